"""Sudoku puzzles with a proven unique solution, in portions that several processes may draw.

A portion is a number of attempts made together, with a random stream of its own that depends only on the seed and the
portion's number. The puzzles are therefore the same for any number of processes.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..io.workers import worker_pool
from .sources import place_of_form
from .sudoku_rules import sudoku_shape
from .sudoku_solver import dig, random_grids, rate_boards, search
from .sudoku_symmetry import canonical_forms


# Fewest clues of any puzzle with one solution (9x9: McGuire et al., 2012).
MIN_CLUES = {4: 4, 6: 8, 9: 17}
MAX_TRIES = 1000  # attempts at one puzzle before its number of clues is called unreachable
# Attempts of the first portions: a few puzzles are soon made, and many with little overhead.
FIRST_PORTIONS = (32, 128, 512)
PORTION = 2048
POOL_PAYS = 2 * PORTION  # attempts ahead from which the seconds until processes have started are worth it


class Puzzles(NamedTuple):
    """Puzzles as arrays.

    Attributes:
        boards, solutions: uint8 [puzzles, cells], 0 for a blank.
        ratings: `rate` of each, float32 [puzzles].
        forms: `canonical_forms`, uint8 [puzzles, cells].
    """

    boards: np.ndarray
    solutions: np.ndarray
    ratings: np.ndarray
    forms: np.ndarray


def rng_of(seed: int | Sequence[int], *key: int) -> np.random.Generator:
    """The random stream of a seed, or of one of its parts."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))


def generate(
    size: int, num_puzzles: int, clues: int | Sequence[int], seed: int | Sequence[int] = 0, **options: object
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield puzzle and solution, uint8 [size * size] each, of `generate_portions`; arguments and errors as there."""
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
    puzzle has a solution of its own.

    Args:
        size: 4, 6 or 9.
        clues: number of given cells, or the lowest and highest number, drawn uniformly for each attempt. An attempt
            that does not come down to its number is given up, so of a range that starts below 25 (9x9) the lowest
            numbers are rarer than the others.
        seed: seed of a Philox generator, or a sequence of seeds.
        grids: digits [G, 16] to draw from, 4x4 only; all 288 if None.
        exclude: solutions (bytes of a uint8 board) that must not be used.
        exclude_forms: canonical forms (bytes) of puzzles of which no symmetric copy must come.
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
                        f"{MAX_TRIES} attempts, after {num_puzzles - missing} of {num_puzzles}; ask for more clues or "
                        "fewer puzzles"
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
    """All that decides the puzzles of a stream."""

    size: int
    low: int
    high: int
    seed: tuple[int, ...]
    grids: np.ndarray | None

    def draw(self, number: int) -> tuple[int, Puzzles]:
        """The number of attempts of one portion, and its puzzles."""
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
