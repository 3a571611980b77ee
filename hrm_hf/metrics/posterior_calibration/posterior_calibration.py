"""Calibration of posterior draws against known true values, for the `evaluate` library.

To load it offline, pass the path of this folder: evaluate.load(".../hrm_hf/metrics/posterior_calibration").
"""

# One import per line, because `evaluate` scans imports line by line.
import datasets
import evaluate
import numpy as np

from hrm_hf.cosmology.evaluation import CosmologyPredictions, expected_coverage, parameter_metrics


_DESCRIPTION = "RMSE, mean z^2, coverage of central intervals, and TARP's expected coverage of posterior draws."

_KWARGS_DESCRIPTION = """
Args:
    predictions: S posterior draws of R parameters for each of N cases, [N, S, R].
    references: true parameters, [N, R].
    names: names of the R parameters; parameter_0, parameter_1, ... by default.
    prior: bounds of each parameter, {name: (low, high)}; defaults to the range of the true values.

Returns:
    NAME_rmse, NAME_mean_z2 (1 if calibrated), NAME_coverage_68, NAME_coverage_95 for each parameter;
    tarp_deviation: largest distance between expected coverage and credibility (0 if calibrated); count.
"""

METRICS = ("rmse", "mean_z2", "coverage_68", "coverage_95")


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class PosteriorCalibration(evaluate.Metric):
    """Metric that compares posterior draws with known true values."""

    def _info(self):
        values = datasets.Sequence(datasets.Value("float64"))
        features = datasets.Features({"predictions": datasets.Sequence(values), "references": values})
        return evaluate.MetricInfo(_DESCRIPTION, "", features, _KWARGS_DESCRIPTION)

    def _compute(self, predictions, references, names=None, prior=None):
        draws, truth = np.asarray(predictions, dtype=float), np.asarray(references, dtype=float)
        if draws.ndim != 3 or draws.shape[1] < 2 or draws.shape[::2] != truth.shape:
            shapes = f"predictions have shape {list(draws.shape)}, references {list(truth.shape)}"
            raise ValueError(f"{shapes}; expected [N, S, R] and [N, R] with N >= 1 and S >= 2")
        names = names or [f"parameter_{i}" for i in range(truth.shape[-1])]
        posteriors = CosmologyPredictions(names, truth, draws.mean(axis=1), draws.std(axis=1, ddof=1), draws)
        if prior is None:
            prior = {name: (low, high) for name, low, high in zip(names, truth.min(axis=0), truth.max(axis=0))}
        metrics = {}
        for name in names:
            found = parameter_metrics(posteriors, name, prior)
            metrics |= {f"{name}_{metric}": found[metric] for metric in METRICS}
        return {**metrics, "tarp_deviation": expected_coverage(posteriors)["deviation"], "count": len(truth)}
