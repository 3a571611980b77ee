"""`MassMapRun`: a run of `training/run_mass_mapping.py`."""

from typing import Any

import numpy as np

from ...hub.kinds import MASS_MAPPER
from ...io.usage import UsageError
from ..regression import CosmologyMaps, load_maps, load_regressor
from ..run import RegressionRun
from ..simulation.maps import PERIODIC
from .collator import MassMapCollator
from .evaluation_run import card_figures, network_metrics, plot_network
from .network import map_with_network
from .shear_maps import ShearMaps, load_shear_info
from .trainer import MassMapTrainer


SCALE_MAPS = 2000  # of the training split, for the standard deviation of their convergence


class MassMapRun(RegressionRun):
    """Trains a model of mass maps; `data_args` is a `MassMapDataArguments`, `args` a `MassMapTrainingArguments`."""

    task, kind, trainer_class = "mass-mapping", MASS_MAPPER, MassMapTrainer

    def validate_options(self) -> None:
        if self.data_args.noise_sigma:
            raise UsageError(
                f"noise_sigma={self.data_args.noise_sigma} is for convergence; the noise of shear is that of the data "
                "set, drawn anew with --fresh_observations true"
            )

    def open_maps(self) -> CosmologyMaps:
        load_shear_info(self.data_args.data_path)
        return load_maps(self.data_args, kappa=True)

    def load_model(self, quantized):
        kappa_std = np.std(self.train.kappa[self.train.rows[:SCALE_MAPS]], axis=(0, 2, 3)).tolist()
        model, self.extractor = load_regressor(
            self.model_args, self.data_args, self.maps.info, self.args.seed, quantized, self.kind, kappa_std=kappa_std
        )
        return model

    def make_collator(self, model: Any) -> MassMapCollator:
        settings, fresh = self.maps.info.settings, self.data_args.fresh_observations
        periodic = settings.kind in PERIODIC
        if fresh and not periodic:
            raise UsageError(
                f"fresh_observations: the maps of {self.data_args.data_path} are of kind {settings.kind!r}, whose "
                "shear is not that of the patch alone; use --fresh_observations false"
            )
        return MassMapCollator(
            self.extractor,
            augment=self.data_args.augment,
            shift=self.data_args.augment and periodic,
            shear_noise=float(settings.pixel_noise) if fresh else None,
            seed=self.args.seed,
        )

    def load_test_rows(self) -> ShearMaps | None:
        if not self.maps.info.counts["test"] or self.data_args.max_test_samples == 0:
            return None
        return ShearMaps.read(self.data_args.data_path, "test", self.data_args.max_test_samples)

    def evaluate_rows(self, model: Any, rows: ShearMaps) -> dict[str, Any]:
        """As `hrm-hf eval cosmo-map` of the test split."""
        batch_size = self.args.per_device_eval_batch_size
        found = map_with_network(model, self.extractor, rows, batch_size=batch_size)
        metrics = network_metrics(found, self.maps.info)
        plot_network(found, rows.shear, metrics, self.out, f"{len(rows.shear)} test maps, {self.maps.info.kind}")
        return metrics

    def card_metrics(self, metrics: dict[str, Any]) -> dict[str, float]:
        return card_figures(metrics)
