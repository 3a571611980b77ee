"""Calibration of refinement decisions, and the intervals of their scores."""

import json
import math

import numpy as np
import pytest
import tiny_go
import torch
from scripted_go import Scripted
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.golang.evaluation.decisions import best_temperature, calibration_error, decide, evaluate_decisions
from hrm_hf.golang.evaluation.metrics import f1_of
from hrm_hf.golang.evaluation.writer import Writer


def writer_of(model):
    return Writer(model, tiny_go.tokenizer(), batch_size=2, max_length=512, progress=False)


def trajectories(count=9):
    return [tiny_go.record(number, ("cd", "rcd", "ccrd")[number % 3]) for number in range(count)]


def thrown(temperature, rows=4000, seed=0):
    """Logits [N, 3], and labels drawn from their softmax at a temperature."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(rows, 3)) * 3
    weights = np.exp(logits / temperature)
    chances = weights / weights.sum(axis=1, keepdims=True)
    return logits, np.array([generator.choice(3, p=row) for row in chances]), chances


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_the_temperature_of_labels_that_were_drawn_with_it_is_found(temperature):
    logits, labels, chances = thrown(temperature)
    assert best_temperature(logits, labels) == pytest.approx(temperature, rel=0.1)  # 4,000 labels: about 3 %
    assert calibration_error(chances, labels) < 0.03


def test_the_calibration_error_is_the_distance_of_confidence_and_accuracy():
    sure = np.array([[0.9, 0.1, 0.0]] * 4 + [[0.5, 0.3, 0.2]] * 4)
    labels = np.array([0, 0, 1, 1, 0, 0, 1, 1])
    assert calibration_error(sure, labels) == pytest.approx((4 * 0.4 + 4 * 0.0) / 8)


def test_macro_f1_is_the_mean_over_the_classes_that_occur():
    table = np.array([[3, 1, 0], [0, 2, 0], [0, 0, 0]])
    assert f1_of(table) == pytest.approx((6 / 7 + 4 / 5) / 2)
    assert f1_of(np.zeros((3, 3))) is None


def test_a_calibration_is_found_on_one_text_and_shown_on_another():
    """The tokens are right with odds of e to two: 1 of 3 sure ones is wrong where labels are turned."""
    boost = lambda ids, position: 2.0  # noqa: E731
    figures = evaluate_decisions(writer_of(Scripted(boost=boost)), tiny_go.builder(), trajectories(), trajectories(3))
    chance = math.exp(2) / (math.exp(2) + 2)
    assert figures["tokens"]["calibration_error"] == pytest.approx(1 - chance)  # always right
    assert figures["tokens"]["temperature"] == pytest.approx(0.05)  # it can be as sure as it gets
    assert figures["tokens"]["calibration_error_calibrated"] == pytest.approx(0, abs=1e-6)
    assert figures["tokens"]["macro_f1"] == 1.0 and figures["tokens"]["macro_f1_interval"] == [1.0, 1.0]
    # The head says DONE to all, whatever is right; a temperature cannot change what is likeliest.
    assert figures["head"]["macro_f1_interval"][0] < figures["head"]["macro_f1"] < 0.5
    assert figures["head"]["temperature"] > 1 and figures["head"]["nll_calibrated"] < figures["head"]["nll"]


def test_the_temperature_of_a_config_divides_the_heads_logits_and_is_not_found_twice():
    ids = torch.tensor([tiny_go.stream("<PLAN> 4 </PLAN> <CODE> 3 </CODE>")])
    where = torch.tensor([[ids.shape[1] - 1]])
    warm, plain = tiny_go.model(awake=True, decision_temperature=2.5), tiny_go.model(awake=True)
    both = [model.model(ids, decision_positions=where).refinement_logits for model in (warm, plain)]
    torch.testing.assert_close(both[0] * 2.5, both[1])
    raw = [decide(writer_of(model), tiny_go.builder(), trajectories(3), "x").logits["head"] for model in (warm, plain)]
    np.testing.assert_allclose(*raw, rtol=1e-5, atol=1e-6)  # divided and multiplied again


def test_the_command_calibrates_and_refuses_what_it_cannot_judge(tmp_path):
    folder = tmp_path / "model"
    tiny_go.model().save_pretrained(folder)
    tiny_go.tokenizer().save_pretrained(folder)
    files = [tiny_go.write(tmp_path / name, trajectories(3)) for name in ("a.jsonl", "b.jsonl")]
    command = ["eval", "go", str(folder), "--calibrate-on", str(files[0])]
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 2 and "--trajectories" in answer.output
    command += ["--trajectories", str(files[1]), "--max-code-tokens", "8", "--json"]
    found = json.loads(CliRunner().invoke(app, command).stdout)
    head = found["metrics"]["decisions"]["head"]
    assert head["nll_calibrated"] <= head["nll"] + 1e-9 and found["calibrate_on"] == [str(files[0])]
