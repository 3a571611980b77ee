"""Exit criteria: when tokens halt, and that halting saves compute. Referees: counted layer visits, forced gates."""

import pytest
import tiny_hrm_lm
import torch

from hrm_hf.models.early_exit import EXIT_CRITERIA, ExitCriterion, SegmentState, relative_change
from hrm_hf.models.hrm_lm_layers import HrmLmDecoderLayer
from hrm_hf.models.segment_plan import SegmentSchedule


M, VISITS = 3, 10  # segments and layer visits per segment of the tiny model


@pytest.fixture
def visits():
    """Count the layer visits of a model: `visits(model)` returns a list that grows by one per visit."""

    def count(model):
        seen = []
        for module in model.modules():
            if isinstance(module, HrmLmDecoderLayer):
                module.register_forward_hook(lambda *_: seen.append(1))
        return seen

    return count


def forced(model, advantage):
    """Set q_halt - q_continue = `advantage` for every token."""
    with torch.no_grad():
        model.model.q_head.weight.zero_()
        model.model.q_head.bias.copy_(torch.tensor([advantage, 0.0]))
    return model


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("advantage", "segments"), [(1.0, 1), (-1.0, M)])
def test_layers_run_once_per_segment_that_any_token_needs(visits, advantage, segments, training):
    model = forced(tiny_hrm_lm.model(halt_exploration_prob=0.0), advantage).train(training)
    seen = visits(model)
    output = model(tiny_hrm_lm.tokens(), use_cache=True)
    assert len(seen) == segments * VISITS == segments * model.config.segment_visits
    assert output.halt_steps.unique().tolist() == [segments]
    assert output.q_logits.shape == (2, 10, segments, 2)


def test_decoding_visits_the_layers_once_for_a_token_that_halts_at_once(visits):
    model = forced(tiny_hrm_lm.model(), 1.0)
    seen = visits(model)
    model.generate(tiny_hrm_lm.tokens(rows=1), max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert len(seen) == 5 * VISITS


def test_one_active_token_keeps_the_layers_running(visits):
    model, ids = tiny_hrm_lm.model(), tiny_hrm_lm.tokens()
    seen = visits(model)
    with torch.no_grad():
        steps = model(ids).halt_steps
    assert steps.max() == M and steps.float().mean() < M
    assert len(seen) == M * VISITS


def test_fixed_exit_gives_every_token_all_segments():
    model = forced(tiny_hrm_lm.model(), 9.0)
    with torch.no_grad():
        assert model(tiny_hrm_lm.tokens(), exit_criterion="fixed").halt_steps.unique().tolist() == [M]
        assert model(tiny_hrm_lm.tokens(), exit_criterion="fixed", num_segments=2).halt_steps.unique().tolist() == [2]


# A threshold at which every token halts as soon as possible, one at which none halts, and the first possible segment:
# criteria that compare a segment with the previous one can halt after the second at the earliest.
EXTREMES = {
    "cdf": (0.0, 1.1, 1),
    "kl": (float("inf"), -1.0, 2),
    "latent_diff": (10.0, 0.0, 2),
    "entropy_diff": (float("inf"), -1.0, 2),
}


@pytest.mark.parametrize("criterion", EXTREMES)
def test_a_threshold_at_its_extremes_halts_at_once_or_never(criterion):
    at_once, never, first = EXTREMES[criterion]
    model, ids = tiny_hrm_lm.model(), tiny_hrm_lm.tokens()
    with torch.no_grad():
        steps = {t: model(ids, exit_criterion=criterion, exit_threshold=t).halt_steps for t in (at_once, never)}
    assert steps[at_once].unique().tolist() == [first]
    assert steps[never].unique().tolist() == [M]


@pytest.mark.parametrize(("margin", "segments"), [(-1e9, 1), (1e9, M)])
def test_the_halting_margin_at_its_extremes_halts_at_once_or_never(margin, segments):
    model = tiny_hrm_lm.model(halt_margin=margin)
    with torch.no_grad():
        assert model(tiny_hrm_lm.tokens()).halt_steps.unique().tolist() == [segments]


@pytest.mark.parametrize("criterion", EXTREMES)
def test_criteria_work_as_config_fields_and_as_arguments(criterion):
    threshold = {"cdf": 0.6, "kl": 0.1, "latent_diff": 0.33, "entropy_diff": 0.1}[criterion]
    configured = tiny_hrm_lm.model(exit_criterion=criterion, exit_threshold=threshold)
    named = tiny_hrm_lm.model()
    with torch.no_grad():
        steps = configured(tiny_hrm_lm.tokens(), use_cache=True).halt_steps
        assert torch.equal(
            steps, named(tiny_hrm_lm.tokens(), exit_criterion=criterion, exit_threshold=threshold).halt_steps
        )
    assert len(steps.unique()) > 1  # otherwise the comparison would be trivial


@pytest.mark.parametrize("criterion", ["kl", "latent_diff", "entropy_diff"])
def test_untrained_criteria_are_inactive_in_training(criterion):
    model = tiny_hrm_lm.model(exit_criterion=criterion, exit_threshold=1e9).train()
    assert model(tiny_hrm_lm.tokens()).halt_steps.unique().tolist() == [M]
    assert model.eval()(tiny_hrm_lm.tokens()).halt_steps.unique().tolist() == [2]


@pytest.mark.parametrize("criterion", ["q", "cdf"])
def test_halt_min_steps_overrides_the_gate(criterion):
    model = forced(tiny_hrm_lm.model(halt_min_steps=2, exit_criterion=criterion), 9.0)
    assert model(tiny_hrm_lm.tokens()).halt_steps.unique().tolist() == [2]
    assert model.train()(tiny_hrm_lm.tokens()).halt_steps.min() == 2


def test_a_schedule_without_halting_acts_in_training_only():
    model, ids = forced(tiny_hrm_lm.model(halt_exploration_prob=0.0), 9.0), tiny_hrm_lm.tokens()
    off = SegmentSchedule(halting=False)
    output = model.train()(ids, labels=ids, schedule=off)
    assert output.halt_steps.unique().tolist() == [M]
    assert output.q_halt_loss > 0  # the values are still trained
    assert model(ids).halt_steps.unique().tolist() == [1]
    assert model.eval()(ids, schedule=off).halt_steps.unique().tolist() == [1]


def test_exploring_tokens_think_longer_in_training_only():
    model, ids = forced(tiny_hrm_lm.model(halt_exploration_prob=0.5), 9.0), tiny_hrm_lm.tokens(rows=8, length=50)
    assert model(ids).halt_steps.unique().tolist() == [1]
    torch.manual_seed(0)
    steps = model.train()(ids).halt_steps
    shares = [(steps == m).float().mean().item() for m in (1, 2, 3)]
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.08)  # 400 draws: standard deviation 0.025


def test_the_gate_halts_where_the_probability_of_having_halted_passes_the_threshold():
    """With a gate of 0.4 in every segment, the probability of having halted is 0.4, 0.64, 0.784."""
    gate = torch.tensor(0.4).logit()
    state = SegmentState(torch.zeros(1, 1, 4), None, torch.stack([gate, torch.tensor(0.0)])[None, None], None)
    for threshold, first in ((0.39, 1), (0.41, 2), (0.63, 2), (0.65, 3), (0.78, 3)):
        rule = ExitCriterion("cdf", threshold)
        assert [rule.check(state).item() for _ in range(3)].index(True) + 1 == first


def test_divergence_and_entropy_use_the_next_token_distribution():
    """Two tokens, two words: (1/2, 1/2) then (1/4, 3/4). KL(new || old) = .1308 nats, entropy falls by .1308."""
    first, second = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    for criterion in ("kl", "entropy_diff"):
        for threshold, halts in ((0.1309, True), (0.1307, False)):
            rule = ExitCriterion(criterion, threshold)
            assert not rule.check(SegmentState(first[None, None], None, None, lambda h: h)).any()
            assert rule.check(SegmentState(second[None, None], None, None, lambda h: h)).item() is halts


def test_the_change_of_a_state_is_relative_to_its_norm():
    now, before = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[3.0, 3.0]]])
    assert relative_change(now, before).item() == pytest.approx(0.2)
    assert relative_change(now, None).item() == float("inf")


def test_a_custom_criterion_is_any_object_with_check():
    class OddPositions:
        def check(self, state):
            return (torch.arange(state.hidden.shape[1]) % 2 == 1).expand(state.hidden.shape[:2])

    with torch.no_grad():
        steps = tiny_hrm_lm.model()(tiny_hrm_lm.tokens(rows=1, length=4), exit_criterion=OddPositions()).halt_steps
    assert steps.tolist() == [[M, 1, M, 1]]


def test_criteria_keep_no_state_between_calls():
    for criterion in EXIT_CRITERIA:
        model, ids = tiny_hrm_lm.model(exit_criterion=criterion), tiny_hrm_lm.tokens()
        with torch.no_grad():
            assert torch.equal(model(ids).logits, model(ids).logits)


def test_an_unknown_criterion_is_rejected_by_name():
    with pytest.raises(ValueError, match="exit_criterion='cosine'"):
        tiny_hrm_lm.model()(tiny_hrm_lm.tokens(), exit_criterion="cosine")


def test_distribution_criteria_need_the_head():
    with pytest.raises(ValueError, match="exit_criterion='kl'"):
        tiny_hrm_lm.model().model(tiny_hrm_lm.tokens(), exit_criterion="kl")
