"""`hrm-hf go`: Go code from a description, with the plan, what a validator says of it, and the repairs."""

import difflib
import json
import sys
from dataclasses import asdict

import typer

from ..golang.options import WriteGo
from ..io.usage import counted
from .command import takes, validate_model, write_json


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
        _show(prompt, attempts, stopped, streamed=bool(shown))


def _stream(prompt: str, text: str, shown: list[str]) -> None:
    """Show a piece of the first attempt, under its prompt."""
    if not shown:
        typer.secho(f"\n# {prompt}", bold=True)
    shown.append(text)
    typer.echo(text, nl=False)
    sys.stdout.flush()


def _show(prompt: str, attempts: list, stopped: str, streamed: bool) -> None:
    """Show all attempts, a repair also as a diff; `streamed` if the prompt and the first code are on the screen."""
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
        return "no complaint"
    where = "" if feedback.line is None else f", line {feedback.line}"
    return f"{feedback.category}{where}: {feedback.message}"
