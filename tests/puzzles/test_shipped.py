"""Shipped models are small, used by default, and can be pushed and pulled like any other."""

import json
from pathlib import Path

import pytest
from hub_here import NAME, call
from safetensors import safe_open
from transformers import pipeline

from hrm_hf import AutoModelForPuzzleSolving
from hrm_hf.hub import pull_checkpoint, push_checkpoint
from hrm_hf.puzzles.options import SHIPPED, SolvePuzzles, shipped_model
from hrm_hf.puzzles.sudoku_rules import validate_solution


NEWSPAPER = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
MAZE = "S  \n## \nG  "


@pytest.mark.parametrize("task", SHIPPED)
def test_shipped_models_are_at_most_a_megabyte_and_record_their_training(task):
    folder = Path(shipped_model(task))
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 10**6
    with safe_open(folder / "model.safetensors", "pt") as weights:
        stored = sum(weights.get_tensor(name).numel() for name in weights.keys())
    model = AutoModelForPuzzleSolving.from_pretrained(folder)
    assert model.config.task == task
    states = 2 if model.config.two_states else 1
    assert stored - model.num_parameters() == states * model.config.hidden_size  # the initial states
    card = (folder / "README.md").read_text()
    assert "training/recipes/" in card and f"{model.num_parameters():,}" in card and "%" in card


def test_the_pipeline_without_a_model_solves_a_newspaper_sudoku():
    answer = pipeline("puzzle-solving")(NEWSPAPER)
    assert answer["text"] == SOLUTION
    assert answer["valid"] and not validate_solution(NEWSPAPER, answer["text"])


def test_the_command_works_without_a_model():
    answers = json.loads(call("solve", NEWSPAPER, "--json").stdout)
    assert [answer["text"] for answer in answers] == [SOLUTION]
    answers = json.loads(call("solve", shipped_model(), NEWSPAPER, "--json").stdout)
    assert [answer["text"] for answer in answers] == [SOLUTION]


@pytest.mark.parametrize(
    "words, model, puzzles",
    [
        ([NEWSPAPER], shipped_model("sudoku"), [NEWSPAPER]),
        ([NEWSPAPER, NEWSPAPER], shipped_model("sudoku"), [NEWSPAPER, NEWSPAPER]),
        (["-"], shipped_model("sudoku"), ["-"]),
        (["runs/demo", NEWSPAPER], "runs/demo", [NEWSPAPER]),
        (["2026", NEWSPAPER], "2026", [NEWSPAPER]),
    ],
)
def test_the_first_argument_is_a_model_unless_it_is_a_puzzle(words, model, puzzles):
    options = SolvePuzzles(words=words)
    assert (options.model, options.puzzles) == (model, puzzles)


def test_a_task_without_a_shipped_model_is_rejected():
    with pytest.raises(ValueError, match="task='arc'"):
        shipped_model("arc")


def test_shipped_models_are_pushed_and_pulled_like_any_other(hub, tmp_path):
    push_checkpoint(shipped_model("sudoku"), NAME)
    pull_checkpoint(NAME, tmp_path / "pulled")
    assert {"model.safetensors", "modeling_se_rrm_puzzle.py", "README.md"} <= set(hub.files(NAME))
    assert pipeline("puzzle-solving", model=str(tmp_path / "pulled"))(NEWSPAPER)["text"] == SOLUTION
