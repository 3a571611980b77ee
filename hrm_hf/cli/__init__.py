"""`hrm-hf`: the command line. One module per subcommand; each exits 0 on success, 2 on bad usage, 1 on failure.

Data sets, plots and the like are imported inside the commands: help and usage errors need torch at most.
"""

import os
import sys

import typer
from huggingface_hub.errors import StrictDataclassError

from .app import show
from .convert import convert
from .data import app as data_app
from .demo import demo
from .demo_go import demo_go
from .evaluate import app as eval_app
from .export import app as export_app
from .go import go
from .hub import pull, push
from .launch import CONTEXT, launch
from .preflight import preflight
from .recommend import recommend
from .rlm import rlm
from .serve import CONTEXT as SERVE_CONTEXT
from .serve import serve
from .slurm import slurm
from .solve import solve


app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Recursive reasoning models in the Hugging Face ecosystem."
)
app.add_typer(data_app, name="data")
app.command("convert")(convert)
app.add_typer(eval_app, name="eval")
app.add_typer(export_app, name="export")
app.command("solve")(solve)
app.command("app")(show)
app.command("rlm")(rlm)
app.command("demo")(demo)
app.command("demo-go")(demo_go)
app.command("go")(go)
app.command("push")(push)
app.command("pull")(pull)
app.command("slurm")(slurm)
app.command("preflight")(preflight)
app.command("recommend")(recommend)
app.command("launch", context_settings=CONTEXT)(launch)
app.command("serve", context_settings=SERVE_CONTEXT)(serve)


def main() -> None:
    """Entry point: an expected failure is one line on stderr and exit status 1, not a traceback."""
    try:
        app()
    except (ValueError, OSError, RuntimeError, ImportError, KeyError, StrictDataclassError) as error:
        if os.environ.get("HRM_HF_DEBUG"):
            raise
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        sys.stderr.write(f"error: {message}\n(set HRM_HF_DEBUG=1 for the traceback)\n")
        sys.exit(1)
