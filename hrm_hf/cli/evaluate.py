"""`hrm-hf eval`: evaluate a trained model on a test set, with one command per kind of task."""

import os
from typing import Any

import typer

from ..cosmology.options import EvaluateBaseline, EvaluateCosmo, EvaluateMassMaps
from ..golang.options import EvaluateGo
from ..puzzles.options import EvaluatePuzzles
from ..text.options import EvaluateLm, EvaluateReasoning
from .command import report, takes, validate_model


app = typer.Typer(no_args_is_help=True, help="Evaluate a trained model.")

# Metrics that are written to results.json and the plot but not printed.
NOT_ON_SCREEN = ("exact_accuracy_per_step", "exact_accuracy_per_step_interval", "steps_histogram", "reliability")
LM_ON_SCREEN = (
    "lm_loss", "perplexity", "bits_per_byte", "token_accuracy", "average_steps", "plan_loss", "code_loss", "tokens",
    "tokens_per_second",
)  # fmt: skip


@app.command()
@takes(EvaluateGo)
def go(options: EvaluateGo, as_json: bool):
    """Evaluate a Go coder: bits per byte, plans, code validity, decisions, repairs, pass@k.

    Example: hrm-hf eval go runs/go_nano --records data/go/test.jsonl --trajectories data/go/trajectories/test.jsonl
    --out runs/go_nano/eval --benchmark humaneval-go=humaneval_go.jsonl.gz
    """
    validate_model(options.model, "LANGUAGE_MODEL")
    from ..golang.evaluation.run import evaluate_checkpoint, on_screen

    result = evaluate_checkpoint(options, on_skip=lambda wrong: typer.echo(f"skipped: {wrong}", err=True))
    report(result, as_json, on_screen(result))


@app.command()
@takes(EvaluateLm)
def lm(options: EvaluateLm, as_json: bool):
    """Evaluate a causal language model on text: perplexity, bits per byte, average number of segments.

    Example: hrm-hf eval lm runs/hrm_lm --data input.txt --last-percentage 5 --num-segments 1 --out runs/hrm_lm/eval
    """
    validate_model(options.model, "LANGUAGE_MODEL")
    from ..text.evaluation import evaluate_checkpoint

    result = evaluate_checkpoint(options)
    metrics = result["metrics"]
    report(result, as_json, _rounded({name: metrics[name] for name in LM_ON_SCREEN if name in metrics}))


@app.command()
@takes(EvaluateReasoning)
def reasoning(options: EvaluateReasoning, as_json: bool):
    """Evaluate a language model on reasoning tasks: accuracy by difficulty and by number of passes.

    For each number of passes, the table shows the fraction of rows with only correct answers and the fraction of
    correct answers. If the model decides when to halt, the table adds the average number of passes in brackets.

    Example: hrm-hf eval reasoning runs/pointers data/pointers --passes 1,2,4,8 --out runs/pointers/eval
    """
    validate_model(options.model, "LANGUAGE_MODEL")
    from ..text.reasoning.evaluation import evaluate_checkpoint, table

    result = evaluate_checkpoint(options)
    metrics = {name: value for name, value in result["metrics"].items() if isinstance(value, float)}
    report(result, as_json, {"exact / cell accuracy": "\n" + table(result["metrics"]), **_rounded(metrics)})


@app.command()
@takes(EvaluateCosmo)
def cosmo(options: EvaluateCosmo, as_json: bool):
    """Evaluate a regressor: accuracy after each segment, and the posteriors' calibration and contour area.

    Example: hrm-hf eval cosmo runs/cosmo --data data/lognormal --baseline runs/gp --out runs/cosmo/eval
    """
    validate_model(options.model, "REGRESSOR")
    from ..cosmology.evaluation_run import evaluate_checkpoint, lines

    result = evaluate_checkpoint(options)
    report(result, as_json, lines(result))


@app.command("cosmo-baseline")
@takes(EvaluateBaseline)
def cosmo_baseline(options: EvaluateBaseline, as_json: bool):
    """Evaluate a baseline that uses power spectra, moments and histograms of the maps.

    Example: hrm-hf eval cosmo-baseline --data data/lognormal --method spectrum-gp --out runs/gp
    """
    from ..cosmology.evaluation_run import evaluate_baseline, lines

    result = evaluate_baseline(options)
    report(result, as_json, lines(result))


@app.command("cosmo-map")
@takes(EvaluateMassMaps)
def cosmo_map(options: EvaluateMassMaps, as_json: bool):
    """Evaluate mass maps from noisy, masked shear: error, agreement by multipole, peaks, uncertainty.

    Pass a trained MODEL or a classical --method. For a model, the results also include the error after each segment
    and the posteriors of the cosmological parameters.

    Example: hrm-hf eval cosmo-map runs/mass_64 --data data/shear64 --steps adaptive --out runs/mass_64/eval

    Example: hrm-hf eval cosmo-map --data data/shear64 --method wiener --draws 16 --out runs/wiener
    """
    if options.model is not None:
        validate_model(options.model, "MASS_MAPPER")
    from ..cosmology.evaluation_run import evaluate_model, evaluate_reconstruction, map_lines

    result = evaluate_reconstruction(options) if options.model is None else evaluate_model(options)
    report(result, as_json, map_lines(result))


@app.command()
@takes(EvaluatePuzzles)
def puzzles(options: EvaluatePuzzles, as_json: bool):
    """Evaluate a puzzle solver: accuracy per ACT step, halting, calibration, valid answers, ARC pass@K.

    Under torchrun, the puzzles are split among the processes, and rank 0 reports the results. Rates come with 95 %
    Wilson intervals.

    Example: hrm-hf eval puzzles runs/sudoku_demo data/sudoku --halt fixed --out runs/sudoku_demo/eval
    """
    from ..puzzles.evaluation import evaluate_checkpoint

    result = evaluate_checkpoint(options, shared=int(os.environ.get("WORLD_SIZE", "1")) > 1)
    shown = {name: value for name, value in result["metrics"].items() if name not in NOT_ON_SCREEN}
    tables = shown.pop("by_difficulty", {})
    report(result, as_json, shown | {f"by {measure}": _table(measure, rows) for measure, rows in tables.items()})


def _table(measure: str, rows: list[dict[str, Any]]) -> str:
    """Format accuracy by difficulty as a table with one line per bin."""
    lines = [f"\n  {measure:>14}  puzzles    exact  95 %"]
    for row in rows:
        ends = f"{row['low']:g}" if row["low"] == row["high"] else f"{row['low']:g} to {row['high']:g}"
        low, high = row["exact_accuracy_interval"]
        lines.append(f"  {ends:>14}  {row['count']:7,}  {row['exact_accuracy']:7.1%}  {low:.1%} to {high:.1%}")
    return "\n".join(lines)


def _rounded(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in metrics.items()}
