"""No token of `hrm_lm` depends on later tokens or other rows, for any mask, cache layout or halting depth."""

import pytest
import tiny_hrm_lm
import torch


LENGTH = 8
MASKS = {
    "none": None,
    "ones": torch.ones(2, LENGTH, dtype=torch.long),
    "left": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * LENGTH]),
    "right": torch.tensor([[1] * LENGTH, [1, 1, 1, 1, 1, 0, 0, 0]]),
}


def depths(model, ids, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask).halt_steps


def test_the_tiny_model_halts_its_tokens_at_every_depth():
    assert depths(tiny_hrm_lm.model(), tiny_hrm_lm.tokens()).unique().tolist() == [1, 2, 3]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kv_layout", ["per_segment", "last_segment", "last_visit"])
@pytest.mark.parametrize("halt_max_steps", [1, 3])
@pytest.mark.parametrize("mask", MASKS)
def test_changing_a_token_changes_no_earlier_logit(mask, halt_max_steps, kv_layout, attention):
    model = tiny_hrm_lm.model(attention=attention, halt_max_steps=halt_max_steps, kv_layout=kv_layout)
    ids, mask = tiny_hrm_lm.tokens(length=LENGTH), MASKS[mask]
    with torch.no_grad():
        before = model(ids, attention_mask=mask, use_cache=True).logits
        for j in range(LENGTH):
            changed = ids.clone()
            changed[:, j] = (changed[:, j] + 7) % tiny_hrm_lm.VOCAB_SIZE
            after = model(changed, attention_mask=mask, use_cache=True).logits
            for row, real in enumerate(torch.ones(2, LENGTH) if mask is None else mask):
                unchanged = real.bool() & (torch.arange(LENGTH) < j)
                if real[j]:
                    assert not torch.equal(after[row, j], before[row, j]), (row, j)
                else:
                    unchanged = real.bool()  # padding: no real token reads it, not even later ones
                assert torch.equal(after[row, unchanged], before[row, unchanged]), (row, j)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("halt_max_steps", [1, 3])
def test_a_logit_has_no_gradient_from_later_embeddings(halt_max_steps, training):
    model = tiny_hrm_lm.model(halt_max_steps=halt_max_steps).train(training)
    embedded = model.get_input_embeddings()(tiny_hrm_lm.tokens(rows=1, length=LENGTH)).detach().requires_grad_()
    torch.manual_seed(0)
    logits = model(inputs_embeds=embedded).logits[0]
    for i in range(LENGTH):
        gradient = torch.autograd.grad(logits[i].square().sum(), embedded, retain_graph=True)[0][0]
        assert torch.equal(gradient[i + 1 :], torch.zeros_like(gradient[i + 1 :])), i
        # Kept keys of halted tokens have no gradient, so with several segments only the token itself must have one.
        assert (gradient[0 if halt_max_steps == 1 else i : i + 1].abs().amax(-1) > 0).all(), i


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_alone_equals_the_row_in_a_padded_batch(side, attention):
    model = tiny_hrm_lm.model(attention=attention)
    lengths = (8, 5, 3, 6)
    ids, mask = torch.zeros(4, LENGTH, dtype=torch.long), torch.zeros(4, LENGTH, dtype=torch.long)
    for row, length in enumerate(lengths):
        real = slice(LENGTH - length, LENGTH) if side == "left" else slice(0, length)
        ids[row, real], mask[row, real] = tiny_hrm_lm.tokens(1, length, seed=row)[0], 1
    with torch.no_grad():
        together = model(ids, attention_mask=mask)
        assert len({tuple(steps.tolist()) for steps in together.halt_steps}) == len(lengths)
        for row, real in enumerate(mask.bool()):
            alone = model(ids[row, real][None])
            # rotary positions are shifted by left padding, hence the rounding
            torch.testing.assert_close(together.logits[row, real], alone.logits[0], atol=1e-5, rtol=0)
            assert torch.equal(together.halt_steps[row, real], alone.halt_steps[0])


def test_packed_documents_do_not_see_each_other_if_their_positions_restart():
    model = tiny_hrm_lm.model()
    first, second = tiny_hrm_lm.tokens(1, 5, seed=2), tiny_hrm_lm.tokens(1, 7, seed=3)
    packed, positions = torch.cat([first, second], dim=1), torch.tensor([[*range(5), *range(7)]])
    with torch.no_grad():
        together = model(packed, position_ids=positions, labels=packed).logits
        alone = torch.cat([model(first).logits, model(second).logits], dim=1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_a_row_is_bitwise_equal_when_other_rows_think_longer_or_shorter():
    model, ids = tiny_hrm_lm.model(), tiny_hrm_lm.tokens(rows=3)
    other = torch.cat([ids[:1], tiny_hrm_lm.tokens(rows=2, seed=9)])
    with torch.no_grad():
        assert torch.equal(model(ids).logits[0], model(other).logits[0])


def test_each_token_halts_independently_as_defined():
    model, ids = tiny_hrm_lm.model().double(), tiny_hrm_lm.tokens(rows=1, length=12, seed=4)
    logits, steps = tiny_hrm_lm.one_token_at_a_time(model, ids[0])
    assert set(steps) == {1, 2, 3}
    with torch.no_grad():
        output = model(ids)
    assert output.halt_steps[0].tolist() == steps
    # The tolerance is for rotary angles, which transformers computes in float32.
    torch.testing.assert_close(output.logits[0], logits, atol=1e-6, rtol=0)


def test_extra_segments_of_a_token_reach_only_later_tokens_that_run_them():
    """Depths are forced; a token's logits only depend on its own depth and the keys it reads."""
    model, ids = tiny_hrm_lm.model(), tiny_hrm_lm.tokens(rows=1, length=6)

    class Forced:
        def __init__(self, depths):
            self.depths, self.segment = torch.tensor([depths]), 0

        def check(self, state):
            self.segment += 1
            return self.depths <= self.segment

    with torch.no_grad():
        runs = {d: model(ids, exit_criterion=Forced([2, d, 3, 1, 2, 3])) for d in (1, 2, 3)}
    for d, run in runs.items():
        assert run.halt_steps.tolist() == [[2, d, 3, 1, 2, 3]]
        assert torch.equal(run.logits[0, 0], runs[1].logits[0, 0])
    assert not torch.equal(runs[1].logits[0, 1], runs[2].logits[0, 1])
    # Position 2 thinks for three segments and reads position 1 in each: its kept keys differ from the second on.
    assert not torch.equal(runs[1].logits[0, 2], runs[2].logits[0, 2])
    # Position 3 halts in the first segment, in which position 1 has the same keys and values in all three runs.
    assert torch.equal(runs[1].logits[0, 3], runs[3].logits[0, 3])
