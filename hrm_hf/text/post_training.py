"""SFT, DPO and GRPO with TRL for the causal language models in this package.

TRL's trainers run on our models without changes. This module fixes cases that they would get wrong:

- `SftTrainer` trains on the model's loss, which includes the terms for halting, deep supervision and plans. TRL
  computes the likelihood of the tokens itself and ignores that loss.
- `DpoTrainer` and `GrpoTrainer` compute the likelihood of a text as in inference. In training mode, `hrm_lm` explores
  random depths in each call; here it halts as in inference. Halting and refinement heads get no loss and are frozen.
- GRPO trains the Go coder's plans and code. `generate` hides the plan, but the likelihood of the code depends on it.
  Completions are therefore plain continuations of the stream, up to </CODE>.
- All trainers save complete checkpoints, stop on signals and write our model card, like `HrmTrainer`. They do not have
  its optimizers and weight averages.

Sources: Rafailov et al. 2023, arXiv 2305.18290 (DPO); Shao et al. 2024, arXiv 2402.03300 (GRPO).
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import unwrap_peft_model
from trl import DPOTrainer, GRPOConfig, GRPOTrainer, SFTTrainer

from ..hub.cards import CARD_FILE, new_card_text
from ..hub.kinds import LANGUAGE_MODEL
from ..io.usage import counted
from ..models.early_exit import EXIT_CRITERIA
from ..models.generation_hrm_go_coder import END_CODE, GoCoderGenerationMixin
from ..models.processing_hrm_go_coder import is_go_tokenizer
from ..registry import ARCHITECTURES, has_ability
from ..trainer.adapters import modules_to_save
from ..trainer.plots import plot_reward_training
from ..trainer.preemption import PreemptionCallback
from ..trainer.recipes import ModelArguments, save_recipe
from ..trainer.run import TrainingRun
from ..trainer.saving import CompleteCheckpoints
from .answers import is_conversation, load_answers
from .causal_lm import load_causal_lm, load_tokenizer


REFERENCE_ADAPTER = "ref"  # name of TRL's copy of the adapter that DPO starts from


class PostTraining(CompleteCheckpoints):
    """Base class of the trainers below, which combine it with a TRL trainer."""

    def __init__(self, model: PreTrainedModel | PeftModel, *args: Any, **kwargs: Any):
        self.cache_at_inference = model.config.use_cache
        trained = [(parameter, parameter.dtype) for parameter in model.parameters() if parameter.requires_grad]
        super().__init__(model, *args, **kwargs)
        for parameter, dtype in trained:  # undo TRL's cast to bfloat16 for adapters and heads of quantized models
            parameter.data = parameter.data.to(dtype)
        self.preemption = PreemptionCallback()
        self.add_callback(self.preemption)

    def create_model_card(
        self, license: str | None = None, tags: str | list[str] | None = None, **kwargs: Any
    ) -> None:
        """Write our card when the final model is saved, instead of TRL's card at every checkpoint."""
        if type(self.model.config) not in ARCHITECTURES:
            super(CompleteCheckpoints, self).create_model_card(tags=tags, **kwargs)
        elif Path(self.args.output_dir, "config.json").exists():  # an adapter is saved without config.json
            super().create_model_card(license=license, tags=tags)


class SftTrainer(PostTraining, SFTTrainer):
    """SFT trainer that uses the model's own loss and logs its terms, or TRL's loss for `loss_type="dft"`."""

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch=None):
        if self.args.loss_type != "nll" or type(self.model.config) not in ARCHITECTURES:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super(SFTTrainer, self).compute_loss(
            model, {**inputs, "use_cache": False}, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if terms := {name: value.detach().float() for name, value in outputs.items() if name.endswith("_loss")}:
            # The model divides by the token count of the complete step, so a logged term is a sum over micro-batches.
            parts = self.current_gradient_accumulation_steps if num_items_in_batch is not None else 1
            shared = num_items_in_batch is not None and self.args.average_tokens_across_devices
            values = self.accelerator.reduce(torch.stack([*terms.values()]), "sum" if shared else "mean")
            logged = self._metrics["train" if self.model.training else "eval"]
            for name, value in zip(terms, values.tolist()):
                logged[name].append(value * parts)
        return (loss, outputs) if return_outputs else loss


class DpoTrainer(PostTraining, DPOTrainer):
    """DPO trainer that computes likelihoods as in inference."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        _use_inference_likelihoods(self)


class GrpoTrainer(PostTraining, GRPOTrainer):
    """GRPO trainer that scores exactly the sampled tokens, which for the Go coder include its plan."""

    def __init__(self, model: PreTrainedModel | PeftModel, *args: Any, **kwargs: Any):
        inner = unwrap_peft_model(model)
        self.writes_streams = isinstance(inner, GoCoderGenerationMixin) and inner.config.tagged
        ends = inner.generation_config.eos_token_id
        if self.writes_streams:  # stop at </CODE>, before the model writes a validator's verdict
            inner.generation_config.eos_token_id = [*([ends] if isinstance(ends, int) else ends), END_CODE]
        try:
            super().__init__(model, *args, **kwargs)
        finally:
            inner.generation_config.eos_token_id = ends
        _use_inference_likelihoods(self)

    def _prepare_inputs(self, inputs):
        """Generate completions. Go coders write their plan into the completion instead of hiding it."""
        with _plain_continuations(unwrap_peft_model(self.model)) if self.writes_streams else contextlib.nullcontext():
            return super()._prepare_inputs(inputs)


def _use_inference_likelihoods(trainer: DpoTrainer | GrpoTrainer) -> None:
    """Make a trainer compute likelihoods as in inference, and freeze the heads that receive no loss.

    Raises:
        ValueError: the exit criterion compares output distributions, which TRL does not compute at every segment.
    """
    model = unwrap_peft_model(trainer.model)
    if has_ability(model, "recurrent_depth") and EXIT_CRITERIA[model.config.exit_criterion].of_distributions:
        raise ValueError(
            f"exit_criterion={model.config.exit_criterion!r}: requires distributions at every segment, which TRL "
            "does not compute; use another criterion, e.g. --config_overrides exit_criterion=q"
        )
    model.base_model.register_forward_pre_hook(_as_in_inference)
    if trainer.ref_model is not None:
        reference = unwrap_peft_model(trainer.accelerator.unwrap_model(trainer.ref_model))
        reference.base_model.register_forward_pre_hook(_as_in_inference)
    unused = set(modules_to_save(model))
    for name, parameter in trainer.model.named_parameters():
        if not unused.isdisjoint(name.split(".")):
            parameter.requires_grad_(False)


def _as_in_inference(base_model: torch.nn.Module, args: tuple) -> None:
    """Turn off the base model's training mode before each call, because trainers enable it at every step.

    Submodules stay in training mode: TRL has an option for dropout, and activation checkpointing needs that mode.
    """
    base_model.training = False


@contextlib.contextmanager
def _plain_continuations(model: PreTrainedModel) -> Iterator[None]:
    """Disable the hidden plan of `model.generate` during a `with` block."""
    model.generate = functools.partial(model.generate, plan_first=False)
    try:
        yield
    finally:
        del model.generate


# ---- runs ----


class PostTrainingRun(TrainingRun):
    """Training run on prompts and answers. `data_args` is `AnswerDataArguments`, `args` a TRL config."""

    kind = LANGUAGE_MODEL
    trainer_class: type[PostTraining]

    def validate_options(self) -> None:
        _validate_effects(self.task, self.model_args, self.args, self.tuning_args.adapts)
        if self.task != "sft" and self.model_args.model_name_or_path is None:
            raise ValueError(f"model_name_or_path=None: {self.task} needs a trained model; pass --model_name_or_path")

    def load_data(self) -> None:
        data_args = self.data_args
        self.tokenizer = load_tokenizer(data_args.tokenizer_name, self.model_args.model_name_or_path)
        read = functools.partial(load_answers, kind=self.task, cache_dir=data_args.data_cache_dir)
        with self.args.main_process_first(desc="reading rows"):
            self.train = read(data_args.train_data, split=data_args.train_split, limit=data_args.max_train_samples)
            if data_args.eval_data:
                most = data_args.max_eval_samples
                self.validation = read(data_args.eval_data, split=data_args.eval_split, limit=most)
        _validate_text(self.task, self.train, self.tokenizer, self.args)

    def load_model(self, quantized) -> PreTrainedModel:
        length = (self.args.max_length or 1) if self.model_args.model_name_or_path is None else 1
        model = load_causal_lm(self.model_args, self.tokenizer, length, self.args.seed, quantized)
        _validate_positions(self.task, model, self.tokenizer, self.train, self.args)
        return model

    def describe(self) -> str:
        held_out = len(self.validation) if self.validation else 0
        return f"{self.task}: {counted(len(self.train), 'row')} to train on, {held_out} to evaluate on"

    def save_options(self) -> None:
        """Save the options in recipe.yaml, except a derived option that GRPOConfig would reject in the next run."""
        model_args, data_args, args, *others = self.options
        if isinstance(args, GRPOConfig):
            args = copy.copy(args)
            # GRPOConfig derives this from steps_per_generation, but rejects a recipe that sets both.
            args.generation_batch_size = None
        save_recipe(self.out / "recipe.yaml", model_args, data_args, args, *others)

    def make_trainer(self, model: PreTrainedModel | PeftModel) -> PostTraining:
        data = {"train_dataset": self.train, "eval_dataset": self.validation, "processing_class": self.tokenizer}
        trainer = self.trainer_class(model=model, args=self.args, **data, **self.trainer_options())
        for name in ("train", "eval"):  # fail if TRL dropped all rows, because none has a target
            rows, kept = data[f"{name}_dataset"], getattr(trainer, f"{name}_dataset")
            if rows is not None and not len(kept):
                raise ValueError(
                    f"max_length={self.args.max_length}: the prompts in all {len(rows)} rows of {name}_data are at "
                    "least this long, so no answer remains; raise it, or shorten the prompts"
                )
        return trainer

    def trainer_options(self) -> dict[str, Any]:
        """Return extra arguments for this task's trainer."""
        return {}

    def before_saving(self, trainer: PostTraining) -> None:
        """Evaluate, and only then delete the reference adapter, because evaluation needs it."""
        self.metrics = super().evaluate(trainer)
        if isinstance(trainer.model, PeftModel) and REFERENCE_ADAPTER in trainer.model.peft_config:
            trainer.model.delete_adapter(REFERENCE_ADAPTER)

    def evaluate(self, trainer: PostTraining) -> dict[str, Any]:
        return self.metrics

    def results(self, trainer: PostTraining, metrics: dict[str, Any]):
        last = next((entry for entry in reversed(trainer.state.log_history) if "loss" in entry), None)
        return metrics, {"rows": len(self.train), "last_steps": last}

    def record(self, metrics: dict[str, Any]) -> None:
        super().record(metrics)
        if not (self.out / CARD_FILE).exists():
            text = new_card_text(self.out, self.parameters["parameters"])
            (self.out / CARD_FILE).write_text(text, encoding="utf-8")

    def card_entry(self, metrics: dict[str, Any]) -> dict[str, Any]:
        data, split = self.data_args.eval_data[0], self.data_args.eval_split
        return {"metrics": metrics, "dataset": data, "split": split, **self.parameters}


class SftRun(PostTrainingRun):
    """A run of `training/run_sft.py`."""

    task, trainer_class = "sft", SftTrainer


class DpoRun(PostTrainingRun):
    """A run of `training/run_dpo.py`."""

    task, trainer_class = "dpo", DpoTrainer

    def trainer_options(self) -> dict[str, Any]:
        """Load the starting weights again as the reference model. With an adapter, TRL needs no copy."""
        if self.tuning_args.adapts:
            return {"ref_model": None}
        return {"ref_model": load_causal_lm(self.model_args, self.tokenizer, 1, self.args.seed)}


class GrpoRun(PostTrainingRun):
    """A run of `training/run_grpo.py`.

    Args:
        make_rewards: creates reward functions from their names (field `reward` of the last options) and a tokenizer.
        options: options of the run, as for `TrainingRun`.
    """

    task, trainer_class = "grpo", GrpoTrainer

    def __init__(self, make_rewards: Callable[[list[str], PreTrainedTokenizerBase], list], *options: Any):
        super().__init__(*options)
        self.make_rewards = make_rewards

    def trainer_options(self) -> dict[str, Any]:
        return {"reward_funcs": self.make_rewards(self.options[-1].reward, self.tokenizer)}

    def plot(self, trainer: PostTraining, metrics: dict[str, Any]) -> None:
        plot_reward_training(trainer.state.log_history, self.out / "training.png")


def _validate_effects(kind: str, model_args: ModelArguments, args: TrainingArguments, adapts: bool) -> None:
    """Reject TRL options that have no effect with our trainers."""
    if args.model_init_kwargs:
        raise ValueError(
            f"model_init_kwargs={args.model_init_kwargs}: has no effect; use --config_overrides, "
            "--attn_implementation or --load_in"
        )
    if args.label_smoothing_factor:
        instead = {"dpo": "use --label_smoothing", "grpo": "remove it"}
        raise ValueError(
            f"label_smoothing_factor={args.label_smoothing_factor}: has no effect on the loss; "
            + instead.get(kind, "use --config_overrides label_smoothing=... if the model has this field")
        )
    if kind == "grpo" and args.beta and model_args.config_overrides and not adapts:
        raise ValueError(
            f"beta={args.beta}: TRL loads the reference model without config_overrides; save a checkpoint with these "
            "fields, train an adapter (--lora_rank), or pass --beta 0"
        )


def _validate_text(kind: str, rows: Dataset, tokenizer: PreTrainedTokenizerBase, args: TrainingArguments) -> None:
    """Reject messages unless the chat template ends answers with the run's EOS token."""
    if not is_conversation(rows):
        return
    if tokenizer.chat_template is None:
        raise ValueError("the rows are messages, but the tokenizer has no chat template; use strings instead")
    if kind == "grpo":
        return
    if is_go_tokenizer(tokenizer):
        raise ValueError(
            "the rows are messages without a plan, but the Go coder writes a plan before the code; use prompts "
            '"<PROBLEM>...</PROBLEM><PLAN>" and answers "...</PLAN><CODE>...</CODE>", or train with run_go_coder.py'
        )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    if kind == "sft" and (end := args.eos_token or tokenizer.eos_token) not in text:
        raise ValueError(
            f"the chat template ends an answer with {text[-12:]!r}, not with {end!r}, so the model would never learn "
            "to stop; set --eos_token to the token that ends an answer"
        )


def _validate_positions(
    kind: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Dataset, args: TrainingArguments
) -> None:
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is None:
        return
    if kind != "grpo":
        if args.max_length is not None and args.max_length > limit:
            raise ValueError(f"max_length={args.max_length}: the model has only {limit} positions; lower it")
        return
    prompts = rows["prompt"]
    if is_conversation(rows):
        prompts = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in prompts]
    longest = max(len(ids) for ids in tokenizer(list(prompts))["input_ids"])
    if longest + args.max_completion_length > limit:
        raise ValueError(
            f"max_completion_length={args.max_completion_length}: with the longest prompt ({longest} tokens) it "
            f"exceeds the model's {limit} positions; lower it, or drop long prompts"
        )
