"""`hrm-hf eval`: what a trained model is worth on a test set. One command per kind of task."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..io.evaluation import validate_data, validate_evaluation
from .evaluate_cosmo import cosmo, cosmo_baseline, cosmo_map
from .evaluate_go import go
from .evaluate_lm import lm, reasoning
from .report import AsJson, Device, UpdateCard, run, usage_errors, validate_model
from .solve import Choose, ExitWhenStill, Halt, Noise, NoiseAt, Restarts


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
def puzzles(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a model on the Hub.")],
    data: Annotated[str, typer.Argument(help="Puzzle data set: ours or the original's .npy arrays, or on the Hub.")],
    split: Annotated[str, typer.Option(help="Split to evaluate.")] = "test",
    max_steps: Annotated[int | None, typer.Option(min=1, help="Most ACT steps; the config's by default.")] = None,
    min_steps: Annotated[int, typer.Option(min=1, help="Fewest ACT steps.")] = 1,
    min_confidence: Annotated[
        float, typer.Option(min=0, max=1, help="Least confidence at which to stop; the model's own choice by default.")
    ] = 0.0,
    halt: Annotated[Halt, typer.Option(help="q: adaptive; fixed: all steps, as the original evaluates.")] = "q",
    restarts: Restarts = 1,
    noise: Noise = None,
    noise_at: NoiseAt = "start",
    choose: Choose = "q",
    exit_when_still: ExitWhenStill = None,
    search: Annotated[
        bool, typer.Option("--search", help="Add what a search finds whose guesses the model orders; for Sudoku.")
    ] = False,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Puzzles at a time; as many as stay in a CPU's cache by default.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows of the split.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and evaluation.png.")] = None,
    device: Device = None,
    by_difficulty: Annotated[
        bool, typer.Option("--by-difficulty", help="Also by rating or path length, and by the clues of Sudoku boards.")
    ] = False,
    update_card: UpdateCard = False,
    as_json: AsJson = False,
):
    """Accuracy per ACT step, halting, calibration and obedience to the rules; pass@K by voting for ARC.

    Processes that torchrun starts share the puzzles; the first one prints and writes.

    Shares of puzzles come with their Wilson interval of 95 %.

    Example: hrm-hf eval puzzles runs/sudoku_demo data/sudoku --halt fixed --out runs/sudoku_demo/eval
    """
    options = dict(locals())
    validate_model(model, "PUZZLE_SOLVER")
    with usage_errors():
        validate_evaluation(model, out, update_card)
        validate_data(data, "puzzle data set")
    from ..puzzles.evaluation import evaluate_checkpoint

    run(evaluate_checkpoint, options | {"shared": int(os.environ.get("WORLD_SIZE", "1")) > 1}, _on_screen)


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
