"""Training arguments: transformers' own with what recursive models add, once for puzzles and once for language models.

`HrmTrainingArguments` holds what both share. Each subclass states its defaults and the options that only it has; an
option that only another kind of model reads does not exist here, so that giving it is an error.
"""

from dataclasses import dataclass, field

from transformers import SchedulerType, TrainingArguments


@dataclass
class HrmTrainingArguments(TrainingArguments):
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
class LmTrainingArguments(HrmTrainingArguments):
    """For causal language models.

    The learning rate is that of published models of these sizes: 6e-4 at 125M and 3e-4 at 350M parameters (Brown et
    al. 2020, table 2.1), 2.2e-4 to 2.5e-4 at 0.6B to 1B for HRM-Text. Lower it for fine-tuning.
    """

    learning_rate: float = field(default=3e-4, metadata={"help": "Peak learning rate; lower it for fine-tuning."})
    weight_decay: float = field(
        default=0.1, metadata={"help": "Weight decay of matrices and embeddings; biases, norms and scales have none."}
    )
    warmup_steps: float = field(default=1000, metadata={"help": "Steps of linear warm-up, or their share if below 1."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradient clipping; 0 for none."})

    label_names: list[str] | None = field(
        default_factory=lambda: ["labels"],
        metadata={"help": "What a batch must have for a loss; the library would take shift_labels for one more."},
    )

    bp_warmup_ratio: float = field(
        default=0.2,
        metadata={"help": "Share of the run over which the back-prop depth grows from 2 to the config's bp_steps."},
    )
    halt_warmup_ratio: float = field(
        default=0.5,
        metadata={"help": "Share of the run in which every token gets all segments; then the halting gate decides."},
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after so many evaluations without a better --metric_for_best_model."}
    )
    early_stopping_threshold: float = field(
        default=0.0, metadata={"help": "By how much the metric must improve to count as better."}
    )

    def __post_init__(self):
        for name in ("bp_warmup_ratio", "halt_warmup_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be a share of the run, 0..1")
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
            self.metric_for_best_model = "eval_lm_loss"  # without label smoothing and auxiliary losses
        super().__post_init__()
