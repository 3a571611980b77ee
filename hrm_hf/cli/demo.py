"""`hrm-hf demo` and `hrm-hf demo-go`: train a small model from scratch on the CPU, and then use the model."""

import json
import sys

import typer

from ..golang.options import DemoGo
from ..puzzles.options import RunDemo
from .command import takes


@takes(RunDemo)
def demo(options: RunDemo, as_json: bool):
    """Train a small Sudoku solver on the CPU in a few minutes, then evaluate and use the saved checkpoint.

    Example: hrm-hf demo --model trm
    """
    from ..puzzles.solve import run_demo

    result = run_demo(options, sys.stderr if as_json else None)
    if as_json:
        typer.echo(json.dumps(result))
    if not result["same"]:
        raise typer.Exit(1)


@takes(DemoGo)
def demo_go(options: DemoGo, as_json: bool):
    """Train the nano Go coder on the CPU, then plan, write, validate and repair held-out functions.

    Example: hrm-hf demo-go --minutes 45

    Example: hrm-hf demo-go --source ~/go/src --minutes 5 --vocab-size 4096
    """
    from ..golang.demo import run_demo

    result = run_demo(options, sys.stderr if as_json else None)
    if as_json:
        typer.echo(json.dumps(result))
