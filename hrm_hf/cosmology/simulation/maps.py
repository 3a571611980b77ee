"""The kinds of maps, behind one function: settings, two parameters and a seed give a map.

"lognormal" is the default and the one that results are stated for. The `legacy-*` kinds are the generators of the
original repository, which delete the amplitude that lensing measures: for compatibility tests only.
"""

from dataclasses import dataclass

import numpy as np

from .background import Cosmology
from .fields import ARCMIN, gaussian_convergence, lognormal_convergence, multipole_grid, shape_noise
from .lpt import lpt_convergence, validate_box
from .survey import smooth_observed, survey_maps


KINDS = ("lognormal", "gaussian", "2lpt", "des", "legacy-synthetic", "legacy-des", "legacy-2lpt")
LEGACY = tuple(kind for kind in KINDS if kind.startswith("legacy-"))
PERIODIC = ("lognormal", "gaussian")  # opposite edges meet: maps may be shifted, and padded in circles
MASKED = ("des",)  # come with a mask of observed pixels
GENERATOR_VERSION = 1  # raised when the same settings and seed would give another map


@dataclass(frozen=True)
class MapSettings:
    """How maps are made; everything but the cosmological parameters and the seed.

    Args:
        kind: one of KINDS. size: pixels a side. side_deg: side of the patch in degrees.
        source_redshifts: one channel for each plane of sources.
        sigma_e: dispersion of intrinsic ellipticities, both components; 0 for maps without noise.
        galaxies_per_arcmin2: sources of all channels together, which share them evenly.
        smoothing_arcmin: standard deviation of a Gaussian smoothing, in arcmin; 0 for none.
        mask_fraction: share of pixels that are not observed (kind "des").
        box_mpc, box_grid: side in Mpc/h and particles a side of the box of kind "2lpt".
    """

    kind: str = "lognormal"
    size: int = 64
    side_deg: float = 5.0
    source_redshifts: tuple[float, ...] = (1.0,)
    sigma_e: float = 0.0
    galaxies_per_arcmin2: float = 10.0
    smoothing_arcmin: float = 0.0
    mask_fraction: float = 0.0
    box_mpc: float = 256.0
    box_grid: int = 64

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is not one of {', '.join(KINDS)}")
        if self.size < 8 or self.box_grid < 8:
            raise ValueError(f"size={self.size} and box_grid={self.box_grid} must be at least 8 pixels")
        object.__setattr__(self, "source_redshifts", tuple(float(z) for z in self.source_redshifts))
        if not self.source_redshifts or not all(0 < z < 20 for z in self.source_redshifts):
            raise ValueError(f"source_redshifts={self.source_redshifts} must be one or more numbers between 0 and 20")
        for name in ("side_deg", "galaxies_per_arcmin2", "box_mpc"):
            if not 0 < getattr(self, name) < np.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        for name in ("sigma_e", "smoothing_arcmin"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or more")
        if not 0 <= self.mask_fraction < 1:
            raise ValueError(f"mask_fraction={self.mask_fraction} is not a share from 0 to below 1")
        if self.mask_fraction and self.kind not in MASKED:
            raise ValueError(f"mask_fraction={self.mask_fraction}: maps of kind {self.kind!r} have no mask; use des")
        if self.kind == "2lpt":
            validate_box(self.box_mpc, self.box_grid)

    @property
    def channels(self) -> int:
        """Planes of a map, a mask not counted."""
        return 1 if self.kind in LEGACY else len(self.source_redshifts)

    @property
    def has_mask(self) -> bool:
        return self.kind in MASKED

    @property
    def side_rad(self) -> float:
        """Side of the patch in radians."""
        return self.side_deg * 60 * ARCMIN

    @property
    def pixel_arcmin(self) -> float:
        """Side of a pixel in arcmin."""
        return self.side_deg * 60 / self.size

    @property
    def pixel_noise(self) -> float:
        """Standard deviation of the shape noise of a pixel of one channel."""
        share = self.galaxies_per_arcmin2 / len(self.source_redshifts)
        return shape_noise(self.sigma_e, share, self.pixel_arcmin)


def generate_map(
    settings: MapSettings, omega_m: float, sigma_8: float, seed: int | np.random.SeedSequence
) -> tuple[np.ndarray, np.ndarray | None]:
    """One map: float32 [channels, size, size], and bool [size, size] (True: observed) for kinds that have a mask.

    The same arguments give the same map in every process. Physical kinds are convergence, dimensionless and with its
    amplitude, that of the observed pixels of a patch with mean 0 before noise and smoothing; legacy kinds are grey
    values from 0 to 1, whatever sigma_8.
    """
    rng = np.random.default_rng(seed)
    if settings.kind in LEGACY:
        from . import legacy as cosmology_legacy

        name = "legacy_" + settings.kind.removeprefix("legacy-").replace("-", "_")
        return getattr(cosmology_legacy, name)(omega_m, settings.size, rng), None
    cosmology = Cosmology(omega_m, sigma_8)
    if settings.kind == "des":
        return survey_maps(cosmology, settings, rng)
    if settings.kind == "2lpt":
        kappa = lpt_convergence(cosmology, settings, rng)
    else:
        draw = lognormal_convergence if settings.kind == "lognormal" else gaussian_convergence
        kappa = draw(cosmology, settings.size, settings.side_rad, rng, settings.source_redshifts)
    # Shear leaves the mean of a patch open (the mass-sheet degeneracy: Falco, Gorenstein & Shapiro 1985). A log-normal
    # patch would also give away its cosmic variance by it: the Gaussian field has no mode at ell = 0.
    kappa = kappa - kappa.mean((1, 2), keepdims=True)
    return observe(kappa, settings, rng).astype(np.float32), None


def observe(kappa: np.ndarray, settings: MapSettings, rng: np.random.Generator) -> np.ndarray:
    """Adds shape noise to maps [channels, size, size], then smooths them, as the settings say.

    Opposite edges are neighbours of each other in maps of a PERIODIC kind alone; at those of others the Gaussian mean
    is over the pixels that there are.
    """
    if settings.sigma_e:
        kappa = kappa + settings.pixel_noise * rng.standard_normal(kappa.shape)
    if settings.smoothing_arcmin and settings.kind not in PERIODIC:
        everywhere = np.ones(kappa.shape[-2:], bool)
        return smooth_observed(kappa, everywhere, settings.smoothing_arcmin / settings.pixel_arcmin)
    if settings.smoothing_arcmin:
        ell = multipole_grid(settings.size, settings.side_rad)
        beam = np.exp(-0.5 * (ell * settings.smoothing_arcmin * ARCMIN) ** 2)
        kappa = np.fft.irfft2(np.fft.rfft2(kappa) * beam, s=kappa.shape[-2:])
    return kappa


__all__ = ["GENERATOR_VERSION", "KINDS", "LEGACY", "MASKED", "PERIODIC", "MapSettings", "generate_map", "observe"]
