"""The 2LPT box and its convergence maps.

Referees: linear theory summed over the modes of the box, closed forms of perturbation theory (displacements of
crossed waves, the skewness of Bouchet et al. 1995 and Bernardeau 1994), the growth equation solved step by step, and
Limber's spectra, which `test_cosmology_physics.py` compares with pyccl.
"""

from functools import cache

import numpy as np
import pytest

from hrm_hf.cosmology.dataset.info import CosmologyPlan
from hrm_hf.cosmology.simulation.fields import Cosmology, gaussian_convergence, map_power_spectrum
from hrm_hf.cosmology.simulation.lpt import (
    LptBox,
    _along,
    _deposit,
    displace,
    linear_density,
    lpt_convergence,
    second_growth,
)
from hrm_hf.cosmology.simulation.maps import MapSettings


SIDE, GRID = 256.0, 64  # Mpc/h, particles per side
COSMOLOGY = Cosmology(0.3, 0.8)


@cache
def box_modes(side=SIDE, grid=GRID):
    """Return |k| of the modes of a box and their multiplicity (0 for the mean), computed independently."""
    axis = 2 * np.pi / side * np.r_[0 : grid // 2, -grid // 2 : 0]
    k = np.linalg.norm(np.stack(np.meshgrid(axis, axis, axis[: grid // 2 + 1], indexing="ij")), axis=0)
    count = np.full(k.shape, 2.0)
    count[..., [0, -1]] = 1
    count[0, 0, 0] = 0
    return k, count


def sphere(x):
    """Fourier transform of a ball of mean 1."""
    x = np.maximum(x, 1e-3)
    return 3 * (np.sin(x) - x * np.cos(x)) / x**3


def linear_moment(cosmology, weight, side=SIDE, grid=GRID):
    """Expected mean square of the box's linear density contrast, each mode's power times `weight(k)`."""
    k, count = box_modes(side, grid)
    k = np.maximum(k, 1e-9)
    return (count * cosmology.linear_power(k) * weight(k)).sum() / side**3


def smoothed(delta, radius, side=SIDE):
    """Return the field averaged over spheres of `radius` Mpc/h."""
    window = sphere(box_modes(side)[0] * radius)
    return np.fft.irfftn(np.fft.rfftn(delta) * window, s=delta.shape, axes=(0, 1, 2))


# linear field


@pytest.mark.parametrize(("omega_m", "sigma_8"), [(0.1, 0.6), (0.3, 0.8), (0.5, 1.0)])
def test_sigma_8_of_the_box_matches_the_requested_value(omega_m, sigma_8):
    cosmology = Cosmology(omega_m, sigma_8)
    fields = [linear_density(cosmology, SIDE, GRID, np.random.default_rng(seed)) for seed in range(6)]
    measured = np.sqrt(np.mean([(smoothed(field, 8) ** 2).mean() for field in fields]))
    expected = np.sqrt(linear_moment(cosmology, lambda k: sphere(8 * k) ** 2))  # omits waves longer than the box
    assert measured == pytest.approx(expected, rel=0.04)
    assert expected == pytest.approx(sigma_8, rel=0.05)


def test_power_of_the_linear_field_is_the_linear_power_spectrum():
    fields = [linear_density(COSMOLOGY, SIDE, GRID, np.random.default_rng(seed)) for seed in range(4)]
    k, count = box_modes()
    power = np.mean([np.abs(np.fft.rfftn(field)) ** 2 for field in fields], 0) * SIDE**3 / GRID**6
    ratio = power / COSMOLOGY.linear_power(np.maximum(k, 1e-9))
    for low, high in ((0.1, 0.2), (0.2, 0.4), (0.4, 0.75)):
        ring = np.where((k > low) & (k <= high), count, 0)
        assert (ratio * ring).sum() / ring.sum() == pytest.approx(1, abs=0.04)


# displacements


def crossed_waves(grid=32, side=50.0, a=0.3, b=0.2):
    """delta = a cos kx + b cos ky, with k the box's longest wave, and the coordinates times k."""
    x = 2 * np.pi * np.arange(grid) / grid
    delta = a * np.cos(x)[:, None, None] + b * np.cos(x)[None, :, None] + np.zeros((grid, grid, grid))
    return delta, x, side / (2 * np.pi)


def test_first_displacement_of_crossed_waves_matches_the_closed_form():
    delta, x, scale = crossed_waves()
    first = displace(delta, 50.0).first
    np.testing.assert_allclose(
        first[0], np.broadcast_to(-0.3 * scale * np.sin(x)[:, None, None], delta.shape), atol=1e-5
    )
    np.testing.assert_allclose(
        first[1], np.broadcast_to(-0.2 * scale * np.sin(x)[None, :, None], delta.shape), atol=1e-5
    )
    np.testing.assert_allclose(first[2], 0, atol=1e-5)


def test_second_displacement_of_crossed_waves_matches_the_closed_form():
    # phi_xx phi_yy = a b cos kx cos ky has phi2 = -a b / (2 k^2) cos kx cos ky.
    delta, x, scale = crossed_waves()
    second = displace(delta, 50.0).second
    expected = 0.3 * 0.2 * scale / 2 * np.sin(x)[:, None, None] * np.cos(x)[None, :, None]
    np.testing.assert_allclose(second[0], np.broadcast_to(expected, delta.shape), atol=1e-5)
    np.testing.assert_allclose(second[2], 0, atol=1e-5)


@pytest.mark.parametrize("omega_m", [0.1, 0.3, 1.0])
def test_second_growth_solves_its_equation(omega_m):
    # D2'' + (2 + H'/H) D2' = 3/2 Omega_m(a) (D2 - D1^2) in ln a, from the matter era on, by Euler-Cromer steps.
    cosmology = Cosmology(omega_m, 0.8)
    log_a = np.linspace(np.log(1e-2), 0, 20001)
    z, step = np.expm1(-log_a), log_a[1] - log_a[0]
    matter = omega_m * (1 + z) ** 3 / cosmology.hubble(z) ** 2
    first = cosmology.growth(z)
    second, speed = -3 / 7 * first[0] ** 2, -6 / 7 * first[0] ** 2
    for index in range(len(z) - 1):
        force = 1.5 * matter[index] * (second - first[index] ** 2)
        speed += step * (force - (2 - 1.5 * matter[index]) * speed)
        second += step * speed
    assert float(second_growth(cosmology, 0.0)) == pytest.approx(second, rel=0.01)


# density


def box_density(cosmology, box, z, order=2):
    """Return a box's density contrast [grid, grid, grid] at redshift z; CIC assigns particles to neighboring cells."""
    cells = box.grid / box.side
    growths = float(cosmology.growth(z)) * cells, float(second_growth(cosmology, z)) * cells * (order == 2)
    counts = np.zeros((1, *[box.grid] * 3), np.float32)
    moved = box.first * np.float32(growths[0]) + box.second * np.float32(growths[1])
    positions = [moved[axis] + _along(axis, np.arange(box.grid)) for axis in range(3)]
    _deposit(counts, np.zeros(1, int), positions)
    return counts[0] - 1


def test_matter_moves_with_the_displacement():
    shift = np.zeros((3, 16, 16, 16), np.float32)
    shift[1, 3, 5, 7] = 6.0  # 1.5 cells of 4 Mpc/h, in the only universe where D1 = 1 and D2 = 0
    delta = box_density(COSMOLOGY, LptBox(64.0, shift, np.zeros_like(shift)), 0.0)
    expected = np.zeros((16, 16, 16))
    expected[3, 5, 7], expected[3, 6, 7], expected[3, 7, 7] = -1, 0.5, 0.5
    np.testing.assert_allclose(delta, expected, atol=1e-6)


@pytest.mark.parametrize("z", [1.0, 3.0])
def test_large_scales_grow_as_in_linear_theory(z):
    linear = linear_density(COSMOLOGY, SIDE, GRID, np.random.default_rng(3))
    evolved = box_density(COSMOLOGY, displace(linear, SIDE), z)
    k, count = box_modes()
    large = np.where(k < 0.06, count, 0)
    power = [(np.abs(np.fft.rfftn(field)) ** 2 * large).sum() for field in (evolved, linear)]
    assert power[0] / power[1] == pytest.approx(float(COSMOLOGY.growth(z)) ** 2, rel=0.04)


@pytest.mark.parametrize(("sigma_8", "z"), [(0.3, 0.0), (0.6, 0.0), (0.8, 0.5)])
def test_sigma_8_of_the_evolved_box_matches_its_linear_field(sigma_8, z):
    # Cells of 2 Mpc/h are so small that they do not smooth. After shell crossing, 2LPT departs from linear theory: at
    # z = 0 it is 7 % low for omega_m, sigma_8 = 0.3, 0.8, 25 % low for 0.5, 1.0 and 9 % high for 0.1, 0.6.
    cosmology = Cosmology(0.3, sigma_8)
    linear = linear_density(cosmology, SIDE / 2, GRID, np.random.default_rng(0))
    evolved = box_density(cosmology, displace(linear, SIDE / 2), z) / float(cosmology.growth(z))
    variance, expected = ((smoothed(field, 8, SIDE / 2) ** 2).mean() for field in (evolved, linear))
    assert variance**0.5 == pytest.approx(expected**0.5, rel=0.05)


def test_skewness_matches_perturbation_theory_in_both_orders():
    # S3 = <d^3> / <d^2>^2 in spheres: 34/7 + dln sigma^2 / dln R, and 4 + ... for Zel'dovich. Averaging with the
    # fields of opposite sign cancels the skewness that Gaussian initial fields have by chance.
    cosmology, radius = Cosmology(0.3, 0.3), 16.0
    variances = [linear_moment(cosmology, lambda k, r=r: sphere(r * k) ** 2) for r in (radius / 1.05, radius * 1.05)]
    slope = np.log(variances[1] / variances[0]) / np.log(1.05**2)
    third, squared = np.zeros(2), np.zeros(2)
    for seed in range(3):
        field = linear_density(cosmology, SIDE, GRID, np.random.default_rng(seed))
        for signed in (field, -field):
            box = displace(signed, SIDE)
            for order in (1, 2):
                delta = smoothed(box_density(cosmology, box, 0.0, order), radius)
                third[order - 1] += (delta**3).mean() / 6
                squared[order - 1] += (delta**2).mean() / 6
    np.testing.assert_allclose(third / squared**2, [4 + slope, 34 / 7 + slope], rtol=0.08)


# convergence


# Many coarse boxes are faster than a few fine ones; waves up to 0.39 h/Mpc.
SETTINGS = MapSettings(kind="2lpt", size=64, side_deg=5.0, source_redshifts=(0.5, 1.0), box_mpc=SIDE, box_grid=32)


@cache
def maps(count=48):
    """Maps of independent boxes, [count, 2, 64, 64]."""
    return np.stack([lpt_convergence(COSMOLOGY, SETTINGS, np.random.default_rng(seed)) for seed in range(count)])


def open_spectrum(patches):
    """Return multipoles and mean power [bins, rings] of non-periodic patches [..., bins, size, size]."""
    window = np.outer(*[np.hanning(66)[1:-1]] * 2)
    centred = patches - patches.mean((-2, -1), keepdims=True)
    ell, power = map_power_spectrum(centred * window, SETTINGS.side_rad, bins=10)
    return ell, power.mean(0)


@pytest.mark.parametrize(("channel", "highest"), [(0, 250), (1, 400)])
def test_power_of_the_maps_matches_limber_on_large_scales(channel, highest):
    # The referee uses the same window: 5-degree patches cut from 20-degree Gaussian maps with Limber's spectrum.
    side, rng = 4 * SETTINGS.side_rad, np.random.default_rng(1)
    wide = np.stack([gaussian_convergence(COSMOLOGY, 256, side, rng, SETTINGS.source_redshifts) for _ in range(8)])
    patches = wide.reshape(8, 2, 4, 64, 4, 64).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 2, 64, 64)
    ell, power = open_spectrum(maps())
    ratio = (power / open_spectrum(patches)[1])[channel, ell < highest]
    assert ratio.mean() == pytest.approx(1, abs=0.12)
    np.testing.assert_allclose(ratio, 1, atol=0.25)  # sampling error up to 10 %


def test_planes_of_sources_see_the_same_matter():
    near, far = maps()[:, 0].ravel(), maps()[:, 1].ravel()
    assert 0.5 < np.corrcoef(near, far)[0, 1] < 0.95


def test_the_random_generator_determines_the_map():
    settings = MapSettings(kind="2lpt", size=16, side_deg=2.0, box_mpc=128.0, box_grid=16)
    first, again, other = (lpt_convergence(COSMOLOGY, settings, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.shape == (1, 16, 16)
    assert first.dtype == np.float32
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-4


# bad input


def test_a_box_narrower_than_the_patch_is_rejected():
    settings = MapSettings(kind="2lpt", box_mpc=150.0, box_grid=16)
    message = r"box_mpc=150\.0.* 201\.8 Mpc/h.*omega_m=0\.3\b.*box_mpc.* 202\b"
    with pytest.raises(ValueError, match=message):
        lpt_convergence(COSMOLOGY, settings, np.random.default_rng(0))


def test_a_plan_is_rejected_if_its_widest_patch_exceeds_the_box():
    # pyccl: 5 degrees at redshift 1 are 215.4 Mpc/h for omega_m = 0.2, and 233.8 for 0.1.
    settings, counts = MapSettings(kind="2lpt", box_mpc=230.0), {"train": 1, "test": 0}
    CosmologyPlan(settings=settings, counts=counts, prior={"omega_m": (0.2, 0.5), "sigma_8": (0.6, 1.0)})
    with pytest.raises(ValueError, match=r"box_mpc=230\.0.* 233\.8 Mpc/h.*omega_m=0\.1\b.*box_mpc.* 234\b"):
        CosmologyPlan(settings=settings, counts=counts)
    CosmologyPlan(settings=MapSettings(kind="2lpt"), counts=counts)  # the default box suffices for the default prior


@pytest.mark.parametrize("fields", [{"box_mpc": 0.0}, {"box_grid": 4}, {"box_grid": 17}, {"box_grid": 4096}])
def test_invalid_boxes_are_rejected(fields):
    with pytest.raises(ValueError, match="box_"):
        MapSettings(kind="2lpt", **fields)
