"""Evaluates mass maps from the shear of a data set, of a trained model or of a method: figures, pictures, card."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import AutoFeatureExtractor, AutoModelForImageToImage

from ...hub.cards import record_evaluation
from ...hub.kinds import MASS_MAPPER, load_config
from ...io.evaluation import chosen_device, validate_data, validate_evaluation, validate_output, write_results
from ...io.usage import UsageError
from ...trainer.recipes import library_versions
from .. import plots
from ..baselines import MapSet, run_baseline
from ..dataset.rows import CosmologyInfo
from ..evaluation import card_figures as posterior_figures
from ..evaluation import evaluate_predictions, map_distances, rmse_per_step
from ..evaluation import summary as posterior_summary
from ..simulation.maps import MapSettings
from .lognormal import LognormalPosterior
from .metrics import MassMaps, error_ratio, evaluate_mass_maps, relative_error, squared_errors
from .network import NetworkMaps, map_with_network
from .plots import plot_mass_maps, plot_segments, plot_spectra
from .reconstruction import WienerFilter, smoothed_kaiser_squires
from .shear_maps import ShearMaps, load_shear_info


TASK = "mass-mapping"
# "wiener" knows the true spectrum of each map, "wiener-mean" the mean spectrum of the training maps; "lognormal" knows
# the distribution of each map with its true parameters, and is the floor.
METHODS = ("kaiser-squires", "wiener", "wiener-mean", "lognormal")
SMOOTHINGS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)  # pixels, of which the best on training maps is taken
SPECTRUM_MAPS = 500  # of the training split, for a mean spectrum


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
    if regression and method in ("wiener", "lognormal"):
        raise UsageError(f"{method} knows each map's parameters: take wiener-mean", "--regression")
    if draws and method in ("kaiser-squires", "lognormal"):
        why = "has no posterior to draw from" if method == "kaiser-squires" else "draws maps anyway"
        raise UsageError(f"{method} {why}: take a Wiener filter", "--draws")
    info = load_shear_info(data)
    settings = info.settings
    if method != "kaiser-squires" and settings.source_redshifts is None:
        reason = "and maps from files do not say the redshifts of their sources: take kaiser-squires"
        raise UsageError(f"{method} takes the spectrum from theory, {reason}", "--method")
    fitted_to_maps = method in ("kaiser-squires", "wiener-mean")
    # First, since maps without parameters have no training split, and that says how to get one.
    training = ShearMaps.read(data, "train", train) if regression or fitted_to_maps else None
    test = ShearMaps.read(data, "test", limit)
    started = time.perf_counter()
    estimator, fitted = map_estimator(method, settings, training, batch_size)
    estimate, std = estimate_maps(estimator, test, batch_size, draws, seed)
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
            MapSet(estimate_maps(estimator, training, batch_size)[0], training.labels, training.masks),
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


def evaluate_model(
    model: str,
    data: str,
    *,
    split: str = "test",
    steps: str = "fixed",
    max_steps: int | None = None,
    num_samples: int = 1000,
    batch_size: int = 50,
    limit: int | None = None,
    seed: int = 0,
    out: Path | None = None,
    device: str | None = None,
    update_card: bool = False,
) -> dict[str, Any]:
    """Evaluates the maps and posteriors of a trained model, after each segment and at the end.

    Args:
        steps: "fixed" for all segments, "adaptive" until little more is expected of them.
        num_samples: draws from each posterior.
        out: folder for results.json and pictures.

    Returns:
        What results.json holds, and the names of the files that were written.

    Raises:
        UsageError: a path or a device that is none, no data set of shear, or a choice of segments for a model with
            one.
        ModelError: a model that is nowhere, or of another kind.
    """
    validate_evaluation(model, out, update_card)
    config = load_config(model, MASS_MAPPER)
    validate_data(data, "cosmology data set")
    info = load_shear_info(data)
    most = config.to_dict().get("halt_max_steps", 1)
    for option, given in (("--steps", steps == "adaptive"), ("--max-steps", max_steps is not None)):
        if given and most == 1:
            raise UsageError(f"{model} has one segment only; there are none to choose, so leave it out", option)
    network = AutoModelForImageToImage.from_pretrained(model).to(chosen_device(device)).eval()
    extractor = AutoFeatureExtractor.from_pretrained(model)
    settings = {"steps": steps, "max_steps": max_steps or most, "num_samples": num_samples, "seed": seed}
    rows = ShearMaps.read(data, split, limit)
    found = map_with_network(
        network,
        extractor,
        rows,
        halt=steps,
        max_steps=max_steps,
        num_samples=num_samples,
        batch_size=batch_size,
        seed=seed,
    )
    distances = map_distances(network, extractor, rows.shear, rows.masks, batch_size)
    result = {
        "task": TASK,
        "model": model,
        "dataset": data,
        "split": split,
        "settings": settings | {"limit": limit},
        "maps_per_second": found.maps_per_second,
        "parameters": network.num_parameters(),
        "metrics": network_metrics(found, info, seed) | ({} if distances is None else {"map_distance": distances}),
        "versions": library_versions(),
    }
    if out is not None:
        title = f"{Path(model).name}, {Path(data).name} ({split})"
        result |= write_results(result, out) | {
            "plots": str(plot_network(found, rows.shear, result["metrics"], out, title))
        }
    if update_card:
        chosen = {name: value for name, value in settings.items() if value is not None}
        result["card"] = str(
            record_evaluation(model, card_figures(result["metrics"]), data, split, result["parameters"], **chosen)
        )
    return result


def network_metrics(found: NetworkMaps, info: CosmologyInfo, seed: int = 0) -> dict[str, Any]:
    """Figures of a model's answers.

    Returns:
        Those of `evaluate_mass_maps`; per_step: error after each segment, and what is left of that after the first one
        at the last (`error_ratio`), with the parameters' RMSE; posterior: those of `evaluate_predictions`.
    """
    metrics = evaluate_mass_maps(found.maps, info.settings.side_rad, seed)
    signal = squared_errors(found.maps)[1].sum()
    metrics["per_step"] = {
        "error": np.sqrt(found.errors.sum(0) / signal).tolist(),
        "last_over_first": error_ratio(found.errors[:, -1], found.errors[:, 0], seed),
        "rmse": rmse_per_step(found.predictions, found.segment_means),
    }
    return metrics | {"posterior": evaluate_predictions(found.predictions, info.prior, seed)}


def plot_network(found: NetworkMaps, shear: np.ndarray, metrics: dict[str, Any], out: Path, title: str) -> Path:
    """Pictures of maps, spectra, segments, posteriors and their calibration, in `out`."""
    plot_mass_maps(found.maps, shear, out / "maps.png", title)
    plot_spectra(metrics, out / "spectra.png", title)
    plot_segments(found.shown, found.maps.truth[0], metrics["per_step"]["error"], out / "segments.png", title)
    plots.plot_corner(found.predictions, out / "corner.png", title=title)
    plots.plot_calibration(found.predictions, out / "calibration.png", metrics["posterior"], title)
    return out


def card_figures(metrics: dict[str, Any]) -> dict[str, float]:
    """Values of `network_metrics` for a model card; results.json has all."""
    names = [name for name in ("error", "error_observed", "error_hidden") if name in metrics]
    return {name: metrics[name]["value"] for name in names} | posterior_figures(metrics["posterior"])


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


class _Lognormal:
    """The mean and the width of the exact posterior of each map."""

    def __init__(self, settings: MapSettings):
        self.settings = settings

    def __call__(self, maps: ShearMaps, rows: slice, draws: int, generator: torch.Generator) -> tuple:
        posterior = LognormalPosterior(self.settings, maps.labels["omega_m"][rows], maps.labels["sigma_8"][rows])
        samples = posterior.sample(*_observed(maps, rows), generator)
        return samples.mean, samples.std


def map_estimator(method: str, settings: MapSettings, training: ShearMaps | None, batch_size: int = 100):
    """One of METHODS for `estimate_maps`, and the figures that it takes from training maps.

    Args:
        training: rows that "kaiser-squires" and "wiener-mean" are fitted to; None for the others.
    """
    if method == "kaiser-squires":
        errors = {}
        for smoothing in SMOOTHINGS:
            estimate, _ = estimate_maps(_KaiserSquires(smoothing), training, batch_size)
            errors[smoothing] = relative_error(MassMaps(training.kappa, estimate))["value"]
        best = min(errors, key=errors.get)
        return _KaiserSquires(best), {"smoothing_pixels": best}
    if method == "lognormal":
        return _Lognormal(settings), {}
    if method == "wiener":
        return _Wiener(settings), {}
    mean_spectrum = training.spectra(settings, slice(SPECTRUM_MAPS)).mean(0)
    return _Wiener(settings, WienerFilter(settings, mean_spectrum)), {}


def estimate_maps(estimator, maps: ShearMaps, batch_size: int, draws: int = 0, seed: int = 0):
    """Estimated maps [N, P, S, S], and the standard deviation of their pixels, or None if the method gives none."""
    generator = torch.Generator().manual_seed(seed)
    estimates, stds = [], []
    for start in tqdm(range(0, len(maps.shear), batch_size), desc="Mapping", unit="batch", disable=None, leave=False):
        rows = slice(start, min(start + batch_size, len(maps.shear)))
        estimate, std = estimator(maps, rows, draws, generator)
        estimates.append(estimate.float().numpy())
        if std is not None:
            stds.append(std.float().numpy())
    return np.concatenate(estimates), np.concatenate(stds) if stds else None


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
    if "per_step" in metrics:
        lines["error after each segment"] = ", ".join(f"{error:.4f}" for error in metrics["per_step"]["error"])
    spectra = metrics["spectra"]
    lines["correlation with the truth"] = ", ".join(
        f"{value:.2f} at ell {ell:.0f}" for ell, value in list(zip(spectra["ell"], spectra["correlation"]))[::3]
    )
    if "uncertainty" in metrics:
        lines["uncertainty"] = "mean z^2 {mean_z2:.3f}, coverage {coverage_68:.3f} and {coverage_95:.3f}".format(
            **metrics["uncertainty"]
        )
    if "posterior" in metrics:
        return lines | posterior_summary(metrics["posterior"] | _distance(metrics))
    for name, figures in result.get("regression", {}).get("metrics", {}).get("parameters", {}).items():
        lines[f"rmse of {name}"] = f"{figures['rmse']:.4f}"
    return lines


def _distance(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: metrics[name] for name in ("map_distance",) if name in metrics}


__all__ = [
    "METHODS",
    "card_figures",
    "estimate_maps",
    "evaluate_model",
    "evaluate_reconstruction",
    "map_estimator",
    "network_metrics",
    "plot_network",
    "summary",
]
