"""The package installed from a wheel and from a source distribution, outside the checkout.

Referees: pip and setuptools, which build and install both. Nothing reaches the network: the environment of the
installed package uses the libraries of this one, but not its checkout.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import every
import pytest
import yaml
from hub_server import HubServer


ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"
GENERATED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "*_quick.json")
RESOURCES = ("model_cards", "pretrained", "training", "accelerate_configs", "benchmarks/results/puzzle_presets.json")


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a "wheel" or an "sdist" of the tree in `source`."""
    out.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, kind, str(out)], cwd=source, check=True, capture_output=True)
    (file,) = out.iterdir()
    return file


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> dict[str, Path]:
    """The wheel and the source distribution of this checkout."""
    folder = tmp_path_factory.mktemp("packages")
    source = folder / "checkout"  # a copy, since builds leave files behind
    for name in ("hrm_hf", "training", "model_cards", "pretrained", "accelerate_configs", "benchmarks/results"):
        shutil.copytree(ROOT / name, source / name, ignore=GENERATED)
    for file in ROOT.iterdir():
        if file.is_file() and file.suffix in (".py", ".cfg", ".toml", ".in", ".md", ".txt", ""):
            shutil.copy(file, source)
    return {kind: build(kind, source, folder / kind) for kind in ("sdist", "wheel")}


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the package's files in a wheel, without the metadata of the build."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.startswith("hrm_hf/")}


def files_below(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    return [f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts and f.suffix != ".pyc"]


def test_a_wheel_has_every_file_of_the_package_and_its_resources(packages):
    expected = {f.relative_to(ROOT).as_posix(): f for f in files_below(ROOT / "hrm_hf")}
    for name in RESOURCES:
        expected |= {f"hrm_hf/_resources/{f.relative_to(ROOT).as_posix()}": f for f in files_below(ROOT / name)}
    found = contents(packages["wheel"])
    assert found.keys() == expected.keys()
    assert all(content == expected[name].read_bytes() for name, content in found.items())


def test_a_source_distribution_builds_the_same_wheel(packages, tmp_path):
    with tarfile.open(packages["sdist"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert contents(build("wheel", source, tmp_path / "wheel")) == contents(packages["wheel"])


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(request, packages, tmp_path_factory):
    """`installed(*command)` runs a command in an environment with the package from a wheel or sdist."""
    folder = tmp_path_factory.mktemp(f"installed_{request.param}")
    venv.create(folder / "venv", system_site_packages=True)
    paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    site = Path(sysconfig.get_path("purelib", vars=paths))
    # Only the libraries, without the .pth files of editable installs.
    (site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    python, empty = str(folder / "venv" / "bin" / "python"), folder / "empty"
    empty.mkdir()

    def run(program: str, *arguments: str, **more: str) -> str:
        command = [str(folder / "venv" / "bin" / program), *map(str, arguments)]
        settings = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **more}
        settings.pop("PYTHONPATH", None)  # might contain a checkout
        done = subprocess.run(command, cwd=empty, env=settings, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps"]
    install += ["--no-build-isolation", "--ignore-installed", str(packages[request.param])]
    subprocess.run(install, check=True, capture_output=True, cwd=empty)
    run.resources = site / "hrm_hf" / "_resources"
    assert run("python", "-c", "import hrm_hf.resources as r; print(r.ROOT)").strip() == str(run.resources)
    return run


@pytest.mark.slow
def test_installed_package_recommends_commands_whose_files_exist(installed):
    for task in ("puzzle", "lm"):
        advice = json.loads(installed("hrm-hf", "recommend", "--memory", "8GB", "--task", task, "--json"))
        for command in advice["commands"].values():
            named = [Path(word) for word in shlex.split(command) if word.endswith((".py", ".yaml"))]
            assert named and all(file.is_relative_to(installed.resources) and file.is_file() for file in named)


@pytest.mark.slow
def test_an_installed_package_plans_a_launch_by_its_recipes(installed):
    flags = ("--dry_run", "--json", "--gpus", "2", "--gpu_memory", "24GB")
    plan = json.loads(installed("hrm-hf", "launch", "--model", "hrm-lm-50m", *flags))
    named = [Path(word) for word in plan["command"] if word.endswith((".py", ".yaml"))]
    assert {file.name for file in named} == {"multi_gpu.yaml", "run_clm.py", "hrm_lm_50m.yaml"}
    assert all(file.is_relative_to(installed.resources) and file.is_file() for file in named)
    assert "sudoku" in installed("hrm-hf", "demo", "--help").lower()


@pytest.mark.slow
def test_an_installed_package_pushes_a_model_with_its_card(installed, tmp_path):
    every.save("hrm_puzzle", tmp_path / "mine")
    with HubServer(tmp_path / "hub") as hub:
        installed("hrm-hf", "push", tmp_path / "mine", "org/model", **hub.environment(tmp_path / "home"))
        files = hub.files("org/model")
    assert "A Hierarchical Reasoning Model" in files["README.md"].decode()
    assert {"config.json", "model.safetensors", "modeling_hrm_puzzle.py", "LICENSE_CODE"} <= files.keys()


@pytest.mark.slow
def test_a_training_script_of_an_installed_package_trains_with_its_recipe_and_data(installed, tmp_path):
    training = installed.resources / "training"
    recipe = training / "recipes" / "sudoku_ultra_small.yaml"
    flags = {"max_steps": 1, "max_eval_samples": 2, "eval_max_steps": 1, "output_dir": tmp_path / "run"}
    flags |= {"data_path": tmp_path / "data", "use_cpu": "true", "torch_compile": "false"}
    options = [word for name, value in flags.items() for word in (f"--{name}", value)]
    installed("python", training / "run_puzzle.py", "--recipe", recipe, *options)
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["max_steps"] == 1
