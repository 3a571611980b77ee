"""Sudoku puzzles with a proven unique solution, in portions that several processes may draw.

A portion is a number of attempts made together, with a random stream that depends only on the seed and the portion's
number. The puzzles are therefore the same for any number of processes.
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


# Fewest clues of any puzzle with one solution (9x9: McGuire et al., 2012).
MIN_CLUES = {4: 4, 6: 8, 9: 17}
MAX_TRIES = 1000  # attempts at one puzzle before its number of clues is called unreachable
# Attempts of the first portions: a few puzzles are soon made, and many with little overhead.
FIRST_PORTIONS = (32, 128, 512)
PORTION = 2048
POOL_PAYS = 2 * PORTION  # attempts ahead from which the seconds until processes have started are worth it


class Puzzles(NamedTuple):
    """Boards (0 for a blank), solutions and `canonical_forms`, uint8 [puzzles, cells], and ratings, float32."""

    boards: np.ndarray
    solutions: np.ndarray
    ratings: np.ndarray
    forms: np.ndarray


def rng_of(seed: int | Sequence[int], *key: int) -> np.random.Generator:
    """Return the random stream of a seed, or of one of its parts."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))


def generate(
    size: int, num_puzzles: int, clues: int | Sequence[int], seed: int | Sequence[int] = 0, **options: object
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield puzzle and solution, uint8 [size * size] each, of `generate_portions`."""
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
    """Yield puzzles with a proven unique solution, rated; the same ones for the same arguments on every machine.

    Cells of a solved grid are emptied in random order, each only if the solution stays unique, until the number of
    clues is reached. No puzzle comes twice. 4x4 puzzles take their solutions from `grids`; for larger boards every
    puzzle has its own solution.

    Args:
        size: 4, 6 or 9.
        clues: number of given cells, or the lowest and highest number, drawn uniformly for each attempt. Attempts
            that do not reach their number are dropped, so numbers below 25 (9x9) are rarer than the others.
        seed: seed of a Philox generator, or a sequence of seeds.
        grids: digits [G, 16] to draw from, 4x4 only; all 288 if None.
        exclude: solutions (bytes of a uint8 board) that must not be used.
        exclude_forms: canonical forms (bytes) of puzzles whose symmetric copies must not come.
        share: only puzzles whose `place_of_form` is in this range, its end not included.
        workers: processes that draw portions, started only if there is enough to draw; 1 is this process. A program
            that asks for more needs `if __name__ == "__main__"`.

    Raises:
        ValueError: impossible number of clues.
        RuntimeError: `MAX_TRIES` attempts gave no new puzzle with this number of clues.
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
        key = (board if size == 4 else solution).tobytes()  # of 4x4, solutions recur
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
            ahead = missing * tried / max(num_puzzles - missing, 1)  # attempts, by the yield so far
            if pool is None and workers > 1 and ahead > POOL_PAYS and number >= len(FIRST_PORTIONS):
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
                        f"{MAX_TRIES} attempts, after {num_puzzles - missing} of {num_puzzles}; use more clues"
                    )
                if new:
                    yield Puzzles(*(array[np.array(new)] for array in puzzles))


@lru_cache
def all_grids_4x4() -> np.ndarray:
    """All solved 4x4 boards, uint8 [288, 16], read-only."""
    grids = search(np.zeros((1, 16), dtype=np.uint8), limit=288).solutions[0]
    grids.flags.writeable = False
    return grids


class _Stream(NamedTuple):
    """Everything that decides the puzzles of a stream."""

    size: int
    low: int
    high: int
    seed: tuple[int, ...]
    grids: np.ndarray | None

    def draw(self, number: int) -> tuple[int, Puzzles]:
        """Return the number of attempts of one portion, and its puzzles."""
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


BATCH = 1024  # puzzles at once: some dozens of arrangements of each are in memory


def canonical_forms(boards: np.ndarray, solutions: np.ndarray) -> np.ndarray:
    """Return the canonical copy of each puzzle: equal for symmetric copies, and for these only.

    The symmetries rename digits, reorder bands, stacks, and the lines in each, and, where boxes are square, transpose:
    2 * 6^8 * 9! for 9x9. The canonical form is the copy with the smallest solution, read row by row, and among those
    the one whose clues come last. It is found without trying all: the first row of the smallest solution is 1 2 3 ...,
    and its second row says how two rows of a band permute the columns, which happens in few ways (`_pairs_of_rows`).
    Only the pairs of rows of the smallest kind are written out and compared. Arrays are uint8 [puzzles, cells].
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
    """Kinds of a second row under a first one, by its code, and the orders of columns that make it smallest.

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
    """Build the table for boards of a size: 12,096 pairs of rows of 9x9 boards."""
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
