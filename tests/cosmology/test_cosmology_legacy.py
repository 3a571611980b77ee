"""Generators of the original: their maps, and how well a ridge regression predicts omega_m from power spectra."""

import numpy as np
import pytest

from hrm_hf.cosmology.simulation import maps as cosmology_maps
from hrm_hf.cosmology.simulation.fields import map_power_spectrum
from hrm_hf.cosmology.simulation.maps import displacements, legacy_2lpt, legacy_des, legacy_synthetic


GENERATORS = {"synthetic": legacy_synthetic, "des": legacy_des, "2lpt": legacy_2lpt}
each = pytest.mark.parametrize("generate", GENERATORS.values(), ids=GENERATORS)


def draw(generate, omega_m=0.3, size=64, seed=0):
    return generate(omega_m, size, np.random.default_rng(seed))


@each
@pytest.mark.parametrize("size", [32, 65])
def test_maps_are_gray_values_of_the_requested_size(generate, size):
    grey = draw(generate, size=size)
    assert grey.shape == (1, size, size) and grey.dtype == np.float32
    assert 0 <= grey.min() < grey.max() <= 1


def test_the_amplitude_of_synthetic_maps_does_not_depend_on_omega_m():
    # The contrast is 0.15 by construction for any omega_m; the discs reduce it slightly.
    contrast = [draw(legacy_synthetic, omega_m, 256).std() for omega_m in (0.1, 0.3, 0.5)]
    np.testing.assert_allclose(contrast, 0.15, atol=0.01)


@pytest.mark.parametrize("size, sigma", [(64, 0.7), (64, 3.0), (32, 10.0)])
def test_the_blur_matches_scipy_on_a_periodic_map(size, sigma):
    ndimage = pytest.importorskip("scipy.ndimage")
    field = np.random.default_rng(0).normal(size=(size, size))
    expected = ndimage.gaussian_filter(field, sigma, mode="wrap")
    np.testing.assert_allclose(cosmology_maps._blur(field, sigma), expected, atol=1e-12)


@pytest.mark.parametrize("omega_m, displacement", [(0.1, 11.7), (0.3, 6.5), (0.5, 4.7)])
def test_particle_displacements_match_the_original(omega_m, displacement):
    # Measured with the original code: one map per omega_m, all with the same seed. Single maps scatter by 10 to 15 %.
    squares = [
        sum((part**2).mean() for part in displacements(omega_m, 256, np.random.default_rng(s))) for s in range(6)
    ]
    np.testing.assert_allclose(np.sqrt(np.mean(squares)), displacement, rtol=0.2)


def _row_wave_numbers(size):
    return 2 * np.pi * np.fft.fftfreq(size)[:, None]


def test_crossed_waves_have_the_second_order_of_their_product(monkeypatch):
    # delta = A (cos x + cos y): phi_xx phi_yy - phi_xy^2 = A^2 cos x cos y, and delta is 0.8 in rms, so A = 0.8.
    size, omega_m = 64, 0.3
    wave = np.cos(2 * np.pi * np.arange(size) / size)
    monkeypatch.setattr(cosmology_maps, "_matter_field", lambda *_: wave[:, None] + wave)
    rows, columns = displacements(omega_m, size, np.random.default_rng(0))
    along = _row_wave_numbers(size)
    divergence = np.fft.ifft(1j * along * np.fft.fft(rows, axis=0), axis=0).real
    divergence += np.fft.ifft(1j * along.T * np.fft.fft(columns, axis=1), axis=1).real
    second = -3 / 7 * omega_m ** (-1 / 143) * 0.8**2 * wave[:, None] * wave
    np.testing.assert_allclose(divergence, -0.8 * (wave[:, None] + wave) + second, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name, rmse", [("synthetic", 0.0344), ("des", 0.0233), ("2lpt", 0.0477)])
def test_spectrum_ridge_predicts_omega_m_as_well_as_on_original_maps(name, rmse):
    # The expected errors are from 1,500 training maps of the original code at 256 pixels. Here, 450 maps are for
    # training and 150 for testing (sampling error about 6 %). For "des", an uncut blur kernel would give 0.069.
    pytest.importorskip("sklearn")
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    omega_m = np.random.default_rng(0).uniform(0.1, 0.5, 600)
    spectra = [
        np.log(map_power_spectrum(draw(GENERATORS[name], value, 256, seed)[0], 1.0, 24)[1])
        for seed, value in enumerate(omega_m)
    ]
    ridge = make_pipeline(StandardScaler(), RidgeCV(np.geomspace(1e-4, 10, 11))).fit(spectra[:450], omega_m[:450])
    error = np.sqrt(np.mean((ridge.predict(spectra[450:]) - omega_m[450:]) ** 2))
    print(name, error)
    assert error == pytest.approx(rmse, rel=0.2)
