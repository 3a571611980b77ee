"""Metrics of the Go coder's evaluation against hand-worked examples, SciPy and textbooks."""

import itertools

import numpy as np
import pytest

from hrm_hf.golang.evaluation import metrics as go_metrics


def plan(intent, *targets):
    return {"intent": intent, "targets": list(targets), "steps": []}


@pytest.mark.parametrize(("samples", "correct", "k"), [(5, 2, 1), (5, 2, 3), (6, 1, 4), (4, 4, 2), (4, 0, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(samples, correct, k):
    flags = [True] * correct + [False] * (samples - correct)
    choices = [any(choice) for choice in itertools.combinations(flags, k)]
    assert go_metrics.pass_at_k(samples, correct, k) == pytest.approx(np.mean(choices))


@pytest.mark.parametrize(
    ("samples", "correct", "k", "named"),
    [(5, 6, 1, "correct=6"), (5, -1, 1, "correct=-1"), (5, 2, 6, "k=6"), (5, 2, 0, "k=0"), (0, 0, 1, "k=1")],
)
def test_pass_at_k_rejects_impossible_counts(samples, correct, k, named):
    with pytest.raises(ValueError, match=rf"^{named}\b.*\b{samples}\b"):
        go_metrics.pass_at_k(samples, correct, k)


def test_pass_at_1_with_one_sample_has_the_wilson_interval():
    scores = go_metrics.pass_at_k_scores([(1, 0)] * 20, (1, 10))
    assert scores["pass@1"] == 0 and scores["pass@1_interval"] == pytest.approx([0, 0.1611], abs=5e-5)
    assert "pass@10" not in scores


def test_pass_at_k_over_tasks_is_a_mean_with_a_bootstrap_interval():
    scores = go_metrics.pass_at_k_scores([(2, 1)] * 50 + [(2, 0)] * 50, (1, 2))
    assert scores["pass@1"] == pytest.approx(0.25) and scores["pass@2"] == pytest.approx(0.5)
    low, high = scores["pass@1_interval"]
    assert low == pytest.approx(0.25 - 1.96 * 0.025, abs=0.005) and high == pytest.approx(
        0.25 + 1.96 * 0.025, abs=0.005
    )


def test_bootstrap_of_a_ratio_has_the_width_of_its_standard_error():
    generator = np.random.default_rng(1)
    sizes = generator.integers(50, 150, 400)
    nats = sizes * generator.normal(2.0, 0.5, 400)
    low, high = go_metrics.ratio_interval(nats, sizes)
    ratio = nats.sum() / sizes.sum()
    error = np.sqrt(np.sum((nats - ratio * sizes) ** 2)) / sizes.sum()  # standard error of a ratio
    assert low < ratio < high and (high - low) / 2 == pytest.approx(1.96 * error, rel=0.1)


def test_paired_difference_counts_both_sides():
    result = go_metrics.paired_difference([1, 1, 0, 1, 1], [0, 1, 1, 0, 0])
    assert result["difference"] == pytest.approx(0.4)
    assert (result["only_first"], result["only_second"]) == (3, 1)
    assert result["interval"][0] < 0.4 < result["interval"][1]


def test_a_constant_difference_has_an_interval_of_width_zero():
    assert go_metrics.paired_difference([3, 4], [1, 2])["interval"] == [2, 2]


def test_bits_per_byte_of_uniform_bytes_is_eight():
    assert go_metrics.bits_per_byte(100 * np.log(256), 100) == pytest.approx(8)


def test_plan_scores_of_a_hand_worked_example():
    right = [plan("ADD", "func:A"), plan("FIX", "func:B", "type:T"), plan("ADD", "method:C.D"), plan("ADD")]
    ours = [plan("ADD", "func:A"), plan("FIX", "type:T", "func:B"), plan("FIX", "method:C.D"), plan("ADD", "func:X")]
    scores = go_metrics.plan_scores(ours, right)
    assert scores["intent_accuracy"] == 0.75 and scores["intent_majority"] == 0.75
    # 4 of 5 predicted targets are right, and 4 are expected. In plan 2, only the order, and so the first, is wrong.
    assert scores["target_precision"] == pytest.approx(4 / 5) and scores["target_recall"] == 1
    assert scores["target_f1"] == pytest.approx(8 / 9)
    assert scores["plan_acc"] == 0.25


def test_a_repeated_target_counts_as_correct_once():
    scores = go_metrics.plan_scores([plan(None, "func:A", "func:A")], [plan("ADD", "func:A")])
    assert scores["target_precision"] == 0.5 and scores["target_recall"] == 1 and scores["intent_accuracy"] == 0


def test_decision_scores_of_a_hand_worked_example():
    right, ours = [0, 0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 0, 1, 1, 2, 2, 2, 0, 2]
    scores = go_metrics.decision_scores(ours, right, [False] * 10)
    assert scores["confusion"] == [[3, 1, 0], [0, 1, 1], [1, 0, 3]]
    assert scores["accuracy"] == 0.7 and scores["majority_accuracy"] == 0.4
    # F1 of a class is 2 hits / (predicted + right): 6/8, 2/4, 6/8.
    assert scores["macro_f1"] == pytest.approx((0.75 + 0.5 + 0.75) / 3)


def test_macro_f1_ignores_classes_that_never_occur():
    # As in scikit-learn: classes 0 and 2 have F1 2/3 each.
    assert go_metrics.decision_scores([2, 2, 0], [2, 0, 0], [False] * 3)["macro_f1"] == pytest.approx(2 / 3)


def test_rule_accuracy_follows_the_validator_verdict():
    right, failed = [0, 0, 1, 2, 2, 2], [True, True, False, False, False, False]
    scores = go_metrics.decision_scores([0, 0, 1, 1, 2, 2], right, failed)
    assert scores["rule_accuracy"] == pytest.approx(5 / 6)  # rule: CONTINUE if the validator failed, else DONE


def test_iteration_scores_of_a_hand_worked_example():
    # Right at first; right at second; never; right at second, then wrong again; stopped early and wrong.
    success = [[True], [False, True], [False] * 3, [False, True, False], [False]]
    scores = go_metrics.iteration_scores(success, [[False] * len(row) for row in success], 3)
    assert scores["success_per_iteration"] == pytest.approx([0.2, 0.6, 0.4])
    assert scores["success"] == 0.4 and scores["any_success"] == 0.6
    assert scores["average_iterations"] == 2
    assert scores["premature_stop_rate"] == pytest.approx(1 / 5)
    assert scores["wasted_iteration_rate"] == pytest.approx(1 / 10)


def test_the_answer_is_the_last_attempt_that_passed_validation():
    success, valid = [[False, True, False]], [[True, True, False]]
    scores = go_metrics.iteration_scores(success, valid, 3)
    assert scores["success_per_iteration"] == [0, 1, 1]


def test_rates_of_nothing_are_none():
    assert go_metrics.mean([]) is None
    assert go_metrics.plan_scores([], [])["plan_acc"] is None
    assert go_metrics.decision_scores([], [], [])["accuracy"] is None
    assert go_metrics.iteration_scores([], [], 3)["average_iterations"] is None
    assert go_metrics.pass_at_k_scores([], (1,)) == {}
