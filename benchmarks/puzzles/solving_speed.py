"""Compare the solving speed of a trained model, step by step, with that of the original's arithmetic (`plain.py`).

    python training/run_puzzle.py --recipe training/recipes/sudoku_demo_trm.yaml
    python -m benchmarks.puzzles.solving_speed MODEL DATA [--boards 200] [--turns 9]
        [--min-steps 2] [--min-confidence 0.9]
    python -m benchmarks.puzzles.solving_speed --quick

All sides have the same weights and solve the same boards. The original runs 16 ACT steps on all boards in one batch,
as in its evaluation (384 boards in its recipe for laptops). The package adds one thing at a time: batches that fit
into the cache, adaptive halting, and bfloat16. All sides are compiled, except where the name says eager. They take
turns. Times are CPU seconds of the process; a ratio is the time of the original divided by that of the side, the
median over the turns with a 95 % bootstrap interval. With --quick, the model is random and has 4 x 4 boards, only to
check that the script works.
"""

import argparse
import statistics
import tempfile
from typing import Any

import torch

from hrm_hf import AutoModelForPuzzleSolving
from hrm_hf.puzzles.dataset import load_puzzle_dataset
from hrm_hf.puzzles.evaluation import correct_cells, wilson_interval
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report
from .plain import PlainReasoner
from .solving import random_example
from .speed import interleave, median_ratio


ORIGINAL = "original"
SETTINGS = ("boards", "max_steps", "min_steps", "min_confidence", "turns", "threads")


def main() -> None:
    parser = make_parser(__doc__, quick="a random model on 4 x 4 boards, two turns")
    parser.add_argument("model", nargs="?", help="checkpoint folder of an HRM or TRM")
    parser.add_argument("data", nargs="?", help="folder of a puzzle data set")
    parser.add_argument("--boards", type=int, default=200, help="number of boards, from the start of the split")
    parser.add_argument("--max-steps", type=int, default=16)
    parser.add_argument("--min-steps", type=int, default=2, help="of adaptive halting")
    parser.add_argument("--min-confidence", type=float, default=0.9, help="of adaptive halting")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.data is None and not args.quick:
        parser.error("pass MODEL and DATA, or --quick")
    with tempfile.TemporaryDirectory() as folder:
        if args.quick:
            args.model = args.data = random_example(folder)
            args.boards, args.turns = 8, 2
        report = compare(args)
    write_report(args, "puzzle_solving_speed", report)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Let all sides solve the boards in turns, print a table and return the report."""
    rows = load_puzzle_dataset(args.data, "test").with_format("torch")[: args.boards]
    batch = {name: rows[name].int() for name in ("input_ids", "puzzle_identifiers")}
    sides = make_sides(args, batch)
    found = {name: solve() for name, solve in sides.items()}  # compiles, too
    times = interleave(sides, 1, args.turns, "cpu")
    table = {}
    print("| side | exact | boards that differ | ACT steps | ms a board | ratio |\n|" + "---|" * 6)
    for name, (answers, steps) in found.items():
        right, labelled = correct_cells(answers, rows["labels"].long())
        exact = int((right == labelled).sum())
        row = table[name] = {
            "exact": exact,
            "interval": wilson_interval(exact, len(answers)),
            "boards_that_differ": int((answers != found[ORIGINAL][0]).any(1).sum()),
            "mean_steps": steps,
            "ms_per_board": statistics.median(times[name]) / len(answers),
            "ratio": median_ratio(times[ORIGINAL], times[name]),
        }
        low, high = row["interval"]
        cells = [name, f"{exact / len(answers):.1%} ({low:.1%} to {high:.1%})", row["boards_that_differ"]]
        ratio = "{:.2f} ({:.2f} to {:.2f})".format(*row["ratio"])
        print("|", " | ".join(map(str, [*cells, f"{steps:.1f}", f"{row['ms_per_board']:.3g}", ratio])), "|")
    settings = {name: getattr(args, name) for name in SETTINGS}
    return {**settings, "table": table, "machine": machine(), "versions": library_versions()}


def make_sides(args: argparse.Namespace, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return functions that solve all boards and return the answers and the mean number of ACT steps."""

    def load(dtype: torch.dtype = torch.float32, compiled: bool = False):
        model = AutoModelForPuzzleSolving.from_pretrained(args.model, dtype=dtype).eval()
        if compiled:
            model.compile_solve()
        return model

    def original(size: int) -> tuple[torch.Tensor, float]:
        return torch.cat([plain.solve(part, args.max_steps) for part in parts(size)]), args.max_steps

    def package(model, halt: str) -> tuple[torch.Tensor, float]:
        settings = {"max_steps": args.max_steps, "halt": halt}
        if halt == "q":
            settings |= {"min_steps": args.min_steps, "min_confidence": args.min_confidence}
        found = [model.solve(**part, **settings) for part in parts(model.boards_per_call)]
        steps = torch.cat([solution.steps for solution in found])
        return torch.cat([solution.predictions for solution in found]), steps.float().mean().item()

    def parts(size: int) -> list[dict[str, torch.Tensor]]:
        return [dict(zip(batch, part)) for part in zip(*(value.split(size) for value in batch.values()))]

    model, compiled, narrow = load(), load(compiled=True), load(torch.bfloat16, compiled=True)
    plain, size = PlainReasoner(model, compiled=True), model.boards_per_call
    return {
        ORIGINAL: lambda: original(args.boards),
        f"original in batches of {size}": lambda: original(size),
        "package, the same steps": lambda: package(compiled, "fixed"),
        "package, adaptive, eager": lambda: package(model, "q"),
        "package, adaptive": lambda: package(compiled, "q"),
        "package, adaptive, bfloat16": lambda: package(narrow, "q"),
    }


if __name__ == "__main__":
    main()
