"""Evaluate mass maps from the shear of a data set, of a trained model or of a method: metrics, pictures, card."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from tqdm.auto import tqdm

from ..hub.kinds import MASS_MAPPER
from ..io.evaluation import write_results
from ..io.usage import UsageError
from ..trainer.recipes import library_versions
from . import plots
from .baselines import run_baseline
from .dataset.info import CosmologyInfo
from .dataset.rows import MapSet, load_cosmology_info
from .evaluation import card_figures as posterior_figures
from .evaluation import evaluate_predictions
from .evaluation import summary as posterior_summary
from .evaluation_run import load_model, model_settings, update_card
from .map_metrics import MassMaps, error_ratio, evaluate_mass_maps, relative_error, squared_errors
from .options import EvaluateMassMaps, MapMethod
from .prediction import Answers, map_distances, predict_maps
from .reconstruction import WienerFilter, smoothed_kaiser_squires, spectra_of_cosmologies
from .simulation.settings import MapSettings


TASK = "mass-mapping"
METHODS = get_args(MapMethod)
SMOOTHINGS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)  # pixels, of which the best on training maps is taken
SPECTRUM_MAPS = 500  # of the training split, for a mean spectrum
# Of rows of shear, a number of draws and a generator: maps [B, P, S, S], and the std of their pixels or None.
Estimator = Callable[[MapSet, int, torch.Generator], tuple[torch.Tensor, torch.Tensor | None]]


def evaluate_reconstruction(options: EvaluateMassMaps) -> dict[str, Any]:
    """Evaluate mass maps of the test split that need no trained model.

    Returns:
        What results.json holds, and the names of the files that were written.

    Raises:
        UsageError: no data set of shear, or one that does not say what the method needs.
    """
    data, method = options.data, options.method
    info = load_cosmology_info(data)
    if method != "kaiser-squires" and info.settings.source_redshifts is None:
        reason = "and maps from files do not say the redshifts of their sources: take kaiser-squires"
        raise UsageError(f"{method} takes the spectrum from theory, {reason}", "--method")
    # First, since maps without parameters have no training split, and that says how to get one.
    needs_training = options.regression or method != "wiener"
    training = MapSet.read(data, "train", options.train, kappa=True) if needs_training else None
    test = MapSet.read(data, "test", options.limit, kappa=True)
    started = time.perf_counter()
    estimator, fitted = map_estimator(method, info.settings, training, options.batch_size)
    estimate, std = estimate_maps(estimator, test, options.batch_size, options.draws, options.seed)
    seconds = time.perf_counter() - started
    maps = MassMaps(test.kappa, estimate, test.masks, std)
    settings = {"train": options.train, "limit": options.limit, "draws": options.draws, "seed": options.seed}
    result = {
        "task": TASK,
        "method": method,
        "dataset": data,
        "split": "test",
        "settings": settings | fitted,
        "maps_per_second": len(estimate) / seconds,
        "metrics": evaluate_mass_maps(maps, info.settings.side_rad, options.seed),
        "versions": library_versions(),
    }
    if options.regression:
        train_maps = estimate_maps(estimator, training, options.batch_size)[0]
        predicted = run_baseline(
            options.regression,
            MapSet(train_maps, training.labels, training.masks),
            MapSet(estimate, test.labels, test.masks),
            seed=options.seed,
        )
        metrics = evaluate_predictions(predicted, info.prior, options.seed)
        result["regression"] = {"method": options.regression, "metrics": metrics}
    if options.out is None:
        return result
    written = write_results(result, options.out)
    title = f"{method}, {Path(data).name} (test)"
    plots.plot_mass_maps(maps, test.maps, options.out / "maps.png", title)
    plots.plot_spectra(result["metrics"], options.out / "spectra.png", title)
    return result | written | {"plots": str(options.out)}


def evaluate_model(options: EvaluateMassMaps) -> dict[str, Any]:
    """Evaluate the maps and posteriors of a trained model, after each segment and at the end.

    Returns:
        What results.json holds, and the names of the files that were written.

    Raises:
        UsageError: a device that is none, no data set of shear, or a choice of segments for a model with one.
        ModelError: no such model, or one of another kind.
    """
    model, extractor = load_model(options, MASS_MAPPER)
    maps = MapSet.read(options.data, options.split, options.limit, kappa=True)
    answers = predict_maps(
        model,
        extractor,
        maps,
        halt=options.steps,
        max_steps=options.max_steps,
        num_samples=options.num_samples,
        batch_size=options.batch_size,
        seed=options.seed,
    )
    metrics = network_metrics(answers, load_cosmology_info(options.data), options.seed)
    if distances := map_distances(model, extractor, maps, options.batch_size):
        metrics["map_distance"] = distances
    result = {"task": TASK, "model": options.model, "dataset": options.data, "split": options.split}
    result |= {"settings": model_settings(options, model), "maps_per_second": answers.maps_per_second}
    result |= {"parameters": model.num_parameters(), "metrics": metrics, "versions": library_versions()}
    if options.out is not None:
        title = f"{Path(options.model).name}, {Path(options.data).name} ({options.split})"
        result |= write_results(result, options.out)
        result["plots"] = str(plot_network(answers, maps.maps, metrics, options.out, title))
    if options.update_card:
        result["card"] = update_card(options, result, card_figures(metrics))
    return result


def network_metrics(answers: Answers, info: CosmologyInfo, seed: int = 0) -> dict[str, Any]:
    """Return the metrics of a model's answers.

    Returns:
        Those of `evaluate_mass_maps`; per_step: error after each segment, and what is left of that after the first one
        at the last (`error_ratio`), with the parameters' RMSE; posterior: those of `evaluate_predictions`.
    """
    metrics = evaluate_mass_maps(answers.mass_maps, info.settings.side_rad, seed)
    errors, signal = answers.map_errors, squared_errors(answers.mass_maps)[1].sum()
    metrics["per_step"] = {
        "error": np.sqrt(errors.sum(0) / signal).tolist(),
        "last_over_first": error_ratio(errors[:, -1], errors[:, 0], seed),
        "rmse": answers.rmse_per_step(),
    }
    return metrics | {"posterior": evaluate_predictions(answers.predictions, info.prior, seed)}


def plot_network(answers: Answers, shear: np.ndarray, metrics: dict[str, Any], out: Path, title: str) -> Path:
    """Draw maps, spectra, segments, posteriors and their calibration in `out`."""
    plots.plot_mass_maps(answers.mass_maps, shear, out / "maps.png", title)
    plots.plot_spectra(metrics, out / "spectra.png", title)
    truth, errors = answers.mass_maps.truth[0], metrics["per_step"]["error"]
    plots.plot_segments(answers.shown, truth, errors, out / "segments.png", title)
    plots.plot_posteriors(answers.predictions, metrics["posterior"], out, title)
    return out


def card_figures(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the values of `network_metrics` for a model card; results.json has all."""
    names = [name for name in ("error", "error_observed", "error_hidden") if name in metrics]
    return {name: metrics[name]["value"] for name in names} | posterior_figures(metrics["posterior"])


# ---- methods without training ----


def map_estimator(
    method: MapMethod, settings: MapSettings, training: MapSet | None, batch_size: int = 100
) -> tuple[Estimator, dict[str, float]]:
    """Return the estimator of a method, and the numbers that it takes from training maps.

    Args:
        training: rows that "kaiser-squires" and "wiener-mean" are fitted to; None for "wiener".
    """
    if method == "kaiser-squires":
        errors = {}
        for smoothing in SMOOTHINGS:
            estimate, _ = estimate_maps(_kaiser_squires(smoothing), training, batch_size)
            errors[smoothing] = relative_error(MassMaps(training.kappa, estimate))["value"]
        best = min(errors, key=errors.get)
        return _kaiser_squires(best), {"smoothing_pixels": best}
    if method == "wiener":
        return _wiener(lambda maps: WienerFilter(settings, spectra_of_cosmologies(settings, maps.labels))), {}
    spectrum = spectra_of_cosmologies(settings, training[:SPECTRUM_MAPS].labels).mean(0)
    common = WienerFilter(settings, spectrum)
    return _wiener(lambda maps: common), {}


def _kaiser_squires(smoothing_pixels: float) -> Estimator:
    return lambda maps, draws, generator: (smoothed_kaiser_squires(*_observed(maps), smoothing_pixels), None)


def _wiener(filter_of: Callable[[MapSet], WienerFilter]) -> Estimator:
    def estimate(maps: MapSet, draws: int, generator: torch.Generator):
        wiener, (shear, mask) = filter_of(maps), _observed(maps)
        errors = wiener.draw_errors(mask, generator, draws) if draws else None
        # The mean of the errors is known to be 0.
        return wiener(shear, mask).kappa, None if errors is None else errors.square().mean(0).sqrt()

    return estimate


def _observed(maps: MapSet) -> tuple[torch.Tensor, torch.Tensor]:
    """Shear and mask [B, 1, S, S], in the shear's dtype."""
    shear = torch.from_numpy(maps.maps)
    return shear, torch.from_numpy(maps.masks)[:, None].to(shear)


def estimate_maps(
    estimator: Estimator, maps: MapSet, batch_size: int, draws: int = 0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray | None]:
    """Estimate maps [N, P, S, S], and the standard deviation of their pixels; None if the method gives none."""
    generator = torch.Generator().manual_seed(seed)
    estimates, stds = [], []
    for start in tqdm(range(0, len(maps), batch_size), desc="Mapping", unit="batch", disable=None, leave=False):
        estimate, std = estimator(maps[start : start + batch_size], draws, generator)
        estimates.append(estimate.float().numpy())
        if std is not None:
            stds.append(std.float().numpy())
    return np.concatenate(estimates), np.concatenate(stds) if stds else None


def lines(result: dict[str, Any]) -> dict[str, str]:
    """Return what the screen shows of a result: a line for each metric."""
    metrics = result["metrics"]
    names = {"error": "error, all pixels", "error_observed": "observed pixels", "error_hidden": "hidden pixels"}
    shown = {
        label: "{value:.4f} of the maps' own rms ({low:.4f} to {high:.4f})".format(**metrics[name])
        for name, label in names.items()
        if name in metrics
    }
    if "per_step" in metrics:
        shown["error after each segment"] = ", ".join(f"{error:.4f}" for error in metrics["per_step"]["error"])
    spectra = metrics["spectra"]
    shown["correlation with the truth"] = ", ".join(
        f"{value:.2f} at ell {ell:.0f}" for ell, value in list(zip(spectra["ell"], spectra["correlation"]))[::3]
    )
    if "uncertainty" in metrics:
        shown["uncertainty"] = "mean z^2 {mean_z2:.3f}, coverage {coverage_68:.3f} and {coverage_95:.3f}".format(
            **metrics["uncertainty"]
        )
    if "posterior" in metrics:
        distance = {name: value for name, value in metrics.items() if name == "map_distance"}
        return shown | posterior_summary(metrics["posterior"] | distance)
    for name, figures in result.get("regression", {}).get("metrics", {}).get("parameters", {}).items():
        shown[f"rmse of {name}"] = f"{figures['rmse']:.4f}"
    return shown
