"""Additions of a task to `model.solve`: rules as a judge of answers, and how many boards it takes at a time."""

from functools import partial
from typing import Any

import torch

from .tasks import PuzzleTask


CAUTIOUS_BOARDS = 25


def choice_of_answers(task: PuzzleTask, choose: str = "q", prefer_valid: bool = False) -> dict[str, Any]:
    """Arguments `choose` and `accepts` of `model.solve`.

    Args:
        choose: as there. "rules" is for tasks whose rules prove an answer (Sudoku, mazes); others fall back to "q".
        prefer_valid: answers that obey the rules of the task beat all others.
    """
    if choose == "rules" and not task.rules_prove:
        choose = "q"
    judged = choose == "rules" or (prefer_valid and task.has_rules)
    return {"choose": choose, "accepts": partial(_accepted, task) if judged else None}


def _accepted(task: PuzzleTask, boards: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(task.obeys(boards.cpu().numpy(), answers.cpu().numpy())).to(boards.device)


def boards_per_call(model) -> int:
    """Boards of a call of `model.solve`. Code that an earlier version saved with a checkpoint does not say."""
    return getattr(model, "boards_per_call", CAUTIOUS_BOARDS)
