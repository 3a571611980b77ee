"""`training/run_puzzle.py` from data set to results: end to end, killed and resumed, on two processes.

Referee for killed runs: the losses of the uninterrupted run. For two processes: one process with twice the slots.
"""

import json
import random
import runpy
import sys
import time
from pathlib import Path

import pytest
import started
import tiny
import torch
import yaml
from safetensors.torch import load_file
from script_runs import PUZZLE_RECIPE as RECIPE
from script_runs import SCRIPTS, puzzle_boards, puzzle_weights, recipe_arguments, renamed_boards

from hrm_hf import AutoModelForPuzzleSolving
from hrm_hf.hub.manifests import find_corruption, list_checkpoints
from hrm_hf.puzzles.dataloader import PuzzleRows
from hrm_hf.puzzles.dataset import load_puzzle_dataset
from hrm_hf.puzzles.evaluation import evaluate_checkpoint, evaluate_puzzles
from hrm_hf.puzzles.options import EvaluatePuzzles
from hrm_hf.puzzles.sudoku import generated_sudoku


SCRIPT = str(SCRIPTS / "run_puzzle.py")


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs the script to its end, in this process or in several new ones."""

    def start(args: list[str], processes: int = 1) -> None:
        if processes == 1:
            monkeypatch.setattr(sys, "argv", [SCRIPT, *args])
            runpy.run_path(SCRIPT, run_name="__main__")
            return
        result = started.run_script(SCRIPT, args, processes)
        assert result.returncode == 0, result.stderr[-3000:]

    return start


def losses(out: Path) -> dict[int, float]:
    """Return the loss logged at each step of a finished run, each step once."""
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    found = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    assert len(found) == len(dict(found))
    return dict(found)


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory):
    return puzzle_boards(tmp_path_factory.mktemp("data") / "boards")


@pytest.fixture(scope="module")
def start_weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    for name, exploration in (("plain", 0.0), ("exploring", 0.5)):
        puzzle_weights(folder / name, exploration)
    return folder


@pytest.fixture
def arguments(tmp_path, puzzles, start_weights):
    """Return `arguments("name", weights=..., option=value, ...)`, the command line of a tiny run."""

    def build(name, weights="exploring", **options):
        recipe = {**RECIPE, "data_path": str(puzzles), "model_name_or_path": str(start_weights / weights)}
        return recipe_arguments(tmp_path / f"{name}.yaml", **{**recipe, "output_dir": str(tmp_path / name), **options})

    return build


def test_puzzles_keep_their_rows_by_name_in_evaluation_and_training(run, tmp_path):
    names, order, metrics = ["<blank>", *(f"renaming {i}" for i in range(1, 5))], [0, 3, 1, 4, 2], []
    data, model = renamed_boards(tmp_path / "data", 5), tiny.model("trm", task="sudoku", box_shape=[2, 2])
    model.model.puzzle_emb.weight.normal_(generator=torch.Generator().manual_seed(0)).mul_(3)
    for place in (tmp_path / "same", tmp_path / "other"):
        model.save_pretrained(place)
        (place / "identifiers.json").write_text(json.dumps(names))
        metrics.append(evaluate_checkpoint(EvaluatePuzzles(model=str(place), data=data, device="cpu"))["metrics"])
        names, _ = [names[number] for number in order], model.order_puzzle_embeddings(order)
    assert metrics[0] | {"puzzles_per_second": 0} == metrics[1] | {"puzzles_per_second": 0}
    options = {**RECIPE, "data_path": data, "max_steps": 1, "puzzle_emb_lr": 0, "puzzle_emb_weight_decay": 0}
    options |= {"model_name_or_path": str(tmp_path / "other"), "output_dir": str(tmp_path / "run")}
    run(recipe_arguments(tmp_path / "r.yaml", **options))
    tables = [AutoModelForPuzzleSolving.from_pretrained(tmp_path / n).model.puzzle_emb.weight for n in ("same", "run")]
    torch.testing.assert_close(*tables)


def test_a_recipe_run_saves_everything_that_a_result_needs(run, tmp_path):
    out = tmp_path / "run"
    recipe = {
        **RECIPE, "model_type": "trm_puzzle", "data_path": str(tmp_path / "boards"), "output_dir": str(out),
        "build_data": "sudoku --size 4 --num-train 30 --num-test 8", "ema_rate": 0.9, "eval_max_steps": 6,
        "config_overrides": {
            "hidden_size": 32, "num_attention_heads": 2, "L_layers": 1, "H_cycles": 1, "L_cycles": 2,
            "puzzle_emb_ndim": 0, "halt_max_steps": 4,
        },
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run(["--recipe", str(tmp_path / "recipe.yaml"), "--max_steps", "6", "--save_steps", "6"])
    expected = {
        "model.safetensors", "raw_weights.safetensors", "config.json", "identifiers.json", "recipe.yaml",
        "results.json", "evaluation.png", "training.png", "README.md", "trainer_state.json", "checkpoint-6",
    }  # fmt: skip
    assert expected <= {path.name for path in out.iterdir()}
    assert sorted(losses(out)) == [1, 2, 3, 4, 5, 6]
    saved = yaml.safe_load((out / "recipe.yaml").read_text())
    assert saved["max_steps"] == 6 and saved["learning_rate"] == 1e-3 and saved["data_path"] == recipe["data_path"]
    results = json.loads((out / "results.json").read_text())
    assert results["task"] == "sudoku" and results["steps"] == 6 and results["parameters"] > 0
    slots = RECIPE["per_device_train_batch_size"]  # each takes a puzzle at once, and the next after 1 to 4 steps
    assert 2 * slots <= results["puzzles"] <= 6 * slots and results["hardware"].startswith("CPU, ")
    card = (out / "README.md").read_text()
    assert f"| puzzles seen | {results['puzzles']} |" in card and f"| hardware | {results['hardware']} |" in card
    assert json.loads((out / "identifiers.json").read_text()) == ["<blank>"]
    assert (out / "training.png").read_bytes()[:4] == (out / "evaluation.png").read_bytes()[:4] == b"\x89PNG"

    # The saved folder gives the same evaluation, with the run's evaluation steps instead of its training steps.
    assert saved["config_overrides"] and results["metrics"]["max_steps"] == 6
    model = AutoModelForPuzzleSolving.from_pretrained(out)
    held_out = PuzzleRows(generated_sudoku(4, num_train=30, num_test=8)[0]["test"])
    again = evaluate_puzzles(model, held_out.input_ids, held_out.labels, halt="fixed")
    speed = {"puzzles_per_second"}
    assert {n: v for n, v in again.items() if n not in speed} == {
        n: v for n, v in results["metrics"].items() if n not in speed
    }


def test_a_saved_recipe_repeats_its_run(run, arguments, tmp_path):
    run(arguments("first"))
    saved = str(tmp_path / "first" / "recipe.yaml")
    run(["--recipe", saved, "--output_dir", str(tmp_path / "second")])
    assert losses(tmp_path / "second") == losses(tmp_path / "first")


@pytest.mark.slow
def test_a_run_killed_three_times_reproduces_the_losses(run, arguments, tmp_path):
    options = {"max_steps": 60, "save_steps": 3, "ema_rate": 0.9, "save_total_limit": 3}
    run(arguments("alone", **options))

    killed = arguments("killed", **options)
    out, draw = tmp_path / "killed", random.Random(0)
    moments = []
    for kill in range(3):
        wanted = 15 * kill + draw.randrange(6, 15)  # wait until this step or a later one is saved, plus a short delay
        process = started.script(SCRIPT, [*killed, *resume_arguments(out)], output=tmp_path / "killed")
        process.start()
        while process.is_alive() and not any(step_of(one) >= wanted for one in list_checkpoints(out)):
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.15))
        process.kill()
        process.join()
        assert process.exitcode == -9, (tmp_path / "killed.err").read_text()[-3000:]
        moments.append((step_of(list_checkpoints(out)[-1]), find_corruption(list_checkpoints(out)[-1])))
    run([*killed, *resume_arguments(out)])
    print(f"\nkilled at (newest checkpoint, its damage): {moments}")
    assert losses(out) == losses(tmp_path / "alone")
    expected, found = (load_file(folder / "model.safetensors") for folder in (tmp_path / "alone", out))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def step_of(folder: Path) -> int:
    return int(folder.name.rsplit("-", 1)[1])


def resume_arguments(out: Path) -> list[str]:
    """Resume like a user: from "last", or "last-complete" if the script reports a corrupted checkpoint."""
    available = list_checkpoints(out)
    if not any(not find_corruption(folder) for folder in available):
        return []
    return ["--resume_from_checkpoint", "last-complete" if find_corruption(available[-1]) else "last"]


def test_two_processes_train_and_evaluate_as_one_with_twice_the_slots(run, arguments, puzzles, tmp_path):
    # The evaluation has three batches, so one process gets two of them.
    lr = 1e-4
    options = {"weights": "plain", "puzzle_emb_lr": lr, "per_device_eval_batch_size": 3}
    run(arguments("one", per_device_train_batch_size=8, **options))
    run(arguments("two", per_device_train_batch_size=4, **options), processes=2)
    one, two = tmp_path / "one", tmp_path / "two"
    parts = [torch.load(two / "checkpoint-12" / f"act_state_{rank}.pt", weights_only=True) for rank in range(2)]
    assert [part["stream"]["world_size"] for part in parts] == [2, 2]
    together = torch.cat([part["carry"]["steps"] for part in parts])
    alone = torch.load(one / "checkpoint-12" / "act_state_0.pt", weights_only=True)["carry"]
    assert together.tolist() == alone["steps"].tolist() and len(set(together.tolist())) > 1
    # In 12 steps at a learning rate of 1e-3, rounding differences grow, but stay below 1e-5.
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    expected, found = (load_file(folder / "model.safetensors") for folder in (one, two))
    # Sums over rows have a different order. If a gradient in the puzzle table is nearly zero, its sign may differ,
    # and sign descent then steps by lr in the other direction. So few entries differ, by multiples of 2 * lr.
    table = "model.puzzle_emb.weight"
    double_steps = (found[table] - expected[table]) / (2 * lr)
    torch.testing.assert_close(double_steps, double_steps.round(), rtol=0, atol=1e-5 / (2 * lr))
    assert (double_steps.round() != 0).float().mean() < 0.05
    for name in expected.keys() - {table}:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5, msg=name)
    before = tiny.model("trm").model.puzzle_emb.weight
    # The table is a buffer, which `module.to(device)` may replace with a copy unknown to the optimizer.
    moved = (found[table] - before).abs().amax(dim=1)
    assert moved[0] == 0 and (moved[1:] > 0).all()
    evaluated = json.loads((two / "results.json").read_text())["metrics"]
    rows = PuzzleRows(load_puzzle_dataset(puzzles, "test"))
    model = AutoModelForPuzzleSolving.from_pretrained(two)
    by_one = evaluate_puzzles(model, rows.input_ids, rows.labels, rows.puzzle_identifiers, batch_size=3, halt="fixed")
    for name in by_one.keys() - {"puzzles_per_second", "ece", "reliability"}:  # confidences: another order of sums
        assert evaluated[name] == by_one[name], name
    assert evaluated["ece"] == pytest.approx(by_one["ece"], abs=1e-5)


def test_weights_are_trained_with_the_steps_that_a_recipe_overrides(run, arguments, tmp_path):
    run(arguments("run", max_steps=2, config_overrides={"halt_max_steps": 3}))
    assert AutoModelForPuzzleSolving.from_pretrained(tmp_path / "run").config.halt_max_steps == 3
