"""`GoCoderTrainer` trains the Go coder, or another causal language model, on records of Go tasks.

`GoValidationCallback` generates code for held-out prompts between steps, in the first process only, and validates it.
It decodes greedily, token by token, so it works for the Go coder and for any baseline.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from accelerate.utils import extract_model_from_parallel
from transformers import PreTrainedModel, Trainer, TrainerCallback

from ..models.processing_hrm_go_coder import Feedback
from ..registry import has_ability
from ..text.trainer import LM_LOG_FORMAT, CausalLMTrainer
from .arguments import LOSS_WEIGHTS, GoTrainingArguments
from .data.streams import GoStreamBuilder
from .data.trajectories import failed_record
from .evaluation.writer import Writer


Validator = Callable[[Sequence[str]], list[Feedback]]


class GoCoderTrainer(CausalLMTrainer):
    """`CausalLMTrainer` that trains on records of Go tasks, and warms up the refinement loss."""

    arguments_class = GoTrainingArguments
    log_format = LM_LOG_FORMAT | {"go/syntax_rate": "code that parses {:6.1%}", "go/type_rate": "type-checks {:6.1%}"}

    def prepare_model(self, model: Any, args: GoTrainingArguments) -> None:
        """Copy the specified loss weights to the model's config. Raise ValueError if the model does not use them."""
        super().prepare_model(model, args)
        for name in LOSS_WEIGHTS:
            value = getattr(args, name)
            if value is None:
                continue
            if not has_ability(model, "refinement"):
                raise ValueError(f"{name}={value}: {type(model).__name__} has no such loss; omit the option")
            setattr(model.config, name, value)

    def compute_loss(self, model, inputs, *args: Any, **kwargs: Any):
        """Scale the refinement loss of a training step by `refinement_scale`."""
        if model.training and has_ability(self.model, "refinement"):
            scale = refinement_scale(self.state.global_step, self.args.refinement_warmup, self.args.refinement_ramp)
            inputs = {**inputs, "refinement_scale": scale}
        return super().compute_loss(model, inputs, *args, **kwargs)


def refinement_scale(step: int, warmup: int, ramp: int) -> float:
    """Return the factor for the refinement loss: 0 for `warmup` steps, then a linear ramp to 1."""
    if step < warmup:
        return 0.0
    return min(1.0, (step + 1 - warmup) / ramp) if ramp else 1.0


class GoValidationCallback(TrainerCallback):
    """Callback that generates code every `validation_frequency` steps and logs its `validity`.

    The prompts are held out. With a `replay_file`, it also generates code for an equal number of training prompts, new
    ones each time, and appends each failure to the file as a record with the attempt, its feedback, and the solution.

    Args:
        trainer: provides the log and the arguments.
        builder: builds the prompts.
        records: held-out records; the first `validation_prompts` are used.
        validator: checks the code.
        training_records: records for the replay file.
    """

    def __init__(
        self,
        trainer: Trainer,
        builder: GoStreamBuilder,
        records: Sequence[dict[str, Any]],
        validator: Validator,
        training_records: Sequence[dict[str, Any]] = (),
    ):
        self.trainer, self.builder, self.validator = trainer, builder, validator
        self.records = _take(records, 0, trainer.args.validation_prompts)
        self.training_records = training_records

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % args.validation_frequency or not state.is_world_process_zero:
            return
        model = extract_model_from_parallel(model, keep_torch_compile=False)
        with self.trainer.train_metrics.paused(), self.trainer.averaged_weights():
            samples = self._write(model, self.records)
            rates = validity(self.validator(samples))
            if args.replay_file:
                self._replay(model, args, state.global_step)
        should_log = control.should_log
        self.trainer.log(rates)
        control.should_log = should_log  # log() resets this flag, but the trainer still has to log the loss

    def _write(self, model: PreTrainedModel, records: Sequence[dict[str, Any]]) -> list[str]:
        args = self.trainer.args
        # Use a single batch: without a loss to compute, even many rows need little memory.
        return write_code(model, self.builder, records, args.validation_max_new_tokens, args.validation_prompts)

    def _replay(self, model: PreTrainedModel, args, step: int) -> None:
        first = (step // args.validation_frequency - 1) * args.validation_prompts
        records = _take(self.training_records, first, args.validation_prompts)
        samples = self._write(model, records)
        with open(args.replay_file, "a", encoding="utf-8") as file:
            for record, code, feedback in zip(records, samples, self.validator(samples)):
                if feedback.failed:
                    made = failed_record(record, code, feedback, suffix=f"@{step}")
                    file.write(json.dumps(made, ensure_ascii=False) + "\n")


def validity(feedback: Sequence[Feedback]) -> dict[str, float]:
    """Return `go/syntax_rate` of checked samples and, if types are checked, `go/type_rate` of all samples."""
    parses = [one.syntax_ok for one in feedback if one.syntax_ok is not None]
    rates = {"go/syntax_rate": sum(parses) / len(parses)} if parses else {}
    if any(one.types_ok is not None for one in feedback):
        rates["go/type_rate"] = sum(one.types_ok is True for one in feedback) / len(feedback)
    return rates


def write_code(
    model: PreTrainedModel, builder: GoStreamBuilder, records: Sequence[dict[str, Any]], max_new_tokens: int, rows: int
) -> list[str]:
    """Generate plans and code greedily, for `rows` records at a time, and return the complete code."""
    writer = Writer(
        model, builder.tokenizer, rows, builder.max_length, builder.plan_budget, max_new_tokens, progress=False
    )
    was_training = model.training
    model.eval()
    try:
        prompts = [builder.prompt_ids(record) for record in records]
        return writer.planned_code(prompts, [record["code_prefix"] or "" for record in records])[1]
    finally:
        model.train(was_training)


def _take(records: Sequence[dict[str, Any]], first: int, count: int) -> list[dict[str, Any]]:
    """Return `count` records from `first` on, wrapping around, or all records if there are fewer."""
    size = len(records)
    return [records[(first + index) % size] for index in range(min(count, size))]
