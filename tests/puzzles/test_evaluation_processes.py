"""Evaluation shared by two processes. Referee: the same evaluation in one."""

import json

import numpy as np
import puzzle_worker
import pytest
import started
from script_runs import puzzle_boards, puzzle_weights
from test_arc_voting import NAMES, OTHER, PUZZLES, QUESTION_A, QUESTION_B, RIGHT, WRONG, vote
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.puzzles.arc_pipeline import ArcVoting


@pytest.fixture(scope="module")
def one_process():
    return puzzle_worker.figures(shared=False)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Return a function from an output folder to the arguments of `hrm-hf eval puzzles`."""
    folder = tmp_path_factory.mktemp("inputs")
    data, model = puzzle_boards(folder / "boards"), puzzle_weights(folder / "model", 0.0)
    words = ["eval", "puzzles", str(model), str(data), "--batch-size", "3", "--device", "cpu", "--json"]
    return lambda out: [*words, "--update-card", "--out", str(out)]


@pytest.fixture(scope="module")
def started_two(command, tmp_path_factory):
    """Run two processes, and return their folder and output."""
    out = tmp_path_factory.mktemp("two")
    result = started.run(puzzle_worker.main, str(out), command(out), processes=2)
    assert result.returncode == 0, result.stderr[-4000:]
    return out, result.stdout


@pytest.fixture(scope="module")
def two_processes(started_two):
    """Return the results of each of the two processes."""
    return [json.loads((started_two[0] / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", puzzle_worker.CASES)
def test_two_processes_give_bit_identical_metrics(one_process, two_processes, case):
    expected = json.loads(json.dumps(one_process[case]["figures"]))
    assert [found[case]["figures"] for found in two_processes] == [expected, expected]
    if expected["halt"] == "q":  # then rows must halt at different steps
        assert sum(puzzles > 0 for puzzles in expected["steps_histogram"]) > 1


@pytest.mark.parametrize("case", puzzle_worker.CASES)
def test_processes_take_turns_solving_batches(one_process, two_processes, case):
    rows, batch_size, _ = puzzle_worker.CASES[case]
    solved = one_process[case]["solved"]
    batches = [solved[start : start + batch_size] for start in range(0, rows, batch_size)]
    for rank, found in enumerate(two_processes):
        assert found[case]["solved"] == [row for batch in batches[rank::2] for row in batch]


def test_votes_from_several_processes_rank_like_those_from_one():
    ballots = [
        (1 + i % 9, QUESTION_A, (RIGHT, WRONG, OTHER)[i % 3], q) for i, q in enumerate(np.linspace(-3, 3, 30).tolist())
    ]
    ballots.append((10, QUESTION_B, RIGHT, 1.0))
    one = ArcVoting(PUZZLES, NAMES)
    vote(one, *ballots)
    parts = [ArcVoting(PUZZLES, NAMES) for _ in range(2)]
    for rank, part in enumerate(parts):
        vote(part, *ballots[rank::2])
    together = parts[0]
    together.replace_votes([part.votes for part in parts])
    for task, number in (("one", 1), ("two", 2)):
        for test in range(number):
            found, expected = together.candidates(task, test), one.candidates(task, test)
            assert [(c.grid.tolist(), c.votes, c.mean_q) for c in found] == [
                (c.grid.tolist(), c.votes, c.mean_q) for c in expected
            ]
    assert together.result() == one.result()


def test_command_under_torchrun_writes_the_same_results_once(started_two, command, tmp_path):
    alone = CliRunner().invoke(app, command(tmp_path / "one"))
    assert alone.exit_code == 0, alone.output
    results = []
    for out, stdout in (started_two, (tmp_path / "one", alone.stdout)):
        printed = json.loads(stdout)  # only rank 0 prints a result
        written = json.loads((out / "results.json").read_text())
        assert written["metrics"] == printed["metrics"] and (out / "evaluation.png").exists()
        assert written["metrics"].pop("puzzles_per_second") > 0
        results.append(written)
    assert results[0] == results[1] and results[0]["metrics"]["count"] == 8


def test_one_device_for_all_processes_is_rejected(tmp_path, monkeypatch):
    from hrm_hf.io.usage import UsageError
    from hrm_hf.puzzles import evaluation
    from hrm_hf.puzzles.options import EvaluatePuzzles

    monkeypatch.setattr(evaluation, "chosen_device", lambda name: name)
    data, model = puzzle_boards(tmp_path / "boards"), puzzle_weights(tmp_path / "model", 0.0)
    options = EvaluatePuzzles(model=str(model), data=str(data), device="cuda:1")
    with pytest.raises(UsageError, match="device=cuda:1"):
        evaluation.evaluate_checkpoint(options, shared=True)
