"""Options for training on maps: data options, and training options for regressors and mass mappers."""

from dataclasses import dataclass
from typing import ClassVar

from transformers.hf_argparser import HfArg

from ..trainer.recipes import CarrylessTrainingArguments, validate_minimum


@dataclass
class CosmoDataArguments:
    """Options that select and augment the training maps; see `cosmology/dataset/collator.py`."""

    data_path: str | None = HfArg(default=None, help="Cosmology data set: folder or OWNER/NAME.")
    build_data: str | None = HfArg(
        default=None, help="Build or finish the data set at data_path with these `hrm-hf data` arguments."
    )
    max_train_samples: int | None = HfArg(
        default=None, help="Train on only the first N maps. Default: all maps that are not held out."
    )
    val_samples: int | None = HfArg(
        default=None, help="Hold out the last N maps of the train split. Default: a tenth of it, at most 10,000."
    )
    max_test_samples: int | None = HfArg(default=None, help="Test on only the first N maps; 0 skips the test.")
    augment: bool = HfArg(default=True, help="Rotate and flip training maps at random; also shift periodic maps.")
    noise_sigma: float = HfArg(
        default=0.0, help="Standard deviation of fresh noise added to each pixel of noiseless maps, in map units."
    )

    def __post_init__(self):
        validate_minimum(self, 1, "max_train_samples")
        validate_minimum(self, 0, "val_samples", "max_test_samples")
        if not 0 <= self.noise_sigma < float("inf"):
            raise ValueError(f"noise_sigma={self.noise_sigma}: must be finite and at least 0")


@dataclass
class CosmoTrainingArguments(CarrylessTrainingArguments):
    """Training options for regressors. The defaults are from the original repository's training script.

    `scale_learning_rate` applies the linear rule of that script: `learning_rate` * maps per step / `base_batch_size`.
    """

    best_metric: ClassVar[str] = "eval_nll_loss"

    learning_rate: float = HfArg(default=3e-4, help="Peak learning rate, before --scale_learning_rate multiplies it.")
    weight_decay: float = HfArg(
        default=1e-3, help="Weight decay for matrices and filters; biases, norms and scales have none."
    )
    adam_beta2: float = HfArg(default=0.999, help="Second beta of AdamW (or of the optimizer in --optim).")
    warmup_steps: float = HfArg(default=0.05, help="Linear warm-up steps, or a fraction of all steps if below 1.")
    lr_min_ratio: float | None = HfArg(
        default=0.0, help="Fraction of the peak learning rate at which cosine decay ends; 1 disables the decay."
    )
    remove_unused_columns: bool | None = HfArg(
        default=False, help="Keep this off: maps are loaded as complete batches, not as rows with columns."
    )

    scale_learning_rate: bool = HfArg(
        default=False, help="Multiply the learning rate by (maps per step) / --base_batch_size."
    )
    base_batch_size: int = HfArg(default=64, help="Number of maps per step for which --learning_rate was tuned.")
    fit_posterior_scale: bool = HfArg(
        default=True, help="After training, fit one scale factor for all standard deviations on validation maps."
    )
    channels_last: bool = HfArg(
        default=False, help="Use the channels_last memory format, which is faster on GPUs in half precision."
    )

    def __post_init__(self):
        validate_minimum(self, 1, "base_batch_size")
        super().__post_init__()

    @property
    def maps_per_step(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def peak_learning_rate(self) -> float:
        """Peak learning rate of the optimizer, scaled if `scale_learning_rate` is set."""
        return self.learning_rate * (self.maps_per_step / self.base_batch_size if self.scale_learning_rate else 1)

    def describe_learning_rate(self) -> str:
        line = f"learning rate {self.peak_learning_rate:.3g} at {self.maps_per_step} maps per step"
        rule = f": {self.learning_rate:.3g} * {self.maps_per_step} / {self.base_batch_size} (scale_learning_rate)"
        return line + (rule if self.scale_learning_rate else "")


@dataclass
class MassMapDataArguments(CosmoDataArguments):
    """Options that select and augment the shear maps for training."""

    fresh_observations: bool = HfArg(
        default=True,
        help="Recompute the shear of training maps from their convergence at every step, with new noise and masks; "
        "periodic maps only. If false, use the noise and masks of the data set.",
    )


@dataclass
class MassMapTrainingArguments(CosmoTrainingArguments):
    """Training options for mass mappers."""

    best_metric: ClassVar[str] = "eval_loss"
