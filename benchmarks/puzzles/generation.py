"""Measure the CPU time to generate and rate Sudoku puzzles, and to compute their canonical forms.

    python -m benchmarks.puzzles.generation [--quick] [--puzzles 6800] [--peer 100]

The result is one process's CPU time per rated 9x9 puzzle with a unique solution, starting from a random grid. The
baseline ("peer" in the report) is a plain generator built on `plain_sudoku.py`, which performs the same steps in
Python, one board at a time. The two generators take turns, so a noisy machine slows both equally. Puzzles with the
fewest clues are the hardest to generate; the time includes discarded grids. The script also times `canonical_forms`.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hrm_hf.puzzles.sudoku_generation import canonical_forms, generate_portions

from ..report import machine, make_parser, write_report
from .plain_sudoku import masks_to_board, rate, search


RANGES = ((30, 36), (22, 28), (22, 50))


def main() -> None:
    from hrm_hf.trainer.recipes import library_versions

    parser = make_parser(__doc__, quick="one range, few puzzles")
    parser.add_argument("--puzzles", type=int, default=6800, help="number of puzzles per clue range")
    parser.add_argument("--peer", type=int, default=100, help="puzzles per clue range for the plain generator")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    ranges = RANGES[:1] if args.quick else RANGES
    if args.quick:
        args.puzzles, args.peer, args.turns = 2000, 20, 1

    report: dict = {"puzzles": args.puzzles, "peer_puzzles": args.peer, "turns": args.turns, "clues": {}}
    for clues in ranges:
        peer, ours, forms = [], [], []
        for turn in range(args.turns):
            peer.append(milliseconds(args.peer, plain, clues, args.peer, turn)[0])
            cost, (boards, solutions) = milliseconds(args.puzzles, batched, clues, args.puzzles, turn)
            ours.append(cost)
            forms.append(milliseconds(args.puzzles, canonical_forms, boards, solutions)[0])
        name = f"{clues[0]} to {clues[1]}"
        figures = {"one by one": peer, "by the hundred": ours, "canonical form": forms}
        report["clues"][name] = {what: statistics.median(values) for what, values in figures.items()}
        report["clues"][name]["ratio"] = statistics.median(one / many for one, many in zip(peer, ours))
        for what, value in report["clues"][name].items():
            unit = "x" if what == "ratio" else "ms of CPU per puzzle"
            print(f"sudoku with {name} clues, {what:14} {value:8.3f} {unit}")
    write_report(args, "puzzle_generation", report | {"machine": machine(), "versions": library_versions()})


def milliseconds(puzzles: int, work: Callable, *how: Any) -> tuple[float, Any]:
    """Call `work`; return the CPU milliseconds per puzzle and the result."""
    started = time.process_time()
    result = work(*how)
    return (time.process_time() - started) * 1e3 / puzzles, result


def batched(clues: tuple[int, int], count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    portions = list(generate_portions(9, count, clues, seed))
    return tuple(np.concatenate([portion[field] for portion in portions]) for field in (0, 1))


def plain(clues: tuple[int, int], count: int, seed: int) -> None:
    """Generate puzzles one at a time: remove blocks of cells, halving a block if the solution is not unique."""
    rng = np.random.Generator(np.random.Philox(seed))
    made = 0
    while made < count:
        found: list[list[int]] = []
        search(rng.permutation(np.arange(1, 10)).tolist() + [0] * 72, 1, found, rng)
        target, order = int(rng.integers(clues[0], clues[1] + 1)), rng.permutation(81).tolist()
        board = plain_dig(masks_to_board(found[0]).tolist(), order, target)
        if board is not None:
            rate(np.array(board))
            made += 1


def plain_dig(board: list[int], order: list[int], target: int) -> list[int] | None:
    surplus, position, block = len(board) - target, 0, len(board) // 2
    while surplus and position < len(order):
        cells = order[position : position + min(block, surplus)]
        trial = board.copy()
        for cell in cells:
            trial[cell] = 0
        found: list[list[int]] = []
        search(trial, 2, found)
        if len(found) == 1:
            board, position, surplus = trial, position + len(cells), surplus - len(cells)
        elif len(cells) == 1:
            position, block = position + 1, 1  # keep this clue: without it, there are several solutions
        else:
            block = len(cells) // 2
    return None if surplus else board


if __name__ == "__main__":
    main()
