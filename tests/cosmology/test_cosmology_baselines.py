"""Regressions on map summaries: summaries match direct computation, and fits work on fields of known spectra."""

import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from hrm_hf.cosmology.baselines import (
    HISTOGRAM_EDGES,
    METHODS,
    SCALES,
    pixel_scales,
    run_baseline,
    shape_features,
    spectrum_features,
)
from hrm_hf.cosmology.dataset.rows import MapSet
from hrm_hf.cosmology.evaluation import evaluate_predictions, summary
from hrm_hf.cosmology.simulation.fields import _correlated_fields, map_power_spectrum, multipole_grid


stats = pytest.importorskip("scipy.stats")
pytest.importorskip("sklearn")

SIZE = 16
PRIOR = {"omega_m": (0.1, 0.5), "sigma_8": (0.6, 1.0)}


def fields(count, seed=0, channels=1):
    """Gaussian fields whose amplitude is sigma_8 and whose slope is omega_m."""
    rng = np.random.default_rng(seed)
    omega_m, sigma_8 = (rng.uniform(*bounds, count) for bounds in PRIOR.values())
    maps = np.empty((count, channels, SIZE, SIZE), np.float32)
    for index in range(count):
        slope, amplitude = 1 + 4 * omega_m[index], sigma_8[index]

        def power(ell, slope=slope, amplitude=amplitude):
            return amplitude**2 * (ell / 10) ** -slope

        spectrum = power(np.maximum(multipole_grid(SIZE, 1.0), 1))[None, None]
        maps[index] = [_correlated_fields(spectrum, SIZE, 1.0, rng)[0] for _ in range(channels)]
    labels = {"omega_m": omega_m, "sigma_8": sigma_8, "s_8": sigma_8 * np.sqrt(omega_m / 0.3)}
    return MapSet(maps, labels)


def with_masks(maps, masks):
    return MapSet(maps.maps, maps.labels, masks)


def test_the_spectrum_of_one_channel_is_the_logarithm_of_its_power():
    maps = fields(3)
    _, power = map_power_spectrum(maps.maps[:, 0].astype(np.float64), 1.0, round(13 * np.log(8) / np.log(32)))
    np.testing.assert_allclose(spectrum_features(maps), np.log10(power))


def test_coherence_is_one_for_equal_and_minus_one_for_opposite_channels():
    maps = fields(2).maps
    equal, opposite = (MapSet(np.concatenate((maps, sign * maps), axis=1), {}) for sign in (1, -1))
    bins = spectrum_features(MapSet(maps, {})).shape[1]
    np.testing.assert_allclose(spectrum_features(equal)[:, 2 * bins :], 1, rtol=1e-6)
    np.testing.assert_allclose(spectrum_features(opposite)[:, 2 * bins :], -1, rtol=1e-6)


def test_masks_and_masked_pixels_do_not_change_the_power_of_white_noise():
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((200, 1, 32, 32))
    masks = rng.random((200, 32, 32)) < 0.7
    whole = spectrum_features(MapSet(noise, {})).mean(axis=0)
    masked = spectrum_features(MapSet(noise, {}, masks))
    np.testing.assert_allclose(masked.mean(axis=0)[2:], whole[2:], atol=0.05)
    hidden = np.where(masks[:, None], noise, 1e6)
    np.testing.assert_allclose(spectrum_features(MapSet(hidden, {}, masks)), masked, atol=1e-6)


def test_moments_and_histograms_agree_with_scipy():
    maps = fields(2)
    unit = pixel_scales(maps)
    assert unit[0, 0] == pytest.approx(maps.maps.astype(np.float64).std())
    found = shape_features(maps, unit).reshape(2, len(SCALES), -1)
    blocks = maps.maps[1, 0].astype(np.float64).reshape(SIZE // 2, 2, SIZE // 2, 2)
    pixels = blocks.mean(axis=(1, 3)).ravel() / unit[1, 0]
    expected = [pixels.mean(), np.log(pixels.std()), stats.skew(pixels), stats.kurtosis(pixels)]
    np.testing.assert_allclose(found[1, 1, :4], expected, atol=1e-9)
    counts, _ = np.histogram(pixels, [-np.inf, *HISTOGRAM_EDGES, np.inf])
    np.testing.assert_allclose(found[1, 1, 4:], counts / len(pixels))


def test_moments_and_histograms_ignore_masked_pixels():
    maps = fields(2)
    masks = np.ones((2, SIZE, SIZE), bool)
    masks[:, :8] = False  # covers whole blocks at every smoothing scale
    unit = pixel_scales(maps)
    seen = shape_features(with_masks(maps, masks), unit)
    other = MapSet(np.where(masks[:, None], maps.maps, 1e6).astype(np.float32), {}, masks)
    np.testing.assert_allclose(shape_features(other, unit), seen)
    half = maps.maps[0, 0, 8:].astype(np.float64).ravel() / unit[0, 0]
    assert seen[0, 0] == pytest.approx(half.mean())


@pytest.mark.parametrize("method", METHODS)
def test_every_baseline_learns_amplitude_and_slope_with_calibrated_errors(method):
    train, test = fields(400), fields(300, seed=1)
    predictions = run_baseline(method, train, test, num_samples=200)
    result = evaluate_predictions(predictions, PRIOR)
    for name in PRIOR:
        found = result["parameters"][name]
        assert found["rmse_over_prior_std"] < 0.75
        assert 0.7 < found["mean_z2"] < 1.4
        assert abs(found["coverage_68"] - 0.68) < 0.1
    # Draws from the posterior have the same correlation of amplitude and slope as the errors.
    errors = predictions.mean - predictions.truth
    draws = predictions.samples - predictions.mean[:, None]
    assert np.corrcoef(draws.reshape(-1, 3).T)[0, 1] == pytest.approx(np.corrcoef(errors.T)[0, 1], abs=0.2)
    assert all("rmse" in summary(result)[name] for name in PRIOR)


def test_baselines_of_masked_channels_are_repeatable():
    train, test = fields(40, channels=2), fields(20, seed=1, channels=2)
    rng = np.random.default_rng(2)
    masks = [rng.random((len(maps.maps), SIZE, SIZE)) < 0.8 for maps in (train, test)]
    masks[1][0] = False  # with a single observed pixel, features are still finite
    masks[1][0, 0, 0] = True
    first, second = (
        run_baseline("spectrum-pdf-ridge", with_masks(train, masks[0]), with_masks(test, masks[1]), num_samples=50)
        for _ in range(2)
    )
    np.testing.assert_array_equal(first.samples, second.samples)


def test_missing_scikit_learn_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"\.\[cosmology\]"):
        run_baseline("spectrum-ridge", fields(4), fields(4))


# The command line


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from hrm_hf.cosmology.dataset.build import build_cosmology_dataset
    from hrm_hf.cosmology.simulation.maps import MapSettings

    folders = {}
    for kind in ("lognormal", "gaussian"):
        folders[kind] = str(tmp_path_factory.mktemp(kind) / "data")
        build_cosmology_dataset(MapSettings(kind=kind, size=SIZE), folders[kind], 60, 30)
    return folders


@pytest.fixture(scope="module")
def model(data, tmp_path_factory):
    import hrm_hf  # noqa: F401 - registers the architectures
    from hrm_hf.cosmology.dataset.rows import load_cosmology_info
    from hrm_hf.models.configuration_hrm_cosmo import HrmCosmoConfig
    from hrm_hf.models.feature_extraction_cosmo import CosmoMapFeatureExtractor
    from hrm_hf.models.modeling_hrm_cosmo import HrmCosmoForRegression

    config = HrmCosmoConfig.from_preset("test", **load_cosmology_info(data["lognormal"]).config_fields())
    folder = tmp_path_factory.mktemp("model")
    HrmCosmoForRegression(config).save_pretrained(folder)
    CosmoMapFeatureExtractor.from_config(config).save_pretrained(folder)
    return str(folder)


def run(*arguments):
    from hrm_hf.cli.evaluate import app

    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_model_is_evaluated_against_a_baseline_and_on_another_generator(data, model, tmp_path):
    out, gp = tmp_path / "model", tmp_path / "ridge"
    found = run("cosmo-baseline", "--data", data["lognormal"], "--method", "spectrum-ridge", "--out", gp)
    assert found.exit_code == 0, found.output
    found = run(
        "cosmo", model, "--data", data["lognormal"], "--steps", "adaptive", "--baseline", gp,
        "--shift-data", data["gaussian"], "--num-samples", 100, "--out", out, "--device", "cpu", "--json",
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    result = json.loads((out / "results.json").read_text())
    assert json.loads(found.stdout.splitlines()[-1])["metrics"] == result["metrics"]
    assert set(result["baseline"]["rmse_ratio"]) == {"omega_m", "sigma_8", "s_8"}
    assert result["shift"]["metrics"]["count"] == 30
    assert len(result["per_step"]["rmse"]["s_8"]) == 2
    assert 0 <= result["per_step"]["adaptive"]["segments_saved"] <= 0.5
    for name in ("corner", "predictions", "calibration", "steps"):
        assert (out / f"{name}.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("./nowhere", "--data", "DATA"), "./nowhere"),
        (("MODEL", "--data", "DATA", "--baseline", "nowhere.json"), "nowhere.json"),
        (("MODEL", "--data", "DATA", "--limit", "1"), "--limit"),
    ],
)
def test_wrong_arguments_raise_a_usage_error(data, model, arguments, message):
    places = {"DATA": data["lognormal"], "MODEL": model}
    found = run("cosmo", *(places.get(argument, argument) for argument in arguments))
    assert found.exit_code == 2 and message in " ".join(found.output.replace("│", " ").split())


def test_a_shift_test_on_another_pixel_size_is_rejected(data, model, tmp_path):
    from hrm_hf.cosmology.dataset.build import build_cosmology_dataset
    from hrm_hf.cosmology.simulation.maps import MapSettings

    other = str(tmp_path / "data")
    settings = MapSettings(kind="gaussian", size=SIZE, side_deg=10.0)
    build_cosmology_dataset(settings, other, 10, 10)
    found = run("cosmo", model, "--data", data["lognormal"], "--shift-data", other, "--num-samples", 100)
    assert isinstance(found.exception, ValueError) and "side_deg=10.0" in str(found.exception)
