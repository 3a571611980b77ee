"""Commands in words: functions of the library called with the arguments of a command line."""

import argparse
import inspect
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, TextIO, get_args, get_origin, get_type_hints


class UsageError(ValueError):
    """Options that are wrong, or that do not fit together: exit status 2 of a command, where other errors are 1.

    Attributes:
        option: the option or argument that is meant, where the message does not say it.
    """

    def __init__(self, message: str, option: str | None = None):
        super().__init__(message)
        self.option = option


def parse_memory(text: str) -> int:
    """`24GB`, `24GiB`, `24` or `800MB` as bytes. GPUs are sold in binary gigabytes, so both spellings mean those.

    Raises:
        ValueError: another form, or no memory at all.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GM])?i?B?", text.strip(), re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise ValueError(f"memory {text!r} is not of the form 24GB or 800MB")
    return int(float(match[1]) * (2**20 if (match[2] or "G").upper() == "M" else 2**30))


def as_usage_errors(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function whose ValueErrors can only come from the options.

    Raises:
        UsageError: instead of such a ValueError.
    """
    try:
        return function(*args, **kwargs)
    except ValueError as error:
        raise UsageError(str(error)) from error


def run_command(command: str, functions: Mapping[str, Callable[..., Any]], **given: Any) -> Any:
    """Calls a function by its command, as "sudoku --size 4". Arguments and errors as of `parse_command`."""
    name, arguments = parse_command(command, functions, **given)
    return functions[name](**arguments)


def parse_command(
    command: str, functions: Mapping[str, Callable[..., Any]], **given: Any
) -> tuple[str, dict[str, Any]]:
    """The name of a function and its arguments from a command, with options as `hrm-hf` has them.

    Args:
        command: name of one of `functions`, its positional arguments and its options.
        given: arguments that the command does not name.

    Raises:
        UsageError: an unknown name or option, or a value of another type.
    """
    name, *words = shlex.split(command) or [""]
    if name not in functions:
        raise UsageError(f"{name!r} is unknown; expected one of {', '.join(functions)}")
    parser = _Parser(prog=name, add_help=False, allow_abbrev=False)
    kinds = get_type_hints(functions[name])
    for parameter in inspect.signature(functions[name]).parameters.values():
        if parameter.name not in given:
            _add(parser, parameter, kinds[parameter.name])
    return name, vars(parser.parse_args(words)) | given


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UsageError(message)


def _add(parser: argparse.ArgumentParser, parameter: inspect.Parameter, kind: Any) -> None:
    """One argument: an option if it is keyword-only, a flag if it is a bool, repeatable if it is a list."""
    if NoneType in get_args(kind):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    many = get_origin(kind) is list
    kind = get_args(kind)[0] if many else kind
    if parameter.kind is not parameter.KEYWORD_ONLY:
        parser.add_argument(parameter.name, type=kind, nargs="+" if many else None)
        return
    required = parameter.default is parameter.empty
    how = {"action": "store_true"} if kind is bool else {"type": kind, "action": "append" if many else "store"}
    default = None if required else parameter.default
    parser.add_argument(f"--{parameter.name.replace('_', '-')}", default=default, required=required, **how)


def run_process(*command: object, out: TextIO | None = None) -> None:
    """Runs a program, whose output goes where ours does, or to `out`.

    Raises:
        CalledProcessError: it failed; has its status.
    """
    subprocess.run([str(part) for part in command], check=True, stdout=out)
