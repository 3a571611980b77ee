"""`hrm-hf data`: build data sets of puzzles, maps, Go code and reasoning tasks."""

from typing import Any

import typer

from ..cosmology.options import BuildCosmology, BuildFromFiles
from ..golang.options import BuildGo, BuildGoPrompts, BuildGoTokenizer
from ..io.files import CHECKSUMS
from ..puzzles.options import BuildArc, BuildMaze, BuildPuzzle, BuildSudoku, ExportPuzzles, ImportPuzzles
from ..text.options import BuildReasoning
from .command import report, takes


app = typer.Typer(no_args_is_help=True, help="Build data sets that datasets.load_dataset can read.")


def _build_puzzles(name: str, options: Any, as_json: bool) -> None:
    from ..puzzles.build import BUILDERS

    report(BUILDERS[name](options), as_json)


@app.command()
@takes(BuildArc)
def arc(options: BuildArc, as_json: bool):
    """Build an augmented ARC-AGI or ConceptARC data set, with the test_puzzles.json that voting reads.

    Example: hrm-hf data arc arc_agi_1.json.gz concept_arc.json.gz --out data/arc1 --num-aug 300
    """
    _build_puzzles("arc", options, as_json)


@app.command("import")
@takes(ImportPuzzles)
def import_npy(options: ImportPuzzles, as_json: bool):
    """Convert a data set (.npy arrays) from the original HRM or TRM scripts to our format.

    Example: hrm-hf data import HRM/data/sudoku-extreme-1k-aug-1000 --out data/sudoku
    """
    _build_puzzles("import", options, as_json)


@app.command()
@takes(ExportPuzzles)
def export(options: ExportPuzzles, as_json: bool):
    """Write a puzzle data set as .npy arrays for the original HRM and TRM code.

    Example: hrm-hf data export data/arc1 --out TRM/data/arc1
    """
    _build_puzzles("export", options, as_json)


@app.command()
@takes(BuildSudoku)
def sudoku(options: BuildSudoku, as_json: bool):
    """Build a Sudoku data set: generate puzzles with provably unique solutions, or read them from a source.

    The puzzles depend only on the seed and the options, not on --workers.

    Example: hrm-hf data sudoku --size 4 --clues 8 --num-train 20000 --num-test 1000 --out data/sudoku4

    Example: hrm-hf data sudoku --source hub:sapientinc/sudoku-extreme --subsample-size 1000 --num-aug 1000 --out s9

    Example: hrm-hf data sudoku --clues 22-50 --num-train 100000 --mix rated.csv.gz --test-share 0.1 --out data/mixed
    """
    _build_puzzles("sudoku", options, as_json)


@app.command()
@takes(BuildPuzzle)
def puzzle(options: BuildPuzzle, as_json: bool):
    """Build a data set of your own puzzle: with its task's generator, or from pairs of puzzles and solutions.

    Example: hrm-hf data puzzle queens.py:Queens --num-train 2000 --num-test 200 --out data/queens

    Example: hrm-hf data puzzle generic --source pairs.csv --test-share 0.1 --out data/pairs
    """
    _build_puzzles("puzzle", options, as_json)


@app.command()
@takes(BuildMaze)
def maze(options: BuildMaze, as_json: bool):
    """Build a maze data set: generate mazes with a unique shortest path, or read them from a source.

    Example: hrm-hf data maze --height 30 --width 30 --min-path-length 110 --out data/maze

    Example: hrm-hf data maze --source hub:sapientinc/maze-30x30-hard-1k --aug --out data/maze
    """
    _build_puzzles("maze", options, as_json)


@app.command()
@takes(BuildCosmology)
def cosmology(options: BuildCosmology, as_json: bool):
    """Build a cosmology data set. Repeat the command to finish an interrupted build.

    The maps depend only on the settings and the seed, not on --workers. A larger data set starts with the same maps.

    Maps of kind des approximate the four source planes and the noise of DES Y3, with values rounded from arXiv
    2012.08566 and 2011.03408. --mask-fraction adds a random mask.

    Example: hrm-hf data cosmology --samples 8000 --test-samples 1000 --workers 4 --out data/kappa64

    Example: hrm-hf data cosmology --kind des --samples 8000 --mask-fraction 0.2 --out data/des64

    Example: hrm-hf data cosmology --observable shear --sigma-e 0.26 --galaxies 30 --mask-fraction 0.3 \\
        --samples 8000 --out data/shear64
    """
    from ..cosmology.dataset.build import build_maps

    try:
        report(build_maps(options), as_json)
    except KeyboardInterrupt as error:
        typer.echo(f"interrupted; finished shards are in {options.out}; repeat the command to continue", err=True)
        raise typer.Exit(130) from error


@app.command()
@takes(BuildFromFiles)
def cosmology_files(options: BuildFromFiles, as_json: bool):
    """Cut maps from local files: DES Y3 mass maps (HEALPix), FITS images, Quijote cubes.

    With --labels and a --test-share below 1, the data set can be used for training, like one from `data cosmology`.
    Without labels, it can only be input for a trained model. Repeat the command to finish an interrupted build.

    --observable shear converts convergence maps to shear with noise and a mask, and keeps the convergence. The mass
    around a patch contributes to its shear, so the border of a FITS image is not used; --margin sets its width.

    Example: hrm-hf data cosmology-files kappa_bin1.fits kappa_bin2.fits --mask mask.fits --out data/des_y3

    Example: hrm-hf data cosmology-files latin_hypercube/*/df_m_256_PCS_z=0.npy --labels latin_hypercube_params.txt
    --slab-mpc 125 --test-share 0.1 --out data/quijote

    Example: hrm-hf data cosmology-files kappa_z1.fits --observable shear --sigma-e 0.26 --galaxies 30
    --mask-fraction 0.3 --out data/shear
    """
    from ..cosmology.dataset.from_files import build_from_files

    report(build_from_files(options), as_json)


@app.command()
@takes(BuildGo)
def go(options: BuildGo, as_json: bool):
    """Build records for the Go coder from documented functions, commits and pull requests.

    Example: hrm-hf data go ~/src/my_project --out data/mine

    Example: hrm-hf data go std --license BSD-3-Clause --deduplicate near --out data/go

    Example: hrm-hf data go git:../cobra prs:pulls.jsonl --trajectories 3 --out data/go_repair
    """
    from ..golang.data.build import build_records

    _report_go(build_records(options), as_json)


@app.command()
@takes(BuildGoTokenizer)
def go_tokenizer(options: BuildGoTokenizer, as_json: bool):
    """Train a byte-level BPE tokenizer on Go source files or records.

    Use only the training split: records from `hrm-hf data go`, or the text files that its --text option writes.

    Example: hrm-hf data go-tokenizer --source data/go_text/train.jsonl --vocab-size 16384 --out data/go_tokenizer

    Example: hrm-hf data go-tokenizer --source data/go/train.jsonl --vocab-size 50000 --out data/go_tokenizer

    Example: hrm-hf data go-tokenizer --source std --vocab-size 8192 --out data/go_tokenizer
    """
    from ..golang.data.build import build_tokenizer

    _report_go(build_tokenizer(options), as_json)


@app.command()
@takes(BuildGoPrompts)
def go_prompts(options: BuildGoPrompts, as_json: bool):
    """Convert records to prompts for run_grpo.py, with the solutions as references for the rewards.

    Example: hrm-hf data go-prompts runs/go_nano --records data/go/train.jsonl --limit 2000 --out data/go_prompts.jsonl
    """
    from ..golang.data.build import build_prompts

    _report_go(build_prompts(options), as_json)


def _report_go(result: dict[str, Any], as_json: bool) -> None:
    """Print the complete report with --json, else one line per entry, without options or checksums."""
    lines = {key: value for key, value in result.items() if key not in ("options", CHECKSUMS)}
    for key, value in lines.items():
        if key in ("not_read", "left_out"):
            lines[key] = ", ".join(f"{count} {reason}" for reason, count in value["counts"].items()) or "nothing"
        elif isinstance(value, dict):
            lines[key] = ", ".join(f"{name} {number}" for name, number in value.items())
    report(result, as_json, lines)


@app.command()
@takes(BuildReasoning)
def reasoning(options: BuildReasoning, as_json: bool):
    """Build a data set of questions with known difficulty: the number of reasoning steps that each one needs.

    The rows depend only on the options and the seed. The folder also contains a tokenizer for AutoTokenizer.

    Example: hrm-hf data reasoning pointers --out data/pointers

    Example: hrm-hf data reasoning automaton --size 20 --difficulty 8 --answers last --out data/rule110
    """
    from ..text.reasoning.build import build_reasoning

    report(build_reasoning(options), as_json)
