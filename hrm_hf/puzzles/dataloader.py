"""Data loader for ACT training. A batch slot gets a new row as soon as its current example has halted.

With B slots over all processes, slot s takes the examples at positions s, s + B, s + 2B, ... of an endless sequence of
shuffled epochs. A slot moves on only when its example has halted, so no example is dropped. A slot's next example does
not depend on the other slots, so one process with B slots and two with B/2 see the same examples. The position of a
slot is a single integer, so a resumed run continues exactly where it stopped.

As in the original code, an epoch has one puzzle per group (a task with its augmentations): groups are shuffled, one
puzzle of each group is drawn, and the examples of that puzzle are shuffled.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

from .dataset import IGNORE_LABEL
from .tasks import PuzzleTask


class PuzzleRows:
    """Columns of a puzzle data set as arrays: token grids [N, S], and indices and ratings [N].

    `puzzle_index`, `group_index` and `rating` are loaded on first access, since evaluation does not need them.
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
        """Return an index column. If it is missing, number the rows, so each row is a separate puzzle and group."""
        return _scalar_column(self._dataset, name) if name in self._dataset.column_names else np.arange(len(self))

    def __len__(self) -> int:
        return len(self.input_ids)

    def validate_fits(self, config: Any) -> None:
        """Raise ValueError unless the data fit the sizes given in a puzzle model's config."""
        if self.input_ids.shape[1] != config.seq_len:
            raise ValueError(f"the data have seq_len {self.input_ids.shape[1]}, but the model has {config.seq_len}")
        for name in ("input_ids", "labels"):
            column = getattr(self, name)
            below = (column < 0) & ((column != IGNORE_LABEL) | (name == "input_ids"))
            for row, cell in np.argwhere(below | (column >= config.vocab_size))[:1]:
                raise ValueError(
                    f"{name} of row {row}, cell {cell} is {column[row, cell]}; must be >= 0 and "
                    f"below the model's vocab_size {config.vocab_size}, or -100 for an ignored label"
                )
        span = [int(self.puzzle_identifiers.min()), int(self.puzzle_identifiers.max())]
        if config.puzzle_emb_ndim and not 0 <= min(span) <= max(span) < config.num_puzzle_identifiers:
            raise ValueError(
                f"the data have puzzle identifiers from {span[0]} to {span[1]}, but the model's table has "
                f"{config.num_puzzle_identifiers} rows; call model.resize_puzzle_embeddings, or set "
                "num_puzzle_identifiers in the config"
            )

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the rows at `indices` as int32 tensors for a puzzle model's forward pass."""
        return {
            name: torch.from_numpy(getattr(self, name)[indices].astype(np.int32))
            for name in ("input_ids", "labels", "puzzle_identifiers")
        }


class PuzzleOrder:
    """Infinite sequence of row indices. Each epoch depends only on (seed, epoch) and is drawn on first use."""

    def __init__(self, rows: PuzzleRows, seed: int):
        self.seed = seed
        for name in ("puzzle_index", "group_index"):
            if (np.diff(getattr(rows, name)) < 0).any():
                raise ValueError(
                    f"{name} must be ascending, so that rows of a puzzle and puzzles of a group are adjacent; "
                    "sort the data set by this column, or do not shuffle it (training draws its own order)"
                )
        # A puzzle is a range of adjacent rows, and a group is a range of adjacent puzzles.
        self.puzzle_starts = np.flatnonzero(np.diff(rows.puzzle_index, prepend=rows.puzzle_index[0] - 1))
        self.puzzle_ends = np.append(self.puzzle_starts[1:], len(rows))
        groups = rows.group_index[self.puzzle_starts]
        self.group_starts = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
        self.group_ends = np.append(self.group_starts[1:], len(groups))
        self.mean_epoch_rows = len(self.group_starts) * len(rows) / len(self.puzzle_starts)
        # the rows not yet freed, the stream position of the first of them, and the next epoch to draw
        self._rows, self._start, self._next = np.empty(0, dtype=np.int64), 0, 0

    def row(self, position: int) -> int:
        """Return the row at `position`, which must not have been freed yet. Draw further epochs as needed."""
        while position >= self._start + len(self._rows):
            self._rows = np.concatenate((self._rows, self._epoch(self._next)))
            self._next += 1
        return int(self._rows[position - self._start])

    def seek(self, position: int) -> None:
        """Jump to `position` and free all rows before it."""
        self._rows, self._start, self._next = self._rows[:0], 0, 0
        while position >= self._start + len(self._rows):
            self.forget_before(self._start + len(self._rows))
            self.row(self._start)  # draws the next epoch; its return value is not needed
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
        # Shuffle the rows within all puzzles at once: sort by (position of the puzzle in the epoch, random key).
        place = np.repeat(np.arange(len(picks)), lengths)
        rows = np.arange(len(place)) - np.repeat(lengths.cumsum() - lengths, lengths) + np.repeat(starts, lengths)
        return rows[np.lexsort((rng.random(len(rows)), place))]


class CarryDataLoader:
    """Data loader for one process. The slots marked in `halted` get a new row in the next batch.

    By default a slot's row waits until the slot is free. With `drop_unplaced_rows`, as in the original code, each
    batch takes B new rows and drops those whose slot is busy. `symmetries` apply a random symmetry to each row, `pool`
    replaces rows depending on the run's `progress` in [0, 1], and `late_starts` adds `steps_ahead` [B] to the batch.
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
        self.dataset = rows  # transformers' Trainer uses this attribute to count the examples
        self.batch_size = slots_per_process
        self.seed = seed
        self.halted = np.ones(slots_per_process, dtype=bool)
        self.taken = np.zeros(slots_per_process, dtype=np.int64)  # number of rows that each slot has received
        self._batch = rows.batch(np.zeros(slots_per_process, dtype=np.int64))

    def __len__(self) -> int:
        """Return the batches per epoch as the original code counts them: mean rows per epoch / global batch size."""
        return max(1, int(self.order.mean_epoch_rows / (self.slots * self.world_size)))

    def __iter__(self):
        for _ in range(len(self)):
            yield self.next_batch()

    def next_batch(self) -> dict[str, torch.Tensor]:
        """Return tensors for all slots, with new rows in halted slots."""
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
        """Return the data position of every slot, and the settings that a resumed run must share."""
        return {"taken": self.taken.tolist(), "seed": self.seed, "world_size": self.world_size, "slots": self.slots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the saved positions, or raise ValueError if `seed`, `world_size` or `slots` differs."""
        for name in ("seed", "world_size", "slots"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)}: the checkpoint was saved with {name}={state[name]}; resume with "
                    "the same number of processes, batch size and seed, or use --model_name_or_path"
                )
        self.taken = np.array(state["taken"], dtype=np.int64)
        self.order.seek(int(self.taken.min()) * self.slots * self.world_size)


def _grid_column(dataset: Any, name: str) -> np.ndarray:
    """Return a list column as an array [N, S], without a copy if Arrow allows it."""
    import pyarrow.compute as pc

    dataset = dataset.select_columns(name)
    table = dataset.data.table if dataset._indices is None else dataset.flatten_indices().data.table
    column = table.column(name)
    lengths = pc.unique(pc.list_value_length(column)).to_pylist()
    if len(lengths) != 1:
        raise ValueError(
            f"{name} has rows of different lengths ({sorted(lengths)[:5]}); all rows must have the same length"
        )
    return pc.list_flatten(column).combine_chunks().to_numpy(zero_copy_only=False).reshape(-1, lengths[0])


def _scalar_column(dataset: Any, name: str, dtype: type = np.int64) -> np.ndarray:
    return np.asarray(dataset.with_format("numpy")[name][:], dtype=dtype)


# ---- symmetries ----

SYMMETRY, LATE_START = range(2)  # purposes of `random_keys`; each has its own random stream


def random_keys(seed: int, purpose: int, positions: np.ndarray, count: int) -> np.ndarray:
    """Compute random numbers, uint64 [len(positions), count], as hashes of the arguments.

    The hashes are SplitMix64 (Steele, Lea and Flood 2014) of seed, purpose, position and column. Creating a generator
    for each position would take longer than applying the symmetry.
    """
    start = _mix(_mix(np.array([seed % 2**64], dtype=np.uint64)) + np.uint64(purpose))
    rows = _mix(start + np.asarray(positions).astype(np.uint64) * _GOLDEN)
    return _mix(rows[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class RandomSymmetries:
    """Callable that applies a random symmetry of the task to the inputs and labels of each row in a batch.

    The symmetry depends only on the seed and the row's position in the training order, so it does not change with the
    number of processes or when a run resumes.
    """

    def __init__(self, task: PuzzleTask, seed: int):
        self.task, self.seed, self.num_keys = task, seed, task.symmetry_keys()

    def __call__(self, batch: dict[str, torch.Tensor], positions: np.ndarray) -> dict[str, torch.Tensor]:
        """Apply the symmetries drawn for `positions` [B] to the rows of `batch` [B, S]."""
        keys = random_keys(self.seed, SYMMETRY, positions, self.num_keys)
        drawn = self.task.symmetric_copies((batch["input_ids"].numpy(), batch["labels"].numpy()), keys)
        return {**batch, **{name: torch.from_numpy(grids) for name, grids in zip(("input_ids", "labels"), drawn)}}


# ---- curriculum ----


FIRST_SHARE = 0.25  # fraction of the rows that a "hard_first" run starts with


class DifficultyPool:
    """Curriculum that replaces rows in the training order with harder ones during the first part of a run.

    Rows are ranked by the column `rating`. Equal ratings, or rows without that column, are ranked by the number of
    cells that differ between puzzle and solution (81 minus the clues of a 9x9 Sudoku; the path of a maze). At progress
    t, the pool has the hardest f(t) = min(1, 1/4 + 3/4 t / ramp) of the rows. The row of rank floor(r f) replaces
    the row of rank r, so all rows in the pool are used equally often. From t = ramp (> 0) on, no row is replaced.
    """

    def __init__(self, rows: PuzzleRows, ramp: float):
        rating = np.zeros(len(rows)) if rows.rating is None else rows.rating
        open_cells = ((rows.input_ids != rows.labels) & (rows.labels != IGNORE_LABEL)).sum(axis=1)
        self.rows = np.lexsort((open_cells, rating))[::-1]
        self.ranks = self.rows.argsort()
        self.ramp = ramp

    def __call__(self, rows: np.ndarray, progress: float) -> np.ndarray:
        """Replace `rows` [B] with harder ones while `progress`, the completed fraction of the run, is below `ramp`."""
        share = min(1.0, FIRST_SHARE + (1 - FIRST_SHARE) * progress / self.ramp)
        return self.rows[(self.ranks[rows] * share).astype(np.intp)]


class LateStarts:
    """Sampler for the number of ACT steps that each row runs without gradient before training starts on it.

    A fraction of the rows, chosen by their position in the order, starts 2^k steps late, where k is uniform from 0 to
    log2(max_steps). Source: Sotaku v2 runs 32 to 512 iterations without gradient before the supervised ones in a fifth
    of its batches. We choose rows instead of batches, since slots start at different times.
    """

    def __init__(self, seed: int, share: float, max_steps: int):
        self.seed, self.share, self.max_power = seed, share, max_steps.bit_length() - 1

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return how many steps the rows at `positions` [B] first run without gradient, int32 [B]; 0 if not late."""
        chosen, power = random_keys(self.seed, LATE_START, positions, 2).T
        late = (chosen >> np.uint64(11)) * 2.0**-53 < self.share
        return np.where(late, 1 << (power % np.uint64(self.max_power + 1)).astype(np.int32), 0).astype(np.int32)
