"""Key-value caching for decoders that visit layers several times per token.

`RecurrentCache` redirects the keys and values of a layer to the slot of the current visit. Visits are numbered as

    visit(h, l, layer) = h * cycle + l * num_l_layers + layer          low-level pass l of cycle h
    visit(h, H, layer) = h * cycle + L_cycles * num_l_layers + layer   the high-level pass that ends cycle h
    with cycle = L_cycles * num_l_layers + num_h_layers

and the slot of a visit is `segment * segment_visits + visit` ("per_segment"), `visit` ("last_segment": each segment
overwrites the previous one), or the layer's own slot ("last_visit": each visit overwrites the previous one). Layers
that run once per token have slots before (prelude) and after (coda) these; see `OnceCache`.

In training and in decoding, a token that has halted keeps the keys and values of its last segment, and later tokens
that run more segments read them. The cache itself is one of transformers' caches; in a `DynamicCache`, `open_cache`
replaces the empty layers with `PreallocatedLayer`s.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticLayer


LEAST_ROOM = 32  # minimum number of further tokens to allocate memory for


class PreallocatedLayer(DynamicLayer):
    """Dynamic cache layer with memory for later tokens, so that appending one does not copy all earlier ones.

    Attributes:
        room: buffers [B, heads, capacity, head_dim] of keys and values, or None. `keys` and `values` are their first
            columns, as long as `keys` is `inside`; other methods of the layer replace `keys` with other tensors.
    """

    room: tuple[torch.Tensor, torch.Tensor] | None = None
    inside: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [B, heads, T, head_dim] of new tokens. Return those of all tokens."""
        start, tokens = self.get_seq_length(), key_states.shape[-2]
        if not start or torch.is_grad_enabled() or not _fits(key_states, self.keys):
            self.room = self.inside = None
            return super().update(key_states, value_states, *args, **kwargs)
        if self.keys is not self.inside or start + tokens > self.room[0].shape[-2] or _read_only(self.keys):
            capacity = start + tokens + max(LEAST_ROOM, start // 8)
            self.room = _copied(self.keys, capacity), _copied(self.values, capacity)
        keys, values = self.room
        keys.narrow(-2, start, tokens).copy_(key_states)
        values.narrow(-2, start, tokens).copy_(value_states)
        self.keys = self.inside = keys.narrow(-2, 0, start + tokens)
        self.values = values.narrow(-2, 0, start + tokens)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens. Their room is reused."""
        inside = self.keys is self.inside
        super().crop(tokens_to_remove)
        self.inside = self.keys if inside else None


def _copied(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """Copy states [B, heads, S, head_dim] to the start of a new buffer [B, heads, capacity, head_dim]."""
    buffer = states.new_empty(*states.shape[:-2], capacity, states.shape[-1])
    buffer.narrow(-2, 0, states.shape[-2]).copy_(states)
    return buffer


def _fits(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Check whether new states [B, heads, T, head_dim] can be written next to old ones. Tracers need `torch.cat`."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return new.dtype == old.dtype and new.shape[:2] == old.shape[:2] and not traced


def _read_only(buffer: torch.Tensor) -> bool:
    """Check whether a buffer was made in inference mode and is used outside of it, where it cannot be written."""
    return buffer.is_inference() and not torch.is_inference_mode_enabled()


def open_cache(cache: Cache | None, config, use_cache: bool | None) -> Cache | None:
    """Return the given cache, a new one if `use_cache`, or None.

    Empty layers of a `DynamicCache` are replaced by `PreallocatedLayer`s.
    """
    if cache is None and use_cache:
        cache = DynamicCache(config=config)
    if type(cache) is DynamicCache and not cache.offloading and not torch.compiler.is_compiling():
        for slot, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer and not layer.is_initialized:
                cache.layers[slot] = PreallocatedLayer()
        if cache.layer_class_to_replicate is DynamicLayer:
            cache.layer_class_to_replicate = PreallocatedLayer
    return cache


def validate_slots(cache: Cache | None, slots: int) -> None:
    """Raise ValueError for a cache with fewer slots than the model needs."""
    made = len(cache.layers) if isinstance(cache, Cache) else 0  # serving engines' caches have no `layers`
    if 0 < made < slots:
        raise ValueError(
            f"past_key_values: has {made} layers, but the model needs {slots}, one for each run of a layer; for "
            f"prefix tuning, set num_layers={slots} in the PrefixTuningConfig"
        )


class VisitCache:
    """Keys and values of one visit to a layer.

    Args:
        cache, slot: the cache with past tokens, or None, and the slot of the visit.
        written: slots that already contain the new tokens of this forward.
        kv_layout: layout of the slots, for error messages.
    """

    active: torch.Tensor | None = None  # bool [B, 1, T, 1], tokens that have not halted
    before: tuple[torch.Tensor, torch.Tensor] | None = None  # keys and values of tokens that have halted
    keeps, detaches = False, False  # whether to keep the new keys and values in `kept`, and whether to detach them
    kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(self, cache: Cache | None, slot: int, written: set[int], kv_layout: str):
        self.cache, self.slot, self.written, self.kv_layout = cache, slot, written, kv_layout

    def update(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add T new tokens. Return the keys and values of all tokens, [B, heads, past + T, head_dim] each."""
        if self.before is not None:
            key, value = (torch.where(self.active, *pair) for pair in zip((key, value), self.before))
        if self.keeps:
            self.kept = (key.detach(), value.detach()) if self.detaches else (key, value)
        if self.cache is None:
            return key, value
        return write_slot(self.cache, self.written, key, value, self.slot, self.kv_layout)


class OnceCache:
    """Keys and values of layers that run once per token (prelude, coda), starting at slot `first_slot`."""

    def __init__(self, cache: Cache | None, first_slot: int):
        self.cache, self.first_slot = cache, first_slot
        self.written: set[int] = set()

    def visit(self, number: int) -> VisitCache:
        """Return the keys and values of a visit. A second visit in the same forward overwrites the first."""
        return VisitCache(self.cache, self.first_slot + number, self.written, "per_segment")


class RecurrentCache:
    """Key-value cache for one segment of a forward pass.

    Args:
        cache: the cache with past tokens, or None.
        active: bool [B, T], tokens that have not halted, or None if all are active.
        before: the `RecurrentCache` of the previous segment, or None in the first segment.
        segments_to_keep: number of segments that later segments may read; 0 if no token can halt before others.
    """

    def __init__(
        self,
        config,
        cache: Cache | None,
        active: torch.Tensor | None,
        before: "RecurrentCache | None",
        segments_to_keep: int,
    ):
        self.config, self.cache, self.kv_layout = config, cache, config.kv_layout
        self.active = None if active is None else active[:, None, :, None]
        self.segment = 0 if before is None else before.segment + 1
        self.slots = segment_slots(config, self.segment)
        self.keeps, self.detaches = self.segment + 1 < segments_to_keep, config.detach_between_segments
        self.before = {} if before is None or active is None else before.kept()
        self.written: set[int] = set() if before is None else before.written
        self.visits: dict[int, VisitCache] = {}

    def visit(self, number: int) -> VisitCache:
        """Return the keys and values of a visit. The module docstring explains how visits are numbered."""
        found = self.visits[number] = VisitCache(self.cache, self.slots[number], self.written, self.kv_layout)
        found.active, found.before = self.active, self.before.get(number)
        found.keeps, found.detaches = self.keeps, self.detaches
        return found

    def kept(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values of the new tokens for each visit, if later segments may read them."""
        return {number: visit.kept for number, visit in self.visits.items() if visit.kept is not None}

    def copy_to_later_segments(self, kwargs: dict[str, Any]) -> None:
        """After the last segment, copy its keys and values into the slots of the segments that did not run.

        `kwargs` are those of the attention function, which include the cache in continuous batching.
        """
        paged = kwargs.get("cache")
        if (self.cache is None and paged is None) or self.config.kv_layout != "per_segment":
            return
        for segment in range(self.segment + 1, self.config.halt_max_steps):
            slots = segment_slots(self.config, segment)
            for visit, (key, value) in self.kept().items():
                if paged is None:
                    self.cache.update(key, value, slots[visit])
                else:  # a copy, because the cache modifies its keyword arguments
                    paged.update(key, value, layer_idx=slots[visit], kwargs=dict(kwargs))


def segment_slots(config, segment: int) -> list[int]:
    """Return the cache slot of each visit in a segment, in order. Segments are counted from 0."""
    first, low = config.prelude_layers, config.num_l_layers
    if config.kv_layout == "last_visit":
        cycle = [*range(low)] * config.L_cycles + [*range(low, low + config.num_h_layers)]
        return [first + slot for slot in cycle] * config.H_cycles  # each cycle reuses the slots of the previous cycle
    if config.kv_layout == "per_segment":
        first += segment * config.segment_visits
    return [*range(first, first + config.segment_visits)]


def first_slots(config) -> tuple[list[int], list[int], list[int]]:
    """Return the first layer's slot in each pass of the low-level stack, the high-level stack and the coda."""
    cycle = config.L_cycles * config.num_l_layers + config.num_h_layers
    low, high = [], []
    for segment in range(config.halt_max_steps):
        slots = segment_slots(config, segment)
        for start in range(0, config.segment_visits, cycle):
            low += [slots[start + n * config.num_l_layers] for n in range(config.L_cycles)]
            high += slots[start + cycle - config.num_h_layers : start + cycle][:1]  # a flat loop has no H layers
    return low, high, [config.num_hidden_layers - config.coda_layers]


def write_slot(
    cache: Cache, written: set[int], key: torch.Tensor, value: torch.Tensor, slot: int, kv_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append the keys and values of T new tokens to a cache slot, and return the slot's full contents.

    If the slot is in `written`, it already contains the new tokens of this forward, and they are replaced. With
    kv_layout="per_segment", this only happens in a coda that computes the logits of every segment.
    """
    if slot in written:
        layer, tokens = cache.layers[slot], key.shape[-2]
        if type(layer) is StaticLayer:
            layer.cumulative_length.sub_(tokens)
        elif type(layer) in (DynamicLayer, PreallocatedLayer):
            layer.crop(-tokens)
        else:
            raise TypeError(
                f"kv_layout={kv_layout!r}: overwrites cache slots, which {type(layer).__name__} does not support; use "
                "a DynamicCache or StaticCache, or kv_layout='per_segment' without output_segment_logits"
            )
    written.add(slot)
    return cache.update(key, value, slot)
