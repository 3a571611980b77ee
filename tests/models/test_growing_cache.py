"""A cache that grows in place. Referee: transformers' DynamicCache, to which the same is done."""

import copy

import pytest
import tiny_go
import torch
from transformers import DynamicCache, StaticCache

from hrm_hf.models.growing_cache import BLOCK, GrowingLayer, let_grow_in_place


LAYERS, ROWS = 2, 3


def both() -> list[DynamicCache]:
    config = tiny_go.model(unified=True, planner_layers=LAYERS, generator_layers=0).config
    return [DynamicCache(config=config), let_grow_in_place(DynamicCache(config=config))]


def write(caches, tokens: int, rows: int = ROWS) -> None:
    """Writes the same new tokens into every cache, which give the same back."""
    for slot in range(LAYERS):
        new = torch.randn(2, rows, 2, tokens, 4)
        given = [cache.update(*new, slot) for cache in caches]
        assert all(map(torch.equal, *given))


def assert_same(caches) -> None:
    expected, found = caches
    assert found.get_seq_length() == expected.get_seq_length()
    for layers in zip(expected.layers, found.layers):
        assert all(torch.equal(*[getattr(layer, name) for layer in layers]) for name in ("keys", "values"))


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.crop(-2),
        lambda cache: cache.crop(-cache.get_seq_length()),
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([2, 1, 0])),
        lambda cache: cache.reset(),
    ],
    ids=["crop", "crop all", "reorder", "select", "reset"],
)
@torch.no_grad()
def test_it_holds_what_a_dynamic_cache_holds_whatever_is_done_to_both(change):
    caches = both()
    for tokens in (5, 1, 1, BLOCK, 1):
        write(caches, tokens)
    for _ in range(2):
        for cache in caches:
            change(cache)
        for tokens in (1, 1, 3):
            write(caches, tokens)
        assert_same(caches)


@torch.no_grad()
def test_rows_can_become_more_and_fewer():
    caches = both()
    write(caches, 3)
    for cache in caches:
        cache.batch_repeat_interleave(2)
    write(caches, 1, rows=2 * ROWS)
    for cache in caches:
        cache.batch_select_indices(torch.tensor([4]))
    write(caches, 1, rows=1)
    assert_same(caches)


@torch.no_grad()
def test_a_copy_and_its_original_go_different_ways():
    caches = both()
    write(caches, 4)
    copies = copy.deepcopy(caches)
    write(caches, 2)
    write(copies, 1)
    assert_same(caches)
    assert_same(copies)


@torch.no_grad()
def test_a_token_does_not_move_those_before_it_and_a_block_does_once():
    cache = both()[1]
    places = []
    for _ in range(2 * BLOCK):
        cache.update(*torch.randn(2, 1, 2, 1, 4), 0)
        places.append(cache.layers[0].keys.data_ptr())
    assert len(set(places)) <= 3


def test_gradients_flow_through_past_tokens_as_in_a_dynamic_cache():
    gradients = []
    for cache in both():
        torch.manual_seed(0)
        past, new = torch.randn(1, 1, 2, 4, requires_grad=True), torch.randn(1, 1, 1, 4)
        cache.update(past, past, 0)
        keys, values = cache.update(new, new, 0)
        (keys * values).sum().backward()
        gradients.append(past.grad)
    assert torch.equal(*gradients) and gradients[0].any()


def test_what_was_written_in_inference_mode_can_be_gone_on_with_outside_of_it():
    caches = both()
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            write(caches, 2)
    assert_same(caches)


def test_other_caches_stay_as_they_are():
    config = tiny_go.model().config
    used = DynamicCache(config=config)
    used.update(*torch.randn(2, 1, 2, 1, 4), 0)
    static, offloaded = StaticCache(config=config, max_cache_len=4), DynamicCache(config=config, offloading=True)
    for cache in (None, used, static, offloaded):
        kinds = None if cache is None else [type(layer) for layer in cache.layers]
        assert let_grow_in_place(cache) is cache
        assert cache is None or [type(layer) for layer in cache.layers] == kinds


def test_generation_uses_it_and_returns_it():
    ids = torch.tensor([tiny_go.stream("<s> <PROBLEM> 9 </PROBLEM> <PLAN>")])
    arguments = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "plan_first": False}
    output = tiny_go.model().generate(ids, **arguments)
    assert {type(layer) for layer in output.past_key_values.layers} == {GrowingLayer}
