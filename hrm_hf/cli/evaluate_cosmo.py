"""`hrm-hf eval cosmo` and `hrm-hf eval cosmo-baseline`: posteriors of cosmological parameters, and what to beat."""

import json
import time
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from .data import report
from .evaluate_checks import RESULTS_FILE, check_arguments, check_data, check_folder, chosen_device, model_config


TASK = "cosmology-regression"


class Steps(str, Enum):
    """How many segments of recurrence a map gets."""

    fixed = "fixed"
    adaptive = "adaptive"


class Method(str, Enum):
    """Baselines; the names of `hrm_hf.cosmology.baselines.METHODS`."""

    spectrum_ridge = "spectrum-ridge"
    spectrum_quadratic = "spectrum-quadratic"
    spectrum_gp = "spectrum-gp"
    spectrum_pdf_ridge = "spectrum-pdf-ridge"
    spectrum_pdf_quadratic = "spectrum-pdf-quadratic"


def cosmo(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a model on the Hub.")],
    data: Annotated[str, typer.Option(help="Cosmology data set: folder, or a data set on the Hub.")],
    split: Annotated[str, typer.Option(help="Split to evaluate.")] = "test",
    steps: Annotated[
        Steps, typer.Option(help="fixed: all segments; adaptive: until little more is expected of them.")
    ] = Steps.fixed,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Most segments; the config's by default.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="results.json of cosmo-baseline, or its folder: adds ratios to it.")
    ] = None,
    shift_data: Annotated[
        str | None, typer.Option(help="Data set of another generator: the same figures on it, beside the first.")
    ] = None,
    num_samples: Annotated[int, typer.Option(min=100, help="Draws from each posterior.")] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Maps at a time.")] = 64,
    limit: Annotated[int | None, typer.Option(min=2, help="Only the first maps of the split.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of draws and of TARP's reference points.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and pictures.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps, ...; the best there is by default.")] = None,
    update_card: Annotated[
        bool, typer.Option("--update-card", help="Write the results into MODEL/README.md.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
):
    """Accuracy, calibration and contour area of a regressor's posteriors; accuracy per segment of its recurrence.

    Example: hrm-hf eval cosmo runs/cosmo --data data/lognormal --baseline runs/gp --out runs/cosmo/eval
    """
    check_arguments(model, out, update_card)
    check_data(data, "cosmology data set")
    if shift_data:
        check_data(shift_data, "cosmology data set")
    device = chosen_device(device)
    reference = _read_results(baseline) if baseline else None
    if shift_data:
        _check_same_sky(data, shift_data)
    from ..cosmology.evaluation import compare
    from ..trainer.recipes import library_versions

    network, extractor = _load(model, device)
    most = network.config.to_dict().get("halt_max_steps", 1)
    if steps is Steps.adaptive and most == 1:
        raise typer.BadParameter(f"{model} has one segment only; there is nothing to halt", param_hint="--steps")
    settings = {"steps": steps.value, "max_steps": max_steps or most, "num_samples": num_samples, "seed": seed}
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
    if as_json:
        report({**result, **written}, True)
    else:
        shown = summary(result["metrics"]) | _comparison(result)
        if shift_data:
            shown |= {f"shift {name}": line for name, line in summary(result["shift"]["metrics"]).items()}
        report({**shown, **written}, False)


def cosmo_baseline(
    data: Annotated[str, typer.Option(help="Cosmology data set: folder, or a data set on the Hub.")],
    method: Annotated[Method, typer.Option(help="Summaries of a map, and the regression on them.")],
    train: Annotated[int | None, typer.Option(min=10, help="Only the first maps of the training split.")] = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Only the first maps of the test split.")] = None,
    num_samples: Annotated[int, typer.Option(min=100, help="Draws from each posterior.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of draws and of TARP's reference points.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and pictures.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
):
    """What a regression on power spectra, moments and histograms makes of the same maps.

    Example: hrm-hf eval cosmo-baseline --data data/lognormal --method spectrum-gp --out runs/gp
    """
    check_data(data, "cosmology data set")
    if out is not None:
        check_folder(out)
    from ..cosmology.baselines import run_baseline
    from ..cosmology.evaluation import evaluate_predictions
    from ..trainer.recipes import library_versions

    prior, train_maps = _maps(data, "train", train)
    _, test_maps = _maps(data, "test", limit)
    started = time.perf_counter()
    predictions = run_baseline(method.value, train_maps, test_maps, num_samples=num_samples, seed=seed)
    result = {
        "task": TASK,
        "method": method.value,
        "dataset": data,
        "split": "test",
        "settings": {"train": len(train_maps.maps), "limit": limit, "num_samples": num_samples, "seed": seed},
        "seconds": time.perf_counter() - started,
        "metrics": evaluate_predictions(predictions, prior, seed),
        "versions": library_versions(),
    }
    written = _write(result, predictions, out, f"{method.value}, {Path(data).name} (test)")
    if as_json:
        report({**result, **written}, True)
    else:
        report({**summary(result["metrics"]), **written}, False)


class Evaluation:
    """One model with one set of settings, on any number of data sets."""

    def __init__(self, model, extractor, batch_size: int, settings: dict[str, Any]):
        self.model, self.extractor, self.batch_size, self.settings = model, extractor, batch_size, settings

    def on(self, data: str, split: str, limit: int | None) -> dict[str, Any]:
        """`predictions`, their `metrics`, and `per_step`: RMSE after each segment, and adaptive halting beside it."""
        from ..cosmology.evaluation import evaluate_predictions, rmse_per_step

        prior, maps = _maps(data, split, limit)
        predictions, segments, speed = self._predict(maps, "fixed")
        per_step: dict[str, Any] = {"rmse": rmse_per_step(predictions, segments)}
        if self.settings["steps"] == "adaptive":
            predictions, segments, speed = self._predict(maps, "adaptive")
        metrics = evaluate_predictions(predictions, prior, self.settings["seed"]) | {"maps_per_second": speed}
        if self.settings["steps"] == "adaptive":
            per_step["adaptive"] = {
                "rmse": {name: figures["rmse"] for name, figures in metrics["parameters"].items()},
                "average_steps": metrics["average_steps"],
                "steps_histogram": metrics["steps_histogram"],
                "segments_saved": 1 - metrics["average_steps"] / self.settings["max_steps"],
            }
        return {"predictions": predictions, "metrics": metrics, "per_step": per_step}

    def _predict(self, maps, halt: str):
        from ..cosmology.evaluation import predict_maps

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
    from transformers import AutoFeatureExtractor, AutoModelForImageClassification

    kind = model_config(name).model_type
    if kind not in ("hrm_cosmo", "cosmo_cnn"):
        raise ValueError(f"{name} is a model of type {kind}; expected hrm_cosmo or cosmo_cnn")
    model = AutoModelForImageClassification.from_pretrained(name).to(device).eval()
    return model, AutoFeatureExtractor.from_pretrained(name)


def _maps(data: str, split: str, limit: int | None):
    """Prior and maps of a split."""
    from ..cosmology.baselines import MapSet
    from ..cosmology.dataset.rows import load_cosmology_info, read_arrays

    info, rows = load_cosmology_info(data), read_arrays(data, split)
    names = [name for name in ("omega_m", "sigma_8", "s_8") if name in rows]
    maps = MapSet(rows["map"], {name: rows[name] for name in names}, rows.get("mask"))
    return info.prior, maps if limit is None else maps.head(limit)


def _check_same_sky(data: str, other: str) -> None:
    """A model has learnt the angular size of a pixel and the depth of its sources."""
    from ..cosmology.dataset.rows import load_cosmology_info

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
        raise typer.BadParameter(f"{file} does not exist; write it with hrm-hf eval cosmo-baseline --out")
    try:
        result = json.loads(file.read_text())
    except ValueError as error:
        raise typer.BadParameter(f"{file} is no JSON: {error}") from error
    if not isinstance(result, dict) or not {"parameters", "contour_area_68"} <= set(result.get("metrics", ())):
        raise typer.BadParameter(f"{file} holds no results of hrm-hf eval cosmo or cosmo-baseline")
    return result


def summary(metrics: dict[str, Any]) -> dict[str, str]:
    """A line for each parameter, and one for each joint figure."""
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
    return lines


def _comparison(result: dict[str, Any]) -> dict[str, str]:
    lines = {}
    for name, value in result.get("baseline", {}).get("rmse_ratio", {}).items():
        lines[f"rmse of {name} over the baseline's"] = f"{value:.3f}"
    for plane, ratios in result.get("baseline", {}).get("contour_area_ratio", {}).items():
        lines[f"area of {plane} over the baseline's"] = f"{ratios['density']:.3f}"
    if "adaptive" in result["per_step"]:
        lines["segments saved"] = f"{result['per_step']['adaptive']['segments_saved']:.1%}"
    return lines


def _update_card(model: str, result: dict[str, Any]) -> str:
    from ..cosmology.regression import card_figures
    from ..hub.cards import record_evaluation

    metrics = result["metrics"]
    chosen = card_figures(metrics)
    if "average_steps" in metrics:
        chosen["average_steps"] = metrics["average_steps"]
    settings = {name: value for name, value in result["settings"].items() if value is not None}
    return str(record_evaluation(model, chosen, result["dataset"], result["split"], result["parameters"], **settings))


def _write(result: dict[str, Any], predictions, out: Path | None, title: str) -> dict[str, str]:
    if out is None:
        return {}
    from ..cosmology import plots as plots

    out.mkdir(parents=True, exist_ok=True)
    file = out / RESULTS_FILE
    file.write_text(json.dumps(result, indent=1))
    plots.plot_corner(predictions, out / "corner.png", title=title)
    plots.plot_predictions(predictions, out / "predictions.png", result["metrics"], title)
    plots.plot_calibration(predictions, out / "calibration.png", result["metrics"], title)
    if "per_step" in result:
        plots.plot_steps(result["per_step"], out / "steps.png", title)
    return {"results": str(file), "plots": str(out)}
