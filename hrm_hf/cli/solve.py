"""`hrm-hf solve`: puzzles from the command line, a file or stdin, answered and checked."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import typer

from ..io.usage import counted
from ..puzzles.options import SolvePuzzles
from .command import takes, validate_model, write_json


MAX_PROBLEMS = 3  # shown per puzzle; --json has all


@takes(SolvePuzzles)
def solve(options: SolvePuzzles, as_json: bool):
    """Solve puzzles with a trained model; answers that break the rules say so.

    Example: hrm-hf solve 53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79

    Example: hrm-hf solve runs/sudoku_demo --file puzzles.csv --votes 8 --max-steps 32

    With --search the answer is no longer the model's: it is found by the rules, which the model helps.
    """
    validate_model(options.model, "PUZZLE_SOLVER")
    from ..puzzles.solve import solve_puzzles, text_board

    results, config = solve_puzzles(options)
    if options.out and not options.plot:
        write_json(results, options.out)
    if as_json:
        typer.echo(json.dumps(results))
        return

    typer.echo("\n\n".join(_describe(partial(text_board, config=config), result) for result in results))
    if len(results) > 1:
        typer.echo(_summary(results))
    if options.out:
        typer.echo(f"written: {options.out}")


def _describe(board: Callable[[list[list]], str], result: dict[str, Any]) -> str:
    lines = []
    tests = result.get("tests", [result])
    for i, answer in enumerate(tests):
        lines += [f"test input {i + 1}:"] if len(tests) > 1 else []
        lines += [board(answer["grid"]), _status(answer)]
        if answer["violations"]:
            more = len(answer["violations"]) - MAX_PROBLEMS
            problems = "; ".join(answer["violations"][:MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
            lines.append(f"breaks the rules: {problems}")
        for attempt in answer.get("attempts", [])[1:]:
            lines += ["second attempt:", board(attempt)]
    return "\n".join(lines)


def _status(answer: dict[str, Any]) -> str:
    parts = [counted(answer["steps"], "step"), f"confidence {answer['confidence']:.3f}"]
    if answer["votes"]["of"] > 1:
        parts.append(f"{answer['votes']['agree']} of {answer['votes']['of']} votes")
    if answer["valid"] and "attempts" not in answer:
        parts.append("obeys the rules")
    if search := answer.get("search"):
        how = "search found that there is no solution" if search["complete"] else "search was stopped"
        nodes = f"{counted(search['nodes'], 'node')}, {search['nodes_without_model']:,} without the model"
        parts.append(f"{'found by search' if search['solved'] else how} ({nodes})")
    if "correct" in answer:
        parts.append("correct" if answer["correct"] else "not the given solution")
    return ", ".join(parts)


def _summary(results: list[dict[str, Any]]) -> str:
    steps = sum(result["steps"] for result in results) / len(results)
    parts = [counted(len(results), "puzzle"), f"{steps:.2f} steps on average"]
    for name in ("valid", "correct"):
        known = [result[name] for result in results if result.get(name) is not None]
        if known:
            parts.append(f"{sum(known)} of {len(known)} {name}")
    return "\n" + ", ".join(parts)
