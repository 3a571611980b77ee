"""Keys and values of decoders that visit a layer several times a token: one slot of the cache for each visit.

`LayerCacheView` leads what a layer stores to the slot of its visit. `RecurrentCache` does so for a decoder that thinks
in segments: within a segment, visits are numbered

    visit(h, l, layer) = h * cycle + l * num_l_layers + layer          low-level pass l of cycle h
    visit(h, H, layer) = h * cycle + L_cycles * num_l_layers + layer   the high-level pass that ends cycle h
    with cycle = L_cycles * num_l_layers + num_h_layers

and the slot of a visit is `segment * segment_visits + visit` ("per_segment"), `visit` ("last_segment": a segment
overwrites the one before), or the layer itself ("last_visit": each visit overwrites the last). Layers that run once a
token have the slots around these: those of the prelude come first, those of the coda last (`OnceCache`).

The freeze rule, the same in training and decoding: a token that has halted keeps the keys and values of its last
segment, and later tokens that think longer read those. The cache itself is transformers'.
"""

from collections.abc import Callable

import torch
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer


class LayerCacheView:
    """A cache seen from one visit of a layer: what the layer stores under its own index goes to the visit's slot.

    `read` gives what the layer is to see of keys or values [B, heads, S, head_dim]; all of them by default.
    """

    def __init__(self, cache: Cache, slot: int, read: Callable[[torch.Tensor], torch.Tensor] | None = None):
        self.cache, self.slot, self.read = cache, slot, read

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As a cache's, with the visit's slot instead of `layer_idx`."""
        keys, values = self.cache.update(key, value, self.slot)
        return (keys, values) if self.read is None else (self.read(keys), self.read(values))


def layer_cache_view(cache: Cache | None, slot: int, read: Callable | None = None) -> LayerCacheView | None:
    """The view of one visit; None without a cache."""
    return None if cache is None else LayerCacheView(cache, slot, read)


def validate_slots(cache: Cache | None, slots: int) -> None:
    """Raise ValueError for a cache that was made with fewer slots than a model has."""
    made = len(cache.layers) if isinstance(cache, Cache) else 0  # those of serving engines have no layers
    if 0 < made < slots:
        raise ValueError(
            f"past_key_values: {made} layers, but the model keeps keys and values of {slots} visits of its layers; "
            f"for prefix tuning, set num_layers={slots} in the PrefixTuningConfig"
        )


class OnceCache:
    """The keys and values of layers that are visited once a token (prelude, coda), from `first_slot` of the cache."""

    def __init__(self, cache: Cache | None, first_slot: int):
        self.cache, self.first_slot = cache, first_slot
        self.written: set[int] = set()

    def update(self, key: torch.Tensor, value: torch.Tensor, visit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `RecurrentCache.update`; a second visit in the same forward overwrites the first."""
        if self.cache is None:
            return key, value
        return write_slot(self.cache, self.written, key, value, self.first_slot + visit, "per_segment")


class RecurrentCache:
    """The keys and values of one segment of one forward.

    Args:
        cache: where past tokens are kept, or None.
        active: bool [B, T], tokens that still think, or None for all of them.
        before: the previous segment's object, or None in the first.
        segments_to_keep: how many segments may be read by later ones; 0 where no token can halt before others.
    """

    def __init__(
        self,
        config,
        cache: Cache | None,
        active: torch.Tensor | None,
        before: "RecurrentCache | None",
        segments_to_keep: int,
    ):
        self.config, self.cache, self.before = config, cache, before
        self.active = None if active is None else active[:, None, :, None]
        self.segment = 0 if before is None else before.segment + 1
        self.keeps = self.segment + 1 < segments_to_keep
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.written: set[int] = set() if before is None else before.written
        if before is not None and not torch.is_grad_enabled():
            before.before = None  # only a recomputed forward (gradient checkpointing) looks further back

    def update(self, key: torch.Tensor, value: torch.Tensor, visit: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, heads, past + T, head_dim] that this visit attends to, given those of T new tokens."""
        if self.active is not None and self.before is not None:
            kept_key, kept_value = self.before.kept[visit]
            key, value = torch.where(self.active, key, kept_key), torch.where(self.active, value, kept_value)
        if self.keeps:
            cut = self.config.detach_between_segments
            self.kept[visit] = (key.detach(), value.detach()) if cut else (key, value)
        if self.cache is None:
            return key, value
        return write_slot(self.cache, self.written, key, value, self._slot(visit), self.config.kv_layout)

    def copy_to_later_segments(self) -> None:
        """After the last segment, copy the stored keys and values into the slots of segments that did not run."""
        if self.cache is None or self.config.kv_layout != "per_segment":
            return
        visits = self.config.segment_visits
        for segment in range(self.segment + 1, self.config.halt_max_steps):
            for visit, (key, value) in self.kept.items():
                self.cache.update(key, value, self.config.prelude_layers + segment * visits + visit)

    def _slot(self, visit: int) -> int:
        config = self.config
        if config.kv_layout == "per_segment":
            visit += self.segment * config.segment_visits
        elif config.kv_layout == "last_visit":
            low = config.L_cycles * config.num_l_layers
            visit %= low + config.num_h_layers  # within its cycle
            visit = visit % config.num_l_layers if visit < low else config.num_l_layers + visit - low
        return config.prelude_layers + visit


def write_slot(
    cache: Cache, written: set[int], key: torch.Tensor, value: torch.Tensor, slot: int, kv_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values of a slot, those of T new tokens behind the past ones; `written` says which slots of this
    forward have them already, to be replaced. "per_segment" does so in a coda that gives logits of every segment."""
    if slot in written:
        layer, tokens = cache.layers[slot], key.shape[-2]
        if type(layer) is StaticLayer:
            layer.cumulative_length.sub_(tokens)
        elif type(layer) is DynamicLayer:
            layer.crop(-tokens)
        else:
            raise TypeError(
                f"kv_layout={kv_layout!r} overwrites cache slots, which {type(layer).__name__} does not support; use "
                "a DynamicCache or StaticCache, or kv_layout='per_segment' without output_segment_logits"
            )
    written.add(slot)
    return cache.update(key, value, slot)


# How the names of these servers' attention functions begin (vLLM 0.33; SGLang's main branch of 2026).
FOREIGN_CACHES = ("vllm", "sglang")


class VisitedLayersMixin:
    """For causal LMs whose layers are visited several times a token: rejects caches that have one place a layer.

    Continuous batching, vLLM and SGLang keep keys and values by the layer's own number; visits of one layer would
    silently overwrite each other. Such a model must not set `_supports_attention_backend` either; vLLM 0.33 asks for
    it, but also takes models without it.
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
