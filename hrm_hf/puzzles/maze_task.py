"""Task "maze": mark the shortest path from S to G."""

from typing import Any

import numpy as np

from . import maze
from .candidates import View
from .tasks import PuzzleTask


COLORS = ("#9aa5b1", "#2f3b47", "#ffffff", "#2a9d4a", "#c8372d", "#5aa9e6")  # PAD # space S G o
WORDS = ("wall", "open", "S, the start", "G, the goal", "path of the model")  # what the colors in COLORS[1:] mean


class MazeTask(PuzzleTask):
    """Task "maze", with the eight symmetries of a square or the four of a rectangle as views."""

    name = "maze"
    title, plural = "Maze", "mazes"
    symbols = ("?", *maze.CHARSET)
    rules_prove = True
    original_board = (900, maze.VOCAB_SIZE, None)
    palette = COLORS
    grid_lines = False
    legend = dict(zip(COLORS[1:], WORDS))
    input_hint = "Rows of '#' (wall) and ' ' (open), with one S (start) and one G (goal)."
    levels = 3
    search_hint = "; use hrm_hf.puzzles.maze.mark_shortest_path"

    def __init__(self, config, identifiers=None):
        super().__init__(config, identifiers)
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
                raise ValueError("the maze contains 'o' or padding; use only walls '#', open cells ' ', S and G")
        return tokens.reshape(-1).astype(np.int64)

    def label(self, token: int) -> str:
        return {maze.START: "S", maze.GOAL: "G"}.get(token, "")

    def card(self) -> dict[str, str]:
        rows, columns = self.grid_shape
        example = f'["S" + " " * {columns - 1}] + [" " * {columns}] * {rows - 2} + [" " * {columns - 1} + "G"]'
        ids = '"?# SGo".index(cell) for cell in "".join(puzzle)'
        return {"example": example, "ids": ids, "meaning": "1 wall, 2 open, 3 start, 4 goal, 5 path"}

    def example(self, level: int, seed: int) -> np.ndarray:
        rows, columns = self.grid_shape
        length = (rows + columns) * level // 4 + 1
        return next(maze.generate(rows, columns, 1, seed, min_path_length=length))[0].reshape(-1)

    def given(self, question: np.ndarray) -> np.ndarray:
        return question != maze.OPEN

    def violations(self, question: np.ndarray, answer: np.ndarray) -> list[str]:
        return maze.validate_solution(question, self.legal(answer), self.grid_shape)

    def wrong_cells(self, question: np.ndarray, answer: np.ndarray) -> np.ndarray:
        return (answer != question) & ~((question == maze.OPEN) & (answer == maze.PATH))

    def symmetries(self) -> list[View]:
        return self.reflections()
