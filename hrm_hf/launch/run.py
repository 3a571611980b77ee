"""A planned run of training/run_clm.py: from the options of a command to the process that it becomes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..io.extras import validate_extra
from ..io.usage import UsageError, as_usage_errors, parse_memory
from ..io.words import counted
from .names import MODELS, is_unknown


if TYPE_CHECKING:
    from .planner import LaunchPlan

PLAN_FILE = "launch_plan.json"


def plan_run(
    model: str,
    arguments: Sequence[str],
    *,
    gpus: int | None = None,
    gpu_memory: str | None = None,
    gpu_capability: str | None = None,
    cpu: bool = False,
    processes: int | None = None,
    dry_run: bool = False,
    **options,
) -> LaunchPlan:
    """Plans a run on this machine, or with `dry_run` on GPUs that may not be here.

    Args:
        model: a recipe, a preset or a model type.
        arguments: flags of run_clm.py, which the plan leaves as they are.
        gpus: how many to use; all if None.
        gpu_memory, gpu_capability: of GPUs to plan for, as "24GB" and "7.5"; with `dry_run`.
        cpu, processes: train on the CPU, with so many processes.
        options: of `plan_launch`.

    Raises:
        ImportError: DeepSpeed is to train, and it is not installed.
        UsageError: options that do not fit together, an unknown model, or flags that run_clm.py refuses.
        ValueError: fewer GPUs than asked for.
    """
    if cpu and (gpus or gpu_memory or gpu_capability):
        raise UsageError("--gpus, --gpu_memory and --gpu_capability mean nothing with --cpu; --processes does")
    if processes and not cpu:
        raise UsageError("the number of CPU processes needs --cpu; of GPUs it is --gpus", "--processes")
    if (gpu_memory or gpu_capability) and not dry_run:
        raise UsageError("GPUs that are not here can be planned for, with --dry_run, but not used")
    strategy = options.get("strategy", "ddp")
    if strategy.startswith("deepspeed") and not dry_run:
        validate_extra("deepspeed", f"--strategy {strategy} needs deepspeed", "deepspeed", instead="take fsdp2")
    memory = as_usage_errors(parse_memory, gpu_memory) if gpu_memory else None
    capability = as_usage_errors(_capability, gpu_capability) if gpu_capability else None
    if is_unknown(model):
        raise UsageError(f"{model!r} is unknown; choose one of {', '.join(MODELS)}", "--model")
    from .planner import plan_launch  # seconds, which the checks above spare

    devices, hypothetical = _devices(cpu, processes, gpus, memory, capability, dry_run)
    plan = plan_launch(model, arguments, devices, hypothetical=hypothetical, **options)
    _validate_flags(plan)
    return plan


def _validate_flags(plan: LaunchPlan) -> None:
    """Raises UsageError for flags that run_clm.py would refuse, before a process of it is started.

    Whether the devices can do what is asked for is left to the script: here they may be assumed.
    """
    from ..text.arguments import LmDataArguments, LmTrainingArguments
    from ..trainer.adapters import TuningArguments
    from ..trainer.recipes import ModelArguments, parse_recipe

    script = next(i for i, word in enumerate(plan.command) if word.endswith("run_clm.py"))
    anywhere = ("--use_cpu", "true", "--bf16", "false", "--fp16", "false", "--tf32", "false")
    environment = dict(os.environ)
    try:
        arguments = (ModelArguments, LmDataArguments, LmTrainingArguments, TuningArguments)  # of run_clm.py
        parse_recipe(arguments, [*plan.command[script + 1 :], *anywhere])
    finally:  # TrainingArguments tell accelerate by variables what they are set to
        os.environ.clear()
        os.environ.update(environment)


def start(plan: LaunchPlan) -> None:
    """Writes the plan into the run's folder and becomes the command, so that signals and exit status are its own."""
    folder = Path(plan.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PLAN_FILE).write_text(json.dumps(plan.to_dict(), indent=1))
    # The programs of this environment first: the launcher may run without its environment being activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which(plan.command[0], path=path)
    if program is None:
        raise FileNotFoundError(f"{plan.command[0]} is not on PATH; it comes with torch or accelerate")
    sys.stdout.flush()
    os.execve(program, [program, *plan.command[1:]], {**os.environ, "PATH": path})


def _devices(
    cpu: bool,
    processes: int | None,
    gpus: int | None,
    memory: int | None,
    capability: tuple[int, int] | None,
    dry_run: bool,
):
    """The devices to plan for, and whether some of them are assumed."""
    from . import planner

    if cpu:
        return planner.cpu_devices(processes or 1), False
    found = planner.cuda_devices()
    if not dry_run:
        if len(found) < (gpus or 1):
            raise ValueError(
                f"{counted(gpus or 1, 'GPU')} needed, {len(found)} found; use fewer, --cpu to train on the CPU, or "
                "--dry_run to plan for GPUs that are not here"
            )
        return found[:gpus], False
    devices = planner.assumed_devices(found, gpus, memory, capability)
    return devices, devices != found[: len(devices)]


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and (minor or "0").isdigit()) or int(major) == 0:
        raise ValueError(f"--gpu_capability is {text!r}; expected a number like 8.0")
    return int(major), int(minor or 0)
