"""`hrm-hf solve`: puzzles from the command line, a file or stdin, answered and checked."""

import json
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from .report import validate_model


MAX_PROBLEMS = 3  # shown per puzzle; --json has all


class Halt(str, Enum):
    """When a puzzle stops."""

    q = "q"
    fixed = "fixed"


def solve(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a model on the Hub.")],
    puzzles: Annotated[
        list[str] | None,
        typer.Argument(help="Puzzles (Sudoku: 81 cells, . or 0 blank), ARC files, or - for stdin."),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="CSV or JSONL with a puzzle column, or an ARC JSON.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Most ACT steps; more than trained may help.")] = None,
    min_steps: Annotated[int, typer.Option(min=1, help="Fewest ACT steps.")] = 1,
    min_confidence: Annotated[
        float, typer.Option(min=0, max=1, help="Least confidence at which to stop; the model's own choice by default.")
    ] = 0.0,
    votes: Annotated[int, typer.Option(min=1, help="Symmetric views that vote.")] = 1,
    restarts: Annotated[int, typer.Option(min=1, help="Runs from noisy states, ranked by q_halt.")] = 1,
    noise: Annotated[float | None, typer.Option(min=0, help="Std of that noise. [default: 0.2]")] = None,
    halt: Annotated[Halt, typer.Option(help="q: stop when the model prefers to; fixed: use all steps.")] = Halt.q,
    prefer_valid: Annotated[
        bool, typer.Option("--prefer-valid", help="An answer that obeys the rules wins; this uses the rules.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Puzzles at a time.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of votes and noise.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the ACT steps of a single puzzle: .png or .gif.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of results.")] = False,
):
    """Solve puzzles with a trained model; answers that break the rules say so.

    Example: hrm-hf solve runs/sudoku_demo --file puzzles.csv --votes 8 --max-steps 32
    """
    validate_model(model)
    if not puzzles and file is None:
        raise typer.BadParameter("no puzzle given; expected PUZZLE arguments, - for stdin, or --file")
    if plot and plot.suffix not in (".png", ".gif"):
        raise typer.BadParameter(f"{plot} must end in .png or .gif", param_hint="--plot")
    from transformers import pipeline

    import hrm_hf  # noqa: F401 - registers the architectures

    solver = pipeline("puzzle-solving", model=model)
    inputs = [solver.read_puzzle(item, f"puzzle {i}: ") for i, item in enumerate(_gather(puzzles or [], file, solver))]
    if plot and len(inputs) != 1:
        raise typer.BadParameter(f"a plot shows one puzzle, not {len(inputs)}", param_hint="--plot")
    results = solver(
        inputs,
        max_steps=max_steps,
        min_steps=min_steps,
        min_confidence=min_confidence,
        votes=votes,
        restarts=restarts,
        noise=noise,
        halt=halt.value,
        prefer_valid=prefer_valid,
        batch_size=batch_size,
        seed=seed,
        return_trajectory=plot is not None,
    )
    if plot:
        _draw(solver, inputs[0], results[0], plot)
    if as_json:
        typer.echo(json.dumps(results))
        return
    typer.echo("\n\n".join(_describe(solver, result) for result in results))
    if len(results) > 1:
        typer.echo(_summary(results))
    if plot:
        typer.echo(f"drawn: {plot}")


def _gather(puzzles: list[str], file: Path | None, solver) -> list[Any]:
    """All puzzles of the arguments, of `file` and of stdin."""
    from ..puzzles.pipeline import read_puzzle_file

    inputs: list[Any] = []
    for puzzle in puzzles:
        if puzzle == "-":
            inputs += _from_text(sys.stdin.read(), solver.puzzle_task)
        else:
            rows = read_puzzle_file(puzzle)
            inputs += [puzzle] if rows is None else rows
    if file is not None:
        rows = read_puzzle_file(file)
        inputs += [str(file)] if rows is None else rows
    if not inputs:
        raise ValueError("stdin holds no puzzle")
    return inputs


def _from_text(text: str, task) -> list[Any]:
    """Puzzles of stdin: JSON (one puzzle, or a list of them), or blocks of lines with empty lines between.

    The lines of a block are puzzles if they have as many cells as a puzzle has, else they are the rows of one puzzle.
    """
    text = text.strip("\n\r")
    if text.lstrip()[:1] in ("{", "["):
        content = json.loads(text)
        return [content] if task.is_single(content) else content
    blocks, block = [], []
    for line in [*text.splitlines(), ""]:
        if line:  # an open row of a maze is a line of spaces
            block.append(line)
        elif block:
            blocks += block if all(len(line.rstrip("\r")) >= task.seq_len for line in block) else ["\n".join(block)]
            block = []
    return blocks


def _describe(solver, result: dict[str, Any]) -> str:
    lines = []
    tests = result.get("tests", [result])
    for i, answer in enumerate(tests):
        lines += [f"test input {i + 1}:"] if len(tests) > 1 else []
        lines += [text_board(answer["grid"], solver.model.config), _status(answer)]
        if answer["violations"]:
            more = len(answer["violations"]) - MAX_PROBLEMS
            problems = "; ".join(answer["violations"][:MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
            lines.append(f"breaks the rules: {problems}")
        for attempt in answer.get("attempts", [])[1:]:
            lines += ["second attempt:", text_board(attempt, solver.model.config)]
    return "\n".join(lines)


def _status(answer: dict[str, Any]) -> str:
    parts = [f"{answer['steps']} steps", f"confidence {answer['confidence']:.3f}"]
    if answer["votes"]["of"] > 1:
        parts.append(f"{answer['votes']['agree']} of {answer['votes']['of']} votes")
    if answer["valid"] and "attempts" not in answer:
        parts.append("obeys the rules")
    if "correct" in answer:
        parts.append("correct" if answer["correct"] else "not the given solution")
    return ", ".join(parts)


def _summary(results: list[dict[str, Any]]) -> str:
    parts = [f"{len(results)} puzzles", f"{sum(r['steps'] for r in results) / len(results):.2f} steps on average"]
    for name, words in (("valid", "valid"), ("correct", "correct")):
        known = [result[name] for result in results if result.get(name) is not None]
        if known:
            parts.append(f"{sum(known)} of {len(known)} {words}")
    return "\n" + ", ".join(parts)


def text_board(grid: list[list], config) -> str:
    """A board as text: Sudoku with box lines, mazes and ARC as they are, tokens in columns."""
    if config.task != "sudoku":
        width = max((len(str(cell)) for row in grid for cell in row), default=1)
        separator = "" if config.task == "maze" else " "
        return "\n".join(separator.join(str(cell).rjust(width) for cell in row) for row in grid) or "(no grid)"
    from ..puzzles.sudoku_rules import sudoku_shape

    size = len(grid)
    box_rows, box_columns = sudoku_shape(size).box_shape
    rule = "+" + "+".join(["-" * (2 * box_columns + 1)] * (size // box_columns)) + "+"
    lines = [rule]
    for i, row in enumerate(grid):
        cells = [str(digit) if digit else "." for digit in row]
        boxes = [" ".join(cells[start : start + box_columns]) for start in range(0, size, box_columns)]
        lines.append("| " + " | ".join(boxes) + " |")
        lines += [rule] if (i + 1) % box_rows == 0 else []
    return "\n".join(lines)


def _draw(solver, puzzle, result: dict[str, Any], path: Path) -> None:
    from ..puzzles.plots import plot_trajectory

    config, confidences = solver.model.config, result["confidences"]
    plot_trajectory(
        puzzle.questions[0], result["trajectory"], config, path, confidences=confidences, solution=puzzle.solutions[0]
    )
