"""`hrm-hf solve`, `go` and `rlm`: solve puzzles, write Go code, and answer questions about long files."""

import difflib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from ..golang.options import WriteGo
from ..io.files import load_json
from ..io.model_names import CONFIGS
from ..io.usage import UsageError, counted
from ..puzzles.options import SolvePuzzles
from ..text.options import RlmOptions
from .command import takes, validate_model, write_json


MAX_PROBLEMS = 3  # maximum number of rule violations to print per puzzle; --json includes all
# transformers imports these if installed, which takes a second. Only quantized weights and adapters need them.
NOT_NEEDED_TO_SOLVE = ("accelerate", "scipy", "torchao")


@takes(SolvePuzzles)
def solve(options: SolvePuzzles, as_json: bool):
    """Solve puzzles with a trained model, and mark answers that break the rules.

    Example: hrm-hf solve 53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79

    Example: hrm-hf solve runs/sudoku_demo --file puzzles.csv --votes 8 --max-steps 32

    With --search, a rule-based solver finds the answer, and the model only guides the solver's guesses. With
    --until-valid, restarts and then search are tried only where the model's own answer breaks the rules.
    """
    validate_model(options.model, "PUZZLE_SOLVER")
    _spare_cpu(options.model)
    from ..puzzles.solve import solve_puzzles

    results, task = solve_puzzles(options)
    if options.out and not options.plot:
        write_json(results, options.out)
    if as_json:
        typer.echo(json.dumps(results))
        return

    typer.echo("\n\n".join(_puzzle_text(task.board_text, result) for result in results))
    if len(results) > 1:
        typer.echo(_summary(results))
    if options.out:
        typer.echo(f"wrote {options.out}")


def _spare_cpu(model: str) -> None:
    """Speed up importing transformers and keep idle threads from spinning. Call this before importing torch."""
    config, adapter = (Path(model, each) for each in CONFIGS)
    plain = config.is_file() and not adapter.is_file() and "quantization_config" not in load_json(config)
    if plain and "torch" not in sys.modules:
        sys.modules.update(dict.fromkeys(NOT_NEEDED_TO_SOLVE))  # a module whose entry is None cannot be imported
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _puzzle_text(board: Callable[[list[list]], str], result: dict[str, Any]) -> str:
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
    if answer["sure"] is not None:
        parts.append("sure" if answer["sure"] else "not sure")
    if answer["votes"]["of"] > 1:
        parts.append(f"{answer['votes']['agree']} of {answer['votes']['of']} votes")
    if answer["valid"] and "attempts" not in answer:
        parts.append("obeys the rules")
    if search := answer.get("search"):
        how = "search found that there is no solution" if search["complete"] else "search was stopped"
        nodes = f"{counted(search['nodes'], 'node')}, {search['nodes_without_model']:,} without the model"
        parts.append(f"{'found by search' if search['solved'] else how} ({nodes})")
    elif found_by := answer.get("found_by"):
        parts.append(f"found by {'the model' if found_by == 'model' else found_by}")
    if "correct" in answer:
        parts.append("correct" if answer["correct"] else "not the given solution")
    return ", ".join(parts)


def _summary(results: list[dict[str, Any]]) -> str:
    steps = sum(result["steps"] for result in results) / len(results)
    parts = [counted(len(results), "puzzle"), f"{steps:.2f} steps on average"]
    for name in ("sure", "valid", "correct"):
        known = [result[name] for result in results if result.get(name) is not None]
        if known:
            parts.append(f"{sum(known)} of {len(known)} {name}")
    return "\n" + ", ".join(parts)


@takes(WriteGo)
def go(options: WriteGo, as_json: bool):
    """Plan, write, validate and repair Go code.

    Example: hrm-hf go runs/go_demo "Abs returns the absolute value of x." --prefix "func Abs(x int) int {"

    Example: hrm-hf go runs/go_demo --records data/go/test.jsonl --repair
    """
    validate_model(options.model, "GO_CODER")
    if options.stream and as_json:
        raise typer.BadParameter("cannot be combined with --json", param_hint="--stream")
    from ..golang.generate import generate_code

    shown: list[str] = []
    live = options.stream if options.stream is not None else sys.stdout.isatty() and not (as_json or options.repair)
    prompts, result = generate_code(options, (lambda *piece: _stream(*piece, shown)) if live else None)
    if options.out:
        write_json(asdict(result), options.out)
    if as_json:
        typer.echo(json.dumps(asdict(result)))
        return
    if not prompts:
        typer.echo("the model repaired none of its failures")
    for prompt, attempts, stopped in zip(prompts, result.attempts, result.stopped):
        _show_attempts(prompt, attempts, stopped, streamed=bool(shown))


def _stream(prompt: str, text: str, shown: list[str]) -> None:
    """Print the next piece of the first attempt. The prompt is printed above the first piece."""
    if not shown:
        typer.secho(f"\n# {prompt}", bold=True)
    shown.append(text)
    typer.echo(text, nl=False)
    sys.stdout.flush()


def _show_attempts(prompt: str, attempts: list, stopped: str, streamed: bool) -> None:
    """Print all attempts and the diff of each repair. Omit the prompt and the first program if already streamed."""
    typer.echo("\n") if streamed else typer.secho(f"\n# {prompt}", bold=True)
    for number, attempt in enumerate(attempts, start=1):
        plan = attempt.plan
        typer.echo(f"plan {number}: {plan['intent']} {', '.join(plan['targets'])}")
        for step in plan["steps"]:
            typer.echo(f"  - {step}")
        if number > 1 or not streamed:
            typer.echo(attempt.code)
        if number > 1:
            before, names = attempts[number - 2].code, (f"attempt {number - 1}", f"attempt {number}")
            difference = difflib.unified_diff(before.split("\n"), attempt.code.split("\n"), *names, lineterm="")
            typer.echo("\n".join(difference))
        typer.echo(f"validator: {_verdict(attempt.feedback)}")
        typer.echo(f"decision: {attempt.decision} (P(DONE) {attempt.done_probability:.2f})\n")
    typer.echo(f"{counted(len(attempts), 'attempt')}, stopped by: {stopped}")


def _verdict(feedback) -> str:
    if feedback is None:
        return "none"
    if not feedback.failed:
        return "no errors"
    where = "" if feedback.line is None else f", line {feedback.line}"
    return f"{feedback.category}{where}: {feedback.message}"


@takes(RlmOptions)
def rlm(options: RlmOptions, as_json: bool):
    """Answer a question about a file longer than the model's context. The model writes code to read the file.

    Example: hrm-hf rlm Qwen/Qwen3-8B --question "Who owes money to whom?" --context-file letters.txt
    """
    from ..text.rlm.executors import MontyExecutor

    executor = MontyExecutor()  # raise ImportError now if pydantic-monty is missing
    validate_model(options.model, "LANGUAGE_MODEL")
    context = read_context(options.context_file)
    from transformers import pipeline

    from ..hub.kinds import LANGUAGE_MODEL, load_config
    from ..io.evaluation import chosen_device

    load_config(options.model, LANGUAGE_MODEL, adapters=True)
    device = chosen_device(options.device)
    ask = pipeline("recursive-text-generation", model=options.model, executor=executor, device=device)
    result = ask(options.question, context, trajectory=options.out, **options.caps)
    if as_json:
        typer.echo(json.dumps(asdict(result)))
        return
    typer.echo(result.answer)
    counts = {"turn": result.turns, "sub-call": result.sub_calls, "token": result.tokens}
    totals = ", ".join(counted(number, noun) for noun, number in counts.items())
    typer.echo(f"({result.stop_reason}; {totals})", err=True)


def read_context(path: Path) -> str | list[Any] | dict[str, Any]:
    """Read a file as JSON (.json), as a list from JSON Lines (.jsonl) or as text (any other suffix).

    Raises:
        ValueError: the content does not match the suffix; the message names the file and the line.
    """
    from ..io.files import load_json, numbered_lines, parse_json

    if not path.is_file():
        raise UsageError(f"{path}: does not exist", "--context-file")
    if path.suffix == ".json":
        return load_json(path)
    if path.suffix == ".jsonl":
        return [parse_json(line, place) for place, line in numbered_lines(path)]
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text (byte {error.start})") from error
