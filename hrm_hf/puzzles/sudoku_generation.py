"""Sudoku puzzles with a proven unique solution, in any number: a stream of portions that several processes may draw.

A portion is a number of attempts made together (`sudoku_batch.py`), with a random stream of its own that hangs on the
seed and the portion's number alone. So the puzzles are the same whatever the number of processes, and a portion that
an interrupted build has stored need not be drawn again.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np

from ..io.complete_files import complete_file
from ..io.workers import worker_pool
from .sources import place_of_form
from .sudoku_batch import dig, random_grids, rate_boards
from .sudoku_rules import masks_to_board, search, sudoku_shape
from .sudoku_symmetry import canonical_forms


# Fewest clues of any puzzle with one solution (9x9: McGuire et al., 2012).
MIN_CLUES = {4: 4, 6: 8, 9: 17}
MAX_TRIES = 1000  # attempts at one puzzle before its number of clues is called unreachable
# Attempts of the first portions: a few puzzles are soon made, and many with little overhead.
FIRST_PORTIONS = (32, 128, 512)
PORTION = 2048
POOL_PAYS = 2 * PORTION  # attempts ahead from which the seconds until processes have started are worth it
WHOLE = (0.0, 1.0)  # a share of all puzzles
VERSION = 1  # of what a portion holds: stored portions of other versions are not taken up


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

    def take(self, rows: np.ndarray) -> "Puzzles":
        return Puzzles(*(array[rows] for array in self))


def rng_of(seed: int | Sequence[int], *key: int) -> np.random.Generator:
    """The random stream of a seed, or of one of its parts."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key)))


def clue_range(size: int, clues: int | Sequence[int]) -> tuple[int, int]:
    """The lowest and highest number of clues. Raises ValueError if no puzzle of this size has so few or many."""
    low, high = (clues, clues) if isinstance(clues, int) else clues
    least, most = MIN_CLUES[sudoku_shape(size).size], size**2
    if not least <= low <= high <= most:
        raise ValueError(
            f"clues is {clues}; a {size}x{size} puzzle with one solution has {least} to {most} clues, lowest first"
        )
    return low, high


def generate(
    size: int,
    num_puzzles: int,
    clues: int | Sequence[int],
    seed: int | Sequence[int] = 0,
    *,
    grids: np.ndarray | None = None,
    exclude: Iterable[bytes] = (),
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields puzzles with a proven unique solution; the same ones for the same arguments on every machine.

    Cells of a solved grid are emptied in random order, each only if the solution stays unique, until the number of
    clues is reached. No puzzle comes twice. 4x4 puzzles take their solutions from `grids`; for larger boards every
    puzzle has a solution of its own.

    Args:
        size: 4, 6 or 9.
        num_puzzles: how many.
        clues: number of given cells, or the lowest and highest number, drawn uniformly for each attempt. An attempt
            that does not come down to its number is given up, so of a range that starts below 25 (9x9) the lowest
            numbers are rarer than the others.
        seed: seed of a Philox generator, or a sequence of seeds.
        grids: digits [G, 16] to draw from, 4x4 only; all 288 if None.
        exclude: solutions (bytes of a uint8 board) that must not be used.

    Yields:
        Puzzle and solution, uint8 [size * size], 0 for a blank.

    Raises:
        ValueError: impossible number of clues.
        RuntimeError: `MAX_TRIES` attempts gave no new puzzle with this number of clues.
    """
    portions = generate_portions(size, num_puzzles, clues, seed, grids=grids, exclude=exclude)
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
    share: tuple[float, float] = WHOLE,
    workers: int = 1,
    store: Path | None = None,
) -> Iterator[Puzzles]:
    """The puzzles of `generate`, rated, in the portions in which they are made.

    Args:
        exclude_forms: canonical forms (bytes) of puzzles of which no symmetric copy must come.
        share: only puzzles whose `place_of_form` is in this range, its end not included.
        workers: processes that draw portions, started only if there is enough to draw; 1 is this process. A program
            that asks for more needs `if __name__ == "__main__"`.
        store: folder that keeps portions, and from which those that an interrupted run has left are taken.
        The others, and what is raised: see `generate`. RuntimeError also if a worker process died.
    """
    low, high = clue_range(size, clues)
    if grids is not None and size != 4:
        raise ValueError(f"grids can only be given for size 4, not {size}: larger boards get random grids")
    if size == 4:
        grids = all_grids_4x4() if grids is None else np.asarray(grids, dtype=np.uint8)
    source = _Source(size, low, high, tuple(np.atleast_1d(seed).tolist()), grids, store)
    allowed = _Allowed(set(exclude), exclude_forms, share, of_boards=size == 4)
    return _generate(source, num_puzzles, allowed, workers)


@dataclass
class _Allowed:
    """Which puzzles may come: see `generate_portions`. `of_boards`: no board twice, instead of no solution."""

    solutions: set[bytes]
    forms: Collection[bytes]
    share: tuple[float, float]
    of_boards: bool
    boards: set[bytes] = field(default_factory=set)

    def take(self, board: np.ndarray, solution: np.ndarray, form: np.ndarray) -> bool:
        """Whether this puzzle may come; it then may not come again."""
        if solution.tobytes() in self.solutions or form.tobytes() in self.forms or board.tobytes() in self.boards:
            return False
        if self.share != WHOLE and not self.share[0] <= place_of_form(form.tobytes()) < self.share[1]:
            return False
        if self.of_boards:
            self.boards.add(board.tobytes())
        else:
            self.solutions.add(solution.tobytes())
        return True


def _generate(source: "_Source", num_puzzles: int, allowed: _Allowed, workers: int) -> Iterator[Puzzles]:
    missing, fruitless = num_puzzles, 0
    drawn = source.draw_all(workers, lambda: missing)
    while missing:
        attempts, puzzles = next(drawn)
        candidates = enumerate(zip(puzzles.boards, puzzles.solutions, puzzles.forms))
        new = list(islice((row for row, puzzle in candidates if allowed.take(*puzzle)), missing))
        missing -= len(new)
        fruitless = 0 if new else fruitless + attempts
        if fruitless >= MAX_TRIES:
            raise RuntimeError(
                f"no new {source.size}x{source.size} puzzle with {source.low} to {source.high} clues in {MAX_TRIES} "
                f"attempts, after {num_puzzles - missing} of {num_puzzles}; ask for more clues or fewer puzzles"
            )
        if new:
            yield puzzles.take(np.array(new))


@lru_cache
def all_grids_4x4() -> np.ndarray:
    """All solved 4x4 boards, uint8 [288, 16], read-only."""
    found: list[list[int]] = []
    search([0] * 16, 289, found)
    grids = np.stack([masks_to_board(masks) for masks in found])
    grids.flags.writeable = False
    return grids


# ---------------------------------------------------------------------------------------------------- portions


class _Source(NamedTuple):
    """All that decides the puzzles of a stream, and where its portions are kept."""

    size: int
    low: int
    high: int
    seed: tuple[int, ...]
    grids: np.ndarray | None
    store: Path | None

    def attempts(self, number: int) -> int:
        return FIRST_PORTIONS[number] if number < len(FIRST_PORTIONS) else PORTION

    def file(self, number: int) -> Path | None:
        """Its name holds all that decides the portion: of another seed or range it is another file."""
        if self.store is None:
            return None
        grids = None if self.grids is None else self.grids.tobytes()
        content = repr((VERSION, self.size, self.low, self.high, self.seed, grids, self.attempts(number), number))
        return self.store / f"{number:05d}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.npz"

    def draw_all(self, workers: int, missing: Callable[[], int]) -> Iterator[tuple[int, Puzzles]]:
        """Attempts and puzzles of every portion, in order and without end; `missing()` are the puzzles still wanted.

        Portions are drawn ahead only as far as the yield so far says that they will be needed.
        """
        wanted, tried, number, pool = missing(), 0, 0, None
        waiting: deque = deque()  # attempts of a portion, and its future
        try:
            while True:
                rate = max(wanted - missing(), 1) / tried if tried else 1.0
                if pool is None and workers > 1 and missing() / rate > POOL_PAYS and number >= len(FIRST_PORTIONS):
                    pool = worker_pool(workers, __name__)
                if pool is None:
                    attempts, puzzles = self.attempts(number), self.portion(number)
                    number += 1
                else:
                    ahead = math.ceil(missing() / rate / PORTION)
                    while len(waiting) < min(ahead, 2 * workers):
                        waiting.append((self.attempts(number), pool.submit(self.portion, number)))
                        number += 1
                    attempts, future = waiting.popleft()
                    puzzles = future.result()
                tried += attempts
                yield attempts, puzzles
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a worker process died (killed, or out of memory: try fewer workers); the same command goes on where "
                "this one ended"
            ) from error
        finally:
            if pool is not None:
                pool.shutdown(cancel_futures=True)

    def portion(self, number: int) -> Puzzles:
        """The puzzles of a portion, from the store if they are there."""
        file = self.file(number)
        if file is not None and file.exists():
            return _read(file)
        puzzles = self.draw(number)
        if file is not None:
            with complete_file(file) as stream:
                np.savez(stream, **puzzles._asdict())
        return puzzles

    def draw(self, number: int) -> Puzzles:
        attempts, rng = self.attempts(number), rng_of(self.seed, number)
        if self.grids is None:
            solutions = random_grids(self.size, attempts, rng)
        else:
            solutions = self.grids[rng.integers(len(self.grids), size=attempts)]
        targets = rng.integers(self.low, self.high + 1, attempts)
        orders = rng.permuted(np.tile(np.arange(self.size**2), (attempts, 1)), axis=1)
        boards, reached = dig(solutions, orders, targets)
        boards, solutions = boards[reached], solutions[reached]
        return Puzzles(boards, solutions, rate_boards(boards).astype(np.float32), canonical_forms(boards, solutions))


def _read(file: Path) -> Puzzles:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return Puzzles(*(arrays[name] for name in Puzzles._fields))
    except (BadZipFile, KeyError, ValueError, EOFError) as error:
        raise ValueError(f"{file} is no portion of puzzles ({error}); delete it, it will be made anew") from error
