"""Shear of patches of a larger map of convergence, with noise and masks: what a survey would see of maps from files.

`models.shear_operator` is exact on a sky whose opposite edges meet. A patch of a larger map is no such sky: the mass
beyond its edges shears it too. So the relation is applied to a cut that is larger than the patch on all sides, with
nothing around it, and the patch is its middle. What is missing is the shear by mass beyond the cut, which is smooth
over the patch. Its rms over the rms of the shear, on log-normal maps of sources at redshift 1, and in brackets without
its mean over the patch (`test_cosmology_files_shear.py` measures it):

    margin on each side    patches of 5 degrees    of 2.5 degrees
    none                   0.47 (0.38)             0.56 (0.41)
    1/4 of the patch       0.24 (0.15)             0.34 (0.19)
    1/2, the default       0.18 (0.09)             0.27 (0.13)
    as wide as the patch   0.10 (0.04)             0.15 (0.06)

Pixels of the cut that the file does not have count as the mean of those that it has: where many are missing, near them
and in the margin, the shear is less exact than that.
"""

import numpy as np

from ..simulation.survey import observe_shear
from .info import FileSettings
from .shards import Rows


MARGIN = 0.5  # on each side, in sides of the patch: the cut is twice as wide as the patch


def sheared(rows: Rows, settings: FileSettings, seed: int, number: int) -> Rows:
    """Rows of convergence with their margins as rows of shear: "map", "mask" and "kappa".

    Args:
        rows: of one reading; "map" [rows, planes, wide, wide], maybe "mask" [rows, wide, wide], "margin" in pixels.
        seed: of the data set. number: of the reading. With the number of the row they decide its noise and its mask.
    """
    wide = rows["map"].shape[-1]
    margin = int(rows["margin"][0])
    middle = np.s_[..., margin : wide - margin, margin : wide - margin]
    observed = rows.get("mask", np.ones((len(rows["map"]), wide, wide), bool))
    columns: dict[str, list[np.ndarray]] = {"map": [], "mask": [], "kappa": []}
    for row, (kappa, seen) in enumerate(zip(rows["map"], observed)):
        if not seen[middle].any():
            raise ValueError(f"{rows['source'][row]}: no pixel of its middle is observed; the patch would be empty")
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(number, row)))
        shear, mask = observe_shear(shear_of_cut(_less_mean(kappa, seen))[middle], settings, rng)
        columns["map"].append(shear * seen[middle])
        columns["mask"].append(mask & seen[middle])
        columns["kappa"].append(_less_mean(kappa[middle], seen[middle]).astype(np.float32))
    return rows | {name: np.stack(values) for name, values in columns.items()}


def shear_of_cut(kappa: np.ndarray) -> np.ndarray:
    """Shear [2 planes, wide, wide] of convergence [planes, wide, wide] with nothing around it."""
    import torch  # seconds, which maps of convergence do not need

    from ...models.shear_operator import shear_from_convergence

    wide = kappa.shape[-1]
    alone = np.zeros((len(kappa), 2 * wide, 2 * wide))  # the operator's sky is periodic: its copies are kept away
    alone[:, :wide, :wide] = kappa
    return shear_from_convergence(torch.from_numpy(alone)).numpy()[:, :wide, :wide]


def _less_mean(kappa: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Maps [planes, side, side] in double precision, of mean 0 over the observed pixels and 0 in the others."""
    kappa = kappa.astype(np.float64)
    return np.where(observed, kappa - kappa[:, observed].mean(1)[:, None, None], 0)
