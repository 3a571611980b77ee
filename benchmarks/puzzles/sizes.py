"""Measure a Sudoku model on boards of 4x4 to 25x25, and whether it helps a search.

    python -m benchmarks.puzzles.sizes MODEL [--sets 16:120 25:320] [--boards 100] [--steps 8 16 32] [--search 20]
    python -m benchmarks.puzzles.sizes --quick

MODEL is a checkpoint with `config.solves_any_size`. A set is SIZE:CLUES. Its boards start from random solved grids;
cells are emptied in random order while a SAT solver (`pip install python-sat`) proves that the solution is unique. The
seed determines the boards. A board runs until its answer obeys the rules, at most max(--steps) steps. The value
"sure_and_wrong" counts the boards whose answer is wrong at the first step with a confidence of `halt_confidence`.
Without MODEL, --quick uses a random model, only to check that the script works.

With --search N, the script also searches the first N boards of each set, with digits in ascending order and in the
order of the model's probabilities, and solves them with the SAT solver. Times are CPU seconds of one thread.
"""

import argparse
import itertools
import statistics
import time
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from hrm_hf import AutoModelForPuzzleSolving, SeRrmPuzzleConfig, SeRrmPuzzleForSolving
from hrm_hf.puzzles.evaluation import wilson_interval
from hrm_hf.puzzles.options import BoardOptions
from hrm_hf.puzzles.sudoku_generation import rng_of
from hrm_hf.puzzles.sudoku_rules import DIGIT_OFFSET, sudoku_shape
from hrm_hf.puzzles.sudoku_solver import search
from hrm_hf.puzzles.task_registry import puzzle_task
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report


SETS = ("4:5", "6:9", "6:12", "9:25", "12:56", "12:45", "16:120", "16:105", "16:95", "25:360", "25:320")
MAX_NODES = 5000  # maximum number of nodes per search; a 25x25 board takes minutes


class BoardMaker:
    """Makes boards of one size with a SAT solver. Literal cell * size + digit means that the cell has the digit."""

    def __init__(self, size: int):
        from pysat.solvers import Glucose4

        self.shape, self.size, self.solver = sudoku_shape(size), size, Glucose4()
        pairs = list(itertools.combinations(range(size), 2))
        groups = [[(cell, digit) for digit in range(1, size + 1)] for cell in range(self.shape.cells)]
        groups += [[(cell, digit) for cell in cells] for _, cells in self.shape.units for digit in range(1, size + 1)]
        for group in groups:  # require exactly one true literal in each group
            literals = [self.literal(*each) for each in group]
            self.solver.add_clause(literals)
            for one, other in pairs:
                self.solver.add_clause([-literals[one], -literals[other]])

    def literal(self, cell: int, digit: int) -> int:
        return int(cell) * self.size + int(digit)

    def solve(self, literals: list[int]) -> np.ndarray | None:
        """Return a solution, uint8 [cells], in which the literals hold, or None."""
        if not self.solver.solve(assumptions=literals):
            return None
        model = np.array(self.solver.get_model()[: self.size**3]).reshape(-1, self.size)
        return (model > 0).argmax(1).astype(np.uint8) + 1

    def random_grid(self, rng: np.random.Generator) -> np.ndarray | None:
        """Return a solved grid with random boxes on the diagonal and up to 2 * size more random cells.

        Return None if the boxes, as happens at 4x4, cannot be completed.
        """
        size, (rows, columns) = self.size, self.shape.box_shape
        grid = np.zeros((size, size), dtype=int)
        for box in range(min(size // rows, size // columns)):
            digits = rng.permutation(size).reshape(rows, columns) + 1
            grid[box * rows : (box + 1) * rows, box * columns : (box + 1) * columns] = digits
        flat = grid.reshape(-1)
        chosen = [self.literal(cell, flat[cell]) for cell in np.flatnonzero(flat)]
        for cell in rng.permutation(np.flatnonzero(flat == 0))[: min(2 * size, 32)]:
            literal = self.literal(cell, rng.integers(1, size + 1))
            if self.solver.solve(assumptions=[*chosen, literal]):
                chosen.append(literal)
        return self.solve(chosen)

    def board(self, clues: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray] | None:
        """Return a board with `clues` random clues and its unique solution, or None on failure."""
        solution = self.random_grid(rng)
        if solution is None:
            return None
        literals = [self.literal(cell, digit) for cell, digit in enumerate(solution)]
        kept = set(range(self.shape.cells))
        for cell in rng.permutation(self.shape.cells).tolist():
            if len(kept) == clues:
                break
            kept.remove(cell)
            if self.solver.solve(assumptions=[*(literals[each] for each in sorted(kept)), -literals[cell]]):
                kept.add(cell)
        board = np.where(np.isin(np.arange(len(solution)), list(kept)), solution, 0).astype(np.uint8)
        return (board, solution) if len(kept) == clues else None


def make_boards(size: int, clues: int, count: int, seed: int) -> np.ndarray:
    """Return `count` boards and their solutions, uint8 [count, 2, cells]."""
    maker, rng = BoardMaker(size), rng_of(seed, size, clues)
    made = (maker.board(clues, rng) for _ in itertools.count())
    return np.stack([np.stack(pair) for pair in itertools.islice(filter(None, made), count)])


@torch.no_grad()
def measure(model, boards: np.ndarray, steps: list[int]) -> tuple[dict[str, Any], torch.Tensor]:
    """Solve boards [N, 2, cells]. Return the metrics, and the probability of each token in each cell, [N, cells, V].

    Each board runs until its answer obeys the rules, for at most `max(steps)` steps.
    """
    shape = sudoku_shape(round(boards.shape[2] ** 0.5))
    solver = model.for_board((shape.size, shape.size), shape.box_shape, shape.vocab_size).eval()
    questions, labels = torch.from_numpy(boards.astype(np.int64) + DIGIT_OFFSET).unbind(1)
    options = BoardOptions(max_steps=max(steps), halt="fixed", choose="rules")
    arguments = options.solve_arguments(puzzle_task(solver.config))
    start, parts = time.process_time(), []
    for rows in torch.arange(len(boards)).split(solver.boards_per_call):
        parts.append(solver.solve(questions[rows].to(solver.device), return_trajectory=True, **arguments))
    report: dict[str, Any] = {"boards": len(boards), "seconds": (time.process_time() - start) / len(boards)}
    report |= {"steps": torch.cat([part.steps.cpu() for part in parts]).float().mean().item()}
    report |= {"exact": {}, "interval": {}, "blank_cells": {}, "sure": 0, "sure_and_wrong": 0}
    blank = questions == DIGIT_OFFSET
    for step in steps:
        right = torch.cat([part.trajectory[:step][-1].cpu() for part in parts]) == labels
        exact = report["exact"][step] = int(right.all(1).sum())
        report["interval"][step] = wilson_interval(exact, len(boards))
        report["blank_cells"][step] = float((right & blank).sum() / blank.sum())
    for part, truth in zip(parts, labels.split(solver.boards_per_call)):
        sure = part.q_trajectory.cpu().sigmoid() >= solver.config.halt_confidence  # [steps, rows]
        first = sure.to(torch.uint8).argmax(0)
        answers = part.trajectory.cpu()[first, torch.arange(len(truth))]
        report["sure"] += int(sure.any(0).sum())
        report["sure_and_wrong"] += int((sure.any(0) & (answers != truth).any(1)).sum())
    return report, torch.cat([part.logits.float().softmax(-1).cpu() for part in parts])


def compare_search(boards: np.ndarray, probabilities: torch.Tensor, size: int) -> dict[str, Any]:
    """Solve boards by search, with and without the model's probabilities, and with the SAT solver."""
    maker, rows = BoardMaker(size), []
    scores = probabilities[..., 1 + DIGIT_OFFSET :].numpy()
    for (board, solution), score in zip(boards, scores):
        row = {}
        for name, order in (("plain", None), ("guided", score[None])):
            start = time.process_time()
            found = search(board[None], scores=order, max_nodes=MAX_NODES)
            row[f"{name}_seconds"] = time.process_time() - start
            row[f"{name}_nodes"], row[f"{name}_solved"] = int(found.nodes[0]), bool(found.counts[0])
            assert not found.counts[0] or (found.solutions[0, 0] == solution).all()
        start = time.process_time()
        maker.solve([maker.literal(cell, board[cell]) for cell in np.flatnonzero(board)])
        rows.append(row | {"sat_seconds": time.process_time() - start})
    report = {name: statistics.median(row[name] for row in rows) for name in rows[0] if "solved" not in name}
    solved = {name: sum(row[name] for row in rows) for name in rows[0] if "solved" in name}
    return {"boards": len(rows), **report, **solved, "rows": rows}


def main() -> None:
    parser = make_parser(__doc__, quick="a few boards of 4x4, 6x6 and 12x12; a random model if none is given")
    parser.add_argument("model", nargs="?", help="checkpoint folder")
    parser.add_argument("--sets", nargs="+", default=SETS, metavar="SIZE:CLUES")
    parser.add_argument("--boards", type=int, default=100, help="boards per set")
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--search", type=int, default=0, help="number of boards per set to solve by search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        if find_spec("pysat") is None:
            print("sizes: skipped; pip install python-sat")
            return
        args.sets, args.boards, args.steps, args.search = ("4:5", "6:12", "12:70"), 3, [1, 2], 2
    if args.model is None and not args.quick:
        parser.error("pass MODEL, or --quick")
    tabulate(args)


def tabulate(args: argparse.Namespace) -> None:
    """Measure the model on each set of boards. After each, print the results and write the report."""
    if args.model is None:
        config = SeRrmPuzzleConfig.from_preset("symbol-pooling", hidden_size=16, intermediate_size=32, task="sudoku")
        model = SeRrmPuzzleForSolving(config)
    else:
        model = AutoModelForPuzzleSolving.from_pretrained(args.model)
    model, sets = model.to(args.device), {}
    report = {"model": args.model, "parameters": model.num_parameters(), "seed": args.seed, "sets": sets}
    report |= {"machine": machine(), "versions": library_versions()}
    for name in args.sets:
        size, clues = map(int, name.split(":"))
        boards = make_boards(size, clues, args.boards, args.seed)
        sets[name], probabilities = measure(model, boards, args.steps)
        print("sizes", name, sets[name], flush=True)
        if args.search:
            sets[name]["search"] = compare_search(boards[: args.search], probabilities, size)
            print("sizes", {key: value for key, value in sets[name]["search"].items() if key != "rows"}, flush=True)
        write_report(args, "puzzle_sizes", report)


if __name__ == "__main__":
    main()
