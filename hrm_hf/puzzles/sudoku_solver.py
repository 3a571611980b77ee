"""Batched Sudoku solver in numpy. It solves, rates and generates puzzles with a unique solution.

Candidates are bit masks (bit d - 1 is digit d), uint16 [cells, boards], so one numpy call advances all boards; boards
with more than 16 digits have uint32 masks. A round of `propagate` applies naked and hidden singles; `Lanes` guesses
and backtracks. All arithmetic uses integers, so results are the same on every machine.
"""

from typing import NamedTuple

import numpy as np

from .sudoku_rules import SudokuShape, sudoku_shape


BATCH = 2048  # boards per batch: smaller batches have more numpy overhead, larger ones exceed the processor's cache
COMPACT = 0.75  # idle lanes are removed when the fraction of busy lanes falls below this


class Found(NamedTuple):
    """Results of `search` for each board.

    Attributes:
        solutions: uint8 [boards, limit, cells] in the order of the search; missing solutions are 0.
        counts: Number of solutions, at most the limit.
        nodes: Number of boards visited: the puzzle itself and one for each digit tried.
        failed: Number of guesses that led to no solution before the search ended.
        complete: False if the search stopped at `max_nodes`.
    """

    solutions: np.ndarray
    counts: np.ndarray
    nodes: np.ndarray
    failed: np.ndarray
    complete: np.ndarray


def search(
    boards: np.ndarray, limit: int = 1, scores: np.ndarray | None = None, max_nodes: int | None = None
) -> Found:
    """Find up to `limit` solutions for each board, uint8 [boards, cells], by depth-first search.

    The search applies naked and hidden singles until nothing changes, then guesses at the first cell (row by row) with
    the fewest candidates. If a guess fails, the next digit is tried on the board before the guess.

    Args:
        scores: [boards, cells, digits]; digits are tried in descending order of score, or ascending if None.
        max_nodes: Number of nodes after which the search on a board stops.
    """
    if len(boards) > BATCH:
        chunks = [slice(at, at + BATCH) for at in range(0, len(boards), BATCH)]
        parts = [search(boards[at], limit, None if scores is None else scores[at], max_nodes) for at in chunks]
        return Found(*map(np.concatenate, zip(*parts)))
    number, cells = boards.shape
    lanes = Lanes(candidates(boards))
    solutions = np.zeros((number, limit, cells), dtype=np.uint8)
    counts, failed = np.zeros((2, number), dtype=np.int64)
    nodes, complete = np.ones(number, dtype=np.int64), np.ones(number, dtype=bool)
    while lanes.busy.any():
        dead, solved, stuck = lanes.advance()
        boards_solved = lanes.board[solved]
        solutions[boards_solved, counts[boards_solved]] = to_digits(lanes.masks[:, solved])
        counts[boards_solved] += 1
        failed[boards_solved] = nodes[boards_solved] - 1 - lanes.depth[solved]
        full = counts[boards_solved] == limit
        lanes.busy[solved[full]] = False
        again, ended = lanes.back_track(np.concatenate([dead, solved[~full]]))
        lanes.busy[ended] = False
        guessing = np.concatenate([stuck, again])
        cell = np.concatenate([lanes.open_cells(stuck), lanes.guessed[lanes.depth[again], again]])
        # A cell whose last digit failed has no candidates left. The next round detects this contradiction.
        some = lanes.masks[cell, guessing] > 0
        guessing, cell = guessing[some], cell[some]
        if max_nodes is not None:
            spent = nodes[lanes.board[guessing]] >= max_nodes
            complete[lanes.board[guessing[spent]]] = False
            lanes.busy[guessing[spent]] = False
            guessing, cell = guessing[~spent], cell[~spent]
        if len(guessing):
            nodes[lanes.board[guessing]] += 1
            order = None if scores is None else scores[lanes.board[guessing], cell]
            lanes.guess(guessing, cell, _first_digit(lanes.masks[cell, guessing], order))
    return Found(solutions, counts, nodes, failed, complete)


def _first_digit(masks: np.ndarray, scores: np.ndarray | None) -> np.ndarray:
    """Return the bit of the next digit to try [k]: the lowest digit or the one with the highest score."""
    if scores is None:
        return masks & -masks
    allowed = (masks[:, None] >> np.arange(scores.shape[1], dtype=masks.dtype)) & 1
    return masks.dtype.type(1) << np.where(allowed, scores, -np.inf).argmax(axis=1).astype(masks.dtype)


def rate_boards(boards: np.ndarray) -> np.ndarray:
    """Rate boards, uint8 [boards, cells], by the number of failed guesses (-1 if there is no solution)."""
    found = search(boards)
    return np.where(found.counts, found.failed, -1)


def candidates(boards: np.ndarray) -> np.ndarray:
    """Convert boards, uint8 [boards, cells], to candidate masks [cells, boards]."""
    size = int(boards.shape[1] ** 0.5)
    masks = np.where(boards == 0, (1 << size) - 1, 1 << (boards.astype(np.int64) - 1).clip(0))
    return np.ascontiguousarray(masks.T.astype(np.uint16 if size <= 16 else np.uint32))


def to_digits(masks: np.ndarray) -> np.ndarray:
    """Convert masks [cells, boards] with one digit per cell to boards, uint8 [boards, cells]."""
    return np.bitwise_count(masks - np.uint16(1)).T.astype(np.uint8) + np.uint8(1)


def propagate(masks: np.ndarray, shape: SudokuShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Apply one round of naked and hidden singles to candidate masks [cells, boards].

    Return the remaining candidates, which boards are contradictory, and which had undecided cells, bool [boards] each.
    """
    several = masks & (masks - np.uint16(1))
    once, twice = _once_and_twice(masks, shape)
    hidden = np.bitwise_or.reduce((once & ~twice)[shape.units_of_cell], axis=0)
    decided = np.where(several == 0, masks, masks & hidden)
    # Two digits in a cell, or the same digit twice in a unit, are a contradiction.
    taken, twice = _once_and_twice(decided, shape)
    seen = np.bitwise_or.reduce(taken[shape.units_of_cell], axis=0)
    left = np.where(decided == 0, masks & ~seen, decided)
    wrong = (once != (1 << shape.size) - 1).any(axis=0) | twice.any(axis=0)
    wrong |= (decided & (decided - np.uint16(1))).any(axis=0) | (masks == 0).any(axis=0)
    return left, wrong, several.any(axis=0)


def _once_and_twice(masks: np.ndarray, shape: SudokuShape) -> tuple[np.ndarray, np.ndarray]:
    """Return masks [units, boards] of the digits that a unit has at least once, and of those it has at least twice."""
    units = shape.cells_of_unit
    once, twice = masks[units[0]], np.zeros((units.shape[1], masks.shape[1]), dtype=masks.dtype)
    for cells in units[1:]:
        more = masks[cells]
        twice |= once & more
        once |= more
    return once, twice


class Lanes:
    """Depth-first search on many boards in lockstep. Each lane has a board and a stack of alternatives.

    `advance` propagates once and returns the lanes that need a decision. Callers then `guess`, `back_track`, load
    another board or retire the lane. These decisions differ between searching, filling and digging.

    Attributes:
        masks: Candidates [cells, lanes].
        board: Index of each lane's board, int64 [lanes].
        busy: False for a lane with a finished board; such lanes are removed when there are many.
        depth: Number of guesses on the lane's current branch.
        guessed: Cells guessed on that branch [depth, lanes].
    """

    def __init__(self, masks: np.ndarray):
        cells, lanes = masks.shape
        self.masks, self.shape = masks, sudoku_shape(int(cells**0.5))
        self.board, self.busy = np.arange(lanes), np.ones(lanes, dtype=bool)
        self.depth = np.zeros(lanes, dtype=np.intp)
        self.guessed = np.empty((cells, lanes), dtype=np.intp)  # each guess fills a cell, so depth <= cells
        self.stack = np.empty((cells, lanes, cells), dtype=masks.dtype)

    def advance(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Propagate once, and return the indices of contradictory, solved and undecided lanes."""
        if self.busy.sum() < COMPACT * len(self.busy):
            self._drop_idle_lanes()
        left, dead, is_open = propagate(self.masks, self.shape)
        at_rest = ~(left ^ self.masks).any(axis=0) & ~dead & self.busy
        self.masks = left
        return np.flatnonzero(dead & self.busy), np.flatnonzero(at_rest & ~is_open), np.flatnonzero(at_rest & is_open)

    def open_cells(self, lanes: np.ndarray) -> np.ndarray:
        """Return each lane's undecided cell with the fewest candidates (the first if there are several), [k]."""
        counts = np.bitwise_count(self.masks[:, lanes])
        return np.where(counts > 1, counts, 255).argmin(axis=0)

    def guess(self, lanes: np.ndarray, cells: np.ndarray, bits: np.ndarray) -> None:
        """Set a cell in each lane to a digit, and push the board without that candidate onto the stack."""
        depth = self.depth[lanes]
        self.masks[cells, lanes] ^= bits
        self.stack[depth, lanes], self.guessed[depth, lanes] = self.masks[:, lanes].T, cells
        self.masks[cells, lanes] = bits
        self.depth[lanes] += 1

    def back_track(self, lanes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pop the lanes' stacks. Return the lanes that continue and those with no alternatives left."""
        goes_on = self.depth[lanes] > 0
        lanes, ended = lanes[goes_on], lanes[~goes_on]
        self.depth[lanes] -= 1
        self.masks[:, lanes] = self.stack[self.depth[lanes], lanes].T
        return lanes, ended

    def _drop_idle_lanes(self) -> None:
        lanes, deepest = np.flatnonzero(self.busy), int(self.depth.max(initial=0))
        self.masks, self.depth = np.ascontiguousarray(self.masks[:, lanes]), self.depth[lanes]
        for name in ("stack", "guessed"):
            kept = getattr(self, name)
            kept[:deepest, : len(lanes)] = kept[:deepest, lanes]
            setattr(self, name, kept[:, : len(lanes)])
        self.board, self.busy = self.board[lanes], self.busy[lanes]


def random_grids(size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Generate solved boards, uint8 [count, cells], from random diagonal boxes and random guesses.

    Boxes on the diagonal share no row or column. On 6x6 and 9x9 boards, every filling of them can be completed.
    """
    box_rows, box_cols = sudoku_shape(size).box_shape
    boards = np.zeros((count, size, size), dtype=np.uint8)
    digits = np.tile(np.arange(1, size + 1, dtype=np.uint8), (count, 1))
    for box in range(min(size // box_rows, size // box_cols)):
        row, column = box * box_rows, box * box_cols
        filled = rng.permuted(digits, axis=1).reshape(count, box_rows, box_cols)
        boards[:, row : row + box_rows, column : column + box_cols] = filled
    lanes, grids = Lanes(candidates(boards.reshape(count, -1))), np.empty((count, size**2), dtype=np.uint8)
    while lanes.busy.any():
        dead, solved, stuck = lanes.advance()
        grids[lanes.board[solved]] = to_digits(lanes.masks[:, solved])
        lanes.busy[solved] = False
        lanes.back_track(dead)
        if len(stuck):
            cells = lanes.open_cells(stuck)
            allowed = (lanes.masks[cells, stuck] >> np.arange(size, dtype=np.uint16)[:, None]) & 1
            digit = (allowed * rng.random(allowed.shape)).argmax(axis=0)
            lanes.guess(stuck, cells, np.uint16(1) << digit.astype(np.uint16))
    return grids


def dig(solutions: np.ndarray, orders: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Remove digits from solved boards in the given order, each only if the solution stays unique.

    A cell can be emptied if and only if no other digit in it leads to a solution.

    Args:
        solutions: uint8 [boards, cells]. orders: Cells in the order to try them [boards, cells].
        targets: Number of clues [boards] at which to stop.

    Returns:
        Boards, uint8 [boards, cells], with 0 for a blank; and which boards reached their target, bool [boards].
    """
    number, cells = solutions.shape
    left = candidates(solutions)  # candidates of the current board
    full = np.bitwise_or.reduce(left, axis=0)
    surplus, position = cells - np.asarray(targets), np.zeros(number, dtype=np.intp)
    lanes = Lanes(left.copy())

    def start(idle: np.ndarray) -> None:
        """Start testing the next cell of the board in each idle lane."""
        board = lanes.board[idle]
        ended = (surplus[board] == 0) | (surplus[board] > cells - position[board])
        lanes.busy[idle[ended]] = False
        idle, board = idle[~ended], board[~ended]
        masks, cell = left[:, board], orders[board, position[board]]
        masks[cell, np.arange(len(board))] ^= full[board]
        lanes.masks[:, idle], lanes.depth[idle] = masks, 0

    start(np.arange(number))
    while lanes.busy.any():
        dead, solved, stuck = lanes.advance()
        cell = lanes.open_cells(stuck)
        lanes.guess(stuck, cell, _first_digit(lanes.masks[cell, stuck], None))
        _, refuted = lanes.back_track(dead)
        board = lanes.board[refuted]
        left[orders[board, position[board]], board] = full[board]
        surplus[board] -= 1
        ended = np.concatenate([refuted, solved])
        position[lanes.board[ended]] += 1
        start(ended)
    return np.where(left.T == full[:, None], 0, solutions).astype(np.uint8), surplus == 0
