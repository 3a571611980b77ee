"""What changes over a run of puzzle training: which rows come, by how hard they are.

Functions of the progress of a run, 0 to 1, which is its step over its steps. They keep no state, so that a resumed run
goes on as it would have.
"""

import numpy as np

from .dataloader import PuzzleRows
from .dataset import IGNORE_LABEL


FIRST_SHARE = 0.25  # of the rows, those that a run with a difficulty begins with


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
