"""Which slot of a key-value cache a layer writes, where a layer is visited more than once."""

import torch
from transformers.cache_utils import Cache


class CacheSlots:
    """A cache seen from one visit of a layer: what the layer stores under its own index goes to the visit's slot."""

    def __init__(self, cache: Cache, slot: int):
        self.cache, self.slot = cache, slot

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As a cache's, with the visit's slot instead of `layer_idx`."""
        return self.cache.update(key, value, self.slot)


# How the names of these servers' attention functions begin (vLLM 0.33; SGLang's main branch of 2026).
FOREIGN_CACHES = ("vllm", "sglang")


class VisitedLayersMixin:
    """For causal LMs whose layers are visited several times a token: no cache that has one place a layer.

    Continuous batching, vLLM and SGLang keep keys and values by the layer's own number; visits of one layer would
    overwrite each other, and the answer would be wrong without a word. Such a model must not say
    `_supports_attention_backend` either; vLLM 0.33 asks for it, but takes models that do not say so too.
    """

    @property
    def visits_layers_again(self) -> bool:
        """Whether a layer stores keys and values more than once a token."""
        return True

    def init_continuous_batching(self, *args, **kwargs):
        """As in transformers, if no layer is visited twice. Raises ValueError otherwise."""
        if self.visits_layers_again:
            raise ValueError(
                f"{type(self).__name__} visits its layers several times a token, and continuous batching has one "
                "place a layer for keys and values: use generate, or serve it without --continuous-batching"
            )
        return super().init_continuous_batching(*args, **kwargs)

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        if self.visits_layers_again and str(attn_implementation).startswith(FOREIGN_CACHES):
            raise ValueError(
                f"attn_implementation={attn_implementation!r} keeps one place a layer for keys and values, and "
                f"{type(self).__name__} visits its layers several times a token: serve it with hrm-hf serve"
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)


def cache_slot(cache: Cache | None, slot: int) -> CacheSlots | None:
    """The view of one visit; None without a cache."""
    return None if cache is None else CacheSlots(cache, slot)
