"""`hrm-hf demo`: learn Sudoku from nothing, save, and solve held-out boards in fresh processes."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .report import AsJson, call


def demo(
    model: Annotated[
        str, typer.Option(help="What to train: units (with a symbol axis), trm, eqr, hrm, se_rrm.")
    ] = "units",
    out: Annotated[Path | None, typer.Option(help="Folder of the run. [default: runs/sudoku_demo]")] = None,
    extra: Annotated[str, typer.Option(help="More flags of run_puzzle.py, e.g. '--max_steps 50'.")] = "",
    as_json: AsJson = False,
):
    """Train a small Sudoku solver on the CPU (minutes), then evaluate and use the saved checkpoint.

    Example: hrm-hf demo --model trm
    """
    options = dict(locals())
    from ..puzzles.demo import run_demo

    del options["as_json"]
    result = call(run_demo, options | {"said": sys.stderr if as_json else None})
    if as_json:
        typer.echo(json.dumps(result))
    if not result["same"]:
        raise typer.Exit(1)
