"""Feed an ACT trainer: every slot of the batch walks its own stride through one seeded order of the examples.

With B slots over all processes, slot s takes the examples at positions s, s + B, s + 2B, ... of an endless order made
of one shuffled epoch after another. A slot moves on only when its example has halted, so no example is dropped; which
example a slot sees next does not depend on the other slots, so one process with B slots and two with B/2 see the same;
and the position of every slot is one integer, so a resumed run continues exactly.

An epoch is one puzzle per group (an original task with its augmentations), as in the original: groups are shuffled,
one puzzle of each is drawn, and the examples of that puzzle are shuffled.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

from .arc_grids import COLOR_OFFSET, FRAME, NUM_COLORS, NUM_DIHEDRAL, box_symmetries, dihedral, encode_pair
from .dataset import IGNORE_LABEL
from .sudoku import moved_cells
from .sudoku_rules import DIGIT_OFFSET


class PuzzleRows:
    """The columns of a puzzle data set as arrays: grids [N, S] and numbers [N].

    Evaluation needs no `puzzle_index`, `group_index` and `rating`, so these load on first use.
    """

    def __init__(self, dataset: Any):
        missing = {"input_ids", "labels", "puzzle_identifiers"} - set(dataset.column_names)
        if missing:
            raise ValueError(f"the data set lacks the columns {sorted(missing)}; it has {dataset.column_names}")
        if len(dataset) == 0:
            raise ValueError("the data set has no rows")
        self._dataset = dataset
        self.input_ids = _grid_column(dataset, "input_ids")
        self.labels = _grid_column(dataset, "labels")
        self.puzzle_identifiers = _scalar_column(dataset, "puzzle_identifiers")

    @cached_property
    def puzzle_index(self) -> np.ndarray:
        return self._index("puzzle_index")

    @cached_property
    def group_index(self) -> np.ndarray:
        return self._index("group_index")

    @cached_property
    def rating(self) -> np.ndarray | None:
        has_rating = "rating" in self._dataset.column_names
        return _scalar_column(self._dataset, "rating", np.float64) if has_rating else None

    def _index(self, name: str) -> np.ndarray:
        """Return an index of the rows; without that column every row is a puzzle and a group of its own."""
        return _scalar_column(self._dataset, name) if name in self._dataset.column_names else np.arange(len(self))

    def __len__(self) -> int:
        return len(self.input_ids)

    def validate_fits(self, config: Any) -> None:
        """Raise ValueError where the data exceed the sizes of a puzzle model's config."""
        if self.input_ids.shape[1] != config.seq_len:
            raise ValueError(f"the data have seq_len {self.input_ids.shape[1]}, the model {config.seq_len}")
        for name in ("input_ids", "labels"):
            column = getattr(self, name)
            below = (column < 0) & ((column != IGNORE_LABEL) | (name == "input_ids"))
            for row, cell in np.argwhere(below | (column >= config.vocab_size))[:1]:
                raise ValueError(
                    f"{name} of row {row}, cell {cell} is {column[row, cell]}; the model's vocab_size is "
                    f"{config.vocab_size}, so 0..{config.vocab_size - 1} is expected, or -100 for a label to ignore"
                )
        span = [int(self.puzzle_identifiers.min()), int(self.puzzle_identifiers.max())]
        if config.puzzle_emb_ndim and not 0 <= min(span) <= max(span) < config.num_puzzle_identifiers:
            raise ValueError(
                f"puzzle identifiers span {span[0]}..{span[1]}, the model's table has {config.num_puzzle_identifiers} "
                "rows; call model.resize_puzzle_embeddings, or set num_puzzle_identifiers in the config"
            )

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Return rows as int32 tensors, ready for a puzzle model's forward."""
        return {
            name: torch.from_numpy(getattr(self, name)[indices].astype(np.int32))
            for name in ("input_ids", "labels", "puzzle_identifiers")
        }


class PuzzleOrder:
    """The endless order, position -> row. Epochs depend on (seed, epoch) alone and are drawn when first needed."""

    def __init__(self, rows: PuzzleRows, seed: int):
        self.seed = seed
        for name in ("puzzle_index", "group_index"):
            if (np.diff(getattr(rows, name)) < 0).any():
                raise ValueError(
                    f"{name} is not in ascending order: rows of one puzzle, and puzzles of one group, are neighbors. "
                    "Do not shuffle the data set (training draws its own order), or sort it by this column"
                )
        # Puzzles as runs of rows, groups as runs of puzzles: neighbors in the file, by the layout of the data set.
        self.puzzle_starts = np.flatnonzero(np.diff(rows.puzzle_index, prepend=rows.puzzle_index[0] - 1))
        self.puzzle_ends = np.append(self.puzzle_starts[1:], len(rows))
        groups = rows.group_index[self.puzzle_starts]
        self.group_starts = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
        self.group_ends = np.append(self.group_starts[1:], len(groups))
        self.mean_epoch_rows = len(self.group_starts) * len(rows) / len(self.puzzle_starts)
        self._rows, self._start, self._next = np.empty(0, dtype=np.int64), 0, 0  # of positions from the start; epoch

    def row(self, position: int) -> int:
        """Return the row at a position of the order; positions may lag behind the newest by any amount."""
        while position >= self._start + len(self._rows):
            self._rows = np.concatenate((self._rows, self._epoch(self._next)))
            self._next += 1
        return int(self._rows[position - self._start])

    def seek(self, position: int) -> None:
        """Start over at `position`, without the earlier rows."""
        self._rows, self._start, self._next = self._rows[:0], 0, 0
        while position >= self._start + len(self._rows):
            self.forget_before(self._start + len(self._rows))
            self.row(self._start)  # the next epoch
        self.forget_before(position)

    def forget_before(self, position: int) -> None:
        """Free the rows before `position`."""
        passed = max(0, min(position - self._start, len(self._rows)))
        self._rows, self._start = self._rows[passed:], self._start + passed

    def _epoch(self, epoch: int) -> np.ndarray:
        rng = np.random.Generator(np.random.Philox([self.seed, epoch]))
        groups = rng.permutation(len(self.group_starts))
        picks = rng.integers(self.group_starts[groups], self.group_ends[groups])
        starts, lengths = self.puzzle_starts[picks], (self.puzzle_ends - self.puzzle_starts)[picks]
        if (lengths == 1).all():
            return starts
        # Shuffle inside each puzzle at once: sort rows by (place of the puzzle in the epoch, a random key).
        place = np.repeat(np.arange(len(picks)), lengths)
        rows = np.arange(len(place)) - np.repeat(lengths.cumsum() - lengths, lengths) + np.repeat(starts, lengths)
        return rows[np.lexsort((rng.random(len(rows)), place))]


class CarryDataLoader:
    """Iterable of batches for the slots of one process; `halted` says which slots want a new row at the next batch.

    With `drop_unplaced_rows` every batch takes B new rows and those offered to busy slots are lost, as in the
    original; the default keeps each slot's row until it is used. `symmetries` draw the form of a row, `pool` replaces
    rows by the `progress` of the run, 0 to 1, and `late_starts` adds `steps_ahead` [B].
    """

    def __init__(
        self,
        rows: PuzzleRows,
        slots_per_process: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        drop_unplaced_rows: bool = False,
        symmetries: "RandomSymmetries | None" = None,
        pool: Callable[[np.ndarray, float], np.ndarray] | None = None,
        late_starts: Callable[[np.ndarray], np.ndarray] | None = None,
    ):
        self.rows = rows
        self.order = PuzzleOrder(rows, seed)
        self.slots, self.rank, self.world_size = slots_per_process, rank, world_size
        self.drop_unplaced_rows = drop_unplaced_rows
        self.symmetries, self.pool, self.late_starts, self.progress = symmetries, pool, late_starts, 0.0
        self.dataset = rows  # what transformers' Trainer counts examples on
        self.batch_size = slots_per_process
        self.seed = seed
        self.halted = np.ones(slots_per_process, dtype=bool)
        self.taken = np.zeros(slots_per_process, dtype=np.int64)  # rows each slot has been given so far
        self._batch = rows.batch(np.zeros(slots_per_process, dtype=np.int64))

    def __len__(self) -> int:
        """Batches in one epoch, counted as the original does: rows of an epoch over rows of a global batch."""
        return max(1, int(self.order.mean_epoch_rows / (self.slots * self.world_size)))

    def __iter__(self):
        for _ in range(len(self)):
            yield self.next_batch()

    def next_batch(self) -> dict[str, torch.Tensor]:
        """Return tensors for all slots; only the rows of halted slots are new."""
        refill = np.ones_like(self.halted) if self.drop_unplaced_rows else self.halted
        slots = np.flatnonzero(refill)
        steps_ahead = np.zeros(self.slots, dtype=np.int32)
        if len(slots):
            stride = self.slots * self.world_size
            positions = self.rank * self.slots + slots + self.taken[slots] * stride
            rows = np.array([self.order.row(int(position)) for position in positions])
            new = self.rows.batch(rows if self.pool is None else self.pool(rows, self.progress))
            if self.symmetries is not None:
                new = self.symmetries(new, positions)
            if self.late_starts is not None:
                steps_ahead[slots] = self.late_starts(positions)
            index = torch.from_numpy(slots)
            self._batch = {name: old.index_copy(0, index, new[name]) for name, old in self._batch.items()}
            self.taken[slots] += 1
            self.order.forget_before(int(self.taken.min()) * stride)
        more = {} if self.late_starts is None else {"steps_ahead": torch.from_numpy(steps_ahead)}
        return {**self._batch, **more}

    def state_dict(self) -> dict[str, Any]:
        """Return the position of every slot."""
        return {"taken": self.taken.tolist(), "seed": self.seed, "world_size": self.world_size, "slots": self.slots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at saved positions; ValueError if the run is laid out differently."""
        for name in ("seed", "world_size", "slots"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the checkpoint was made with {name}={state[name]}, this run has {getattr(self, name)}: resume "
                    "with the same processes, batch size and seed, or start from its weights (--model_name_or_path)"
                )
        self.taken = np.array(state["taken"], dtype=np.int64)
        self.order.seek(int(self.taken.min()) * self.slots * self.world_size)


def _grid_column(dataset: Any, name: str) -> np.ndarray:
    """Return a list column as [N, S], without copying where Arrow allows it."""
    import pyarrow.compute as pc

    dataset = dataset.select_columns(name)
    table = dataset.data.table if dataset._indices is None else dataset.flatten_indices().data.table
    column = table.column(name)
    lengths = pc.unique(pc.list_value_length(column)).to_pylist()
    if len(lengths) != 1:
        raise ValueError(f"rows of {name} differ in length ({sorted(lengths)[:5]}); all must have the model's seq_len")
    return pc.list_flatten(column).combine_chunks().to_numpy(zero_copy_only=False).reshape(-1, lengths[0])


def _scalar_column(dataset: Any, name: str, dtype: type = np.int64) -> np.ndarray:
    return np.asarray(dataset.with_format("numpy")[name][:], dtype=dtype)


# ---- symmetries ----

Grids = tuple[np.ndarray, np.ndarray]
# What is drawn for positions, by purpose: other numbers for each.
SYMMETRY, LATE_START = range(2)


def random_keys(seed: int, purpose: int, positions: np.ndarray, count: int) -> np.ndarray:
    """Return random numbers of positions, uint64 [len(positions), count]; they depend on the arguments alone.

    They are SplitMix64 (Steele, Lea and Flood 2014) of seed, purpose, position and column: a generator for each
    position would cost more than the symmetry.
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
    """Apply a random symmetry to each row of a batch, input and labels alike.

    Sudoku: names of digits, bands, rows in their band, stacks, columns in their stack, transposition. Mazes: turns and
    reflections. ARC: those and the names of the colors 1..9, for models without a puzzle table. The draw depends on
    the seed and on the row's position in the order of training alone, so processes and resumed runs draw the same.
    """

    def __init__(self, board: Any, seed: int):
        makers = {"sudoku": _sudoku_symmetries, "maze": _maze_symmetries, "arc": _arc_symmetries}
        if board.task not in makers:
            raise ValueError(
                f"augment=true, but the symmetries of the task {board.task!r} are not known: train with --augment "
                f"false, or set the config's task, if its boards are of {', '.join(makers)}"
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
    """Order lines so that the lines of a block of `size` stay together, int [B, n], from keys of both."""
    within = lines.reshape(*blocks.shape, size).argsort(axis=2)
    return (blocks.argsort(axis=1)[:, :, None] * size + within).reshape(lines.shape)


def _renamed(grids: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Rename tokens [B, S] by the table [B, V] of their row; ignored labels stay."""
    ignored = grids == IGNORE_LABEL
    return np.where(ignored, grids, _taken(tokens, np.where(ignored, 0, grids)))


def _taken(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return `np.take_along_axis(values, index, axis=1)` in half its time."""
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
            "augment=true: a model with a puzzle table learns an ARC task by its identifier, and a turned task has "
            "another. Store views (hrm-hf data arc --num-aug N) and give --augment false, or set puzzle_emb_ndim=0"
        )

    def apply(grids: Grids, keys: np.ndarray) -> Grids:
        colors = np.concatenate([np.zeros((len(keys), 1), dtype=int), keys[:, 1:].argsort(axis=1) + 1], axis=1)
        transforms = (keys[:, 0] % np.uint64(NUM_DIHEDRAL)).astype(int)
        pairs = [_arc_view(*row) for row in zip(*grids, transforms.tolist(), colors)]
        return tuple(np.stack(part).astype(np.int32) for part in zip(*pairs))

    return NUM_COLORS, apply


def _arc_view(inputs: np.ndarray, labels: np.ndarray, transform: int, colors: np.ndarray) -> Grids:
    """Turn and recolor a pair [900] each, in its place in the frame, or as near to that as it fits."""
    found = [_arc_grid(tokens) for tokens in (inputs, labels)]
    views = [None if grid is None else dihedral(colors[grid], transform) for grid, _ in found]
    sides = np.max([view.shape for view in views if view is not None], axis=0)
    top, left = (min(place, FRAME - side) for place, side in zip(found[0][1], sides.tolist()))
    return encode_pair(views[0], views[1], (top, left))


def _arc_grid(tokens: np.ndarray) -> tuple[np.ndarray | None, tuple[int, int]]:
    """Return the colors of a grid in its frame, and its corner; None where all is ignored."""
    frame = tokens.reshape(FRAME, FRAME)
    rows, columns = np.nonzero(frame >= COLOR_OFFSET)
    if not len(rows):
        return None, (0, 0)
    top, left = int(rows.min()), int(columns.min())
    return frame[top : rows.max() + 1, left : columns.max() + 1] - COLOR_OFFSET, (top, left)


# ---- what changes over a run ----


FIRST_SHARE = 0.25  # of the rows, those that a run with a difficulty begins with


class DifficultyPool:
    """Replace rows of the order of training by harder ones, in the first part of a run.

    Rows are ranked by difficulty: by the column `rating`, and among equal ratings, or without that column, by the
    number of cells that differ between puzzle and solution (81 minus the clues of a 9x9 Sudoku, the path of a maze).
    At progress t the share f(t) = min(1, 1/4 + 3/4 t / ramp) of the hardest rows is in the pool. The row of rank
    floor(r f) replaces the row of rank r, so rows of the pool come equally often, and from t = ramp (> 0) on none is
    replaced.
    """

    def __init__(self, rows: PuzzleRows, ramp: float):
        rating = np.zeros(len(rows)) if rows.rating is None else rows.rating
        open_cells = ((rows.input_ids != rows.labels) & (rows.labels != IGNORE_LABEL)).sum(axis=1)
        self.rows = np.lexsort((open_cells, rating))[::-1]
        self.ranks = self.rows.argsort()
        self.ramp = ramp

    def __call__(self, rows: np.ndarray, progress: float) -> np.ndarray:
        """Return the rows that replace `rows`, both int [B]."""
        share = min(1.0, FIRST_SHARE + (1 - FIRST_SHARE) * progress / self.ramp)
        return self.rows[(self.ranks[rows] * share).astype(np.intp)]


class LateStarts:
    """Draw how many ACT steps without gradient a row runs before the trained ones.

    A share of the rows, drawn by their positions in the order, starts 2^k steps late; k is drawn evenly from 0 to
    log2(max_steps). Source: Sotaku v2 runs 32 to 512 iterations without gradient before the supervised ones, on a
    fifth of its batches; here rows are drawn, since slots start one by one.
    """

    def __init__(self, seed: int, share: float, max_steps: int):
        self.seed, self.share, self.max_power = seed, share, max_steps.bit_length() - 1

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the steps int32 [B] of the rows at `positions` [B]; 0 for most."""
        chosen, power = random_keys(self.seed, LATE_START, positions, 2).T
        late = (chosen >> np.uint64(11)) * 2.0**-53 < self.share
        return np.where(late, 1 << (power % np.uint64(self.max_power + 1)).astype(np.int32), 0).astype(np.int32)
