"""Measure how ACT steps, restarts and the rule for choosing an answer affect a puzzle model's accuracy and CPU time.

    python -m benchmarks.puzzles.solving MODEL DATA [--split test] [--limit 200]
        [--steps 16 64 256 1024] [--restarts 1 8]
        [--choose q residual vote rules] [--noise 0.2] [--noise-at start] [--exit-when-still 0.001] [--halt fixed]
        [--device cpu]
    python -m benchmarks.puzzles.solving pretrained/sudoku-9x9 runs/data/x_sudoku --task x_sudoku.py:XSudoku
    python -m benchmarks.puzzles.solving --quick

Every row of the table solves the same boards; for Sudoku, the script also measures search. A board runs all steps,
unless its state stops changing (--exit-when-still), the model prefers to halt (--halt q), or the puzzle's rules accept
the answer (--choose rules). The model takes the symbols and units of the data, so a Sudoku model can solve variants.
Times are CPU seconds of the process and include reading out the answers. With --quick and no MODEL, the script uses a
random model on 4 x 4 boards, only to check that it works.
"""

import argparse
import itertools
import tempfile
import time
from typing import Any, get_args

import torch

from hrm_hf import AutoModelForPuzzleSolving, TrmPuzzleConfig, TrmPuzzleForSolving
from hrm_hf.models.pipeline_batches import seeded
from hrm_hf.models.settings_puzzle import SolveSettings
from hrm_hf.puzzles.dataset import load_puzzle_dataset, load_puzzle_info, save_puzzle_dataset
from hrm_hf.puzzles.evaluation import correct_cells, evaluate_puzzles, wilson_interval
from hrm_hf.puzzles.options import BoardOptions, import_task
from hrm_hf.puzzles.sudoku import generated_sudoku
from hrm_hf.puzzles.task_registry import puzzle_task
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report


CHOICES = get_args(SolveSettings.__annotations__["choose"])
COLUMNS = ("steps", "restarts", "choice", "exact", "95 % interval", "steps of all runs", "CPU s", "CPU ms a board")
WIDTHS = (5, 8, 8, 7, 15, 17, 8, 14)


def main() -> None:
    parser = make_parser(__doc__, quick="few boards, steps and restarts; a random model if none is given")
    parser.add_argument("model", nargs="?", help="checkpoint folder")
    parser.add_argument("data", nargs="?", help="folder of a puzzle data set")
    parser.add_argument("--task", help="task of the data, if hrm_hf does not ship it: FILE.py:CLASS")
    parser.add_argument("--split", default="test")
    parser.add_argument("--limit", type=int, default=200, help="number of boards, from the start of the split")
    parser.add_argument("--steps", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--restarts", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--choose", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--noise", type=float)
    parser.add_argument("--noise-at", choices=("start", "every_step"), default="start")
    parser.add_argument("--exit-when-still", type=float)
    parser.add_argument("--halt", choices=("fixed", "q"), default="fixed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-search", action="store_true", help="do not measure search, which is slow on a GPU")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.quick:
        args.limit, args.steps, args.restarts = 10, [2, 8], [1, 3]
    if args.data is None and not args.quick:
        parser.error("pass MODEL and DATA, or --quick")
    with tempfile.TemporaryDirectory() as folder:
        if args.data is None:
            args.model = args.data = random_example(folder)
        report = tabulate(args)
    write_report(args, "solving", report)


def random_example(folder: str) -> str:
    """Save a random model and 4x4 boards in one folder."""
    splits, info = generated_sudoku(4, num_train=1, num_test=10, seed=0)
    save_puzzle_dataset(splits, info, folder)
    fields = {"hidden_size": 16, "num_attention_heads": 1, "L_layers": 1, "L_cycles": 2, "puzzle_emb_ndim": 0}
    torch.manual_seed(0)
    TrmPuzzleForSolving(TrmPuzzleConfig(**fields, **info.config_fields())).save_pretrained(folder)
    return folder


def tabulate(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all combinations of settings, print the results and return the report."""
    import_task(args.task)
    fields = load_puzzle_info(args.data).config_fields()
    changes = {name: fields[name] for name in ("task", "symbols", "units")} if fields["symbols"] else {}
    model = AutoModelForPuzzleSolving.from_pretrained(args.model, **changes).eval().to(args.device)
    rows = load_puzzle_dataset(args.data, args.split).with_format("torch")[: args.limit]
    inputs = {name: rows[name].long() for name in ("input_ids", "puzzle_identifiers")}
    labels = rows["labels"].long()
    print("solving", *(name.rjust(width) for name, width in zip(COLUMNS, WIDTHS)), flush=True)
    table = []
    for steps, restarts, choose in itertools.product(args.steps, args.restarts, args.choose):
        if restarts == 1 and choose in ("residual", "vote"):
            continue  # "residual" and "vote" choose among several runs
        options = {
            "max_steps": steps,
            "restarts": restarts,
            "exit_when_still": args.exit_when_still,
            "halt": args.halt,
        }
        if restarts > 1:
            options |= {"noise": args.noise, "noise_at": args.noise_at}
        arguments = BoardOptions(choose=choose, **options).solve_arguments(puzzle_task(model.config))
        table.append({"choose": choose, **options, **solved(model, inputs, labels, args.seed, **arguments)})
        print_row(table[-1])
    report = {"model": args.model, "data": args.data, "split": args.split, "boards": len(labels), "table": table}
    if model.config.task == "sudoku" and not args.no_search:
        start = time.process_time()
        found = evaluate_puzzles(model, inputs["input_ids"], labels, inputs["puzzle_identifiers"], search=True)
        report["search"] = {name: value for name, value in found.items() if name.startswith("search_")}
        report["search"]["cpu_seconds"] = time.process_time() - start
        for name, value in report["search"].items():
            print(f"solving {name:45} {value:.3f}")
    return report | {"parameters": model.num_parameters(), "machine": machine(), "versions": library_versions()}


def solved(model, inputs: dict[str, torch.Tensor], labels: torch.Tensor, seed: int, **options: Any) -> dict[str, Any]:
    """Return the count and fraction of exact answers, its 95 % interval, mean ACT steps per board, and CPU seconds."""
    exact = steps = 0
    start = time.process_time()
    with seeded(model.device, seed):
        for rows in torch.arange(len(labels)).split(model.boards_per_call):
            piece = {name: value[rows].to(model.device) for name, value in inputs.items()}
            solution = model.solve(**piece, **options)
            right, labelled = correct_cells(solution.predictions.cpu(), labels[rows])
            exact += int((right == labelled).sum())
            spent = solution.steps if solution.steps_of_all_runs is None else solution.steps_of_all_runs
            steps += int(spent.sum())
    return {
        "exact": exact,
        "count": len(labels),
        "exact_accuracy": exact / len(labels),
        "interval": wilson_interval(exact, len(labels)),
        "steps_of_all_runs": steps / len(labels),
        "cpu_seconds": time.process_time() - start,
    }


def print_row(row: dict[str, Any]) -> None:
    low, high = row["interval"]
    cells = (
        row["max_steps"],
        row["restarts"],
        row["choose"],
        f"{row['exact_accuracy']:.1%}",
        f"{low:.1%}-{high:.1%}",
        f"{row['steps_of_all_runs']:.1f}",
        f"{row['cpu_seconds']:.1f}",
        f"{1e3 * row['cpu_seconds'] / row['count']:.1f}",
    )
    print("solving", *(str(cell).rjust(width) for cell, width in zip(cells, WIDTHS)), flush=True)


if __name__ == "__main__":
    main()
