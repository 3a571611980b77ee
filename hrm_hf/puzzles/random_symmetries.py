"""Symmetries of boards drawn on the fly: every time that a row is given to a slot it comes in another form.

What is drawn depends on the seed and on the row's position in the order of training alone (see `dataloader`), so that
it is the same in one process and in several, and after a resume. Sudoku: names of digits, bands, rows in their band,
stacks, columns in their stack, transposition. Mazes: the turns and reflections. ARC: those and the names of the colors
1..9, for models without a puzzle table. Symmetries that are stored as rows are drawn in `sudoku`, `maze` and `arc`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .arc_grids import COLOR_OFFSET, FRAME, NUM_COLORS, encode_pair
from .augment import NUM_DIHEDRAL, box_symmetries, dihedral
from .dataset import IGNORE_LABEL
from .sudoku import moved_cells
from .sudoku_rules import DIGIT_OFFSET


Grids = tuple[np.ndarray, np.ndarray]
# What is drawn for positions, by purpose: other numbers for each.
SYMMETRY, LATE_START = range(2)


def random_keys(seed: int, purpose: int, positions: np.ndarray, count: int) -> np.ndarray:
    """Random numbers of positions, uint64 [len(positions), count]; the same for the same arguments on every machine.

    A generator for each position would cost more than the symmetry: these are SplitMix64 (Steele, Lea and Flood 2014)
    of seed, purpose, position and column, all positions at once.
    """
    start = _mixed(_mixed(np.array([seed % 2**64], dtype=np.uint64)) + np.uint64(purpose))
    rows = _mixed(start + np.asarray(positions).astype(np.uint64) * _GOLDEN)
    return _mixed(rows[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class RandomSymmetries:
    """Puts each row of a batch under a symmetry of its own, input and labels alike.

    Args:
        board: what says which task it is and how a board looks: a puzzle model's config.
        seed: of the draws.

    Raises:
        ValueError: a task whose symmetries are not known, or one whose puzzle identifiers tell its views apart.
    """

    def __init__(self, board: Any, seed: int):
        makers = {"sudoku": _sudoku_symmetries, "maze": _maze_symmetries, "arc": _arc_symmetries}
        if board.task not in makers:
            raise ValueError(
                f"augment=true, but the symmetries of the task {board.task!r} are not known: train with --augment "
                f"false, or set task in the model's config to one of {', '.join(makers)}, if its boards are such"
            )
        self.seed = seed
        self.num_keys, self._apply = makers[board.task](board)

    def __call__(self, batch: dict[str, torch.Tensor], positions: np.ndarray) -> dict[str, torch.Tensor]:
        """`batch` [B, S] with the rows at `positions` [B] of the order, each in the form drawn for its position."""
        keys = random_keys(self.seed, SYMMETRY, positions, self.num_keys)
        drawn = self._apply((batch["input_ids"].numpy(), batch["labels"].numpy()), keys)
        return {**batch, **{name: torch.from_numpy(grids) for name, grids in zip(("input_ids", "labels"), drawn)}}


Maker = tuple[int, Callable[[Grids, np.ndarray], Grids]]  # the number of keys that a row needs, and what uses them


def _sudoku_symmetries(board: Any) -> Maker:
    if board.box_shape is None:
        raise ValueError("augment=true: the model's config has no box_shape, so bands and stacks are not known")
    n, (box_rows, box_columns) = board.grid_shape[0], board.box_shape
    bands, stacks = n // box_rows, n // box_columns
    lengths = (n, bands, n, stacks, n, 1)  # digits; bands and rows in them; stacks and columns in them; transposition

    def apply(grids: Grids, keys: np.ndarray) -> Grids:
        digits, band, row, stack, column, turn = np.split(keys, np.cumsum(lengths)[:-1], axis=1)
        tokens = np.tile(np.arange(board.vocab_size, dtype=np.int32), (len(keys), 1))
        first = 1 + DIGIT_OFFSET  # the token of digit 1
        tokens[:, first : first + n] = digits.argsort(axis=1) + first
        square = box_rows == box_columns
        transposed = (turn[:, 0] >> np.uint64(63)).astype(bool) & square
        cells = moved_cells(_lines(band, row, box_rows), _lines(stack, column, box_columns), transposed)
        return tuple(_renamed(_taken(grid, cells), tokens) for grid in grids)

    return sum(lengths), apply


def _lines(blocks: np.ndarray, lines: np.ndarray, size: int) -> np.ndarray:
    """Orders of lines that keep the lines of a block of `size` together, int [B, n], from keys of both."""
    within = lines.reshape(*blocks.shape, size).argsort(axis=2)
    return (blocks.argsort(axis=1)[:, :, None] * size + within).reshape(lines.shape)


def _renamed(grids: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Tokens [B, S] by the table [B, V] of their row; labels that are ignored stay so."""
    ignored = grids == IGNORE_LABEL
    return np.where(ignored, grids, _taken(tokens, np.where(ignored, 0, grids)))


def _taken(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """`np.take_along_axis` of each row, in half the time."""
    return values.reshape(-1)[index + (np.arange(len(values)) * values.shape[1])[:, None]]


def _maze_symmetries(board: Any) -> Maker:
    rows, columns = board.grid_shape
    cells = np.arange(rows * columns).reshape(rows, columns)
    views = np.stack([dihedral(cells, one).reshape(-1) for one in box_symmetries((rows, columns))])

    def apply(grids: Grids, keys: np.ndarray) -> Grids:
        drawn = views[(keys[:, 0] % np.uint64(len(views))).astype(np.intp)]
        return tuple(_taken(grid, drawn) for grid in grids)

    return 1, apply


def _arc_symmetries(board: Any) -> Maker:
    if board.puzzle_emb_ndim:
        raise ValueError(
            "augment=true: a model with a puzzle table learns an ARC task by its identifier, and a turned or "
            "recolored task is another one with another identifier. Store the views (hrm-hf data arc --num-aug N: "
            "training draws one of each task an epoch) and train with --augment false, or with puzzle_emb_ndim=0"
        )

    def apply(grids: Grids, keys: np.ndarray) -> Grids:
        colors = np.concatenate([np.zeros((len(keys), 1), dtype=int), keys[:, 1:].argsort(axis=1) + 1], axis=1)
        transforms = (keys[:, 0] % np.uint64(NUM_DIHEDRAL)).astype(int)
        pairs = [_arc_view(*row) for row in zip(*grids, transforms.tolist(), colors)]
        return tuple(np.stack(part).astype(np.int32) for part in zip(*pairs))

    return NUM_COLORS, apply


def _arc_view(inputs: np.ndarray, labels: np.ndarray, transform: int, colors: np.ndarray) -> Grids:
    """One pair [900] each, turned and recolored where it stands in its frame, or as near to that as it fits."""
    found = [_arc_grid(tokens) for tokens in (inputs, labels)]
    views = [None if grid is None else dihedral(colors[grid], transform) for grid, _ in found]
    sides = np.max([view.shape for view in views if view is not None], axis=0)
    top, left = (min(place, FRAME - side) for place, side in zip(found[0][1], sides.tolist()))
    return encode_pair(views[0], views[1], (top, left))


def _arc_grid(tokens: np.ndarray) -> tuple[np.ndarray | None, tuple[int, int]]:
    """The colors of a grid in its frame, and its corner; no grid where all is ignored."""
    frame = tokens.reshape(FRAME, FRAME)
    rows, columns = np.nonzero(frame >= COLOR_OFFSET)
    if not len(rows):
        return None, (0, 0)
    top, left = int(rows.min()), int(columns.min())
    return frame[top : rows.max() + 1, left : columns.max() + 1] - COLOR_OFFSET, (top, left)
