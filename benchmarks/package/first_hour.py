"""Run every command in the README and the guides, in a fresh clone with an empty home folder.

    python -m benchmarks.package.first_hour [--pages README.md start ...] [--text FILE] [--quick] [--out DIR]

Each page gets a clone of the checkout's last commit and an empty home folder; all pages share one new virtual
environment. Every line of a shell block and every Python block runs in order, each in a fresh process. A local server
replaces the Hub. INSTEAD lists the commands that are changed or skipped, and why. The page `start` measures the core
install, start-up times, and commands with mistakes. A page's new report replaces its previous one.

The script prints one line per command and writes the output of each to first_hour.md. The exit status is 1 if a
command had an unexpected exit status, or wrote anything to stderr except progress bars and an expected one-line error.
"""

import argparse
import gzip
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "hpc"))

import docs_pages
from hub_server import HubServer
from slurm_cluster import missing, running_cluster

from ..report import machine, make_parser, write_report
from .first_hour_files import bring


ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(page for page in docs_pages.PAGES if "/coming_from/" in page)]
BOARD = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
SETUP = ("python3 -m venv ../venv", "pip install --quiet -c constraints.txt torch==2.13.0")
STEP = "python training/run_puzzle.py --recipe training/recipes/sudoku_demo_units.yaml --torch_compile false"
# Commands on the page `start`, each with its expected exit status.
START = [
    ("hrm-hf --version", 0),
    ("hrm-hf solv", 2),
    ("hrm-hf solve --stepps 3", 2),
    (f"hrm-hf solve {BOARD} --json", 0),
    ("hrm-hf solve runs/nothere 123", 2),
    ("hrm-hf recommend --memory 4GB", 0),
    (f"{STEP} --output_dir runs/one_step --max_steps 1 --warmup_steps 0 --max_eval_samples 4", 0),
    (f"{STEP} --output_dir runs/one_step --no_such_flag 1", 2),
    ("hrm-hf eval puzzles runs/one_step runs/data/sudoku_demo --limit 20", 0),
    ("hrm-hf push runs/one_step me/sudoku --license apache-2.0", 0),
    ("hrm-hf pull me/sudoku --out models/sudoku", 0),
    (f"hrm-hf solve models/sudoku {BOARD}", 0),
]
# Maximum CPU seconds of the commands that test start-up time.
LIMITS = {"hrm-hf --help": 2, f"hrm-hf solve {BOARD}": 4}
SCRIPTS = {path.name: f"python training/{path.name} --help" for path in sorted(ROOT.glob("training/run_*.py"))}
LIMITS_OF_TRL = {SCRIPTS.pop(f"run_{name}.py"): 2 for name in ("dpo", "grpo", "sft")}
LIMITS |= dict.fromkeys(SCRIPTS.values(), 2)

# Pattern of a command, replacement (None runs nothing, \g<0> is the command) and reason. The first match wins.
INSTEAD = [
    (r"curl -LO \S+/input\.txt", "cp {text} input.txt", "no network: the file is copied to where curl would write it"),
    (r".*sudoku_extreme_1k\.yaml", None, "40 minutes of a GPU, on a data set of the Hub"),
    (
        r"(hrm-hf app .*) --open",
        r"(curl -s -o page.html -w 'page: %{{http_code}}\\n' --retry 60 --retry-connrefused --retry-delay 1 "
        r"http://127.0.0.1:7860 &); timeout --foreground --signal INT --preserve-status 60 \g<1>",
        "a server without a browser: curl fetches its page, and Ctrl-C follows after a minute",
    ),
    (r"sbatch .*", r"\g<0>; tail -n 30 $(ls -t *.out | head -n 1)", "Slurm on this machine, with {slurm}"),
    (
        r".*_shakespeare_cpu\.yaml.*",
        r"\g<0> --max_steps 100 --warmup_steps 10",
        "800 steps take eight minutes of a core",
    ),
    (
        r".*--model_name_or_path runs/start .*",
        r"\g<0> --max_steps 20 --warmup_steps 2",
        "the stand-in for the user's corpus is smaller than the default warm-up",
    ),
    (
        r".*go_base\.yaml.*",
        r"\g<0> --max_steps 2 --warmup_steps 0 --per_device_train_batch_size 2",
        "125,000 steps are for a GPU",
    ),
]
# Replacements that --quick adds, in the format of INSTEAD.
SHORTER = [(r"hrm-hf demo$", r"\g<0> --extra '--max_steps 20'", "five minutes of two cores")]
JOBS = {
    "SBATCH_WAIT": "1",
    "USE_CPU": "1",
    "SIZE": "32",
    "TRAIN_SAMPLES": "32",
    "VAL_SAMPLES": "16",
    "TEST_SAMPLES": "16",
}
JOBS |= {"MAX_STEPS": "2", "EXTRA_ARGS": "--warmup_steps 0"}
PROGRESS = re.compile(r"\d+%\||\[\d+:\d+, |^\s*$")  # matches progress bars, with or without a total
SHOWN = 40  # maximum number of output lines per command in the transcript
HEADING = re.compile(r"^# Page (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """Shell command, or Python block with the line number where it begins in the page."""

    text: str
    line: int | None = None
    expected: int = 0
    reason: str | None = None
    instead: str | None = None

    @property
    def name(self) -> str:
        return self.text if self.line is None else f"the Python block at line {self.line}"


def main() -> None:
    args, wrong = parse(), False
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        for page in args.pages:
            rows = run_page(page, Path(folder), args)
            report_of(page, rows, args)
            wrong |= any(row["wrong"] for row in rows)
    sys.exit(wrong)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, quick="train for a few steps only")
    parser.add_argument("--pages", nargs="+", choices=["start", *PAGES], default=["start", *PAGES], metavar="PAGE")
    parser.add_argument("--text", type=Path, help="text file (plain or .gz) that replaces tinyshakespeare")
    args = parser.parse_args()
    if args.text is None and set(args.pages) - {"start"}:
        parser.error("--text: required, because this test has no network; pass a text file of about 1 MB")
    return args


def run_page(page: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the commands of a page in a fresh clone and home folder, in the virtual environment that all pages share."""
    print(f"\n{page}", flush=True)
    clone, home, text = folder / "hrm_hf", folder / "home", folder / "text"
    for place in (clone, home):
        shutil.rmtree(place, ignore_errors=True)
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    if args.text:
        data = args.text.read_bytes()
        text.write_bytes(gzip.decompress(data) if args.text.suffix == ".gz" else data)
    bring(page, clone, text)
    commands = [replaced(command, args, text) for command in typed(page)]
    with ExitStack() as stack:
        environment = stack.enter_context(HubServer(folder / "hub")).environment(home)
        environment |= {"HOME": str(home), "XDG_CACHE_HOME": f"{home}/.cache"}
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS"):
            environment.pop(name, None)
        others = [place for place in os.environ["PATH"].split(os.pathsep) if place != str(Path(sys.executable).parent)]
        environment["PATH"] = os.pathsep.join([f"{folder}/venv/bin", *others])
        if any(command.text.startswith("sbatch") for command in commands) and not missing():
            environment |= JOBS | {"SLURM_CONF": stack.enter_context(running_cluster()).environment["SLURM_CONF"]}
        rows = []
        if not (folder / "venv").exists():
            rows += [run(Command(line), clone, environment) for line in SETUP]
        if page == "start":
            rows += [run(Command("pip install --quiet ."), clone, environment), core_of(folder / "venv")]
            rows += limits(LIMITS, clone, environment)
            rows += [run(Command('pip install --quiet ".[trl]"'), clone, environment)]
            rows += limits(LIMITS_OF_TRL, clone, environment)
        rows += [run(command, clone, environment) for command in commands]
    for row in rows:
        for place, name in ((clone, "hrm_hf"), (home, "~"), (folder, "/tmp"), (ROOT, "REPOSITORY")):
            for field in ("output", "command", "instead"):
                row[field] = row[field] and row[field].replace(str(place), name)
    return rows


def typed(page: str) -> Iterator[Command]:
    """Yield the commands of a page in order. A `pip install` in the sentence above a block precedes its commands."""
    if page == "start":
        yield from (Command(text, expected=status) for text, status in START)
        return
    lines = (ROOT / page).read_text().splitlines()
    for block in docs_pages.blocks(page, "python", *docs_pages.SHELLS):
        above = "\n".join(lines[: block.line - 2]).rstrip().rpartition("\n\n")[2]
        if above.endswith(":"):
            yield from map(Command, re.findall(r"`(pip install [^`]+)`", above))
        if block.language == "python":
            yield Command(block.text, line=block.line, reason=block.reason)
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            text = re.sub(r"  +", " ", re.sub(r"(^|\s+)#.*", "", line)).strip()
            if text:
                yield Command(text)


def replaced(command: Command, args: argparse.Namespace, text: Path) -> Command:
    """Return the command, with the replacement and reason of the first pattern in INSTEAD that matches it."""
    for pattern, instead, reason in (SHORTER if args.quick else []) + INSTEAD:
        match = None if command.line else re.fullmatch(pattern, command.text)
        if match:
            reason = reason.format(slurm=" ".join(f"{name}={value}" for name, value in JOBS.items()))
            instead = instead and match.expand(instead).format(text=text)
            return Command(command.text, expected=command.expected, reason=reason, instead=instead)
    return command


def run(command: Command, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run a command; print one line about it and return its row for the report."""
    row = {"command": command.name, "instead": command.instead, "reason": command.reason, "noise": [], "wrong": False}
    if command.reason and not command.instead:
        print(f"{'not run':33}  {command.name[:90]} ({command.reason})", flush=True)
        return {**row, "status": None, "seconds": 0, "cpu_seconds": 0, "output": ""}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    given = ["python", "-"] if command.line else ["bash", "-c", command.instead or command.text]
    ended = subprocess.run(
        given, input=command.text if command.line else "", cwd=folder, env=environment, capture_output=True, text=True,
        errors="replace",
    )  # fmt: skip
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = [line for line in re.split(r"[\r\n]+|\x1b\[A", ended.stderr) if not PROGRESS.search(line)]
    row["noise"] = [] if command.expected else lines
    row["wrong"] = ended.returncode != command.expected or bool(row["noise"])
    name = " ".join((command.instead or command.name).split())
    print(f"{'WRONG' if row['wrong'] else 'ok':5} {seconds:7.1f} s {cpu:7.1f} s of CPU  {name[:90]}", flush=True)
    for line in row["noise"]:
        print(f"      stderr: {line[:150]}", flush=True)
    output = "\n".join(filter(None, (ended.stdout.rstrip(), *lines)))
    if ended.returncode != command.expected:
        print(f"      exit status {ended.returncode}\n{output[-1500:]}", flush=True)
    return {
        **row,
        "status": ended.returncode,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "output": output,
    }


def limits(seconds: dict[str, int], clone: Path, environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Run each command twice and yield the row for the second run, when its files are already cached and compiled."""
    for text, limit in seconds.items():
        run(Command(text), clone, environment)
        row = run(Command(text), clone, environment)
        late = row["cpu_seconds"] > limit
        yield {**row, "reason": f"{'over' if late else 'within'} {limit} s of CPU", "wrong": row["wrong"] or late}


def core_of(venv: Path) -> dict[str, Any]:
    """Print the size and package count of the virtual environment, and return them as a row of the report."""
    megabytes = sum(file.stat().st_size for file in venv.glob("lib/**/*") if file.is_file()) / 1e6
    packages = len(list(venv.glob("lib/python*/site-packages/*.dist-info")))
    said = f"{megabytes:,.0f} MB, {packages} packages"
    print(f"the core: {said}")
    return {"command": "the core install", "instead": None, "reason": None, "noise": [], "wrong": False, "status": 0,
            "seconds": 0, "cpu_seconds": 0, "output": said}  # fmt: skip


def report_of(page: str, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Write the results and the transcript of one page, keeping those of other pages."""
    suffix = "_quick" if args.quick else ""
    figures, transcript = args.out / f"first_hour{suffix}.json", args.out / f"first_hour{suffix}.md"
    pages = json.loads(figures.read_text()).get("pages", {}) if figures.exists() else {}
    parts = HEADING.split(transcript.read_text())[1:] if transcript.exists() else []
    texts = dict(zip(parts[::2], parts[1::2], strict=True))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    pages[page] = {"commit": commit.strip(), "commands": [short(row) for row in rows]}
    texts[page] = "\n\n" + "\n".join(map(as_text, rows)) + "\n"
    order = [page for page in ("start", *PAGES) if page in pages]
    write_report(args, "first_hour", {"pages": {page: pages[page] for page in order}, "machine": machine()})
    transcript.write_text("".join(f"# Page {page}{texts[page]}" for page in order if page in texts).rstrip() + "\n")


def short(row: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if name not in ("output", "wrong") and value is not None}
    return kept | ({"output": row["output"]} if row["command"] == "the core install" else {})


def as_text(row: dict[str, Any]) -> str:
    # Omit the lines in which pip names local package folders.
    said = [line for line in row["output"].splitlines() if not line.startswith("Looking in ")]
    if len(said) > SHOWN:
        said[SHOWN // 2 : -SHOWN // 2] = [f"... {len(said) - SHOWN} lines"]
    status = f", exit status {row['status']}" if row["status"] else ""
    ended = "not run" if row["status"] is None else f"{row['seconds']} s, {row['cpu_seconds']} s of CPU{status}"
    form = f" ({row['reason']})" if row["reason"] else ""
    form += f", as `{row['instead']}`" if row["instead"] not in (None, row["command"]) else ""
    return f"`{row['command']}`{form}: {ended}\n\n```text\n" + "\n".join(said) + "\n```\n"


if __name__ == "__main__":
    main()
