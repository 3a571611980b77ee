"""Models of maps with a few thousand weights, maps and data sets, for tests of behaviour."""

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
# Of a model of mass maps: one plane of shear, with a mask. Maps are of size 1, so that differences of them count.
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
}  # logged, but not part of what a resumed run repeats


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
    """A model of mass maps: `head` is its class."""
    torch.manual_seed(seed)
    fields = SHEAR | ({"statistics_dropout": 0.0} if head is HrmCosmoForMassMapping else {})
    return head(head.config_class.from_preset("test", **{**fields, **overrides}))


def masked(maps: torch.Tensor) -> torch.Tensor:
    """Scaled maps [B, C, S, S] of which a third of the pixels is hidden, as their last channel then says."""
    observed = (maps[:, -1:] > -0.43).to(maps)
    return torch.cat((maps[:, :-1] * observed, observed), dim=1)


def rows(count: int = 24, seed: int = 0, **options) -> MapRows:
    """Random maps whose amplitude is told by their first parameter."""
    rng = np.random.default_rng(seed)
    labels = rng.uniform(*np.transpose(PRIOR), (count, 2)).astype(np.float32)
    maps = 0.5 + 10 * labels[:, :1, None, None] * rng.standard_normal((count, 1, SIZE, SIZE))
    return MapRows(maps.astype(np.float32), labels, **options)


def shear_rows(count: int = 24, seed: int = 0, **options) -> MapRows:
    """Shear of random convergence whose amplitude is told by the first parameter, with masks."""
    rng = np.random.default_rng(seed)
    labels = rng.uniform(*np.transpose(PRIOR), (count, 2)).astype(np.float32)
    kappa = (5 * labels[:, :1, None, None] * rng.standard_normal((count, 1, SIZE, SIZE))).astype(np.float32)
    masks = rng.random((count, SIZE, SIZE)) > 0.3
    shear = shear_from_convergence(torch.from_numpy(kappa), torch.from_numpy(masks)[:, None]).numpy()
    return MapRows(shear, labels, masks, kappa=kappa, **options)


def trainer(folder, regressor=None, train=24, held_out=10, collator=None, **arguments) -> RegressionTrainer:
    """On the CPU; logs every step."""
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
    """Of a model of mass maps, on shear without noise; otherwise as `trainer`."""
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
    """Returns the values logged at each training step, but for times."""
    history = [entry for entry in one.state.log_history if "loss" in entry]
    return [{name: value for name, value in entry.items() if name not in TIMES} for entry in history]


def build(folder, samples: int = 40, test_samples: int = 8, **options) -> str:
    """A data set of log-normal maps of 16 x 16 pixels."""
    settings = MapSettings(size=SIZE, **options)
    build_cosmology_dataset(settings, folder, samples, test_samples, workers=0)
    return str(folder)
