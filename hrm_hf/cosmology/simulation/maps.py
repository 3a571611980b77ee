"""The kinds of maps, behind one function: settings, two parameters and a seed give a map.

"lognormal" is the default and the one that results are stated for. The `legacy-*` kinds are the generators of the
original repository, which delete the amplitude that lensing measures: for compatibility tests only.
"""

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from ..options import Kind
from .background import Cosmology
from .fields import gaussian_convergence, lognormal_convergence
from .lpt import lpt_convergence, validate_box
from .survey import SurveySettings, observe_shear, survey_maps


KINDS = get_args(Kind)
LEGACY = tuple(kind for kind in KINDS if kind.startswith("legacy-"))
PERIODIC = ("lognormal", "gaussian")  # opposite edges meet: maps may be shifted, and padded in circles
MASKED = ("des",)  # come with a mask of observed pixels, whatever is observed
GENERATOR_VERSION = 1  # raised when the same settings and seed would give another map


@dataclass(frozen=True)
class MapSettings(SurveySettings):
    """How maps are made; everything but the cosmological parameters and the seed.

    Args:
        kind: one of KINDS. size: pixels a side. side_deg: side of the patch in degrees.
        source_redshifts: one channel for each plane of sources.
        box_mpc, box_grid: side in Mpc/h and particles a side of the box of kind "2lpt".
        The others: see `SurveySettings`. Shear is of PERIODIC kinds, on which `models.shear_operator` is exact; a
            mask is of kind "des", or of shear.
    """

    kind: str = "lognormal"
    size: int = 64
    side_deg: float = 5.0
    source_redshifts: tuple[float, ...] = (1.0,)
    box_mpc: float = 256.0
    box_grid: int = 64

    def __post_init__(self):
        super().__post_init__()
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is not one of {', '.join(KINDS)}")
        if self.size < 8 or self.box_grid < 8:
            raise ValueError(f"size={self.size} and box_grid={self.box_grid} must be at least 8 pixels")
        object.__setattr__(self, "source_redshifts", tuple(float(z) for z in self.source_redshifts))
        if not self.source_redshifts or not all(0 < z < 20 for z in self.source_redshifts):
            raise ValueError(f"source_redshifts={self.source_redshifts} must be one or more numbers between 0 and 20")
        for name in ("side_deg", "box_mpc"):
            if not 0 < getattr(self, name) < np.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.observable == "shear" and self.kind not in PERIODIC:
            raise ValueError(
                f"observable='shear' of kind {self.kind!r}: mass beyond its edges shears it, and the maps do not show "
                f"that; use {' or '.join(PERIODIC)}"
            )
        if self.mask_fraction and not self.has_mask:
            raise ValueError(
                f"mask_fraction={self.mask_fraction}: convergence of kind {self.kind!r} has no mask; use des or shear"
            )
        if self.kind == "2lpt":
            validate_box(self.box_mpc, self.box_grid)

    @property
    def planes(self) -> int:
        """Convergence maps behind a map."""
        return 1 if self.kind in LEGACY else len(self.source_redshifts)

    @property
    def channels(self) -> int:
        """Channels of a map, a mask not counted."""
        return 2 * self.planes if self.observable == "shear" else self.planes

    @property
    def has_mask(self) -> bool:
        return self.kind in MASKED or self.observable == "shear"


def generate_map(
    settings: MapSettings, omega_m: float, sigma_8: float, seed: int | np.random.SeedSequence
) -> tuple[np.ndarray, np.ndarray | None]:
    """One map: float32 [channels, size, size], and bool [size, size] (True: observed) where there is a mask.

    The same arguments give the same map in every process. Physical kinds are convergence, dimensionless and with its
    amplitude, that of the observed pixels of a patch with mean 0 before noise; legacy kinds are grey
    values from 0 to 1, whatever sigma_8. Shear is dimensionless, and 0 where not observed.
    """
    columns = generate_columns(settings, omega_m, sigma_8, seed)
    return columns["map"], columns.get("mask")


def generate_columns(
    settings: MapSettings, omega_m: float, sigma_8: float, seed: int | np.random.SeedSequence
) -> dict[str, Any]:
    """Columns of one map in a data set: "map" and maybe "mask" as in `generate_map`, and of shear "kappa".

    That is the convergence, float32 [planes, size, size], without noise and everywhere: the map that is to be found.
    It is the one that the same seed gives as convergence without noise.
    """
    rng = np.random.default_rng(seed)
    if settings.observable == "shear":
        return _shear(settings, Cosmology(omega_m, sigma_8), rng)
    maps, mask = _convergence(settings, omega_m, sigma_8, rng)
    return {"map": maps} if mask is None else {"map": maps, "mask": mask}


def _shear(settings: MapSettings, cosmology: Cosmology, rng: np.random.Generator) -> dict[str, Any]:
    import torch  # seconds in each worker, which other maps do not need

    from ...models.shear_operator import shear_from_convergence

    kappa = _periodic_convergence(settings, cosmology, rng)
    shear = shear_from_convergence(torch.from_numpy(kappa)).numpy()
    shear, mask = observe_shear(shear, settings, rng)
    return {"map": shear, "mask": mask, "kappa": kappa.astype(np.float32)}


def _convergence(
    settings: MapSettings, omega_m: float, sigma_8: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray | None]:
    if settings.kind in LEGACY:
        from . import legacy as cosmology_legacy

        name = "legacy_" + settings.kind.removeprefix("legacy-").replace("-", "_")
        return getattr(cosmology_legacy, name)(omega_m, settings.size, rng), None
    cosmology = Cosmology(omega_m, sigma_8)
    if settings.kind == "des":
        return survey_maps(cosmology, settings, rng)
    if settings.kind == "2lpt":
        kappa = _without_mean(lpt_convergence(cosmology, settings, rng))
    else:
        kappa = _periodic_convergence(settings, cosmology, rng)
    if settings.sigma_e:
        kappa = kappa + settings.pixel_noise * rng.standard_normal(kappa.shape)
    return kappa.astype(np.float32), None


def _periodic_convergence(settings: MapSettings, cosmology: Cosmology, rng: np.random.Generator) -> np.ndarray:
    draw = lognormal_convergence if settings.kind == "lognormal" else gaussian_convergence
    return _without_mean(draw(cosmology, settings.size, settings.side_rad, rng, settings.source_redshifts))


def _without_mean(kappa: np.ndarray) -> np.ndarray:
    """Maps [planes, size, size] of mean 0.

    Shear leaves the mean of a patch open (the mass-sheet degeneracy: Falco, Gorenstein & Shapiro 1985). A log-normal
    patch would also give away its cosmic variance by it: the Gaussian field has no mode at ell = 0.
    """
    return kappa - kappa.mean((1, 2), keepdims=True)
