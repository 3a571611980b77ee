"""Rows, batches, augmentation and noise of maps for training.

Augmentation and fresh noise are functions of (seed, step, number of the map) without a saved generator state, so a
resumed run, dataloader workers, and two processes instead of one all see the same maps. They are tensor operations on
the batch, on its device. Evaluation maps are never augmented, and their noise depends on (seed, number) only.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from ...models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from ...models.shear_operator import shear_from_convergence


Batch = dict[str, torch.Tensor]
EVALUATION = -1  # the step of maps that are not trained on
MASK_SHARES = (0.1, 0.6, 0.2, 0.1)  # of training maps with zero, one, two and three masks


class MapRows(Dataset):
    """Maps of a split, with labels.

    Args:
        maps: float32 [N, C, H, W], an array or a `MappedColumn`. masks: bool [N, H, W] or None, likewise.
        labels: float32 [N, T], in physical units and the order of the model's targets.
        rows: numbers of the rows to use; None for all.
        training: whether `MapCollator.at_step` may augment the maps.
        kappa: true convergence float32 [N, P, H, W] of shear maps, for mass mappers.
    """

    column_names = None  # as a `datasets.Dataset` without a table

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
        """Return `maps`, `labels` [B, T], `map_index` [B], and optional `masks`, `kappa`, `training`."""
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
    """Turn a batch of `MapRows` into `pixel_values` and `labels`.

    A call leaves batches of training rows as they are; the trainer finishes them by `at_step`.

    Args:
        augment: turn and mirror each training map at random (the 8 symmetries of the square).
        shift: also move it by random whole pixels around the edges, for periodic maps.
        shear: the maps are shear, whose components change sign as the map is turned.
        noise_sigma: standard deviation of Gaussian noise on each pixel, in the unit of the maps; new at every step,
            fixed in evaluation.
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
        """Add noise to a batch of step `step`, scale it, and augment it unless the step is EVALUATION."""
        maps, masks, numbers = batch["maps"], batch.get("masks"), batch["map_index"]
        if self.noise_sigma:
            maps = maps + self.noise_sigma * map_noise(maps, numbers, self.seed, step)
        draws = None if step == EVALUATION else map_draws(numbers, self.seed, step)
        if self.shear and self.augment and draws is not None:
            maps = maps * shear_signs(draws[:, 0] % 8, maps)
        finished = {"pixel_values": self.moved(self.extractor.scale(maps, masks), draws), "labels": batch["labels"]}
        # Convergence has no direction, so its values do not change sign.
        return finished | ({"kappa": self.moved(batch["kappa"], draws)} if "kappa" in batch else {})

    def moved(self, maps: torch.Tensor, draws: torch.Tensor | None) -> torch.Tensor:
        """Turn and shift maps [B, C, S, S] by `map_draws`, as the options say; None changes nothing."""
        if draws is not None and self.augment:
            maps = turned(maps, draws[:, 0] % 8)
        return maps if draws is None or not self.shift else shifted(maps, draws[:, 1], draws[:, 2])


@dataclass
class MassMapCollator(MapCollator):
    """A `MapCollator` for rows of shear with `kappa`, which draws new observations at every training step.

    It computes shear from the complete convergence, draws shape noise, and turns and moves the mask, because a network
    memorizes fixed observations.

    Args:
        shear_noise: standard deviation of the shape noise of new observations; None uses the stored ones. Only for
            periodic maps, whose shear can be computed from the patch.
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
    """Apply to each map [B, C, S, S] the symmetry of the square of number `which` [B], 0 to 7."""
    transposed, upside_down, mirrored = (((which >> bit) & 1).bool()[:, None, None, None] for bit in range(3))
    maps = torch.where(transposed, maps.mT, maps)
    maps = torch.where(upside_down, maps.flip(-2), maps)
    return torch.where(mirrored, maps.flip(-1), maps)


def shear_signs(which: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """Return the sign [B, C, 1, 1] of each component of shear maps [B, C, S, S] that `turned` turns.

    Shear has spin 2: g1 changes sign where x and y change places, and g2 where one axis is mirrored.
    """
    transposed, upside_down, mirrored = (which >> bit & 1 for bit in range(3))
    signs = torch.stack((1 - 2 * transposed, 1 - 2 * (upside_down ^ mirrored)), dim=1)
    return signs.repeat(1, maps.shape[1] // 2)[:, :, None, None].to(maps)


def shifted(maps: torch.Tensor, down: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Move each map [B, C, H, W] by whole pixels [B] around the periodic edges."""
    height, width = maps.shape[-2:]
    rows = (torch.arange(height, device=maps.device) - down[:, None]) % height
    columns = (torch.arange(width, device=maps.device) - right[:, None]) % width
    maps = maps.gather(2, rows[:, None, :, None].expand_as(maps))
    return maps.gather(3, columns[:, None, None, :].expand_as(maps))


def map_draws(numbers: torch.Tensor, seed: int, step: int, count: int = 3) -> torch.Tensor:
    """Return random integers below 2^31 [B, count] that depend only on seed, step and each map's number."""
    start = _mixed(_mixed(numbers.new_tensor(seed) ^ 0x5DEECE66D) + step)
    streams = torch.arange(1, count + 1, device=numbers.device)
    return _mixed(_mixed(start ^ numbers)[:, None] + streams) >> 33 & 0x7FFFFFFF


def map_noise(maps: torch.Tensor, numbers: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """Draw standard normal noise for each map; it depends on the kind of device."""
    noise = torch.empty_like(maps)
    generator = torch.Generator(maps.device)
    for row, key in enumerate(map_draws(numbers, seed, step, count=4)[:, 3].tolist()):
        noise[row].normal_(generator=generator.manual_seed(key))
    return noise


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Finaliser of splitmix64 (Steele, Lea & Flood 2014) on int64 tensors; products wrap around."""
    x = x + -0x61C8864680B583EB
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 0x1FFFFFFFF)


def mixed_masks(masks: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Combine zero to three copies of each row's mask [B, S, S], each turned and moved in another way.

    A model thus meets fewer and more hidden pixels than the set has, by `MASK_SHARES`; `draws` are integers [B, 4].
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
    """Return the numbers of the first rows to train on, and of the last rows, to validate on.

    No cosmology is in both: training skips maps at the border. None validates on a tenth, at most 10,000 maps, and
    trains on all others. Raises ValueError if there are too few maps.
    """
    total = len(cosmology_id)
    wanted = min(total // 10, 10_000) if val_samples is None else val_samples
    if wanted >= total:
        raise ValueError(f"val_samples={wanted} of {total} maps leave none to train on")
    held_out = np.arange(total - wanted, total)
    free = np.arange(total - wanted)
    free = free[~np.isin(cosmology_id[free], cosmology_id[held_out])]
    if not len(free) or len(free) < (train_samples or 0):
        raise ValueError(
            f"max_train_samples={train_samples} and val_samples={wanted}: of the {total} maps of the train split "
            f"{len(free)} are of other cosmologies than the validation maps; ask for fewer or build a larger set"
        )
    return free[:train_samples], held_out
