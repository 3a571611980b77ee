"""Maps from files, end to end: cubes like Quijote's and a table of parameters become a data set, a trained model, its
evaluation, a baseline and pipeline outputs. Maps without parameters are rejected where parameters are needed.

Referees: the metrics that training reports, the model's outputs for arrays.
"""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from transformers import pipeline
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.cosmology.dataset.rows import load_cosmology_info, read_arrays


SCRIPT = str(Path(__file__).parents[2] / "training" / "run_cosmo.py")
UNIVERSES = 10
RECIPE = {
    "model_type": "hrm_cosmo", "preset": "test", "use_cpu": True, "report_to": "none", "disable_tqdm": True,
    "logging_steps": 1, "per_device_train_batch_size": 16, "learning_rate": 1e-3, "max_steps": 3, "val_samples": 12,
    "save_strategy": "no",
}  # fmt: skip


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def cubes(tmp_path_factory):
    """Ten folders with a cube each, whose contrast grows with sigma_8, and the table of their parameters."""
    folder = tmp_path_factory.mktemp("latin_hypercube")
    rng = np.random.default_rng(0)
    table = ["#Omega_m   Omega_b  h  n_s  sigma_8"]
    for number in range(UNIVERSES):
        omega_m, sigma_8 = rng.uniform(0.1, 0.5), rng.uniform(0.6, 1.0)
        density = rng.lognormal(0, 0.5 * sigma_8, (16, 16, 16))
        (folder / str(number)).mkdir()
        np.save(folder / str(number) / "df_m_16_CIC_z=0.npy", (density / density.mean() - 1).astype(np.float32))
        table.append(f"{omega_m:.4f} 0.0493 0.67 0.96 {sigma_8:.4f}")
    (folder / "latin_hypercube_params.txt").write_text("\n".join(table))
    return folder


def build(cubes, out, *options):
    files = [cubes / str(number) / "df_m_16_CIC_z=0.npy" for number in range(UNIVERSES)]
    result = call("data", "cosmology-files", *files, "--slab-mpc", 250, "--out", out, *options)
    assert result.exit_code == 0, (result.output, result.exception)
    return str(out)


@pytest.fixture(scope="module")
def data(cubes, tmp_path_factory):
    """A data set of 120 slabs, two universes in the test split."""
    labels = ("--labels", cubes / "latin_hypercube_params.txt", "--test-share", 0.2)
    return build(cubes, tmp_path_factory.mktemp("data") / "quijote", *labels)


@pytest.fixture(scope="module")
def unlabelled(cubes, tmp_path_factory):
    return build(cubes, tmp_path_factory.mktemp("unlabelled") / "maps")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run the training script in this process and return its output folder."""

    def start(**options):
        folder = tmp_path_factory.mktemp("run")
        recipe = RECIPE | {"output_dir": str(folder / "out")} | options
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [SCRIPT, "--recipe", str(folder / "recipe.yaml")])
            runpy.run_path(SCRIPT, run_name="run_cosmo")["main"]()  # not as "__main__", which blocks signals
        return folder / "out"

    return start


@pytest.fixture(scope="module")
def trained(run, data):
    return run(data_path=data)


def test_a_model_trains_on_labeled_maps_from_files(trained, data):
    results = json.loads((trained / "results.json").read_text())
    assert results["data"]["kind"] == "quijote" and results["validation"]["maps"] == 12
    assert results["metrics"]["count"] == 24
    config, info = json.loads((trained / "config.json").read_text()), load_cosmology_info(data)
    for name, value in info.config_fields().items():
        assert config[name] == (pytest.approx(value) if name == "pixel_std" else value), name
    assert config["padding_mode"] == "zeros"


def test_evaluation_matches_the_metrics_of_training(trained, data):
    result = call("eval", "cosmo", trained, "--data", data, "--device", "cpu", "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)["metrics"]["parameters"]
    expected = json.loads((trained / "results.json").read_text())["metrics"]["parameters"]
    for name in ("omega_m", "sigma_8", "s_8"):
        assert found[name]["rmse"] == pytest.approx(expected[name]["rmse"], rel=1e-4)


def test_the_pipeline_accepts_maps_with_and_without_parameters(trained, data, unlabelled):
    infer = pipeline("cosmology-regression", model=str(trained), device="cpu")
    rows, bare = read_arrays(data, "test"), read_arrays(unlabelled, "test")
    assert set(bare) == {"map", "source", "axis", "slab", "redshift"}
    same = np.flatnonzero(np.isin(bare["source"], rows["source"]))
    assert infer(bare["map"][same]) == infer(rows["map"])


def test_training_rejects_maps_without_parameters(run, unlabelled):
    with pytest.raises(ValueError, match=r"'train'.*\['test'\].*--labels TABLE"):
        run(data_path=unlabelled)


def test_evaluation_rejects_maps_without_parameters(trained, unlabelled):
    commands = [
        (("eval", "cosmo", trained, "--data", unlabelled, "--device", "cpu"), "omega_m and sigma_8"),
        (("eval", "cosmo-baseline", "--data", unlabelled, "--method", "spectrum-ridge"), "'train'"),
    ]
    for command, message in commands:
        result = call(*command)
        assert isinstance(result.exception, ValueError), result.output
        assert message in str(result.exception) and "trained model" in str(result.exception)
