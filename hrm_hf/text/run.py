"""`CausalLMRun`: a run of `training/run_clm.py`."""

import inspect
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, default_data_collator

from ..hub.kinds import LANGUAGE_MODEL
from ..io.files import load_split
from ..registry import has_ability
from ..trainer.plots import plot_lm_training
from ..trainer.run import TrainingRun
from .arguments import AnswerDataArguments, LmDataArguments
from .causal_lm import continue_text, default_block_size, load_causal_lm, load_tokenizer
from .corpus import TextCorpus, load_text_corpus
from .reasoning.build import FILLING, INFO_FILE, load_reasoning_info, validate_vocabulary
from .trainer import CausalLMTrainer


# Options of `LmDataArguments` that also apply to reasoning data, in addition to `AnswerDataArguments`.
REASONING_OPTIONS = ("block_size", "prompt", "prompt_new_tokens", "validation_split_percentage")


class CausalLMRun(TrainingRun):
    """Run that trains a causal LM on text, with `LmDataArguments` and `LmTrainingArguments`."""

    task, kind = "causal-lm", LANGUAGE_MODEL

    def load_data(self) -> None:
        data, weights = self.data_args, self.model_args.model_name_or_path
        is_reasoning = is_reasoning_data(data.train_data)
        if is_reasoning and data.tokenizer_name is None and weights is None:
            data.tokenizer_name = data.train_data[0]
        self.tokenizer = load_tokenizer(data.tokenizer_name, weights)
        if data.block_size is None and weights is not None:
            data.block_size = default_block_size(weights)
        with self.args.main_process_first(desc="reading and packing text"):
            if is_reasoning:
                self.corpus = load_reasoning_corpus(data, self.tokenizer)
            else:
                self.corpus = load_text_corpus(data, self.tokenizer, self.args.seed)
        self.train, self.validation = self.corpus.train, self.corpus.validation

    def load_model(self, quantized) -> PreTrainedModel:
        model = load_causal_lm(self.model_args, self.tokenizer, self.data_args.row_length, self.args.seed, quantized)
        if self.data_args.document_mask and "position_ids" not in inspect.signature(model.forward).parameters:
            raise ValueError(f"document_mask=True: {type(model).__name__} accepts no position_ids; remove this flag")
        self.vocabulary_rows = model.get_input_embeddings().num_embeddings
        return model

    def describe(self) -> str:
        tokens, rows = len(self.tokenizer), self.vocabulary_rows
        padding = f" ({rows - tokens:,} unused)" if rows > tokens else ""
        length = self.corpus.row_length or self.data_args.row_length
        vocabulary = f"vocabulary: {tokens:,} tokens, {rows:,} rows of embeddings{padding}"
        return f"{self.corpus.describe()}\n{vocabulary}; {length:,} tokens per row of data"

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
        counted_by_workers = self.data_args.streaming and args.dataloader_num_workers  # this process sees no bad lines
        return metrics, {
            # This upper bound includes padding and context, and counts the incomplete last step of an epoch as full.
            "tokens": trainer.state.global_step * rows * (self.corpus.row_length or self.data_args.row_length),
            "bad_lines": None if counted_by_workers else self.corpus.bad_lines,
            "data": self.corpus.report(),
            "sample": self._continue_prompt(trainer),
        }

    def _continue_prompt(self, trainer: CausalLMTrainer) -> str | None:
        prompt, length = self.data_args.prompt, self.data_args.prompt_new_tokens
        if not prompt:
            return None
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            print("skipping --prompt: the weights are sharded, so a single process cannot run the model")
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


class MhcMonitorCallback(TrainerCallback):
    """Callback that logs the gains of hyper-connections on a fixed batch whenever the trainer logs.

    `mhc/amax_pre` and `mhc/amax_post` are the largest gains of the attention and feed-forward maps;
    `mhc/amax_composite` is the gain of the product of all maps. The ideal is 1; above 2, signals grow with depth.

    Args:
        trainer: trainer that logs the values; a callback cannot reach all reporters otherwise.
        batch: arguments of the model's forward, such as `input_ids` [B, S]; None uses the first four training rows,
            read separately to keep the order of training rows.
    """

    def __init__(self, trainer: CausalLMTrainer, batch: dict[str, torch.Tensor] | None = None):
        self.trainer, self.batch = trainer, batch

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        if self.batch is None:
            self.batch = dict(train_dataloader.collate_fn(list(islice(iter(train_dataloader.dataset), 4))))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if not control.should_log:
            return
        model = extract_model_from_parallel(model, keep_torch_compile=False)
        inputs = {
            name: value.to(model.device)
            for name, value in self.batch.items()
            if name in ("input_ids", "attention_mask", "position_ids")
        }
        sites = model.get_detailed_mhc_metrics(**inputs)
        if not sites:
            return
        gains = [max(site["forward"], site["backward"]) for site in sites]
        composite = max(sites[-1]["composite_forward"], sites[-1]["composite_backward"])
        parts = {"mhc/amax_pre": max(gains[::2]), "mhc/amax_post": max(gains[1::2])}
        self.trainer.log(parts | {"mhc/amax_composite": composite})
        control.should_log = True  # `log` resets this flag, but Trainer must still log its own values


# ---- reasoning data: rows that already have labels and are not packed ----


def is_reasoning_data(sources: list[str]) -> bool:
    """Check whether all sources are reasoning data sets. Raise ValueError if only some of them are."""
    found = [(Path(source) / INFO_FILE).is_file() for source in sources]
    if any(found) and not all(found):
        text = sources[found.index(False)]
        raise ValueError(f"{text} is not a reasoning data set, but other sources are; train on them separately")
    return any(found)


def load_reasoning_corpus(options: LmDataArguments, tokenizer: PreTrainedTokenizerBase) -> TextCorpus:
    """Load reasoning data. Validation rows are `--eval_split` of `--eval_data` or of the training data.

    Raises:
        ValueError: an option applies only to text, the tokenizer does not match, or a row exceeds block_size.
    """
    usual = LmDataArguments()
    shared = {option.name for option in fields(AnswerDataArguments)}.union(REASONING_OPTIONS)
    for name in {option.name for option in fields(options)} - shared:
        if (value := getattr(options, name)) != getattr(usual, name):
            raise ValueError(f"{name}={value!r}: has no effect on a reasoning data set; remove it")
    for source in options.train_data:
        validate_vocabulary(tokenizer, source)
    corpus = TextCorpus(train=None, validation=None)
    corpus.train = _reasoning_rows(options.train_data, options.train_split, options.max_train_samples, "train", corpus)
    sizes = {source: load_reasoning_info(source).rows for source in options.train_data}
    held_out = options.eval_data or [source for source in sizes if sizes[source].get(options.eval_split, 1)]
    if held_out and options.validation_split_percentage:
        corpus.validation = _reasoning_rows(
            held_out, options.eval_split, options.max_eval_samples, "validation", corpus
        )
    corpus.row_length = max(size["tokens_per_row"] for size in corpus.sizes.values())
    if corpus.row_length > options.row_length:
        raise ValueError(
            f"block_size={options.row_length}: must be >= {corpus.row_length}, the row length of this data set"
        )
    return corpus


def _reasoning_rows(sources: list[str], split: str, most: int | None, name: str, corpus: TextCorpus) -> Dataset:
    parts = [load_split(source, split, info=INFO_FILE).select_columns(["input_ids", "labels"]) for source in sources]
    length = max(len(part[0]["input_ids"]) for part in parts)

    def fill(row: dict[str, list[int]]) -> dict[str, list[int]]:
        return {name: row[name] + [FILLING[name]] * (length - len(row[name])) for name in row}

    rows = concatenate_datasets([part.map(fill) for part in parts])
    rows = (rows if most is None else rows.select(range(min(most, len(rows))))).with_format("torch")
    answers = int(sum((batch["labels"][:, 1:] >= 0).sum() for batch in rows.iter(1000)))
    corpus.sizes[name] = {"rows": len(rows), "tokens_per_row": length, "answers": answers}
    return rows
