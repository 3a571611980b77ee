"""Curriculum: which rows are used over a run, and at which iteration training on them starts.

Referees: counts, the order without a pool, and model steps called one by one.
"""

from collections import Counter

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from tolerances import assert_copied

from hrm_hf.puzzles.dataloader import CarryDataLoader, DifficultyPool, LateStarts, PuzzleOrder, PuzzleRows
from hrm_hf.puzzles.trainer import PuzzleTrainingArguments, run_ahead


ROWS, SEQ_LEN = 40, 8


def rows(rated: bool = True) -> PuzzleRows:
    """Create rows of increasing difficulty: row i has i % 8 cells to fill and, if rated, rating i // 8."""
    open_cells = np.arange(ROWS) % SEQ_LEN
    labels = np.full((ROWS, SEQ_LEN), 2)
    inputs = np.where(np.arange(SEQ_LEN) < open_cells[:, None], 1, labels)
    columns = {"input_ids": inputs.tolist(), "labels": labels.tolist(), "puzzle_identifiers": [0] * ROWS}
    if rated:
        columns["rating"] = (np.arange(ROWS) // SEQ_LEN / 2).tolist()
    return PuzzleRows(Dataset.from_dict(columns))


# ---- difficulty ----


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (0.0, range(30, 40)),
        (0.2, range(15, 40)),  # 1/4 + 3/4 * 0.2 / 0.4 = 5/8 of the rows
        (0.4, range(40)),
        (0.9, range(40)),
    ],
)
def test_pool_grows_with_progress_and_draws_rows_equally_often(progress, expected):
    pool = DifficultyPool(rows(), ramp=0.4)
    found = Counter(pool(np.arange(ROWS), progress).tolist())
    assert sorted(found) == list(expected)
    assert max(found.values()) - min(found.values()) <= 1


def test_rows_follow_the_order_after_the_ramp():
    pool = DifficultyPool(rows(), ramp=0.5)
    drawn = np.random.default_rng(0).integers(0, ROWS, 100)
    for progress in (0.5, 0.75, 1.0):
        assert pool(drawn, progress).tolist() == drawn.tolist()
    assert pool(drawn, 0.49).tolist() != drawn.tolist()


def test_empty_cells_are_the_difficulty_of_unrated_rows():
    unrated = rows(rated=False)
    chosen = DifficultyPool(unrated, ramp=0.5)(np.arange(ROWS), 0.0)
    assert set((chosen % SEQ_LEN).tolist()) == {6, 7}
    assert rows().rating[9] == 0.5 and unrated.rating is None  # ratings need not be integers


def test_two_processes_get_the_rows_of_one_with_twice_the_slots_at_every_progress():
    def walk(streams, batches=30):
        seen = []
        for batch in range(batches):
            for one in streams:
                one.progress = batch / batches
            seen.append(np.concatenate([one.next_batch()["input_ids"].numpy() for one in streams]).tolist())
        return seen

    def stream(**options):
        return CarryDataLoader(rows(), seed=0, pool=DifficultyPool(rows(), 0.5), **options)

    pair = [stream(slots_per_process=2, rank=rank, world_size=2) for rank in range(2)]
    assert walk(pair) == walk([stream(slots_per_process=4)])


def test_stream_draws_from_the_pool_then_follows_the_order():
    data = rows()
    stream = CarryDataLoader(data, 4, seed=0, pool=DifficultyPool(data, 0.5))
    order = PuzzleOrder(data, 0)
    for batch in range(20):
        stream.progress = batch / 20
        given = stream.next_batch()["input_ids"].tolist()
        expected = stream.pool(np.array([order.row(4 * batch + slot) for slot in range(4)]), batch / 20)
        assert given == data.input_ids[expected].tolist()


# ---- later iterations ----


def test_late_starts_use_every_power_of_two_equally_often():
    count = 60_000
    steps = LateStarts(seed=0, share=0.3, max_steps=8)(np.arange(count))
    found = Counter(steps.tolist())
    assert sorted(found) == [0, 1, 2, 4, 8]
    assert abs(found[0] - 0.7 * count) < 500  # five standard deviations: 560 and 330
    assert all(abs(found[power] - 0.3 * count / 4) < 330 for power in (1, 2, 4, 8))
    assert (LateStarts(1, 0.3, 8)(np.arange(count)) != steps).any()


def test_late_starts_depend_only_on_positions_of_new_rows():
    late = LateStarts(0, 0.5, 4)

    def stream(**options):
        return CarryDataLoader(rows(), seed=0, late_starts=late, **options)

    one, pair = stream(slots_per_process=4), [stream(slots_per_process=2, rank=r, world_size=2) for r in range(2)]
    taken, rng = np.zeros(4, dtype=int), np.random.default_rng(0)
    halted = np.ones(4, dtype=bool)
    for _ in range(30):
        for rank, two in enumerate(pair):
            two.halted = halted[2 * rank : 2 * rank + 2]
        one.halted = halted
        expected = np.where(halted, late(np.arange(4) + 4 * taken), 0).tolist()
        assert one.next_batch()["steps_ahead"].tolist() == expected
        assert torch.cat([two.next_batch()["steps_ahead"] for two in pair]).tolist() == expected
        taken += halted
        halted = rng.random(4) < 0.5


@pytest.mark.parametrize("architecture", ["hrm", "trm", "se_rrm"])
def test_late_rows_have_the_states_after_that_many_steps(architecture):
    model = tiny.se_rrm() if architecture == "se_rrm" else tiny.model(architecture)
    model.train()
    batch, busy = tiny.batch(seed=1), tiny.batch(seed=2)
    carry = model(**busy).carry
    carry.halted = torch.arange(len(carry.halted)) != 1  # slot 1 continues with its row
    steps_ahead = torch.zeros(len(carry.halted), dtype=torch.int32)
    steps_ahead[:4] = torch.tensor([2, 4, 0, 1])
    before = {name: value.clone() for name, value in carry.to_tensors().items()}
    after = run_ahead(model, carry, steps_ahead, batch)
    assert_copied(carry.to_tensors(), before)
    x, rotary = model.model.embed(
        batch["input_ids"],
        model.model.puzzle_rows(batch["puzzle_identifiers"], len(batch["input_ids"])),
        model.compute_dtype,
    )
    states, walked = model.model.fresh_states(x), {}
    with torch.no_grad():
        for step in range(1, 3):
            states = walked[step] = model.model.reason(x, rotary, *states)
    for slot, steps in ((0, 2), (3, 1)):
        for found, expected in zip((after.z_H, after.z_L), walked[steps]):
            torch.testing.assert_close(found[slot], expected[slot], rtol=0, atol=1e-5)  # different batch size
        assert not after.halted[slot] and after.steps[slot] == 0
        for name, value in after.current_data.items():
            assert torch.equal(value[slot], batch[name][slot])
    for slot in (1, 2):
        for name, value in after.to_tensors().items():
            assert torch.equal(value[slot], before[name][slot])
    assert not after.z_H.requires_grad


def test_late_starts_are_not_compiled():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = tiny.model("trm").train()
    torch._dynamo.reset()
    model.compile_act_step(backend=backend)
    batch, rng = tiny.batch(), np.random.default_rng(0)
    carry = model.initial_carry(**batch)
    for _ in range(4):
        carry = run_ahead(model, carry, torch.from_numpy(rng.integers(0, 3, len(carry.steps))), batch)
        output = model(**batch, carry=carry)
        output.loss.backward()
        carry = output.carry
        carry.halted = torch.from_numpy(rng.random(len(carry.steps)) < 0.5)  # varies the number of late rows
    torch._dynamo.reset()
    assert len(graphs) == 1


# ---- options ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"difficulty": "hard"}, "difficulty='hard'"),
        ({"difficulty": "hard_first", "difficulty_ramp": 0}, "difficulty_ramp=0"),
        ({"late_starts": 2}, "late_starts=2"),
        ({"late_start_max_steps": 0}, "late_start_max_steps=0"),
        ({"late_start_max_steps": 24}, "late_start_max_steps=24"),
        ({"difficulty_ramp": 1.5}, r"difficulty_ramp=1\.5: "),
    ],
)
def test_invalid_curriculum_options_are_rejected(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        PuzzleTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **arguments)
