"""Training run for `training/run_go_coder.py`."""

import inspect
from collections import Counter
from typing import Any

from transformers import PreTrainedModel

from ..models.configuration_hrm_go_coder import HrmGoCoderConfig
from ..models.processing_hrm_go_coder import DECISIONS
from ..text.causal_lm import load_causal_lm, load_tokenizer
from ..text.run import CausalLMRun
from .data.streams import GoCoderCollator, GoStreamBuilder, load_go_streams
from .trainer import GoCoderTrainer, GoValidationCallback
from .validators.go_validators import best_validator


class GoCoderRun(CausalLMRun):
    """Training run on records of Go tasks, configured by `GoDataArguments` and `GoTrainingArguments`."""

    task = "go-coder"

    def validate_options(self) -> None:
        if not self.data_args.train_data:
            raise ValueError("train_data=[]: no records; pass --train_data with files from `hrm-hf data go`")
        if self.args.replay_file and not self.data_args.eval_data:
            raise ValueError(f"replay_file={self.args.replay_file!r}: needs held-out records; pass --eval_data")

    def load_data(self) -> None:
        data_args = self.data_args
        self.tokenizer = load_tokenizer(data_args.tokenizer_name, self.model_args.model_name_or_path)
        self.builder = GoStreamBuilder(self.tokenizer, data_args.max_length, **data_args.budgets())
        options = {
            "on_bad_line": data_args.on_bad_line,
            "num_workers": data_args.preprocessing_num_workers,
            "cache_dir": data_args.data_cache_dir,
        }
        with self.args.main_process_first(desc="reading and tokenizing records"):
            train = options | {"plain": self.args.refinement_warmup > 0, "max_records": data_args.max_train_samples}
            self.train = load_go_streams(data_args.train_data, self.builder, training=True, **train)
            if data_args.eval_data:
                held_out = options | {"max_records": data_args.max_eval_samples}
                self.validation = load_go_streams(data_args.eval_data, self.builder, training=False, **held_out)

    def skip_evaluation(self) -> None:
        super().skip_evaluation()
        self.args.validation_frequency = 0  # validation needs held-out prompts

    def load_model(self, quantized) -> PreTrainedModel:
        model = load_causal_lm(self.model_args, self.tokenizer, self.data_args.max_length, self.args.seed, quantized)
        if isinstance(model.config, HrmGoCoderConfig):
            model.config.update(self.data_args.budgets())  # generation must truncate prompts as training does
            if self.args.balance_decisions:
                model.config.refinement_class_weights = self._class_weights()
        elif self.args.balance_decisions:
            raise ValueError(f"balance_decisions=True: {type(model).__name__} has no refinement head; omit the option")
        return model

    def _class_weights(self) -> list[float]:
        """Return class weights that balance the decisions in the training data. Absent classes get weight 1."""
        counts = Counter(label for labels in self.train.rows["decision_labels"] for label in labels)
        total, kinds = counts.total(), len(counts)
        return [total / (kinds * counts[kind]) if counts[kind] else 1.0 for kind in range(len(DECISIONS))]

    def describe(self) -> str:
        validation = self.validation.describe() if self.validation else "none"
        return f"train: {self.train.describe()}\nvalidation: {validation}"

    def make_trainer(self, model: Any) -> GoCoderTrainer:
        takes_decisions = "decision_positions" in inspect.signature(model.forward).parameters
        trainer = GoCoderTrainer(
            model,
            self.args,
            train_dataset=self.train.rows,
            eval_dataset=self.validation.rows if self.validation else None,
            data_collator=GoCoderCollator(self.tokenizer.pad_token_id, takes_decisions, self.args.refinement_warmup),
            processing_class=self.tokenizer,
        )
        if self.args.validation_frequency:
            trainer.add_callback(self._validation_callback(trainer))
        return trainer

    def _validation_callback(self, trainer: GoCoderTrainer) -> GoValidationCallback:
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError(
                f"validation_frequency={self.args.validation_frequency}: the weights are sharded, so one "
                "process cannot generate code; train with DDP, or set --validation_frequency 0"
            )
        validator = best_validator(self.args.validator)
        return GoValidationCallback(trainer, self.builder, self.validation.records, validator, self.train.records)

    def results(self, trainer: GoCoderTrainer, metrics: dict[str, Any]):
        validation = self.validation.counts if self.validation else None
        return metrics, {"data": {"train": self.train.counts, "validation": validation}}

    def card_entry(self, metrics: dict[str, Any]) -> dict[str, Any]:
        data = self.data_args.eval_data[0]
        return {"metrics": metrics, "dataset": data, "split": "validation", **self.parameters}
