"""The rules of Sudoku: geometry, notation, and checking an answer.

Two notations. A *board* is an array of digits, 0 for a blank. *Tokens* are what models see: PAD 0, blank 1, digit d as
d + 1, as in the original HRM.

Boards as people write them have frames, comments and several signs for a blank; `split_boards` finds them in a text.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np


PAD, BLANK, DIGIT_OFFSET = 0, 1, 1
BOX_SHAPES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}

Puzzle = str | Sequence | np.ndarray

_CELLS = frozenset("0123456789.")
_FRAME = re.compile(r"[\s\ufeff\u200b|+=:!,'\"`(){}\[\]\u2500-\u257f]")
_BLANKS = "_?xX·□*-"  # signs for a blank where there is neither `.` nor 0
_SEPARATOR, _DIGIT = re.compile(r"[\s,;:|\"'#]+"), re.compile(r"\d")
_LETTERS = re.compile(r"(?!xxx)[a-z]{3}", re.IGNORECASE)
_PROGRESS = re.compile(r"^\s*\[(state|pencilmarks)\][^\[]*", re.IGNORECASE | re.MULTILINE)  # of SadMan's .sdk files


class SudokuShape:
    """Geometry of a board of `size` x `size` cells (4, 6 or 9) with boxes of `box_shape`; cells count row by row.

    Attributes:
        units: name and cells of each row, column and box: 3 * size entries.
        cells_of_unit: the same cells, int64 [size, units].
        units_of_cell: row, column and box of each cell, int64 [3, cells].
    """

    def __init__(self, size: int):
        if size not in BOX_SHAPES:
            raise ValueError(f"size={size!r}: a Sudoku has {sorted(BOX_SHAPES)} rows")
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
    """Return the geometry for `size` (4, 6 or 9), computed once."""
    return SudokuShape(size)


def to_board(puzzle: Puzzle, size: int | None = None) -> np.ndarray:
    """Read a board from a string (`.` or `0` is blank; frames are skipped), rows of digits, or a flat list.

    Return uint8 [size * size], 0 for a blank. ValueError: a number of cells other than 16, 36 or 81 (or of `size`), an
    illegal character, or a digit above the size.
    """
    if isinstance(puzzle, (list, tuple)) and puzzle and all(isinstance(row, str) and len(row) > 1 for row in puzzle):
        puzzle = "\n".join(puzzle)
    if isinstance(puzzle, str):
        text = puzzle if _CELLS.issuperset(puzzle) else "".join(_rows(_PROGRESS.sub("", puzzle)))
        cells: list[Any] = list(text or puzzle)
    elif not isinstance(puzzle, (Sequence, np.ndarray)):
        raise ValueError(f"a board is a text or a list of cells, not {puzzle!r:.60}")
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
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{place}: {cell!r} is no digit; expected 1 to {size}, or '.' or 0 for a blank")
    if int(text) > size:
        raise ValueError(f"{place}: digit {text} is above the board's size {size}")
    return int(text)


def _rows(text: str) -> list[str]:
    """Return the cells of each line, `.` for a blank; an empty string for frames and comments."""
    lines = ["" if _is_comment(line) else _FRAME.sub("", line) for line in text.splitlines()]
    blank, rows = ".", []
    if not any("." in line or "0" in line for line in lines):
        counts = {sign: sum(line.count(sign) for line in lines if _DIGIT.search(line)) for sign in _BLANKS}
        blank = max(counts, key=counts.get) if any(counts.values()) else "."
    for line in lines:
        row = "".join(cell for cell in line if cell == blank or cell not in "*-")
        is_rule = blank != "." and not _DIGIT.search(row) and len(row) not in BOX_SHAPES
        rows.append("" if is_rule else row.replace(blank, "."))
    return rows


def _is_comment(line: str) -> bool:
    """Whether a line is a header, a comment or prose: it has a word, and most of it is no cells."""
    text = "".join(line.split())
    is_prose = _LETTERS.search(line) and sum(character in _CELLS for character in text) < len(text) / 2
    return text.startswith(("#", ";", "//")) or bool(is_prose)


def split_boards(text: str, size: int) -> list[str | dict[str, str]]:
    """Split a text into its boards of `size` rows, each as lines of cells, or a dict with its solution.

    A board is a line, on which its solution and other words may follow, or lines of cells; frames, comments and empty
    lines between bands are skipped. An empty line elsewhere ends an incomplete board.
    """
    shape = sudoku_shape(size)
    text = _PROGRESS.sub("", text)
    boards, rows = [], []

    def end() -> None:
        boards.extend(["\n".join(rows)] if rows else [])
        rows.clear()

    for line, row in zip(text.splitlines(), _rows(text)):
        words = [each for each in _SEPARATOR.split(line) if len(each) == shape.cells and _CELLS.issuperset(each)]
        if words or len(row) == shape.cells:
            end()
            solved = len(words) > 1 and not set(words[1]) & {".", "0"}
            boards.append({"puzzle": words[0], "solution": words[1]} if solved else (words or [row])[0])
        elif row:
            rows.append(row)
        cells = sum(map(len, rows))
        if cells >= shape.cells or (not line.strip() and cells % (shape.size * shape.box_shape[0])):
            end()
    end()
    return boards


def encode(puzzle: Puzzle, size: int | None = None) -> np.ndarray:
    """Return tokens int8 [size * size] of a board in any form that `to_board` reads; errors as there."""
    return to_board(puzzle, size).astype(np.int8) + DIGIT_OFFSET


def decode(tokens: Sequence[int] | np.ndarray) -> str:
    """Return the board of a token array as a string, `.` for a blank.

    A predicted PAD is shown as a blank too: a model may emit it, and `validate_solution` then reports the cell.
    ValueError: a wrong number of cells, or a token outside the vocabulary.
    """
    flat = np.asarray(tokens).reshape(-1)
    sizes = {n**2: n for n in BOX_SHAPES}
    if flat.size not in sizes:
        raise ValueError(f"a board has {' or '.join(map(str, sizes))} tokens; got {flat.size}")
    shape = sudoku_shape(sizes[flat.size])
    for cell in np.flatnonzero((flat < PAD) | (flat >= shape.vocab_size))[:1]:
        raise ValueError(f"{shape.name(cell)}: token {flat[cell]}; expected 0 to {shape.vocab_size - 1}")
    return "".join("." if token <= BLANK else str(token - DIGIT_OFFSET) for token in flat.tolist())


def validate_solution(puzzle: Puzzle, solution: Puzzle) -> list[str]:
    """List the faults of `solution` as an answer to `puzzle`, both in any form that `to_board` reads."""
    clues = to_board(puzzle)
    shape = sudoku_shape(int(len(clues) ** 0.5))
    answer = to_board(solution, shape.size)
    problems = [f"{shape.name(cell)} is blank" for cell in np.flatnonzero(answer == 0)]
    for cell in np.flatnonzero((clues != 0) & (answer != clues) & (answer != 0)):
        problems.append(f"{shape.name(cell)}: clue {clues[cell]} was changed to {answer[cell]}")
    for name, cells in shape.units:
        counts = np.bincount(answer[cells], minlength=shape.size + 1)
        problems += [f"{name} holds {digit} {counts[digit]} times" for digit in np.flatnonzero(counts > 1) if digit]
    return problems


def obey_rules(boards: np.ndarray, solutions: np.ndarray) -> np.ndarray:
    """Return which of `solutions` obey the rules and the clues of `boards` (digits [rows, cells] both), bool [rows].

    Numbers that are no digits count as blanks.
    """
    shape = sudoku_shape(int(boards.shape[1] ** 0.5))
    digits = np.where((solutions > 0) & (solutions <= shape.size), solutions, 0).astype(np.uint16)
    bits = np.uint16(1) << digits
    valid = ((boards <= 0) | (boards == solutions)).all(axis=1)
    for cells in shape.cells_of_unit.T:
        valid &= np.bitwise_or.reduce(bits[:, cells], axis=1) == (1 << (shape.size + 1)) - 2
    return valid
