"""Errors of usage, and what commands share when they read options and start programs."""

import re
import subprocess
from collections.abc import Callable
from typing import Any, TextIO


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


def run_process(*command: object, out: TextIO | None = None) -> None:
    """Runs a program, whose output goes where ours does, or to `out`.

    Raises:
        CalledProcessError: it failed; has its status.
    """
    subprocess.run([str(part) for part in command], check=True, stdout=out)
