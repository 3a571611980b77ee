"""A dynamic cache that writes new tokens in place, in room that it takes for a block of tokens at a time.

transformers' `DynamicLayer` copies all past keys and values for every new token, which is a good part of a small
model's step and grows with the text. Here a token is copied once, and the rest once a block. What is returned are
views of that room, with the values a `DynamicLayer` has; whatever exchanges them (reordering of beams, selection of
rows) gives new tensors, which get new room with the next token.
"""

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


BLOCK = 128  # tokens


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` for decoding; where gradients are wanted it grows as that one does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._rooms: list[torch.Tensor | None] = [None, None]  # behind keys and values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values [B, heads, past + T, head_dim], given those of T new tokens."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = self._append(0, self.keys, key_states), self._append(1, self.values, value_states)
        return self.keys, self.values

    def _append(self, which: int, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        past = held.shape[-2] if held.numel() else 0
        end, room = past + new.shape[-2], self._rooms[which]
        if room is None or end > room.shape[-2] or not _is_beginning(held, room):
            room = new.new_empty((*new.shape[:-2], (end // BLOCK + 1) * BLOCK, new.shape[-1]))
            if past:
                room[..., :past, :] = held
            self._rooms[which] = room
        room[..., past:end, :] = new
        return room[..., :end, :]

    def reset(self) -> None:
        """Forgets all tokens, and gives their room back."""
        super().reset()
        self._rooms = [None, None]


def _is_beginning(held: torch.Tensor, room: torch.Tensor) -> bool:
    """Whether `held` [B, heads, past, head_dim] are the first tokens in `room`, which may be written to here."""
    same = held.data_ptr() == room.data_ptr() and held.stride() == room.stride() and held.shape[:-2] == room.shape[:-2]
    return same and room.is_inference() == torch.is_inference_mode_enabled()


def let_grow_in_place(cache: Cache | None) -> Cache | None:
    """The same cache, whose layers become `GrowingLayer`s if they are all `DynamicLayer`s without tokens."""
    if type(cache) is DynamicCache and not cache.offloading:
        if cache.layers and all(type(layer) is DynamicLayer and not layer.is_initialized for layer in cache.layers):
            cache.layers = [GrowingLayer() for _ in cache.layers]
    return cache
