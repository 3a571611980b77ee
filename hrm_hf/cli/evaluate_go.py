"""`hrm-hf eval go`: what a Go coder, or a baseline trained on the same stream, is worth."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..io.evaluation import validate_evaluation
from .report import (
    AsJson,
    BadLines,
    Device,
    GoRepairs,
    GoValidator,
    RepetitionGuard,
    UpdateCard,
    run,
    usage_errors,
    validate_model,
)


CALIBRATE_HELP = (
    "Other trajectories, such as validation.jsonl: the temperature with which the decisions' probabilities are right "
    "is found on them, and what it is worth shown on --trajectories."
)
FAILURES_HELP = (
    "Compare edits, new attempts and half of each at equal new tokens, on so many failed codes of the model's own for "
    "--records."
)


def go(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a model on the Hub.")],
    records: Annotated[list[Path] | None, typer.Option(help="Held-out records (JSON Lines); repeat for more.")] = None,
    trajectories: Annotated[list[Path] | None, typer.Option(help="Held-out trajectories; repeat for more.")] = None,
    calibrate_on: Annotated[list[Path] | None, typer.Option(help=CALIBRATE_HELP)] = None,
    benchmark: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE of a local test set, such as humaneval-go=FILE.jsonl.gz.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="So many records and trajectories, from all over the files; tasks."),
    ] = None,
    validator: Annotated[
        GoValidator, typer.Option(help="auto: parser where Go is installed, else tree-sitter.")
    ] = "auto",
    max_iterations: Annotated[int, typer.Option(min=1, max=5, help="Attempts of the loop and of its control.")] = 3,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of everything that is sampled.")] = 0.8,
    samples: Annotated[int, typer.Option(min=1, help="Of each task and each repair; 1 is greedy.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 8,
    max_length: Annotated[
        int | None, typer.Option(min=32, help="Tokens of a sequence; the model's by default.")
    ] = None,
    problem_budget: Annotated[
        int | None, typer.Option(min=18, help="Tokens of a problem; as the Go coder was trained, or 256.")
    ] = None,
    context_budget: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a context; as the Go coder was trained, or 512.")
    ] = None,
    max_code_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of a code.")] = 512,
    repair_mode: Annotated[
        GoRepairs | None, typer.Option(help="What a repair is; as the Go coder was trained, or rewrite.")
    ] = None,
    repetition_guard: RepetitionGuard = True,
    failures: Annotated[int, typer.Option(min=0, help=FAILURES_HELP)] = 0,
    token_budget: Annotated[
        int, typer.Option(min=1, help="New tokens for each of --failures, and each way to go on.")
    ] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of samples and shuffled plans.")] = 0,
    on_bad_line: BadLines = "stop",
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.json, evaluation.png and all that is written.")
    ] = None,
    device: Device = None,
    update_card: UpdateCard = False,
    as_json: AsJson = False,
):
    """Bits per byte, plans, code, decisions, repair and refinement against resampling; pass@k of local test sets.

    Example: hrm-hf eval go runs/go_nano --records data/go/test.jsonl --trajectories data/go/test.trajectories.jsonl
    --out runs/go_nano/eval --benchmark humaneval-go=humaneval_go.jsonl.gz

    Example: hrm-hf eval go runs/go_nano --records data/go/test.jsonl --failures 400 --token-budget 512 --out runs/eval
    """
    options = dict(locals())
    validate_model(model, "LANGUAGE_MODEL")
    from ..golang.evaluation.sources import validate_sources

    with usage_errors():
        validate_evaluation(model, out, update_card)
        validate_sources(records, trajectories, benchmark, out, failures, calibrate_on)
    from ..golang.evaluation.run import evaluate_checkpoint

    run(evaluate_checkpoint, options | {"on_skip": _say_left_out}, _on_screen)


def _say_left_out(wrong: str) -> None:
    typer.echo(f"left out: {wrong}", err=True)


def _on_screen(result: dict[str, Any]) -> dict[str, str]:
    from ..golang.evaluation.run import SCREEN_METRICS, flattened

    flat = flattened(result["metrics"])
    return {name: _rounded(flat[name]) for name in flat if name in SCREEN_METRICS or name.startswith("benchmarks.")}


def _rounded(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_rounded, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
