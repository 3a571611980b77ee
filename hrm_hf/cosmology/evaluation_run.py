"""Evaluate a saved regressor, or a baseline, on a data set: predictions, metrics, pictures, the model's card."""

import json
import time
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoFeatureExtractor, PreTrainedModel

from ..hub.cards import record_evaluation
from ..hub.kinds import REGRESSOR, Kind, load_config
from ..io.evaluation import RESULTS_FILE, chosen_device, write_results
from ..io.usage import UsageError
from ..trainer.recipes import library_versions
from . import plots
from .baselines import run_baseline
from .dataset.rows import MapSet, load_cosmology_info
from .evaluation import CosmologyPredictions, card_figures, compare, evaluate_predictions, summary
from .options import EvaluateBaseline, EvaluateCosmo, EvaluateMassMaps
from .prediction import map_distances, predict_maps, segments_of


TASK = "cosmology-regression"


def evaluate_checkpoint(options: EvaluateCosmo) -> dict[str, Any]:
    """Evaluate the posteriors of a regressor: accuracy, calibration, contour area, accuracy per segment.

    Returns:
        What results.json holds, and the names of the files that were written.

    Raises:
        UsageError: a path, a device or a baseline that is none, or a choice of segments of a model with one.
        ModelError: no such model, or one of another kind. ValueError: data sets of different skies.
    """
    load_config(options.model, REGRESSOR)
    reference = _read_results(options.baseline) if options.baseline else None
    if options.shift_data:
        _validate_same_sky(options.data, options.shift_data)
    model, extractor = load_model(options, REGRESSOR)
    found, predictions = _evaluate(model, extractor, options, options.data)
    result = {"task": TASK, "model": options.model, "dataset": options.data, "split": options.split}
    result |= {"settings": model_settings(options, model), **found}
    result |= {"parameters": model.num_parameters(), "versions": library_versions()}
    if reference:
        ratios = compare(found["metrics"], reference["metrics"])
        result["baseline"] = {"results": str(options.baseline), **ratios}
    if options.shift_data:
        shifted, _ = _evaluate(model, extractor, options, options.shift_data)
        result["shift"] = {"dataset": options.shift_data, **shifted}
    title = f"{Path(options.model).name}, {Path(options.data).name} ({options.split})"
    written = _write(result, predictions, options.out, title)
    if options.update_card:
        steps = {name: value for name, value in found["metrics"].items() if name == "average_steps"}
        written["card"] = update_card(options, result, card_figures(found["metrics"]) | steps)
    return result | written


def load_model(options: EvaluateCosmo | EvaluateMassMaps, kind: Kind) -> tuple[PreTrainedModel, Any]:
    """Load a model and its feature extractor. Raises UsageError for a choice of segments of a model with one."""
    if segments_of(load_config(options.model, kind)) == 1 and (options.steps == "adaptive" or options.max_steps):
        raise UsageError(f"{options.model} has one segment only; there is none to choose, so leave it out", "--steps")
    model = getattr(transformers, kind.auto_class).from_pretrained(options.model)
    return model.to(chosen_device(options.device)).eval(), AutoFeatureExtractor.from_pretrained(options.model)


def model_settings(options: EvaluateCosmo | EvaluateMassMaps, model: PreTrainedModel) -> dict[str, Any]:
    """Return the settings that results.json names."""
    settings = {"steps": options.steps, "max_steps": options.max_steps or segments_of(model.config)}
    return settings | {"num_samples": options.num_samples, "seed": options.seed, "limit": options.limit}


def update_card(options: EvaluateCosmo | EvaluateMassMaps, result: dict[str, Any], figures: dict[str, float]) -> str:
    """Write metrics into the model's card; returns its path."""
    settings = {name: value for name, value in result["settings"].items() if value is not None}
    card = record_evaluation(
        options.model, figures, options.data, options.split, result["parameters"], **settings
    )  # fmt: skip
    return str(card)


def _evaluate(
    model: PreTrainedModel, extractor: Any, options: EvaluateCosmo, data: str
) -> tuple[dict[str, Any], CosmologyPredictions]:
    """Metrics, and `per_step`: RMSE after each segment, and adaptive halting beside it; and the predictions."""
    maps = MapSet.read(data, options.split, options.limit)
    prior = load_cosmology_info(data).prior
    shared = {"max_steps": options.max_steps, "num_samples": options.num_samples}
    shared |= {"batch_size": options.batch_size, "seed": options.seed}
    answers = predict_maps(model, extractor, maps, **shared)
    per_step: dict[str, Any] = {"rmse": answers.rmse_per_step()}
    if options.steps == "adaptive":
        answers = predict_maps(model, extractor, maps, halt="adaptive", **shared)
    metrics = evaluate_predictions(answers.predictions, prior, options.seed)
    metrics["maps_per_second"] = answers.maps_per_second
    if distances := map_distances(model, extractor, maps, options.batch_size):
        metrics["map_distance"] = distances
    if options.steps == "adaptive":
        most = options.max_steps or segments_of(model.config)
        per_step["adaptive"] = {
            "rmse": {name: figures["rmse"] for name, figures in metrics["parameters"].items()},
            "average_steps": metrics["average_steps"],
            "steps_histogram": metrics["steps_histogram"],
            "segments_saved": 1 - metrics["average_steps"] / most,
        }
    return {"metrics": metrics, "per_step": per_step}, answers.predictions


def evaluate_baseline(options: EvaluateBaseline) -> dict[str, Any]:
    """Evaluate a regression on summaries of the same maps; results as those of `evaluate_checkpoint`."""
    train, test = MapSet.read(options.data, "train", options.train), MapSet.read(options.data, "test", options.limit)
    started = time.perf_counter()
    predictions = run_baseline(options.method, train, test, num_samples=options.num_samples, seed=options.seed)
    settings = {"train": len(train), "limit": options.limit, "num_samples": options.num_samples, "seed": options.seed}
    result = {
        "task": TASK,
        "method": options.method,
        "dataset": options.data,
        "split": "test",
        "settings": settings,
        "seconds": time.perf_counter() - started,
        "metrics": evaluate_predictions(predictions, load_cosmology_info(options.data).prior, options.seed),
        "versions": library_versions(),
    }
    return result | _write(result, predictions, options.out, f"{options.method}, {Path(options.data).name} (test)")


def lines(result: dict[str, Any]) -> dict[str, str]:
    """Return what the screen shows of a result: a line for each metric."""
    shown = summary(result["metrics"])
    for name, value in result.get("baseline", {}).get("rmse_ratio", {}).items():
        shown[f"rmse of {name} over the baseline's"] = f"{value:.3f}"
    for plane, ratios in result.get("baseline", {}).get("contour_area_ratio", {}).items():
        shown[f"area of {plane} over the baseline's"] = f"{ratios['density']:.3f}"
    if "adaptive" in result.get("per_step", {}):
        shown["segments saved"] = f"{result['per_step']['adaptive']['segments_saved']:.1%}"
    shift = summary(result["shift"]["metrics"]) if "shift" in result else {}
    return shown | {f"shift {name}": line for name, line in shift.items()}


def _validate_same_sky(data: str, other: str) -> None:
    """A model has learnt the angular size of a pixel and the depth of its sources."""
    first, second = (load_cosmology_info(name).settings for name in (data, other))
    for field in ("size", "side_deg", "source_redshifts"):
        if getattr(first, field) != getattr(second, field):
            raise ValueError(
                f"{other} has {field}={getattr(second, field)}, {data} has {getattr(first, field)}: a shift test "
                "changes the generator alone; build the set with the same"
            )


def _read_results(path: Path) -> dict[str, Any]:
    file = path / RESULTS_FILE if path.is_dir() else path
    if not file.exists():
        raise UsageError(f"{file} does not exist; write it with hrm-hf eval cosmo-baseline --out")
    result = json.loads(file.read_text())
    if not isinstance(result, dict) or not {"parameters", "contour_area_68"} <= set(result.get("metrics", ())):
        raise UsageError(f"{file} holds no results of hrm-hf eval cosmo or cosmo-baseline")
    return result


def _write(result: dict[str, Any], predictions: CosmologyPredictions, out: Path | None, title: str) -> dict[str, str]:
    if out is None:
        return {}
    written = write_results(result, out)
    plots.plot_posteriors(predictions, result["metrics"], out, title)
    if "per_step" in result:
        plots.plot_steps(result["per_step"], out / "steps.png", title)
    return written | {"plots": str(out)}
