"""Declare and validate the options of commands, with one dataclass per command.

The command line, pipelines and the app read names, defaults, bounds and help texts from these classes. This module
imports no large library, so `--help` stays fast.

    @dataclass(kw_only=True)
    class CountOptions(Options):
        data: str = option("Data set to count.", argument=True)
        limit: int | None = option("Number of rows to count. [default: all]", None, min=1)

`hrm_hf.cli.command.takes` turns such a class into a command, and `parse_command` parses a command in a string.
"""

import argparse
import dataclasses
import difflib
import os
import re
import shlex
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from .usage import UsageError


def option(
    help: str,
    default: Any = dataclasses.MISSING,
    *,
    min: float | None = None,
    max: float | None = None,
    argument: bool = False,
    metavar: str | None = None,
    flags: tuple[str, ...] = (),
) -> Any:
    """Declare a field of an `Options` class.

    Args:
        help: command-line help text.
        default: default value; without one, the option is required. A list is copied for each instance.
        min, max: inclusive bounds of a number.
        argument: whether the option is a positional argument on the command line.
        metavar: placeholder in the help, for positional arguments.
        flags: command-line flags, such as ("--on-bad-line",); the field's name with hyphens by default.
    """
    metadata = {"help": help, "min": min, "max": max, "argument": argument, "metavar": metavar, "flags": flags}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(kw_only=True)
class Options:
    """Base class for options that checks bounds and choices. Subclasses add checks in `__post_init__`."""

    def __post_init__(self) -> None:
        """Expand `~/` in paths, and raise UsageError for the first value that is out of bounds or not allowed."""
        hints = get_type_hints(type(self))
        for each in dataclasses.fields(self):
            value = _at_home(getattr(self, each.name))
            setattr(self, each.name, value)
            if value is not None:
                self._validate(each, value, value_type(hints[each.name]))

    def _validate(self, field: dataclasses.Field, value: Any, kind: Any) -> None:
        low, high = field.metadata.get("min"), field.metadata.get("max")
        if kind in (int, float) and not _is_number(value, kind):
            expected = f"must be {'an integer' if kind is int else 'a number'}"
        elif get_origin(kind) is Literal and value not in get_args(kind):
            expected = f"must be one of {', '.join(map(repr, get_args(kind)))}"
        elif (low is not None and value < low) or (high is not None and value > high):
            expected = f"must be at least {low}" if high is None else f"must be in [{low}, {high}]"
        else:
            return
        raise UsageError(f"{field.name}={value!r}: {expected}", flag(field))

    @classmethod
    def of(cls, values: Mapping[str, Any], caller: str, *more: str) -> Self:
        """Create options from `values`. For an unknown name, raise TypeError, naming `caller` and a similar option."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values.keys() - set(known):
            nearest = difflib.get_close_matches(name, [*known, *more], n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join([*known, *more])}"
            raise TypeError(f"{name}={values[name]!r:.60}: {caller} has no such argument; {hint}")
        return cls(**values)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with the given changes."""
        return dataclasses.replace(self, **changes)


def expand_home(text: str) -> str:
    """Expand `~/` and `~USER/` at the start of each path in a comma-separated list."""
    return re.sub(r"(?:^|(?<=,)|(?<=, ))~[\w.-]*(?=/)", lambda found: os.path.expanduser(found[0]), text)


def _is_number(value: Any, kind: type) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool) or value != value:
        return False
    return kind is float or value == value // 1


def _at_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_at_home(each) for each in value]
    if isinstance(value, Path):
        return value.expanduser() if str(value).startswith("~/") else value
    return expand_home(value) if isinstance(value, str) else value


def flag(field: dataclasses.Field) -> str:
    """Return the command-line name of a field: a flag like `--max-steps`, or a positional argument like `MODEL`."""
    if field.metadata.get("argument"):
        return field.metadata.get("metavar") or field.name.upper()
    return next(iter(field.metadata.get("flags") or ()), f"--{field.name.replace('_', '-')}")


def value_type(hint: Any) -> Any:
    """Return a type without None: `int` for `int | None`."""
    kinds = get_args(hint)
    return next((each for each in kinds if each is not NoneType), hint) if NoneType in kinds else hint


def parse_command(command: str, kinds: Mapping[str, type[Options]], **given: Any) -> tuple[str, Options]:
    """Parse a command such as "sudoku --size 4" into its name and its options.

    Args:
        command: one of the names in `kinds`, followed by arguments and flags as on the command line.
        given: values of fields that `command` cannot set.

    Raises:
        UsageError: an unknown name or flag, or a value of the wrong type.
    """
    name, *words = shlex.split(command) or [""]
    if name not in kinds:
        raise UsageError(f"{name!r} is unknown; expected one of {', '.join(kinds)}")
    parser = _Parser(prog=name, add_help=False, allow_abbrev=False)
    hints = get_type_hints(kinds[name])
    for field in dataclasses.fields(kinds[name]):
        if field.name not in given:
            _add_to(parser, field, value_type(hints[field.name]))
    return name, kinds[name](**vars(parser.parse_args(words)), **given)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UsageError(message)


def _add_to(parser: argparse.ArgumentParser, field: dataclasses.Field, kind: Any) -> None:
    """Add one field to a parser. Omitted flags set no attribute, so the dataclass fills in the default."""
    many = get_origin(kind) is list
    kind = get_args(kind)[0] if many else kind
    kind = str if get_origin(kind) is Literal else kind
    required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    if field.metadata.get("argument"):
        parser.add_argument(field.name, type=kind, nargs="+" if many else None if required else "?")
        return
    shared = {"dest": field.name, "required": required, "default": argparse.SUPPRESS}
    names = dict.fromkeys((flag(field), f"--{field.name}"))
    if kind is bool:
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, **shared)
    else:
        parser.add_argument(*names, type=kind, action="append" if many else "store", **shared)


def wanted_checkpoint(value: str | bool | Path | None) -> str | None:
    """Convert a value of `resume_from_checkpoint` to None, "last", "last-complete" or a folder."""
    return {"none": None, "false": None, "true": "last"}.get(str(value).lower(), str(value))
