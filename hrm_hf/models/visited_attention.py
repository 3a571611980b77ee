"""Attention for layers that run several times per token.

Serving engines (transformers' continuous batching, vLLM, SGLang) store keys and values by the `layer_idx` of the
module that calls the attention function. A layer that runs several times therefore needs one such module per visit.
"""

from copy import copy, deepcopy
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward


class VisitAttention(nn.Module):
    """Parameter-free module that calls the attention function for one visit to a layer.

    Args:
        config: the model's config, whose `_attn_implementation` selects the attention function.
        layer_idx: the visit's slot in a key-value cache.
        head_dim, num_key_value_groups: width of a head, and number of query heads per key-value head.
    """

    def __init__(self, config, layer_idx: int, head_dim: int, num_key_value_groups: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = head_dim
        self.num_key_value_groups = num_key_value_groups
        self.scaling = head_dim**-0.5
        self.is_causal = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from query [B, heads, T, head_dim] to key and value [B, key_heads, S, head_dim].

        Returns the output [B, T, heads, head_dim], and the attention weights or None.
        """
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return attention(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)


def visit_attentions(config, slots: list[int], head_dim: int, num_key_value_groups: int) -> nn.ModuleList:
    """Build one `VisitAttention` for each visit to a layer, in order. `slots` lists their cache slots."""
    return nn.ModuleList(VisitAttention(config, slot, head_dim, num_key_value_groups) for slot in slots)


def rotary_tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Prepare the tables of rotary positions, [B, T, head_dim] each, for `rotate`: [B, T, 1, head_dim]."""
    first, second = sin.chunk(2, dim=-1)
    return cos.unsqueeze(2), torch.cat([-first, second], dim=-1).unsqueeze(2)


def rotate(states: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to queries or keys [B, T, heads, head_dim]. Return them as [B, heads, T, head_dim].

    The result equals that of `apply_rotary_pos_emb`, with fewer operations.
    """
    return (states * cos + states.roll(states.shape[-1] // 2, dims=-1) * signed_sin).transpose(1, 2)


class VisitedLlamaAttention(LlamaAttention):
    """Llama's attention for a layer that runs several times. Each run uses its own cache slot from `slots`."""

    def __init__(self, config, layer_idx: int, slots: list[int]):
        super().__init__(config, layer_idx)
        self.visits = visit_attentions(config, slots, self.head_dim, self.num_key_value_groups)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        visit: int = 0,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from hidden_states [B, T, C].

        `position_embeddings` are the result of `rotary_tables`. `visit` counts the layer's runs on the same tokens,
        from 0.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key = (
            rotate(project(hidden_states).view(shape), *position_embeddings) for project in (self.q_proj, self.k_proj)
        )
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        attend = self.visits[visit]
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, attend.layer_idx)
        dropout = self.attention_dropout if self.training else 0.0
        mixed, weights = attend(query, key, value, attention_mask, dropout, **kwargs)
        return self.o_proj(mixed.reshape(*hidden_states.shape[:-1], -1)), weights


# Name prefixes of the attention functions in vLLM 0.33 and in SGLang's main branch of 2026.
FOREIGN_CACHES = ("vllm", "sglang")


class VisitedLayersMixin:
    """Mixin for models with a `VisitAttention` for each visit to a layer. It rejects unsupported serving engines.

    Attributes:
        _generation_options: arguments of forward that generation configs and `generate_batch` accept.
        batch_options: values of these arguments in continuous batching, which passes none to forward.
    """

    _generation_options: tuple[str, ...] = ()
    batch_options: ClassVar[dict[str, Any]] = {}

    def serving_problem(self, engine: str, may_skip: bool, **options) -> str | None:
        """Return the reason why an engine with its own cache cannot match `generate`, or None if it can.

        `may_skip`: whether a forward pass may skip visits, which requires writing to their slots without attention.
        """
        return None

    def generation_options(self, config: GenerationConfig) -> dict[str, Any]:
        """Return the arguments in `_generation_options` that a generation config sets, with their values."""
        return {name: value for name in self._generation_options if (value := getattr(config, name, None)) is not None}

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        *args,
        **kwargs,
    ):
        """Initialize as transformers does, but raise ValueError if tokens could differ from `generate`'s."""
        options = self.generation_options(self.generation_config if generation_config is None else generation_config)
        flash = "flash" in str(self.config._attn_implementation)
        if problem := self.serving_problem("continuous batching", not flash, **options):
            raise ValueError(problem)
        if self.serving_problem("continuous batching", False, **options):
            continuous_batching_config = copy(continuous_batching_config) or ContinuousBatchingConfig()
            # Flash attention would leave the slots of skipped visits empty.
            continuous_batching_config.auto_switch_to_flash = False
        self.batch_options = options
        return super().init_continuous_batching(generation_config, continuous_batching_config, *args, **kwargs)

    def generate_batch(self, inputs, generation_config: GenerationConfig | None = None, *args, **kwargs):
        """Generate as transformers does, but also apply the arguments in `_generation_options`."""
        if options := {name: kwargs.pop(name) for name in self._generation_options if name in kwargs}:
            generation_config = deepcopy(self.generation_config if generation_config is None else generation_config)
            for name, value in options.items():
                setattr(generation_config, name, value)
        return super().generate_batch(inputs, generation_config, *args, **kwargs)

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        engine = str(attn_implementation)
        if engine.startswith(FOREIGN_CACHES) and (problem := self.serving_problem(engine, False)):
            raise ValueError(problem)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)
