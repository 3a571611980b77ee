"""Training arguments: transformers' own with what recursive models add, for puzzles, language models and regressors.

`HrmTrainingArguments` holds what all share. Each subclass states its defaults and the options that only it has; an
option that only another kind of model reads does not exist here, so that giving it is an error.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import SchedulerType, TrainingArguments


# Groups of parameters with learning rates of their own, and what they are multiplied by without --lr_multipliers.
LR_MULTIPLIERS = {"planner": 1.2, "generator": 0.8, "refinement": 1.0, "shared": 1.0}


# What no run can be without; nothing here may be infinite.
AT_LEAST_1 = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "global_batch_size",
    "max_nonfinite_steps", "eval_max_steps",
)  # fmt: skip
AT_LEAST_0 = (
    "learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "puzzle_emb_lr", "puzzle_emb_weight_decay",
    "dataloader_num_workers", "early_stopping_threshold",
)  # fmt: skip
FROM_0_TO_1 = ("lr_min_ratio", "ema_rate")
BELOW_1 = ("adam_beta1", "adam_beta2")
EVERY = ("save", "eval", "logging")  # NAME_steps, if NAME_strategy is "steps": a number, or a share of the run


@dataclass
class CheckedArguments:
    """What every script of the package adds to the library's arguments; before TrainingArguments or one of TRL's."""

    overwrite_output_dir: bool = field(
        default=False,
        metadata={"help": "A run that starts anew deletes the checkpoints of --output_dir, after its first step."},
    )

    def __post_init__(self):
        self._check_numbers()
        super().__post_init__()

    def _check_numbers(self) -> None:
        """Raises ValueError for numbers that no run can have, before anything is built."""
        for name in AT_LEAST_1:
            self._require(name, lambda value: value >= 1, "a number from 1 up")
        for name in AT_LEAST_0:
            self._require(name, lambda value: value >= 0, "a number from 0 up")
        for name in FROM_0_TO_1:
            self._require(name, lambda value: 0 <= value <= 1, "a number in 0..1")
        for name in BELOW_1:
            self._require(name, lambda value: 0 <= value < 1, "a number from 0 to below 1")
        self._require("adam_epsilon", lambda value: value > 0, "a number above 0")
        self._require("num_train_epochs", lambda value: value > 0, "a number above 0")
        wanted = "a number from 1 up, or -1 for whole epochs"
        self._require("max_steps", lambda value: value == -1 or value >= 1, wanted)
        for name in EVERY:
            strategy = getattr(self, f"{name}_strategy")
            if getattr(strategy, "value", strategy) == "steps" and (name != "eval" or self.eval_steps != 0):
                wanted = "a number of steps from 1 up, or a share of the run below 1"
                self._require(f"{name}_steps", lambda value: value > 0, wanted)

    def _require(self, name: str, fits: Any, wanted: str) -> None:
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
class PuzzleTrainingArguments(HrmTrainingArguments):
    """For models with a carry. The defaults are those of the original HRM's recipes."""

    learning_rate: float = field(default=1e-4, metadata={"help": "Base learning rate of the weights."})
    weight_decay: float = field(default=1.0, metadata={"help": "Weight decay, applied to every weight."})
    warmup_steps: float = field(default=2000, metadata={"help": "Steps of linear warm-up."})
    max_grad_norm: float = field(default=0.0, metadata={"help": "Gradient clipping; 0 for none."})
    adam_atan2: bool = field(default=True, metadata={"help": "Train weights with AdamATan2; False takes --optim."})
    lr_min_ratio: float | None = field(
        default=1.0, metadata={"help": "Cosine decay ends at this share of the learning rate; 1 is constant."}
    )

    puzzle_emb_lr: float = field(default=1e-2, metadata={"help": "Learning rate of puzzle rows (sign descent)."})
    puzzle_emb_weight_decay: float = field(default=0.1, metadata={"help": "Weight decay of the puzzle rows in use."})
    drop_unplaced_rows: bool = field(
        default=False, metadata={"help": "As the original: rows offered to busy slots are lost, not kept."}
    )
    eval_max_steps: int | None = field(
        default=None, metadata={"help": "Most ACT steps in evaluation; the config's halt_max_steps by default."}
    )
    eval_halt: str = field(default="fixed", metadata={"help": '"fixed" as the original, or "q" for adaptive halting.'})


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


@dataclass
class LmTrainingArguments(CarrylessTrainingArguments):
    """For causal language models.

    The learning rate is that of published models of these sizes: 6e-4 at 125M and 3e-4 at 350M parameters (Brown et
    al. 2020, table 2.1), 2.2e-4 to 2.5e-4 at 0.6B to 1B for HRM-Text. Lower it for fine-tuning.
    """

    best_metric: ClassVar[str] = "eval_lm_loss"  # without label smoothing and auxiliary losses

    learning_rate: float = field(default=3e-4, metadata={"help": "Peak learning rate; lower it for fine-tuning."})
    weight_decay: float = field(
        default=0.1, metadata={"help": "Weight decay of matrices and embeddings; biases, norms and scales have none."}
    )
    warmup_steps: float = field(default=1000, metadata={"help": "Steps of linear warm-up, or their share if below 1."})

    lr_multipliers: str | None = field(
        default=None,
        metadata={
            "help": "Learning rates of a model's groups over --learning_rate, e.g. planner=1.2,generator=0.8; what is "
            "not named has 1. By default planner 1.2 and generator 0.8, for models with these groups."
        },
    )
    bp_warmup_ratio: float = field(
        default=0.2,
        metadata={"help": "Share of the run over which the back-prop depth grows from 2 to the config's bp_steps."},
    )
    halt_warmup_ratio: float = field(
        default=0.5,
        metadata={"help": "Share of the run in which every token gets all segments; then the halting gate decides."},
    )

    def __post_init__(self):
        for name in ("bp_warmup_ratio", "halt_warmup_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be a share of the run, 0..1")
        super().__post_init__()
        self.group_multipliers()

    def group_multipliers(self) -> dict[str, float]:
        """`lr_multipliers` as numbers, for every group. Raises ValueError for what is no group or no number."""
        if self.lr_multipliers is None:
            return dict(LR_MULTIPLIERS)
        found = dict.fromkeys(LR_MULTIPLIERS, 1.0)
        for item in self.lr_multipliers.split(","):
            name, _, value = (part.strip() for part in item.partition("="))
            if name not in LR_MULTIPLIERS:
                raise ValueError(f"lr_multipliers: {name!r} is no group; there are {', '.join(LR_MULTIPLIERS)}")
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = -1.0
            if not 0 <= found[name] < float("inf"):
                raise ValueError(f"lr_multipliers: {item.strip()!r} is not of the form group=number, from 0 up")
        return found


@dataclass
class CosmoTrainingArguments(CarrylessTrainingArguments):
    """For regressors of cosmological parameters. The defaults are those of the original training script.

    The batch size and its learning rate belong together: `scale_learning_rate` applies the linear rule that the
    original documents, `learning_rate` * batch size of a step / `base_batch_size`.
    """

    best_metric: ClassVar[str] = "eval_nll_loss"

    learning_rate: float = field(default=3e-4, metadata={"help": "Peak learning rate, before any scaling."})
    weight_decay: float = field(
        default=1e-3, metadata={"help": "Weight decay of matrices and filters; biases, norms and scales have none."}
    )
    adam_beta2: float = field(default=0.999, metadata={"help": "Second beta of AdamW (or of --optim)."})
    warmup_steps: float = field(default=0.05, metadata={"help": "Steps of linear warm-up, or their share if below 1."})
    lr_min_ratio: float | None = field(
        default=0.0, metadata={"help": "Cosine decay ends at this share of the learning rate; 1 is constant."}
    )
    remove_unused_columns: bool | None = field(
        default=False, metadata={"help": "Off: maps come as whole batches, not as rows with columns."}
    )

    scale_learning_rate: bool = field(
        default=False, metadata={"help": "Multiply the learning rate by the maps of a step over --base_batch_size."}
    )
    base_batch_size: int = field(default=64, metadata={"help": "Maps of a step that --learning_rate is meant for."})
    fit_posterior_scale: bool = field(
        default=True, metadata={"help": "At the end, fit one factor on all standard deviations to validation maps."}
    )
    channels_last: bool = field(
        default=False, metadata={"help": "Lay filters out with channels last: faster on GPUs in half precision."}
    )

    def __post_init__(self):
        if self.base_batch_size < 1:
            raise ValueError(f"base_batch_size={self.base_batch_size} must be 1 or more")
        super().__post_init__()

    @property
    def maps_per_step(self) -> int:
        """Of all processes and accumulated batches."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def peak_learning_rate(self) -> float:
        """That which the optimizer gets, scaled or not."""
        scale = self.maps_per_step / self.base_batch_size if self.scale_learning_rate else 1
        return self.learning_rate * scale

    def describe_learning_rate(self) -> str:
        """One line on the rate and where it comes from."""
        line = f"learning rate {self.peak_learning_rate:.3g} at {self.maps_per_step} maps a step"
        if self.scale_learning_rate:
            line += f": {self.learning_rate:.3g} * {self.maps_per_step} / {self.base_batch_size} (scale_learning_rate)"
        return line


VALIDATORS = ("tree-sitter", "parser", "types", "auto")
LOSS_WEIGHTS = ("plan_loss_weight", "code_loss_weight", "refinement_loss_weight")


@dataclass
class GoTrainingArguments(LmTrainingArguments):
    """For the Go coder, and for other causal language models on the same records."""

    train_sampling_strategy: str = field(
        default="group_by_length",
        metadata={"help": "random, sequential or group_by_length: rows of about one length make a batch."},
    )
    remove_unused_columns: bool | None = field(
        default=False, metadata={"help": "Off: the collator reads columns that no model takes."}
    )

    refinement_warmup: int = field(
        default=0, metadata={"help": "Steps with solutions only: no attempts in the data, no refinement loss."}
    )
    refinement_ramp: int = field(
        default=1000, metadata={"help": "Steps after that over which the refinement loss grows to its weight."}
    )
    plan_loss_weight: float | None = field(default=None, metadata={"help": "Instead of the config's."})
    code_loss_weight: float | None = field(default=None, metadata={"help": "Instead of the config's."})
    refinement_loss_weight: float | None = field(default=None, metadata={"help": "Instead of the config's."})

    validation_frequency: int = field(
        default=0, metadata={"help": "Write and check code every so many steps; 0 for never."}
    )
    validation_prompts: int = field(default=16, metadata={"help": "Evaluation records that are written then."})
    validation_max_new_tokens: int = field(default=256, metadata={"help": "Most tokens of that code."})
    validator: str = field(
        default="tree-sitter", metadata={"help": "What checks it: tree-sitter, parser, types, or auto (best here)."}
    )
    replay_file: str | None = field(
        default=None,
        metadata={"help": "Also write as many training records then, and append those that fail here, as attempts."},
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("refinement_warmup", "refinement_ramp", "validation_frequency", *LOSS_WEIGHTS):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more")
        for name in ("validation_prompts", "validation_max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.validator not in VALIDATORS:
            raise ValueError(f"validator={self.validator!r} is not one of {', '.join(VALIDATORS)}")
        if self.replay_file and not self.validation_frequency:
            raise ValueError(f"replay_file={self.replay_file!r} needs --validation_frequency")
