"""Kill training with SIGKILL at random moments, resume it, and compare it with an uninterrupted run.

    python -m benchmarks.package.faults [--quick] [--runs 6] [--kills 3] [--seed 0] [--out benchmarks/results]

Every run is a separate process with one thread that trains a tiny model from the tests on puzzles, text, Go or
cosmology. It saves a checkpoint after each step and is killed `--kills` times, each time at a moment drawn uniformly
from the duration of an uninterrupted run. After each kill, it resumes from `last-complete`. The losses of all steps
and the bytes of all weights must then equal those of the uninterrupted run; otherwise, the exit status is 1.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path


# Makes preemption_worker, which builds the four trainers, importable.
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

import torch
from preemption_worker import logged, make

from hrm_hf.hub.manifests import find_corruption, list_checkpoints
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report


TASKS = ("puzzle", "lm", "go", "cosmo")
STEPS = 12
ALONE = "alone.json"


def main() -> None:
    parser = make_parser(__doc__, quick="one run of each task")
    parser.add_argument("--runs", type=int, default=6, help="number of runs per task")
    parser.add_argument("--kills", type=int, default=3, help="number of kills per run")
    parser.add_argument("--seed", type=int, default=0, help="random seed for the kill times")
    args = parser.parse_args()
    if args.quick:
        args.runs = 1
    torch.set_num_threads(1)
    moments = random.Random(args.seed)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for task in TASKS:
            rows.append(one_task(task, Path(scratch, task), args, moments))
            print(" ".join(f"{name}: {value}" for name, value in rows[-1].items()), flush=True)
    report = {"steps": STEPS, "seed": args.seed, "kills of a run": args.kills, "tasks": rows}
    report |= {"machine": machine(), "versions": library_versions()}
    write_report(args, "faults", report)
    sys.exit(0 if all(row["identical"] == row["runs"] for row in rows) else 1)


def one_task(task: str, folder: Path, args: argparse.Namespace, moments: random.Random) -> dict:
    """Run one task. Count kills, kills during a save, and runs that end with the result of the uninterrupted run."""
    folder.mkdir()
    begun = time.perf_counter()
    if wait(start(task, folder / "alone", folder / ALONE)):
        print((folder / "alone.log").read_text()[-3000:])
        sys.exit(f"{task}: the run that is left alone failed")
    seconds = time.perf_counter() - begun
    expected = json.loads((folder / ALONE).read_text())
    row = {"task": task, "runs": args.runs, "identical": 0, "killed": 0, "killed while saving": 0, "seconds alone": 0}
    row["seconds alone"] = round(seconds, 2)
    for number in range(args.runs):
        run, result = folder / f"run-{number}", folder / f"run-{number}.json"
        for _ in range(args.kills):
            before = unfinished(run)
            process = start(task, run, result)
            time.sleep(moments.uniform(0, seconds))
            os.kill(process, signal.SIGKILL)
            if wait(process) == -signal.SIGKILL:
                row["killed"] += 1
                row["killed while saving"] += bool(unfinished(run) - before)
        if status := wait(start(task, run, result)):
            print(run.with_suffix(".log").read_text()[-3000:])
            sys.exit(f"{task}: run {number} could not be continued, status {status}")
        row["identical"] += json.loads(result.read_text()) == expected
    return row


def unfinished(run: Path) -> set[tuple[str, int]]:
    """List incomplete checkpoints with the time of their last change."""
    return {(saved.name, saved.stat().st_mtime_ns) for saved in list_checkpoints(run) if find_corruption(saved, False)}


def start(task: str, folder: Path, result: Path) -> int:
    """Fork a process that trains or resumes a run and writes its result; return the process id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        with open(folder.with_suffix(".log"), "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            trainer = make(task, folder, max_steps=STEPS, save_strategy="steps", save_steps=1, save_total_limit=3)
            trainer.train("last-complete")
            result.write_text(json.dumps({"losses": logged(trainer), "weights": digest(trainer.model)}))
        status = 0
    except Exception:  # print the traceback here, because os._exit below does not
        traceback.print_exc()
    finally:
        os._exit(status)


def wait(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def digest(model: torch.nn.Module) -> str:
    """Return a hash of the names and bytes of all weights."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
