"""`RegressionRun`: a run of `training/run_cosmo.py`."""

from typing import Any

import torch
from transformers import PreTrainedModel

from ..hub.kinds import REGRESSOR
from ..trainer.plots import plot_cosmo_training
from ..trainer.run import TrainingRun
from .dataset.collator import MapCollator
from .evaluation import card_figures
from .regression import (
    CosmologyMaps,
    ensure_maps,
    evaluate_on_test,
    fit_map_distance,
    fit_posterior_scale,
    fit_statistics,
    load_maps,
    load_regressor,
    load_test_maps,
    map_collator,
)
from .trainer import RegressionTrainer


class RegressionRun(TrainingRun):
    """Trains a regressor on maps; `data_args` is a `CosmoDataArguments`, `args` a `CosmoTrainingArguments`."""

    task, kind, trainer_class = "cosmology-regression", REGRESSOR, RegressionTrainer

    def load_data(self) -> None:
        data_args = self.data_args
        with self.args.main_process_first(desc="building the data set"):
            wanted = (data_args.max_train_samples or 0) + (data_args.val_samples or 0)
            ensure_maps(data_args.data_path, data_args.build_data, wanted)
        self.maps = self.open_maps()
        self.train, self.validation = self.maps.train, self.maps.validation

    def open_maps(self) -> CosmologyMaps:
        """The data set, which is there by now."""
        return load_maps(self.data_args)

    def load_model(self, quantized) -> PreTrainedModel:
        model, self.extractor = load_regressor(
            self.model_args, self.data_args, self.maps.info, self.args.seed, quantized
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
        """That of training and held-out maps, for this model."""
        return map_collator(self.extractor, model, self.data_args, self.maps.info, self.args.seed)

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
        rows = self.load_test_rows()
        if rows is None:
            return {}
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            print("no test: weights are sharded, and one process alone cannot run the model; see `hrm-hf eval cosmo`")
            return {}
        with trainer.averaged_weights():
            return self.evaluate_rows(trainer.model, rows)

    def load_test_rows(self) -> Any:
        """Test maps for `evaluate_rows`; None without."""
        return load_test_maps(self.data_args, self.args.seed)

    def evaluate_rows(self, model: PreTrainedModel, rows: Any) -> dict[str, Any]:
        """Figures of test maps as `load_test_maps` gives them; pictures in the run's folder."""
        return evaluate_on_test(
            model, self.extractor, rows, self.maps.info, self.out, self.args.per_device_eval_batch_size
        )

    def plot(self, trainer: RegressionTrainer, metrics: dict[str, Any]) -> None:
        plot_cosmo_training(trainer.state.log_history, self.out / "training.png")

    def card_entry(self, metrics: dict[str, Any]) -> dict[str, Any]:
        settings = {"noise_sigma": self.data_args.noise_sigma} if self.data_args.noise_sigma else {}
        entry = {"metrics": self.card_metrics(metrics), "dataset": self.data_args.data_path, "split": "test"}
        return entry | self.parameters | settings

    def card_metrics(self, metrics: dict[str, Any]) -> dict[str, float]:
        """Those of `results` that a card shows."""
        return card_figures(metrics)
