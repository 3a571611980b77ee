"""Hierarchical recurrent model that infers cosmological parameters from maps.

A stem turns a map into tokens once. Segments of H_cycles * L_cycles low-level and H_cycles high-level updates then
refine the two states. Only the last update of each is differentiated (the one-step gradient of Wang et al. 2025, arXiv
2506.21734), and the posterior after each segment has its own loss (deep supervision). A head predicts how many nats
the remaining segments would gain; adaptive halting stops a map when the expected gain is too small.

Unlike for puzzles, a training step runs all segments of a batch, because the stem is as expensive as the segments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput, can_return_tuple

from .configuration_hrm_cosmo import HrmCosmoConfig
from .cosmo_layers import CosmoStem, ZeroLinear
from .modeling_utils import CheckpointCodeMixin, validate_no_attentions
from .posterior_head import CosmoRegressionOutput, Posterior, PosteriorHead, PosteriorMixin
from .puzzle_layers import ReasoningLevel, one_step_gradient


if TYPE_CHECKING:
    from .pipeline_cosmo import CosmologyRegressionPipeline  # noqa: F401 - saved with checkpoints

GAIN_LIMITS = (-1.0, 3.0)  # the gain in nats is clamped, so that no single map dominates the halting loss


@dataclass
class HrmCosmoModelOutput(ModelOutput):
    """Latent states [B, tokens, D] after a segment. `last_hidden_state` is z_H."""

    last_hidden_state: torch.Tensor | None = None
    z_H: torch.Tensor | None = None
    z_L: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


class HrmCosmoPreTrainedModel(CheckpointCodeMixin, PreTrainedModel):
    """Base class with initialization and saving."""

    config: HrmCosmoConfig
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["PuzzleBlock", "StemStage"]
    _input_embed_layer = "stem"
    _keep_in_fp32_modules_strict = ["statistics.mean", "statistics.whitening", "statistics.spread"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if hasattr(module, "reset"):
            module.reset(std)
        elif isinstance(module, nn.Conv2d):
            fan_in = module.weight[0].numel()
            init.normal_(module.weight, std=std or (2 / fan_in) ** 0.5)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, std=std or module.in_features**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=std or 0.1)


class HrmCosmoModel(HrmCosmoPreTrainedModel):
    """Stem and recurrence without heads. `embed` returns tokens, `forward` runs one segment on them."""

    def __init__(self, config: HrmCosmoConfig):
        super().__init__(config)
        self.stem = CosmoStem(config)
        self.H_level = ReasoningLevel(config, config.H_layers)
        self.L_level = ReasoningLevel(config, config.L_layers)
        self.post_init()

    def embed(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Turn maps [B, C, S, S] into tokens [B, tokens, D], starting with CLS."""
        return self.stem(pixel_values)

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        z_H: torch.Tensor | None = None,
        z_L: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> HrmCosmoModelOutput:
        """Run one segment on maps or on `tokens` from `embed`, starting from z_H and z_L (0 if None)."""
        validate_no_attentions(self, output_attentions)
        if (pixel_values is None) == (tokens is None):
            raise ValueError("pass either pixel_values, or tokens from embed(pixel_values)")
        x = self.embed(pixel_values) if tokens is None else tokens
        z_H, z_L = (torch.zeros_like(x) if z is None else z.detach() for z in (z_H, z_L))
        cycles = (self.config.H_cycles, self.config.L_cycles)
        z_H, z_L = one_step_gradient(self.H_level, self.L_level, cycles, x, None, z_H, z_L)
        states = (z_L, z_H) if wants_hidden_states(self.config, output_hidden_states) else None
        return HrmCosmoModelOutput(last_hidden_state=z_H, z_H=z_H, z_L=z_L, hidden_states=states)


def _tensors(state: ModelOutput) -> dict[str, torch.Tensor]:
    """Return the tensors in a state by name, without the duplicates in `hidden_states`."""
    return {name: values for name, values in state.items() if torch.is_tensor(values)}


class RecurrentHeadMixin:
    """Mixin that adds the segment loop, halting and map statistics to heads with a `halt_head`."""

    def run_segments(
        self, segment: Callable[[torch.Tensor | None, Any], Any], max_steps: int | None, halt: str
    ) -> tuple[list[Any], torch.Tensor]:
        """Run all segments on a batch. With halt="adaptive", skip maps that have halted.

        Args:
            segment: function that takes rows [N] (None for all) and their state (None at first), runs one segment,
                and returns the next state, an output with z_H.
            max_steps: number of segments; `config.halt_max_steps` by default.
            halt: "fixed" or "adaptive".

        Returns:
            The state after each segment (halted maps repeat theirs), and the number of segments of each map [B].
        """
        steps = self.config.halt_max_steps if max_steps is None else max_steps
        if steps < 1 or halt not in ("fixed", "adaptive"):
            raise ValueError(f"max_steps={max_steps}, halt={halt!r}: needs max_steps >= 1, halt='fixed' or 'adaptive'")
        if halt == "adaptive" and self.training:
            raise ValueError('halt="adaptive": only works in inference; call model.eval(), or use halt="fixed"')
        states = [segment(None, None)]
        while halt == "fixed" and len(states) < steps:
            states.append(segment(None, states[-1]))
        z_H = states[0].z_H
        used = torch.full(z_H.shape[:1], len(states), device=z_H.device)
        if halt == "fixed":
            return states, used
        active = (self.expected_gain(z_H) >= self.config.halt_threshold).nonzero().squeeze(-1)
        for _ in range(steps - 1):
            last = states[-1]
            if len(active):
                found = segment(active, type(last)(**{name: each[active] for name, each in _tensors(last).items()}))
                merged = {name: each.index_copy(0, active, found[name]) for name, each in _tensors(last).items()}
                last = type(last)(**merged)
                used[active] += 1
                active = active[self.expected_gain(found.z_H) >= self.config.halt_threshold]
            states.append(last)
        return states, used

    def expected_gain(self, z_H: torch.Tensor) -> torch.Tensor:
        """Predict by how many nats [B] the remaining segments will lower the loss. z_H gets no gradients."""
        with torch.autocast(z_H.device.type, enabled=False):
            return self.halt_head(z_H[:, 0].detach()).squeeze(-1)

    def add_halt_loss(self, output: CosmoRegressionOutput, gained: torch.Tensor) -> None:
        """Add the loss of the predicted gains. `gained` [B, segments] holds the true gain after each segment."""
        output.halt_loss = (output.halt_logits - gained).square().mean()
        output.loss = output.loss + self.config.halt_loss_weight * output.halt_loss
        output.metrics["steps"] = output.steps.float().mean()

    def fit_statistics(self, batches: Sequence[torch.Tensor]) -> None:
        """Fit the statistics' whitening to a few thousand training maps. Call this once, before training."""
        if self.model.stem.statistics is not None:
            self.model.stem.statistics.fit(batches)

    def map_distance(self, pixel_values: torch.Tensor) -> torch.Tensor | None:
        """Return the distance of each map's statistics from those of the training maps, float32 [B].

        This is the Mahalanobis distance divided by the square root of the number of statistics, about 1 for a training
        map. Beyond `config.max_map_distance`, a posterior can be confident and wrong. If the model has no statistics,
        the result is None.
        """
        statistics = self.model.stem.statistics
        return None if statistics is None else statistics.distance(pixel_values)


class HrmCosmoForRegression(RecurrentHeadMixin, PosteriorMixin, HrmCosmoPreTrainedModel):
    """Infers the posterior of cosmological parameters from maps."""

    _keep_in_fp32_modules_strict = ["posterior_head", "halt_head"]  # transformers adds the base model's modules
    # Modules that quantizers skip. They end in ".*", because transformers' tests reject names that are also in
    # `_keep_in_fp32_modules_strict`.
    _keep_in_fp32_modules = ["posterior_head.*", "halt_head.*"]

    def __init__(self, config: HrmCosmoConfig):
        super().__init__(config)
        self.model = HrmCosmoModel(config)
        self.posterior_head = PosteriorHead(config, config.hidden_size)
        self.halt_head = ZeroLinear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        max_steps: int | None = None,
        halt: str = "fixed",
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> CosmoRegressionOutput:
        """Infer posteriors for a batch of maps, and compute losses if labels are given.

        Args:
            pixel_values: [B, C, S, S], as `CosmoMapFeatureExtractor` returns them.
            labels: [B, T] in physical units, in the order of `config.target_names`.
            max_steps: segments, `config.halt_max_steps` by default.
            halt: "fixed" runs all segments; "adaptive" (only in inference) stops a map when its expected gain is below
                `config.halt_threshold`.
            output_hidden_states: also return (z_L, z_H) [B, tokens, D] after the last segment.
        """
        validate_no_attentions(self, output_attentions)
        tokens = self.model.embed(pixel_values)

        def segment(rows: torch.Tensor | None, state: HrmCosmoModelOutput | None) -> HrmCosmoModelOutput:
            z_H, z_L = (None, None) if state is None else (state.z_H, state.z_L)
            return self.model(tokens=tokens if rows is None else tokens[rows], z_H=z_H, z_L=z_L, return_dict=True)

        states, used = self.run_segments(segment, max_steps, halt)
        posteriors = [self.posterior_head(state.z_H[:, 0]) for state in states]
        output = self.posterior_output(posteriors, used)
        output.halt_logits = torch.stack([self.expected_gain(state.z_H) for state in states], dim=1)
        if wants_hidden_states(self.config, output_hidden_states):
            output.hidden_states = (states[-1].z_L, states[-1].z_H)
        if labels is not None:
            self._add_losses(output, posteriors, labels)
        return output

    def _add_losses(self, output: CosmoRegressionOutput, posteriors: list[Posterior], labels: torch.Tensor) -> None:
        config = self.config
        nll, mse = self.posterior_losses(output, posteriors, labels)
        gained = (nll - nll[:, -1:]).detach().clamp(*GAIN_LIMITS)
        output.loss = (config.nll_loss_weight * nll + config.mse_loss_weight * mse).mean()
        self.add_halt_loss(output, gained)


def wants_hidden_states(config: HrmCosmoConfig, requested: bool | None) -> bool:
    return config.output_hidden_states if requested is None else requested


__all__ = ["HrmCosmoForRegression", "HrmCosmoModel"]
