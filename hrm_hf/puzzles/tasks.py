"""Base class of puzzle tasks, which define symbols, text form, rules, symmetries, search and colors.

A task is a subclass of `PuzzleTask`. Data builders, trainer, pipeline, app and plots know a task only through this
class. `task_registry.py` finds it by its name. This module handles only tokens, not models. In shapes, S is the number
of cells, V the vocabulary size, and Q the number of questions.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from .arc_grids import box_symmetries, dihedral
from .backtracking import SearchResult, dig, find
from .candidates import Ballot, Candidate, Puzzle, View, ballots, sigmoid
from .dataset import IGNORE_LABEL, PAD_ID
from .readers import COLUMN_NAMES


QUESTION_NAMES, SOLUTION_NAMES = zip(*COLUMN_NAMES)
SHIPPED_TASKS = {  # name of each task, and its module in this package
    "sudoku": "sudoku_task", "maze": "maze_task", "arc": "arc_pipeline", "light_up": "light_up",
    "coloring": "coloring", "jigsaw": "jigsaw", "nonogram": "nonogram", "n_queens": "n_queens", "kenken": "kenken",
}  # fmt: skip
MAX_NODES = 100_000  # default limit of a search; a Sudoku search reaches it in a few minutes

Grids = tuple[np.ndarray, np.ndarray]  # inputs and labels [B, S]


class PuzzleTask:
    """Task "generic" (token lists without rules or symmetries) and base class of the other tasks.

    A subclass states what differs. Everything but `name` is optional:

    Attributes:
        name: Value of `config.task`. A class with a name can be found by `task_class` once its module is imported.
        title, plural: Name to display, and its plural in sentences.
        symbols: Text of each token, from token 0, padding. Empty if boards are token ids, or if `config.symbols` has
            them.
        blank: Token of a cell to fill in, if there is one. Larger tokens may be filled in.
        default_shape: Rows and columns of generated boards.
        rules_prove: True if every answer that obeys the rules is correct.
        reports_valid: Whether evaluations report the fraction of answers that obey the rules.
        named_puzzles: True if puzzles have names in `identifiers.json`.
        original_board: seq_len, vocab_size and box shape in the original repositories.
        palette: Color of each token; without one, boards show symbols on white cells.
        grid_lines: Whether plots with a palette separate the cells by lines.
        legend: Meaning of the colors of the palette, for the app.
        typed_by_cell: True if the app has an input for each cell.
        levels: Number of difficulties of `example`.
        praise: What the app says of an answer that obeys the rules.
    """

    name = "generic"
    title = "Puzzle"
    plural = "puzzles"
    symbols: ClassVar[Sequence[str]] = ()
    blank: ClassVar[int | None] = None
    default_shape: ClassVar[tuple[int, int] | None] = None
    rules_prove = False
    reports_valid = True
    named_puzzles = False
    original_board: ClassVar[tuple | None] = None
    palette: ClassVar[Sequence[str]] = ()
    grid_lines = True
    legend: ClassVar[dict[str, str]] = {}
    typed_by_cell = False
    levels = 1
    praise = "obeys the rules"
    search_hint = ""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            _register(cls)

    def __init__(self, config, identifiers: Sequence[str] | None = None):
        self.config, self.identifiers = config, identifiers
        self.seq_len, self.vocab_size = config.seq_len, config.vocab_size
        self.grid_shape = tuple(config.grid_shape) if config.grid_shape else (1, config.seq_len)
        self.box_shape = tuple(config.box_shape) if config.box_shape else None
        self.symbols = tuple(type(self).symbols or config.symbols or ())
        if len(self.symbols) > self.vocab_size:
            raise ValueError(f"vocab_size={self.vocab_size}: must be >= {len(self.symbols)} for task {self.name!r}")

    @property
    def has_rules(self) -> bool:
        return self._overrides("allowed", "violations")

    @property
    def searchable(self) -> bool:
        return self._overrides("allowed", "search")

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(PuzzleTask, name) for name in names)

    @property
    def input_hint(self) -> str:
        """Return a hint that tells users of the app how to type a puzzle."""
        return f"Rows of {' '.join(self.symbols[1:])}" if self.symbols else "Token ids, separated by spaces."

    # reading

    def is_single(self, item: Any) -> bool:
        """Check whether `item` is a single puzzle (its elements have fewer than S cells), not a list of puzzles."""
        if not isinstance(item, (list, tuple)):
            return True
        return all(not isinstance(part, (dict, Puzzle)) and _length(part) < max(2, self.seq_len) for part in item)

    def read(self, item: Any) -> Puzzle:
        """Read a puzzle, given as cells in a form that `encode` accepts, or as a dict with puzzle and solution."""
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

    def puzzles_of_json(self, content: Any) -> list[Any]:
        """Return the puzzles in a JSON value, which is a list or a single puzzle."""
        return [content] if self.is_single(content) else content

    def named_by_file(self, content: Any) -> bool:
        """Check whether the JSON content of a file is one puzzle that takes its name from the file."""
        return False

    def encode(self, cells: Any, is_solution: bool = False) -> np.ndarray:
        """Encode the cells of a board as tokens, int64 [S]."""
        if self.symbols:
            return self._encode_symbols(cells)
        if isinstance(cells, str):
            text = f'task="generic" needs token ids, not the string {cells!r:.60}'
            raise ValueError(f"{text}; set config.task if the model was trained on Sudoku, mazes or ARC")
        tokens = np.asarray(cells)
        if tokens.size != self.seq_len or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"the puzzle has shape {tokens.shape}; expected {self.seq_len} token ids")
        for value in tokens[(tokens < 0) | (tokens >= self.vocab_size)].reshape(-1)[:1]:
            raise ValueError(f"token {value} is outside the vocabulary; expected 0 to {self.vocab_size - 1}")
        return tokens.reshape(-1).astype(np.int64)

    def _encode_symbols(self, cells: Any) -> np.ndarray:
        known = {symbol: token for token, symbol in enumerate(self.symbols) if token}
        found = cells_of(cells, self.symbols)
        if len(found) != self.seq_len:
            raise ValueError(f"the puzzle has {len(found)} cells; expected {self.seq_len}")
        for place, cell in enumerate(found):
            if cell not in known:
                row, column = divmod(place, self.grid_shape[1])
                where = f"row {row + 1}, column {column + 1}"
                raise ValueError(f"{where}: {cell!r:.40} is not a symbol; expected one of {' '.join(known)!r}")
        return np.array([known[cell] for cell in found], dtype=np.int64)

    def board_fields(self, seq_len: int) -> dict[str, Any]:
        """Return grid_shape, box_shape and vocab_size of boards with `seq_len` cells, for models of any board size."""
        raise ValueError(f"seq_len={seq_len}: task={self.name!r} has only boards of {self.seq_len} cells")

    # showing

    def grid(self, tokens: np.ndarray) -> list[list]:
        """Return the board's rows as symbols or token ids. Tokens without a symbol are shown as padding."""
        if self.symbols:
            tokens = np.array(self.symbols)[self.legal(tokens)]
        return tokens.reshape(self.grid_shape).tolist()

    @cached_property
    def separator(self) -> str:
        return "" if self.symbols and max(map(len, self.symbols)) == 1 else " "

    def text(self, tokens: np.ndarray) -> str:
        """Return the board as a string, in a form that `encode` accepts (except for task "generic")."""
        return "\n".join(self.separator.join(map(str, row)) for row in self.grid(tokens))

    def board_text(self, grid: list[list]) -> str:
        """Turn the nested list that `grid` returns into text for a terminal."""
        width = max((len(str(cell)) for row in grid for cell in row), default=1)
        return "\n".join(self.separator.join(str(cell).rjust(width) for cell in row) for row in grid) or "(no grid)"

    def label(self, token: int) -> str:
        """Return the text of a cell in plots and in the app."""
        if not self.symbols:
            return str(token)
        return "" if token == self.blank or token >= len(self.symbols) else self.symbols[token]

    def color(self, token: int) -> str:
        """Return the color of a cell (requires a palette). Tokens beyond the palette get the color of padding."""
        return self.palette[token if token < len(self.palette) else PAD_ID]

    def ink(self, token: int) -> str:
        """Return a label color that is readable on the cell's color: white on dark cells, dark on all others."""
        red, green, blue = (int(self.color(token)[at : at + 2], 16) for at in (1, 3, 5))
        return "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 160 else "#1f2933"

    def window(self, states: np.ndarray) -> tuple[int, int]:
        """Return how many rows and columns of the boards [N, S] to show."""
        return self.grid_shape

    def read_typed(self, text: str) -> Any:
        """Convert text typed in the app to a form that `read` accepts."""
        if self.symbols:
            return text
        words = text.split()
        for word in words:
            if not word.isdecimal():
                raise ValueError(f"{word!r:.40} is not a token id; expected {self.seq_len} numbers")
        return [int(word) for word in words]

    def read_cell(self, text: str, cell: int) -> Any:
        """Parse the text typed into a cell, for tasks whose tab in the app has an input for each cell."""
        return text

    def answer_text(self, result: dict[str, Any]) -> str:
        """Return a result's answer as text that can be copied from the app."""
        return result["text"]

    def example(self, level: int, seed: int) -> np.ndarray | str:
        """Return an example, tokens [S] or typed text, determined by the seed. Level 0 is the easiest."""
        rng = np.random.default_rng(seed)
        if self.generates:
            return self.generate(level / 2, rng)[0]
        return rng.integers(1 if self.symbols else 0, len(self.symbols) or self.vocab_size, self.seq_len)

    def card(self) -> dict[str, str]:
        """Return values for the model card: an example puzzle and its token ids in Python, and what tokens mean."""
        if not self.symbols:
            meaning = f"0 to {self.vocab_size - 1}, as in training"
            return {"example": f"[1] * {self.seq_len}", "ids": "token for token in puzzle", "meaning": meaning}
        cells = self.example(0, 0) if self.generates else np.ones(self.seq_len, dtype=int)
        example = json.dumps([self.symbols[cell] for cell in cells], ensure_ascii=False)
        meaning = ", ".join(f"{token} is {symbol!r}" for token, symbol in enumerate(self.symbols) if token)
        return {"example": example, "ids": f"{list(self.symbols)}.index(cell) for cell in puzzle", "meaning": meaning}

    # rules

    def given(self, question: np.ndarray) -> np.ndarray:
        """Return a bool mask [S] of the cells in `question` that an answer must keep (clues, walls)."""
        return np.zeros(len(question), dtype=bool) if self.blank is None else question != self.blank

    def fillable(self, board: np.ndarray) -> np.ndarray:
        """Return a bool mask [S] of the cells that a puzzle may leave blank; walls, for example, are always given."""
        return np.ones(len(board), dtype=bool)

    def units(self) -> dict[str, list[list[int]]]:
        """Return the cells of each unit by kind, such as {"row": ...}, used by models with mixing="units"."""
        return {}

    def neighbours(self, marked: np.ndarray) -> np.ndarray:
        """Count the `marked` cells [S] that share a unit with each cell, int [S]; twice if they share two units."""
        members = self._members
        return (members.T @ (members @ marked) - members.sum(axis=0) * marked).astype(int)

    @cached_property
    def _members(self) -> np.ndarray:
        """Return a table [units, S] that is 1 where a cell belongs to a unit."""
        units = [unit for kind in self.units().values() for unit in kind]
        members = np.zeros((len(units), self.seq_len), dtype=np.float32)
        for row, unit in zip(members, units):
            row[unit] = 1
        return members

    def allowed(self, board: np.ndarray) -> np.ndarray:
        """Return bool [S, V]: which tokens each cell may have, given all other filled cells of `board` [S].

        This states the rules once: answers are checked, searched and generated with it.
        """
        raise NotImplementedError

    def violations(self, question: np.ndarray, answer: np.ndarray) -> list[str]:
        """List the rules that `answer`, tokens [S], violates as a solution to `question`, tokens [S]."""
        if not self._overrides("allowed"):
            return []
        problems, legal = [], self.legal(answer)
        for cell in np.flatnonzero(self.wrong_cells(question, answer)):
            row, column = divmod(int(cell), self.grid_shape[1])
            what = "is blank" if legal[cell] <= self.blank else f"{self.symbols[legal[cell]]!r} breaks a rule"
            changed = self.given(question)[cell] and answer[cell] != question[cell]
            problems.append(f"row {row + 1}, column {column + 1}: {'a given cell was changed' if changed else what}")
        return problems

    def obeys(self, questions: np.ndarray, answers: np.ndarray) -> np.ndarray:
        """Return bool [N]: whether each of `answers` to `questions` (token arrays [N, S]) obeys all rules."""
        return np.array([not self.violations(*pair) for pair in zip(questions, answers)], dtype=bool)

    def wrong_cells(self, question: np.ndarray, answer: np.ndarray) -> np.ndarray:
        """Return bool [S], True for the cells of `answer` that violate the rules, for plots and the app."""
        if not self._overrides("allowed"):
            return np.zeros(len(answer), dtype=bool)
        legal = self.legal(answer)
        possible = self.allowed(np.where(legal <= self.blank, self.blank, legal))
        changed = self.given(question) & (answer != question)
        return changed | (legal <= self.blank) | ~possible[np.arange(len(legal)), legal]

    def difficulty(self, questions: np.ndarray) -> dict[str, np.ndarray]:
        """Return a dict from the name of a difficulty measure to its values [N] for the questions [N, S]."""
        return {}

    def search(
        self, question: np.ndarray, scores: np.ndarray | None = None, max_nodes: int = MAX_NODES
    ) -> SearchResult:
        """Search for the first solution of `question` [S]. `scores` only order the guesses.

        The search tries the tokens of a cell in descending order of `scores` [S, V], or in ascending order if None.
        Scores change only the number of nodes. Compare the number with and without scores to judge the model.
        """
        found = find(self, question, scores, max_nodes=max_nodes)
        return SearchResult(found.boards[0] if found.boards else None, found.nodes, found.complete)

    def validate_searchable(self) -> None:
        """Raise ValueError if the task has no search."""
        if not self.searchable:
            raise ValueError(f"search=True: the task {self.name!r} of this model has no search{self.search_hint}")

    # generation

    @property
    def generates(self) -> bool:
        return self._overrides("allowed", "generate")

    def generate(self, level: float, rng: np.random.Generator) -> Grids:
        """Draw a puzzle and its unique solution, tokens [S] each. Level 0 is the easiest, level 1 the hardest.

        By default, a search that guesses at random finds a solution (ValueError if it finds none), and cells are
        emptied while the solution stays unique.
        """
        blank = np.full(self.seq_len, self.blank)
        found = find(self, blank, rng.random((self.seq_len, self.vocab_size)))
        if not found.boards:
            raise ValueError(f"task={self.name!r}: no filled board found in {found.nodes:,} nodes; define `generate`")
        return dig(self, found.boards[0], level, rng), found.boards[0]

    def canonical_form(self, board: np.ndarray) -> bytes:
        """Return a key that identifies a board up to its symmetries."""
        return min(view.show(board).astype(np.int8).tobytes() for view in self.symmetries())

    # symmetries

    def symmetries(self) -> list[View]:
        """Return the symmetries of the board as views, with the identity first."""
        return [View(np.arange(self.seq_len), np.arange(self.vocab_size))]

    def reflections(self) -> list[View]:
        """Return the rotations and reflections of the board: eight if it is square, otherwise four."""
        cells, symbols = np.arange(self.seq_len).reshape(self.grid_shape), np.arange(self.vocab_size)
        return [View(dihedral(cells, one).reshape(-1), symbols) for one in box_symmetries(self.grid_shape)]

    def symmetry_keys(self) -> int:
        """Return how many random keys each row needs. Raise ValueError if the task has no known symmetries."""
        if len(self.symmetries()) < 2:
            raise ValueError(
                f"augment=true: task {self.name!r} has no known symmetries; use --augment false, or correct the "
                f"config's task if it should be one of {', '.join(SHIPPED_TASKS)}"
            )
        return 1

    def random_symmetries(self, keys: np.ndarray) -> Grids:
        """Return the cells [B, S] and symbols [B, V] of the views chosen by `keys`, uint64 [B, symmetry_keys()].

        Override this method and `symmetry_keys` if there are too many symmetries to list.
        """
        cells, symbols = self._tables
        chosen = (keys[:, 0] % np.uint64(len(cells))).astype(np.intp)
        return cells[chosen], symbols[chosen]

    def symmetric_copies(self, grids: Grids, keys: np.ndarray) -> Grids:
        """Apply the symmetries of `random_symmetries` to the grids of each row."""
        cells, symbols = self.random_symmetries(keys)
        return tuple(map_tokens(take(grid, cells), symbols) for grid in grids)

    @cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        views = self.symmetries()
        return np.stack([view.cells for view in views]), np.stack([view.symbols for view in views]).astype(np.int32)

    # voting

    def views(self, puzzle: Puzzle, votes: int, rng: np.random.Generator) -> list[View]:
        """Return `votes` views of the puzzle. The first view is the puzzle itself."""
        views = self.symmetries()
        if self._overrides("random_symmetries"):
            drawn = self.random_symmetries(
                rng.integers(2**63, size=(votes - 1, self.symmetry_keys()), dtype=np.uint64)
            )
            views += [View(*pair) for pair in zip(*drawn)]
        if votes > 1 == len(views):
            raise ValueError(f'votes={votes}: task="{self.name}" has no known symmetries; use restarts instead')
        if votes > len(views):
            raise ValueError(
                f"votes={votes}: task={self.name!r} on boards of {self.grid_shape[0]} x {self.grid_shape[1]} has only "
                f"{len(views)} symmetries; use votes={len(views)}, and increase restarts for more candidates"
            )
        return [replace(view, identifier=puzzle.identifier) for view in views[:votes]]

    def voting(self, data: str, names: Sequence[str]) -> Any:
        """Return a vote counter for the rows of a data set, such as `ArcVoting`, or None if the task has no votes."""
        return None

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
            "sure": best.sure and not problems and 2 * len(winner.members) > len(candidates),
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

    def legal(self, tokens: np.ndarray) -> np.ndarray:
        """Replace tokens without a symbol, which a model with a larger vocabulary may predict, with padding."""
        return np.where(tokens < (len(self.symbols) or self.vocab_size), tokens, PAD_ID)


REGISTERED: dict[str, type[PuzzleTask]] = {PuzzleTask.name: PuzzleTask}  # tasks by name, searched by task_registry.py


def _register(task: type[PuzzleTask]) -> None:
    """Register a task under its name, replacing an earlier one. Raise ValueError for the name of a shipped task."""
    shipped = SHIPPED_TASKS.get(task.name)
    if task.name == PuzzleTask.name or (shipped and task.__module__ != f"{__package__}.{shipped}"):
        raise ValueError(f"name={task.name!r}: hrm_hf has a task with this name; use another name for {task.__name__}")
    REGISTERED[task.name] = task


def cells_of(board: Any, symbols: Sequence[str] = ()) -> list[str]:
    """Split a board, given as text or nested lists, into the text of its cells.

    A text has cells of one character, or words if a symbol is longer. Spaces between one-character cells are skipped
    unless a space is a symbol.
    """
    if isinstance(board, (list, tuple, np.ndarray)):
        return [cell for part in board for cell in cells_of(part, symbols)]
    if not isinstance(board, str) or board in symbols:
        return [str(board)]
    if any(len(symbol) > 1 for symbol in symbols):
        return board.split()
    return [cell for cell in board if cell not in "\r\n" and (cell != " " or " " in symbols)]


def _length(part: Any) -> int:
    """Count the cells in an element of a list, including those in nested lists."""
    if isinstance(part, (list, tuple)):
        return sum(_length(inner) if isinstance(inner, (list, tuple)) else 1 for inner in part)
    return len(part) if isinstance(part, str) else 1


def map_tokens(grids: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Look up the tokens of grids [B, S] in each row's table [B, V], leaving ignored labels unchanged."""
    ignored = grids == IGNORE_LABEL
    return np.where(ignored, grids, take(tokens, np.where(ignored, 0, grids)))


def take(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Compute `np.take_along_axis(values, index, axis=1)` in half the time."""
    return values.reshape(-1)[index + (np.arange(len(values)) * values.shape[1])[:, None]]
