"""`hrm-hf eval go`: evaluate a Go coder, or a baseline trained on the same stream."""

import typer

from ..golang.evaluation.options import EvaluateGo
from .options import takes
from .report import run, validate_model


@takes(EvaluateGo)
def go(options: EvaluateGo, as_json: bool):
    """Evaluate a Go coder: bits per byte, plans, code validity, decisions, repairs, pass@k.

    Example: hrm-hf eval go runs/go_nano --records data/go/test.jsonl --trajectories data/go/trajectories/test.jsonl
    --out runs/go_nano/eval --benchmark humaneval-go=humaneval_go.jsonl.gz
    """
    validate_model(options.model, "LANGUAGE_MODEL")
    from ..golang.evaluation.report import on_screen
    from ..golang.evaluation.run import evaluate_checkpoint

    def on_skip(wrong: str) -> None:
        typer.echo(f"skipped: {wrong}", err=True)

    run(evaluate_checkpoint, options, as_json, on_screen, on_skip=on_skip)
