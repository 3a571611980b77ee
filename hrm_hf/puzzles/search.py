"""Sudoku by search: the model proposes, the rules decide. Not the model's own answer, and never called that.

The search is that of `sudoku_solver`. The model only orders the digits of the cell where it guesses, by the
probabilities it gave them when it saw the puzzle. A wrong order costs time; the answer is right whenever the search
ends. The model's worth is the number of nodes with it against those of the same search with the digits ascending.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .sudoku_rules import DIGIT_OFFSET, decode, to_board
from .sudoku_solver import search
from .tasks import Puzzle, PuzzleTask


MAX_NODES = 100_000  # some minutes


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        tokens: the solution, int64 [S], or None.
        nodes: boards looked at, the puzzle itself and one for each digit that was tried.
        complete: False if the search was stopped at the most nodes; without a solution then, there may be one.
    """

    tokens: np.ndarray | None
    nodes: int
    complete: bool


def search_sudoku(question: np.ndarray, scores: np.ndarray | None = None, max_nodes: int = MAX_NODES) -> SearchResult:
    """Searches the solution of a Sudoku; the first one, if there are several.

    Args:
        question: tokens [S]. scores: [S, V], by which the digits of a cell are tried, highest first (equals
            ascending); ascending if None.
        max_nodes: where the search stops.
    """
    board = to_board(decode(question))
    first = 1 + DIGIT_OFFSET  # the token of digit 1
    digits = None if scores is None else scores[None, :, first : first + round(len(board) ** 0.5)]
    found = search(board[None], scores=digits, max_nodes=max_nodes)
    tokens = found.solutions[0, 0].astype(np.int64) + DIGIT_OFFSET if found.counts[0] else None
    return SearchResult(tokens, int(found.nodes[0]), bool(found.complete[0]))


def validate_searchable(task_name: str) -> None:
    """Raises ValueError for a task without such a search."""
    if task_name == "sudoku":
        return
    mend = "; the shortest path of a maze needs no guess: hrm_hf.puzzles.maze.mark_shortest_path finds it"
    raise ValueError(f"search is for Sudoku; the task of this model is {task_name!r}{mend * (task_name == 'maze')}")


def searched_answer(task: PuzzleTask, puzzle: Puzzle, scores: np.ndarray) -> dict[str, Any]:
    """Entries of the pipeline's result that a search changes, and "search": what it took.

    Args:
        scores: probabilities [S, V] of the model.
    """
    question, solution = puzzle.questions[0], puzzle.solutions[0]
    found, plain = search_sudoku(question, scores), search_sudoku(question)
    report = {
        "solved": found.tokens is not None,
        "complete": found.complete,
        "nodes": found.nodes,
        "nodes_without_model": plain.nodes,
    }
    if found.tokens is None:  # a board without a solution: the model's answer stays, with what is wrong with it
        return {"search": report}
    answer = {"grid": task.grid(found.tokens), "text": task.text(found.tokens), "valid": True, "violations": []}
    if solution is not None:
        answer["correct"] = bool((found.tokens == solution).all())
    return {**answer, "search": report}
