"""The resident checker: one process, many questions, no waiting between them.

A batch is written and its answers are read at the same time, so neither side blocks. A process that dies is started
again: the question it died at is asked once more, and blamed if it kills the new process too. A question that takes
too long is blamed at once.
"""

import atexit
import base64
import json
import os
import selectors
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from .syntax import to_bytes
from .toolchain import build_checker, find_go


_running: "weakref.WeakSet[CheckerProcess]" = weakref.WeakSet()


class CheckerError(RuntimeError):
    """The checker died."""


class CheckerTimeoutError(CheckerError):
    """No answer in time."""


class CheckerProcess:
    """Asks the checker program; any number of threads may, one batch is answered at a time.

    Args:
        seconds: most time that one question may take. The first questions that import a package of the standard
            library also read its sources (about 2 s).

    Raises:
        GoNotFoundError: there is no Go toolchain, or the checker cannot be built.
        ValueError: seconds is not above 0.
    """

    def __init__(self, seconds: float = 60.0):
        if not seconds > 0:
            raise ValueError(f"seconds={seconds}; expected more than 0")
        self.seconds = seconds
        go = find_go()
        self._command = [str(build_checker(go))]
        # Module mode off: imports are found in GOROOT without asking the go tool.
        self._environment = {**go.environment(), "GO111MODULE": "off", "GOFLAGS": "", "GOMEMLIMIT": "1GiB"}
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._owner = os.getpid()
        _running.add(self)

    @property
    def pid(self) -> int | None:
        """Of the running process; None before the first question and after close()."""
        return None if self._process is None else self._process.pid

    def ask(self, mode: str, codes: Sequence[str], **options: Any) -> list[dict[str, Any]]:
        """The checker's answer (see checker/main.go) for each code; {"failure": text} where it has none."""
        lines = [self._request(mode, code, options) for code in codes]
        answers: list[dict[str, Any]] = []
        died_at = -1
        with self._lock:
            self._leave_parent()
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
        """Ends the process; a later question starts a new one."""
        with self._lock:
            self._stop()

    def __enter__(self) -> "CheckerProcess":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @staticmethod
    def _request(mode: str, code: str, options: dict[str, Any]) -> bytes:
        text = base64.b64encode(to_bytes(code)).decode()
        return json.dumps({"mode": mode, "code": text, "package": "p", **options}).encode() + b"\n"

    def _leave_parent(self) -> None:
        """After a fork the pipes are the parent's: this process takes a checker of its own."""
        if self._owner != os.getpid():
            self._process, self._owner = None, os.getpid()

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env=self._environment, cwd="/", bufsize=0, start_new_session=True,
        )  # fmt: skip
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        self._errors.close()

    def _exchange(self, lines: list[bytes], answers: list[dict[str, Any]]) -> None:
        """Writes the questions that have no answer yet and reads until all have one.

        Raises:
            CheckerError: it ended before it did that.
            CheckerTimeoutError: no answer came in time.
        """
        if self._process is None:
            self._start()
        writing = memoryview(b"".join(lines[len(answers) :]))
        received = bytearray()
        deadline = time.monotonic() + self.seconds
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            ready.register(self._process.stdin, selectors.EVENT_WRITE)
            while len(answers) < len(lines):
                events = ready.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    raise CheckerTimeoutError(f"no answer in {self.seconds:g} s")
                for key, _ in events:
                    if key.fileobj is self._process.stdin:
                        writing = writing[self._write(writing) :]
                        if not writing:
                            ready.unregister(self._process.stdin)
                    elif self._read(received, answers):
                        deadline = time.monotonic() + self.seconds

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._process.stdin.fileno(), data[: 1 << 16])
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            raise CheckerError(self._obituary()) from None

    def _read(self, received: bytearray, answers: list[dict[str, Any]]) -> bool:
        """Takes what has come; True if an answer is complete."""
        data = os.read(self._process.stdout.fileno(), 1 << 20)
        if not data:
            raise CheckerError(self._obituary())
        received += data
        *complete, rest = bytes(received).split(b"\n") if b"\n" in data else (bytes(received),)
        answers.extend(json.loads(line) for line in complete)
        received[:] = rest
        return bool(complete)

    def _obituary(self) -> str:
        code = self._process.wait()
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4096))
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return f"the checker ended with status {code}" + (f": {lines[0][:200]}" if lines else "")


@atexit.register
def _close_all() -> None:
    for process in list(_running):
        process.close()
