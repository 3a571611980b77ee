"""Map models with a few thousand weights, maps and data sets for tests of behavior."""

import numpy as np
import torch

from hrm_hf import HrmCosmoConfig, HrmCosmoForMassMapping, HrmCosmoForRegression
from hrm_hf.cosmology.dataset.build import build_cosmology_dataset
from hrm_hf.cosmology.dataset.collator import MapCollator, MapRows, MassMapCollator
from hrm_hf.cosmology.simulation.maps import MapSettings
from hrm_hf.cosmology.trainer import (
    CosmoTrainingArguments,
    MassMapTrainer,
    MassMapTrainingArguments,
    RegressionTrainer,
)
from hrm_hf.models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from hrm_hf.models.shear_operator import shear_from_convergence


SIZE = 16
PRIOR = [[0.1, 0.5], [0.6, 1.0]]
# Mass map config: one plane of shear with a mask; maps have unit scale, so that differences matter.
SHEAR = {"prior_bounds": PRIOR, "pixel_mean": [0.1, -0.1], "pixel_std": [0.5, 0.5], "kappa_std": [2.0]}
# Options of a trainer on the CPU that logs every step.
TRAINING = {
    "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 8, "logging_steps": 1,
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-3, "save_strategy": "no",
}  # fmt: skip
TIMES = {
    "maps_per_second",
    "steps_per_second",
    "samples_per_second",
    "epoch",
}  # logged, but different in a resumed run


def config(**overrides) -> HrmCosmoConfig:
    fields = {
        "prior_bounds": PRIOR,
        "pixel_mean": [0.5],
        "pixel_std": [2.0],
        "padding_mode": "circular",
        "statistics_dropout": 0.0,
    }
    return HrmCosmoConfig.from_preset("test", **{**fields, **overrides})


def model(seed: int = 0, **overrides) -> HrmCosmoForRegression:
    torch.manual_seed(seed)
    return HrmCosmoForRegression(config(**overrides))


def mass_mapper(head: type = HrmCosmoForMassMapping, seed: int = 0, **overrides):
    """Return a mass map model of class `head`."""
    torch.manual_seed(seed)
    fields = SHEAR | ({"statistics_dropout": 0.0} if head is HrmCosmoForMassMapping else {})
    return head(head.config_class.from_preset("test", **{**fields, **overrides}))


def masked(maps: torch.Tensor) -> torch.Tensor:
    """Return scaled maps [B, C, S, S] with a third of the pixels hidden; the last channel is the mask."""
    observed = (maps[:, -1:] > -0.43).to(maps)
    return torch.cat((maps[:, :-1] * observed, observed), dim=1)


def rows(count: int = 24, seed: int = 0, **options) -> MapRows:
    """Return random maps whose first parameter sets their amplitude."""
    rng = np.random.default_rng(seed)
    labels = rng.uniform(*np.transpose(PRIOR), (count, 2)).astype(np.float32)
    maps = 0.5 + 10 * labels[:, :1, None, None] * rng.standard_normal((count, 1, SIZE, SIZE))
    return MapRows(maps.astype(np.float32), labels, **options)


def shear_rows(count: int = 24, seed: int = 0, **options) -> MapRows:
    """Return masked shear of random convergence whose first parameter sets the amplitude."""
    rng = np.random.default_rng(seed)
    labels = rng.uniform(*np.transpose(PRIOR), (count, 2)).astype(np.float32)
    kappa = (5 * labels[:, :1, None, None] * rng.standard_normal((count, 1, SIZE, SIZE))).astype(np.float32)
    masks = rng.random((count, SIZE, SIZE)) > 0.3
    shear = shear_from_convergence(torch.from_numpy(kappa), torch.from_numpy(masks)[:, None]).numpy()
    return MapRows(shear, labels, masks, kappa=kappa, **options)


def trainer(folder, regressor=None, train=24, held_out=10, collator=None, **arguments) -> RegressionTrainer:
    """Return a trainer on the CPU that logs every step."""
    regressor = model() if regressor is None else regressor
    extractor = CosmoMapFeatureExtractor.from_config(regressor.config)
    return RegressionTrainer(
        regressor,
        CosmoTrainingArguments(**{"output_dir": str(folder), **TRAINING, **arguments}),
        train_dataset=rows(train, training=True) if isinstance(train, int) else train,
        eval_dataset=rows(held_out, seed=1),
        data_collator=MapCollator(extractor, shift=True) if collator is None else collator,
        processing_class=extractor,
    )


def map_trainer(folder, mapper=None, **arguments) -> MassMapTrainer:
    """Return a trainer like `trainer` for a mass map model, on shear without noise."""
    mapper = mass_mapper() if mapper is None else mapper
    extractor = CosmoMapFeatureExtractor.from_config(mapper.config)
    return MassMapTrainer(
        mapper,
        MassMapTrainingArguments(**{"output_dir": str(folder), **TRAINING, **arguments}),
        train_dataset=shear_rows(24, training=True),
        eval_dataset=shear_rows(10, seed=1),
        data_collator=MassMapCollator(extractor),
        processing_class=extractor,
    )


def logged(one: RegressionTrainer) -> list[dict]:
    """Return the values logged at each training step, except times."""
    history = [entry for entry in one.state.log_history if "loss" in entry]
    return [{name: value for name, value in entry.items() if name not in TIMES} for entry in history]


def build(folder, samples: int = 40, test_samples: int = 8, **options) -> str:
    """Build a data set of log-normal maps of 16 x 16 pixels."""
    settings = MapSettings(size=SIZE, **options)
    build_cosmology_dataset(settings, folder, samples, test_samples, workers=0)
    return str(folder)
