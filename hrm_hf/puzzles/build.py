"""Puzzle data sets from beginning to end: options, a builder, a folder, and a report of what is in it.

These functions are the commands `hrm-hf data sudoku`, `maze`, `arc`, `import` and `export`, and what a recipe's
`build_data` calls.
"""

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..io.evaluation import validate_data
from ..io.usage import UsageError, as_usage_errors, run_command
from ..io.workers import usable_cores
from .dataset import INFO_FILE, PuzzleInfo, load_puzzle_dataset, load_puzzle_info, save_puzzle_dataset


UNFINISHED = "unfinished"  # folder of what a build has made so far


def ensure_built(path: str | None, command: str | None) -> None:
    """Builds the data set at `path` with the arguments of `hrm-hf data`, unless it exists.

    Raises:
        ValueError: it does not exist and there is no command to build it.
    """
    if path is None:
        raise ValueError("no data set: give --data_path, a puzzle data set's folder or its name on the Hub")
    if (Path(path) / INFO_FILE).exists():
        return
    if command:
        try:
            run_command(command, BUILDERS, out=Path(path))
        except UsageError as error:
            raise ValueError(f"build_data {command!r}: {error}") from error
    elif Path(path).exists() or path[:1] in "./~":
        raise ValueError(f"{path} holds no puzzle data set; build one with `hrm-hf data ... --out {path}`")


def build_arc(
    sources: list[str],
    out: Path,
    *,
    num_aug: int = 1000,
    seed: int = 42,
    evaluate: str = "evaluation",
    train_only: bool = False,
) -> dict[str, Any]:
    """Builds ARC-AGI or ConceptARC with augmentations; `test_puzzles.json` for voting is written beside it.

    Args:
        sources: bundles, folders or Kaggle files; PATH:SUBSET,SUBSET takes part of one.
        evaluate: subsets whose test pairs form the test split, with commas between them.
        train_only: evaluate nothing, train on all pairs.
    """
    from . import arc

    started = time.perf_counter()
    _validate_at_least(0, num_aug=num_aug, seed=seed)
    try:
        tasks = arc.read_tasks(sources, () if train_only else evaluate.split(","))
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    _validate_place(out, arc.build_options(tasks, num_aug, seed))
    splits, info = arc.build_arc(tasks, num_aug, seed)
    arc.save_arc_dataset(splits, info, tasks, out)
    return _summary(out, splits, info) | {"seconds": round(time.perf_counter() - started, 1)}


def import_npy(source: Path, out: Path) -> dict[str, Any]:
    """Converts a data set that the original HRM or TRM scripts built (.npy arrays) into ours."""
    from .npy_layout import read_original

    if not source.is_dir():
        raise UsageError(f"{source} is no folder; expected identifiers.json, train/ and test/ in it")
    splits, info = read_original(source)
    save_puzzle_dataset(splits, info, out)
    return _summary(out, splits, info) | {"task": info.task, "grid_shape": list(info.grid_shape)}


def export_npy(source: str, out: Path) -> dict[str, Any]:
    """Writes a puzzle data set in the layout that the original HRM and TRM code trains on (.npy arrays)."""
    validate_data(source, "puzzle data set")
    from datasets import DatasetDict, get_dataset_split_names

    from .npy_layout import write_original

    info = load_puzzle_info(source)
    if Path(source).is_dir():
        names = [file.name.rsplit("-", 1)[0] for file in sorted(Path(source, "data").glob("*.parquet"))]
    else:
        names = get_dataset_split_names(source)
    splits = DatasetDict({name: load_puzzle_dataset(source, name) for name in names})
    write_original(splits, info, out)
    return _summary(out, splits, info)


def build_sudoku(
    out: Path,
    *,
    source: str = "generate",
    size: int | None = None,
    clues: str | None = None,
    num_train: int | None = None,
    num_test: int | None = None,
    test_fraction: float | None = None,
    num_aug: int = 0,
    subsample_size: int | None = None,
    min_difficulty: float | None = None,
    test_size: int | None = None,
    test_share: float | None = None,
    mix: str | None = None,
    seed: int = 0,
    workers: int | None = None,
) -> dict[str, Any]:
    """Builds a Sudoku data set: generated with proven unique solutions, or read from a source.

    Puzzles are kept in the folder `unfinished` of `out` while they are made, and a repeated call goes on with them.

    Args:
        source: "generate", a file or folder (CSV, JSONL, parquet), or hub:OWNER/NAME.
        size: 4, 6 or 9; of generated boards 9 if not given, else found in the source.
        clues: given cells of generated boards, as "8" or "7-10"; 8, 14 or 30 by size if not given.
        num_train, num_test: generated puzzles, 1000 each if not given.
        test_fraction: share of the 288 4x4 grids kept for testing, a sixth if not given.
        num_aug: symmetries added to each training puzzle.
        subsample_size, min_difficulty: training puzzles to take from a source, and the lowest rating to keep.
        test_size: of a source without a test split, the last rows that become one.
        test_share: of a source without a test split (`source` or `mix`), the share that becomes one: puzzles are
            chosen by a hash of their canonical form, which no order of rows and no symmetry changes.
        mix: a source that is added to generated puzzles; its test puzzles are the split test_mixed.
        workers: processes that generate; as many as there are processors if not given. They change nothing else.
    """
    from .sudoku import DEFAULT_CLUES, generated_sudoku, sudoku_from_source, sudoku_shape

    generating = source == "generate"
    only_generate = {"clues": clues, "num_train": num_train, "num_test": num_test, "test_fraction": test_fraction}
    only_source = {"subsample_size": subsample_size, "min_difficulty": min_difficulty, "test_size": test_size}
    unused = only_source if generating else {**only_generate, "mix": mix, "workers": workers}
    if generating and mix is None:
        unused["test_share"] = test_share
    _validate_used(source, unused)
    _validate_at_least(0, num_train=num_train, num_test=num_test, num_aug=num_aug, seed=seed)
    _validate_at_least(1, subsample_size=subsample_size, test_size=test_size, workers=workers)
    shared = {"size": 9 if generating and size is None else size, "num_aug": num_aug, "seed": seed}
    if shared["size"] is not None:
        as_usage_errors(sudoku_shape, shared["size"])
    if not generating:
        if test_share is not None:
            only_source["test_share"] = test_share
        return _build(sudoku_from_source, source, {**shared, **only_source}, out)
    if mix is not None:
        only_generate |= {"mix": mix, "test_share": test_share}
    only_generate["clues"] = DEFAULT_CLUES[shared["size"]] if clues is None else _parse_clues(clues)
    given = {name: value for name, value in only_generate.items() if value is not None}
    defaults = {"num_train": 1000, "num_test": 1000, "test_fraction": 1 / 6}
    how = {"workers": workers or usable_cores(), "store": out / UNFINISHED}
    summary = _build(partial(generated_sudoku, **how), None, {**defaults, **shared, **given}, out)
    shutil.rmtree(out / UNFINISHED, ignore_errors=True)
    return summary


def build_maze(
    out: Path,
    *,
    source: str = "generate",
    height: int | None = None,
    width: int | None = None,
    num_train: int | None = None,
    num_test: int | None = None,
    openings: float | None = None,
    min_path_length: int = 1,
    aug: bool = False,
    test_size: int | None = None,
    test_share: float | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Builds a maze data set: generated with one shortest path each, or read from a source.

    Args:
        source: as of `build_sudoku`.
        height, width: of generated mazes 30 if not given; of a source square mazes.
        num_train, num_test: generated mazes, 1000 each if not given.
        openings: share of spare walls that are opened in generated mazes, 0.05 if not given.
        min_path_length: fewest steps from S to G.
        aug: add the 7 other symmetries of each training maze.
        test_size, test_share: as of `build_sudoku`.
        seed: of generated mazes, 0 if not given.
    """
    from .maze import DEFAULT_OPENINGS, generated_mazes, mazes_from_source

    generating = source == "generate"
    only_generate = {"num_train": num_train, "num_test": num_test, "openings": openings, "seed": seed}
    only_source = {"test_size": test_size, "test_share": test_share}
    _validate_used(source, only_source if generating else only_generate)
    _validate_at_least(3, height=height, width=width)
    _validate_at_least(0, num_train=num_train, num_test=num_test, seed=seed)
    _validate_at_least(1, min_path_length=min_path_length, test_size=test_size)
    shared = {"min_path_length": min_path_length, "aug": aug}
    if generating:
        given = {"height": height, "width": width, **only_generate}
        given = {name: value for name, value in given.items() if value is not None}
        defaults = {"height": 30, "width": 30, "num_train": 1000, "num_test": 1000, "seed": 0}
        return _build(generated_mazes, None, {"openings": DEFAULT_OPENINGS, **defaults, **shared, **given}, out)
    if (height is None) != (width is None):
        raise UsageError("--height and --width belong together; give both, or none for square mazes")
    grid_shape = None if height is None else [height, width]
    only_source = {name: value for name, value in only_source.items() if value is not None or name == "test_size"}
    return _build(mazes_from_source, source, {**shared, "grid_shape": grid_shape, **only_source}, out)


BUILDERS = {"sudoku": build_sudoku, "maze": build_maze, "arc": build_arc, "import": import_npy, "export": export_npy}


def _validate_used(source: str, options: dict[str, Any]) -> None:
    """An option that this source would not read is an error, not a surprise."""
    for name, value in options.items():
        if value is not None:
            kind = "generated sets" if source == "generate" else "sets read from a source"
            raise UsageError(f"--{name.replace('_', '-')} has no effect on {kind} (--source {source})")


def _validate_at_least(least: int, **options: int | None) -> None:
    for name, value in options.items():
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; expected {least} or more")


def _validate_place(out: Path, options: dict[str, Any]) -> None:
    """Says before a long build, not after it, that `out` is taken."""
    if (out / INFO_FILE).exists() and load_puzzle_info(out).options != options:
        raise UsageError(f"{out} already holds a puzzle data set with other options; choose another --out")


def _parse_clues(text: str) -> int | list[int]:
    parts = text.split("-")
    if len(parts) > 2 or not all(part.isdigit() for part in parts):
        raise UsageError(f"--clues is {text!r}; expected a number like 8 or a range like 7-10")
    return int(text) if len(parts) == 1 else [int(part) for part in parts]


def _build(builder: Callable, source: str | None, options: dict[str, Any], out: Path) -> dict[str, Any]:
    """Runs a builder of Sudoku or mazes and writes its data set; `source` None means generate."""
    started = time.perf_counter()
    _validate_place(out, {"source": source or "generate", **options})
    try:
        if source is None:
            splits, info = as_usage_errors(builder, **options, progress=True)
        else:
            splits, info = builder(source, **options, progress=True)
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    if not splits:
        raise UsageError("the data set is empty; raise --num-train or --num-test")
    save_puzzle_dataset(splits, info, out)
    return _summary(out, splits, info) | {"seconds": round(time.perf_counter() - started, 1)}


def _summary(out: Path, splits, info: PuzzleInfo) -> dict[str, Any]:
    rows = {f"{name}_rows": len(split) for name, split in splits.items()}
    repeated = {"repeated": info.repeated} if info.repeated else {}
    return {"out": str(out), **rows, "puzzle_identifiers": info.num_puzzle_identifiers, **repeated}
