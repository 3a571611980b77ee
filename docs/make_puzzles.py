"""Draws images/puzzles.png, a puzzle of each pencil task and its solution: `python docs/make_puzzles.py`."""

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from hrm_hf.puzzles.any_puzzle import describe
from hrm_hf.puzzles.plots import plot_trajectory
from hrm_hf.puzzles.task_registry import task_class


TASKS = ("n_queens", "nonogram", "kenken", "light_up", "coloring")
PICTURE = Path(__file__).parent / "images" / "puzzles.png"


def draw(path: Path = PICTURE) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in TASKS:
            task = describe(task_class(name))[1]
            puzzle, solution = task.generate(1.0, np.random.default_rng(0))
            file = plot_trajectory(puzzle, [solution], task, Path(folder, f"{name}.png"), title=task.title)
            rows.append(Image.open(file).convert("RGB"))
    width, height = rows[0].size
    picture = Image.new("RGB", (2 * width, height * ((len(rows) + 1) // 2)), "white")
    for place, row in enumerate(rows):
        picture.paste(row.resize((width, height)), (place % 2 * width, place // 2 * height))
    picture.quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    draw()
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")
