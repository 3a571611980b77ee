"""`hrm-hf go`: Go code from a description, with the plan, what a validator says of it, and the repairs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .report import validate_model


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
    validator: Annotated[str, typer.Option(help="auto, tree-sitter, parser, types, or none.")] = "auto",
    max_iterations: Annotated[int | None, typer.Option(min=1, max=5, help="Most attempts; the model's own.")] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Least P(DONE) at which to stop; the model's own by default.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of an attempt; the model's own budget.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
):
    """Plan, write, validate and repair Go code.

    Example: hrm-hf go runs/go_demo "Abs returns the absolute value of x." --prefix "func Abs(x int) int {"
    """
    tasks = _tasks(prompts, prefix, records, limit)
    validate_model(model)
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    import hrm_hf  # noqa: F401 - registers the architectures

    from ..golang import best_validator

    coder = AutoModelForCausalLM.from_pretrained(model).to(device).eval()
    if not hasattr(coder, "generate_with_refinement"):
        raise ValueError(f"{model} is a {coder.config.model_type}, no Go coder (hrm_go_coder)")
    tokenizer = AutoTokenizer.from_pretrained(model)
    set_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    if max_new_tokens:
        sampling["max_new_tokens"] = max_new_tokens
    result = coder.generate_with_refinement(
        [task["prompt"] for task in tasks],
        tokenizer=tokenizer,
        validator=None if validator == "none" else best_validator(validator),
        max_refinement_iterations=max_iterations,
        refinement_threshold=threshold,
        code_prefixes=[task["prefix"] for task in tasks],
        contexts=[task["context"] for task in tasks],
        **sampling,
    )
    if as_json:
        typer.echo(json.dumps(asdict(result)))
        return
    for index, task in enumerate(tasks):
        _show(task["prompt"], result.attempts[index], result.stopped[index])


def _tasks(prompts, prefixes, records: Path | None, limit: int) -> list[dict[str, Any]]:
    """Prompts with prefix and context, from the command line or from records."""
    if bool(prompts) == (records is not None):
        raise typer.BadParameter("give prompts, or --records FILE", param_hint="PROMPTS")
    if records is None:
        if prefixes and len(prefixes) != len(prompts):
            raise typer.BadParameter(
                f"{len(prefixes)} for {len(prompts)} prompts; one for each", param_hint="--prefix"
            )
        prefixes = prefixes or [""] * len(prompts)
        return [{"prompt": p, "prefix": q, "context": ("", "")} for p, q in zip(prompts, prefixes)]
    from ..golang.data.records import read_records
    from ..golang.evaluation.run import spread

    rows = list(read_records(records))
    if not rows:
        raise ValueError(f"{records} has no records")
    tasks = []
    for row in spread(rows, limit):
        problem, context = row["problem"], row["context"] or {}
        text = "\n\n".join(part for part in (problem["title"], problem["body"]) if part)
        named = context.get("path") or "", context.get("before") or ""
        tasks.append({"prompt": text, "prefix": row["code_prefix"] or "", "context": named})
    return tasks


def _show(prompt: str, attempts: list, stopped: str) -> None:
    typer.secho(f"\n# {prompt}", bold=True)
    for number, attempt in enumerate(attempts, start=1):
        plan = attempt.plan
        typer.echo(f"plan {number}: {plan['intent']} {', '.join(plan['targets'])}")
        for step in plan["steps"]:
            typer.echo(f"  - {step}")
        typer.echo(attempt.code)
        typer.echo(f"validator: {_verdict(attempt.feedback)}")
        typer.echo(f"decision: {attempt.decision} (P(DONE) {attempt.done_probability:.2f})\n")
    typer.echo(f"{len(attempts)} attempt(s), stopped by: {stopped}")


def _verdict(feedback) -> str:
    if feedback is None:
        return "none"
    if not feedback.failed:
        return "no complaint"
    where = "" if feedback.line is None else f", line {feedback.line}"
    return f"{feedback.category}{where}: {feedback.message}"
