"""Tokenizer, config and weights fit each other, or the error says how to fix it."""

from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, HrmTextConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from hrm_hf.models.modeling_utils import only_errors_logged
from hrm_hf.text.arguments import LmDataArguments, LmTrainingArguments
from hrm_hf.text.causal_lm import causal_lm_config, continue_text, load_causal_lm, load_tokenizer
from hrm_hf.trainer.recipes import ModelArguments, parse_recipe


BYTES = load_tokenizer("byte")
TINY_LLAMA = "hidden_size=32,intermediate_size=64,num_hidden_layers=1,num_attention_heads=2"
FOLDER = Path(__file__).parents[2] / "training" / "recipes"
RECIPES = sorted(path for path in FOLDER.glob("*.yaml") if "tokenizer_name" in yaml.safe_load(path.read_text()))
# Vocabulary sizes of the recipes' tokenizers with a padding token, as published.
PUBLISHED = {"byte": 264, "openai-community/gpt2": 50258, "meta-llama/Llama-2-7b-hf": 32001}
PARAMETERS = {"hrm_lm_50m": 50_136_066, "hrm_lm_100m": 99_976_706, "gpt2_125m": 124_475_904, "llama_50m": 50_117_120}


def tokenizer_of(size: int, **special) -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({f"t{number}": number for number in range(size)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="t1", **special)


def config(overrides=None, block_size=16, tokenizer=BYTES, **arguments):
    return causal_lm_config(ModelArguments(config_overrides=overrides, **arguments), tokenizer, block_size)


def test_vocabulary_and_special_tokens_come_from_the_tokenizer():
    found = config(TINY_LLAMA, model_type="llama")
    assert (found.vocab_size, found.pad_token_id, found.bos_token_id, found.eos_token_id) == (264, 0, 1, 2)


def test_overrides_win_under_either_name_of_a_field():
    found = config("hidden_size=32,n_head=2,n_layer=1,vocab_size=320", model_type="gpt2")
    assert (found.n_embd, found.n_head, found.vocab_size) == (32, 2, 320)
    with pytest.raises(ValueError, match=r"n_embd .*32 .*hidden_size\) .*64"):
        config("n_embd=32,hidden_size=64", model_type="gpt2")
    with pytest.raises(ValueError, match=r"llama.*'hiden_size'.*'hidden_size'"):
        config("hiden_size=32", model_type="llama")


def test_vocabulary_smaller_than_the_tokenizers_is_rejected():
    with pytest.raises(ValueError, match=r"vocab_size=256.*264"):
        config("vocab_size=256", model_type="llama")


def test_config_has_a_position_for_every_token_of_a_row():
    assert config("n_embd=32,n_head=2,n_layer=1", 5000, model_type="gpt2").n_positions == 5000
    assert config("n_embd=32,n_head=2,n_layer=1", 500, model_type="gpt2").n_positions == 1024
    with pytest.raises(ValueError, match=r"n_positions=64.*block_size=128"):
        config("n_positions=64", 128, model_type="gpt2")


def test_hrm_text_gets_the_requested_layers():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16}
    overrides = ",".join(f"{name}={value}" for name, value in {**sizes, "num_hidden_layers": 2}.items())
    found = config(overrides, 4096, model_type="hrm_text")  # requires building the config again, with more positions
    direct = HrmTextConfig(**sizes, num_hidden_layers=2)
    assert found.num_layers_per_stack == direct.num_layers_per_stack == 2
    assert found.num_hidden_layers == direct.num_hidden_layers == 16 and found.max_position_embeddings == 4096


def test_preset_of_an_architecture_without_presets_is_rejected():
    with pytest.raises(ValueError, match=r"llama.*presets.*--config_overrides"):
        config(model_type="llama", preset="small")


def test_a_tokenizer_for_a_fresh_model_never_pads_with_eos(tmp_path):
    for name, special in {"none": {}, "eos": {"pad_token": "t1"}, "own": {"pad_token": "t2"}}.items():
        tokenizer_of(8, **special).save_pretrained(tmp_path / name)
    assert load_tokenizer(str(tmp_path / "none")).pad_token_id == 8
    assert load_tokenizer(str(tmp_path / "eos")).pad_token_id == 8
    assert load_tokenizer(str(tmp_path / "own")).pad_token_id == 2
    assert load_tokenizer(None, str(tmp_path / "none")).pad_token_id is None  # the weights have no row for a new token
    with pytest.raises(ValueError, match="--tokenizer_name byte"):
        load_tokenizer(None)


def test_saved_weights_load_with_overrides_or_are_rejected(tmp_path):
    model = load_causal_lm(ModelArguments(model_type="llama", config_overrides=TINY_LLAMA), BYTES, 16)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    saved = ModelArguments(model_name_or_path=str(tmp_path), config_overrides="attention_dropout=0.25")
    loaded = load_causal_lm(saved, BYTES, 16)
    assert loaded.dtype == torch.float32 and loaded.config.attention_dropout == 0.25
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.float())
    other = load_causal_lm(saved, tokenizer_of(200, pad_token="t9"), 16)
    assert (other.config.eos_token_id, other.config.pad_token_id) == (1, 9)
    with pytest.raises(ValueError, match=r"block_size=4096.*2048.*max_position_embeddings"):
        load_causal_lm(saved, BYTES, 4096)
    with pytest.raises(ValueError, match=r"vocab_size=264.*300"):
        load_causal_lm(saved, tokenizer_of(300), 16)


def test_seed_determines_the_fresh_weights():
    arguments = ModelArguments(model_type="llama", config_overrides=TINY_LLAMA)
    one, same, other = (load_causal_lm(arguments, BYTES, 16, seed).lm_head.weight for seed in (3, 3, 4))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_a_text_is_continued_within_the_models_positions():
    overrides = "n_embd=32,n_head=2,n_layer=1,n_positions=16"
    model = load_causal_lm(ModelArguments(model_type="gpt2", config_overrides=overrides), BYTES, 16)
    text = continue_text(model.train(), BYTES, "abc", new_tokens=1000)
    assert text.startswith("abc") and len(BYTES(text)["input_ids"]) <= 3 * 16 and model.training
    assert continue_text(model, BYTES, "abc", 1000) == text


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_language_model_recipe_parses_and_builds_its_model(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    classes = (ModelArguments, LmDataArguments, LmTrainingArguments)
    model_args, data_args, args = parse_recipe(
        classes, ["--recipe", str(path), "--use_cpu", "true", "--bf16", "false"]
    )
    assert args.output_dir.startswith("runs/")
    tokenizer = BYTES if data_args.tokenizer_name == "byte" else tokenizer_of(PUBLISHED[data_args.tokenizer_name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(causal_lm_config(model_args, tokenizer, data_args.block_size))
    assert model.num_parameters() == PARAMETERS.get(path.stem, model.num_parameters())
    if path.stem == "hrm_text_50m":
        assert abs(model.num_parameters() / PARAMETERS["hrm_lm_50m"] - 1) < 0.001


def test_log_level_is_restored_after_an_error():
    before = logging.get_verbosity()
    with pytest.raises(OSError, match="unreadable"), only_errors_logged():
        assert logging.get_verbosity() == logging.ERROR != before
        raise OSError("unreadable")
    assert logging.get_verbosity() == before
