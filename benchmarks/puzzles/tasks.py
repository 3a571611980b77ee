"""Train a model for each shipped pencil puzzle with its recipe, and measure it on held-out puzzles.

    OMP_NUM_THREADS=2 python -m benchmarks.puzzles.tasks [n_queens nonogram kenken light_up coloring]
    python -m benchmarks.puzzles.tasks --quick

Data and models are saved in data/TASK and runs/TASK; a folder that exists is used as it is. Exact accuracy is the
share of puzzles that are completely right: in one run, by a vote of eight symmetric copies, and by a search that tries
the model's answers first, compared with the same search without the model.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hrm_hf import AutoModelForPuzzleSolving, PuzzleSolvingPipeline
from hrm_hf.puzzles.dataset import load_puzzle_dataset
from hrm_hf.puzzles.evaluation import evaluate_puzzles, share_of
from hrm_hf.resources import resource as package_file
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report


TASKS = ("n_queens", "nonogram", "kenken", "light_up", "coloring")
VOTES = 8
TIME_FILE = "time.json"
QUICK = "--max_steps 2 --warmup_steps 1 --torch_compile false".split()


def main() -> None:
    parser = make_parser(__doc__, quick="two training steps on 20 puzzles of one task")
    parser.add_argument("tasks", nargs="*", default=TASKS, metavar="TASK")
    parser.add_argument("--limit", type=int, default=400, help="number of held-out puzzles")
    parser.add_argument("--folder", type=Path, default=Path(), help="folder that contains data/TASK and runs/TASK")
    args = parser.parse_args()
    report = {"machine": machine(), "threads": os.environ.get("OMP_NUM_THREADS"), "versions": library_versions()}
    with tempfile.TemporaryDirectory() as temporary:
        if args.quick:
            args.tasks, args.limit, args.folder = TASKS[:1], 4, Path(temporary)
        report["tasks"] = {task: measure(args, task) for task in args.tasks}
    write_report(args, "puzzle_tasks", report)


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Train and evaluate one task; return and print its row of the table."""
    recipe = package_file("training") / "recipes" / f"{name}.yaml"
    data, run = args.folder / "data" / name, args.folder / "runs" / name
    if not run.exists():
        train(args, name, recipe, data, run)
    row: dict[str, Any] = json.loads((run / TIME_FILE).read_text())
    model = AutoModelForPuzzleSolving.from_pretrained(run)
    test = load_puzzle_dataset(data, "test").with_format("numpy")[: args.limit]
    boards, labels = test["input_ids"].astype(np.int64), test["labels"].astype(np.int64)
    options = {"max_steps": yaml.safe_load(recipe.read_text())["eval_max_steps"], "halt": "fixed"}
    found = evaluate_puzzles(model, boards, labels, search=True, **options)
    kept = ("count", "exact_accuracy", "cell_accuracy", "confidence_auroc", "search_")
    scores = {key: value for key, value in found.items() if key.startswith(kept) and "per_step" not in key}
    row |= {"parameters": model.num_parameters(), **scores}
    solver = PuzzleSolvingPipeline(model)
    text = solver.puzzle_task.text
    puzzles = [{"puzzle": text(board), "solution": text(label)} for board, label in zip(boards, labels)]
    results = solver(puzzles, votes=VOTES, **options)
    row |= share_of("exact_accuracy_of_votes", [result["correct"] for result in results])
    print("tasks", name, row, flush=True)
    return row


def train(args: argparse.Namespace, name: str, recipe: Path, data: Path, run: Path) -> None:
    """Build the data unless they exist, train, and save how long the training took."""
    tool = [sys.executable, "-m", "hrm_hf.cli", "data", "puzzle", name, "--out", str(data)]
    sizes = yaml.safe_load(recipe.read_text())["build_data"].split()[2:]
    if not data.exists():
        subprocess.run([*tool, *(["--num-train", "20", "--num-test", "4"] if args.quick else sizes)], check=True)
    script = [sys.executable, str(package_file("training") / "run_puzzle.py"), "--recipe", str(recipe)]
    places = ["--data_path", str(data), "--output_dir", str(run), *(QUICK if args.quick else ())]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([*script, *places], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    times = {"minutes": (time.perf_counter() - start) / 60, "cpu_seconds": seconds}
    (run / TIME_FILE).write_text(json.dumps(times))


if __name__ == "__main__":
    main()
