"""Solves puzzles as people give them: as arguments, in files or on stdin, and shows the boards as text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..hub.kinds import PUZZLE_SOLVER, load_config
from ..io.evaluation import chosen_device
from ..io.usage import UsageError
from .options import SolveOptions, SolvePuzzles, values_of


if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def solve_puzzles(options: SolvePuzzles) -> tuple[list[dict[str, Any]], PreTrainedConfig]:
    """Solves puzzles by the pipeline "puzzle-solving".

    Returns:
        The results, and the config of the model.

    Raises:
        UsageError: several puzzles to plot.
        ModelError: a model that is nowhere, or of another kind.
        ValueError: no puzzle, or what cannot be read as one, by its number.
    """
    load_config(options.model, PUZZLE_SOLVER, adapters=True)
    from transformers import pipeline  # seconds, which the check above spares

    from .plots import plot_trajectory

    solver = pipeline("puzzle-solving", model=options.model, device=chosen_device(options.device))
    items = _gather(options.puzzles, options.file, solver)
    inputs = [solver.read_puzzle(item, f"puzzle {i}: ") for i, item in enumerate(items)]
    if options.plot and len(inputs) != 1:
        raise UsageError(f"out={options.plot}: a picture shows one puzzle, not {len(inputs)}", "--out")
    given = values_of(options, SolveOptions)
    results = solver(inputs, return_trajectory=options.plot is not None, batch_size=options.batch_size, **given)
    config = solver.model.config
    if options.plot:
        puzzle, result = inputs[0], results[0]
        plot_trajectory(
            puzzle.questions[0], result["trajectory"], config, options.plot, confidences=result["confidences"],
            solution=puzzle.solutions[0],
        )  # fmt: skip
    return results, config


def _gather(puzzles: list[str], file: Path | None, solver) -> list[Any]:
    """All puzzles of the arguments, of `file` and of stdin."""
    from .pipeline import read_puzzle_file

    inputs: list[Any] = []
    for puzzle in puzzles:
        if puzzle == "-":
            inputs += puzzles_of_text(sys.stdin.read(), solver.puzzle_task)
        else:
            rows = read_puzzle_file(puzzle)
            inputs += [puzzle] if rows is None else rows
    if file is not None:
        rows = read_puzzle_file(file)
        inputs += [str(file)] if rows is None else rows
    if not inputs:
        raise ValueError("no puzzle given, or stdin holds none")
    return inputs


def puzzles_of_text(text: str, task) -> list[Any]:
    """Puzzles of stdin: JSON (one puzzle, or a list of them), or blocks of lines with empty lines between.

    The lines of a block are puzzles if they have as many cells as a puzzle has, else they are the rows of one puzzle.
    """
    text = text.strip("\n\r")
    if text.lstrip()[:1] in ("{", "["):
        content = json.loads(text)
        return [content] if task.is_single(content) else content
    blocks, block = [], []
    for line in [*text.splitlines(), ""]:
        if line:  # an open row of a maze is a line of spaces
            block.append(line)
        elif block:
            blocks += block if all(len(line.rstrip("\r")) >= task.seq_len for line in block) else ["\n".join(block)]
            block = []
    return blocks


def text_board(grid: list[list], config) -> str:
    """A board as text: Sudoku with box lines, mazes and ARC as they are, tokens in columns."""
    if config.task != "sudoku":
        width = max((len(str(cell)) for row in grid for cell in row), default=1)
        separator = "" if config.task == "maze" else " "
        return "\n".join(separator.join(str(cell).rjust(width) for cell in row) for row in grid) or "(no grid)"
    from .sudoku_rules import sudoku_shape

    size = len(grid)
    box_rows, box_columns = sudoku_shape(size).box_shape
    rule = "+" + "+".join(["-" * (2 * box_columns + 1)] * (size // box_columns)) + "+"
    lines = [rule]
    for i, row in enumerate(grid):
        cells = [str(digit) if digit else "." for digit in row]
        boxes = [" ".join(cells[start : start + box_columns]) for start in range(0, size, box_columns)]
        lines.append("| " + " | ".join(boxes) + " |")
        lines += [rule] if (i + 1) % box_rows == 0 else []
    return "\n".join(lines)
