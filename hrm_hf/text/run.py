"""`CausalLMRun`: a run of `training/run_clm.py`."""

import inspect
from typing import Any

from transformers import PreTrainedModel, default_data_collator

from ..hub.kinds import LANGUAGE_MODEL
from ..registry import has_ability
from ..trainer.plots import plot_lm_training
from ..trainer.run import TrainingRun
from .callbacks import MhcMonitorCallback
from .causal_lm import continue_text, load_causal_lm, load_tokenizer
from .corpus import load_text_corpus
from .reasoning.corpus import is_reasoning_data, load_reasoning_corpus
from .trainer import CausalLMTrainer


class CausalLMRun(TrainingRun):
    """Trains a causal language model on text; `data_args` is a `LmDataArguments`, `args` a `LmTrainingArguments`."""

    task, kind = "causal-lm", LANGUAGE_MODEL

    def load_data(self) -> None:
        data, weights = self.data_args, self.model_args.model_name_or_path
        is_reasoning = is_reasoning_data(data.train_data)
        if is_reasoning and data.tokenizer_name is None and weights is None:
            data.tokenizer_name = data.train_data[0]
        self.tokenizer = load_tokenizer(data.tokenizer_name, weights)
        with self.args.main_process_first(desc="reading and packing text"):
            if is_reasoning:
                self.corpus = load_reasoning_corpus(data, self.tokenizer)
            else:
                self.corpus = load_text_corpus(data, self.tokenizer, self.args.seed)
        self.train, self.validation = self.corpus.train, self.corpus.validation

    def load_model(self, quantized) -> PreTrainedModel:
        model = load_causal_lm(self.model_args, self.tokenizer, self.data_args.block_size, self.args.seed, quantized)
        if self.data_args.document_mask and "position_ids" not in inspect.signature(model.forward).parameters:
            raise ValueError(f"--document_mask: {type(model).__name__} takes no position_ids; leave the flag out")
        return model

    def describe(self) -> str:
        return self.corpus.describe()

    def make_trainer(self, model: Any) -> CausalLMTrainer:
        trainer = CausalLMTrainer(
            model,
            self.args,
            self.corpus.eval_bytes_per_token,
            train_dataset=self.train,
            eval_dataset=self.validation,
            data_collator=default_data_collator,
            processing_class=self.tokenizer,
        )
        if has_ability(model, "hyper_connections"):
            trainer.add_callback(MhcMonitorCallback(trainer))
        return trainer

    def results(self, trainer: CausalLMTrainer, metrics: dict[str, Any]):
        args = self.args
        rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        counted_elsewhere = self.data_args.streaming and args.dataloader_num_workers  # by processes that load a stream
        return metrics, {
            # Of all steps, padding and context included; the last step of an epoch may be a little smaller.
            "tokens": trainer.state.global_step * rows * (self.corpus.row_length or self.data_args.block_size),
            "bad_lines": None if counted_elsewhere else self.corpus.bad_lines,
            "data": self.corpus.report(),
            "sample": self._continue_prompt(trainer),
        }

    def _continue_prompt(self, trainer: CausalLMTrainer) -> str | None:
        prompt, length = self.data_args.prompt, self.data_args.prompt_new_tokens
        if not prompt:
            return None
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            print("no continuation of --prompt: the weights are sharded, and one process alone cannot run the model")
            return None
        with trainer.averaged_weights():
            text = continue_text(trainer.model, self.tokenizer, prompt, length, self.args.seed)
        print(text)
        return text

    def plot(self, trainer: CausalLMTrainer, metrics: dict[str, Any]) -> None:
        plot_lm_training(trainer.state.log_history, self.out / "training.png")

    def card_entry(self, metrics: dict[str, Any]) -> dict[str, Any]:
        if self.data_args.eval_data or self.corpus.row_length:
            data, split = (self.data_args.eval_data or self.data_args.train_data)[0], self.data_args.eval_split
        else:
            data, split = self.data_args.train_data[0], f"last {self.data_args.validation_split_percentage:g} %"
        return {"metrics": metrics, "dataset": data, "split": split, **self.parameters}
