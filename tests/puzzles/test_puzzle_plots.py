"""Plots: marked cells and file formats. The appearance was checked by eye."""

import numpy as np
import pytest
from PIL import Image

from hrm_hf import HrmPuzzleConfig
from hrm_hf.puzzles import maze, sudoku_generation
from hrm_hf.puzzles.arc_grids import encode_grid
from hrm_hf.puzzles.plots import MAX_PANELS, _Boards, changed_cells, plot_trajectory
from hrm_hf.puzzles.task_registry import puzzle_task


SUDOKU = puzzle_task(HrmPuzzleConfig(task="sudoku", grid_shape=[4, 4], seq_len=16, vocab_size=6))


@pytest.fixture(scope="module")
def board():
    return [np.asarray(digits, dtype=np.int64) + 1 for digits in next(iter(sudoku_generation.generate(4, 1, 6)))]


def trajectory(board, steps):
    puzzle, solution = board
    return np.stack([solution if step == steps - 1 else puzzle for step in range(steps)])


def test_a_png_shows_the_board(board, tmp_path):
    path = plot_trajectory(board[0], trajectory(board, 3), SUDOKU, tmp_path / "a.png", confidences=[0.1, 0.5, 0.9])
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width > 3 * image.height  # puzzle and three steps in a row
        assert len(image.convert("RGB").getcolors(1 << 24)) > 4


def test_a_gif_has_a_frame_for_the_puzzle_and_each_step(board, tmp_path):
    path = plot_trajectory(board[0], trajectory(board, 3), SUDOKU, tmp_path / "a.gif", solution=board[1])
    with Image.open(path) as image:
        # The second step repeats the first, and Pillow merges equal frames, but the different titles prevent that.
        assert image.format == "GIF" and image.n_frames == 4


def test_long_trajectories_are_thinned_but_keep_the_last_step(board, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(_Boards, "draw", lambda self, axes, step: drawn.append(step))
    plot_trajectory(board[0], trajectory(board, 64), SUDOKU, tmp_path / "a.png")
    assert len(drawn) == MAX_PANELS and drawn[0] == 0 and drawn[-1] == 64


def test_without_a_solution_clashes_and_changed_clues_are_wrong(board):
    puzzle, solution = board
    assert not SUDOKU.wrong_cells(puzzle, solution).any()
    clue, free = np.flatnonzero(puzzle > 1)[0], np.flatnonzero(puzzle == 1)[0]
    changed = solution.copy()
    changed[clue] = solution[clue] % 4 + 2
    assert SUDOKU.wrong_cells(puzzle, changed)[clue]
    blank = solution.copy()
    blank[free] = 1
    assert np.flatnonzero(SUDOKU.wrong_cells(puzzle, blank)).tolist() == [free]


def test_a_clue_that_is_put_back_is_not_marked_as_changed(board):
    puzzle, solution = board
    clue, free = np.flatnonzero(puzzle > 1)[0], np.flatnonzero(puzzle == 1)[0]
    overwritten = solution.copy()
    overwritten[[clue, free]] = solution[[clue, free]] % 4 + 2
    states = np.stack([puzzle, overwritten, solution])
    assert np.flatnonzero(changed_cells(SUDOKU, states, 2)).tolist() == [free]
    assert not changed_cells(SUDOKU, states, 1).any()


def test_with_a_solution_cells_that_differ_are_wrong(board):
    puzzle, solution = board
    answer = solution.copy()
    answer[3] = 0
    known = solution.copy()
    known[5] = -100
    boards = _Boards(puzzle, answer[None], SUDOKU, known, None)
    assert np.flatnonzero(boards._wrong(answer)).tolist() == [3]


@pytest.mark.parametrize("task", ["maze", "arc", "generic"])
def test_other_tasks_are_drawn(task, tmp_path):
    if task == "maze":
        puzzle, solution = (grid.reshape(-1) for grid in next(iter(maze.generate(7, 11, 1))))
        config = HrmPuzzleConfig(task="maze", grid_shape=[7, 11], seq_len=77, vocab_size=6)
    elif task == "arc":
        puzzle, solution = encode_grid(np.eye(3, dtype=int)), encode_grid(np.ones((2, 5), dtype=int))
        config = HrmPuzzleConfig(task="arc", grid_shape=[30, 30], seq_len=900, vocab_size=12)
    else:
        puzzle, solution = np.arange(6), np.arange(6)[::-1]
        config = HrmPuzzleConfig(grid_shape=[2, 3], seq_len=6)
    path = plot_trajectory(puzzle, np.stack([puzzle, solution]), puzzle_task(config), tmp_path / "a.png", title=task)
    with Image.open(path) as image:
        assert image.format == "PNG"


@pytest.mark.parametrize("name, shape, message", [("a.pdf", (2, 16), r"\.pdf: "), ("a.png", (2, 9), r"\(2, 9\)")])
def test_invalid_plot_arguments_are_rejected(name, shape, message, board, tmp_path):
    with pytest.raises(ValueError, match=message):
        plot_trajectory(board[0], np.zeros(shape), SUDOKU, tmp_path / name)
