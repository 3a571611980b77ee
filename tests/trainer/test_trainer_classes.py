"""`HrmTrainer(...)` of old code is the trainer of the task; the base knows no task."""

import ast
import inspect
from pathlib import Path

import pytest
import tiny
import tiny_cosmo
import tiny_go
import tiny_lm
from transformers import TrainingArguments

from hrm_hf.cosmology.arguments import CosmoTrainingArguments
from hrm_hf.cosmology.trainer import RegressionTrainer
from hrm_hf.golang.arguments import GoTrainingArguments
from hrm_hf.golang.trainer import GoCoderTrainer
from hrm_hf.puzzles.arguments import PuzzleTrainingArguments
from hrm_hf.puzzles.trainer import PuzzleTrainer
from hrm_hf.text.arguments import LmTrainingArguments
from hrm_hf.text.trainer import CausalLMTrainer
from hrm_hf.trainer import HrmTrainer


KINDS = {
    PuzzleTrainer: (PuzzleTrainingArguments, lambda: tiny.model("trm")),
    CausalLMTrainer: (LmTrainingArguments, lambda: tiny_lm.model("llama")),
    GoCoderTrainer: (GoTrainingArguments, tiny_go.model),
    RegressionTrainer: (CosmoTrainingArguments, tiny_cosmo.model),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_old_name_makes_the_trainer_of_the_arguments_and_says_which(kind, tmp_path):
    arguments, model = KINDS[kind]
    with pytest.warns(DeprecationWarning, match=f"use {kind.__module__}.{kind.__name__}$"):
        trainer = HrmTrainer(model=model(), args=arguments(str(tmp_path), use_cpu=True, report_to="none"))
    assert type(trainer) is kind


def test_arguments_of_no_task_make_no_trainer(tmp_path):
    with pytest.raises(TypeError, match="args is a TrainingArguments; a trainer needs the training arguments of a"):
        HrmTrainer(model=tiny_lm.model("llama"), args=TrainingArguments(str(tmp_path), use_cpu=True))


def test_the_room_of_trainers_imports_no_task():
    folder = Path(inspect.getfile(HrmTrainer)).parent
    tasks = {"puzzles", "text", "golang", "cosmology", "cli", "app", "launch"}
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 2:
                assert node.module.split(".")[0] not in tasks, f"{file.name} imports {node.module}"
