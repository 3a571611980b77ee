"""Rules of adaptive computation. Referee: the formulas of the papers, worked out here with numbers."""

import math

import pytest
import tiny
import torch

from hrm_hf import ActCarry
from hrm_hf.models import act


def carry(halted, steps):
    rows = len(halted)
    data = {"input_ids": torch.zeros(rows, 2, dtype=torch.long), "puzzle_identifiers": torch.zeros(rows).int()}
    z = torch.zeros(rows, 3, 4)
    return ActCarry(z, z, torch.tensor(steps, dtype=torch.int32), torch.tensor(halted), data)


def test_only_halted_slots_take_new_data_and_start_at_step_0():
    old = carry([True, False, True], [4, 2, 7])
    incoming = {"input_ids": torch.ones(3, 2, dtype=torch.long), "puzzle_identifiers": torch.tensor([5, 6, 7])}
    steps, data = act.refill(old, incoming)
    assert steps.tolist() == [0, 2, 0]
    assert data["input_ids"].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert data["puzzle_identifiers"].tolist() == [5, 0, 7] and data["puzzle_identifiers"].dtype == torch.int32
    assert old.current_data["input_ids"].sum() == 0  # the old carry is unchanged


def test_a_carry_survives_saving():
    old = carry([True, False, True], [4, 2, 7])
    back = ActCarry.from_tensors(old.to_tensors())
    assert torch.equal(back.steps, old.steps) and back.current_data.keys() == old.current_data.keys()
    with pytest.raises(KeyError, match="halted"):
        ActCarry.from_tensors({name: value for name, value in old.to_tensors().items() if name != "halted"})


def test_exploration_draws_min_steps_of_2_to_halt_max_steps_for_some_slots():
    steps = torch.zeros(20_000, dtype=torch.int32)
    torch.manual_seed(0)
    assert act.exploration_min_steps(steps, 4, 0.0).abs().sum() == 0
    always = act.exploration_min_steps(steps, 4, 1.0)
    assert always.unique().tolist() == [2, 3, 4]
    drawn = act.exploration_min_steps(steps, 4, 0.3)
    assert abs((drawn > 0).float().mean() - 0.3) < 0.02  # within six standard deviations
    assert drawn.dtype == torch.int32


def test_exploration_draws_slots_before_min_steps_like_the_original():
    steps = torch.zeros(50, dtype=torch.int32)
    torch.manual_seed(3)
    explore = torch.rand(50) < 0.5
    expected = explore * torch.randint(2, 17, (50,), dtype=torch.int32)
    torch.manual_seed(3)
    assert torch.equal(act.exploration_min_steps(steps, 16, 0.5), expected)


def test_halting_compares_the_q_values_or_the_sign_of_q_halt():
    q_halt, q_continue = torch.tensor([1.0, -1.0, -1.0, 0.0]), torch.tensor([2.0, -2.0, -1.0, 0.0])
    assert act.wants_to_halt(q_halt, q_continue).tolist() == [False, True, False, False]
    assert act.wants_to_halt(q_halt, None).tolist() == [True, False, False, False]


def test_the_continue_target_is_the_better_of_the_next_values_or_q_halt_at_the_last_step():
    target = act.continue_target(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0]), torch.tensor([False, True]))
    torch.testing.assert_close(target, torch.tensor([1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-1))]))


def test_stablemax_matches_its_formula():
    logits, labels = torch.tensor([[[1.0, 0.0, -1.0], [3.0, -3.0, 0.5]]]), torch.tensor([[2, -100]])
    s = [1 + 1, 0 + 1, 1 / (1 + 1)]
    expected = torch.tensor([[-math.log(s[2] / sum(s)), 0.0]], dtype=torch.float64)
    torch.testing.assert_close(act.stablemax_cross_entropy(logits, labels), expected)


def test_stablemax_in_float32_as_on_mps_agrees_with_float64(monkeypatch):
    torch.manual_seed(0)
    logits = (100 * torch.randn(4, 81, 11)).requires_grad_()
    labels = torch.randint(0, 11, (4, 81))
    in_64 = act.stablemax_cross_entropy(logits, labels)
    (grad_64,) = torch.autograd.grad(in_64.sum(), logits)
    # Without an MPS device, run the same code with the dtype it would use there.
    monkeypatch.setattr(torch, "float64", torch.float32)
    in_32 = act.stablemax_cross_entropy(logits, labels)
    (grad_32,) = torch.autograd.grad(in_32.sum(), logits)
    monkeypatch.undo()
    assert (in_64.dtype, in_32.dtype) == (torch.float64, torch.float32)
    torch.testing.assert_close(in_32, in_64.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad_32, grad_64, atol=1e-5, rtol=1e-5)


def test_stablemax_of_extreme_logits_has_finite_gradients():
    logits = torch.tensor([[0.0, -0.0, 1e30, -1e30]], requires_grad=True)
    act.stablemax_cross_entropy(logits, torch.tensor([3])).sum().backward()
    assert logits.grad.isfinite().all()


def test_rows_have_equal_weight_for_any_number_of_labels():
    loss = torch.tensor([[1.0, 3.0], [5.0, 0.0], [0.0, 0.0]])
    assert act.row_mean_loss(loss, torch.tensor([2, 1, 0])) == 2.0 + 5.0 + 0.0


def test_metrics_sum_over_rows_that_halted_and_have_labels():
    metrics = act.halted_metrics(
        halted=torch.tensor([True, True, False, True]),
        steps=torch.tensor([3, 5, 7, 9]),
        num_correct=torch.tensor([4, 1, 4, 0]),
        num_labels=torch.tensor([4, 4, 4, 0]),
        q_halt=torch.tensor([1.0, 2.0, 3.0, 4.0]),
    )
    found = {name: value.item() for name, value in metrics.items()}
    # Row 1 is wrong although q_halt predicts right; row 2 has not halted; row 3 is padding.
    assert found == {"count": 2, "accuracy": 1.25, "exact_accuracy": 1, "q_halt_accuracy": 1, "steps": 8}


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_model_that_always_prefers_halting_does_so_in_training_only(architecture):
    model = tiny.model(architecture, undecided=False, halt_max_steps=3, halt_exploration_prob=0.0)
    with torch.no_grad():
        model.q_head.bias.copy_(torch.tensor([5.0, -5.0]))
    assert model.train()(**tiny.batch()).carry.halted.all()
    model.eval()
    carry, halted = None, []
    for _ in range(4):
        carry = model(**tiny.batch(), carry=carry).carry
        halted.append((carry.halted.tolist(), carry.steps.tolist()))
    assert halted == [([last] * 8, [step] * 8) for last, step in ((False, 1), (False, 2), (True, 3), (False, 1))]


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_a_model_that_never_prefers_halting_stops_at_the_last_step(architecture):
    model = tiny.model(architecture, undecided=False, halt_max_steps=3, halt_exploration_prob=0.5).train()
    carry, halted = None, []
    for _ in range(3):
        carry = model(**tiny.batch(), carry=carry).carry
        halted.append(carry.halted.all().item())
    assert halted == [False, False, True]


def test_active_slots_keep_their_state_and_halted_slots_restart():
    model = tiny.model("hrm")
    batch, other = tiny.batch(), tiny.batch(seed=2)
    with torch.no_grad():
        first = model(**batch).carry
        first.halted[:4] = True
        second = model(**other, carry=first)
        fresh, continued = model(**other), model(**batch, carry=model(**batch).carry)
    torch.testing.assert_close(second.logits[:4], fresh.logits[:4])
    torch.testing.assert_close(second.logits[4:], continued.logits[4:])
    assert second.carry.steps.tolist() == [1] * 4 + [2] * 4
    assert torch.equal(second.carry.current_data["labels"][4:], batch["labels"][4:])


def test_one_step_per_example_needs_no_continue_value():
    output = tiny.model("hrm", halt_max_steps=1).train()(**tiny.batch())
    assert output.carry.halted.all() and output.target_q_continue is None and output.q_continue_loss is None
