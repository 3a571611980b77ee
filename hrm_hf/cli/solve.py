"""`hrm-hf solve`: puzzles from the command line, a file or stdin, answered and checked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..io.words import counted
from .report import Device, call, validate_model, write_json


MAX_PROBLEMS = 3  # shown per puzzle; --json has all
PICTURES = (".png", ".gif")


# Options of `hrm-hf eval puzzles`, too.
Halt = Literal["q", "fixed"]  # when a puzzle stops
Restarts = Annotated[int, typer.Option(min=1, help="Runs of each puzzle; all but the first have noise.")]
Noise = Annotated[float | None, typer.Option(min=0, help="Std of that noise. [default: 0.2, where it is needed]")]
NoiseAt = Annotated[
    Literal["start", "every_step"],
    typer.Option(help="On the initial states, or before every ACT step."),
]
Choose = Annotated[
    Literal["q", "residual", "vote", "rules"],
    typer.Option(
        help="Which run stands: the surest, the stillest, the answer of most, or the first that obeys the rules."
    ),
]
ExitWhenStill = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="A run also stops when its state moves by less than this share, such as 0.001."),
]


def solve(
    puzzles: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] PUZZLE...",
            help="Checkpoint folder or model on the Hub, by default one that comes with hrm_hf (9x9 Sudoku, 15x15 "
            "mazes); then puzzles (Sudoku: 81 cells, . or 0 blank), ARC files, or - for stdin.",
        ),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="CSV or JSONL with a puzzle column, or an ARC JSON.")] = None,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Most ACT steps; more than trained may help.")] = None,
    min_steps: Annotated[int, typer.Option(min=1, help="Fewest ACT steps.")] = 1,
    min_confidence: Annotated[
        float, typer.Option(min=0, max=1, help="Least confidence at which to stop; the model's own choice by default.")
    ] = 0.0,
    votes: Annotated[int, typer.Option(min=1, help="Symmetric views that vote.")] = 1,
    restarts: Restarts = 1,
    noise: Noise = None,
    noise_at: NoiseAt = "start",
    choose: Choose = "q",
    exit_when_still: ExitWhenStill = None,
    halt: Annotated[Halt, typer.Option(help="q: stop when the model prefers to; fixed: use all steps.")] = "q",
    prefer_valid: Annotated[
        bool, typer.Option("--prefer-valid", help="An answer that obeys the rules wins; this uses the rules.")
    ] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Search with backtracking, the model orders the guesses; for Sudoku.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Puzzles at a time.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of votes and noise.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write: .json, the results; .png or .gif, the ACT steps of a single puzzle."),
    ] = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of results.")] = False,
):
    """Solve puzzles with a trained model; answers that break the rules say so.

    Example: hrm-hf solve 53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79

    Example: hrm-hf solve runs/sudoku_demo --file puzzles.csv --votes 8 --max-steps 32

    With --search the answer is no longer the model's: it is found by the rules, which the model helps.
    """
    options = dict(locals())
    del options["as_json"], options["out"]
    if out and out.suffix not in (".json", *PICTURES):
        raise typer.BadParameter(f"{out} must end in .json, {' or '.join(PICTURES)}", param_hint="--out")
    options["plot"] = out if out and out.suffix in PICTURES else None
    from ..puzzles.shipped import model_and_puzzles

    options["model"], options["puzzles"] = model_and_puzzles(puzzles or [])
    validate_model(options["model"], "PUZZLE_SOLVER")
    if not options["puzzles"] and file is None:
        raise typer.BadParameter("no puzzle given; expected PUZZLE arguments, - for stdin, or --file")
    from ..puzzles.solve import solve_puzzles, text_board

    results, config = call(solve_puzzles, options)
    if out and not options["plot"]:
        write_json(results, out)
    if as_json:
        typer.echo(json.dumps(results))
        return

    def board(grid: list[list]) -> str:
        return text_board(grid, config)

    typer.echo("\n\n".join(_describe(board, result) for result in results))
    if len(results) > 1:
        typer.echo(_summary(results))
    if out:
        typer.echo(f"written: {out}")


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
    if "search" in answer:
        parts.append(_search_status(answer["search"]))
    if "correct" in answer:
        parts.append("correct" if answer["correct"] else "not the given solution")
    return ", ".join(parts)


def _search_status(search: dict[str, Any]) -> str:
    nodes = f"{counted(search['nodes'], 'node')}, {search['nodes_without_model']:,} without the model"
    if search["solved"]:
        return f"found by search ({nodes})"
    return f"search {'found that there is no solution' if search['complete'] else 'was stopped'} ({nodes})"


def _summary(results: list[dict[str, Any]]) -> str:
    parts = [
        counted(len(results), "puzzle"),
        f"{sum(r['steps'] for r in results) / len(results):.2f} steps on average",
    ]
    for name, words in (("valid", "valid"), ("correct", "correct")):
        known = [result[name] for result in results if result.get(name) is not None]
        if known:
            parts.append(f"{sum(known)} of {len(known)} {words}")
    return "\n" + ", ".join(parts)
