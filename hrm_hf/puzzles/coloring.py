"""Task "coloring": complete the coloring of a graph, so that the ends of every edge differ.

The board of a graph with n nodes is its n x n matrix: `#` for an edge, `.` for none, and on the diagonal the color of
each node, or `?`. So the structure of a puzzle, which differs from puzzle to puzzle, is part of the board. A model
that mixes rows and columns passes messages along edges.
"""

import numpy as np

from .backtracking import dig
from .tasks import Grids, PuzzleTask


OPEN, FIRST, COLORS = 1, 2, 4
NO_EDGE, EDGE = FIRST + COLORS, FIRST + COLORS + 1
EDGE_SHARE = (0.7, 1.0)  # range of the probability of an edge between two nodes of different colors


class ColoringTask(PuzzleTask):
    """Task "coloring" for graphs with any number of nodes and four colors."""

    name = "coloring"
    title = plural = "Graph coloring"
    symbols = ("_", "?", "a", "b", "c", "d", ".", "#")
    blank = OPEN
    default_shape = (10, 10)
    rules_prove = True  # valid answers are correct, because each generated puzzle has a unique solution
    palette = ("#9aa5b1", "#ffffff", "#e76f51", "#2a9d8f", "#e9c46a", "#4f83cc", "#eef1f4", "#2f3b47")
    legend = {"#eef1f4": "no edge", "#2f3b47": "edge", "#ffffff": "node to color"}
    levels = 3

    def label(self, token: int) -> str:
        return self.symbols[token] if OPEN < token < NO_EDGE else ""

    def units(self) -> dict[str, list[list[int]]]:
        cells = np.arange(self.seq_len).reshape(self.grid_shape)
        return {"row": cells.tolist(), "column": cells.T.tolist()}

    def fillable(self, board: np.ndarray) -> np.ndarray:
        return np.eye(self.grid_shape[0], dtype=bool).reshape(-1)

    def allowed(self, board: np.ndarray) -> np.ndarray:
        nodes = self.fillable(board)
        edges = (board == EDGE).reshape(self.grid_shape).astype(np.float32)
        result = np.zeros((self.seq_len, self.vocab_size), dtype=bool)
        for color in range(FIRST, FIRST + COLORS):
            result[nodes, color] = edges @ (board[nodes] == color) == 0
        result[~nodes, board[~nodes]] = board[~nodes] >= NO_EDGE
        return result

    def generate(self, level: float, rng: np.random.Generator) -> Grids:
        """Color the nodes, connect nodes of different colors, and remove colors while the solution stays unique."""
        n = self.grid_shape[0]
        colors = rng.permutation(np.arange(n) % COLORS)
        edges = (rng.random((n, n)) < rng.uniform(*EDGE_SHARE)) & (colors[:, None] != colors)
        edges = np.triu(edges) | np.triu(edges).T
        board = np.where(edges, EDGE, NO_EDGE)
        np.fill_diagonal(board, colors + FIRST)
        return dig(self, board.reshape(-1), level, rng), board.reshape(-1)

    def symmetry_keys(self) -> int:
        return self.grid_shape[0] + COLORS

    def random_symmetries(self, keys: np.ndarray) -> Grids:
        """Permute nodes and colors at random. Return the new order of the cells and of the symbols."""
        n = self.grid_shape[0]
        order = keys[:, :n].argsort(axis=1)
        cells = order[:, :, None] * n + order[:, None, :]
        symbols = np.tile(np.arange(self.vocab_size, dtype=np.int32), (len(keys), 1))
        symbols[:, FIRST:NO_EDGE] = keys[:, n:].argsort(axis=1) + FIRST
        return cells.reshape(len(keys), -1), symbols
