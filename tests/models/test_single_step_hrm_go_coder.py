"""Single tokens of code, which read a part of the cache. Referee: the whole stream at once, without a cache."""

import pytest
import tiny_go
import torch
from tiny_go import TOKEN_IDS
from tolerances import assert_equal_but_for_rounding
from transformers import DynamicCache

from hrm_hf.models import modeling_hrm_go_coder as module
from hrm_hf.models import single_step_hrm_go_coder as steps
from hrm_hf.models.growing_cache import let_grow_in_place


SHAPES = {name: tiny_go.VARIANTS[name] for name in ("two stacks", "cycles")}
PLANNED = "<s> <PROBLEM> {} </PROBLEM> <PLAN> <INTENT:ADD> 2 </PLAN> <CODE> {}"
BATCHES = {
    "one row": ([PLANNED.format(4, 9)], "left"),
    "equal rows": ([PLANNED.format(4, 9)] * 3, "left"),
    "rows of other lengths": ([PLANNED.format(4, 9), PLANNED.format(7, 6), PLANNED.format(2, 11)], "left"),
    "several attempts": ([tiny_go.REPAIRED, tiny_go.EDITED, tiny_go.ONE_ATTEMPT], "left"),
    "no opener": ([tiny_go.PLAIN, "9"], "left"),
    "padded on the right": ([PLANNED.format(4, 9), PLANNED.format(3, 2)], "right"),
}


@pytest.fixture
def ranges(monkeypatch):
    """Of each step: first column of self-attention, last of cross-attention, tokens in all. All copies are made."""
    taken = []

    class Noted(steps.SingleStep):
        def generator_masks(self, phases):
            masks = super().generator_masks(phases)
            taken.append((self.first, self.last, self.seen + 1))
            return masks

    monkeypatch.setattr(module, "SingleStep", Noted)
    monkeypatch.setattr(steps, "WORTHWHILE", 0)
    return taken


@torch.no_grad()
def token_by_token(model, ids, mask, cache, start: int = 1):
    """Logits [B, S, V] of the first `start` tokens at once and of every later one alone."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    ends = [start, *range(start + 1, ids.shape[1] + 1)]
    steps = [
        model(
            ids[:, begin:end], attention_mask=mask[:, :end], position_ids=positions[:, begin:end],
            past_key_values=cache, use_cache=True,
        ).logits
        for begin, end in zip([0, *ends], ends)
    ]  # fmt: skip
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("grows", [True, False], ids=["in place", "by copies"])
@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("rows", "side"), BATCHES.values(), ids=BATCHES.keys())
def test_token_by_token_is_what_the_stream_gives_at_once(rows, side, fields, grows, attention, ranges):
    model, batch = tiny_go.model(awake=True, **fields), tiny_go.batch(*rows, side=side)
    model.set_attn_implementation(attention)
    ids, mask = batch.values()
    cache = DynamicCache(config=model.config)
    found = token_by_token(model, ids, mask, let_grow_in_place(cache) if grows else cache)
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
    assert_equal_but_for_rounding(found[mask.bool()], expected[mask.bool()])
    assert len(ranges) == ids.shape[1] - 1  # every token but the first was such a step


def test_code_reads_code_and_plan_and_not_all_that_is_cached(ranges):
    model, batch = tiny_go.model(awake=True), tiny_go.batch(*BATCHES["rows of other lengths"][0])
    ids, mask = batch.values()
    token_by_token(model, ids, mask, DynamicCache(config=model.config))
    opened = (ids == TOKEN_IDS["<CODE>"]).nonzero()[:, 1]
    first, last, total = ranges[-1]
    assert (first, last, total) == (opened.min() - 1, opened.max() - 1, ids.shape[1])


def test_few_columns_are_not_worth_a_copy(ranges, monkeypatch):
    monkeypatch.setattr(steps, "WORTHWHILE", 256)
    model, batch = tiny_go.model(awake=True), tiny_go.batch(*BATCHES["rows of other lengths"][0])
    token_by_token(model, *batch.values(), DynamicCache(config=model.config))
    assert all((first, last) == (0, total - 2) for first, last, total in ranges)


def test_tokens_that_were_taken_back_leave_nothing_behind():
    """As assisted generation does it: several tokens at once, some of them cropped, others in their place."""
    model = tiny_go.model(awake=True, **SHAPES["two stacks"])
    batch, other = tiny_go.batch(PLANNED.format(4, 9)), tiny_go.batch(tiny_go.REPAIRED)["input_ids"]
    ids, mask = batch.values()
    cache = let_grow_in_place(DynamicCache(config=model.config))
    token_by_token(model, ids, mask, cache)
    kept = ids.shape[1] - 12  # back into the plan
    cache.crop(kept - ids.shape[1])
    joined = torch.cat([ids[:, :kept], other[:, 5:]], dim=1)
    with torch.no_grad():
        found = [
            model(joined[:, begin:end], past_key_values=cache, use_cache=True).logits
            for begin, end in [(i, i + 1) for i in range(kept, kept + 20)] + [(kept + 20, joined.shape[1])]
        ]
        expected = model(joined, use_cache=False).logits
    assert_equal_but_for_rounding(torch.cat(found, dim=1), expected[:, kept:])


def test_what_looks_at_gradients_or_has_a_mask_of_its_own_takes_no_such_step(ranges):
    model = tiny_go.model()
    ids = torch.tensor([tiny_go.stream(PLANNED.format(4, 9))])
    own = torch.ones(1, 1, 1, ids.shape[1], dtype=torch.bool)
    for mode, mask in ((torch.enable_grad, None), (torch.no_grad, own)):
        with mode():
            cache = model(ids[:, :-1], use_cache=True).past_key_values
            model(ids[:, -1:], past_key_values=cache, attention_mask=mask)
    assert not ranges
