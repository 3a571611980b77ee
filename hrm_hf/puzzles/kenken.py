"""Task "kenken": complete a Latin square so that the digits in each cage combine to its clue.

Each cell of the square takes 2 x 2 cells of the board, so a 4 x 4 square is an 8 x 8 board:

    digit           wall to the right (`#`, or `.` for none)
    wall below      clue of the digit's cage, such as `7+`

Every cell of a cage repeats its clue, which makes the puzzle easier to learn. In text, one clue per cage is enough.
"""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .arc_grids import dihedral
from .backtracking import find, needs_no_guess
from .tasks import Grids, PuzzleTask, View


LARGEST, MOST_CELLS = 5, 3  # largest digit, and maximum number of cells in a cage
CAGE_SHARE = (0.75, 0.45)  # number of cages per cell of the square at levels 0 and 1


def clues_of(digits: Sequence[int]) -> list[str]:
    """Return the clues that fit a cage's digits: `=` for one cell, else `+` and `x`, for two cells also `-`, `/`."""
    if len(digits) == 1:
        return [f"{digits[0]}="]
    low, high = min(digits), max(digits)
    clues = [f"{sum(digits)}+", f"{math.prod(digits)}x"]
    if len(digits) == 2 and low < high:
        clues += [f"{high - low}-"] + [f"{high // low}/"] * (high % low == 0)
    return clues


CAGES = [cage for size in range(1, MOST_CELLS + 1) for cage in itertools.product(range(1, LARGEST + 1), repeat=size)]
CLUES = sorted({clue for cage in CAGES for clue in clues_of(cage)}, key=lambda clue: (clue[-1], int(clue[:-1])))
OPEN = 1  # the token of digit d is OPEN + d
NOTHING, WALL = OPEN + LARGEST + 1, OPEN + LARGEST + 2


class KenKenTask(PuzzleTask):
    """Task "kenken" for squares of up to 5 x 5 and cages of up to three cells."""

    name = "kenken"
    title, plural = "KenKen", "KenKen puzzles"
    symbols = ("_", "?", *map(str, range(1, LARGEST + 1)), ".", "#", *CLUES)
    blank = OPEN
    default_shape = (8, 8)
    rules_prove = True  # valid answers are correct, because each generated puzzle has a unique solution
    palette = ("#9aa5b1", *["#ffffff"] * (LARGEST + 1), "#eef1f4", "#2f3b47", *["#fff3b0"] * len(CLUES))
    legend = {"#ffffff": "digit", "#2f3b47": "wall of a cage", "#fff3b0": "clue of a cage"}
    levels = 3

    def __init__(self, config, identifiers=None):
        super().__init__(config, identifiers)
        rows, columns = self.grid_shape
        if rows != columns or rows % 2 or rows > 2 * LARGEST:
            raise ValueError(f"grid_shape={rows, columns}: must be square with an even side, at most 10 x 10")
        cells, order = np.arange(self.seq_len).reshape(self.grid_shape), np.arange(self.seq_len // 4)
        self.digits, self.clues = cells[::2, ::2].ravel(), cells[1::2, 1::2].ravel()
        self.right, self.below = cells[::2, 1:-1:2], cells[1:-1:2, ::2]  # walls right of, and below, a digit
        self.walls = np.concatenate([self.right.ravel(), self.below.ravel()])
        square = order.reshape(rows // 2, rows // 2)
        beside = [(square[:, :-1], square[:, 1:]), (square[:-1], square[1:])]
        self.pairs = np.concatenate([np.stack(pair, axis=2).reshape(-1, 2) for pair in beside])  # two cells per wall

    def label(self, token: int) -> str:
        return "" if token in (OPEN, NOTHING, WALL) or token >= len(self.symbols) else self.symbols[token]

    def units(self) -> dict[str, list[list[int]]]:
        """List the cells of each unit: a row or column of digits, a 2 x 2 block, or a wall and its two digits."""
        square = self.digits.reshape(self.grid_shape[0] // 2, -1)
        parts = self.digits[:, None] + [0, 1, self.grid_shape[1], self.grid_shape[1] + 1]
        sides = np.concatenate([self.digits[self.pairs], self.walls[:, None]], axis=1)
        return {
            "row": square.tolist(),
            "column": square.T.tolist(),
            "cell": parts.tolist(),
            "side": sides.tolist(),
        }

    def fillable(self, board: np.ndarray) -> np.ndarray:
        return np.isin(np.arange(self.seq_len), self.digits)

    def encode(self, cells: Any, is_solution: bool = False) -> np.ndarray:
        """Encode a board, copying the clue of each cage to its cells that have none."""
        board = super().encode(cells, is_solution)
        cages = self._cages(board[self.walls] != WALL)
        for place in np.flatnonzero(board[self.clues] > WALL):
            others = self.clues[(cages == cages[place]) & (board[self.clues] == NOTHING)]
            board[others] = board[self.clues[place]]
        return board

    def allowed(self, board: np.ndarray) -> np.ndarray:
        n, is_digit = self.grid_shape[0] // 2, self.fillable(board)
        result = np.zeros((self.seq_len, self.vocab_size), dtype=bool)
        for token in range(OPEN + 1, OPEN + n + 1):
            result[:, token] = is_digit & (self.neighbours(board == token) == 0)
        cages = self._cages(board[self.walls] != WALL)
        has_clue = board[self.clues] > WALL
        for cage, clue in {*zip(cages[has_clue].tolist(), board[self.clues[has_clue]].tolist())}:
            cells = self.digits[cages == cage]
            options = _options(clue, len(cells), n)
            differs = (board[cells] > OPEN) & (options != board[cells])
            # A combination allows its digit in a cell if it agrees with the digits entered in the cage's other cells.
            agrees, cell = np.nonzero(differs.sum(axis=1, keepdims=True) == differs)
            possible = np.zeros((len(cells), self.vocab_size), dtype=bool)
            possible[cell, options[agrees, cell]] = True
            result[cells] &= possible
        result[~is_digit, board[~is_digit]] = board[~is_digit] >= NOTHING
        return result

    def _cages(self, joined: np.ndarray) -> np.ndarray:
        """Return the cage number of each cell. `joined` marks the pairs of neighbors without a wall between them."""
        cages = np.arange(len(self.digits))
        for one, other in self.pairs[joined]:
            cages[cages == cages[other]] = cages[one]
        return cages

    def generate(self, level: float, rng: np.random.Generator) -> Grids:
        """Fill a Latin square at random, then draw cages and clues until they can be solved without a guess."""
        easy, hard = CAGE_SHARE
        wanted = round((easy + (hard - easy) * level) * len(self.digits))
        empty = np.where(self.fillable(self.digits), OPEN, NOTHING)
        square = find(self, empty, rng.random((self.seq_len, self.vocab_size))).boards[0]
        square.reshape(self.grid_shape)[::2, -1] = square.reshape(self.grid_shape)[-1, ::2] = WALL
        while True:
            solution, cages = square.copy(), self._draw_cages(wanted, rng)
            solution[self.walls] = np.where(cages[self.pairs[:, 0]] == cages[self.pairs[:, 1]], NOTHING, WALL)
            for cage in np.unique(cages):
                clues = clues_of((solution[self.digits[cages == cage]] - OPEN).tolist())
                solution[self.clues[cages == cage]] = WALL + 1 + CLUES.index(rng.choice(clues))
            puzzle = np.where(self.fillable(solution), OPEN, solution)
            if needs_no_guess(self, puzzle):
                return puzzle, solution

    def _draw_cages(self, wanted: int, rng: np.random.Generator) -> np.ndarray:
        """Merge random neighbors until `wanted` cages are left. Return the cage number of each cell."""
        cages = np.arange(len(self.digits))
        for one, other in rng.permutation(self.pairs):
            merged = (cages == cages[one]) | (cages == cages[other])
            if merged.sum() <= MOST_CELLS and len(np.unique(cages)) > wanted:
                cages[merged] = cages[one]
        return cages

    def symmetries(self) -> list[View]:
        """Return the rotations and reflections of the square. Each wall stays between the same two cells."""
        views, half = [], self.grid_shape[0] // 2
        for one in range(8):
            cells = np.arange(self.seq_len).reshape(self.grid_shape)
            walls = {part.shape: part for part in (dihedral(self.right, one), dihedral(self.below, one))}
            cells[::2, 1:-1:2], cells[1:-1:2, ::2] = walls[self.right.shape], walls[self.below.shape]
            for part, at in ((self.digits, 0), (self.clues, 1)):
                cells[at::2, at::2] = dihedral(part.reshape(half, half), one)
            views.append(View(cells.reshape(-1), np.arange(self.vocab_size)))
        return views


@lru_cache(maxsize=4096)
def _options(clue: int, count: int, n: int) -> np.ndarray:
    """Return every combination of digits that fits a clue in a cage of `count` cells, as tokens [options, count]."""
    cages = itertools.product(range(1, n + 1), repeat=count) if count <= MOST_CELLS else ()
    fits = [cage for cage in cages if CLUES[clue - WALL - 1] in clues_of(cage)]
    return np.array(fits, dtype=int).reshape(-1, count) + OPEN
