"""A checkpoint carries its code: a process that cannot import this package computes the same, and saves it again.

Referee: the package with the same weights. Loading from a Hub is in tests/hub/test_hub_round_trip.py.
"""

import json
import os

import clean_process
import every
import hub_worker
import pytest
import tiny
import torch
from tolerances import assert_equal_but_for_rounding

from hrm_hf.models.presets_hrm_lm import LOOP
from hrm_hf.models.retrofit_hrm_lm import DECODER


# Runs where `import hrm_hf` fails; argv: a folder of checkpoints, each with expected.pt.
SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import torch, transformers
from hub_worker import base_output, outputs

for folder in sorted(Path(sys.argv[1]).iterdir()):
    expected = torch.load(folder / "expected.pt", weights_only=True)
    source, found = folder, {}
    for target in (folder / "again", folder / "and again"):
        base = transformers.AutoModel.from_pretrained(source, trust_remote_code=True)
        model = getattr(transformers, expected["auto_class"]).from_pretrained(source, trust_remote_code=True)
        classes = [type(one).__module__ for one in (model.config, base, model)]
        assert all(name.startswith("transformers_modules") for name in classes), classes
        with torch.no_grad():
            loss = model(**expected["inputs"], **expected["targets"]).loss
        found[target.name] = {
            "loss": loss, "base": base_output(base, expected["inputs"]), **outputs(model, expected["inputs"])
        }
        model.save_pretrained(target)
        source = target
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    bounded = ("halt_max_steps", "num_loops", "planner_cycles", "embedding_size", "num_error_rings")
    name = next(each for each in bounded if each in fields)
    file.write_text(json.dumps({**fields, name: -1}))
    try:
        transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    except Exception as error:
        found[f"{name}=-1"] = str(error)
    torch.save(found, folder / "found.pt")
"""


LOOPED = {
    **LOOP,
    **DECODER,
    "input_injection": "gated",
    "loop_step": "damped",
    "attention_bias": "qkv",
}  # fields that from_llama sets
OTHERS = {"trm_puzzle-mlp": ("trm_puzzle", tiny.MLP), "hrm_lm-looped": ("hrm_lm", LOOPED)}


@pytest.fixture(scope="module")
def without_the_package(tmp_path_factory):
    """By variant: outputs of the package, and of a process without it, for the checkpoint and for a copy."""
    home = tmp_path_factory.mktemp("home")
    variants = {name: (name, {}) for name in every.ARCHITECTURES} | OTHERS
    folders = {variant: home / "checkpoints" / variant for variant in variants}
    for variant, (name, fields) in variants.items():
        model, inputs, targets = every.model(name, **fields), every.inputs(name), every.targets(name)
        model.save_pretrained(folders[variant])
        with torch.no_grad():
            loss = model(**inputs, **targets).loss
        base = hub_worker.base_output(model.base_model, inputs)
        expected = {"loss": loss, "base": base, **hub_worker.outputs(model, inputs)}
        known = {"auto_class": every.AUTO_CLASSES[name], "inputs": inputs, "targets": targets, "outputs": expected}
        torch.save(known, folders[variant] / "expected.pt")
    helpers = os.path.dirname(hub_worker.__file__)
    finished = clean_process.run(SCRIPT, home / "checkpoints", helpers, cwd=home, home=home / "hf_home")
    assert finished.returncode == 0, finished.stderr[-3000:]
    load = {name: torch.load(folders[name] / "found.pt", weights_only=True) for name in variants}
    return {name: (torch.load(folders[name] / "expected.pt")["outputs"], load[name]) for name in variants}


@pytest.mark.parametrize("variant", [*every.ARCHITECTURES, *OTHERS])
def test_a_process_without_the_package_computes_the_same_and_saves_it_again(variant, without_the_package):
    expected, found = without_the_package[variant]
    for copy in (found["again"], found["and again"]):
        assert copy.keys() == expected.keys() and len(expected) >= 4
        for name, value in expected.items():
            pair = (one.float() if one.is_floating_point() else one for one in (copy[name], value))
            assert_equal_but_for_rounding(*pair, msg=name)


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_checkpoint_code_rejects_an_impossible_config(architecture, without_the_package):
    _, found = without_the_package[architecture]
    ((value, error),) = (each for each in found.items() if each[0] not in ("again", "and again"))
    assert value in error


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_a_checkpoint_names_every_head_and_holds_their_code(architecture, tmp_path):
    every.model(architecture).save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    row = every.ROWS[architecture]
    assert auto_map.keys() == {"AutoConfig", *(auto_class.__name__ for auto_class in row.heads)}
    assert {name.split(".")[1] for name in auto_map.values()} == {
        one.__name__ for one in (row.config, *row.heads.values())
    }
    for name in auto_map.values():
        module, class_name = name.split(".")
        assert f"class {class_name}(" in (tmp_path / f"{module}.py").read_text()
