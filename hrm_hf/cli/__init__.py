"""`hrm-hf`: the command line. Each command exits 0 on success, 2 on bad usage, 1 on failure.

A command's module is loaded when the command is called, and each function imports what it needs: help and usage errors
load neither torch nor transformers.
"""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .._version import __version__
from .command import with_hyphens


# MODULE or MODULE:NAME of each command, in the order of the help. No module is called `app`: loading it would replace
# the command line below.
COMMANDS = {
    "data": "data:app", "convert": "convert", "eval": "evaluate:app", "export": "convert:app", "solve": "ask:solve",
    "app": "serve:show", "rlm": "ask:rlm", "demo": "demo", "demo-go": "demo:demo_go", "go": "ask:go",
    "push": "hub:push", "pull": "hub:pull", "slurm": "launch:slurm", "preflight": "launch:preflight",
    "recommend": "launch:recommend", "launch": "launch", "serve": "serve",
}  # fmt: skip


class CommandsWhenNeeded(TyperGroup):
    """Group of all commands, each loaded when `get_command` asks for it."""

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        self.commands = dict.fromkeys(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _load(cmd_name)
        return super().get_command(ctx, cmd_name)


def _load(name: str) -> Any:
    """Return a command, or a group of commands, as an object of click."""
    place, _, attribute = COMMANDS[name].partition(":")
    module, around = import_module(f".{place}", __name__), typer.Typer()
    found = getattr(module, attribute or name)
    if isinstance(found, typer.Typer):
        around.add_typer(found, name=name)
    else:
        around.command(name, context_settings=module.CONTEXT if name == "launch" else None)(found)
    return typer.main.get_group(around).commands[name]


SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": with_hyphens}
app = typer.Typer(cls=CommandsWhenNeeded, no_args_is_help=True, context_settings=SETTINGS)


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
    """Run the command line; an expected failure is one line on stderr and exit status 1."""
    from ..io.usage import one_line_errors

    with one_line_errors():
        app()
