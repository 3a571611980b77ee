"""Residual network that infers cosmological parameters from maps, as a non-recurrent baseline.

The blocks are those of transformers' ResNet (He et al. 2015, arXiv 1512.03385), with these changes for maps: the stem
is a 3x3 convolution at full resolution, because pooling would remove the small scales, which contain most information;
convolutions can wrap around periodic edges; and batch norms use the maps of all processes, so training does not depend
on how a batch is split. Posterior head, losses and output are as in `hrm_cosmo`, so the two models differ only in
their backbone.
"""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, ResNetConfig
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndNoAttention
from transformers.models.resnet.modeling_resnet import ResNetConvLayer, ResNetEncoder, ResNetShortCut
from transformers.utils import can_return_tuple

from .configuration_cosmo_cnn import CosmoCnnConfig
from .cosmo_layers import validate_maps, wrap
from .modeling_utils import CheckpointCodeMixin, ConvolutionsMixin, validate_no_attentions
from .posterior_head import CosmoRegressionOutput, PosteriorHead, PosteriorMixin


if TYPE_CHECKING:
    from .pipeline_cosmo import CosmologyRegressionPipeline  # noqa: F401 - saved with checkpoints


class SumOverProcesses(torch.autograd.Function):
    """Sums a tensor and its gradients over all processes. torch's own version is deprecated."""

    @staticmethod
    def forward(ctx, values: torch.Tensor) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return SumOverProcesses.apply(gradient.contiguous())


class ProcessBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over the maps of all processes. Unlike torch's SyncBatchNorm, it works on CPUs too."""

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        if not (self.training and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(maps)
        mean, variance, count = self._statistics(maps)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
            unbiased = variance * (count / (count - 1))
            self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return torch.addcmul(shift.view(-1, 1, 1), maps, scale.view(-1, 1, 1)).to(maps.dtype)

    def _statistics(self, maps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return each channel's mean and biased variance over all processes, [C] each, and the number of values."""
        variance, mean = torch.var_mean(maps.float(), dim=(0, 2, 3), correction=0)
        channels, count = len(mean), mean.new_full((1,), maps.numel() / maps.shape[1])
        # Gather one row per process, because E[x^2] - E[x]^2 would lose precision if means are large.
        rows = mean.new_zeros(dist.get_world_size(), 2 * channels + 1)
        rows[dist.get_rank()] = torch.cat((mean, variance, count))
        means, variances, counts = SumOverProcesses.apply(rows).split((channels, channels, 1), dim=1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        return mean, ((variances + (means - mean).square()) * counts).sum(0) / total, total


class CosmoCnnPreTrainedModel(ConvolutionsMixin, CheckpointCodeMixin, PreTrainedModel):
    """Base class that supports saving and initializes convolutions as in ResNet (He initialization, fan-out)."""

    config_class = CosmoCnnConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _no_split_modules = ["ResNetBasicLayer"]
    _input_embed_layer = "stem"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, PosteriorHead):
            module.reset(self.config.initializer_range)
        elif isinstance(module, nn.Conv2d):
            if self.config.initializer_range is None:
                init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            else:
                init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.BatchNorm2d):
            super()._init_weights(module)


def _wrap_maps(layer: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (wrap(inputs[0]),)


class CosmoCnnModel(CosmoCnnPreTrainedModel):
    """Stem and residual stages that turn maps [B, C, S, S] into features [B, F] averaged over the map."""

    def __init__(self, config: CosmoCnnConfig):
        super().__init__(config)
        shared = {name: getattr(config, name) for name in ("embedding_size", "hidden_sizes", "depths", "hidden_act")}
        resnet = ResNetConfig(layer_type="basic", downsample_in_first_stage=True, **shared)
        self.stem = ResNetConvLayer(config.num_channels, config.embedding_size, activation=config.hidden_act)
        self.encoder = ResNetEncoder(resnet)
        for module in self.modules():
            if isinstance(module, ResNetConvLayer | ResNetShortCut):
                module.normalization = ProcessBatchNorm2d(module.normalization.num_features)
        if config.padding_mode == "circular":  # transformers' ResNet has no padding option
            for module in self.modules():
                if isinstance(module, ResNetConvLayer):
                    # Pad in a hook, because adapters do not copy a convolution's padding_mode.
                    module.convolution.padding = (0, 0)
                    module.register_forward_pre_hook(_wrap_maps)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPoolingAndNoAttention:
        """Return the last stage's features for each pixel, and their mean as `pooler_output` [B, F]."""
        validate_no_attentions(self, output_attentions)
        validate_maps(pixel_values, self.config)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        stem = self.stem(pixel_values.to(self.stem.convolution.weight.dtype))
        encoded = self.encoder(stem, output_hidden_states=output_hidden_states)
        return BaseModelOutputWithPoolingAndNoAttention(
            last_hidden_state=encoded.last_hidden_state,
            pooler_output=encoded.last_hidden_state.mean(dim=(2, 3)),
            hidden_states=encoded.hidden_states,
        )


class CosmoCnnForRegression(PosteriorMixin, CosmoCnnPreTrainedModel):
    """Infers the posterior of each map's cosmological parameters in a single pass."""

    _keep_in_fp32_modules_strict = ["posterior_head"]

    def __init__(self, config: CosmoCnnConfig):
        super().__init__(config)
        self.model = CosmoCnnModel(config)
        self.posterior_head = PosteriorHead(config, config.hidden_sizes[-1])
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> CosmoRegressionOutput:
        """Predict posteriors and, given labels, compute losses.

        Args:
            pixel_values: [B, C, S, S], as `CosmoMapFeatureExtractor` returns them.
            labels: [B, T] in physical units, in the order of `config.target_names`.
            output_hidden_states: also return the features of each stage.
        """
        features = self.model(pixel_values, output_hidden_states, output_attentions, return_dict=True)
        posteriors = [self.posterior_head(features.pooler_output)]
        used = torch.ones(features.pooler_output.shape[0], dtype=torch.int64, device=features.pooler_output.device)
        output = self.posterior_output(posteriors, used, hidden_states=features.hidden_states)
        if labels is not None:
            self.posterior_losses(output, posteriors, labels)
            config = self.config
            output.loss = config.nll_loss_weight * output.nll_loss + config.mse_loss_weight * output.mse_loss
        return output


__all__ = ["CosmoCnnForRegression", "CosmoCnnModel"]
