"""Attention for layers that run several times per token.

Serving engines (transformers' continuous batching, vLLM, SGLang) store keys and values by the `layer_idx` of the
module that calls the attention function. A layer that runs several times therefore needs one such module per visit.
"""

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward


class VisitAttention(nn.Module):
    """Parameter-free module that calls the attention function for one visit of a layer.

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
    """Build one `VisitAttention` for each visit of a layer, in order. `slots` lists their cache slots."""
    return nn.ModuleList(VisitAttention(config, slot, head_dim, num_key_value_groups) for slot in slots)
