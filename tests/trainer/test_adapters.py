"""LoRA, DoRA and QLoRA on every architecture, trained by our trainers: trained weights, saving, merging.

Referees: the chain rule on the gradient of the whole weight (for weights that a step uses several times), an
uninterrupted run (for a resumed one), PEFT's own loading and merging, and transformers' loading of an adapter.
"""

import sys
from types import SimpleNamespace

import every
import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from tolerances import assert_copied, assert_equal_but_for_rounding, differ_beyond_rounding
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator

from hrm_hf.cosmology.trainer import (
    CosmoTrainingArguments,
    MassMapTrainer,
    MassMapTrainingArguments,
    RegressionTrainer,
)
from hrm_hf.golang.trainer import GoCoderTrainer, GoTrainingArguments
from hrm_hf.hub.manifests import RAW_WEIGHTS_FILE, find_corruption, read_manifest
from hrm_hf.puzzles.dataloader import PuzzleRows
from hrm_hf.puzzles.sudoku import generated_sudoku
from hrm_hf.puzzles.trainer import PuzzleTrainer, PuzzleTrainingArguments
from hrm_hf.registry import architecture_of
from hrm_hf.text.arguments import LmTrainingArguments
from hrm_hf.text.trainer import CausalLMTrainer
from hrm_hf.trainer import HrmTrainer
from hrm_hf.trainer.adapters import (
    TuningArguments,
    adaptable_modules,
    merge,
    quantization_config,
    resolve_base_model,
    save_trained,
    with_adapters,
)
from hrm_hf.trainer.recipes import ModelArguments


METHODS = ("lora", "dora")
LEARNING_RATES = {
    "hrm_lm": 3e-3, "se_rrm_puzzle": 5e-3, "hrm_go_coder": 5e-3, "hrm_cosmo": 5e-3, "cosmo_cnn": 3e-3,
    "cosmo_unet": 3e-3,
}  # fmt: skip
ROWS = 4
QUANTIZED = tuple(name for name in every.ARCHITECTURES if every.ROWS[name].quantizable)
TIMES = ("per_second", "epoch")


def tuning(method: str, **options) -> TuningArguments:
    return TuningArguments(lora_rank=4, use_dora=method == "dora", **options)


def batch(architecture: str) -> dict[str, torch.Tensor]:
    """Return training data: a few rows, the same at every step."""
    if architecture in every.PUZZLES:
        return puzzle_rows().batch(np.arange(ROWS))
    inputs = every.inputs(architecture, ROWS) | every.targets(architecture, ROWS)
    if architecture in every.OF_MAPS:
        maps, amplitudes = inputs["pixel_values"], torch.linspace(0.2, 3, ROWS).view(-1, 1, 1, 1)
        if architecture in every.MASS_MAPPERS:
            maps[:, :-1] *= amplitudes  # but not the masks
        else:
            inputs["pixel_values"] = 0.5 + 2 * maps * amplitudes
        inputs["labels"] = torch.stack((torch.linspace(0.15, 0.45, ROWS), torch.linspace(0.95, 0.65, ROWS)), dim=1)
    return inputs


def puzzle_rows() -> PuzzleRows:
    rows = PuzzleRows(generated_sudoku(4, num_train=ROWS, num_test=1)[0]["train"])
    rows.puzzle_identifiers = np.arange(len(rows)) % 5
    return rows


def make_trainer(architecture: str, model, folder, **options) -> HrmTrainer:
    settings = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 6,
        "logging_steps": 1, "per_device_train_batch_size": ROWS, "per_device_eval_batch_size": ROWS,
        "learning_rate": LEARNING_RATES.get(architecture, 2e-2), "warmup_steps": 1, "lr_min_ratio": 1.0,
        "save_strategy": "no", **options,
    }  # fmt: skip
    if architecture in every.PUZZLES:
        return PuzzleTrainer(model, PuzzleTrainingArguments(**settings), train_dataset=puzzle_rows())
    kinds = {
        "hrm_go_coder": (GoCoderTrainer, GoTrainingArguments),
        "hrm_cosmo": (RegressionTrainer, CosmoTrainingArguments),
        "cosmo_cnn": (RegressionTrainer, CosmoTrainingArguments),
        **dict.fromkeys(every.MASS_MAPPERS, (MassMapTrainer, MassMapTrainingArguments)),
    }
    if architecture == "hrm_go_coder":
        settings["train_sampling_strategy"] = "random"
    trainer_class, arguments_class = kinds.get(architecture, (CausalLMTrainer, LmTrainingArguments))
    args = arguments_class(**settings)
    data = batch(architecture)
    rows = [{name: value[row] for name, value in data.items()} for row in range(ROWS)]
    return trainer_class(model, args, train_dataset=rows, eval_dataset=rows, data_collator=default_data_collator)


@torch.no_grad()
def loss_on(model, data: dict[str, torch.Tensor]) -> float:
    model.eval()
    return model(**data).loss.item()


@torch.no_grad()
def logits(architecture: str, model) -> torch.Tensor:
    """Also return the raw head outputs of regressors, whose means are limited by a prior."""
    outputs = model.eval()(**every.inputs(architecture))
    if architecture in every.OF_MAPS:
        return torch.cat((outputs.logits.flatten(), outputs.loc.flatten(), outputs.scale_tril.flatten()))
    return outputs.logits


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def load_base(architecture: str, folder, **options):
    return getattr(transformers, every.AUTO_CLASSES[architecture]).from_pretrained(folder, **options).eval()


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {name: every.save(name, folder / name) for name in every.ARCHITECTURES}


@pytest.fixture(scope="module")
def tuned(request, bases, tmp_path_factory):
    """Return the trainer of a finished run, its folder, and the state before."""
    architecture, method = request.param
    torch.manual_seed(0)
    model = with_adapters(load_base(architecture, bases[architecture]), tuning(method))
    before, data = weights(model), batch(architecture)
    start = loss_on(model, data)
    out = tmp_path_factory.mktemp(f"{architecture}_{method}")
    trainer = make_trainer(architecture, model, out)
    trainer.train()
    assert not save_trained(trainer, tuning(method))
    return SimpleNamespace(
        architecture=architecture, method=method, base=bases[architecture], trainer=trainer, model=model, out=out,
        before=before, start=start, end=loss_on(model, data),
    )  # fmt: skip


each = pytest.mark.parametrize(
    "tuned",
    [(architecture, method) for architecture in every.ARCHITECTURES for method in METHODS],
    indirect=True,
    ids=lambda pair: "-".join(pair),
    scope="module",
)


# ---- training ----


@each
def test_training_an_adapter_lowers_the_loss(tuned):
    assert tuned.end < tuned.start - 0.05


@each
def test_base_weights_stay_bit_identical(tuned):
    base = weights(load_base(tuned.architecture, tuned.base))
    found = {}
    for name, value in tuned.model.state_dict().items():
        name = name.removeprefix("base_model.model.")
        if "lora_" not in name and ".modules_to_save." not in name:
            found[name.replace(".base_layer.", ".").replace(".original_module.", ".")] = value
    assert_copied(found, base)


@each
def test_every_adapter_parameter_is_trained(tuned):
    """Except those without a gradient on these data: the refinement parts of the Go coder."""
    after = tuned.model.state_dict()
    idle = ("refinement_head", "feedback_encoder")
    still = [
        name
        for name, p in tuned.model.named_parameters()
        if p.requires_grad and torch.equal(p, tuned.before[name]) and not any(part in name for part in idle)
    ]
    assert still == []
    adapted = [name for name, module in tuned.model.named_modules() if isinstance(module, LoraLayer)]
    assert len(adapted) == len(adaptable_modules(load_base(tuned.architecture, tuned.base)))
    if tuned.architecture in every.PUZZLES:
        name = next(name for name in after if "puzzle_emb.modules_to_save" in name)
        assert (after[name] - tuned.before[name])[:ROWS].abs().amax(dim=1).min() > 0


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_an_adapter_gets_the_gradient_of_all_uses_of_its_weight(architecture, bases):
    """B starts at zero, so the chain rule gives dL/dB = scale * (dL/dW) A^T with dL/dW from the original model."""
    base, data = load_base(architecture, bases[architecture]).train(), batch(architecture)
    torch.manual_seed(3)
    base(**data).loss.backward()
    whole = {name: module.weight.grad for name, module in base.named_modules() if name in adaptable_modules(base)}
    model = with_adapters(load_base(architecture, bases[architecture]), tuning("lora")).train()
    torch.manual_seed(3)
    model(**data).loss.backward()
    flows = 0
    for name, module in model.get_base_model().named_modules():
        if not isinstance(module, LoraLayer):
            continue
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        expected = module.scaling["default"] * whole[name].flatten(1) @ a.detach().flatten(1).T
        torch.testing.assert_close(b.grad.flatten(1), expected, rtol=1e-4, atol=1e-6, msg=name)
        flows += bool(b.grad.abs().max() > 0)
    assert flows == len(whole)


# ---- saved, loaded, merged ----


@each
def test_a_saved_adapter_gives_the_same_outputs_again(tuned):
    expected = logits(tuned.architecture, tuned.model)
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {file.name for file in tuned.out.iterdir()}
    assert not (tuned.out / "model.safetensors").exists()
    again = PeftModel.from_pretrained(load_base(tuned.architecture, tuned.base), tuned.out)
    assert_equal_but_for_rounding(logits(tuned.architecture, again), expected)
    assert differ_beyond_rounding(logits(tuned.architecture, load_base(tuned.architecture, tuned.base)), expected)


@each
def test_the_folder_of_an_adapter_loads_as_a_model(tuned):
    """With transformers alone, which finds the base in the adapter's config and (5.23) loses DoRA's magnitudes."""
    if tuned.method == "dora":
        with pytest.raises(ValueError, match=r"DoRA.* PeftModel.from_pretrained\(base, "):
            load_base(tuned.architecture, tuned.out)
        return
    loaded = load_base(tuned.architecture, tuned.out)
    assert_equal_but_for_rounding(logits(tuned.architecture, loaded), logits(tuned.architecture, tuned.model))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", every.OF_MAPS)
def test_adapters_on_convolutions_see_maps_without_edges(architecture, method):
    """PEFT's convolutions pad with zeros, regardless of the padding_mode of the adapted convolution."""
    model = with_adapters(every.model(architecture, padding_mode="circular"), tuning(method))
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.2)
    expected = logits(architecture, model)
    torch.testing.assert_close(logits(architecture, model.merge_and_unload()), expected, rtol=0, atol=1e-5)


# ---- the trainer ----


@pytest.mark.parametrize("architecture", ["hrm_puzzle", "hrm_lm", "cosmo_cnn"])  # one of each kind of training
def test_a_run_with_adapters_resumes_with_the_same_losses(architecture, bases, tmp_path):
    options = {"max_steps": 4, "ema_rate": 0.9, "save_strategy": "steps", "save_steps": 2}

    def run(folder, resume=None):
        torch.manual_seed(0)
        model = with_adapters(load_base(architecture, bases[architecture]), tuning("dora", lora_dropout=0.1))
        trainer = make_trainer(architecture, model, folder, **options)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        return trainer

    whole = run(tmp_path / "whole")
    kept = tmp_path / "whole" / "checkpoint-2"
    assert find_corruption(kept) == [] and not (kept / "model.safetensors").exists()
    assert "adapter_model.safetensors" in read_manifest(kept).files
    (tmp_path / "whole" / "checkpoint-4").rename(tmp_path / "away")
    resumed = run(tmp_path / "whole", resume="last")
    history = [
        [{n: v for n, v in e.items() if not n.endswith(TIMES)} for e in one.state.log_history if "loss" in e]
        for one in (whole, resumed)
    ]
    assert history[0] == history[1] and len(history[0]) == 4
    assert_copied(weights(resumed.model), weights(whole.model))
    # The average is saved as the adapter, and the raw adapter in the same folder.
    saved = load_file(tmp_path / "whole" / "adapter_model.safetensors")
    name = next(name for name in saved if "lora_B" in name)
    raw = load_file(tmp_path / "whole" / RAW_WEIGHTS_FILE)[name.replace(".weight", ".default.weight")]
    assert torch.equal(raw, resumed.model.state_dict()[name.replace(".weight", ".default.weight")])
    assert not torch.equal(saved[name], raw)


def test_the_best_adapter_is_loaded_at_the_end(bases, tmp_path):
    """Here the highest loss is the best, so that the best step is not the last."""
    torch.manual_seed(0)
    model = with_adapters(load_base("rlm_mhc", bases["rlm_mhc"]), tuning("lora"))
    trainer = make_trainer(
        "rlm_mhc", model, tmp_path, max_steps=3, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_lm_loss", greater_is_better=True,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("-1")
    best = load_file(f"{trainer.state.best_model_checkpoint}/adapter_model.safetensors")
    name = next(name for name in best if "lora_B" in name)
    assert torch.equal(best[name], trainer.model.state_dict()[name.replace(".weight", ".default.weight")])


@pytest.mark.parametrize("architecture", ["hrm_puzzle", "hrm_lm", "hrm_go_coder"])
def test_dora_magnitudes_have_no_weight_decay(architecture, bases, tmp_path):
    """With weight decay, AdamW and AdamATan2 would shrink the magnitudes even where their gradients are zero."""
    model = with_adapters(load_base(architecture, bases[architecture]), tuning("dora"))
    optimizer = make_trainer(architecture, model, tmp_path).create_optimizer()
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    of = {name: decays[p] for name, p in model.named_parameters() if p.requires_grad}
    assert {value for name, value in of.items() if "lora_magnitude_vector" in name} == {0.0}
    assert all(value > 0 for name, value in of.items() if "lora_A" in name or "lora_B" in name)


def test_groups_of_parameters_keep_their_learning_rates(bases, tmp_path):
    model = with_adapters(load_base("hrm_go_coder", bases["hrm_go_coder"]), tuning("lora"))
    trainer = make_trainer("hrm_go_coder", model, tmp_path, learning_rate=1e-3, lr_multipliers="planner=2,generator=3")
    rates = {p: group["lr"] for group in trainer.create_optimizer().param_groups for p in group["params"]}
    for part, rate in {".planner.": 2e-3, ".generator.": 3e-3, ".refinement_head.": 1e-3}.items():
        assert {rates[p] for name, p in model.named_parameters() if part in name and p.requires_grad} == {rate}


def test_warm_ups_reach_the_model_below_an_adapter(bases, tmp_path):
    model = with_adapters(load_base("hrm_lm", bases["hrm_lm"]), tuning("lora"))
    depths = []
    note = lambda module, args, kwargs: depths.append(kwargs["schedule"].bp_steps)  # noqa: E731
    model.get_base_model().register_forward_pre_hook(note, with_kwargs=True)
    make_trainer("hrm_lm", model, tmp_path, max_steps=6, bp_warmup_ratio=1.0).train()
    assert depths[0] == 2 and depths == sorted(depths) and len(depths) > 1


def test_merging_uses_the_averaged_adapter(bases, tmp_path):
    torch.manual_seed(0)
    model = with_adapters(load_base("hrm_lm", bases["hrm_lm"]), tuning("lora"))
    trainer = make_trainer("hrm_lm", model, tmp_path, max_steps=4, ema_rate=0.9, learning_rate=2e-2)
    trainer.train()
    with trainer.averaged_weights():
        expected = logits("hrm_lm", trainer.model)
    raw = logits("hrm_lm", trainer.model)
    assert save_trained(trainer, tuning("lora", merge_adapter=True))
    merged = load_base("hrm_lm", tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    torch.testing.assert_close(logits("hrm_lm", merged), expected, rtol=0, atol=1e-5)
    assert (raw - expected).abs().max() > 1e-3


def test_a_merged_regressor_reads_its_own_config(bases, tmp_path):
    """The trained copy of the head must not keep a copy of the config."""
    model = with_adapters(load_base("hrm_cosmo", bases["hrm_cosmo"]), tuning("lora"))
    trainer = make_trainer("hrm_cosmo", model, tmp_path)
    merge(trainer)
    before = trainer.model(**every.inputs("hrm_cosmo")).std
    trainer.model.config.posterior_scale *= 2
    torch.testing.assert_close(trainer.model(**every.inputs("hrm_cosmo")).std.gt(before).all(), torch.tensor(True))


# ---- transformers' own interface ----


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_transformers_adds_and_loads_adapters_itself(architecture, bases, tmp_path):
    from hrm_hf.trainer.adapters import lora_config

    model = load_base(architecture, bases[architecture])
    model.add_adapter(lora_config(model, tuning("lora")))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_config.json").exists() and not (tmp_path / "model.safetensors").exists()
    again = load_base(architecture, bases[architecture])
    plain = logits(architecture, again)
    again.load_adapter(str(tmp_path))
    assert_equal_but_for_rounding(logits(architecture, again), logits(architecture, model))
    again.disable_adapters()
    assert torch.equal(logits(architecture, again), plain)  # same weights at the same addresses


# ---- quantized weights ----


@pytest.mark.parametrize(
    ("architecture", "load_in"), [*((name, "4bit") for name in QUANTIZED), ("rlm_mhc", "8bit"), ("hrm_puzzle", "8bit")]
)
def test_adapter_learns_on_quantized_weights(architecture, load_in, bases, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    arguments = tuning("lora", load_in=load_in)
    torch.manual_seed(0)
    base = load_base(
        architecture, bases[architecture], quantization_config=quantization_config(arguments, bases[architecture])
    )
    kind = bitsandbytes.nn.Linear4bit if load_in == "4bit" else bitsandbytes.nn.Linear8bitLt
    quantized = {name for name, module in base.named_modules() if isinstance(module, kind)}
    linear = {name for name in adaptable_modules(base) if not isinstance(base.get_submodule(name), nn.Conv2d)}
    assert quantized == linear  # all layers of the base model, but not the heads
    model = with_adapters(base, arguments)
    below = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith("base_layer.weight")}
    data = batch(architecture)
    start = loss_on(model, data)
    trainer = make_trainer(architecture, model, tmp_path)
    trainer.train()
    assert loss_on(model, data) < start
    assert all(torch.equal(p, below[name]) for name, p in model.named_parameters() if name in below)
    trainer.save_model()
    again = PeftModel.from_pretrained(load_base(architecture, bases[architecture]), tmp_path)  # not quantized
    assert loss_on(again, data) < start


@pytest.mark.parametrize("architecture", [name for name in every.ARCHITECTURES if name not in QUANTIZED])
def test_quantizing_a_convolutional_model_is_rejected(architecture, bases):
    with pytest.raises(ValueError, match=f"load_in='4bit': {architecture} "):
        quantization_config(tuning("lora", load_in="4bit"), bases[architecture])


def test_missing_bitsandbytes_names_its_extra(bases, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match=r'load_in=4bit .*pip install "\.\[bitsandbytes\]"'):
        quantization_config(tuning("lora", load_in="4bit"), bases["hrm_lm"])


# ---- options ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_rank": 4, "load_in": "2bit"}, "load_in='2bit'.*none, 8bit, 4bit"),
        ({"use_dora": True}, "use_dora: .*--lora_rank"),
        ({"load_in": "4bit", "merge_adapter": True}, "load_in, merge_adapter: .*--lora_rank"),
        ({"adapter": "x", "lora_rank": 4}, "adapter='x'.*lora_rank"),
        ({"lora_rank": 4, "load_in": "4bit", "merge_adapter": True}, "merge_adapter.*load_in='4bit'"),
    ],
)
def test_conflicting_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        TuningArguments(**options)


@pytest.mark.parametrize("architecture", ["hrm_lm", "rlm_mhc", "hrm_go_coder", "llama"])
def test_tied_embeddings_are_trained_completely_or_not_at_all(architecture, bases, tmp_path):
    """PEFT merges an adapter of a tied weight into both uses of the weight, for a Llama too."""

    def load():
        if architecture != "llama":
            return load_base(architecture, bases[architecture])
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=True))

    for target in ("lm_head", "embed_tokens", "model.embed_tokens"):
        name = target.split(".")[-1]
        with pytest.raises(ValueError, match=rf"lora_targets='q_proj,{target}'.*--lora_modules_to_save {name}"):
            with_adapters(load(), TuningArguments(lora_rank=2, lora_targets=f"q_proj,{target}"))
    get_peft_model(load(), LoraConfig(target_modules=["lm_head"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"merge_adapter=True.*lm_head"):
        with_adapters(load(), TuningArguments(adapter=str(tmp_path), merge_adapter=True))
    with_adapters(load(), TuningArguments(adapter=str(tmp_path)))  # without merging, the adapter works
    with pytest.raises(ValueError, match=rf"lora_modules_to_save: {type(load()).__name__}.*'head'"):
        with_adapters(load(), TuningArguments(lora_rank=2, lora_modules_to_save="head"))
    model = with_adapters(load(), TuningArguments(lora_rank=2, lora_targets="q_proj", lora_modules_to_save="lm_head"))
    head = model.get_base_model().lm_head.modules_to_save["default"].weight
    head.data += torch.randn_like(head)
    ids = torch.arange(5, 17).view(1, -1)
    logits = model.eval()(input_ids=ids).logits.detach()
    assert_equal_but_for_rounding(model.merge_and_unload()(input_ids=ids).logits, logits)


def test_hyper_connections_stay_frozen_unless_named(bases):
    plain = with_adapters(load_base("rlm_mhc", bases["rlm_mhc"]), tuning("lora"))
    assert not any("_hc" in name for name, p in plain.named_parameters() if p.requires_grad)
    named = with_adapters(
        load_base("rlm_mhc", bases["rlm_mhc"]), tuning("lora", lora_modules_to_save="attn_hc,ffn_hc")
    )
    trained = [name for name, p in named.named_parameters() if p.requires_grad and "_hc" in name]
    assert len(trained) == 2 * 2 * 3  # blocks, connections per block, parameters per connection


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_modules_to_save_exist(architecture, bases):
    names = {
        part for name, _ in load_base(architecture, bases[architecture]).named_modules() for part in name.split(".")
    }
    assert set(architecture_of(architecture).modules_to_save) <= names


def test_adapter_needs_base_weights_and_is_rejected_as_base(bases, tmp_path):
    with pytest.raises(ValueError, match=r"adapter.*--model_name_or_path"):
        resolve_base_model(ModelArguments(model_type="hrm_lm"), tuning("lora"))
    with_adapters(load_base("hrm_lm", bases["hrm_lm"]), tuning("lora")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model_name_or_path=.*hrm_lm.*--adapter "):
        resolve_base_model(ModelArguments(model_name_or_path=str(tmp_path)), TuningArguments())
    arguments = ModelArguments()
    resolve_base_model(arguments, TuningArguments(adapter=str(tmp_path)))
    assert arguments.model_name_or_path == str(bases["hrm_lm"])
