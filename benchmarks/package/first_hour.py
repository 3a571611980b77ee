"""The first hour of a newcomer: every command in a fresh clone with an empty home, its seconds and what it prints.

    python -m benchmarks.package.first_hour [--quick] [--out DIR]

The checkout's last commit is cloned, `make demo` installs the core and trains, and what README and docs/index.md say
next is typed: help, mistakes, solving, evaluating, a training step, a push to a Hub on this machine and a pull.
Prints a line a command; first_hour.md has the whole of what each printed. The exit status is 1 if a command ended
otherwise than it should, or said something on stderr that is neither progress nor its one line of error.
"""

import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

from hub_server import HubServer

from ..report import machine, make_parser, write_report


ROOT = Path(__file__).parents[2]
BOARD = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
STEP = "python training/run_puzzle.py --recipe training/recipes/sudoku_demo_units.yaml --torch_compile false"
# What is typed in the clone, and the exit status that it should have.
INSTALL = [("make demo", 0)]
QUICK_INSTALL = [("make .venv/.core", 0)]
FIRST = [
    ("hrm-hf --help", 0),
    ("hrm-hf --version", 0),
    ("hrm-hf solv", 2),
    ("hrm-hf solve --stepps 3", 2),
    (f"hrm-hf solve {BOARD}", 0),
    (f"hrm-hf solve {BOARD} --json", 0),
    ("hrm-hf solve runs/nothere 123", 2),
    ("hrm-hf recommend --memory 4GB", 0),
    (f"{STEP} --output_dir runs/one_step --max_steps 1 --max_eval_samples 4", 0),
    (f"{STEP} --output_dir runs/one_step --no_such_flag 1", 2),
    ("hrm-hf eval puzzles runs/one_step runs/data/sudoku_demo --limit 20", 0),
]
SHARED = [
    ("hrm-hf push runs/one_step me/sudoku --license apache-2.0", 0),
    ("hrm-hf pull me/sudoku --out models/sudoku", 0),
    (f"hrm-hf solve models/sudoku {BOARD}", 0),
]
PROGRESS = re.compile(r"\d+%\||\[\d+:\d+, |^\s*$")  # bars with a total, and without


def main() -> None:
    args = make_parser(__doc__, quick="install the core, without the demo").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clone, home = Path(folder, "hrm_hf"), Path(folder, "home")
        home.mkdir()
        with HubServer(Path(folder, "hub")) as hub:
            environment = {
                **os.environ,
                **hub.environment(home),
                "HOME": str(home),
                "XDG_CACHE_HOME": f"{home}/.cache",
            }
            for name in ("PYTHONPATH", "VIRTUAL_ENV", "HF_HUB_OFFLINE"):
                environment.pop(name, None)
            environment["PATH"] = f"{clone}/.venv/bin{os.pathsep}{environment['PATH']}"
            rows = [run(f"git clone --quiet {shlex.quote(str(ROOT))} {clone}", 0, folder, environment)]
            for command, status in (QUICK_INSTALL if args.quick else INSTALL) + FIRST + SHARED:
                rows.append(run(command, status, clone, environment))
        installed = sum(file.stat().st_size for file in clone.glob(".venv/lib/**/*") if file.is_file())
        packages = len(list(clone.glob(".venv/lib/python*/site-packages/*.dist-info")))
    core = {"megabytes": round(installed / 1e6), "packages": packages}
    print(f"the core: {core['megabytes']:,} MB, {packages} packages")
    transcript = "\n".join(map(as_text, rows))
    for place, name in ((ROOT, "REPOSITORY"), (clone, "hrm_hf"), (home, "~")):
        transcript = transcript.replace(str(place), name)
    (args.out / f"first_hour{'_quick' if args.quick else ''}.md").write_text(f"# The first hour\n\n{transcript}")
    columns = ("command", "status", "seconds", "cpu_seconds", "noise")
    figures = [{name: row[name] for name in columns} for row in rows[1:]]  # without the clone
    write_report(args, "first_hour", {"commands": figures, "core": core, "machine": machine()})
    sys.exit(any(row["wrong"] for row in rows))


def run(command: str, expected: int, folder: Path | str, environment: dict[str, str]) -> dict[str, Any]:
    """Runs a command as it is typed, and prints its line of the table."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ended = subprocess.run(
        command, shell=True, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        errors="replace",
    )  # fmt: skip
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = [line for line in re.split(r"[\r\n]", ended.stderr) if not PROGRESS.search(line)]
    noise = [] if expected else lines
    wrong = ended.returncode != expected or bool(noise)
    print(f"{'WRONG' if wrong else 'ok':5} {seconds:7.1f} s {cpu:7.1f} s of CPU  {command[:90]}", flush=True)
    for line in noise:
        print(f"      stderr: {line[:150]}")
    return {
        "command": command, "status": ended.returncode, "seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2),
        "noise": noise, "wrong": wrong, "stdout": ended.stdout, "stderr": "\n".join(lines),
    }  # fmt: skip


def as_text(row: dict[str, Any]) -> str:
    said = "\n".join(filter(None, (row["stdout"].rstrip(), row["stderr"].rstrip())))
    status = f", exit status {row['status']}" if row["status"] else ""
    return f"`{row['command']}` ({row['seconds']} s, {row['cpu_seconds']} s of CPU{status})\n\n```text\n{said}\n```\n"


if __name__ == "__main__":
    main()
