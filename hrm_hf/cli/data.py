"""`hrm-hf data`: builds data sets; those of cosmology and the Go coder are in `data_cosmology.py`, `data_go.py`."""

import json
import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from .data_cosmology import cosmology
from .data_cosmology_files import cosmology_files
from .data_go import go, go_tokenizer


app = typer.Typer(no_args_is_help=True, help="Build data sets (folders that datasets.load_dataset reads).")
app.command("cosmology")(cosmology)
app.command("cosmology-files")(cosmology_files)
app.command("go")(go)
app.command("go-tokenizer")(go_tokenizer)


def report(result: dict, as_json: bool) -> None:
    """Prints a command's result: JSON with --json, else a line per entry."""
    typer.echo(json.dumps(result) if as_json else "\n".join(f"{key}: {value}" for key, value in result.items()))


def ensure_built(path: str | None, command: str | None) -> None:
    """Builds the data set at `path` with the arguments of `hrm-hf data`, unless it exists.

    Raises:
        ValueError: it does not exist and there is no command to build it.
    """
    from ..puzzles.dataset import INFO_FILE

    if path is None:
        raise ValueError("no data set: give --data_path, a puzzle data set's folder or its name on the Hub")
    if (Path(path) / INFO_FILE).exists():
        return
    if command:
        typer.main.get_command(app).main([*shlex.split(command), "--out", path], standalone_mode=False)
    elif Path(path).exists() or path[:1] in "./~":
        raise ValueError(f"{path} holds no puzzle data set; build one with `hrm-hf data ... --out {path}`")


@app.command()
def arc(
    sources: Annotated[
        list[str],
        typer.Argument(help="Bundles, folders or Kaggle files; PATH:SUBSET,SUBSET takes part of one."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    num_aug: Annotated[int, typer.Option(min=0, help="Augmentations per task besides the original.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of augmentations and offsets.")] = 42,
    evaluate: Annotated[
        str, typer.Option(help="Subsets whose test pairs form the test split, comma-separated.")
    ] = "evaluation",
    train_only: Annotated[bool, typer.Option("--train-only", help="Evaluate nothing: train on all pairs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
):
    """Build ARC-AGI / ConceptARC with augmentations; test_puzzles.json for voting is written beside it.

    Example: hrm-hf data arc arc_agi_1.json.gz concept_arc.json.gz --out data/arc1 --num-aug 300
    """
    from ..puzzles.arc import build_arc, build_options, read_tasks, save_arc_dataset

    started = time.perf_counter()
    try:
        tasks = read_tasks(sources, () if train_only else evaluate.split(","))
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error)) from error
    _refuse_other_build(out, build_options(tasks, num_aug, seed))
    splits, info = build_arc(tasks, num_aug, seed)
    save_arc_dataset(splits, info, tasks, out)
    report({**_summary(out, splits, info), "seconds": round(time.perf_counter() - started, 1)}, as_json)


@app.command("import")
def import_original(
    source: Annotated[Path, typer.Argument(help="Folder of the original layout: identifiers.json, train/, test/.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
):
    """Convert a data set that the original HRM or TRM scripts built (.npy arrays) into ours.

    Example: hrm-hf data import HRM/data/sudoku-extreme-1k-aug-1000 --out data/sudoku
    """
    from ..puzzles.dataset import save_puzzle_dataset
    from ..puzzles.npy_layout import read_original

    if not source.is_dir():
        raise typer.BadParameter(f"{source} is no folder; expected identifiers.json, train/ and test/ in it")
    splits, info = read_original(source)
    save_puzzle_dataset(splits, info, out)
    report({**_summary(out, splits, info), "task": info.task, "grid_shape": list(info.grid_shape)}, as_json)


@app.command()
def export(
    source: Annotated[str, typer.Argument(help="Puzzle data set: a folder of ours, or a data set on the Hub.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
):
    """Write a puzzle data set in the layout that the original HRM and TRM code trains on (.npy arrays).

    Example: hrm-hf data export data/arc1 --out TRM/data/arc1
    """
    from datasets import DatasetDict, get_dataset_split_names

    from ..puzzles.dataset import load_puzzle_dataset, load_puzzle_info
    from ..puzzles.npy_layout import write_original

    if source[:1] in "./~" and not Path(source).is_dir():
        raise typer.BadParameter(f"{source} is no folder; expected a puzzle data set (or OWNER/NAME on the Hub)")
    info = load_puzzle_info(source)
    if Path(source).is_dir():
        names = [file.name.rsplit("-", 1)[0] for file in sorted(Path(source, "data").glob("*.parquet"))]
    else:
        names = get_dataset_split_names(source)
    splits = DatasetDict({name: load_puzzle_dataset(source, name) for name in names})
    write_original(splits, info, out)
    report(_summary(out, splits, info), as_json)


@app.command()
def sudoku(
    source: str = typer.Option(
        "generate", help="generate, a file or folder (CSV, JSONL, parquet), or hub:OWNER/NAME."
    ),
    out: Path = typer.Option(..., help="Folder to write."),  # noqa: B008
    size: int | None = typer.Option(None, help="4, 6 or 9; generate: 9 if not given, else found in the source."),
    clues: str | None = typer.Option(None, help="generate: given cells, as 8 or 7-10; default 8, 14, 30 by size."),
    num_train: int | None = typer.Option(None, min=0, help="generate: training puzzles, default 1000."),
    num_test: int | None = typer.Option(None, min=0, help="generate: test puzzles, default 1000."),
    test_fraction: float | None = typer.Option(None, help="generate: share of the 288 4x4 grids kept for testing."),
    num_aug: int = typer.Option(0, min=0, help="Symmetries added to each training puzzle."),
    subsample_size: int | None = typer.Option(None, min=1, help="Source: training puzzles to draw from it."),
    min_difficulty: float | None = typer.Option(None, help="Source: lowest rating to keep."),
    test_size: int | None = typer.Option(None, min=1, help="Source without a test split: last rows that become one."),
    seed: int = typer.Option(0, min=0, help="Seed of generation, sampling and augmentation."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
):
    """Build a Sudoku data set: generated with proven unique solutions, or read from a source.

    Example: hrm-hf data sudoku --size 4 --clues 8 --num-train 20000 --num-test 1000 --out data/sudoku4

    Example: hrm-hf data sudoku --source hub:sapientinc/sudoku-extreme --subsample-size 1000 --num-aug 1000 --out s9
    """
    from ..puzzles.sudoku import DEFAULT_CLUES, generated_sudoku, sudoku_from_source, sudoku_shape

    generating = source == "generate"
    only_generate = {"clues": clues, "num_train": num_train, "num_test": num_test, "test_fraction": test_fraction}
    only_source = {"subsample_size": subsample_size, "min_difficulty": min_difficulty, "test_size": test_size}
    _refuse_unused(source, only_source if generating else only_generate)
    shared = {"size": 9 if generating and size is None else size, "num_aug": num_aug, "seed": seed}
    if shared["size"] is not None:
        _usage(sudoku_shape, shared["size"])
    if not generating:
        _build(sudoku_from_source, source, {**shared, **only_source}, out, as_json)
        return
    only_generate["clues"] = DEFAULT_CLUES[shared["size"]] if clues is None else _parse_clues(clues)
    given = {name: value for name, value in only_generate.items() if value is not None}
    defaults = {"num_train": 1000, "num_test": 1000, "test_fraction": 1 / 6}
    _build(generated_sudoku, None, {**defaults, **shared, **given}, out, as_json)


@app.command()
def maze(
    source: str = typer.Option(
        "generate", help="generate, a file or folder (CSV, JSONL, parquet), or hub:OWNER/NAME."
    ),
    out: Path = typer.Option(..., help="Folder to write."),  # noqa: B008
    height: int | None = typer.Option(None, min=3, help="Rows; generate: 30 if not given, source: square mazes."),
    width: int | None = typer.Option(None, min=3, help="Columns, as --height."),
    num_train: int | None = typer.Option(None, min=0, help="generate: training mazes, default 1000."),
    num_test: int | None = typer.Option(None, min=0, help="generate: test mazes, default 1000."),
    openings: float | None = typer.Option(None, help="generate: share of spare walls opened, default 0.05."),
    min_path_length: int = typer.Option(1, min=1, help="Fewest steps from S to G; 110 makes 30x30 mazes hard."),
    aug: bool = typer.Option(False, "--aug", help="Add the 7 other symmetries of each training maze."),
    test_size: int | None = typer.Option(None, min=1, help="Source without a test split: last rows that become one."),
    seed: int | None = typer.Option(None, min=0, help="generate: seed, default 0."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
):
    """Build a maze data set: generated with one shortest path each, or read from a source.

    Example: hrm-hf data maze --height 30 --width 30 --min-path-length 110 --out data/maze

    Example: hrm-hf data maze --source hub:sapientinc/maze-30x30-hard-1k --aug --out data/maze
    """
    from ..puzzles.maze import DEFAULT_OPENINGS, generated_mazes, mazes_from_source

    generating = source == "generate"
    only_generate = {"num_train": num_train, "num_test": num_test, "openings": openings, "seed": seed}
    _refuse_unused(source, {"test_size": test_size} if generating else only_generate)
    shared = {"min_path_length": min_path_length, "aug": aug}
    if generating:
        given = {"height": height, "width": width, **only_generate}
        given = {name: value for name, value in given.items() if value is not None}
        defaults = {"height": 30, "width": 30, "num_train": 1000, "num_test": 1000, "seed": 0}
        _build(generated_mazes, None, {"openings": DEFAULT_OPENINGS, **defaults, **shared, **given}, out, as_json)
        return
    if (height is None) != (width is None):
        raise typer.BadParameter("--height and --width belong together; give both, or none for square mazes")
    grid_shape = None if height is None else [height, width]
    _build(mazes_from_source, source, {**shared, "grid_shape": grid_shape, "test_size": test_size}, out, as_json)


def _refuse_unused(source: str, options: dict) -> None:
    """An option that this source would not read is an error, not a surprise."""
    for name, value in options.items():
        if value is not None:
            kind = "generated sets" if source == "generate" else "sets read from a source"
            raise typer.BadParameter(f"--{name.replace('_', '-')} has no effect on {kind} (--source {source})")


def _parse_clues(text: str) -> int | list[int]:
    parts = text.split("-")
    if len(parts) > 2 or not all(part.isdigit() for part in parts):
        raise typer.BadParameter(f"--clues is {text!r}; expected a number like 8 or a range like 7-10")
    return int(text) if len(parts) == 1 else [int(part) for part in parts]


def _usage(function, *args, **kwargs):
    """Calls a function whose ValueErrors can only come from the options: they are bad usage, exit status 2."""
    try:
        return function(*args, **kwargs)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _build(builder, source: str | None, options: dict, out: Path, as_json: bool) -> None:
    """Runs a builder of Sudoku or mazes, writes its data set and reports; `source` None means generate."""
    from ..puzzles.dataset import save_puzzle_dataset

    started = time.perf_counter()
    _refuse_other_build(out, {"source": source or "generate", **options})
    if source is None:
        splits, info = _usage(builder, **options, progress=True)
    else:
        try:
            splits, info = builder(source, **options, progress=True)
        except FileNotFoundError as error:
            raise typer.BadParameter(str(error)) from error
    if not splits:
        raise typer.BadParameter("the data set is empty; raise --num-train or --num-test")
    save_puzzle_dataset(splits, info, out)
    report({**_summary(out, splits, info), "seconds": round(time.perf_counter() - started, 1)}, as_json)


def _refuse_other_build(out: Path, options: dict) -> None:
    """Says before a long build, not after it, that `out` is taken."""
    from ..puzzles.dataset import INFO_FILE, load_puzzle_info

    if (out / INFO_FILE).exists() and load_puzzle_info(out).options != options:
        raise typer.BadParameter(f"{out} already holds a puzzle data set with other options; choose another --out")


def _summary(out: Path, splits, info) -> dict:
    rows = {f"{name}_rows": len(split) for name, split in splits.items()}
    repeated = {"repeated": info.repeated} if info.repeated else {}
    return {"out": str(out), **rows, "puzzle_identifiers": info.num_puzzle_identifiers, **repeated}
