"""From maps to tokens: a convolutional (or patch) stem, means over the map, and a power-spectrum token.

No normalisation over a map anywhere: its amplitude is the signal. B maps of C channels, side S; D is the width.
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_hrm_cosmo import HrmCosmoConfig


class StemStage(GradientCheckpointingLayer):
    """Two 3x3 convolutions, the second with stride 2: [B, c_in, S, S] to [B, c_out, S / 2, S / 2]."""

    def __init__(self, c_in: int, c_out: int, padding_mode: str):
        super().__init__()
        middle = max(1, c_out // 2)  # at full resolution channels cost most
        self.wraps = padding_mode == "circular"
        padding = 0 if self.wraps else 1
        self.conv = nn.Conv2d(c_in, middle, 3, padding=padding)
        self.down = nn.Conv2d(middle, c_out, 3, stride=2, padding=padding)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        for conv in (self.conv, self.down):
            maps = F.gelu(conv(wrap(maps) if self.wraps else maps))
        return maps


def wrap(maps: torch.Tensor) -> torch.Tensor:
    """One pixel of periodic padding on each side of the last two axes.

    As F.pad(mode="circular"), whose backward pass is three times slower on the CPU.
    """
    maps = torch.cat((maps[..., -1:], maps, maps[..., :1]), dim=-1)
    return torch.cat((maps[..., -1:, :], maps, maps[..., :1, :]), dim=-2)


class PowerSpectrum(nn.Module):
    """Log power of each map, and correlation of each pair, in rings of equal width in log |k|.

    In units of white noise of variance 1. Pixels that are not observed count as 0, and the power is over the share
    that is observed. [B, C, S, S] to [B, features].
    """

    def __init__(self, config: HrmCosmoConfig):
        super().__init__()
        self.size, self.bins = config.image_size, config.num_ps_bins
        self.maps, self.masked = config.num_map_channels, config.mask_channel
        rings = int(ring_weights(self.size, self.bins).shape[1])
        self.rings = nn.Buffer(torch.empty(self.size * (self.size // 2 + 1), rings), persistent=False)
        self.pairs = [(i, j) for i in range(self.maps) for j in range(i + 1, self.maps)]
        self.num_features = rings * (self.maps + len(self.pairs))

    def reset(self) -> None:
        """Fills the weights of modes in rings; called by `_init_weights` of the model."""
        init.copy_(self.rings, ring_weights(self.size, self.bins))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        with torch.autocast(pixel_values.device.type, enabled=False):
            maps = pixel_values[:, : self.maps].float()
            power = 1.0
            if self.masked:
                mask = pixel_values[:, -1:].float()
                maps, power = maps * mask, mask.mean((1, 2, 3)).clamp_min(1e-3).view(-1, 1, 1)
            modes = torch.fft.rfft2(maps, norm="ortho").flatten(2)
            auto = (modes.real.square() + modes.imag.square()) @ self.rings / power
            features = [torch.log(auto.clamp_min(1e-8)) / 2]
            for i, j in self.pairs:
                cross = (modes[:, i] * modes[:, j].conj()).real.unsqueeze(1) @ self.rings / power
                features.append(cross / (auto[:, i : i + 1] * auto[:, j : j + 1]).clamp_min(1e-16).sqrt())
            return torch.cat(features, dim=1).flatten(1)


def ring_weights(size: int, bins: int) -> torch.Tensor:
    """Weight of each mode of `rfft2` in each ring's mean power, [size * (size // 2 + 1), rings].

    Rings of equal width in log |k| from the fundamental to the Nyquist frequency; those without a mode are left out.
    """
    real = {"dtype": torch.float64, "device": "cpu"}  # also where a model is built without memory
    rows, columns = torch.fft.fftfreq(size, 1 / size, **real), torch.arange(size // 2 + 1, **real)
    k = torch.hypot(rows[:, None], columns).flatten()
    weight = torch.full((size, size // 2 + 1), 2.0, **real)  # each mode stands for its conjugate too
    weight[:, 0] = 1
    if size % 2 == 0:
        weight[:, -1] = 1
    ring = (torch.log(k.clamp_min(0.5)) / math.log(size / 2 * (1 + 1e-9)) * bins).floor().long()
    inside = (k >= 1) & (ring < bins)
    onto = F.one_hot(torch.where(inside, ring, 0), bins) * (weight.flatten() * inside).unsqueeze(-1)
    onto = onto[:, onto.sum(0) > 0]
    return (onto / onto.sum(0)).float()


class CosmoStem(nn.Module):
    """Tokens x [B, tokens, D]: CLS, power spectrum, means of each stage, then the map row by row."""

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
        if config.use_power_spectrum_token:
            self.spectrum = PowerSpectrum(config)
            self.spectrum_in = nn.Linear(self.spectrum.num_features, width)
            self.spectrum_out = nn.Linear(width, width)
        if config.pos_encodings == "learned":
            self.positions = nn.Embedding((config.image_size // config.patch_size) ** 2, width)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        channels, size = self.config.num_channels, self.config.image_size
        if pixel_values.dim() != 4 or tuple(pixel_values.shape[1:]) != (channels, size, size):
            raise ValueError(
                f"pixel_values has shape {list(pixel_values.shape)}; expected [batch, {channels}, {size}, {size}]"
            )
        tokens = [self.cls.expand(len(pixel_values), 1, -1)]
        if self.config.use_power_spectrum_token:
            hidden = F.gelu(self.spectrum_in(self.spectrum(pixel_values)))
            tokens.append(self.spectrum_out(hidden).unsqueeze(1))
        features, means = pixel_values, []
        for stage in self.stages:
            features = stage(features)
            means.append(features.mean((2, 3)))
        # With a patch stem or without summaries there is nothing to pair.
        tokens.extend(summary(mean).unsqueeze(1) for summary, mean in zip(self.summaries, means, strict=False))
        if self.stages:
            grid = self.project(features.flatten(2).mT)
        else:
            grid = self.project(features).flatten(2).mT
        if self.config.pos_encodings == "learned":
            grid = grid + self.positions.weight
        return torch.cat((*(token.to(grid.dtype) for token in tokens), grid), dim=1)
