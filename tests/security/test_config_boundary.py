"""Boundary of configs: whatever a config.json or `--config_overrides` holds, nothing is built from absurd numbers.

The cases are made from the fields themselves, so a new field without bounds fails here.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import get_args

import clean_process
import every
import pytest
import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from hrm_hf.models.bounds import MAX_LAYER_VISITS, MAX_PARAMETERS
from hrm_hf.registry import ARCHITECTURES
from hrm_hf.trainer.recipes import ModelArguments, build_config


REFUSED = (StrictDataclassError, ValueError)
CLASSES = sorted(ARCHITECTURES, key=lambda config_class: config_class.__name__)
HOSTILE = {
    "1e13": 10**13,
    "-1e13": -(10**13),
    "5000-digits": 10**5000,
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": -float("inf"),
    "true": True,
    "text": "4",
    "list": [10**13],
    "nested": [[[[1]]]],
}
# What was reported, and its like: (model_type, fields, what the message has to say)
TOGETHER = {
    "layers-1e12": ("hrm_puzzle", {"H_layers": 10**12}, "H_layers=1000000000000; expected a whole number from 1 to"),
    "cycles-1e12": ("trm_puzzle", {"L_cycles": 10**12}, "L_cycles=1000000000000; expected"),
    "steps-1e12": ("hrm_lm", {"halt_max_steps": 10**12}, "halt_max_steps=1000000000000; expected"),
    "no-heads": ("hrm_lm", {"num_attention_heads": 0}, "num_attention_heads=0; expected a whole number from 1"),
    "no-heads-by-another-name": ("hrm_puzzle", {"num_heads": 0}, "num_attention_heads=0; expected"),
    "no-key-heads": ("hrm_lm", {"num_key_value_heads": 0}, "num_key_value_heads=0; expected"),
    "no-spread": ("hrm_lm", {"initializer_range": 0.0}, "initializer_range=0.0; expected"),
    "streams-1e12": ("rlm_mhc", {"hc_mult": 10**12}, "mhc_flows=1000000000000; expected"),
    "loops-1e12": ("rlm_mhc", {"num_loops": 10**12}, "num_loops=1000000000000; expected"),
    "theta-nan": ("rlm_mhc", {"rope_theta": float("nan")}, r"rope_parameters\['rope_theta'\]=nan; expected"),
    "theta-nan-inside": ("hrm_puzzle", {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}},
                         r"rope_parameters\['rope_theta'\]=nan"),
    "theta-true": ("hrm_lm", {"rope_parameters": {"rope_type": "default", "rope_theta": True}}, "rope_theta"),
    "rope-factor-0": ("hrm_lm", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}},
                      r"rope_parameters\['factor'\]=0"),
    "labels-1e12": ("hrm_go_coder", {"num_labels": 10**12}, "num_labels=1000000000000; expected"),
    "stages-1000": ("cosmo_cnn", {"hidden_sizes": [8] * 1000}, "hidden_sizes has 1000 entries; expected 1 to 16"),
    "parameters-puzzle": ("hrm_puzzle", {"hidden_size": 2**20, "num_attention_heads": 2**10, "H_layers": 10_000},
                          "parameters, more than 1,000,000,000,000"),
    "parameters-table": ("hrm_puzzle", {"num_puzzle_identifiers": 2**31}, "parameters, more than"),
    "parameters-lm": ("hrm_lm", {"vocab_size": 2**27, "hidden_size": 2**20}, "parameters, more than"),
    "parameters-go": ("hrm_go_coder", {"intermediate_size": 2**20, "hidden_size": 2**19}, "parameters, more than"),
    "parameters-mhc": ("rlm_mhc", {"hidden_size": 2**20, "num_attention_heads": 2**10}, "parameters, more than"),
    "parameters-cosmo": ("hrm_cosmo", {"hidden_size": 2**20, "L_layers": 10_000}, "parameters, more than"),
    "parameters-cnn": ("cosmo_cnn", {"hidden_sizes": [2**20] * 3, "depths": [9] * 3}, "parameters, more than"),
    "visits-puzzle": ("trm_puzzle", {"H_cycles": 10_000, "L_cycles": 10_000}, "visits of layers in a forward"),
    "visits-lm": ("hrm_lm", {"H_cycles": 10_000, "halt_max_steps": 10_000}, "visits of layers in a forward"),
    "visits-mhc": ("rlm_mhc", {"num_loops": 10_000, "num_hidden_layers": 10_000, "hidden_size": 64}, "visits"),
    "visits-cosmo": ("hrm_cosmo", {"H_cycles": 10_000, "L_cycles": 10_000}, "visits of layers in a forward"),
}  # fmt: skip


def kinds(annotation) -> set:
    """All types that an annotation names, inside lists and unions too."""
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
def test_every_numeric_field_refuses_absurd_values_by_its_name(config_class, field):
    assert "validator" in field.metadata, f"{field.name} of {config_class.__name__} has no bound: use `bounded`"
    for value in HOSTILE.values():
        with pytest.raises(REFUSED, match=field.name):
            config_class(**{field.name: value})


@pytest.mark.parametrize("name", TOGETHER)
def test_absurd_configs_are_refused_before_anything_is_built(name):
    model_type, values, message = TOGETHER[name]
    with pytest.raises(REFUSED, match=message):
        class_of(model_type)(**values)


@pytest.mark.parametrize("name", TOGETHER)
def test_a_checkpoint_with_an_absurd_config_is_refused_before_anything_is_built(name, tmp_path):
    model_type, values, message = TOGETHER[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **values}))
    with pytest.raises(REFUSED, match=message):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("override", ["H_layers=1000000000000", "rms_norm_eps=.nan", "num_heads=0", "H_cycles=true"])
def test_overrides_of_a_run_are_refused_by_the_name_of_the_field(override):
    name = override.partition("=")[0].replace("num_heads", "num_attention_heads")
    with pytest.raises(ValueError, match=f"config_overrides.*{name}"):
        build_config(ModelArguments(model_type="hrm_puzzle", config_overrides=override), seq_len=16)


def test_a_value_set_later_is_refused_too():
    config = class_of("hrm_puzzle")()
    with pytest.raises(REFUSED, match="halt_max_steps=0"):
        config.halt_max_steps = 0


# Runs where `import hrm_hf` fails; argv: folder of checkpoints.
SCRIPT = """
import json, sys
from pathlib import Path
from transformers import AutoConfig
for folder in sorted(Path(sys.argv[1]).iterdir()):
    file = folder / "config.json"
    whole = json.loads(file.read_text())
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert type(config).__module__.startswith("transformers_modules")
    bounded = ("halt_max_steps", "num_loops", "planner_cycles", "embedding_size", "num_error_rings")
    name = next(n for n in bounded if n in whole)
    file.write_text(json.dumps({**whole, name: 10**12}))
    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=True)
    except Exception as error:
        print("refused", folder.name, f"{name}=1000000000000; expected a whole number" in str(error))
"""


def test_code_that_travels_with_a_checkpoint_has_the_same_bounds(tmp_path):
    names = sorted(config_class.model_type for config_class in CLASSES)
    for name in names:
        every.model(name).save_pretrained(tmp_path / "checkpoints" / name)
    done = clean_process.run(SCRIPT, tmp_path / "checkpoints", cwd=tmp_path, home=tmp_path / "home")
    said = [line for line in done.stdout.splitlines() if line.startswith("refused")]
    assert said == [f"refused {name} True" for name in names], done.stderr[-2000:]


@pytest.mark.parametrize("config_class", CLASSES, ids=lambda config_class: config_class.model_type)
def test_every_preset_is_far_from_the_bounds(config_class):
    for config in [config_class(), *map(config_class.from_preset, config_class.presets())]:
        assert config.parameter_estimate() * 100 < MAX_PARAMETERS
        assert config.layer_visits() * 100 < MAX_LAYER_VISITS


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


@pytest.mark.parametrize("name", every.ARCHITECTURES)
def test_the_estimate_is_near_the_parameters_of_a_model(name):
    model = every.model(name)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert 0.3 < model.config.parameter_estimate() / counted < 3
