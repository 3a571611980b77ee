"""Options of a run on maps: the data, and the training of regressors and of models of mass maps."""

from dataclasses import dataclass, field
from typing import ClassVar

from ..trainer.arguments import CarrylessTrainingArguments


@dataclass
class CosmoDataArguments:
    """Which maps, and what is done to them. See `cosmology/dataset/collator.py`."""

    data_path: str | None = field(default=None, metadata={"help": "Cosmology data set: folder or OWNER/NAME."})
    build_data: str | None = field(
        default=None,
        metadata={"help": "Arguments of `hrm-hf data` that build or finish data_path; an error if it holds others."},
    )
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Train on the first maps only; on all that are not held out by default."}
    )
    val_samples: int | None = field(
        default=None,
        metadata={"help": "Last maps of the train split that are held out; a tenth, at most 10,000, by default."},
    )
    max_test_samples: int | None = field(default=None, metadata={"help": "Test on the first maps only; 0 for none."})
    augment: bool = field(default=True, metadata={"help": "Turn and mirror training maps; move periodic ones."})
    noise_sigma: float = field(
        default=0.0,
        metadata={"help": "Standard deviation of fresh noise on each pixel of noiseless maps, in their unit."},
    )
    stretch: str = field(default="linear", metadata={"help": "linear, or asinh to tame bright pixels."})

    def __post_init__(self):
        for name, least in {"max_train_samples": 1, "val_samples": 0, "max_test_samples": 0}.items():
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not 0 <= self.noise_sigma < float("inf"):
            raise ValueError(f"noise_sigma={self.noise_sigma} must be 0 or more")
        if self.stretch not in ("linear", "asinh"):
            raise ValueError(f"stretch={self.stretch!r} is not one of linear, asinh")


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


@dataclass
class MassMapDataArguments(CosmoDataArguments):
    """Which shear maps, and what is done to them. See `cosmology/dataset/collator.py`."""

    fresh_observations: bool = field(
        default=True,
        metadata={
            "help": "Draw noise and masks of training maps anew at every step, from their convergence; those of the "
            "data set otherwise. For periodic maps alone."
        },
    )


@dataclass
class MassMapTrainingArguments(CosmoTrainingArguments):
    """For models of mass maps."""

    best_metric: ClassVar[str] = "eval_loss"
