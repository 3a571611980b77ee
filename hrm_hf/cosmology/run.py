"""Runs that train models on maps, for `training/run_cosmo.py` and `training/run_mass_mapping.py`.

The statistics that scale the maps come from the data set for a fresh model, and from the checkpoint for saved weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoFeatureExtractor, BitsAndBytesConfig, PreTrainedModel, set_seed

from ..hub.kinds import MASS_MAPPER, REGRESSOR, Kind
from ..io.options import parse_command
from ..io.usage import UsageError
from ..models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from ..models.posterior_head import Posterior
from ..registry import ARCHITECTURES, has_ability
from ..trainer.plots import plot_cosmo_training
from ..trainer.recipes import ModelArguments, build_config
from ..trainer.run import TrainingRun
from . import plots
from .arguments import CosmoDataArguments
from .dataset.build import build_maps
from .dataset.collator import EVALUATION, Batch, MapCollator, MapRows, MassMapCollator, map_noise, split_rows
from .dataset.from_files import build_from_files
from .dataset.info import CosmologyInfo
from .dataset.rows import MapSet, load_cosmology_info, map_arrays, validate_shear
from .evaluation import evaluate_predictions, posterior_card_metrics
from .evaluation_run import map_card_metrics, network_metrics, plot_network, predict_maps
from .options import BuildCosmology, BuildFromFiles
from .simulation.settings import PERIODIC
from .trainer import MassMapTrainer, RegressionTrainer


# Commands of `hrm-hf data` that `build_data` may use.
BUILDERS = {"cosmology": (BuildCosmology, build_maps), "cosmology-files": (BuildFromFiles, build_from_files)}
SHARED_FIELDS = ("image_size", "num_channels", "mask_channel", "target_names")  # config fields that depend on the data
STATISTICS_MAPS = 4000  # maps used to compute means and standard deviations; they must fit in memory
DISTANCE_QUANTILE = 0.995  # fraction of held-out maps that lie within `max_map_distance`
SCALE_MAPS = 2000  # number of training maps used to estimate the standard deviation of the convergence


@dataclass
class CosmologyMaps:
    """Training maps and validation maps (or None), with the info about their data set."""

    info: CosmologyInfo
    train: MapRows
    validation: MapRows | None


def ensure_maps(data_args: CosmoDataArguments) -> None:
    """Build or finish the data set at `data_path` with the arguments in `build_data`, if given."""
    path, command = data_args.data_path, data_args.build_data
    if path is None:
        raise ValueError("data_path=None: pass the folder of a cosmology data set, or its name on the Hub")
    if not command:
        return
    wanted = (data_args.max_train_samples or 0) + (data_args.val_samples or 0)
    try:
        name, options = parse_command(command, {each: kind for each, (kind, _) in BUILDERS.items()}, out=Path(path))
        if isinstance(options, BuildCosmology) and options.samples < wanted:  # check first: builds may take hours
            raise UsageError(
                f"samples={options.samples}: max_train_samples and val_samples need {wanted} maps; reduce them, "
                "or build a larger data set first and use it with --data_path DIR --build_data ''"
            )
        BUILDERS[name][1](options)
    except UsageError as error:
        raise ValueError(f"build_data={command!r}: {error}") from error


def load_maps(data_args: CosmoDataArguments, kappa: bool = False) -> CosmologyMaps:
    """Open the train split, with the convergence if `kappa`, and hold out its last maps. Maps stay on disk."""
    info = load_cosmology_info(data_args.data_path)
    if kappa:
        validate_shear(data_args.data_path, info)
    if data_args.noise_sigma and info.settings.sigma_e:
        raise ValueError(
            f"noise_sigma={data_args.noise_sigma}: the maps of {data_args.data_path} already have shape noise "
            f"(sigma_e={info.settings.sigma_e}); use noiseless maps, or omit noise_sigma"
        )
    columns = [name for name in info.column_names() if kappa or name != "kappa"]
    rows = map_arrays(data_args.data_path, "train", columns)
    labels = np.stack([rows[name] for name in info.target_names], axis=1)
    try:
        train, held_out = split_rows(rows["cosmology_id"], data_args.max_train_samples, data_args.val_samples)
    except ValueError as error:
        raise ValueError(f"{data_args.data_path}: {error}") from error
    parts = {"maps": rows["map"], "labels": labels, "masks": rows.get("mask"), "kappa": rows.get("kappa")}
    validation = MapRows(**parts, rows=held_out) if len(held_out) else None
    return CosmologyMaps(info, MapRows(**parts, rows=train, training=True), validation)


def load_test_maps(data_args: CosmoDataArguments, seed: int, kappa: bool = False) -> MapSet:
    """Read the first `max_test_samples` maps of the test split, with fixed noise."""
    wanted, count = data_args.max_test_samples, load_cosmology_info(data_args.data_path).counts["test"]
    if (wanted or 0) > count:
        raise ValueError(f"max_test_samples={wanted}: the test split of {data_args.data_path} has only {count} maps")
    maps = MapSet.read(data_args.data_path, "test", wanted, kappa)
    if not data_args.noise_sigma:
        return maps
    pixels = torch.from_numpy(maps.maps)
    # `seed` instead of `seed + 1` would give a test map the noise of the validation map with the same row number.
    noise = map_noise(pixels, torch.arange(len(maps)), seed + 1, EVALUATION)
    return replace(maps, maps=(pixels + data_args.noise_sigma * noise).numpy())


def load_regressor(
    model_args: ModelArguments,
    data_args: CosmoDataArguments,
    info: CosmologyInfo,
    seed: int,
    quantization_config: BitsAndBytesConfig | None = None,
    kind: Kind = REGRESSOR,
    **config_fields: Any,
) -> tuple[PreTrainedModel, CosmoMapFeatureExtractor]:
    """Build a model and a feature extractor for these maps, or load them from a checkpoint.

    Args:
        kind: required kind of model. config_fields: additional config fields of a fresh model.

    Raises:
        ValueError: an unknown type, preset or field; a model of a different kind; a checkpoint for different maps.
    """
    set_seed(seed)
    auto_class = getattr(transformers, kind.auto_class)
    options = {"attn_implementation": model_args.attn_implementation}
    fields = info.config_fields() | config_fields
    # The added noise contributes to the standard deviation of the pixels.
    fields["pixel_std"] = [float(np.hypot(std, data_args.noise_sigma)) for std in fields["pixel_std"]]
    if model_args.model_name_or_path is None:
        model_type = model_args.model_type
        if model_type in CONFIG_MAPPING and not kind.takes(CONFIG_MAPPING[model_type]):
            known = " or ".join(row.model_type for row in ARCHITECTURES.values() if kind.has(row))
            raise ValueError(f"model_type={model_type!r}: must be {kind.title}; use {known}")
        config = build_config(model_args, **fields)
        return auto_class.from_config(config, **options), CosmoMapFeatureExtractor.from_config(config)
    path, maps = model_args.model_name_or_path, f"the maps of {data_args.data_path}"
    model = auto_class.from_pretrained(path, quantization_config=quantization_config, **options)
    for name in SHARED_FIELDS:
        if (found := getattr(model.config, name)) != fields[name]:
            wanted = f"but {maps} have {fields[name]}; train a fresh model, or build matching maps"
            raise ValueError(f"{path} was trained with {name}={found}, {wanted}")
    for name, (low, high) in zip(fields["target_names"], model.config.prior_bounds or ()):
        first, last = info.prior[name]
        if first < low or last > high:
            wanted = f"but {maps} range from {first} to {last}; train a fresh model"
            raise ValueError(f"{path} was trained with {name} from {low} to {high}, {wanted}")
    return model, AutoFeatureExtractor.from_pretrained(path)


def fit_statistics(model: PreTrainedModel, train: MapRows, collator: MapCollator, batch_size: int = 250) -> None:
    """Fit the normalization of a fresh model's summary statistics to the first training maps."""
    if not has_ability(model, "statistics"):
        return
    batches = _plain_batches(train, collator, batch_size, STATISTICS_MAPS)
    model.fit_statistics([batch["pixel_values"] for batch in batches])


def _plain_batches(rows: MapRows, collator: MapCollator, batch_size: int, most: int | None = None) -> Iterator[Batch]:
    """Yield batches of the first `most` rows, or of all rows, in order and without augmentation."""
    numbers = list(range(len(rows)))[:most]
    for start in range(0, len(numbers), batch_size):
        yield collator.at_step(rows.__getitems__(numbers[start : start + batch_size]), EVALUATION)


@torch.no_grad()
def fit_posterior_scale(model: PreTrainedModel, rows: MapRows, collator: MapCollator, batch_size: int) -> float:
    """Fit `posterior_scale`, a factor for all standard deviations, to held-out maps, and return the factor."""
    model.eval()
    parts, labels = [], []
    for batch in _plain_batches(rows, collator, batch_size):
        outputs = model(batch["pixel_values"].to(model.device))
        parts.append((outputs.log_weights, outputs.loc, outputs.scale_tril))
        labels.append(batch["labels"].to(model.device))
    posterior = Posterior(*(torch.cat(column) for column in zip(*parts)))
    model.config.posterior_scale *= model.posterior_head.best_scale(posterior, torch.cat(labels))
    return model.config.posterior_scale


@torch.no_grad()
def fit_map_distance(model: PreTrainedModel, rows: MapRows, collator: MapCollator, batch_size: int) -> float | None:
    """Set and return `max_map_distance` from held-out maps; return None for a model without summary statistics."""
    if not has_ability(model, "statistics"):
        return None
    distances = []
    for batch in _plain_batches(rows, collator, batch_size):
        distance = model.map_distance(batch["pixel_values"].to(model.device))
        if distance is None:
            return None
        distances.append(distance.float().cpu())
    model.config.max_map_distance = torch.cat(distances).quantile(DISTANCE_QUANTILE).item()
    return model.config.max_map_distance


class RegressionRun(TrainingRun):
    """Training run for a map regressor, configured by `CosmoDataArguments` and `CosmoTrainingArguments`."""

    task, kind, trainer_class = "cosmology-regression", REGRESSOR, RegressionTrainer
    reads_kappa = False  # whether to load the convergence, the target of mass mappers

    def load_data(self) -> None:
        with self.args.main_process_first(desc="building the data set"):
            ensure_maps(self.data_args)
        self.maps = self.open_maps()
        self.train, self.validation = self.maps.train, self.maps.validation

    def open_maps(self) -> CosmologyMaps:
        return load_maps(self.data_args, self.reads_kappa)

    def load_model(self, quantized, **config_fields: Any) -> PreTrainedModel:
        model, self.extractor = load_regressor(
            self.model_args, self.data_args, self.maps.info, self.args.seed, quantized, self.kind, **config_fields
        )
        return model

    def describe(self) -> str:
        counts = f"{len(self.train):,} to train on, {len(self.validation or ()):,} held out"
        return f"{self.maps.info.kind} maps: {counts}\n{self.args.describe_learning_rate()}"

    def make_trainer(self, model: Any) -> RegressionTrainer:
        if self.args.channels_last:
            model.to(memory_format=torch.channels_last)
        collator = self.make_collator(model)
        if self.model_args.model_name_or_path is None:
            fit_statistics(model, self.train, collator)
        datasets = {"train_dataset": self.train, "eval_dataset": self.validation}
        return self.trainer_class(
            model, self.args, data_collator=collator, processing_class=self.extractor, **datasets
        )

    def make_collator(self, model: PreTrainedModel) -> MapCollator:
        """Create the collator, which shifts maps only if the model uses periodic padding."""
        return MapCollator(
            self.extractor,
            augment=self.data_args.augment,
            shift=self.data_args.augment and model.config.padding_mode == "circular",
            shear=self.maps.info.settings.observable == "shear",
            noise_sigma=self.data_args.noise_sigma,
            seed=self.args.seed,
        )

    def before_saving(self, trainer: RegressionTrainer) -> None:
        """Fit the config's `posterior_scale` and `max_map_distance` to held-out maps.

        Skipped for sharded weights, which cannot run in one process, and for adapters, which have no config.
        """
        sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        if self.validation and not sharded and not self.tuning_args.saves_adapter:
            held_out = self.validation, trainer.data_collator, self.args.per_device_eval_batch_size
            fit_map_distance(trainer.model, *held_out)
            if self.args.fit_posterior_scale:
                with trainer.averaged_weights():
                    fit_posterior_scale(trainer.model, *held_out)

    def results(self, trainer: RegressionTrainer, metrics: dict[str, Any]):
        noise = self.data_args.noise_sigma
        return self._test(trainer), {
            "validation": metrics,
            "posterior_scale": trainer.model.config.posterior_scale,
            "peak_learning_rate": self.args.peak_learning_rate,
            "data": {"kind": self.maps.info.kind, "train_maps": len(self.train), "noise_sigma": noise},
        }

    def _test(self, trainer: RegressionTrainer) -> dict[str, Any]:
        if not self.maps.info.counts["test"] or self.data_args.max_test_samples == 0 or self.args.do_eval is False:
            return {}
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            print("skipping the test: one process cannot run a model with sharded weights; use `hrm-hf eval` instead")
            return {}
        with trainer.averaged_weights():
            return self.evaluate_rows(trainer.model, self.load_test_rows())

    def load_test_rows(self) -> MapSet:
        return load_test_maps(self.data_args, self.args.seed, self.reads_kappa)

    def evaluate_rows(self, model: PreTrainedModel, rows: MapSet) -> dict[str, Any]:
        """Return the metrics on test maps, and save plots in the run's folder."""
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
        """Select the metrics of `results` that go into the model card."""
        return posterior_card_metrics(metrics)


class MassMapRun(RegressionRun):
    """Training run for a mass mapper, configured by `MassMapDataArguments` and `MassMapTrainingArguments`."""

    task, kind, trainer_class = "mass-mapping", MASS_MAPPER, MassMapTrainer
    reads_kappa = True

    def validate_options(self) -> None:
        if self.data_args.noise_sigma:
            raise UsageError(
                f"noise_sigma={self.data_args.noise_sigma}: only for convergence maps; shear already has the noise of "
                "the data set, and --fresh_observations true draws it again at every step"
            )

    def load_model(self, quantized) -> PreTrainedModel:
        kappa_std = np.std(self.train.kappa[self.train.rows[:SCALE_MAPS]], axis=(0, 2, 3)).tolist()
        return super().load_model(quantized, kappa_std=kappa_std)

    def make_collator(self, model: Any) -> MassMapCollator:
        settings, fresh = self.maps.info.settings, self.data_args.fresh_observations
        periodic = settings.kind in PERIODIC
        if fresh and not periodic:
            raise UsageError(
                f"fresh_observations=True: maps of kind {settings.kind!r}, as in {self.data_args.data_path}, are not "
                "periodic, so their shear cannot be recomputed from the patch alone; use --fresh_observations false"
            )
        return MassMapCollator(
            self.extractor,
            augment=self.data_args.augment,
            shift=self.data_args.augment and periodic,
            shear_noise=float(settings.pixel_noise) if fresh else None,
            seed=self.args.seed,
        )

    def evaluate_rows(self, model: Any, rows: MapSet) -> dict[str, Any]:
        answers = predict_maps(model, self.extractor, rows, batch_size=self.args.per_device_eval_batch_size)
        metrics = network_metrics(answers, self.maps.info)
        title = f"{len(rows)} test maps, {self.maps.info.kind}"
        plot_network(answers, rows.maps, metrics, self.out, title)
        return metrics

    def card_metrics(self, metrics: dict[str, Any]) -> dict[str, float]:
        return map_card_metrics(metrics)
