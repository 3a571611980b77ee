"""Configs reject impossible values from any source, and name the field.

The cases are made from the fields themselves, so a new field without a bound fails here. Code that is loaded from a
checkpoint is tested in tests/common/test_own_code.py.
"""

import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig

from hrm_hf.registry import ARCHITECTURES
from hrm_hf.trainer.recipes import ModelArguments, build_config


REJECTED = (StrictDataclassError, ValueError)
CLASSES = sorted(ARCHITECTURES, key=lambda config_class: config_class.__name__)
IMPOSSIBLE = (float("nan"), float("inf"), -float("inf"), True, "4", [[[[1]]]])
FIELDS = {
    "no-heads": ("hrm_lm", {"num_attention_heads": 0}, "num_attention_heads=0"),
    "no-heads-by-another-name": ("hrm_puzzle", {"num_heads": 0}, "num_attention_heads=0"),
    "no-spread": ("hrm_lm", {"initializer_range": 0.0}, "initializer_range=0.0"),
    "streams-by-another-name": ("rlm_mhc", {"hc_mult": 0}, "mhc_flows=0"),
    "stages-1000": ("cosmo_cnn", {"hidden_sizes": [8] * 1000}, "hidden_sizes .*1000"),
}


def kinds(annotation) -> set:
    """Return all types in an annotation, also inside lists and unions."""
    inner = get_args(annotation)
    return set().union(*map(kinds, inner)) if inner else {annotation}


def numeric_fields():
    return [
        pytest.param(config_class, field, id=f"{config_class.model_type}-{field.name}")
        for config_class in CLASSES
        for field in fields(config_class)
        if {int, float} & kinds(field.type) and not {str} & kinds(field.type)
    ]


def class_of(model_type):
    return next(config_class for config_class in CLASSES if config_class.model_type == model_type)


@pytest.mark.parametrize(("config_class", "field"), numeric_fields())
def test_every_numeric_field_rejects_impossible_values_by_its_name(config_class, field):
    assert "validator" in field.metadata, f"{field.name} of {config_class.__name__} has no bound: use `bounded`"
    for value in IMPOSSIBLE:
        with pytest.raises(REJECTED, match=field.name):
            config_class(**{field.name: value})


@pytest.mark.parametrize("name", FIELDS)
def test_a_checkpoint_with_an_impossible_config_is_rejected(name, tmp_path):
    model_type, values, message = FIELDS[name]
    with pytest.raises(REJECTED, match=message):
        class_of(model_type)(**values)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **values}))
    with pytest.raises(REJECTED, match=message):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("override", ["H_layers=-1", "rms_norm_eps=.nan", "num_heads=0", "H_cycles=true"])
def test_invalid_config_overrides_are_rejected_by_field_name(override):
    name = override.partition("=")[0].replace("num_heads", "num_attention_heads")
    with pytest.raises(ValueError, match=rf"config_overrides=.*\}}: .*\b{name}\b"):  # after the list of overrides
        build_config(ModelArguments(model_type="hrm_puzzle", config_overrides=override), seq_len=16)


def test_invalid_assignment_is_rejected():
    config = class_of("hrm_puzzle")()
    with pytest.raises(REJECTED, match="halt_max_steps=0"):
        config.halt_max_steps = 0


@pytest.mark.parametrize("config_class", CLASSES, ids=lambda config_class: config_class.model_type)
def test_unknown_fields_raise_with_the_nearest_one_wherever_they_come_from(config_class, tmp_path):
    config = config_class()
    config.save_pretrained(tmp_path)
    makers = (
        config_class, partial(AutoConfig.for_model, config_class.model_type), config_class.from_dict,
        partial(config_class.from_preset, config_class.presets()[0]), partial(config_class.from_pretrained, tmp_path),
        partial(AutoConfig.from_pretrained, tmp_path),
    )  # fmt: skip
    right = "hidden_size" if hasattr(config, "hidden_size") else "hidden_sizes"
    for make in makers:
        given = {"hiden_size": 3}
        with pytest.raises(TypeError, match=rf"hiden_size=3: {config_class.__name__}.*{right}\?"):
            make(given) if make == config_class.from_dict else make(**given)
    with pytest.raises(TypeError, match=r"n_embd=3.*hidden_size\?" if right == "hidden_size" else "n_embd=3"):
        config_class(n_embd=3)


@pytest.mark.parametrize("config_class", CLASSES, ids=lambda config_class: config_class.model_type)
def test_fields_passed_or_saved_by_the_library_are_known(config_class, tmp_path, caplog):
    own = config_class().to_dict()
    labels = {} if "target_names" in own else {"num_labels": 3, "problem_type": "regression"}
    passed = {
        "torch_dtype": "bfloat16", "_name_or_path": "x", "_commit_hash": "0", "_attn_implementation": "eager",
        "attn_implementation": "eager", "architectures": ["X"], "auto_map": {"AutoConfig": "x.X"}, "is_decoder": True,
        "output_attentions": False, "quantization_config": {"load_in_8bit": True}, "tokenizer_class": "T",
        "tie_word_embeddings": True, "use_cache": False, "transformers_version": "4.40.0", "torchscript": False,
        **GenerationConfig(max_length=9, do_sample=True, temperature=0.5).to_dict(), **labels,
    }  # fmt: skip
    passed = {name: value for name, value in passed.items() if value is not None}
    config_class(**passed)
    config_class(**own)
    assert not caplog.records

    # A file of another version: unknown fields are kept, and reported once.
    (tmp_path / "config.json").write_text(json.dumps({**own, "halt_max_stepz": 9, "dtype": None}))
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.halt_max_stepz == 9 and loaded.to_dict()["halt_max_stepz"] == 9
    assert "halt_max_stepz=9" in caplog.text


def test_every_recipe_passes():
    built = 0
    for file in sorted((Path(__file__).parents[2] / "training" / "recipes").glob("*.yaml")):
        recipe = yaml.safe_load(file.read_text())
        if recipe.get("model_type") in {config_class.model_type for config_class in CLASSES}:
            overrides = recipe.get("config_overrides")
            overrides = json.dumps(overrides) if isinstance(overrides, dict) else overrides
            arguments = {"model_type": recipe["model_type"], "preset": recipe.get("preset")}
            build_config(ModelArguments(**arguments, config_overrides=overrides))
            built += 1
    assert built > 15
