"""Make a command of a dataclass of options, so that no name, default or help text is written twice."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from ..io.options import Options, flag
from .report import AsJson, usage_errors


def takes(options: type[Options], json: bool = True, **extra: Any) -> Callable[[Callable], Callable]:
    """Decorate a function that takes one instance of `options`, so that typer reads the options from its fields.

        @app.command()
        @takes(EvaluatePuzzles)
        def puzzles(options: EvaluatePuzzles, as_json: bool):

    Args:
        options: dataclass with fields made by `hrm_hf.io.options.option`.
        extra: annotations of flags that belong to the screen only, by name, each an `Annotated` whose flag is off by
            default. The function receives them by keyword.
        json: whether the command has `--json`, which the function receives as `as_json`.
    """
    hints = get_type_hints(options)
    fields = {each.name: each for each in dataclasses.fields(options)}
    screen = ({"as_json": AsJson} if json else {}) | extra

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def command(**given: Any) -> Any:
            shown = {name: given.pop(name) for name in screen}
            with usage_errors():
                built = options(**given)
            return function(built, **shown)

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
    """Describe a field as typer expects a parameter."""
    about = field.metadata
    shared = {name: about.get(name) for name in ("help", "metavar", "min", "max")}
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    default = inspect.Parameter.empty if default is dataclasses.MISSING else default
    if about.get("argument"):
        info = typer.Argument(**shared)
    else:
        names = about.get("flags") or ((flag(field),) if hint is bool and default is False else ())
        info = typer.Option(*names, **shared)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info]
    )
