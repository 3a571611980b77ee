"""8-bit and 4-bit weights, and 8-bit AdamW, for every architecture: types, outputs, saving, training, resuming.

Referees: the float model with the rounded weights copied into it, each scheme's largest possible rounding error,
torch's AdamW, and an uninterrupted run.
"""

import every
import pytest
import tiny_cosmo
import tiny_go
import tiny_lm
import torch
import transformers
from datasets import Dataset
from tolerances import assert_equal_but_for_rounding
from torch import nn
from transformers import BitsAndBytesConfig, TorchAoConfig

from hrm_hf.golang.data.streams import GoCoderCollator
from hrm_hf.golang.trainer import GoCoderTrainer, GoTrainingArguments
from hrm_hf.puzzles.dataloader import PuzzleRows
from hrm_hf.puzzles.sudoku import generated_sudoku
from hrm_hf.puzzles.trainer import PuzzleTrainer, PuzzleTrainingArguments
from hrm_hf.trainer import HrmTrainer
from hrm_hf.trainer.optim import CompositeOptimizer


bitsandbytes = pytest.importorskip("bitsandbytes")
torchao = pytest.importorskip("torchao.quantization")

SCHEMES = {
    "bnb-int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "bnb-nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "torchao-int8": lambda: TorchAoConfig(torchao.Int8WeightOnlyConfig()),
}
QUANTIZED_TYPES = {"bnb-int8": "Int8Params", "bnb-nf4": "Params4bit", "torchao-int8": "Int8Tensor"}
WITH_LINEAR_MAPS = [name for name in every.ARCHITECTURES if every.ROWS[name].quantizable]
# Linear layers that are not quantized: output heads, and layers that make decisions or parametrize densities.
KEPT = {
    "hrm_puzzle": {"lm_head", "q_head"},
    "trm_puzzle": {"lm_head", "q_head"},
    "se_rrm_puzzle": {"lm_head"},
    "hrm_lm": {"lm_head", "model.q_head"},
    "rlm_mhc": {"lm_head"},
    "hrm_go_coder": {
        "lm_head", "model.refinement_head.hidden", "model.refinement_head.classes", "model.feedback_encoder.flags",
        "model.feedback_encoder.projection",
    },
    "hrm_cosmo": {"posterior_head.hidden", "posterior_head.out", "halt_head"},
    "hrm_mass_mapping": {
        "posterior_head.hidden", "posterior_head.out", "halt_head", "model.readout.gains", "model.readout.errors",
    },
}  # fmt: skip
# Largest errors. int8 rounds float16 weights to multiples of the row's maximum / 127. The widest gap between two nf4
# values is 0.304 times the maximum of a block of 64.
ROUNDING = {"bnb-int8": 0.55 / 127, "bnb-nf4": 0.153, "torchao-int8": 0.55 / 127}
# Compared with a float model with the rounded weights; bitsandbytes' int8 also rounds activations to 8 bits.
OUTPUT_ERROR = {"bnb-int8": 0.05, "bnb-nf4": 1e-4, "torchao-int8": 1e-4}

every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
every_model = pytest.mark.parametrize("architecture", WITH_LINEAR_MAPS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoint folders by architecture."""
    root = tmp_path_factory.mktemp("models")
    return {name: every.save(name, root / name) for name in every.ARCHITECTURES}


def load(architecture: str, folder, scheme: str | None = None):
    auto = getattr(transformers, every.AUTO_CLASSES[architecture])
    options = {} if scheme is None else {"quantization_config": SCHEMES[scheme]()}
    return auto.from_pretrained(folder, **options).eval()


@torch.no_grad()
def logits(model, architecture: str) -> torch.Tensor:
    return model(**every.inputs(architecture)).logits.float()


def relative_error(mine: torch.Tensor, expected: torch.Tensor) -> float:
    return ((mine - expected).norm() / expected.norm()).item()


def linear_maps(model) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def rounded_weight(module) -> torch.Tensor:
    """Return the weight of a quantized layer as floats."""
    weight = module.weight
    if type(weight).__name__ == "Int8Params":
        scale = weight.SCB if weight.SCB is not None else module.state.SCB
        return weight.data.float() * scale.float().unsqueeze(1) / 127
    if type(weight).__name__ == "Params4bit":
        state, packed = weight.quant_state, weight.data.flatten()  # two values per byte; blocks span rows
        values = state.code[torch.stack((packed >> 4, packed & 15), dim=1).flatten().long()]
        return (values.view(-1, state.blocksize) * state.absmax.unsqueeze(1)).view(tuple(state.shape))
    return weight.dequantize().float()


# ---- weights ----


@every_scheme
@every_model
def test_every_linear_layer_is_quantized_except_heads(saved, architecture, scheme):
    model = load(architecture, saved[architecture], scheme)
    types = {name: type(module.weight).__name__ for name, module in linear_maps(model).items()}
    kept = {name for name, kind in types.items() if kind == "Parameter"}
    assert kept == KEPT[architecture]
    assert {types[name] for name in types.keys() - kept} == {QUANTIZED_TYPES[scheme]}
    assert len(types) > len(kept)
    for name in kept:
        assert model.get_submodule(name).weight.dtype == torch.float32


@every_scheme
@every_model
def test_outputs_match_the_rounded_weights(saved, architecture, scheme):
    model, plain = load(architecture, saved[architecture], scheme), load(architecture, saved[architecture])
    with torch.no_grad():
        for name, module in linear_maps(plain).items():
            if name in KEPT[architecture]:
                continue
            rounded = rounded_weight(model.get_submodule(name))
            error = (rounded - module.weight).abs().amax()
            assert 0 < error <= ROUNDING[scheme] * module.weight.abs().amax()
            module.weight.copy_(rounded)
    mine = logits(model, architecture)
    assert relative_error(mine, logits(plain, architecture)) < OUTPUT_ERROR[scheme]


@every_scheme
@every_model
def test_saved_quantized_model_reloads_unchanged(saved, architecture, scheme, tmp_path):
    model = load(architecture, saved[architecture], scheme)
    before = logits(model, architecture)  # first, because a forward may repack 4-bit weights
    model.save_pretrained(tmp_path)
    size, full = ((folder / "model.safetensors").stat().st_size for folder in (tmp_path, saved[architecture]))
    again = load(architecture, tmp_path)
    assert_equal_but_for_rounding(logits(again, architecture), before)
    assert size < full


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", [name for name, row in every.ROWS.items() if not row.quantizable])
def test_convolutions_are_rejected(saved, architecture, scheme):
    with pytest.raises(ValueError, match=r"convolutions.*dtype=torch\.bfloat16"):
        load(architecture, saved[architecture], scheme)


@every_scheme
@pytest.mark.parametrize("architecture", every.CAUSAL_LMS)
def test_generates_the_same_with_and_without_a_cache(saved, architecture, scheme):
    model = load(architecture, saved[architecture], scheme)
    model.config.plan_budget = 4  # the Go coder writes a plan before the code
    ids = every.inputs(architecture)["input_ids"]
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    cached, plain = (model.generate(ids, use_cache=use_cache, **options) for use_cache in (True, False))
    assert cached.shape[1] == ids.shape[1] + 4
    assert torch.equal(cached, plain)


@every_scheme
@pytest.mark.parametrize("architecture", every.PUZZLES)
def test_boards_are_solved_and_rows_halt_apart(saved, architecture, scheme):
    model = load(architecture, saved[architecture], scheme)
    solution = model.solve(**every.inputs(architecture, rows=16), max_steps=4)
    assert solution.predictions.shape == (16, 16)
    assert solution.steps.unique().numel() > 1


@every_scheme
@pytest.mark.parametrize("architecture", ["hrm_cosmo", "hrm_mass_mapping"])
def test_maps_halt_and_posteriors_are_drawn(saved, architecture, scheme):
    model = load(architecture, saved[architecture], scheme)
    with torch.no_grad():
        outputs = model(**every.inputs(architecture), **every.targets(architecture), halt="adaptive")
    assert outputs.scale_tril.dtype == torch.float32
    assert torch.isfinite(outputs.loss)
    assert torch.isfinite(model.sample_posterior(outputs, 8)).all()


@every_scheme
@pytest.mark.parametrize("architecture", every.PUZZLES)
def test_blocks_follow_the_activations_dtype(architecture, scheme, tmp_path):
    plain = every.model(architecture, forward_dtype="bfloat16")
    plain.save_pretrained(tmp_path)
    model = load(architecture, tmp_path, scheme)
    with torch.no_grad():
        out = model(**every.inputs(architecture)).logits
    assert out.dtype == torch.bfloat16
    bound = 0.5 if scheme == "bnb-nf4" else 0.05  # rounding random weights to 4 bits has large errors
    assert relative_error(out.float(), logits(plain, architecture)) < bound


def test_custom_skip_list_leaves_more_layers_unquantized(saved):
    skipped = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head", "q_head", "o_proj"])
    auto = transformers.AutoModelForMaskedLM
    model = auto.from_pretrained(saved["hrm_puzzle"], quantization_config=skipped).eval()
    kinds = {name.rpartition(".")[2]: type(m.weight).__name__ for name, m in linear_maps(model).items()}
    assert kinds["o_proj"] == kinds["q_head"] == "Parameter"
    assert kinds["qkv_proj"] == kinds["down_proj"] == "Int8Params"
    assert relative_error(logits(model, "hrm_puzzle"), logits(every.model("hrm_puzzle"), "hrm_puzzle")) < 0.05


def test_4_bit_layers_pass_gradients_after_an_evaluation(saved):
    model = load("hrm_go_coder", saved["hrm_go_coder"], "bnb-nf4")
    embeddings = model.get_input_embeddings()(every.inputs("hrm_go_coder")["input_ids"]).detach()

    def gradient():
        given = embeddings.clone().requires_grad_()
        model.train()(inputs_embeds=given, use_cache=False).logits.square().mean().backward()
        return given.grad

    before = gradient()
    with torch.no_grad():
        model.eval()(inputs_embeds=embeddings)
    torch.testing.assert_close(gradient(), before)


# ---- 8-bit AdamW ----

WIDER = {"hidden_size": 64, "intermediate_size": 96}  # 8 bits are used only for tensors of at least 4096 weights
OVERRIDES = {
    **dict.fromkeys(every.CAUSAL_LMS, WIDER),
    "cosmo_cnn": {"embedding_size": 8, "hidden_sizes": [16, 32]},
    "cosmo_unet": {"hidden_sizes": [16, 32]},
}


def trainer(folder, architecture: str, **arguments) -> HrmTrainer:
    """Return a trainer of four steps on the CPU that saves a checkpoint after every second step."""
    options = {"learning_rate": 1e-3, "warmup_steps": 0, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    options |= arguments
    model = every.model(architecture, **OVERRIDES.get(architecture, {}))
    if architecture in every.MASS_MAPPERS:
        return tiny_cosmo.map_trainer(folder, model, **options)
    if architecture in every.REGRESSORS:
        return tiny_cosmo.trainer(folder, model, **options)
    if architecture in ("hrm_lm", "rlm_mhc"):
        # All tokens get all segments, because small differences in the weights could change when a token halts.
        return tiny_lm.trainer(folder, model, halt_warmup_ratio=1.0, **options)
    options |= {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1,
        "per_device_train_batch_size": 4,
    }  # fmt: skip
    if architecture == "hrm_go_coder":
        rows = [tiny_go.builder().build(record) for record in tiny_go.records(12)]
        rows = [{name: value for name, value in row.items() if not name.startswith("code_")} for row in rows]
        data, collator = Dataset.from_list(rows), GoCoderCollator(3)
        return GoCoderTrainer(model, GoTrainingArguments(**options), train_dataset=data, data_collator=collator)
    splits, _ = generated_sudoku(4, num_train=24, num_test=4)
    args = PuzzleTrainingArguments(adam_atan2=False, **options)
    return PuzzleTrainer(model, args, train_dataset=PuzzleRows(splits["train"]))


def losses(one: HrmTrainer) -> list[float]:
    return [entry["loss"] for entry in one.state.log_history if "loss" in entry]


def adamw_states(one: HrmTrainer) -> dict[str, torch.Tensor]:
    """Return AdamW's first moments by parameter name."""
    optimizer = getattr(one.optimizer, "optimizer", one.optimizer)  # remove accelerate's wrapper
    optimizer = optimizer.optimizers[-1] if isinstance(optimizer, CompositeOptimizer) else optimizer
    assert type(optimizer).__module__.startswith("bitsandbytes")
    names = {p: name for name, p in one.model.named_parameters()}
    return {names[p]: state["state1"] for p, state in optimizer.state.items()}


@pytest.fixture
def no_overrides():
    """Reset the list of 32-bit states, which bitsandbytes keeps per process, by position in the parameter groups."""
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_8_bit_adamw_trains_as_adamw_does_and_resumes_exactly(architecture, tmp_path, no_overrides):
    plain, one, resumed = (
        trainer(tmp_path / name, architecture, optim=optim)
        for name, optim in (("plain", "adamw_torch"), ("one", "adamw_8bit"), ("resumed", "adamw_8bit"))
    )
    plain.train()
    one.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
    assert losses(one) == pytest.approx(losses(plain), rel=2e-3)  # four steps; moments have a relative error of 1 %
    assert losses(one)[2:] == losses(resumed)[2:]
    for name, value in one.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    embeddings = {id(m.weight) for m in one.model.modules() if isinstance(m, nn.Embedding)}
    parameters = dict(one.model.named_parameters())
    states = adamw_states(one)
    narrow = {name for name, state in states.items() if state.dtype == torch.uint8}
    assert narrow == {n for n in states if parameters[n].numel() >= 4096 and id(parameters[n]) not in embeddings}
    assert narrow
