"""`hrm-hf demo`: learn Sudoku from nothing, save, and solve held-out boards in fresh processes."""

import json
import sys

import typer

from ..puzzles.options import RunDemo
from .options import takes
from .report import usage_errors


@takes(RunDemo)
def demo(options: RunDemo, as_json: bool):
    """Train a small Sudoku solver on the CPU (minutes), then evaluate and use the saved checkpoint.

    Example: hrm-hf demo --model trm
    """
    from ..puzzles.demo import run_demo

    with usage_errors():
        result = run_demo(options, sys.stderr if as_json else None)
    if as_json:
        typer.echo(json.dumps(result))
    if not result["same"]:
        raise typer.Exit(1)
