"""Evaluates mass maps from the shear of a data set: estimates, figures, pictures."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ...io.evaluation import validate_data, validate_output, write_results
from ...io.usage import UsageError
from ...trainer.recipes import library_versions
from ..baselines import MapSet, run_baseline
from ..dataset.rows import load_cosmology_info, map_arrays
from ..evaluation import evaluate_predictions
from ..simulation.maps import MapSettings
from .metrics import MassMaps, evaluate_mass_maps, relative_error
from .plots import plot_mass_maps, plot_spectra
from .reconstruction import WienerFilter, smoothed_kaiser_squires, spectra_of_cosmologies


TASK = "mass-mapping"
# "wiener" knows the true spectrum of each map, "wiener-mean" the mean spectrum of the training maps.
METHODS = ("kaiser-squires", "wiener", "wiener-mean")
SMOOTHINGS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)  # pixels, of which the best on training maps is taken
SPECTRUM_MAPS = 500  # of the training split, for a mean spectrum


@dataclass(frozen=True)
class ShearMaps:
    """Rows of a split: shear [N, 2P, S, S], masks [N, S, S], the convergence kappa [N, P, S, S] and the parameters."""

    shear: np.ndarray
    masks: np.ndarray
    kappa: np.ndarray
    labels: dict[str, np.ndarray]

    @classmethod
    def read(cls, data: str, split: str, limit: int | None) -> "ShearMaps":
        """The first `limit` rows of a split, or all."""
        rows = map_arrays(data, split)  # a training split may be larger than the memory
        chosen = np.arange(len(rows["map"]))[:limit]
        labels = {name: rows[name][chosen] for name in ("omega_m", "sigma_8", "s_8")}
        return cls(*(rows[name][chosen] for name in ("map", "mask", "kappa")), labels)

    def spectra(self, settings: MapSettings, rows: slice) -> np.ndarray:
        """The true spectra of some rows, as `spectra_of_cosmologies`."""
        return spectra_of_cosmologies(settings, self.labels["omega_m"][rows], self.labels["sigma_8"][rows])


def evaluate_reconstruction(
    data: str,
    method: str,
    *,
    train: int = 1000,
    limit: int | None = None,
    regression: str | None = None,
    draws: int = 0,
    batch_size: int = 100,
    seed: int = 0,
    out: Path | None = None,
) -> dict[str, Any]:
    """Evaluates mass maps of the test split that need no trained model.

    Args:
        method: one of METHODS.
        train: training maps, for the smoothing of "kaiser-squires", the spectrum of "wiener-mean" and `regression`.
        regression: one of `baselines.METHODS`: parameters from the estimated maps, the usual second step.
        draws: of the error of a Wiener filter, for the standard deviation of pixels; 0 for none.
        batch_size: maps at a time. seed: of draws and bootstraps.
        out: folder for results.json, maps.png and spectra.png.

    Returns:
        What results.json holds, and the names of the files that were written.

    Raises:
        UsageError: no data set of shear, or options that do not go with the method.
    """
    validate_data(data, "cosmology data set")
    if out is not None:
        validate_output(out)
    if method not in METHODS:
        raise UsageError(f"{method!r} is none of {', '.join(METHODS)}", "--method")
    if regression and method == "wiener":
        raise UsageError("wiener knows each map's spectrum, so its parameters: take wiener-mean", "--regression")
    if draws and method == "kaiser-squires":
        raise UsageError("kaiser-squires has no posterior to draw from: take a Wiener filter", "--draws")
    info = load_cosmology_info(data)
    settings = info.settings
    if settings.observable != "shear":
        raise UsageError(f"{data} holds {settings.observable}, not shear: hrm-hf data cosmology --observable shear")
    if method != "kaiser-squires" and settings.source_redshifts is None:
        reason = "and maps from files do not say the redshifts of their sources: take kaiser-squires"
        raise UsageError(f"{method} takes the spectrum from theory, {reason}", "--method")
    # First, since maps without parameters have no training split, and that says how to get one.
    training = ShearMaps.read(data, "train", train) if regression or method != "wiener" else None
    test = ShearMaps.read(data, "test", limit)
    started = time.perf_counter()
    estimator, fitted = _estimator(method, settings, training, batch_size)
    estimate, std = _estimates(estimator, test, batch_size, draws, seed)
    seconds = time.perf_counter() - started
    maps = MassMaps(test.kappa, estimate, test.masks, std)
    result = {
        "task": TASK,
        "method": method,
        "dataset": data,
        "split": "test",
        "settings": {"train": train, "limit": limit, "draws": draws, "seed": seed, **fitted},
        "maps_per_second": len(estimate) / seconds,
        "metrics": evaluate_mass_maps(maps, settings.side_rad, seed),
        "versions": library_versions(),
    }
    if regression:
        predicted = run_baseline(
            regression,
            MapSet(_estimates(estimator, training, batch_size)[0], training.labels, training.masks),
            MapSet(estimate, test.labels, test.masks),
            seed=seed,
        )
        result["regression"] = {"method": regression, "metrics": evaluate_predictions(predicted, info.prior, seed)}
    if out is None:
        return result
    written = write_results(result, out)
    title = f"{method}, {Path(data).name} (test)"
    plot_mass_maps(maps, test.shear, out / "maps.png", title)
    plot_spectra(result["metrics"], out / "spectra.png", title)
    return result | written | {"plots": str(out)}


class _KaiserSquires:
    def __init__(self, smoothing_pixels: float):
        self.smoothing_pixels = smoothing_pixels

    def __call__(self, maps: ShearMaps, rows: slice, draws: int, generator: torch.Generator) -> tuple:
        return smoothed_kaiser_squires(*_observed(maps, rows), self.smoothing_pixels), None


class _Wiener:
    """A filter of each batch with the spectra of its maps, or `common`, which is one of all."""

    def __init__(self, settings: MapSettings, common: WienerFilter | None = None):
        self.settings, self.common = settings, common

    def __call__(self, maps: ShearMaps, rows: slice, draws: int, generator: torch.Generator) -> tuple:
        wiener = self.common or WienerFilter(self.settings, maps.spectra(self.settings, rows))
        shear, mask = _observed(maps, rows)
        errors = wiener.draw_errors(mask, generator, draws) if draws else None
        # The mean of the errors is known to be 0.
        return wiener(shear, mask).kappa, None if errors is None else errors.square().mean(0).sqrt()


def _estimator(method: str, settings: MapSettings, training: ShearMaps | None, batch_size: int):
    """The map of rows of shear to convergence, and the figures that it takes from training maps."""
    if method == "kaiser-squires":
        errors = {}
        for smoothing in SMOOTHINGS:
            estimate, _ = _estimates(_KaiserSquires(smoothing), training, batch_size)
            errors[smoothing] = relative_error(MassMaps(training.kappa, estimate))["value"]
        best = min(errors, key=errors.get)
        return _KaiserSquires(best), {"smoothing_pixels": best}
    if method == "wiener":
        return _Wiener(settings), {}
    mean_spectrum = training.spectra(settings, slice(SPECTRUM_MAPS)).mean(0)
    return _Wiener(settings, WienerFilter(settings, mean_spectrum)), {}


def _estimates(estimator, maps: ShearMaps, batch_size: int, draws: int = 0, seed: int = 0):
    """Estimated maps [N, P, S, S], and the standard deviation of their pixels, or None without draws."""
    generator = torch.Generator().manual_seed(seed)
    estimates, stds = [], []
    for start in tqdm(range(0, len(maps.shear), batch_size), desc="Mapping", unit="batch", disable=None, leave=False):
        rows = slice(start, min(start + batch_size, len(maps.shear)))
        estimate, std = estimator(maps, rows, draws, generator)
        estimates.append(estimate.float().numpy())
        if draws:
            stds.append(std.float().numpy())
    return np.concatenate(estimates), np.concatenate(stds) if draws else None


def _observed(maps: ShearMaps, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Shear and mask [B, 1, S, S] of some rows, in the shear's dtype."""
    shear = torch.from_numpy(maps.shear[rows])
    return shear, torch.from_numpy(maps.masks[rows])[:, None].to(shear)


def summary(result: dict[str, Any]) -> dict[str, str]:
    """Lines for the screen."""
    metrics = result["metrics"]
    names = {"error": "error, all pixels", "error_observed": "observed pixels", "error_hidden": "hidden pixels"}
    lines = {
        label: "{value:.4f} of the maps' own rms ({low:.4f} to {high:.4f})".format(**metrics[name])
        for name, label in names.items()
        if name in metrics
    }
    spectra = metrics["spectra"]
    lines["correlation with the truth"] = ", ".join(
        f"{value:.2f} at ell {ell:.0f}" for ell, value in list(zip(spectra["ell"], spectra["correlation"]))[::3]
    )
    if "uncertainty" in metrics:
        lines["uncertainty"] = "mean z^2 {mean_z2:.3f}, coverage {coverage_68:.3f} and {coverage_95:.3f}".format(
            **metrics["uncertainty"]
        )
    for name, figures in result.get("regression", {}).get("metrics", {}).get("parameters", {}).items():
        lines[f"rmse of {name}"] = f"{figures['rmse']:.4f}"
    return lines


__all__ = ["METHODS", "evaluate_reconstruction", "summary"]
