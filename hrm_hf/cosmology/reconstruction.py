"""Mass maps from noisy, masked shear without training: what a network that iterates has to beat.

Two estimates of the convergence kappa behind shear d = A kappa + n, where A is `models.shear_operator` under a mask:

- Kaiser and Squires, smoothed: A's inverse as if the hidden pixels had no shear, then a Gaussian;
- Wiener filter: the most likely map of a Gaussian field with a known spectrum S, and of all linear estimates the one
  with the least squared error, kappa = (S^-1 + A^T N^-1 A)^-1 A^T N^-1 d. Under a mask this is no filter of each mode
  by itself, and the equations are solved by conjugate gradients.

B maps of P planes of sources, S pixels a side. Sources: Kaiser & Squires 1993 (ApJ 404, 441); Jeffrey et al. 2018
(arXiv 1801.08945) for the Wiener filter of weak lensing; Shewchuk 1994 for conjugate gradients.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..models.shear_operator import adjoint_shear, kaiser_squires, shear_from_convergence
from .simulation.background import Cosmology
from .simulation.fields import lower_roots, spectra_on_modes
from .simulation.settings import MapSettings


MOST_ITERATIONS = 500


def smoothed_kaiser_squires(shear: torch.Tensor, mask: torch.Tensor | None, smoothing_pixels: float) -> torch.Tensor:
    """Convergence [B, P, S, S] of shear [B, 2P, S, S] under a mask [B, 1, S, S], smoothed by a Gaussian.

    Args:
        smoothing_pixels: standard deviation of the Gaussian in pixels; 0 for none.
    """
    kappa = kaiser_squires(shear, mask)
    size = kappa.shape[-1]
    y, x = torch.fft.fftfreq(size, 1 / size), torch.arange(size // 2 + 1)
    wave = (2 * torch.pi / size) ** 2 * (y[:, None] ** 2 + x**2)
    window = torch.exp(-0.5 * smoothing_pixels**2 * wave).to(kappa)
    return torch.fft.irfft2(torch.fft.rfft2(kappa) * window, s=(size, size))


@dataclass(frozen=True)
class WienerMaps:
    """Wiener-filtered maps.

    Attributes:
        kappa: [B, P, S, S], the mean of the posterior of a Gaussian field; its own mean is 0.
        iterations: of the conjugate gradients.
        residual: of each map [B], the norm of what is left of its equations over that of their right side.
    """

    kappa: torch.Tensor
    iterations: int
    residual: torch.Tensor


class WienerFilter:
    """The Wiener filter of maps with one spectrum each, or with one spectrum of all.

    Args:
        settings: of the data set: pixels, patch, planes and noise.
        spectra: in steradian, [P, P, S, S // 2 + 1] of all maps, or [B, P, P, S, S // 2 + 1], as `spectra_on_modes`.

    Raises:
        ValueError: shear without noise, for which there is nothing to weigh the spectrum against.
    """

    def __init__(self, settings: MapSettings, spectra: np.ndarray):
        if not settings.sigma_e:
            raise ValueError("sigma_e=0: a Wiener filter weighs signal against noise; use kaiser-squires")
        self.noise = settings.pixel_noise
        self.size = settings.size
        spectra = spectra if spectra.ndim == 5 else spectra[None]
        roots = np.stack([lower_roots(one) for one in spectra])
        # Of modes as rfft2 gives them: the field is `_colored` of white noise of variance 1 in each pixel.
        self.roots = torch.from_numpy(roots * settings.size / settings.side_rad)

    def __call__(self, shear: torch.Tensor, mask: torch.Tensor | None, tolerance: float = 1e-5) -> WienerMaps:
        """Filters shear [B, 2P, S, S] under a mask [B, 1, S, S]; in double precision.

        Args:
            tolerance: iterates until `WienerMaps.residual` of every map is below.

        Raises:
            RuntimeError: that is not reached.
        """
        shear = shear.double()
        mask = None if mask is None else mask.double()
        # In white noise w, kappa = L w with S = L L^T: (1 + L^T A^T N^-1 A L) w = L^T A^T N^-1 d is well conditioned.
        right = self._colored_back(adjoint_shear(shear, mask)) / self.noise**2
        white, rest = torch.zeros_like(right), right.clone()
        direction, size, first = rest.clone(), _dot(rest, rest), _dot(right, right)
        for iteration in range(MOST_ITERATIONS + 1):
            residual = (size / first.clamp_min(torch.finfo(torch.float64).tiny)).sqrt().flatten()
            if residual.max() <= tolerance:
                return WienerMaps(self._colored(white), iteration, residual)
            image = direction + self._normal(direction, mask)
            step = size / _dot(direction, image).clamp_min(torch.finfo(torch.float64).tiny)
            white, rest = white + step * direction, rest - step * image
            size, before = _dot(rest, rest), size
            direction = rest + size / before.clamp_min(torch.finfo(torch.float64).tiny) * direction
        raise RuntimeError(
            f"the Wiener filter left {residual.max():.2g} of its equations after {MOST_ITERATIONS} iterations; "
            f"expected {tolerance:g}: use a larger tolerance, or single out maps with little noise"
        )

    def draw_errors(self, mask: torch.Tensor | None, generator: torch.Generator, count: int) -> torch.Tensor:
        """Draws of the error [count, B, P, S, S] that the filter makes under a mask [B, 1, S, S].

        The error of a Gaussian field is independent of the data, so that filtering drawn fields with drawn noise gives
        draws from the posterior: its width, hidden pixels included.
        """
        rows = len(self.roots) if mask is None else len(mask)
        draws = []
        for _ in range(count):
            white = torch.randn(
                rows, self.roots.shape[1], self.size, self.size, generator=generator, dtype=torch.float64
            )
            kappa = self._colored(white)
            shear = shear_from_convergence(kappa, None)
            noise = torch.randn(shear.shape, generator=generator, dtype=torch.float64)
            shear = shear + self.noise * noise
            draws.append(self(shear, mask).kappa - kappa)
        return torch.stack(draws)

    def _normal(self, white: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        observed = adjoint_shear(shear_from_convergence(self._colored(white), mask), mask)
        return self._colored_back(observed) / self.noise**2

    def _colored(self, white: torch.Tensor) -> torch.Tensor:
        return self._with_roots("bijxy,bjxy->bixy", white)

    def _colored_back(self, maps: torch.Tensor) -> torch.Tensor:
        """The adjoint of `_colored`: the roots are real, so that of a mode's matrix is its transpose."""
        return self._with_roots("bjixy,bjxy->bixy", maps)

    def _with_roots(self, product: str, maps: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.rfft2(maps)
        roots = self.roots.expand(len(maps), *self.roots.shape[1:]).to(modes)
        return torch.fft.irfft2(torch.einsum(product, roots, modes), s=maps.shape[-2:])


def spectra_of_cosmologies(settings: MapSettings, labels: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the spectra of maps with these parameters, by name [N]: [N, P, P, S, S // 2 + 1] in steradian."""
    redshifts = settings.source_redshifts
    return np.stack([
        spectra_on_modes(Cosmology(float(one), float(other)), settings.size, settings.side_rad, redshifts)
        for one, other in zip(labels["omega_m"], labels["sigma_8"], strict=True)
    ])  # fmt: skip


def _dot(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first * second).sum((1, 2, 3), keepdim=True)
