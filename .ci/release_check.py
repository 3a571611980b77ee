"""`make release-check`: builds what would be released, and tries it where nothing else is installed.

    python .ci/release_check.py [--out dist] [--oldest python3.11] [--newest python3.13] [--only newest]

The files that git knows are built into a source distribution, and that into a wheel; twine reads the metadata of
both. Then two empty environments: the source distribution on the oldest Python with the oldest libraries
(constraints-min.txt), and the wheel on the newest Python with the newest (constraints.txt). In each: a solved puzzle,
a demo of one training step, and checkpoints that load after the package has been uninstalled. Commands run in an
empty folder with an empty home, offline.

Each environment takes what pip installs of torch, several gigabytes with CUDA. PIP_EXTRA_INDEX_URL=
https://download.pytorch.org/whl/cpu makes pip take the builds for the CPU. This script needs git and Python alone.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
REMOTE_CODE = ROOT / ".ci" / "remote_code.py"
BOARD = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
ANSWER = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"  # Wikipedia's "Sudoku"
# The demo has 20,000 boards, 3,000 steps and a compiler.
ONE_STEP = (
    "--build_data", "sudoku --size 4 --clues 8 --num-train 200 --num-test 16", "--max_steps", "1",
    "--max_eval_rows", "4", "--eval_max_steps", "1", "--torch_compile", "false",
)  # fmt: skip
VERSIONS = """
import platform
from importlib.metadata import version
import hrm_hf
assert "site-packages" in hrm_hf.__file__, hrm_hf.__file__
found = [f"{name} {version(name)}" for name in ("hrm_hf", "torch", "transformers", "numpy")]
print("Python", platform.python_version(), *found)
"""


class FailedCheckError(Exception):
    """A command that should have worked; its output is the message."""


@dataclass
class Environment:
    """A virtual environment in a folder of its own, with an empty home beside it."""

    folder: Path
    python: str

    def __post_init__(self):
        self.home, self.empty = self.folder / "home", self.folder / "empty"
        for folder in (self.home, self.empty):
            folder.mkdir(parents=True)
        run([self.python, "-m", "venv", self.folder / "venv"], self.empty, os.environ)
        self.pip("--upgrade", "pip")

    def pip(self, *arguments) -> str:
        """`pip install`."""
        return self("python", "-m", "pip", "install", "--quiet", "--no-compile", *arguments)

    def __call__(self, program: str, *arguments, **more: str) -> str:
        """Return the output of a program of the environment."""
        settings = {**os.environ, "HOME": str(self.home), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", **more}
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "HF_HOME"):
            settings.pop(name, None)
        return run([self.folder / "venv" / "bin" / program, *arguments], self.empty, settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="for the two files (default: dist)")
    parser.add_argument("--oldest", default=sys.executable, metavar="PYTHON", help="default: the running one")
    parser.add_argument("--newest", default=sys.executable, metavar="PYTHON", help="default: the running one")
    parser.add_argument("--only", choices=("oldest", "newest"), help="one of the two environments")
    parser.add_argument("--folder", type=Path, help="where environments are made and deleted; a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="release-check-") as name:
        folder = Path(name)
        try:
            sdist, wheel = build(folder, args.out.resolve())
            if args.only != "newest":
                try_installed(folder / "oldest", args.oldest, sdist, ROOT / "constraints-min.txt")
                shutil.rmtree(folder / "oldest")  # gigabytes
            if args.only != "oldest":
                try_installed(folder / "newest", args.newest, wheel, ROOT / "constraints.txt")
        except FailedCheckError as failure:
            print(f"FAILED\n{failure}", flush=True)
            return 1
    print(f"{sdist.name} and {wheel.name} in {args.out} can be released" + f", says {args.only}" * bool(args.only))
    return 0


def build(folder: Path, out: Path) -> tuple[Path, Path]:
    """Build a source distribution, and a wheel from it, into the emptied folder `out`."""
    if out.exists() and any(file.suffix not in (".gz", ".whl") for file in out.iterdir()):
        raise FailedCheckError(f"--out {out} holds other files than distributions; name an empty folder")
    shutil.rmtree(out, ignore_errors=True)
    source, tools = folder / "source", Environment(folder / "tools", sys.executable)
    listed = run(["git", "ls-files", "-z"], ROOT, os.environ)
    for name in listed.strip("\0").split("\0"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    step("tools", "build and twine installed", lambda: tools.pip("build", "twine"))
    step("tools", "built", lambda: tools("python", "-m", "build", "--outdir", out, source))
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    step("tools", f"{sdist.name} and {wheel.name}", lambda: tools("twine", "check", "--strict", sdist, wheel), True)
    return sdist, wheel


def try_installed(folder: Path, python: str, file: Path, constraints: Path) -> None:
    """Installs one of the two files, uses it, and uninstalls it."""
    name, here = folder.name, Environment(folder, python)
    step(name, f"{file.name} with {constraints.name}", lambda: here.pip("-c", constraints, file))
    step(name, "pip check", lambda: here("python", "-m", "pip", "check"), True)
    step(name, "import", lambda: here("python", "-c", VERSIONS), True)
    step(name, "hrm-hf solve", lambda: expect(ANSWER, here("hrm-hf", "solve", BOARD, "--json")))
    training = here("python", "-c", "from hrm_hf.resources import resource; print(resource('training'))").strip()
    recipe = f"{training}/recipes/sudoku_demo_hrm.yaml"
    step(
        name,
        "one step of the demo",
        lambda: here("python", f"{training}/run_puzzle.py", "--recipe", recipe, *ONE_STEP),
    )
    step(
        name,
        "its checkpoint solves",
        lambda: here("hrm-hf", "solve", "runs/sudoku_demo", "1...............", "--json"),
    )
    step(name, "checkpoints", lambda: here("python", REMOTE_CODE, "save", folder), True)
    step(name, "hrm_hf uninstalled", lambda: here("python", "-m", "pip", "uninstall", "--yes", "hrm_hf"))
    step(name, "remote code", lambda: here("python", REMOTE_CODE, "load", folder), True)


def step(where: str, what: str, work: Callable[[], str], show: bool = False) -> None:
    """Run one step; print its seconds and, with `show`, its last line of output."""
    print(f"{where:8} {what}", end=" ", flush=True)
    started = time.monotonic()
    said = work().strip().splitlines()[-1:] if show else work() and []
    print("ok", f"({time.monotonic() - started:.0f} s)", *said, flush=True)


def expect(wanted: str, output: str) -> str:
    """Raise FailedCheckError if an output does not contain a text."""
    if wanted not in output:
        raise FailedCheckError(f"expected {wanted} in:\n{output}")
    return output


def run(command: list, folder: Path, settings: dict[str, str] | os._Environ) -> str:
    """Return the output of a command. Raise FailedCheckError with the output if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=settings, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise FailedCheckError(f"{' '.join(words)}\nended with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
