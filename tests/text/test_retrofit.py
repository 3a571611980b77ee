"""`hrm-hf retrofit` saves a looped model with the decoder's tokenizer and generation config."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaConfig, GenerationConfig, LlamaConfig
from typer.testing import CliRunner

from hrm_hf import HrmLmForCausalLM
from hrm_hf.cli import app
from hrm_hf.text.byte_tokenizer import byte_tokenizer


SIZES = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama that reads bytes."""
    torch.manual_seed(0)
    path, model = tmp_path_factory.mktemp("llama"), AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    model.generation_config = GenerationConfig(do_sample=True, top_k=7)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def call(*words, status=0):
    result = CliRunner().invoke(app, ["retrofit", *map(str, words)])
    assert result.exit_code == status, (result.output, result.exception)
    return result


def test_the_command_saves_a_looped_model_with_its_tokenizer(folder, tmp_path):
    out = tmp_path / "looped"
    layers = ("--prelude", 2, "--loop", 2, "--coda", 2, "--passes", 3)
    found = json.loads(call(folder, "--out", out, *layers, "--json").stdout)
    assert found["one_pass_difference"] == 0.0
    assert found["new"] == [
        f"model.{name}" for name in ("loop_input.gated", "loop_input.damping", "q_head.weight", "q_head.bias")
    ]
    source, model = (AutoModelForCausalLM.from_pretrained(each) for each in (folder, out))
    assert found["new_parameters"] == model.num_parameters() - source.num_parameters() == 32 + 2 + 66
    assert type(model) is HrmLmForCausalLM and model.config.halt_max_steps == 3
    assert model.generation_config.top_k == 7
    prompt = AutoTokenizer.from_pretrained(out)("To be", return_tensors="pt")
    assert torch.equal(model(**prompt, num_segments=1).logits, source(**prompt).logits)


def test_the_default_layers_and_passes_are_printed(folder, tmp_path):
    text = call(folder, "--out", tmp_path / "looped", "--input-injection", "none", "--loop-step", "replace").stdout
    assert "layers: 2 before the loop, 2 in it, 2 after it" in text and "passes: 4" in text
    assert "one_pass_difference: 0.0" in text and "new_parameters: 66" in text


def test_the_dtype_of_the_weights_is_kept(folder, tmp_path):
    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    source.save_pretrained(tmp_path / "llama")
    text = call(tmp_path / "llama", "--out", tmp_path / "looped").stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "looped")
    assert model.dtype == torch.bfloat16 and torch.equal(model.lm_head.weight, source.lm_head.weight)
    assert "one_pass_difference: 0.0" in text and "tokenizer: False" in text


def test_existing_files_and_wrong_layers_are_rejected(folder, tmp_path):
    (tmp_path / "file").write_text("kept")
    assert "is not empty" in str(call(folder, "--out", tmp_path, status=1).exception)
    assert "must add up to the model's 6" in call(folder, "--out", tmp_path / "a", "--loop", 9, status=2).stderr
    assert "does not exist" in call("./nosuch", "--out", tmp_path / "a", status=2).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    call(folder, "--out", tmp_path, "--force")
    assert (tmp_path / "file").read_text() == "kept" and (tmp_path / "retrofit_hrm_lm.py").exists()


def test_other_decoders_are_rejected_before_their_weights_load(tmp_path):
    GemmaConfig(**SIZES).save_pretrained(tmp_path)
    assert "model_type='gemma'" in str(call(tmp_path, "--out", tmp_path / "a", status=1).exception)


def test_pickled_weights_are_rejected(tmp_path):
    LlamaConfig(**SIZES).save_pretrained(tmp_path / "llama")
    torch.save({}, tmp_path / "llama" / "pytorch_model.bin")
    assert "model.safetensors" in str(call(tmp_path / "llama", "--out", tmp_path / "a", status=1).exception)
    assert not (tmp_path / "a").exists()
