"""The benchmarks compare like with like: peers of equal size and equal work, FLOPs as torch counts them."""

import json
import sys

import numpy as np
import pytest
import torch

from benchmarks.text import decoding, halting, models, quality, reasoning


EQUAL_SIZE = ("hrm_lm_m4", "hrm_text", "llama", "rlm_mhc", "rlm_mhc_off")


@pytest.mark.parametrize("peer", EQUAL_SIZE)
def test_peers_of_equal_size_have_as_many_parameters_within_2_percent(peer):
    wanted = models.count_parameters(models.peer_config("hrm_lm", "1m"))
    assert models.count_parameters(models.peer_config(peer, "1m")) == pytest.approx(wanted, rel=0.02)


def test_the_llama_of_equal_work_has_as_many_forward_flops_within_2_percent():
    hrm, llama = (models.peer_config(peer, "1m", 256) for peer in ("hrm_lm", "llama_equal_flops"))
    forward = [models.flops_per_token(config, 256, backward=False) for config in (hrm, llama)]
    assert forward[1] == pytest.approx(forward[0], rel=0.02)


def test_decoding_is_compared_with_the_same_body_without_what_a_model_adds():
    sides = decoding.families("tiny")
    off, sinkhorn, birkhoff = sides["rlm_mhc"].values()
    assert (off.mhc_enabled, sinkhorn.mhc_res_mode, birkhoff.mhc_res_mode) == (False, "sinkhorn", "birkhoff")
    llama, hrm = sides["hrm_lm"].values()
    assert llama.num_hidden_layers == hrm.num_hidden_layers == 8 and hrm.halt_max_steps == 1
    for family in sides.values():
        assert len({(c.hidden_size, c.intermediate_size, c.vocab_size) for c in family.values()}) == 1


def test_the_interval_of_a_median_holds_it():
    values = torch.arange(1.0, 102.0)
    low, high = decoding.interval(values)
    assert 30 < low < 51 < high < 72


@pytest.mark.parametrize("peer", ["hrm_lm", "hrm_lm_m4", "hrm_text", "llama", "rlm_mhc"])
def test_analytic_training_flops_are_those_that_torch_counts(peer):
    analytic, counted = quality.measured_flops(models.peer_config(peer, "tiny"), 64)
    assert analytic == pytest.approx(counted, rel=0.02)


def test_a_forward_alone_costs_what_torch_counts():
    config = models.peer_config("hrm_lm", "tiny")
    analytic, counted = quality.measured_flops(config, 64, backward=False)
    assert analytic == pytest.approx(counted, rel=1e-6)


def test_flops_of_hrm_lm_follow_the_segments_that_ran():
    config = models.peer_config("hrm_lm_m4", "tiny")
    one, four = (models.flops_per_token(config, 64, segments=segments) for segments in (1, 4))
    assert four == pytest.approx(4 * one)


def test_a_text_is_one_id_a_byte_and_documents_end_in_one_eos():
    ids = models.ids_of(b"ab\n<|endoftext|>\nc")
    assert ids.tolist() == [8 + ord("a"), 8 + ord("b"), 8 + ord("\n"), models.EOS_ID, 8 + ord("c")]


def test_random_halting_has_the_average_it_was_asked_for():
    rule = halting.RandomExit(halting.hazards_of(halting.around(2.3, 4)))
    state = type("State", (), {"hidden": torch.zeros(100, 200, 1)})()
    thinking, steps = torch.ones(100, 200, dtype=torch.bool), torch.zeros(100, 200)
    for _ in range(3):
        steps += thinking
        thinking &= ~rule.check(state)
    steps += thinking
    assert steps.mean().item() == pytest.approx(2.3, abs=0.02)
    assert set(np.unique(steps)) == {2.0, 3.0}


def test_models_of_a_seed_see_the_same_questions_and_a_killed_run_goes_on(tmp_path, monkeypatch, capsys):
    seen = []
    step = reasoning.train_step

    def noted(model, optimizer, ids, share, args, *, labels, **options):
        seen.append((model.config.model_type, ids.numpy().tobytes(), labels.numpy().tobytes()))
        return step(model, optimizer, ids, share, args, labels=labels, **options)

    monkeypatch.setattr(reasoning, "train_step", noted)
    options = (
        "--task brackets --size 2 --difficulty 1-2 --models hrm_lm,llama --steps 3 --batch_size 4 --evaluations 1 "
    )
    options += f"--test_rows 5 --passes 1,2 --set hidden_size=32 --out {tmp_path}"

    def run(*more):
        seen.clear()
        monkeypatch.setattr(sys, "argv", ["reasoning.py", *options.split(), *more])
        reasoning.main()
        return json.loads((tmp_path / "lm_reasoning_brackets.json").read_text())

    report = run("--seeds", "0")
    batches = {name: [batch for kind, *batch in seen if kind == name] for name in ("hrm_lm", "llama")}
    assert batches["hrm_lm"] == batches["llama"] and len({ids for ids, _ in batches["llama"]}) == 3
    assert report["models"]["llama"]["parameters"] == pytest.approx(report["models"]["hrm_lm"]["parameters"], rel=0.05)
    rows = report["summary"]["hrm_lm"]["by_difficulty"]
    assert {(row["split"], row["passes"]) for row in rows} == {
        (split, passes) for split in ("test", "beyond") for passes in ("own", 1, 2)
    }
    assert "half_width" not in report["summary"]["llama"]["test_cell_accuracy"]  # of one seed
    report = run("--seeds", "0,1")
    assert [kind for kind, *_ in seen] == ["hrm_lm"] * 3 + ["llama"] * 3  # seed 1 alone
    found = report["summary"]["llama"]
    shares = [run["last"]["test_cell_accuracy"] for run in report["models"]["llama"]["runs"].values()]
    assert found["test_cell_accuracy"]["mean"] == pytest.approx(np.mean(shares))
    # Of two values the interval is t(1) s / sqrt(2), and s their distance over sqrt(2).
    assert found["test_cell_accuracy"]["half_width"] == pytest.approx(12.706 * abs(shares[0] - shares[1]) / 2)
    assert set(found["minus_first"]) == {
        f"{split}_{what}_accuracy" for split in ("test", "beyond") for what in ("exact", "cell")
    }
    with pytest.raises(SystemExit, match="another model or learning rate"):
        run("--seeds", "0", "--set", "L_cycles=2")
    run("--seeds", "0", "--models", "hrm_lm+L_cycles=2")
    assert [kind for kind, *_ in seen] == ["hrm_lm"] * 3
    with pytest.raises(SystemExit, match="other settings"):
        run("--seeds", "0", "--batch_size", "5")
    assert "| hrm_lm+L_cycles=2 |" in capsys.readouterr().out
