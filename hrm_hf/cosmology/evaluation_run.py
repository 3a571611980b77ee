"""Evaluates a saved regressor, or a baseline, on a data set: predictions, figures, pictures, the model's card."""

import json
import time
from pathlib import Path
from typing import Any

from transformers import AutoFeatureExtractor, AutoModelForImageClassification

from ..hub.cards import record_evaluation
from ..hub.kinds import REGRESSOR, load_config
from ..io.evaluation import (
    RESULTS_FILE,
    chosen_device,
    validate_data,
    validate_evaluation,
    validate_output,
    write_results,
)
from ..io.usage import UsageError
from ..trainer.recipes import library_versions
from . import plots
from .baselines import MapSet, run_baseline
from .dataset.rows import load_cosmology_info, read_arrays
from .evaluation import card_figures, compare, evaluate_predictions, map_distances, predict_maps, rmse_per_step


TASK = "cosmology-regression"


def evaluate_checkpoint(
    model: str,
    data: str,
    *,
    split: str = "test",
    steps: str = "fixed",
    max_steps: int | None = None,
    baseline: Path | None = None,
    shift_data: str | None = None,
    num_samples: int = 1000,
    batch_size: int = 64,
    limit: int | None = None,
    seed: int = 0,
    out: Path | None = None,
    device: str | None = None,
    update_card: bool = False,
) -> dict[str, Any]:
    """Evaluates the posteriors of a regressor: accuracy, calibration, contour area, accuracy per segment.

    Args:
        steps: "fixed" for all segments, "adaptive" until little more is expected of them.
        baseline: results.json of `evaluate_baseline`, or its folder; adds ratios to it.
        shift_data: a data set of another generator; the same figures on it, beside the first.
        num_samples: draws from each posterior.
        out: folder for results.json and pictures.

    Returns:
        What results.json holds, and the names of the files that were written.

    Raises:
        UsageError: a path, a device or a baseline that is none, or adaptive steps of a model with one segment.
        ModelError: a model that is nowhere, or of another kind.
        ValueError: data sets of different skies.
    """
    validate_evaluation(model, out, update_card)
    load_config(model, REGRESSOR)
    validate_data(data, "cosmology data set")
    if shift_data:
        validate_data(shift_data, "cosmology data set")
    device = chosen_device(device)
    reference = _read_results(baseline) if baseline else None
    if shift_data:
        _validate_same_sky(data, shift_data)
    network, extractor = _load(model, device)
    most = network.config.to_dict().get("halt_max_steps", 1)
    if steps == "adaptive" and most == 1:
        raise UsageError(f"{model} has one segment only; there is nothing to halt", "--steps")
    settings = {"steps": steps, "max_steps": max_steps or most, "num_samples": num_samples, "seed": seed}
    run = Evaluation(network, extractor, batch_size, settings)
    found = run.on(data, split, limit)
    result = {
        "task": TASK,
        "model": model,
        "dataset": data,
        "split": split,
        "settings": settings | {"limit": limit},
        "metrics": found["metrics"],
        "per_step": found["per_step"],
        "parameters": network.num_parameters(),
        "versions": library_versions(),
    }
    if reference:
        result["baseline"] = {"results": str(baseline), **compare(found["metrics"], reference["metrics"])}
    if shift_data:
        shifted = run.on(shift_data, split, limit)
        result["shift"] = {"dataset": shift_data, "metrics": shifted["metrics"], "per_step": shifted["per_step"]}
    written = _write(result, found["predictions"], out, f"{Path(model).name}, {Path(data).name} ({split})")
    if update_card:
        written["card"] = _update_card(model, result)
    return result | written


def evaluate_baseline(
    data: str,
    method: str,
    *,
    train: int | None = None,
    limit: int | None = None,
    num_samples: int = 1000,
    seed: int = 0,
    out: Path | None = None,
) -> dict[str, Any]:
    """Evaluates a regression on summaries of the same maps; `method` is one of `baselines.METHODS`."""
    validate_data(data, "cosmology data set")
    if out is not None:
        validate_output(out)
    prior, train_maps = _maps(data, "train", train)
    _, test_maps = _maps(data, "test", limit)
    started = time.perf_counter()
    predictions = run_baseline(method, train_maps, test_maps, num_samples=num_samples, seed=seed)
    result = {
        "task": TASK,
        "method": method,
        "dataset": data,
        "split": "test",
        "settings": {"train": len(train_maps.maps), "limit": limit, "num_samples": num_samples, "seed": seed},
        "seconds": time.perf_counter() - started,
        "metrics": evaluate_predictions(predictions, prior, seed),
        "versions": library_versions(),
    }
    written = _write(result, predictions, out, f"{method}, {Path(data).name} (test)")
    return result | written


class Evaluation:
    """One model with one set of settings, on any number of data sets."""

    def __init__(self, model, extractor, batch_size: int, settings: dict[str, Any]):
        self.model, self.extractor, self.batch_size, self.settings = model, extractor, batch_size, settings

    def on(self, data: str, split: str, limit: int | None) -> dict[str, Any]:
        """`predictions`, their `metrics`, and `per_step`: RMSE after each segment, and adaptive halting beside it."""
        prior, maps = _maps(data, split, limit)
        predictions, segments, speed = self._predict(maps, "fixed")
        per_step: dict[str, Any] = {"rmse": rmse_per_step(predictions, segments)}
        if self.settings["steps"] == "adaptive":
            predictions, segments, speed = self._predict(maps, "adaptive")
        metrics = evaluate_predictions(predictions, prior, self.settings["seed"]) | {"maps_per_second": speed}
        distances = map_distances(self.model, self.extractor, maps.maps, maps.masks, self.batch_size)
        metrics |= {} if distances is None else {"map_distance": distances}
        if self.settings["steps"] == "adaptive":
            per_step["adaptive"] = {
                "rmse": {name: figures["rmse"] for name, figures in metrics["parameters"].items()},
                "average_steps": metrics["average_steps"],
                "steps_histogram": metrics["steps_histogram"],
                "segments_saved": 1 - metrics["average_steps"] / self.settings["max_steps"],
            }
        return {"predictions": predictions, "metrics": metrics, "per_step": per_step}

    def _predict(self, maps, halt: str):
        return predict_maps(
            self.model,
            self.extractor,
            maps.maps,
            maps.labels,
            maps.masks,
            halt=halt,
            max_steps=self.settings["max_steps"],
            num_samples=self.settings["num_samples"],
            batch_size=self.batch_size,
            seed=self.settings["seed"],
            progress=None,
        )


def _load(name: str, device: str):
    model = AutoModelForImageClassification.from_pretrained(name).to(device).eval()
    return model, AutoFeatureExtractor.from_pretrained(name)


def _maps(data: str, split: str, limit: int | None):
    """Prior and maps of a split."""
    info, rows = load_cosmology_info(data), read_arrays(data, split)
    names = [name for name in ("omega_m", "sigma_8", "s_8") if name in rows]
    maps = MapSet(rows["map"], {name: rows[name] for name in names}, rows.get("mask"))
    return info.prior, maps if limit is None else maps.head(limit)


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
    try:
        result = json.loads(file.read_text())
    except ValueError as error:
        raise UsageError(f"{file} is no JSON: {error}") from error
    if not isinstance(result, dict) or not {"parameters", "contour_area_68"} <= set(result.get("metrics", ())):
        raise UsageError(f"{file} holds no results of hrm-hf eval cosmo or cosmo-baseline")
    return result


def _update_card(model: str, result: dict[str, Any]) -> str:
    metrics = result["metrics"]
    chosen = card_figures(metrics)
    if "average_steps" in metrics:
        chosen["average_steps"] = metrics["average_steps"]
    settings = {name: value for name, value in result["settings"].items() if value is not None}
    return str(record_evaluation(model, chosen, result["dataset"], result["split"], result["parameters"], **settings))


def _write(result: dict[str, Any], predictions, out: Path | None, title: str) -> dict[str, str]:
    if out is None:
        return {}
    written = write_results(result, out)
    plots.plot_corner(predictions, out / "corner.png", title=title)
    plots.plot_predictions(predictions, out / "predictions.png", result["metrics"], title)
    plots.plot_calibration(predictions, out / "calibration.png", result["metrics"], title)
    if "per_step" in result:
        plots.plot_steps(result["per_step"], out / "steps.png", title)
    return written | {"plots": str(out)}
