"""Parts shared by mass-mapping models: multipole filters, the likelihood of a map, and the output.

Within a model, convergence maps are in units of `config.kappa_std` and have mean 0. B is the number of maps, P the
number of planes, and S the side length of a map in pixels.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import initialization as init

from .configuration_cosmo import MassMappingConfig
from .cosmo_layers import ring_weights
from .modeling_utils import Float32Buffers
from .posterior_head import CosmoRegressionOutput, Posterior, PosteriorMixin


if TYPE_CHECKING:
    from .pipeline_mass_mapping import MassMappingPipeline  # noqa: F401 - saved with checkpoints

LOG_STD_LIMIT = 5.0  # keeps predicted standard deviations within a factor of e^5 of the maps' std


@dataclass
class MassMappingOutput(CosmoRegressionOutput):
    """Output of a mass-mapping model.

    Attributes:
        map_loss: negative log likelihood of the true map in nats per pixel, after the last segment.
        harmonic_loss: that of the map's Fourier modes in nats per mode, given the error's power in each ring.
        kappa: convergence [B, P, S, S], with mean 0 in each plane. kappa_std: standard deviation of its error.
        segment_maps: `kappa` after each segment [B, segments, P, S, S]; halted maps repeat their last map.
    """

    map_loss: torch.Tensor | None = None
    harmonic_loss: torch.Tensor | None = None
    kappa: torch.Tensor | None = None
    kappa_std: torch.Tensor | None = None
    segment_maps: torch.Tensor | None = None


@dataclass
class MapEstimate:
    """Estimated map [B, P, S, S] with the log std [B, P, S, S] and log power [B, P, rings] of its error."""

    kappa: torch.Tensor
    log_std: torch.Tensor
    log_power: torch.Tensor


def shear_and_mask(pixel_values: torch.Tensor, config: MassMappingConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Recover the shear [B, 2P, S, S], 0 in unobserved pixels, and the mask [B, 1, S, S] from scaled maps."""
    channels = config.num_map_channels
    maps = pixel_values[:, :channels].float()
    std, mean = config.pixel_std or [1.0], config.pixel_mean or [0.0]
    maps = maps * maps.new_tensor(std).view(-1, 1, 1) + maps.new_tensor(mean).view(-1, 1, 1)
    if not config.mask_channel:
        return maps, None
    mask = pixel_values[:, channels:].float()
    return maps * mask, mask


def soft_limited(log_std: torch.Tensor) -> torch.Tensor:
    """Limit absolute values smoothly to `LOG_STD_LIMIT`, keeping gradients nonzero."""
    return LOG_STD_LIMIT * torch.tanh(log_std / LOG_STD_LIMIT)


def map_units(config: MassMappingConfig, like: torch.Tensor) -> torch.Tensor:
    """Return `config.kappa_std` as float32 [P, 1, 1]."""
    return torch.tensor(config.kappa_std or [1.0] * config.num_planes, device=like.device).view(-1, 1, 1)


class MultipoleGains(Float32Buffers):
    """Combines maps [B, C, S, S], weighted by a gain per multipole, into maps [B, P, S, S] with mean 0.

    Gains are given at nodes from the fundamental frequency to the corner of Fourier space, and interpolated linearly
    in the logarithm of the multipole.
    """

    def __init__(self, size: int, nodes: int):
        super().__init__()
        self.size, self.nodes = size, nodes
        self.hats = nn.Buffer(torch.empty(nodes, size * (size // 2 + 1), dtype=torch.float32), persistent=False)
        self.reset()

    def reset(self, std: float | None = None) -> None:
        init.copy_(self.hats, hat_functions(self.size, self.nodes))

    def forward(self, maps: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
        """Filter maps [B, C, S, S] with gains [B, P, C, nodes]."""
        modes = torch.fft.rfft2(maps.float()).flatten(2)
        summed = ((gains @ self.hats) * modes.unsqueeze(1)).sum(2)
        return torch.fft.irfft2(summed.unflatten(-1, (self.size, -1)), s=(self.size, self.size))


def hat_functions(size: int, nodes: int) -> torch.Tensor:
    """Return each node's interpolation weight at each `rfft2` mode, [nodes, modes]; 0 at zero frequency."""
    real = {"dtype": torch.float64, "device": "cpu"}
    rows, columns = torch.fft.fftfreq(size, 1 / size, **real), torch.arange(size // 2 + 1, **real)
    k = torch.hypot(rows[:, None], columns).flatten()
    place = torch.log(k.clamp_min(1)) / math.log(size / math.sqrt(2)) * (nodes - 1)
    hats = (1 - (place - torch.arange(nodes, **real)[:, None]).abs()).clamp_min(0)
    return (hats * (k > 0)).float()


class MapLikelihood(Float32Buffers):
    """Gaussian likelihoods of a map in nats: one over pixels, one over multipoles."""

    def __init__(self, config: MassMappingConfig):
        super().__init__()
        self.size, self.bins = config.image_size, config.num_error_rings
        rings = ring_weights(self.size, self.bins)
        self.num_rings = rings.shape[1]
        self.rings = nn.Buffer(torch.empty(rings.shape, dtype=torch.float32), persistent=False)
        self.reset()

    def reset(self, std: float | None = None) -> None:
        init.copy_(self.rings, ring_weights(self.size, self.bins))

    def log_power(self, maps: torch.Tensor) -> torch.Tensor:
        """Return the log of the mean power per ring, [B, C, R]. White noise of variance 1 gives 0."""
        modes = torch.fft.rfft2(maps.float(), norm="ortho").flatten(2)
        with torch.autocast(maps.device.type, enabled=False):  # bfloat16 would round the power by up to 0.4 %
            power = (modes.real.square() + modes.imag.square()) @ self.rings
        return torch.log(power.clamp_min(1e-8))

    def pixels(self, estimate: MapEstimate, truth: torch.Tensor) -> torch.Tensor:
        """Return the negative log likelihood [B] of true maps [B, P, S, S] in nats per pixel."""
        error = (truth - estimate.kappa).square()
        nll = estimate.log_std + 0.5 * error * torch.exp(-2 * estimate.log_std)
        return nll.mean((1, 2, 3)) + 0.5 * math.log(2 * math.pi)

    def harmonic(self, estimate: MapEstimate, truth: torch.Tensor) -> torch.Tensor:
        """Return the negative log likelihood [B] of the error's modes, given the predicted power per ring.

        All rings have equal weight. If they were weighted by their number of modes, the smallest scales, which are
        noise, would dominate.
        """
        found = self.log_power(truth - estimate.kappa)
        return 0.5 * (estimate.log_power + torch.exp(found - estimate.log_power)).mean((1, 2))


class MassMappingMixin(PosteriorMixin):
    """Mixin that builds outputs and losses for heads with a `MapLikelihood` as `model.likelihood`."""

    _custom_pipelines = {
        "mass-mapping": {
            "impl": "pipeline_mass_mapping.MassMappingPipeline",
            "pt": ["AutoModelForImageToImage"],
            "type": "image",
        }
    }

    def maps_and_posteriors(
        self, estimates: list[MapEstimate], posteriors: list[Posterior], used: torch.Tensor
    ) -> MassMappingOutput:
        """Build the output in physical units, without losses."""
        units = map_units(self.config, used)
        maps = torch.stack([estimate.kappa for estimate in estimates], dim=1) * units
        fields = {"kappa": maps[:, -1], "kappa_std": estimates[-1].log_std.exp() * units, "segment_maps": maps}
        return self.posterior_output(posteriors, used, MassMappingOutput, **fields)

    def add_losses(
        self,
        output: MassMappingOutput,
        estimates: list[MapEstimate],
        posteriors: list[Posterior],
        labels: torch.Tensor | None,
        kappa: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Add losses (averaged over segments) and metrics for the given labels and true maps.

        The true maps can also be passed as `labels`, the name that image-to-image data sets use.

        Returns:
            The squared error of each map after each segment, relative to the variance of the training set,
            [B, segments], without gradients; None if no true maps are given.
        """
        config, likelihood, errors = self.config, self.model.likelihood, None
        parts, output.metrics = [], {}
        if kappa is None and labels is not None and labels.dim() == 4:
            labels, kappa = None, labels
        if labels is not None:
            nll, mse = self.posterior_losses(output, posteriors, labels)
            parts += [config.nll_loss_weight * nll, config.mse_loss_weight * mse]
        if kappa is not None:
            if kappa.shape != output.kappa.shape:
                raise ValueError(f"kappa has shape {list(kappa.shape)}: must be {list(output.kappa.shape)}")
            truth = kappa.float()
            truth = (truth - truth.mean((2, 3), keepdim=True)) / map_units(config, truth)
            pixels = torch.stack([likelihood.pixels(estimate, truth) for estimate in estimates], dim=1)
            modes = torch.stack([likelihood.harmonic(estimate, truth) for estimate in estimates], dim=1)
            output.map_loss, output.harmonic_loss = pixels[:, -1].mean(), modes[:, -1].mean()
            parts += [config.map_loss_weight * pixels, config.harmonic_loss_weight * modes]
            with torch.no_grad():
                maps = torch.stack([estimate.kappa for estimate in estimates], dim=1)
                errors = (maps - truth.unsqueeze(1)).square().mean((2, 3, 4))
            output.metrics["mse_kappa"] = errors[:, -1].mean()
        if parts:
            output.loss = sum(part.mean() for part in parts)
        return errors
