"""The kinds of maps, behind one function: settings, two parameters and a seed give a map.

"lognormal" is the default and the one that results are stated for. The `legacy-*` kinds are the generators of the
original repository, which delete the amplitude that lensing measures: for compatibility tests only.
"""

from typing import Any

import numpy as np

from .background import Cosmology
from .fields import gaussian_convergence, lognormal_convergence
from .lpt import lpt_convergence
from .settings import LEGACY, MapSettings
from .survey import observe_shear, survey_maps


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
