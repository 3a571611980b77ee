"""ARC-AGI-1, ARC-AGI-2 and ConceptARC as puzzle data sets, and the helpers that voting and pipelines need.

    tasks = read_tasks(["arc_agi_1.json.gz", "concept_arc.json.gz"])
    splits, info = build_arc(tasks, num_aug=1000)
    save_arc_dataset(splits, info, tasks, "data/arc1")

Tokens: 0 padding, 1 end of grid, colour c is c + 2. A grid lies in a 30 x 30 frame; the row below it and the column to
its right hold end-of-grid tokens. Each task is augmented by the eight symmetries and permutations of the colours
1..9 (0, the background, stays), and every augmentation is a puzzle with an identifier of its own.

What differs from the original builders: randomness is drawn per task, from the seed and the task's name, and tasks are
sorted, so identifiers do not depend on directory order, hash seed, machine, or which other tasks are present. A task
that is both trained and evaluated is an error.
"""

import gzip
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .augment import NUM_DIHEDRAL, dihedral, inverse_dihedral
from .original_layout import RowWriter, working_folder
from .puzzles import BLANK_IDENTIFIER, IGNORE_LABEL, PAD_ID, PuzzleInfo, save_puzzle_dataset


if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

FRAME = 30
SEQ_LEN = FRAME * FRAME
EOS_ID = 1
COLOUR_OFFSET = 2
NUM_COLOURS = 10
VOCAB_SIZE = COLOUR_OFFSET + NUM_COLOURS
EVALUATED_SUBSETS = ("evaluation",)
TRIALS_PER_AUGMENTATION = 5
TEST_PUZZLES_FILE = "test_puzzles.json"
KAGGLE_SUFFIX = "_challenges"

IDENTITY_COLOURS = np.arange(NUM_COLOURS, dtype=np.uint8)
TRM_IDENTIFIER = re.compile(r"(.+)\|\|\|t([0-7])\|\|\|(\d{10})")
HRM_IDENTIFIER = re.compile(r"(.+)_t([0-7])_(\d{10})")


class Pair(NamedTuple):
    """One demonstration or question: grids of colours 0..9, uint8 [rows, columns]; a hidden output is None."""

    input: np.ndarray
    output: np.ndarray | None


@dataclass(frozen=True)
class ArcTask:
    """One task. `evaluated`: its test pairs form the test split; otherwise all its pairs are trained on."""

    name: str
    train: tuple[Pair, ...]
    test: tuple[Pair, ...]
    evaluated: bool
    source: str


# Sources


def read_tasks(sources: Iterable[str | Path], evaluate: Sequence[str] = EVALUATED_SUBSETS) -> list[ArcTask]:
    """Reads tasks from bundles, folders and Kaggle files, sorted by name.

    A source is one of

    - a bundle `{subset: {name: task}}`, a `{name: task}` or a single task, as .json or .json.gz;
    - a folder of one JSON per task (the subset is the folder that holds the file: training/, evaluation/, ...);
    - a Kaggle file `..._training_challenges.json` with its `..._solutions.json`, or a folder of such files.

    `source:training,evaluation` takes only these subsets of a source.

    Args:
        sources: paths. Where a task recurs within one role, the last source's version is used, and a warning says so.
        evaluate: names of the subsets whose test pairs are the test split; all other subsets are trained on.

    Raises:
        FileNotFoundError: a source does not exist.
        ValueError: a malformed task, an unknown subset, or a task that is trained and evaluated at once.
    """
    roles: dict[bool, dict[str, ArcTask]] = {True: {}, False: {}}
    recurring, subsets = set(), set()
    for source in sources:
        path, wanted = _split_selector(source)
        content = _read_source(path)
        for subset in wanted or sorted(content):
            if subset not in content:
                raise ValueError(f"{path} has no subset {subset!r}; it has {sorted(content)}")
            subsets.add(subset)
            tasks = roles[subset in evaluate]
            for name, (raw, where) in content[subset].items():
                recurring.update([name] if name in tasks else [])
                tasks[name] = parse_task(raw, name, evaluated=subset in evaluate, where=where, source=path.name)
    unknown = set(evaluate) - subsets
    if unknown:
        raise ValueError(
            f"no source has the subset {sorted(unknown)} to be evaluated; the sources have {sorted(subsets)}. "
            "Name one of them, or evaluate nothing (evaluate=(), --train-only)"
        )
    _refuse_leaks(roles)
    if recurring:
        logger.warning("%d tasks recur; the last source's version is used: %s", len(recurring), _some(recurring))
    return sorted([*roles[True].values(), *roles[False].values()], key=lambda task: task.name)


def parse_task(raw: Any, name: str, evaluated: bool = True, where: str = "task", source: str = "") -> ArcTask:
    """Checks one task `{"train": [{"input", "output"}, ...], "test": [...]}` and makes its grids arrays.

    Raises:
        ValueError: naming `where` (file), the task, the pair, and what was expected.
    """
    where = f"{where}: task {name!r}"
    if not isinstance(raw, dict) or not all(isinstance(raw.get(part), list) for part in ("train", "test")):
        found = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
        raise ValueError(f"{where} must have 'train' and 'test' lists of pairs; found {found}")
    if name == BLANK_IDENTIFIER or "|||" in name or parse_identifier(name)[0] != name:
        raise ValueError(f"{where} is named like an identifier of an augmentation; rename it")
    pairs = {
        part: tuple(_pair(raw_pair, f"{where}, {part} pair {i}") for i, raw_pair in enumerate(raw[part]))
        for part in ("train", "test")
    }
    if evaluated and not (pairs["train"] and pairs["test"]):
        raise ValueError(f"{where} is empty: an evaluated task needs at least one train pair and one test pair")
    if not (pairs["train"] or pairs["test"]):
        raise ValueError(f"{where} is empty: it has no pairs")
    hidden = [pair for pair in (*pairs["train"], *(() if evaluated else pairs["test"])) if pair.output is None]
    if hidden:
        raise ValueError(
            f"{where} has {len(hidden)} pairs to train on without 'output'; add the solutions or evaluate it"
        )
    return ArcTask(name, pairs["train"], pairs["test"], evaluated, source)


def _split_selector(source: str | Path) -> tuple[Path, list[str] | None]:
    if Path(source).exists():
        return Path(source), None
    path, separator, subsets = str(source).rpartition(":")
    if separator and Path(path).exists():
        return Path(path), subsets.split(",")
    raise FileNotFoundError(f"{source} does not exist; expected a file, a folder, or PATH:SUBSET,SUBSET")


def _read_source(path: Path) -> dict[str, dict[str, tuple[Any, str]]]:
    """{subset: {name: (raw task, the file it came from)}}"""
    if path.is_file():
        return _read_file(path)
    kaggle = sorted(path.glob(f"*{KAGGLE_SUFFIX}.json"))
    if kaggle:
        return {subset: tasks for file in kaggle for subset, tasks in _read_file(file).items()}
    content: dict[str, dict[str, tuple[Any, str]]] = {}
    for file in sorted(path.rglob("*.json")):
        tasks = content.setdefault(file.parent.name, {})
        if file.stem in tasks:
            raise ValueError(f"{file}: subset {file.parent.name!r} already has a task {file.stem!r}")
        tasks[file.stem] = (_load_json(file), str(file))
    if not content:
        raise ValueError(
            f"{path} holds no .json files; expected folders of tasks, or Kaggle files *{KAGGLE_SUFFIX}.json"
        )
    return content


def _read_file(file: Path) -> dict[str, dict[str, tuple[Any, str]]]:
    stem = file.name.split(".json")[0]
    raw = _load_json(file)
    if not isinstance(raw, dict) or not raw:
        raise ValueError(f"{file} must hold a JSON object of tasks; it holds {str(raw)[:40]}")
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
            raise ValueError(f"{file}: subset {subset!r} must be an object {{name: task}}; it is {str(tasks)[:40]}")
    return {subset: {name: (task, str(file)) for name, task in tasks.items()} for subset, tasks in subsets.items()}


def _add_solutions(tasks: dict[str, Any], challenges: Path) -> None:
    """Puts the outputs of Kaggle's solutions file, where there is one, into the test pairs of `tasks`."""
    file = challenges.with_name(challenges.name.replace(KAGGLE_SUFFIX, "_solutions"))
    if not file.exists():
        return
    solutions = _load_json(file)
    for name, task in tasks.items():
        tests, outputs = task.get("test", []), solutions.get(name, [])
        if len(tests) != len(outputs):
            raise ValueError(
                f"{file}: task {name!r} has {len(outputs)} solutions; {challenges.name} has {len(tests)} tests"
            )
        task["test"] = [{**pair, "output": output} for pair, output in zip(tests, outputs)]


def _load_json(file: Path) -> Any:
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    try:
        return json.loads(data)
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error


def _pair(raw: Any, where: str) -> Pair:
    if not isinstance(raw, dict) or "input" not in raw:
        raise ValueError(f"{where} must be an object with 'input' and 'output'; it is {str(raw)[:40]}")
    output = raw.get("output")
    return Pair(_grid(raw["input"], f"{where}, input"), None if output is None else _grid(output, f"{where}, output"))


def _grid(raw: Any, where: str) -> np.ndarray:
    """A checked grid, uint8 [rows, columns]."""
    rows = raw.tolist() if isinstance(raw, np.ndarray) else raw
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        raise ValueError(f"{where} must be a list of rows, each a list of colours; it is {str(raw)[:40]}")
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        raise ValueError(f"{where} is ragged: its rows have {sorted(widths)} cells; all rows must be equally long")
    if max(len(rows), *widths) > FRAME:
        raise ValueError(f"{where} is {len(rows)} x {len(rows[0])}; at most {FRAME} x {FRAME} fit")
    for row in rows:
        for colour in row:
            if type(colour) is not int or not 0 <= colour < NUM_COLOURS:
                raise ValueError(f"{where} holds the colour {colour!r}; expected a whole number from 0 to 9")
    return np.array(rows, dtype=np.uint8)


def _refuse_leaks(roles: dict[bool, dict[str, ArcTask]]) -> None:
    leaks = roles[True].keys() & roles[False].keys()
    if leaks:
        name = min(leaks)
        raise ValueError(
            f"{len(leaks)} evaluated tasks are also trained on: {_some(leaks)} ({name} is trained from "
            f"{roles[False][name].source} and evaluated from {roles[True][name].source}). ARC-AGI-2 training repeats "
            "most of ARC-AGI-1: take only one of the two, or select subsets with PATH:SUBSET"
        )


def _some(names: Iterable[str], count: int = 5) -> str:
    names = sorted(names)
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")


# Tokens


def encode_grid(grid: np.ndarray, offset: tuple[int, int] = (0, 0)) -> np.ndarray:
    """Colours [rows, columns] as tokens int8 [900], the grid's corner at `offset` (row, column) of the frame."""
    frame = np.zeros((FRAME, FRAME), dtype=np.int8)
    _place(np.asarray(grid), offset, frame)
    return frame.reshape(SEQ_LEN)


def encode_pair(
    grid: np.ndarray, answer: np.ndarray | None, offset: tuple[int, int] = (0, 0)
) -> tuple[np.ndarray, np.ndarray]:
    """`(input_ids, labels)`, both int8 [900]; labels are -100 on padding, everywhere if `answer` is None (hidden)."""
    if answer is None:
        return encode_grid(grid, offset), np.full(SEQ_LEN, IGNORE_LABEL, dtype=np.int8)
    labels = encode_grid(answer, offset)
    return encode_grid(grid, offset), np.where(labels == PAD_ID, np.int8(IGNORE_LABEL), labels)


def crop_prediction(tokens: np.ndarray) -> np.ndarray:
    """The grid in a prediction: the largest rectangle of colour tokens anchored at the top left corner.

    Args:
        tokens: integers [900] or [30, 30].

    Returns:
        Colours uint8 [rows, columns]; [0, 0] where the first token is no colour. Of equal areas the one with fewer
        rows wins, as in the original.
    """
    frame = np.asarray(tokens).reshape(FRAME, FRAME)
    other = (frame < COLOUR_OFFSET) | (frame >= VOCAB_SIZE)
    widths = np.where(other.any(axis=1), other.argmax(axis=1), FRAME)
    widths = np.minimum.accumulate(widths)
    rows = int(np.argmax(widths * np.arange(1, FRAME + 1))) + 1
    columns = int(widths[rows - 1])
    rows = rows if columns else 0
    return (frame[:rows, :columns] - COLOUR_OFFSET).astype(np.uint8)


def _place(grid: np.ndarray, offset: tuple[int, int], frame: np.ndarray) -> None:
    """Writes grid and end-of-grid tokens into a zeroed frame [30, 30]; the corner of the two stays padding."""
    top, left = offset
    bottom, right = top + grid.shape[0], left + grid.shape[1]
    frame[top:bottom, left:right] = grid
    frame[top:bottom, left:right] += COLOUR_OFFSET
    if bottom < FRAME:
        frame[bottom, left:right] = EOS_ID
    if right < FRAME:
        frame[top:bottom, right] = EOS_ID


# Augmentations


def identifier_name(task: str, transform: int, colours: np.ndarray) -> str:
    """TRM's name of an augmentation, `task|||t3|||0251346789`: symmetry, then the new colour of each colour."""
    return f"{task}|||t{transform}|||{''.join(str(colour) for colour in colours)}"


def parse_identifier(name: str) -> tuple[str, int, np.ndarray]:
    """`(task, dihedral id, colour map)` of an identifier of TRM, HRM (`task_t3_0251346789`), or a bare task name.

    The colour map is uint8 [10]: new colour of each colour. A bare task name is the unchanged task.

    Raises:
        ValueError: a malformed identifier, or digits that are no permutation of 0..9.
    """
    match = TRM_IDENTIFIER.fullmatch(name) or HRM_IDENTIFIER.fullmatch(name)
    if match is None:
        if "|||" in name:
            raise ValueError(f"identifier {name!r} is malformed; expected task|||t<0-7>|||<10 digits>")
        return name, 0, IDENTITY_COLOURS
    task, transform, digits = match.groups()
    if sorted(digits) != list("0123456789"):
        raise ValueError(f"identifier {name!r}: colours {digits} are no permutation of 0123456789")
    return task, int(transform), np.frombuffer(digits.encode(), dtype=np.uint8) - ord("0")


def apply_augmentation(grid: np.ndarray, name: str) -> np.ndarray:
    """The grid as the puzzle named `name` shows it."""
    _, transform, colours = parse_identifier(name)
    return dihedral(colours[grid], transform)


def undo_augmentation(grid: np.ndarray, name: str) -> np.ndarray:
    """The original of a grid that the puzzle named `name` shows: inverse symmetry, then inverse colour map."""
    _, transform, colours = parse_identifier(name)
    return np.argsort(colours).astype(np.uint8)[inverse_dihedral(grid, transform)]


def augmentations(task: ArcTask, num_aug: int, seed: int) -> Iterator[tuple[str, list[Pair]]]:
    """Yields `(identifier name, train pairs then test pairs)`: the task, then up to `num_aug` distinct variants.

    Draws at most 5 * num_aug variants, so a task with few distinct ones yields fewer.
    """
    pairs = [*task.train, *task.test]
    yield task.name, pairs
    rng = _task_rng(seed, task.name, "augmentation")
    seen = {_fingerprint(pairs)}
    for _ in range(TRIALS_PER_AUGMENTATION * num_aug):
        if len(seen) > num_aug:
            return
        transform = int(rng.integers(NUM_DIHEDRAL))
        colours = np.concatenate([[0], rng.permutation(np.arange(1, NUM_COLOURS))]).astype(np.uint8)
        variant = [
            Pair(*(None if grid is None else dihedral(colours[grid], transform) for grid in pair)) for pair in pairs
        ]
        fingerprint = _fingerprint(variant)
        if fingerprint not in seen:
            seen.add(fingerprint)
            yield identifier_name(task.name, transform, colours), variant


def _task_rng(seed: int, name: str, purpose: str) -> np.random.Generator:
    """A generator of its own for each task and purpose; sha256 because `hash()` differs between processes."""
    digest = hashlib.sha256(f"{purpose}:{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, int.from_bytes(digest, "little")])))


def _fingerprint(pairs: list[Pair]) -> bytes:
    """Equal for two variants with the same pairs in any order."""
    return b"".join(sorted(hashlib.sha256(b"|".join(_grid_bytes(grid) for grid in pair)).digest() for pair in pairs))


def _grid_bytes(grid: np.ndarray | None) -> bytes:
    return b"" if grid is None else bytes(grid.shape) + grid.tobytes()


# Data sets


def build_arc(
    tasks: Sequence[ArcTask],
    num_aug: int = 1000,
    seed: int = 42,
    cache_dir: str | Path | None = None,
    progress: bool | None = None,
) -> tuple["datasets.DatasetDict", PuzzleInfo]:
    """Augments and encodes tasks; the rows go to Arrow files, so memory does not grow with their number.

    The train split holds all pairs of trained tasks and the train pairs of evaluated ones, each pair shifted by a
    random offset except one per puzzle; the test split holds the test pairs of evaluated tasks, in all augmentations,
    unshifted. Identifiers count from 1 over the sorted tasks and their augmentations.

    Args:
        tasks: from `read_tasks`.
        num_aug: variants per task besides the original.
        seed: of augmentations and offsets.
        cache_dir: where the Arrow files go; see `working_folder`. Full ARC needs about 8 GB.
        progress: a progress bar; None shows it on a terminal only.

    Raises:
        ValueError: no tasks, or a negative `num_aug` or `seed`.
    """
    from datasets import DatasetDict
    from tqdm.auto import tqdm

    options = build_options(tasks, num_aug, seed)
    work = working_folder(cache_dir)
    writers = {"train": _SplitWriter(work / "train.arrow")}
    if any(task.evaluated for task in tasks):
        writers["test"] = _SplitWriter(work / "test.arrow")
    identifiers = [BLANK_IDENTIFIER]
    hide_bar = None if progress is None else not progress
    for task in tqdm(sorted(tasks, key=lambda task: task.name), desc="ARC tasks", unit="task", disable=hide_bar):
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
    splits = DatasetDict({name: writer.rows.finish() for name, writer in writers.items()})
    return splits, PuzzleInfo("arc", (FRAME, FRAME), VOCAB_SIZE, identifiers=identifiers, options=options)


def build_options(tasks: Sequence[ArcTask], num_aug: int, seed: int) -> dict[str, Any]:
    """What identifies a build, kept in `puzzle.json`; known before the rows are made."""
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


def task_to_json(task: ArcTask) -> dict[str, list[dict[str, list]]]:
    """The task as its JSON file had it; hidden outputs are left out."""
    names = Pair._fields
    return {
        part: [{name: grid.tolist() for name, grid in zip(names, pair) if grid is not None} for pair in pairs]
        for part, pairs in (("train", task.train), ("test", task.test))
    }


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
    """Encodes puzzles and numbers puzzles and groups within one split."""

    def __init__(self, path: Path):
        self.rows = RowWriter(path, SEQ_LEN)
        self.puzzles = self.groups = self.puzzles_at_last_group = 0

    def add_puzzle(self, pairs: Sequence[Pair], offsets: Sequence[tuple[int, int]], identifier: int) -> None:
        frames = np.zeros((2, len(pairs), FRAME, FRAME), dtype=np.int8)
        for i, (pair, offset) in enumerate(zip(pairs, offsets)):
            for frame, grid in zip(frames[:, i], pair):
                if grid is not None:
                    _place(grid, offset, frame)
        inputs, labels = frames.reshape(2, len(pairs), SEQ_LEN)
        labels[labels == PAD_ID] = IGNORE_LABEL
        scalars = np.repeat(
            np.array([[identifier], [self.puzzles], [self.groups]], dtype=np.int32), len(pairs), axis=1
        )
        self.rows.write(inputs, labels, *scalars)
        self.puzzles += 1

    def end_group(self) -> None:
        """The task is done; a split that got none of its pairs does not count it."""
        self.groups += self.puzzles > self.puzzles_at_last_group
        self.puzzles_at_last_group = self.puzzles


def _offsets(pairs: Sequence[Pair], rng: np.random.Generator) -> list[tuple[int, int]]:
    """A random corner for each pair, shared by its input and output; one random pair stays at (0, 0)."""
    fixed = rng.integers(len(pairs))
    room = FRAME - np.array([np.maximum(pair.input.shape, pair.output.shape) for pair in pairs])
    corners = rng.integers(0, room + 1)
    corners[fixed] = 0
    return [(int(row), int(column)) for row, column in corners]
