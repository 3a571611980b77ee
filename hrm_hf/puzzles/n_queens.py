"""Task "n_queens": place n queens, some of them given, on an n x n board, so that none attacks another."""

from functools import cache

import numpy as np

from .backtracking import needs_no_guess
from .tasks import Grids, PuzzleTask, View


OPEN, EMPTY, QUEEN = range(1, 4)


class QueensTask(PuzzleTask):
    """Task "n_queens" on boards of up to 12 x 12. Below 9 x 9, there are too few solutions to hold some out."""

    name = "n_queens"
    title = plural = "n queens"
    symbols = ("_", "?", ".", "Q")
    blank = OPEN
    default_shape = (10, 10)
    rules_prove = True  # valid answers are correct, because each generated puzzle has a unique solution
    palette = ("#9aa5b1", "#ffffff", "#fff3b0", "#e76f51")
    legend = {"#ffffff": "open", "#fff3b0": "no queen", "#e76f51": "queen"}
    levels = 3

    def label(self, token: int) -> str:
        return "Q" if token == QUEEN else ""

    def units(self) -> dict[str, list[list[int]]]:
        n, cells = self.grid_shape[0], np.arange(self.seq_len).reshape(self.grid_shape)
        diagonals = range(2 - n, n - 1)
        return {
            "row": cells.tolist(),
            "column": cells.T.tolist(),
            "diagonal": [cells.diagonal(offset).tolist() for offset in diagonals],
            "antidiagonal": [cells[::-1].diagonal(offset).tolist() for offset in diagonals],
        }

    def allowed(self, board: np.ndarray) -> np.ndarray:
        queens = board == QUEEN
        attacked = self.neighbours(queens) > 0
        could = ((board == OPEN) | queens) & ~attacked  # cells that have a queen or could get one
        grid = could.reshape(self.grid_shape)
        # Cells that may be empty, because their row and their column have other cells in `could`.
        spare = (grid.sum(0) > grid) & (grid.sum(1, keepdims=True) > grid)
        result = np.zeros((self.seq_len, self.vocab_size), dtype=bool)
        result[:, EMPTY], result[:, QUEEN] = spare.reshape(-1), ~attacked
        return result

    def generate(self, level: float, rng: np.random.Generator) -> Grids:
        """Draw a solution and remove queens in random order, keeping those without which a guess would be needed.

        Level 0 tries half of the queens, level 1 all of them.
        """
        solutions = all_solutions(self.grid_shape[0])
        solution = solutions[rng.integers(len(solutions))]
        puzzle = np.where(solution, QUEEN, OPEN)
        order = rng.permutation(np.flatnonzero(solution))
        for cell in order[: round((0.5 + 0.5 * level) * len(order))]:
            puzzle[cell] = OPEN
            if not needs_no_guess(self, puzzle):
                puzzle[cell] = QUEEN
        return puzzle, np.where(solution, QUEEN, EMPTY)

    def symmetries(self) -> list[View]:
        return self.reflections()


@cache
def all_solutions(n: int) -> np.ndarray:
    """Return all placements of n queens, bool [solutions, n * n]."""

    def place(columns: tuple[int, ...]) -> list[tuple[int, ...]]:
        row = len(columns)
        if row == n:
            return [columns]
        free = [c for c in range(n) if all(c != d and abs(c - d) != row - r for r, d in enumerate(columns))]
        return [found for column in free for found in place((*columns, column))]

    return np.eye(n, dtype=bool)[np.array(place(()))].reshape(-1, n * n)
