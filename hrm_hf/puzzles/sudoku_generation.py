"""Generate Sudoku puzzles with a proven unique solution, in portions that can run in parallel.

A portion is a batch of attempts with a random stream that depends only on the seed and the portion's number. The
puzzles are therefore the same for any number of processes.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..io.workers import worker_pool
from .readers import place_of_form
from .sudoku_rules import SudokuShape, sudoku_shape
from .sudoku_solver import dig, random_grids, rate_boards, search


# Minimum number of clues for a unique solution (9x9: McGuire et al., 2012).
MIN_CLUES = {4: 4, 6: 8, 9: 17}
MAX_TRIES = 1000  # attempts without a new puzzle before the number of clues is considered unreachable
# Number of attempts in each of the first portions. They are small so that the first puzzles arrive soon; larger
# portions need less time per puzzle.
FIRST_PORTIONS = (32, 128, 512)
PORTION = 2048
POOL_THRESHOLD = 2 * PORTION  # expected attempts above which worker processes save more time than they take to start


class Puzzles(NamedTuple):
    """Boards (0 for a blank), solutions and canonical forms, uint8 [puzzles, cells], and float32 ratings."""

    boards: np.ndarray
    solutions: np.ndarray
    ratings: np.ndarray
    forms: np.ndarray


def rng_of(seed: int | Sequence[int], *key: int) -> np.random.Generator:
    """Return the random generator for a seed, or for the substream `key` of the seed."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))


def generate(
    size: int, num_puzzles: int, clues: int | Sequence[int], seed: int | Sequence[int] = 0, **options: object
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the puzzles of `generate_portions` as (puzzle, solution), uint8 [size * size] each."""
    portions = generate_portions(size, num_puzzles, clues, seed, **options)
    return (pair for portion in portions for pair in zip(portion.boards, portion.solutions))


def generate_portions(
    size: int,
    num_puzzles: int,
    clues: int | Sequence[int],
    seed: int | Sequence[int] = 0,
    *,
    grids: np.ndarray | None = None,
    exclude: Iterable[bytes] = (),
    exclude_forms: Collection[bytes] = (),
    share: tuple[float, float] = (0.0, 1.0),
    workers: int = 1,
) -> Iterator[Puzzles]:
    """Yield rated puzzles with a proven unique solution, determined only by the arguments.

    Cells of a solved grid are emptied in random order, each only if the solution stays unique, until the number of
    clues is reached. All puzzles are distinct, and the same on every machine. Solutions of 4x4 puzzles come from
    `grids`; on larger boards all solutions are distinct, too.

    Args:
        size: 4, 6 or 9.
        clues: Number of clues, or the lowest and highest number, drawn uniformly for each attempt. Attempts that do
            not reach their number are dropped, so numbers below 25 (9x9) are rarer than others.
        seed: Seed of a Philox generator, or a sequence of seeds.
        grids: Solutions to draw from, digits [G, 16], for 4x4 only; all 288 if None.
        exclude: Solutions (bytes of a uint8 board) to avoid.
        exclude_forms: Canonical forms (bytes) of puzzles to avoid, together with their symmetric copies.
        share: Keep only puzzles with `place_of_form` in this half-open range.
        workers: Number of processes, started only if there is enough work; 1 uses this process. A program that uses
            more than one needs `if __name__ == "__main__"`.

    Raises:
        ValueError: If the number of clues is impossible.
        RuntimeError: If `MAX_TRIES` attempts in a row yield no new puzzle with this number of clues.
    """
    low, high = (clues, clues) if isinstance(clues, int) else clues
    least, most = MIN_CLUES[sudoku_shape(size).size], size**2
    if not least <= low <= high <= most:
        raise ValueError(f"clues={clues}: a {size}x{size} puzzle with one solution has {least} to {most} clues")
    if size == 4:
        grids = all_grids_4x4() if grids is None else np.asarray(grids, dtype=np.uint8)
    stream = _Stream(size, low, high, tuple(np.atleast_1d(seed).tolist()), grids)
    excluded, seen = set(exclude), set()

    def is_new(board: np.ndarray, solution: np.ndarray, form: np.ndarray) -> bool:
        key = (board if size == 4 else solution).tobytes()  # 4x4 boards have few solutions, so puzzles may share one
        if solution.tobytes() in excluded or key in seen or form.tobytes() in exclude_forms:
            return False
        if not share[0] <= place_of_form(form.tobytes()) < share[1]:
            return False
        seen.add(key)
        return True

    return _generate(stream, num_puzzles, is_new, workers)


def _generate(stream: "_Stream", num_puzzles: int, is_new: Callable[..., bool], workers: int) -> Iterator[Puzzles]:
    missing, fruitless, tried, number, pool = num_puzzles, 0, 0, 0, None
    with contextlib.ExitStack() as stack:
        while missing:
            ahead = missing * tried / max(num_puzzles - missing, 1)  # attempts still needed at this success rate
            if pool is None and workers > 1 and ahead > POOL_THRESHOLD and number >= len(FIRST_PORTIONS):
                pool = stack.enter_context(worker_pool(workers, __name__))
            numbers = range(number, number + (min(workers, math.ceil(ahead / PORTION)) if pool else 1))
            number = numbers.stop
            for attempts, puzzles in (pool.map if pool else map)(stream.draw, numbers):
                candidates = enumerate(zip(puzzles.boards, puzzles.solutions, puzzles.forms))
                new = list(itertools.islice((row for row, puzzle in candidates if is_new(*puzzle)), missing))
                missing, tried = missing - len(new), tried + attempts
                fruitless = 0 if new else fruitless + attempts
                if missing and fruitless >= MAX_TRIES:
                    raise RuntimeError(
                        f"no new {stream.size}x{stream.size} puzzle with {stream.low} to {stream.high} clues in "
                        f"{MAX_TRIES} attempts; found only {num_puzzles - missing} of {num_puzzles}; use more clues"
                    )
                if new:
                    yield Puzzles(*(array[np.array(new)] for array in puzzles))


@lru_cache
def all_grids_4x4() -> np.ndarray:
    """Return all solved 4x4 boards as a read-only array, uint8 [288, 16]."""
    grids = search(np.zeros((1, 16), dtype=np.uint8), limit=288).solutions[0]
    grids.flags.writeable = False
    return grids


class _Stream(NamedTuple):
    """Settings of a random stream, which determine its puzzles."""

    size: int
    low: int
    high: int
    seed: tuple[int, ...]
    grids: np.ndarray | None

    def draw(self, number: int) -> tuple[int, Puzzles]:
        """Generate one batch of puzzles. Return the number of attempts and the puzzles found."""
        attempts = FIRST_PORTIONS[number] if number < len(FIRST_PORTIONS) else PORTION
        rng = rng_of(self.seed, number)
        if self.grids is None:
            solutions = random_grids(self.size, attempts, rng)
        else:
            solutions = self.grids[rng.integers(len(self.grids), size=attempts)]
        targets = rng.integers(self.low, self.high + 1, attempts)
        orders = rng.permuted(np.tile(np.arange(self.size**2), (attempts, 1)), axis=1)
        boards, reached = dig(solutions, orders, targets)
        boards, solutions = boards[reached], solutions[reached]
        ratings, forms = rate_boards(boards).astype(np.float32), canonical_forms(boards, solutions)
        return attempts, Puzzles(boards, solutions, ratings, forms)


BATCH = 1024  # puzzles per batch, limited because dozens of arrangements of each puzzle are in memory at once


def canonical_forms(boards: np.ndarray, solutions: np.ndarray) -> np.ndarray:
    """Return the canonical form of each puzzle. Two forms are equal iff the puzzles are symmetric copies.

    The symmetries permute digits, bands, stacks and the lines within them, and transpose boards with square boxes:
    2 * 6^8 * 9! for 9x9. The canonical form is the copy with the smallest solution, read row by row. Ties are broken
    by the smallest clue mask. There is no need to try all symmetries: the first row of the smallest solution is
    1 2 3 ..., and its second row depends only on how two rows of a band permute the columns. There are few kinds of
    such permutations (`_pairs_of_rows`), and only the smallest is expanded. Arrays are uint8 [puzzles, cells].
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
    if box_rows == n // box_rows:  # with square boxes, the transposed board is also a symmetric copy
        grids, given = (np.stack([some, some.swapaxes(1, 2)], axis=1) for some in (grids, given))
    else:
        grids, given = grids[:, None], given[:, None]
    columns_of = np.argsort(grids, axis=-1)  # column of each digit in each row, [puzzles, views, rows, digits]

    # All pairs of rows within a band, in both orders.
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
    # Sort the rows within each band, and the bands, by first cell. This keeps the chosen first and second rows.
    start = turned[:, :, 0].astype(np.intp)
    of_band = np.repeat(start.reshape(len(start), -1, box_rows).min(axis=2), box_rows, axis=1)
    rows = np.argsort(of_band * n + start, axis=1)[:, :, None]
    turned = np.take_along_axis(turned, rows, axis=1).reshape(-1, n * n)
    shown = np.take_along_axis(given[puzzle, view], order[:, None, :], axis=2)
    shown = np.take_along_axis(shown, rows, axis=1).reshape(-1, n * n)
    # For each puzzle, select the lexicographically smallest grid; the smallest clue mask breaks ties.
    cells = np.concatenate([turned, shown], axis=1, dtype=np.uint8) + np.uint8(1)
    ascending = np.lexsort((cells.view(f"S{2 * n * n}").reshape(-1), puzzle))
    best = ascending[np.flatnonzero(np.diff(puzzle[ascending], prepend=-1))]
    return np.where(shown[best], turned[best] + 1, 0).astype(np.uint8)


class _Pairs(NamedTuple):
    """Row pairs that a band can have, each with the column orders that make its second row smallest.

    A pair is a permutation that maps each column to the column where the first row has the second row's digit.
    """

    codes: np.ndarray  # each permutation as one number, `permutation @ powers`, in ascending order, int64 [pairs]
    kinds: np.ndarray  # symmetry class of each row pair [pairs], numbered in order of its smallest code
    starts: np.ndarray  # index in `orders` where the column orders of each row pair start [pairs]
    counts: np.ndarray  # number of column orders of each row pair [pairs]
    orders: np.ndarray  # column orders of all row pairs [entries, size]
    powers: np.ndarray  # [size]


@lru_cache
def _pairs_of_rows(size: int) -> _Pairs:
    """Build the table of row pairs for a board size (12,096 pairs for 9x9 boards)."""
    box_cols = sudoku_shape(size).box_shape[1]
    lines, stack = np.arange(size), np.arange(size) // box_cols
    all_orders = np.array(list(itertools.permutations(lines.tolist())), dtype=np.int64)
    by_stack = stack[all_orders].reshape(len(all_orders), -1, box_cols)
    orders = all_orders[(by_stack == by_stack[:, :, :1]).all(axis=(1, 2))]  # keep columns of a stack together
    powers = size ** np.arange(size - 1, -1, -1, dtype=np.int64)
    found: set[int] = set()
    codes, kinds, entries = [], [], []
    for smallest in all_orders[(stack[all_orders] != stack).all(axis=1)]:  # no digit repeats in a box
        if int(smallest @ powers) in found:
            continue
        # Find all pairs symmetric to `smallest`. None of them has a smaller code, because `all_orders` is ascending.
        turned = np.take_along_axis(orders, smallest[np.argsort(orders, axis=1)], axis=1)
        codes.append(turned @ powers)
        kinds.append(np.full(len(orders), len(kinds)))
        entries.append(orders)
        found.update(codes[-1].tolist())
    code, kind, order = (np.concatenate(part) for part in (codes, kinds, entries))
    ascending = np.argsort(code, kind="stable")
    code, first, counts = np.unique(code[ascending], return_index=True, return_counts=True)
    return _Pairs(code, kind[ascending][first], first, counts, order[ascending], powers)
