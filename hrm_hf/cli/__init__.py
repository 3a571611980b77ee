"""Command line `hrm-hf`. Every command exits with 0 on success, 1 on failure and 2 on bad usage.

A command's module is imported when the command is called, and each function imports what it needs. Help and usage
errors therefore load neither torch nor transformers.
"""

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .._version import __version__
from .command import with_hyphens


# MODULE or MODULE:NAME of each command, in the order that --help lists them. No module may be named `app`, because
# importing it would overwrite `app` below.
COMMANDS = {
    "data": "data:app", "convert": "convert", "retrofit": "convert:retrofit", "eval": "evaluate:app",
    "export": "convert:app", "solve": "ask:solve", "app": "serve:show", "rlm": "ask:rlm", "demo": "demo",
    "demo-go": "demo:demo_go", "go": "ask:go", "push": "hub:push", "pull": "hub:pull", "slurm": "launch:slurm",
    "preflight": "launch:preflight", "recommend": "launch:recommend", "launch": "launch", "serve": "serve",
}  # fmt: skip


class LazyCommands(TyperGroup):
    """Group of all commands. `get_command` imports each command on first use."""

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        self.commands = dict.fromkeys(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _load(cmd_name)
        return super().get_command(ctx, cmd_name)


def _load(name: str) -> Any:
    """Import a command or a group of commands, and return it as a click object."""
    place, _, attribute = COMMANDS[name].partition(":")
    module, around = import_module(f".{place}", __name__), typer.Typer()
    found = getattr(module, attribute or name)
    if isinstance(found, typer.Typer):
        around.add_typer(found, name=name)
    else:
        around.command(name, context_settings=module.CONTEXT if name == "launch" else None)(found)
    return typer.main.get_group(around).commands[name]


SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": with_hyphens}
app = typer.Typer(cls=LazyCommands, no_args_is_help=True, context_settings=SETTINGS)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
):
    """Recursive reasoning models in the Hugging Face ecosystem.

    Errors are one line long; set HRM_HF_DEBUG=1 to see tracebacks.
    """


def main() -> None:
    """Run the command line. Expected failures print one line on stderr and exit with 1."""
    from ..io.usage import one_line_errors

    with one_line_errors():
        app()
