"""Helpers shared by all commands: options from a dataclass, usage errors, and printed results."""

import dataclasses
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CalledProcessError
from typing import Annotated, Any, get_type_hints

import typer

from ..io.options import Options, flag


AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
WRITTEN = ("results", "plot", "plots", "card")  # result entries that name the files written by an evaluation


_UNDERSCORED: set[str] = set()  # names of all option fields; importing a command adds its names


def with_hyphens(name: str) -> str:
    """Replace underscores in an option with hyphens. Users may type underscores, as in the training scripts."""
    return name.replace("_", "-") if name.removeprefix("no_") in _UNDERSCORED else name


def takes(options: type[Options], json: bool = True, **extra: Any) -> Callable[[Callable], Callable]:
    """Decorate a function that takes an `options` instance, so typer reads its options from the fields.

        @app.command()
        @takes(EvaluatePuzzles)
        def puzzles(options: EvaluatePuzzles, as_json: bool):

    Usage errors raised by the options or the function exit with status 2.

    Args:
        json: add `--json`, which the function receives as `as_json`.
        extra: additional flags as `Annotated` types, off by default. The function receives them as keyword arguments.
    """
    hints = get_type_hints(options)
    fields = {each.name: each for each in dataclasses.fields(options)}
    screen = ({"as_json": AsJson} if json else {}) | extra

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def command(**given: Any) -> Any:
            shown = {name: given.pop(name) for name in screen}
            with usage_errors():
                return function(options(**given), **shown)

        parameters = [_parameter(each, hints[name]) for name, each in fields.items()]
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
            for name, annotation in screen.items()
        ]
        command.__signature__ = inspect.Signature(parameters)
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        del command.__wrapped__
        return command

    return decorate


def _parameter(field: dataclasses.Field, hint: Any) -> inspect.Parameter:
    """Convert a dataclass field to a parameter for typer."""
    about = field.metadata
    shared = {name: about.get(name) for name in ("metavar", "min", "max")}
    shared["help"] = about["help"].replace("[default:", r"\[default:")  # rich drops unescaped brackets as markup
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    if about.get("argument"):
        info = typer.Argument(**shared)
    else:
        _UNDERSCORED.add(field.name)
        names = about.get("flags") or ((flag(field),) if hint is bool and default is False else ())
        info = typer.Option(*names, **shared)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, keyword, default=default, annotation=Annotated[hint, info])


@contextmanager
def usage_errors() -> Iterator[None]:
    """Exit with status 2 for bad usage, or with the status of a subprocess that failed."""
    from ..io.model_names import ModelError
    from ..io.usage import UsageError

    try:
        yield
    except ModelError as error:  # print one line, because the usage text would not help
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    except UsageError as error:
        raise typer.BadParameter(str(error), param_hint=error.option) from error
    except CalledProcessError as error:  # the subprocess has already printed its error
        raise typer.Exit(error.returncode) from error


def validate_model(name: str, kind: str | None = None) -> None:
    """Raise ModelError if the model does not exist or its config.json is for a different kind of model.

    Args:
        kind: name in `hrm_hf.hub.kinds`, for example LANGUAGE_MODEL.
    """
    from ..io.model_names import find_model

    find_model(name)
    if kind:
        from ..hub import kinds

        kinds.validate_kind(name, getattr(kinds, kind))


def report(result: dict[str, Any], as_json: bool, on_screen: dict[str, Any] | None = None) -> None:
    """Print a result on rank 0: as JSON with --json, else one line per entry.

    Args:
        on_screen: entries to print without --json, besides the files an evaluation wrote; by default, all entries.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        typer.echo(json.dumps(result))
        return
    if on_screen is not None:
        result = on_screen | {name: result[name] for name in WRITTEN if name in result}
    typer.echo("\n".join(f"{key}: {value}" for key, value in result.items()))


def write_json(result: Any, out: Path) -> None:
    """Write a command's result to a JSON file, and create the folder if it is missing."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result) + "\n", encoding="utf-8")
