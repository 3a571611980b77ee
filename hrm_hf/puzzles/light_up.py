"""Task "light_up" (Akari): place bulbs so that every open cell is lit and no bulb lights another.

A bulb lights its row and column up to the next wall. A number in a wall is the number of bulbs beside it.
"""

from functools import lru_cache

import numpy as np

from .backtracking import find, needs_no_guess
from .tasks import Grids, PuzzleTask, View


OPEN, DARK, BULB, WALL, NUMBER = range(1, 6)  # DARK: a cell without a bulb; NUMBER + n: a wall with the number n
WALL_SHARE = (0.2, 0.35)  # minimum and maximum fraction of walls in generated puzzles
MAX_NODES = 500  # search limit for placing bulbs in a generated layout; a layout that needs more is dropped


class LightUpTask(PuzzleTask):
    """Task "light_up" on boards of any size."""

    name = "light_up"
    title = plural = "Light up"
    symbols = ("_", "?", ".", "*", "#", "0", "1", "2", "3", "4")
    blank = OPEN
    default_shape = (7, 7)
    rules_prove = True  # valid answers are correct, because each generated puzzle has a unique solution
    palette = ("#9aa5b1", "#ffffff", "#fff3b0", "#f9a825", *["#2f3b47"] * 6)
    legend = {"#ffffff": "open", "#fff3b0": "no bulb", "#f9a825": "bulb of the model", "#2f3b47": "wall"}
    levels = 3

    def label(self, token: int) -> str:
        return self.symbols[token] if NUMBER <= token < len(self.symbols) else ""

    def allowed(self, board: np.ndarray) -> np.ndarray:
        walls, bulbs, numbers = board >= WALL, board == BULB, board - NUMBER
        sees, beside = _structure(walls.tobytes(), self.grid_shape)
        lit = sees @ bulbs > 0  # cells lit by a bulb in another cell
        could = (board == OPEN) & ~lit  # open cells that could get a bulb
        count, most = beside @ bulbs, beside @ (bulbs | could)  # current and maximum number of bulbs beside each wall

        def near(wrong):  # cells beside a numbered wall that is marked in `wrong`
            return beside.T @ (wrong & (numbers >= 0)) > 0

        result = np.zeros((self.seq_len, self.vocab_size), dtype=bool)
        result[:, BULB] = ~walls & ~lit & ~np.where(bulbs, near(count > numbers), near(count >= numbers))
        result[:, DARK] = ~walls & (lit | (sees @ could > 0))
        result[:, DARK] &= ~np.where(bulbs | could, near(most <= numbers), near(most < numbers))
        result[walls, board[walls]] = ((numbers < 0) | ((count <= numbers) & (numbers <= most)))[walls]
        return result

    def generate(self, level: float, rng: np.random.Generator) -> Grids:
        """Draw walls, number them to fit a random solution, and hide at most a fraction `level` of the numbers."""
        while True:
            walls = rng.random(self.seq_len) < rng.uniform(*WALL_SHARE)
            scores = rng.random((self.seq_len, self.vocab_size))
            found = find(self, np.where(walls, WALL, OPEN), scores, max_nodes=MAX_NODES).boards
            if not found or walls.all():
                continue
            beside = _structure(walls.tobytes(), self.grid_shape)[1]
            solution = np.where(walls, NUMBER + (beside @ (found[0] == BULB)).astype(int), found[0])
            puzzle = np.where(walls, solution, OPEN)
            if needs_no_guess(self, puzzle):
                break
        order = rng.permutation(np.flatnonzero(walls))
        for cell in order[: round(level * len(order))]:
            puzzle[cell] = WALL
            if not needs_no_guess(self, puzzle):
                puzzle[cell] = solution[cell]
        return puzzle, np.where(walls, puzzle, solution)

    def symmetries(self) -> list[View]:
        return self.reflections()


@lru_cache(maxsize=4096)
def _structure(walls: bytes, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 tables [S, S]: which cells see each other, and which cells are beside each wall."""
    grid = np.frombuffer(walls, dtype=bool).reshape(shape)
    cells, row, column = np.arange(grid.size), *np.indices(shape).reshape(2, -1)
    open_cells = ~grid.reshape(-1)
    sees = np.zeros((grid.size, grid.size), dtype=bool)
    for line, axis in ((row, 1), (column, 0)):
        part = np.cumsum(grid, axis=axis).reshape(-1)  # number of walls up to each cell in its line
        sees |= (line[:, None] == line) & (part[:, None] == part)
    sees &= open_cells[:, None] & open_cells & (cells[:, None] != cells)
    beside = abs(row[:, None] - row) + abs(column[:, None] - column) == 1
    return sees.astype(np.float32), (beside & ~open_cells[:, None] & open_cells).astype(np.float32)
