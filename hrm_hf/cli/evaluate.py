"""`hrm-hf eval`: what a trained model is worth on a test set. One command per kind of task."""

import os
from typing import Any

import typer

from ..puzzles.options import EvaluatePuzzles
from .evaluate_cosmo import cosmo, cosmo_baseline, cosmo_map
from .evaluate_go import go
from .evaluate_lm import lm, reasoning
from .options import takes
from .report import run


app = typer.Typer(no_args_is_help=True, help="Evaluate a trained model.")
app.command("go")(go)
app.command("lm")(lm)
app.command("reasoning")(reasoning)
app.command("cosmo")(cosmo)
app.command("cosmo-baseline")(cosmo_baseline)
app.command("cosmo-map")(cosmo_map)

# These are in results.json and in the plot.
NOT_ON_SCREEN = ("exact_accuracy_per_step", "exact_accuracy_per_step_interval", "steps_histogram", "reliability")


@app.callback()
def _group() -> None:
    """Evaluate a trained model."""


@app.command()
@takes(EvaluatePuzzles)
def puzzles(options: EvaluatePuzzles, as_json: bool):
    """Accuracy per ACT step, halting, calibration and obedience to the rules; pass@K by voting for ARC.

    Processes that torchrun starts share the puzzles; the first one prints and writes.

    Shares of puzzles come with their Wilson interval of 95 %.

    Example: hrm-hf eval puzzles runs/sudoku_demo data/sudoku --halt fixed --out runs/sudoku_demo/eval
    """
    from ..puzzles.evaluation import evaluate_checkpoint

    run(evaluate_checkpoint, options, as_json, _on_screen, shared=int(os.environ.get("WORLD_SIZE", "1")) > 1)


def _on_screen(result: dict[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in result["metrics"].items() if name not in NOT_ON_SCREEN}
    tables = shown.pop("by_difficulty", {})
    return shown | {f"by {measure}": "\n" + _table(measure, rows) for measure, rows in tables.items()}


def _table(measure: str, rows: list[dict[str, Any]]) -> str:
    """Accuracy by difficulty, a line a bin."""
    lines = [f"  {measure:>14}  puzzles    exact  95 %"]
    for row in rows:
        ends = f"{row['low']:g}" if row["low"] == row["high"] else f"{row['low']:g} to {row['high']:g}"
        low, high = row["exact_accuracy_interval"]
        lines.append(f"  {ends:>14}  {row['count']:7,}  {row['exact_accuracy']:7.1%}  {low:.1%} to {high:.1%}")
    return "\n".join(lines)
