"""`hrm-hf eval cosmo`, `cosmo-baseline` and `cosmo-map`: posteriors of cosmological parameters, and mass maps."""

from collections.abc import Callable
from typing import Any

from ..cosmology.options import EvaluateBaseline, EvaluateCosmo, EvaluateMassMaps
from .options import takes
from .report import WRITTEN, report, usage_errors, validate_model


@takes(EvaluateCosmo)
def cosmo(options: EvaluateCosmo, as_json: bool):
    """Accuracy, calibration and contour area of a regressor's posteriors; accuracy per segment of its recurrence.

    Example: hrm-hf eval cosmo runs/cosmo --data data/lognormal --baseline runs/gp --out runs/cosmo/eval
    """
    validate_model(options.model, "REGRESSOR")
    from ..cosmology.evaluation_run import evaluate_checkpoint, lines

    _show(evaluate_checkpoint, options, as_json, lines)


@takes(EvaluateBaseline)
def cosmo_baseline(options: EvaluateBaseline, as_json: bool):
    """Evaluate a regression on power spectra, moments and histograms of the same maps.

    Example: hrm-hf eval cosmo-baseline --data data/lognormal --method spectrum-gp --out runs/gp
    """
    from ..cosmology.evaluation_run import evaluate_baseline, lines

    _show(evaluate_baseline, options, as_json, lines)


@takes(EvaluateMassMaps)
def cosmo_map(options: EvaluateMassMaps, as_json: bool):
    """Mass maps from noisy, masked shear, by a model or a method: error, agreement by multipole, peaks, uncertainty.

    Of a model also the error after each segment, and its posteriors of cosmological parameters.

    Example: hrm-hf eval cosmo-map runs/mass_64 --data data/shear64 --steps adaptive --out runs/mass_64/eval

    Example: hrm-hf eval cosmo-map --data data/shear64 --method wiener --draws 16 --out runs/wiener
    """
    if options.model is not None:
        validate_model(options.model, "MASS_MAPPER")
    from ..cosmology.map_evaluation import evaluate_model, evaluate_reconstruction, lines

    _show(evaluate_reconstruction if options.model is None else evaluate_model, options, as_json, lines)


def _show(evaluate: Callable, options: Any, as_json: bool, lines: Callable[[dict[str, Any]], dict[str, str]]) -> None:
    """Evaluate, and print the result: all of it with --json, else `lines` of it and the files that were written."""
    with usage_errors():
        result = evaluate(options)
    written = {name: result[name] for name in WRITTEN if name in result}
    report(result if as_json else lines(result) | written, as_json)
