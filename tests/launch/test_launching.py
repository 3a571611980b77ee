"""`training/launch.py` and `hrm-hf launch`: plans, command lines, and a run on the CPU.

Referees: the numbers in the guide's tables, and the argument parsers of run_clm.py and accelerate.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_lm
from accelerate.commands.launch import launch_command_parser
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.launch import planner as launching
from hrm_hf.launch.memory import GIB
from hrm_hf.launch.options import LaunchOptions, parse_memory
from hrm_hf.launch.planner import Device, share_batch
from hrm_hf.text.arguments import LmDataArguments, LmTrainingArguments
from hrm_hf.text.byte_tokenizer import byte_tokenizer
from hrm_hf.trainer.recipes import ModelArguments, build_config, parse_recipe


ROOT = Path(__file__).parents[2]
AMPERE, TURING = Device("A", 24 * GIB, (8, 6)), Device("T", 16 * GIB, (7, 5))


def invoke(*flags: str):
    return CliRunner().invoke(app, ["launch", *flags])


def plan_launch(model: str, flags: list[str], devices: list[Device], **options):
    return launching.plan_launch(LaunchOptions(model=model, **options), flags, devices)


def plan_of(*flags: str) -> dict:
    """Return the JSON plan of a dry run."""
    result = invoke(*flags, "--dry_run", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.mark.parametrize(
    "model, gpus, batch",
    [("50m", 2, 6), ("50m", 4, 4), ("50m", 8, 3), ("50m", 1, 8), ("50m", 3, 6), ("100m", 2, 3), ("100m", 4, 2),
     ("100m", 8, 1), ("100m", 16, 1)],
)  # fmt: skip
def test_guide_batch_table_can_be_selected(model, gpus, batch):
    plan = plan_launch(f"hrm-lm-{model}", [], [AMPERE] * gpus, batch_table="guide")
    assert (plan.per_device_train_batch_size, plan.gradient_accumulation_steps) == (batch, 1)
    assert plan.effective_batch == batch * gpus


def test_learning_rate_scales_with_the_square_root_of_batches_above_sixteen():
    base = plan_launch("hrm-lm-50m", [], [AMPERE] * 4, batch_table="guide")
    eight = plan_launch("hrm-lm-50m", [], [AMPERE] * 8, batch_table="guide")
    assert base.learning_rate == base.base_learning_rate == 3e-5
    assert eight.learning_rate == pytest.approx(3e-5 * math.sqrt(24 / 16))
    small = plan_launch("hrm-lm-100m", [], [AMPERE] * 2, batch_table="guide")
    assert small.effective_batch == 6 and small.learning_rate == small.base_learning_rate == 1e-5


def test_the_number_of_gpus_does_not_change_the_batch_of_a_step():
    for gpus in (1, 2, 4, 8, 16):
        assert plan_launch("hrm-lm-50m", [], [AMPERE] * gpus).effective_batch == 16


def test_less_memory_means_more_accumulation_and_the_same_step():
    plans = [plan_launch("hrm-lm-50m", [], [Device("G", size * GIB, (8, 0))]) for size in (5, 8, 24)]
    batches = [plan.per_device_train_batch_size for plan in plans]
    assert batches == sorted(batches) and batches[0] < batches[-1]
    assert {plan.effective_batch for plan in plans} == {16} and all(plan.fits for plan in plans)


def test_batch_is_split_equally_over_processes():
    assert [share_batch(*each) for each in ((16, 4, 8), (16, 1, 3), (10, 4, 9))] == [(4, 1), (2, 8), (3, 1)]


def test_bfloat16_needs_capability_eight_on_every_gpu():
    assert plan_launch("hrm-lm-50m", [], [AMPERE] * 2).bf16
    assert not plan_launch("hrm-lm-50m", [], [AMPERE, TURING]).bf16


def test_large_models_use_checkpointing_and_small_ones_only_when_memory_is_short():
    assert plan_launch("hrm-lm-100m", [], [AMPERE]).activation_checkpointing
    assert not plan_launch("hrm-lm-50m", [], [AMPERE]).activation_checkpointing
    assert plan_launch("hrm-lm-50m", ["--block_size=2048"], [Device("G", 5 * GIB, (8, 0))]).activation_checkpointing


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_both_names_of_activation_checkpointing_work(name):
    plan = plan_launch("hrm-lm-100m", [f"--{name}", "false"], [AMPERE])  # its recipe sets true
    assert not plan.activation_checkpointing
    assert plan.command[plan.command.index("--activation_checkpointing") + 1] == "false"


@pytest.mark.parametrize("overrides", [None, "", "num_hidden_layers=3", '{"hidden_size": 128}', "vocab_size=99"])
def test_plan_and_script_build_the_same_config_from_recipe_and_overrides(overrides):
    flags = [] if overrides is None else ["--config_overrides", overrides]
    recipe = ["--recipe", str(launching.RECIPES / "llama_50m.yaml"), "--output_dir", "x", "--use_cpu", "true"]
    arguments, *_ = parse_recipe(launching.RUN_CLM, [*recipe, *flags])
    planned = launching.config_of(*launching.run_values("llama-50m", flags))
    assert planned.to_dict() == build_config(arguments).to_dict()
    if overrides:
        assert plan_launch("llama-50m", flags, [AMPERE]).parameters == launching.model_shape(planned).parameters


def test_plan_applies_overrides_to_the_config_of_saved_weights(tmp_path):
    tiny_lm.model("hrm_lm").save_pretrained(tmp_path)
    given = {"model_name_or_path": str(tmp_path), "config_overrides": "halt_max_steps=7"}
    assert launching.config_of({}, given).halt_max_steps == 7
    assert launching.config_of({"config_overrides": "bp_steps=5"}, given).bp_steps == 5


def test_model_that_does_not_fit_is_rejected_with_its_memory_terms_and_a_fix():
    with pytest.raises(ValueError, match=r"rlm-mhc-large.*optimizer 49\.2.*--strategy fsdp2"):
        plan_launch("rlm-mhc-large", [], [Device("G", 80 * GIB, (8, 0))] * 2)
    short = plan_launch("rlm-mhc-large", ["--block_size=4096"], [Device("G", 80 * GIB, (8, 0))] * 2, strategy="fsdp2")
    assert "accelerate_configs/fsdp2.yaml" in shlex.join(short.command)


def test_user_flags_are_forwarded_unchanged_and_override_the_plan():
    flags = ["--learning_rate=1e-4", "--per_device_train_batch_size", "2", "--bf16", "false", "--max_steps", "7"]
    plan = plan_launch("hrm-lm-50m", flags, [AMPERE] * 4)
    assert plan.command[-len(flags) :] == flags
    assert (plan.learning_rate, plan.per_device_train_batch_size, plan.bf16) == (1e-4, 2, False)
    assert plan.gradient_accumulation_steps == 2  # 2 x 4 x 2 = 16
    assert not any(part in ("--learning_rate", "--global_batch_size 16") for part in plan.command)


def test_accelerate_and_run_clm_accept_the_command():
    plan = plan_of("--model", "hrm-lm-50m", "--gpus", "4", "--gpu_memory", "24GB", "--train_data", "x.jsonl")
    assert plan["command"][:2] == ["accelerate", "launch"]
    args = launch_command_parser().parse_args(plan["command"][2:])
    assert args.num_processes == 4 and args.main_process_port == plan["port"]
    assert Path(args.training_script).resolve() == ROOT / "training" / "run_clm.py"
    flags = list(args.training_script_args)
    flags[flags.index("--bf16") + 1] = "false"  # needs a GPU
    flags += ["--use_cpu", "true"]
    # Four processes share the recipe's batch; this one process must accumulate it.
    flags[flags.index("--gradient_accumulation_steps") + 1] = "4"
    model, data, training = parse_recipe((ModelArguments, LmDataArguments, LmTrainingArguments), flags)
    assert model.preset == "hrm-lm-50m" and data.train_data == ["x.jsonl"]
    assert training.per_device_train_batch_size == plan["per_device_train_batch_size"]


def test_a_dry_run_needs_no_gpu(monkeypatch):
    monkeypatch.setattr(launching, "cuda_devices", list)
    plan = plan_of("--model", "hrm-lm-100m")
    assert plan["hypothetical"] and len(plan["devices"]) == 1


@pytest.mark.parametrize(("gpus", "message"), [(0, "--cpu.*--dry_run|--dry_run.*--cpu"), (1, "gpus=4: found 1")])
def test_fewer_gpus_than_requested_is_an_error(gpus, message, monkeypatch):
    monkeypatch.setattr(launching, "cuda_devices", lambda: [AMPERE] * gpus)
    result = invoke("--model", "hrm-lm-50m", *["--gpus", "4"] * gpus)
    assert result.exit_code == 1 and re.search(message, str(result.exception))


@pytest.mark.parametrize(
    "flags",
    [("--model", "hrm-lm-51m", "--dry_run"), ("--model", "hrm-lm-50m", "--cpu", "--gpus", "2"), (),
     ("--model", "gpt2", "--gpus", "x"), ("--model", "gpt2", "--processes", "2"),
     ("--model", "gpt2", "--gpu_memory", "24GB"), ("--model", "gpt2", "--dry_run", "--gpu_memory", "much")],
)  # fmt: skip
def test_bad_usage_exits_with_two(flags):
    assert invoke(*flags).exit_code == 2


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--max_stepps", "5"), "'max_stepps'; did you mean 'max_steps'"),
        (("--max_steps", "many"), "--max_steps/--max-steps: invalid int value: 'many'"),
        (("--lr_scheduler_type", "cosinus"), "'cosinus'"),
        (("--model_name_or_path", "./nowhere"), "./nowhere"),
        (("--batch_size", "4"), "--per_device_train_batch_size"),
        (("--recipe", "training/recipes/hrm_lm_100m.yaml"), "--model hrm-lm-50m"),
        (("--model", "50m"), "hrm-lm-50m; see docs/coming_from/hrm_lm_distributed.md"),
    ],
)
def test_a_dry_run_rejects_unknown_flags_and_values(flags, message):
    result = invoke("--model", "hrm-lm-50m", "--gpus", "2", "--dry_run", *flags)
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())  # without the box


def test_recipe_replaces_the_model():
    path = str(launching.RECIPES / "hrm_lm_100m.yaml")
    assert launching.run_values(None, ["--recipe", path])[0] == launching.run_values("hrm-lm-100m")[0]


def test_a_byte_level_run_is_planned_with_the_vocabulary_of_its_tokenizer():
    config = launching.config_of(*launching.run_values("hrm-lm-shakespeare-cpu"))
    assert config.vocab_size == len(byte_tokenizer())


def test_cpu_processes_are_started_by_torchrun_never_by_accelerate():
    plan = plan_of("--model", "hrm-lm-10m-byte", "--cpu", "--processes", "2")
    assert plan["command"][:3] == ["torchrun", "--nproc_per_node", "2"]
    assert "--use_cpu true" in plan["command_line"] and not plan["bf16"]


@pytest.mark.parametrize("model", launching.known_models())
def test_every_model_can_be_planned(model):
    plan = plan_launch(model, [], [Device("G", 80 * GIB, (9, 0))] * 8, strategy="fsdp2")
    assert plan.fits and plan.parameters > 1e5
    if model in ("rlm-mhc-base", "rlm-mhc-large"):  # the guide's sizes, row length and learning rate
        assert (plan.sequence_length, plan.learning_rate, plan.effective_batch) == (8192, 1e-4, 32)


@pytest.mark.parametrize(
    "text, size", [("24GB", 24 * GIB), ("24", 24 * GIB), ("1.5GiB", 1.5 * GIB), ("800MB", 800 * 2**20)]
)
def test_memory_sizes_are_parsed_with_and_without_units(text, size):
    assert parse_memory(text, "--memory") == size


@pytest.mark.slow
def test_two_cpu_processes_train(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 400)
    command = [sys.executable, str(ROOT / "training" / "launch.py"), "--model", "hrm-lm-shakespeare-cpu", "--cpu"]
    command += ["--processes", "2", "--train_data", str(text), "--output_dir", str(tmp_path / "run")]
    command += ["--max_steps", "2", "--logging_steps", "1", "--eval_strategy", "no", "--prompt", ""]
    result = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr.decode()[-3000:]
    plan = json.loads((tmp_path / "run" / "launch_plan.json").read_text())
    assert plan["effective_batch"] == 16 and plan["command_line"] in result.stdout.decode()
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["steps"] == 2 and results["tokens"] == 2 * 16 * 128  # tokens of both processes
