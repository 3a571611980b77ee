"""`hrm-hf demo` with fast stand-ins for its commands: what it runs and what it prints where.

Referee: the expected commands.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.puzzles import solve


@pytest.fixture
def commands(monkeypatch):
    """Replace the demo's commands with stand-ins that write `accuracies` to results.json in order."""
    called, accuracies = [], [0.9, 0.9, 0.8]

    def run(*command, out=None):
        words = [str(word) for word in command]
        called.append((words, out))
        folder = words[words.index("--output_dir" if "--output_dir" in words else "--out") + 1]
        if not folder.endswith(".gif"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            results = {"metrics": {"exact_accuracy": accuracies[len(called) - 1]}}
            Path(folder, "results.json").write_text(json.dumps(results))

    monkeypatch.setattr(solve, "run_process", run)
    monkeypatch.setattr(solve, "_held_out_board", lambda data: "53..7....")
    return called, accuracies


def test_the_demo_trains_evaluates_twice_and_solves(commands, tmp_path):
    called, _ = commands
    extra = "--build_data 'sudoku --num-train 5'"
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "run"), "--extra", extra])
    assert done.exit_code == 0, done.output
    words = [command for command, _ in called]
    assert Path(words[0][1]).name == "run_puzzle.py" and words[0][-1] == "sudoku --num-train 5"
    assert [command[3] for command in words[1:]] == ["eval", "eval", "solve"]
    assert "exact' is the share" in done.output and "90.0%, as before" in done.output


def test_demo_fails_if_the_reloaded_model_differs(commands, tmp_path):
    commands[1][1] = 0.5
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "run")])
    assert done.exit_code == 1 and "50.0%, but 90.0% before" in done.output


def test_json_mode_prints_only_the_result_to_stdout(commands, tmp_path):
    called, _ = commands
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "run"), "--json"])
    folder = str(tmp_path / "run")
    expected = {"out": folder, "exact_accuracy": 0.9, "exact_accuracy_reloaded": 0.9, "same": True}
    assert json.loads(done.stdout) == expected and "Training with" in done.stderr
    assert all(out is not None for _, out in called)  # the processes that it starts do not write there either
