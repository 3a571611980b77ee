"""Additions of a task and a seed to `model.solve`: rules as a judge of answers, and random numbers that repeat."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
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


@contextmanager
def seeded(device: torch.device, *seed: int) -> Iterator[None]:
    """Random numbers of `device` and of the CPU that depend on `seed` alone; those of the caller are left alone."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        yield
