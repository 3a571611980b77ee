"""The trained puzzle models that come with the package, for whoever names none.

Their cards (README.md beside the weights) say how they were trained, with which command, and what they reach.
"""

import re

from ..resources import ROOT


SHIPPED = {"sudoku": "pretrained/sudoku-9x9", "maze": "pretrained/maze-15x15"}
_PUZZLE = re.compile(r"-|[0-9.\s]{16,}|[#SGo \n]{9,}")


def shipped_model(task: str = "sudoku") -> str:
    """Folder of the model for a task, "sudoku" (9x9) or "maze" (15x15).

    Raises:
        ValueError: another task.
    """
    if task not in SHIPPED:
        raise ValueError(f"no trained model for {task!r} comes with the package; there are {' and '.join(SHIPPED)}")
    return str(ROOT / SHIPPED[task])


def model_and_puzzles(arguments: list[str]) -> tuple[str, list[str]]:
    """Splits `[MODEL] [PUZZLE]...` of a command line; without a model it is the one that comes for such a puzzle."""
    if arguments and not _PUZZLE.fullmatch(arguments[0]):
        return arguments[0], arguments[1:]
    task = "maze" if arguments and "#" in arguments[0] else "sudoku"
    return shipped_model(task), arguments
