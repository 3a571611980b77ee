"""Random symmetries are valid, occur equally often, and depend only on seed and position.

Referees: the Sudoku rules, `dihedral` for mazes, the ARC encoder, and counts.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hrm_hf.puzzles import maze
from hrm_hf.puzzles.arc_grids import EOS_ID, FRAME, NUM_DIHEDRAL, SEQ_LEN, crop_prediction, dihedral, encode_pair
from hrm_hf.puzzles.dataloader import CarryDataLoader, PuzzleRows, RandomSymmetries, random_keys
from hrm_hf.puzzles.dataset import IGNORE_LABEL
from hrm_hf.puzzles.sudoku import generated_sudoku
from hrm_hf.puzzles.sudoku_generation import generate
from hrm_hf.puzzles.sudoku_rules import BOX_SHAPES, DIGIT_OFFSET, validate_solution
from hrm_hf.puzzles.task_registry import puzzle_task


PINNED = [[3370201870272828264, 3563684007782942589], [17261686997450993842, 8053421937255753335]]


def board(task="sudoku", size=9, **fields) -> SimpleNamespace:
    """Return the fields of a model's config that describe the board."""
    defaults = {"task": task, "grid_shape": [size, size], "box_shape": None, "vocab_size": 6, "puzzle_emb_ndim": 0}
    if task == "sudoku":
        defaults |= {"box_shape": list(BOX_SHAPES[size]), "vocab_size": size + 2}
    fields = {**defaults, **fields}
    return SimpleNamespace(seq_len=math.prod(fields["grid_shape"]), num_puzzle_identifiers=1, symbols=None, **fields)


def drawn(config, inputs, labels=None, positions=None, seed=0) -> tuple[np.ndarray, np.ndarray]:
    """Return symmetric copies of one board [S], one for each position."""
    positions = np.arange(200) if positions is None else positions
    grids = {"input_ids": inputs, "labels": inputs if labels is None else labels}
    rows = {
        name: torch.from_numpy(np.tile(grid, (len(positions), 1)).astype(np.int32)) for name, grid in grids.items()
    }
    made = RandomSymmetries(puzzle_task(config), seed)(rows, positions)
    assert {tensor.dtype for tensor in made.values()} == {torch.int32}
    return made["input_ids"].numpy(), made["labels"].numpy()


# ---- Sudoku ----


@pytest.mark.parametrize("size", [4, 6, 9])
def test_every_copy_of_a_sudoku_is_valid_with_its_solution(size):
    puzzle, solution = next(generate(size, 1, size * size // 2, seed=1))
    forms, answers = drawn(board(size=size), puzzle + DIGIT_OFFSET, solution + DIGIT_OFFSET)
    for form, answer in zip(forms - DIGIT_OFFSET, answers - DIGIT_OFFSET):
        assert validate_solution(form, answer) == []
        given = [sorted(np.unique(b[b > 0], return_counts=True)[1].tolist()) for b in (form, puzzle)]
        assert given[0] == given[1], "as many of each digit, by other names"
    assert len(np.unique(forms, axis=0)) > 150


@pytest.mark.parametrize("size", [6, 9])
def test_clues_reach_every_cell_and_digit_equally_often(size):
    cells, count = size * size, 200 * size * size
    puzzle = np.full(cells, DIGIT_OFFSET)  # blanks
    puzzle[5] = 1 + DIGIT_OFFSET
    forms, _ = drawn(board(size=size), puzzle, positions=np.arange(count))
    places, names = (forms > DIGIT_OFFSET).argmax(axis=1), forms.max(axis=1) - DIGIT_OFFSET
    for values, kinds in ((places, cells), (names - 1, size)):
        found = np.bincount(values, minlength=kinds)
        assert len(found) == kinds
        assert np.abs(found - count / kinds).max() < 5 * (count / kinds) ** 0.5  # five standard deviations


def test_bands_become_stacks_only_if_boxes_are_square():
    for size, both in ((9, True), (6, False)):
        grid = np.full((size, size), DIGIT_OFFSET)
        grid[0] = 1 + DIGIT_OFFSET  # a row of clues
        forms, _ = drawn(board(size=size), grid.reshape(-1))
        rows = [len(np.unique(np.nonzero(form.reshape(size, size) > DIGIT_OFFSET)[0])) for form in forms]
        assert set(rows) == ({1, size} if both else {1})


def test_each_row_has_its_own_symmetry_and_ignored_labels_stay():
    config = board(size=4)
    puzzles = np.array([puzzle for puzzle, _ in generate(4, 2, 10)]) + DIGIT_OFFSET
    labels = np.where(puzzles > DIGIT_OFFSET, IGNORE_LABEL, 3)
    rows = {
        "input_ids": torch.from_numpy(puzzles.astype(np.int32)),
        "labels": torch.from_numpy(labels.astype(np.int32)),
    }
    rows["puzzle_identifiers"] = torch.tensor([4, 7])
    made = RandomSymmetries(puzzle_task(config), 0)(rows, np.array([8, 3]))
    for row, position in enumerate((8, 3)):
        alone = drawn(config, puzzles[row], labels[row], np.array([position]))
        assert made["input_ids"][row].tolist() == alone[0][0].tolist()
        assert made["labels"][row].tolist() == alone[1][0].tolist()
        ignored = made["labels"][row] == IGNORE_LABEL
        assert torch.equal(ignored, made["input_ids"][row] > DIGIT_OFFSET)
    assert made["puzzle_identifiers"].tolist() == [4, 7]


# ---- mazes and ARC ----


@pytest.mark.parametrize(("shape", "symmetries"), [((7, 7), range(NUM_DIHEDRAL)), ((5, 9), (0, 2, 4, 5))])
def test_mazes_appear_in_all_rotations_and_reflections_with_their_path(shape, symmetries):
    puzzle, solution = next(maze.generate(*shape, 1, seed=3))
    config = board("maze", grid_shape=list(shape))
    forms, answers = drawn(config, puzzle.reshape(-1), solution.reshape(-1))
    expected = {(dihedral(puzzle, one).tobytes(), dihedral(solution, one).tobytes()) for one in symmetries}
    assert len(expected) == len(symmetries)
    found = {
        (form.astype(np.int8).tobytes(), answer.astype(np.int8).tobytes()) for form, answer in zip(forms, answers)
    }
    assert found == expected
    for form, answer in zip(forms[:20], answers):
        assert maze.validate_solution(form.reshape(shape), answer.reshape(shape)) == []


def test_both_grids_of_an_arc_pair_are_transformed_alike():
    rng = np.random.default_rng(0)
    grid, answer = rng.integers(0, 10, (4, 28)), rng.integers(0, 10, (3, 2))  # too large to rotate in place
    inputs, labels = encode_pair(grid, answer, (20, 1))
    forms, answers = drawn(board("arc", grid_shape=[FRAME, FRAME], vocab_size=12), inputs, labels)
    kinds = set()
    for form, other in zip(forms, answers):
        frame = form.reshape(FRAME, FRAME)
        top, left = np.argwhere(frame > EOS_ID).min(axis=0)
        seen = crop_prediction(np.roll(frame, (-top, -left), axis=(0, 1)))
        target = crop_prediction(np.roll(other.reshape(FRAME, FRAME), (-top, -left), axis=(0, 1)))
        matching = [one for one in range(NUM_DIHEDRAL) if _recolored(dihedral(grid, one), seen)]
        assert len(matching) == 1
        colors = _recolored(dihedral(grid, matching[0]), seen)
        assert colors[0] == 0 and sorted(colors.values()) == list(range(10))
        assert np.array_equal(np.vectorize(colors.get)(dihedral(answer, matching[0])), target)
        again = encode_pair(seen, target, (top, left))
        assert [grid.tolist() for grid in again] == [form.tolist(), other.tolist()]
        kinds.add((matching[0], tuple(colors.values())))
    assert len(kinds) > 190 and {one for one, _ in kinds} == set(range(NUM_DIHEDRAL))


def _recolored(grid: np.ndarray, seen: np.ndarray) -> dict[int, int] | None:
    """Return the color map from `grid` to `seen`, or None if there is none."""
    if grid.shape != seen.shape:
        return None
    colors = dict(zip(grid.reshape(-1).tolist(), seen.reshape(-1).tolist()))
    return colors if np.array_equal(np.vectorize(colors.get)(grid), seen) else None


def test_an_arc_pair_without_an_answer_stays_without_one():
    inputs, labels = encode_pair(np.ones((2, 3), dtype=int), None)
    _, answers = drawn(board("arc", grid_shape=[FRAME, FRAME], vocab_size=12), inputs, labels)
    assert answers.shape == (200, SEQ_LEN) and (answers == IGNORE_LABEL).all()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            board("arc", grid_shape=[FRAME, FRAME], vocab_size=12, puzzle_emb_ndim=8),
            "ARC .*--num-aug N.*puzzle_emb_ndim=0",
        ),
        (board("generic"), "'generic' .*--augment false.*sudoku, maze, arc"),
    ],
)
def test_boards_without_known_symmetries_are_rejected(config, message):
    with pytest.raises(ValueError, match=message):
        RandomSymmetries(puzzle_task(config), 0)


# ---- random draws ----


def test_keys_are_machine_independent_and_depend_on_every_argument():
    # Recorded from another process; integer arithmetic guarantees that it never changes.
    assert random_keys(42, 0, np.array([0, 7]), 2).tolist() == PINNED
    many = [random_keys(seed, purpose, np.arange(50), 4) for seed in (0, 1, -1, 2**63) for purpose in (0, 1)]
    assert len(np.unique(np.concatenate(many))) == 8 * 50 * 4
    assert np.array_equal(random_keys(0, 0, np.arange(50), 4)[13], random_keys(0, 0, np.array([13]), 4)[0])


def stream(slots=4, seed=0, **options) -> CarryDataLoader:
    splits, _ = generated_sudoku(4, num_train=12, num_test=1)
    symmetries = RandomSymmetries(puzzle_task(board(size=4)), seed)
    return CarryDataLoader(PuzzleRows(splits["train"]), slots, seed, symmetries=symmetries, **options)


def boards(streams, batches: int, first: int = 0) -> list[list[list[int]]]:
    """Return the boards that each slot received, with slots halting depending only on slot and batch."""
    total = sum(one.slots for one in streams)
    seen = [[] for _ in range(total)]
    halting = np.random.default_rng(0).random((first + batches, total)) < 0.5
    for batch in range(first, first + batches):
        for rank, one in enumerate(streams):
            slots = slice(rank * one.slots, (rank + 1) * one.slots)
            if batch:
                one.halted = halting[batch - 1, slots]
            rows = one.next_batch()
            for slot in np.flatnonzero(one.halted):
                seen[rank * one.slots + slot].append(rows["input_ids"][slot].tolist() + rows["labels"][slot].tolist())
    return seen


def test_two_processes_get_the_forms_of_one_with_twice_the_slots():
    pair = [stream(slots=2, rank=rank, world_size=2) for rank in range(2)]
    assert boards(pair, 40) == boards([stream()], 40)


def test_a_restored_stream_continues_with_the_same_forms():
    whole = boards([stream()], 40)
    first, second = stream(), stream()
    before = boards([first], 25)
    second.load_state_dict(first.state_dict())
    after = boards([second], 15, first=25)
    assert [a + b for a, b in zip(before, after)] == whole


def test_rows_get_new_forms_each_time_and_for_each_seed():
    one = boards([stream()], 100)
    given = [tuple(form) for slot in one for form in slot]
    assert len(set(given)) > 0.95 * len(given) > 150  # 12 rows; two copies may be equal by chance
    assert boards([stream(seed=1)], 100) != one
