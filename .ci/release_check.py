"""Build the distributions to release, and test each in an empty environment: `make release-check`.

    python .ci/release_check.py [--out dist] [--oldest python3.11] [--newest python3.13] [--only newest]

The files tracked by git are built into a source distribution, and that into a wheel; twine checks the metadata of
both. The source distribution is then installed with the oldest supported Python and libraries (constraints-min.txt),
and the wheel with the newest (constraints.txt). Each environment solves a puzzle, runs one training step of the demo,
and loads checkpoints after the package has been uninstalled. Except for pip, commands run offline, in an empty folder
and with an empty home folder.

By default, pip installs torch with CUDA, several gigabytes per environment. To install CPU builds instead, set
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. The script requires only git and Python.
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
# Shorten the demo, which otherwise uses 20,000 boards, 3,000 steps and torch.compile.
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
    """Failure of a command or of a check; the message contains the command's output."""


@dataclass
class Environment:
    """Virtual environment in its own folder, next to an empty home folder."""

    folder: Path
    python: str

    def __post_init__(self):
        self.home, self.empty = self.folder / "home", self.folder / "empty"
        for folder in (self.home, self.empty):
            folder.mkdir(parents=True)
        run([self.python, "-m", "venv", self.folder / "venv"], self.empty, os.environ)
        self.pip("--upgrade", "pip")

    def pip(self, *arguments) -> str:
        """Run `pip install` in the environment."""
        return self("python", "-m", "pip", "install", "--quiet", "--no-compile", *arguments)

    def __call__(self, program: str, *arguments, **more: str) -> str:
        """Run a program of the environment and return its output."""
        settings = {**os.environ, "HOME": str(self.home), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", **more}
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "HF_HOME"):
            settings.pop(name, None)
        return run([self.folder / "venv" / "bin" / program, *arguments], self.empty, settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the two files (default: dist)")
    parser.add_argument("--oldest", default=sys.executable, metavar="PYTHON", help="default: this Python")
    parser.add_argument("--newest", default=sys.executable, metavar="PYTHON", help="default: this Python")
    parser.add_argument("--only", choices=("oldest", "newest"), help="test only one environment")
    parser.add_argument("--folder", type=Path, help="folder for the temporary environments")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="release-check-") as name:
        folder = Path(name)
        try:
            sdist, wheel = build(folder, args.out.resolve())
            if args.only != "newest":
                try_installed(folder / "oldest", args.oldest, sdist, ROOT / "constraints-min.txt")
                shutil.rmtree(folder / "oldest")  # frees gigabytes
            if args.only != "oldest":
                try_installed(folder / "newest", args.newest, wheel, ROOT / "constraints.txt")
        except FailedCheckError as failure:
            print(f"FAILED\n{failure}", flush=True)
            return 1
    print(f"{sdist.name} and {wheel.name} in {args.out} can be released" + f" (tested: {args.only})" * bool(args.only))
    return 0


def build(folder: Path, out: Path) -> tuple[Path, Path]:
    """Build a source distribution, and a wheel from it, into the folder `out`, which is emptied first."""
    if out.exists() and any(file.suffix not in (".gz", ".whl") for file in out.iterdir()):
        raise FailedCheckError(f"--out {out}: holds other files besides distributions; pass an empty folder")
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
    """Install one of the two distributions, use it, uninstall it, and load checkpoints without it."""
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
    """Return `output`; raise FailedCheckError if it does not contain `wanted`."""
    if wanted not in output:
        raise FailedCheckError(f"expected {wanted} in this output:\n{output}")
    return output


def run(command: list, folder: Path, settings: dict[str, str] | os._Environ) -> str:
    """Run a command and return its output; if it fails, raise FailedCheckError with the output."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=settings, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise FailedCheckError(f"{' '.join(words)}\nended with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
