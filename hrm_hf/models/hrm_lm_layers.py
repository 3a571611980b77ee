"""Blocks of `hrm_lm`: gated causal attention, SwiGLU, and the stack of one level.

Attention functions, rotary positions and the feed-forward network are transformers'. What differs from Llama: keys and
values go to the slot of this visit (`recurrent_cache.py`), attention has a sigmoid gate, RMS norms have no gain, and a
stack ends in a norm. Source: Sapient's HRM-Text.
"""

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb, eager_attention_forward
from transformers.processing_utils import Unpack
from transformers.utils.generic import TransformersKwargs

from .configuration_hrm_lm import HrmLmConfig
from .recurrent_cache import SegmentKeyValues


def _rms_norm(config: HrmLmConfig, width: int) -> nn.RMSNorm:
    return nn.RMSNorm(width, eps=config.rms_norm_eps, elementwise_affine=config.norm_affine)


class HrmLmAttention(nn.Module):
    """Causal attention with rotary positions, grouped keys, and optionally a sigmoid gate and normalised queries."""

    def __init__(self, config: HrmLmConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        width, kv_width = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False) if config.attention_gate else None
        self.q_norm = _rms_norm(config, self.head_dim) if config.qk_norm else None
        self.k_norm = _rms_norm(config, self.head_dim) if config.qk_norm else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        key_values: SegmentKeyValues,
        first_visit: int,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [B, T, D]; `first_visit` is the visit number of the first layer of this stack pass."""
        input_shape = hidden_states.shape[:-1]
        heads = (*input_shape, -1, self.head_dim)
        query, key = self.q_proj(hidden_states).view(heads), self.k_proj(hidden_states).view(heads)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        key, value = key_values.update(key, value, first_visit + self.layer_idx)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        mixed, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        mixed = mixed.reshape(*input_shape, -1)
        if self.gate_proj is not None:
            mixed = mixed * torch.sigmoid(self.gate_proj(hidden_states))
        return self.o_proj(mixed), weights


class HrmLmDecoderLayer(GradientCheckpointingLayer):
    """Attention and SwiGLU, normalised before each branch ("pre_exit") or after each sum ("post")."""

    def __init__(self, config: HrmLmConfig, layer_idx: int):
        super().__init__()
        self.post_norm = config.norm_position == "post"
        self.self_attn = HrmLmAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = _rms_norm(config, config.hidden_size)
        self.post_attention_layernorm = _rms_norm(config, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> torch.Tensor:
        """[B, T, D] to [B, T, D]."""
        if self.post_norm:
            mixed, _ = self.self_attn(hidden_states, **kwargs)
            hidden_states = self.input_layernorm(hidden_states + self.dropout(mixed))
            return self.post_attention_layernorm(hidden_states + self.dropout(self.mlp(hidden_states)))
        mixed, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.dropout(mixed)
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))


class HrmLmStack(nn.Module):
    """The blocks of one level. Its exit norm bounds a state that passes through it many times."""

    def __init__(self, config: HrmLmConfig, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(HrmLmDecoderLayer(config, index) for index in range(num_layers))
        self.exit_norm = nn.Identity() if config.norm_position == "post" else _rms_norm(config, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> torch.Tensor:
        """[B, T, D] to [B, T, D]."""
        if self.layers[0].gradient_checkpointing and torch.is_grad_enabled() and not hidden_states.requires_grad:
            hidden_states.requires_grad_()  # a reentrant checkpoint gives no gradients where no input needs one
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)
        return self.exit_norm(hidden_states)


class HrmLmQHead(nn.Linear):
    """Halting and continuing value of a token; a class of its own because it starts at zero weights, biases -5.

    In float32 at least: the values differ by less than bfloat16 resolves.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, T, D] to [B, T, 2]."""
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        with torch.autocast(hidden_states.device.type, enabled=False):
            return nn.functional.linear(hidden_states.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
