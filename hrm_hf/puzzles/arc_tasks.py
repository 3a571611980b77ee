"""Tasks of ARC-AGI-1, ARC-AGI-2 and ConceptARC: read from bundles, folders and Kaggle files, and checked.

    tasks = read_tasks(["arc_agi_1.json.gz", "concept_arc.json.gz"])

A task that is both trained and evaluated is an error. Data sets of tasks are built in `arc`.
"""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..io.files import load_json
from .arc_grids import FRAME, NUM_COLORS, parse_identifier
from .dataset import BLANK_IDENTIFIER


logger = logging.getLogger(__name__)

EVALUATED_SUBSETS = ("evaluation",)
KAGGLE_SUFFIX = "_challenges"


class Pair(NamedTuple):
    """One demonstration or question: grids of colors 0..9, uint8 [rows, columns]; a hidden output is None."""

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

    A warning names trained tasks that have the pairs of an evaluated one under another name.

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
    _validate_no_leaks(roles)
    _warn_of_copies(roles)
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
    if not (all if evaluated else any)(pairs.values()):
        raise ValueError(f"{where} is empty: an evaluated task needs train and test pairs, another one any pair")
    trained = (*pairs["train"], *(() if evaluated else pairs["test"]))
    if hidden := sum(pair.output is None for pair in trained):
        raise ValueError(f"{where} has {hidden} pairs to train on without 'output'; add solutions or evaluate it")
    return ArcTask(name, pairs["train"], pairs["test"], evaluated, source)


def task_to_json(task: ArcTask) -> dict[str, list[dict[str, list]]]:
    """The task as its JSON file had it; hidden outputs are left out."""
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
        tasks[file.stem] = (load_json(file), str(file))
    if not content:
        raise ValueError(
            f"{path} holds no .json files; expected folders of tasks, or Kaggle files *{KAGGLE_SUFFIX}.json"
        )
    return content


def _read_file(file: Path) -> dict[str, dict[str, tuple[Any, str]]]:
    stem = file.name.split(".json")[0]
    raw = load_json(file)
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
    solutions = load_json(file)
    for name, task in tasks.items():
        tests, outputs = task.get("test", []), solutions.get(name, [])
        if len(tests) != len(outputs):
            raise ValueError(
                f"{file}: task {name!r} has {len(outputs)} solutions; {challenges.name} has {len(tests)} tests"
            )
        task["test"] = [{**pair, "output": output} for pair, output in zip(tests, outputs)]


def _pair(raw: Any, where: str) -> Pair:
    if not isinstance(raw, dict) or "input" not in raw:
        raise ValueError(f"{where} must be an object with 'input' and 'output'; it is {str(raw)[:40]}")
    output = raw.get("output")
    return Pair(_grid(raw["input"], f"{where}, input"), None if output is None else _grid(output, f"{where}, output"))


def _grid(raw: Any, where: str) -> np.ndarray:
    """A checked grid, uint8 [rows, columns]."""
    rows = raw.tolist() if isinstance(raw, np.ndarray) else raw
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        raise ValueError(f"{where} must be a list of rows, each a list of colors; it is {str(raw)[:40]}")
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        raise ValueError(f"{where} is ragged: its rows have {sorted(widths)} cells; all rows must be equally long")
    if max(len(rows), *widths) > FRAME:
        raise ValueError(f"{where} is {len(rows)} x {len(rows[0])}; at most {FRAME} x {FRAME} fit")
    for row in rows:
        for color in row:
            if type(color) is not int or not 0 <= color < NUM_COLORS:
                raise ValueError(f"{where} holds the color {color!r}; expected a whole number from 0 to 9")
    return np.array(rows, dtype=np.uint8)


def _validate_no_leaks(roles: dict[bool, dict[str, ArcTask]]) -> None:
    if leaks := sorted(roles[True].keys() & roles[False].keys()):
        trained, evaluated = (roles[role][leaks[0]].source for role in (False, True))
        raise ValueError(
            f"{len(leaks)} evaluated tasks are also trained on: {_some(leaks)} ({leaks[0]} is trained from {trained} "
            f"and evaluated from {evaluated}). ARC-AGI-2 training repeats most of ARC-AGI-1: take one of the two, "
            "or select subsets with PATH:SUBSET"
        )


def _warn_of_copies(roles: dict[bool, dict[str, ArcTask]]) -> None:
    """Trained tasks with the pairs of an evaluated one under another name stay: published metrics include one."""
    evaluated = {fingerprint([*task.train, *task.test]): task.name for task in roles[True].values()}
    for name, task in roles[False].items():
        if twin := evaluated.get(fingerprint([*task.train, *task.test])):
            logger.warning(
                "the answers of the evaluated task %s are trained on: task %s of %s is the same under another name",
                twin, name, task.source,
            )  # fmt: skip


def fingerprint(pairs: Sequence[Pair]) -> bytes:
    """Equal for two tasks, or variants, with the same pairs in any order."""
    return b"".join(sorted(hashlib.sha256(b"|".join(_grid_bytes(grid) for grid in pair)).digest() for pair in pairs))


def _grid_bytes(grid: np.ndarray | None) -> bytes:
    return b"" if grid is None else bytes(grid.shape) + grid.tobytes()


def _some(names: Iterable[str], count: int = 5) -> str:
    names = sorted(names)
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
