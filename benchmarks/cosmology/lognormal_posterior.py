"""Sample log-normal maps from their exact posterior given noisy, masked shear, by Hamiltonian Monte Carlo.

For a log-normal field with a known cosmology, the mean of this posterior has the smallest expected squared error of
all estimates, linear or not. Its error is therefore a lower bound for any network trained on such maps. Sampling a
batch of maps takes minutes; a network takes milliseconds.

The field is kappa = shift (exp(g - var(g) / 2) - 1) minus its mean, with g = L w for white noise w in the pixels. The
negative log-posterior is

    -log p(w | d) = |w|^2 / 2 + |d - A kappa(w)|^2 / (2 sigma^2) + constant.

Sources: Duane et al. 1987 and Neal 2011 (arXiv 1206.1901) for the sampler; Fiedorowicz et al. 2022 (arXiv 2105.14699)
for its use on log-normal mass maps.
"""

from dataclasses import dataclass

import numpy as np
import torch

from hrm_hf.cosmology.dataset.rows import MapSet
from hrm_hf.cosmology.simulation.fields import Cosmology, gaussian_under_lognormal, lower_roots
from hrm_hf.cosmology.simulation.maps import MapSettings
from hrm_hf.models.shear_operator import shear_from_convergence


LEAPFROGS = 15  # leapfrog steps per trajectory, which then spans about one correlation length of the posterior
FIRST_STEP = 0.05
STEP_RANGE = (0.8, 1.2)  # random factor on each trajectory's step size, to avoid periodic trajectories
WANTED_ACCEPTANCE = 0.7


@dataclass(frozen=True)
class MapSamples:
    """Mean and standard deviation of the sampled maps, [B, P, S, S] each.

    Attributes:
        acceptance: fraction of trajectories that were accepted.
        drift: rms difference between the means of the two halves of the samples, divided by the standard deviation;
            about sqrt(2 / n) for n independent samples per half.
    """

    mean: torch.Tensor
    std: torch.Tensor
    acceptance: float
    drift: float


class LognormalPosterior:
    """Posterior distribution of maps, given each map's shear and cosmology.

    Args:
        settings: settings of a shear data set of kind "lognormal". omega_m, sigma_8: parameters of each map [B].

    Raises:
        ValueError: the maps are of a different kind, or have no noise.
    """

    def __init__(self, settings: MapSettings, omega_m: np.ndarray, sigma_8: np.ndarray):
        if settings.kind != "lognormal" or not settings.sigma_e:
            raise ValueError(
                f"kind={settings.kind!r}, sigma_e={settings.sigma_e}: the kind must be 'lognormal' "
                "and sigma_e > 0, because only log-normal maps with shape noise have a known likelihood"
            )
        self.size, self.noise = settings.size, settings.pixel_noise
        parts = [
            gaussian_under_lognormal(
                Cosmology(float(one), float(other)), settings.size, settings.side_rad, settings.source_redshifts
            )
            for one, other in zip(omega_m, sigma_8, strict=True)
        ]
        shifts, spectra, variances = (np.stack(column) for column in zip(*parts))
        roots = np.stack([lower_roots(one) for one in spectra]) * settings.size / settings.side_rad
        self.shifts, self.roots, self.variances = (
            torch.from_numpy(values).float() for values in (shifts, roots, variances)
        )

    def kappa(self, white: torch.Tensor) -> torch.Tensor:
        """Transform white noise [B, P, S, S] into log-normal maps of the same shape."""
        modes = torch.einsum("bijxy,bjxy->bixy", self.roots.to(torch.complex64), torch.fft.rfft2(white))
        gaussian = torch.fft.irfft2(modes, s=(self.size, self.size))
        shifts, variances = self.shifts[..., None, None], self.variances[..., None, None]
        maps = shifts * torch.expm1(gaussian - variances / 2)
        return maps - maps.mean((2, 3), keepdim=True)

    def sample(
        self,
        shear: torch.Tensor,
        mask: torch.Tensor | None,
        generator: torch.Generator,
        draws: int = 400,
        warmup: int = 200,
    ) -> MapSamples:
        """Sample maps from the posterior given shear [B, 2P, S, S] and its mask [B, 1, S, S].

        Args:
            draws: number of trajectories after the warm-up. warmup: number of earlier ones, which tune the step sizes.
        """
        shear, mask = shear.float(), None if mask is None else mask.float()
        white = torch.zeros(len(shear), shear.shape[1] // 2, self.size, self.size)
        step = torch.full((len(shear), 1, 1, 1), FIRST_STEP)
        halves, squares, accepted = [torch.zeros_like(white) for _ in range(2)], torch.zeros_like(white), 0.0
        for number in range(warmup + draws):
            white, probability = self._trajectory(white, shear, mask, step, generator)
            if number < warmup:
                larger = probability > WANTED_ACCEPTANCE
                step = step * torch.where(larger, 1.08, 0.93)[:, None, None, None]
                continue
            maps = self.kappa(white)
            halves[2 * (number - warmup) >= draws] += maps
            squares += maps.square()
            accepted += probability.mean().item()
        mean = (halves[0] + halves[1]) / draws
        std = (squares / draws - mean.square()).clamp_min(0).sqrt()
        first = draws - draws // 2
        drift = halves[0] / first - halves[1] / max(draws - first, 1)
        return MapSamples(mean, std, accepted / draws, (drift.square().mean() / std.square().mean()).sqrt().item())

    def _trajectory(
        self,
        white: torch.Tensor,
        shear: torch.Tensor,
        mask: torch.Tensor | None,
        step: torch.Tensor,
        generator: torch.Generator,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one trajectory; return the next white noise and the acceptance probability [B] of each proposal."""
        momentum = torch.randn(white.shape, generator=generator)
        low, high = STEP_RANGE
        step = step * (low + (high - low) * torch.rand(1, generator=generator))
        proposed, (energy, slope) = white, self._energy(white, shear, mask)
        before = energy + _half_square(momentum)
        for _ in range(LEAPFROGS):
            momentum = momentum - 0.5 * step * slope
            proposed = proposed + step * momentum
            energy, slope = self._energy(proposed, shear, mask)
            momentum = momentum - 0.5 * step * slope
        # Reject a trajectory that overflowed.
        probability = (before - energy - _half_square(momentum)).clamp(max=0).exp().nan_to_num(nan=0.0)
        taken = torch.rand(len(white), generator=generator) < probability
        return torch.where(taken[:, None, None, None], proposed, white), probability

    def _energy(
        self, white: torch.Tensor, shear: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return -log p(white | shear) [B] up to a constant, and its gradient with respect to `white`."""
        with torch.enable_grad():
            white = white.detach().requires_grad_()
            rest = (shear - shear_from_convergence(self.kappa(white), mask)) / self.noise
            energy = _half_square(white) + _half_square(rest)
            slope = torch.autograd.grad(energy.sum(), white)[0]
        return energy.detach(), slope


def _half_square(values: torch.Tensor) -> torch.Tensor:
    return 0.5 * values.square().sum((1, 2, 3))


def lognormal_estimator(settings: MapSettings):
    """Return an estimator for `estimate_maps` that gives the mean and standard deviation of the exact posterior."""

    def estimate(maps: MapSet, draws: int, generator: torch.Generator):
        posterior = LognormalPosterior(settings, maps.labels["omega_m"], maps.labels["sigma_8"])
        shear, mask = torch.from_numpy(maps.maps), torch.from_numpy(maps.masks)[:, None]
        samples = posterior.sample(shear, mask.to(shear), generator)
        return samples.mean, samples.std

    return estimate
