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


def cache_slot(cache: Cache | None, slot: int) -> CacheSlots | None:
    """The view of one visit; None without a cache."""
    return None if cache is None else CacheSlots(cache, slot)
