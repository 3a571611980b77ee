"""`hrm-hf demo`: learn Sudoku from nothing, save, and solve held-out boards in fresh processes."""

from typing import Annotated

import typer

from .report import call


def demo(
    model: Annotated[
        str, typer.Option(help="What to train: units (with a symbol axis), trm, eqr, hrm, se_rrm.")
    ] = "units",
    extra: Annotated[str, typer.Option(help="More flags of run_puzzle.py, e.g. '--max_steps 50'.")] = "",
):
    """Train a small Sudoku solver on the CPU (minutes), then evaluate and use the saved checkpoint.

    Example: hrm-hf demo --model trm
    """
    options = dict(locals())
    from ..puzzles.demo import run_demo

    if not call(run_demo, options):
        raise typer.Exit(1)
