"""Metrics for the `evaluate` library, loaded by path and from a Space. Referees: hand-computed values."""

import math
import subprocess
import sys
from pathlib import Path

import evaluate
import numpy as np
import pytest
from hub_server import HubServer

from hrm_hf import metrics
from hrm_hf.metrics import METRICS, write_metric_space


FOLDER = Path(metrics.__file__).parent


def load(name):
    return evaluate.load(str(FOLDER / name))


def test_there_is_a_module_for_each_kind_of_task():
    assert METRICS == ["arc_pass_at_k", "bits_per_byte", "exact_accuracy", "go_code", "posterior_calibration"]


def test_bits_per_byte_of_a_uniform_guess_over_256_bytes_is_8():
    texts = ["abc", "é"]
    predictions = [[-math.log(256)] * len(text.encode()) for text in texts]
    result = load("bits_per_byte").compute(predictions=predictions, references=texts)
    assert result["bits_per_byte"] == pytest.approx(8) and result["perplexity"] == pytest.approx(256)
    assert (result["tokens"], result["bytes"]) == (5, 5)


@pytest.mark.parametrize("value", [0.5, math.nan])
def test_positive_or_nan_log_probabilities_are_rejected(value):
    with pytest.raises(ValueError, match="text 1"):
        load("bits_per_byte").compute(predictions=[[-1.0], [-1.0, value]], references=["a", "b"])


def test_arc_counts_a_test_within_k_guesses_and_averages_over_tasks():
    right, wrong = [[1, 2]], [[2, 1]]
    guesses = [[right, wrong], [wrong, right], [wrong, wrong]]
    result = load("arc_pass_at_k").compute(
        predictions=guesses, references=[right] * 3, tasks=["one", "one", "two"], ks=[1, 2]
    )
    assert result == {"pass@1": 0.25, "pass@2": 0.5, "tasks": 2}


def test_go_code_is_parsed_and_compared():
    pytest.importorskip("tree_sitter_go")
    codes = ["func f() int {\n\treturn 1\n}", "func f( int {", "func f() int { return 2 }"]
    result = load("go_code").compute(predictions=codes, references=["func f() int {\nreturn 1\n}"] * 3)
    assert result["syntax_rate"] == pytest.approx(2 / 3) and result["exact_match"] == pytest.approx(1 / 3)
    assert 1 / 3 < result["subtree_f1"] < 1


def test_correct_posteriors_are_calibrated_and_narrow_ones_are_not():
    rng = np.random.default_rng(0)
    truth = rng.uniform(0, 1, (400, 2))
    centre = truth + 0.1 * rng.standard_normal(truth.shape)
    draws = centre[:, None] + 0.1 * rng.standard_normal((400, 100, 2))
    metric = load("posterior_calibration")
    right = metric.compute(predictions=draws, references=truth, names=["a", "b"])
    narrow = metric.compute(predictions=centre[:, None] + (draws - centre[:, None]) / 3, references=truth)
    # 400 cases: a share of 0.68 has a standard error of 0.023, the mean of z^2 one of 0.07.
    assert right["a_coverage_68"] == pytest.approx(0.683, abs=0.08) and right["b_mean_z2"] == pytest.approx(1, abs=0.3)
    assert narrow["parameter_0_coverage_68"] < 0.4 and narrow["parameter_0_mean_z2"] > 5
    assert right["tarp_deviation"] < narrow["tarp_deviation"] and right["count"] == 400


def test_a_metric_loads_from_a_space(tmp_path):
    with HubServer(tmp_path / "hub") as hub:
        folder = write_metric_space("bits_per_byte", tmp_path / "space")
        script = (
            # `evaluate` imports transformers if it can, which takes seconds and which no metric needs.
            "import sys; sys.modules['transformers'] = None; import evaluate; del sys.modules['transformers']\n"
            "from huggingface_hub import HfApi; api = HfApi()\n"
            "api.create_repo('me/bits_per_byte', repo_type='space', space_sdk='gradio')\n"
            "api.upload_folder(repo_id='me/bits_per_byte', repo_type='space', folder_path=sys.argv[1])\n"
            "metric = evaluate.load('me/bits_per_byte', module_type='metric')\n"
            "print(metric.compute(predictions=[[-1.0]], references=['a'])['perplexity'])"
        )
        finished = subprocess.run(
            [sys.executable, "-c", script, str(folder)],
            env={**hub.environment(tmp_path / "home"), "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=300, cwd=tmp_path,
        )  # fmt: skip
        assert finished.returncode == 0, finished.stderr[-3000:]
        assert float(finished.stdout.split()[-1]) == pytest.approx(math.e)
        assert set(hub.files("me/bits_per_byte", repo_type="space")) >= {"app.py", "bits_per_byte.py", "README.md"}


def test_unknown_metrics_and_nonempty_folders_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"accuracy.*arc_pass_at_k"):
        write_metric_space("accuracy", tmp_path / "space")
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(FileExistsError, match="not empty"):
        write_metric_space("go_code", tmp_path)
