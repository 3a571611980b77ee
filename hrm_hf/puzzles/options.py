"""Options of the puzzle commands (data, convert, solve, eval, demo), and shipped models. Imports no torch."""

import os
import re
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..hub.kinds import PUZZLE_SOLVER, validate_kind
from ..io.evaluation import EvaluationOptions, validate_data
from ..io.model_names import find_model
from ..io.options import Options, option
from ..io.usage import UsageError
from ..models.settings_puzzle import SolveSettings
from ..resources import ROOT


if TYPE_CHECKING:
    import torch

PICTURES = (".png", ".gif")
SHIPPED = {"sudoku": "pretrained/sudoku-9x9", "maze": "pretrained/maze-15x15"}
# A word of `hrm-hf solve` that is no model: a file of puzzles by its name, or most of it are cells of a board.
PUZZLE_FILE = re.compile(r"\.(csv|json|jsonl|txt|text|sdm|sdk|ss|sud)(\.gz)?$", re.IGNORECASE)
FRAME = re.compile(r"[\s|+\-_=*:]+")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx")


@dataclass(kw_only=True)
class BoardOptions(Options, SolveSettings):
    """How boards are solved: the settings of `model.solve`, and what needs the rules of the task."""

    search: bool = option("Sudoku only: search with backtracking; the model orders the guesses.", False)
    seed: int = option("Seed of noise and of symmetric views.", 0, min=0)

    def solve_arguments(self, task: Any, prefer_valid: bool = False) -> dict[str, Any]:
        """Return the keyword arguments of `model.solve` for boards of a `PuzzleTask`.

        choose="rules" is for tasks whose rules prove an answer (Sudoku, mazes); others fall back to "q".
        With `prefer_valid`, answers that obey the rules beat all others.
        """
        arguments = values_of(self, SolveSettings)
        if self.choose == "rules" and not task.rules_prove:
            arguments["choose"] = "q"
        if arguments["choose"] == "rules" or (prefer_valid and task.has_rules):
            arguments["accepts"] = partial(_accepted, task)
        return arguments


def _accepted(task: Any, boards: "torch.Tensor", answers: "torch.Tensor") -> "torch.Tensor":
    return boards.new_tensor(task.obeys(boards.cpu().numpy(), answers.cpu().numpy()), dtype=bool)


@dataclass(kw_only=True)
class SolveOptions(BoardOptions):
    """Options of the pipeline "puzzle-solving", constructor and call.

    Notes:
        votes: Sudoku: the puzzle and random permutations of digits, rows, columns, bands and stacks; mazes: up to the
            8 symmetries of the square; ARC: the task's own augmentations (those in `identifiers.json`, so with a
            puzzle row of their own). Votes are weighted by sigmoid(q_halt); ARC answers are ranked by number of votes
            first, as its scores are.
        noise: which noise a puzzle gets depends on its neighbors in the batch.
        prefer_valid, choose="rules": these *use the rules* of the task, which the model does not know; mention it in
            reports.
        search: the answer is right whenever there is one, and *not the model's answer*.
    """

    votes: int = option("Symmetric views that vote.", 1, min=1)
    prefer_valid: bool = option("An answer that obeys the rules wins; this uses the rules.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise and self.restarts == 1:
            raise UsageError(f"noise={self.noise}: the first run has none; use restarts > 1", "--noise")


def is_file_name(text: str) -> bool:
    """Return whether a text names a file, which exists or not, and is no board."""
    named = "/" in text or "\\" in text or re.search(r"\.[A-Za-z]{2}\w*(\.gz)?$", text)
    return "\n" not in text and bool(named or os.path.isfile(text))


def is_puzzle(word: str) -> bool:
    """Return whether a word of `hrm-hf solve` is a puzzle, a file of puzzles or `-`, and not a model."""
    if word == "-" or PUZZLE_FILE.search(word) or (os.path.isfile(word) and not word.endswith(WEIGHTS)):
        return True
    cells = FRAME.sub("", word)
    is_sudoku = len(cells) >= 16 and sum(cell in "0123456789." for cell in cells) > 0.6 * len(cells)
    return not is_file_name(word) and not os.path.isdir(word) and (is_sudoku or is_maze(word))


def is_maze(text: str) -> bool:
    """Return whether most of a text are cells of a maze."""
    return len(text) >= 9 and "#" in text and sum(cell in "#SGo \n\r" for cell in text) > 0.6 * len(text)


@dataclass(kw_only=True)
class SolvePuzzles(SolveOptions):
    """Options of `hrm-hf solve` and `solve_puzzles`."""

    words: list[str] | None = option(
        "Checkpoint folder or model on the Hub, by default one that comes with hrm_hf (9x9 Sudoku, 15x15 mazes); then "
        "puzzles (Sudoku: 81 cells, . or 0 blank), files of puzzles, or - for stdin.",
        None,
        argument=True,
        metavar="[MODEL] PUZZLE...",
    )
    file: Path | None = option(
        "CSV or JSONL with a puzzle column, JSON (ARC too), or text with boards as on stdin.", None
    )
    batch_size: int = option("Puzzles at a time.", 32, min=1)
    out: Path | None = option(
        "File to write: .json, the results; .png or .gif, the ACT steps of a single puzzle.", None
    )
    device: str | None = option("cpu, cuda, mps, ...; the best available by default.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out and self.out.suffix not in (".json", *PICTURES):
            raise UsageError(f"out={self.out}: must end in .json, {' or '.join(PICTURES)}", "--out")
        if not self.puzzles and self.file is None:
            after = f" after the model {self.model!r}" if self.words else ""
            raise UsageError(f"no puzzle given{after}; give PUZZLE arguments, - for stdin, or --file")

    @property
    def plot(self) -> Path | None:
        """Return the plot file, if one is wanted."""
        return self.out if self.out and self.out.suffix in PICTURES else None

    @property
    def model(self) -> str:
        """Return the named model, or the one in the package for such puzzles."""
        words = self.words or []
        if words and not is_puzzle(words[0]):
            return words[0]
        first = words[0] if words else str(self.file)
        if os.path.isfile(first) and Path(first).suffix != ".gz":
            with open(first, encoding="utf-8", errors="replace") as file:
                first = file.read(4096)
        return shipped_model("maze" if is_maze(first) else "sudoku")

    @property
    def puzzles(self) -> list[str]:
        """Return the words after the model."""
        words = self.words or []
        return words[1:] if words and not is_puzzle(words[0]) else words


@dataclass(kw_only=True)
class EvaluatePuzzles(EvaluationOptions, BoardOptions):
    """Options of `hrm-hf eval puzzles` and `evaluate_checkpoint`."""

    data: str = option("Puzzle data set: ours or the original's .npy arrays, or on the Hub.", argument=True)
    split: str = option("Split to evaluate.", "test")
    batch_size: int | None = option("Puzzles at a time; by default as many as fit a CPU's cache.", None, min=1)
    limit: int | None = option("Evaluate only the first rows of the split.", None, min=1)
    by_difficulty: bool = option("Also report by rating or path length, and by the number of clues in Sudoku.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        find_model(self.model)
        validate_kind(self.model, PUZZLE_SOLVER)
        validate_data(self.data, "puzzle data set")


@dataclass(kw_only=True)
class RunDemo(Options):
    """Options of `hrm-hf demo` and `run_demo`."""

    model: Literal["units", "trm", "eqr", "hrm", "se_rrm"] = option(
        "Model to train; units has a symbol axis.", "units"
    )
    out: Path | None = option("Folder of the run. [default: runs/sudoku_demo]", None)
    extra: str = option("More flags of run_puzzle.py, e.g. '--max_steps 50'.", "")


GENERATE = "generate"  # in place of a source
DEFAULT_CLUES = {4: 8, 6: 14, 9: 30}


@dataclass(kw_only=True)
class BuildPuzzles(Options):
    """Options shared by the builders of Sudoku and mazes, which generate puzzles or read a source."""

    source: str = option("generate, a file or folder (CSV, JSONL, parquet), or hub:OWNER/NAME.", GENERATE)
    out: Path = option("Folder to write.")
    num_train: int | None = option("generate: training puzzles. [default: 1000]", None, min=0)
    num_test: int | None = option("generate: test puzzles. [default: 1000]", None, min=0)
    test_size: int | None = option("Source without a test split: last rows that become one.", None, min=1)
    test_share: float | None = option(
        "Source (or --mix) without a test split: share that becomes one, by a hash of canonical forms.", None
    )
    seed: int = option("Seed of generation, sampling and augmentation.", 0, min=0)

    generate_only: ClassVar[tuple[str, ...]] = ("num_train", "num_test")
    source_only: ClassVar[tuple[str, ...]] = ("test_size", "test_share")

    @property
    def generates(self) -> bool:
        return self.source == GENERATE

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.source_only if self.generates else self.generate_only:
            if getattr(self, name) is not None:
                kind = "generated sets" if self.generates else "sets read from a source"
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} has no effect on {kind} (--source {self.source}); remove it", flag)
        if self.generates:
            self.num_train = 1000 if self.num_train is None else self.num_train
            self.num_test = 1000 if self.num_test is None else self.num_test

    def recorded(self) -> dict[str, Any]:
        """Return the options that decide the rows, for `puzzle.json` and the data card."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in given.items() if value is not None and name not in ("out", "workers")}


@dataclass(kw_only=True)
class BuildSudoku(BuildPuzzles):
    """Options of `hrm-hf data sudoku`."""

    size: int | None = option("4, 6 or 9. [default: 9 for generate, else found in the source]", None)
    clues: str | None = option("generate: given cells, as 8 or 7-10. [default: 8, 14, 30 by size]", None)
    num_aug: int = option("Symmetries added to each training puzzle.", 0, min=0)
    subsample_size: int | None = option("Source: training puzzles to draw from it.", None, min=1)
    min_difficulty: float | None = option("Source: lowest rating to keep.", None)
    mix: str | None = option("generate: a source to add; its test puzzles become the split test_mixed.", None)
    workers: int | None = option("generate: processes. [default: one for each processor]", None, min=1)

    generate_only = ("clues", "num_train", "num_test", "mix", "workers")
    source_only = ("subsample_size", "min_difficulty", "test_size", "test_share")

    def __post_init__(self) -> None:
        if self.mix is not None:
            self.source_only = tuple(name for name in self.source_only if name != "test_share")
        super().__post_init__()
        if self.generates and self.size is None:
            self.size = 9
        if self.size not in (None, *DEFAULT_CLUES):
            raise UsageError(f"size={self.size}: must be one of {list(DEFAULT_CLUES)}", "--size")
        if self.generates and self.clues is None:
            self.clues = str(DEFAULT_CLUES[self.size])
        parts = (self.clues or "0").split("-")
        if len(parts) > 2 or not all(part.isdigit() for part in parts):
            raise UsageError(f"clues={self.clues!r}: must be a number like 8 or a range like 7-10", "--clues")

    def clue_range(self) -> tuple[int, int]:
        """Return the lowest and the highest number of clues."""
        low, _, high = self.clues.partition("-")
        return int(low), int(high or low)


@dataclass(kw_only=True)
class BuildMaze(BuildPuzzles):
    """Options of `hrm-hf data maze`."""

    height: int | None = option("Rows. [default: 30 for generate, square mazes for a source]", None, min=3)
    width: int | None = option("Columns, as --height.", None, min=3)
    openings: float | None = option("generate: share of spare walls opened. [default: 0.05]", None, min=0, max=1)
    min_path_length: int = option("Fewest steps from S to G; 110 makes 30x30 mazes hard.", 1, min=1)
    aug: bool = option("Add the 7 other symmetries of each training maze.", False)

    generate_only = ("num_train", "num_test", "openings")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generates:
            self.height, self.width = self.height or 30, self.width or 30
            self.openings = 0.05 if self.openings is None else self.openings
        if (self.height is None) != (self.width is None):
            raise UsageError("--height and --width belong together; give both, or none for square mazes")


@dataclass(kw_only=True)
class BuildArc(Options):
    """Options of `hrm-hf data arc`."""

    sources: list[str] = option(
        "Bundles, folders or Kaggle files; PATH:SUBSET,SUBSET takes part of one.", argument=True
    )
    out: Path = option("Folder to write.")
    num_aug: int = option("Augmentations per task besides the original.", 1000, min=0)
    seed: int = option("Seed of augmentations and offsets.", 42, min=0)
    evaluate: str = option("Subsets whose test pairs form the test split, comma-separated.", "evaluation")
    train_only: bool = option("Evaluate nothing: train on all pairs.", False)


@dataclass(kw_only=True)
class ImportPuzzles(Options):
    """Options of `hrm-hf data import`."""

    source: Path = option("Folder of the original layout: identifiers.json, train/, test/.", argument=True)
    out: Path = option("Folder to write.")


@dataclass(kw_only=True)
class ExportPuzzles(Options):
    """Options of `hrm-hf data export`."""

    source: str = option("Puzzle data set: a folder of ours, or a data set on the Hub.", argument=True)
    out: Path = option("Folder to write.")


Architecture = Literal["hrm", "trm", "eqr", "se_rrm", "rlm_mhc", "hrm_lm"]  # originals that can be converted
TEXT = {  # language models, and what their conversion is
    "rlm_mhc": "it converts to ours, from one folder of weights",
    "hrm_lm": "it reads HRMText1 weights as a start for training",
}
WITH_WAY_BACK = ("hrm", "trm")


@dataclass(kw_only=True)
class ConvertCheckpoint(Options):
    """Options of `hrm-hf convert`."""

    architecture: Architecture = option("Architecture of the checkpoint.", argument=True)
    src: str = option(
        "Folder with step_N and all_config.yaml (rlm_mhc: model.safetensors and config.yaml; hrm_lm: "
        "pytorch_model.bin and config.json), or the weights file; or the same on the Hub: OWNER/NAME, "
        "OWNER/NAME/FILE, or its address. With --to-original, ours.",
        argument=True,
    )
    out: Path = option("Folder to write.")
    to_original: bool = option("Write the original's layout from ours.", False)
    config: str | None = option(
        "The run's configuration, if it is not next to the weights; or a preset of ours.", None, metavar="FILE"
    )
    revision: str | None = option("Branch, tag or sha on the Hub. [default: main]", None)
    seq_len: int | None = option("Cells of a puzzle, if neither in the weights nor in the data folder.", None, min=1)
    vocab_size: int | None = option("Tokens, padding and empty included, if not in the files (se_rrm).", None, min=1)
    step: int | None = option(
        "N of step_N: to read (largest), or to write with --to-original (that of the run).", None, min=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("seq_len", "vocab_size", "config") if getattr(self, name) is not None]
        if self.to_original and given:
            flag = f"--{given[0].replace('_', '-')}"
            raise UsageError(f"{flag} has no effect with --to-original, since our checkpoints know it; remove it")
        if self.architecture in TEXT and (self.to_original or given or self.step is not None):
            raise UsageError(f"{self.architecture} takes SRC and --out only; {TEXT[self.architecture]}")
        if self.to_original and self.architecture not in WITH_WAY_BACK:
            known = " and ".join(WITH_WAY_BACK)
            raise UsageError(f"there is no way back to {self.architecture}, only to {known}", "--to-original")


def values_of(options: Any, kind: type) -> dict[str, Any]:
    """Return the values of those fields that a dataclass `kind` has."""
    return {each.name: getattr(options, each.name) for each in fields(kind)}


def shipped_model(task: str = "sudoku") -> str:
    """Return the folder of the trained model for a task, "sudoku" (9x9) or "maze" (15x15)."""
    if task not in SHIPPED:
        raise ValueError(f"task={task!r}: no trained model comes with the package; use {' or '.join(SHIPPED)}")
    return str(ROOT / SHIPPED[task])
