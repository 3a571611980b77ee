"""Reconstruct mass maps from noisy, masked shear without a trained model.

The shear is d = A kappa + n, where A is `models.shear_operator` under a mask. Two methods estimate the convergence
kappa:

- Smoothed Kaiser-Squires: apply the inverse of A as if the hidden pixels had zero shear, then smooth with a Gaussian.
- Wiener filter: kappa = (S^-1 + A^T N^-1 A)^-1 A^T N^-1 d, the most likely map of a Gaussian field with known spectrum
  S, and the linear estimate with the smallest squared error. A mask couples the modes, so the equations are solved by
  conjugate gradients.

In shapes, B is the number of maps, P the number of source planes, and S the number of pixels per side. References:
Kaiser & Squires 1993 (ApJ 404, 441); Jeffrey et al. 2018 (arXiv 1801.08945) for the Wiener filter in weak lensing;
Shewchuk 1994 for conjugate gradients.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from tqdm.auto import tqdm

from ..models.shear_operator import adjoint_shear, kaiser_squires, shear_from_convergence
from .dataset.rows import MapSet
from .evaluation import MassMaps, relative_error
from .options import MapMethod
from .simulation.fields import Cosmology, lower_roots, spectra_on_modes
from .simulation.settings import MapSettings


# Smoothing scales to try, in pixels; the one that works best on training maps is used.
SMOOTHINGS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
SPECTRUM_MAPS = 500  # number of training maps for the mean spectrum
MAX_ITERATIONS = 500
TINY = torch.finfo(torch.float64).tiny
# (shear maps, number of draws, generator) -> estimated maps [B, P, S, S], and the std of their pixels or None.
Estimator = Callable[[MapSet, int, torch.Generator], tuple[torch.Tensor, torch.Tensor | None]]


def smoothed_kaiser_squires(shear: torch.Tensor, mask: torch.Tensor | None, smoothing_pixels: float) -> torch.Tensor:
    """Estimate convergence from shear [B, 2P, S, S] masked by [B, 1, S, S], and smooth it with a Gaussian."""
    kappa = kaiser_squires(shear, mask)
    size = kappa.shape[-1]
    y, x = torch.fft.fftfreq(size, 1 / size), torch.arange(size // 2 + 1)
    wave = (2 * torch.pi / size) ** 2 * (y[:, None] ** 2 + x**2)
    window = torch.exp(-0.5 * smoothing_pixels**2 * wave).to(kappa)
    return torch.fft.irfft2(torch.fft.rfft2(kappa) * window, s=(size, size))


class WienerFilter:
    """Wiener filter for noisy maps with one common spectrum or one spectrum per map.

    `spectra` come from `spectra_on_modes`, in steradians: [P, P, S, S // 2 + 1], or [B, P, P, S, S // 2 + 1].
    """

    def __init__(self, settings: MapSettings, spectra: np.ndarray):
        if not settings.sigma_e:
            raise ValueError("sigma_e=0: a Wiener filter needs noise in the maps; use kaiser-squires")
        self.noise = settings.pixel_noise
        self.size = settings.size
        spectra = spectra if spectra.ndim == 5 else spectra[None]
        roots = np.stack([lower_roots(one) for one in spectra])
        # Square roots of the spectra at the rfft2 modes; with them, `_colored` turns unit white noise into the field.
        self.roots = torch.from_numpy(roots * settings.size / settings.side_rad)

    def __call__(self, shear: torch.Tensor, mask: torch.Tensor | None, tolerance: float = 1e-5) -> torch.Tensor:
        """Filter shear [B, 2P, S, S] under a mask [B, 1, S, S] in double precision.

        Raises RuntimeError unless the relative residual of every map's equations falls to `tolerance`.
        """
        shear = shear.double()
        mask = None if mask is None else mask.double()
        # With kappa = L w and S = L L^T, this system is well conditioned: (1 + L^T A^T N^-1 A L) w = L^T A^T N^-1 d.
        right = self._colored_back(adjoint_shear(shear, mask)) / self.noise**2
        white, rest = torch.zeros_like(right), right.clone()
        direction, size, first = rest.clone(), _dot(rest, rest), _dot(right, right)
        for _ in range(MAX_ITERATIONS + 1):
            residual = (size / first.clamp_min(TINY)).sqrt().flatten()
            if residual.max() <= tolerance:
                return self._colored(white)
            image = direction + self._normal(direction, mask)
            step = size / _dot(direction, image).clamp_min(TINY)
            white, rest = white + step * direction, rest - step * image
            size, before = _dot(rest, rest), size
            direction = rest + size / before.clamp_min(TINY) * direction
        raise RuntimeError(
            f"tolerance={tolerance:g}: the Wiener filter's relative residual is {residual.max():.2g} after "
            f"{MAX_ITERATIONS} iterations; use a larger tolerance, or filter maps with little noise separately"
        )

    def draw_errors(self, mask: torch.Tensor | None, generator: torch.Generator, count: int) -> torch.Tensor:
        """Draw reconstruction errors [count, B, P, S, S] of the filter for a mask [B, 1, S, S].

        The error distribution for a Gaussian field does not depend on the data. Filtering simulated fields with
        simulated noise therefore gives the width of the posterior, even for hidden pixels.
        """
        rows = len(self.roots) if mask is None else len(mask)
        draws = []
        for _ in range(count):
            shape = rows, self.roots.shape[1], self.size, self.size
            kappa = self._colored(torch.randn(shape, generator=generator, dtype=torch.float64))
            shear = shear_from_convergence(kappa)
            shear = shear + self.noise * torch.randn(shear.shape, generator=generator, dtype=torch.float64)
            draws.append(self(shear, mask) - kappa)
        return torch.stack(draws)

    def _normal(self, white: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        observed = adjoint_shear(shear_from_convergence(self._colored(white), mask), mask)
        return self._colored_back(observed) / self.noise**2

    def _colored(self, white: torch.Tensor) -> torch.Tensor:
        return self._with_roots("bijxy,bjxy->bixy", white)

    def _colored_back(self, maps: torch.Tensor) -> torch.Tensor:
        """Apply the adjoint of `_colored`. The roots are real, so the adjoint of a mode's matrix is its transpose."""
        return self._with_roots("bjixy,bjxy->bixy", maps)

    def _with_roots(self, product: str, maps: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.rfft2(maps)
        roots = self.roots.expand(len(maps), *self.roots.shape[1:]).to(modes)
        return torch.fft.irfft2(torch.einsum(product, roots, modes), s=maps.shape[-2:])


def spectra_of_cosmologies(settings: MapSettings, labels: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the spectra [N, P, P, S, S // 2 + 1], in steradians, for maps with the given parameters [N]."""
    redshifts = settings.source_redshifts
    return np.stack([
        spectra_on_modes(Cosmology(float(one), float(other)), settings.size, settings.side_rad, redshifts)
        for one, other in zip(labels["omega_m"], labels["sigma_8"], strict=True)
    ])  # fmt: skip


def _dot(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first * second).sum((1, 2, 3), keepdim=True)


# ---- methods of `hrm-hf eval cosmo-map` ----


def map_estimator(
    method: MapMethod, settings: MapSettings, training: MapSet | None, batch_size: int = 100
) -> tuple[Estimator, dict[str, float]]:
    """Return the estimator of a method, and the values fitted to `training`, which "wiener" does not need."""
    if method == "kaiser-squires":
        errors = {}
        for smoothing in SMOOTHINGS:
            estimate, _ = estimate_maps(_kaiser_squires(smoothing), training, batch_size)
            errors[smoothing] = relative_error(MassMaps(training.kappa, estimate))["value"]
        best = min(errors, key=errors.get)
        return _kaiser_squires(best), {"smoothing_pixels": best}
    if method == "wiener":
        return _wiener(lambda maps: WienerFilter(settings, spectra_of_cosmologies(settings, maps.labels))), {}
    spectrum = spectra_of_cosmologies(settings, training[:SPECTRUM_MAPS].labels).mean(0)
    common = WienerFilter(settings, spectrum)
    return _wiener(lambda maps: common), {}


def _kaiser_squires(smoothing_pixels: float) -> Estimator:
    return lambda maps, draws, generator: (smoothed_kaiser_squires(*_observed(maps), smoothing_pixels), None)


def _wiener(filter_of: Callable[[MapSet], WienerFilter]) -> Estimator:
    def estimate(maps: MapSet, draws: int, generator: torch.Generator):
        wiener, (shear, mask) = filter_of(maps), _observed(maps)
        errors = wiener.draw_errors(mask, generator, draws) if draws else None
        # The errors have mean 0, so their root mean square is their standard deviation.
        return wiener(shear, mask), None if errors is None else errors.square().mean(0).sqrt()

    return estimate


def _observed(maps: MapSet) -> tuple[torch.Tensor, torch.Tensor]:
    """Return shear and mask [B, 1, S, S] in the shear's dtype."""
    shear = torch.from_numpy(maps.maps)
    return shear, torch.from_numpy(maps.masks)[:, None].to(shear)


def estimate_maps(
    estimator: Estimator, maps: MapSet, batch_size: int, draws: int = 0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray | None]:
    """Estimate maps [N, P, S, S], plus the standard deviation of each pixel if the method provides one."""
    generator = torch.Generator().manual_seed(seed)
    estimates, stds = [], []
    for start in tqdm(range(0, len(maps), batch_size), desc="Mapping", unit="batch", disable=None, leave=False):
        estimate, std = estimator(maps[start : start + batch_size], draws, generator)
        estimates.append(estimate.float().numpy())
        if std is not None:
            stds.append(std.float().numpy())
    return np.concatenate(estimates), np.concatenate(stds) if stds else None
