"""A plain Sudoku solver: one board at a time in Python, with the search of `hrm_hf.puzzles.sudoku_solver`.

The solver is the baseline in `benchmarks/puzzles/generation.py` and the reference in tests of the fast solver.
"""

from functools import lru_cache

import numpy as np

from hrm_hf.puzzles.sudoku_rules import Puzzle, SudokuShape, sudoku_shape, to_board


def count_solutions(puzzle: Puzzle, limit: int = 2) -> int:
    """Count the solutions of a board, up to `limit`."""
    found: list[list[int]] = []
    search(to_board(puzzle).tolist(), limit, found)
    return len(found)


def solve(puzzle: Puzzle) -> np.ndarray | None:
    """Return the first solution that the search finds, uint8 [size * size], or None if the board has no solution."""
    found: list[list[int]] = []
    search(to_board(puzzle).tolist(), 1, found)
    return masks_to_board(found[0]) if found else None


def rate(puzzle: Puzzle) -> int:
    """Rate a board by the number of failed guesses before the first solution.

    The search is deterministic: it applies naked and hidden singles until nothing changes, then guesses at the first
    cell (row by row) with the fewest candidates, trying digits in ascending order. 0 means that no guess failed.

    Raises:
        ValueError: the board has no solution.
    """
    found: list[list[int]] = []
    failed = search(to_board(puzzle).tolist(), 1, found)
    if not found:
        raise ValueError(f"the board {puzzle!r:.100} has no solution and therefore no rating")
    return failed


def masks_to_board(masks: list[int]) -> np.ndarray:
    return np.array([mask.bit_length() for mask in masks], dtype=np.uint8)


def search(
    board: list[int],
    limit: int,
    found: list[list[int]],
    rng: np.random.Generator | None = None,
) -> int:
    """Append up to `limit` solutions of a board to `found`; return the number of failed guesses.

    Args:
        board: digits, 0 for a blank.
        found: receives one list of bit masks per solution (bit d - 1 is digit d); see `masks_to_board`.
        rng: shuffles the digits of each guess; ascending order if None.
    """
    shape = sudoku_shape(int(len(board) ** 0.5))
    full = (1 << shape.size) - 1
    masks = [1 << (digit - 1) if digit else full for digit in board]
    clues = [cell for cell, digit in enumerate(board) if digit]
    return _search(masks, shape, limit, found, rng) if _propagate(masks, clues, shape) else 0


def _search(masks: list[int], shape: SudokuShape, limit: int, found: list[list[int]], rng) -> int:
    """Search depth-first from a propagated board; return the number of guesses that led to no solution."""
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
    for bit in bits:
        branch, before = masks.copy(), len(found)
        branch[cell] = bit
        if _propagate(branch, [cell], shape):
            failed += _search(branch, shape, limit, found, rng)
        if len(found) >= limit:
            return failed
        failed += len(found) == before
    return failed


def _propagate(masks: list[int], decided: list[int], shape: SudokuShape) -> bool:
    """Apply naked and hidden singles to `masks` in place until nothing changes; return False on a contradiction.

    `decided` lists the cells with one candidate whose digit is not yet removed from their peers.
    """
    full, peers = (1 << shape.size) - 1, _peers(shape)
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
                    return False  # contradiction: two digits of this unit fit only in this cell
                if hidden and hidden != masks[cell]:
                    masks[cell] = hidden
                    decided.append(cell)
        if not decided:
            return True


@lru_cache
def _peers(shape: SudokuShape) -> list[list[int]]:
    """Return the peers of each cell: the other cells in its row, column and box."""
    units = [set(cells) for _, cells in shape.units]
    return [sorted(set().union(*(u for u in units if cell in u)) - {cell}) for cell in range(shape.cells)]
