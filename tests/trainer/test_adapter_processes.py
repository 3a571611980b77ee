"""Adapters, tables and TRL in two processes of torchrun (gloo, CPU), through the training scripts.

Referee: one process with twice the batch of each, for losses, terms of losses and weights.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import every
import pytest
import tiny
import torch
import tuning_worker
from safetensors.torch import load_file
from script_runs import RECIPE, losses, names, renamed_boards


pytest.importorskip("trl")
from accelerate_launch import environment
from datasets import Dataset
from tiny_answers import RUN, answers, preferences, prompts, write


pytestmark = pytest.mark.slow  # two processes that import torch, transformers and TRL: a minute
needs_deepspeed = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="needs deepspeed")
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
# Logged values that describe a step; the others are times or counted per process.
TERMS = ("loss", "_loss", "grad_norm", "kl", "rewards/margins", "logps/chosen")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return scripts and options by name, with the batch size of the complete step."""
    data = tmp_path_factory.mktemp("data")
    quiet = {"halt_exploration_prob": 0.0}  # otherwise, each process explores differently
    for short in ("hrm", "trm"):
        built = tiny.model(short, task="sudoku", box_shape=[2, 2], **quiet)
        built.save_pretrained(data / f"{short}_puzzle")
    every.model("hrm_lm", **quiet).save_pretrained(data / "hrm_lm")
    every.processor("hrm_lm").save_pretrained(data / "hrm_lm")
    every.save("rlm_mhc", data / "rlm_mhc")
    (data / "text.txt").write_text("".join(f"Line {number}: the cat sat on mat.\n" for number in range(200)))
    files = {}
    for kind, rows in (("sft", answers("hrm_lm")), ("dpo", preferences("hrm_lm")), ("grpo", prompts("hrm_lm"))):
        longer = [{**rows[number % 3], "prompt": "x" * number + rows[number % 3]["prompt"]} for number in range(8)]
        files[kind] = write(data / f"{kind}.jsonl", Dataset.from_list(longer))
    own = {**RECIPE, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2}
    puzzle = {**own, "data_path": renamed_boards(data / "boards", tiny.PUZZLES), "eval_max_steps": 2}
    text = {**own, "train_data": str(data / "text.txt"), "data_cache_dir": str(data / "cache"), "block_size": 32}
    trl = {**RUN, "max_steps": 2, "learning_rate": 1e-3}
    whole = {"lora_rank": 4, "merge_adapter": True}

    def options(base: str, *groups: dict) -> dict:
        return {"model_name_or_path": str(data / base)} | {
            key: value for group in groups for key, value in group.items()
        }

    sft, dpo = ({"train_data": files[kind], "max_length": 64} for kind in ("sft", "dpo"))
    grpo = {"train_data": files["grpo"], "beta": 0.04, "num_generations": 4, "max_completion_length": 12}
    grpo |= {"reward": "regex:[A-Za-z]{2}"}
    return {
        "puzzle": ("run_puzzle", options("trm_puzzle", puzzle, {"lora_rank": 4})),
        "puzzle, DoRA, merged": ("run_puzzle", options("hrm_puzzle", puzzle, whole, {"use_dora": True})),
        "table": ("run_puzzle", options("trm_puzzle", puzzle, {"freeze_weights": True})),
        "text": ("run_clm", options("rlm_mhc", text, {"lora_rank": 4})),
        "text, averaged, merged": ("run_clm", options("hrm_lm", text, whole, {"ema_rate": 0.9})),
        "sft": ("run_sft", options("hrm_lm", trl, sft)),
        "sft, adapter": ("run_sft", options("hrm_lm", trl, sft, {"lora_rank": 4})),
        "dpo": ("run_dpo", options("rlm_mhc", trl, dpo)),
        "dpo, adapter": ("run_dpo", options("rlm_mhc", trl, dpo, whole)),
        "grpo": ("run_grpo", options("hrm_lm", trl, grpo)),
        "grpo, adapter": ("run_grpo", options("hrm_lm", trl, grpo, {"lora_rank": 4})),
    }


EQUAL = (
    "puzzle", "puzzle, DoRA, merged", "table", "text", "text, averaged, merged", "sft", "sft, adapter", "dpo",
    "dpo, adapter",
)  # fmt: skip
SHARDED = ("text", "text, averaged, merged", "sft, adapter")  # names of runs for DeepSpeed
RESUMED = ("puzzle", "table", "text", "text, averaged, merged")


def plan(folder: Path, chosen: dict, processes: int) -> None:
    """Write the runs of the worker; each run with checkpoints is followed by one that resumes from the first."""
    folder.mkdir()
    listed = []
    for name, (script, options) in chosen.items():
        batch = options["per_device_train_batch_size"] // processes
        here = {**options, "per_device_train_batch_size": batch, "output_dir": str(folder / name)}
        listed.append((script, here))
        if processes > 1 and name in RESUMED:
            resumed = {**here, "output_dir": str(folder / f"{name}, resumed")}
            resumed["resume_from_checkpoint"] = str(folder / name / "checkpoint-2")
            listed.append((script, resumed))
    (folder / "runs.json").write_text(json.dumps(listed))


def start_two(folder: Path, **variables: str) -> list[list[dict]]:
    """Run the plan of a folder in two processes, and return the results of each."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    result = subprocess.run(
        [*torchrun, tuning_worker.__file__, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=900,
    )
    said = [line for line in result.stderr.splitlines() if line.startswith("[rank")]  # of a traceback
    assert result.returncode == 0, "\n".join(said[-30:]) or result.stderr[-4000:]
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def together(runs, tmp_path_factory):
    """Return the folder of two processes, and how each run was distributed."""
    folder = tmp_path_factory.mktemp("processes") / "two"
    plan(folder, runs, 2)
    return folder, start_two(folder)


@pytest.fixture(scope="module")
def alone(runs, tmp_path_factory):
    """Return the folder of the same runs in this process."""
    folder = tmp_path_factory.mktemp("processes") / "one"
    plan(folder, {name: runs[name] for name in EQUAL}, 1)
    arguments = sys.argv
    tuning_worker.run_all(folder)
    sys.argv = arguments
    return folder


def log(folder: Path) -> list[dict[str, float]]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    kept = [{name: value for name, value in entry.items() if name.endswith(TERMS)} for entry in history]
    return [entry for entry in kept if "loss" in entry]


def saved(folder: Path) -> dict[str, torch.Tensor]:
    found = [folder / name for name in WEIGHTS if (folder / name).exists()]
    assert len(found) == 1
    return load_file(found[0])


def assert_same_run(found: Path, expected: Path, tolerance: float = 1e-5) -> None:
    for mine, other in zip(log(found), log(expected), strict=True):
        assert mine == pytest.approx(other, abs=1e-4, rel=1e-4)
    for name, value in saved(expected).items():
        torch.testing.assert_close(saved(found)[name], value, rtol=0, atol=tolerance, msg=name)


def test_all_runs_are_of_two_processes(together):
    for seen in together[1]:
        assert {(one["processes"], one["distributed"]) for one in seen} == {(2, "MULTI_CPU")}


@pytest.mark.parametrize("name", EQUAL)
def test_two_processes_train_as_one_with_twice_the_batch(together, alone, name):
    assert_same_run(together[0] / name, alone / name)
    assert names(together[0] / name) == names(alone / name)  # process 1 writes no files


@pytest.mark.parametrize("name", RESUMED)
def test_two_processes_resume_exactly(together, name):
    whole, resumed = together[0] / name, together[0] / f"{name}, resumed"
    assert losses(resumed) == losses(whole)
    assert all(torch.equal(saved(whole)[key], value) for key, value in saved(resumed).items())


@pytest.mark.parametrize("name", ["grpo", "grpo, adapter"])
def test_rewards_are_learned_against_the_model_at_the_start(together, name):
    entries = log(together[0] / name)
    assert entries[0]["kl"] == pytest.approx(0, abs=1e-6) and entries[1]["kl"] > 0


@needs_deepspeed
def test_adapters_train_under_deepspeed_as_in_one_process(runs, alone, tmp_path):
    chosen = {name: (script, dict(options)) for name, (script, options) in runs.items() if name in SHARDED}
    chosen["text, averaged, merged"][1]["ema_rate"] = 0.0  # rejected with sharded weights
    folder = tmp_path / "two"
    plan(folder, chosen, 2)
    for seen in start_two(folder, **environment("deepspeed_zero2"), DS_ACCELERATOR="cpu"):
        assert {(one["processes"], one["distributed"]) for one in seen} == {(2, "DEEPSPEED")}
    for name in ("text", "sft, adapter"):
        assert_same_run(folder / name, alone / name)
    assert losses(folder / "text, resumed") == losses(folder / "text")
    # With sharded weights only the adapter is saved; it can be merged after loading.
    assert "adapter_model.safetensors" in names(folder / "text, averaged, merged")
