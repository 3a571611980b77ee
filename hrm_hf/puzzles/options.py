"""Options of the puzzle commands (data, convert, solve, eval, demo), and paths of the shipped models."""

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
from ..io.usage import UsageError, as_usage_errors
from ..models.settings_puzzle import SolveSettings
from ..resources import ROOT


if TYPE_CHECKING:
    import torch

RESTARTS = 8  # of `until_valid`
PICTURES = (".png", ".gif")
SHIPPED = {"sudoku": "pretrained/sudoku-9x9", "maze": "pretrained/maze-15x15"}
# `hrm-hf solve` treats an argument with one of these suffixes as a file of puzzles, not as a model.
PUZZLE_FILE = re.compile(r"\.(csv|json|jsonl|txt|text|sdm|sdk|ss|sud)(\.gz)?$", re.IGNORECASE)
FRAME = re.compile(r"[\s|+\-_=*:]+")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx")


@dataclass(kw_only=True)
class BoardOptions(Options, SolveSettings):
    """Options for solving boards: the settings of `model.solve`, and options that use the task's rules."""

    search: bool = option("Search with backtracking that guesses in the order the model prefers (Sudoku).", False)
    seed: int = option("Seed for the noise and the symmetric views.", 0, min=0)

    def solve_arguments(self, task: Any, prefer_valid: bool = False) -> dict[str, Any]:
        """Return the keyword arguments of `model.solve` for solving boards of a `PuzzleTask`.

        choose="rules" needs a task in which every valid answer is correct (`rules_prove`); other tasks fall back to
        "q". With `prefer_valid`, answers that obey the rules rank above all others.
        """
        arguments = values_of(self, SolveSettings)
        if self.choose == "rules" and not task.rules_prove:
            arguments["choose"] = "q"
        if arguments["choose"] == "rules" or (prefer_valid and task.has_rules):
            arguments["accepts"] = partial(_obeys_rules, task)
        return arguments


def _obeys_rules(task: Any, boards: "torch.Tensor", answers: "torch.Tensor") -> "torch.Tensor":
    return boards.new_tensor(task.obeys(boards.cpu().numpy(), answers.cpu().numpy()), dtype=bool)


@dataclass(kw_only=True)
class SolveOptions(BoardOptions):
    """Options of the "puzzle-solving" pipeline, accepted by its constructor and by each call.

    Notes:
        votes: Sudoku views are the puzzle and random permutations of its digits, rows, columns, bands and stacks; maze
            views are up to 8 symmetries of the square; ARC views are the task's augmentations in `identifiers.json`,
            which have rows in the puzzle table. Votes are weighted by sigmoid(q_halt); ARC answers are ranked by
            number of votes first, as in the ARC scores.
        noise: The noise added to a puzzle depends on the other puzzles in the batch.
        prefer_valid, choose="rules": These *use the rules* of the task, which the model does not know; mention this in
            reports.
        search: An answer found by search is always correct, but it is *not the model's answer*.
        until_valid: Only for tasks whose rules prove an answer, such as Sudoku. A puzzle whose answer violates a rule
            is solved again with restarts and noise at every step, then by search if the task has one.
    """

    votes: int = option("Number of symmetric views of each puzzle that vote on the answer.", 1, min=1)
    prefer_valid: bool = option("Prefer answers that obey the rules of the task.", False)
    until_valid: bool = option("If an answer breaks the rules, go on with restarts, then with search.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise and self.restarts == 1:
            raise UsageError(f"noise={self.noise}: needs restarts > 1, as the first run has no noise", "--noise")

    def attempts(self, task: Any) -> dict[str, "SolveOptions | None"]:
        """Return the model's options for each attempt of `until_valid`, None for a search without the model."""
        if not task.rules_prove:
            raise ValueError(f"until_valid=True: the task {task.name!r} has no rules to check answers with; omit it")
        plain = self.replace(search=False)
        attempts = {
            "model": plain,
            "restarts": plain.replace(restarts=max(self.restarts, RESTARTS), noise_at="every_step", choose="rules"),
        }
        return attempts | ({"search": None} if task.searchable else {})


def is_file_name(text: str) -> bool:
    """Check whether a string is a file name rather than a board. The file need not exist."""
    named = "/" in text or "\\" in text or re.search(r"\.[A-Za-z]{2}\w*(\.gz)?$", text)
    return "\n" not in text and bool(named or os.path.isfile(text))


def is_puzzle(word: str) -> bool:
    """Check whether an argument of `hrm-hf solve` is a puzzle, a file of puzzles or `-`, not a model."""
    if word == "-" or PUZZLE_FILE.search(word) or (os.path.isfile(word) and not word.endswith(WEIGHTS)):
        return True
    return not is_file_name(word) and not os.path.isdir(word) and (shipped_task(word) is not None)


def shipped_task(text: str) -> str | None:
    """Return "maze" or "sudoku" if a text looks like such a board, else None. Does not import numpy, which is slow."""
    cells = FRAME.sub("", text)
    if len(text) >= 9 and "#" in text and sum(cell in "#SGo \n\r" for cell in text) > 0.6 * len(text):
        return "maze"
    return "sudoku" if len(cells) >= 16 and sum(cell in "0123456789." for cell in cells) > 0.6 * len(cells) else None


@dataclass(kw_only=True)
class TaskOptions(Options):
    """Option that imports a task, so that it can be found by its name."""

    task: str | None = option("The model's task, if hrm_hf does not ship it: FILE.py:CLASS or MODULE:CLASS.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        import_task(self.task)


def import_task(task: str | None) -> None:
    """Import a task given on the command line, or raise UsageError."""
    if task is not None:
        from .task_registry import task_class  # imports numpy, which is slow

        as_usage_errors(lambda: task_class(task))


@dataclass(kw_only=True)
class SolvePuzzles(TaskOptions, SolveOptions):
    """Options of `hrm-hf solve` and `solve_puzzles`."""

    words: list[str] | None = option(
        "Checkpoint folder or model on the Hub, by default one shipped with hrm_hf (9x9 Sudoku, 15x15 mazes); then "
        "puzzles (Sudoku: 81 cells, . or 0 for a blank), files of puzzles, or - for stdin.",
        None,
        argument=True,
        metavar="[MODEL] PUZZLE...",
    )
    file: Path | None = option(
        "CSV or JSONL file with a puzzle column, JSON file of puzzles or ARC tasks, or text file with boards.", None
    )
    batch_size: int = option("Puzzles per batch.", 32, min=1)
    out: Path | None = option(
        "Output file: .json for the results; .png or .gif to plot the ACT steps of a single puzzle.", None
    )
    device: str | None = option("Device: cpu, cuda, mps, ... [default: the best available device]", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out and self.out.suffix not in (".json", *PICTURES):
            raise UsageError(f"out={self.out}: must end in .json, {' or '.join(PICTURES)}", "--out")
        if not self.puzzles and self.file is None:
            after = f" after the model {self.model!r}" if self.words else ""
            raise UsageError(f"no puzzle given{after}; pass PUZZLE arguments, - for stdin, or --file")

    @property
    def plot(self) -> Path | None:
        """Return `out` if it is the name of a plot file, else None."""
        return self.out if self.out and self.out.suffix in PICTURES else None

    @property
    def model(self) -> str:
        """Return the given model, or the shipped model for this kind of puzzle."""
        words = self.words or []
        if words and not is_puzzle(words[0]):
            return words[0]
        first = words[0] if words else str(self.file)
        if os.path.isfile(first) and Path(first).suffix != ".gz":
            with open(first, encoding="utf-8", errors="replace") as file:
                first = file.read(4096)
        return shipped_model(shipped_task(first) or "sudoku")

    @property
    def puzzles(self) -> list[str]:
        """Return the puzzles: all positional arguments except the model, if one is given."""
        words = self.words or []
        return words[1:] if words and not is_puzzle(words[0]) else words


@dataclass(kw_only=True)
class EvaluatePuzzles(TaskOptions, EvaluationOptions, BoardOptions):
    """Options of `hrm-hf eval puzzles` and `evaluate_checkpoint`."""

    data: str = option("Puzzle data set: a folder in our layout or the original one, or OWNER/NAME.", argument=True)
    split: str = option("Split to evaluate.", "test")
    batch_size: int | None = option("Puzzles per batch. [default: sized to fit a CPU's cache]", None, min=1)
    limit: int | None = option("Evaluate on only the first N rows of the split.", None, min=1)
    by_difficulty: bool = option("Also report accuracy by rating, path length, or (Sudoku) number of clues.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        find_model(self.model)
        validate_kind(self.model, PUZZLE_SOLVER)
        validate_data(self.data, "puzzle data set")


@dataclass(kw_only=True)
class RunDemo(Options):
    """Options of `hrm-hf demo` and `run_demo`."""

    model: Literal["units", "trm", "eqr", "hrm", "se_rrm"] = option(
        "Model to train; 'units' is se_rrm with means instead of attention.", "units"
    )
    out: Path | None = option("Folder for the run. [default: runs/sudoku_demo]", None)
    extra: str = option("Additional flags for run_puzzle.py, e.g. '--max_steps 50'.", "")


GENERATE = "generate"  # value of `source` that generates puzzles
DEFAULT_CLUES = {4: 8, 6: 14, 9: 30}


@dataclass(kw_only=True)
class BuildPuzzles(Options):
    """Options of both the Sudoku and the maze builder, which generate puzzles or read them from a source."""

    source: str = option("Source: generate, a file or folder (CSV, JSONL, Parquet), or hub:OWNER/NAME.", GENERATE)
    out: Path = option("Output folder.")
    num_train: int | None = option("When generating: number of training puzzles. [default: 1000]", None, min=0)
    num_test: int | None = option("When generating: number of test puzzles. [default: 1000]", None, min=0)
    test_size: int | None = option("If the source has no test split: hold out the last N rows.", None, min=1)
    test_share: float | None = option(
        "If the source (or --mix) has no test split: fraction of rows to hold out, selected by puzzle hash.", None
    )
    seed: int = option("Seed for generation, sampling and augmentation.", 0, min=0)

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
        """Return the options that determine the rows, for `puzzle.json` and the data card."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in given.items() if value is not None and name not in ("out", "workers")}


@dataclass(kw_only=True)
class BuildSudoku(BuildPuzzles):
    """Options of `hrm-hf data sudoku`."""

    size: int | None = option("Board size: 4, 6 or 9. [default: 9 for generate, else the source's size]", None)
    clues: str | None = option(
        "When generating: number of clues, e.g. 8 or 7-10. [default: 8, 14 or 30, by size]", None
    )
    num_aug: int = option("Number of symmetric copies to add for each training puzzle.", 0, min=0)
    subsample_size: int | None = option("With a source: number of training puzzles to sample.", None, min=1)
    min_difficulty: float | None = option("With a source: lowest rating to keep.", None)
    mix: str | None = option("When generating: source to mix in; its test puzzles become the split test_mixed.", None)
    workers: int | None = option("When generating: number of processes. [default: one per processor]", None, min=1)

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

    height: int | None = option("Number of rows. [default: 30 for generate; inferred for square mazes]", None, min=3)
    width: int | None = option("Number of columns; same default as --height.", None, min=3)
    openings: float | None = option(
        "When generating: fraction of inner walls to open. [default: 0.05]", None, min=0, max=1
    )
    min_path_length: int = option("Minimum number of steps from S to G; 110 makes 30x30 mazes hard.", 1, min=1)
    aug: bool = option("Add the 7 symmetric copies of each training maze.", False)

    generate_only = ("num_train", "num_test", "openings")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generates:
            self.height, self.width = self.height or 30, self.width or 30
            self.openings = 0.05 if self.openings is None else self.openings
        if (self.height is None) != (self.width is None):
            raise UsageError("--height and --width must be set together; pass both, or neither for square mazes")


@dataclass(kw_only=True)
class BuildPuzzle(BuildPuzzles):
    """Options of `hrm-hf data puzzle`."""

    task: str = option(
        "Task: a name, FILE.py:CLASS or MODULE:CLASS. Use generic if you only have puzzles and their solutions.",
        argument=True,
    )
    height: int | None = option(
        "Number of rows. [default: the task's default, else the size of the source's puzzles]", None, min=1
    )
    width: int | None = option(
        "Number of columns. [default: the task's default, else the size of the source's puzzles]", None, min=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.height is None) != (self.width is None):
            raise UsageError("--height and --width must be set together; pass both or neither")


@dataclass(kw_only=True)
class BuildArc(Options):
    """Options of `hrm-hf data arc`."""

    sources: list[str] = option("Task or Kaggle files, or folders; PATH:SUBSET,SUBSET selects subsets.", argument=True)
    out: Path = option("Output folder.")
    num_aug: int = option("Number of augmentations to add for each task.", 1000, min=0)
    seed: int = option("Seed for augmentations and offsets.", 42, min=0)
    evaluate: str = option("Subsets whose test pairs form the test split, comma-separated.", "evaluation")
    train_only: bool = option("Train on all pairs, without a test split.", False)


@dataclass(kw_only=True)
class ImportPuzzles(Options):
    """Options of `hrm-hf data import`."""

    source: Path = option("Folder in the original layout: identifiers.json, train/, test/.", argument=True)
    out: Path = option("Output folder.")


@dataclass(kw_only=True)
class ExportPuzzles(Options):
    """Options of `hrm-hf data export`."""

    source: str = option("Puzzle data set: a folder in our layout, or a data set on the Hub.", argument=True)
    out: Path = option("Output folder.")


Architecture = Literal["hrm", "trm", "eqr", "se_rrm", "rlm_mhc", "hrm_lm"]  # supported originals
ONLY_OUT = {  # why these architectures accept only SRC and --out
    "rlm_mhc": "it converts a folder of weights to our model",
    "hrm_lm": "it converts HRMText1 weights to initialize training",
}
WITH_WAY_BACK = ("hrm", "trm")


@dataclass(kw_only=True)
class ConvertCheckpoint(Options):
    """Options of `hrm-hf convert`."""

    architecture: Architecture = option("Architecture of the checkpoint.", argument=True)
    src: str = option(
        "Folder with step_N and all_config.yaml (rlm_mhc: model.safetensors and config.yaml; hrm_lm: "
        "pytorch_model.bin and config.json), or the weights file; or its path on the Hub: OWNER/NAME, "
        "OWNER/NAME/FILE, or a URL. With --to-original, one of our checkpoints.",
        argument=True,
    )
    out: Path = option("Output folder.")
    to_original: bool = option("Convert one of our checkpoints to the original layout.", False)
    config: str | None = option(
        "Configuration file of the run if it is not next to the weights, or a preset's name.", None, metavar="FILE"
    )
    revision: str | None = option("Branch, tag or sha on the Hub. [default: main]", None)
    seq_len: int | None = option("Cells per puzzle. [default: from the weights or the data]", None, min=1)
    vocab_size: int | None = option("Vocabulary size, with padding and blank. [default: from the files]", None, min=1)
    step: int | None = option(
        "Step N to read (default: the largest), or to write with --to-original (default: the run's last).", None, min=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [name for name in ("seq_len", "vocab_size", "config") if getattr(self, name) is not None]
        if self.to_original and given:
            flag = f"--{given[0].replace('_', '-')}"
            raise UsageError(f"{flag} has no effect with --to-original, because checkpoints store it; remove it")
        if self.architecture in ONLY_OUT and (self.to_original or given or self.step is not None):
            raise UsageError(f"{self.architecture} accepts only SRC and --out: {ONLY_OUT[self.architecture]}")
        if self.to_original and self.architecture not in WITH_WAY_BACK:
            known = " and ".join(WITH_WAY_BACK)
            raise UsageError(f"{self.architecture} cannot be converted back; only {known} can", "--to-original")


def values_of(options: Any, kind: type) -> dict[str, Any]:
    """Return the values in `options` for the fields that the dataclass `kind` has."""
    return {each.name: getattr(options, each.name) for each in fields(kind)}


def shipped_model(task: str = "sudoku") -> str:
    """Return the folder of the shipped model for a task, "sudoku" (9x9) or "maze" (15x15)."""
    if task not in SHIPPED:
        raise ValueError(f"task={task!r}: the package has no trained model for it; use {' or '.join(SHIPPED)}")
    return str(ROOT / SHIPPED[task])
