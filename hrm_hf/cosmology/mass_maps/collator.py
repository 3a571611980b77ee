"""Shear maps with the convergence behind them, observed anew at every training step.

The convergence of a data set is free of noise and whole, so that a training step need not see the one observation that
is stored with it: it draws shape noise, and turns and moves the mask. On fixed observations a network learns these by
heart.
"""

from dataclasses import dataclass

import torch

from ...models.shear_operator import shear_from_convergence
from ..dataset.collator import Batch, MapCollator, map_draws, map_noise, shifted, turned


MASK_SHARES = (0.1, 0.6, 0.2, 0.1)  # of training maps: under none, one, two and three masks at once


@dataclass
class MassMapCollator(MapCollator):
    """As `MapCollator`, of rows with `kappa`; batches have that too.

    Args:
        shear_noise: standard deviation of the shape noise that training maps get anew, with other masks; None leaves
            them as they are stored. Only for periodic maps, whose shear can be computed from the patch alone.
    """

    shear: bool = True
    shear_noise: float | None = None

    def at_step(self, batch: Batch, step: int) -> Batch:
        """A training batch as the model takes it, in the optimizer step after `step` steps."""
        if self.shear_noise is None:
            return super().at_step(batch, step)
        numbers = batch["map_index"]
        draws = map_draws(numbers, self.seed, step, count=8)
        kappa = self.moved(batch["kappa"], draws)
        noise = self.shear_noise * map_noise(batch["maps"], numbers, self.seed, step)
        masks = mixed_masks(batch["masks"], draws[:, 4:])
        shear = (shear_from_convergence(kappa) + noise) * masks[:, None]
        return {"pixel_values": self.extractor.scale(shear, masks), "labels": batch["labels"], "kappa": kappa}


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
