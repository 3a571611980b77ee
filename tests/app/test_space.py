"""The folder of a Space is complete, lists its requirements, and runs without the installed package."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from gradio_client import Client
from huggingface_hub import RepoCard
from started import free_port
from transformers import AutoModelForCausalLM, AutoTokenizer

import hrm_hf
from hrm_hf.app.space import write_space


# Hides every distribution that requirements.txt does not install, then runs app.py as the Hub does.
RUNNER = """
import importlib.metadata as metadata, re, runpy, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from packaging.requirements import Requirement

allowed, waiting = set(), [line for line in open("requirements.txt").read().split()]
while waiting:
    requirement = Requirement(waiting.pop())
    name = re.sub("[-_.]+", "-", requirement.name).lower()
    if name in allowed or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        continue
    try:
        waiting += metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        continue
    allowed.add(name)
owners = metadata.packages_distributions()
normal = lambda names: {re.sub("[-_.]+", "-", name).lower() for name in names}

class Listed(PathFinder):
    # Finds modules as usual, but those of other distributions; an editable install has no finder left.

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if path is None and name in owners and not normal(owners[name]) & allowed and name != "hrm_hf":
            return None
        return super().find_spec(name, path, target)

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Listed]
sys.path.insert(0, ".")
import hrm_hf
print("runs", hrm_hf.__file__, flush=True)
runpy.run_path("app.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def space(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spaces") / "demo"
    models = ["org/sudoku", *(str(checkpoints[name]) for name in ("rlm_mhc", "sudoku", "hrm_cosmo"))]
    return write_space(folder, models, title='A "small" demo', embed=True)


def test_space_readme_has_the_metadata_the_hub_needs(space):
    card = RepoCard.load(space / "README.md").data.to_dict()
    assert card["sdk"] == "gradio" and card["app_file"] == "app.py" and card["title"] == 'A "small" demo'
    assert card["models"] == ["org/sudoku"] and card["license"] == "apache-2.0"
    pins = dict(line.split("==") for line in (space / "requirements.txt").read_text().split())
    assert pins["gradio"] == card["sdk_version"]
    assert "+" not in pins["torch"]
    assert not {"hrm_hf", "pytest"} & set(pins)


def test_space_contains_the_complete_package_and_checkpoints(space, checkpoints):
    source = Path(hrm_hf.__file__).parent
    names = {
        path.relative_to(source) for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    copied = {path.relative_to(space / "hrm_hf") for path in (space / "hrm_hf").rglob("*") if path.is_file()}
    assert copied == {name for name in names if name.suffix not in (".pyc", ".pyi")}
    weights = "model.safetensors"
    assert (space / "models/rlm_mhc" / weights).read_bytes() == (checkpoints["rlm_mhc"] / weights).read_bytes()
    assert (space / "models/hrm_cosmo/preprocessor_config.json").exists()


def test_invalid_space_sources_are_rejected_and_nothing_is_written(checkpoints, tmp_path):
    local = str(checkpoints["rlm_mhc"])
    with pytest.raises(ValueError, match=r"rlm_mhc.*embed=True"):
        write_space(tmp_path / "new", [local])
    with pytest.raises(ValueError, match=r"models=\[\]"):
        write_space(tmp_path / "new", [])
    with pytest.raises(ValueError, match=r"\(rlm_mhc, rlm_mhc\)"):
        write_space(tmp_path / "new", [local, f"{local}/../rlm_mhc"], embed=True)
    with pytest.raises(FileNotFoundError):
        write_space(tmp_path / "new", [f"{local}/nothing"], embed=True)
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    (tmp_path / "old/file").touch()
    with pytest.raises(FileExistsError, match="old is not empty"):
        write_space(tmp_path / "old", ["org/model"])


@pytest.mark.slow
def test_a_space_runs_from_its_own_copy_and_answers(space, checkpoints, tmp_path):
    (space / "app.py").write_text((space / "app.py").read_text().replace("'org/sudoku', ", ""))  # is on the Hub
    port = free_port()
    environment = os.environ | {"GRADIO_SERVER_PORT": str(port), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    log = tmp_path / "log"
    with log.open("w") as output:
        program = subprocess.Popen(
            [sys.executable, "-c", RUNNER], cwd=space, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            address = f"http://127.0.0.1:{port}/"
            _wait_for(address, program, log)
            client = Client(address, verbose=False, analytics_enabled=False, download_files=False)
            *_, table = client.predict("To be", api_name="/mhc_gains")
        finally:
            program.terminate()
            program.wait(120)
    assert f"runs {space / 'hrm_hf/__init__.py'}" in log.read_text().replace("./", "")
    model = AutoModelForCausalLM.from_pretrained(checkpoints["rlm_mhc"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["rlm_mhc"])
    expected = model.get_mhc_metrics(**tokenizer("To be", return_tensors="pt"))
    assert [row[1:3] for row in table["data"]] == [pytest.approx(pair, abs=1e-5) for pair in expected]


def _wait_for(address: str, program: subprocess.Popen, log: Path, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{address}config", timeout=10) as reply:
                json.load(reply)
                return
        except OSError:
            assert program.poll() is None, f"the Space ended: {log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"the Space does not answer: {log.read_text()[-3000:]}"
            time.sleep(0.5)
