"""Evaluation of regressors, mass mappers and training-free methods: predictions, metrics, plots, model card."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm.auto import tqdm
from transformers import AutoFeatureExtractor, PreTrainedModel

from ..hub.cards import record_evaluation
from ..hub.kinds import MASS_MAPPER, REGRESSOR, Kind, load_config, load_network
from ..io.evaluation import RESULTS_FILE, chosen_device, write_results
from ..io.usage import UsageError
from ..trainer.recipes import library_versions
from . import plots
from .baselines import run_baseline
from .dataset.info import CosmologyInfo
from .dataset.rows import MapSet, load_cosmology_info
from .evaluation import (
    CosmologyPredictions,
    MassMaps,
    compare,
    error_ratio,
    evaluate_mass_maps,
    evaluate_predictions,
    posterior_card_metrics,
    squared_errors,
    summary,
)
from .options import EvaluateBaseline, EvaluateCosmo, EvaluateMassMaps
from .reconstruction import estimate_maps, map_estimator


TASK, MAP_TASK = "cosmology-regression", "mass-mapping"


# ---- predictions ----


@dataclass(frozen=True)
class Answers:
    """Outputs of a model for N maps. The last three fields are None unless the model is a mass mapper.

    Attributes:
        segment_means: posterior means after each segment [N, segments, R].
        maps_per_second: speed of the forward passes.
        mass_maps: estimated and true convergence.
        map_errors: squared error of the estimates after each segment, summed over pixels [N, segments].
        shown: estimates of the first map after each segment [segments, P, S, S].
    """

    predictions: CosmologyPredictions
    segment_means: np.ndarray
    maps_per_second: float
    mass_maps: MassMaps | None = None
    map_errors: np.ndarray | None = None
    shown: np.ndarray | None = None

    def rmse_per_step(self) -> dict[str, list[float]]:
        """Return the RMSE of each parameter after each segment."""
        error = self.segment_means - self.predictions.truth[:, None]
        rmse = np.sqrt(np.mean(error**2, axis=0))
        return {name: rmse[:, column].tolist() for column, name in enumerate(self.predictions.names)}


def num_segments(config: Any) -> int:
    """Return the maximum number of segments of a recurrent model; 1 for models without recurrence."""
    return config.to_dict().get("halt_max_steps", 1)


@torch.no_grad()
def predict_maps(
    model: Any,
    extractor: Any,
    maps: MapSet,
    *,
    halt: str = "fixed",
    max_steps: int | None = None,
    num_samples: int = 1000,
    batch_size: int = 64,
    seed: int = 0,
) -> Answers:
    """Run a model on maps whose true parameters are known.

    Args:
        extractor: the `CosmoMapFeatureExtractor` of the model.
        halt, max_steps: passed to the model's forward. num_samples: draws from each posterior.

    Raises:
        ValueError: labels lack a parameter that the model predicts, or the extractor or the model rejects the maps.
    """
    names = model.config.reported_names
    missing = [name for name in names if name not in maps.labels]
    if missing:
        raise ValueError(
            f"labels={sorted(maps.labels)}: the data set lacks {', '.join(missing)}, which the model predicts"
        )
    generator = torch.Generator(model.device).manual_seed(seed)
    depth = {"max_steps": max_steps, "halt": halt} if num_segments(model.config) > 1 else {}
    parts: list[list[np.ndarray]] = []
    shown, seconds, was_training = None, 0.0, model.training
    model.eval()
    for start in tqdm(range(0, len(maps), batch_size), desc="Predicting", unit="batch", disable=None, leave=False):
        batch = maps[start : start + batch_size]
        inputs = extractor(batch.maps, mask=batch.masks)["pixel_values"].to(model.device)
        started = time.perf_counter()
        output = model(inputs, **depth)
        tensors = [output.reported_means, output.reported_stds, output.steps, output.segment_means]
        tensors += [output.kappa, output.kappa_std, output.segment_maps] if "segment_maps" in output else []
        found = [tensor.float().cpu().numpy() for tensor in tensors]  # waits until the device is done
        seconds += time.perf_counter() - started
        if "segment_maps" in output:
            segments = found.pop()
            shown = segments[0] if shown is None else shown
            pairs = [MassMaps(batch.kappa, segments[:, number]) for number in range(segments.shape[1])]
            found.append(np.stack([squared_errors(pair)[0] for pair in pairs], axis=1))
        parts.append([model.sample_posterior(output, num_samples, generator).float().cpu().numpy(), *found])
    model.train(was_training)
    samples, mean, std, steps, segment_means, *of_maps = (np.concatenate(columns) for columns in zip(*parts))
    truth = np.stack([maps.labels[name] for name in names], axis=1)
    predictions = CosmologyPredictions(names, truth, mean, std, samples, steps)
    speed = len(mean) / max(seconds, 1e-9)
    if not of_maps:
        return Answers(predictions, segment_means, speed)
    kappa, kappa_std, errors = of_maps
    mass_maps = MassMaps(maps.kappa, kappa, maps.masks, kappa_std)
    return Answers(predictions, segment_means, speed, mass_maps, errors, shown)


@torch.no_grad()
def map_distances(model: Any, extractor: Any, maps: MapSet, batch_size: int = 64) -> dict[str, float] | None:
    """Measure how far maps are from the training maps with `RecurrentHeadMixin.map_distance`.

    Returns the median distance, the limit `config.max_map_distance` and the fraction above it; None without a limit.
    """
    limit = getattr(model.config, "max_map_distance", None)
    if limit is None:
        return None
    found = []
    for start in range(0, len(maps), batch_size):
        batch = maps[start : start + batch_size]
        inputs = extractor(batch.maps, mask=batch.masks)["pixel_values"].to(model.device)
        found.append(model.map_distance(inputs).float().cpu())
    distances = torch.cat(found)
    beyond = (distances > limit).float().mean().item()
    return {"median": distances.median().item(), "limit": limit, "share_beyond": beyond}


# ---- parameters ----


def evaluate_checkpoint(options: EvaluateCosmo) -> dict[str, Any]:
    """Evaluate the posteriors of a regressor: accuracy, calibration, contour area, accuracy per segment.

    Returns the content of results.json and the paths of the written files. Raises UsageError for invalid options,
    ModelError for a missing or wrong model, and ValueError if `shift_data` covers a different kind of sky patch.
    """
    reference = _read_results(options.baseline) if options.baseline else None
    if options.shift_data:
        _validate_same_sky(options.data, options.shift_data)
    model, extractor = _load_model(options, REGRESSOR)
    found, predictions = _evaluate(model, extractor, options, options.data)
    result = _model_record(TASK, options, model) | found
    if reference:
        ratios = compare(found["metrics"], reference["metrics"])
        result["baseline"] = {"results": str(options.baseline), **ratios}
    if options.shift_data:
        shifted, _ = _evaluate(model, extractor, options, options.shift_data)
        result["shift"] = {"dataset": options.shift_data, **shifted}
    written = _write(result, predictions, options.out, _title(options))
    if options.update_card:
        steps = {name: value for name, value in found["metrics"].items() if name == "average_steps"}
        written["card"] = _update_card(options, result, posterior_card_metrics(found["metrics"]) | steps)
    return result | written


def _evaluate(
    model: PreTrainedModel, extractor: Any, options: EvaluateCosmo, data: str
) -> tuple[dict[str, Any], CosmologyPredictions]:
    """Return a dict of `metrics` and `per_step` (RMSE per segment, adaptive halting results), and the predictions."""
    maps = MapSet.read(data, options.split, options.limit)
    prior = load_cosmology_info(data).prior
    answers = predict_maps(model, extractor, maps, **_prediction_options(options))
    per_step: dict[str, Any] = {"rmse": answers.rmse_per_step()}
    if options.steps == "adaptive":
        answers = predict_maps(model, extractor, maps, halt="adaptive", **_prediction_options(options))
    metrics = evaluate_predictions(answers.predictions, prior, options.seed)
    metrics["maps_per_second"] = answers.maps_per_second
    if distances := map_distances(model, extractor, maps, options.batch_size):
        metrics["map_distance"] = distances
    if options.steps == "adaptive":
        most = options.max_steps or num_segments(model.config)
        per_step["adaptive"] = {
            "rmse": {name: values["rmse"] for name, values in metrics["parameters"].items()},
            "average_steps": metrics["average_steps"],
            "steps_histogram": metrics["steps_histogram"],
            "segments_saved": 1 - metrics["average_steps"] / most,
        }
    return {"metrics": metrics, "per_step": per_step}, answers.predictions


def evaluate_baseline(options: EvaluateBaseline) -> dict[str, Any]:
    """Evaluate a regression on summary statistics of the maps. Results are as in `evaluate_checkpoint`."""
    train, test = MapSet.read(options.data, "train", options.train), MapSet.read(options.data, "test", options.limit)
    started = time.perf_counter()
    predictions = run_baseline(options.method, train, test, num_samples=options.num_samples, seed=options.seed)
    settings = {"train": len(train), "limit": options.limit, "num_samples": options.num_samples, "seed": options.seed}
    seconds = time.perf_counter() - started
    metrics = evaluate_predictions(predictions, load_cosmology_info(options.data).prior, options.seed)
    result = _method_record(TASK, options, settings=settings, seconds=seconds, metrics=metrics)
    return result | _write(result, predictions, options.out, f"{options.method}, {Path(options.data).name} (test)")


def lines(result: dict[str, Any]) -> dict[str, str]:
    """Format one line for each metric of a regressor."""
    shown = summary(result["metrics"])
    for name, value in result.get("baseline", {}).get("rmse_ratio", {}).items():
        shown[f"rmse of {name}, ratio to baseline"] = f"{value:.3f}"
    for plane, ratios in result.get("baseline", {}).get("contour_area_ratio", {}).items():
        shown[f"area of {plane}, ratio to baseline"] = f"{ratios['density']:.3f}"
    if "adaptive" in result.get("per_step", {}):
        shown["segments saved"] = f"{result['per_step']['adaptive']['segments_saved']:.1%}"
    shift = summary(result["shift"]["metrics"]) if "shift" in result else {}
    return shown | {f"shift {name}": line for name, line in shift.items()}


def _validate_same_sky(data: str, other: str) -> None:
    """Reject data whose pixel size or source redshifts differ, because the model does not get them as inputs."""
    first, second = (load_cosmology_info(name).settings for name in (data, other))
    for field in ("size", "side_deg", "source_redshifts"):
        if getattr(first, field) != getattr(second, field):
            found = f"shift_data={other}: has {field}={getattr(second, field)}, but {data} has {getattr(first, field)}"
            raise ValueError(f"{found}; use a data set that differs only in its generator")


def _read_results(path: Path) -> dict[str, Any]:
    file = path / RESULTS_FILE if path.is_dir() else path
    if not file.exists():
        raise UsageError(f"{file} does not exist; create it with hrm-hf eval cosmo-baseline --out")
    result = json.loads(file.read_text())
    if not isinstance(result, dict) or not {"parameters", "contour_area_68"} <= set(result.get("metrics", ())):
        raise UsageError(f"{file}: not a results file of hrm-hf eval cosmo or cosmo-baseline")
    return result


def _write(result: dict[str, Any], predictions: CosmologyPredictions, out: Path | None, title: str) -> dict[str, str]:
    if out is None:
        return {}
    written = write_results(result, out)
    plots.plot_posteriors(predictions, result["metrics"], out, title)
    if "per_step" in result:
        plots.plot_steps(result["per_step"], out / "steps.png", title)
    return written | {"plots": str(out)}


# ---- mass maps ----


def evaluate_model(options: EvaluateMassMaps) -> dict[str, Any]:
    """Evaluate a trained mass mapper's maps and posteriors. Results have the format of `evaluate_checkpoint`."""
    model, extractor = _load_model(options, MASS_MAPPER)
    maps = MapSet.read(options.data, options.split, options.limit, kappa=True)
    answers = predict_maps(model, extractor, maps, halt=options.steps, **_prediction_options(options))
    metrics = network_metrics(answers, load_cosmology_info(options.data), options.seed)
    if distances := map_distances(model, extractor, maps, options.batch_size):
        metrics["map_distance"] = distances
    result = _model_record(MAP_TASK, options, model)
    result |= {"maps_per_second": answers.maps_per_second, "metrics": metrics}
    if options.out is not None:
        result |= write_results(result, options.out)
        result["plots"] = str(plot_network(answers, maps.maps, metrics, options.out, _title(options)))
    if options.update_card:
        result["card"] = _update_card(options, result, map_card_metrics(metrics))
    return result


def network_metrics(answers: Answers, info: CosmologyInfo, seed: int = 0) -> dict[str, Any]:
    """Compute the metrics of a mass mapper: those from `evaluate_mass_maps`, plus per_step and posterior.

    per_step has the map error and the RMSE of each parameter after each segment, and the ratio of the last map error
    to the first (`error_ratio`). posterior has the results of `evaluate_predictions`.
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
    """Save plots of maps, spectra, segments, posteriors and posterior calibration in the folder `out`."""
    plots.plot_mass_maps(answers.mass_maps, shear, out / "maps.png", title)
    plots.plot_spectra(metrics, out / "spectra.png", title)
    truth, errors = answers.mass_maps.truth[0], metrics["per_step"]["error"]
    plots.plot_segments(answers.shown, truth, errors, out / "segments.png", title)
    plots.plot_posteriors(answers.predictions, metrics["posterior"], out, title)
    return out


def map_card_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """Select the metrics of `network_metrics` that go into a model card."""
    names = [name for name in ("error", "error_observed", "error_hidden") if name in metrics]
    return {name: metrics[name]["value"] for name in names} | posterior_card_metrics(metrics["posterior"])


def evaluate_reconstruction(options: EvaluateMassMaps) -> dict[str, Any]:
    """Evaluate a training-free mass-mapping method on the test split.

    Results are as in `evaluate_checkpoint`. Raises UsageError if the data set lacks shear or source redshifts.
    """
    data, method = options.data, options.method
    info = load_cosmology_info(data)
    if method != "kaiser-squires" and info.settings.source_redshifts is None:
        raise UsageError(f"{method} needs source redshifts, but {data} has none; use kaiser-squires", "--method")
    # Read the train split first: if it is missing, the error explains how to get one.
    training = None if method == "wiener" else MapSet.read(data, "train", options.train, kappa=True)
    test = MapSet.read(data, "test", options.limit, kappa=True)
    started = time.perf_counter()
    estimator, fitted = map_estimator(method, info.settings, training, options.batch_size)
    estimate, std = estimate_maps(estimator, test, options.batch_size, options.draws, options.seed)
    speed = len(estimate) / (time.perf_counter() - started)
    maps = MassMaps(test.kappa, estimate, test.masks, std)
    metrics = evaluate_mass_maps(maps, info.settings.side_rad, options.seed)
    settings = {name: getattr(options, name) for name in ("train", "limit", "draws", "seed")} | fitted
    result = _method_record(MAP_TASK, options, settings=settings, maps_per_second=speed, metrics=metrics)
    if options.out is None:
        return result
    written = write_results(result, options.out)
    title = f"{method}, {Path(data).name} (test)"
    plots.plot_mass_maps(maps, test.maps, options.out / "maps.png", title)
    plots.plot_spectra(result["metrics"], options.out / "spectra.png", title)
    return result | written | {"plots": str(options.out)}


def map_lines(result: dict[str, Any]) -> dict[str, str]:
    """Format one line for each metric of mass maps."""
    metrics = result["metrics"]
    names = {"error": "error, all pixels", "error_observed": "observed pixels", "error_hidden": "hidden pixels"}
    shown = {
        label: "{value:.4f} of the true maps' rms ({low:.4f} to {high:.4f})".format(**metrics[name])
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
        return shown | summary(metrics["posterior"] | distance)
    return shown


# ---- shared ----


def _method_record(task: str, options: EvaluateBaseline | EvaluateMassMaps, **found: Any) -> dict[str, Any]:
    """Return the content of results.json for a method without a trained model."""
    result = {"task": task, "method": options.method, "dataset": options.data, "split": "test"}
    return result | found | {"versions": library_versions()}


def _load_model(options: EvaluateCosmo | EvaluateMassMaps, kind: Kind) -> tuple[PreTrainedModel, Any]:
    """Load a model and its extractor. Raises UsageError for segment options if the model has only one segment."""
    if num_segments(load_config(options.model, kind)) == 1 and (options.steps == "adaptive" or options.max_steps):
        raise UsageError(f"{options.model} has only one segment; omit --steps and --max-steps", "--steps")
    model = load_network(options.model, getattr(transformers, kind.auto_class))
    return model.to(chosen_device(options.device)), AutoFeatureExtractor.from_pretrained(options.model)


def _prediction_options(options: EvaluateCosmo | EvaluateMassMaps) -> dict[str, Any]:
    """Return the options to pass to `predict_maps`."""
    return {name: getattr(options, name) for name in ("max_steps", "num_samples", "batch_size", "seed")}


def _model_record(task: str, options: EvaluateCosmo | EvaluateMassMaps, model: PreTrainedModel) -> dict[str, Any]:
    """Return the entries of results.json that describe a model and its data."""
    settings = {"steps": options.steps, "max_steps": options.max_steps or num_segments(model.config)}
    settings |= {"num_samples": options.num_samples, "seed": options.seed, "limit": options.limit}
    result = {"task": task, "model": options.model, "dataset": options.data, "split": options.split}
    return result | {"settings": settings, "parameters": model.num_parameters(), "versions": library_versions()}


def _title(options: EvaluateCosmo | EvaluateMassMaps) -> str:
    return f"{Path(options.model).name}, {Path(options.data).name} ({options.split})"


def _update_card(options: EvaluateCosmo | EvaluateMassMaps, result: dict[str, Any], metrics: dict[str, float]) -> str:
    """Write metrics into the model's card, and return its path."""
    settings = {name: value for name, value in result["settings"].items() if value is not None}
    evaluated = options.model, metrics, options.data, options.split, result["parameters"]
    return str(record_evaluation(*evaluated, **settings))
