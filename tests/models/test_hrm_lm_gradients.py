"""Which passes of `hrm_lm` have gradients, and that these are correct. Referees: finite differences, hooks."""

import pytest
import tiny_hrm_lm
import torch
import torch.nn.functional as F

from hrm_hf.models.early_exit import halting_value_losses, ponder_loss
from hrm_hf.models.segment_plan import SegmentSchedule


H_CYCLES, L_CYCLES = 2, 3
PASSES = [*["L"] * L_CYCLES, "H", *["L"] * L_CYCLES, "H"]


def passes_with_gradients(model, **kwargs):
    """Return the stack passes of a forward in order, as ("H" or "L", whether the result has a graph)."""
    seen, handles = [], []
    for name, stack in (("H", model.model.H_module), ("L", model.model.L_module)):
        handles.append(
            stack.register_forward_hook(lambda m, i, out, name=name: seen.append((name, out.requires_grad)))
        )
    output = model(tiny_hrm_lm.tokens(), **kwargs)
    for handle in handles:
        handle.remove()
    return seen, output


# bp_steps and the passes that have gradients, out of L L L H L L L H. The high-level stack has priority.
ROUTES = {
    2: [6, 7],
    3: [3, 6, 7],
    4: [3, 5, 6, 7],
    5: [3, 4, 5, 6, 7],
    6: [2, 3, 4, 5, 6, 7],
    8: [0, 1, 2, 3, 4, 5, 6, 7],
}


@pytest.mark.parametrize("bp_steps", ROUTES)
def test_the_last_passes_of_each_segment_have_gradients_with_priority_for_the_high_level(bp_steps):
    model = tiny_hrm_lm.model(bp_steps=bp_steps, exit_criterion="fixed").train()
    seen, _ = passes_with_gradients(model)
    expected = [(name, index in ROUTES[bp_steps]) for index, name in enumerate(PASSES)]
    assert sum(graph for _, graph in expected) == bp_steps
    assert seen == expected * 3


def test_a_schedule_lowers_the_number_of_passes_with_gradients():
    model = tiny_hrm_lm.model(bp_steps=5).train()
    for bp_steps in (2, 4, 5):
        seen, output = passes_with_gradients(model, num_segments=1, schedule=SegmentSchedule(bp_steps=bp_steps))
        assert sum(graph for _, graph in seen) == bp_steps
        output.logits.sum().backward()


@pytest.mark.parametrize("bp_steps", [1, 9])
def test_a_schedule_with_an_impossible_number_of_passes_is_rejected(bp_steps):
    with pytest.raises(ValueError, match=rf"bp_steps={bp_steps}"):
        tiny_hrm_lm.model()(tiny_hrm_lm.tokens(), schedule=SegmentSchedule(bp_steps=bp_steps))


def test_without_gradients_no_pass_builds_a_graph():
    with torch.no_grad():
        seen, _ = passes_with_gradients(tiny_hrm_lm.model())
    assert not any(graph for _, graph in seen)


def cross_entropy(logits, ids):
    """Compute the cross entropy in double precision, the logits' dtype here; the model's losses are in float32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("halting", [False, True])
def test_gradients_through_all_passes_match_finite_differences(halting):
    """Derivatives along random directions, without detaching; if tokens halt, their kept keys have gradients, too."""
    model = tiny_hrm_lm.model(
        bp_steps=8, detach_between_segments=False, exit_criterion="q" if halting else "fixed", qk_norm=True,
        norm_affine=True,
    ).double()  # fmt: skip
    ids, generator, step = tiny_hrm_lm.tokens(), torch.Generator().manual_seed(0), 1e-6
    assert len(model(ids).halt_steps.unique()) == (3 if halting else 1)

    def value():
        output = model(ids, output_segment_logits=True)
        return cross_entropy(output.logits, ids) + sum(cross_entropy(x, ids) for x in output.segment_logits.unbind(1))

    parameters = [p for name, p in model.named_parameters() if "q_head" not in name]
    gradients = torch.autograd.grad(value(), parameters)
    for _ in range(4):
        directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
        sides = []
        for offset in (step, -2 * step):
            with torch.no_grad():
                for parameter, direction in zip(parameters, directions):
                    parameter += offset * direction
                sides.append(value().item())
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions):
                parameter += step * direction
        predicted = sum((g * d).sum().item() for g, d in zip(gradients, directions))
        assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(predicted, rel=1e-5, abs=1e-6)


def test_the_loss_has_the_gradients_of_its_formula():
    """The loss is deep supervision of active tokens with weights 1, 2, 3, plus the loss at the halting segment."""
    fields = {"q_loss_weight": 0.0, "ponder_loss_weight": 0.0, "bp_steps": 8, "halt_exploration_prob": 0.0}
    model, ids = tiny_hrm_lm.model(**fields).train(), tiny_hrm_lm.tokens()
    output = model(ids, labels=ids, output_segment_logits=True)
    nll = -output.segment_logits.log_softmax(-1)[:, :, :-1].gather(-1, ids[:, None, 1:, None].expand(-1, 3, -1, 1))
    thinking = torch.arange(1, 4)[None, :, None] <= output.halt_steps[:, None, :-1]
    supervised = (nll.squeeze(-1) * thinking * torch.tensor([1.0, 2.0, 3.0])[None, :, None]).sum() / 6 / 18
    parameters = [p for name, p in model.named_parameters() if "q_head" not in name]
    expected = torch.autograd.grad(supervised + cross_entropy(output.logits, ids), parameters, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(output.loss, parameters), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("ponder_type", ["expected_steps", "geometric_kl", "neg_entropy"])
def test_gate_loss_gradients_match_finite_differences(ponder_type):
    config = tiny_hrm_lm.config(ponder_type=ponder_type)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 3, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    nll, halted_in = torch.rand(6, 3, generator=generator, dtype=torch.float64), torch.tensor([1, 2, 3, 3, 2, 1])
    assert torch.autograd.gradcheck(lambda q: ponder_loss(config, q), q)
    # The target of the continue value is detached, so only the halt loss can be checked by finite differences.
    halt_loss = lambda q: halting_value_losses(config, q, halted_in, nll, nll > 0.5)[0]["q_halt_loss"]  # noqa: E731
    assert torch.autograd.gradcheck(halt_loss, q)


def test_q_continue_learns_from_the_next_segment_and_not_vice_versa():
    """Its target is detached: with a low q_halt, only continue values get gradients, towards the next value."""
    model, ids = tiny_hrm_lm.model(exit_criterion="fixed"), tiny_hrm_lm.tokens()
    model(ids, labels=ids).q_continue_loss.backward()
    gradient = model.model.q_head.weight.grad
    assert torch.equal(gradient[0], torch.zeros_like(gradient[0]))
    assert (gradient[1] != 0).all()


def test_used_embeddings_get_gradients_with_the_fewest_passes():
    model, ids = tiny_hrm_lm.model(bp_steps=2, tie_word_embeddings=False), tiny_hrm_lm.tokens()
    model(ids, labels=ids).loss.backward()
    gradient = model.get_input_embeddings().weight.grad
    used = ids[:, :-1].unique()
    assert (gradient[used].abs().amax(-1) > 0).all()
    unused = torch.ones(tiny_hrm_lm.VOCAB_SIZE, dtype=torch.bool)
    unused[ids] = False
    assert (gradient[unused] == 0).all()


@pytest.mark.parametrize("halting", [False, True])
def test_no_gradient_reaches_the_previous_segment(halting):
    model, starts = tiny_hrm_lm.model(bp_steps=8, exit_criterion="q" if halting else "fixed"), []
    original = model.model.segment

    def segment(state, x, **kwargs):
        starts.append(tuple(z.requires_grad for z in state))
        return original(state, x, **kwargs)

    model.model.segment = segment
    model(tiny_hrm_lm.tokens())
    assert starts == [(True, False), (False, False), (False, False)]  # the first z_H is the embeddings
    starts.clear()
    model.config.detach_between_segments = False
    model(tiny_hrm_lm.tokens())
    assert starts == [(True, False), (True, True), (True, True)]


def test_gate_losses_do_not_backpropagate_into_the_language_model():
    model, ids = tiny_hrm_lm.model(), tiny_hrm_lm.tokens()
    output = model(ids, labels=ids)
    (output.q_halt_loss + output.q_continue_loss + output.ponder_loss).backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert moved == {"model.q_head.weight", "model.q_head.bias"}


@pytest.mark.parametrize("overrides", [{}, {"halt_max_steps": 1}, {"bp_steps": 2}, {"deep_supervision": "last"}])
def test_every_parameter_gets_a_gradient_for_data_parallel_training(overrides):
    model, ids = tiny_hrm_lm.model(**overrides).train(), tiny_hrm_lm.tokens()
    model(ids, labels=ids).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(reentrant):
    ids, results = tiny_hrm_lm.tokens(), []
    for checkpointing in (False, True):
        model = tiny_hrm_lm.model(hidden_dropout=0.1, halt_exploration_prob=0.5).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(0)
        output = model(ids, labels=ids, use_cache=True)
        output.loss.backward()
        results.append((output.loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)
