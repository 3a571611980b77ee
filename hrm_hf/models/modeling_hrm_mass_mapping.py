"""HRM-based model that infers mass maps and cosmological parameters from noisy, masked shear.

The data are d = A kappa + n, where A gives the shear of a convergence map under the survey's mask (`shear_operator`).
Every segment m begins with the residual of its map,

    r = d - A kappa_m,    b = A^T r,

and ends with kappa_(m+1) = kappa_m + sum over proposals u of gain_u(ell) * u, where the proposals are b, kappa_m, the
last change, and maps of the low level. With only b, kappa_m and gains from a known spectrum, this iteration would
converge to the Wiener filter of a masked field (messenger field: Elsner & Wandelt 2013, A&A 549, A111); here, the high
level has to infer the spectrum. HRM's two levels compute the new map from r (Wang et al. 2025, arXiv 2506.21734):
the low level convolves cells of pixels; the high level attends to the tokens of patches and to CLS, which reads
statistics of the shear. CLS determines the gains, the power of the error and the posterior of the parameters.

Differences from HRM: all updates in a segment are differentiated, not only the last, because there are few; states and
map are detached between segments, and each segment has its own loss (deep supervision). Halting compares the expected
reduction of the map's squared error with a threshold.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput, can_return_tuple

from .configuration_hrm_mass_mapping import HrmMassMappingConfig
from .cosmo_layers import CosmoStem, ZeroLinear, wrap
from .mass_map_layers import (
    MapEstimate,
    MapLikelihood,
    MassMappingMixin,
    MassMappingOutput,
    MultipoleGains,
    map_units,
    shear_and_mask,
    soft_limited,
)
from .modeling_hrm_cosmo import HrmCosmoPreTrainedModel, RecurrentHeadMixin, wants_hidden_states
from .modeling_utils import Float32Linear, validate_no_attentions
from .posterior_head import PosteriorHead
from .puzzle_layers import ReasoningLevel, rms_norm
from .shear_operator import adjoint_shear, shear_from_convergence


FIRST_GAIN = 0.3  # initial gain of b, the residual shear mapped back to convergence
PROPOSAL_GAIN = 0.1  # initial gain of the maps that the low level proposes
LOG_STD_SCALE = 0.1  # small, so that the initial std is nearly the same in all pixels


@dataclass
class HrmMassMappingModelOutput(ModelOutput):
    """State after a segment. `last_hidden_state` is z_H.

    z_H: [B, tokens, D]. z_L: [B, C, cells, cells]. kappa, change: the map and its change [B, P, S, S], in units of
    `config.kappa_std`. log_std, log_power: see `MapEstimate`. hidden_states: (z_L, z_H), if requested.
    """

    last_hidden_state: torch.Tensor | None = None
    z_H: torch.Tensor | None = None
    z_L: torch.Tensor | None = None
    kappa: torch.Tensor | None = None
    change: torch.Tensor | None = None
    log_std: torch.Tensor | None = None
    log_power: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


class MapBlock(GradientCheckpointingLayer):
    """Post-norm block over cells: h = RMS(h + W2 gelu(W1 * h)), with a 3x3 convolution W1."""

    def __init__(self, config: HrmMassMappingConfig):
        super().__init__()
        channels = config.cell_channels
        self.eps, self.wraps = config.rms_norm_eps, config.padding_mode == "circular"
        self.conv = nn.Conv2d(channels, 2 * channels, 3, padding=0 if self.wraps else 1)
        self.mix = nn.Conv2d(2 * channels, channels, 1)

    def forward(self, cells: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(wrap(cells) if self.wraps else cells)
        return rms_norm((cells + self.mix(F.gelu(hidden))).movedim(1, -1), self.eps).movedim(-1, 1)


class MapLevel(nn.Module):
    """Low-level module, which adds an injection to the cell states [B, C, h, w] and refines the sum."""

    def __init__(self, config: HrmMassMappingConfig):
        super().__init__()
        self.layers = nn.ModuleList(MapBlock(config) for _ in range(config.L_layers))

    def forward(self, cells: torch.Tensor, injection: torch.Tensor) -> torch.Tensor:
        cells = cells + injection
        for layer in self.layers:
            cells = layer(cells)
        return cells


class GainHead(Float32Linear):
    """Predicts gains [B, P, maps, nodes] from CLS: how much each map adds to each plane at each node.

    Initially, gains are small, and only b and the low level's proposals for a plane change that plane.
    """

    def __init__(self, config: HrmMassMappingConfig):
        self.shape = (config.num_planes, (3 + config.num_proposals) * config.num_planes, config.num_gain_nodes)
        super().__init__(config.hidden_size, math.prod(self.shape))

    def reset(self, std: float | None) -> None:
        planes, maps, _ = self.shape
        first = torch.zeros(maps)
        first[:planes], first[3 * planes :] = FIRST_GAIN, PROPOSAL_GAIN
        own = torch.eye(planes).repeat(1, maps // planes)
        init.normal_(self.weight, std=std or 0.1 * self.in_features**-0.5)
        init.copy_(self.bias, (own * first).unsqueeze(-1).expand(self.shape).flatten())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return super().forward(features).unflatten(-1, self.shape)


class MapReadout(nn.Module):
    """Computes the change in the map, and the expected error of the map, from both states."""

    def __init__(self, config: HrmMassMappingConfig):
        super().__init__()
        self.config = config
        planes = config.num_planes
        self.cells = nn.Conv2d(config.cell_channels, (config.num_proposals + 1) * planes * config.cell_size**2, 1)
        self.gains = GainHead(config)
        self.filter = MultipoleGains(config.image_size, config.num_gain_nodes)
        self.errors = ZeroLinear(config.hidden_size, planes * (1 + MapLikelihood(config).num_rings))

    def forward(
        self, z_H: torch.Tensor, z_L: torch.Tensor, maps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the change in the map, and the `log_std` and `log_power` of the new map's error.

        `maps` [B, 3P, S, S] contains the residual b (mapped back to convergence), the map kappa and its last change.
        """
        config, planes = self.config, self.config.num_planes
        proposed = F.pixel_shuffle(self.cells(z_L), config.cell_size).float()
        proposals, log_std = proposed.split((config.num_proposals * planes, planes), dim=1)
        with torch.autocast(z_H.device.type, enabled=False):
            change = self.filter(torch.cat((maps, proposals), dim=1), self.gains(z_H[:, 0]))
            errors = self.errors(z_H[:, 0]).unflatten(-1, (planes, -1))
        log_std = LOG_STD_SCALE * log_std + errors[..., :1, None]
        return change, soft_limited(log_std), errors[..., 1:]


class HrmMassMappingPreTrainedModel(HrmCosmoPreTrainedModel):
    """Base class with initialization and saving."""

    config: HrmMassMappingConfig
    _no_split_modules = ["PuzzleBlock", "StemStage", "MapBlock"]


class HrmMassMappingModel(HrmMassMappingPreTrainedModel):
    """Recurrence without the posterior head. `embed` returns tokens, `forward` runs one segment."""

    _keep_in_fp32_modules_strict = [
        "statistics.mean", "statistics.whitening", "statistics.spread", "readout.gains", "readout.errors",
    ]  # fmt: skip
    # Modules that quantizers skip. They end in ".*", because transformers' tests
    # reject names that are also in `_keep_in_fp32_modules_strict`.
    _keep_in_fp32_modules = ["readout.gains.*", "readout.errors.*"]

    def __init__(self, config: HrmMassMappingConfig):
        super().__init__(config)
        width, planes, cells = config.hidden_size, config.num_planes, config.cell_channels
        self.stem = CosmoStem(config)
        self.H_level = ReasoningLevel(config, config.H_layers)
        self.L_level = MapLevel(config)
        self.wraps = config.padding_mode == "circular"
        channels = (3 * planes + config.mask_channel) * config.cell_size**2
        self.cells_in = nn.Conv2d(channels, cells, 3, padding=0 if self.wraps else 1)
        self.down, self.up = nn.Linear(width, cells), nn.Linear(cells, width)
        self.likelihood = MapLikelihood(config)
        self.spectra_in = nn.Linear(2 * planes * self.likelihood.num_rings, width)
        self.readout = MapReadout(config)
        self.post_init()

    def embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Turn shear maps [B, C, S, S] into tokens [B, tokens, D], starting with CLS."""
        return self.stem(pixel_values)

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        state: HrmMassMappingModelOutput | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> HrmMassMappingModelOutput:
        """Run one segment on shear maps [B, C, S, S] and their tokens, from `state` or, if it is None, from zeros."""
        validate_no_attentions(self, output_attentions)
        x = self.embed(pixel_values) if tokens is None else tokens
        z_H, z_L, kappa, change = self._begin(x, state)
        shear, mask = shear_and_mask(pixel_values, self.config)
        units = map_units(self.config, kappa)
        rest = shear - shear_from_convergence(kappa * units, mask)
        maps = torch.cat((adjoint_shear(rest, mask) / units, kappa, change), dim=1)
        powers = self.likelihood.log_power(maps[:, : 2 * self.config.num_planes]).flatten(1)
        spectra = self.spectra_in(powers.to(x.dtype))  # for CLS: spectra of the residual convergence and of kappa
        z_H, z_L = self._reason(x, self._cells(maps, mask), spectra, z_H, z_L)
        change, log_std, log_power = self.readout(z_H, z_L, maps)
        states = (z_L, z_H) if wants_hidden_states(self.config, output_hidden_states) else None
        maps = {"kappa": kappa + change, "change": change, "log_std": log_std, "log_power": log_power}
        return HrmMassMappingModelOutput(last_hidden_state=z_H, z_H=z_H, z_L=z_L, hidden_states=states, **maps)

    def _begin(self, x: torch.Tensor, state: HrmMassMappingModelOutput | None) -> tuple[torch.Tensor, ...]:
        """Return z_H, z_L, kappa and its last change: detached from `state`, or zeros for the first segment."""
        if state is not None:
            return tuple(values.detach() for values in (state.z_H, state.z_L, state.kappa, state.change))
        config = self.config
        side = config.image_size // config.cell_size
        kappa = x.new_zeros(len(x), config.num_planes, *(config.image_size,) * 2, dtype=torch.float32)
        return torch.zeros_like(x), x.new_zeros(len(x), config.cell_channels, side, side), kappa, kappa

    def _cells(self, maps: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Embed maps and mask as low-level input [B, C, cells, cells]."""
        maps = maps if mask is None else torch.cat((maps, mask), dim=1)
        cells = F.pixel_unshuffle(maps.to(self.cells_in.weight.dtype), self.config.cell_size)
        return self.cells_in(wrap(cells) if self.wraps else cells)

    def _reason(self, x, cells, spectra, z_H, z_L) -> tuple[torch.Tensor, torch.Tensor]:
        """Run H_cycles cycles, each with L_cycles low-level updates and one high-level update."""
        config = self.config
        grid, ratio = config.image_size // config.patch_size, config.patch_size // config.cell_size
        first = x.shape[1] - grid**2  # CLS and the mean features of the stem's stages come before the patches
        x = torch.cat((x[:, :1] + spectra.unsqueeze(1), x[:, 1:]), dim=1)
        for _ in range(config.H_cycles):
            from_above = self.down(z_H[:, first:]).mT.unflatten(-1, (grid, grid))
            from_above = from_above.repeat_interleave(ratio, 2).repeat_interleave(ratio, 3)
            for _ in range(config.L_cycles):
                z_L = self.L_level(z_L, cells + from_above)
            from_below = self.up(F.avg_pool2d(z_L, ratio).flatten(2).mT)
            z_H = self.H_level(z_H, x + F.pad(from_below, (0, 0, first, 0)), None)
        return z_H, z_L


class HrmCosmoForMassMapping(RecurrentHeadMixin, MassMappingMixin, HrmMassMappingPreTrainedModel):
    """Infers mass maps with uncertainties, and the posterior of cosmological parameters, from shear."""

    _keep_in_fp32_modules_strict = ["posterior_head", "halt_head"]  # transformers adds the base model's modules
    # transformers compares prefixes of full names, so names in the base model need "model." in front.
    _keep_in_fp32_modules = ["posterior_head.*", "halt_head.*", "model.readout.gains.*", "model.readout.errors.*"]

    def __init__(self, config: HrmMassMappingConfig):
        super().__init__(config)
        self.model = HrmMassMappingModel(config)
        self.posterior_head = PosteriorHead(config, config.hidden_size)
        self.halt_head = ZeroLinear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        kappa: torch.Tensor | None = None,
        max_steps: int | None = None,
        halt: str = "fixed",
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> MassMappingOutput:
        """Infer mass maps and parameters from shear maps. Compute losses for the given labels and kappa.

        Args:
            pixel_values: [B, 2P (+ 1), S, S] as `CosmoMapFeatureExtractor` scales them: g1 and g2 of each plane, and
                the mask.
            labels: [B, T] in physical units, in the order of `config.target_names`.
            kappa: true convergence [B, P, S, S]; its mean is ignored.
            max_steps, halt: as in `HrmCosmoForRegression.forward`. A map halts when the remaining segments are
                expected to reduce its squared error by a smaller fraction than `config.halt_threshold`.
            output_hidden_states: also return (z_L, z_H) after the last segment.
        """
        validate_no_attentions(self, output_attentions)
        tokens = self.model.embed(pixel_values)

        def segment(rows: torch.Tensor | None, state: HrmMassMappingModelOutput | None) -> HrmMassMappingModelOutput:
            maps, x = (pixel_values, tokens) if rows is None else (pixel_values[rows], tokens[rows])
            return self.model(maps, tokens=x, state=state, return_dict=True)

        states, used = self.run_segments(segment, max_steps, halt)
        posteriors = [self.posterior_head(state.z_H[:, 0]) for state in states]
        estimates = [MapEstimate(state.kappa, state.log_std, state.log_power) for state in states]
        output = self.maps_and_posteriors(estimates, posteriors, used)
        output.halt_logits = torch.stack([self.expected_gain(state.z_H) for state in states], dim=1)
        if wants_hidden_states(self.config, output_hidden_states):
            output.hidden_states = (states[-1].z_L, states[-1].z_H)
        errors = self.add_losses(output, estimates, posteriors, labels, kappa)
        if errors is not None:  # target: fraction of the squared error that later segments remove
            self.add_halt_loss(output, (1 - errors[:, -1:] / errors).clamp(-1, 1))
        return output


__all__ = ["HrmCosmoForMassMapping", "HrmMassMappingModel"]
