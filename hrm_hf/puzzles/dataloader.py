"""Feeds an ACT trainer: every slot of the batch walks its own stride through one seeded order of the examples.

With B slots over all processes, slot s takes the examples at positions s, s + B, s + 2B, ... of an endless order made
of one shuffled epoch after another. A slot moves on only when its example has halted, so no example is dropped; which
example a slot sees next does not depend on the other slots, so one process with B slots and two with B/2 see the same;
and the position of every slot is one integer, so a resumed run continues exactly.

An epoch is one puzzle per group (an original task with its augmentations), as in the original: groups are shuffled,
one puzzle of each is drawn, and the examples of that puzzle are shuffled.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .random_symmetries import RandomSymmetries


class PuzzleRows:
    """The columns of a puzzle data set as arrays: grids [N, S] and per-row indices [N]."""

    def __init__(self, dataset: Any):
        missing = {"input_ids", "labels", "puzzle_identifiers"} - set(dataset.column_names)
        if missing:
            raise ValueError(f"the data set lacks the columns {sorted(missing)}; it has {dataset.column_names}")
        if len(dataset) == 0:
            raise ValueError("the data set has no rows")
        self.input_ids = _grid_column(dataset, "input_ids")
        self.labels = _grid_column(dataset, "labels")
        self.puzzle_identifiers = _scalar_column(dataset, "puzzle_identifiers")
        self.rating = _scalar_column(dataset, "rating", np.float64) if "rating" in dataset.column_names else None
        own = np.arange(len(dataset), dtype=np.int64)  # a data set without groups: every row is its own
        names = dataset.column_names
        self.puzzle_index = _scalar_column(dataset, "puzzle_index") if "puzzle_index" in names else own
        self.group_index = _scalar_column(dataset, "group_index") if "group_index" in names else own
        for name in ("puzzle_index", "group_index"):
            if (np.diff(getattr(self, name)) < 0).any():
                raise ValueError(
                    f"{name} is not in ascending order: rows of one puzzle, and puzzles of one group, are neighbours. "
                    "Do not shuffle the data set (training draws its own order), or sort it by this column"
                )

    def __len__(self) -> int:
        return len(self.input_ids)

    def validate_fits(self, config: Any) -> None:
        """Raises ValueError where the data exceed what a puzzle model's config allows."""
        if self.input_ids.shape[1] != config.seq_len:
            raise ValueError(f"the data have seq_len {self.input_ids.shape[1]}, the model {config.seq_len}")
        for name in ("input_ids", "labels"):
            column = getattr(self, name)
            bad = (column < 0) | (column >= config.vocab_size)
            if name == "labels":
                bad &= column != -100
            if bad.any():
                row, cell = (int(index[0]) for index in np.nonzero(bad))
                raise ValueError(
                    f"{name} of row {row}, cell {cell} is {column[row, cell]}; the model's vocab_size is "
                    f"{config.vocab_size}, so 0..{config.vocab_size - 1} is expected"
                    + (", or -100 for a cell to ignore" if name == "labels" else "")
                )
        largest, smallest = int(self.puzzle_identifiers.max()), int(self.puzzle_identifiers.min())
        if config.puzzle_emb_ndim and not 0 <= smallest <= largest < config.num_puzzle_identifiers:
            raise ValueError(
                f"puzzle identifiers span {smallest}..{largest}, the model's table has "
                f"{config.num_puzzle_identifiers} rows; "
                "call model.resize_puzzle_embeddings, or set num_puzzle_identifiers in the config"
            )

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Rows as int32 tensors, ready for a puzzle model's forward."""
        return {
            name: torch.from_numpy(getattr(self, name)[indices].astype(np.int32))
            for name in ("input_ids", "labels", "puzzle_identifiers")
        }


class PuzzleOrder:
    """The endless order, position -> row. Epochs depend on (seed, epoch) alone and are drawn when first needed."""

    def __init__(self, rows: PuzzleRows, seed: int):
        self.seed = seed
        # Puzzles as runs of rows, groups as runs of puzzles: neighbours in the file, by the layout of the data set.
        self.puzzle_starts = np.flatnonzero(np.diff(rows.puzzle_index, prepend=rows.puzzle_index[0] - 1))
        self.puzzle_ends = np.append(self.puzzle_starts[1:], len(rows))
        groups = rows.group_index[self.puzzle_starts]
        self.group_starts = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1))
        self.group_ends = np.append(self.group_starts[1:], len(groups))
        self.mean_epoch_rows = len(self.group_starts) * len(rows) / len(self.puzzle_starts)
        self._epochs: list[np.ndarray] = []
        self._offsets = [0]
        self._first = 0

    def row(self, position: int) -> int:
        """The row at a position of the order. Positions may lag behind the newest by any amount, at a cost in time."""
        while position >= self._offsets[-1]:
            self._epochs.append(self._epoch(self._first + len(self._epochs)))
            self._offsets.append(self._offsets[-1] + len(self._epochs[-1]))
        index = int(np.searchsorted(self._offsets, position, side="right")) - 1
        return int(self._epochs[index][position - self._offsets[index]])

    def seek(self, position: int) -> None:
        """Starts over with the epoch that holds `position`, without keeping the earlier ones."""
        self._epochs, self._offsets, self._first = [], [0], 0
        self.row(0)
        while self._offsets[-1] <= position:
            self.row(self._offsets[-1])
            self.forget_before(min(position, self._offsets[-2]))

    def forget_before(self, position: int) -> None:
        """Frees the epochs that end before `position`."""
        while len(self._epochs) > 1 and self._offsets[1] <= position:
            del self._epochs[0], self._offsets[0]
            self._first += 1

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

    With `drop_unplaced_rows` every batch takes B new rows and those offered to busy slots are lost, which is what the
    original does; the default keeps each slot's row until it is used. `symmetries` draw the form in which a row comes,
    `pool` (a `DifficultyPool`) says which row comes in its place at the `progress` of the run, 0 to 1, that is set,
    and `late_starts` (a `LateStarts`) adds `steps_ahead` [B] to a batch: what new rows run without gradient.
    """

    def __init__(
        self,
        rows: PuzzleRows,
        slots_per_process: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        drop_unplaced_rows: bool = False,
        symmetries: RandomSymmetries | None = None,
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
        """Tensors for all slots; only the rows of halted slots are new."""
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
        return (
            self._batch if self.late_starts is None else {**self._batch, "steps_ahead": torch.from_numpy(steps_ahead)}
        )

    def state_dict(self) -> dict[str, Any]:
        """Position of every slot."""
        return {"taken": self.taken.tolist(), "seed": self.seed, "world_size": self.world_size, "slots": self.slots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at saved positions. Raises ValueError if the run is laid out differently."""
        for name in ("seed", "world_size", "slots"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the checkpoint was made with {name}={state[name]}, this run has {getattr(self, name)}: the data "
                    "position and the carry belong to that layout. Resume with the same number of processes, batch "
                    "size and seed, or start anew from the saved weights with --model_name_or_path"
                )
        self.taken = np.array(state["taken"], dtype=np.int64)
        self.order.seek(int(self.taken.min()) * self.slots * self.world_size)


def _grid_column(dataset: Any, name: str) -> np.ndarray:
    """A list column as [N, S], without copying where Arrow allows it."""
    import pyarrow.compute as pc

    table = dataset.data.table if dataset._indices is None else dataset.flatten_indices().data.table
    column = table.column(name)
    lengths = pc.unique(pc.list_value_length(column)).to_pylist()
    if len(lengths) != 1:
        raise ValueError(f"rows of {name} differ in length ({sorted(lengths)[:5]}); all must have the model's seq_len")
    return pc.list_flatten(column).combine_chunks().to_numpy(zero_copy_only=False).reshape(-1, lengths[0])


def _scalar_column(dataset: Any, name: str, dtype: type = np.int64) -> np.ndarray:
    return np.asarray(dataset.with_format("numpy")[name][:], dtype=dtype)
