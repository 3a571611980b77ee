"""Metrics of posteriors over cosmological parameters, on Gaussian posteriors with known metrics."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from known_posteriors import CASES, REFERENCES, posteriors

from hrm_hf.cosmology.dataset.rows import MapSet
from hrm_hf.cosmology.evaluation import (
    CosmologyPredictions,
    compare,
    contour_areas,
    evaluate_predictions,
    expected_coverage,
    joint_chi2,
    parameter_metrics,
    prior_moments,
    simulation_based_ranks,
)
from hrm_hf.cosmology.evaluation_run import predict_maps
from hrm_hf.cosmology.plots import plot_calibration, plot_corner, plot_predictions, plot_steps


REFEREES = Path(__file__).parents[1] / "fixtures" / "cosmology"
NOISE_95 = 1.358 / 2000**0.5  # Kolmogorov's 95 % limit for the deviation of 2,000 calibrated maps
PRIOR = {"omega_m": (0.1, 0.5), "sigma_8": (0.6, 1.0)}
COVARIANCE = np.array([[0.03**2, -0.7 * 0.03 * 0.05], [-0.7 * 0.03 * 0.05, 0.05**2]])


def gaussian(width=1.0, bias=0.0, maps=2000, draws=400, seed=0):
    """Posteriors N(mean, C) of two parameters, reported `width` times too wide; the truths are drawn from them."""
    rng = np.random.default_rng(seed)
    factor = np.linalg.cholesky(COVARIANCE)
    mean = np.stack([rng.uniform(*bounds, maps) for bounds in PRIOR.values()], axis=1)
    truth = mean + rng.standard_normal((maps, 2)) @ factor.T
    mean = mean + bias * np.sqrt(np.diag(COVARIANCE))
    samples = mean[:, None] + width * rng.standard_normal((maps, draws, 2)) @ factor.T
    std = np.broadcast_to(width * np.sqrt(np.diag(COVARIANCE)), mean.shape)
    return CosmologyPredictions(["omega_m", "sigma_8"], truth, mean, std, samples)


def test_calibrated_posteriors_pass_every_calibration_test():
    result = evaluate_predictions(gaussian(), PRIOR)
    for found in result["parameters"].values():
        assert abs(found["mean_z2"] - 1) < 0.1
        assert abs(found["coverage_68"] - 0.6827) < 0.03  # three standard errors for 2,000 maps
        assert abs(found["coverage_95"] - 0.9545) < 0.015
        assert found["sbc"]["p_value"] > 0.01
        assert sum(found["sbc"]["histogram"]) == 2000
    assert result["tarp"]["deviation"] < NOISE_95
    assert abs(result["chi2_per_parameter"] - 1) < 0.1


@pytest.mark.parametrize(("width", "z2"), [(0.5, 4.0), (2.0, 0.25)])
def test_wrong_posterior_widths_match_the_analytic_prediction(width, z2):
    predictions = gaussian(width)
    found = parameter_metrics(predictions, "omega_m", PRIOR)
    assert found["mean_z2"] == pytest.approx(z2, rel=0.1)
    # In units of the true standard deviation, the reported interval is +-width.
    assert found["coverage_68"] == pytest.approx(math.erf(width / math.sqrt(2)), abs=0.03)
    assert simulation_based_ranks(predictions, "omega_m")["p_value"] < 1e-6
    assert joint_chi2(predictions) == pytest.approx(z2, rel=0.1)
    tarp = expected_coverage(predictions)
    assert tarp["deviation"] > 2 * NOISE_95
    assert tarp["deviation_interval"][0] < tarp["deviation"] < tarp["deviation_interval"][1] + 0.01


def test_a_bias_is_detected():
    predictions = gaussian(bias=1.0)
    found = parameter_metrics(predictions, "sigma_8", PRIOR)
    assert found["bias"] == pytest.approx(0.05, abs=0.005)
    assert found["mean_z2"] == pytest.approx(2.0, rel=0.1)  # 1 + bias^2
    assert expected_coverage(predictions)["deviation"] > 0.1


def test_accuracy_agrees_with_scikit_learn():
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    predictions = gaussian(maps=300, draws=10)
    found = parameter_metrics(predictions, "omega_m", PRIOR)
    truth, mean = predictions.truth[:, 0], predictions.mean[:, 0]
    assert found["r2"] == pytest.approx(sklearn_metrics.r2_score(truth, mean))
    assert found["rmse"] ** 2 == pytest.approx(sklearn_metrics.mean_squared_error(truth, mean))


def test_the_p_value_of_ranks_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    found = simulation_based_ranks(gaussian(draws=399), "omega_m")  # 400 possible ranks in 16 bins of 25
    reference = stats.chisquare(found["histogram"])
    assert found["chi2"] == pytest.approx(reference.statistic)
    assert found["p_value"] == pytest.approx(reference.pvalue)


def test_bins_with_unequal_rank_counts_do_not_indicate_miscalibration():
    values = [simulation_based_ranks(gaussian(draws=20, seed=seed), "omega_m")["p_value"] for seed in range(20)]
    assert 0.25 < np.mean(values) < 0.75


@pytest.mark.parametrize("case", CASES)
def test_expected_coverage_agrees_with_the_reference_package(case):
    table = json.loads((REFEREES / "tarp.json").read_text())
    truth, draws = posteriors(*CASES[case])
    predictions = CosmologyPredictions(("omega_m", "sigma_8"), truth, draws.mean(1), draws.std(1), draws)
    ours = expected_coverage(predictions, num_references=REFERENCES)
    np.testing.assert_allclose(ours["credibility"], table["levels"])
    # Both curves are means over 20 sets of reference points, with a noise of 0.011 per set. TARP's is also binned.
    np.testing.assert_allclose(ours["expected_coverage"], table["curves"][case], rtol=0, atol=0.02)
    assert (ours["deviation"] > NOISE_95) == (case != "right")


def test_contour_areas_of_gaussians_match_their_ellipses():
    predictions = gaussian(maps=200, draws=1000)
    areas = contour_areas(predictions, ("omega_m", "sigma_8"))
    expected = math.pi * -2 * math.log(1 - 0.6827) * math.sqrt(np.linalg.det(COVARIANCE))
    assert np.median(areas["gaussian"]) == pytest.approx(expected, rel=0.02)
    assert np.median(areas["density"]) == pytest.approx(expected, rel=0.05)


def test_the_contour_area_of_a_uniform_box_is_a_fraction_of_the_box():
    rng = np.random.default_rng(0)
    samples = rng.uniform(0, 1, (20, 4000, 2))
    predictions = CosmologyPredictions(
        ["omega_m", "s_8"], samples[:, 0], samples.mean(axis=1), samples.std(axis=1), samples
    )
    areas = contour_areas(predictions, ("omega_m", "s_8"))
    assert np.median(areas["density"]) == pytest.approx(0.6827, rel=0.12)
    assert np.median(areas["gaussian"]) == pytest.approx(0.601, rel=0.03)  # 2.2957 pi / 12


def test_contour_areas_scale_with_squared_width_relative_to_a_baseline():
    metrics, baseline = (evaluate_predictions(gaussian(width, maps=300), PRIOR) for width in (1.0, 2.0))
    found = compare(metrics, baseline)
    assert found["contour_area_ratio"]["omega_m,sigma_8"]["gaussian"] == pytest.approx(0.25, rel=0.02)
    assert found["contour_area_ratio"]["omega_m,sigma_8"]["density"] == pytest.approx(0.25, rel=0.05)
    assert found["rmse_ratio"]["omega_m"] == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"baseline.*\[\].*omega_m"):
        compare(metrics, {"parameters": {}})


def test_prior_moments_of_s8_match_those_of_draws():
    rng = np.random.default_rng(0)
    omega_m, sigma_8 = (rng.uniform(*bounds, 400_000) for bounds in PRIOR.values())
    s_8 = sigma_8 * np.sqrt(omega_m / 0.3)
    mean, std = prior_moments("s_8", PRIOR)
    assert mean == pytest.approx(s_8.mean(), rel=2e-3)
    assert std == pytest.approx(s_8.std(), rel=5e-3)
    with pytest.raises(ValueError, match=r"prior.*'sigma_8'.*\bh\b"):
        prior_moments("h", PRIOR)


def test_derived_s8_is_evaluated_but_not_counted_as_a_free_parameter():
    base = gaussian(maps=300)

    def with_s8(values):
        return np.concatenate((values, values[..., 1:] * np.sqrt(values[..., :1] / 0.3)), axis=-1)

    samples = with_s8(np.clip(base.samples, 0.01, None))
    predictions = CosmologyPredictions(
        ["omega_m", "sigma_8", "s_8"], with_s8(np.clip(base.truth, 0.01, None)), samples.mean(axis=1),
        samples.std(axis=1), samples, np.full(300, 2),
    )  # fmt: skip
    result = evaluate_predictions(predictions, PRIOR)
    assert set(result["parameters"]) == {"omega_m", "sigma_8", "s_8"}
    assert result["tarp"]["names"] == ["omega_m", "sigma_8"]
    assert set(result["contour_area_68"]) == {"omega_m,s_8", "omega_m,sigma_8"}
    assert result["steps_histogram"] == [0, 300]
    assert json.loads(json.dumps(result)) == result


@pytest.mark.parametrize(
    ("change", "message"),
    [({"std": np.zeros((4, 1))}, r"std.*map 0\b"), ({"mean": np.full((4, 1), np.nan)}, r"mean.*\b4\b.*finite")],
)
def test_invalid_predictions_are_rejected_with_the_reason(change, message):
    good = {
        "truth": np.ones((4, 1)), "mean": np.ones((4, 1)), "std": np.ones((4, 1)), "samples": np.ones((4, 5, 1)),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        CosmologyPredictions(["omega_m"], **good | change)


def test_plots_are_drawn_for_one_and_three_parameters(tmp_path):
    base = gaussian(maps=40, draws=120)
    alone = CosmologyPredictions(
        ["omega_m"], base.truth[:, :1], base.mean[:, :1], base.std[:, :1], base.samples[..., :1]
    )
    for name, predictions in {"one": alone, "two": base}.items():
        metrics = evaluate_predictions(predictions, PRIOR)
        files = [
            plot_corner(predictions, tmp_path / f"{name}_corner.png"),
            plot_predictions(predictions, tmp_path / f"{name}_predictions.png", metrics),
            plot_calibration(predictions, tmp_path / f"{name}_calibration.png", metrics, "title"),
        ]
        assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    per_step = {"rmse": {"omega_m": [0.2, 0.1]}}
    adaptive = {"average_steps": 1.5, "rmse": {"omega_m": 0.15}, "steps_histogram": [2, 2]}
    assert plot_steps(per_step, tmp_path / "a.png").exists()
    assert plot_steps(per_step | {"adaptive": adaptive}, tmp_path / "b.png").exists()


def tiny_model():
    from hrm_hf.models.configuration_hrm_cosmo import HrmCosmoConfig
    from hrm_hf.models.modeling_hrm_cosmo import HrmCosmoForRegression

    torch.manual_seed(0)
    bounds = [list(pair) for pair in PRIOR.values()]
    return HrmCosmoForRegression(HrmCosmoConfig.from_preset("test", prior_bounds=bounds))


def scaled(maps, mask=None):
    return {"pixel_values": torch.as_tensor(np.asarray(maps, dtype=np.float32))}


def test_predictions_match_the_forward_pass_for_any_batch_size():
    rng = np.random.default_rng(0)
    model, maps = tiny_model(), rng.standard_normal((7, 1, 16, 16)).astype(np.float32)
    labels = {name: rng.uniform(*bounds, 7) for name, bounds in PRIOR.items()}
    labels["s_8"] = labels["sigma_8"] * np.sqrt(labels["omega_m"] / 0.3)
    answers = predict_maps(model, scaled, MapSet(maps, labels), num_samples=50, batch_size=3)
    predictions = answers.predictions
    assert model.training and answers.maps_per_second > 0
    whole = model.eval()(torch.as_tensor(maps))
    np.testing.assert_allclose(predictions.mean, whole.reported_means.detach().numpy(), atol=1e-5)
    assert predictions.names == ("omega_m", "sigma_8", "s_8") and predictions.samples.shape == (7, 50, 3)
    last = {name: curve[-1] for name, curve in answers.rmse_per_step().items()}
    for name, rmse in last.items():
        assert rmse == pytest.approx(parameter_metrics(predictions, name, PRIOR)["rmse"])
    with pytest.raises(ValueError, match=r"'sigma_8'\].* s_8"):
        predict_maps(model, scaled, MapSet(maps, {name: labels[name] for name in PRIOR}))
