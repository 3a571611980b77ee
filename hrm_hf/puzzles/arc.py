"""ARC-AGI-1, ARC-AGI-2 and ConceptARC as puzzle data sets, and one task as model inputs.

    tasks = read_tasks(["arc_agi_1.json.gz", "concept_arc.json.gz"])
    splits, info = build_arc(tasks, num_aug=1000)
    save_arc_dataset(splits, info, tasks, "data/arc1")

Each task is augmented by the eight symmetries and permutations of the colors 1..9 (0, the background, stays), and
every augmentation is a puzzle with an identifier of its own. Sources are read in `arc_tasks`; tokens, and the names
of augmentations, are in `arc_grids`.

What differs from the original builders: randomness is drawn per task, from the seed and the task's name, and tasks are
sorted, so identifiers do not depend on directory order, hash seed, machine, or which other tasks are present. A task
that is both trained and evaluated is an error.
"""

import atexit
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .arc_grids import (
    FRAME,
    NUM_COLORS,
    SEQ_LEN,
    VOCAB_SIZE,
    apply_augmentation,
    encode_pair,
    identifier_name,
    parse_identifier,
    place_grid,
)
from .arc_tasks import ArcTask, Pair, fingerprint, parse_task, task_to_json
from .augment import NUM_DIHEDRAL, dihedral
from .dataset import (
    BLANK_IDENTIFIER,
    IDENTIFIERS_FILE,
    IGNORE_LABEL,
    PAD_ID,
    ROW_COLUMNS,
    PuzzleInfo,
    puzzle_features,
    save_puzzle_dataset,
)


if TYPE_CHECKING:
    import datasets

TRIALS_PER_AUGMENTATION = 5
TEST_PUZZLES_FILE = "test_puzzles.json"
CHUNK_PUZZLES = 2048


# Augmentations


def augmentations(task: ArcTask, num_aug: int, seed: int) -> Iterator[tuple[str, list[Pair]]]:
    """Yields `(identifier name, train pairs then test pairs)`: the task, then up to `num_aug` distinct variants.

    Draws at most 5 * num_aug variants, so a task with few distinct ones yields fewer.
    """
    pairs = [*task.train, *task.test]
    yield task.name, pairs
    rng = _task_rng(seed, task.name, "augmentation")
    seen = {fingerprint(pairs)}
    for _ in range(TRIALS_PER_AUGMENTATION * num_aug):
        if len(seen) > num_aug:
            return
        transform = int(rng.integers(NUM_DIHEDRAL))
        colors = np.concatenate([[0], rng.permutation(np.arange(1, NUM_COLORS))]).astype(np.uint8)
        variant = [
            Pair(*(None if grid is None else dihedral(colors[grid], transform) for grid in pair)) for pair in pairs
        ]
        print_of_variant = fingerprint(variant)
        if print_of_variant not in seen:
            seen.add(print_of_variant)
            yield identifier_name(task.name, transform, colors), variant


def _task_rng(seed: int, name: str, purpose: str) -> np.random.Generator:
    """A generator of its own for each task and purpose; sha256 because `hash()` differs between processes."""
    digest = hashlib.sha256(f"{purpose}:{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, int.from_bytes(digest, "little")])))


# Data sets


def build_arc(
    tasks: Sequence[ArcTask],
    num_aug: int = 1000,
    seed: int = 42,
    cache_dir: str | Path | None = None,
) -> tuple["datasets.DatasetDict", PuzzleInfo]:
    """Augments and encodes tasks; the rows go to Arrow files, so memory does not grow with their number.

    The train split holds all pairs of trained tasks and the train pairs of evaluated ones, each pair shifted by a
    random offset except one per puzzle; the test split holds the test pairs of evaluated tasks, in all augmentations,
    unshifted. Identifiers count from 1 over the sorted tasks and their augmentations.

    Args:
        tasks: from `read_tasks`.
        num_aug: variants per task besides the original.
        seed: of augmentations and offsets.
        cache_dir: where the Arrow files go; a folder in the `datasets` cache that is removed at exit by default. Full
            ARC needs about 8 GB: set HF_DATASETS_CACHE to choose another disk.

    Raises:
        ValueError: no tasks, or a negative `num_aug` or `seed`.
    """
    from datasets import DatasetDict, config
    from tqdm.auto import tqdm

    options = build_options(tasks, num_aug, seed)
    if cache_dir is None:
        Path(config.HF_DATASETS_CACHE).mkdir(parents=True, exist_ok=True)
        cache_dir = tempfile.mkdtemp(prefix="hrm_hf_", dir=config.HF_DATASETS_CACHE)
        atexit.register(shutil.rmtree, cache_dir, ignore_errors=True)
    work = Path(cache_dir)
    work.mkdir(parents=True, exist_ok=True)
    writers = {"train": _SplitWriter(work / "train.arrow")}
    if any(task.evaluated for task in tasks):
        writers["test"] = _SplitWriter(work / "test.arrow")
    identifiers = [BLANK_IDENTIFIER]
    for task in tqdm(sorted(tasks, key=lambda task: task.name), desc="ARC tasks", unit="task", disable=None):
        rng = _task_rng(seed, task.name, "offset")
        num_trained = len(task.train) if task.evaluated else len(task.train) + len(task.test)
        for name, pairs in augmentations(task, num_aug, seed):
            offsets = _offsets(pairs[:num_trained], rng)
            writers["train"].add_puzzle(pairs[:num_trained], offsets, len(identifiers))
            if task.evaluated:
                tests = pairs[num_trained:]
                writers["test"].add_puzzle(tests, [(0, 0)] * len(tests), len(identifiers))
            identifiers.append(name)
        for writer in writers.values():
            writer.end_group()
    splits = DatasetDict({name: writer.finish() for name, writer in writers.items()})
    return splits, PuzzleInfo("arc", (FRAME, FRAME), VOCAB_SIZE, identifiers=identifiers, options=options)


def build_options(tasks: Sequence[ArcTask], num_aug: int, seed: int) -> dict[str, Any]:
    """Returns the options that identify a build, for `puzzle.json`, before its rows are made."""
    if num_aug < 0 or seed < 0:
        raise ValueError(f"num_aug is {num_aug} and seed {seed}; neither may be negative")
    if not tasks:
        raise ValueError("there are no tasks to build from")
    return {
        "sources": sorted({task.source for task in tasks}),
        "tasks": len(tasks),
        "evaluated_tasks": sum(task.evaluated for task in tasks),
        "num_aug": num_aug,
        "seed": seed,
    }


def save_arc_dataset(
    splits: "datasets.DatasetDict", info: PuzzleInfo, tasks: Sequence[ArcTask], out: str | Path
) -> Path:
    """`save_puzzle_dataset`, and `test_puzzles.json` beside it: the evaluated tasks unchanged, for voting."""
    folder = save_puzzle_dataset(splits, info, out)
    puzzles = {task.name: task_to_json(task) for task in tasks if task.evaluated}
    (folder / TEST_PUZZLES_FILE).write_text(json.dumps(puzzles))
    return folder


def encode_task(task: ArcTask | dict[str, Any], identifier: str | None = None) -> dict[str, dict[str, np.ndarray]]:
    """Model inputs of one task, for inference: no offsets, one row per pair.

    Args:
        task: an `ArcTask`, or the JSON object `{"train": [...], "test": [...]}`; test outputs may be missing.
        identifier: name of the augmentation to show the task in (see `task_identifiers`); None for the original.

    Returns:
        `{"train": {"input_ids", "labels"}, "test": {...}}`, arrays int64 [pairs, 900]; -100 where nothing is known.
        `undo_augmentation(crop_prediction(row), identifier)` turns a prediction into a grid.
    """
    if not isinstance(task, ArcTask):
        task = parse_task(task, "task")
    encoded = {}
    for part, pairs in (("train", task.train), ("test", task.test)):
        shown = [
            [grid if grid is None or identifier is None else apply_augmentation(grid, identifier) for grid in pair]
            for pair in pairs
        ]
        rows = np.array([encode_pair(*pair) for pair in shown], dtype=np.int64).reshape(len(pairs), 2, SEQ_LEN)
        encoded[part] = {"input_ids": rows[:, 0], "labels": rows[:, 1]}
    return encoded


def task_identifiers(task_name: str, identifiers: Sequence[str]) -> dict[int, str]:
    """`{puzzle identifier: name}` of all augmentations of a task known to a data set or checkpoint."""
    return {i: name for i, name in enumerate(identifiers) if i and parse_identifier(name)[0] == task_name}


class _SplitWriter:
    """Stream the encoded puzzles of a split into an Arrow file, in chunks, and number its puzzles and groups."""

    def __init__(self, path: Path):
        from datasets.arrow_writer import ArrowWriter

        self.path, self.writer = path, ArrowWriter(features=puzzle_features(SEQ_LEN), path=str(path))
        self.buffer: list[tuple[np.ndarray, ...]] = []
        self.puzzles = self.groups = self.puzzles_at_last_group = 0

    def add_puzzle(self, pairs: Sequence[Pair], offsets: Sequence[tuple[int, int]], identifier: int) -> None:
        frames = np.zeros((2, len(pairs), FRAME, FRAME), dtype=np.int8)
        for i, (pair, offset) in enumerate(zip(pairs, offsets)):
            for frame, grid in zip(frames[:, i], pair):
                if grid is not None:
                    place_grid(grid, offset, frame)
        inputs, labels = frames.reshape(2, len(pairs), SEQ_LEN)
        labels[labels == PAD_ID] = IGNORE_LABEL
        numbers = (identifier, self.puzzles, self.groups)
        self.buffer.append((inputs, labels, *(np.full(len(pairs), number, dtype=np.int32) for number in numbers)))
        self.puzzles += 1
        if len(self.buffer) >= CHUNK_PUZZLES:
            self._flush()

    def end_group(self) -> None:
        """The task is done; a split that got none of its pairs does not count it."""
        self.groups += self.puzzles > self.puzzles_at_last_group
        self.puzzles_at_last_group = self.puzzles

    def finish(self) -> "datasets.Dataset":
        """The memory-mapped rows."""
        from datasets import Dataset

        self._flush()
        self.writer.finalize()
        return Dataset.from_file(str(self.path))

    def _flush(self) -> None:
        import pyarrow as pa

        if self.buffer:
            columns = [np.concatenate(parts) for parts in zip(*self.buffer)]
            grids = [pa.FixedSizeListArray.from_arrays(pa.array(grid.reshape(-1)), SEQ_LEN) for grid in columns[:2]]
            self.writer.write_table(pa.table(dict(zip(ROW_COLUMNS, grids + columns[2:]))))
            self.buffer = []


def _offsets(pairs: Sequence[Pair], rng: np.random.Generator) -> list[tuple[int, int]]:
    """A random corner for each pair, shared by its input and output; one random pair stays at (0, 0)."""
    fixed = rng.integers(len(pairs))
    room = FRAME - np.array([np.maximum(pair.input.shape, pair.output.shape) for pair in pairs])
    corners = rng.integers(0, room + 1)
    corners[fixed] = 0
    return [(int(row), int(column)) for row, column in corners]


# Model cards


def card_context(config: Any, folder: Path) -> dict[str, str]:
    """`known_task`, for the example in the card of an ARC model: a task that has rows in its puzzle table."""
    file = folder / IDENTIFIERS_FILE
    names = json.loads(file.read_text(encoding="utf-8")) if config.task == "arc" and file.exists() else []
    return {"known_task": parse_identifier(names[1])[0] if len(names) > 1 else "task"}
