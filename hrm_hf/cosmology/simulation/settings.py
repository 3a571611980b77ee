"""Settings of simulated maps: everything except the cosmological parameters and the seed."""

from dataclasses import dataclass
from typing import get_args

import numpy as np

from ..options import Kind, Observable
from .fields import ARCMIN, shape_noise


KINDS = get_args(Kind)
LEGACY = tuple(kind for kind in KINDS if kind.startswith("legacy-"))
PERIODIC = ("lognormal", "gaussian")  # kinds whose opposite edges match, so maps can be shifted and padded circularly
MASKED = ("des",)  # kinds whose convergence maps also have a mask of observed pixels
GENERATOR_VERSION = 1  # increase this number when the same settings and seed no longer give the same map
EDGE_SHARE = 0.5  # default fraction of hidden pixels that are beyond the survey's edge; the rest are in holes
HOLE_ARCMIN = (2.0, 12.0)  # range of the hole radii, uniform in the logarithm
OBSERVABLES = get_args(Observable)
LARGEST_GRID = 512  # maximum particles per side of the box; their displacements alone take 2 GB


@dataclass(frozen=True, kw_only=True)
class SurveySettings:
    """Observable, noise and mask of a patch of sky; subclasses add `size`, `side_deg` and `planes`.

    Args:
        observable: "convergence", or "shear": components g1 and g2 of each plane, together with their convergence.
        sigma_e: dispersion of intrinsic ellipticities, both components together; 0 for maps without noise.
        galaxies_per_arcmin2: source density of all planes together, divided evenly among them.
        mask_fraction: fraction of pixels that are hidden.
        mask_edge_share: fraction of hidden pixels beyond the survey's edge; the rest are in holes around bright stars.
        hole_arcmin: smallest and largest radius of a hole; radii are uniform in the logarithm.
    """

    observable: str = "convergence"
    sigma_e: float = 0.0
    galaxies_per_arcmin2: float = 10.0
    mask_fraction: float = 0.0
    mask_edge_share: float = EDGE_SHARE
    hole_arcmin: tuple[float, float] = HOLE_ARCMIN

    def __post_init__(self):
        if self.observable not in OBSERVABLES:
            raise ValueError(f"observable={self.observable!r}: must be one of {', '.join(OBSERVABLES)}")
        for name, valid, condition in (
            ("sigma_e", 0 <= self.sigma_e < np.inf, "must be finite and at least 0"),
            ("galaxies_per_arcmin2", 0 < self.galaxies_per_arcmin2 < np.inf, "must be positive"),
            ("mask_fraction", 0 <= self.mask_fraction < 1, "must be in [0, 1)"),
            ("mask_edge_share", 0 <= self.mask_edge_share <= 1, "must be in [0, 1]"),
        ):
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)}: {condition}")
        object.__setattr__(self, "hole_arcmin", tuple(float(radius) for radius in self.hole_arcmin))
        if len(self.hole_arcmin) != 2 or not 0 < self.hole_arcmin[0] <= self.hole_arcmin[1] < np.inf:
            raise ValueError(f"hole_arcmin={self.hole_arcmin}: must be two radii above 0, the smaller one first")

    @property
    def side_rad(self) -> float:
        return self.side_deg * 60 * ARCMIN

    @property
    def pixel_arcmin(self) -> float:
        return self.side_deg * 60 / self.size

    @property
    def pixel_noise(self) -> float:
        """Standard deviation of the shape noise in a pixel of one plane, the same for convergence, g1 and g2."""
        return shape_noise(self.sigma_e, self.galaxies_per_arcmin2 / self.planes, self.pixel_arcmin)


@dataclass(frozen=True)
class MapSettings(SurveySettings):
    """Settings of simulated maps.

    Args:
        kind: one of KINDS; shear requires a PERIODIC kind, for which `models.shear_operator` is exact.
        size: pixels per side. side_deg: side of the patch in degrees.
        source_redshifts: redshift of each source plane.
        box_mpc, box_grid: side in Mpc/h and particles per side of the box of kind "2lpt".
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
            raise ValueError(f"kind={self.kind!r}: must be one of {', '.join(KINDS)}")
        if self.size < 8:
            raise ValueError(f"size={self.size}: must be at least 8 pixels")
        if not 8 <= self.box_grid <= LARGEST_GRID or self.box_grid % 2:
            raise ValueError(f"box_grid={self.box_grid}: must be an even number from 8 to {LARGEST_GRID}")
        object.__setattr__(self, "source_redshifts", tuple(float(z) for z in self.source_redshifts))
        if not self.source_redshifts or not all(0 < z < 20 for z in self.source_redshifts):
            raise ValueError(f"source_redshifts={self.source_redshifts}: must be one or more numbers in (0, 20)")
        for name in ("side_deg", "box_mpc"):
            if not 0 < getattr(self, name) < np.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be positive")
        if self.observable == "shear" and self.kind not in PERIODIC:
            kinds = " or ".join(PERIODIC)
            found = f"kind {self.kind!r} is not periodic, so mass beyond the edges also shears it"
            raise ValueError(f"observable='shear': {found}; use {kinds}")
        if self.mask_fraction and not self.has_mask:
            raise ValueError(
                f"mask_fraction={self.mask_fraction}: kind={self.kind!r} has no mask; use 'des' or observable='shear'"
            )

    @property
    def planes(self) -> int:
        """Number of convergence planes of a map."""
        return 1 if self.kind in LEGACY else len(self.source_redshifts)

    @property
    def channels(self) -> int:
        """Number of channels of a map, without the mask."""
        return 2 * self.planes if self.observable == "shear" else self.planes

    @property
    def has_mask(self) -> bool:
        return self.kind in MASKED or self.observable == "shear"
