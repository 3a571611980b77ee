"""Task "jigsaw": Sudoku with irregular regions in place of boxes.

The regions are the third kind of unit, so the weights of a Sudoku solver that mixes by units fit. They belong to the
task, not to the puzzle: for other regions, subclass `JigsawTask` with another `name` and other `regions`.
"""

from functools import cached_property

import numpy as np

from .backtracking import dig, find
from .tasks import Grids, PuzzleTask


BLANK, FIRST = 1, 2  # FIRST is the token of digit 1
MAX_NODES = 100  # limit of each search for a solved grid; a new search is faster than a long one
HARDEST = 0.6  # level of `dig` for the hardest puzzles, about 22 clues; with fewer, proving uniqueness takes seconds


class JigsawTask(PuzzleTask):
    """Sudoku with regions of any shape instead of boxes. All puzzles of a task share one division into regions.

    Attributes:
        regions: One line per row, with a letter per cell that names the cell's region.
    """

    name = "jigsaw"
    title = plural = "Jigsaw Sudoku"
    symbols = ("_", *".123456789")
    blank = BLANK
    default_shape = (9, 9)
    rules_prove = True
    levels = 3
    regions = """
        aaabbbbcc
        aaaabcccc
        aadebbbcc
        dddeebfcf
        ddeefffff
        dddeeeegf
        hhhiiiigf
        hhhhigggg
        hhiiiiggg
    """

    def __init__(self, config, identifiers=None):
        super().__init__(config, identifiers)
        self.box_shape = None  # regions replace boxes, even if the config (e.g. of Sudoku weights) has them
        letters = np.array(list("".join(self.regions.split())))
        self._regions = [np.flatnonzero(letters == letter).tolist() for letter in np.unique(letters)]
        rows, columns = self.grid_shape
        if rows != columns or len(letters) != self.seq_len or {*map(len, self._regions)} != {columns}:
            sizes = [len(region) for region in self._regions]
            raise ValueError(f"grid_shape={self.grid_shape}: does not fit {self.name!r} with regions of {sizes} cells")

    def units(self) -> dict[str, list[list[int]]]:
        cells, regions = np.arange(self.seq_len).reshape(self.grid_shape), self._regions
        return {"row": cells.tolist(), "column": cells.T.tolist(), "box": regions}

    @cached_property
    def _units_of_cell(self) -> np.ndarray:
        """Return the row, column and region of each cell, int64 [S, 3], as row indices of `_members`."""
        return self._members.T.nonzero()[1].reshape(self.seq_len, 3)

    def allowed(self, board: np.ndarray) -> np.ndarray:
        """Apply the rules: no digit twice in a unit, and a digit with one possible cell in a unit goes there."""
        result = np.zeros((self.seq_len, self.vocab_size), dtype=bool)
        for digit in range(FIRST, self.vocab_size):
            result[:, digit] = self.neighbours(board == digit) == 0
        is_open = board == BLANK
        could = np.where(is_open[:, None], result, np.eye(self.vocab_size, dtype=bool)[board])[:, FIRST:]
        places = self._members @ could.astype(np.float32)  # possible cells of each digit in each unit
        hidden = (places[self._units_of_cell] == 1).any(axis=1) & could & is_open[:, None]
        forced = hidden.any(axis=1)
        result[forced, FIRST:] = hidden[forced]
        return result

    def generate(self, level: float, rng: np.random.Generator) -> Grids:
        blank, found = np.full(self.seq_len, BLANK), None
        while not found:
            found = find(self, blank, rng.random((self.seq_len, self.vocab_size)), max_nodes=MAX_NODES).boards
        return dig(self, found[0], HARDEST * level, rng), found[0]
