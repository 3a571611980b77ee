"""`RegressionRun` and `MassMapRun`: runs of `training/run_cosmo.py` and `training/run_mass_mapping.py`."""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..hub.kinds import MASS_MAPPER, REGRESSOR
from ..io.usage import UsageError
from ..trainer.plots import plot_cosmo_training
from ..trainer.run import TrainingRun
from . import map_evaluation, plots
from .dataset.collator import MapCollator, MassMapCollator
from .dataset.rows import MapSet
from .evaluation import card_figures, evaluate_predictions
from .prediction import predict_maps
from .regression import (
    CosmologyMaps,
    ensure_maps,
    fit_map_distance,
    fit_posterior_scale,
    fit_statistics,
    load_maps,
    load_regressor,
    load_test_maps,
)
from .simulation.settings import PERIODIC
from .trainer import MassMapTrainer, RegressionTrainer


SCALE_MAPS = 2000  # of the training split, for the standard deviation of their convergence


class RegressionRun(TrainingRun):
    """Trains a regressor on maps; `data_args` is a `CosmoDataArguments`, `args` a `CosmoTrainingArguments`."""

    task, kind, trainer_class = "cosmology-regression", REGRESSOR, RegressionTrainer
    reads_kappa = False  # the convergence behind shear, from which a model of mass maps learns

    def load_data(self) -> None:
        with self.args.main_process_first(desc="building the data set"):
            ensure_maps(self.data_args)
        self.maps = self.open_maps()
        self.train, self.validation = self.maps.train, self.maps.validation

    def open_maps(self) -> CosmologyMaps:
        """Open the data set, which exists by now."""
        return load_maps(self.data_args, self.reads_kappa)

    def load_model(self, quantized, **figures: Any) -> PreTrainedModel:
        model, self.extractor = load_regressor(
            self.model_args, self.data_args, self.maps.info, self.args.seed, quantized, self.kind, **figures
        )
        return model

    def describe(self) -> str:
        return f"{self.maps.describe()}\n{self.args.describe_learning_rate()}"

    def make_trainer(self, model: Any) -> RegressionTrainer:
        if self.args.channels_last:
            model.to(memory_format=torch.channels_last)
        collator = self.make_collator(model)
        if self.model_args.model_name_or_path is None:
            fit_statistics(model, self.train, collator)
        return self.trainer_class(
            model,
            self.args,
            train_dataset=self.train,
            eval_dataset=self.validation,
            data_collator=collator,
            processing_class=self.extractor,
        )

    def make_collator(self, model: PreTrainedModel) -> MapCollator:
        """Return the collator of training and held-out maps; it shifts maps if the model takes edges to meet."""
        return MapCollator(
            self.extractor,
            augment=self.data_args.augment,
            shift=self.data_args.augment and model.config.padding_mode == "circular",
            shear=self.maps.info.settings.observable == "shear",
            noise_sigma=self.data_args.noise_sigma,
            seed=self.args.seed,
        )

    def before_saving(self, trainer: RegressionTrainer) -> None:
        """Fits the scale of all standard deviations, and how far from training maps is too far: fields of the config.

        Sharded weights cannot run in one process, and an adapter has no config.
        """
        sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        if self.validation and not sharded and not self.tuning_args.saves_adapter:
            held_out = self.validation, trainer.data_collator, self.args.per_device_eval_batch_size
            fit_map_distance(trainer.model, *held_out)
            if self.args.fit_posterior_scale:
                with trainer.averaged_weights():
                    fit_posterior_scale(trainer.model, *held_out)

    def results(self, trainer: RegressionTrainer, metrics: dict[str, Any]):
        """Metrics of the test split, those of validation beside them."""
        noise = self.data_args.noise_sigma
        return self._test(trainer), {
            "validation": metrics,
            "posterior_scale": trainer.model.config.posterior_scale,
            "peak_learning_rate": self.args.peak_learning_rate,
            "data": {"kind": self.maps.info.kind, "train_maps": len(self.train), "noise_sigma": noise},
        }

    def _test(self, trainer: RegressionTrainer) -> dict[str, Any]:
        if not self.maps.info.counts["test"] or self.data_args.max_test_samples == 0:
            return {}
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            print("no test: weights are sharded, and one process alone cannot run the model; see `hrm-hf eval`")
            return {}
        with trainer.averaged_weights():
            return self.evaluate_rows(trainer.model, self.load_test_rows())

    def load_test_rows(self) -> MapSet:
        """Test maps for `evaluate_rows`."""
        return load_test_maps(self.data_args, self.args.seed, self.reads_kappa)

    def evaluate_rows(self, model: PreTrainedModel, rows: MapSet) -> dict[str, Any]:
        """Metrics of test maps; pictures in the run's folder."""
        answers = predict_maps(model, self.extractor, rows, batch_size=self.args.per_device_eval_batch_size)
        metrics = evaluate_predictions(answers.predictions, self.maps.info.prior)
        title = f"{len(rows)} test maps, {self.maps.info.kind}"
        plots.plot_posteriors(answers.predictions, metrics, self.out, title)
        return metrics | {"rmse_per_step": answers.rmse_per_step()}

    def plot(self, trainer: RegressionTrainer, metrics: dict[str, Any]) -> None:
        plot_cosmo_training(trainer.state.log_history, self.out / "training.png")

    def card_entry(self, metrics: dict[str, Any]) -> dict[str, Any]:
        settings = {"noise_sigma": self.data_args.noise_sigma} if self.data_args.noise_sigma else {}
        entry = {"metrics": self.card_metrics(metrics), "dataset": self.data_args.data_path, "split": "test"}
        return entry | self.parameters | settings

    def card_metrics(self, metrics: dict[str, Any]) -> dict[str, float]:
        """Those of `results` that a card shows."""
        return card_figures(metrics)


class MassMapRun(RegressionRun):
    """Trains a model of mass maps; `data_args` is a `MassMapDataArguments`, `args` a `MassMapTrainingArguments`."""

    task, kind, trainer_class = "mass-mapping", MASS_MAPPER, MassMapTrainer
    reads_kappa = True

    def validate_options(self) -> None:
        if self.data_args.noise_sigma:
            raise UsageError(
                f"noise_sigma={self.data_args.noise_sigma} is for convergence; the noise of shear is that of the data "
                "set, drawn anew with --fresh_observations true"
            )

    def load_model(self, quantized) -> PreTrainedModel:
        kappa_std = np.std(self.train.kappa[self.train.rows[:SCALE_MAPS]], axis=(0, 2, 3)).tolist()
        return super().load_model(quantized, kappa_std=kappa_std)

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

    def evaluate_rows(self, model: Any, rows: MapSet) -> dict[str, Any]:
        """As `hrm-hf eval cosmo-map` of the test split."""
        answers = predict_maps(model, self.extractor, rows, batch_size=self.args.per_device_eval_batch_size)
        metrics = map_evaluation.network_metrics(answers, self.maps.info)
        title = f"{len(rows)} test maps, {self.maps.info.kind}"
        map_evaluation.plot_network(answers, rows.maps, metrics, self.out, title)
        return metrics

    def card_metrics(self, metrics: dict[str, Any]) -> dict[str, float]:
        return map_evaluation.card_figures(metrics)
