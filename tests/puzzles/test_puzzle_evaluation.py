"""Metrics of an evaluation, for models with known answers, steps and confidence."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import evaluate
import numpy as np
import pytest
import torch

from benchmarks.puzzles import plain_sudoku
from hrm_hf import HrmPuzzleConfig, HrmPuzzleForSolving, PuzzleSolution, metrics
from hrm_hf.models.pipeline_batches import seeded
from hrm_hf.puzzles import sudoku_generation
from hrm_hf.puzzles.evaluation import (
    accuracies,
    accuracy_by_difficulty,
    auroc,
    calibration,
    correct_cells,
    evaluate_puzzles,
    trusted,
    wilson_interval,
)
from hrm_hf.trainer.plots import plot_evaluation


METRIC_FOLDER = str(Path(metrics.__file__).with_name("exact_accuracy"))
CONFIG = {
    "task": "sudoku", "grid_shape": [4, 4], "seq_len": 16, "vocab_size": 6, "hidden_size": 8, "num_attention_heads": 1,
    "H_layers": 1, "L_layers": 1, "expansion": 1, "puzzle_emb_ndim": 8, "halt_max_steps": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def data():
    pairs = list(sudoku_generation.generate(4, 10, 6, seed=0))
    return [np.stack(boards).astype(np.int8) + 1 for boards in zip(*pairs)]


class Scripted(HrmPuzzleForSolving):
    """Model that solves puzzle i (its identifier) after i % 4 + 1 steps if i < 8, otherwise never."""

    def __init__(self, labels, **fields):
        super().__init__(HrmPuzzleConfig(**{**CONFIG, "num_puzzle_identifiers": 10, **fields}))
        self.right = torch.from_numpy(labels).long()

    def solve(self, input_ids, puzzle_identifiers, **settings):
        assert not self.training
        needed = puzzle_identifiers % 4 + 1
        right = self.right[puzzle_identifiers]
        rows = [
            torch.where(((needed <= step) & (puzzle_identifiers < 8))[:, None], right, input_ids)
            for step in range(1, int(needed.max()) + 1)
        ]
        q_halt = torch.where(puzzle_identifiers < 8, 3.0, -3.0)
        return PuzzleSolution(rows[-1], needed.int(), q_halt, None, torch.stack(rows), q_halt.expand(len(rows), -1))


def run(model, data, **options):
    model.train()
    found = evaluate_puzzles(model, *data, np.arange(10), **{"batch_size": 4, "max_steps": 6, **options})
    assert model.training  # restored
    return found


def test_accuracy_per_step_counts_the_puzzles_solved_by_then(data):
    result = run(Scripted(data[1]), data)
    assert result["exact_accuracy_per_step"] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert result["exact_accuracy"] == pytest.approx(0.8) and result["count"] == 10
    blank_share = np.mean([(data[0][i] == data[1][i]).mean() for i in (8, 9)])
    assert result["cell_accuracy"] == pytest.approx(0.8 + 0.2 * blank_share)


def test_steps_are_counted(data):
    result = run(Scripted(data[1]), data)
    assert result["steps_histogram"] == [3, 3, 2, 2, 0, 0]
    assert result["average_steps"] == pytest.approx(2.3)


def test_a_model_that_knows_when_it_is_right_has_a_small_calibration_error(data):
    result = run(Scripted(data[1]), data)
    assert result["q_halt_accuracy"] == 1.0
    assert result["ece"] == pytest.approx(1 - 1 / (1 + np.exp(-3)))
    assert [row["count"] for row in result["reliability"]] == [2] + [0] * 8 + [8]


def test_validity_is_judged_by_the_rules_not_by_the_labels(data):
    wrong_labels = np.roll(data[1], 1, axis=1)
    result = evaluate_puzzles(Scripted(data[1]), data[0], wrong_labels, np.arange(10))
    assert result["valid_fraction"] == pytest.approx(0.8) and result["exact_accuracy"] == 0


def test_tasks_without_rules_have_no_valid_fraction(data):
    assert "valid_fraction" not in run(Scripted(data[1], task="generic"), data)


def test_metrics_do_not_depend_on_the_batch_size(data):
    torch.manual_seed(0)
    model = HrmPuzzleForSolving(HrmPuzzleConfig(**CONFIG))
    with torch.no_grad():
        model.q_head.weight.normal_()
    results = [evaluate_puzzles(model, *data, batch_size=size, max_steps=5) for size in (1, 4, 10)]
    for result in results:
        del result["puzzles_per_second"]
        result["ece"] = result["reliability"] = None  # floats are summed in another order
    assert results[0] == results[1] == results[2]


def test_fixed_halting_uses_every_step_and_q_halting_may_stop_earlier(data):
    model = HrmPuzzleForSolving(HrmPuzzleConfig(**CONFIG))
    with torch.no_grad():
        model.q_head.bias.copy_(torch.tensor([1.0, 0.0]))  # always prefers to halt
    assert evaluate_puzzles(model, *data, halt="fixed")["average_steps"] == 4
    assert evaluate_puzzles(model, *data, halt="q")["average_steps"] == 1
    assert evaluate_puzzles(model, *data, halt="q", min_steps=3)["average_steps"] == 3


def random_model(**fields):
    torch.manual_seed(0)
    model = HrmPuzzleForSolving(HrmPuzzleConfig(**{**CONFIG, **fields}))
    with torch.no_grad():
        model.q_head.weight.normal_()
    return model.eval()


def test_restarts_equal_those_of_solve_and_are_reported(data):
    model = random_model()
    options = {"restarts": 3, "noise": 0.7, "noise_at": "every_step", "choose": "residual", "exit_when_still": 0.01}
    seen = []
    found = evaluate_puzzles(
        model, *data, batch_size=10, max_steps=5, seed=4, on_batch=lambda *found: seen.append(found[2]), **options
    )
    with seeded(model.device, 4):
        expected = model.solve(torch.from_numpy(data[0]).long(), max_steps=5, **options)
    assert torch.equal(seen[0].predictions, expected.predictions) and torch.equal(seen[0].steps, expected.steps)
    assert found["average_steps"] == expected.steps.float().mean().item()
    assert found["average_steps_of_all_runs"] == expected.steps_of_all_runs.float().mean().item()
    assert {name: found[name] for name in options} == options


def test_the_default_batch_fits_the_cache(data, monkeypatch):
    rows = []
    monkeypatch.setattr(HrmPuzzleForSolving, "boards_per_call", 3)
    evaluate_puzzles(random_model(), *data, on_batch=lambda ids, *_: rows.append(len(ids)))
    assert rows == [3, 3, 3, 1]


def test_default_options_are_not_reported_and_unknown_ones_raise(data):
    plain = {"restarts": 1, "noise": None, "noise_at": "start", "choose": "q", "exit_when_still": None}
    assert not {*plain, "average_steps_of_all_runs"} & run(Scripted(data[1]), data, **plain).keys()
    with pytest.raises(TypeError, match="'restart'"):
        run(Scripted(data[1]), data, restart=2)


def test_the_same_seed_gives_the_same_evaluation_and_leaves_other_random_numbers_alone(data):
    model = random_model()
    options = {"restarts": 3, "noise": 2.0, "batch_size": 4, "max_steps": 3}
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(results))
        state = torch.get_rng_state()
        results.append(evaluate_puzzles(model, *data, seed=seed, **options))
        assert torch.equal(torch.get_rng_state(), state)
        del results[-1]["puzzles_per_second"]
    assert results[0] == results[1] != results[2]


def test_rules_choose_restarts_only_for_tasks_with_rules(data):
    """The model is correct in its second run, with lower confidence than in the first."""

    class Second(HrmPuzzleForSolving):
        def run(self, input_ids, puzzle_identifiers, settings, *args):
            found, noise = super().run(input_ids, puzzle_identifiers, settings, *args), settings.noise
            solved = torch.from_numpy(np.stack([plain_sudoku.solve(row - 1) for row in input_ids.numpy()])).long() + 1
            answer = solved if noise else torch.zeros_like(solved)
            return replace(found, predictions=answer, q_halt=torch.full((len(answer),), -9.0 if noise else 9.0))

    model = Second(HrmPuzzleConfig(**CONFIG)).eval()
    for choose, expected in (("q", 0), ("rules", 1)):
        assert evaluate_puzzles(model, *data, restarts=2, choose=choose)["exact_accuracy"] == expected
    model.config.task = "generic"  # has no rules, so q chooses
    assert evaluate_puzzles(model, *data, restarts=2, choose="rules")["exact_accuracy"] == 0


def test_rows_without_labels_are_solved_but_not_scored(data):
    labels = data[1].astype(np.int64)
    labels[8:] = -100
    seen = []
    result = run(Scripted(data[1]), [data[0], labels], on_batch=lambda ids, *_: seen.append(len(ids)))
    assert result["count"] == 8 and result["exact_accuracy"] == 1 and sum(seen) == 10
    assert result["exact_accuracy_per_step"][:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_the_result_is_json(data):
    assert json.loads(json.dumps(run(Scripted(data[1]), data)))["halt"] == "q"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, a, i: (q[:, :9], a, i), r"input_ids .*\(10, 9\); .*\(10, 16\)"),
        (lambda q, a, i: (q, a[:5], i), r"labels .*\(5, 16\)"),
        (lambda q, a, i: (q, a, i[:3]), "puzzle_identifiers .*3 .*10 rows"),
        (lambda q, a, i: (q, a, i + 5), "puzzle_identifiers .*14"),
        (lambda q, a, i: (q, np.full_like(a, -100), i), "10 rows .*-100"),
        (lambda q, a, i: (q[:0], a[:0], i[:0]), "no puzzles"),
    ],
)
def test_invalid_data_are_rejected(change, message, data):
    with pytest.raises(ValueError, match=message):
        evaluate_puzzles(Scripted(data[1]), *change(*data, np.arange(10)))


def test_auroc_counts_pairs_of_right_and_wrong_answers():
    assert auroc(np.array([0.9, 0.2, 0.5, 0.5]), np.array([True, False, True, False])) == 3.5 / 4
    assert auroc(np.array([0.9, 0.2]), np.array([True, True])) is None


def test_at_most_one_trusted_answer_in_a_thousand_is_wrong():
    """Referee: with 0 errors, Wilson's upper bound is z^2 / (n + z^2), which is 1 / 1,000 at n = 3,838."""
    confidence = np.linspace(1, 0.5, 5000)
    for wrong, expected in (([], 5000), ([4999], 4999), ([3838], 3838), ([3837], 0), ([1000, 4000], 0)):
        right = np.ones(5000, dtype=bool)
        right[wrong] = False
        found = trusted(confidence, right)
        assert found["sure_fraction"] == expected / 5000, wrong
        assert found["sure_confidence"] == (confidence[expected - 1] if expected else None)
    assert trusted(np.ones(3838), np.arange(3838) < 3837)["sure_confidence"] is None  # equal confidences stay together


def test_calibration_of_confident_errors_is_bad():
    assert calibration(np.array([1.0, 1.0]), np.array([False, True]))["ece"] == pytest.approx(0.5)
    assert calibration(np.array([0.55, 0.55]), np.array([False, True]))["ece"] == pytest.approx(0.05)


def test_numpy_and_torch_count_correct_cells_alike():
    predictions, labels = np.array([[1, 2, 3], [1, 1, 1]]), np.array([[1, 0, -100], [-100] * 3])
    for convert in (np.asarray, torch.from_numpy):
        counts = correct_cells(convert(predictions), convert(labels))
        assert [count.tolist() for count in counts] == [[1, 0], [2, 0]]
    found = accuracies([1, 0], [2, 0])
    assert found.pop("exact_accuracy_interval") == pytest.approx([0, 0.7935], abs=5e-5)  # 1 / (1 + 1 / 1.96^2)
    assert found == {"cell_accuracy": 0.5, "exact_accuracy": 0.0, "count": 1}


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_intervals_match_those_published_by_newcombe(right, count, low, high):
    # Statistics in Medicine 17 (1998), table I, method 3
    assert wilson_interval(right, count) == pytest.approx((low, high), abs=5e-5)
    found = accuracies([1] * right + [0] * (count - right), [1] * count)
    assert found["exact_accuracy_interval"] == pytest.approx([low, high], abs=5e-5)


def test_every_share_of_puzzles_comes_with_its_interval(data):
    result = run(Scripted(data[1]), data)
    for name in ("exact_accuracy", "valid_fraction", "q_halt_accuracy"):
        right = round(result[name] * 10)
        assert result[name] == right / 10 and result[f"{name}_interval"] == list(wilson_interval(right, 10))
    steps = zip(result["exact_accuracy_per_step"], result["exact_accuracy_per_step_interval"])
    assert [list(wilson_interval(round(10 * share), 10)) for share, _ in steps] == result[
        "exact_accuracy_per_step_interval"
    ]
    assert [row["accuracy_interval"] for row in result["reliability"] if row["count"]] == [
        list(wilson_interval(0, 2)), list(wilson_interval(8, 8)),
    ]  # fmt: skip


def test_difficulty_is_binned_by_value_or_into_similar_counts():
    table = accuracy_by_difficulty(np.array([2, 0, 2, 5]), np.array([True, True, False, False]))
    assert [(row["low"], row["high"], row["count"], row["exact_accuracy"]) for row in table] == [
        (0, 0, 1, 1), (2, 2, 2, 0.5), (5, 5, 1, 0),
    ]  # fmt: skip
    assert table[1]["exact_accuracy_interval"] == list(wilson_interval(1, 2))
    rng = np.random.default_rng(0)
    ratings = np.concatenate([np.zeros(500), rng.geometric(0.02, 500)])  # half of the values are equal
    solved = rng.random(1000) < 0.5
    table = accuracy_by_difficulty(ratings, solved)
    assert sum(row["count"] for row in table) == 1000 and len(table) <= 8
    assert all(one["high"] < two["low"] for one, two in pairwise(table))
    assert all(row["count"] < 200 for row in table[1:]) and table[0]["high"] == 0
    for row in table:
        inside = (ratings >= row["low"]) & (ratings <= row["high"])
        assert row["exact_accuracy"] == pytest.approx(solved[inside].mean())


def test_rows_without_labels_are_in_no_bin_of_difficulty(data):
    labels = data[1].copy().astype(np.int64)
    labels[9] = -100
    table = run(Scripted(data[1]), (data[0], labels), difficulty={"number": np.arange(10) // 5})["by_difficulty"]
    assert [(row["count"], row["exact_accuracy"]) for row in table["number"]] == [(5, 1.0), (4, 0.75)]


def test_the_evaluate_module_loads_offline_and_ignores_minus_100():
    metric = evaluate.load(METRIC_FOLDER)
    result = metric.compute(predictions=[[1, 2, 9], [3, 3]], references=[[1, 2, -100], [3, 4]])
    interval = list(wilson_interval(1, 2))
    found = {"cell_accuracy": 0.75, "exact_accuracy": 0.5, "exact_accuracy_interval": interval, "count": 2}
    assert result == found


def test_the_evaluate_module_rejects_rows_of_unequal_length():
    with pytest.raises(ValueError, match=r"puzzle 0: 1 .*2 labels"):
        evaluate.load(METRIC_FOLDER).compute(predictions=[[1]], references=[[1, 2]])


def test_the_plot_is_a_picture(data, tmp_path):
    from PIL import Image

    path = plot_evaluation(run(Scripted(data[1]), data), tmp_path / "evaluation.png", "title")
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width > image.height > 300
    harder = run(Scripted(data[1]), data, difficulty={"clues": np.arange(10)})
    with Image.open(plot_evaluation(harder, tmp_path / "more.png")) as wider:
        assert wider.width == image.width * 4 // 3  # a panel more
