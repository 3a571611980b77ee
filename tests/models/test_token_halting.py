"""Losses of tokens that think in segments. Referees: numbers worked out by hand, and PyTorch's cross entropy."""

from math import log

import pytest
import tiny_hrm_lm
import torch
import torch.nn.functional as F

from hrm_hf.models import early_exit
from hrm_hf.models.early_exit import halting_distribution, ponder_loss, segment_losses
from hrm_hf.models.modeling_hrm_lm import HrmLmModelOutput
from hrm_hf.models.segment_plan import plan_segments


LOSSES = ("loss", "lm_loss", "deep_supervision_loss", "q_halt_loss", "q_continue_loss", "ponder_loss")

# Three tokens, three words, three segments. Word 0 is the correct one, with these probabilities:
#   token A halts in segment 1: 1/2
#   token B halts in segment 2: 1/4, then 1/2
#   token C halts in segment 3: 1/10, then 1/5, then 4/5
A, B, C = [0.5, 0.3, 0.2], [0.25, 0.7, 0.05], [0.1, 0.6, 0.3]
B2, C2, C3 = [0.5, 0.4, 0.1], [0.2, 0.3, 0.5], [0.8, 0.1, 0.1]
WORDS = torch.tensor([[A, B, C], [A, B2, C2], [A, B2, C3]])  # [segment, token, word]
HALTED_IN = torch.tensor([[1, 2, 3]])
# Halt and continue values as probabilities; a token that has halted keeps its values.
Q = torch.tensor([
    [[0.7, 0.4], [0.7, 0.4], [0.7, 0.4]],
    [[0.2, 0.6], [0.6, 0.5], [0.6, 0.5]],
    [[0.1, 0.8], [0.3, 0.5], [0.9, 0.2]],
])  # fmt: skip


def three_tokens(**overrides):
    """Return the losses of the example, in which the states are the logits."""
    head = torch.nn.Linear(3, 3, bias=False)
    head.weight.data.copy_(torch.eye(3))
    states = tuple(segment.log()[None] for segment in WORDS)
    given = {
        "states": states, "last_hidden": states[-1], "q_logits": Q.logit()[None],
        "targets": torch.zeros(1, 3, dtype=torch.long), "num_items": None,
    }  # fmt: skip
    given |= {name: overrides.pop(name) for name in list(overrides) if name in given}
    outputs = HrmLmModelOutput(
        last_hidden_state=given["last_hidden"], segment_hidden_states=given["states"], q_logits=given["q_logits"],
        halt_steps=HALTED_IN,
    )  # fmt: skip
    plan = plan_segments(tiny_hrm_lm.config(**overrides), states[0], training=True)
    return segment_losses(plan, head, outputs, given["targets"], num_items=given["num_items"])


def test_the_language_model_loss_is_the_mean_at_the_halting_segments():
    expected = (log(2) + log(2) + log(1.25)) / 3
    assert three_tokens()["lm_loss"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("schedule", "weights"), [("linear", (1, 2, 3)), ("uniform", (1, 1, 1))])
def test_deep_supervision_weights_segments_and_counts_tokens_until_they_halt(schedule, weights):
    first, second, third = log(2) + log(4) + log(10), log(2) + log(5), log(1.25)
    expected = (weights[0] * first + weights[1] * second + weights[2] * third) / sum(weights) / 3
    found = three_tokens(ds_schedule=schedule)["deep_supervision_loss"].item()
    assert found == pytest.approx(expected, rel=1e-5)
    assert three_tokens(deep_supervision="last")["deep_supervision_loss"] == 0


def test_halting_is_correct_if_no_later_segment_gains():
    """The target is 0 for B after 1 and C after 1 and 2: the next segment was better. Halted tokens have no target."""
    expected = -(log(1 - 0.2) + log(1 - 0.1) + log(1 - 0.3)) / 3 / 3  # by segments, by tokens
    result = three_tokens(q_target="loss_gain")
    assert result["q_halt_loss"].item() == pytest.approx(expected, rel=1e-5)
    assert result["metrics"]["q_halt_accuracy"].item() == 1.0
    assert result["metrics"]["q_halt_calibration"].item() == pytest.approx((0.2 + 0.1 + 0.3) / 3, rel=1e-5)


def test_a_gain_below_the_threshold_does_not_make_halting_wrong():
    """From segment 1 to 2, B and C gain log 2 = 0.693 each; C gains 1.386 from 2 to 3, and 2.079 from 1 to 3."""
    expected = -(log(0.2) + log(1 - 0.1) + log(1 - 0.3)) / 9
    assert three_tokens(loss_gain_threshold=0.7)["q_halt_loss"].item() == pytest.approx(expected, rel=1e-5)


def test_halting_is_correct_if_the_likeliest_token_is_correct():
    """A is right after segment 1; B is wrong after 1, right after 2; C is wrong after 1 and 2, right after 3."""
    expected = -(log(0.7) + log(1 - 0.2) + log(0.6) + log(1 - 0.1) + log(1 - 0.3) + log(0.9)) / 9
    assert three_tokens(q_target="correct")["q_halt_loss"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("q_target", "last"), [("loss_gain", 1.0), ("correct", 0.9)])
def test_the_continue_target_is_the_better_next_value_minus_halt_step_cost(q_target, last):
    """Targets: max(.6, .5) for B after 1, max(.3, .5) for C after 1, and C's halt value in segment 3 after 2."""

    def cross_entropy(value, target):
        return -(target * log(value) + (1 - target) * log(1 - value))

    for price in (0.0, 0.02):
        expected = (
            cross_entropy(0.6, 0.6 - price) + cross_entropy(0.8, 0.5 - price) + cross_entropy(0.5, last - price)
        ) / 9
        found = three_tokens(halt_step_cost=price, q_target=q_target)["q_continue_loss"].item()
        assert found == pytest.approx(expected, rel=1e-5)


def test_the_gate_spreads_a_probability_of_one_over_the_segments():
    """With gates of 1/4 and 1/3 after the first two segments, the probabilities are 1/4, 3/4 * 1/3, and the rest."""
    gate = torch.tensor([0.25, 1 / 3, 0.9])
    q = torch.stack([gate.logit(), torch.zeros(3)], dim=-1)[None]
    torch.testing.assert_close(halting_distribution(q), torch.tensor([[0.25, 0.25, 0.5]]))
    q = torch.randn(100, 5, 2, generator=torch.Generator().manual_seed(0)) * 10
    torch.testing.assert_close(halting_distribution(q).sum(1), torch.ones(100))
    assert (halting_distribution(q[:, :1]) == 1).all()


@pytest.mark.parametrize(
    ("ponder_type", "expected"),
    [
        ("expected_steps", (1 * 0.25 + 2 * 0.25 + 3 * 0.5) / 3),
        ("neg_entropy", 0.25 * log(0.25) + 0.25 * log(0.25) + 0.5 * log(0.5)),
        # geometric with 1/2, cut off after three: (1/2, 1/4, 1/8) / (7/8) = (4, 2, 1) / 7
        ("geometric_kl", 0.25 * log(0.25 * 7 / 4) + 0.25 * log(0.25 * 7 / 2) + 0.5 * log(0.5 * 7)),
    ],
)
def test_the_ponder_loss_matches_its_formula(ponder_type, expected):
    gate = torch.tensor([0.25, 1 / 3, 0.9])
    q = torch.stack([gate.logit(), torch.zeros(3)], dim=-1)[None]
    assert ponder_loss(tiny_hrm_lm.config(ponder_type=ponder_type), q).item() == pytest.approx(expected, rel=1e-5)


def test_the_loss_is_the_weighted_sum_of_its_terms():
    weights = {"lm_loss_weight": 0.7, "ds_loss_weight": 0.4, "q_loss_weight": 0.3, "ponder_loss_weight": 0.2}
    found = three_tokens(**weights)
    expected = 0.7 * found["lm_loss"] + 0.4 * found["deep_supervision_loss"] + 0.2 * found["ponder_loss"]
    expected += 0.3 * (found["q_halt_loss"] + found["q_continue_loss"]) / 2
    torch.testing.assert_close(found["loss"], expected)


def test_metrics_count_tokens_segments_and_hits():
    metrics = {name: value.item() for name, value in three_tokens()["metrics"].items()}
    expected = {
        "avg_steps": 2.0, "halted_at_1": 1 / 3, "halted_at_2": 1 / 3, "halted_at_3": 1 / 3, "token_accuracy": 1.0,
        "h_updates": 2.0 * 2, "l_steps": 2.0 * 2 * 3, "layer_visits_per_token": 2.0 * 10,
        "ce_first": (log(2) + log(4) + log(10)) / 3, "ce_last": (log(2) + log(2) + log(1.25)) / 3,
        "perplexity": (2 * 2 * 1.25) ** (1 / 3), "convergence_rate": 0.0,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert three_tokens(convergence_threshold=10.0)["metrics"]["convergence_rate"] == 1.0  # 3 of 3 later segments


def test_other_tokens_do_not_change_the_loss_of_a_token():
    """Token A alone runs one segment; together with B and C, three. Its part of every loss is the same."""
    states = tuple(segment.log()[None] for segment in WORDS)
    for ponder_type in ("expected_steps", "geometric_kl", "neg_entropy"):
        alone = three_tokens(
            states=states[:1], last_hidden=states[0], q_logits=Q.logit()[None, :, :1],
            targets=torch.tensor([[0, -100, -100]]), num_items=3, ponder_type=ponder_type,
        )  # fmt: skip
        rest = three_tokens(targets=torch.tensor([[-100, 0, 0]]), num_items=3, ponder_type=ponder_type)
        together = three_tokens(ponder_type=ponder_type)
        for name in LOSSES:
            torch.testing.assert_close(alone[name] + rest[name], together[name], msg=name)


# In the model


def labeled(rows=4, length=10):
    ids = tiny_hrm_lm.tokens(rows, length)
    labels = ids.clone()
    labels[0, :4], labels[1, 7:], labels[2, 3] = -100, -100, -100
    return ids, labels


def test_with_one_segment_the_loss_is_plain_cross_entropy_and_there_is_no_halting_head():
    model, (ids, labels) = tiny_hrm_lm.model(halt_max_steps=1), labeled()
    assert not [name for name, _ in model.named_parameters() if "q_head" in name]
    output = model(ids, labels=labels)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(output.lm_loss, expected)
    assert output.q_logits is None and output.q_halt_loss is None and output.ponder_loss is None


def test_labels_are_shifted_once():
    """A stub predicts the next token, so the loss is zero only if the targets are the next tokens."""
    ids, labels = labeled()
    model = tiny_hrm_lm.model(tie_word_embeddings=False, hidden_size=64, vocab_size=64, halt_max_steps=1)
    model.lm_head.weight.data.copy_(torch.eye(64) * 100)

    class NextToken(torch.nn.Module):
        def forward(self, input_ids, *args, **kwargs):
            state = F.one_hot(input_ids.roll(-1, dims=1), 64).float()
            ones = torch.ones_like(input_ids)
            return HrmLmModelOutput(last_hidden_state=state, halt_steps=ones, segment_hidden_states=(state,))

    model.model = NextToken()
    assert model(ids, labels=labels).loss < 1e-6
    assert model(ids, shift_labels=F.pad(labels[:, 1:], (0, 1), value=-100)).loss < 1e-6
    assert model(ids, labels=labels.roll(-1, dims=1)).loss > 10


def test_micro_batch_losses_add_up_to_the_batch_loss():
    model, (ids, labels) = tiny_hrm_lm.model(halt_exploration_prob=0.0).train(), labeled()
    with torch.no_grad():
        model.model.q_head.bias.copy_(torch.tensor([10.0, 1.0]))  # most tokens halt at once
    parts = [slice(0, 1), slice(1, 2), slice(2, 4)]
    runs = [model(ids[part]).q_logits.shape[2] for part in parts]
    assert len(set(runs)) > 1, "the micro-batches must run different numbers of segments for this to say anything"
    count = (labels[:, 1:] != -100).sum()
    together = model(ids, labels=labels)
    together.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    sums = dict.fromkeys(LOSSES, 0.0)
    for part in parts:
        output = model(ids[part], labels=labels[part], num_items_in_batch=count)
        output.loss.backward()
        sums = {name: sums[name] + output[name].detach() for name in LOSSES}
    torch.testing.assert_close(sums, {name: together[name].detach() for name in LOSSES})
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, gradients, atol=1e-6, rtol=1e-4)


def test_labels_are_smoothed_in_training_only_and_never_in_the_reported_loss():
    model, (ids, labels) = tiny_hrm_lm.model(halt_max_steps=1, label_smoothing=0.1), labeled()
    for training in (True, False):
        output = model.train(training)(ids, labels=labels)
        flat = output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        torch.testing.assert_close(output.loss, F.cross_entropy(*flat, label_smoothing=0.1 * training))
        torch.testing.assert_close(output.lm_loss, F.cross_entropy(*flat))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_logits_computed_in_chunks_give_the_same_losses_and_gradients(label_smoothing, monkeypatch):
    results = []
    for at_once in (2**24, 7 * tiny_hrm_lm.VOCAB_SIZE):  # seven tokens per chunk
        monkeypatch.setattr(early_exit, "LOGITS_AT_ONCE", at_once)
        model, (ids, labels) = tiny_hrm_lm.model(label_smoothing=label_smoothing).train(), labeled()
        torch.manual_seed(0)
        output = model(ids, labels=labels, logits_to_keep=1)  # so that the logits must be computed
        output.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        results.append(({name: output[name].detach() for name in LOSSES}, gradients))
    torch.testing.assert_close(*results)


def test_keeping_fewer_logits_does_not_change_the_losses():
    model, (ids, labels) = tiny_hrm_lm.model(), labeled()
    whole, last = model(ids, labels=labels), model(ids, labels=labels, logits_to_keep=1)
    assert last.logits.shape == (4, 1, tiny_hrm_lm.VOCAB_SIZE)
    torch.testing.assert_close({n: last[n] for n in LOSSES}, {n: whole[n] for n in LOSSES})


def test_the_perplexity_uses_the_unsmoothed_halting_segment():
    model, (ids, labels) = tiny_hrm_lm.model(label_smoothing=0.1).train(), labeled()
    output = model(ids, labels=labels)
    torch.testing.assert_close(output.metrics["perplexity"], output.lm_loss.detach().exp())


def test_a_batch_without_labels_has_a_loss_of_zero_and_finite_metrics():
    model, ids = tiny_hrm_lm.model().train(), tiny_hrm_lm.tokens()
    output = model(ids, labels=torch.full_like(ids, -100))
    output.loss.backward()
    assert output.loss == 0
    assert all(value.isfinite() for value in output.metrics.values())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
