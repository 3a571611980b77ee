"""The benchmarks compare models of equal size and equal compute. Referee: FLOPs as counted by torch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.text import decoding, halting, models, quality, retrofit_arms, retrofit_tasks


EQUAL_SIZE = ("hrm_lm_m4", "hrm_text", "llama", "rlm_mhc", "rlm_mhc_off")


@pytest.mark.parametrize("peer", EQUAL_SIZE)
def test_peers_of_equal_size_match_parameters_within_2_percent(peer):
    wanted = models.count_parameters(models.peer_config("hrm_lm", "1m"))
    assert models.count_parameters(models.peer_config(peer, "1m")) == pytest.approx(wanted, rel=0.02)


def test_llama_of_equal_compute_matches_forward_flops_within_2_percent():
    hrm, llama = (models.peer_config(peer, "1m", 256) for peer in ("hrm_lm", "llama_equal_flops"))
    forward = [models.flops_per_token(config, 256, backward=False) for config in (hrm, llama)]
    assert forward[1] == pytest.approx(forward[0], rel=0.02)


def test_decoding_baselines_share_the_body_without_the_added_part():
    sides = decoding.families("tiny")
    off, sinkhorn, birkhoff = sides["rlm_mhc"].values()
    assert (off.mhc_enabled, sinkhorn.mhc_res_mode, birkhoff.mhc_res_mode) == (False, "sinkhorn", "birkhoff")
    for family, passes in {"hrm_lm one pass": 1, "hrm_lm two passes": 2, "hrm_lm four passes": 4}.items():
        llama, hrm = sides[family].values()
        assert llama.num_hidden_layers == hrm.num_hidden_layers == 8 * passes and hrm.halt_max_steps == passes
    for family in sides.values():
        assert len({(c.hidden_size, c.intermediate_size, c.vocab_size) for c in family.values()}) == 1


def test_median_interval_contains_the_median():
    values = torch.arange(1.0, 102.0)
    low, high = decoding.interval(values)
    assert 30 < low < 51 < high < 72


@pytest.mark.parametrize("peer", ["hrm_lm", "hrm_lm_m4", "hrm_text", "llama", "rlm_mhc"])
def test_analytic_training_flops_match_torch(peer):
    analytic, counted = quality.measured_flops(models.peer_config(peer, "tiny"), 64)
    assert analytic == pytest.approx(counted, rel=0.02)


def test_analytic_forward_flops_match_torch():
    config = models.peer_config("hrm_lm", "tiny")
    analytic, counted = quality.measured_flops(config, 64, backward=False)
    assert analytic == pytest.approx(counted, rel=1e-6)


def test_flops_of_hrm_lm_follow_the_segments_that_ran():
    config = models.peer_config("hrm_lm_m4", "tiny")
    one, four = (models.flops_per_token(config, 64, segments=segments) for segments in (1, 4))
    assert four == pytest.approx(4 * one)


def test_text_has_one_id_per_byte_and_documents_end_in_one_eos():
    ids = models.ids_of(b"ab\n<|endoftext|>\nc")
    assert ids.tolist() == [8 + ord("a"), 8 + ord("b"), 8 + ord("\n"), models.EOS_ID, 8 + ord("c")]


def test_random_halting_has_the_requested_average():
    rule = halting.RandomExit(halting.hazards_of(halting.around(2.3, 4)))
    state = type("State", (), {"hidden": torch.zeros(100, 200, 1)})()
    thinking, steps = torch.ones(100, 200, dtype=torch.bool), torch.zeros(100, 200)
    for _ in range(3):
        steps += thinking
        thinking &= ~rule.check(state)
    steps += thinking
    assert steps.mean().item() == pytest.approx(2.3, abs=0.02)
    assert set(np.unique(steps)) == {2.0, 3.0}


def retrofit_args(**changes):
    given = {"layers": "1,2,1", "width": 32, "heads": 2, "rows": 4, "pretrain_steps": 4, "arm_steps": 40}
    given |= {"learning_rate": 1e-3, "pretrain_rate": 1e-3, "device": "cpu", "family": "qwen3"}
    return SimpleNamespace(**given | changes)


def test_retrofit_questions_have_the_answer_of_their_rearrangements():
    ids, labels, steps = retrofit_tasks.make_task("rearrangements").rows(3, torch.Generator().manual_seed(0))
    assert ((steps > 0) == (labels != -100)).all()
    for row, answers in zip(ids, labels):
        text = bytes((row - models.FIRST_BYTE).tolist()).decode()
        wanted = ""
        for question in filter(None, text.split("\n")):
            steps, moves = ord(question[1]) - ord("0"), question[3:].split(">")[0].rstrip(".")
            items = "01234"
            for move in moves:
                place = "abcd".find(move)
                items = items[-1] + items[:-1] if move == "e" else (
                    items[:place] + items[place + 1] + items[place] + items[place + 2 :]
                )  # fmt: skip
            assert len(moves) == steps and question.endswith(f">{items}")
            wanted += items
        found = answers[answers != -100]
        assert bytes((found - models.FIRST_BYTE).tolist()).decode() == wanted


def test_retrofit_automaton_asks_for_every_step():
    task = retrofit_tasks.make_task("automaton")
    ids, labels, steps = task.rows(2, torch.Generator().manual_seed(0))
    cells = ids[:, 1:17]  # the first token is BOS
    for number in range(1, task.most + 1):
        zero = cells.min()
        left, here, right = ((cells.roll(shift, 1) - zero) for shift in (1, 0, -1))
        cells = zero + (110 >> (4 * left + 2 * here + right) & 1)
        assert torch.equal(labels[steps == number].view_as(cells), cells)
    assert ids.shape == labels.shape == steps.shape == (2, task.length)


@pytest.mark.parametrize(
    ("task", "arms"), [("rearrangements", ("deeper", "one_pass")), ("permutations", ("one_pass",))]
)
def test_retrofit_arms_start_as_the_pretrained_model_and_spend_equal_flops(tmp_path, task, arms):
    args = retrofit_args(runs=tmp_path, task=task)
    llama = retrofit_arms.make_decoder(args, "0", 4).eval()
    torch.save(llama.state_dict(), tmp_path / "pretrained_seed0.pt")
    ids = torch.randint(8, 200, (2, 16))
    for arm in arms:
        model = retrofit_arms.make_model(args, arm, "0").eval()
        options = {} if arm == "deeper" else {"num_segments": 1}
        assert torch.equal(model(ids, **options).logits, llama(ids).logits)
        passes, spent = retrofit_arms.drawn_passes(args, arm, "0", model, 1e11)
        assert sum(spent) == pytest.approx(1e11, rel=0.005)
        assert arm != "one_pass" or passes.count(1) > len(passes) / 5
