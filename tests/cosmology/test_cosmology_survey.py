"""Maps of a survey: noise, correlation of the planes and mask.

The referee of spectra is Limber's integral, checked against pyccl in `test_cosmology_physics.py`.
"""

import numpy as np
import pytest

from hrm_hf.cosmology.simulation.fields import Cosmology, convergence_power, multipole_grid
from hrm_hf.cosmology.simulation.maps import DES_Y3, MARGIN, MapSettings, generate_map, survey_mask


OMEGA_M, SIGMA_8 = 0.3, 0.8


def draw(seed=0, **fields):
    """Maps and mask of a small survey patch."""
    return generate_map(MapSettings(**{"kind": "des", "size": 32, **fields}), OMEGA_M, SIGMA_8, seed)


def test_a_seed_determines_the_patch():
    fields = {"mask_fraction": 0.2, **DES_Y3}
    for first, again, other in zip(draw(1, **fields), draw(1, **fields), draw(2, **fields)):
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)


@pytest.mark.parametrize("fields", [{}, {"mask_fraction": 0.4}])
def test_observed_pixels_of_each_plane_have_mean_zero(fields):
    # The mean convergence is not observable, so it is removed, as in patches of the other kinds.
    maps, mask = draw(3, source_redshifts=(0.5, 1.0), **fields)
    np.testing.assert_allclose(maps[:, mask].mean(1), 0, atol=1e-8)
    assert (maps[:, ~mask] == 0).all() and mask.mean() == pytest.approx(1 - fields.get("mask_fraction", 0), abs=1e-3)


def test_the_mean_is_removed_from_the_signal_but_not_from_the_noise():
    fields = {"size": 64, "source_redshifts": (0.5, 1.0)}
    noisy, clean = (draw(3, sigma_e=sigma_e, **fields)[0] for sigma_e in (0.37, 0.0))
    means = noisy.mean((1, 2), dtype=float)
    np.testing.assert_allclose(means, (noisy - clean).mean((1, 2), dtype=float), atol=1e-8)
    assert (np.abs(means) > 1e-6).all()


# noise


def test_planes_share_the_galaxies_and_have_independent_noise():
    fields = {"size": 64, "galaxies_per_arcmin2": 10.0, "source_redshifts": (0.5, 1.0)}
    noise = draw(sigma_e=0.26, **fields)[0] - draw(sigma_e=0.0, **fields)[0]
    np.testing.assert_allclose(noise.std((1, 2)), 0.0124 * 2**0.5, rtol=0.04)
    assert abs(np.corrcoef(noise.reshape(2, -1))[0, 1]) < 0.05


# correlation of the planes


def test_correlations_of_planes_match_the_cross_spectra():
    redshifts, size, side = (0.5, 1.0), 32, np.radians(5.0)
    patches = [draw(seed, source_redshifts=redshifts)[0] for seed in range(150)]
    measured = np.mean([np.einsum("ixy,jxy->ij", kappa, kappa) for kappa in patches], axis=0) / size**2

    # Covariance in a pixel: the sum of the spectra over the modes of the periodic sky from which the patch is cut,
    # minus the covariance of the patch's mean, in which a mode is weighted by its squared mean over the patch.
    wide, cosmology = int(MARGIN * size), Cosmology(OMEGA_M, SIGMA_8)
    ell = multipole_grid(wide, side * MARGIN)
    waves = np.exp(2j * np.pi * np.outer(np.arange(wide), np.arange(size)) / wide).mean(1)
    twice = np.full(ell.shape, 2.0)  # rfft2 omits half of the modes
    twice[:, [0, -1]] = 1
    twice[0, 0] = 0
    twice *= 1 - np.abs(np.outer(waves, waves[: ell.shape[1]])) ** 2
    expected = np.zeros((2, 2))
    for i in range(2):
        for j in range(2):
            power = convergence_power(cosmology, np.maximum(ell, 1), redshifts[i], redshifts[j])
            expected[i, j] = (twice * power).sum() / (side * MARGIN) ** 2
    np.testing.assert_allclose(measured, expected, rtol=0.12)  # 150 small patches scatter by about 5 %
    assert 0.5 < measured[0, 1] / np.sqrt(measured[0, 0] * measured[1, 1]) < 0.95


def test_opposite_edges_are_not_neighbors():
    # In a periodic map the first and the last column would be as alike as the first and the second.
    kappa = np.concatenate([draw(seed)[0] for seed in range(60)])
    beside, across = (np.corrcoef(kappa[:, :, 0].ravel(), kappa[:, :, column].ravel())[0, 1] for column in (1, -1))
    assert beside > 0.4 and across < 0.2


# mask


@pytest.mark.parametrize("fraction", [0, 0.1, 0.37, 0.9])
def test_the_requested_fraction_is_masked(fraction):
    _, mask = draw(mask_fraction=fraction)
    assert np.count_nonzero(~mask) == round(fraction * 32 * 32)


def test_some_sky_stays_observed_at_every_mask_fraction():
    assert survey_mask(16, 9.0, 0.9999, np.random.default_rng(0)).sum() == 1


def test_a_mask_has_an_edge_and_holes():
    ndimage = pytest.importorskip("scipy.ndimage")
    masks = [survey_mask(128, 5.0, 0.2, np.random.default_rng(seed)) for seed in range(5)]
    for mask in masks:
        areas = _areas(ndimage, mask)
        assert areas.max() > 0.04 * mask.size  # half of the mask, 10 % of the map, lies beyond the edge
        assert len(areas) > 20 and np.median(areas) * 5.0**2 < np.pi * 12.0**2  # arcmin^2


def test_holes_have_sizes_in_arcmin():
    ndimage = pytest.importorskip("scipy.ndimage")
    medians = []
    for size, pixel in ((64, 4.0), (256, 1.0)):  # the same area of sky
        areas = [_areas(ndimage, survey_mask(size, pixel, 0.1, np.random.default_rng(seed))) for seed in range(8)]
        medians.append(np.median(np.concatenate(areas)) * pixel**2)
    # Radii from 2 to 12 arcmin, uniform in the logarithm: half of them above 4.9 arcmin, 75 arcmin^2.
    np.testing.assert_allclose(medians, np.pi * 2 * 12, rtol=0.5)


def _areas(ndimage, mask):
    return np.bincount(ndimage.label(~mask)[0].ravel())[1:]
