"""`hrm-hf demo-go`: a Go coder from nothing, on a laptop: sources, tokenizer, records, training, use."""

import json
import sys

import typer

from ..golang.options import DemoGo
from .options import takes
from .report import usage_errors


@takes(DemoGo)
def demo_go(options: DemoGo, as_json: bool):
    """Train the nano Go coder on the CPU, then plan, write, validate and repair held-out functions with it.

    Example: hrm-hf demo-go --minutes 45

    Example: hrm-hf demo-go --source ~/go/src --minutes 5 --vocab-size 4096
    """
    from ..golang.demo import run_demo

    with usage_errors():
        result = run_demo(options, sys.stderr if as_json else None)
    if as_json:
        typer.echo(json.dumps(result))
