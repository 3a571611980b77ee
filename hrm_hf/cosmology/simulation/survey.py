"""Convergence as a lensing survey observes it: shape noise and a footprint with holes; maps of kind "des".

`SurveySettings` are those of drawn maps and of maps from files alike. Maps of kind "des" are made so:

1. Log-normal convergence of the source planes of `settings.source_redshifts`, with the right cross spectra, on a
   periodic sky of 1.5 times the side; the patch is cut out of it, so opposite edges do not meet. The mean of each
   plane over the observed pixels is taken out, for shear does not measure it.
2. Shape noise in each pixel and plane, variance sigma_e^2 / (2 n A): A the area of a pixel, n the density of galaxies
   of one plane, an even share of `galaxies_per_arcmin2`.
3. A mask for all planes: one rough edge of the footprint and round holes around bright stars.

Unobserved pixels are 0 in every plane and False in the mask, which is an array of its own: what a 0 means is never
left to a guess. Left out: the spread of redshifts within a plane, densities, ellipticities and masks that differ
between planes, variable depth, intrinsic alignments, and what a reconstruction from shears adds (correlated noise,
leakage at the mask).

`DES_Y3` is like the real survey, no more: the figures are rounded after Myles et al. 2021 (arXiv 2012.08566; mean
redshifts) and Gatti et al. 2021 (arXiv 2011.03408; density and ellipticity of all sources together) and were not
checked against the papers' tables.
"""

import numpy as np

from .background import Cosmology
from .fields import lognormal_convergence
from .settings import EDGE_SHARE, HOLE_ARCMIN, MapSettings, SurveySettings


# Arguments of MapSettings, approximate.
# Each component of ellipticity has a dispersion of 0.26; sigma_e is that of both.
DES_Y3 = {"source_redshifts": (0.34, 0.52, 0.74, 0.94), "galaxies_per_arcmin2": 5.59, "sigma_e": 0.26 * 2**0.5}
MARGIN = 1.5  # side of the periodic sky over that of the patch: opposite edges are half a side apart, not neighbours
EDGE_ROUGHNESS = 0.1  # rms of the edge around a straight line, in sides


def survey_maps(
    cosmology: Cosmology, settings: MapSettings, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draws the maps of one patch.

    Returns:
        convergence, dimensionless, float32 [planes, size, size], 0 where not observed; and the mask, bool
        [size, size], True where observed.
    """
    wide = int(np.ceil(MARGIN * settings.size))
    side = settings.side_rad * wide / settings.size
    kappa = lognormal_convergence(cosmology, wide, side, rng, settings.source_redshifts)
    signal = kappa[:, : settings.size, : settings.size]
    noise = settings.pixel_noise * rng.standard_normal(signal.shape) if settings.sigma_e else 0.0
    shape = settings.mask_edge_share, settings.hole_arcmin
    mask = survey_mask(settings.size, settings.pixel_arcmin, settings.mask_fraction, rng, *shape)
    # As in `generate_map`: the mean of a patch is not observable, and here neither is that of what the mask hides.
    kappa = signal - signal[:, mask].mean(1)[:, None, None] + noise
    return (kappa * mask).astype(np.float32), mask


def observe_shear(
    shear: np.ndarray, settings: SurveySettings, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Adds shape noise to shear [2 planes, size, size] and hides what is not observed.

    Returns:
        the shear, float32, 0 where not observed; and the mask, bool [size, size], True where observed.
    """
    if settings.sigma_e:
        shear = shear + settings.pixel_noise * rng.standard_normal(shear.shape)
    shape = settings.mask_edge_share, settings.hole_arcmin
    mask = survey_mask(shear.shape[-1], settings.pixel_arcmin, settings.mask_fraction, rng, *shape)
    return (shear * mask).astype(np.float32), mask


def survey_mask(
    size: int,
    pixel_arcmin: float,
    fraction: float,
    rng: np.random.Generator,
    edge_share: float = EDGE_SHARE,
    hole_arcmin: tuple[float, float] = HOLE_ARCMIN,
) -> np.ndarray:
    """A random footprint, bool [size, size], True where observed; round(fraction size^2) pixels are not.

    Args:
        pixel_arcmin: side of a pixel. fraction: share of unobserved pixels, 0 to below 1.
        edge_share: of these, the share beyond the edge; the others are in holes.
        hole_arcmin: smallest and largest radius of a hole.
    """
    hidden = min(round(fraction * size * size), size * size - 1)
    mask = np.ones(size * size, bool)
    beyond_edge = np.argsort(_edge(size, rng).ravel())[size * size - round(edge_share * hidden) :]
    mask[beyond_edge] = False
    mask = mask.reshape(size, size)
    left = hidden - len(beyond_edge)
    for centre in rng.permutation(size * size):  # more than enough: a hole takes at least the pixel at its centre
        if not left:
            break
        row, column = divmod(centre, size)
        if mask[row, column]:
            left -= _punch(mask, row, column, np.exp(rng.uniform(*np.log(hole_arcmin))) / pixel_arcmin, left)
    return mask


def _punch(mask: np.ndarray, row: int, column: int, radius: float, most: int) -> int:
    """Makes a round hole of at most `most` pixels; returns how many observed pixels fell into it."""
    reach = int(radius)
    near = np.s_[max(row - reach, 0) : row + reach + 1, max(column - reach, 0) : column + reach + 1]
    rows, columns = np.indices(mask[near].shape)
    distance = np.hypot(rows + near[0].start - row, columns + near[1].start - column)
    hole = np.argwhere(mask[near] & (distance <= radius))
    hole = hole[np.argsort(distance[tuple(hole.T)], kind="stable")][:most]
    mask[near][tuple(hole.T)] = False
    return len(hole)


def _edge(size: int, rng: np.random.Generator) -> np.ndarray:
    """Signed distance from a rough line across the patch, in sides, [size, size]; the survey lies on the low side."""
    direction = rng.uniform(0, 2 * np.pi)
    place = (np.arange(size) + 0.5) / size - 0.5
    straight = np.cos(direction) * place[:, None] + np.sin(direction) * place
    waves = np.arange(1, 6)[:, None]  # down to a fifth of the side, at random phases
    rough = np.sin(2 * np.pi * (waves * place + rng.random((2, len(waves), 1)))).sum(1) / np.sqrt(len(waves))
    return straight + EDGE_ROUGHNESS * (rough[0][:, None] + rough[1])
