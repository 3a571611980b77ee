"""`hrm-hf data`: builds data sets; those of other tasks than puzzles are in `data_*.py`."""

import typer

from ..io.options import Options
from ..puzzles.data_options import BuildArc, BuildMaze, BuildSudoku, ExportPuzzles, ImportPuzzles
from .data_cosmology import cosmology, cosmology_files
from .data_go import go, go_prompts, go_tokenizer
from .data_reasoning import reasoning
from .options import takes
from .report import report, usage_errors


app = typer.Typer(no_args_is_help=True, help="Build data sets (folders that datasets.load_dataset reads).")
app.command("cosmology")(cosmology)
app.command("cosmology-files")(cosmology_files)
app.command("go")(go)
app.command("go-tokenizer")(go_tokenizer)
app.command("go-prompts")(go_prompts)
app.command("reasoning")(reasoning)


@app.command()
@takes(BuildArc)
def arc(options: BuildArc, as_json: bool):
    """Build ARC-AGI / ConceptARC with augmentations; test_puzzles.json for voting is written beside it.

    Example: hrm-hf data arc arc_agi_1.json.gz concept_arc.json.gz --out data/arc1 --num-aug 300
    """
    _build("arc", options, as_json)


@app.command("import")
@takes(ImportPuzzles)
def import_npy(options: ImportPuzzles, as_json: bool):
    """Convert a data set that the original HRM or TRM scripts built (.npy arrays) into ours.

    Example: hrm-hf data import HRM/data/sudoku-extreme-1k-aug-1000 --out data/sudoku
    """
    _build("import", options, as_json)


@app.command()
@takes(ExportPuzzles)
def export(options: ExportPuzzles, as_json: bool):
    """Write a puzzle data set in the layout that the original HRM and TRM code trains on (.npy arrays).

    Example: hrm-hf data export data/arc1 --out TRM/data/arc1
    """
    _build("export", options, as_json)


@app.command()
@takes(BuildSudoku)
def sudoku(options: BuildSudoku, as_json: bool):
    """Build a Sudoku data set: generated with proven unique solutions, or read from a source.

    The puzzles depend on the seed and the options alone, not on --workers.

    Example: hrm-hf data sudoku --size 4 --clues 8 --num-train 20000 --num-test 1000 --out data/sudoku4

    Example: hrm-hf data sudoku --source hub:sapientinc/sudoku-extreme --subsample-size 1000 --num-aug 1000 --out s9

    Example: hrm-hf data sudoku --clues 22-50 --num-train 100000 --mix rated.csv.gz --test-share 0.1 --out data/mixed
    """
    _build("sudoku", options, as_json)


@app.command()
@takes(BuildMaze)
def maze(options: BuildMaze, as_json: bool):
    """Build a maze data set: generated with one shortest path each, or read from a source.

    Example: hrm-hf data maze --height 30 --width 30 --min-path-length 110 --out data/maze

    Example: hrm-hf data maze --source hub:sapientinc/maze-30x30-hard-1k --aug --out data/maze
    """
    _build("maze", options, as_json)


def _build(name: str, options: Options, as_json: bool) -> None:
    from ..puzzles.build import BUILDERS

    with usage_errors():
        report(BUILDERS[name](options), as_json)
