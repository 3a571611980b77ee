"""`hrm-hf`: the command line. One module per subcommand; each exits 0 on success, 2 on bad usage, 1 on failure.

The module of a command is loaded when that command is asked for, and what its work needs is imported inside it: help
and usage errors load neither torch nor transformers.
"""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .._version import __version__


# In the order of the help: the module of each, and the name there of its function or its group. No module is called
# `app`: loading it would take the name of the command line below.
COMMANDS = {
    "data": ("data", "app"),
    "convert": ("convert", "convert"),
    "eval": ("evaluate", "app"),
    "export": ("export", "app"),
    "solve": ("solve", "solve"),
    "app": ("web_app", "show"),
    "rlm": ("rlm", "rlm"),
    "demo": ("demo", "demo"),
    "demo-go": ("demo_go", "demo_go"),
    "go": ("go", "go"),
    "push": ("hub", "push"),
    "pull": ("hub", "pull"),
    "slurm": ("slurm", "slurm"),
    "preflight": ("preflight", "preflight"),
    "recommend": ("recommend", "recommend"),
    "launch": ("launch", "launch"),
    "serve": ("serve", "serve"),
}


class CommandsWhenNeeded(TyperGroup):
    """The group of all commands; `commands` has a command from the moment when `get_command` was asked for it."""

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        self.commands = dict.fromkeys(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _load(cmd_name)
        return super().get_command(ctx, cmd_name)


def _load(name: str) -> Any:
    """A command, or a group of commands, as click has it."""
    module, attribute = COMMANDS[name]
    module = import_module(f".{module}", __name__)
    found, around = getattr(module, attribute), typer.Typer()
    if isinstance(found, typer.Typer):
        around.add_typer(found, name=name)
    else:
        around.command(name, context_settings=getattr(module, "CONTEXT", None))(found)
    return typer.main.get_group(around).commands[name]


app = typer.Typer(
    cls=CommandsWhenNeeded, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}
)


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
    from ..io.usage import one_line_errors

    with one_line_errors():
        app()
