"""Draws images/board.gif, the moving board of the front page and of the README: `python docs/make_board.py`.

What moves is the answer of the solver that ships, after each of its ACT steps.
"""

from pathlib import Path

from transformers import pipeline

import hrm_hf  # noqa: F401 - registers the pipeline
from hrm_hf.puzzles.plots import plot_trajectory


BOARD = "1....7.9..3..2...8..96..5....53..9...1..8...26....4...3......1..4......7..7...3.."  # AI Escargot, 23 clues
PICTURE = Path(__file__).parent / "images" / "board.gif"


def draw(path: Path = PICTURE) -> dict:
    """Solves BOARD, draws the answer after each ACT step, and returns what the pipeline found."""
    solver = pipeline("puzzle-solving")
    answer = solver(BOARD, return_trajectory=True)
    (clues,) = solver.read_puzzle(BOARD).questions
    plot_trajectory(clues, answer["trajectory"], solver.puzzle_task, path, confidences=answer["confidences"])
    return answer


if __name__ == "__main__":
    found = draw()
    print(f"{PICTURE}: {found['steps']} steps, {PICTURE.stat().st_size / 1000:.0f} kB")
