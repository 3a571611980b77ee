"""The exact posterior of log-normal maps: in the Gaussian limit that of the Wiener filter, and calibrated beyond it.

Referees: the Wiener filter and the draws of its error; maps drawn from the prior that the posterior has.
"""

import numpy as np
import pytest
import torch

from hrm_hf.cosmology.mass_maps.lognormal import LognormalPosterior
from hrm_hf.cosmology.mass_maps.reconstruction import WienerFilter, spectra_of_cosmologies
from hrm_hf.cosmology.simulation import fields
from hrm_hf.cosmology.simulation.maps import MapSettings, generate_columns


SETTINGS = MapSettings(
    observable="shear", sigma_e=0.26, galaxies_per_arcmin2=100, size=8, side_deg=1.0, mask_fraction=0.3,
    hole_arcmin=(5, 10), source_redshifts=(0.7, 1.3),
)  # fmt: skip
ROWS = 24


def problem(settings: MapSettings = SETTINGS):
    """Parameters, shear, mask and convergence of maps of one cosmology each."""
    rng = np.random.default_rng(0)
    omega_m, sigma_8 = rng.uniform(0.2, 0.4, ROWS), rng.uniform(0.7, 0.9, ROWS)
    rows = [generate_columns(settings, omega_m[i], sigma_8[i], i) for i in range(ROWS)]
    shear, mask, kappa = (torch.from_numpy(np.stack([row[name] for row in rows])) for name in ("map", "mask", "kappa"))
    return (omega_m, sigma_8), shear, mask[:, None], kappa


def test_far_from_empty_the_field_is_gaussian_and_the_posterior_that_of_the_wiener_filter(monkeypatch):
    """With a shift of a hundred empty beams nothing is skewed; the spectra stay."""
    monkeypatch.setattr(fields, "LOGNORMAL_SHIFT", 100.0)
    parameters, shear, mask, _ = problem()
    generator = torch.Generator().manual_seed(0)
    samples = LognormalPosterior(SETTINGS, *parameters).sample(shear, mask, generator, draws=200, warmup=100)
    wiener = WienerFilter(SETTINGS, spectra_of_cosmologies(SETTINGS, *parameters))
    expected = wiener(shear, mask).kappa
    width = wiener.draw_errors(mask.double(), generator, 200).square().mean(0).sqrt()
    assert 0.5 < samples.acceptance < 0.95
    # Means of some hundred samples that follow one another: a twentieth of the width; 0.15 leaves room for its tail.
    assert ((samples.mean - expected) / width).square().mean().sqrt() < 0.15
    np.testing.assert_allclose((samples.std / width).square().mean().sqrt(), 1, atol=0.05)


def test_true_maps_lie_within_the_posterior_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr(fields, "LOGNORMAL_SHIFT", 0.15)  # more skewed than any sky, so that it shows
    parameters, shear, mask, kappa = problem()
    samples = LognormalPosterior(SETTINGS, *parameters).sample(
        shear, mask, torch.Generator().manual_seed(0), draws=200, warmup=100
    )
    z = (kappa - samples.mean) / samples.std
    # 24 maps of 2 x 64 pixels, correlated: some hundred independent numbers, 5 % in the mean square each way.
    np.testing.assert_allclose(z.square().mean(), 1, atol=0.2)
    assert samples.drift < 0.3
    wiener = WienerFilter(SETTINGS, spectra_of_cosmologies(SETTINGS, *parameters))(shear, mask).kappa
    assert (kappa - samples.mean).square().sum() < (kappa - wiener).square().sum()  # it is the best estimate


def test_other_fields_are_refused():
    settings = MapSettings(kind="gaussian", observable="shear", sigma_e=0.26, size=8)
    with pytest.raises(ValueError, match=r"kind='gaussian', sigma_e=0\.26: expected log-normal maps with shape noise"):
        LognormalPosterior(settings, np.array([0.3]), np.array([0.8]))
