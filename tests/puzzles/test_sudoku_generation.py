"""Batched Sudoku solver, and puzzles that are generated in portions.

Referee: the simple solver of the benchmarks, which solves one board at a time.
"""

import numpy as np
import pytest

from benchmarks.puzzles import plain_sudoku
from hrm_hf.puzzles import sudoku_generation, sudoku_rules
from hrm_hf.puzzles.sudoku_generation import generate_portions
from hrm_hf.puzzles.sudoku_solver import dig, random_grids, rate_boards


CLUES = {6: (9, 14), 9: (24, 36)}


def stream(size=9, seed=5):
    return np.random.default_rng((seed, size))


def dig_cell_by_cell(solution, order, target):
    """Dig cell by cell, as a simple reference for `dig`."""
    board = solution.copy()
    for cell in order:
        if np.count_nonzero(board) == target:
            break
        digit, board[cell] = board[cell], 0
        if plain_sudoku.count_solutions(board) > 1:
            board[cell] = digit
    return board


def joined(portions):
    return [np.concatenate(parts) for parts in zip(*portions)]


@pytest.mark.parametrize("size", [6, 9])
def test_random_grids_are_solved_and_distinct(size):
    grids = random_grids(size, 100, stream(size))
    assert all(sudoku_rules.validate_solution(grid, grid) == [] for grid in grids)
    assert len({grid.tobytes() for grid in grids}) == 100


def test_every_filling_of_the_diagonal_boxes_of_6x6_can_be_completed():
    # There are 720 up to permutations of digits; random_grids would never finish if one could not be completed.
    grids = random_grids(6, 20_000, stream(6))
    second = grids[:, [15, 16, 17, 21, 22, 23]]
    names = np.argsort(grids[:, [0, 1, 2, 6, 7, 8]], axis=1)  # position of each digit in the first box
    assert len({tuple(row) for row in np.take_along_axis(names, second.astype(np.intp) - 1, axis=1)}) == 720


@pytest.mark.parametrize("size", [6, 9])
def test_batched_digging_equals_digging_cell_by_cell(size):
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


def test_batched_ratings_equal_single_ratings():
    rng = stream()
    grids = random_grids(9, 60, rng)
    orders = rng.permuted(np.tile(np.arange(81), (60, 1)), axis=1)
    boards, reached = dig(grids, orders, np.full(60, 25))
    ambiguous = np.where(np.arange(81) < 40, boards[:3], 0)
    boards = np.concatenate([boards[reached], ambiguous, grids[:1]])
    ratings = rate_boards(boards)
    assert ratings.tolist() == [plain_sudoku.rate(board) for board in boards]
    assert ratings.max() > 3


def test_a_board_without_a_solution_has_no_rating():
    assert rate_boards(np.array([[1, 1] + [0] * 79, [0] * 81], dtype=np.uint8)).tolist() == [-1, 0]


def test_puzzles_do_not_depend_on_the_processes_and_a_larger_set_begins_with_a_smaller_one(monkeypatch):
    started, pool = [], sudoku_generation.worker_pool
    monkeypatch.setattr(sudoku_generation, "POOL_THRESHOLD", 0)
    monkeypatch.setattr(sudoku_generation, "worker_pool", lambda *how: started.append(how[0]) or pool(*how))
    drawn = {workers: joined(generate_portions(6, 3000, (10, 14), 3, workers=workers)) for workers in (1, 2)}
    assert started == [2]
    assert all(np.array_equal(one, two) for one, two in zip(drawn[1], drawn[2]))
    few = joined(generate_portions(6, 100, (10, 14), 3))
    assert all(np.array_equal(part[:100], small) for part, small in zip(drawn[1], few))


def test_unreachable_clue_counts_are_an_error(monkeypatch):
    monkeypatch.setattr(sudoku_generation, "MAX_TRIES", 32)
    with pytest.raises(RuntimeError, match=r"17 to 17 .*0 of 5"):
        list(sudoku_generation.generate(9, 5, 17))
