"""The quality of mass maps: error in pixels, agreement by multipole, peaks, and whether their uncertainty is right.

Shear does not tell the mean of a map (`models.shear_operator`), so that every map here is taken less its own mean.
Plain numpy; N maps of P planes, S pixels a side.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .simulation.fields import map_power_spectrum


PEAK_HEIGHTS = (1.0, 2.0, 3.0, 4.0, 5.0)  # in units of the true maps' standard deviation
LEVELS = {"coverage_68": 1.0, "coverage_95": 2.0}  # half widths of the intervals in standard deviations
RESAMPLES = 1000


@dataclass(frozen=True)
class MassMaps:
    """Estimated convergence of N maps beside the truth.

    Args:
        truth, estimate: [N, P, S, S]. masks: bool [N, S, S], True where observed; None if everything is.
        std: of each pixel, [N, P, S, S]; None if the method gives none.
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
    """All figures of estimated maps; numbers, lists and dicts only, ready for JSON.

    Args:
        side_rad: side of the patch in radians. seed: of the bootstrap over maps.

    Returns:
        count; error, error_observed, error_hidden: `relative_error` over all, the observed and the hidden pixels;
        spectra: `compare_spectra`; peaks: `compare_peaks`; uncertainty: `pixel_calibration`, if there is one.
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
    """Sums over the pixels `where` [N, S, S] of (estimate - truth)^2 and of truth^2, of each map [N]."""
    weight = 1.0 if where is None else where[:, None].astype(np.float64)
    error = (weight * (maps.estimate - maps.truth) ** 2).sum((1, 2, 3))
    return error, (weight * maps.truth**2).sum((1, 2, 3))


def relative_error(maps: MassMaps, where: np.ndarray | None = None, seed: int = 0) -> dict[str, float]:
    """Root of the mean squared error over that of the truth: 0 for the truth, 1 for an empty map.

    Returns:
        value, low and high: the 95 % interval of a bootstrap over maps.
    """
    error, signal = squared_errors(maps, where)
    return _with_interval(lambda rows: np.sqrt(error[rows].sum(-1) / signal[rows].sum(-1)), len(error), seed)


def error_ratio(error: np.ndarray, other: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Error of one way over that of another on the same maps, from their `squared_errors` [N]: below 1 it is better.

    Returns:
        value, low and high, as `relative_error`; maps are drawn in pairs.
    """
    return _with_interval(lambda rows: np.sqrt(error[rows].sum(-1) / other[rows].sum(-1)), len(error), seed)


def _with_interval(figure: Callable[[np.ndarray], np.ndarray], count: int, seed: int) -> dict[str, float]:
    """A figure of rows, by their numbers [..., N], with the 95 % interval of a bootstrap over `count` of them."""
    drawn = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    low, high = np.quantile(figure(drawn), (0.025, 0.975))
    return {"value": float(figure(np.arange(count))), "low": float(low), "high": float(high)}


def compare_spectra(maps: MassMaps, side_rad: float, bins: int = 13) -> dict[str, list[float]]:
    """Estimate against truth in rings of multipoles, over all maps and planes together.

    Returns:
        ell; correlation: of the modes, 1 for the truth but for amplitudes; transfer: the regression of the estimate's
        modes on the true ones, the share of an amplitude that comes back on average; power: the estimate's power over
        the true one, which the noise in a map raises.
    """
    ell, true = map_power_spectrum(maps.truth, side_rad, bins)
    own = map_power_spectrum(maps.estimate, side_rad, bins)[1]
    cross = map_power_spectrum(maps.estimate, side_rad, bins, other=maps.truth)[1]
    true, own, cross = (values.mean((0, 1)) for values in (true, own, cross))
    correlation = cross / np.sqrt(np.maximum(true * own, np.finfo(float).tiny))
    found = {"ell": ell, "correlation": correlation, "transfer": cross / true, "power": own / true}
    return {name: values.tolist() for name, values in found.items()}


def compare_peaks(maps: MassMaps) -> dict[str, Any]:
    """Peaks, pixels above their eight neighbours, by height in units of the true maps' standard deviation.

    Opposite edges meet. Returns heights; true and estimated: peaks above each of them, a map and plane.
    """
    unit = maps.truth.std()
    counts = {
        name: [float(count) for count in peak_counts(values / unit, PEAK_HEIGHTS).mean((0, 1))]
        for name, values in (("true", maps.truth), ("estimated", maps.estimate))
    }
    return {"heights": list(PEAK_HEIGHTS), **counts}


def peak_counts(values: np.ndarray, heights: tuple[float, ...]) -> np.ndarray:
    """Peaks of periodic maps [..., S, S] that are above each height: [..., heights]."""
    steps = (-1, 0, 1)
    neighbours = [np.roll(values, (y, x), (-2, -1)) for y in steps for x in steps if y or x]
    peak = np.logical_and.reduce([values > other for other in neighbours])
    return np.stack([(peak & (values > height)).sum((-2, -1)) for height in heights], axis=-1)


def pixel_calibration(maps: MassMaps) -> dict[str, float]:
    """Whether the errors of pixels are as large as their standard deviations say.

    Returns:
        mean_z2: mean squared error in units of the variance, 1 if right; coverage_68, coverage_95: share of pixels
        within one and two standard deviations, .6827 and .9545 if errors are Gaussian; mean_std over the truth's.
    """
    z = np.abs(maps.estimate - maps.truth) / maps.std
    shares = {name: float((z <= width).mean()) for name, width in LEVELS.items()}
    return {"mean_z2": float((z**2).mean()), **shares, "mean_std": float(maps.std.mean() / maps.truth.std())}
