"""Tasks of puzzle models: how to read puzzles, format answers, check rules and apply symmetries.

ARC and `puzzle_task(config)` are in `arc_pipeline.py`. This module handles only tokens, not models. In shapes, S is
the number of cells, V the vocabulary size, and Q the number of questions.

A *view* is a symmetric copy of a puzzle. Undoing the symmetry maps an answer to the view to an answer to the puzzle.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import maze, sudoku, sudoku_rules
from .arc_grids import box_symmetries, dihedral
from .board_text import split_boards
from .dataset import PAD_ID
from .readers import COLUMN_NAMES
from .sudoku_rules import BLANK, DIGIT_OFFSET, decode, to_board
from .sudoku_solver import search


QUESTION_NAMES, SOLUTION_NAMES = zip(*COLUMN_NAMES)
# seq_len and vocab_size of each task in the original repositories.
TASKS = {"sudoku": (81, 11), "maze": (900, 6), "arc": (900, 12)}


def guess_task(seq_len: int, vocab_size: int) -> tuple[str, tuple[int, int], tuple[int, int] | None]:
    """Guess the task, grid shape and box shape. A "generic" board is square if possible, else 1 x seq_len."""
    task = next((task for task, sizes in TASKS.items() if sizes == (seq_len, vocab_size)), "generic")
    side = math.isqrt(seq_len)
    return task, (side, side) if side * side == seq_len else (1, seq_len), (3, 3) if task == "sudoku" else None


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
    """

    tokens: np.ndarray
    steps: int
    q_halt: float
    trajectory: np.ndarray | None = None
    q_trajectory: np.ndarray | None = None
    probabilities: np.ndarray | None = None

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


class PuzzleTask:
    """Task "generic" (token lists without rules or symmetries) and base class of the other tasks."""

    name = "generic"
    has_rules = False
    rules_prove = False  # True if every answer that obeys the rules is correct

    def __init__(self, config):
        self.config = config
        self.seq_len, self.vocab_size = config.seq_len, config.vocab_size
        self.grid_shape = tuple(config.grid_shape) if config.grid_shape else (1, config.seq_len)

    # reading

    def is_single(self, item: Any) -> bool:
        """Check whether `item` is a single puzzle (its elements have fewer than S cells), not a list of puzzles."""
        if not isinstance(item, (list, tuple)):
            return True
        return all(not isinstance(part, (dict, Puzzle)) and _length(part) < max(2, self.seq_len) for part in item)

    def read(self, item: Any) -> Puzzle:
        """Read a puzzle, given as cells in a form that `encode` accepts or a dict with puzzle and solution."""
        if not isinstance(item, dict):
            return Puzzle(self.encode(item)[None], [None])
        question = [item[name] for name in QUESTION_NAMES if name in item]
        if not question:
            raise ValueError(f"a puzzle given as a dict needs one of {list(QUESTION_NAMES)}; found {sorted(item)}")
        solution = [item[name] for name in SOLUTION_NAMES if item.get(name) is not None and len(item[name])]
        identifier = int(item.get("puzzle_identifier", 0))
        if not 0 <= identifier < self.config.num_puzzle_identifiers:
            most = self.config.num_puzzle_identifiers - 1
            raise ValueError(f"puzzle_identifier={identifier}: must be in [0, {most}] for this model")
        solutions = [self.encode(solution[0], is_solution=True) if solution else None]
        return Puzzle(self.encode(question[0])[None], solutions, identifier)

    def split(self, text: str) -> list[Any]:
        """Split a text into puzzles, given as blocks of lines separated by empty lines.

        If every line of a block has all cells of a puzzle, each line is a puzzle; otherwise the block is one puzzle.
        """
        blocks, block = [], []
        for line in [*text.splitlines(), ""]:
            if line:  # a line of spaces does not separate blocks, since it may be an open row of a maze
                block.append(line)
            elif block:
                blocks += block if all(len(line) >= self.seq_len for line in block) else ["\n".join(block)]
                block = []
        return blocks

    def encode(self, cells: Any, is_solution: bool = False) -> np.ndarray:
        """Encode the cells of a board as tokens, int64 [S]."""
        if isinstance(cells, str):
            text = f'task="generic" needs token ids, not the string {cells!r:.60}'
            raise ValueError(f"{text}; set config.task if the model was trained on Sudoku, mazes or ARC")
        tokens = np.asarray(cells)
        if tokens.size != self.seq_len or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"the puzzle has shape {tokens.shape}; expected {self.seq_len} token ids")
        for value in tokens[(tokens < 0) | (tokens >= self.vocab_size)].reshape(-1)[:1]:
            raise ValueError(f"token {value} is outside the vocabulary; expected 0 to {self.vocab_size - 1}")
        return tokens.reshape(-1).astype(np.int64)

    # showing

    def grid(self, tokens: np.ndarray) -> list[list]:
        """Return the board as a list of rows."""
        return tokens.reshape(self.grid_shape).tolist()

    def text(self, tokens: np.ndarray) -> str:
        """Return the board as a string, in a form that `encode` accepts (except for task "generic")."""
        return "\n".join(" ".join(map(str, row)) for row in self.grid(tokens))

    def given(self, question: np.ndarray) -> np.ndarray:
        """Return a bool mask [S] of the cells in `question` that an answer must keep (clues, walls)."""
        return np.zeros(len(question), dtype=bool)

    def violations(self, question: np.ndarray, answer: np.ndarray) -> list[str]:
        """List the rules that `answer` to `question` violates (both tokens [S])."""
        return []

    def obeys(self, questions: np.ndarray, answers: np.ndarray) -> np.ndarray:
        """Check which `answers` to `questions` (both tokens [N, S]) obey all rules, bool [N]."""
        return np.array([not self.violations(*pair) for pair in zip(questions, answers)], dtype=bool)

    # voting

    def views(self, puzzle: Puzzle, votes: int, rng: np.random.Generator) -> list[View]:
        """Return `votes` views of the puzzle. The first view is the puzzle itself."""
        if votes > 1:
            raise ValueError(f'votes={votes}: task="{self.name}" has no known symmetries; use restarts instead')
        return [View(np.arange(self.seq_len), np.arange(self.vocab_size), puzzle.identifier)]

    def rank(self, puzzle: Puzzle, question: int, candidates: list[Candidate]) -> list[Ballot]:
        """Group equal answers and sort the groups by descending sum of confidences, then by their first view."""
        return sorted(ballots(candidates).values(), key=lambda ballot: -ballot.weight)

    def result(self, puzzle: Puzzle, candidates: Sequence[list[Candidate]], prefer_valid: bool) -> dict[str, Any]:
        """Build the pipeline's result for a puzzle from the list of candidates for each question."""
        return self._answer(puzzle, 0, candidates[0], prefer_valid)

    def _answer(self, puzzle: Puzzle, index: int, candidates: list[Candidate], prefer_valid: bool) -> dict[str, Any]:
        question, solution = puzzle.questions[index], puzzle.solutions[index]
        ranked = self.rank(puzzle, index, candidates)
        if prefer_valid:
            ranked.sort(key=lambda ballot: bool(self.violations(question, ballot.best.tokens)))  # stable
        winner, best = ranked[0], ranked[0].best
        problems = self.violations(question, best.tokens)
        result = {
            "grid": self.grid(best.tokens),
            "text": self.text(best.tokens),
            "steps": best.steps,
            "confidence": winner.weight / len(winner.members),
            "valid": not problems if self.has_rules else None,
            "violations": problems,
            "votes": {"agree": len(winner.members), "of": len(candidates), "answers": len(ranked)},
        }
        if solution is not None:
            result["correct"] = bool((best.tokens == solution).all())
        if best.trajectory is not None:
            result["trajectory"] = best.trajectory.tolist()
            result["confidences"] = sigmoid(best.q_trajectory).tolist()
        return self._extend(result, ranked, solution)

    def _extend(self, result: dict[str, Any], ranked: list[Ballot], solution: np.ndarray | None) -> dict[str, Any]:
        return result

    def _legal(self, tokens: np.ndarray) -> np.ndarray:
        """Replace tokens that the task does not use with padding, if the model's vocabulary is larger."""
        return np.where(tokens < self.num_tokens, tokens, PAD_ID)


class SudokuTask(PuzzleTask):
    """Task "sudoku" of size 4, 6 or 9, with views that permute digits, rows, columns, bands and stacks."""

    name = "sudoku"
    has_rules = rules_prove = True

    def __init__(self, config):
        super().__init__(config)
        side = round(config.seq_len**0.5)
        self.board = sudoku_rules.sudoku_shape(side)
        self.grid_shape = (side, side)
        if self.board.cells != config.seq_len or config.vocab_size < self.board.vocab_size:
            raise ValueError(
                f"seq_len={config.seq_len}, vocab_size={config.vocab_size}: task='sudoku' of {side} x {side} needs "
                f"seq_len={self.board.cells}, vocab_size={self.board.vocab_size}"
            )
        if config.box_shape and tuple(config.box_shape) != self.board.box_shape:
            raise ValueError(f"box_shape={config.box_shape}: must be {list(self.board.box_shape)}; correct the config")

    def split(self, text: str) -> list[Any]:
        return split_boards(text, self.board.size)

    def encode(self, cells: Any, is_solution: bool = False) -> np.ndarray:
        return sudoku_rules.encode(cells, self.board.size).astype(np.int64)

    def grid(self, tokens: np.ndarray) -> list[list]:
        return sudoku_rules.to_board(self.text(tokens)).reshape(self.grid_shape).tolist()

    def text(self, tokens: np.ndarray) -> str:
        return sudoku_rules.decode(self._legal(tokens))

    def given(self, question: np.ndarray) -> np.ndarray:
        return question > BLANK

    def violations(self, question: np.ndarray, answer: np.ndarray) -> list[str]:
        return sudoku_rules.validate_solution(self.text(question), self.text(answer))

    def obeys(self, questions: np.ndarray, answers: np.ndarray) -> np.ndarray:
        """Check the same rules as `violations`, but fast enough to call after each ACT step."""
        return sudoku_rules.obey_rules(questions.astype(int) - DIGIT_OFFSET, answers.astype(int) - DIGIT_OFFSET)

    def views(self, puzzle: Puzzle, votes: int, rng: np.random.Generator) -> list[View]:
        unchanged = super().views(puzzle, 1, rng)
        drawn = zip(*sudoku.random_symmetries(self.board, votes - 1, rng))
        symbols = np.arange(self.vocab_size)
        first = 1 + DIGIT_OFFSET  # the token of digit 1
        others = symbols[first + self.board.size :]
        return unchanged + [
            View(cells, np.concatenate([symbols[:first], digits[1:] + DIGIT_OFFSET, others]), puzzle.identifier)
            for digits, cells in drawn
        ]

    @property
    def num_tokens(self) -> int:
        return self.board.vocab_size


class MazeTask(PuzzleTask):
    """Task "maze", with the eight symmetries of a square or the four of a rectangle as views."""

    name = "maze"
    has_rules = rules_prove = True
    num_tokens = maze.VOCAB_SIZE

    def __init__(self, config):
        super().__init__(config)
        if config.vocab_size < maze.VOCAB_SIZE:
            raise ValueError(f"vocab_size={config.vocab_size}: must be >= {maze.VOCAB_SIZE} for task='maze'")
        if not config.grid_shape:
            side = round(config.seq_len**0.5)
            if side**2 != config.seq_len:
                raise ValueError(f"seq_len={config.seq_len}: not a square maze; set grid_shape in the config")
            self.grid_shape = (side, side)

    def encode(self, cells: Any, is_solution: bool = False) -> np.ndarray:
        tokens = maze.encode(cells, self.grid_shape)
        if not is_solution:
            maze.endpoints(tokens)
            if np.isin(tokens, (maze.PAD, maze.PATH)).any():
                raise ValueError("the maze has 'o' or padding; a puzzle has only walls '#', open cells ' ', S and G")
        return tokens.reshape(-1).astype(np.int64)

    def grid(self, tokens: np.ndarray) -> list[list]:
        text = maze.decode(self._legal(tokens))
        return [list(text[start : start + self.grid_shape[1]]) for start in range(0, len(text), self.grid_shape[1])]

    def text(self, tokens: np.ndarray) -> str:
        return "\n".join("".join(row) for row in self.grid(tokens))

    def given(self, question: np.ndarray) -> np.ndarray:
        return question != maze.OPEN

    def violations(self, question: np.ndarray, answer: np.ndarray) -> list[str]:
        return maze.validate_solution(question, self._legal(answer), self.grid_shape)

    def views(self, puzzle: Puzzle, votes: int, rng: np.random.Generator) -> list[View]:
        transforms = box_symmetries(self.grid_shape)
        if votes > len(transforms):
            raise ValueError(
                f"votes={votes}: a maze of {self.grid_shape[0]} x {self.grid_shape[1]} has only {len(transforms)} "
                f"symmetries; use votes={len(transforms)}, and increase restarts for more candidates"
            )
        cells = np.arange(self.seq_len).reshape(self.grid_shape)
        symbols = np.arange(self.vocab_size)
        return [View(dihedral(cells, t).reshape(-1), symbols, puzzle.identifier) for t in transforms[:votes]]


def ballots(candidates: Sequence[Candidate]) -> dict[bytes, Ballot]:
    """Group equal answers, keyed by the bytes of their tokens as int64."""
    groups: dict[bytes, Ballot] = {}
    for candidate in candidates:
        groups.setdefault(candidate.tokens.astype(np.int64).tobytes(), Ballot()).members.append(candidate)
    return groups


def sigmoid(logits: np.ndarray | float) -> np.ndarray:
    """Compute 1 / (1 + exp(-x)) in float64 without overflow."""
    return np.exp(-np.logaddexp(0.0, -np.asarray(logits, dtype=np.float64)))


def _length(part: Any) -> int:
    """Count the cells in an element of a list, including those in nested lists."""
    if isinstance(part, (list, tuple)):
        return sum(_length(inner) if isinstance(inner, (list, tuple)) else 1 for inner in part)
    return len(part) if isinstance(part, str) else 1


MAX_NODES = 100_000  # a search with this many nodes takes a few minutes


@dataclass(frozen=True)
class SearchResult:
    """Result of a search: solution (int64 [S] or None), boards visited, and whether the search was complete."""

    tokens: np.ndarray | None
    nodes: int
    complete: bool


def search_sudoku(question: np.ndarray, scores: np.ndarray | None = None, max_nodes: int = MAX_NODES) -> SearchResult:
    """Find the first solution of a Sudoku, tokens [S], by search. The model only orders the guesses.

    The search tries the digits of a cell in descending order of `scores` [S, V], or in ascending order if None. Scores
    change only the number of nodes. Compare the number with and without scores to judge the model.
    """
    board = to_board(decode(question))
    first = 1 + DIGIT_OFFSET  # the token of digit 1
    digits = None if scores is None else scores[None, :, first : first + round(len(board) ** 0.5)]
    found = search(board[None], scores=digits, max_nodes=max_nodes)
    tokens = found.solutions[0, 0].astype(np.int64) + DIGIT_OFFSET if found.counts[0] else None
    return SearchResult(tokens, int(found.nodes[0]), bool(found.complete[0]))


def validate_searchable(task_name: str) -> None:
    """Raise ValueError if `search_sudoku` cannot solve the task."""
    if task_name != "sudoku":
        hint = "; use hrm_hf.puzzles.maze.mark_shortest_path" if task_name == "maze" else ""
        raise ValueError(f"search works only for Sudoku, but this model's task is {task_name!r}{hint}")


def search_answer(task: PuzzleTask, puzzle: Puzzle, scores: np.ndarray) -> dict[str, Any]:
    """Search with the model's probabilities [S, V]. Return the entries to update in the pipeline's result."""
    question, solution = puzzle.questions[0], puzzle.solutions[0]
    found, plain = search_sudoku(question, scores), search_sudoku(question)
    report = {
        "solved": found.tokens is not None,
        "complete": found.complete,
        "nodes": found.nodes,
        "nodes_without_model": plain.nodes,
    }
    if found.tokens is None:  # keep the model's answer and its violations
        return {"search": report}
    answer = {"grid": task.grid(found.tokens), "text": task.text(found.tokens), "valid": True, "violations": []}
    if solution is not None:
        answer["correct"] = bool((found.tokens == solution).all())
    return {**answer, "search": report}
