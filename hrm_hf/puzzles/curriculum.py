"""The things that change over a run of puzzle training and from row to row: difficulty, late starts, growing cycles.

Functions of the progress of a run, 0 to 1, which is its step over its steps, and of positions in the order of training
(see `dataloader`). They keep no state, so that a resumed run goes on as it would have.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from .dataloader import PuzzleRows
from .dataset import IGNORE_LABEL
from .random_symmetries import LATE_START, random_keys


FIRST_SHARE = 0.25  # of the rows, those that a run with a difficulty begins with
CYCLE_STAGES = 3


class DifficultyPool:
    """Which row comes in the place of that which the order of training says.

    Rows are ranked by difficulty: by the column `rating`, and among equal ratings, or without that column, by the
    number of cells that differ between puzzle and solution (81 minus the clues of a 9x9 Sudoku, the path of a maze).
    At progress t the first f(t) of N ranks are in the pool, f(t) = min(1, 1/4 + 3/4 t / ramp): with "hard_first" from
    the hardest, with "easy_first" from the easiest row on. Where the order says the row of rank r, that of rank
    floor(r f) comes: rows of the pool come equally often, and from t = ramp on those that the order says.

    Args:
        difficulty: "hard_first" or "easy_first".
        ramp: progress at which all rows are in the pool, above 0.
    """

    def __init__(self, rows: PuzzleRows, difficulty: str, ramp: float):
        rating = np.zeros(len(rows)) if rows.rating is None else rows.rating
        open_cells = ((rows.input_ids != rows.labels) & (rows.labels != IGNORE_LABEL)).sum(axis=1)
        self.rows = np.lexsort((open_cells, rating))
        if difficulty == "hard_first":
            self.rows = self.rows[::-1]
        self.ranks = self.rows.argsort()
        self.ramp = ramp

    def __call__(self, rows: np.ndarray, progress: float) -> np.ndarray:
        """The rows that come for `rows`, both int [B]."""
        share = min(1.0, FIRST_SHARE + (1 - FIRST_SHARE) * progress / self.ramp)
        return self.rows[(self.ranks[rows] * share).astype(np.intp)]


class LateStarts:
    """How many ACT steps without gradient a row runs before those that are trained on.

    A share of the rows, drawn by their positions in the order, starts 2^k steps late; k is drawn evenly from 0 to
    log2(max_steps), rounded down. All others start at once. Source: Sotaku v2 runs 32 to 512 iterations without
    gradient before the supervised ones, on a fifth of its batches; here rows are drawn, since slots start one by one.
    """

    def __init__(self, seed: int, share: float, max_steps: int):
        self.seed, self.share, self.max_power = seed, share, max_steps.bit_length() - 1

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Steps int32 [B] of the rows at `positions` [B]; 0 for most."""
        chosen, power = random_keys(self.seed, LATE_START, positions, 2).T
        late = (chosen >> np.uint64(11)) * 2.0**-53 < self.share
        return np.where(late, 1 << (power % np.uint64(self.max_power + 1)).astype(np.int32), 0).astype(np.int32)


def cycles_at(progress: float, grow: float, cycles: int) -> int:
    """How many of its `cycles` a model runs at a progress, while they grow over the share `grow` of the run.

    Three stages, ceil(cycles / 3), ceil(2 cycles / 3) and all of them; the first two take half of `grow` each. TRM's
    3 and 6 go by (1, 2) and (2, 4); with grow 0.6 it is at 30 and 60 % of the run. After CGAR, arXiv 2511.08653.
    """
    stage = CYCLE_STAGES if progress >= grow else 1 + int(progress / grow * (CYCLE_STAGES - 1))
    return -(-cycles * stage // CYCLE_STAGES)


@contextlib.contextmanager
def fewer_cycles(config: Any, progress: float, grow: float) -> Iterator[None]:
    """Inside the block a puzzle model runs the cycles of this progress; saving and evaluating see its own config."""
    full = {name: getattr(config, name) for name in ("H_cycles", "L_cycles")}
    for name, cycles in full.items():
        setattr(config, name, cycles_at(progress, grow, cycles))
    try:
        yield
    finally:
        for name, cycles in full.items():
            setattr(config, name, cycles)
