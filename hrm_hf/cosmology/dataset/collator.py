"""Rows and batches of training maps, with augmentation and noise.

Augmentation and fresh noise depend only on (seed, step, number of the map), not on the state of a random generator, so
a map is the same in a resumed run and for any number of workers or processes. Both are tensor operations on the device
of the batch. Evaluation maps are never augmented, and their noise depends only on (seed, number).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from ...models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from ...models.shear_operator import shear_from_convergence


Batch = dict[str, torch.Tensor]
EVALUATION = -1  # value of `step` for evaluation maps
MASK_SHARES = (0.1, 0.6, 0.2, 0.1)  # fractions of training maps with zero, one, two and three masks


class MapRows(Dataset):
    """Maps from one split, with labels.

    Args:
        maps: float32 [N, C, H, W], an array or a `MappedColumn`. masks: in the same form, bool [N, H, W], or None.
        labels: float32 [N, T], in physical units and in the order of the model's targets.
        rows: indices of the rows to use; None for all.
        training: whether `MapCollator` passes batches on unchanged, for `at_step` to augment.
        kappa: true convergence of shear maps, float32 [N, P, H, W], for mass mappers.
    """

    column_names = None  # tells Trainer that this dataset has no columns

    def __init__(
        self,
        maps: np.ndarray,
        labels: np.ndarray,
        masks: np.ndarray | None = None,
        rows: np.ndarray | None = None,
        training: bool = False,
        kappa: np.ndarray | None = None,
    ):
        self.maps, self.labels, self.masks, self.training, self.kappa = maps, labels, masks, training, kappa
        self.rows = np.arange(len(maps)) if rows is None else np.asarray(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        """Return the rows' `maps`, `labels` [B, T], `map_index` [B], and optional `masks`, `kappa`, `training`."""
        rows = self.rows[indices]
        batch = {
            "maps": torch.from_numpy(self.maps[rows]),
            "labels": torch.from_numpy(self.labels[rows]),
            "map_index": torch.from_numpy(rows.astype(np.int64)),
        }
        for name, values in (("masks", self.masks), ("kappa", self.kappa)):
            if values is not None:
                batch[name] = torch.from_numpy(values[rows])
        return batch | ({"training": torch.ones(len(rows), dtype=torch.bool)} if self.training else {})


@dataclass
class MapCollator:
    """Collator that converts a batch of `MapRows` to `pixel_values` and `labels`.

    Calling the collator returns training batches unchanged. The trainer passes them and the step to `at_step`.

    Args:
        augment: rotate and flip each training map at random (the 8 symmetries of the square).
        shift: also shift training maps by a random number of pixels around the edges; for periodic maps.
        shear: whether the maps are shear, whose components can change sign when a map is rotated or flipped.
        noise_sigma: standard deviation of Gaussian noise added to each pixel, in map units; training maps get new
            noise at every step, evaluation maps always the same.
    """

    extractor: CosmoMapFeatureExtractor
    augment: bool = True
    shift: bool = False
    shear: bool = False
    noise_sigma: float = 0.0
    seed: int = 0

    def __call__(self, batch: Batch) -> Batch:
        return batch if "training" in batch else self.at_step(batch, EVALUATION)

    def at_step(self, batch: Batch, step: int) -> Batch:
        """Add noise to a batch and scale the maps; also augment the maps unless `step` is EVALUATION."""
        maps, masks, numbers = batch["maps"], batch.get("masks"), batch["map_index"]
        if self.noise_sigma:
            maps = maps + self.noise_sigma * map_noise(maps, numbers, self.seed, step)
        draws = None if step == EVALUATION else map_draws(numbers, self.seed, step)
        if self.shear and self.augment and draws is not None:
            maps = maps * shear_signs(draws[:, 0] % 8, maps)
        finished = {"pixel_values": self.moved(self.extractor.scale(maps, masks), draws), "labels": batch["labels"]}
        # Convergence is a scalar, so rotating a map does not change the sign of its values.
        return finished | ({"kappa": self.moved(batch["kappa"], draws)} if "kappa" in batch else {})

    def moved(self, maps: torch.Tensor, draws: torch.Tensor | None) -> torch.Tensor:
        """Rotate, flip and shift maps [B, C, S, S] by `draws`, if enabled. Without `draws`, return them unchanged."""
        if draws is not None and self.augment:
            maps = turned(maps, draws[:, 0] % 8)
        return maps if draws is None or not self.shift else shifted(maps, draws[:, 1], draws[:, 2])


@dataclass
class MassMapCollator(MapCollator):
    """Collator for shear maps with `kappa`, which can simulate new observations at every training step.

    A network would memorize fixed observations. New observations have shear computed from the full convergence, new
    shape noise, and a mask that is rotated, flipped and shifted.

    Args:
        shear_noise: standard deviation of the shape noise of new observations; None uses the stored observations. New
            observations need periodic maps, whose shear can be computed from the patch alone.
    """

    shear: bool = True
    shear_noise: float | None = None

    def at_step(self, batch: Batch, step: int) -> Batch:
        if self.shear_noise is None or step == EVALUATION:
            return super().at_step(batch, step)
        numbers = batch["map_index"]
        draws = map_draws(numbers, self.seed, step, count=8)
        kappa = self.moved(batch["kappa"], draws)
        noise = self.shear_noise * map_noise(batch["maps"], numbers, self.seed, step)
        masks = mixed_masks(batch["masks"], draws[:, 4:])
        shear = (shear_from_convergence(kappa) + noise) * masks[:, None]
        return {"pixel_values": self.extractor.scale(shear, masks), "labels": batch["labels"], "kappa": kappa}


def turned(maps: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Apply one of the 8 symmetries of the square to each map [B, C, S, S], chosen by `which` [B], 0 to 7."""
    transposed, upside_down, mirrored = (((which >> bit) & 1).bool()[:, None, None, None] for bit in range(3))
    maps = torch.where(transposed, maps.mT, maps)
    maps = torch.where(upside_down, maps.flip(-2), maps)
    return torch.where(mirrored, maps.flip(-1), maps)


def shear_signs(which: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """Return the sign [B, C, 1, 1] that each component of shear maps [B, C, S, S] gets when `turned` is applied.

    Shear has spin 2: g1 changes sign if x and y are swapped, and g2 if one axis is mirrored.
    """
    transposed, upside_down, mirrored = (which >> bit & 1 for bit in range(3))
    signs = torch.stack((1 - 2 * transposed, 1 - 2 * (upside_down ^ mirrored)), dim=1)
    return signs.repeat(1, maps.shape[1] // 2)[:, :, None, None].to(maps)


def shifted(maps: torch.Tensor, down: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Shift each map [B, C, H, W] by an integer number of pixels [B], with periodic edges."""
    height, width = maps.shape[-2:]
    rows = (torch.arange(height, device=maps.device) - down[:, None]) % height
    columns = (torch.arange(width, device=maps.device) - right[:, None]) % width
    maps = maps.gather(2, rows[:, None, :, None].expand_as(maps))
    return maps.gather(3, columns[:, None, None, :].expand_as(maps))


def map_draws(numbers: torch.Tensor, seed: int, step: int, count: int = 3) -> torch.Tensor:
    """Return random integers below 2^31, [B, count], that depend only on seed, step and map number."""
    start = _mixed(_mixed(numbers.new_tensor(seed) ^ 0x5DEECE66D) + step)
    streams = torch.arange(1, count + 1, device=numbers.device)
    return _mixed(_mixed(start ^ numbers)[:, None] + streams) >> 33 & 0x7FFFFFFF


def map_noise(maps: torch.Tensor, numbers: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """Draw standard normal noise for each map; the values differ between device types."""
    noise = torch.empty_like(maps)
    generator = torch.Generator(maps.device)
    for row, key in enumerate(map_draws(numbers, seed, step, count=4)[:, 3].tolist()):
        noise[row].normal_(generator=generator.manual_seed(key))
    return noise


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of splitmix64 (Steele, Lea & Flood 2014) to int64 tensors; products wrap around."""
    x = x + -0x61C8864680B583EB
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 0x1FFFFFFFF)


def mixed_masks(masks: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Combine zero to three copies of each row's mask [B, S, S], each rotated and shifted differently.

    With `MASK_SHARES`, a model sees both fewer and more hidden pixels than in the data set. `draws`: integers [B, 4].
    """
    ends = torch.tensor(MASK_SHARES, device=masks.device).cumsum(0)
    count = torch.bucketize(draws[:, 0] % 1000 / 1000, ends, right=True)
    mixed = torch.ones_like(masks)
    for number in range(1, len(MASK_SHARES)):
        other = turned(masks.unsqueeze(1), (draws[:, 1] + number) % 8)
        other = shifted(other, draws[:, 2] * number, draws[:, 3] * number).squeeze(1)
        mixed = mixed & (other | (count < number)[:, None, None])
    return mixed


def split_rows(
    cosmology_id: np.ndarray, train_samples: int | None, val_samples: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the first rows, for training, and of the last rows, for validation.

    No cosmology is in both: training skips maps that share one with a validation map. By default, a tenth of the maps
    (at most 10,000) are for validation and all others for training. Raises ValueError if there are too few maps.
    """
    total = len(cosmology_id)
    wanted = min(total // 10, 10_000) if val_samples is None else val_samples
    if wanted >= total:
        raise ValueError(f"val_samples={wanted}: the train split has {total} maps, so none are left to train on")
    held_out = np.arange(total - wanted, total)
    free = np.arange(total - wanted)
    free = free[~np.isin(cosmology_id[free], cosmology_id[held_out])]
    if not len(free) or len(free) < (train_samples or 0):
        raise ValueError(
            f"max_train_samples={train_samples} and val_samples={wanted}: only {len(free)} of the {total} maps of the "
            "train split share no cosmology with the validation maps; reduce them or build a larger data set"
        )
    return free[:train_samples], held_out
