"""Options of a run that trains a model of mass maps."""

from dataclasses import dataclass, field
from typing import ClassVar

from ..arguments import CosmoDataArguments, CosmoTrainingArguments


@dataclass
class MassMapDataArguments(CosmoDataArguments):
    """Which shear maps, and what is done to them. See `cosmology/mass_maps/collator.py`."""

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

    trainer: ClassVar[str] = "hrm_hf.cosmology.mass_maps.trainer:MassMapTrainer"
    best_metric: ClassVar[str] = "eval_loss"
