"""A saved checkpoint carries its code: a process without this package loads, solves and saves it again."""

import os
import subprocess
import sys

import pytest
import tiny
import torch


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

    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf_home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("HF_MODULES_CACHE", None)
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(checkpoints)],
        cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    said = [line for line in finished.stdout.splitlines() if line.endswith("loaded twice")]
    assert said == [f"{name} loaded twice" for name in sorted(tiny.ARCHITECTURES)]


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_checkpoint_names_every_head_and_holds_their_code(architecture, tmp_path):
    model = tiny.model(architecture)
    model.save_pretrained(tmp_path)
    auto_map = model.config.auto_map
    assert auto_map.keys() == {"AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoModelForPuzzleSolving"}
    for name in auto_map.values():
        module, class_name = name.split(".")
        assert f"class {class_name}(" in (tmp_path / f"{module}.py").read_text()
