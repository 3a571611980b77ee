"""`make gpu-check` in pytest: tests marked `gpu` compare a GPU with the CPU; the others test the check itself.

The comparisons are those of benchmarks/package/comparisons.py, whose docstring names referee and bounds. Without a
GPU, the tests run the CPU half, and check that it detects faults in models, caches, attention and training.
"""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

import every
import pytest
import tiny
import torch
import transformers
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.package import comparisons, gpu_check
from benchmarks.text.models import build, peer_config


FAST = tuple(name for name in comparisons.CHECKS if name != "losses")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return comparisons.Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(autouse=True)
def logging_as_before():
    """Undo what `gpu_check.main`, written for a separate process, does to the logging of transformers."""
    before = transformers.utils.logging.get_verbosity()
    yield
    transformers.utils.logging.set_verbosity(before)
    transformers.utils.logging.enable_progress_bar()


def failures(rows) -> list[str]:
    return [row.line() for row in rows if not row.ok]


# ---- with a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("check", comparisons.CHECKS)
@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_a_gpu_computes_what_the_cpu_does(check, architecture, checkpoints):
    assert failures(comparisons.CHECKS[check](checkpoints, architecture, "cuda")) == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one_process_on_the_cpu_does(checkpoints):
    assert failures(comparisons.check_processes(checkpoints, "cuda")) == []


# ---- without a GPU ----


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_the_cpu_agrees_with_itself_in_bfloat16_with_other_attention_and_with_caches(architecture, checkpoints):
    rows = [row for check in FAST for row in comparisons.CHECKS[check](checkpoints, architecture, "cpu")]
    assert failures(rows) == []
    assert {row.check for row in rows} >= {"outputs"} | ({"cached"} if architecture in every.CAUSAL_LMS else set())


@pytest.mark.slow
@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_training_in_bfloat16_on_the_cpu_has_the_losses_of_float32(architecture, checkpoints):
    assert failures(comparisons.check_losses(checkpoints, architecture, "cpu")) == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_compared_training_draws_no_random_numbers(architecture, checkpoints):
    """A GPU would draw other numbers. Referee: two trainings whose steps start from different seeds."""
    losses = []
    for seed in (1, 2):
        model = checkpoints.load(architecture)
        model.register_forward_pre_hook(lambda module, arguments, seed=seed: torch.manual_seed(seed) and None)
        losses.append(comparisons.training_losses(model, architecture, "cpu", torch.float32, 3)["loss"])
    assert torch.equal(*losses)


@pytest.mark.slow
def test_two_processes_train_as_one_does(checkpoints):
    rows = list(comparisons.check_processes(checkpoints, "cpu"))
    assert failures(rows) == [] and len(rows) == len(every.ARCHITECTURES) - 1  # not cosmo_cnn, which has batch norms


@pytest.mark.slow
def test_rows_with_cuda_graphs_are_measured():
    """Without a GPU, the modes that record CUDA graphs compile as usual."""
    args = argparse.Namespace(device="cpu", quick=True)
    model = tiny.model("hrm").eval()
    comparison, row = gpu_check.graph_solving("tiny", model, tiny.batch()["input_ids"], args)
    assert comparison.ok and row["puzzles_per_s"] > 0, comparison.line()
    model = build(peer_config("hrm_lm", "tiny", 160)).eval()
    with torch.no_grad():
        comparison, row = gpu_check.graph_decoding("tiny", model, 2, 4, args)
    assert comparison.ok and row["tokens_per_s"] > 0, comparison.line()


# ---- faults ----


def run(monkeypatch, folder: Path, *flags: str) -> tuple[int, dict]:
    """Return exit status and report of the quick check on the CPU."""
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--quick", "--out", str(folder), *flags])
    return gpu_check.main(), json.loads((folder / "gpu_check_cpu_quick.json").read_text())


def test_quick_check_prints_a_table_and_writes_a_report(monkeypatch, tmp_path, capsys):
    status, report = run(monkeypatch, tmp_path, "--only", *FAST, "puzzles")
    assert (status, report["failed"], report["device"]) == (0, 0, "cpu")
    assert {row["check"] for row in report["comparisons"]} == set(FAST)
    assert all(row["puzzles_per_s"] > 0 for row in report["speed"]) and len(report["speed"]) == 4
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == len(report["comparisons"]) + len(report["speed"]) + 2
    assert f"{len(report['comparisons'])} of {len(report['comparisons'])} comparisons" in printed


def test_wrong_attention_scale_is_detected(monkeypatch, tmp_path, capsys):
    right = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def wrong(module, query, *others, **kwargs):
        return right(module, 1.001 * query, *others, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", wrong)
    status, report = run(monkeypatch, tmp_path, "--only", "attention")
    found = {row["architecture"] for row in report["comparisons"] if not row["ok"]}
    assert status == 1 and found == {row["architecture"] for row in report["comparisons"]}
    assert capsys.readouterr().out.count("FAILED") == report["failed"] == len(found) >= 2


def test_cache_that_loses_a_token_is_detected(monkeypatch, tmp_path):
    class Forgetful(DynamicCache):
        def update(self, *arguments, **kwargs):
            keys, values = super().update(*arguments, **kwargs)
            return keys, torch.cat([values[:, :, :1], values[:, :, :-1]], dim=2)

    monkeypatch.setitem(comparisons.CACHES, "growing cache", Forgetful)
    status, report = run(monkeypatch, tmp_path, "--only", "cached")
    found = {row["setting"]: row["ok"] for row in report["comparisons"]}
    assert status == 1 and found == {"growing cache": False, "static cache": True}


def test_wrong_weights_are_detected_in_outputs_and_losses(monkeypatch, checkpoints):
    """A change of 0.1 %: far below the rounding of bfloat16, far above that of float32."""
    for measured, check in ((comparisons.outputs, "outputs"), (comparisons.training_losses, "losses")):

        def wrong(model, architecture, device, *others, measured=measured):
            if device == "somewhere":
                torch._foreach_mul_([weight.data for weight in model.parameters()], 1.001)
            return measured(model, architecture, "cpu", *others)

        monkeypatch.setattr(comparisons, measured.__name__, wrong)
        options = {"steps": 2} if check == "losses" else {}
        rows = list(comparisons.CHECKS[check](checkpoints, "cosmo_cnn", "somewhere", **options))
        assert [row.ok for row in rows] == [False, True], [row.line() for row in rows]  # float32, bfloat16


def test_crashed_comparison_is_a_failure_and_others_still_run(monkeypatch, tmp_path):
    monkeypatch.setattr(comparisons, "cached_logits", lambda *arguments: 1 / 0)
    monkeypatch.setattr(gpu_check, "puzzle_speed", lambda args: 1 / 0)
    status, report = run(monkeypatch, tmp_path, "--only", "puzzles", "cached", "outputs")
    errors = {row["check"]: row["error"] for row in report["comparisons"]}
    broken = "ZeroDivisionError: division by zero"
    assert status == 1 and errors == {"puzzles": broken, "cached": broken, "outputs": None}


def test_a_value_that_is_not_a_number_is_a_failure():
    good = {"logits": torch.ones(3)}
    reference = comparisons.Reference(good, [good], torch.finfo(torch.float32).eps)
    bad = {"logits": torch.tensor([1.0, math.nan, 1.0])}
    for found, ok in ((good, True), (bad, False), ({"logits": torch.tensor([1.0, 1.0, math.inf])}, False)):
        row = comparisons.Comparison("outputs", "x", "y", **reference.compare(found))
        assert row.ok is ok
        assert dataclasses.asdict(row).keys() < row.as_dict().keys() and json.dumps(row.as_dict(), allow_nan=False)
