"""Plot a board over the ACT steps: `.png` shows one board per step, `.gif` is an animation.

Boards show symbols, with given cells in bold, or the colors of the task's palette. Amber marks a cell that changed in
this step; given cells are never amber. Red marks a cell that differs from the solution; without a solution, it marks
changed clues and cells that conflict with another cell of their unit.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .tasks import PuzzleTask


CHANGED, WRONG, INK, PREDICTED, CLUE_CELL = "#ffe08a", "#f6b3ab", "#1f2933", "#2563a8", "#eef1f4"
MAX_PANELS = 16
PANELS_PER_ROW = 4
FRAME_MS, LAST_FRAME_MS = 600, 2500


def plot_trajectory(
    puzzle: Sequence[int] | np.ndarray,
    trajectory: Sequence[Sequence[int]] | np.ndarray,
    task: PuzzleTask,
    path: str | Path,
    *,
    confidences: Sequence[float] | None = None,
    solution: Sequence[int] | np.ndarray | None = None,
    title: str = "",
) -> Path:
    """Plot a puzzle and the answer after each ACT step, and return `path`.

    Args:
        puzzle: Tokens [S].
        trajectory: Tokens [steps, S], such as `PuzzleSolution.trajectory[:, row]` or the pipeline's "trajectory".
        task: Task of the model, such as `puzzle_task(model.config)` or the `puzzle_task` of a pipeline.
        path: `.png` (the puzzle and at most 15 evenly spaced steps, including the last) or `.gif` (all steps).
        confidences: sigmoid(q_halt) [steps], shown in the titles.
        solution: Correct answer, tokens [S]; -100 if unknown.
    """
    path = Path(path)
    if path.suffix not in (".png", ".gif"):
        raise ValueError(f"path={path}: must end in .png (boards side by side) or .gif (animation)")
    puzzle, trajectory = np.asarray(puzzle, dtype=np.int64), np.asarray(trajectory, dtype=np.int64)
    if puzzle.ndim != 1 or trajectory.ndim != 2 or not len(trajectory) or trajectory.shape[1:] != puzzle.shape:
        raise ValueError(f"puzzle has shape {puzzle.shape}, trajectory {trajectory.shape}; expected [S], [steps, S]")
    boards = _Boards(puzzle, trajectory, task, None if solution is None else np.asarray(solution), confidences)
    (_save_panels if path.suffix == ".png" else _save_animation)(boards, path, title)
    return path


class _Boards:
    """Plotter that draws the steps of a trajectory on matplotlib axes, with the puzzle as step 0."""

    def __init__(self, puzzle, trajectory, task, solution, confidences):
        self.puzzle, self.solution, self.confidences = puzzle, solution, confidences
        self.task = task
        self.states = np.concatenate((puzzle[None], trajectory))
        self.shape = self.task.grid_shape
        self.window = task.window(self.states)

    @property
    def last_step(self) -> int:
        return len(self.states) - 1

    def draw(self, axes, step: int) -> None:
        tokens = self.states[step]
        changed = changed_cells(self.task, self.states, step)
        wrong = self._wrong(tokens) if step else np.zeros(len(tokens), dtype=bool)
        if self.task.palette:
            self._draw_colors(axes, tokens, changed, wrong)
        else:
            self._draw_symbols(axes, tokens, changed, wrong)
        rows, columns = self.window
        axes.set(xlim=(-0.06, columns + 0.06), ylim=(rows + 0.06, -0.06), xticks=[], yticks=[], aspect="equal")
        axes.spines[:].set_visible(False)
        axes.set_title(self._heading(step, int(wrong.sum())), fontsize=9, color=INK, pad=4)

    def _heading(self, step: int, wrong: int) -> str:
        if not step:
            return "puzzle"
        parts = [f"step {step}"]
        if self.confidences is not None:
            parts.append(f"confidence {self.confidences[step - 1]:.2f}")
        if wrong or self.solution is not None:
            parts.append(f"{wrong} wrong" if wrong else "right")
        return " · ".join(parts)

    def _wrong(self, tokens: np.ndarray) -> np.ndarray:
        if self.solution is not None:
            return (tokens != self.solution) & (self.solution >= 0)
        return self.task.wrong_cells(self.puzzle, tokens)

    def _draw_symbols(self, axes, tokens, changed, wrong) -> None:
        from matplotlib.patches import Rectangle

        rows, columns = self.shape
        clues = self.task.given(self.puzzle)
        size = 118 / max(rows, columns)  # font size in points, for a board about 2.2 inches wide
        for cell, token in enumerate(tokens.tolist()):
            row, column = divmod(cell, columns)
            color = WRONG if wrong[cell] else CHANGED if changed[cell] else CLUE_CELL if clues[cell] else "white"
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=color, edgecolor="#c3ccd5", linewidth=0.5))
            style = {"weight": "bold", "color": INK} if clues[cell] else {"color": PREDICTED}
            text = self.task.label(token)
            axes.text(column + 0.5, row + 0.53, text, ha="center", va="center", fontsize=size, **style)
        box_rows, box_columns = self.task.box_shape or self.shape
        axes.hlines(range(0, rows + 1, box_rows), 0, columns, color=INK, linewidth=1.4, zorder=3)
        axes.vlines(range(0, columns + 1, box_columns), 0, rows, color=INK, linewidth=1.4, zorder=3)

    def _draw_colors(self, axes, tokens, changed, wrong) -> None:
        from matplotlib.colors import to_rgb
        from matplotlib.patches import Rectangle

        rows, columns = self.window
        palette = np.array([to_rgb(color) for color in self.task.palette])
        grid = np.where(tokens < len(palette), tokens, 0).reshape(self.shape)[:rows, :columns]
        axes.imshow(palette[grid], extent=(0, columns, rows, 0), interpolation="nearest")
        if self.task.grid_lines:
            lines = {"color": "#555555", "linewidth": 0.4, "alpha": 0.6}
            axes.hlines(range(rows + 1), 0, columns, **lines)
            axes.vlines(range(columns + 1), 0, rows, **lines)
        else:
            axes.add_patch(Rectangle((0, 0), columns, rows, fill=False, edgecolor=INK, linewidth=0.8))
        for marked, color in ((changed & ~wrong, "#f5c518"), (wrong, "#e0201b")):
            for row, column in np.argwhere(marked.reshape(self.shape)[:rows, :columns]):
                axes.add_patch(
                    Rectangle((column + 0.1, row + 0.1), 0.8, 0.8, fill=False, edgecolor=color, linewidth=1.0)
                )
        for (row, column), token in np.ndenumerate(grid):
            if text := self.task.label(int(token)):
                size = 110 / max(rows, columns) * min(1, 2 / len(text))
                style = {"color": self.task.ink(int(token)), "weight": "bold", "fontsize": size}
                axes.text(column + 0.5, row + 0.53, text, ha="center", va="center", **style)


def changed_cells(task: PuzzleTask, states: np.ndarray, step: int) -> np.ndarray:
    """Return the cells, bool [S], that a step changed. `states` [1 + steps, S]: puzzle and answers.

    No cell counts as changed in the first step, which fills in the complete board. Given cells never count as changed.
    """
    if step < 2:
        return np.zeros(states.shape[1], dtype=bool)
    return (states[step] != states[step - 1]) & ~task.given(states[0])


def _figure(rows: int, columns: int, title: str, aspect: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 2.35 * min(2.0, max(0.5, aspect)) + 0.25
    figure = Figure(figsize=(2.35 * columns, height * rows + (0.35 if title else 0.0)), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, color=INK, fontsize=11)
    return figure, figure.subplots(rows, columns, squeeze=False).reshape(-1)


def _save_panels(boards: _Boards, path: Path, title: str) -> None:
    steps = list(range(boards.last_step + 1))
    if len(steps) > MAX_PANELS:
        steps = [0, *np.linspace(1, boards.last_step, MAX_PANELS - 1).round().astype(int).tolist()]
    columns = min(PANELS_PER_ROW, len(steps))
    figure, panels = _figure(-(-len(steps) // columns), columns, title, boards.window[0] / boards.window[1])
    for axes, step in zip(panels, steps):
        boards.draw(axes, step)
    for axes in panels[len(steps) :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=150)


def _save_animation(boards: _Boards, path: Path, title: str) -> None:
    from PIL import Image

    frames = []
    for step in range(boards.last_step + 1):
        figure, (axes,) = _figure(1, 1, title, boards.window[0] / boards.window[1])
        boards.draw(axes, step)
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=150, format="png")
        # Each frame has few colors, so its own palette keeps them exact.
        frames.append(Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE))
    times = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0)
