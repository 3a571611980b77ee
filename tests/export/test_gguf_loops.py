"""GGUF files of looped language models. The referee is llama.cpp in the package xllamacpp."""

from importlib.util import find_spec

import pytest
import torch
from gguf import GGUFReader

from hrm_hf import HrmLmConfig, HrmLmForCausalLM
from hrm_hf.export.gguf import export_gguf, layout_of
from hrm_hf.text.byte_tokenizer import byte_tokenizer


needs_xllamacpp = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
LOOP = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "max_position_embeddings": 128, "num_h_layers": 0, "num_l_layers": 2, "H_cycles": 1, "L_cycles": 1,
    "bp_steps": 1, "halt_max_steps": 3, "exit_criterion": "fixed", "rope_parameters": {"rope_theta": 500.0},
    "initializer_range": 0.12, "embedding_scale": 3.0,
}  # fmt: skip
NO_INPUT = LOOP | {"input_injection": "none", "initial_state": "zero", "attention_gate": False}
INPUT = LOOP | {"coda_layers": 2, "coda_input": "state+input"}
TWO_STACKS = LOOP | {
    "num_h_layers": 2,
    "H_cycles": 2,
    "L_cycles": 2,
    "halt_max_steps": 2,
    "bp_steps": 2,
    "input_injection": "none",
}
UNROLLED = NO_INPUT | {"exit_norms": "last", "prelude_layers": 1, "coda_layers": 2, "norm_affine": True}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LAYOUTS = {
    "nanbeige": NO_INPUT | {"embedding_scale": 1.0},
    "nanbeige, gains and biases": NO_INPUT | {"norm_affine": True, "attention_bias": "qkv", "L_cycles": 2},
    "nanbeige, norm after the last pass": NO_INPUT | {"exit_norms": "last", "rope_parameters": LLAMA3},
    "hrm_text, loop": INPUT | {"initial_state": "zero"},
    "hrm_text, loop, untied": INPUT | {"initial_state": "learned", "tie_word_embeddings": False, "L_cycles": 2},
    "hrm_text, two stacks": TWO_STACKS,
    "llama": UNROLLED,
    "llama, gains": UNROLLED | {"pass_gains": True, "attention_bias": True, "norm_affine": False},
    "llama, no coda": UNROLLED | {"coda_layers": 0, "rope_parameters": LLAMA3, "tie_word_embeddings": False},
}


def save(folder, **fields) -> HrmLmForCausalLM:
    """Save a random model whose logits are far from flat and whose vectors are neither 0 nor 1."""
    torch.manual_seed(0)
    model = HrmLmForCausalLM(HrmLmConfig(**fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("pass_gains"):
                parameter.add_(torch.randn_like(parameter) / 10)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


@needs_xllamacpp
@pytest.mark.external
@pytest.mark.parametrize("name", LAYOUTS)
def test_llama_cpp_computes_the_same_distributions_and_greedy_tokens(tmp_path, name):
    save(tmp_path / "model", **LAYOUTS[name])
    result = export_gguf(tmp_path / "model", tmp_path / "out.gguf", dtype="f32", check=True)
    print(name, result)
    assert result["architecture"] == name.partition(",")[0]
    assert result["max_logit"] > 2 and result["compared_tokens"] > 60
    assert result["max_logprob_difference"] < 1e-5
    assert result["argmax_agreement"] == 1.0


@pytest.mark.parametrize(
    "fields, layout, keys, stored",
    [
        (NO_INPUT, "nanbeige", {"block_count": 2, "num_loops": 5, "skip_loop_final_norm": False}, 2),
        (
            TWO_STACKS,
            "hrm_text",
            {"block_count": 60, "hrm.layers_per_stack": 2, "hrm.h_cycles": 10, "hrm.l_cycles": 2},
            4,
        ),
        (UNROLLED, "llama", {"block_count": 13}, 13),
    ],
)
def test_file_names_the_passes_and_stores_a_loop_once_except_as_a_llama(tmp_path, fields, layout, keys, stored):
    model = save(tmp_path / "model", **fields)
    result = export_gguf(tmp_path / "model", tmp_path / "out.gguf", dtype="f32", passes=5)
    reader = GGUFReader(tmp_path / "out.gguf")
    found = {name: field.contents() for name, field in reader.fields.items()}
    assert found["general.architecture"] == layout and result["passes"] == 5
    assert keys.items() <= {name.removeprefix(f"{layout}."): value for name, value in found.items()}.items()
    blocks = {tensor.name.split(".")[1] for tensor in reader.tensors if tensor.name.startswith("blk.")}
    assert blocks == {str(block) for block in range(stored)}
    if stored < 13:
        once = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name)
        norms = 0 if layout == "hrm_text" else 2 * 64 * stored
        assert sum(int(t.n_elements) for t in reader.tensors if t.name.startswith("blk.")) == once + norms


@pytest.mark.parametrize(
    "fields, options, named",
    [
        (
            {},
            {},
            [r"nanbeige needs num_h_layers=0, not 2, input_injection='none', not 'add'", "llama needs num_h_layers"],
        ),
        (NO_INPUT | {"step_vectors": True}, {}, ["step_vectors=False, not True"] * 3),
        (NO_INPUT | {"pass_lora_rank": 2}, {}, ["pass_lora_rank=0, not 2"] * 3),
        (NO_INPUT, {"architecture": "hrm_text"}, ["coda_layers=2, not 0", "coda_input='state\\+input', not 'state'"]),
        (
            UNROLLED | {"exit_norms": "every"},
            {"architecture": "llama"},
            ["llama needs exit_norms='last', not 'every'"],
        ),
        (NO_INPUT | {"exit_criterion": "q"}, {}, ["exit_criterion='fixed', not 'q'", "--passes N"]),
        (NO_INPUT, {"passes": 300}, ["passes=300: .* 600 layers .* 512"]),
        (NO_INPUT, {"architecture": "gpt2"}, ["layout='gpt2': a hrm_lm .* nanbeige or hrm_text or llama"]),
    ],
)
def test_every_field_in_the_way_is_named_with_the_value_needed(fields, options, named):
    with pytest.raises(ValueError, match="(?s)" + ".*".join(named)):
        layout_of(HrmLmConfig(**{**LOOP, "num_h_layers": 2, "bp_steps": 2, **fields}), "lm", **options)


def test_layout_and_passes_choose_among_layouts_that_fit():
    config = HrmLmConfig(**UNROLLED | {"input_injection": "gated", "loop_step": "damped"})
    assert layout_of(config, "lm", passes=1).layers == 5
    config = HrmLmConfig(**NO_INPUT | {"exit_norms": "last", "exit_criterion": "q"})
    layouts = [layout_of(config, "lm", name, 4) for name in (None, "llama")]
    assert [(one.architecture, one.layers, one.segments) for one in layouts] == [("nanbeige", 2, 4), ("llama", 8, 4)]


@pytest.mark.parametrize("name", [name for name in HrmLmConfig.presets() if "served" in name])
def test_preset_fits_the_layout_in_its_name(name):
    assert name.endswith(layout_of(HrmLmConfig.from_preset(name), name).architecture.replace("_", "-"))
