"""Options of solving and evaluating puzzles, and the trained models that come with the package. Imports no torch."""

import re
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..hub.kinds import PUZZLE_SOLVER, validate_kind
from ..io.evaluation import EvaluationOptions, validate_data
from ..io.model_names import find_model
from ..io.options import Options, option
from ..io.usage import UsageError
from ..models.settings_puzzle import SolveSettings
from ..resources import ROOT


if TYPE_CHECKING:
    import torch

    from .tasks import PuzzleTask

PICTURES = (".png", ".gif")
SHIPPED = {"sudoku": "pretrained/sudoku-9x9", "maze": "pretrained/maze-15x15"}
PUZZLE = re.compile(r"-|[0-9.\s]{16,}|[#SGo \n]{9,}")


@dataclass(kw_only=True)
class BoardOptions(Options, SolveSettings):
    """How boards are solved: the settings of `model.solve`, and what needs the rules of the task."""

    search: bool = option("Sudoku only: search with backtracking; the model orders the guesses.", False)
    seed: int = option("Seed of noise and of symmetric views.", 0, min=0)

    def solve_arguments(self, task: "PuzzleTask", prefer_valid: bool = False) -> dict[str, Any]:
        """Return the keyword arguments of `model.solve` for boards of a task.

        choose="rules" is for tasks whose rules prove an answer (Sudoku, mazes); others fall back to "q".
        With `prefer_valid`, answers that obey the rules beat all others.
        """
        arguments = values_of(self, SolveSettings)
        if self.choose == "rules" and not task.rules_prove:
            arguments["choose"] = "q"
        if arguments["choose"] == "rules" or (prefer_valid and task.has_rules):
            arguments["accepts"] = partial(_accepted, task)
        return arguments


def _accepted(task: "PuzzleTask", boards: "torch.Tensor", answers: "torch.Tensor") -> "torch.Tensor":
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
        prefer_valid, choose="rules": these *use the rules* of the task, which the model was not told: say so where
            you report results.
        search: the answer is right whenever there is one, and *not the model's answer*.
    """

    votes: int = option("Symmetric views that vote.", 1, min=1)
    prefer_valid: bool = option("An answer that obeys the rules wins; this uses the rules.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise and self.restarts == 1:
            raise UsageError(f"noise={self.noise}: the first run has none; use restarts > 1", "--noise")


@dataclass(kw_only=True)
class SolvePuzzles(SolveOptions):
    """Options of `hrm-hf solve` and `solve_puzzles`."""

    words: list[str] | None = option(
        "Checkpoint folder or model on the Hub, by default one that comes with hrm_hf (9x9 Sudoku, 15x15 mazes); then "
        "puzzles (Sudoku: 81 cells, . or 0 blank), ARC files, or - for stdin.",
        None,
        argument=True,
        metavar="[MODEL] PUZZLE...",
    )
    file: Path | None = option("CSV or JSONL with a puzzle column, or an ARC JSON.", None)
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
            raise UsageError("no puzzle given; give PUZZLE arguments, - for stdin, or --file")

    @property
    def plot(self) -> Path | None:
        """The picture to draw."""
        return self.out if self.out and self.out.suffix in PICTURES else None

    @property
    def model(self) -> str:
        """The model that is named, or the one that comes for such puzzles."""
        words = self.words or []
        if words and not PUZZLE.fullmatch(words[0]):
            return words[0]
        return shipped_model("maze" if words and "#" in words[0] else "sudoku")

    @property
    def puzzles(self) -> list[str]:
        """What follows the model."""
        words = self.words or []
        return words[1:] if words and not PUZZLE.fullmatch(words[0]) else words


@dataclass(kw_only=True)
class EvaluatePuzzles(EvaluationOptions, BoardOptions):
    """Options of `hrm-hf eval puzzles` and `evaluate_checkpoint`."""

    data: str = option("Puzzle data set: ours or the original's .npy arrays, or on the Hub.", argument=True)
    split: str = option("Split to evaluate.", "test")
    batch_size: int | None = option("Puzzles at a time; as many as stay in a CPU's cache by default.", None, min=1)
    limit: int | None = option("Only the first rows of the split.", None, min=1)
    by_difficulty: bool = option("Also by rating or path length, and by the clues of Sudoku boards.", False)

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


def values_of(options: Any, kind: type) -> dict[str, Any]:
    """Return the values of those fields that a dataclass `kind` has."""
    return {each.name: getattr(options, each.name) for each in fields(kind)}


def shipped_model(task: str = "sudoku") -> str:
    """Folder of the trained model for a task, "sudoku" (9x9) or "maze" (15x15); its card says how it was trained.

    Raises:
        ValueError: another task.
    """
    if task not in SHIPPED:
        raise ValueError(f"task={task!r}: no trained model comes with the package; use {' or '.join(SHIPPED)}")
    return str(ROOT / SHIPPED[task])
