"""Training of mass mappers: fresh observations, the script, and its output files.

Referees: the forward operator, the same rows in other batches, and the saved model run by the pipeline.
"""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_cosmo
import torch
import yaml
from transformers import AutoFeatureExtractor, AutoModelForImageToImage, pipeline

from hrm_hf.cosmology.arguments import CosmoDataArguments
from hrm_hf.cosmology.dataset.collator import MapRows, MassMapCollator, mixed_masks
from hrm_hf.cosmology.dataset.rows import read_arrays
from hrm_hf.cosmology.run import load_maps
from hrm_hf.io.usage import UsageError
from hrm_hf.models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from hrm_hf.models.shear_operator import shear_from_convergence


SCRIPT = str(Path(__file__).parents[2] / "training" / "run_mass_mapping.py")
RECIPE = {
    "model_type": "hrm_mass_mapping", "preset": "test", "use_cpu": True, "report_to": "none", "disable_tqdm": True,
    "logging_steps": 1, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "max_steps": 3, "val_samples": 10,
    "save_strategy": "no",
}  # fmt: skip
NOISE = 0.01


@pytest.fixture(scope="module")
def shear_maps(tmp_path_factory):
    """A data set of 40 training and 8 test maps of shear, with a quarter of the pixels masked."""
    options = {"observable": "shear", "sigma_e": 0.26, "galaxies_per_arcmin2": 30.0, "mask_fraction": 0.25}
    return tiny_cosmo.build(tmp_path_factory.mktemp("data") / "shear", side_deg=1.25, hole_arcmin=(5, 15), **options)


@pytest.fixture
def run(tmp_path, shear_maps, monkeypatch):
    """`run("name", option=value, ...)` runs the script in this process and returns its output folder."""

    def start(name, **options):
        recipe = {**RECIPE, "data_path": shear_maps, "output_dir": str(tmp_path / name), **options}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        monkeypatch.setattr(sys, "argv", [SCRIPT, "--recipe", str(path)])
        # Not as "__main__", which would block the signals of the tests.
        runpy.run_path(SCRIPT, run_name="run_mass_mapping")["main"]()
        return tmp_path / name

    return start


def rows(count: int = 6) -> MapRows:
    generator = np.random.default_rng(0)
    kappa = generator.standard_normal((count, 1, 16, 16)).astype(np.float32)
    masks = generator.random((count, 16, 16)) > 0.3
    shear = shear_from_convergence(torch.from_numpy(kappa)).numpy() * masks[:, None]
    labels = np.full((count, 2), 0.7, np.float32)
    return MapRows(shear.astype(np.float32), labels, masks, training=True, kappa=kappa)


def collator(**options) -> MassMapCollator:
    extractor = CosmoMapFeatureExtractor(16, [0.0, 0.0], [1.0, 1.0], mask_channel=True)
    return MassMapCollator(extractor, shift=True, **options)


@pytest.mark.parametrize("fresh", [None, 1e-6])
def test_the_shear_of_a_batch_matches_its_convergence(fresh):
    """Convergence and shear are rotated and shifted together, for fresh and for stored observations."""
    batch = collator(shear_noise=fresh).at_step(rows().__getitems__([0, 1, 2, 3, 4, 5]), 7)
    mask = batch["pixel_values"][:, 2:]
    expected = shear_from_convergence(batch["kappa"], mask)
    # The tolerance covers float32 transforms and the fresh noise, which is about 1e-6.
    torch.testing.assert_close(batch["pixel_values"][:, :2], expected, rtol=0, atol=1e-4)
    assert not torch.equal(batch["kappa"], torch.from_numpy(rows().kappa))  # they have been rotated or shifted


def test_fresh_observations_depend_only_on_seed_step_and_index():
    one = collator(shear_noise=NOISE)
    together = one.at_step(rows().__getitems__([0, 1, 2, 3]), 7)
    apart = [one.at_step(rows().__getitems__(pair), 7) for pair in ([0, 1], [2, 3])]
    for name in ("pixel_values", "kappa"):
        expected = torch.cat([part[name] for part in apart])
        torch.testing.assert_close(together[name], expected, rtol=0, atol=1e-6)  # the batch size affects rounding
    later = one.at_step(rows().__getitems__([0, 1, 2, 3]), 8)
    assert not torch.equal(together["pixel_values"], later["pixel_values"])


def test_masks_are_mixed_in_the_documented_shares():
    count = 2000
    masks = torch.ones(count, 16, 16, dtype=torch.bool)
    masks[:, :4] = False  # a quarter
    draws = torch.randint(2**31, (count, 4), generator=torch.Generator().manual_seed(0))
    hidden = 1 - mixed_masks(masks, draws).float().mean((1, 2))
    # The binomial standard deviation of a share of 60 % is 0.011 for 2,000 maps.
    assert (hidden == 0).float().mean() == pytest.approx(0.1, abs=0.02)
    assert (hidden == 0.25).float().mean() >= 0.6 - 0.03
    assert (hidden > 0.25).float().mean() == pytest.approx(0.3, abs=0.06)
    assert hidden.max() <= 0.75


@pytest.mark.parametrize("model_type", ["hrm_mass_mapping", "cosmo_unet"])
def test_the_pipeline_loads_the_model_saved_by_the_script(run, shear_maps, model_type):
    out = run("mapper", model_type=model_type, val_samples=20)
    result = json.loads((out / "results.json").read_text())
    test = read_arrays(shear_maps, "test")
    mapper = pipeline("mass-mapping", model=str(out))
    found = mapper([{"map": one, "mask": mask} for one, mask in zip(test["map"], test["mask"])])
    kappa = np.stack([each["kappa"] for each in found])
    truth = test["kappa"][:, 0] - test["kappa"].mean((1, 2, 3))[:, None, None]
    error = np.sqrt(((kappa - truth) ** 2).sum() / (truth**2).sum())
    assert result["metrics"]["error"]["value"] == pytest.approx(error, rel=1e-4)  # float32, different batches
    assert found[0]["kappa_std"].shape == (16, 16) and found[0]["kappa_std"].min() > 0
    assert found[0]["steps"] == (2 if model_type == "hrm_mass_mapping" else 1)
    assert {"mean", "std", "interval_68"} <= set(found[0]["s_8"])
    left = {each.name for each in out.iterdir()}
    assert {"maps.png", "spectra.png", "segments.png", "corner.png", "README.md"} <= left
    config = AutoModelForImageToImage.from_pretrained(out).config
    assert config.kappa_std[0] == pytest.approx(float(read_arrays(shear_maps, "train")["kappa"][:20].std()), rel=1e-3)
    assert AutoFeatureExtractor.from_pretrained(out).mask_channel


def test_resuming_a_killed_run_reproduces_its_losses(run):
    steady = {"max_test_samples": 0, "lr_min_ratio": 1.0, "warmup_steps": 0}
    first = run("whole", max_steps=4, **steady)
    run("killed", max_steps=2, save_strategy="steps", save_steps=2, **steady)
    second = run("killed", max_steps=4, resume_from_checkpoint="last", **steady)
    logs = [json.loads((out / "trainer_state.json").read_text())["log_history"] for out in (first, second)]
    losses = [[entry["loss"] for entry in log if "loss" in entry] for log in logs]
    assert losses[0][2:] == pytest.approx(losses[1][-2:], rel=1e-6)  # losses are logged with six digits


def test_the_last_segment_of_the_pipeline_is_its_map(run, shear_maps):
    out = run("mapper", max_test_samples=0)
    one = {name: read_arrays(shear_maps, "test")[name][0] for name in ("map", "mask")}
    found = pipeline("mass-mapping", model=str(out))(one, return_segments=True, max_steps=3)
    assert found["segment_maps"].shape == (3, 1, 16, 16) and found["steps"] == 3
    np.testing.assert_array_equal(found["segment_maps"][-1, 0], found["kappa"])


def test_wrong_usage_is_rejected(run, tmp_path):
    with pytest.raises(ValueError, match="model_type='hrm_cosmo'"):
        run("wrong", model_type="hrm_cosmo")
    with pytest.raises(UsageError, match=r"kappa .*convergence.*shear"):
        run("wrong", data_path=tiny_cosmo.build(tmp_path / "kappa", samples=12))
    with pytest.raises(UsageError, match=r"noise_sigma=0\.1\b"):
        run("wrong", noise_sigma=0.1)


def test_a_regression_on_shear_does_not_read_the_convergence(shear_maps):
    assert load_maps(CosmoDataArguments(data_path=shear_maps)).train.kappa is None
