"""Regressors of a few thousand weights, maps and data sets, for tests of behaviour."""

import numpy as np
import torch

from hrm_hf import HrmCosmoConfig, HrmCosmoForRegression
from hrm_hf.cosmology.arguments import CosmoTrainingArguments
from hrm_hf.cosmology.dataset.build import build_cosmology_dataset
from hrm_hf.cosmology.dataset.collator import MapCollator, MapRows
from hrm_hf.cosmology.simulation.maps import MapSettings
from hrm_hf.cosmology.trainer import RegressionTrainer
from hrm_hf.models.feature_extraction_cosmo import CosmoMapFeatureExtractor


SIZE = 16
PRIOR = [[0.1, 0.5], [0.6, 1.0]]
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


def rows(count: int = 24, seed: int = 0, **options) -> MapRows:
    """Random maps whose amplitude is told by their first parameter."""
    rng = np.random.default_rng(seed)
    labels = rng.uniform(*np.transpose(PRIOR), (count, 2)).astype(np.float32)
    maps = 0.5 + 10 * labels[:, :1, None, None] * rng.standard_normal((count, 1, SIZE, SIZE))
    return MapRows(maps.astype(np.float32), labels, **options)


def trainer(folder, regressor=None, train=24, held_out=10, collator=None, **arguments) -> RegressionTrainer:
    """On the CPU; logs every step."""
    regressor = model() if regressor is None else regressor
    extractor = CosmoMapFeatureExtractor.from_config(regressor.config)
    options = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 8,
        "logging_steps": 1, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-3,
        "save_strategy": "no",
    }  # fmt: skip
    return RegressionTrainer(
        regressor,
        CosmoTrainingArguments(**{**options, **arguments}),
        train_dataset=rows(train, training=True) if isinstance(train, int) else train,
        eval_dataset=rows(held_out, seed=1),
        data_collator=MapCollator(extractor, shift=True) if collator is None else collator,
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
