"""Layers and stacks of the Go coder: the planner, and the generator, which attends to the planner's states."""

from collections.abc import Callable

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, eager_attention_forward

from .configuration_hrm_go_coder import HrmGoCoderConfig
from .visited_attention import VisitedLlamaAttention, rotate


class HrmGoCoderCrossAttention(LlamaAttention):
    """Cross-attention from code positions to planner states, with the rotary positions of the stream."""

    def __init__(self, config: HrmGoCoderConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = False  # the mask determines which states are visible

    def keys_and_values(
        self, states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [B, heads, S, head_dim] for planner states [B, S, C]."""
        shape = (*states.shape[:-1], -1, self.head_dim)
        keys = rotate(self.k_proj(states).view(shape), *position_embeddings)
        return keys, self.v_proj(states).view(shape).transpose(1, 2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        keys_and_values: tuple[torch.Tensor, torch.Tensor],
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from hidden_states [B, T, C] to keys and values at S >= T stream positions."""
        shape = hidden_states.shape[:-1]
        query = rotate(self.q_proj(hidden_states).view(*shape, -1, self.head_dim), *position_embeddings)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, *keys_and_values, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.reshape(*shape, -1)), weights


class HrmGoCoderPlannerLayer(GradientCheckpointingLayer):
    """Llama layer with dropout on the output of each branch."""

    def __init__(self, config: HrmGoCoderConfig, layer_idx: int):
        super().__init__()
        slots = [layer_idx + cycle * config.planner_layers for cycle in range(config.planner_cycles)]
        self.self_attn = VisitedLlamaAttention(config, layer_idx, slots)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.dropout(attended)
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


class HrmGoCoderGeneratorLayer(GradientCheckpointingLayer):
    """Generator layer: self-attention over code, cross-attention to planner states, feed-forward."""

    def __init__(self, config: HrmGoCoderConfig, layer_idx: int):
        super().__init__()
        first = config.cache_slots["generator"] + layer_idx
        slots = [first + cycle * config.generator_layers for cycle in range(config.generator_cycles)]
        self.self_attn = VisitedLlamaAttention(config, layer_idx, slots)
        self.cross_attn = HrmGoCoderCrossAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.cross_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,  # separate from `values`, because reentrant checkpointing drops gradients of tuples
        values: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cross_attention_mask: torch.Tensor | None = None,
        past_key_values=None,
        visit: int = 0,
        **kwargs,
    ) -> torch.Tensor:
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            visit=visit,
            **kwargs,
        )
        hidden_states = hidden_states + self.dropout(attended)
        read, _ = self.cross_attn(
            self.cross_attention_layernorm(hidden_states),
            (keys, values),
            position_embeddings,
            cross_attention_mask,
            **kwargs,
        )
        hidden_states = hidden_states + self.dropout(read)
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


class HrmGoCoderPlanner(nn.Module):
    """Causal stack over the complete stream. It reads all tokens and writes plans."""

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(HrmGoCoderPlannerLayer(config, index) for index in range(config.planner_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Map embeddings [B, T, C] to states [B, T, C]."""
        for cycle in range(self.config.planner_cycles):
            for layer in self.layers:
                hidden_states = layer(hidden_states, visit=cycle, **kwargs)
        return self.norm(hidden_states)


class HrmGoCoderGenerator(nn.Module):
    """Causal stack over code. It reads the planner's states through cross-attention."""

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(
            HrmGoCoderGeneratorLayer(config, index) for index in range(config.generator_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def keys_and_values(
        self, planner_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], cache: Cache | None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each layer's cross-attention keys and values, including past positions. All cycles use them."""
        first = self.config.cache_slots["cross"]
        pairs = [layer.cross_attn.keys_and_values(planner_states, position_embeddings) for layer in self.layers]
        return pairs if cache is None else [cache.update(*pair, first + index) for index, pair in enumerate(pairs)]

    def forward(
        self,
        hidden_states: torch.Tensor,
        memory: list[tuple[torch.Tensor, torch.Tensor]],
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **kwargs,
    ) -> torch.Tensor:
        """Map embeddings [B, T, C] to states [B, T, C], given `memory` from `keys_and_values`."""
        for cycle in range(self.config.generator_cycles):
            for layer, pair in zip(self.layers, memory):
                hidden_states = layer(hidden_states, *pair, position_embeddings, visit=cycle, **kwargs)
        return self.norm(hidden_states)
