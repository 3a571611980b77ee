"""What version 0.1.0 saved, before the package got its rooms, still loads, by package and by remote code, and resumes.

`fixtures/saved_earlier/` has a checkpoint of each architecture with its code of then and the logits that it gave, and
two checkpoints of runs in the middle with the losses of the whole runs.
"""

import json
import shutil
from pathlib import Path

import clean_process
import every
import numpy as np
import pytest
import tiny
import tiny_lm
import transformers
from safetensors.torch import load_file, save_file
from tolerances import assert_copied, assert_equal_but_for_rounding

from hrm_hf.puzzles.arguments import PuzzleTrainingArguments
from hrm_hf.puzzles.dataloader import PuzzleRows
from hrm_hf.puzzles.sudoku import generated_sudoku
from hrm_hf.puzzles.trainer import PuzzleTrainer


SAVED = Path(__file__).parents[1] / "fixtures" / "saved_earlier"
# Those of then: an architecture that came later has nothing to be loaded.
ARCHITECTURES = sorted(folder.name for folder in SAVED.iterdir() if (folder / "expected.safetensors").exists())
# Runs where `import hrm_hf` fails; argv: folder of checkpoints, names, where to write the logits. Inputs lie beside.
WITHOUT_THE_PACKAGE = """
import sys
from pathlib import Path
import torch, transformers
from safetensors.torch import load_file, save_file

saved, out = Path(sys.argv[1]), Path(sys.argv[2])
for pair in sys.argv[3:]:
    name, auto_class = pair.split("=")
    model = getattr(transformers, auto_class).from_pretrained(saved / name, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules"), type(model)
    with torch.no_grad():
        logits = model(**load_file(out / f"{name}_inputs.safetensors")).logits
    save_file({"logits": logits.contiguous()}, out / f"{name}.safetensors")
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_checkpoint_of_an_earlier_version_loads(architecture):
    model = getattr(transformers, every.AUTO_CLASSES[architecture]).from_pretrained(SAVED / architecture).eval()
    assert type(model) is type(every.model(architecture))
    saved = load_file(SAVED / architecture / "model.safetensors")
    assert_copied({name: value for name, value in model.state_dict().items() if name in saved}, saved)
    expected = load_file(SAVED / architecture / "expected.safetensors")["logits"]
    output = model(**every.inputs(architecture))
    # Then logits of regressors had a column for s_8 too.
    found = output.reported_means if architecture in every.REGRESSORS else output.logits
    assert_equal_but_for_rounding(found.detach(), expected)


def test_checkpoints_of_an_earlier_version_load_by_their_own_code(tmp_path):
    for name in ARCHITECTURES:
        save_file(every.inputs(name), tmp_path / f"{name}_inputs.safetensors")
    pairs = (f"{name}={every.AUTO_CLASSES[name]}" for name in ARCHITECTURES)
    finished = clean_process.run(WITHOUT_THE_PACKAGE, SAVED, tmp_path, *pairs, cwd=tmp_path, home=tmp_path / "hf_home")
    assert finished.returncode == 0, finished.stderr[-3000:]
    for name in ARCHITECTURES:
        found = load_file(tmp_path / f"{name}.safetensors")["logits"]
        assert_equal_but_for_rounding(found, load_file(SAVED / name / "expected.safetensors")["logits"], msg=name)


@pytest.mark.parametrize("name", ["checkpoint_trm_puzzle", "checkpoint_hrm_lm"])
def test_a_run_of_an_earlier_version_goes_on_with_the_same_losses(name, tmp_path):
    shutil.copytree(SAVED / name, tmp_path / "checkpoint-3")
    fields = {"save_strategy": "no", "ema_rate": 0.9}
    if name == "checkpoint_hrm_lm":
        trainer = tiny_lm.trainer(tmp_path, tiny_lm.model("hrm_lm"), **fields)
    else:
        trainer = _puzzle_trainer(tmp_path, **fields)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # Six steps of training enlarge what another order of sums makes of the first of them.
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
