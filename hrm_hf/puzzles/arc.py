"""Build puzzle data sets from ARC-AGI-1, ARC-AGI-2 and ConceptARC, and encode tasks as model inputs.

    tasks = read_tasks(["arc_agi_1.json.gz", "concept_arc.json.gz"])
    splits, info = build_arc(tasks, num_aug=1000)
    save_arc_dataset(splits, info, tasks, "data/arc1")

Each task is augmented with the eight symmetries and with permutations of the colors 1..9 (0, the background, is
fixed). Each augmented copy is a puzzle with its own identifier.

Unlike the original builders, this module sorts the tasks and seeds the random numbers of each task with the seed and
the task's name. Identifiers therefore do not depend on directory order, hash seed, machine or the other tasks.
"""

import atexit
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..io.files import load_json, visible_files
from .arc_grids import (
    FRAME,
    NUM_COLORS,
    NUM_DIHEDRAL,
    SEQ_LEN,
    VOCAB_SIZE,
    apply_augmentation,
    dihedral,
    encode_pair,
    identifier_name,
    parse_identifier,
    place_grid,
)
from .dataset import (
    BLANK_IDENTIFIER,
    IGNORE_LABEL,
    PAD_ID,
    ROW_COLUMNS,
    PuzzleInfo,
    puzzle_features,
    save_puzzle_dataset,
)


if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

EVALUATED_SUBSETS = ("evaluation",)
KAGGLE_SUFFIX = "_challenges"
TRIALS_PER_AUGMENTATION = 5
TEST_PUZZLES_FILE = "test_puzzles.json"
CHUNK_PUZZLES = 2048


class Pair(NamedTuple):
    """Input and output grid, uint8 [rows, columns] with colors 0..9. The output is None if it is hidden."""

    input: np.ndarray
    output: np.ndarray | None


@dataclass(frozen=True)
class ArcTask:
    """ARC task. Its test pairs go to the test split if `evaluated` is True, otherwise to the train split."""

    name: str
    train: tuple[Pair, ...]
    test: tuple[Pair, ...]
    evaluated: bool
    source: str


def read_tasks(sources: Iterable[str | Path], evaluate: Sequence[str] = EVALUATED_SUBSETS) -> list[ArcTask]:
    """Read tasks from JSON files, Kaggle files and folders of either, and sort them by name.

    A source is one of

    - a bundle `{subset: {name: task}}`, a `{name: task}` or a single task, as .json or .json.gz;
    - a folder with one JSON file per task (the file's parent folder names the subset: training/, evaluation/, ...);
    - a Kaggle file `..._training_challenges.json` with its `..._solutions.json`, or a folder of such files.

    `source:training,evaluation` selects the subsets "training" and "evaluation" of a source.

    The test pairs of the subsets in `evaluate` form the test split; all other subsets are used for training. If
    several sources contain a task, the last one wins, with a warning. A second warning lists training tasks that have
    the same pairs as an evaluated task.

    Raises:
        FileNotFoundError: If a source does not exist.
        ValueError: If a task is malformed, a subset is unknown, or a task is used for both training and evaluation.
    """
    roles: dict[bool, dict[str, ArcTask]] = {True: {}, False: {}}
    recurring, subsets = set(), set()
    for source in sources:
        path, wanted = _split_selector(source)
        content = _read_source(path)
        for subset in wanted or sorted(content):
            if subset not in content:
                raise ValueError(f"{path} has no subset {subset!r}; choose from {sorted(content)}")
            subsets.add(subset)
            tasks = roles[subset in evaluate]
            for name, (raw, where) in content[subset].items():
                recurring.update([name] if name in tasks else [])
                tasks[name] = parse_task(raw, name, evaluated=subset in evaluate, where=where, source=path.name)
    if unknown := set(evaluate) - subsets:
        raise ValueError(
            f"evaluate={sorted(unknown)}: not found in the sources; choose from {sorted(subsets)}, "
            "or disable evaluation (evaluate=(), --train-only)"
        )
    _validate_no_leaks(roles)
    _warn_of_copies(roles)
    if recurring:
        logger.warning("%d tasks occur in several sources; using the last copy: %s", len(recurring), _some(recurring))
    return sorted([*roles[True].values(), *roles[False].values()], key=lambda task: task.name)


def parse_task(raw: Any, name: str, evaluated: bool = True, where: str = "task", source: str = "") -> ArcTask:
    """Validate `{"train": [{"input", "output"}, ...], "test": [...]}` and convert its grids to arrays.

    Raise ValueError if the task is malformed; the message names `where` (the file), the task and the pair.
    """
    where = f"{where}: task {name!r}"
    if not isinstance(raw, dict) or not all(isinstance(raw.get(part), list) for part in ("train", "test")):
        found = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
        raise ValueError(f"{where} must have 'train' and 'test' lists of pairs; found {found}")
    if name == BLANK_IDENTIFIER or "|||" in name or parse_identifier(name)[0] != name:
        raise ValueError(f"{where}: this name is reserved for augmentations; rename the task")
    pairs = {
        part: tuple(_pair(raw_pair, f"{where}, {part} pair {i}") for i, raw_pair in enumerate(raw[part]))
        for part in ("train", "test")
    }
    if not (all if evaluated else any)(pairs.values()):
        raise ValueError(f"{where}: missing pairs; add {'train and test pairs' if evaluated else 'at least one'}")
    trained = (*pairs["train"], *(() if evaluated else pairs["test"]))
    if hidden := sum(pair.output is None for pair in trained):
        raise ValueError(f"{where} has {hidden} training pairs without 'output'; add outputs, or evaluate on the task")
    return ArcTask(name, pairs["train"], pairs["test"], evaluated, source)


def task_to_json(task: ArcTask) -> dict[str, list[dict[str, list]]]:
    """Convert a task back to the content of its JSON file, without hidden outputs."""
    names = Pair._fields
    return {
        part: [{name: grid.tolist() for name, grid in zip(names, pair) if grid is not None} for pair in pairs]
        for part, pairs in (("train", task.train), ("test", task.test))
    }


def _split_selector(source: str | Path) -> tuple[Path, list[str] | None]:
    if Path(source).exists():
        return Path(source), None
    path, separator, subsets = str(source).rpartition(":")
    if separator and Path(path).exists():
        return Path(path), subsets.split(",")
    raise FileNotFoundError(f"{source} does not exist; expected a file, a folder, or PATH:SUBSET,SUBSET")


def _read_source(path: Path) -> dict[str, dict[str, tuple[Any, str]]]:
    """Return `{subset: {name: (raw task, file name)}}`."""
    if path.is_file():
        return _read_file(path)
    kaggle = [file for file in visible_files(path, f"*{KAGGLE_SUFFIX}.json") if file.parent == path]
    if kaggle:
        return {subset: tasks for file in kaggle for subset, tasks in _read_file(file).items()}
    content: dict[str, dict[str, tuple[Any, str]]] = {}
    for file in visible_files(path, "*.json"):
        tasks = content.setdefault(file.parent.name, {})
        if file.stem in tasks:
            raise ValueError(f"{file}: subset {file.parent.name!r} already has a task {file.stem!r}; rename one")
        tasks[file.stem] = (load_json(file), str(file))
    if not content:
        raise ValueError(f"{path} has no .json files; expected folders of tasks or Kaggle's *{KAGGLE_SUFFIX}.json")
    return content


def _read_file(file: Path) -> dict[str, dict[str, tuple[Any, str]]]:
    stem = file.name.split(".json")[0]
    raw = load_json(file)
    if not isinstance(raw, dict) or not raw:
        raise ValueError(f"{file} must contain a JSON object of tasks; got {str(raw)[:40]}")
    if stem.endswith(KAGGLE_SUFFIX):
        _add_solutions(raw, file)
        subsets = {stem.removesuffix(KAGGLE_SUFFIX).rpartition("_")[2]: raw}
    elif "train" in raw or "test" in raw:
        subsets = {file.resolve().parent.name: {stem: raw}}
    elif all(isinstance(value, dict) and ("train" in value or "test" in value) for value in raw.values()):
        subsets = {stem: raw}
    else:
        subsets = raw
    for subset, tasks in subsets.items():
        if not isinstance(tasks, dict):
            raise ValueError(f"{file}: subset {subset!r} must be an object {{name: task}}; got {str(tasks)[:40]}")
    return {subset: {name: (task, str(file)) for name, task in tasks.items()} for subset, tasks in subsets.items()}


def _add_solutions(tasks: dict[str, Any], challenges: Path) -> None:
    """Add the outputs in Kaggle's solutions file, if it exists, to the test pairs of `tasks`."""
    file = challenges.with_name(challenges.name.replace(KAGGLE_SUFFIX, "_solutions"))
    if not file.exists():
        return
    solutions = load_json(file)
    for name, task in tasks.items():
        tests, outputs = task.get("test", []), solutions.get(name, [])
        if len(tests) != len(outputs):
            counts = f"{len(outputs)} solutions; {challenges.name} has {len(tests)} tests"
            raise ValueError(f"{file}: task {name!r} has {counts}")
        task["test"] = [{**pair, "output": output} for pair, output in zip(tests, outputs)]


def _pair(raw: Any, where: str) -> Pair:
    if not isinstance(raw, dict) or "input" not in raw:
        raise ValueError(f"{where} must be an object with 'input' and 'output'; got {str(raw)[:40]}")
    output = raw.get("output")
    return Pair(_grid(raw["input"], f"{where}, input"), None if output is None else _grid(output, f"{where}, output"))


def _grid(raw: Any, where: str) -> np.ndarray:
    """Validate a grid and return it as uint8 [rows, columns]."""
    rows = raw.tolist() if isinstance(raw, np.ndarray) else raw
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        raise ValueError(f"{where} must be a list of rows, each a list of colors; got {str(raw)[:40]}")
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        raise ValueError(f"{where} has rows of {sorted(widths)} cells; all rows must have the same length")
    if max(len(rows), *widths) > FRAME:
        raise ValueError(f"{where} is {len(rows)} x {len(rows[0])}; must be at most {FRAME} x {FRAME}")
    for color in (color for row in rows for color in row):
        if type(color) is not int or not 0 <= color < NUM_COLORS:
            raise ValueError(f"{where} has the color {color!r}; must be an integer in [0, 9]")
    return np.array(rows, dtype=np.uint8)


def _validate_no_leaks(roles: dict[bool, dict[str, ArcTask]]) -> None:
    if leaks := sorted(roles[True].keys() & roles[False].keys()):
        trained, evaluated = (roles[role][leaks[0]].source for role in (False, True))
        raise ValueError(
            f"{len(leaks)} tasks are used for both training and evaluation: {_some(leaks)} ({leaks[0]} for training "
            f"in {trained}, for evaluation in {evaluated}); use one ARC-AGI version, or select subsets (PATH:SUBSET)"
        )


def _warn_of_copies(roles: dict[bool, dict[str, ArcTask]]) -> None:
    """Warn about training tasks that duplicate evaluated tasks (the ARC-AGI-1 data of published runs has one)."""
    evaluated = {fingerprint([*task.train, *task.test]): task.name for task in roles[True].values()}
    for name, task in roles[False].items():
        if duplicate := evaluated.get(fingerprint([*task.train, *task.test])):
            text = "training task %s of %s is identical to evaluated task %s, so the model trains on the answers"
            logger.warning(text, name, task.source, duplicate)


def fingerprint(pairs: Sequence[Pair]) -> bytes:
    """Hash the pairs of a task or variant, ignoring their order."""
    texts = [[b"" if grid is None else bytes(grid.shape) + grid.tobytes() for grid in pair] for pair in pairs]
    return b"".join(sorted(hashlib.sha256(b"|".join(pair)).digest() for pair in texts))


def _some(names: Collection[str], count: int = 5) -> str:
    return ", ".join(sorted(names)[:count]) + (", ..." if len(names) > count else "")


# Augmentations


def augmentations(task: ArcTask, num_aug: int, seed: int) -> Iterator[tuple[str, list[Pair]]]:
    """Yield `(identifier, train pairs + test pairs)` for the task and up to `num_aug` distinct variants.

    At most 5 * num_aug variants are drawn, so a task with few distinct variants yields fewer.
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
        variant_key = fingerprint(variant)
        if variant_key not in seen:
            seen.add(variant_key)
            yield identifier_name(task.name, transform, colors), variant


def _task_rng(seed: int, name: str, purpose: str) -> np.random.Generator:
    """Return the random generator for a task and purpose, seeded with sha256 because `hash()` varies by process."""
    digest = hashlib.sha256(f"{purpose}:{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, int.from_bytes(digest, "little")])))


# Data sets


def build_arc(
    tasks: Sequence[ArcTask], num_aug: int = 1000, seed: int = 42, cache_dir: str | Path | None = None
) -> tuple["datasets.DatasetDict", PuzzleInfo]:
    """Augment and encode tasks, streaming the rows to Arrow files so that memory use stays constant.

    The train split has all pairs of training tasks and the train pairs of evaluated tasks. In each puzzle all pairs
    but one are shifted by a random offset. The test split has all augmentations of the test pairs of evaluated tasks,
    without shifts. Identifiers number the sorted tasks and their augmentations from 1.

    Args:
        tasks: From `read_tasks`. num_aug: Variants per task, besides the task itself. seed: Seed for all draws.
        cache_dir: Folder for the Arrow files. By default a folder in the `datasets` cache (HF_DATASETS_CACHE), deleted
            at exit. The full ARC data needs about 8 GB.

    Raises:
        ValueError: If there are no tasks, or `num_aug` or `seed` is negative.
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
    """Return the options that identify a build, as recorded in `puzzle.json`."""
    if num_aug < 0 or seed < 0:
        raise ValueError(f"num_aug={num_aug}, seed={seed}: both must be >= 0")
    if not tasks:
        raise ValueError("tasks=[]: there is nothing to build; pass at least one task")
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
    """Save the data set and, for voting, the evaluated tasks (`test_puzzles.json`)."""
    puzzles = {task.name: task_to_json(task) for task in tasks if task.evaluated}
    return save_puzzle_dataset(splits, info, out, {TEST_PUZZLES_FILE: json.dumps(puzzles)})


def encode_task(task: ArcTask | dict[str, Any], identifier: str | None = None) -> dict[str, dict[str, np.ndarray]]:
    """Encode a task as `{"train": {"input_ids", "labels"}, "test": {...}}`, int64 [pairs, 900].

    Args:
        task: `ArcTask` or JSON object `{"train": [...], "test": [...]}`; test outputs may be missing.
        identifier: Name of the augmentation to apply (see `task_identifiers`); None for the original task.
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
    """Return `{puzzle identifier: name}` for all augmentations of a task that are in `identifiers`."""
    return {i: name for i, name in enumerate(identifiers) if i and parse_identifier(name)[0] == task_name}


class _SplitWriter:
    """Writer that streams encoded puzzles to an Arrow file and numbers the split's puzzles and groups."""

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
        """End the current task, and count it as a group if this split received any of its pairs."""
        self.groups += self.puzzles > self.puzzles_at_last_group
        self.puzzles_at_last_group = self.puzzles

    def finish(self) -> "datasets.Dataset":
        """Close the file and return its rows as a memory-mapped data set."""
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
    """Draw an offset for each pair, shared by its input and output, but keep one random pair at (0, 0)."""
    fixed = rng.integers(len(pairs))
    largest = FRAME - np.array([np.maximum(pair.input.shape, pair.output.shape) for pair in pairs])
    corners = rng.integers(0, largest + 1)
    corners[fixed] = 0
    return [(int(row), int(column)) for row, column in corners]
