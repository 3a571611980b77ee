"""Decoding `hrm_lm` with a cache. Referee: the same tokens in one forward without a cache."""

import pytest
import tiny_hrm_lm
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from hrm_hf.models.recurrent_cache import PreallocatedLayer, first_slots, segment_slots


LENGTH = 12
CHUNKS = {"prefill and decode": [8, 1, 1, 1, 1], "token by token": [1] * LENGTH, "chunks": [5, 4, 3]}


def cache_of(kind, model):
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=LENGTH + 4)


@torch.no_grad()
def in_chunks(model, ids, sizes, cache, mask=None, **kwargs):
    """Return logits and halting steps of `ids` fed in chunks."""
    logits, steps, start = [], [], 0
    for size in sizes:
        so_far = None if mask is None else mask[:, : start + size]
        piece = ids[:, start : start + size]
        output = model(piece, attention_mask=so_far, past_key_values=cache, use_cache=True, **kwargs)
        logits.append(output.logits)
        steps.append(output.halt_steps)
        start += size
    return torch.cat(logits, dim=1), torch.cat(steps, dim=1)


def test_a_call_with_more_segments_reads_the_cache_of_fewer_segments():
    model, ids = tiny_hrm_lm.model(), tiny_hrm_lm.tokens(length=LENGTH)
    cache = cache_of("dynamic", model)
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache, use_cache=True, num_segments=1)
        assert {layer.get_seq_length() for layer in cache.layers} == {6}
        assert len(cache.layers) == model.config.num_hidden_layers
        visits = model.config.segment_visits
        for visit in range(visits):
            for later in (visit + visits, visit + 2 * visits):
                assert torch.equal(cache.layers[later].keys, cache.layers[visit].keys)
        model(ids[:, 6:], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("kv_layout", ["last_segment", "last_visit"])
def test_sharing_slots_is_exact_in_the_prefill_and_approximate_after_it(kv_layout, kind):
    model, ids = tiny_hrm_lm.model(kv_layout=kv_layout), tiny_hrm_lm.tokens(length=LENGTH)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    logits, _ = in_chunks(model, ids, CHUNKS["prefill and decode"], cache_of(kind, model))
    torch.testing.assert_close(logits[:, :8], whole[:, :8], atol=1e-5, rtol=0)
    drift = (logits[:, 8:] - whole[:, 8:]).abs().max().item()
    print(f"{kv_layout}, {kind}: largest drift of a decoded logit {drift:.3f}, their std {whole.std():.3f}")
    assert 1e-4 < drift < 10 * whole.std()  # sharing slots changes the logits, but not to noise


def test_sharing_slots_gives_the_same_drift_in_both_kinds_of_cache():
    for kv_layout in ("last_segment", "last_visit"):
        model, ids = tiny_hrm_lm.model(kv_layout=kv_layout), tiny_hrm_lm.tokens(length=LENGTH)
        logits = [in_chunks(model, ids, CHUNKS["chunks"], cache_of(k, model))[0] for k in ("dynamic", "static")]
        torch.testing.assert_close(*logits, atol=1e-5, rtol=0)


def test_with_one_segment_sharing_slots_over_segments_is_exact():
    ids = tiny_hrm_lm.tokens(length=LENGTH)
    model = tiny_hrm_lm.model(halt_max_steps=1, kv_layout="last_segment")
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    logits, _ = in_chunks(model, ids, CHUNKS["token by token"], cache_of("dynamic", model))
    torch.testing.assert_close(logits, whole, atol=1e-5, rtol=0)


def test_slots_shared_over_segments_allow_more_than_halt_max_steps():
    model, ids = tiny_hrm_lm.model(kv_layout="last_segment"), tiny_hrm_lm.tokens(length=LENGTH)
    with torch.no_grad():
        whole = model(ids, num_segments=5, use_cache=False, exit_criterion="fixed")
        cached = model(ids, num_segments=5, use_cache=True, exit_criterion="fixed")
    assert whole.halt_steps.unique().tolist() == [5]
    torch.testing.assert_close(cached.logits, whole.logits, atol=1e-5, rtol=0)
    assert len(cached.past_key_values.layers) == model.config.segment_visits


@pytest.mark.parametrize(("kv_layout", "slots"), [("per_segment", 3 * 10), ("last_segment", 10), ("last_visit", 3)])
def test_a_cache_has_a_slot_for_each_visit_each_segments_visit_or_each_layer(kv_layout, slots):
    """2 cycles x (3 passes x 1 low-level layer + 2 high-level layers) = 10 visits per segment."""
    model = tiny_hrm_lm.model(kv_layout=kv_layout)
    assert model.config.num_hidden_layers == slots
    with torch.no_grad():
        cache = model(tiny_hrm_lm.tokens(), use_cache=True).past_key_values
    assert len(cache.layers) == slots
    assert {layer.keys.shape for layer in cache.layers} == {(2, 2, 10, 8)}  # rows, key heads, tokens, head_dim


def test_every_visit_of_a_layer_has_its_slot():
    """Visits by the module's formulas, for 2 low-level layers, 3 high-level layers and 2 low-level passes."""
    config = tiny_hrm_lm.config(num_l_layers=2, num_h_layers=3, L_cycles=2, kv_layout="last_visit")
    one_cycle = [0, 1, 0, 1, 2, 3, 4]
    assert segment_slots(config, 0) == one_cycle + one_cycle
    assert first_slots(config)[:2] == ([0, 0] * 2 * config.halt_max_steps, [2] * 2 * config.halt_max_steps)
    config = tiny_hrm_lm.config(num_l_layers=2, num_h_layers=3, L_cycles=2, halt_max_steps=2)
    assert segment_slots(config, 1) == [*range(14, 28)]
    assert first_slots(config)[:2] == ([0, 2, 7, 9, 14, 16, 21, 23], [4, 11, 18, 25])


def test_a_cache_that_cannot_be_overwritten_is_rejected_by_name():
    model = tiny_hrm_lm.model(kv_layout="last_segment")
    cache = DynamicCache(config=model.config)

    class Quantized(type(cache.layers[0])):
        pass

    cache.layers = [Quantized() for _ in cache.layers]
    with pytest.raises(TypeError, match=r"kv_layout='last_segment'.*Quantized.*DynamicCache or StaticCache"):
        model(tiny_hrm_lm.tokens(), past_key_values=cache, use_cache=True)


@torch.no_grad()
def test_appended_tokens_are_written_next_to_the_earlier_ones():
    model, ids = tiny_hrm_lm.model(), tiny_hrm_lm.tokens(length=LENGTH)
    cache = model(ids[:, :6], use_cache=True).past_key_values
    model(ids[:, 6:7], past_key_values=cache, use_cache=True)
    places = [layer.values.data_ptr() for layer in cache.layers]
    logits = model(ids[:, 7:8], past_key_values=cache, use_cache=True).logits
    cache.crop(-1)
    assert torch.equal(model(ids[:, 7:8], past_key_values=cache, use_cache=True).logits, logits)
    assert [layer.values.data_ptr() for layer in cache.layers] == places


def test_a_preallocated_layer_holds_the_same_tokens_as_a_dynamic_layer():
    layers, generator = (DynamicLayer(), PreallocatedLayer()), torch.Generator().manual_seed(0)

    def grow(tokens, rows=2):
        keys = torch.randn(rows, 2, tokens, 4, generator=generator)
        plain, preallocated = (layer.update(keys, -keys) for layer in layers)
        assert all(map(torch.equal, plain, preallocated))

    with torch.inference_mode():
        grow(5)
        grow(1)
    grow(1)  # with gradients, and after tensors of inference mode
    with torch.no_grad():
        for name, argument, rows in (
            ("crop", -2, 2),
            ("reorder_cache", torch.tensor([1, 0]), 2),
            ("batch_repeat_interleave", 2, 4),
            ("batch_select_indices", torch.tensor([0, 3]), 2),
            ("crop", -3, 2),
        ):
            for layer in layers:
                getattr(layer, name)(argument)
            for tokens in (1, 40, 1):
                grow(tokens, rows)
        for layer in layers:
            layer.reset()
        grow(2)
        grow(1)


GENERATE = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 10, "temperature": 0.8},
}


@pytest.mark.parametrize("strategy", GENERATE)
def test_generation_with_a_cache_equals_generation_without(strategy):
    model, ids = tiny_hrm_lm.model(), tiny_hrm_lm.tokens(rows=2, length=6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    written = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        arguments = {"max_new_tokens": 8, "eos_token_id": None, "use_cache": use_cache, **GENERATE[strategy]}
        written.append(model.generate(ids, attention_mask=mask, **arguments))
    assert written[0].shape == (2, 14)
    assert torch.equal(*written)


def test_a_row_of_a_left_padded_batch_generates_the_same_as_alone():
    model, ids = tiny_hrm_lm.model(), tiny_hrm_lm.tokens(rows=2, length=6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    together = model.generate(ids, attention_mask=mask, **arguments)
    assert torch.equal(together[0, 2:], model.generate(ids[:1, 2:], **arguments)[0])


def test_generation_passes_segments_and_exit_to_every_step():
    model, ids = tiny_hrm_lm.model(), tiny_hrm_lm.tokens(rows=1, length=6)
    seen = []
    model.model.register_forward_hook(lambda module, inputs, output: seen.append(output.halt_steps.max().item()))
    model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, num_segments=1)
    assert seen == [1, 1, 1, 1]
    seen.clear()
    model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, exit_criterion="fixed")
    assert seen == [3, 3, 3, 3]
