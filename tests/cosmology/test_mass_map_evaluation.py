"""`hrm-hf eval cosmo-map` of a trained model, and the options that are valid for models or methods only.

Referees: the maps and posteriors of the pipeline for the same rows.
"""

import json

import every
import numpy as np
import pytest
import tiny_cosmo
from transformers import pipeline
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.cosmology.dataset.rows import read_arrays


MAPS = 10  # in the test split
PICTURES = ("maps.png", "spectra.png", "segments.png", "corner.png", "calibration.png")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a shear data set, a quarter of whose pixels are masked, and one tiny model of each kind."""
    folder = tmp_path_factory.mktemp("mass_maps")
    sky = {"observable": "shear", "sigma_e": 0.26, "galaxies_per_arcmin2": 30.0, "mask_fraction": 0.25}
    tiny_cosmo.build(folder / "shear", samples=20, test_samples=MAPS, side_deg=1.25, hole_arcmin=(5, 15), **sky)
    for name in ("hrm_mass_mapping", "cosmo_unet", "hrm_cosmo"):
        every.save(name, folder / name)
    return folder


def run(*arguments):
    return CliRunner().invoke(app, ["eval", "cosmo-map", *map(str, arguments)])


def mapped(model, data, **options):
    """Outputs of the pipeline for the rows, and the true maps without their means."""
    rows = read_arrays(data, "test")
    items = [{"map": one, "mask": mask} for one, mask in zip(rows["map"], rows["mask"])]
    truth = rows["kappa"] - rows["kappa"].mean((2, 3), keepdims=True)
    return pipeline("mass-mapping", model=str(model))(items, **options), truth[:, 0], rows


def error(kappa, truth):
    return np.sqrt(((kappa - truth) ** 2).sum() / (truth**2).sum())


def test_metrics_of_a_model_match_the_maps_of_the_pipeline(files, tmp_path):
    model, data, out = files / "hrm_mass_mapping", files / "shear", tmp_path / "eval"
    found = run(model, "--data", data, "--batch-size", 4, "--num-samples", 200, "--out", out, "--json")
    assert found.exit_code == 0, found.output
    result = json.loads((out / "results.json").read_text())
    metrics = result["metrics"]
    assert json.loads(found.stdout.splitlines()[-1])["metrics"] == metrics
    expected, truth, rows = mapped(model, data, return_segments=True)
    kappa = np.stack([one["kappa"] for one in expected])
    # Both are in float32, but with different batches.
    assert metrics["count"] == MAPS and metrics["error"]["value"] == pytest.approx(error(kappa, truth), rel=1e-4)
    hidden = ~rows["mask"]
    assert metrics["error_hidden"]["value"] == pytest.approx(error(kappa[hidden], truth[hidden]), rel=1e-4)
    std = np.stack([one["kappa_std"] for one in expected])
    assert metrics["uncertainty"]["mean_z2"] == pytest.approx((((kappa - truth) / std) ** 2).mean(), rel=1e-4)
    segments = np.stack([one["segment_maps"] for one in expected])[:, :, 0]
    by_segment = [error(segments[:, number], truth) for number in range(segments.shape[1])]
    assert metrics["per_step"]["error"] == pytest.approx(by_segment, rel=1e-4) and len(by_segment) == 2
    means = np.array([one["omega_m"]["mean"] for one in expected])
    rmse = np.sqrt(((means - rows["omega_m"]) ** 2).mean())
    assert metrics["posterior"]["parameters"]["omega_m"]["rmse"] == pytest.approx(rmse, rel=1e-4)
    assert all((out / name).stat().st_size > 10_000 for name in PICTURES)
    assert result["settings"] == {"steps": "fixed", "max_steps": 2, "num_samples": 200, "seed": 0, "limit": None}


def test_adaptive_segments_match_the_pipeline(files, tmp_path):
    model, data = files / "hrm_mass_mapping", files / "shear"
    options = ("--steps", "adaptive", "--max-steps", 3, "--num-samples", 100, "--limit", MAPS, "--json")
    found = run(model, "--data", data, *options)
    assert found.exit_code == 0, found.output
    metrics = json.loads(found.stdout.splitlines()[-1])["metrics"]
    expected, truth, _ = mapped(model, data, halt="adaptive", max_steps=3)
    used = np.array([one["steps"] for one in expected])
    histogram = metrics["posterior"]["steps_histogram"]
    assert histogram == [int((used == number).sum()) for number in range(1, len(histogram) + 1)]
    assert metrics["posterior"]["average_steps"] == pytest.approx(used.mean()) and used.mean() < 3
    kappa = np.stack([one["kappa"] for one in expected])
    assert metrics["error"]["value"] == pytest.approx(error(kappa, truth), rel=1e-4)


def test_evaluation_of_a_u_net_updates_its_model_card(files):
    model = files / "cosmo_unet"
    found = run(model, "--data", files / "shear", "--num-samples", 100, "--update-card")
    assert found.exit_code == 0, found.output
    assert "error_hidden" in (model / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "MODEL or --method: neither"),
        (("MODEL", "--method", "wiener"), "MODEL or --method: both"),
        (("MODEL", "--train", 10), "--train: only valid with --method"),
        (("--method", "wiener", "--split", "train"), "--split: only valid with MODEL"),
        (("--method", "wiener", "--update-card"), "--update-card: only valid with MODEL"),
        (("UNET", "--steps", "adaptive"), "--steps: "),
        (("UNET", "--max-steps", 2), "one segment"),
        (("REGRESSOR",), "mass maps"),
    ],
)
def test_wrong_usage_is_rejected(files, arguments, message):
    models = {"MODEL": "hrm_mass_mapping", "UNET": "cosmo_unet", "REGRESSOR": "hrm_cosmo"}
    words = [files / models[word] if word in models else word for word in arguments]
    found = run(*words, "--data", files / "shear")
    assert found.exit_code == 2, found.output
    assert message in " ".join(found.output.replace("│", " ").split())
