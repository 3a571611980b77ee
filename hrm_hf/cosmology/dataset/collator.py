"""Maps on their way to a regressor: rows out of arrays, batches, and what is done to a map anew at every step.

Augmentation and fresh noise are functions of (seed, step, number of the map), not of a generator whose state would
have to be saved: a resumed run, one with workers, and two processes instead of one all see the same maps. They run
after the batch has reached its device, as tensor operations on all of it. Evaluation maps are never augmented, and
their noise is that of (seed, number of the map) alone.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from ...models.feature_extraction_cosmo import CosmoMapFeatureExtractor
from ...models.shear_operator import shear_from_convergence


Batch = dict[str, torch.Tensor]
EVALUATION = -1  # the step of maps that are not trained on
MASK_SHARES = (0.1, 0.6, 0.2, 0.1)  # of training maps: under none, one, two and three masks at once


class MapRows(Dataset):
    """Maps of a split, with labels.

    Args:
        maps: float32 [N, C, H, W], in the unit of the data; an array, or a `MappedColumn` on the disk. So the masks.
        labels: float32 [N, T], in physical units and the order of the model's targets.
        masks: bool [N, H, W], or None.
        rows: which of them, by number; all if None. Nothing is copied.
        training: these are trained on, so `MapCollator.at_step` may change them.
        kappa: true convergence float32 [N, P, H, W] of shear maps, for models that make it; None for others.
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
        """A batch: `maps` [B, C, H, W], `labels` [B, T], `map_index` [B], and maybe `masks`, `kappa`, `training`."""
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
    """Makes what a model takes of a batch of `MapRows`: `pixel_values`, `labels`.

    Batches of training rows are left as they are by the call, and finished by `at_step`, which the trainer calls.

    Args:
        extractor: that scales the maps.
        augment: turn and mirror each training map at random (the 8 symmetries of the square).
        shift: also move it by random whole pixels around the edges, for periodic maps.
        noise_sigma: standard deviation of Gaussian noise that is added to each pixel, in the unit of the maps; new
            noise at every step, always the same in evaluation.
        seed: of all of it.
        shear: the maps are shear, whose components change sign as the map is turned.
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
        """A batch as the model takes it after `step` steps: with noise, scaled, and augmented unless in EVALUATION."""
        maps, masks, numbers = batch["maps"], batch.get("masks"), batch["map_index"]
        if self.noise_sigma:
            maps = maps + self.noise_sigma * map_noise(maps, numbers, self.seed, step)
        draws = None if step == EVALUATION else map_draws(numbers, self.seed, step)
        if self.shear and self.augment and draws is not None:
            maps = maps * shear_signs(draws[:, 0] % 8, maps)
        finished = {"pixel_values": self.moved(self.extractor.scale(maps, masks), draws), "labels": batch["labels"]}
        # Convergence is turned as it is: it has no direction.
        return finished | ({"kappa": self.moved(batch["kappa"], draws)} if "kappa" in batch else {})

    def moved(self, maps: torch.Tensor, draws: torch.Tensor | None) -> torch.Tensor:
        """Maps [B, C, S, S] turned and shifted by `map_draws`, as far as this collator does; as they are without."""
        if draws is not None and self.augment:
            maps = turned(maps, draws[:, 0] % 8)
        return maps if draws is None or not self.shift else shifted(maps, draws[:, 1], draws[:, 2])


@dataclass
class MassMapCollator(MapCollator):
    """As `MapCollator`, of rows of shear with `kappa`, which can be observed anew at every training step.

    The convergence of a data set is free of noise and complete, so a training step need not see the one observation
    that is stored with it: it draws shape noise, and turns and moves the mask. On fixed observations a network learns
    these by heart.

    Args:
        shear_noise: standard deviation of the shape noise that training maps get anew, with other masks; None leaves
            them as they are stored. Only for periodic maps, whose shear can be computed from the patch alone.
    """

    shear: bool = True
    shear_noise: float | None = None

    def at_step(self, batch: Batch, step: int) -> Batch:
        """As in the base; training maps get noise and masks of their own at each step."""
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
    """Each map [B, C, S, S] under one of the 8 symmetries of the square, by its number 0..7 in `which` [B]."""
    transposed, upside_down, mirrored = (((which >> bit) & 1).bool()[:, None, None, None] for bit in range(3))
    maps = torch.where(transposed, maps.mT, maps)
    maps = torch.where(upside_down, maps.flip(-2), maps)
    return torch.where(mirrored, maps.flip(-1), maps)


def shear_signs(which: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """Factors [B, C, 1, 1] of shear maps [B, C, S, S] which `turned` is to turn.

    Shear has spin 2: g1 changes sign where x and y change places, and g2 where one axis is mirrored. Without that a
    turned map would be the shear of no mass.
    """
    transposed, upside_down, mirrored = (which >> bit & 1 for bit in range(3))
    signs = torch.stack((1 - 2 * transposed, 1 - 2 * (upside_down ^ mirrored)), dim=1)
    return signs.repeat(1, maps.shape[1] // 2)[:, :, None, None].to(maps)


def shifted(maps: torch.Tensor, down: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Each map [B, C, H, W] moved by whole pixels [B]; what leaves at one edge comes in at the other."""
    height, width = maps.shape[-2:]
    rows = (torch.arange(height, device=maps.device) - down[:, None]) % height
    columns = (torch.arange(width, device=maps.device) - right[:, None]) % width
    maps = maps.gather(2, rows[:, None, :, None].expand_as(maps))
    return maps.gather(3, columns[:, None, None, :].expand_as(maps))


def map_draws(numbers: torch.Tensor, seed: int, step: int, count: int = 3) -> torch.Tensor:
    """Random integers 0..2^31 - 1 [B, count] that depend on seed, step and each map's number alone."""
    start = _mixed(_mixed(numbers.new_tensor(seed) ^ 0x5DEECE66D) + step)
    streams = torch.arange(1, count + 1, device=numbers.device)
    return _mixed(_mixed(start ^ numbers)[:, None] + streams) >> 33 & 0x7FFFFFFF


def map_noise(maps: torch.Tensor, numbers: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """Standard normal noise in the shape of the maps, each map's own; on another kind of device it is another."""
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
    """The pixels that none, one, two or three masks leave, a row's own [B, S, S], each turned and moved another way.

    So a model meets fewer and more hidden pixels than the set has, by `MASK_SHARES`.

    Args:
        draws: random integers [B, 4].
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
    """Numbers of the rows to train on, from the start, and of those to validate on, from the end.

    No cosmology is in both: maps of one at the border are left out of training.

    Args:
        cosmology_id: of each row. train_samples: maps to train on; all that are left if None.
        val_samples: maps to validate on; a tenth, at most 10,000, if None.

    Raises:
        ValueError: more maps are wanted than there are.
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
