"""Task "nonogram": fill cells of a picture so that the runs in each row and column have the given lengths.

The first rows and columns of a board hold the clues of the picture's columns and rows: `-` for none, else the length
of a run, or 0 for an empty line. A picture with n rows has ceil(n / 2) rows of clues, so a 9 x 9 board has a 6 x 6
picture.
"""

import itertools
from functools import lru_cache

import numpy as np

from .backtracking import needs_no_guess
from .tasks import Grids, PuzzleTask, View


OPEN, EMPTY, FILLED, NONE, NUMBER = range(1, 6)  # NONE: a clue cell without a number; NUMBER + n: the clue n
LONGEST = 9  # maximum number of rows or columns of a picture, because each clue must be a single digit
FILLED_SHARE = (0.7, 0.5)  # share of filled cells in generated pictures at levels 0 and 1


class NonogramTask(PuzzleTask):
    """Task "nonogram" for pictures with up to nine rows and columns."""

    name = "nonogram"
    title, plural = "Nonogram", "nonograms"
    symbols = ("_", "?", ".", "#", "-", *map(str, range(LONGEST + 1)))
    blank = OPEN
    default_shape = (9, 9)
    rules_prove = True  # valid answers are correct, because each generated puzzle has a unique solution
    palette = ("#9aa5b1", "#ffffff", "#fff3b0", "#2f3b47", *["#dbe4ec"] * (LONGEST + 2))
    legend = {"#dbe4ec": "clues", "#ffffff": "open", "#fff3b0": "empty", "#2f3b47": "filled"}
    levels = 3

    def __init__(self, config, identifiers=None):
        super().__init__(config, identifiers)
        rows, columns = self.grid_shape
        self.clue_rows, self.clue_columns = rows - 2 * rows // 3, columns - 2 * columns // 3
        if max(rows - self.clue_rows, columns - self.clue_columns) > LONGEST:
            raise ValueError(f"grid_shape={rows, columns}: must be at most 14 x 14, a 9 x 9 picture and its clues")

    def label(self, token: int) -> str:
        return self.symbols[token] if NUMBER <= token < len(self.symbols) else ""

    def units(self) -> dict[str, list[list[int]]]:
        cells = np.arange(self.seq_len).reshape(self.grid_shape)
        return {"row": cells.tolist(), "column": cells.T.tolist()}

    def fillable(self, board: np.ndarray) -> np.ndarray:
        picture = np.zeros(self.grid_shape, dtype=bool)
        picture[self.clue_rows :, self.clue_columns :] = True
        return picture.reshape(-1)

    def allowed(self, board: np.ndarray) -> np.ndarray:
        grid, picture = board.reshape(self.grid_shape), self.fillable(board)
        lower, right = grid[self.clue_rows :], grid[:, self.clue_columns :]
        by_row = _possible(lower[:, self.clue_columns :], lower[:, : self.clue_columns])
        by_column = _possible(right[self.clue_rows :].T, right[: self.clue_rows].T)
        result = np.zeros((self.seq_len, self.vocab_size), dtype=bool)
        result[picture, EMPTY : FILLED + 1] = (by_row & by_column.swapaxes(0, 1)).reshape(-1, 2)
        result[~picture, board[~picture]] = board[~picture] >= NONE
        return result

    def generate(self, level: float, rng: np.random.Generator) -> Grids:
        """Draw random pictures until the clues of one can be solved without a guess."""
        easy, hard = FILLED_SHARE
        while True:
            board = np.full(self.grid_shape, NONE)
            filled = rng.random(self.grid_shape)[self.clue_rows :, self.clue_columns :]
            filled = filled < easy + (hard - easy) * level
            board[self.clue_rows :, : self.clue_columns] = [_clues(line, self.clue_columns) for line in filled]
            board[: self.clue_rows, self.clue_columns :].T[:] = [_clues(line, self.clue_rows) for line in filled.T]
            board[self.clue_rows :, self.clue_columns :] = np.where(filled, FILLED, EMPTY)
            solution = board.reshape(-1)
            puzzle = np.where(self.fillable(solution), OPEN, solution)
            if needs_no_guess(self, puzzle):
                return puzzle, solution

    def symmetries(self) -> list[View]:
        """Return reflections of the board, also transposed if it is square. Clues are reversed with their lines."""
        cells, symbols = np.arange(self.seq_len).reshape(self.grid_shape), np.arange(self.vocab_size)
        views = []
        for board in (cells, cells.T) if self.clue_rows == self.clue_columns else (cells,):
            parts = [np.split(half, [self.clue_columns], axis=1) for half in np.split(board, [self.clue_rows])]
            for down, across in itertools.product((1, -1), repeat=2):
                turned = np.block([[part[::down, ::across] for part in row] for row in parts])
                views.append(View(turned.reshape(-1), symbols))
        return views


def _clues(line: np.ndarray, count: int) -> list[int]:
    """Return the clue tokens of a line of filled cells, bool [n], preceded by `NONE` for each unused place."""
    runs = [len(list(run)) for filled, run in itertools.groupby(line) if filled] or [0]
    return [NONE] * (count - len(runs)) + [NUMBER + run for run in runs]


@lru_cache
def _patterns(length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all lines of the given length, bool [2^length, length], and their clues [2^length, count]."""
    lines = np.array(list(itertools.product((False, True), repeat=length)))
    return lines, np.array([_clues(line, count) for line in lines])


def _possible(lines: np.ndarray, clues: np.ndarray) -> np.ndarray:
    """Return bool [L, n, 2]: whether a cell may be empty or filled, given its line's clues and other known cells.

    The clues [L, count] may contain NONE in any position.
    """
    patterns, their_clues = _patterns(lines.shape[1], clues.shape[1])
    order = np.argsort(clues != NONE, axis=1, kind="stable")
    fits = (np.take_along_axis(clues, order, axis=1)[:, None] == their_clues).all(axis=2)
    differs = (lines > OPEN)[:, None] & (patterns != (lines == FILLED)[:, None])  # [L, patterns, n]
    # For each cell: whether a pattern fits the clues and all known cells, except perhaps this one.
    agrees = fits[:, :, None] & (differs.sum(axis=2, keepdims=True) == differs)
    return np.stack([(agrees & ~patterns).any(axis=1), (agrees & patterns).any(axis=1)], axis=2)
