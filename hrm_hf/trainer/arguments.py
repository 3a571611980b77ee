"""Training arguments: transformers' own with what all recursive models share.

Each task has a subclass in its `arguments.py`, with its defaults and the options that only it has; an option that only
another kind of model reads does not exist there, so that giving it is an error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import SchedulerType, TrainingArguments


# What no run can be without; nothing here may be infinite.
AT_LEAST_1 = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "global_batch_size",
    "max_nonfinite_steps", "eval_max_steps", "late_start_max_steps",
)  # fmt: skip
AT_LEAST_0 = (
    "learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "puzzle_emb_lr", "puzzle_emb_weight_decay",
    "dataloader_num_workers", "early_stopping_threshold",
)  # fmt: skip
FROM_0_TO_1 = ("lr_min_ratio", "ema_rate", "difficulty_ramp", "late_starts")
BELOW_1 = ("adam_beta1", "adam_beta2")
EVERY = ("save", "eval", "logging")  # NAME_steps, if NAME_strategy is "steps": a number, or a share of the run


@dataclass
class CheckedArguments:
    """Arguments that every script adds to the library's; stands before TrainingArguments or one of TRL's."""

    overwrite_output_dir: bool = field(
        default=False,
        metadata={"help": "A run that starts anew deletes the checkpoints of --output_dir, after its first step."},
    )

    def __post_init__(self):
        self._validate_numbers()
        super().__post_init__()

    def _validate_numbers(self) -> None:
        """Raises ValueError for numbers that no run can have, before anything is built."""
        for name in AT_LEAST_1:
            self._validate_number(name, lambda value: value >= 1, "a number from 1 up")
        for name in AT_LEAST_0:
            self._validate_number(name, lambda value: value >= 0, "a number from 0 up")
        for name in FROM_0_TO_1:
            self._validate_number(name, lambda value: 0 <= value <= 1, "a number in 0..1")
        for name in BELOW_1:
            self._validate_number(name, lambda value: 0 <= value < 1, "a number from 0 to below 1")
        self._validate_number("adam_epsilon", lambda value: value > 0, "a number above 0")
        self._validate_number("num_train_epochs", lambda value: value > 0, "a number above 0")
        wanted = "a number from 1 up, or -1 for whole epochs"
        self._validate_number("max_steps", lambda value: value == -1 or value >= 1, wanted)
        for name in EVERY:
            strategy = getattr(self, f"{name}_strategy")
            if getattr(strategy, "value", strategy) == "steps" and (name != "eval" or self.eval_steps != 0):
                wanted = "a number of steps from 1 up, or a share of the run below 1"
                self._validate_number(f"{name}_steps", lambda value: value > 0, wanted)

    def _validate_number(self, name: str, fits: Any, wanted: str) -> None:
        value = getattr(self, name, None)
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and fits(value)):
            raise ValueError(f"{name}={value!r} is not {wanted}")


@dataclass
class HrmTrainingArguments(CheckedArguments, TrainingArguments):
    """TrainingArguments with the fields and defaults that every recursive model shares."""

    adam_beta2: float = field(default=0.95, metadata={"help": "Second beta of AdamATan2 (or of --optim)."})
    lr_scheduler_type: SchedulerType | str = field(
        default="cosine", metadata={"help": "Schedule after the warm-up. --lr_min_ratio belongs to cosine alone."}
    )
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Hide non-finite losses from the log."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "As in DDP."})
    ddp_broadcast_buffers: bool | None = field(
        default=False, metadata={"help": "As in DDP. Off: the puzzle table is a buffer that each process keeps equal."}
    )
    save_total_limit: int | None = field(default=3, metadata={"help": "Checkpoints kept."})

    global_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Rows of one optimizer step, over all processes and accumulated batches; "
            "sets per_device_train_batch_size, whatever was given."
        },
    )
    adam_atan2: bool = field(default=False, metadata={"help": "Train weights with AdamATan2 instead of --optim."})
    lr_min_ratio: float | None = field(
        default=0.1, metadata={"help": "Cosine decay ends at this share of the learning rate; 1 is constant."}
    )
    ema_rate: float = field(default=0.0, metadata={"help": "Moving average of weights, e.g. 0.999; 0 for none."})
    max_nonfinite_steps: int = field(
        default=20, metadata={"help": "Stop after so many steps in a row with a non-finite loss or gradient."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.global_batch_size is not None:
            shares = self.world_size * self.gradient_accumulation_steps
            if self.global_batch_size % shares:
                accumulated = f" times {self.gradient_accumulation_steps} accumulated batches"
                raise ValueError(
                    f"global_batch_size={self.global_batch_size} cannot be shared by {self.world_size} processes"
                    f"{accumulated if self.gradient_accumulation_steps > 1 else ''}; choose a multiple of "
                    f"{'their product' if self.gradient_accumulation_steps > 1 else 'their number'}"
                )
            self.per_device_train_batch_size = self.global_batch_size // shares

    @property
    def peak_learning_rate(self) -> float:
        """That which the optimizer gets."""
        return self.learning_rate


@dataclass
class CarrylessTrainingArguments(HrmTrainingArguments):
    """For models without a carry: language models and regressors."""

    best_metric: ClassVar[str] = "eval_loss"  # what early stopping and the best model go by, unless told otherwise

    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradient clipping; 0 for none."})
    label_names: list[str] | None = field(
        default_factory=lambda: ["labels"],
        metadata={"help": "What a batch must have for a loss; the library would take shift_labels for one more."},
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after so many evaluations without a better --metric_for_best_model."}
    )
    early_stopping_threshold: float = field(
        default=0.0, metadata={"help": "By how much the metric must improve to count as better."}
    )

    def __post_init__(self):
        if self.early_stopping_patience is not None:
            if self.early_stopping_patience < 1:
                raise ValueError(f"early_stopping_patience={self.early_stopping_patience} must be 1 or more")
            if str(getattr(self.eval_strategy, "value", self.eval_strategy)) == "no":
                raise ValueError(
                    f"early_stopping_patience={self.early_stopping_patience} needs evaluations: set --eval_strategy "
                    "steps and --eval_steps"
                )
            self.load_best_model_at_end = True
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = self.best_metric
        super().__post_init__()


def split_names(values: str | Sequence) -> list:
    """`"a,b"`, `["a,b"]` and `["a", "b"]` are the same list: flags and recipes write it as they like."""
    values = [values] if isinstance(values, str) else values
    return [part.strip() for value in values for part in str(value).split(",") if part.strip()]
