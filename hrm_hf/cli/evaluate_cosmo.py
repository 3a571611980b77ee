"""`hrm-hf eval cosmo`, `cosmo-baseline` and `cosmo-map`: posteriors of cosmological parameters, and mass maps."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..io.evaluation import validate_data, validate_evaluation, validate_output
from .report import AsJson, Device, UpdateCard, run, usage_errors, validate_model


Steps = Literal["fixed", "adaptive"]  # how many segments of recurrence a map gets
# Baselines; the names of `hrm_hf.cosmology.baselines.METHODS`.
Method = Literal["spectrum-ridge", "spectrum-quadratic", "spectrum-gp", "spectrum-pdf-ridge", "spectrum-pdf-quadratic"]
# Mass maps without training; the names of `hrm_hf.cosmology.mass_maps.evaluation_run.METHODS`.
MapMethod = Literal["kaiser-squires", "wiener", "wiener-mean", "lognormal"]
# Options of `cosmo-map` for one of its two forms alone.
OF_MODELS = ("split", "steps", "max_steps", "num_samples", "device", "update_card")
OF_METHODS = ("train", "regression", "draws")


def cosmo(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a model on the Hub.")],
    data: Annotated[str, typer.Option(help="Cosmology data set: folder, or a data set on the Hub.")],
    split: Annotated[str, typer.Option(help="Split to evaluate.")] = "test",
    steps: Annotated[
        Steps, typer.Option(help="fixed: all segments; adaptive: until little more is expected of them.")
    ] = "fixed",
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
    device: Device = None,
    update_card: UpdateCard = False,
    as_json: AsJson = False,
):
    """Accuracy, calibration and contour area of a regressor's posteriors; accuracy per segment of its recurrence.

    Example: hrm-hf eval cosmo runs/cosmo --data data/lognormal --baseline runs/gp --out runs/cosmo/eval
    """
    options = dict(locals())
    validate_model(model, "REGRESSOR")
    with usage_errors():
        validate_evaluation(model, out, update_card)
        for each in filter(None, (data, shift_data)):
            validate_data(each, "cosmology data set")
    from ..cosmology.evaluation_run import evaluate_checkpoint

    run(evaluate_checkpoint, options, _on_screen)


def cosmo_baseline(
    data: Annotated[str, typer.Option(help="Cosmology data set: folder, or a data set on the Hub.")],
    method: Annotated[Method, typer.Option(help="Summaries of a map, and the regression on them.")],
    train: Annotated[int | None, typer.Option(min=10, help="Only the first maps of the training split.")] = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Only the first maps of the test split.")] = None,
    num_samples: Annotated[int, typer.Option(min=100, help="Draws from each posterior.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of draws and of TARP's reference points.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and pictures.")] = None,
    as_json: AsJson = False,
):
    """Evaluate a regression on power spectra, moments and histograms of the same maps.

    Example: hrm-hf eval cosmo-baseline --data data/lognormal --method spectrum-gp --out runs/gp
    """
    options = dict(locals())
    with usage_errors():
        validate_data(data, "cosmology data set")
        if out is not None:
            validate_output(out)
    from ..cosmology.evaluation import summary
    from ..cosmology.evaluation_run import evaluate_baseline

    run(evaluate_baseline, options, lambda result: summary(result["metrics"]))


def cosmo_map(
    data: Annotated[str, typer.Option(help="Data set of shear: folder, or a data set on the Hub.")],
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint folder, or a model on the Hub; or else give --method.")
    ] = None,
    method: Annotated[
        MapMethod | None,
        typer.Option(
            help="In place of MODEL. kaiser-squires: smoothed as is best for training maps; wiener: with the true "
            "spectrum of each map; wiener-mean: with the mean spectrum of training maps; lognormal: the exact "
            "posterior by sampling, with each map's true parameters, which takes minutes for a hundred maps."
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Of a model: split to evaluate; test by default.")] = None,
    steps: Annotated[
        Steps | None,
        typer.Option(
            help="Of a model: fixed, the default: all segments; adaptive: until little more is expected of them."
        ),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Of a model: most segments; the config's by default.")
    ] = None,
    num_samples: Annotated[
        int | None, typer.Option(min=100, help="Of a model: draws from each posterior; 1000 by default.")
    ] = None,
    train: Annotated[
        int | None,
        typer.Option(min=10, help="Of a method: first maps of the training split that are used; 1000 by default."),
    ] = None,
    regression: Annotated[
        Method | None,
        typer.Option(help="Of a method: also infer parameters from the mass maps: summaries, and the regression."),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(
            min=0, help="Of a Wiener filter: draws of its error, for the uncertainty of pixels; none by default."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Maps at a time; by default 50 of a model and 100 of a method.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Only the first maps of the split.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of draws and bootstraps.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and pictures.")] = None,
    device: Device = None,
    update_card: UpdateCard = False,
    as_json: AsJson = False,
):
    """Mass maps from noisy, masked shear, by a model or a method: error, agreement by multipole, peaks, uncertainty.

    Of a model also the error after each segment, and its posteriors of cosmological parameters.

    Example: hrm-hf eval cosmo-map runs/mass_64 --data data/shear64 --steps adaptive --out runs/mass_64/eval

    Example: hrm-hf eval cosmo-map --data data/shear64 --method wiener --draws 16 --out runs/wiener
    """
    # The defaults of what is not given are those of the two functions.
    options = {name: value for name, value in locals().items() if value is not None and value is not False}
    _validate_form(options)
    if model is not None:
        validate_model(model, "MASS_MAPPER")
    with usage_errors():
        if model is not None:
            validate_evaluation(model, out, update_card)
        elif out is not None:
            validate_output(out)
        validate_data(data, "cosmology data set")
    from ..cosmology.mass_maps.evaluation_run import evaluate_model, evaluate_reconstruction, summary

    run(evaluate_reconstruction if model is None else evaluate_model, options | {"as_json": as_json}, summary)


def _validate_form(options: dict[str, Any]) -> None:
    """Refuses `cosmo-map` with a model and a method, with neither, or with options of the other one."""
    if ("model" in options) == ("method" in options):
        found = "both are given" if "model" in options else "neither is given"
        raise typer.BadParameter(
            f"{found}; expected one: a trained model, or a method that needs none", param_hint="MODEL or --method"
        )
    others, wanted = (OF_METHODS, "--method") if "model" in options else (OF_MODELS, "MODEL")
    for name in others:
        if name in options:
            raise typer.BadParameter(
                f"goes with {wanted} only, which is not given; leave it out",
                param_hint=f"--{name.replace('_', '-')}",
            )


def _on_screen(result: dict[str, Any]) -> dict[str, str]:
    from ..cosmology.evaluation import summary

    shift = summary(result["shift"]["metrics"]) if "shift" in result else {}
    return summary(result["metrics"]) | _comparison(result) | {f"shift {name}": line for name, line in shift.items()}


def _comparison(result: dict[str, Any]) -> dict[str, str]:
    lines = {}
    for name, value in result.get("baseline", {}).get("rmse_ratio", {}).items():
        lines[f"rmse of {name} over the baseline's"] = f"{value:.3f}"
    for plane, ratios in result.get("baseline", {}).get("contour_area_ratio", {}).items():
        lines[f"area of {plane} over the baseline's"] = f"{ratios['density']:.3f}"
    if "adaptive" in result["per_step"]:
        lines["segments saved"] = f"{result['per_step']['adaptive']['segments_saved']:.1%}"
    return lines
