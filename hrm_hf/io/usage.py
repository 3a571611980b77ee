"""Helpers for commands: usage errors, subprocesses, optional packages and one-line error messages."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO


INTERRUPTED = 130  # exit status after Ctrl-C, as in a shell


class UsageError(ValueError):
    """Raised when an `option` is invalid or conflicts with another. Commands exit with status 2."""

    def __init__(self, message: str, option: str | None = None):
        super().__init__(message)
        self.option = option


def as_usage_errors(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function and convert ValueError to UsageError. Only invalid options may cause the ValueError."""
    try:
        return function(*args, **kwargs)
    except ValueError as error:
        raise UsageError(str(error)) from error


def run_process(*command: object, out: TextIO | None = None) -> None:
    """Run a program and wait for it, even after Ctrl-C. `out` gets stdout. Raise CalledProcessError if it fails."""
    words, status = [str(part) for part in command], None
    with subprocess.Popen(words, stdout=out) as process:
        while status is None:
            with suppress(KeyboardInterrupt):
                status = process.wait()
    if status:
        raise subprocess.CalledProcessError(status, words)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, in the singular or plural: `1 board`, `2 boards`, `10,000 boards`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def install_command(extra: str) -> str:
    """Return the command that installs an extra from source, since the package is not on PyPI."""
    return f'pip install ".[{extra}]" in the source folder of hrm_hf'


def validate_extra(extra: str, need: str, *modules: str, instead: str = "") -> None:
    """Raise an ImportError that names the extra to install if any of the modules is missing.

    Args:
        extra: name of an extra in setup.cfg.
        need: clause that names the feature and its packages, such as "ONNX export needs onnx and onnxruntime".
        modules: names of the top-level modules of these packages.
        instead: alternative to suggest that does not need these packages.
    """
    if any(find_spec(module) is None for module in modules):
        raise ImportError(f"{need}: {install_command(extra)}{instead and f', or {instead}'}")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an error in a `with` block as one line and exit, with status 2 for bad usage and otherwise 1.

    Ctrl-C also prints one line, with status 130. Unexpected errors, which are bugs, keep their traceback;
    HRM_HF_DEBUG=1 shows the traceback of all errors.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        if os.environ.get("HRM_HF_DEBUG"):
            raise
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"interrupted{f': {stop}' if str(stop) else ''}\n")
        sys.exit(INTERRUPTED)
    except Exception as error:
        expected = _is_expected(error)
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        line = f"error: {message}" if expected else f"error: {type(error).__name__}: {message}"
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun adds the contents of this file to its report
            Path(file).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))
        if os.environ.get("HRM_HF_DEBUG") or not expected:
            raise
        sys.stderr.write(f"{line}\n")
        sys.exit(2 if isinstance(error, UsageError) else 1)


def _is_expected(error: Exception) -> bool:
    from huggingface_hub.errors import StrictDataclassError  # this import takes 0.25 s and would slow down --help

    return isinstance(error, ValueError | OSError | RuntimeError | ImportError | KeyError | StrictDataclassError)
