"""Data loader for ACT training: rows of each slot, no lost rows, and exact resume.

Referee for order and coverage: a plain Python walk over `PuzzleOrder`, and counting.
"""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset

from hrm_hf.puzzles.dataloader import CarryDataLoader, PuzzleOrder, PuzzleRows
from hrm_hf.puzzles.dataset import puzzle_features


SEQ_LEN, BASE = 4, 100
UNGROUPED = [[1]] * 24  # every row is a separate puzzle and group
AUGMENTED = [[1, 1, 1], [2, 3], [4], [1, 2], [3, 3, 3]]  # number of examples of each puzzle in each group

# Rows at positions 0..29 of the order of AUGMENTED with seed 3.
PINNED = [22, 21, 23, 6, 7, 5, 2, 11, 9, 10, 8, 12, 8, 11, 9, 10, 2, 13, 14, 4, 3, 23, 22, 21, 10, 8, 11, 9, 2, 4]


def dataset(groups=UNGROUPED, **columns) -> Dataset:
    """Create rows with their number in the first two tokens of input_ids, in base 100."""
    puzzle_of_row, group_of_row = [], []
    for group, puzzles in enumerate(groups):
        for examples in puzzles:
            puzzle = puzzle_of_row[-1] + 1 if puzzle_of_row else 0
            puzzle_of_row += [puzzle] * examples
            group_of_row += [group] * examples
    numbers = np.arange(len(puzzle_of_row))
    grids = np.stack([numbers // BASE, numbers % BASE, 0 * numbers, 0 * numbers], axis=1)
    values = {
        "input_ids": grids.tolist(), "labels": grids.tolist(), "puzzle_identifiers": puzzle_of_row,
        "puzzle_index": puzzle_of_row, "group_index": group_of_row, **columns,
    }  # fmt: skip
    return Dataset.from_dict(values, features=puzzle_features(SEQ_LEN))


def stream(groups=UNGROUPED, slots=4, seed=0, **options) -> CarryDataLoader:
    return CarryDataLoader(PuzzleRows(dataset(groups)), slots, seed, **options)


def numbers(batch) -> list[int]:
    """Return the numbers of the rows in a batch."""
    return (batch["input_ids"][:, 0] * BASE + batch["input_ids"][:, 1]).tolist()


def walk(streams, batches: int, seed: int = 0, prob: float = 0.4) -> list[list[int]]:
    """Return the rows that each slot of all processes received, with slots halting at random.

    Halting depends only on slot and batch, so it is the same for other layouts of the same slots.
    """
    total = sum(one.slots for one in streams)
    seen = [[] for _ in range(total)]
    halting = np.random.default_rng(seed).random((batches, total)) < prob
    for batch in range(batches):
        for rank, one in enumerate(streams):
            for slot, row in enumerate(numbers(one.next_batch())):
                if one.halted[slot]:
                    seen[rank * one.slots + slot].append(row)
            one.halted = halting[batch, rank * one.slots : (rank + 1) * one.slots]
    return seen


def config(**fields) -> SimpleNamespace:
    """Return the fields of a model's config that data must fit."""
    return SimpleNamespace(
        **{"seq_len": SEQ_LEN, "vocab_size": 100, "puzzle_emb_ndim": 8, "num_puzzle_identifiers": 24, **fields}
    )


# ---- rows of a slot ----


def test_every_slot_walks_its_stride_of_the_order_whenever_it_halts():
    one = stream(slots=4)
    order = PuzzleOrder(one.rows, seed=0)
    for slot, rows in enumerate(walk([one], batches=200)):
        assert len(rows) > 40
        assert rows == [order.row(slot + taken * 4) for taken in range(len(rows))]


def test_a_busy_slot_keeps_its_next_row():
    one = stream(slots=4)
    first = numbers(one.next_batch())
    one.halted = np.array([False, True, False, False])
    second = numbers(one.next_batch())
    assert [a == b for a, b in zip(first, second)] == [True, False, True, True]


@pytest.mark.parametrize("groups", [UNGROUPED, AUGMENTED], ids=["ungrouped", "augmented"])
def test_no_row_is_dropped_or_repeated_when_slots_halt_at_random(groups):
    # Slots advance at different speeds, so only the positions below the slowest slot's are complete.
    one = stream(groups, slots=4, seed=5)
    seen = walk([one], batches=300)
    complete = min(map(len, seen))
    order = PuzzleOrder(one.rows, seed=5)
    expected = Counter(order.row(position) for position in range(complete * 4))
    assert Counter(row for rows in seen for row in rows[:complete]) == expected
    assert complete > 40


def test_each_row_of_an_ungrouped_set_comes_once_per_epoch():
    order = PuzzleOrder(PuzzleRows(dataset()), seed=2)
    for epoch in range(3):
        assert sorted(order.row(24 * epoch + i) for i in range(24)) == list(range(24))


@pytest.mark.parametrize("drop", [False, True], ids=["kept", "dropped"])
def test_two_processes_see_exactly_the_rows_of_one_with_twice_the_slots(drop):
    single = walk([stream(AUGMENTED, slots=6, drop_unplaced_rows=drop)], batches=100)
    pair = [stream(AUGMENTED, slots=3, rank=rank, world_size=2, drop_unplaced_rows=drop) for rank in range(2)]
    assert walk(pair, batches=100) == single


def test_with_drop_unplaced_rows_every_batch_takes_b_rows_of_the_order():
    one = stream(slots=4, drop_unplaced_rows=True)
    order = PuzzleOrder(one.rows, seed=0)
    for batch in range(30):
        assert numbers(one.next_batch()) == [order.row(batch * 4 + slot) for slot in range(4)]
        one.halted = np.zeros(4, dtype=bool)


# ---- epochs ----


def test_an_epoch_is_one_puzzle_of_each_group_with_all_its_examples():
    rows = PuzzleRows(dataset(AUGMENTED))
    order = PuzzleOrder(rows, seed=1)
    position, picked = 0, set()
    for _ in range(40):
        groups = []
        while len(groups) < len(AUGMENTED):
            first = order.row(position)
            puzzle = rows.puzzle_index[first]
            examples = np.flatnonzero(rows.puzzle_index == puzzle)
            taken = [order.row(position + i) for i in range(len(examples))]
            assert sorted(taken) == examples.tolist(), "examples of a puzzle are neighbours, each once"
            groups.append(rows.group_index[first])
            picked.add(puzzle)
            position += len(examples)
        assert sorted(groups) == list(range(len(AUGMENTED)))
    assert picked == set(rows.puzzle_index), "every augmentation has its turn"


def test_the_examples_of_a_puzzle_are_shuffled():
    order = PuzzleOrder(PuzzleRows(dataset([[6]])), seed=0)
    epochs = {tuple(order.row(6 * epoch + i) for i in range(6)) for epoch in range(5)}
    assert len(epochs) > 1


def test_each_epoch_and_seed_has_its_own_order():
    rows = PuzzleRows(dataset())
    epochs = [tuple(PuzzleOrder(rows, seed).row(24 * epoch + i) for i in range(24)) for seed, epoch in
              ((0, 0), (0, 1), (1, 0), (1, 1))]  # fmt: skip
    assert len(set(epochs)) == 4


def test_the_order_is_the_same_in_every_process_and_on_every_machine():
    # PINNED was recorded in another process; Philox and lexsort guarantee that the order never changes.
    order = PuzzleOrder(PuzzleRows(dataset(AUGMENTED)), seed=3)
    assert [order.row(i) for i in range(30)] == PINNED


@pytest.mark.parametrize(
    ("groups", "slots", "world_size", "length"),
    [
        (UNGROUPED, 4, 1, 6),
        (UNGROUPED, 4, 2, 3),
        (UNGROUPED, 5, 1, 4),  # 24 / 5; the remainder goes to the next epoch
        (UNGROUPED, 100, 1, 1),  # never 0, or a trainer would wait forever
        (AUGMENTED, 2, 1, 5),  # 26 rows in 11 puzzles, 5 groups: 11.8 rows on average
    ],
)
def test_length_is_the_number_of_batches_in_a_mean_epoch(groups, slots, world_size, length):
    one = stream(groups, slots=slots, world_size=world_size)
    assert len(one) == length == len(list(one))


# ---- resuming ----


@pytest.mark.parametrize("drop", [False, True], ids=["kept", "dropped"])
def test_restored_stream_continues_with_the_same_batches(drop):
    first = stream(AUGMENTED, slots=4, drop_unplaced_rows=drop)
    walk([first], batches=57, seed=1)
    second = stream(AUGMENTED, slots=4, drop_unplaced_rows=drop)
    second.load_state_dict(first.state_dict())
    second.halted = first.halted.copy()
    assert walk([first], batches=50, seed=2) == walk([second], batches=50, seed=2)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"slots": 8}, "slots=8: .*slots=4; .*batch size"),
        ({"seed": 9}, "seed=9: .*seed=0; .*--model_name_or_path"),
        ({"world_size": 2}, "world_size=2: .*world_size=1; "),
    ],
)
def test_a_position_of_another_layout_is_rejected(other, message):
    state = stream().state_dict()
    with pytest.raises(ValueError, match=message):
        stream(**other).load_state_dict(state)


def test_epochs_that_every_slot_has_left_are_freed():
    one = stream(slots=4)
    walk([one], batches=1000, prob=1.0)  # 4000 rows, 166 epochs
    assert len(one.order._rows) <= 2 * 24  # two epochs
    slow = stream(slots=4)
    slow.next_batch()
    for _ in range(100):  # one slot never halts, so its epoch must be kept
        slow.halted = np.array([False, True, True, True])
        slow.next_batch()
    slow.halted = np.ones(4, dtype=bool)
    assert numbers(slow.next_batch())[0] == PuzzleOrder(slow.rows, 0).row(4)


# ---- validation of data sets ----


def test_columns_of_selected_rows_are_read_unchanged():
    selected = dataset(AUGMENTED).select([5, 6, 7, 8, 9])
    scattered = dataset(AUGMENTED).select([0, 5, 9])
    for subset, expected in ((selected, [5, 6, 7, 8, 9]), (scattered, [0, 5, 9])):
        rows = PuzzleRows(subset)
        assert numbers(rows.batch(np.arange(len(rows)))) == expected
        assert rows.puzzle_index.tolist() == subset["puzzle_index"][:]
        assert {str(tensor.dtype) for tensor in rows.batch(np.arange(2)).values()} == {"torch.int32"}


def test_each_row_is_its_own_group_without_group_columns():
    rows = PuzzleRows(dataset(AUGMENTED).remove_columns(["puzzle_index", "group_index"]))
    order = PuzzleOrder(rows, 0)
    assert sorted(order.row(i) for i in range(len(rows))) == list(range(len(rows)))


def ragged(lengths) -> Dataset:
    rows = {name: [[1] * length for length in lengths] for name in ("input_ids", "labels")}
    return Dataset.from_dict({**rows, "puzzle_identifiers": [0] * len(lengths)})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: dataset().remove_columns("labels"), "labels"),
        (lambda: dataset().select([]), "no rows"),
        (lambda: ragged([4, 5]), "input_ids"),
        (lambda: ragged([3, 5]), "input_ids"),
        (lambda: dataset(AUGMENTED).select([3, 0, 4, 1]), "puzzle_index"),
        (lambda: dataset(group_index=[1] + [0] * 23), "group_index"),
    ],
)
def test_data_sets_without_valid_puzzle_rows_are_rejected(made, message):
    with pytest.raises(ValueError, match=message):
        PuzzleOrder(PuzzleRows(made()), 0)


def test_data_that_fit_a_model_pass():
    PuzzleRows(dataset(labels=[[-100] * SEQ_LEN] * 24)).validate_fits(config())
    PuzzleRows(dataset()).validate_fits(config(puzzle_emb_ndim=0, num_puzzle_identifiers=1))


@pytest.mark.parametrize(
    ("columns", "fields", "message"),
    [
        ({}, {"seq_len": 16}, "seq_len 4, .* 16"),
        ({"input_ids": [[7] * 4] * 24}, {"vocab_size": 7}, "input_ids .*row 0, cell 0 .*7; .*vocab_size .*7"),
        ({"labels": [[100] * 4] * 24}, {}, "labels .*row 0, cell 0 .*100; .*vocab_size .*100"),
        ({"input_ids": [[-1] * 4] * 24}, {}, "input_ids .*row 0, cell 0 .*-1;"),
        ({"labels": [[-101] * 4] * 24}, {}, "labels .*row 0, cell 0 .*-101;"),
        ({}, {"num_puzzle_identifiers": 5}, r"identifiers .*0 to 23, .*5 rows; .*resize_puzzle_embeddings"),
        ({"puzzle_identifiers": [-1] * 24}, {}, r"identifiers .*-1 to -1"),
        pytest.param(
            {"labels": [[-1] * 4] * 24}, {}, "labels",
        ),
    ],
)  # fmt: skip
def test_data_that_do_not_fit_a_model_are_rejected(columns, fields, message):
    with pytest.raises(ValueError, match=message):
        PuzzleRows(dataset(**columns)).validate_fits(config(**fields))
