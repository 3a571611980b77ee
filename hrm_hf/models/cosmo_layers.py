"""Layers that turn maps into tokens: a stem, mean features of its stages, and map statistics.

No layer normalizes over a map, because the map's amplitude is the signal. B is the number of maps, C the number of
channels, S the side length of a map in pixels, and D the width of the model.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_cosmo import CosmoRegressionConfig
from .configuration_hrm_cosmo import HrmCosmoConfig
from .modeling_utils import Float32Buffers, Float32Linear


SCALES = (1, 2, 4, 8)  # statistics use maps averaged over squares with these side lengths in pixels
THRESHOLDS = (-1.5, -1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0)  # in units of the training std
VARIANCE_FLOOR = 1e-3  # added to the variance of each principal component to avoid amplifying noise


class StemStage(GradientCheckpointingLayer):
    """Two 3x3 convolutions, the second with stride 2: [B, c_in, S, S] to [B, c_out, S / 2, S / 2]."""

    def __init__(self, c_in: int, c_out: int, padding_mode: str):
        super().__init__()
        middle = max(1, c_out // 2)  # fewer channels at full resolution, where each channel costs most
        self.wraps = padding_mode == "circular"
        padding = 0 if self.wraps else 1
        self.conv = nn.Conv2d(c_in, middle, 3, padding=padding)
        self.down = nn.Conv2d(middle, c_out, 3, stride=2, padding=padding)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        for conv in (self.conv, self.down):
            maps = F.gelu(conv(wrap(maps) if self.wraps else maps))
        return maps


def validate_maps(pixel_values: torch.Tensor | None, config: CosmoRegressionConfig) -> None:
    """Raise ValueError unless maps are float [B, C, S, S] with the config's channels and size."""
    shape = (config.num_channels, config.image_size, config.image_size)
    expected = f"must be [batch, {', '.join(map(str, shape))}]"
    if pixel_values is None:
        raise ValueError(f"pixel_values=None: {expected}")
    if tuple(pixel_values.shape[1:]) != shape:
        raise ValueError(f"pixel_values has shape {list(pixel_values.shape)}: {expected}")
    if not pixel_values.is_floating_point():
        raise ValueError(f"pixel_values has dtype {pixel_values.dtype}: must be float; use CosmoMapFeatureExtractor")


def wrap(maps: torch.Tensor) -> torch.Tensor:
    """Pad each side periodically by one pixel. On CPUs, the backward pass is faster than that of F.pad."""
    maps = torch.cat((maps[..., -1:], maps, maps[..., :1]), dim=-1)
    return torch.cat((maps[..., -1:, :], maps, maps[..., :1, :]), dim=-2)


class MapStatistics(Float32Buffers):
    """Summary statistics of maps, whitened to zero mean and identity covariance over the training set.

    The statistics of a map are its log power in rings of equal width in log |k| and, at four scales, the fraction of
    pixels below each threshold, the log standard deviation, skewness and kurtosis. Each pair of maps adds its
    correlation in each ring. Unobserved pixels do not count; the power is divided by the observed fraction.

    Whitening helps because neighboring statistics are nearly equal: the information is in their differences, which
    gradient descent would be slow to find. `fit` computes the transformation, and the units of the thresholds, from
    the training set.
    """

    def __init__(self, config: HrmCosmoConfig):
        super().__init__()
        self.size, self.maps, self.masked = config.image_size, config.num_map_channels, config.mask_channel
        self.bins = config.num_ps_bins if config.use_power_spectrum else 0
        self.scales = [s for s in SCALES if self.size // s >= 4] if config.use_histogram else []
        rings = int(ring_weights(self.size, self.bins).shape[1])
        shape = (self.size * (self.size // 2 + 1), rings)
        self.rings = nn.Buffer(torch.empty(shape, dtype=torch.float32), persistent=False)
        self.thresholds = nn.Buffer(torch.empty(len(THRESHOLDS), dtype=torch.float32), persistent=False)
        self.pairs = [(i, j) for i in range(self.maps) for j in range(i + 1, self.maps)]
        self.num_features = rings * (self.maps + len(self.pairs))
        self.num_features += self.maps * len(self.scales) * (len(THRESHOLDS) + 3)
        self.mean = nn.Buffer(torch.empty(self.num_features, dtype=torch.float32))
        self.whitening = nn.Buffer(torch.empty(self.num_features, self.num_features, dtype=torch.float32))
        self.spread = nn.Buffer(torch.empty(len(self.scales), self.maps, dtype=torch.float32))
        self.reset()

    def reset(self, std: float | None = None) -> None:
        """Fill the buffers with initial values. This also works if the model was created on the meta device."""
        init.copy_(self.rings, ring_weights(self.size, self.bins))
        init.copy_(self.thresholds, torch.tensor(THRESHOLDS))
        init.zeros_(self.mean)
        init.copy_(self.whitening, torch.eye(self.num_features))
        init.ones_(self.spread)

    @torch.no_grad()
    def fit(self, batches: Sequence[torch.Tensor]) -> None:
        """Compute the whitening from batches of training maps. The method iterates over them several times."""
        spreads = [self._moments(batch, scale)[1].mean(0) for scale in self.scales for batch in batches]
        if self.scales:
            self.spread.copy_(torch.stack(spreads).view(len(self.scales), len(batches), -1).mean(1).sqrt())
        features = torch.cat([self.features(batch) for batch in batches]).double()
        self.mean.copy_(features.mean(0))
        std = features.std(0).clamp_min(1e-6)
        variances, axes = torch.linalg.eigh(torch.cov(((features - self.mean) / std).mT))
        self.whitening.copy_(axes / (variances.clamp_min(0) + VARIANCE_FLOOR).sqrt() / std.unsqueeze(-1))

    @torch.no_grad()
    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the whitened features [B, F] of pixel_values [B, C, S, S], without gradients."""
        return self._whitened(pixel_values).clamp(-10, 10)

    @torch.no_grad()
    def distance(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return each map's Mahalanobis distance [B], divided by the square root of the number of statistics."""
        return self._whitened(pixel_values).square().mean(1).sqrt()

    def _whitened(self, pixel_values: torch.Tensor) -> torch.Tensor:
        with torch.autocast(pixel_values.device.type, enabled=False):
            return (self.features(pixel_values) - self.mean) @ self.whitening

    def features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the features [B, F] before whitening."""
        parts = [self._shape(pixel_values, index) for index in range(len(self.scales))]
        return torch.cat(([self._power(pixel_values)] if self.bins else []) + parts, dim=1)

    def _power(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the features of the power spectra, [B, F].

        They are half the log power of each map in each ring of modes (0 for unit white noise), and the correlation of
        each pair of maps in each ring.
        """
        maps, share = pixel_values[:, : self.maps].float(), 1.0
        if self.masked:
            mask = pixel_values[:, -1:].float()
            maps, share = maps * mask, mask.mean((1, 2, 3)).clamp_min(1e-3).view(-1, 1, 1)
        modes = torch.fft.rfft2(maps, norm="ortho").flatten(2)
        auto = (modes.real.square() + modes.imag.square()) @ self.rings / share
        features = [torch.log(auto.clamp_min(1e-8)) / 2]
        for i, j in self.pairs:
            cross = (modes[:, i] * modes[:, j].conj()).real.unsqueeze(1) @ self.rings / share
            features.append(cross / (auto[:, i : i + 1] * auto[:, j : j + 1]).clamp_min(1e-16).sqrt())
        return torch.cat(features, dim=1).flatten(1)

    def _shape(self, pixel_values: torch.Tensor, index: int) -> torch.Tensor:
        """Return the moments at one scale and the fraction of pixels below each threshold, [B, maps * features]."""
        centred, variance, weight, count = self._moments(pixel_values, self.scales[index])
        scaled = centred / self.spread[index].view(-1, 1)
        below = [(weight * (scaled < threshold)).sum(-1) / count for threshold in self.thresholds]
        std = variance.clamp_min(1e-12).sqrt()
        normal = centred / std.unsqueeze(-1)
        skewness = (weight * normal**3).sum(-1) / count
        kurtosis = (weight * normal**4).sum(-1) / count - 3
        return torch.stack((*below, std.log(), torch.asinh(skewness), torch.asinh(kurtosis)), dim=-1).flatten(1)

    def _moments(self, pixel_values: torch.Tensor, scale: int) -> tuple[torch.Tensor, ...]:
        """Average maps over squares with a side of `scale` pixels and return the moments.

        Returns:
            The centered pixels [B, maps, P], their variance [B, maps], the weight of each pixel (0 if less than half
            of the pixel is observed), and the sum of the weights.
        """
        maps = pixel_values[:, : self.maps].float()
        if self.masked:
            observed = F.avg_pool2d(pixel_values[:, -1:].float(), scale)
            maps = F.avg_pool2d(maps * pixel_values[:, -1:], scale) / observed.clamp_min(1e-6)
            weight = (observed >= 0.5).float().flatten(2)
        else:
            maps = F.avg_pool2d(maps, scale)
            weight = torch.ones_like(maps[:, :1]).flatten(2)
        maps, count = maps.flatten(2), weight.sum(-1).clamp_min(1)
        centred = maps - ((weight * maps).sum(-1) / count).unsqueeze(-1)
        return centred, (weight * centred.square()).sum(-1) / count, weight, count


def ring_weights(size: int, bins: int) -> torch.Tensor:
    """Return weights [modes, rings] that average the power of `rfft2` modes over each ring.

    Rings have equal width in log |k| from the fundamental to the Nyquist frequency; rings without modes are dropped.
    """
    if not bins:
        return torch.empty(size * (size // 2 + 1), 0, device="cpu")
    real = {"dtype": torch.float64, "device": "cpu"}  # computed on the CPU even if the model is created on "meta"
    rows, columns = torch.fft.fftfreq(size, 1 / size, **real), torch.arange(size // 2 + 1, **real)
    k = torch.hypot(rows[:, None], columns).flatten()
    weight = torch.full((size, size // 2 + 1), 2.0, **real)  # 2, because each mode also represents its conjugate
    weight[:, 0] = 1
    if size % 2 == 0:
        weight[:, -1] = 1
    ring = (torch.log(k.clamp_min(0.5)) / math.log(size / 2 * (1 + 1e-9)) * bins).floor().long()
    inside = (k >= 1) & (ring < bins)
    onto = F.one_hot(torch.where(inside, ring, 0), bins) * (weight.flatten() * inside).unsqueeze(-1)
    onto = onto[:, onto.sum(0) > 0]
    return (onto / onto.sum(0)).float()


class ZeroLinear(Float32Linear):
    """Linear layer in float32 with weights and biases initialized to 0."""

    def reset(self, std: float | None = None) -> None:
        init.zeros_(self.weight)
        init.zeros_(self.bias)


class CosmoStem(nn.Module):
    """Turns maps into tokens [B, tokens, D]: CLS with statistics, each stage's mean features, and patches."""

    def __init__(self, config: HrmCosmoConfig):
        super().__init__()
        self.config = config
        width, channels = config.hidden_size, [config.num_channels, *config.stem_channels]
        self.cls = nn.Parameter(torch.zeros(width))
        if config.stem == "conv":
            self.stages = nn.ModuleList(
                StemStage(c_in, c_out, config.padding_mode) for c_in, c_out in pairwise(channels)
            )
            self.project = nn.Linear(channels[-1], width)
        else:
            self.stages = nn.ModuleList()
            self.project = nn.Conv2d(config.num_channels, width, config.patch_size, stride=config.patch_size)
        summaries = config.stem_channels if config.use_summary_tokens and config.stem == "conv" else []
        self.summaries = nn.ModuleList(nn.Linear(c, width) for c in summaries)
        self.statistics = MapStatistics(config) if config.use_power_spectrum or config.use_histogram else None
        if self.statistics is not None:
            self.statistics_in = nn.Linear(self.statistics.num_features, width)
            self.statistics_out = nn.Linear(width, width)
        if config.pos_encodings == "learned":
            self.positions = nn.Embedding((config.image_size // config.patch_size) ** 2, width)

    def reset(self, std: float | None) -> None:
        init.normal_(self.cls, std=std or 1.0)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        validate_maps(pixel_values, self.config)
        dtype = self.cls.dtype  # quantization may change the dtype of linear layers, but not that of CLS
        cls = self.cls.expand(pixel_values.shape[0], -1)  # not len(), which torch.export makes a constant
        if self.statistics is not None:
            hidden = F.gelu(self.statistics_in(self.statistics(pixel_values).to(dtype)))
            # Random rotations and shifts do not change the statistics, so only dropout reduces overfitting to them.
            cls = cls + self.statistics_out(F.dropout(hidden, self.config.statistics_dropout, self.training))
        tokens = [cls.unsqueeze(1)]
        features, means = pixel_values.to(dtype), []
        if self.training and any(stage.gradient_checkpointing for stage in self.stages):
            # With reentrant checkpointing, a layer gets no gradients unless one of its inputs requires them.
            features = features.detach().requires_grad_()
        for stage in self.stages:
            features = stage(features)
            means.append(features.mean((2, 3)))
        tokens.extend(summary(mean).unsqueeze(1) for summary, mean in zip(self.summaries, means, strict=False))
        grid = self.project(features.flatten(2).mT) if self.stages else self.project(features).flatten(2).mT
        if self.config.pos_encodings == "learned":
            # Do not read the weight directly: accelerate loads offloaded weights only when their module is called.
            grid = grid + self.positions(torch.arange(grid.shape[1], device=grid.device))
        return torch.cat((*(token.to(grid.dtype) for token in tokens), grid), dim=1)
