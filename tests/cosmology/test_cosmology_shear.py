"""Data sets of shear: noise, masks, the stored convergence, and augmentation of a spin-2 field.

Referees: the convergence of the same seed, the shear operator (which has a test of its own), the variance of noise.
"""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.cosmology.dataset.collator import EVALUATION, MapCollator, MapRows, shear_signs, turned
from hrm_hf.cosmology.dataset.rows import load_cosmology_info, read_arrays
from hrm_hf.cosmology.simulation.maps import MapSettings, generate_columns, generate_map, survey_mask
from hrm_hf.models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from hrm_hf.models.shear_operator import shear_from_convergence


OMEGA_M, SIGMA_8 = 0.3, 0.8
SKY = {"size": 32, "side_deg": 2.5, "source_redshifts": (0.5, 1.0)}


def shear(seed=0, **fields):
    return generate_columns(MapSettings(observable="shear", **SKY | fields), OMEGA_M, SIGMA_8, seed)


@pytest.mark.parametrize("kind", ["lognormal", "gaussian"])
def test_the_convergence_matches_the_convergence_map_of_the_same_seed(kind):
    columns = shear(kind=kind, sigma_e=0.3, mask_fraction=0.3)
    kappa, mask = generate_map(MapSettings(kind=kind, **SKY), OMEGA_M, SIGMA_8, 0)
    np.testing.assert_array_equal(columns["kappa"], kappa)
    assert mask is None and columns["map"].shape == (4, 32, 32) and columns["kappa"].shape == (2, 32, 32)


def test_noiseless_shear_is_the_shear_of_the_convergence():
    columns = shear(mask_fraction=0.3)
    mask = torch.from_numpy(columns["mask"])
    expected = shear_from_convergence(torch.from_numpy(columns["kappa"]).double(), mask)
    # The stored maps are float32, with values of about 0.01.
    np.testing.assert_allclose(columns["map"], expected, rtol=0, atol=1e-8)
    assert (~mask).sum() == round(0.3 * 32 * 32)


def test_noise_matches_the_galaxies_in_each_component():
    settings = MapSettings(observable="shear", sigma_e=0.26, galaxies_per_arcmin2=30, **SKY)
    quiet = MapSettings(observable="shear", **SKY)
    noise = np.stack([
        generate_map(settings, OMEGA_M, SIGMA_8, seed)[0] - generate_map(quiet, OMEGA_M, SIGMA_8, seed)[0]
        for seed in range(8)
    ])  # fmt: skip
    # 15 galaxies per square arcmin and plane, in pixels of 4.6875 arcmin.
    expected = 0.26 / np.sqrt(2 * 15 * 4.6875**2)
    assert settings.pixel_noise == pytest.approx(expected)
    # With 8,192 pixels per component, the standard error is 0.8 %; allow five.
    np.testing.assert_allclose(noise.std((0, 2, 3)), expected, rtol=0.04)
    assert np.abs(np.corrcoef(np.moveaxis(noise, 1, 0).reshape(4, -1)) - np.eye(4)).max() < 0.06


def test_masks_have_the_requested_shape():
    def masks(share, **options):
        drawn = (survey_mask(64, 4.7, 0.3, np.random.default_rng(seed), share, **options) for seed in range(4))
        return np.stack(list(drawn))

    def borders(mask):  # number of adjacent pairs with one observed pixel: high for holes, low for an edge
        return sum(np.count_nonzero(np.diff(mask.astype(int), axis=axis)) for axis in (1, 2))

    edge, holes = masks(1.0), masks(0.0)
    assert (~edge).sum() == (~holes).sum() == 4 * round(0.3 * 64 * 64)
    assert borders(edge) < borders(holes) / 3
    assert borders(masks(0.0, hole_arcmin=(30.0, 60.0))) < borders(holes) / 2


@pytest.mark.parametrize("fields, message", [
    ({"kind": "2lpt"}, "observable='shear'.*'2lpt'.*lognormal.*gaussian"),
    ({"mask_edge_share": 1.2}, "mask_edge_share=1.2"),
    ({"hole_arcmin": (5.0, 2.0)}, r"hole_arcmin=\(5.0, 2.0\)"),
])  # fmt: skip
def test_invalid_settings_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        MapSettings(observable="shear", **fields)
    with pytest.raises(ValueError, match="observable='flexion'"):
        MapSettings(observable="flexion")


def test_the_command_builds_a_set(tmp_path):
    options = "--samples 12 --test-samples 4 --size 16 --observable shear --sigma-e 0.26 --galaxies 30"
    options += " --mask-fraction 0.3 --mask-edge-share 0.2 --hole-arcmin 20,40 --shard-size 5"
    result = CliRunner().invoke(app, ["data", "cosmology", *options.split(), "--out", str(tmp_path / "set")])
    assert result.exit_code == 0, result.output
    info, rows = load_cosmology_info(tmp_path / "set"), read_arrays(tmp_path / "set", "train")
    assert (info.settings.mask_edge_share, info.settings.hole_arcmin) == (0.2, (20.0, 40.0))
    fields = info.config_fields()
    assert (fields["num_channels"], fields["mask_channel"], fields["padding_mode"]) == (3, True, "circular")
    assert rows["map"].shape == (12, 2, 16, 16) and rows["kappa"].shape == (12, 1, 16, 16)
    again = generate_columns(info.settings, float(rows["omega_m"][7]), float(rows["sigma_8"][7]), int(rows["seed"][7]))
    for name, column in again.items():
        np.testing.assert_array_equal(rows[name][7], column)
    assert "| kappa |" in (tmp_path / "set" / "README.md").read_text(encoding="utf-8")


def test_rotated_shear_is_the_shear_of_the_rotated_convergence():
    kappa = torch.randn(1, 2, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).expand(
        8, -1, -1, -1
    )
    which = torch.arange(8)
    maps = shear_from_convergence(kappa)
    found = turned(maps * shear_signs(which, maps), which)
    torch.testing.assert_close(found, shear_from_convergence(turned(kappa, which)), rtol=0, atol=1e-12)


def test_the_collator_rotates_shear_with_its_signs():
    """The shear of an augmented batch must equal the shear of its augmented convergence."""
    size = 9
    kappa = np.random.default_rng(0).normal(size=(16, 1, size, size)).astype(np.float32)
    maps = shear_from_convergence(torch.from_numpy(kappa)).numpy()

    def batch(maps, channels, **options):
        extractor = CosmoMapFeatureExtractor(size, [0.0] * channels, [1.0] * channels)
        rows = MapRows(maps, np.zeros((16, 2), np.float32), training=True)
        collator = MapCollator(extractor, shift=True, seed=3, **options)
        return [collator.at_step(rows.__getitems__(list(range(16))), step)["pixel_values"] for step in (EVALUATION, 5)]

    still, moved = batch(maps, 2, shear=True)
    assert torch.equal(still, torch.from_numpy(maps))
    expected = shear_from_convergence(batch(kappa, 1)[1])
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(batch(maps, 2)[1], expected, atol=0.1)
