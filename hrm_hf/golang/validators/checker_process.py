"""The resident checker: one process that answers many questions without waiting between them.

A thread writes a batch while its answers are read, so that neither side blocks. A process that dies is started again:
the question at which it died is asked once more, and blamed if it kills the new process too. A question that takes too
long is blamed at once.
"""

import base64
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .sandbox import readable
from .syntax import to_bytes
from .toolchain import build_checker, find_go


class CheckerError(RuntimeError):
    """The checker died."""


class CheckerTimeoutError(CheckerError):
    """The checker did not answer in time."""


class CheckerProcess:
    """Ask the checker program from any thread; one batch is answered at a time.

    Args:
        seconds: most time for one question. The first questions that import a package of the standard library also
            read its sources (about 2 s).

    Raises:
        GoNotFoundError: there is no Go toolchain, or the checker cannot be built.
    """

    def __init__(self, seconds: float = 60.0):
        self.seconds = seconds
        go = find_go()
        self._command = [str(build_checker(go))]
        # Module mode off: imports are found in GOROOT without asking the go tool.
        self._environment = {**go.environment(), "GO111MODULE": "off", "GOFLAGS": "", "GOMEMLIMIT": "1GiB"}
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    @property
    def pid(self) -> int | None:
        """The id of the running process; None before the first question and after close()."""
        return None if self._process is None else self._process.pid

    def ask(self, mode: str, codes: Sequence[str], **options: Any) -> list[dict[str, Any]]:
        """Return the checker's answer (see checker/main.go) for each code; {"failure": text} where it has none."""
        lines = []
        for code in codes:
            text = base64.b64encode(to_bytes(code)).decode()
            request = {"mode": mode, "code": text, "package": "p", "auto_import": True, **options}
            lines.append(json.dumps(request).encode() + b"\n")
        answers: list[dict[str, Any]] = []
        died_at = -1
        with self._lock:
            while len(answers) < len(lines):
                try:
                    self._exchange(lines, answers)
                except CheckerError as failure:
                    self._stop()
                    if isinstance(failure, CheckerTimeoutError) or died_at == len(answers):
                        answers.append({"failure": str(failure)})
                    else:
                        died_at = len(answers)
        return answers

    def close(self) -> None:
        """End the process; a later question starts a new one."""
        with self._lock:
            self._stop()

    def __enter__(self) -> "CheckerProcess":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
            self._errors.close()

    def _exchange(self, lines: list[bytes], answers: list[dict[str, Any]]) -> None:
        """Write the questions that have no answer yet, and read until all have one.

        Raises:
            CheckerError: the process ended before.
            CheckerTimeoutError: no answer came in time.
        """
        if self._process is None:
            self._errors = tempfile.TemporaryFile()
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                env=self._environment, cwd="/", bufsize=0, start_new_session=True,
            )  # fmt: skip
        process, received = self._process, bytearray()
        writer = threading.Thread(target=_write, args=(process.stdin, lines[len(answers) :]), daemon=True)
        writer.start()
        try:
            while len(answers) < len(lines):
                if not readable(process.stdout.fileno(), self.seconds):
                    raise CheckerTimeoutError(f"no answer in {self.seconds:g} s")
                data = os.read(process.stdout.fileno(), 1 << 20)
                if not data:
                    raise CheckerError(self._obituary())
                received += data
                if b"\n" in data:
                    *complete, rest = bytes(received).split(b"\n")
                    answers.extend(map(json.loads, complete))
                    received = bytearray(rest)
        except BaseException:
            process.kill()  # the writer ends with it
            raise
        finally:
            writer.join()

    def _obituary(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read(4096).decode("utf-8", "replace").strip().splitlines()
        return f"the checker ended with status {code}" + (f": {lines[0][:200]}" if lines else "")


def _write(stdin, lines: list[bytes]) -> None:
    rest = memoryview(b"".join(lines))
    with suppress(BrokenPipeError):
        while rest:
            rest = rest[stdin.write(rest) :]


class UsesChecker:
    """Base of validators: a context manager that ends the checker process, if there is one."""

    checker: CheckerProcess | None = None

    def close(self) -> None:
        """End the checker process; a later call starts a new one."""
        if self.checker is not None:
            self.checker.close()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()
