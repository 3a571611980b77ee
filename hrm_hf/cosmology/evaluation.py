"""Metrics of any model's posteriors over cosmological parameters and mass maps, in numpy.

Errors of posterior means are also reported relative to the prior's standard deviation, because R^2 alone hides that a
parameter is unconstrained. Calibration is measured per parameter by coverage and simulation-based ranks, and jointly
for the free parameters by expected coverage with random points (TARP).

Shear does not determine the mean of a map, so it is subtracted. Shapes: N maps of P planes, S pixels per side.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .simulation.fields import map_power_spectrum


Prior = Mapping[str, tuple[float, float]]  # lower and upper bounds of the flat prior on each parameter

PLANES = (("omega_m", "s_8"), ("omega_m", "sigma_8"))
LEVELS = {"coverage_68": 0.6827, "coverage_95": 0.9545}
CARD_METRICS = ("rmse", "rmse_over_prior_std", "r2", "bias", "mean_z2", "coverage_68", "coverage_95")
SBC_BINS = 16
TARP_LEVELS = 50
# A pair of standard normal variables lies in a disc of squared radius -2 ln(1 - p) with probability p.
RADIUS_68 = -2 * np.log(1 - LEVELS["coverage_68"])
PEAK_HEIGHTS = (1.0, 2.0, 3.0, 4.0, 5.0)  # minimum heights of peaks, in units of the true maps' standard deviation
WIDTHS = {"coverage_68": 1.0, "coverage_95": 2.0}  # half-widths of pixel intervals, in standard deviations
RESAMPLES = 1000


@dataclass(frozen=True)
class CosmologyPredictions:
    """Posteriors of N maps over R named parameters, in physical units.

    Args:
        truth: [N, R]. mean, std: mean and standard deviation of each posterior, [N, R].
        samples: S draws from each posterior, [N, S, R].
        steps: number of segments that a recurrent model used on each map, [N].
    """

    names: tuple[str, ...]
    truth: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    samples: np.ndarray
    steps: np.ndarray | None = None

    def __post_init__(self):
        object.__setattr__(self, "names", tuple(self.names))
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is not None:
                object.__setattr__(self, field.name, np.asarray(value, dtype=np.float64))
        for name in ("truth", "mean", "std", "samples"):
            bad = np.argwhere(~np.isfinite(getattr(self, name)))
            if len(bad):
                raise ValueError(f"{name}: {len(bad)} values are NaN or infinite, the first for map {bad[0][0]}")
        if (self.std <= 0).any():
            raise ValueError(f"std: must be > 0; map {np.argwhere(self.std <= 0)[0][0]} has values <= 0")

    @property
    def free_names(self) -> list[str]:
        """Names of the parameters, without S_8 if omega_m and sigma_8 determine it."""
        derived = {"omega_m", "sigma_8"} <= set(self.names)
        return [name for name in self.names if not (derived and name == "s_8")]

    def columns(self, names) -> list[int]:
        return [self.names.index(name) for name in names]


def evaluate_predictions(predictions: CosmologyPredictions, prior: Prior, seed: int = 0) -> dict[str, Any]:
    """Compute all metrics of a set of posteriors as JSON-serializable values.

    Args:
        prior: bounds of the free parameters; those of omega_m and sigma_8 determine the moments of s_8.
        seed: seed of TARP's reference points and bootstrap.

    Returns:
        count and num_samples; parameters: `parameter_metrics` and `simulation_based_ranks` (sbc) of each parameter;
        tarp (`expected_coverage`) and chi2_per_parameter (`joint_chi2`), both over the free parameters;
        contour_area_68: median `contour_areas` for each plane; average_steps and steps_histogram, if there are steps.
    """
    result: dict[str, Any] = {
        "count": len(predictions.truth),
        "num_samples": predictions.samples.shape[1],
        "parameters": {
            name: parameter_metrics(predictions, name, prior) | {"sbc": simulation_based_ranks(predictions, name)}
            for name in predictions.names
        },
        "tarp": expected_coverage(predictions, seed=seed),
        "contour_area_68": {
            ",".join(plane): {how: float(np.median(areas)) for how, areas in contour_areas(predictions, plane).items()}
            for plane in PLANES
            if set(plane) <= set(predictions.names)
        },
        "chi2_per_parameter": joint_chi2(predictions),
    }
    if predictions.steps is not None:
        steps = predictions.steps.astype(int)
        result |= {"average_steps": float(steps.mean()), "steps_histogram": np.bincount(steps)[1:].tolist()}
    return result


def posterior_card_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """Select the metrics of `evaluate_predictions` that go into a model card."""
    values = {f"{name}_{key}": found[key] for name, found in metrics["parameters"].items() for key in CARD_METRICS}
    return values | {"tarp_deviation": metrics["tarp"]["deviation"]}


def summary(metrics: dict[str, Any]) -> dict[str, str]:
    """Format one line for each parameter and each joint metric."""
    lines = {
        name: (
            f"rmse {found['rmse']:.4f} ± {found['rmse_standard_error']:.4f} "
            f"({found['rmse_over_prior_std']:.3f} of the prior's std), R2 {found['r2']:.3f}, "
            f"bias {found['bias']:+.4f}, mean z2 {found['mean_z2']:.3f}, "
            f"coverage {found['coverage_68']:.3f} and {found['coverage_95']:.3f}, "
            f"ranks p {found['sbc']['p_value']:.2g}"
        )
        for name, found in metrics["parameters"].items()
    }
    tarp = metrics["tarp"]
    low, high = tarp["deviation_interval"]
    lines["tarp deviation"] = f"{tarp['deviation']:.3f} ({low:.3f} to {high:.3f})"
    lines["chi2 per parameter"] = f"{metrics['chi2_per_parameter']:.3f}"
    for plane, areas in metrics["contour_area_68"].items():
        lines[f"68 % area of {plane}"] = f"{areas['density']:.5f}, as a Gaussian {areas['gaussian']:.5f}"
    if "average_steps" in metrics:
        lines["average steps"] = f"{metrics['average_steps']:.2f}"
    if "map_distance" in metrics:
        found = metrics["map_distance"]
        lines["not like the training maps"] = (
            f"{found['share_beyond']:.1%} of maps; median distance {found['median']:.2f}, limit {found['limit']:.2f}"
        )
    return lines


def prior_moments(name: str, prior: Prior) -> tuple[float, float]:
    """Return the mean and standard deviation of a parameter, or of S_8, under a flat prior."""
    if name == "s_8" and name not in prior and {"omega_m", "sigma_8"} <= set(prior):
        (low, high), amplitude = prior["omega_m"], prior_moments("sigma_8", prior)
        root = (high**1.5 - low**1.5) / (1.5 * (high - low))  # E[sqrt(omega_m)]
        mean = amplitude[0] * root / np.sqrt(0.3)
        square = (amplitude[0] ** 2 + amplitude[1] ** 2) * (low + high) / 2 / 0.3
        return float(mean), float(np.sqrt(square - mean**2))
    if name not in prior:
        raise ValueError(f"prior has bounds for {sorted(prior)} but not for {name}; add bounds for {name}")
    low, high = prior[name]
    if not low < high:
        raise ValueError(f"prior of {name}={low},{high}: the lower bound must be below the upper bound")
    return (low + high) / 2, float((high - low) / np.sqrt(12))


def parameter_metrics(predictions: CosmologyPredictions, name: str, prior: Prior) -> dict[str, float]:
    """Compute the accuracy and calibration of the posteriors of one parameter.

    Returns:
        rmse, rmse_standard_error (over maps), and rmse_over_prior_std, which is 1 if nothing was learned;
        r2: 1 - mse / variance of the truth, or 0 if the truth does not vary;
        bias: mean of prediction minus truth; mean_z2: mean of ((truth - mean) / std)^2, 1 if calibrated;
        coverage_68, coverage_95: fraction of truths inside the central 68.27% and 95.45% intervals of the draws.
    """
    column = predictions.names.index(name)
    truth, std = predictions.truth[:, column], predictions.std[:, column]
    error = predictions.mean[:, column] - truth
    scale = prior_moments(name, prior)[1]
    mse, rmse = np.mean(error**2), np.sqrt(np.mean(error**2))
    coverage = central_coverage(predictions, name, np.array(list(LEVELS.values())))
    values = {
        "rmse": rmse,
        "rmse_standard_error": np.std(error**2) / np.sqrt(len(error)) / (2 * rmse) if rmse else 0.0,
        "rmse_over_prior_std": rmse / scale,
        "r2": 1 - mse / np.var(truth) if np.var(truth) else 0.0,
        "bias": error.mean(),
        "mean_z2": np.mean((error / std) ** 2),
    }
    return {key: float(value) for key, value in (values | dict(zip(LEVELS, coverage))).items()}


def central_coverage(predictions: CosmologyPredictions, name: str, probabilities: np.ndarray) -> np.ndarray:
    """Return the fraction of truths inside the central credible interval, for each probability."""
    column = predictions.names.index(name)
    samples, truth = predictions.samples[:, :, column], predictions.truth[:, column]
    low, high = (np.quantile(samples, ends, axis=1) for ends in ((1 - probabilities) / 2, (1 + probabilities) / 2))
    return ((low <= truth) & (truth <= high)).mean(axis=1)


def simulation_based_ranks(predictions: CosmologyPredictions, name: str, num_bins: int = SBC_BINS) -> dict[str, Any]:
    """Rank each true value among its draws (simulation-based calibration; Talts et al. 2018, arXiv 1804.06788).

    Returns the histogram [num_bins] of ranks 0..S, its chi2 against a uniform distribution (calibrated) and p_value.
    """
    import torch

    column = predictions.names.index(name)
    samples, truth = predictions.samples[:, :, column], predictions.truth[:, column]
    num_ranks = samples.shape[1] + 1
    num_bins = min(num_bins, num_ranks)
    bin_of_rank = np.arange(num_ranks) * num_bins // num_ranks
    histogram = np.bincount(bin_of_rank[(samples < truth[:, None]).sum(axis=1)], minlength=num_bins)
    expected = np.bincount(bin_of_rank) * len(truth) / num_ranks
    chi2 = float(((histogram - expected) ** 2 / expected).sum())
    half = torch.tensor([(num_bins - 1) / 2, chi2 / 2], dtype=torch.float64)
    p_value = float(torch.special.gammaincc(half[0], half[1]))
    return {"histogram": histogram.tolist(), "chi2": chi2, "p_value": p_value}


def expected_coverage(
    predictions: CosmologyPredictions, *, num_references: int = 20, num_bootstrap: int = 100, seed: int = 0
) -> dict[str, Any]:
    """Compute TARP, the expected coverage of balls around random points (arXiv 2302.03026).

    A posterior's credibility at a reference point is the fraction of draws closer to it than the truth; credibilities
    of calibrated posteriors are uniform. Parameters are scaled to [0, 1] over the range of the truths, and the
    points are uniform there. Unlike algorithm 2 of the paper, we average over several points per map to reduce noise.

    Returns:
        names: the free parameters; credibility: TARP_LEVELS + 1 levels from 0 to 1;
        expected_coverage: one value per level; band: its 95% interval ([low, high]) under a bootstrap over maps;
        deviation: the largest |expected coverage - credibility|; deviation_interval: its 95% bootstrap interval.
    """
    names = predictions.free_names
    columns = predictions.columns(names)
    truth, samples = predictions.truth[:, columns], predictions.samples[:, :, columns]
    low, high = truth.min(axis=0), truth.max(axis=0)
    width = np.where(high > low, high - low, 1.0)
    truth, samples = (truth - low) / width, (samples - low) / width
    rng = np.random.default_rng(seed)
    levels = np.linspace(0, 1, TARP_LEVELS + 1)
    below = np.zeros((len(truth), len(levels)))
    for _ in range(num_references):
        reference = rng.uniform(size=truth.shape)
        distance = np.linalg.norm(truth - reference, axis=1)
        share = (np.linalg.norm(samples - reference[:, None], axis=2) < distance[:, None]).mean(axis=1)
        # Ties count half, so that a small number of draws does not bias the result.
        below += (share[:, None] < levels) / 2 + (share[:, None] <= levels) / 2
    below /= num_references
    below[:, [0, -1]] = 0, 1
    curve = below.mean(axis=0)
    curves = np.stack([below[rng.integers(len(below), size=len(below))].mean(axis=0) for _ in range(num_bootstrap)])
    deviations = np.abs(curves - levels).max(axis=1)
    return {
        "names": names,
        "credibility": levels.tolist(),
        "expected_coverage": curve.tolist(),
        "band": np.quantile(curves, [0.025, 0.975], axis=0).tolist(),
        "deviation": float(np.abs(curve - levels).max()),
        "deviation_interval": np.quantile(deviations, [0.025, 0.975]).tolist(),
    }


def joint_chi2(predictions: CosmologyPredictions) -> float:
    """Return the mean of (truth - mean)^T C^-1 (truth - mean) per free parameter, where C is the covariance."""
    columns = predictions.columns(predictions.free_names)
    covariance = covariances(predictions.samples[:, :, columns])
    error = predictions.truth[:, columns] - predictions.samples[:, :, columns].mean(axis=1)
    # Use the pseudo-inverse: C is singular if the edge of the prior squeezes the draws onto a line.
    chi2 = np.einsum("ni,nij,nj->n", error, np.linalg.pinv(covariance, hermitian=True), error)
    return float(chi2.mean() / len(columns))


def contour_areas(predictions: CosmologyPredictions, plane: tuple[str, str]) -> dict[str, np.ndarray]:
    """Measure the area that contains 68.27% of each posterior in a plane of two parameters.

    Returns:
        gaussian [N]: pi (-2 ln(1 - 0.6827)) sqrt(det C), where C is the covariance of the draws;
        density [N]: area of the smallest such region; below the Gaussian area if a posterior is curved or truncated.
    """
    samples = predictions.samples[:, :, predictions.columns(plane)]
    covariance = covariances(samples)
    root = np.sqrt(np.clip(np.linalg.det(covariance), 0, None))
    areas = np.zeros(len(root))
    for row in np.flatnonzero(root > 0):
        _, density, (level,), cell = smoothed_density(samples[row], covariance[row], (LEVELS["coverage_68"],))
        areas[row] = (density >= level).sum() * cell
    return {"gaussian": np.pi * RADIUS_68 * root, "density": areas}


def covariances(samples: np.ndarray) -> np.ndarray:
    """Return the covariance [N, R, R] of each map's draws [N, S, R]."""
    centred = samples - samples.mean(axis=1, keepdims=True)
    return np.einsum("nsi,nsj->nij", centred, centred) / (samples.shape[1] - 1)


def smoothed_density(
    draws: np.ndarray, covariance: np.ndarray, probabilities: tuple[float, ...], cells: int = 60, reach: float = 5.0
) -> tuple[np.ndarray, np.ndarray, list[float], float]:
    """Smooth a histogram of draws [S, 2], and find the density level that encloses each probability.

    The draws are whitened first, so that one grid and one kernel (Scott's rule) suit every posterior. Levels are
    quantiles of the density at the draws, so smoothing does not enlarge the area of a Gaussian.

    Returns the cell centers [cells, cells, 2], the density [cells, cells], the levels, and the area of a cell.
    """
    factor, centre = np.linalg.cholesky(covariance), draws.mean(axis=0)
    white = np.linalg.solve(factor, (draws - centre).T).T
    width = 2 * reach / cells
    axis = (np.arange(cells) + 0.5) * width - reach
    cell = np.clip(((white + reach) / width).astype(int), 0, cells - 1)
    counts = np.zeros((cells, cells))
    np.add.at(counts, (cell[:, 0], cell[:, 1]), 1)
    kernel = np.exp(-((axis[:, None] - axis) ** 2) / (2 * len(draws) ** (-1 / 3)))
    density = kernel @ counts @ kernel
    at_draws = density[cell[:, 0], cell[:, 1]]
    levels = [float(np.quantile(at_draws, 1 - probability)) for probability in probabilities]
    plane = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1) @ factor.T + centre
    return plane, density, levels, float(width**2 * np.prod(np.diag(factor)))


def compare(metrics: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
    """Divide the RMSE of each parameter and the contour area of each plane by those of a baseline.

    Both arguments come from `evaluate_predictions`. Raises ValueError if they share no parameter.
    """
    ours, theirs = metrics["parameters"], baseline.get("parameters", {})
    shared = [name for name in ours if name in theirs]
    if not shared:
        raise ValueError(f"baseline: has metrics for {sorted(theirs)}; expected at least one of {', '.join(ours)}")
    areas, others = metrics["contour_area_68"], baseline["contour_area_68"]
    return {
        "rmse_ratio": {name: ours[name]["rmse"] / theirs[name]["rmse"] for name in shared},
        "contour_area_ratio": {
            plane: {how: areas[plane][how] / area for how, area in others[plane].items() if area}
            for plane in areas
            if plane in others
        },
    }


# ---- mass maps ----


@dataclass(frozen=True)
class MassMaps:
    """True and estimated convergence of N maps.

    Args:
        truth, estimate: [N, P, S, S]. masks: bool [N, S, S], True where observed; None if all pixels are observed.
        std: estimated standard deviation of each pixel, [N, P, S, S], if the method provides one.
    """

    truth: np.ndarray
    estimate: np.ndarray
    masks: np.ndarray | None = None
    std: np.ndarray | None = None

    def __post_init__(self):
        for name in ("truth", "estimate"):
            values = getattr(self, name).astype(np.float64)
            object.__setattr__(self, name, values - values.mean((2, 3), keepdims=True))


def evaluate_mass_maps(maps: MassMaps, side_rad: float, seed: int = 0) -> dict[str, Any]:
    """Compute all metrics of estimated maps as JSON-serializable values; `side_rad` is the side of the patch.

    Returns:
        count; error, error_observed, error_hidden: `relative_error` over all, observed, and hidden pixels;
        spectra: `compare_spectra`; peaks: `compare_peaks`; uncertainty: `pixel_calibration`, if `maps` has a std.
    """
    result: dict[str, Any] = {"count": len(maps.truth), "error": relative_error(maps, None, seed)}
    if maps.masks is not None:
        result["error_observed"] = relative_error(maps, maps.masks, seed)
        if not maps.masks.all():
            result["error_hidden"] = relative_error(maps, ~maps.masks, seed)
    result |= {"spectra": compare_spectra(maps, side_rad), "peaks": compare_peaks(maps)}
    if maps.std is not None:
        result["uncertainty"] = pixel_calibration(maps)
    return result


def squared_errors(maps: MassMaps, where: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Sum (estimate - truth)^2 and truth^2 over the pixels selected by `where` [N, S, S], as two arrays [N]."""
    weight = 1.0 if where is None else where[:, None].astype(np.float64)
    error = (weight * (maps.estimate - maps.truth) ** 2).sum((1, 2, 3))
    return error, (weight * maps.truth**2).sum((1, 2, 3))


def relative_error(maps: MassMaps, where: np.ndarray | None = None, seed: int = 0) -> dict[str, float]:
    """Return the rms error divided by the rms of the truth (1 for a map of zeros), with a 95% interval."""
    return error_ratio(*squared_errors(maps, where), seed)


def error_ratio(error: np.ndarray, other: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Return sqrt(sum(error) / sum(other)) over all maps, given the sums per map [N] from `squared_errors`.

    low and high bound the 95% interval of a bootstrap over maps.
    """
    drawn = np.random.default_rng(seed).integers(len(error), size=(RESAMPLES, len(error)))
    value, drawn = (np.sqrt(error[rows].sum(-1) / other[rows].sum(-1)) for rows in (np.arange(len(error)), drawn))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return {"value": float(value), "low": float(low), "high": float(high)}


def compare_spectra(maps: MassMaps, side_rad: float, bins: int = 13) -> dict[str, list[float]]:
    """Compare the spectra of estimate and truth in multipole bins, averaged over all maps and planes.

    Returns:
        ell: mean multipole of each bin; correlation: of estimated and true modes; transfer: slope of a regression of
        the estimated modes on the true modes; power: estimated power divided by true power.
    """
    ell, true = map_power_spectrum(maps.truth, side_rad, bins)
    own = map_power_spectrum(maps.estimate, side_rad, bins)[1]
    cross = map_power_spectrum(maps.estimate, side_rad, bins, other=maps.truth)[1]
    true, own, cross = (values.mean((0, 1)) for values in (true, own, cross))
    correlation = cross / np.sqrt(np.maximum(true * own, np.finfo(float).tiny))
    found = {"ell": ell, "correlation": correlation, "transfer": cross / true, "power": own / true}
    return {name: values.tolist() for name, values in found.items()}


def compare_peaks(maps: MassMaps) -> dict[str, Any]:
    """Count the peaks per map and plane above each of PEAK_HEIGHTS."""
    unit = maps.truth.std()
    counts = {
        name: [float(count) for count in peak_counts(values / unit, PEAK_HEIGHTS).mean((0, 1))]
        for name, values in (("true", maps.truth), ("estimated", maps.estimate))
    }
    return {"heights": list(PEAK_HEIGHTS), **counts}


def peak_counts(values: np.ndarray, heights: tuple[float, ...]) -> np.ndarray:
    """Count the peaks above each height in periodic maps, [..., heights]. A peak exceeds its eight neighbors."""
    steps = (-1, 0, 1)
    neighbours = [np.roll(values, (y, x), (-2, -1)) for y in steps for x in steps if y or x]
    peak = np.logical_and.reduce([values > other for other in neighbours])
    return np.stack([(peak & (values > height)).sum((-2, -1)) for height in heights], axis=-1)


def pixel_calibration(maps: MassMaps) -> dict[str, float]:
    """Compare pixel errors with their predicted standard deviations.

    Returns mean_z2 (1 if calibrated), coverage_68 and coverage_95 (fraction of pixels within one and two standard
    deviations), and mean_std (mean predicted standard deviation divided by the standard deviation of the truth).
    """
    z = np.abs(maps.estimate - maps.truth) / maps.std
    shares = {name: float((z <= width).mean()) for name, width in WIDTHS.items()}
    return {"mean_z2": float((z**2).mean()), **shares, "mean_std": float(maps.std.mean() / maps.truth.std())}
