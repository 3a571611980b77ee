"""Checkpoints of an earlier version load with equal outputs, and interrupted runs resume with equal losses.

`fixtures/saved_earlier/` has the weights, config and logits of each architecture, and two checkpoints from the middle
of runs with the losses of the complete runs.
"""

import json
import shutil
from pathlib import Path

import every
import numpy as np
import pytest
import tiny
import tiny_lm
import transformers
from safetensors.torch import load_file
from tolerances import assert_copied, assert_equal_but_for_rounding

from hrm_hf.puzzles.dataloader import PuzzleRows
from hrm_hf.puzzles.sudoku import generated_sudoku
from hrm_hf.puzzles.trainer import PuzzleTrainer, PuzzleTrainingArguments


SAVED = Path(__file__).parents[1] / "fixtures" / "saved_earlier"
ARCHITECTURES = sorted(folder.name for folder in SAVED.iterdir() if (folder / "expected.safetensors").exists())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_earlier_checkpoint_loads_with_equal_logits(architecture):
    model = getattr(transformers, every.AUTO_CLASSES[architecture]).from_pretrained(SAVED / architecture).eval()
    assert type(model) is type(every.model(architecture))
    saved = load_file(SAVED / architecture / "model.safetensors")
    assert_copied({name: value for name, value in model.state_dict().items() if name in saved}, saved)
    expected = load_file(SAVED / architecture / "expected.safetensors")["logits"]
    output = model(**every.inputs(architecture))
    # In that version, the logits of regressors also had a column for s_8.
    found = output.reported_means if architecture in every.REGRESSORS else output.logits
    assert_equal_but_for_rounding(found.detach(), expected)


@pytest.mark.parametrize("name", ["checkpoint_trm_puzzle", "checkpoint_hrm_lm"])
def test_earlier_run_resumes_with_equal_losses(name, tmp_path):
    shutil.copytree(SAVED / name, tmp_path / "checkpoint-3")
    fields = {"save_strategy": "no", "ema_rate": 0.9}
    if name == "checkpoint_hrm_lm":
        trainer = tiny_lm.trainer(tmp_path, tiny_lm.model("hrm_lm"), **fields)
    else:
        trainer = _puzzle_trainer(tmp_path, **fields)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # Six training steps amplify the rounding differences of the first one.
    assert losses == pytest.approx(json.loads((SAVED / "losses.json").read_text())[name], rel=1e-3)


def _puzzle_trainer(folder, **fields) -> PuzzleTrainer:
    splits, _ = generated_sudoku(4, num_train=24, num_test=10)
    rows = {split: PuzzleRows(columns) for split, columns in splits.items()}
    for columns in rows.values():
        columns.puzzle_identifiers = np.arange(len(columns)) % tiny.PUZZLES
    args = PuzzleTrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=6, logging_steps=1,
        per_device_train_batch_size=4, learning_rate=1e-3, warmup_steps=3, **fields,
    )  # fmt: skip
    return PuzzleTrainer(tiny.model("trm"), args, train_dataset=rows["train"], eval_dataset=rows["test"])
