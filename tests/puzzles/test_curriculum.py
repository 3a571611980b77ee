"""What changes over a run: which rows come, and how hard they are. Referee: counting, and the order without a pool."""

from collections import Counter

import numpy as np
import pytest
from datasets import Dataset

from hrm_hf.puzzles.arguments import PuzzleTrainingArguments
from hrm_hf.puzzles.curriculum import DifficultyPool
from hrm_hf.puzzles.dataloader import CarryDataLoader, PuzzleOrder, PuzzleRows


ROWS, SEQ_LEN = 40, 8


def rows(rated: bool = True) -> PuzzleRows:
    """Row i has i % 8 cells to fill and, if rated, rating i // 8: by both, it is the harder the larger i is."""
    open_cells = np.arange(ROWS) % SEQ_LEN
    labels = np.full((ROWS, SEQ_LEN), 2)
    inputs = np.where(np.arange(SEQ_LEN) < open_cells[:, None], 1, labels)
    columns = {"input_ids": inputs.tolist(), "labels": labels.tolist(), "puzzle_identifiers": [0] * ROWS}
    if rated:
        columns["rating"] = (np.arange(ROWS) // SEQ_LEN / 2).tolist()
    return PuzzleRows(Dataset.from_dict(columns))


# ---- difficulty ----


@pytest.mark.parametrize(
    ("difficulty", "progress", "expected"),
    [
        ("hard_first", 0.0, range(30, 40)),
        ("easy_first", 0.0, range(10)),
        ("hard_first", 0.2, range(15, 40)),  # 1/4 + 3/4 * 0.2 / 0.4 = 5/8 of the rows
        ("easy_first", 0.2, range(25)),
        ("hard_first", 0.4, range(40)),
        ("easy_first", 0.9, range(40)),
    ],
)
def test_the_pool_has_the_share_of_rows_that_the_progress_says_equally_often(difficulty, progress, expected):
    pool = DifficultyPool(rows(), difficulty, ramp=0.4)
    found = Counter(pool(np.arange(ROWS), progress).tolist())
    assert sorted(found) == list(expected)
    assert max(found.values()) - min(found.values()) <= 1


def test_after_the_ramp_the_rows_are_those_of_the_order():
    pool = DifficultyPool(rows(), "hard_first", ramp=0.5)
    drawn = np.random.default_rng(0).integers(0, ROWS, 100)
    for progress in (0.5, 0.75, 1.0):
        assert pool(drawn, progress).tolist() == drawn.tolist()
    assert pool(drawn, 0.49).tolist() != drawn.tolist()


def test_without_ratings_the_cells_to_fill_are_the_difficulty():
    unrated = rows(rated=False)
    for difficulty, cells in (("hard_first", {6, 7}), ("easy_first", {0, 1})):
        chosen = DifficultyPool(unrated, difficulty, ramp=0.5)(np.arange(ROWS), 0.0)
        assert set((chosen % SEQ_LEN).tolist()) == cells
    assert rows().rating[9] == 0.5 and unrated.rating is None  # ratings are no whole numbers


def test_two_processes_get_the_rows_of_one_with_twice_the_slots_at_every_progress():
    def walk(streams, batches=30):
        seen = []
        for batch in range(batches):
            for one in streams:
                one.progress = batch / batches
            seen.append(np.concatenate([one.next_batch()["input_ids"].numpy() for one in streams]).tolist())
        return seen

    def stream(**options):
        return CarryDataLoader(rows(), seed=0, pool=DifficultyPool(rows(), "easy_first", 0.5), **options)

    pair = [stream(slots_per_process=2, rank=rank, world_size=2) for rank in range(2)]
    assert walk(pair) == walk([stream(slots_per_process=4)])


def test_the_stream_gives_the_pool_and_then_the_order():
    data = rows()
    stream = CarryDataLoader(data, 4, seed=0, pool=DifficultyPool(data, "hard_first", 0.5))
    order = PuzzleOrder(data, 0)
    for batch in range(20):
        stream.progress = batch / 20
        given = stream.next_batch()["input_ids"].tolist()
        expected = stream.pool(np.array([order.row(4 * batch + slot) for slot in range(4)]), batch / 20)
        assert given == data.input_ids[expected].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"difficulty": "hard"}, "difficulty='hard' is not one of uniform, hard_first, easy_first"),
        ({"difficulty": "hard_first", "difficulty_ramp": 0}, "difficulty_ramp=0 leaves nothing of a difficulty"),
        ({"difficulty_ramp": 1.5}, r"difficulty_ramp=1\.5 is not a number in 0\.\.1"),
    ],
)
def test_options_that_no_run_can_have_are_refused(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        PuzzleTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **arguments)
