"""Correlated random fields: spectra of several planes, and the factor of a matrix of spectra.

Referees: GLASS (a table, by `make_referees.py`), numpy's Cholesky factor, the requested spectra, the field of a single
plane.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from hrm_hf.cosmology.simulation.fields import (
    Cosmology,
    _correlated_fields,
    convergence_power,
    gaussian_convergence,
    gaussian_correlation,
    lognormal_convergence,
    lower_roots,
    map_power_spectrum,
    multipole_grid,
)


COSMOLOGY, SIDE, REDSHIFTS = Cosmology(0.3, 0.8), np.radians(5.0), (0.34, 0.52, 0.94)


def power(ell):
    return 1e-9 / (ell + 100)


def test_a_field_is_white_noise_times_the_root_of_its_spectrum():
    # Equal bit by bit, so that data sets generated from a seed never change.
    white = np.fft.rfft2(np.random.default_rng(3).standard_normal((1, 33, 33)))
    spectrum = power(multipole_grid(33, SIDE))
    spectrum[0, 0] = 0
    expected = np.fft.irfft2(white * np.sqrt(spectrum) * 33 / SIDE, s=(33, 33))[0]
    found = _correlated_fields(spectrum[None, None], 33, SIDE, np.random.default_rng(3))[0]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("draw", [gaussian_convergence, lognormal_convergence])
def test_planes_behind_a_plane_do_not_change_it(draw):
    alone, several = (draw(COSMOLOGY, 32, SIDE, np.random.default_rng(1), REDSHIFTS[:count]) for count in (1, 3))
    np.testing.assert_array_equal(several[0], alone[0])


@pytest.mark.parametrize("draw", [gaussian_convergence, lognormal_convergence])
def test_auto_and_cross_spectra_of_planes_match_the_requested_ones(draw):
    rng, measured = np.random.default_rng(0), 0
    for _ in range(200):
        maps = draw(COSMOLOGY, 64, SIDE, rng, REDSHIFTS)
        sums = maps[:, None] + maps  # for cross spectra: P(a + b) = P(a) + P(b) + 2 P(a, b)
        measured = measured + map_power_spectrum(sums, SIDE, bins=8)[1] / 200
    auto = np.einsum("iib->ib", measured) / 4
    cross = (measured - auto[:, None] - auto) / 2
    # Expected values: the requested spectra, averaged over the modes of each ring.
    grid = multipole_grid(64, SIDE)
    for i in range(3):
        for j in range(3):
            wanted = np.zeros_like(grid)
            wanted[grid > 0] = convergence_power(COSMOLOGY, grid[grid > 0], REDSHIFTS[i], REDSHIFTS[j])
            # A map whose modes have exactly this power.
            exact = np.fft.irfft2(np.sqrt(wanted) * 64**2 / SIDE, s=(64, 64))
            expected = map_power_spectrum(exact, SIDE, bins=8)[1]
            np.testing.assert_allclose(cross[i, j] if i != j else auto[i], expected, rtol=0.12)
            np.testing.assert_allclose((cross[i, j] if i != j else auto[i])[3:], expected[3:], rtol=0.03)


def test_the_root_of_spectra_is_their_cholesky_factor():
    factors = np.random.default_rng(0).normal(size=(6, 5, 4, 4))
    spectra = np.moveaxis(factors @ factors.swapaxes(-1, -2), (-2, -1), (0, 1))
    expected = np.moveaxis(np.linalg.cholesky(np.moveaxis(spectra, (0, 1), (-2, -1))), (-2, -1), (0, 1))
    np.testing.assert_allclose(lower_roots(spectra), expected, atol=1e-10)


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ([[1, 1], [1, 1]], [[1, 1], [1, 1]]),  # two planes at one redshift
        ([[0, 0], [0, 0]], [[0, 0], [0, 0]]),  # ell = 0
        ([[1, 2], [2, 1]], [[1, 1], [1, 1]]),  # correlation above 1
        ([[-1, 0], [0, 4]], [[0, 0], [0, 4]]),  # negative power
        ([[1e-20, 1], [1, 1e-20]], [[1e-20, 1e-20], [1e-20, 1e-20]]),
    ],
)
def test_invalid_matrices_are_replaced_by_the_nearest_with_the_same_auto_spectra(matrix, expected):
    root = lower_roots(np.array(matrix, float)[..., None, None])[..., 0, 0]
    np.testing.assert_allclose(root @ root.T, expected, rtol=1e-12)


def test_the_gaussian_correlation_of_a_log_normal_field_matches_glass():
    table = json.loads((Path(__file__).parents[1] / "fixtures/cosmology/glass.json").read_text())
    for pair in table["pairs"]:
        found = gaussian_correlation(np.array(table["correlations"]), pair["first"] * pair["second"])
        np.testing.assert_allclose(found, pair["gaussian"], rtol=1e-12)
