"""Blocks of the Go coder: planner and generator layers, cross-attention, feedback encoder, refinement head.

Attention, feed-forward, norms and rotary positions are transformers' Llama; names of weights too, so that the planner
stack alone is a Llama. Cross-attention is here because Llama has none.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .cache_slots import cache_slot
from .configuration_hrm_go_coder import HrmGoCoderConfig
from .processing_hrm_go_coder import CATEGORIES, DECISIONS, LINE_BUCKETS


class HrmGoCoderCrossAttention(nn.Module):
    """Attention of code positions to the planner's states. Positions are those of the one stream, for both sides."""

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = False  # which states may be read is in the mask
        inner, inner_kv = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, inner_kv, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, inner_kv, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def keys_and_values(
        self, states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, heads, S, head_dim] of planner states [B, S, C]."""
        shape = (*states.shape[:-1], -1, self.head_dim)
        keys = self.k_proj(states).view(shape).transpose(1, 2)
        values = self.v_proj(states).view(shape).transpose(1, 2)
        return apply_rotary_pos_emb(keys, keys, *position_embeddings)[1], values

    def forward(
        self,
        hidden_states: torch.Tensor,
        keys_and_values: tuple[torch.Tensor, torch.Tensor],
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attends from hidden_states [B, T, C] to keys and values of S >= T stream positions."""
        shape = hidden_states.shape[:-1]
        query = self.q_proj(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
        query = apply_rotary_pos_emb(query, query, *position_embeddings)[0]
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, *keys_and_values, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.reshape(*shape, -1)), weights


class HrmGoCoderPlannerLayer(GradientCheckpointingLayer):
    """Llama's layer, with dropout on its branches."""

    def __init__(self, config: HrmGoCoderConfig, layer_idx: int):
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.dropout(attended)
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


class HrmGoCoderGeneratorLayer(GradientCheckpointingLayer):
    """Self-attention over code, attention to the planner, feed-forward."""

    def __init__(self, config: HrmGoCoderConfig, layer_idx: int):
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx)
        self.cross_attn = HrmGoCoderCrossAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.cross_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        keys: torch.Tensor,  # of the planner, apart: reentrant checkpointing sees no gradient through a tuple
        values: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cross_attention_mask: torch.Tensor | None = None,
        past_key_values=None,
        **kwargs,
    ) -> torch.Tensor:
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
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
    """A causal stack over the whole stream: it reads problem, context, attempts and feedback, and writes plans."""

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(HrmGoCoderPlannerLayer(config, index) for index in range(config.planner_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, past_key_values=None, **kwargs) -> torch.Tensor:
        """States [B, T, C] of embeddings [B, T, C]."""
        for cycle in range(self.config.planner_cycles):
            for index, layer in enumerate(self.layers):
                slot = cycle * len(self.layers) + index
                hidden_states = layer(hidden_states, past_key_values=cache_slot(past_key_values, slot), **kwargs)
        return self.norm(hidden_states)


class HrmGoCoderGenerator(nn.Module):
    """A causal stack over code, which reads the planner's states by cross-attention."""

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(
            HrmGoCoderGeneratorLayer(config, index) for index in range(config.generator_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def keys_and_values(
        self, planner_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], past_key_values
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What each layer's cross-attention reads, past positions included. The same in every cycle."""
        first = self.config.cache_slots["cross"]
        pairs = [layer.cross_attn.keys_and_values(planner_states, position_embeddings) for layer in self.layers]
        if past_key_values is None:
            return pairs
        return [past_key_values.update(*pair, first + index) for index, pair in enumerate(pairs)]

    def forward(
        self,
        hidden_states: torch.Tensor,
        memory: list[tuple[torch.Tensor, torch.Tensor]],
        past_key_values=None,
        **kwargs,
    ) -> torch.Tensor:
        """States [B, T, C] of embeddings [B, T, C] of code positions."""
        first = self.config.cache_slots["generator"]
        for cycle in range(self.config.generator_cycles):
            for index, layer in enumerate(self.layers):
                slot = first + cycle * len(self.layers) + index
                cache = cache_slot(past_key_values, slot)
                hidden_states = layer(hidden_states, *memory[index], past_key_values=cache, **kwargs)
        return self.norm(hidden_states)


class HrmGoCoderFeedbackEncoder(nn.Module):
    """What a validator said, as a vector: its two verdicts, the category of the error and where it is.

    Without a validator the vector is a learned one of its own, not that of a validator without complaints.
    """

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__()
        half = config.hidden_size // 2
        self.flags = nn.Linear(2, half)
        self.category = nn.Embedding(len(CATEGORIES), half)
        self.projection = nn.Linear(2 * half, config.hidden_size)
        self.line = nn.Embedding(LINE_BUCKETS, config.hidden_size)
        self.no_validator = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, feedback_ids: torch.Tensor) -> torch.Tensor:
        """[..., C] of feedback ids [..., 4] (`Feedback.token_ids`): syntax, tests, category, line bucket."""
        syntax, tests, category, line = feedback_ids.unbind(dim=-1)
        # 0 unknown, 1 good, 2 bad become 0, 1, -1.
        flags = torch.stack([syntax, tests], dim=-1)
        flags = torch.where(flags == 2, -1, flags).to(self.no_validator.dtype)
        encoded = self.projection(torch.cat([self.flags(flags), self.category(category)], dim=-1))
        encoded = nn.functional.gelu(encoded) + self.line(line)
        nobody = ((syntax == 0) & (tests == 0)).unsqueeze(-1)
        return torch.where(nobody, self.no_validator.to(encoded.dtype), encoded)


class HrmGoCoderRefinementHead(nn.Module):
    """Whether an attempt is to be continued, refined or done, from what is known at its </CODE>."""

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__()
        self.hidden = nn.Linear(4 * config.hidden_size, config.hidden_size // 2)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.classes = nn.Linear(config.hidden_size // 2, len(DECISIONS))

    def forward(self, planner, generator, plan, feedback) -> torch.Tensor:
        """Logits [..., 3] of planner and generator states, the mean state of the plan, and feedback, each [..., C]."""
        features = torch.cat([planner, generator, plan, feedback], dim=-1)
        return self.classes(self.dropout(nn.functional.gelu(self.hidden(features))))
