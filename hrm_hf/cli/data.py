"""`hrm-hf data`: builds data sets; those of other tasks than puzzles are in `data_*.py`."""

from pathlib import Path
from typing import Annotated

import typer

from .data_cosmology import cosmology, cosmology_files
from .data_go import go, go_prompts, go_tokenizer
from .data_reasoning import reasoning
from .report import AsJson, run


app = typer.Typer(no_args_is_help=True, help="Build data sets (folders that datasets.load_dataset reads).")
app.command("cosmology")(cosmology)
app.command("cosmology-files")(cosmology_files)
app.command("go")(go)
app.command("go-tokenizer")(go_tokenizer)
app.command("go-prompts")(go_prompts)
app.command("reasoning")(reasoning)


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
    as_json: AsJson = False,
):
    """Build ARC-AGI / ConceptARC with augmentations; test_puzzles.json for voting is written beside it.

    Example: hrm-hf data arc arc_agi_1.json.gz concept_arc.json.gz --out data/arc1 --num-aug 300
    """
    options = dict(locals())
    from ..puzzles.build import build_arc

    run(build_arc, options)


@app.command("import")
def import_npy(
    source: Annotated[Path, typer.Argument(help="Folder of the original layout: identifiers.json, train/, test/.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    as_json: AsJson = False,
):
    """Convert a data set that the original HRM or TRM scripts built (.npy arrays) into ours.

    Example: hrm-hf data import HRM/data/sudoku-extreme-1k-aug-1000 --out data/sudoku
    """
    options = dict(locals())
    from ..puzzles import build

    run(build.import_npy, options)


@app.command()
def export(
    source: Annotated[str, typer.Argument(help="Puzzle data set: a folder of ours, or a data set on the Hub.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    as_json: AsJson = False,
):
    """Write a puzzle data set in the layout that the original HRM and TRM code trains on (.npy arrays).

    Example: hrm-hf data export data/arc1 --out TRM/data/arc1
    """
    options = dict(locals())
    from ..puzzles.build import export_npy

    run(export_npy, options)


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
    test_share: float | None = typer.Option(
        None, help="Source (or --mix) without a test split: share that becomes one, by a hash of canonical forms."
    ),
    mix: str | None = typer.Option(None, help="generate: a source to add; its test puzzles are split test_mixed."),
    seed: int = typer.Option(0, min=0, help="Seed of generation, sampling and augmentation."),
    workers: int | None = typer.Option(None, min=1, help="generate: processes, default one a processor."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
):
    """Build a Sudoku data set: generated with proven unique solutions, or read from a source.

    The puzzles hang on the seed and the options alone, not on --workers. The same command finishes a build that was
    interrupted.

    Example: hrm-hf data sudoku --size 4 --clues 8 --num-train 20000 --num-test 1000 --out data/sudoku4

    Example: hrm-hf data sudoku --source hub:sapientinc/sudoku-extreme --subsample-size 1000 --num-aug 1000 --out s9

    Example: hrm-hf data sudoku --clues 22-50 --num-train 100000 --mix rated.csv.gz --test-share 0.1 --out data/mixed
    """
    options = dict(locals())
    from ..puzzles.build import build_sudoku

    run(build_sudoku, options)


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
    test_share: float | None = typer.Option(
        None, help="Source without a test split: share that becomes one, by a hash of canonical forms."
    ),
    seed: int | None = typer.Option(None, min=0, help="generate: seed, default 0."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
):
    """Build a maze data set: generated with one shortest path each, or read from a source.

    Example: hrm-hf data maze --height 30 --width 30 --min-path-length 110 --out data/maze

    Example: hrm-hf data maze --source hub:sapientinc/maze-30x30-hard-1k --aug --out data/maze
    """
    options = dict(locals())
    from ..puzzles.build import build_maze

    run(build_maze, options)
