"""Losses of the Go coder. Referees: short computations from the logits, cross_entropy, and the entropy of dice."""

import math

import pytest
import tiny_go
import torch
from tiny_go import ONE_ATTEMPT, PLAIN, REPAIRED
from torch.nn.functional import cross_entropy

from hrm_hf.models.configuration_hrm_go_coder import HrmGoCoderConfig
from hrm_hf.models.modeling_hrm_go_coder import HrmGoCoderForCausalLM
from hrm_hf.models.processing_hrm_go_coder import DECISION_TOKENS, TOKEN_IDS, Feedback


IGNORED = -100
TWO_STACKS, UNIFIED = tiny_go.VARIANTS["two stacks"], tiny_go.VARIANTS["unified"]
both = pytest.mark.parametrize("fields", [TWO_STACKS, UNIFIED], ids=["two stacks", "unified"])
DECIDING = [TOKEN_IDS[token] for token in DECISION_TOKENS]


def training_batch(*patterns: str) -> dict[str, torch.Tensor]:
    """Return right-padded streams with labels for all tokens but padding, and a decision after every attempt."""
    batch = tiny_go.batch(*patterns, side="right")
    ids = batch["input_ids"]
    labels = ids.masked_fill(batch["attention_mask"] == 0, IGNORED)
    ends = [(row == TOKEN_IDS["</CODE>"]).nonzero()[:, 0].tolist() for row in ids]
    most = max(1, *map(len, ends))
    positions, classes = torch.zeros(len(ids), most, dtype=torch.long), torch.full((len(ids), most), IGNORED)
    feedback = torch.zeros(len(ids), most, 4, dtype=torch.long)
    for row, places in enumerate(ends):
        for number, place in enumerate(places):
            positions[row, number], classes[row, number] = place, (number + row) % 3
            feedback[row, number] = torch.tensor(Feedback(number > 0, category="other", line=2).token_ids(4))
    return {
        **batch, "labels": labels, "decision_positions": positions, "decision_labels": classes,
        "feedback_ids": feedback,
    }  # fmt: skip


def expected_losses(outputs, batch, phases) -> dict[str, list[float]]:
    """Compute the losses of each component from the logits, one for each target."""
    found = {"plan": [], "code": [], "token": []}
    for row, labels in enumerate(batch["labels"]):
        for index in range(1, len(labels)):
            if labels[index] == IGNORED:
                continue
            kind = "token" if labels[index] in DECIDING else "code" if phases[row, index - 1] else "plan"
            found[kind].append(cross_entropy(outputs.logits[row, index - 1], labels[index]).item())
    return found


def mean(values) -> float:
    return sum(values) / len(values) if values else 0.0


@both
def test_each_component_is_the_mean_over_its_own_targets(fields):
    model, batch = tiny_go.model(awake=True, **fields), training_batch(REPAIRED, ONE_ATTEMPT, PLAIN)
    with torch.no_grad():
        trained, outputs = model.train()(**batch).loss.item(), model.eval()(**batch)
        phases = model.model(batch["input_ids"], attention_mask=batch["attention_mask"]).phases
    losses = expected_losses(outputs, batch, phases)
    refinement, decisions = mean(losses["token"]), 3
    if not fields.get("unified"):
        head = cross_entropy(outputs.refinement_logits.flatten(0, 1), batch["decision_labels"].flatten()).item()
        refinement, decisions = (refinement + head) / 2, 4
    expected = [mean(losses["plan"]), mean(losses["code"]), refinement]
    found = [outputs.plan_loss.item(), outputs.code_loss.item(), outputs.refinement_loss.item()]
    assert found == pytest.approx(expected, rel=1e-4)
    assert trained == pytest.approx(0.4 * expected[0] + 0.4 * expected[1] + 0.2 * expected[2], rel=1e-4)
    counts = {name: count.item() for name, count in outputs.metrics.items()}
    assert counts == {"plan_tokens": len(losses["plan"]), "code_tokens": len(losses["code"]), "decisions": decisions}


@both
def test_the_fused_training_loss_matches_the_plain_one_and_its_gradients(fields):
    model, batch = tiny_go.model(awake=True, **fields), training_batch(REPAIRED, ONE_ATTEMPT, PLAIN)
    results = []
    for fused in (True, False):
        if not fused:
            model.lm_head.register_forward_hook(lambda *_: None)  # a hook disables the fused loss
        model.train().zero_grad()
        outputs = model(**batch, use_cache=False)
        outputs.loss.backward()
        assert (outputs.logits is None) == fused
        components = [outputs.loss, outputs.plan_loss, outputs.code_loss, outputs.refinement_loss]
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        results.append(([component.detach() for component in components], gradients))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("pattern", "silenced", "zero"),
    [
        ("9", (), ("plan_loss", "refinement_loss")),
        ("<PROBLEM> 4 </PROBLEM>", (), ("code_loss", "refinement_loss")),
        (ONE_ATTEMPT, ("decision_positions", "decision_labels", "feedback_ids"), ("refinement_loss",)),
        (ONE_ATTEMPT, ("labels",), ("plan_loss", "code_loss")),
        ("9", ("labels",), ("plan_loss", "code_loss", "refinement_loss", "loss")),
    ],
)
def test_a_component_without_targets_is_zero_and_every_parameter_has_a_gradient(pattern, silenced, zero):
    model, batch = tiny_go.model(awake=True).train(), training_batch(pattern)
    for name in silenced:
        if name == "labels":
            batch["labels"] = torch.full_like(batch["labels"], IGNORED)
        else:
            del batch[name]
    outputs = model(**batch, use_cache=False)
    outputs.loss.backward()
    for name in ("plan_loss", "code_loss", "refinement_loss", "loss"):
        assert (outputs[name] == 0) == (name in zero), name
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


def test_decision_classes_can_have_different_weights():
    weights = [3.0, 0.5, 1.0]
    model, batch = tiny_go.model(awake=True, refinement_class_weights=weights), training_batch(REPAIRED)
    batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    outputs = model(**batch)
    flat, labels = outputs.refinement_logits.flatten(0, 1), batch["decision_labels"].flatten()
    torch.testing.assert_close(outputs.refinement_loss, cross_entropy(flat, labels, torch.tensor(weights)).detach())
    assert not torch.isclose(outputs.refinement_loss, cross_entropy(flat, labels))


def test_classes_of_zero_weight_alone_give_no_loss():
    model, batch = tiny_go.model(refinement_class_weights=[0.0, 1.0, 1.0]), training_batch(ONE_ATTEMPT)
    batch["decision_labels"][:] = 0
    outputs = model(**batch)
    assert outputs.refinement_loss == 0 and outputs.loss.isfinite()


def test_a_refinement_scale_of_zero_leaves_plan_and_code_losses():
    model, batch = tiny_go.model(awake=True).train(), training_batch(REPAIRED)
    outputs = model(**batch, use_cache=False, refinement_scale=0.0)
    outputs.loss.backward()
    torch.testing.assert_close(outputs.loss.detach(), 0.4 * outputs.plan_loss + 0.4 * outputs.code_loss)
    assert outputs.refinement_loss > 0  # still reported
    refining = [p for name, p in model.named_parameters() if model.parameter_group(name) == "refinement"]
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in refining)
    losses = {model.eval()(**batch, refinement_scale=scale).loss.item() for scale in (0.0, 1.0)}
    assert len(losses) == 1  # the scale does not affect evaluation


def test_loss_weights_come_from_the_config():
    weights = {"plan_loss_weight": 1.0, "code_loss_weight": 2.0, "refinement_loss_weight": 3.0}
    outputs = tiny_go.model(awake=True, **weights).train()(**training_batch(REPAIRED))
    parts = outputs.plan_loss + 2 * outputs.code_loss + 3 * outputs.refinement_loss
    torch.testing.assert_close(outputs.loss.detach(), parts)


@pytest.mark.parametrize("fields", [TWO_STACKS, UNIFIED, {"tagged": False}], ids=["two stacks", "unified", "untagged"])
def test_labels_alone_train_on_plain_text_like_any_causal_model(fields):
    model, ids = tiny_go.model(awake=True, **fields), torch.tensor([tiny_go.stream("20")])
    outputs = model(ids, labels=ids)
    plain = cross_entropy(outputs.logits[0, :-1], ids[0, 1:])
    torch.testing.assert_close(outputs.code_loss, plain.detach())
    torch.testing.assert_close(outputs.loss, plain)
    torch.testing.assert_close(model.train()(ids, labels=ids).loss, 0.4 * plain)
    assert outputs.metrics["code_tokens"] == 19


@both
def test_bfloat16_autocast_trains(fields):
    model, batch = tiny_go.model(**fields).train(), training_batch(REPAIRED, ONE_ATTEMPT)
    expected = model(**batch, use_cache=False).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, atol=0.02, rtol=0.01)
    assert all(p.grad.isfinite().all() for p in model.parameters())


# No way to copy the targets

SIDES, FIRST = 32, 100  # tokens FIRST..FIRST+SIDES-1
PATTERN = "<s> <PROBLEM> 2 </PROBLEM> <PLAN> 8 </PLAN> <CODE> 8 </CODE> <VALIDATE> 1 </VALIDATE> <DONE> </s>"
PLAN, CODE, VERDICT, DECISION = slice(6, 14), slice(16, 24), 26, 28


def dice(rows: int, learnable: bool, generator) -> dict[str, torch.Tensor]:
    """Return streams whose plan, code and decision are dice throws, the only tokens with labels.

    If `learnable`, each token is instead the successor of the previous one, and the decision follows the verdict.
    """

    def throw(sides, *shape):
        return torch.randint(0, sides, shape, generator=generator)

    ids = torch.tensor(tiny_go.stream(PATTERN)).repeat(rows, 1)
    decisions, verdicts = throw(3, rows), throw(3, rows)
    for part in (PLAN, CODE):
        length = part.stop - part.start
        first = throw(SIDES, rows, 1)
        ids[:, part] = FIRST + ((first + torch.arange(length)) % SIDES if learnable else throw(SIDES, rows, length))
    if learnable:
        decisions = verdicts
    ids[:, 2:4], ids[:, VERDICT] = FIRST + throw(SIDES, rows, 2), FIRST + verdicts
    ids[:, DECISION] = DECIDING[0] + decisions
    labels = torch.full_like(ids, IGNORED)
    for part in (PLAN, CODE, DECISION):
        labels[:, part] = ids[:, part]
    feedback = torch.tensor([Feedback(False, category="other").token_ids(1)]).repeat(rows, 1)
    feedback[:, 2] = verdicts + 1
    return {
        "input_ids": ids, "labels": labels, "decision_positions": torch.full((rows, 1), CODE.stop),
        "decision_labels": decisions.unsqueeze(1), "feedback_ids": feedback.unsqueeze(1),
    }  # fmt: skip


def trained_losses(learnable: bool, steps: int = 100) -> list[float]:
    """Train on new streams in every step; return the mean plan, code and refinement losses of the last quarter."""
    torch.manual_seed(0)
    model = HrmGoCoderForCausalLM(HrmGoCoderConfig.from_preset("test")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, seen = torch.Generator().manual_seed(0), []
    for step in range(steps):
        outputs = model(**dice(16, learnable, generator), use_cache=False)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= steps * 3 // 4:
            seen.append([outputs.plan_loss.item(), outputs.code_loss.item(), outputs.refinement_loss.item()])
    return [sum(column) / len(seen) for column in zip(*seen)]


FLOORS = [math.log(SIDES), math.log(SIDES), math.log(3)]


def test_random_tokens_cannot_be_learned_below_their_entropy():
    for loss, floor in zip(trained_losses(learnable=False), FLOORS):
        assert floor - 0.05 <= loss <= floor + 0.3  # the range of tokens is learned, but not the throws


def test_a_pattern_is_learned_far_below_the_entropy_of_random_tokens():
    for loss, floor in zip(trained_losses(learnable=True), FLOORS):
        assert loss < floor / 2
