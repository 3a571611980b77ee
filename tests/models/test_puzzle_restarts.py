"""Restarts, the choice among their answers, noise at every step, and exit when the state barely changes.

Referees: single runs of the same model, and constructed answers for which each rule has one right choice.
"""

from itertools import pairwise

import pytest
import tiny
import torch
from tolerances import assert_equal_but_for_rounding

from hrm_hf import PuzzleSolution, TrmPuzzleForSolving
from hrm_hf.models.modeling_se_rrm_puzzle import canonical_symbols
from hrm_hf.models.settings_puzzle import DEFAULT_NOISE
from hrm_hf.models.solving_puzzle import RESIDUAL_WINDOW, AnswerPool


MODELS = {
    "hrm": lambda: tiny.model("hrm"),
    "trm": lambda: tiny.model("trm"),
    "trm-mlp": lambda: tiny.model("trm-mlp"),
    "se_rrm": tiny.se_rrm,
}
models = pytest.mark.parametrize("name", MODELS)
FIELDS = ("predictions", "steps", "q_halt", "logits", "trajectory", "q_trajectory")


def inputs(rows=8):
    data = tiny.batch(rows)
    return {name: data[name] for name in ("input_ids", "puzzle_identifiers")}


def assert_same(found, expected, names=FIELDS):
    for name in names:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@models
def test_a_batch_equals_its_rows_alone_with_exit_when_still(name):
    # In float64, because random weights amplify the rounding differences between batch shapes.
    model, data = MODELS[name]().double(), inputs()
    options = {"halt": "fixed", "max_steps": 4, "choose": "residual"}
    options["exit_when_still"] = model.solve(**data, **options).residual.median().item()
    options["max_steps"] = 8
    together = model.solve(**data, **options)
    assert len(together.steps.unique()) > 1, "the rows of this test have to stop at different steps"
    for row in range(8):
        alone = model.solve(**{key: value[row : row + 1] for key, value in data.items()}, **options)
        assert alone.steps.item() == together.steps[row]
        torch.testing.assert_close(alone.logits[0], together.logits[row], atol=1e-6, rtol=0)
        torch.testing.assert_close(alone.residual[0], together.residual[row], atol=1e-6, rtol=1e-5)


# Noise


@models
def test_noise_has_the_stated_std_at_every_step_or_once_at_the_start(name, monkeypatch):
    model, data = MODELS[name](), inputs(64)

    def states(**options):
        seen = []
        monkeypatch.setattr(
            model.model, "reason", lambda x, rotary, z_H, z_L: (seen.append((z_H, z_L)), (z_H, z_L))[1]
        )
        torch.manual_seed(0)
        model.solve(**data, halt="fixed", max_steps=4, **options)
        return seen

    still = states()[0]
    for noise_at, steps in (("start", [1, 1, 1, 1]), ("every_step", [1, 2, 3, 4])):
        for found, times in zip(states(noise=0.3, noise_at=noise_at), steps):
            for noisy, quiet in zip(found, still):
                if quiet.numel():  # SE-RRM has one state
                    assert (noisy - quiet).std().item() == pytest.approx(0.3 * times**0.5, rel=0.05)
                    assert abs((noisy - quiet).mean().item()) < 0.02


# Restarts


@models
def test_restarts_are_runs_and_the_most_confident_one_wins(name):
    model, data = MODELS[name](), inputs()
    torch.manual_seed(3)
    found = model.solve(**data, restarts=4, noise=0.5, max_steps=6, return_trajectory=True)
    torch.manual_seed(3)
    runs = [model.solve(**data, max_steps=6, return_trajectory=True)]
    rows = {key: value.repeat(3, *[1] * (value.dim() - 1)) for key, value in data.items()}
    noisy = model.solve(**rows, noise=0.5, max_steps=6, return_trajectory=True)  # as one batch
    runs += [noisy.select(torch.arange(8) + 8 * number) for number in range(3)]
    best = torch.stack([run.q_halt for run in runs]).argmax(0)
    assert len(best.unique()) > 1, "different runs have to win, or this test shows nothing"
    for row, run in enumerate(best):
        chosen = runs[run]
        assert_same(found.select(torch.tensor([row])), chosen.select(torch.tensor([row])), FIELDS[:4])
        steps = found.steps[row]
        assert torch.equal(found.trajectory[:steps, row], chosen.trajectory[:steps, row])
        assert (found.trajectory[steps:, row] == found.predictions[row]).all()
    assert torch.equal(found.steps_of_all_runs, sum(run.steps for run in runs))


@pytest.fixture
def runs(monkeypatch):
    """Record the boards and the noise of each run of a TRM."""
    seen, run = [], TrmPuzzleForSolving.run

    def spy(self, input_ids, puzzle_identifiers, settings, *args):
        seen.append((len(input_ids), settings.noise))
        return run(self, input_ids, puzzle_identifiers, settings, *args)

    monkeypatch.setattr(TrmPuzzleForSolving, "run", spy)
    return seen


def test_restarts_have_noise_by_default_unless_the_model_draws_numbers_itself(runs):
    tiny.model("trm").solve(**inputs(2), restarts=3, max_steps=1)
    tiny.model("trm", random_initial_states=True).solve(**inputs(2), restarts=3, max_steps=1)
    assert runs == [(2, 0.0), (4, DEFAULT_NOISE), (2, 0.0), (4, 0.0)]


def test_runs_are_batched_up_to_boards_per_call(runs, monkeypatch):
    model = tiny.model("trm")
    assert model.boards_per_call == 4 * 2**20 // ((2 + tiny.SEQ_LEN) * 512 * 4)  # of the widest layer's output
    monkeypatch.setattr(TrmPuzzleForSolving, "boards_per_call", 10)
    model.solve(**inputs(4), restarts=8, max_steps=1)
    model.solve(**inputs(16), restarts=3, max_steps=1)
    assert [size for size, _ in runs] == [4, 8, 8, 8, 4, 16, 16, 16]


def test_a_board_decided_by_the_rules_gets_no_further_run_or_step(runs):
    model, data = tiny.model("trm"), inputs(4)
    plain = model.solve(**data, halt="fixed", max_steps=3, return_trajectory=True)
    wanted = plain.trajectory[1, 2]  # the answer of board 2 after its second step
    boards = data["input_ids"]

    def accepts(questions, answers):
        return (questions == boards[2]).all(1) & (answers == wanted).all(1)

    found = model.solve(**data, halt="fixed", max_steps=3, restarts=2, choose="rules", accepts=accepts, noise=1.0)
    assert [size for size, _ in runs[1:]] == [4, 3]
    assert torch.equal(found.predictions[2], wanted) and found.steps.tolist() == [3, 3, 2, 3]
    assert found.steps_of_all_runs.tolist() == [6, 6, 2, 6]


def test_the_rules_check_boards_in_their_original_symbols():
    model, data = tiny.se_rrm(), inputs(16)
    to_new, _ = canonical_symbols(data["input_ids"], tiny.VOCAB_SIZE)
    assert (to_new != torch.arange(tiny.VOCAB_SIZE)).any()
    judged = []

    def accepts(boards, answers):
        judged.append(bool((boards.unsqueeze(1) == data["input_ids"]).all(-1).any(1).all()))
        return answers[:, 0] == 3

    plain = model.solve(**data, halt="fixed", max_steps=4, return_trajectory=True)
    found = model.solve(**data, halt="fixed", max_steps=4, restarts=2, choose="rules", accepts=accepts, noise=0.1)
    hits = plain.trajectory[:, :, 0] == 3
    settled = hits.any(0)
    assert 0 < settled.sum() < 16 and all(judged)
    assert torch.equal(found.steps[settled], hits.int().argmax(0)[settled].int() + 1)
    assert (found.predictions[settled, 0] == 3).all()


# The choice among constructed answers


def answers(*rows):
    """Return answers of several runs on one board, given as (the answer, a number; q_halt; residual)."""
    numbers, q_halt, residual = (torch.tensor(column) for column in zip(*rows))
    predictions = numbers.unsqueeze(1).expand(-1, 3).long()
    steps = torch.arange(1, len(rows) + 1, dtype=torch.int32)
    logits = torch.nn.functional.one_hot(predictions, 9).float()
    return PuzzleSolution(predictions, steps, q_halt.float(), logits, residual=residual.float())


def chosen(choose, rows, accepts=None, at_once=False):
    """Return the step count of the chosen answer, which is its number in `rows`, from 1."""
    runs = answers(*rows)
    pool = AnswerPool(torch.zeros(1, 3), runs.select(torch.tensor([0])), choose, accepts)
    for numbers in [range(1, len(rows))] if at_once else [[number] for number in range(1, len(rows))]:
        numbers = torch.tensor(list(numbers))
        pool.add(torch.zeros_like(numbers), runs.select(numbers))
    solution = pool.solution()
    assert solution.steps_of_all_runs.item() == sum(range(1, len(rows) + 1))
    return solution.steps.item()


def is_even(boards, found):
    return found[:, 0] % 2 == 0


ROWS = [(1, 0.0, 0.3), (3, 4.0, 0.2), (5, 1.0, 0.1), (1, 2.0, 0.5), (2, -1.0, 0.4), (4, -0.5, 0.6)]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    "choose, accepts, expected",
    [
        ("q", None, 2),
        ("residual", None, 3),
        ("vote", None, 4),  # answer 1 has two votes, and its second run is more confident
        ("rules", is_even, 5),  # the first accepted answer, although 4 is more confident
        ("rules", lambda boards, found: found[:, 0] > 8, 2),  # none is accepted: highest q
        ("q", is_even, 6),  # the most confident accepted answer
        ("residual", is_even, 5),
        ("vote", is_even, 6),
    ],
)
def test_each_rule_chooses_its_answer(choose, accepts, expected, at_once):
    assert chosen(choose, ROWS, accepts, at_once) == expected


def test_vote_ties_are_decided_by_q():
    assert chosen("vote", [(1, 0.0, 0), (2, 3.0, 0), (1, 1.0, 0), (2, -3.0, 0)]) == 2
    assert chosen("vote", [(1, 0.0, 0), (2, 3.0, 0), (1, 4.0, 0), (2, -3.0, 0)]) == 3
    assert chosen("q", [(1, 2.0, 0), (2, 2.0, 0)]) == 1  # a tie: the first run


def test_a_vote_that_no_run_can_change_is_decided():
    pool = AnswerPool(torch.zeros(2, 3), answers((1, 0.0, 0), (1, 0.0, 0)), "vote")
    assert pool.undecided(1).tolist() == [0, 1] and pool.undecided(0).tolist() == []
    pool.add(torch.tensor([0, 1]), answers((1, 0.0, 0), (2, 0.0, 0)))
    assert pool.undecided(2).tolist() == [0, 1]  # two more votes could still tie on board 0
    assert pool.undecided(1).tolist() == [1]


@pytest.mark.parametrize("choose", ["q", "residual", "vote"])
def test_skipping_decided_boards_changes_no_answer(choose, monkeypatch):
    model, data = tiny.model("trm"), inputs(16)
    model.lm_head.weight.data[:4] = 0  # few different answers, so that some agree
    options = {"restarts": 6, "noise": 0.3, "max_steps": 2, "choose": choose}
    monkeypatch.setattr(TrmPuzzleForSolving, "boards_per_call", 1)  # one run per batch

    def solve():
        torch.manual_seed(0)
        return model.solve(**data, **options)

    first = solve()
    assert torch.equal(solve().predictions, first.predictions)
    monkeypatch.setattr(AnswerPool, "undecided", lambda self, left: torch.arange(len(self.input_ids) if left else 0))
    full = solve()
    assert (first.steps_of_all_runs <= full.steps_of_all_runs).all()
    if choose != "vote":  # with "vote", later runs apply the noise to other boards
        assert_same(first, full, FIELDS[:4])


# Exit when the state barely changes


def residual_of(states):
    """Compute the residual independently, from the states before and after each step [steps + 1, N, ...]."""
    norms = [((a - b).square().sum((1, 2)) / a.square().sum((1, 2))).sqrt() for b, a in pairwise(states)]
    return torch.stack(norms[-RESIDUAL_WINDOW:]).mean(0)


def scripted(model, monkeypatch, shrink=0.5):
    """Script the states: odd rows move from 1 towards 2 in shrinking steps, even rows do not move."""
    ones = torch.ones(8, model.config.max_position_embeddings, model.config.hidden_size)
    moving = (torch.arange(8) % 2).view(-1, 1, 1)
    monkeypatch.setattr(model.model, "fresh_states", lambda x, noise=0.0: (ones[: len(x)], ones[: len(x)]))
    numbers = []
    monkeypatch.setattr(model, "q_values", lambda z_H, logits=None: (torch.full((len(z_H),), -1.0),) * 2)

    def reason(x, rotary, z_H, z_L):
        moves = z_H + shrink * (2 - z_H) if len(z_H) < 8 else torch.where(moving > 0, z_H + shrink * (2 - z_H), z_H)
        numbers.append(len(z_H))
        return moves, z_L

    monkeypatch.setattr(model.model, "reason", reason)
    return numbers


def test_a_row_stops_when_its_last_steps_moved_the_state_by_less_than_the_tolerance(monkeypatch):
    model, data = tiny.model("trm"), inputs()
    sizes = scripted(model, monkeypatch)
    solution = model.solve(**data, halt="fixed", max_steps=30, exit_when_still=0.01)
    z, residuals = [torch.ones(1, 1, 1)], []
    for _ in range(30):
        z.append(z[-1] + 0.5 * (2 - z[-1]))
        residuals.append(residual_of(z).item() if len(z) > RESIDUAL_WINDOW else 1.0)
    expected = next(step for step, residual in enumerate(residuals, 1) if residual <= 0.01)
    assert expected > RESIDUAL_WINDOW + 1
    assert solution.steps.tolist() == [RESIDUAL_WINDOW, expected] * 4
    assert sizes == [8] * RESIDUAL_WINDOW + [4] * (expected - RESIDUAL_WINDOW)  # unchanged rows have left
    assert_equal_but_for_rounding(solution.residual[1::2], torch.full((4,), residuals[expected - 1]))
    assert solution.residual[::2].tolist() == [0.0] * 4


def test_exit_when_still_waits_for_min_steps_and_is_off_by_default(monkeypatch):
    model, data = tiny.model("trm"), inputs()
    scripted(model, monkeypatch)
    later = model.solve(**data, halt="fixed", max_steps=30, min_steps=20, exit_when_still=0.01)
    assert later.steps.tolist() == [20] * 8
    assert model.solve(**data, halt="fixed", max_steps=30).steps.tolist() == [30] * 8


@models
def test_the_residual_is_computed_from_the_states(name):
    model, data = MODELS[name](), inputs()
    states = []
    hook, reason = model.model.fresh_states, model.model.reason
    model.model.fresh_states = lambda x, noise=0.0: (states.append(hook(x)[0]), hook(x))[1]
    model.model.reason = lambda *args: (result := reason(*args), states.append(result[0]))[0]
    solution = model.solve(**data, halt="fixed", max_steps=5, choose="residual")
    assert_equal_but_for_rounding(solution.residual, residual_of([state.flatten(2) for state in states]))
    assert model.solve(**data, max_steps=1).residual is None


# Bad input


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("halt", "never", {}),
        ("min_steps", 0, {}),
        ("min_steps", 5, {"max_steps": 4}),
        ("min_steps", 17, {}),
        ("min_confidence", 2, {}),
        ("restarts", 0, {}),
        ("choose", "luck", {}),
        ("choose", "rules", {}),
        ("noise_at", "end", {}),
        ("noise", -0.1, {}),
        ("noise", float("nan"), {}),
        ("noise", 0.0, {"restarts": 2}),
        ("exit_when_still", -1.0, {}),
    ],
)
def test_invalid_settings_are_rejected_by_name(name, value, others):
    with pytest.raises(ValueError, match=f"{name}=.?{value}"):
        tiny.model("hrm").solve(**inputs(), **{name: value, **others})


def test_an_unknown_setting_is_rejected_by_name():
    with pytest.raises(TypeError, match="'restart'"):
        tiny.model("hrm").solve(**inputs(), restart=2)
