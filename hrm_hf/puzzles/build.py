"""Commands `hrm-hf data puzzle`, `sudoku`, `maze`, `arc`, `import` and `export`, also used by `build_data`."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..io.evaluation import validate_data
from ..io.files import load_info, one_at_a_time, visible_files
from ..io.options import Options, parse_command
from ..io.usage import UsageError, as_usage_errors
from ..io.workers import usable_cores
from .dataset import INFO_FILE, PuzzleInfo, load_puzzle_dataset, load_puzzle_info, save_puzzle_dataset
from .options import BuildArc, BuildMaze, BuildPuzzle, BuildPuzzles, BuildSudoku, ExportPuzzles, ImportPuzzles


def ensure_built(path: str | None, command: str | None) -> None:
    """Unless the data set at `path` exists, build it by running `hrm-hf data` with the arguments `command`."""
    if path is None:
        raise ValueError("data_path=None: a data set is required; use --data_path FOLDER or OWNER/NAME on the Hub")
    if (Path(path) / INFO_FILE).exists():
        return
    if command:
        try:
            name, options = parse_command(command, OPTIONS, out=Path(path))
            BUILDERS[name](options)
        except UsageError as error:
            raise ValueError(f"build_data={command!r}: {error}") from error
    elif Path(path).exists() or path[:1] in "./~":
        raise ValueError(f"{path} is not a puzzle data set; build one with `hrm-hf data ... --out {path}`")


@one_at_a_time
def build_arc(options: BuildArc) -> dict[str, Any]:
    """Build an augmented ARC-AGI or ConceptARC data set, with the `test_puzzles.json` that voting reads."""
    from . import arc

    started = time.perf_counter()
    try:
        tasks = arc.read_tasks(options.sources, () if options.train_only else options.evaluate.split(","))
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    _validate_place(options.out, arc.build_options(tasks, options.num_aug, options.seed))
    splits, info = arc.build_arc(tasks, options.num_aug, options.seed)
    arc.save_arc_dataset(splits, info, tasks, options.out)
    return _summary(options.out, splits, info) | {"seconds": round(time.perf_counter() - started, 1)}


@one_at_a_time
def import_npy(options: ImportPuzzles) -> dict[str, Any]:
    """Convert a data set built by the original HRM or TRM scripts (.npy arrays) to our layout."""
    from .npy_layout import read_original

    if not options.source.is_dir():
        raise UsageError(f"{options.source} is not a folder; expected one with identifiers.json, train/ and test/")
    splits, info = read_original(options.source)
    save_puzzle_dataset(splits, info, options.out)
    return _summary(options.out, splits, info) | {"task": info.task, "grid_shape": list(info.grid_shape)}


@one_at_a_time
def export_npy(options: ExportPuzzles) -> dict[str, Any]:
    """Write a puzzle data set in the layout of the original HRM and TRM code (.npy arrays)."""
    source = options.source
    validate_data(source, "puzzle data set")
    from datasets import DatasetDict, get_dataset_split_names

    from .npy_layout import write_original

    info = load_puzzle_info(source)
    if Path(source).is_dir():
        names = [file.name.rsplit("-", 1)[0] for file in visible_files(Path(source, "data"), "*.parquet")]
    else:
        names = get_dataset_split_names(source)
    splits = DatasetDict({name: load_puzzle_dataset(source, name) for name in names})
    write_original(splits, info, options.out)
    return _summary(options.out, splits, info)


@one_at_a_time
def build_sudoku(options: BuildSudoku) -> dict[str, Any]:
    """Build a Sudoku data set: generate puzzles with proven unique solutions, or read them from a source."""
    from .sudoku import generated_sudoku, sudoku_from_source

    shared = {"num_aug": options.num_aug, "test_share": options.test_share, "seed": options.seed}
    if options.generates:
        sizes = (options.size, options.num_train, options.num_test, options.clue_range())
        workers = options.workers or usable_cores()
        return _build(options, lambda: generated_sudoku(*sizes, **shared, mix=options.mix, workers=workers))
    chosen = {name: getattr(options, name) for name in ("subsample_size", "min_difficulty", "test_size")}
    return _build(options, lambda: sudoku_from_source(options.source, options.size, **chosen, **shared))


@one_at_a_time
def build_puzzle(options: BuildPuzzle) -> dict[str, Any]:
    """Build a data set of any task: with the task's generator, or from pairs of puzzles and solutions."""
    from .any_puzzle import describe, generated_puzzles, puzzles_from_source
    from .task_registry import task_class
    from .tasks import SHIPPED_TASKS

    kind = as_usage_errors(lambda: task_class(options.task))
    if kind.name in SHIPPED_TASKS and kind.name in OPTIONS:
        raise UsageError(f"TASK={options.task!r}: has its own command; use `hrm-hf data {kind.name}`")
    shape = None if options.height is None else (options.height, options.width)

    def generate():
        info, task = describe(kind, shape)
        return generated_puzzles(task, options.num_train, options.num_test, options.seed), info

    def read():
        return puzzles_from_source(
            kind, options.source, shape, test_size=options.test_size, test_share=options.test_share
        )

    return _build(options.replace(task=kind.name), generate if options.generates else read)


@one_at_a_time
def build_maze(options: BuildMaze) -> dict[str, Any]:
    """Build a maze data set: generate mazes with a unique shortest path, or read them from a source."""
    from .maze import generated_mazes, mazes_from_source

    shared = {"min_path_length": options.min_path_length, "aug": options.aug}
    if options.generates:
        sizes = (options.height, options.width, options.num_train, options.num_test)
        return _build(options, lambda: generated_mazes(*sizes, openings=options.openings, seed=options.seed, **shared))
    shape = None if options.height is None else (options.height, options.width)
    held_out = {"test_size": options.test_size, "test_share": options.test_share}
    return _build(options, lambda: mazes_from_source(options.source, shape, **held_out, **shared))


BUILDERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "puzzle": build_puzzle, "sudoku": build_sudoku, "maze": build_maze, "arc": build_arc, "import": import_npy,
    "export": export_npy,
}  # fmt: skip
OPTIONS: dict[str, type[Options]] = {
    "puzzle": BuildPuzzle, "sudoku": BuildSudoku, "maze": BuildMaze, "arc": BuildArc, "import": ImportPuzzles,
    "export": ExportPuzzles,
}  # fmt: skip


def _validate_place(out: Path, options: dict[str, Any]) -> None:
    """Raise UsageError before a long build if `out` has a data set with different options."""
    if (out / INFO_FILE).exists() and load_info(out / INFO_FILE).get("options") != options:
        raise UsageError(f"{out} already has a puzzle data set with different options; choose another --out")


def _build(options: BuildPuzzles, builder: Callable) -> dict[str, Any]:
    """Run a builder and save its data set."""
    started = time.perf_counter()
    _validate_place(options.out, options.recorded())
    try:
        splits, info = as_usage_errors(builder) if options.generates else builder()
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    if not splits:
        raise UsageError("the data set is empty; increase --num-train or --num-test")
    info.options = options.recorded()
    save_puzzle_dataset(splits, info, options.out)
    return _summary(options.out, splits, info) | {"seconds": round(time.perf_counter() - started, 1)}


def _summary(out: Path, splits, info: PuzzleInfo) -> dict[str, Any]:
    rows = {f"{name}_rows": len(split) for name, split in splits.items()}
    repeated = {"repeated": info.repeated} if info.repeated else {}
    return {"out": str(out), **rows, "puzzle_identifiers": info.num_puzzle_identifiers, **repeated}
