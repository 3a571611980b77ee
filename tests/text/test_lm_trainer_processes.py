"""`CausalLMTrainer` in other processes: killed and resumed, and two processes with DDP.

Referee of a killed run: the same run left alone. Referee of two processes: one with twice the batch.
"""

import json
import random
import time
from pathlib import Path

import lm_worker
import pytest
import started
import torch
from safetensors.torch import load_file
from tiny_lm import NOT_OVER_TOKENS
from tolerances import assert_copied

from hrm_hf.hub.manifests import RAW_WEIGHTS_FILE, list_checkpoints


@pytest.mark.slow
def test_run_killed_twice_has_the_losses_of_an_uninterrupted_run(tmp_path):
    lm_worker.train_resumable(str(tmp_path / "alone"), steps=24)
    out, draw = tmp_path / "killed", random.Random(0)
    for kill in range(2):
        wanted = 6 * kill + draw.randrange(3, 6)
        process = started.process(lm_worker.train_resumable, str(out), 24)
        process.start()
        while process.is_alive() and not any(step_of(one) >= wanted for one in list_checkpoints(out)):
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -9
    lm_worker.train_resumable(str(out), 24)
    expected, found = (json.loads((folder / "log.json").read_text()) for folder in (tmp_path / "alone", out))
    assert len(expected) == 24 and found == expected
    for name in ("model.safetensors", RAW_WEIGHTS_FILE):
        assert_copied(load_file(out / name), load_file(tmp_path / "alone" / name))


def step_of(folder: Path) -> int:
    return int(folder.name.rsplit("-", 1)[1])


# ---- two processes ----


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Run two processes once, and return the results as one dict per process."""
    out = tmp_path_factory.mktemp("ddp")
    result = started.run(lm_worker.main, str(out), processes=2)
    assert result.returncode == 0, result.stderr[-4000:]
    return [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_processes_run_distributed(two_processes):
    found = [(one["num_processes"], one["distributed_type"], one["find_unused"]) for one in two_processes]
    assert found == [(2, "MULTI_CPU", False)] * 2


@pytest.mark.parametrize(("architecture", "accumulation"), lm_worker.EQUAL)
def test_two_processes_train_as_one_with_twice_the_batch(two_processes, tmp_path, architecture, accumulation):
    alone = lm_worker.train_equal(tmp_path, architecture, accumulation, batch_size=8)
    for together in (one["equal"][f"{architecture} {accumulation}"] for one in two_processes):
        for mine, expected in zip(together["log"], alone["log"], strict=True):
            assert mine.keys() == expected.keys()
            compared = expected.keys() - NOT_OVER_TOKENS
            assert [mine[n] for n in compared] == pytest.approx([expected[n] for n in compared], abs=1e-5, rel=1e-5)
        for name, value in alone["weights"].items():
            torch.testing.assert_close(together["weights"][name], value, rtol=0, atol=1e-5, msg=name)


def test_uneven_evaluation_data_are_counted_once(two_processes, tmp_path):
    for rows, architecture in lm_worker.EVALUATIONS:
        alone = lm_worker.evaluate(tmp_path, architecture, rows)
        for one in two_processes:
            assert one["evaluation"][f"{architecture} {rows}"] == pytest.approx(alone, rel=1e-5, abs=1e-6)


def test_nonfinite_loss_on_one_process_skips_the_step_on_both(two_processes):
    first, second = (one["nonfinite"] for one in two_processes)
    assert first["moved"] == second["moved"] == [True, False, True, True]
    assert first["counts"] == second["counts"] == [None, 1, 1, 1]
    assert_copied(first["weights"], second["weights"])
    assert all(value.isfinite().all() for value in first["weights"].values())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_processes_whose_data_end_at_different_times_do_not_wait_for_each_other(two_processes, accumulation):
    first, second = (one["uneven"][str(accumulation)] for one in two_processes)
    assert first["steps"] == second["steps"] == 7
    assert_copied(first["weights"], second["weights"])


def test_two_processes_resume_exactly(two_processes):
    for one in two_processes:
        assert one["resumed"]["log"] == one["resumed"]["expected"]
