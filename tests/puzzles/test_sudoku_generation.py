"""Generation of Sudoku puzzles by the hundred: the batch solver, portions, processes, and builds that are interrupted.

The referee is the solver of `sudoku_rules.py`, which goes board by board and is itself held against brute force and
published ratings in test_sudoku.py.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hrm_hf.puzzles import sudoku, sudoku_generation
from hrm_hf.puzzles.dataset import load_puzzle_dataset
from hrm_hf.puzzles.sudoku_batch import dig, random_grids, rate_boards
from hrm_hf.puzzles.sudoku_generation import generate_portions


CLUES = {6: (9, 14), 9: (24, 36)}


def stream(size=9, seed=5):
    return np.random.default_rng((seed, size))


def dig_cell_by_cell(solution, order, target):
    """What `dig` promises, in the plainest way."""
    board = solution.copy()
    for cell in order:
        if np.count_nonzero(board) == target:
            break
        digit, board[cell] = board[cell], 0
        if sudoku.count_solutions(board) > 1:
            board[cell] = digit
    return board


def joined(portions):
    return [np.concatenate(parts) for parts in zip(*portions)]


@pytest.mark.parametrize("size", [6, 9])
def test_random_grids_are_solved_and_distinct(size):
    grids = random_grids(size, 100, stream(size))
    assert all(sudoku.validate_solution(grid, grid) == [] for grid in grids)
    assert len({grid.tobytes() for grid in grids}) == 100


def test_every_filling_of_the_diagonal_boxes_of_6x6_can_be_completed():
    # Up to the names of digits there are 720; random_grids would wait for ever for one that cannot.
    grids = random_grids(6, 20_000, stream(6))
    second = grids[:, [15, 16, 17, 21, 22, 23]]
    names = np.argsort(grids[:, [0, 1, 2, 6, 7, 8]], axis=1)  # by digit, its place in the first box
    assert len({tuple(row) for row in np.take_along_axis(names, second.astype(np.intp) - 1, axis=1)}) == 720


@pytest.mark.parametrize("size", [6, 9])
def test_boards_dug_together_are_those_dug_cell_by_cell(size):
    rng, (low, high) = stream(size), CLUES[size]
    grids, targets = random_grids(size, 40, rng), rng.integers(low, high + 1, 40)
    orders = rng.permuted(np.tile(np.arange(size**2), (40, 1)), axis=1)
    boards, reached = dig(grids, orders, targets)
    for board, found, *how in zip(boards, reached, grids, orders, targets):
        expected = dig_cell_by_cell(*how)
        assert found == (np.count_nonzero(expected) == how[2])
        if found:
            assert board.tolist() == expected.tolist()
    assert 5 < reached.sum()


def test_boards_rated_together_are_rated_as_one_by_one():
    rng = stream()
    grids = random_grids(9, 60, rng)
    orders = rng.permuted(np.tile(np.arange(81), (60, 1)), axis=1)
    boards, reached = dig(grids, orders, np.full(60, 25))
    ambiguous = np.where(np.arange(81) < 40, boards[:3], 0)
    boards = np.concatenate([boards[reached], ambiguous, grids[:1]])
    ratings = rate_boards(boards)
    assert ratings.tolist() == [sudoku.rate(board) for board in boards]
    assert ratings.max() > 3


def test_a_board_without_a_solution_has_no_rating():
    assert rate_boards(np.array([[1, 1] + [0] * 79, [0] * 81], dtype=np.uint8)).tolist() == [-1, 0]


def test_puzzles_do_not_depend_on_the_processes_and_a_larger_set_begins_with_a_smaller_one(monkeypatch):
    started, pool = [], sudoku_generation.worker_pool
    monkeypatch.setattr(sudoku_generation, "POOL_PAYS", 0)
    monkeypatch.setattr(sudoku_generation, "worker_pool", lambda *how: started.append(how[0]) or pool(*how))
    drawn = {workers: joined(generate_portions(6, 3000, (10, 14), 3, workers=workers)) for workers in (1, 2)}
    assert started == [2]
    assert all(np.array_equal(one, two) for one, two in zip(drawn[1], drawn[2]))
    few = joined(generate_portions(6, 100, (10, 14), 3))
    assert all(np.array_equal(part[:100], small) for part, small in zip(drawn[1], few))


def test_a_second_run_takes_up_the_portions_of_the_first(tmp_path, monkeypatch):
    whole = joined(generate_portions(6, 500, 12, 1))
    first = generate_portions(6, 500, 12, 1, store=tmp_path)
    next(first), next(first)
    first.close()
    (tmp_path / ".00002-half.npz.17.tmp").write_bytes(b"half a portion")  # of a process that was killed
    drawn, draw = [], sudoku_generation._Source.draw
    monkeypatch.setattr(
        sudoku_generation._Source, "draw", lambda self, number: drawn.append(number) or draw(self, number)
    )
    again = joined(generate_portions(6, 500, 12, 1, store=tmp_path))
    assert all(np.array_equal(one, two) for one, two in zip(whole, again))
    assert drawn == [2]
    list(generate_portions(6, 10, 12, 2, store=tmp_path))  # another seed takes nothing up
    assert drawn == [2, 0]


def test_a_damaged_portion_is_named(tmp_path):
    list(generate_portions(6, 10, 12, 1, store=tmp_path))
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"not an archive")
    with pytest.raises(ValueError, match=rf"{file.name} is no portion of puzzles .*delete it"):
        list(generate_portions(6, 10, 12, 1, store=tmp_path))


def test_clues_that_no_attempt_reaches_are_an_error(monkeypatch):
    monkeypatch.setattr(sudoku_generation, "MAX_TRIES", 32)
    with pytest.raises(RuntimeError, match=r"no new 9x9 puzzle with 17 to 17 clues .*after 0 of 5; ask for more"):
        list(sudoku.generate(9, 5, 17))


def test_a_killed_build_is_finished_by_the_same_command(tmp_path):
    options = ["--size", "6", "--clues", "12", "--num-train", "7000", "--num-test", "40", "--workers", "2"]
    command = [sys.executable, "-m", "hrm_hf.cli", "data", "sudoku", *options, "--out"]
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    build = subprocess.Popen([*command, str(killed)], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        limit = time.monotonic() + 120
        while len(list(killed.glob("unfinished/*.npz"))) < 5 and build.poll() is None and time.monotonic() < limit:
            time.sleep(0.02)
    finally:
        os.killpg(build.pid, signal.SIGKILL)
        build.wait()
    assert not (killed / "puzzle.json").exists()
    kept = {file.name for file in Path(killed, "unfinished").glob("*.npz")}
    assert len(kept) >= 5
    for out in (killed, straight):
        subprocess.run([*command, str(out)], check=True, stderr=subprocess.DEVNULL, timeout=300)
    assert not (killed / "unfinished").exists()
    for split in ("train", "test"):
        one, two = (load_puzzle_dataset(folder, split).to_dict() for folder in (killed, straight))
        assert one == two
