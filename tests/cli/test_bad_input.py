"""Mistakes in puzzles that no other file tests: each message names the input and its value."""

import json

import pytest
import tiny
import torch
from datasets import Dataset

from hrm_hf.hub.manifests import write_manifest
from hrm_hf.puzzles.arguments import PuzzleDataArguments, PuzzleTrainingArguments
from hrm_hf.puzzles.build import ensure_built
from hrm_hf.puzzles.dataset import INFO_FILE, load_puzzle_dataset, load_puzzle_info, save_puzzle_dataset
from hrm_hf.puzzles.npy_layout import read_original
from hrm_hf.puzzles.sudoku import generated_sudoku, sudoku_from_source
from hrm_hf.puzzles.trainer import PuzzleTrainer
from hrm_hf.trainer.recipes import ModelArguments, build_config, parse_overrides, parse_recipe


BOARD, SOLVED = "12..34....4...21", "1234341221434321"
OTHER = SOLVED.translate(str.maketrans("12", "21"))  # a valid grid that contradicts the clues of BOARD


def rows(**columns) -> Dataset:
    values = {"input_ids": [[1] * 16] * 3, "labels": [[2] * 16] * 3, "puzzle_identifiers": [0, 1, 2], **columns}
    return Dataset.from_dict(values)


def trainer(folder, train=None, **arguments) -> PuzzleTrainer:
    options = {"output_dir": str(folder / "run"), "use_cpu": True, "report_to": "none", "max_steps": 1}
    options |= {"per_device_train_batch_size": 2, "save_strategy": "no", "disable_tqdm": True}
    args = PuzzleTrainingArguments(**{**options, **arguments})
    return PuzzleTrainer(tiny.model("hrm"), args, train_dataset=train or rows(), eval_dataset=rows())


def evaluate_nothing(folder):
    one = trainer(folder)
    one.eval_dataset = None
    one.evaluate()


def resume_without_a_carry(folder):
    trainer(folder, save_strategy="steps", save_steps=1).train()
    checkpoint = folder / "run" / "checkpoint-1"
    (checkpoint / "act_state_0.pt").unlink()
    write_manifest(checkpoint)
    trainer(folder, max_steps=2).train("last")


def flags(*words):
    classes = (ModelArguments, PuzzleDataArguments, PuzzleTrainingArguments)
    parse_recipe(classes, ("--output_dir", "x", "--report_to", "none", *words))


def config(overrides="", **arguments):
    build_config(
        ModelArguments(**{"model_type": "hrm_puzzle", "config_overrides": overrides or None, **arguments}), seq_len=16
    )


def boards(folder, **options):
    splits, info = generated_sudoku(4, num_train=4, num_test=2)
    info.options |= options
    save_puzzle_dataset(splits, info, folder / "boards")
    return folder / "boards"


def another_set(folder):
    boards(folder)
    boards(folder, seed=7)


def without_identifiers(folder):
    (boards(folder) / "identifiers.json").unlink()
    load_puzzle_info(folder / "boards")


def info_of(folder, change):
    file = boards(folder) / INFO_FILE
    file.write_text(change(file.read_text()))
    load_puzzle_info(folder / "boards")


def source(folder, name, *lines):
    (folder / name).write_text("\n".join(lines))
    sudoku_from_source(folder / name)


GOOD = ("puzzle,solution", f"{BOARD},{SOLVED}")
CASES = {
    "an identifier above the table": (
        lambda p: tiny.model("hrm")(**tiny.batch(4) | {"puzzle_identifiers": torch.tensor([0, 1, 2, 99])}), "99"
    ),
    "other puzzles": (lambda p: tiny.model("hrm").adapt_puzzle_embeddings(9, "keep"), "puzzle_embeddings='keep'"),
    "an unknown field": (lambda p: config("H_cycle=3"), "'H_cycle'.*'H_cycles'"),
    "an override without a value": (lambda p: config("H_cycles"), "'H_cycles'"),
    "broken overrides": (lambda p: parse_overrides('{"H_cycles": 3'), "config_overrides"),
    "no model": (lambda p: config(model_type=None), "--model_type"),
    "an unknown flag": (lambda p: flags("--puzle_emb_lr", "1"), "'puzle_emb_lr'.*'puzzle_emb_lr'"),
    "a negative rate": (lambda p: trainer(p, learning_rate=-1.0), "learning_rate=-1.0"),
    "an average above 1": (lambda p: trainer(p, ema_rate=1.5), "ema_rate=1.5"),
    "other data": (lambda p: trainer(p, train=rows(input_ids=[[9] * 16] * 3)).train(), "cell 0 is 9"),
    "other data in evaluation": (lambda p: trainer(p).evaluate(rows(input_ids=[[9] * 16] * 3)), "input_ids contain 9"),
    "no data to evaluate": (evaluate_nothing, "eval_dataset"),
    "no carry": (resume_without_a_carry, "number of processes"),
    "no data set": (lambda p: load_puzzle_info(p), INFO_FILE),
    "no data path": (lambda p: ensure_built(None, None), "data_path"),
    "a data set that nothing builds": (lambda p: ensure_built(str(p / "no"), None), "/no is not a puzzle data set"),
    "no identifiers": (without_identifiers, "identifiers.json"),
    "an unknown split": (lambda p: load_puzzle_dataset(boards(p), "validation"), "'validation'"),
    "another data set there": (another_set, "boards already has"),
    "an unknown field of a data set": (
        lambda p: info_of(p, lambda text: json.dumps(json.loads(text) | {"colour": "red"})), "colour"
    ),
    "a broken description": (lambda p: info_of(p, lambda text: text[:30]), INFO_FILE),
    "an original without files": (lambda p: read_original(p), "identifiers.json"),
    "a source that is not there": (lambda p: sudoku_from_source(p / "no.csv"), r"no\.csv"),
    "broken JSON": (
        lambda p: source(p, "a.jsonl", json.dumps({"puzzle": BOARD, "solution": SOLVED}), '{"puzzle": '), "line 2"
    ),
    "an illegal character": (lambda p: source(p, "a.csv", *GOOD, f"x{BOARD[1:]},{SOLVED}"), "line 3.*'x'"),
    "another solution": (lambda p: source(p, "a.csv", *GOOD, f"{BOARD},{OTHER}"), f"line 3.*'{OTHER}'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_reported_with_its_value(name, tmp_path):
    call, message = CASES[name]
    with pytest.raises((ValueError, OSError), match=message):
        call(tmp_path)
