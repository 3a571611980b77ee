"""One form for all symmetric copies of a Sudoku puzzle, so that none of them is in two splits.

The symmetries rename digits, reorder bands, stacks, and the lines in each, and, where boxes are square, transpose: 2 *
6^8 * 9! for 9x9. The canonical form is the copy whose solution is the smallest, read row by row, and among those the
one whose clues come last. It is found without trying all: the first row of the smallest solution is 1 2 3 ..., and its
second row says how two rows of a band permute the columns, of which there are few kinds (`_pairs_of_rows`). Only the
pairs of rows of the smallest kind, in the orders of columns that show it as such, are written out and compared.
"""

import itertools
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .sudoku_rules import SudokuShape, sudoku_shape


BATCH = 1024  # puzzles at once: some dozens of arrangements of each are in memory


def canonical_forms(boards: np.ndarray, solutions: np.ndarray) -> np.ndarray:
    """The canonical copy of each puzzle: equal for symmetric copies, and for these only.

    Args:
        boards: uint8 [puzzles, cells], 0 for a blank.
        solutions: uint8 [puzzles, cells]. Copies of a puzzle with several solutions have one form for each.

    Returns:
        Boards uint8 [puzzles, cells], each a copy of its puzzle.
    """
    boards, solutions = np.asarray(boards, dtype=np.uint8), np.asarray(solutions, dtype=np.uint8)
    if not len(boards):
        return boards
    shape = sudoku_shape(int(boards.shape[1] ** 0.5))
    starts = range(0, len(boards), BATCH)
    return np.concatenate([_canonical(boards[at : at + BATCH], solutions[at : at + BATCH], shape) for at in starts])


def _canonical(boards: np.ndarray, solutions: np.ndarray, shape: SudokuShape) -> np.ndarray:
    n, box_rows = shape.size, shape.box_shape[0]
    pairs = _pairs_of_rows(n)
    grids = (solutions - 1).reshape(-1, n, n)
    given = (boards != 0).reshape(-1, n, n)
    if box_rows == n // box_rows:  # square boxes: the transposed board is a copy too
        grids, given = (np.stack([some, some.swapaxes(1, 2)], axis=1) for some in (grids, given))
    else:
        grids, given = grids[:, None], given[:, None]
    columns_of = np.argsort(grids, axis=-1)  # [puzzles, views, rows, digits]: where each digit of a row is

    # Each row as the first, each other row of its band as the second.
    first = np.repeat(np.arange(n), box_rows - 1)
    second = np.array([row // box_rows * box_rows + other for row in range(n) for other in range(box_rows)
                       if other != row % box_rows])  # fmt: skip
    permutations = np.take_along_axis(columns_of[:, :, first], grids[:, :, second].astype(np.intp), axis=-1)
    entries = np.searchsorted(pairs.codes, permutations @ pairs.powers)  # [puzzles, views, pairs]
    kinds = pairs.kinds[entries]
    puzzle, view, pair = np.nonzero(kinds == kinds.min(axis=(1, 2), keepdims=True))
    entry = entries[puzzle, view, pair]
    times = pairs.counts[entry]
    nth = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
    order = pairs.orders[np.repeat(pairs.starts[entry], times) + nth]  # [arrangements, size]
    puzzle, view, row = (np.repeat(part, times) for part in (puzzle, view, first[pair]))

    names = np.argsort(order, axis=1)[np.arange(len(order))[:, None], columns_of[puzzle, view, row]].astype(np.uint8)
    turned = np.take_along_axis(grids[puzzle, view], order[:, None, :], axis=2).reshape(len(order), -1)
    turned = np.take_along_axis(names, turned.astype(np.intp), axis=1).reshape(-1, n, n)
    # The rows of a band and the bands by their first cells: so the first row stays first, and the second is second.
    start = turned[:, :, 0].astype(np.intp)
    of_band = np.repeat(start.reshape(len(start), -1, box_rows).min(axis=2), box_rows, axis=1)
    rows = np.argsort(of_band * n + start, axis=1)[:, :, None]
    turned = np.take_along_axis(turned, rows, axis=1).reshape(-1, n * n)
    shown = np.take_along_axis(given[puzzle, view], order[:, None, :], axis=2)
    shown = np.take_along_axis(shown, rows, axis=1).reshape(-1, n * n)
    # Of each puzzle's arrangements the one with the smallest grid, and then the smallest marks of clues.
    cells = np.concatenate([turned, shown], axis=1, dtype=np.uint8) + np.uint8(1)
    ascending = np.lexsort((cells.view(f"S{2 * n * n}").reshape(-1), puzzle))
    best = ascending[np.flatnonzero(np.diff(puzzle[ascending], prepend=-1))]
    return np.where(shown[best], turned[best] + 1, 0).astype(np.uint8)


class _Pairs(NamedTuple):
    """The kinds of a second row under a first one, by its code, and the orders of columns that make it smallest.

    A pair of rows is a permutation of the columns: for each, the one where the first row has the second row's digit.
    """

    codes: np.ndarray  # scalar products of the permutations with `powers`, int64 [pairs], ascending
    kinds: np.ndarray  # rank of the smallest second row that the pair can be turned into [pairs]
    starts: np.ndarray  # of the pair's entries in `orders` [pairs]
    counts: np.ndarray  # [pairs]
    orders: np.ndarray  # columns in their new order [entries, size]
    powers: np.ndarray  # [size]


@lru_cache
def _pairs_of_rows(size: int) -> _Pairs:
    """The table for boards of a size: 12,096 pairs of rows of 9x9 boards."""
    box_cols = sudoku_shape(size).box_shape[1]
    lines, stack = np.arange(size), np.arange(size) // box_cols
    all_orders = np.array(list(itertools.permutations(lines.tolist())), dtype=np.int64)
    by_stack = stack[all_orders].reshape(len(all_orders), -1, box_cols)
    orders = all_orders[(by_stack == by_stack[:, :, :1]).all(axis=(1, 2))]  # those that keep stacks together
    powers = size ** np.arange(size - 1, -1, -1, dtype=np.int64)
    found: set[int] = set()
    codes, kinds, entries = [], [], []
    for smallest in all_orders[(stack[all_orders] != stack).all(axis=1)]:  # no column stays in its stack
        if int(smallest @ powers) in found:
            continue
        # All that can be turned into this one, which is smaller than they are, since permutations come in order.
        turned = np.take_along_axis(orders, smallest[np.argsort(orders, axis=1)], axis=1)
        codes.append(turned @ powers)
        kinds.append(np.full(len(orders), len(kinds)))
        entries.append(orders)
        found.update(codes[-1].tolist())
    code, kind, order = (np.concatenate(part) for part in (codes, kinds, entries))
    ascending = np.argsort(code, kind="stable")
    code, first, counts = np.unique(code[ascending], return_index=True, return_counts=True)
    return _Pairs(code, kind[ascending][first], first, counts, order[ascending], powers)
