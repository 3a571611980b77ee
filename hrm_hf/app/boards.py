"""Boards and the confidence over the ACT steps as HTML: what a step shows, without a browser or a page.

Colors and rules are those of `hrm_hf.puzzles.plots`, which draws the same as pictures.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..puzzles import maze
from ..puzzles.plots import ARC_COLORS, MAZE_COLORS, changed_cells, used_window, wrong_cells
from ..puzzles.sudoku_rules import BLANK, DIGIT_OFFSET
from ..puzzles.tasks import PuzzleTask


BOARD_PIXELS = 324  # side of a large board
MAX_CELL = 44
MAX_PROBLEMS = 3  # named in a caption; how many more there are is said


@dataclass(frozen=True)
class SolvedBoard:
    """One question and how its answer came to be; S cells.

    Attributes:
        states: tokens [1 + steps, S], the puzzle and the answer after each ACT step.
        confidences: sigmoid(q_halt) [steps]. result: what the pipeline returned.
    """

    states: np.ndarray
    confidences: list[float]
    result: dict[str, Any]

    @property
    def puzzle(self) -> np.ndarray:
        return self.states[0]

    @property
    def last_step(self) -> int:
        return len(self.states) - 1


def board_html(task: PuzzleTask, board: SolvedBoard, step: int) -> str:
    """The board after a step: what was given, filled in, changed by this step, and what breaks the rules.

    A given cell is never marked as changed: a model that changes it breaks a rule.
    """
    tokens = board.states[step]
    given, changed = task.given(board.puzzle), changed_cells(task, board.states, step)
    wrong = wrong_cells(task, board.puzzle, tokens) if step else np.zeros(len(tokens), dtype=bool)
    rows, columns = task.grid_shape
    if task.name == "arc":
        rows, columns = used_window(board.states, task.grid_shape)
    cells = []
    for cell in range(len(tokens)):
        row, column = divmod(cell, task.grid_shape[1])
        if row >= rows or column >= columns:
            continue
        text, style, classes = _cell(task, bool(given[cell]), int(tokens[cell]))
        classes += ["wrong"] if wrong[cell] else ["changed"] if changed[cell] else []
        classes += box_edges(task, row, column)
        place = f"row {row + 1}, column {column + 1}"
        cells.append(f'<span class="{" ".join(classes)}" style="{style}" title="{place}">{text}</span>')
    kind = "colors" if task.name in ("maze", "arc") else "symbols"
    grid = f'<div class="hrm-board {kind}" style="{board_size(rows, columns)}">{"".join(cells)}</div>'
    return f'<div data-step="{step}">{grid}{_legend(kind)}</div>'


def board_size(rows: int, columns: int) -> str:
    """The style of a board's size in cells; a narrow page makes them smaller."""
    return f"--columns: {columns}; --most: {min(MAX_CELL, BOARD_PIXELS // max(rows, columns))}px"


def box_edges(task: PuzzleTask, row: int, column: int) -> list[str]:
    """Classes of a cell at the lower or right edge of its Sudoku box, inside the board."""
    if task.name != "sudoku":
        return []
    (box_rows, box_columns), (rows, columns) = task.board.box_shape, task.grid_shape
    right = (column + 1) % box_columns == 0 and column + 1 < columns
    bottom = (row + 1) % box_rows == 0 and row + 1 < rows
    return ["box-right"] * right + ["box-bottom"] * bottom


def _cell(task: PuzzleTask, given: bool, token: int) -> tuple[str, str, list[str]]:
    """Text, style and classes of a cell."""
    if task.name == "maze":
        letter = {maze.START: "S", maze.GOAL: "G"}.get(token, "")
        return letter, f"background: {MAZE_COLORS[min(token, maze.VOCAB_SIZE - 1)]}", []
    if task.name == "arc":
        return "", f"background: {ARC_COLORS[token if token < len(ARC_COLORS) else 0]}", []
    if task.name == "sudoku":
        digit = str(token - DIGIT_OFFSET) if BLANK < token < task.board.vocab_size else ""
        return digit, "", ["given" if given else "filled"]
    return str(token), "", ["filled"]


def _legend(kind: str) -> str:
    ring = "box-shadow: inset 0 0 0 2px"
    marks = {
        "symbols": {"background: #e3e8ee": "given", "background: #ffffff": "filled in",
                    "background: #ffe08a": "changed in this step", "background: #f6b3ab": "breaks a rule"},
        "colors": {f"{ring} #f5c518": "changed in this step", f"{ring} #e0201b": "breaks a rule"},
    }[kind]  # fmt: skip
    items = "".join(f'<span><i style="{style}"></i>{words}</span>' for style, words in marks.items())
    return f'<div class="hrm-legend">{items}</div>'


def caption(task: PuzzleTask, board: SolvedBoard, step: int) -> str:
    """Caption of a step, as Markdown: its confidence, and which rules the answer breaks."""
    if not step:
        return "**The puzzle**, before the first step."
    parts = [f"**Step {step} of {board.last_step}**", f"confidence {board.confidences[step - 1]:.3f}"]
    problems = task.violations(board.puzzle, board.states[step])
    if task.has_rules and not problems:
        parts.append("a grid" if task.name == "arc" else "obeys the rules")
    if step == board.last_step:
        votes = board.result["votes"]
        parts += [f"{votes['agree']} of {votes['of']} votes"] if votes["of"] > 1 else []
        if "correct" in board.result:
            parts.append("correct" if board.result["correct"] else "not the given solution")
    text = " · ".join(parts)
    if problems:
        more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
        text += f"\n\nBreaks the rules: {html.escape('; '.join(problems[:MAX_PROBLEMS]))}{more}."
    return text


def confidence_chart(confidences: Sequence[float], step: int) -> str:
    """sigmoid(q_halt) after each step as bars, the shown step in color; SVG."""
    width, height, left, top = 460, 92, 34, 8
    base = height - 18
    slot = min(60, (width - left - 6) / len(confidences))
    bars, skip = [], max(1, len(confidences) // 16)
    for index, value in enumerate(confidences):
        tall = value * (base - top)
        color = "#2563a8" if index + 1 == step else "#9db8d9"
        x = left + index * slot
        bars.append(
            f'<rect x="{x + 0.1 * slot:.1f}" y="{base - tall:.1f}" width="{0.8 * slot:.1f}" height="{tall:.1f}" '
            f'fill="{color}"><title>step {index + 1}: {value:.3f}</title></rect>'
        )
        if index % skip == 0:
            bars.append(f'<text x="{x + slot / 2:.1f}" y="{height - 4}" text-anchor="middle">{index + 1}</text>')
    lines = "".join(
        f'<line x1="{left}" x2="{width - 6}" y1="{y:.1f}" y2="{y:.1f}" stroke="#9aa5b1" stroke-width="0.6" '
        f'stroke-dasharray="{dash}"/><text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        for y, label, dash in ((base, "0", ""), ((base + top) / 2, "0.5", "3 3"), (top, "1", "3 3"))
    )
    title = "Confidence that the answer is right, after each ACT step: sigmoid(q_halt)"
    return (
        f'<div style="font-size: 13px">{title}</div><svg class="hrm-chart" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{title}">{lines}{"".join(bars)}</svg>'
    )
