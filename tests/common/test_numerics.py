"""Each registered architecture gives equal outputs however it is batched, cached, saved or offloaded.

Referee: the same model run plainly, unbatched and in memory. Compiled models are in test_compiled.py, checkpoints with
their code in test_own_code.py, and tests of a single architecture in tests/models.
"""

import every
import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from peft import PeftModel
from tolerances import assert_copied, assert_equal_but_for_rounding, differ_beyond_rounding
from transformers import AutoConfig, CompileConfig, DynamicCache, StaticCache

from hrm_hf.registry import ABILITIES, CLASSIFIERS
from hrm_hf.trainer.adapters import TuningArguments, with_adapters


LOADED = [
    (name, auto_class)
    for name in every.ARCHITECTURES
    for auto_class in every.ROWS[name].heads
    if auto_class not in CLASSIFIERS  # see test_classifiers.py
]


def tensors(output) -> dict[str, torch.Tensor]:
    """Return the tensors of an output by field."""
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert equality up to float32 rounding, also for losses that are summed in float64."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        pair = (one.float() if one.is_floating_point() else one for one in (found[name], value))
        assert_equal_but_for_rounding(*pair, msg=name)


def of_tokens(output) -> dict[str, torch.Tensor]:
    """Return the logits of each token, and its halt step if the model has them."""
    return {name: value for name, value in tensors(output).items() if name in ("logits", "halt_steps")}


@torch.no_grad()
def outputs(architecture: str, model, **options) -> dict[str, torch.Tensor]:
    """Return the outputs of a model in eval mode for its kind of inputs and labels."""
    arguments = every.inputs(architecture) | every.targets(architecture)
    return tensors(model.eval()(**arguments, **options))


def test_every_registered_architecture_is_tested():
    kinds = {row.model_type: row.pipeline for row in every.ROWS.values() if row.model_type not in every.ARCHITECTURES}
    assert kinds == {}, f"tests/helpers/every.py has no inputs for these pipelines: {kinds}"


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_head_has_only_the_methods_of_its_abilities(architecture):
    row = every.ROWS[architecture]
    for ability, methods in ABILITIES.items():
        assert [hasattr(row.head, method) for method in methods] == [ability in row.abilities] * len(methods), ability


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_labels_give_a_loss_with_a_gradient(architecture):
    model = every.model(architecture).train()
    model(**every.inputs(architecture), **every.targets(architecture)).loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("architecture", every.CAUSAL_LMS)
def test_evaluation_without_labels_has_no_loss(architecture):
    """A loss of 0 would be that of a perfect model. A Llama's mean over no tokens is NaN, too."""
    model, inputs = every.model(architecture), every.inputs(architecture)
    labels = torch.full_like(inputs["input_ids"], -100)
    assert model(**inputs, labels=labels).loss.isnan()
    labels[:, 1] = 5
    assert model(**inputs, labels=labels).loss > 0


# ---- a row alone = in a batch ----


@every.with_variants((*every.PUZZLES, *every.OF_MAPS))
def test_single_row_equals_its_row_in_a_batch(architecture, fields):
    model, batch = every.model(architecture, **fields), every.inputs(architecture, rows=5)
    with torch.no_grad():
        together = {name: value for name, value in tensors(model(**batch)).items() if len(value) == 5}
        assert "logits" in together and differ_beyond_rounding(together["logits"][0], together["logits"][1])
        for row in range(5):
            alone = tensors(model(**{name: value[row : row + 1] for name, value in batch.items()}))
            assert_same({name: alone[name][0] for name in together}, {k: v[row] for k, v in together.items()})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@every.with_variants(every.CAUSAL_LMS)
def test_single_text_equals_its_row_in_a_padded_batch(architecture, fields, side, attention):
    model, batch = every.wake(every.model(architecture, **fields)), every.padded(architecture, side)
    model.set_attn_implementation(attention)
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        runs = [of_tokens(model(**batch, use_cache=False, **more)) for more in ({}, {"position_ids": positions})]
        assert all(together["logits"].isfinite().all() for together in runs)
        for row, real in enumerate(batch["attention_mask"].bool()):
            alone = of_tokens(model(batch["input_ids"][row : row + 1, real], use_cache=False))
            for together in runs:
                assert_same({k: v[row, real] for k, v in together.items()}, {k: v[0] for k, v in alone.items()})


# ---- with a cache = without ----


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@every.with_variants(every.CAUSAL_LMS)
def test_cached_pieces_equal_one_forward(architecture, fields, kind, attention):
    """A left-padded batch is fed as single tokens, pieces, and single tokens again."""
    model, batch = every.wake(every.model(architecture, **fields)), every.padded(architecture)
    model.set_attn_implementation(attention)
    ids, mask = batch.values()
    real, length = mask.bool(), ids.shape[1]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = kind(config=model.config, **({"max_cache_len": length + 3} if kind is StaticCache else {}))
    third, late = length // 3, 3 * length // 4
    ends = [1, 2, third, *range(third + 1, length // 2), late, *range(late + 1, length + 1)]
    with torch.no_grad():
        whole = [model(**batch, use_cache=False, **more) for more in ({}, {"position_ids": positions})]
        steps = [
            model(
                ids[:, start:end], attention_mask=mask[:, :end], position_ids=positions[:, start:end],
                past_key_values=cache, use_cache=True,
            )
            for start, end in zip([0, *ends], ends)
        ]  # fmt: skip
    cached = {name: torch.cat([step[name] for step in steps], dim=1)[real] for name in of_tokens(whole[0])}
    for expected in whole:
        assert_same(cached, {name: value[real] for name, value in of_tokens(expected).items()})


@every.with_variants(every.CAUSAL_LMS)
def test_generation_is_equal_with_dynamic_static_and_no_cache(architecture, fields):
    model = every.wake(every.model(architecture, **fields))
    batch = {name: value[:2] for name, value in every.padded(architecture).items()}
    arguments = {**batch, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**arguments, use_cache=False)
    assert expected.shape[1] > batch["input_ids"].shape[1]
    assert torch.equal(model.generate(**arguments), expected)
    static = model.generate(**arguments, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, expected)


@pytest.mark.parametrize("architecture", every.CAUSAL_LMS)
def test_beams_are_equal_with_static_and_dynamic_cache(architecture):
    model = every.wake(every.model(architecture))
    batch = {name: value[:2] for name, value in every.padded(architecture).items()}
    arguments = {**batch, "max_new_tokens": 8, "do_sample": False, "num_beams": 3}
    static = model.generate(**arguments, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, model.generate(**arguments))


@pytest.mark.parametrize("architecture", [name for name in every.CAUSAL_LMS if name != "hrm_go_coder"])
def test_an_assistant_changes_no_token(architecture):
    """The model checks many tokens at once, and crops rejected ones from the cache. The Go coder has its own test."""
    model, assistant = (every.wake(every.model(architecture, seed)) for seed in (0, 1))
    batch = {name: value[-1:] for name, value in every.padded(architecture).items()}
    real = batch["attention_mask"][0].bool()
    arguments = {"input_ids": batch["input_ids"][:, real], "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(**arguments, assistant_model=assistant), model.generate(**arguments))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", every.CAUSAL_LMS)
def test_compiled_static_cache_step_equals_dynamic_cache(architecture, backend):
    """Backend "eager" runs the captured graph with torch's own kernels."""
    torch._dynamo.reset()
    model = every.wake(every.model(architecture))
    batch = {name: value[:2] for name, value in every.padded(architecture).items()}
    arguments = {**batch, "max_new_tokens": 8, "do_sample": False}
    compile_config = CompileConfig(fullgraph=True, dynamic=False, backend=backend, mode="default")
    compile_config._compile_all_devices = True  # otherwise transformers compiles only on GPUs
    calls = torch._dynamo.utils.counters["stats"]
    before = calls["unique_graphs"]
    static = model.generate(**arguments, cache_implementation="static", compile_config=compile_config)
    assert torch.equal(static, model.generate(**arguments))
    assert calls["unique_graphs"] == before + 1


# ---- saved = loaded ----


@pytest.mark.parametrize("shards", ["one file", "shards"])
@every.with_variants(every.ARCHITECTURES)
def test_loaded_model_equals_the_saved_one(architecture, fields, shards, tmp_path):
    model = every.model(architecture, **fields)
    model.train()(**every.inputs(architecture), **every.targets(architecture))  # updates running means, if any
    model.eval().save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if shards == "shards" else {}))
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "shards")
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert_copied(loaded.state_dict(), model.state_dict())
    assert_same(outputs(architecture, loaded), outputs(architecture, model))


@pytest.mark.parametrize(("architecture", "auto_class"), LOADED, ids=lambda value: getattr(value, "__name__", value))
def test_an_auto_class_loads_its_head_as_it_was_saved(architecture, auto_class, tmp_path):
    model = every.model(architecture)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is every.ROWS[architecture].config and config.to_diff_dict() == model.config.to_diff_dict()
    loaded = auto_class.from_pretrained(tmp_path).eval()
    assert type(loaded) is every.ROWS[architecture].heads[auto_class]
    saved = model if type(loaded) is type(model) else model.base_model
    assert_copied(loaded.state_dict(), saved.state_dict())
    inputs = every.inputs(architecture)
    with torch.no_grad():
        assert_same(tensors(loaded(**inputs)), tensors(saved(**inputs)))


# ---- weights elsewhere = in memory ----


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_offloaded_weights_give_equal_outputs(architecture, place, tmp_path):
    """Accelerate loads the weights of a module when it is called, and unloads them afterwards."""
    expected = outputs(architecture, every.model(architecture))
    model = every.model(architecture)
    if place == "memory":
        cpu_offload(model, torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path), torch.device("cpu"))
    assert all(p.is_meta for p in model.parameters())
    assert_same(outputs(architecture, model), expected)
    assert all(p.is_meta for p in model.parameters())


# ---- an adapter merged = beside the weights ----


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_adapter_gives_equal_outputs_saved_loaded_and_merged(architecture, method, tmp_path):
    every.save(architecture, tmp_path / "base")
    load = getattr(transformers, every.AUTO_CLASSES[architecture]).from_pretrained
    adapted = with_adapters(load(tmp_path / "base"), TuningArguments(lora_rank=4, use_dora=method == "dora"))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
            elif "modules_to_save" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    expected = outputs(architecture, adapted)
    assert differ_beyond_rounding(outputs(architecture, load(tmp_path / "base"))["loss"], expected["loss"])
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter")
    assert_same(outputs(architecture, again), expected)
    merged = again.merge_and_unload()
    assert_same(outputs(architecture, merged), expected)
    merged.save_pretrained(tmp_path / "merged")
    loaded = load(tmp_path / "merged")
    assert_copied(loaded.state_dict(), merged.state_dict())
    assert_same(outputs(architecture, loaded), outputs(architecture, merged))
