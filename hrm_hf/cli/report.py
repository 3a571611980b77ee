"""Shared by the commands: calls a function of the library with the options and prints its result."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CalledProcessError
from typing import Annotated, Any

import typer


# Options that several commands have.
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, mps, ...; the best there is by default.")]
WRITTEN = ("results", "plot", "plots", "card")  # files that an evaluation has made


def run(
    function: Callable[..., dict[str, Any]],
    options: Any,
    as_json: bool,
    on_screen: Callable[[dict[str, Any]], dict[str, Any]],
    **more: Any,
) -> None:
    """Calls `function` with the options of a command, and prints the result.

    Args:
        on_screen: what is shown of a result without --json, beside the files that were written.
        more: other arguments of `function`.
    """
    with usage_errors():
        result = function(options, **more)
    if not as_json:
        result = on_screen(result) | {name: result[name] for name in WRITTEN if name in result}
    report(result, as_json)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Bad usage that the library has found: exit status 2. A program that failed: its own status."""
    from ..io.model_names import ModelError
    from ..io.usage import UsageError

    try:
        yield
    except ModelError as error:  # one line: how the command is used has nothing to do with it
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    except UsageError as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from error
    except CalledProcessError as error:  # the program has said what is wrong
        raise typer.Exit(error.returncode) from error


def report(result: dict[str, Any], as_json: bool) -> None:
    """Prints a command's result: JSON with --json, else a line per entry. Of several processes the first one does."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(json.dumps(result) if as_json else "\n".join(f"{key}: {value}" for key, value in result.items()))


def write_json(result: Any, out: Path) -> None:
    """Writes a command's result into a file, in a folder that is made."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result) + "\n", encoding="utf-8")


def validate_model(name: str, kind: str | None = None) -> None:
    """Refuses a model that is nowhere, or whose config.json says that it is of another kind; loads nothing heavy.

    Args:
        kind: name in `hrm_hf.hub.kinds`, as LANGUAGE_MODEL.
    """
    from ..io.model_names import find_model

    with usage_errors():
        find_model(name)
        if kind:
            from ..hub import kinds

            kinds.validate_kind(name, getattr(kinds, kind))
