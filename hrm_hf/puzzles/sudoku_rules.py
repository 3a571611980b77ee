"""The rules of Sudoku: geometry, notation, checking an answer, and a solver that proves and rates.

Two notations. A *board* is an array of digits, 0 for a blank. *Tokens* are what models see: PAD 0, blank 1, digit d as
d + 1, as in the original HRM. Making puzzles and data sets is the business of `sudoku.py`, which offers the names of
this module too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np


PAD, BLANK, DIGIT_OFFSET = 0, 1, 1
BOX_SHAPES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}

Puzzle = str | Sequence | np.ndarray


@dataclass(frozen=True)
class SudokuShape:
    """Geometry of a board of `size` x `size` cells with boxes of `box_rows` x `box_cols`; cells count row by row."""

    size: int

    def __post_init__(self):
        if self.size not in BOX_SHAPES:
            raise ValueError(f"Sudoku size is {self.size!r}; expected one of {sorted(BOX_SHAPES)}")

    @property
    def box_shape(self) -> tuple[int, int]:
        return BOX_SHAPES[self.size]

    @property
    def cells(self) -> int:
        return self.size**2

    @property
    def vocab_size(self) -> int:
        return self.size + 2

    @cached_property
    def units(self) -> list[tuple[str, list[int]]]:
        """Name and cells of each row, column and box: 3 * size entries."""
        n, (box_rows, box_cols) = self.size, self.box_shape
        grid = np.arange(self.cells).reshape(n, n)
        boxes = grid.reshape(n // box_rows, box_rows, n // box_cols, box_cols).swapaxes(1, 2).reshape(n, n)
        kinds = (("row", grid), ("column", grid.T), ("box", boxes))
        return [(f"{kind} {i + 1}", cells[i].tolist()) for kind, cells in kinds for i in range(n)]

    @cached_property
    def peers(self) -> list[list[int]]:
        """For each cell, the other cells that must hold another digit."""
        units = [set(cells) for _, cells in self.units]
        return [sorted(set().union(*(u for u in units if cell in u)) - {cell}) for cell in range(self.cells)]

    def name(self, cell: int) -> str:
        return f"row {cell // self.size + 1}, column {cell % self.size + 1}"


@lru_cache
def sudoku_shape(size: int) -> SudokuShape:
    """The geometry for `size` (4, 6 or 9), computed once."""
    return SudokuShape(size)


# ---------------------------------------------------------------------------------------------------- notation


def to_board(puzzle: Puzzle, size: int | None = None) -> np.ndarray:
    """Reads a board from a string (`.` or `0` is blank; white space is skipped), rows of digits, or a flat list.

    Args:
        puzzle: 16, 36 or 81 cells.
        size: expected size; found from the number of cells if None.

    Returns:
        uint8 [size * size], 0 for a blank.

    Raises:
        ValueError: wrong number of cells, an illegal character, or a digit above the size.
    """
    if isinstance(puzzle, str):
        cells: list[Any] = list("".join(puzzle.split()))
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
    text = "0" if cell == "." else str(cell)
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{place}: {cell!r} is no digit; expected 1 to {size}, or '.' or 0 for a blank")
    if int(text) > size:
        raise ValueError(f"{place}: digit {text} is above the board's size {size}")
    return int(text)


def encode(puzzle: Puzzle, size: int | None = None) -> np.ndarray:
    """Tokens int8 [size * size] of a board in any form that `to_board` reads; errors as there."""
    return to_board(puzzle, size).astype(np.int8) + DIGIT_OFFSET


def decode(tokens: Sequence[int] | np.ndarray) -> str:
    """The board of a token array as a string, `.` for a blank.

    A predicted PAD is shown as a blank too: a model may emit it, and `validate_solution` then reports the cell.

    Raises:
        ValueError: no board has this number of cells, or a token lies outside the vocabulary.
    """
    flat = np.asarray(tokens).reshape(-1)
    sizes = {n**2: n for n in BOX_SHAPES}
    if flat.size not in sizes:
        raise ValueError(f"a board has {' or '.join(map(str, sizes))} tokens; got {flat.size}")
    shape = sudoku_shape(sizes[flat.size])
    for cell in np.flatnonzero((flat < PAD) | (flat >= shape.vocab_size))[:1]:
        raise ValueError(f"{shape.name(cell)}: token {flat[cell]}; expected 0 to {shape.vocab_size - 1}")
    return "".join("." if token <= BLANK else str(token - DIGIT_OFFSET) for token in flat.tolist())


def decode_grid(tokens: Sequence[int] | np.ndarray) -> list[list[int]]:
    """The board of a token array as rows of digits, 0 for a blank; as `decode`."""
    board = to_board(decode(tokens))
    return board.reshape(int(len(board) ** 0.5), -1).tolist()


def validate_solution(puzzle: Puzzle, solution: Puzzle) -> list[str]:
    """Lists what is wrong with `solution` as an answer to `puzzle`; an empty list means it is valid.

    Both in any form that `to_board` reads (tokens must be decoded first).

    Raises:
        ValueError: `puzzle` or `solution` is no board, or their sizes differ.
    """
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


# ---------------------------------------------------------------------------------------------------- solver


def count_solutions(puzzle: Puzzle, limit: int = 2) -> int:
    """Number of solutions of a board, counted up to `limit`."""
    found: list[list[int]] = []
    search(to_board(puzzle).tolist(), limit, found)
    return len(found)


def solve(puzzle: Puzzle) -> np.ndarray | None:
    """The first solution, uint8 [size * size], in the order of the search below; None if there is none."""
    found: list[list[int]] = []
    search(to_board(puzzle).tolist(), 1, found)
    return masks_to_board(found[0]) if found else None


def rate(puzzle: Puzzle) -> int:
    """Difficulty: guesses that failed before the first solution was found.

    The search is fixed: naked and hidden singles until nothing changes, then a guess at the cell with the fewest
    candidates (the first such cell, row by row), digits ascending. 0 means that no guess failed.

    Raises:
        ValueError: the board has no solution.
    """
    found: list[list[int]] = []
    failed = search(to_board(puzzle).tolist(), 1, found)
    if not found:
        raise ValueError(f"the board {puzzle!r:.100} has no solution, and so no rating")
    return failed


def masks_to_board(masks: list[int]) -> np.ndarray:
    return np.array([mask.bit_length() for mask in masks], dtype=np.uint8)


def search(
    board: list[int],
    limit: int,
    found: list[list[int]],
    rng: np.random.Generator | None = None,
    order: Callable[[int, list[int]], Iterable[int]] | None = None,
) -> int:
    """Appends up to `limit` solutions to `found` and returns the number of guesses that failed on the way.

    Args:
        board: digits, 0 for a blank.
        found: gets one list of bit masks per solution (bit d - 1 is digit d); see `masks_to_board`.
        rng: tries the digits of a guess in random order; ascending if None.
        order: gives the masks of a cell's digits (arguments: cell, masks) in the order in which to try them.
    """
    shape = sudoku_shape(int(len(board) ** 0.5))
    full = (1 << shape.size) - 1
    masks = [1 << (digit - 1) if digit else full for digit in board]
    clues = [cell for cell, digit in enumerate(board) if digit]
    return _search(masks, shape, limit, found, rng, order) if _propagate(masks, clues, shape) else 0


def _search(masks: list[int], shape: SudokuShape, limit: int, found: list[list[int]], rng, order) -> int:
    """Depth-first search below a propagated board; returns how many guesses led to no solution."""
    counts = [mask.bit_count() for mask in masks]
    open_counts = [count for count in counts if count > 1]
    if not open_counts:
        found.append(masks)
        return 0
    cell = counts.index(min(open_counts))
    bits = [1 << i for i in range(shape.size) if masks[cell] >> i & 1]
    if rng is not None:
        rng.shuffle(bits)
    failed = 0
    for bit in bits if order is None else order(cell, bits):
        branch, before = masks.copy(), len(found)
        branch[cell] = bit
        if _propagate(branch, [cell], shape):
            failed += _search(branch, shape, limit, found, rng, order)
        if len(found) >= limit:
            return failed
        failed += len(found) == before
    return failed


def _propagate(masks: list[int], decided: list[int], shape: SudokuShape) -> bool:
    """Applies naked and hidden singles to `masks` in place until nothing changes; False on a contradiction.

    `decided` are the cells with one candidate whose digit the peers have not lost yet.
    """
    full, peers = (1 << shape.size) - 1, shape.peers
    while True:
        while decided:
            cell = decided.pop()
            bit = masks[cell]
            for peer in peers[cell]:
                mask = masks[peer]
                if mask & bit:
                    mask ^= bit
                    if not mask:
                        return False
                    masks[peer] = mask
                    if not mask & (mask - 1):
                        decided.append(peer)
        for _, unit in shape.units:
            once = twice = 0
            for cell in unit:
                mask = masks[cell]
                twice |= once & mask
                once |= mask
            if once != full:
                return False
            once &= ~twice
            if not once:
                continue
            for cell in unit:
                hidden = masks[cell] & once
                if hidden & (hidden - 1):
                    return False  # two digits have this cell as their only place
                if hidden and hidden != masks[cell]:
                    masks[cell] = hidden
                    decided.append(cell)
        if not decided:
            return True
