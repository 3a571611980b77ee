"""Transfer function, growth, distances, normalization and Limber projection of `Cosmology`.

The referees are camb and pyccl, through the tables in `tests/fixtures/cosmology` (made by `make_tables.py` there).
"""

import json
from pathlib import Path

import numpy as np
import pytest

from hrm_hf.cosmology.simulation.fields import Cosmology, convergence_power, empty_beam, lensing_kernel


FOLDER = Path(__file__).parents[1] / "fixtures" / "cosmology"
CAMB, PYCCL = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("camb", "pyccl"))
K = np.array(CAMB["k"])
# Largest relative error of the Eisenstein-Hu formula against camb's power, by omega_m (pyccl's implementation has the
# same). The formula's authors state 5 % for usual baryon fractions; at omega_m = 0.1, baryons are 46 % of the matter,
# and the formula is 17 % off in the acoustic wiggles.
FORMULA_ERROR = {0.3: 0.035, 0.2: 0.045, 0.1: 0.17, 0.5: 0.05}


def cosmology_of(row):
    return Cosmology(row["omega_m"], row["sigma_8"])


def each(table):
    """Parametrize a test over the cosmologies of a table."""
    rows = table["cosmologies"]
    return pytest.mark.parametrize("row", rows, ids=[f"{row['omega_m']}-{row['sigma_8']}" for row in rows])


# linear power


@each(CAMB)
@pytest.mark.parametrize("z", [0, 1])
def test_linear_power_matches_camb_within_the_error_of_the_formula(row, z):
    ratio = cosmology_of(row).linear_power(K, z) / row[f"power_z{z}"]
    np.testing.assert_allclose(ratio, 1, atol=FORMULA_ERROR[row["omega_m"]])


@pytest.mark.parametrize("index", [0, 1])
def test_the_shape_of_the_power_matches_camb_within_five_percent(index):
    row = CAMB["cosmologies"][index]
    ratio = cosmology_of(row).linear_power(K) / row["power_z0"]
    np.testing.assert_allclose(ratio / np.interp(0.05, K, ratio), 1, atol=0.05)


@each(PYCCL)
@pytest.mark.parametrize("z", [0, 1])
def test_linear_power_matches_eisenstein_hu_of_pyccl(row, z):
    # 0.45 % at omega_m = 0.1, where pyccl's interpolation rounds off large wiggles; under 0.1 % elsewhere.
    tolerance = 5e-3 if row["omega_m"] == 0.1 else 1e-3
    np.testing.assert_allclose(cosmology_of(row).linear_power(K, z), row[f"power_z{z}"], rtol=tolerance)


@each(PYCCL)
def test_rms_in_spheres_matches_pyccl(row):
    # The top-hat window of a sphere over our power; at 8 Mpc/h the rms is sigma_8, which normalizes the power.
    k = np.geomspace(1e-4, 200, 4096)
    x = np.outer(PYCCL["radii"], k)
    window = 3 * (np.sin(x) - x * np.cos(x)) / x**3
    variance = np.trapezoid(cosmology_of(row).linear_power(k) * window**2 * k**3, np.log(k)) / (2 * np.pi**2)
    np.testing.assert_allclose(np.sqrt(variance), row["sigma_r"], rtol=2e-4)


# background


@each(PYCCL)
def test_growth_matches_pyccl(row):
    np.testing.assert_allclose(cosmology_of(row).growth(np.array(PYCCL["z"])), row["growth"], rtol=1e-6)


@each(PYCCL)
def test_comoving_distance_matches_pyccl(row):
    ours = cosmology_of(row).comoving_distance(np.array(PYCCL["z"]))
    np.testing.assert_allclose(ours, row["comoving_distance"], rtol=1e-6)


def test_a_universe_without_dark_energy_matches_einstein_de_sitter():
    cosmology, z = Cosmology(1.0, 0.8), np.array([0.3, 1.0, 3.0])
    np.testing.assert_allclose(cosmology.growth(z), 1 / (1 + z), rtol=1e-9)
    np.testing.assert_allclose(cosmology.comoving_distance(z), 2 * 2997.92458 * (1 - (1 + z) ** -0.5), rtol=1e-9)


# lensing


@each(PYCCL)
@pytest.mark.parametrize("sources", [(0.5, 0.5), (1.0, 1.0), (0.5, 1.0)])
def test_convergence_power_matches_pyccl(row, sources):
    ell = np.array(PYCCL["ell"])
    ours = convergence_power(cosmology_of(row), ell, *sources)
    # pyccl differentiates on the sphere. In the flat-sky limit of our maps, this factor is 1 (0.45 % off at ell = 10).
    sphere = (ell * (ell + 1) / (ell + 0.5) ** 2) ** 2
    np.testing.assert_allclose(ours * sphere, row["convergence_power"]["linear_{}_{}".format(*sources)], rtol=1e-3)


def test_lensing_kernel_vanishes_at_the_observer_and_behind_the_source():
    weights = lensing_kernel(Cosmology(0.3, 0.8), np.array([0.0, 0.4, 1.0, 2.0]), 1.0)
    assert weights[1] > 0
    np.testing.assert_allclose(weights[[0, 2, 3]], 0, atol=1e-15)


def test_empty_beam_of_einstein_de_sitter_matches_the_closed_form():
    # 3/2 int (1+z) chi (1 - chi/s) dchi with 1 + z = (1 - chi/2)^-2 and lengths in c/H0, by a fine midpoint rule.
    source = 2 * (1 - 2**-0.5)
    chi = (np.arange(200_000) + 0.5) / 200_000 * source
    expected = -1.5 * np.mean((1 - chi / 2) ** -2 * chi * (1 - chi / source)) * source
    assert empty_beam(Cosmology(1.0, 0.8), 1.0) == pytest.approx(expected, rel=1e-8)


# a live comparison


def test_another_universe_agrees_with_pyccl():
    # The tables hold four universes with one h, omega_b and n_s; here all five parameters are drawn.
    ccl = pytest.importorskip("pyccl")
    names, low, high = zip(
        ("omega_m", 0.2, 0.45), ("sigma_8", 0.6, 1), ("h", 0.6, 0.8), ("omega_b", 0.035, 0.055), ("n_s", 0.9, 1.02)
    )
    rng = np.random.default_rng(5)
    ours = Cosmology(**dict(zip(names, rng.uniform(low, high))))
    theirs = ccl.Cosmology(
        Omega_c=ours.omega_m - ours.omega_b, Omega_b=ours.omega_b, h=ours.h, n_s=ours.n_s, sigma8=ours.sigma_8,
        Neff=0.0, Omega_g=0.0, T_CMB=2.7255, transfer_function="eisenstein_hu", matter_power_spectrum="linear",
    )  # fmt: skip
    z, sources = rng.uniform(0.1, 2, 5), np.sort(rng.uniform(0.3, 1.5, 2))
    a, ell = 1 / (1 + z), np.array(PYCCL["ell"])
    np.testing.assert_allclose(ours.growth(z), ccl.growth_factor(theirs, a), rtol=0.01)
    np.testing.assert_allclose(ours.comoving_distance(z), ccl.comoving_radial_distance(theirs, a) * ours.h, rtol=0.01)
    for redshift, scale in zip(z, a):
        power = ccl.linear_matter_power(theirs, K * ours.h, scale) * ours.h**3
        np.testing.assert_allclose(ours.linear_power(K, redshift), power, rtol=0.01)
    sphere = (ell * (ell + 1) / (ell + 0.5) ** 2) ** 2  # see above
    for pair in ((sources[0], sources[0]), (sources[1], sources[1]), tuple(sources)):
        tracers = [ccl.CMBLensingTracer(theirs, z_source=source) for source in pair]
        np.testing.assert_allclose(
            convergence_power(ours, ell, *pair) * sphere, ccl.angular_cl(theirs, *tracers, ell), rtol=0.01
        )


# bad input


REFUSED = [(name, value) for name in ("omega_m", "sigma_8", "h", "omega_b") for value in (-0.3, np.nan)]


@pytest.mark.parametrize(("field", "value"), [*REFUSED, ("n_s", np.nan)])
def test_invalid_parameters_are_rejected_by_name_and_value(field, value):
    fields = {"omega_m": 0.3, "sigma_8": 0.8} | {field: value}
    with pytest.raises(ValueError, match=f"{field}={value}"):
        Cosmology(**fields)


def test_more_baryons_than_matter_are_rejected():
    with pytest.raises(ValueError, match=r"omega_b=0\.046.*omega_m=0\.04"):
        Cosmology(0.04, 0.8)
