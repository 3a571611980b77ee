"""`hrm-hf go`: Go code from a description, with the plan, what a validator says of it, and the repairs."""

import difflib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..io.words import counted
from .report import Device, GoRepairs, GoValidator, RepetitionGuard, call, validate_model, write_json


REPAIR_HELP = (
    "Write code for --records until one fails that the model mends by edits, and show the difference; samples at 0.8 "
    "unless --temperature says otherwise."
)


def go(
    model: Annotated[str, typer.Argument(help="Go coder: checkpoint folder, or a model on the Hub.")],
    prompts: Annotated[list[str] | None, typer.Argument(help="What to write, in words.")] = None,
    prefix: Annotated[
        list[str] | None, typer.Option(help="How the code begins, e.g. a signature; one for each prompt.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Take prompts from a file of records instead.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many of --records, spread over the file.")] = 3,
    validator: Annotated[
        Literal[GoValidator, "none"], typer.Option(help="auto: parser where Go is, else tree-sitter.")
    ] = "auto",
    max_iterations: Annotated[int | None, typer.Option(min=1, max=5, help="Most attempts; the model's own.")] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Least P(DONE) at which to stop; the model's own by default.")
    ] = None,
    repair_mode: Annotated[
        GoRepairs | None, typer.Option(help="Repairs by whole code or by edits; as the model was trained by default.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of an attempt; the model's own budget.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    repetition_guard: RepetitionGuard = True,
    lexical: Annotated[
        bool, typer.Option(help="Write no code that cannot be Go (open strings, wrong brackets, ...); edits are free.")
    ] = False,
    repair: Annotated[bool, typer.Option("--repair", help=REPAIR_HELP)] = False,
    stream: Annotated[
        bool | None,
        typer.Option(help="Show the first attempt at one prompt while it is written; on a terminal by default."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write everything into this file, as JSON.")] = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
):
    """Plan, write, validate and repair Go code.

    Example: hrm-hf go runs/go_demo "Abs returns the absolute value of x." --prefix "func Abs(x int) int {"

    Example: hrm-hf go runs/go_demo --records data/go/test.jsonl --repair
    """
    options = dict(locals())
    del options["as_json"], options["out"], options["repair"]
    validate_model(model, "GO_CODER")
    if repair:
        _repair(options, out, as_json)
        return
    if stream and (as_json or len(prompts or []) > 1 or (records is not None and limit > 1)):
        raise typer.BadParameter("shows one prompt, without --json; leave it out otherwise", param_hint="--stream")
    from ..golang.generate import generate_code

    shown: list[str] = []
    live = stream if stream is not None else sys.stdout.isatty() and not as_json
    options["stream"] = (lambda prompt, text: _stream(prompt, text, shown)) if live else None
    prompts, result = call(generate_code, options)
    if out:
        write_json(asdict(result), out)
    if as_json:
        typer.echo(json.dumps(asdict(result)))
        return
    for prompt, attempts, code, stopped in zip(prompts, result.attempts, result.codes, result.stopped):
        _show(prompt, attempts, stopped, streamed=bool(shown))
        if any(attempt.outcome == "applied" for attempt in attempts):  # of edits only differences were shown
            typer.echo(f"\n{code}")


def _repair(options: dict[str, Any], out: Path | None, as_json: bool) -> None:
    """A failure that the model mends, on the screen, as JSON, or in a file."""
    from ..golang.rounds.run import Sampling
    from ..golang.rounds.shown import working_repair
    from ..models.processing_hrm_go_coder import Feedback

    if options["prompts"] or options["records"] is None or options["validator"] == "none":
        raise typer.BadParameter("give --records and a validator, and no prompts", param_hint="--repair")
    others = ("prefix", "max_iterations", "threshold", "repair_mode", "lexical", "stream")
    of_no_use = [name for name in others if options[name]]
    if of_no_use:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in of_no_use)
        raise typer.BadParameter(f"has no use for {flags}; leave it out", param_hint="--repair")
    sampling = Sampling(
        samples=4,
        temperature=options["temperature"] or 0.8,
        validator=options["validator"],
        max_code_tokens=options["max_new_tokens"] or 256,
        seed=options["seed"],
        device=options["device"],
    )
    asked = {"model": options["model"], "records": options["records"], "sampling": sampling}
    result = call(working_repair, asked)
    if out:
        write_json(result, out)
    if as_json:
        typer.echo(json.dumps(result))
        return
    tried = f"{counted(result['written'], 'code')} written, {counted(result['failures'], 'failure')}"
    if result["repair"] is None:
        typer.echo(f"{tried}, none of which the model mended")
        return
    shown = result["repair"]
    typer.secho(f"\n# {shown['problem']}", bold=True)
    typer.echo(f"{shown['attempt']}\nvalidator: {_verdict(Feedback(**shown['verdict']))}\n")
    names = ("attempt", "repair")
    difference = difflib.unified_diff(shown["attempt"].split("\n"), shown["code"].split("\n"), *names, lineterm="")
    typer.echo("\n".join(difference))
    typer.echo(f"validator: no complaint\n({tried} until this one)")


def _stream(prompt: str, text: str, shown: list[str]) -> None:
    """A piece of the first attempt, under its prompt."""
    if not shown:
        typer.secho(f"\n# {prompt}", bold=True)
    shown.append(text)
    typer.echo(text, nl=False)
    sys.stdout.flush()


def _show(prompt: str, attempts: list, stopped: str, streamed: bool) -> None:
    """All attempts; `streamed` says that the prompt and the first code are on the screen already."""
    typer.echo("\n") if streamed else typer.secho(f"\n# {prompt}", bold=True)
    for number, attempt in enumerate(attempts, start=1):
        plan = attempt.plan
        typer.echo(f"plan {number}: {plan['intent']} {', '.join(plan['targets'])}")
        for step in plan["steps"]:
            typer.echo(f"  - {step}")
        if number > 1 or not streamed:
            typer.echo("\n".join(_written(attempts, number)))
        typer.echo(f"validator: {_verdict(attempt.feedback)}")
        typer.echo(f"decision: {attempt.decision} (P(DONE) {attempt.done_probability:.2f})\n")
    typer.echo(f"{counted(len(attempts), 'attempt')}, stopped by: {stopped}")


def _written(attempts: list, number: int) -> list[str]:
    """An attempt's code, or what became of its edits; a repair also as its difference from the attempt before."""
    attempt = attempts[number - 1]
    shown = [attempt.code if attempt.outcome is None else f"repair: {attempt.outcome}"]
    if number > 1:
        before, names = attempts[number - 2].code, (f"attempt {number - 1}", f"attempt {number}")
        shown += difflib.unified_diff(before.split("\n"), attempt.code.split("\n"), *names, lineterm="")
    return shown


def _verdict(feedback) -> str:
    if feedback is None:
        return "none"
    if not feedback.failed:
        return "no complaint"
    where = "" if feedback.line is None else f", line {feedback.line}"
    return f"{feedback.category}{where}: {feedback.message}"
