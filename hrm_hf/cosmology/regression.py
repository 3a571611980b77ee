"""Maps, model and feature extractor of a regressor of cosmological parameters, from the options of a run.

The figures that scale the maps come from the data set for a fresh model, and from the checkpoint for saved weights:
those have learnt what one unit is. What does not fit together is an error here, not a crash in the first batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoFeatureExtractor, BitsAndBytesConfig, PreTrainedModel, set_seed

from ..hub.kinds import REGRESSOR, Kind
from ..io.options import parse_command
from ..io.usage import UsageError
from ..models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from ..models.posterior_head import Posterior
from ..registry import ARCHITECTURES, has_ability
from ..trainer.recipes import ModelArguments, build_config
from .dataset.build import build_maps
from .dataset.collator import EVALUATION, Batch, MapCollator, MapRows, map_noise, split_rows
from .dataset.from_files import build_from_files
from .dataset.info import CosmologyInfo
from .dataset.rows import MapSet, load_cosmology_info, map_arrays, validate_shear
from .options import BuildCosmology, BuildFromFiles
from .trainer import CosmoDataArguments


# What `build_data` may call, as the commands of `hrm-hf data`.
BUILDERS = {"cosmology": (BuildCosmology, build_maps), "cosmology-files": (BuildFromFiles, build_from_files)}
SAME = ("image_size", "num_channels", "mask_channel", "target_names")  # in saved weights and in the data
STATISTICS_MAPS = 4000  # enough for means and standard deviations, and for any memory
USUAL_SHARE = 0.995  # of held-out maps are within `max_map_distance`


@dataclass
class CosmologyMaps:
    """Maps to train on, to validate on (None without), and what the data set says of itself."""

    info: CosmologyInfo
    train: MapRows
    validation: MapRows | None

    def describe(self) -> str:
        held_out = len(self.validation) if self.validation else 0
        return f"{self.info.kind} maps: {len(self.train):,} to train on, {held_out:,} held out"


def ensure_maps(data_args: CosmoDataArguments) -> None:
    """Build or finish the data set at `data_path` with the arguments of `build_data`, if some are given.

    A data set that is there already is compared with them, so that maps of another kind are not trained on in silence.

    Raises:
        ValueError: no path, too few maps, or the data set at the path is another one.
    """
    path, command = data_args.data_path, data_args.build_data
    if path is None:
        raise ValueError("no data set: give --data_path, a cosmology data set's folder or its name on the Hub")
    if not command:
        return
    wanted = (data_args.max_train_samples or 0) + (data_args.val_samples or 0)
    try:
        name, options = parse_command(command, {each: kind for each, (kind, _) in BUILDERS.items()}, out=Path(path))
        if isinstance(options, BuildCosmology) and options.samples < wanted:  # drawing them may last hours
            raise UsageError(
                f"draws {options.samples} maps, and max_train_samples and val_samples want {wanted}; ask for fewer, "
                "or build a larger set before and give it: --data_path DIR --build_data ''"
            )
        BUILDERS[name][1](options)
    except UsageError as error:
        raise ValueError(f"build_data={command!r}: {error}") from error


def load_maps(data_args: CosmoDataArguments, kappa: bool = False) -> CosmologyMaps:
    """Open the train split, whose maps stay on the disk (`map_arrays`), and hold out its end.

    Args:
        kappa: the convergence behind shear too.

    Raises:
        UsageError: no shear. ValueError: more maps are wanted than there are, or noise for maps that have some.
    """
    info = load_cosmology_info(data_args.data_path)
    if kappa:
        validate_shear(data_args.data_path, info)
    if data_args.noise_sigma and info.settings.sigma_e:
        raise ValueError(
            f"noise_sigma={data_args.noise_sigma}, but the maps of {data_args.data_path} have shape noise already "
            f"(sigma_e={info.settings.sigma_e}); use noiseless maps, or leave it out"
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
        raise ValueError(f"max_test_samples={wanted}: the test split of {data_args.data_path} has {count}")
    maps = MapSet.read(data_args.data_path, "test", wanted, kappa)
    if not data_args.noise_sigma:
        return maps
    pixels = torch.from_numpy(maps.maps)
    # Another seed than that of training, whose validation maps have the same numbers.
    noise = map_noise(pixels, torch.arange(len(maps)), seed + 1, EVALUATION)
    return replace(maps, maps=(pixels + data_args.noise_sigma * noise).numpy())


def load_regressor(
    model_args: ModelArguments,
    data_args: CosmoDataArguments,
    info: CosmologyInfo,
    seed: int,
    quantization_config: BitsAndBytesConfig | None = None,
    kind: Kind = REGRESSOR,
    **figures: Any,
) -> tuple[PreTrainedModel, CosmoMapFeatureExtractor]:
    """A fresh model with a feature extractor for these maps, or saved ones.

    Args:
        kind: what the model has to be. figures: fields of a fresh model's config beside those that the set decides.

    Raises:
        ValueError: unknown type, preset or field; a model of another kind; saved weights for other maps.
    """
    set_seed(seed)
    auto_class = getattr(transformers, kind.auto_class)
    options = {"attn_implementation": model_args.attn_implementation}
    fields = info.config_fields() | figures
    # Maps are scaled as they are trained on: with their noise.
    fields["pixel_std"] = [float(np.hypot(std, data_args.noise_sigma)) for std in fields["pixel_std"]]
    if model_args.model_name_or_path is None:
        asked = model_args.model_type
        if asked in CONFIG_MAPPING and not kind.takes(CONFIG_MAPPING[asked]):
            known = " or ".join(row.model_type for row in ARCHITECTURES.values() if kind.has(row))
            raise ValueError(f"model_type={asked!r} is not {kind.title}; choose {known}")
        config = build_config(model_args, **fields)
        return auto_class.from_config(config, **options), CosmoMapFeatureExtractor.from_config(
            config, stretch=data_args.stretch
        )
    model = auto_class.from_pretrained(
        model_args.model_name_or_path, quantization_config=quantization_config, **options
    )
    for name in SAME:
        if getattr(model.config, name) != fields[name]:
            raise ValueError(
                f"{model_args.model_name_or_path} was made for {name}={getattr(model.config, name)}, the maps of "
                f"{data_args.data_path} have {fields[name]}; train a fresh model, or build such maps"
            )
    for name, (low, high) in zip(fields["target_names"], model.config.prior_bounds or ()):
        if info.prior[name][0] < low or info.prior[name][1] > high:
            raise ValueError(
                f"{model_args.model_name_or_path} knows {name} from {low} to {high}, the maps of "
                f"{data_args.data_path} have {info.prior[name][0]} to {info.prior[name][1]}; train a fresh model"
            )
    return model, AutoFeatureExtractor.from_pretrained(model_args.model_name_or_path)


def fit_statistics(model: PreTrainedModel, train: MapRows, collator: MapCollator, batch_size: int = 250) -> None:
    """Scales the statistics that a fresh model reads beside the maps by the first training maps, as they come."""
    if not has_ability(model, "statistics"):
        return
    batches = _plain_batches(train, collator, batch_size, STATISTICS_MAPS)
    model.fit_statistics([batch["pixel_values"] for batch in batches])


def _plain_batches(rows: MapRows, collator: MapCollator, batch_size: int, most: int | None = None) -> Iterator[Batch]:
    """The first `most` rows, or all, in their order: not augmented, with the noise of an evaluation."""
    numbers = list(range(len(rows)))[:most]
    for start in range(0, len(numbers), batch_size):
        yield collator.at_step(rows.__getitems__(numbers[start : start + batch_size]), EVALUATION)


@torch.no_grad()
def fit_posterior_scale(model: PreTrainedModel, rows: MapRows, collator: MapCollator, batch_size: int) -> float:
    """Sets the factor on all standard deviations that makes the labels of held-out maps most likely; returns it."""
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
    """Sets the distance beyond which a map is not like these held-out ones; returns it, None without statistics."""
    if not has_ability(model, "statistics"):
        return None
    distances = []
    for batch in _plain_batches(rows, collator, batch_size):
        distance = model.map_distance(batch["pixel_values"].to(model.device))
        if distance is None:
            return None
        distances.append(distance.float().cpu())
    model.config.max_map_distance = torch.cat(distances).quantile(USUAL_SHARE).item()
    return model.config.max_map_distance
