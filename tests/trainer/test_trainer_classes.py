"""Trainers reject arguments that are not those of their task. lint-imports checks that the base imports no task."""

import pytest
import tiny_lm
from transformers import TrainingArguments

from hrm_hf.text.trainer import CausalLMTrainer


def test_arguments_of_another_class_are_rejected(tmp_path):
    with pytest.raises(TypeError, match=r" TrainingArguments.*LmTrainingArguments"):
        CausalLMTrainer(model=tiny_lm.model("llama"), args=TrainingArguments(str(tmp_path), use_cpu=True))
