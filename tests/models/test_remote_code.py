"""A saved checkpoint carries its code: a process without this package loads, solves and saves it again."""

import os
import subprocess
import sys

import pytest
import tiny
import torch

from hrm_hf import CosmoCnnConfig, CosmoCnnForRegression, HrmCosmoConfig, HrmCosmoForRegression


# Runs where `import hrm_hf` fails; argv: folder of checkpoints, each with expected.pt.
SCRIPT = """
import sys
sys.modules["hrm_hf"] = None
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

for folder in sorted(Path(sys.argv[1]).iterdir()):
    expected = torch.load(folder / "expected.pt", weights_only=True)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert type(config).__module__.startswith("transformers_modules"), type(config)
    assert config.to_dict()["seq_len"] == expected["input_ids"].shape[1]
    data = {name: expected[name] for name in ("input_ids", "puzzle_identifiers")}
    saved = folder / "again"
    for source in (folder, saved):
        base = AutoModel.from_pretrained(source, trust_remote_code=True)
        model = AutoModelForMaskedLM.from_pretrained(source, trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules"), type(model)
        with torch.no_grad():
            output = model(**data, labels=expected["labels"])
            torch.testing.assert_close(output.logits, expected["logits"])
            torch.testing.assert_close(output.loss, expected["loss"])
            torch.testing.assert_close(base(**data).z_H, output.carry.z_H)
        solution = model.solve(**data)
        assert torch.equal(solution.predictions, expected["predictions"])
        assert torch.equal(solution.steps, expected["steps"])
        model.save_pretrained(saved)
    print(folder.name, "loaded twice")
"""

# As SCRIPT, for regressors of cosmological parameters.
REGRESSION_SCRIPT = """
import sys
sys.modules["hrm_hf"] = None
from pathlib import Path
import torch
from transformers import AutoModel, AutoModelForImageClassification

for folder in sorted(Path(sys.argv[1]).iterdir()):
    expected = torch.load(folder / "expected.pt", weights_only=True)
    saved = folder / "again"
    for source in (folder, saved):
        base = AutoModel.from_pretrained(source, trust_remote_code=True)
        model = AutoModelForImageClassification.from_pretrained(source, trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules"), type(model)
        with torch.no_grad():
            output = model(expected["pixel_values"], labels=expected["labels"])
            assert base(expected["pixel_values"]).last_hidden_state.isfinite().all()
        for name in ("loss", "logits", "std"):
            torch.testing.assert_close(output[name], expected[name])
        assert model.sample_posterior(output, 5).shape == (3, 5, 3)
        model.save_pretrained(saved)
    print(folder.name, "loaded twice")
"""


def said_without_the_package(script, checkpoints, home):
    """What `script` says of loading in a new process with an empty cache of code."""
    environment = {**os.environ, "HF_HOME": str(home / "hf_home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("HF_MODULES_CACHE", None)
    finished = subprocess.run(
        [sys.executable, "-c", script, str(checkpoints)],
        cwd=home, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    return [line for line in finished.stdout.splitlines() if line.endswith("loaded twice")]


def test_a_process_without_the_package_loads_solves_and_saves(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    for architecture in tiny.ARCHITECTURES:
        model, batch = tiny.model(architecture), tiny.batch()
        model.save_pretrained(checkpoints / architecture)
        with torch.no_grad():
            output = model(**batch)
        solution = model.solve(batch["input_ids"], batch["puzzle_identifiers"])
        results = {"logits": output.logits, "loss": output.loss}
        results |= {"predictions": solution.predictions, "steps": solution.steps}
        torch.save({**batch, **results}, checkpoints / architecture / "expected.pt")

    said = said_without_the_package(SCRIPT, checkpoints, tmp_path)
    assert said == [f"{name} loaded twice" for name in sorted(tiny.ARCHITECTURES)]


def test_a_process_without_the_package_loads_runs_and_saves_regressors(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    classes = {"cosmo_cnn": (CosmoCnnConfig, CosmoCnnForRegression), "hrm": (HrmCosmoConfig, HrmCosmoForRegression)}
    batch = {"pixel_values": torch.randn(3, 1, 16, 16), "labels": torch.tensor([0.3, 0.8]).expand(3, 2).clone()}
    for name, (config_class, model_class) in classes.items():
        model = model_class(config_class.from_preset("test", prior_bounds=[[0.1, 0.5], [0.6, 1.0]])).eval()
        model.save_pretrained(checkpoints / name)
        with torch.no_grad():
            output = model(**batch)
        results = {field: output[field] for field in ("loss", "logits", "std")}
        torch.save(batch | results, checkpoints / name / "expected.pt")
    said = said_without_the_package(REGRESSION_SCRIPT, checkpoints, tmp_path)
    assert said == [f"{name} loaded twice" for name in sorted(classes)]


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_checkpoint_names_every_head_and_holds_their_code(architecture, tmp_path):
    model = tiny.model(architecture)
    model.save_pretrained(tmp_path)
    auto_map = model.config.auto_map
    assert auto_map.keys() == {"AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoModelForPuzzleSolving"}
    for name in auto_map.values():
        module, class_name = name.split(".")
        assert f"class {class_name}(" in (tmp_path / f"{module}.py").read_text()
