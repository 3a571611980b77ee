"""`hrm-hf`: the command line. One module per subcommand; each exits 0 on success, 2 on bad usage, 1 on failure.

What a command needs is imported inside it: help and usage errors load neither torch nor transformers.
"""

from typing import Annotated

import typer

from .._version import __version__
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


app = typer.Typer(no_args_is_help=True, add_completion=False)
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


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
):
    """Recursive reasoning models in the Hugging Face ecosystem.

    An error is one line; with HRM_HF_DEBUG=1 in the environment its traceback is shown too.
    """


def main() -> None:
    """Entry point: an expected failure is one line on stderr and exit status 1, not a traceback."""
    from ..io.failures import one_line_errors

    with one_line_errors():
        app()
