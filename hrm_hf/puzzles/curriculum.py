"""The things that change over a run of puzzle training and from row to row: difficulty and late starts.

Functions of the progress of a run, 0 to 1, which is its step over its steps, and of positions in the order of training
(see `dataloader`). They keep no state, so that a resumed run goes on as it would have.
"""

from typing import Any

import numpy as np
import torch

from ..models.act import ActCarry
from ..models.modeling_utils import uncompiled
from .dataloader import PuzzleRows
from .dataset import IGNORE_LABEL
from .random_symmetries import LATE_START, random_keys


FIRST_SHARE = 0.25  # of the rows, those that a run with a difficulty begins with


class DifficultyPool:
    """Which row comes in the place of that which the order of training says.

    Rows are ranked by difficulty: by the column `rating`, and among equal ratings, or without that column, by the
    number of cells that differ between puzzle and solution (81 minus the clues of a 9x9 Sudoku, the path of a maze).
    At progress t the f(t) of N rows that are hardest are in the pool, f(t) = min(1, 1/4 + 3/4 t / ramp). Where the
    order says the row of rank r, that of rank floor(r f) comes: rows of the pool come equally often, and from
    t = ramp on those that the order says.

    Args:
        ramp: progress at which all rows are in the pool, above 0.
    """

    def __init__(self, rows: PuzzleRows, ramp: float):
        rating = np.zeros(len(rows)) if rows.rating is None else rows.rating
        open_cells = ((rows.input_ids != rows.labels) & (rows.labels != IGNORE_LABEL)).sum(axis=1)
        self.rows = np.lexsort((open_cells, rating))[::-1]
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


@torch.no_grad()
@uncompiled
def run_ahead(model: Any, carry: ActCarry, steps_ahead: torch.Tensor, batch: dict[str, torch.Tensor]) -> ActCarry:
    """Starts fresh rows some ACT steps late: those steps have no gradient, and are not counted.

    Uncompiled, since the number of rows is another each time.

    Args:
        steps_ahead: int [B]; 0 leaves a row to the next call of the model, as it does all rows of busy slots.
        batch: arguments of the model's forward.

    Returns:
        The carry in which these rows are under way, at 0 steps.
    """
    wanted = steps_ahead * carry.halted
    rows = wanted.argsort(descending=True)[: int(wanted.count_nonzero())]
    if not len(rows):
        return carry
    data = {name: value[rows] for name, value in batch.items()}
    puzzle_rows = model.model.puzzle_rows(data["puzzle_identifiers"], len(rows))
    x, rotary = model.model.embed(data["input_ids"], puzzle_rows, model.compute_dtype)
    z_H, z_L = (z.clone() for z in model.model.fresh_states(x))
    for step in range(int(wanted[rows[0]])):
        n = int((wanted > step).sum())  # the first n rows go on
        z_H[:n], z_L[:n] = model.model.reason(x[:n], rotary, z_H[:n], z_L[:n])
    return ActCarry(
        carry.z_H.index_copy(0, rows, z_H),
        carry.z_L.index_copy(0, rows, z_L),
        carry.steps.index_fill(0, rows, 0),
        carry.halted.index_fill(0, rows, False),
        {n: old.index_copy(0, rows, data[n].to(old.dtype)) for n, old in carry.current_data.items()},
    )
