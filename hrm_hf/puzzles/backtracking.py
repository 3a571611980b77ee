"""Search for solutions, and generate puzzles, for any task that states its rules as `allowed(board)`.

`allowed(board)` returns bool [S, V]: which tokens each cell may have, given all *other* filled cells of a board [S].
The search fills cells that have only one possible token, and guesses in a cell with the fewest.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Solutions(NamedTuple):
    """Solutions found, int64 [S] each, the number of boards visited, and whether the search was complete."""

    boards: list[np.ndarray]
    nodes: int
    complete: bool


@dataclass(frozen=True)
class SearchResult:
    """Result of a search: solution (int64 [S] or None), boards visited, and whether the search was complete."""

    tokens: np.ndarray | None
    nodes: int
    complete: bool


def find(
    task: Any, board: np.ndarray, scores: np.ndarray | None = None, limit: int = 1, max_nodes: int = 100_000
) -> Solutions:
    """Find up to `limit` solutions of a board, trying the tokens of a cell in descending order of `scores` [S, V]."""
    stack, found, nodes = [np.asarray(board, dtype=np.int64)], [], 0
    while stack and len(found) < limit:
        if nodes == max_nodes:
            return Solutions(found, nodes, False)
        nodes += 1
        board, possible = _propagate(task, stack.pop())
        if board is None:
            continue
        open_cells = np.flatnonzero(board == task.blank)
        if not len(open_cells):
            found.append(board)
            continue
        cell = open_cells[possible[open_cells].sum(axis=1).argmin()]
        tokens = np.flatnonzero(possible[cell])
        if scores is not None:
            tokens = tokens[np.argsort(-scores[cell, tokens], kind="stable")]
        for token in tokens[::-1]:
            stack.append(board.copy())
            stack[-1][cell] = token
    return Solutions(found, nodes, True)


def needs_no_guess(task: Any, board: np.ndarray) -> bool:
    """Return whether filling cells that have only one possible token solves a board, so its solution is unique."""
    solved, _ = _propagate(task, board)
    return solved is not None and not (solved == task.blank).any()


def _propagate(task: Any, board: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """Fill all cells that have only one possible token. Return None for a board without a solution."""
    board = board.copy()
    while True:
        possible = task.allowed(board).copy()
        is_open = board == task.blank
        possible[:, : task.blank + 1] &= ~is_open[:, None]
        counts = possible.sum(axis=1)
        if not possible[np.arange(len(board)), board][~is_open].all() or not counts[is_open].all():
            return None, possible
        single = is_open & (counts == 1)
        if not single.any():
            return board, possible
        board[single] = possible[single].argmax(axis=1)


def dig(task: Any, solution: np.ndarray, level: float, rng: np.random.Generator) -> np.ndarray:
    """Remove tokens of a solution in random order, each only if the solution provably stays unique.

    Level 1 tries all cells, level 0 four tenths of them. A cell is emptied only if a complete search proves that no
    other token in it leads to a solution.
    """
    board = solution.astype(np.int64)
    fillable = np.flatnonzero(task.fillable(solution))
    for cell in rng.permutation(fillable)[: round((0.4 + 0.6 * level) * len(fillable))]:
        token, board[cell] = board[cell], task.blank
        others = np.flatnonzero(task.allowed(board)[cell])
        for other in others[(others > task.blank) & (others != token)]:
            board[cell] = other
            found = find(task, board)
            if found.boards or not found.complete:
                board[cell] = token
                break
        else:
            board[cell] = task.blank
    return board
