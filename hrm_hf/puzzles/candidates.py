"""Views of a puzzle, candidate answers, and the votes for them.

A *view* is a symmetric copy of a puzzle. Undoing the symmetry maps an answer to the view to an answer to the puzzle.
In shapes, S is the number of cells, V the vocabulary size, and Q the number of questions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class View:
    """Symmetry that maps a board to `symbols[board[cells]]`, with cells int [S] and symbols int [V]."""

    cells: np.ndarray
    symbols: np.ndarray
    identifier: int = 0

    def show(self, tokens: np.ndarray) -> np.ndarray:
        """Map tokens [..., S] of the puzzle to this view."""
        return self.symbols[tokens[..., self.cells]]

    def undo(self, tokens: np.ndarray) -> np.ndarray:
        """Map tokens [..., S] of this view back to the puzzle."""
        original = np.empty_like(tokens)
        original[..., self.cells] = np.argsort(self.symbols)[tokens]
        return original

    def undo_scores(self, scores: np.ndarray) -> np.ndarray:
        """Map scores [S, V] of this view's tokens back to the puzzle."""
        original = np.empty_like(scores)
        original[self.cells] = scores[:, self.symbols]
        return original


@dataclass
class Puzzle:
    """Puzzle encoded as tokens. It has one question (Q = 1), except for ARC tasks with several test inputs.

    Attributes:
        questions: Tokens, int64 [Q, S]. solutions: Tokens [S] for each question, or None if unknown.
        identifier: Row of the model's puzzle table. name, source: For ARC, the task's name and parsed content.
    """

    questions: np.ndarray
    solutions: list[np.ndarray | None]
    identifier: int = 0
    name: str | None = None
    source: Any = None


@dataclass
class Candidate:
    """Candidate answer to a question, in the puzzle's original orientation.

    Attributes:
        tokens: int [S]. steps: ACT steps used. q_halt: Logit for the answer being correct.
        trajectory: Tokens [steps, S] after each step, if requested. q_trajectory: q_halt [steps], if requested.
        probabilities: Probabilities of the tokens [S, V], if a search needs them.
        sure: Whether the model is sure (see `PuzzleSolution`), or None.
    """

    tokens: np.ndarray
    steps: int
    q_halt: float
    trajectory: np.ndarray | None = None
    q_trajectory: np.ndarray | None = None
    probabilities: np.ndarray | None = None
    sure: bool | None = None

    @property
    def confidence(self) -> float:
        return float(sigmoid(self.q_halt))


@dataclass
class Ballot:
    """Group of candidates with the same answer, weighted by the sum of their confidences."""

    members: list[Candidate] = field(default_factory=list)

    @property
    def weight(self) -> float:
        return sum(member.confidence for member in self.members)

    @property
    def best(self) -> Candidate:
        return max(self.members, key=lambda member: member.confidence)


def ballots(candidates: Sequence[Candidate]) -> dict[bytes, Ballot]:
    """Group equal answers, keyed by the bytes of their tokens as int64."""
    groups: dict[bytes, Ballot] = {}
    for candidate in candidates:
        groups.setdefault(candidate.tokens.astype(np.int64).tobytes(), Ballot()).members.append(candidate)
    return groups


def sigmoid(logits: np.ndarray | float) -> np.ndarray:
    """Compute 1 / (1 + exp(-x)) in float64 without overflow."""
    return np.exp(-np.logaddexp(0.0, -np.asarray(logits, dtype=np.float64)))
