"""Infer parameters from masked shear in two steps: make Wiener maps, then train `hrm_cosmo` on them.

    python -m benchmarks.cosmology.two_steps --recipe training/recipes/cosmo_lognormal_64_cpu.yaml
        --data_path SHEAR --build_data "" --output_dir runs/two_steps [--observations 3]

The script takes the options of `training/run_cosmo.py` and a shear data set. The filter uses the mean spectrum of the
training maps, because the spectrum of a map is unknown until its parameters are known. Every training map gets
`--observations` different noise realizations and masks, because a network would memorize fixed ones. Validation and
test maps are filtered as stored. As for any run, the metrics of the test posteriors are in OUTPUT_DIR/results.json.
"""

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import torch

from hrm_hf.cosmology.arguments import CosmoDataArguments, CosmoTrainingArguments
from hrm_hf.cosmology.dataset.collator import MapRows, shifted, split_rows
from hrm_hf.cosmology.dataset.rows import MapSet, load_cosmology_info
from hrm_hf.cosmology.reconstruction import estimate_maps, map_estimator
from hrm_hf.cosmology.run import CosmologyMaps, RegressionRun
from hrm_hf.models.shear_operator import shear_from_convergence
from hrm_hf.trainer.recipes import parse_script
from hrm_hf.trainer.run import run_training


BATCH = 200  # number of maps per call of the Wiener filter


@dataclass
class TwoStepDataArguments(CosmoDataArguments):
    """Data options of `training/run_cosmo.py`, plus the number of observations of each training map."""

    observations: int = field(default=3, metadata={"help": "number of noisy observations of each training map"})


class TwoStepRun(RegressionRun):
    """Regression run on maps that are Wiener-filtered before training."""

    def open_maps(self) -> CosmologyMaps:
        info = load_cosmology_info(self.data_args.data_path)
        rows = MapSet.read(self.data_args.data_path, "train", kappa=True)
        self.estimator, _ = map_estimator("wiener-mean", info.settings, rows)
        cosmologies = np.arange(len(rows)) // info.maps_per_cosmology
        free, held_out = split_rows(cosmologies, self.data_args.max_train_samples, self.data_args.val_samples)
        generator = torch.Generator().manual_seed(self.args.seed)
        observed = [new_observations(rows[free], info.settings.pixel_noise, generator)
                    for _ in range(self.data_args.observations)]  # fmt: skip
        train, labels = self.filtered([*observed, rows[held_out]], info.target_names)
        count = len(train) - len(held_out)
        info = dataclasses.replace(
            info,
            settings=dataclasses.replace(info.settings, observable="convergence", mask_fraction=0.0),
            pixel_mean=(float(train.mean()),),
            pixel_std=(float(train.std()),),
        )
        return CosmologyMaps(
            info,
            MapRows(train, labels, rows=np.arange(count), training=True),
            MapRows(train, labels, rows=np.arange(count, len(train))),
        )

    def filtered(self, parts: list[MapSet], names: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the Wiener maps [N, P, S, S] and the labels [N, T] of all rows in `parts`."""
        maps = [estimate_maps(self.estimator, part, BATCH)[0] for part in parts]
        labels = [np.stack([part.labels[name] for name in names], axis=1) for part in parts]
        return np.concatenate(maps), np.concatenate(labels)

    def load_test_rows(self) -> MapSet:
        rows = MapSet.read(self.data_args.data_path, "test", self.data_args.max_test_samples, kappa=True)
        return MapSet(estimate_maps(self.estimator, rows, BATCH)[0], rows.labels)


def new_observations(rows: MapSet, noise: float, generator: torch.Generator) -> MapSet:
    """Observe the rows' convergence again, with new shear noise and shifted masks of random rows."""
    count, size = len(rows.kappa), rows.kappa.shape[-1]
    masks = torch.from_numpy(rows.masks)[torch.randperm(count, generator=generator), None]
    masks = shifted(masks, *torch.randint(size, (2, count), generator=generator))
    shear = shear_from_convergence(torch.from_numpy(rows.kappa))
    shear = (shear + noise * torch.randn(shear.shape, generator=generator)) * masks
    return MapSet(shear.numpy(), rows.labels, masks[:, 0].numpy(), rows.kappa)


if __name__ == "__main__":
    run_training(TwoStepRun(*parse_script((TwoStepDataArguments, CosmoTrainingArguments), __doc__)))
