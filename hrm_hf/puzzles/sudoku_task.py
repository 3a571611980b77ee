"""Task "sudoku" on boards of size 4, 6, 9, 12, 16 or 25."""

import json
from dataclasses import replace
from typing import Any

import numpy as np

from . import sudoku, sudoku_generation, sudoku_rules
from .backtracking import SearchResult
from .board_text import BOX_SHAPES, SYMBOLS, split_boards
from .candidates import Puzzle, View
from .sudoku_rules import BLANK, DIGIT_OFFSET
from .sudoku_solver import search
from .tasks import MAX_NODES, Grids, PuzzleTask


PUBLISHED = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"  # Wikipedia's example
LARGEST_BOARD = 625  # cells
EXAMPLE_CLUES = {4: (10, 8, 6), 6: (24, 18, 14), 9: (50, 42, 32)}  # clues in example boards, by size and level
CLUE_SHARES = (0.7, 0.6, 0.5)  # fraction of clues in the examples of larger boards, by level


class SudokuTask(PuzzleTask):
    """Task "sudoku", with views that permute digits, rows, columns, bands and stacks.

    If the model's config has `solves_any_size`, boards of other sizes are read, too.
    """

    name = "sudoku"
    title = plural = "Sudoku"
    rules_prove = True
    original_board = (81, 11, (3, 3))
    input_hint = "Type digits (arrow keys move), or paste a complete puzzle into a cell."
    typed_by_cell = True
    levels = 3

    def __init__(self, config, identifiers=None):
        super().__init__(config, identifiers)
        side = round(config.seq_len**0.5)
        self.board = sudoku_rules.sudoku_shape(side)
        self.grid_shape, self.box_shape = (side, side), self.board.box_shape
        if self.board.cells != config.seq_len or config.vocab_size < self.board.vocab_size:
            raise ValueError(
                f"seq_len={config.seq_len}, vocab_size={config.vocab_size}: a {side} x {side} Sudoku needs "
                f"seq_len={self.board.cells}, vocab_size={self.board.vocab_size}"
            )
        if config.box_shape and tuple(config.box_shape) != self.board.box_shape:
            raise ValueError(f"box_shape={config.box_shape}: must be {list(self.board.box_shape)}; correct the config")

    def is_single(self, item: Any) -> bool:
        single = super().is_single(item)
        if not self.config.solves_any_size or not isinstance(item, (list, tuple)) or len(item) > LARGEST_BOARD:
            return single
        # A row of a 16x16 board looks like a complete 4x4 board.
        sizes = {_size(part) for part in item if isinstance(part, str)}
        if any(isinstance(part, dict) for part in item) or sizes - {None, 4} or sizes == {4}:
            return False
        return single or _size(item) is not None

    def split(self, text: str) -> list[Any]:
        boards = split_boards(text, self.board.size)
        if not self.config.solves_any_size or {*map(_size, boards)} == {self.board.size}:
            return boards
        others = ((size, split_boards(text, size)) for size in BOX_SHAPES)
        return next((found for size, found in others if {*map(_size, found)} == {size}), boards)

    def encode(self, cells: Any, is_solution: bool = False) -> np.ndarray:
        try:
            return sudoku_rules.encode(cells, self.board.size).astype(np.int64)
        except ValueError:
            size = _size(cells) if self.config.solves_any_size else None
            if size in (None, self.board.size):
                raise
            return sudoku_rules.encode(cells, size).astype(np.int64)

    def board_fields(self, seq_len: int) -> dict[str, Any]:
        board = sudoku_rules.sudoku_shape(round(seq_len**0.5))
        return {"grid_shape": (board.size,) * 2, "box_shape": board.box_shape, "vocab_size": board.vocab_size}

    def grid(self, tokens: np.ndarray) -> list[list]:
        return sudoku_rules.to_board(self.text(tokens)).reshape(self.grid_shape).tolist()

    def text(self, tokens: np.ndarray) -> str:
        return sudoku_rules.decode(self.legal(tokens))

    def answer_text(self, result: dict[str, Any]) -> str:
        return "\n".join("".join(SYMBOLS[digit - 1] if digit else "0" for digit in row) for row in result["grid"])

    def read_cell(self, text: str, cell: int) -> int | str:
        """Convert a number to an int, since `encode` reads a string of several digits as a row."""
        text = text.strip() or "."
        if text.isascii() and text.isdigit():
            return int(text)
        if len(text) > 1:
            raise ValueError(f"{self.board.name(cell)}: {text!r:.40} is not a digit")
        return text

    def label(self, token: int) -> str:
        return SYMBOLS[token - DIGIT_OFFSET - 1] if BLANK < token < self.board.vocab_size else ""

    def board_text(self, grid: list[list]) -> str:
        """Format a board with box lines."""
        size = len(grid)
        box_rows, box_columns = sudoku_rules.sudoku_shape(size).box_shape
        rule = "+" + "+".join(["-" * (2 * box_columns + 1)] * (size // box_columns)) + "+"
        lines = [rule]
        for i, row in enumerate(grid):
            cells = [SYMBOLS[digit - 1] if digit else "." for digit in row]
            boxes = [" ".join(cells[start : start + box_columns]) for start in range(0, size, box_columns)]
            lines.append("| " + " | ".join(boxes) + " |")
            lines += [rule] if (i + 1) % box_rows == 0 else []
        return "\n".join(lines)

    def card(self) -> dict[str, str]:
        published = json.dumps(PUBLISHED) if self.board.size == 9 else f'"1" + "." * {self.seq_len - 1}'
        ids = '1 if cell == "." else int(cell) + 1 for cell in puzzle'
        return {"example": published, "ids": ids, "meaning": "1 is a blank cell, d + 1 is the digit d"}

    def example(self, level: int, seed: int) -> np.ndarray:
        """Generate a puzzle. Puzzles larger than 9x9 may have several solutions."""
        size, (box_rows, box_columns) = self.board.size, self.board.box_shape
        if size in EXAMPLE_CLUES:
            return next(sudoku_generation.generate(size, 1, EXAMPLE_CLUES[size][level], seed))[0] + DIGIT_OFFSET
        rng, (row, column) = np.random.default_rng(seed), np.divmod(np.arange(self.seq_len), size)
        solved = (row % box_rows * box_columns + row // box_rows + column) % size + 1
        (board,), _ = sudoku.augment(solved, solved, 1, rng)
        return np.where(rng.random(self.seq_len) < CLUE_SHARES[level], board, 0) + DIGIT_OFFSET

    def given(self, question: np.ndarray) -> np.ndarray:
        return question > BLANK

    def units(self) -> dict[str, list[list[int]]]:
        size, cells = self.board.size, [cells for _, cells in self.board.units]
        return {kind: cells[at * size : (at + 1) * size] for at, kind in enumerate(("row", "column", "box"))}

    def violations(self, question: np.ndarray, answer: np.ndarray) -> list[str]:
        return sudoku_rules.validate_solution(self.text(question), self.text(answer))

    def obeys(self, questions: np.ndarray, answers: np.ndarray) -> np.ndarray:
        """Check the same rules as `violations`, but fast enough to call after each ACT step."""
        return sudoku_rules.obey_rules(questions.astype(int) - DIGIT_OFFSET, answers.astype(int) - DIGIT_OFFSET)

    def wrong_cells(self, question: np.ndarray, answer: np.ndarray) -> np.ndarray:
        """Return bool [S], True for cells that change a clue, have no digit, or repeat a digit in their unit."""
        clue = question > BLANK
        wrong = (clue & (answer != question)) | (answer <= BLANK) | (answer >= self.board.vocab_size)
        for _, cells in self.board.units:
            values = answer[cells]
            repeated = (values[:, None] == values[None, :]).sum(axis=1) > 1
            wrong[cells] |= repeated & ~(clue & (answer == question))[cells]
        return wrong

    def difficulty(self, questions: np.ndarray) -> dict[str, np.ndarray]:
        return {"clues": (questions > BLANK).sum(axis=1)}

    def search(
        self, question: np.ndarray, scores: np.ndarray | None = None, max_nodes: int = MAX_NODES
    ) -> SearchResult:
        board, first = sudoku_rules.to_board(self.text(question)), 1 + DIGIT_OFFSET  # `first` is the token of digit 1
        digits = None if scores is None else scores[None, :, first : first + self.board.size]
        found = search(board[None], scores=digits, max_nodes=max_nodes)
        tokens = found.solutions[0, 0].astype(np.int64) + DIGIT_OFFSET if found.counts[0] else None
        return SearchResult(tokens, int(found.nodes[0]), bool(found.complete[0]))

    def views(self, puzzle: Puzzle, votes: int, rng: np.random.Generator) -> list[View]:
        unchanged = [replace(view, identifier=puzzle.identifier) for view in self.symmetries()]
        drawn = zip(*sudoku.random_symmetries(self.board, votes - 1, rng))
        symbols = np.arange(self.vocab_size)
        first = 1 + DIGIT_OFFSET  # the token of digit 1
        others = symbols[first + self.board.size :]
        return unchanged + [
            View(cells, np.concatenate([symbols[:first], digits[1:] + DIGIT_OFFSET, others]), puzzle.identifier)
            for digits, cells in drawn
        ]

    @property
    def _key_lengths(self) -> tuple[int, ...]:
        """Return the numbers of random keys for digits, bands, rows, stacks, columns and the transposition."""
        n, (box_rows, box_columns) = self.board.size, self.box_shape
        return n, n // box_rows, n, n // box_columns, n, 1

    def symmetry_keys(self) -> int:
        return sum(self._key_lengths)

    def random_symmetries(self, keys: np.ndarray) -> Grids:
        n, (box_rows, box_columns) = self.board.size, self.box_shape
        parts = np.split(keys, np.cumsum(self._key_lengths)[:-1], axis=1)
        digits, band, row, stack, column, turn = parts
        tokens = np.tile(np.arange(self.vocab_size, dtype=np.int32), (len(keys), 1))
        first = 1 + DIGIT_OFFSET  # token of digit 1
        tokens[:, first : first + n] = digits.argsort(axis=1) + first
        transposed = (turn[:, 0] >> np.uint64(63)).astype(bool) & (box_rows == box_columns)
        return sudoku.moved_cells(_lines(band, row, box_rows), _lines(stack, column, box_columns), transposed), tokens


def _size(cells: Any) -> int | None:
    """Return the size of a board in any form, or None if it is not a board."""
    try:
        board = cells["puzzle"] if isinstance(cells, dict) else cells
        return round(len(sudoku_rules.to_board(board)) ** 0.5)
    except ValueError:
        return None


def _lines(blocks: np.ndarray, lines: np.ndarray, size: int) -> np.ndarray:
    """Order lines by their random keys, int [B, n], keeping each block of `size` lines together."""
    within = lines.reshape(*blocks.shape, size).argsort(axis=2)
    return (blocks.argsort(axis=1)[:, :, None] * size + within).reshape(lines.shape)
