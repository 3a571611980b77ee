"""Options of a run on maps: the data, and the training of regressors and of models of mass maps."""

from dataclasses import dataclass
from typing import ClassVar

from transformers.hf_argparser import HfArg

from ..trainer.recipes import CarrylessTrainingArguments


@dataclass
class CosmoDataArguments:
    """Which maps to train on, and how to augment them; see `cosmology/dataset/collator.py`."""

    data_path: str | None = HfArg(default=None, help="Cosmology data set: folder or OWNER/NAME.")
    build_data: str | None = HfArg(
        default=None, help="Arguments of `hrm-hf data` that build or finish data_path; an error if it holds others."
    )
    max_train_samples: int | None = HfArg(
        default=None, help="Train on the first maps only; on all that are not held out by default."
    )
    val_samples: int | None = HfArg(
        default=None, help="Last maps of the train split that are held out; a tenth, at most 10,000, by default."
    )
    max_test_samples: int | None = HfArg(default=None, help="Test on the first maps only; 0 for none.")
    augment: bool = HfArg(default=True, help="Turn and mirror training maps; move periodic ones.")
    noise_sigma: float = HfArg(
        default=0.0, help="Standard deviation of fresh noise on each pixel of noiseless maps, in their unit."
    )

    def __post_init__(self):
        for name, least in {"max_train_samples": 1, "val_samples": 0, "max_test_samples": 0}.items():
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not 0 <= self.noise_sigma < float("inf"):
            raise ValueError(f"noise_sigma={self.noise_sigma} must be 0 or more")


@dataclass
class CosmoTrainingArguments(CarrylessTrainingArguments):
    """Options of training regressors; the defaults are those of the original training script.

    `scale_learning_rate` applies the original's linear rule: `learning_rate` * maps of a step / `base_batch_size`.
    """

    best_metric: ClassVar[str] = "eval_nll_loss"

    learning_rate: float = HfArg(default=3e-4, help="Peak learning rate, before any scaling.")
    weight_decay: float = HfArg(
        default=1e-3, help="Weight decay of matrices and filters; biases, norms and scales have none."
    )
    adam_beta2: float = HfArg(default=0.999, help="Second beta of AdamW (or of --optim).")
    warmup_steps: float = HfArg(default=0.05, help="Steps of linear warm-up, or their share if below 1.")
    lr_min_ratio: float | None = HfArg(
        default=0.0, help="Cosine decay ends at this share of the learning rate; 1 is constant."
    )
    remove_unused_columns: bool | None = HfArg(
        default=False, help="Off: maps come as whole batches, not as rows with columns."
    )

    scale_learning_rate: bool = HfArg(
        default=False, help="Multiply the learning rate by the maps of a step over --base_batch_size."
    )
    base_batch_size: int = HfArg(default=64, help="Maps of a step that --learning_rate is meant for.")
    fit_posterior_scale: bool = HfArg(
        default=True, help="At the end, fit one factor on all standard deviations to validation maps."
    )
    channels_last: bool = HfArg(
        default=False, help="Lay filters out with channels last: faster on GPUs in half precision."
    )

    def __post_init__(self):
        if self.base_batch_size < 1:
            raise ValueError(f"base_batch_size={self.base_batch_size} must be 1 or more")
        super().__post_init__()

    @property
    def maps_per_step(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate that the optimizer gets, scaled or not."""
        return self.learning_rate * (self.maps_per_step / self.base_batch_size if self.scale_learning_rate else 1)

    def describe_learning_rate(self) -> str:
        line = f"learning rate {self.peak_learning_rate:.3g} at {self.maps_per_step} maps a step"
        rule = f": {self.learning_rate:.3g} * {self.maps_per_step} / {self.base_batch_size} (scale_learning_rate)"
        return line + (rule if self.scale_learning_rate else "")


@dataclass
class MassMapDataArguments(CosmoDataArguments):
    """Which shear maps to train on, and how to augment them."""

    fresh_observations: bool = HfArg(
        default=True,
        help="Draw new noise and masks for training maps at every step, from their convergence; if false, use those "
        "of the data set. For periodic maps only.",
    )


@dataclass
class MassMapTrainingArguments(CosmoTrainingArguments):
    """Options of training models of mass maps."""

    best_metric: ClassVar[str] = "eval_loss"
