"""`hrm_lm` as a prelude, a flat loop and a coda, with optional parameters for each pass.

Referee: `tiny_hrm_lm.one_token_at_a_time`, the same written down for one token, without masks and caches.
"""

import pytest
import tiny_hrm_lm
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from hrm_hf import HrmLmForCausalLM
from hrm_hf.models.early_exit import DrawnExit
from hrm_hf.models.segment_plan import SegmentSchedule, drawn_segments, plan_segments
from hrm_hf.text.trainer import freeze_all_but_gate


OPTIONS = {
    "nested, prelude and coda": {"prelude_layers": 1, "coda_layers": 2},
    "nested, gains and vectors": {"pass_gains": True, "step_vectors": True},
    "flat": {**tiny_hrm_lm.LOOP, "prelude_layers": 0, "coda_layers": 0},
    "flat, prelude and coda": tiny_hrm_lm.LOOP,
    "flat, three passes a segment": {**tiny_hrm_lm.LOOP, "L_cycles": 3, "bp_steps": None},
    "flat, from zero": {**tiny_hrm_lm.LOOP, "initial_state": "zero"},
    "flat, from a learned state": {**tiny_hrm_lm.LOOP, "initial_state": "learned"},
    "flat, sandwich": {**tiny_hrm_lm.LOOP, "norm_position": "sandwich"},
    "flat, gains and vectors": {**tiny_hrm_lm.LOOP, "pass_gains": True, "step_vectors": True},
}


def made(seed=6, **overrides):
    """Return a model with nonzero gains and vectors; with this seed, tokens halt at several depths."""
    model = tiny_hrm_lm.model(seed, **overrides)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("step_vectors", "pass_gains")):
                parameter.normal_(std=0.5)
    return model


@pytest.mark.parametrize("option", OPTIONS)
def test_a_forward_matches_its_definition_token_by_token(option):
    model, ids = made(**OPTIONS[option]).double(), tiny_hrm_lm.tokens(rows=1, length=16)
    with torch.no_grad():
        output = model(ids)
    logits, steps = tiny_hrm_lm.one_token_at_a_time(model, ids[0])
    assert output.halt_steps[0].tolist() == steps and len(set(steps)) > 1
    # The tolerance is for rotary angles, which transformers computes in float32.
    torch.testing.assert_close(output.logits[0], logits, atol=1e-6, rtol=0)


CACHED = {**OPTIONS, "flat, streams": {**tiny_hrm_lm.LOOP, "mhc_flows": 3}}


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("option", CACHED)
def test_decoding_with_a_cache_gives_the_logits_of_one_forward(option, kind):
    model, ids = made(**CACHED[option]), tiny_hrm_lm.tokens(length=12)
    with torch.no_grad():
        whole = model(ids, use_cache=False)
        cache = DynamicCache(config=model.config)
        if kind == "static":
            cache = StaticCache(config=model.config, max_cache_len=16)
        parts = [model(ids[:, a:b], past_key_values=cache) for a, b in ((0, 7), (7, 8), (8, 12))]
    assert len(cache.layers) == model.config.num_hidden_layers
    torch.testing.assert_close(torch.cat([p.logits for p in parts], dim=1), whole.logits, atol=2e-5, rtol=1e-4)
    assert torch.equal(torch.cat([p.halt_steps for p in parts], dim=1), whole.halt_steps)


@pytest.mark.parametrize("option", CACHED)
def test_changing_a_token_changes_no_earlier_logit(option):
    model, ids = made(**CACHED[option]), tiny_hrm_lm.tokens(length=8)
    with torch.no_grad():
        before = model(ids).logits
        for j in range(8):
            changed = ids.clone()
            changed[:, j] = (changed[:, j] + 7) % tiny_hrm_lm.VOCAB_SIZE
            after = model(changed).logits
            assert torch.equal(after[:, :j], before[:, :j]) and not torch.equal(after[:, j], before[:, j])


@pytest.mark.parametrize("option", CACHED)
def test_every_parameter_gets_a_gradient(option):
    model, ids = made(**CACHED[option]).train(), tiny_hrm_lm.tokens()
    model(ids, labels=ids).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("option", CACHED)
def test_a_reloaded_model_gives_the_same_logits(option, tmp_path):
    model, ids = made(**CACHED[option]), tiny_hrm_lm.tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_initial_gains_and_vectors_change_no_logit():
    ids = tiny_hrm_lm.tokens()
    plain = tiny_hrm_lm.model(**tiny_hrm_lm.LOOP)
    both = tiny_hrm_lm.model(**tiny_hrm_lm.LOOP, pass_gains=True, step_vectors=True)
    missing = both.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing == ["model.L_module.step_vectors", "model.L_module.pass_gains"]
    with torch.no_grad():
        assert torch.equal(both(ids).logits, plain(ids).logits)


def test_extra_segments_use_the_last_step_vector():
    model, ids = made(**tiny_hrm_lm.LOOP, step_vectors=True, kv_layout="last_segment"), tiny_hrm_lm.tokens()
    with torch.no_grad():
        deep = model(ids, num_segments=5, exit_criterion="fixed")
        vectors = model.model.L_module.step_vectors
        longer = made(**tiny_hrm_lm.LOOP, step_vectors=True, halt_max_steps=5)
        longer.load_state_dict(
            model.state_dict() | {"model.L_module.step_vectors": torch.cat([vectors, vectors[2:].expand(2, -1)])}
        )
        torch.testing.assert_close(deep.logits, longer(ids, exit_criterion="fixed").logits, atol=1e-5, rtol=1e-4)


def test_only_the_last_segments_have_gradients():
    """Referee: the same segments, detached after each, so that only the last one has gradients."""
    ids, gradients = tiny_hrm_lm.tokens(), []
    for fields in ({"bp_segments": 1}, {"detach_between_segments": True}):
        model = tiny_hrm_lm.model(**{**tiny_hrm_lm.LOOP, "prelude_layers": 0, "q_loss_weight": 0, **fields}).train()
        model(ids, labels=ids, schedule=SegmentSchedule(halting=False)).lm_loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if "q_head" not in name})
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)
    through_two = tiny_hrm_lm.model(**{**tiny_hrm_lm.LOOP, "prelude_layers": 0, "bp_segments": 2}).train()
    through_two(ids, labels=ids, schedule=SegmentSchedule(halting=False)).lm_loss.backward()
    name = "model.L_module.layers.0.mlp.up_proj.weight"
    assert not torch.allclose(dict(through_two.named_parameters())[name].grad, gradients[0][name], rtol=1e-2)


@pytest.mark.parametrize(("sampling", "most"), [("lognormal_poisson", 24), ("per_token", 12)])
def test_the_number_of_segments_is_drawn_with_the_mean_of_the_config(sampling, most):
    """3,000 draws with mean 6: their standard deviation is below 4, so that of the mean is below 0.08."""
    config = tiny_hrm_lm.config(**tiny_hrm_lm.LOOP, halt_max_steps=6, segment_sampling=sampling)
    torch.manual_seed(0)
    x = torch.zeros(30, 100, 1)
    draws = 3000 if sampling == "lognormal_poisson" else 1
    drawn = torch.stack([drawn_segments(config, x) for _ in range(draws)]).flatten()
    assert len(drawn) == 3000 and drawn.min() == 1 and most // 2 < drawn.max() <= most
    assert drawn.double().mean().item() == pytest.approx(6, abs=0.3)
    assert plan_segments(config, x, True, SegmentSchedule(segments=2)).segments == 2
    lower = torch.stack([drawn_segments(config, x, 2) for _ in range(draws)]).flatten()
    assert lower.double().mean().item() == pytest.approx(2, abs=0.1)


def test_tokens_halt_at_the_number_of_segments_they_draw():
    """The result equals that of an exit that halts tokens there; in inference nothing is drawn."""
    fields = {**tiny_hrm_lm.LOOP, "q_loss_weight": 0, "ponder_loss_weight": 0, "segment_sampling": "per_token"}
    model, ids = tiny_hrm_lm.model(**fields).train(), tiny_hrm_lm.tokens()
    torch.manual_seed(0)
    drawn = drawn_segments(model.config, ids)
    torch.manual_seed(0)
    output = model(ids, labels=ids)
    assert torch.equal(output.halt_steps, drawn) and len(drawn.unique()) > 3
    output.lm_loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "q_head" not in n)
    halting = model.eval()(ids, num_segments=int(drawn.max()), exit_criterion=DrawnExit(drawn), use_cache=False)
    torch.testing.assert_close(halting.logits, output.logits)
    assert model(ids, exit_criterion="fixed").halt_steps.unique().tolist() == [3]


def test_depths_are_drawn_in_training_only():
    fields = {**tiny_hrm_lm.LOOP, "q_loss_weight": 0, "ponder_loss_weight": 0, "segment_sampling": "lognormal_poisson"}
    model, ids = tiny_hrm_lm.model(**fields), tiny_hrm_lm.tokens()
    torch.manual_seed(0)
    ran = {model.train()(ids, labels=ids).halt_steps.max().item() for _ in range(20)}
    assert len(ran) > 2
    assert {model.eval()(ids, exit_criterion="fixed").halt_steps.max().item() for _ in range(3)} == {3}


@pytest.mark.parametrize("sampling", ["lognormal_poisson", "per_token"])
def test_a_training_forward_that_draws_more_segments_than_the_cache_has_slots_runs(sampling):
    model = tiny_hrm_lm.model(**tiny_hrm_lm.LOOP, segment_sampling=sampling, segment_sampling_sigma=1.0).train()
    ids = tiny_hrm_lm.tokens(rows=4)
    torch.manual_seed(0)
    outputs = [model(ids) for _ in range(8)]
    assert max(output.halt_steps.max().item() for output in outputs) > model.config.halt_max_steps
    assert all(output.past_key_values is None for output in outputs)


def test_the_random_state_is_redrawn_in_training_and_fixed_in_inference():
    model, ids = tiny_hrm_lm.model(**tiny_hrm_lm.LOOP, initial_state="random"), tiny_hrm_lm.tokens()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)


def test_freeze_all_but_gate_trains_only_the_gate():
    fields = {**tiny_hrm_lm.LOOP, "q_loss_weight": 0, "exit_criterion": "fixed"}
    model, ids = tiny_hrm_lm.model(**fields).train(), tiny_hrm_lm.tokens()
    freeze_all_but_gate(model)
    assert model.config.exit_criterion == "q"
    output = model(ids, labels=ids, schedule=SegmentSchedule(segments=3, halting=False, gate_only=True))
    assert output.halt_steps.unique().tolist() == [3]
    output.loss.backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        "model.q_head.weight",
        "model.q_head.bias",
    }
    expected = (output.q_halt_loss + output.q_continue_loss) / 2
    expected = expected + model.config.ponder_loss_weight * output.ponder_loss
    torch.testing.assert_close(output.loss, expected)


def test_a_last_segment_loss_is_the_same_without_other_segment_logits():
    ids = tiny_hrm_lm.tokens()
    fields = {**tiny_hrm_lm.LOOP, "exit_criterion": "fixed"}
    lean = tiny_hrm_lm.model(**fields, q_loss_weight=0, ponder_loss_weight=0)
    output, full = lean(ids, labels=ids), tiny_hrm_lm.model(**fields)(ids, labels=ids)
    torch.testing.assert_close(output.loss, full.lm_loss)
    assert output.q_halt_loss is None and "ce_first" not in output.metrics and "ce_first" in full.metrics


def test_segment_logits_of_a_model_with_a_coda_do_not_change_the_cache():
    model, ids = tiny_hrm_lm.model(**tiny_hrm_lm.LOOP), tiny_hrm_lm.tokens(length=12)
    with torch.no_grad():
        whole = model(ids, output_segment_logits=True)
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        for cache, wanted in zip(caches, (False, True)):
            first = model(ids[:, :7], past_key_values=cache, output_segment_logits=wanted)
            second = model(ids[:, 7:], past_key_values=cache, output_segment_logits=wanted)
        for a, b in zip(*(cache.layers for cache in caches)):
            assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
    torch.testing.assert_close(whole.segment_logits[:, -1], whole.logits)
    torch.testing.assert_close(first.segment_logits[:, -1], whole.logits[:, :7], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(second.segment_logits[:, -1], whole.logits[:, 7:], atol=2e-5, rtol=1e-4)


def test_batched_beam_and_assisted_generation_match_one_row():
    model, ids = tiny_hrm_lm.model(**tiny_hrm_lm.LOOP), tiny_hrm_lm.tokens(rows=3, length=6)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    alone = torch.cat([model.generate(row[None], **settings) for row in ids])
    assert torch.equal(model.generate(ids, **settings), alone)
    assert torch.equal(model.generate(ids[:1], assistant_model=tiny_hrm_lm.model(1), **settings), alone[:1])
    beams = model.generate(ids, num_beams=3, **settings)
    assert torch.equal(beams, model.generate(ids, num_beams=3, use_cache=False, **settings))


def test_new_fields_do_not_change_old_configs():
    """New fields have neutral defaults, and bp_steps is resolved to a number."""
    config = tiny_hrm_lm.config()
    assert (config.prelude_layers, config.coda_layers, config.mhc_flows, config.bp_segments) == (0, 0, 1, None)
    assert not config.step_vectors and not config.pass_gains and config.initial_state == "fixed"
    assert tiny_hrm_lm.config(bp_steps=None).bp_steps == config.stack_passes == 8
    names = {name.split(".")[1] for name in HrmLmForCausalLM(config).state_dict()} - {"weight"}
    assert names == {"embed_tokens", "H_module", "L_module", "q_head", "z_L_init"}
