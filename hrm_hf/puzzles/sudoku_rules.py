"""Sudoku rules: geometry, notation, and validation of answers.

There are two notations. A *board* is an array of digits, with 0 for a blank. *Tokens* are the model inputs, as in the
original HRM: PAD is 0, blank is 1, and digit d is d + 1.

Boards in text files may have frames, comments and various symbols for blanks; `board_text.py` reads them.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from .board_text import BOX_SHAPES, CELLS, LARGE_BOXES, SYMBOLS, split_boards


PAD, BLANK, DIGIT_OFFSET = 0, 1, 1

Puzzle = str | Sequence | np.ndarray


class SudokuShape:
    """Geometry of a `size` x `size` board (4, 6, 9, 12, 16 or 25), with cells numbered row by row.

    Attributes:
        units: Name and cells of each row, column and box; 3 * size entries.
        cells_of_unit: The same cells as an array, int64 [size, units].
        units_of_cell: Row, column and box of each cell, int64 [3, cells].
    """

    def __init__(self, size: int):
        if size not in BOX_SHAPES:
            raise ValueError(f"size={size!r}: must be one of {sorted(BOX_SHAPES)}")
        self.size, self.box_shape, self.cells, self.vocab_size = size, BOX_SHAPES[size], size**2, size + 2
        grid, (box_rows, box_cols) = np.arange(self.cells).reshape(size, size), self.box_shape
        boxes = grid.reshape(size // box_rows, box_rows, size // box_cols, box_cols).swapaxes(1, 2)
        kinds = np.stack([grid, grid.T, boxes.reshape(size, size)])
        names = [f"{kind} {number}" for kind in ("row", "column", "box") for number in range(1, size + 1)]
        self.units = list(zip(names, kinds.reshape(-1, size).tolist()))
        self.cells_of_unit = kinds.reshape(-1, size).T
        self.units_of_cell = np.argsort(kinds.reshape(3, -1), axis=1) // size + [[0], [size], [2 * size]]

    def name(self, cell: int) -> str:
        return f"row {cell // self.size + 1}, column {cell % self.size + 1}"


@lru_cache
def sudoku_shape(size: int) -> SudokuShape:
    """Return the cached geometry for `size`."""
    return SudokuShape(size)


def to_board(puzzle: Puzzle, size: int | None = None) -> np.ndarray:
    """Read a board from a string (`.` or `0` is blank, frames are skipped), rows of digits, or a flat list.

    Digits above 9 are numbers or letters (A is 10). Return uint8 [size * size], 0 for a blank. Raise ValueError if no
    size in `BOX_SHAPES` (or not `size`) has this number of cells, a character is illegal, or a digit exceeds the size.
    """
    if isinstance(puzzle, (list, tuple)) and puzzle and all(isinstance(row, str) and len(row) > 1 for row in puzzle):
        puzzle = "\n".join(puzzle)
    if isinstance(puzzle, str):
        boards = [puzzle] if CELLS.issuperset(puzzle) else split_boards(puzzle, size)
        board = boards[0] if len(boards) == 1 else puzzle
        words = (board["puzzle"] if isinstance(board, dict) else board).split()
        cells: list[Any] = words if len(words) in {n**2 for n in LARGE_BOXES} else list("".join(words))
    elif not isinstance(puzzle, (Sequence, np.ndarray)):
        raise ValueError(f"puzzle={puzzle!r:.60}: must be a string or a list of cells")
    else:
        cells = [
            cell for row in puzzle for cell in (row if isinstance(row, (list, tuple, str, np.ndarray)) else [row])
        ]
    sizes = {n**2: n for n in BOX_SHAPES} if size is None else {sudoku_shape(size).cells: size}
    if len(cells) not in sizes:
        raise ValueError(f"a board has {' or '.join(map(str, sizes))} cells; got {len(cells)}: {puzzle!r:.100}")
    size = sizes[len(cells)]
    return np.array([_to_digit(cell, i, size) for i, cell in enumerate(cells)], dtype=np.uint8)


def _to_digit(cell: Any, index: int, size: int) -> int:
    place = sudoku_shape(size).name(index)
    text = "0" if cell is None or cell in (".", "", " ") else str(cell)
    if len(text) == 1 and text.upper() in SYMBOLS[9:size]:
        return SYMBOLS.index(text.upper()) + 1
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{place}: {cell!r} is not a digit; expected 1 to {size}, or '.' or 0 for a blank")
    if int(text) > size:
        raise ValueError(f"{place}: digit {text} exceeds the board's size {size}")
    return int(text)


def encode(puzzle: Puzzle, size: int | None = None) -> np.ndarray:
    """Encode a board in any form that `to_board` accepts as tokens, int8 [size * size]."""
    return to_board(puzzle, size).astype(np.int8) + DIGIT_OFFSET


def decode(tokens: Sequence[int] | np.ndarray) -> str:
    """Decode tokens to a board as a string, with `.` for a blank.

    PAD, which a model may predict, also becomes a blank; `validate_solution` then reports the cell.
    Raise ValueError if the number of cells is wrong or a token is outside the vocabulary.
    """
    flat = np.asarray(tokens).reshape(-1)
    sizes = {n**2: n for n in BOX_SHAPES}
    if flat.size not in sizes:
        raise ValueError(f"a board has {' or '.join(map(str, sizes))} tokens; got {flat.size}")
    shape = sudoku_shape(sizes[flat.size])
    for cell in np.flatnonzero((flat < PAD) | (flat >= shape.vocab_size))[:1]:
        raise ValueError(f"{shape.name(cell)}: token {flat[cell]}; expected 0 to {shape.vocab_size - 1}")
    return "".join("." if token <= BLANK else SYMBOLS[token - DIGIT_OFFSET - 1] for token in flat.tolist())


def validate_solution(puzzle: Puzzle, solution: Puzzle) -> list[str]:
    """List the rules that `solution` violates as a solution of `puzzle`. `to_board` defines the accepted forms."""
    clues = to_board(puzzle)
    shape = sudoku_shape(int(len(clues) ** 0.5))
    answer = to_board(solution, shape.size)
    problems = [f"{shape.name(cell)} is blank" for cell in np.flatnonzero(answer == 0)]
    for cell in np.flatnonzero((clues != 0) & (answer != clues) & (answer != 0)):
        problems.append(f"{shape.name(cell)}: clue {clues[cell]} was changed to {answer[cell]}")
    for name, cells in shape.units:
        counts = np.bincount(answer[cells], minlength=shape.size + 1)
        problems += [f"{name} has {digit} {counts[digit]} times" for digit in np.flatnonzero(counts > 1) if digit]
    return problems


def obey_rules(boards: np.ndarray, solutions: np.ndarray) -> np.ndarray:
    """Return a bool mask [rows] of the `solutions` [rows, cells] that obey the rules and the clues in `boards`.

    Numbers that are not digits count as blanks.
    """
    shape = sudoku_shape(int(boards.shape[1] ** 0.5))
    digits = np.where((solutions > 0) & (solutions <= shape.size), solutions, 0).astype(np.uint32)
    bits = np.uint32(1) << digits
    valid = ((boards <= 0) | (boards == solutions)).all(axis=1)
    for cells in shape.cells_of_unit.T:
        valid &= np.bitwise_or.reduce(bits[:, cells], axis=1) == (1 << (shape.size + 1)) - 2
    return valid
