"""One optimizer step per ACT step, exact resume, skipped nonfinite steps, complete checkpoints.

Referees: an uninterrupted run, and a hand-written training loop. Losses of a resumed run are compared exactly, since
it does the same arithmetic on the same numbers.
"""

import errno
import itertools
import math
import re

import numpy as np
import pytest
import tiny
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tolerances import assert_copied
from torch._dynamo.utils import counters
from transformers import Trainer

from hrm_hf import AutoModelForPuzzleSolving
from hrm_hf.hub.manifests import (
    RAW_WEIGHTS_FILE,
    WEIGHT_AVERAGE_FILE,
    find_corruption,
    list_checkpoints,
    resolve_checkpoint,
    write_manifest,
)
from hrm_hf.puzzles.dataloader import PuzzleOrder, PuzzleRows
from hrm_hf.puzzles.evaluation import evaluate_puzzles
from hrm_hf.puzzles.sudoku import generated_sudoku
from hrm_hf.puzzles.sudoku_rules import DIGIT_OFFSET, validate_solution
from hrm_hf.puzzles.trainer import PuzzleTrainer, PuzzleTrainingArguments
from hrm_hf.trainer import NonFiniteError
from hrm_hf.trainer.optim import AdamATan2, CompositeOptimizer, SignSGD, WeightAverage


BATCH_SIZE = 4
TIMES = {
    "puzzles_per_second",
    "steps_per_second",
    "samples_per_second",
    "epoch",
}  # logged, but not repeated exactly by a resumed run


@pytest.fixture(scope="session")
def sudoku():
    """Build 4x4 boards with puzzle identifiers, so that there is a table to train."""
    splits, _ = generated_sudoku(4, num_train=24, num_test=10)
    rows = {name: PuzzleRows(split) for name, split in splits.items()}
    for split in rows.values():
        split.puzzle_identifiers = np.arange(len(split)) % tiny.PUZZLES
    return rows


@pytest.fixture
def make_trainer(sudoku, tmp_path):
    """Return `make_trainer(model or architecture, **arguments)` for CPU trainers that log every step."""

    def make(model="hrm", train=None, **arguments):
        model = tiny.model(model) if isinstance(model, str) else model
        options = {
            "output_dir": str(tmp_path / "run"), "use_cpu": True, "report_to": "none", "disable_tqdm": True,
            "max_steps": 8, "logging_steps": 1, "per_device_train_batch_size": BATCH_SIZE, "learning_rate": 1e-3,
            "warmup_steps": 3, "save_strategy": "no",
        }  # fmt: skip
        args = PuzzleTrainingArguments(**{**options, **arguments})
        return PuzzleTrainer(model, args, train_dataset=train or sudoku["train"], eval_dataset=sudoku["test"])

    return make


def logged(trainer) -> list[dict]:
    """Return the logs of each training step, without times."""
    return [
        {name: value for name, value in entry.items() if name not in TIMES}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def inner_optimizers(trainer) -> list[torch.optim.Optimizer]:
    """Return the optimizers inside accelerate's and our wrappers."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer).optimizers


def spy(trainer) -> list[dict]:
    """Record the carry after each training step, and which slots were free before it."""
    seen, step = [], trainer.training_step

    def recorded(*args, **kwargs):
        before = None if trainer.carry is None else trainer.carry
        loss = step(*args, **kwargs)
        seen.append({"before": before, "after": trainer.carry})
        return loss

    trainer.training_step = recorded
    return seen


def break_at(model, steps, how="loss", calls=None) -> None:
    """Set the loss (with how="latents" also the latents of slot 1) of the given training steps to NaN."""
    original, calls = model.act_step, itertools.count(1) if calls is None else calls

    def act_step(*args):
        carry, outputs, states = original(*args)
        if model.training and next(calls) in steps:
            outputs["loss"] = outputs["loss"] * math.nan
            if how == "latents":
                carry.z_H = carry.z_H.clone()
                carry.z_H[1] = math.nan
        return carry, outputs, states

    model.act_step = act_step


# ---- one step ----


def test_a_compiled_run_compiles_the_act_step_and_the_update_once(make_trainer, monkeypatch):
    monkeypatch.setattr("hrm_hf.trainer.base.validate_compiler", lambda device: None)  # "eager" needs no compiler
    plain = make_trainer()
    plain.train()
    trainer = make_trainer(torch_compile=True, torch_compile_backend="eager")
    torch._dynamo.reset()
    counters.clear()
    trainer.train()
    assert counters["stats"]["unique_graphs"] == 2
    losses = [[entry["loss"] for entry in logged(one)] for one in (trainer, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("architecture", ["hrm", "trm"])
def test_one_optimizer_step_is_one_act_step_on_a_carry_that_persists(make_trainer, architecture):
    trainer = make_trainer(architecture, max_steps=12)
    seen = spy(trainer)
    trainer.train()
    assert trainer.state.global_step == len(seen) == 12
    assert {int(state["step"]) for state in inner_optimizers(trainer)[1].state.values()} == {12}
    for before, after in [(entry["before"], entry["after"]) for entry in seen if entry["before"] is not None]:
        expected = torch.where(before.halted, torch.ones_like(before.steps), before.steps + 1)
        assert torch.equal(after.steps, expected)
    assert max(int(entry["after"].steps.max()) for entry in seen) > 2


def test_only_slots_that_halted_get_new_rows(make_trainer, sudoku):
    trainer = make_trainer(max_steps=20)
    seen = spy(trainer)
    trainer.train()
    order, given = PuzzleOrder(sudoku["train"], seed=trainer.args.seed), [0] * BATCH_SIZE
    for entry in seen:
        for slot in range(BATCH_SIZE):
            given[slot] += entry["before"] is None or bool(entry["before"].halted[slot])
        expected = [order.row(slot + (n - 1) * BATCH_SIZE) for slot, n in enumerate(given)]
        data = entry["after"].current_data
        assert data["input_ids"].tolist() == sudoku["train"].input_ids[expected].tolist()
        assert data["puzzle_identifiers"].tolist() == sudoku["train"].puzzle_identifiers[expected].tolist()
    assert len(set(given)) > 1, "slots halted at different moments"


def test_augment_gives_every_slot_new_boards_with_their_solutions(make_trainer, sudoku):
    trainer = make_trainer(tiny.model("trm", halt_max_steps=2, **BOARDS_4X4), max_steps=30, augment=True)
    seen = spy(trainer)
    trainer.train()
    stored = {row.tobytes() for row in sudoku["train"].input_ids.astype(np.int32)}
    fresh = set()
    for data in (entry["after"].current_data for entry in seen):
        for puzzle, solution in zip(data["input_ids"].numpy(), data["labels"].numpy()):
            assert validate_solution(puzzle - DIGIT_OFFSET, solution - DIGIT_OFFSET) == []
            fresh |= {puzzle.tobytes()} - stored
    assert len(fresh) > len(stored)


def test_hard_first_starts_with_the_hardest_rows_and_reaches_all(make_trainer):
    splits, _ = generated_sudoku(4, num_train=24, num_test=1, clues=(6, 14))
    rows = PuzzleRows(splits["train"])
    rows.rating = None
    trainer = make_trainer(tiny.model("trm", halt_max_steps=1), train=rows, max_steps=24, difficulty="hard_first")
    seen = spy(trainer)
    trainer.train()
    boards = [entry["after"].current_data["input_ids"].numpy() for entry in seen]
    clues = [(board > DIGIT_OFFSET).sum(axis=1).tolist() for board in boards]
    ordered = sorted((rows.input_ids > DIGIT_OFFSET).sum(axis=1).tolist())
    assert set(clues[0]) <= set(ordered[:6]) and ordered[6] != ordered[-1]
    last = {board.astype(np.int8).tobytes() for some in boards[-6:] for board in some}
    assert last == {board.tobytes() for board in rows.input_ids}, "an epoch of the order has every row"


def test_late_rows_train_on_states_after_that_many_steps(make_trainer):
    def first_step(**options):
        trainer = make_trainer(tiny.model("trm", undecided=False), max_steps=1, **options)
        seen = spy(trainer)
        trainer.train()
        return trainer, seen[0]["after"]

    trainer, carry = first_step(late_starts=1.0, late_start_max_steps=4)
    late = trainer.stream.late_starts(np.arange(BATCH_SIZE))
    assert len(set(late)) > 1 and carry.steps.tolist() == [1] * BATCH_SIZE
    plain, once = first_step()
    steps, states, walked = 1, once, {1: once.z_H}
    model, batch = tiny.model("trm", undecided=False), once.current_data
    while steps <= 4:
        states.halted[:] = False
        states = model(**batch, carry=states).carry
        steps += 1
        walked[steps] = states.z_H
    for slot, ahead in enumerate(late):
        torch.testing.assert_close(carry.z_H[slot], walked[1 + int(ahead)][slot], rtol=0, atol=1e-4)
    assert logged(trainer)[0]["loss"] != logged(plain)[0]["loss"]


@pytest.mark.parametrize("architecture", ["hrm", "trm"])
def test_training_matches_the_hand_written_original_loop(make_trainer, sudoku, architecture):
    # The original offers a full batch at every step and loses the rows offered to busy slots.
    lr, puzzle_lr, decay, steps = 1e-3, 1e-2, 0.1, 12
    trainer = make_trainer(
        architecture, max_steps=steps, drop_unplaced_rows=True, learning_rate=lr, puzzle_emb_lr=puzzle_lr,
        weight_decay=decay, puzzle_emb_weight_decay=decay, warmup_steps=4,
    )  # fmt: skip
    trainer.train()

    model = tiny.model(architecture).train()
    table, order, rows, carry = model.model.puzzle_emb.weight, PuzzleOrder(sudoku["train"], 42), sudoku["train"], None
    optimizers = [
        SignSGD([table], puzzle_lr, decay),
        AdamATan2(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=decay),
    ]
    optimizer = CompositeOptimizer(optimizers)
    torch.manual_seed(trainer.args.seed)
    for step, entry in enumerate(logged(trainer)):
        for one, base in zip(optimizers, (puzzle_lr, lr)):
            one.param_groups[0]["lr"] = base * min(1.0, (step + 1) / 4)
        batch = rows.batch(np.array([order.row(step * BATCH_SIZE + slot) for slot in range(BATCH_SIZE)]))
        output = model(**batch, carry=carry)
        carry = output.carry
        output.loss.backward()
        assert entry["loss"] == pytest.approx(output.loss.item(), rel=1e-6)  # the log is float32, our loss float64
        assert entry["lm_loss"] == output.lm_loss.item()
        optimizer.step()
        optimizer.zero_grad()
    assert step == steps - 1
    assert_copied(weights(trainer.model), weights(model))


# ---- optimizers ----


def test_puzzle_rows_have_their_own_learning_rate_on_the_same_schedule(make_trainer):
    trainer = make_trainer(max_steps=2, warmup_steps=10, learning_rate=1e-3, puzzle_emb_lr=1e-2)
    trainer.train()
    sparse, dense = inner_optimizers(trainer)
    assert type(sparse).__name__ == "SignSGD" and type(dense).__name__ == "AdamATan2"
    assert sparse.param_groups[0]["lr"] == pytest.approx(1e-2 * 3 / 10)  # ready for the third step
    assert dense.param_groups[0]["lr"] == pytest.approx(1e-3 * 3 / 10)
    assert logged(trainer)[-1]["learning_rate"] == pytest.approx(1e-3 * 2 / 10, rel=0.6)  # rate of weights


def test_only_rows_of_used_puzzles_move_by_sign_descent(make_trainer, sudoku):
    rows = PuzzleRows.__new__(PuzzleRows)
    rows.__dict__.update(sudoku["train"].__dict__, puzzle_identifiers=np.where(np.arange(24) % 2, 1, 3))
    trainer = make_trainer(train=rows, puzzle_emb_lr=0.01, puzzle_emb_weight_decay=0.0, warmup_steps=0)
    before = trainer.model.model.puzzle_emb.weight.clone()
    trainer.train()
    moved = (trainer.model.model.puzzle_emb.weight - before) / 0.01
    assert not moved[[0, 2, 4]].any()
    assert moved[[1, 3]].any(dim=1).all()
    # Multiples of lr; 1e-3 allows for float32 rounding of values around 1, in units of 0.01.
    torch.testing.assert_close(moved, moved.round(), rtol=0, atol=1e-3)


def test_the_table_stays_the_same_tensor_when_the_model_moves(make_trainer):
    # Under DDP on CPUs, accelerate moves a model like this after its optimizer has been created.
    model = tiny.model("trm")
    table = model.model.puzzle_emb.weight
    model.to("cpu:0")
    assert model.model.puzzle_emb.weight is table


def test_a_library_optimizer_trains_the_weights_next_to_sign_descent(make_trainer):
    trainer = make_trainer(adam_atan2=False, optim="adamw_torch")
    before = weights(trainer.model)
    trainer.train()
    sparse, dense = inner_optimizers(trainer)
    assert isinstance(sparse, SignSGD) and isinstance(dense, torch.optim.AdamW)
    after = weights(trainer.model)
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert {name.rsplit(".", 1)[-1] for name in still} <= {"cos", "sin", "H_init", "L_init"}


def test_freeze_weights_trains_only_the_table(make_trainer):
    model = tiny.model("trm").requires_grad_(False)
    trainer = make_trainer(model, max_steps=3, ema_rate=0.9)
    before = weights(model)
    trainer.train()
    after = weights(model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"model.puzzle_emb.weight"}


# ---- resuming ----


BOARDS_4X4 = {"task": "sudoku", "box_shape": [2, 2]}
CURRICULUM = {
    "augment": True, "difficulty": "hard_first", "late_starts": 0.5, "late_start_max_steps": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "more"), [("hrm", {}), ("trm", {}), ("trm", CURRICULUM)], ids=["hrm", "trm", "curriculum"]
)
def test_a_resumed_run_repeats_the_uninterrupted_one_exactly(make_trainer, architecture, more):
    options = more | {
        "max_steps": 14, "save_strategy": "steps", "save_steps": 5, "save_total_limit": 9, "ema_rate": 0.9,
        "eval_strategy": "steps", "eval_steps": 4, "lr_min_ratio": 0.1,
    }  # fmt: skip
    whole = make_trainer(tiny.model(architecture, **BOARDS_4X4), **options)
    assert whole.model.config.halt_exploration_prob > 0
    whole.train()
    torch.manual_seed(999)  # another process starts with different random state and weights
    resumed = make_trainer(tiny.model(architecture, seed=3, **BOARDS_4X4), **options)
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-5")
    assert len(logged(whole)) == 14
    assert logged(resumed) == logged(whole)
    epochs = [[entry["epoch"] for entry in one.state.log_history] for one in (whole, resumed)]
    assert epochs[0] == epochs[1]
    assert_copied(weights(resumed.model), weights(whole.model))
    assert_copied(resumed.average.shadow, whole.average.shadow)
    assert_copied(resumed.carry.to_tensors(), whole.carry.to_tensors())


def test_a_resumed_run_follows_the_rates_of_both_optimizers(make_trainer, capsys):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    make_trainer(**options).train()
    resumed = make_trainer(**options, learning_rate=3e-3, puzzle_emb_lr=5e-3)
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    assert [one.param_groups[0]["initial_lr"] for one in resumed.optimizer.optimizer.optimizers] == [5e-3, 3e-3]
    assert re.search(r"rate of puzzle_emb \S+ -> 0.005, learning rate of dense \S+ -> 0.003", capsys.readouterr().out)


# ---- moving average ----


def test_the_average_is_updated_once_per_step(make_trainer, sudoku):
    trainer = make_trainer(max_steps=6, ema_rate=0.8)
    expected, by_hand = WeightAverage(tiny.model("hrm"), 0.8), []
    step = trainer.training_step
    trainer.training_step = lambda *args: (by_hand.append(weights(trainer.model)), step(*args))[1]
    trainer.train()
    for after in [*by_hand[1:], weights(trainer.model)]:  # weights after each of the steps
        for name, value in expected.shadow.items():
            value.lerp_(after[name], 0.2)
    assert trainer.average.shadow.keys() == dict(trainer.model.named_parameters()).keys()  # without the table
    for name, value in trainer.average.shadow.items():
        torch.testing.assert_close(value, expected.shadow[name], rtol=0, atol=1e-7)


def test_a_finished_run_saves_averaged_and_raw_weights(make_trainer, tmp_path):
    trainer = make_trainer(max_steps=6, ema_rate=0.9)
    trainer.train()
    raw, averaged = weights(trainer.model), {n: v.clone() for n, v in trainer.average.shadow.items()}
    trainer.save_model()
    saved = load_file(tmp_path / "run" / "model.safetensors")
    for name, value in averaged.items():
        assert torch.equal(saved[name], value) and not torch.equal(value, raw[name])
    assert torch.equal(saved["model.puzzle_emb.weight"], raw["model.puzzle_emb.weight"])
    kept = load_file(tmp_path / "run" / RAW_WEIGHTS_FILE)
    assert_copied(kept, {name: raw[name] for name in averaged})
    assert_copied(weights(trainer.model), raw)  # training can continue
    loaded = AutoModelForPuzzleSolving.from_pretrained(tmp_path / "run")
    assert torch.equal(loaded.lm_head.weight, averaged["lm_head.weight"])


def test_a_checkpoint_saves_raw_weights_as_the_model_and_the_average_separately(make_trainer, tmp_path):
    trainer = make_trainer(max_steps=4, ema_rate=0.9, save_strategy="steps", save_steps=4)
    trainer.train()
    folder = tmp_path / "run" / "checkpoint-4"
    assert torch.equal(load_file(folder / "model.safetensors")["lm_head.weight"], trainer.model.lm_head.weight)
    assert_copied(load_file(folder / WEIGHT_AVERAGE_FILE), trainer.average.shadow)


# ---- nonfinite losses ----


@pytest.mark.parametrize("architecture", ["hrm", "trm"])
def test_a_nonfinite_step_changes_neither_weights_nor_table(make_trainer, architecture):
    model = tiny.model(architecture)
    break_at(model, {3, 4})
    trainer = make_trainer(model, max_steps=6)
    snapshots, step = [], trainer.training_step
    trainer.training_step = lambda *args: (snapshots.append(weights(model)), step(*args))[1]
    trainer.train()
    snapshots.append(weights(model))
    same = [all(torch.equal(a[n], b[n]) for n in a) for a, b in itertools.pairwise(snapshots)]
    assert same == [False, False, True, True, False, False]
    assert all(value.isfinite().all() for value in snapshots[-1].values())


def test_skipped_steps_are_counted_in_the_log(make_trainer):
    model = tiny.model("trm")
    break_at(model, {2, 4})
    trainer = make_trainer(model, max_steps=5)
    assert math.isfinite(trainer.train().training_loss)
    assert [entry.get("nonfinite_steps") for entry in logged(trainer)] == [None, 1, 1, 2, 2]
    assert all(math.isfinite(entry["loss"]) for entry in logged(trainer)[2:])


def test_a_slot_with_nonfinite_latents_starts_its_next_row(make_trainer, sudoku):
    model = tiny.model("trm", undecided=False)  # no slot halts on its own
    break_at(model, {2}, how="latents")
    trainer = make_trainer(model, max_steps=4)
    seen = spy(trainer)
    trainer.train()
    expected = [[1, 1, 1, 1], [2, 2, 2, 2], [3, 1, 3, 3], [4, 2, 4, 4]]
    assert [entry["after"].steps.tolist() for entry in seen] == expected
    assert trainer.carry.z_H.isfinite().all()
    order = PuzzleOrder(sudoku["train"], 42)
    assert trainer.carry.current_data["input_ids"][1].tolist() == sudoku["train"].input_ids[order.row(5)].tolist()


def test_too_many_nonfinite_steps_in_a_row_stop_the_run(make_trainer):
    trainer = make_trainer(max_steps=20, max_nonfinite_steps=3)
    break_at(trainer.model, range(1, 20))
    before = weights(trainer.model)
    with pytest.raises(NonFiniteError, match=r"3 steps .*step 3 \(loss nan, .*norm \w+, .*rate 0\.0\d+\)"):
        trainer.train()
    after = weights(trainer.model)
    assert_copied(after, before)


def test_a_finite_step_resets_the_count(make_trainer):
    model = tiny.model("trm")
    break_at(model, {2, 3, 5, 6})
    trainer = make_trainer(model, max_steps=7, max_nonfinite_steps=3)
    trainer.train()
    assert trainer.nonfinite_steps == 4


def test_a_resumed_run_remembers_the_skipped_steps(make_trainer):
    model = tiny.model("trm")
    break_at(model, {3, 4})
    make_trainer(model, max_steps=4, save_strategy="steps", save_steps=4).train()
    resumed = make_trainer("trm", max_steps=5)
    resumed.train("last")
    assert resumed.nonfinite_steps == 2
    assert [entry.get("nonfinite_steps") for entry in logged(resumed)] == [None, None, 1, 2, 2]


# ---- precision and rejected arguments ----


def test_bf16_is_the_dtype_of_activations_not_of_weights(make_trainer):
    trainer = make_trainer(bf16=True, max_steps=2)
    assert trainer.model.config.forward_dtype == "bfloat16"
    assert not trainer.accelerator.native_amp
    trainer.train()
    assert trainer.carry.z_H.dtype == torch.bfloat16
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2: .*per_device_train_batch_size"),
        ({"fp16": True}, "fp16=True: .*--bf16"),
    ],
)
def test_unsupported_training_arguments_are_rejected(make_trainer, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(**arguments)


def test_data_that_do_not_fit_are_rejected_before_the_first_step(make_trainer):
    trainer = make_trainer(tiny.model("hrm", seq_len=9, grid_shape=[3, 3]))
    with pytest.raises(ValueError, match=r"seq_len 16, .*9"):
        trainer.train()


# ---- evaluation ----


def test_evaluation_uses_averaged_weights_and_puts_the_raw_ones_back(make_trainer, sudoku):
    trainer = make_trainer(max_steps=8, ema_rate=0.99, learning_rate=1e-2, eval_max_steps=3)
    trainer.train()
    raw = weights(trainer.model)
    metrics = trainer.evaluate()
    assert_copied(weights(trainer.model), raw)

    def by_hand():
        test = sudoku["test"]
        found = evaluate_puzzles(
            trainer.model, test.input_ids, test.labels, test.puzzle_identifiers, max_steps=3, halt="fixed"
        )
        return {n: v for n, v in found.items() if isinstance(v, (int, float)) and n != "puzzles_per_second"}

    of_raw = by_hand()
    with trainer.averaged_weights():
        of_average = by_hand()
    assert {"exact_accuracy", "cell_accuracy", "average_steps", "ece", "count"} <= of_average.keys()
    # Batches of other sizes may sum in another order, which changes the calibration error slightly.
    close = pytest.approx(of_average, abs=1e-4)
    assert {n: metrics[f"eval_{n}"] for n in of_average} == close
    assert of_raw != close
    assert metrics["eval_count"] == 10 and metrics["eval_average_steps"] == 3
    assert trainer.state.log_history[-1]["eval_exact_accuracy"] == metrics["eval_exact_accuracy"]


@pytest.mark.parametrize("saves", ["steps", "best"])
def test_the_best_checkpoint_is_restored_with_its_average(make_trainer, monkeypatch, tmp_path, saves):
    scores = iter([0.1, 0.9, 0.3])
    monkeypatch.setattr("hrm_hf.puzzles.trainer.evaluate_puzzles", lambda *_, **__: {"exact_accuracy": next(scores)})
    trainer = make_trainer(
        max_steps=6, ema_rate=0.9, save_strategy=saves, save_steps=2, eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, metric_for_best_model="exact_accuracy", greater_is_better=True,
        save_total_limit=1,
    )  # fmt: skip
    trainer.train()
    best = tmp_path / "run" / "checkpoint-4"
    assert trainer.state.best_model_checkpoint == str(best)
    assert_copied(trainer.average.shadow, load_file(best / WEIGHT_AVERAGE_FILE))
    saved = load_file(best / "model.safetensors")
    assert_copied({name: weights(trainer.model)[name] for name in saved}, saved)
    trainer.save_model()
    final = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(final["lm_head.weight"], load_file(best / WEIGHT_AVERAGE_FILE)["lm_head.weight"])


# ---- checkpoints ----


@pytest.fixture
def checkpoints(tmp_path):
    """Create a run folder with three complete checkpoints of small files."""
    for step in (2, 4, 10):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"x" * 2000)
        (folder / "optimizer.pt").write_bytes(b"y" * 30)
        write_manifest(folder)
    return tmp_path / "run"


def truncate(folder):
    (folder / "model.safetensors").write_bytes(b"x" * 1234)


def remove(folder):
    (folder / "optimizer.pt").unlink()


def stop_before_manifest(folder):
    (folder / "manifest.json").unlink()


def stop_in_manifest(folder):
    (folder / "manifest.json").write_text('{"model.safe')


DAMAGE = [
    (truncate, "model.safetensors .*1,234 bytes.* 2,000"),
    (remove, "optimizer.pt is missing"),
    (stop_before_manifest, "manifest.json is missing"),
    pytest.param(stop_in_manifest, "manifest.json"),
]


@pytest.mark.parametrize(("harm", "message"), DAMAGE, ids=lambda value: getattr(value, "__name__", ""))
def test_corrupted_checkpoint_error_names_the_file_and_the_last_complete_one(checkpoints, harm, message):
    harm(checkpoints / "checkpoint-10")
    with pytest.raises(ValueError, match=f"checkpoint-10 is corrupted: .*{message}.*last-complete") as error:
        resolve_checkpoint(checkpoints, "last")
    assert str(checkpoints / "checkpoint-4") in str(error.value)
    assert resolve_checkpoint(checkpoints, "last-complete") == str(checkpoints / "checkpoint-4")


def test_the_newest_checkpoint_has_the_most_steps(checkpoints):
    assert [folder.name for folder in list_checkpoints(checkpoints)] == [f"checkpoint-{n}" for n in (2, 4, 10)]
    for wanted in (True, "True", "true", "last", "last-complete"):
        assert resolve_checkpoint(checkpoints, wanted) == str(checkpoints / "checkpoint-10")
    assert resolve_checkpoint(checkpoints, str(checkpoints / "checkpoint-2")) == str(checkpoints / "checkpoint-2")
    assert resolve_checkpoint(checkpoints, None) is None is resolve_checkpoint(checkpoints, False)
    assert resolve_checkpoint(checkpoints, "false") is None


def test_resuming_without_a_checkpoint_is_an_error(checkpoints, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"empty has no checkpoint"):
        resolve_checkpoint(tmp_path / "empty", "last")
    for folder in list_checkpoints(checkpoints):
        stop_before_manifest(folder)
    for folder in (checkpoints, tmp_path / "empty"):
        assert resolve_checkpoint(folder, "last-complete") is None
    with pytest.raises(ValueError, match="no complete checkpoint"):
        resolve_checkpoint(checkpoints, "last")
    with pytest.raises(ValueError, match="checkpoint-77 does not exist"):
        resolve_checkpoint(checkpoints, str(checkpoints / "checkpoint-77"))


def test_last_complete_resumes_from_the_checkpoint_before_a_corrupted_one(make_trainer, tmp_path):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(**options)
    whole.train()
    file = tmp_path / "run" / "checkpoint-6" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model\.safetensors .*100 bytes; expected [\d,]+.*checkpoint-4"):
        make_trainer(**options).train("last")
    resumed = make_trainer(**options)
    resumed.train("last-complete")
    assert logged(resumed) == logged(whole)
    assert find_corruption(tmp_path / "run" / "checkpoint-6") == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:668] . unexpected pos 64 vs 0"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_is_reported_and_earlier_checkpoints_stay(make_trainer, monkeypatch, tmp_path, error):
    save, calls = Trainer._save_optimizer_and_scheduler, itertools.count(1)

    def full(self, folder):
        if next(calls) > 1:
            raise error
        save(self, folder)

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", full)
    trainer = make_trainer(max_steps=6, save_strategy="steps", save_steps=2, save_total_limit=1)
    with pytest.raises(OSError, match=r"write .*checkpoint-4: .*last-complete"):
        trainer.train()
    assert trainer.args.save_total_limit == 1
    assert resolve_checkpoint(tmp_path / "run", "last-complete") == str(tmp_path / "run" / "checkpoint-2")


def test_a_disk_that_fills_up_at_the_manifest_is_reported(make_trainer, monkeypatch):
    def full(folder, run_id):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hrm_hf.trainer.saving.write_manifest", full)
    with pytest.raises(OSError, match=r"write .*checkpoint-2: "):
        make_trainer(max_steps=2, save_strategy="steps", save_steps=2).train()


def test_an_interrupted_overwrite_leaves_an_incomplete_checkpoint(make_trainer, monkeypatch, tmp_path):
    # An old manifest would confirm a mixture of both checkpoints.
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(**options).train()

    def killed(self, folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", killed)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(**options).train(str(tmp_path / "run" / "checkpoint-1"))
    assert find_corruption(tmp_path / "run" / "checkpoint-2") != []


def test_old_checkpoints_are_deleted_after_the_new_one_is_complete(make_trainer, monkeypatch, tmp_path):
    import hrm_hf.trainer.saving as module

    seen, write = [], module.write_manifest

    def watched(folder, run_id):
        seen.append([one.name for one in list_checkpoints(tmp_path / "run")])
        write(folder, run_id)

    monkeypatch.setattr(module, "write_manifest", watched)
    make_trainer(max_steps=6, save_strategy="steps", save_steps=2, save_total_limit=1).train()
    assert seen == [["checkpoint-2"], ["checkpoint-2", "checkpoint-4"], ["checkpoint-4", "checkpoint-6"]]
    assert [one.name for one in list_checkpoints(tmp_path / "run")] == ["checkpoint-6"]
