"""U-Net that reconstructs mass maps from shear in one pass, as a non-recurrent baseline.

The architecture is from Ronneberger et al. 2015 (arXiv 1505.04597), applied to weak lensing by Jeffrey et al. 2020
(arXiv 1908.00543, DeepMass). As in DeepMass, the input includes a first estimate of the map, here the adjoint A^T d.
There are no normalization layers, because the amplitude is the signal, and convolutions wrap around periodic edges.
Likelihoods, posterior head and output are as in `hrm_mass_mapping`, so the two models differ only in their
backbone.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndNoAttention
from transformers.utils import can_return_tuple

from .configuration_cosmo_unet import CosmoUnetConfig
from .cosmo_layers import ZeroLinear, validate_maps, wrap
from .mass_map_layers import (
    MapEstimate,
    MapLikelihood,
    MassMappingMixin,
    MassMappingOutput,
    map_units,
    shear_and_mask,
    soft_limited,
)
from .modeling_utils import CheckpointCodeMixin, ConvolutionsMixin, validate_no_attentions
from .posterior_head import PosteriorHead
from .shear_operator import adjoint_shear


class CosmoUnetPreTrainedModel(ConvolutionsMixin, CheckpointCodeMixin, PreTrainedModel):
    """Base class that supports saving and applies He initialization to convolutions."""

    config: CosmoUnetConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _no_split_modules = ["UnetLevel"]
    _input_embed_layer = "down"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if hasattr(module, "reset"):
            module.reset(std)
        elif isinstance(module, nn.Conv2d):
            init.normal_(module.weight, std=std or (2 / module.weight[0].numel()) ** 0.5)
            init.zeros_(module.bias)


class UnetLevel(nn.Module):
    """Two 3x3 convolutions at one resolution, mapping [B, c_in, S, S] to [B, c_out, S, S]."""

    def __init__(self, c_in: int, c_out: int, wraps: bool):
        super().__init__()
        self.wraps, padding = wraps, 0 if wraps else 1
        self.convolutions = nn.ModuleList([
            nn.Conv2d(c_in, c_out, 3, padding=padding), nn.Conv2d(c_out, c_out, 3, padding=padding)
        ])  # fmt: skip

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        for convolution in self.convolutions:
            maps = F.gelu(convolution(wrap(maps) if self.wraps else maps))
        return maps


class CosmoUnetModel(CosmoUnetPreTrainedModel):
    """U-Net that turns shear maps [B, C, S, S] into features per pixel and for the complete map."""

    def __init__(self, config: CosmoUnetConfig):
        super().__init__(config)
        widths, wraps = config.hidden_sizes, config.padding_mode == "circular"
        channels = [config.num_channels + config.num_planes, *widths]
        self.down = nn.ModuleList(UnetLevel(*pair, wraps) for pair in pairwise(channels))
        self.up = nn.ModuleList(UnetLevel(width + below, width, wraps) for width, below in pairwise(widths))
        self.likelihood = MapLikelihood(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPoolingAndNoAttention:
        """Return features [B, F, S, S], and the mean over the lowest level, [B, W], as `pooler_output`.

        Args:
            pixel_values: [B, 2P (+ 1), S, S], as `CosmoMapFeatureExtractor` returns them.
            output_hidden_states: also return the features of each level on the way down.
        """
        validate_no_attentions(self, output_attentions)
        validate_maps(pixel_values, self.config)
        shear, mask = shear_and_mask(pixel_values, self.config)
        first = adjoint_shear(shear, mask)
        first = first / map_units(self.config, first)
        features = torch.cat((first, pixel_values), dim=1).to(self.down[0].convolutions[0].weight.dtype)
        passed = []
        for number, level in enumerate(self.down):
            features = level(F.avg_pool2d(features, 2) if number else features)
            passed.append(features)
        for level, skip in zip(reversed(self.up), reversed(passed[:-1]), strict=True):
            features = level(torch.cat((skip, F.interpolate(features, scale_factor=2.0)), dim=1))
        requested = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutputWithPoolingAndNoAttention(
            last_hidden_state=features,
            pooler_output=passed[-1].mean((2, 3)),
            hidden_states=tuple(passed) if requested else None,
        )


class CosmoUnetForMassMapping(MassMappingMixin, CosmoUnetPreTrainedModel):
    """Infers mass maps with uncertainties, and the posterior of cosmological parameters, in one pass."""

    _keep_in_fp32_modules_strict = ["posterior_head", "errors"]

    def __init__(self, config: CosmoUnetConfig):
        super().__init__(config)
        self.model = CosmoUnetModel(config)
        planes, width = config.num_planes, config.hidden_sizes[-1]
        self.maps = nn.Conv2d(config.hidden_sizes[0], 2 * planes, 1)
        self.errors = ZeroLinear(width, planes * self.model.likelihood.num_rings)
        self.posterior_head = PosteriorHead(config, width)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        kappa: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> MassMappingOutput:
        """Estimate maps and parameters. Takes the arguments of `HrmCosmoForMassMapping.forward`."""
        features = self.model(pixel_values, output_hidden_states, output_attentions, return_dict=True)
        estimated, log_std = self.maps(features.last_hidden_state).float().split(self.config.num_planes, dim=1)
        with torch.autocast(estimated.device.type, enabled=False):
            log_power = self.errors(features.pooler_output).unflatten(-1, (self.config.num_planes, -1))
        estimated = estimated - estimated.mean((2, 3), keepdim=True)
        estimates = [MapEstimate(estimated, soft_limited(log_std), log_power)]
        posteriors = [self.posterior_head(features.pooler_output)]
        used = torch.ones(estimated.shape[0], dtype=torch.int64, device=estimated.device)
        output = self.maps_and_posteriors(estimates, posteriors, used)
        output.hidden_states = features.hidden_states
        self.add_losses(output, estimates, posteriors, labels, kappa)
        return output


__all__ = ["CosmoUnetForMassMapping", "CosmoUnetModel"]
