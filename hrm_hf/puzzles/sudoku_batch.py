"""Sudoku by the hundred: a solver in numpy that moves many boards at once, for making and rating puzzles.

A board's candidates are bit planes, one a digit: uint32 [digits, bands, boards]. A word holds the rows of a band of
boxes, each row its columns and a guard bit above them, so that one subtraction tells for all its rows whether they
hold no, one or several candidates. `propagate` applies naked and hidden singles to all boards; what guesses,
backtracks and answers is `Lanes`. Results are those of the solver in `sudoku_rules.py`, which goes board by board, and
the same on every machine: only integers are computed.
"""

from functools import cached_property, lru_cache

import numpy as np

from .sudoku_rules import SudokuShape, sudoku_shape


BATCH = 2048  # boards that move together: fewer pay for each call of numpy, more leave the processor's cache
COMPACT = 0.75  # lanes are moved together when this share of them is still busy

Pair = tuple[np.ndarray, np.ndarray]  # bits that occur at least once, and at least twice


class Planes:
    """Geometry of the bit planes of one shape of board, and the way from boards to planes and back."""

    def __init__(self, shape: SudokuShape):
        self.size, (self.box_rows, self.box_cols) = shape.size, shape.box_shape
        self.bands, self.width = shape.size // self.box_rows, shape.size + 1
        self.columns = (1 << self.size) - 1  # the lowest row of a word
        self.every_row = sum(1 << self.width * row for row in range(self.box_rows))  # times a row: all rows hold it
        self.full = self.columns * self.every_row
        self.guards = self.every_row << self.size
        self.every_box = sum(1 << column for column in range(0, self.size, self.box_cols))
        self.box_width = (1 << self.box_cols) - 1  # times a box's lowest column: all its columns
        row, column = np.divmod(np.arange(shape.cells), self.size)
        self.band = row // self.box_rows
        self.shift = (row % self.box_rows * self.width + column).astype(np.uint32)

    @cached_property
    def bits(self) -> np.ndarray:
        """Words with the one bit of each cell, uint32 [cells]."""
        return np.left_shift(np.uint32(1), self.shift)

    @cached_property
    def cell_of_bit(self) -> np.ndarray:
        """The cell of each bit of each band's word, int64 [bands, 33]; 0 where there is none."""
        table = np.zeros((self.bands, 33), dtype=np.intp)
        table[self.band, self.shift] = np.arange(len(self.shift))
        return table

    def pack(self, cells: np.ndarray) -> np.ndarray:
        """Words [bands, boards] of the marked cells, bool [boards, cells]."""
        words = np.where(cells, self.bits, np.uint32(0)).reshape(len(cells), self.bands, self.box_rows * self.size)
        return np.ascontiguousarray(np.bitwise_or.reduce(words, axis=2).T)

    def of_boards(self, boards: np.ndarray) -> np.ndarray:
        """Planes [digits, bands, boards] of boards [boards, cells]: a blank allows every digit."""
        digits = np.arange(1, self.size + 1)[:, None, None]
        return np.stack([self.pack((boards == digit) | (boards == 0)) for digit in digits])

    def to_boards(self, planes: np.ndarray) -> np.ndarray:
        """Boards uint8 [boards, cells] of planes with one digit in each cell."""
        found = self.candidates(planes)
        return np.einsum("dcb,d->bc", found, np.arange(1, self.size + 1, dtype=np.uint8), dtype=np.uint8)

    def candidates(self, planes: np.ndarray) -> np.ndarray:
        """0 or 1 for each digit, cell and board, uint8 [digits, cells, boards]."""
        return ((planes[:, self.band] >> self.shift[:, None]) & 1).astype(np.uint8)


@lru_cache
def bit_planes(size: int) -> Planes:
    return Planes(sudoku_shape(size))


def propagate(planes: np.ndarray, geometry: Planes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One round of naked and hidden singles.

    Args:
        planes: candidates uint32 [digits, bands, boards].

    Returns:
        The candidates that are left; which boards contradict the rules, bool [boards]; and which have more than one
        candidate in some cell of `planes`, bool [boards].
    """
    g = geometry
    in_cell, often_in_cell = _pair(planes)
    lowered = (planes | g.guards) - g.every_row
    often_in_row = ((planes & lowered) + g.full) & g.guards
    often_in_row -= often_in_row >> g.size
    by_column = _pair_of_rows(planes, g)
    in_column, often_in_column = _pair_of_bands(by_column)
    in_box, often_in_box = _pair_of_boxes(by_column, g)
    once_in_band = (in_column & ~often_in_column)[:, None] | (in_box & ~often_in_box) * g.box_width
    decided = planes & (~often_in_row | ~often_in_cell | once_in_band * g.every_row)
    wrong = (in_cell ^ g.full) | _union((lowered & g.guards) ^ g.guards) | _union(in_box ^ g.every_box)
    wrong |= _union(in_column ^ g.columns)

    # Two of a digit in a row, column or box, or two digits in a cell: what is decided contradicts itself.
    decided_cells, twice_in_cell = _pair(decided)
    lowered = (decided | g.guards) - g.every_row
    by_column = _pair_of_rows(decided, g)
    in_column, twice_in_column = _pair_of_bands(by_column)
    in_box, twice_in_box = _pair_of_boxes(by_column, g)
    wrong |= twice_in_cell | _union(decided & lowered) | _union(twice_in_box) | _union(twice_in_column)
    peers = (in_column[:, None] | in_box * g.box_width) * g.every_row
    rows = lowered & g.guards
    peers |= rows - (rows >> g.size)
    left = (planes & ~(peers | decided_cells)) | decided
    return left, np.bitwise_or.reduce(wrong, axis=0) != 0, np.bitwise_or.reduce(often_in_cell, axis=0) != 0


def _union(words: np.ndarray) -> np.ndarray:
    return np.bitwise_or.reduce(words, axis=0)


def _pair(parts) -> Pair:
    """Which bits occur at least once and at least twice in `parts`."""
    once, twice = parts[0].copy(), np.zeros_like(parts[0])
    for part in parts[1:]:
        twice |= once & part
        once |= part
    return once, twice


def _exactly_two(planes: np.ndarray) -> np.ndarray:
    """The cells with two candidates, [bands, boards]."""
    once, twice, often = planes[0].copy(), *np.zeros((2, *planes.shape[1:]), dtype=np.uint32)
    for plane in planes[1:]:
        often |= twice & plane
        twice |= once & plane
        once |= plane
    return twice & ~often


def _pair_of_rows(planes: np.ndarray, g: Planes) -> Pair:
    """The columns of each band that hold candidates, from the lowest bit: [digits, bands, boards]."""
    return _pair([(planes >> g.width * row) & g.columns for row in range(g.box_rows)])


def _joined(pairs: list[Pair]) -> Pair:
    once, twice = pairs[0][0].copy(), pairs[0][1].copy()
    for more, often in pairs[1:]:
        twice |= often | (once & more)
        once |= more
    return once, twice


def _pair_of_bands(by_column: Pair) -> Pair:
    """Columns of the board: [digits, boards]."""
    return _joined([(by_column[0][:, band], by_column[1][:, band]) for band in range(by_column[0].shape[1])])


def _pair_of_boxes(by_column: Pair, g: Planes) -> Pair:
    """The boxes of each band, each at the bit of its lowest column: [digits, bands, boards]."""
    return _joined([tuple((bits >> column) & g.every_box for bits in by_column) for column in range(g.box_cols)])


class Lanes:
    """Depth-first searches on many boards in step; each lane has its board and its stack of what is left to try.

    `advance` propagates once and says which lanes came to an end of a branch. Callers then `guess`, `back_track` or
    `load` another board: that is what differs between filling a grid, proving a puzzle and rating it.
    """

    def __init__(self, planes: np.ndarray, geometry: Planes):
        self.geometry, self.planes = geometry, planes
        lanes, depth = planes.shape[-1], len(geometry.bits)  # each guess decides a cell
        self.depth = np.zeros(lanes, dtype=np.intp)
        self.stack = np.empty((depth, lanes, *planes.shape[:2]), dtype=np.uint32)
        self.stacked_cells = np.empty((depth, lanes), dtype=np.intp)

    def advance(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lanes (indices) that met a contradiction, that are solved, and that need a guess."""
        left, dead, is_open = propagate(self.planes, self.geometry)
        at_rest = ~np.bitwise_or.reduce(np.bitwise_or.reduce(left ^ self.planes, axis=0), axis=0).astype(bool)
        self.planes = left
        at_rest &= ~dead
        return np.flatnonzero(dead), np.flatnonzero(at_rest & ~is_open), np.flatnonzero(at_rest & is_open)

    def load(self, lanes: np.ndarray, planes: np.ndarray) -> None:
        self.planes[:, :, lanes], self.depth[lanes] = planes, 0

    def choices(self, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first cell with the fewest candidates of each lane [k], and its candidates, 0 or 1 [digits, k]."""
        g, planes = self.geometry, self.planes[:, :, lanes]
        cells = np.empty(len(lanes), dtype=np.intp)
        of_two = _exactly_two(planes)  # almost always some cell has no more, and words tell the first of them
        band = (of_two != 0).argmax(axis=0)
        word = of_two[band, np.arange(len(lanes))]
        cells = g.cell_of_bit[band, np.bitwise_count((word & -word) - np.uint32(1))]
        others = np.flatnonzero(word == 0)
        if len(others):
            counts = g.candidates(planes[:, :, others]).sum(axis=0, dtype=np.uint8)
            cells[others] = np.where(counts > 1, counts, 255).argmin(axis=0)
        return cells, (planes[:, g.band[cells], np.arange(len(lanes))] & g.bits[cells]) != 0

    def guess(self, lanes: np.ndarray, cells: np.ndarray, digits: np.ndarray) -> None:
        """Decides a cell of each lane (digits count from 0) and keeps the board without that candidate for later."""
        bits, bands = self.geometry.bits[cells], self.geometry.band[cells]
        depth = self.depth[lanes]
        self.planes[digits, bands, lanes] &= ~bits
        self.stack[depth, lanes] = np.moveaxis(self.planes[:, :, lanes], -1, 0)
        self.stacked_cells[depth, lanes] = cells
        self.depth[lanes] += 1
        self.decide(lanes, cells, digits)

    def decide(self, lanes: np.ndarray, cells: np.ndarray, digits: np.ndarray) -> None:
        bits, bands = self.geometry.bits[cells], self.geometry.band[cells]
        self.planes[:, bands, lanes] &= ~bits
        self.planes[digits, bands, lanes] |= bits

    def back_track(self, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Takes up what was kept last, without the refuted candidate.

        Returns:
            Lanes that go on, and those that have nothing left to try.
        """
        goes_on = self.depth[lanes] > 0
        lanes, ended = lanes[goes_on], lanes[~goes_on]
        self.depth[lanes] -= 1
        self.planes[:, :, lanes] = np.moveaxis(self.stack[self.depth[lanes], lanes], 0, -1)
        return lanes, ended

    def keep(self, lanes: np.ndarray) -> None:
        """Drops all other lanes."""
        deepest = int(self.depth.max(initial=0))
        stack, cells = self.stack[:deepest, lanes], self.stacked_cells[:deepest, lanes]
        self.planes, self.depth = np.ascontiguousarray(self.planes[:, :, lanes]), self.depth[lanes]
        self.stack, self.stacked_cells = self.stack[:, : len(lanes)], self.stacked_cells[:, : len(lanes)]
        self.stack[:deepest], self.stacked_cells[:deepest] = stack, cells


def random_grids(size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Solved boards, uint8 [count, cells]: random boxes on the diagonal, then random guesses where least is left.

    Boxes on the diagonal share no row, column or box; of 6x6 and 9x9 boards every filling of them can be completed.
    """
    geometry = bit_planes(size)
    boards = np.zeros((count, size, size), dtype=np.uint8)
    digits = np.tile(np.arange(1, size + 1, dtype=np.uint8), (count, 1))
    for box in range(min(geometry.bands, size // geometry.box_cols)):
        row, column = box * geometry.box_rows, box * geometry.box_cols
        filled = rng.permuted(digits, axis=1).reshape(count, geometry.box_rows, geometry.box_cols)
        boards[:, row : row + geometry.box_rows, column : column + geometry.box_cols] = filled
    boards = boards.reshape(count, -1)
    lanes, grids, busy = Lanes(geometry.of_boards(boards), geometry), np.empty_like(boards), np.arange(count)
    waits = np.ones(count, dtype=bool)
    while waits.any():
        dead, solved, stuck = lanes.advance()
        solved = solved[waits[solved]]
        grids[busy[solved]] = geometry.to_boards(lanes.planes[:, :, solved])
        waits[solved] = False
        lanes.back_track(dead)
        if len(stuck):
            cells, candidates = lanes.choices(stuck)
            lanes.guess(stuck, cells, (candidates * rng.random(candidates.shape)).argmax(axis=0))
        if waits.sum() < COMPACT * len(busy):
            lanes.keep(np.flatnonzero(waits))
            busy, waits = busy[waits], waits[waits]
    return grids


def rate_boards(boards: np.ndarray) -> np.ndarray:
    """`sudoku_rules.rate` of boards uint8 [boards, cells], int64 [boards]; -1 for a board without a solution."""
    geometry = bit_planes(int(boards.shape[1] ** 0.5))
    parts = [_rate(boards[start : start + BATCH], geometry) for start in range(0, len(boards), BATCH)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _rate(boards: np.ndarray, geometry: Planes) -> np.ndarray:
    """A guess failed if it was made and is not on the way to the solution."""
    lanes, ratings, busy = (
        Lanes(geometry.of_boards(boards), geometry),
        np.full(len(boards), -1),
        np.arange(len(boards)),
    )
    guesses, path = np.zeros((2, len(boards)), dtype=np.int64)
    stacked_path = np.empty(lanes.stacked_cells.shape, dtype=np.int64)
    waits = np.ones(len(boards), dtype=bool)
    while waits.any():
        dead, solved, stuck = lanes.advance()
        solved = solved[waits[solved]]
        ratings[busy[solved]] = guesses[solved] - path[solved]
        waits[solved] = False
        again, ended = lanes.back_track(dead[waits[dead]])
        waits[ended] = False
        path[again] = stacked_path[lanes.depth[again], again]
        cells = lanes.stacked_cells[lanes.depth[again], again]
        first_cells, _ = lanes.choices(stuck)
        guessing, cells = np.concatenate([stuck, again]), np.concatenate([first_cells, cells])
        # The next digit of a cell is tried on the board as it was at the guess: nothing is concluded from a failure.
        candidates = (lanes.planes[:, geometry.band[cells], guessing] & geometry.bits[cells]) != 0
        digits, last = candidates.argmax(axis=0), candidates.sum(axis=0) == 1
        guesses[guessing] += 1
        lanes.decide(guessing[last], cells[last], digits[last])
        more = ~last
        stacked_path[lanes.depth[guessing[more]], guessing[more]] = path[guessing[more]]
        lanes.guess(guessing[more], cells[more], digits[more])
        path[guessing] += 1
        if waits.sum() < COMPACT * len(busy):
            lanes.keep(np.flatnonzero(waits))
            busy, guesses, path, stacked_path = busy[waits], guesses[waits], path[waits], stacked_path[:, waits]
            waits = waits[waits]
    return ratings


class _Proofs(Lanes):
    """Searches for a solution other than the one known; at a guess the known digit comes last."""

    def __init__(self, known: np.ndarray, geometry: Planes):
        super().__init__(known.copy(), geometry)
        self.known = known

    def settle(self, waits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One step of the lanes that wait; returns those without another solution, and those that have one."""
        dead, solved, stuck = (some[waits[some]] for some in self.advance())
        if len(solved):
            same = ~(self.planes[:, :, solved] ^ self.known[:, :, solved]).any(axis=(0, 1))
            dead, solved = np.concatenate([dead, solved[same]]), solved[~same]
        if len(stuck):
            cells, candidates = self.choices(stuck)
            known = (self.known[:, self.geometry.band[cells], stuck] & self.geometry.bits[cells]) != 0
            self.guess(stuck, cells, (candidates & ~known).argmax(axis=0))
        return self.back_track(dead)[1] if len(dead) else dead, solved

    def keep(self, lanes: np.ndarray) -> None:
        super().keep(lanes)
        self.known = np.ascontiguousarray(self.known[:, :, lanes])


def are_unique(boards: np.ndarray, solutions: np.ndarray) -> np.ndarray:
    """Whether boards uint8 [boards, cells] have no solution but the one given, bool [boards]."""
    geometry, unique = bit_planes(int(boards.shape[1] ** 0.5)), np.zeros(len(boards), dtype=bool)
    for start in range(0, len(boards), BATCH):
        some = slice(start, start + BATCH)
        proofs = _Proofs(geometry.of_boards(solutions[some]), geometry)
        busy = np.arange(start, start + len(boards[some]))
        proofs.load(busy - start, geometry.of_boards(boards[some]))
        waits = np.ones(len(busy), dtype=bool)
        while waits.any():
            proved, refuted = proofs.settle(waits)
            unique[busy[proved]] = True
            waits[proved] = waits[refuted] = False
            if waits.sum() < COMPACT * len(busy):
                proofs.keep(np.flatnonzero(waits))
                busy, waits = busy[waits], waits[waits]
    return unique


def dig(solutions: np.ndarray, orders: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Empties cells of solved boards in order, each only if the solution stays unique, down to a number of clues.

    Cells go in blocks, halved when uniqueness is lost. The result is that of going cell by cell, because fewer clues
    never make a solution unique again. A block of one cell is proved by looking for another digit there.

    Args:
        solutions: uint8 [boards, cells].
        orders: the cells in the order of their trials [boards, cells].
        targets: clues to come down to [boards].

    Returns:
        Boards uint8 [boards, cells], 0 for a blank; and which of them came down to their target, bool [boards].
    """
    number, cells = solutions.shape
    geometry = bit_planes(int(cells**0.5))
    ranks = np.argsort(orders, axis=1)
    given = np.ones((number, cells), dtype=bool)
    surplus = cells - np.asarray(targets)
    position, block = np.zeros(number, dtype=np.intp), np.full(number, cells // 2)
    size = np.zeros(number, dtype=np.intp)  # of the block on trial
    busy = np.arange(number)  # the board of each lane
    proofs = _Proofs(geometry.of_boards(solutions), geometry)
    waits = np.ones(number, dtype=bool)

    def on_trial(of: np.ndarray) -> np.ndarray:
        return (ranks[of] >= position[of, None]) & (ranks[of] < (position[of] + size[of])[:, None])

    def start_trials(lanes: np.ndarray) -> None:
        ended = (surplus[busy[lanes]] == 0) | (surplus[busy[lanes]] > cells - position[busy[lanes]])
        waits[lanes[ended]] = False
        lanes = lanes[~ended]
        of, known = busy[lanes], proofs.known[:, :, lanes]
        size[of] = np.minimum(block[of], surplus[of])
        trial = on_trial(of)
        blank, other = geometry.pack(trial | ~given[of]), geometry.pack(trial & (size[of] == 1)[:, None])
        proofs.load(lanes, (known | blank) & ~(known & other))

    def finish_trials(unique: np.ndarray, ambiguous: np.ndarray) -> None:
        given[unique] &= ~on_trial(unique)
        position[unique] += size[unique]
        surplus[unique] -= size[unique]
        position[ambiguous] += size[ambiguous] == 1  # this clue is needed
        block[ambiguous] = np.maximum(size[ambiguous] // 2, 1)

    start_trials(np.arange(number))
    while waits.any():
        proved, refuted = proofs.settle(waits)
        if len(proved) or len(refuted):
            finish_trials(busy[proved], busy[refuted])
            start_trials(np.concatenate([proved, refuted]))
        if waits.sum() < COMPACT * len(busy):
            proofs.keep(np.flatnonzero(waits))
            busy, waits = busy[waits], waits[waits]
    return np.where(given, solutions, 0).astype(np.uint8), surplus == 0
