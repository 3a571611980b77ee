"""Numbers out of range are rejected with name, value and allowed range, before anything is built."""

import math

import pytest

from hrm_hf.cosmology.arguments import CosmoDataArguments
from hrm_hf.cosmology.trainer import CosmoTrainingArguments
from hrm_hf.golang.arguments import GoDataArguments
from hrm_hf.golang.trainer import GoTrainingArguments
from hrm_hf.puzzles.arguments import PuzzleDataArguments
from hrm_hf.puzzles.trainer import PuzzleTrainingArguments
from hrm_hf.text.arguments import AnswerDataArguments, LmDataArguments, LmTrainingArguments
from hrm_hf.text.trl_arguments import SftArguments


EVERY = (PuzzleTrainingArguments, CosmoTrainingArguments, GoTrainingArguments, LmTrainingArguments, SftArguments)
REFUSED = [
    ("per_device_train_batch_size", 0), ("per_device_train_batch_size", -4), ("per_device_eval_batch_size", 0),
    ("gradient_accumulation_steps", 0), ("max_steps", -5), ("max_steps", 0), ("num_train_epochs", -1.0),
    ("num_train_epochs", math.inf), ("learning_rate", -1e-3), ("learning_rate", math.nan), ("learning_rate", math.inf),
    ("weight_decay", -0.1), ("weight_decay", math.nan), ("max_grad_norm", -1.0), ("warmup_steps", -1),
    ("adam_beta1", 1.0), ("adam_beta2", math.nan), ("adam_epsilon", 0.0), ("save_steps", 0), ("save_steps", -1),
    ("logging_steps", 0), ("dataloader_num_workers", -1),
]  # fmt: skip
OURS = [
    ("global_batch_size", 0), ("ema_rate", 1.5), ("ema_rate", math.nan), ("lr_min_ratio", -0.1), ("lr_min_ratio", 2.0),
    ("max_nonfinite_steps", 0), ("puzzle_emb_lr", -1.0), ("puzzle_emb_weight_decay", math.nan), ("eval_max_steps", 0),
    ("max_minutes", 0.0),
]  # fmt: skip


def made(kind, folder, **options):
    return kind(output_dir=str(folder / "run"), use_cpu=True, report_to="none", save_strategy="steps", **options)


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_invalid_numbers_are_rejected_by_every_script(kind, name, value, tmp_path):
    with pytest.raises(ValueError, match=rf"^{name}={value!r}: must be ") as error:
        made(kind, tmp_path, **{name: value})
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "value"), OURS)
def test_invalid_numbers_of_our_own_options_are_rejected(name, value, tmp_path):
    with pytest.raises(ValueError, match=rf"^{name}={value!r}: must be "):
        made(PuzzleTrainingArguments, tmp_path, **{name: value})


@pytest.mark.parametrize("value", [0, -3])
@pytest.mark.parametrize("name", ["max_train_samples", "max_eval_samples", "max_length"])
def test_training_on_no_rows_or_tokens_is_rejected(name, value):
    kinds = (PuzzleDataArguments, CosmoDataArguments, GoDataArguments, LmDataArguments, AnswerDataArguments)
    for kind in (kind for kind in (*kinds, SftArguments) if hasattr(kind, name)):
        with pytest.raises(ValueError, match=rf"^{name}={value}: must be >= [12]$"):
            kind(**{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": -1}, {"learning_rate": 0.0}, {"save_steps": 0.25}, {"warmup_steps": 0.1}, {"logging_steps": 0.5},
        {"eval_strategy": "steps", "eval_steps": 0}, {"global_batch_size": 8}, {"num_train_epochs": 0.5},
        {"max_grad_norm": 0.0}, {"logging_strategy": "no", "logging_steps": 0},
    ],
    ids=str,
)  # fmt: skip
def test_valid_numbers_are_accepted(options, tmp_path):
    made(LmTrainingArguments, tmp_path, **options)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # of TRL
@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", ["bf16", "bf16_full_eval"])
def test_bfloat16_without_a_gpu_names_the_option_that_trains_in_float32(kind, name, tmp_path, monkeypatch):
    monkeypatch.setattr("hrm_hf.trainer.recipes.is_torch_bf16_gpu_available", lambda: False)
    options = {"output_dir": str(tmp_path), "report_to": "none"}
    given = {"bf16": False, name: True} if kind is not SftArguments or name != "bf16" else {}  # TRL's default
    with pytest.raises(ValueError, match=rf"^{name}=True: .*--{name} false.*--use_cpu true$"):
        kind(**options, **given)
    assert getattr(kind(**options, use_cpu=True, **{name: True}), name) is True
