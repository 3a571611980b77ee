"""A planned run of training/run_clm.py: from the options of a command to the process that it becomes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..io.usage import validate_extra
from .options import LaunchOptions


if TYPE_CHECKING:
    from .planner import LaunchPlan

PLAN_FILE = "launch_plan.json"


def plan_run(options: LaunchOptions, arguments: Sequence[str]) -> LaunchPlan:
    """Plan a run on this machine, or with `dry_run` on GPUs that may not be here.

    Args:
        options: of the launcher.
        arguments: flags of run_clm.py, which the plan leaves as they are.

    Raises:
        ImportError: DeepSpeed is to train, and it is not installed.
        UsageError: an unknown model, or flags that run_clm.py rejects.
        ValueError: fewer GPUs than asked for.
    """
    if options.strategy.startswith("deepspeed") and not options.dry_run:
        what = f"--strategy {options.strategy} needs deepspeed"
        validate_extra("deepspeed", what, "deepspeed", instead="use fsdp2")
    from .planner import plan_launch  # takes seconds

    devices, hypothetical = _devices(options)
    plan = plan_launch(options, arguments, devices, hypothetical)
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


def _devices(options: LaunchOptions):
    """The devices to plan for, and whether some of them are assumed."""
    from . import planner

    if options.cpu:
        return planner.cpu_devices(options.processes or 1), False
    found, gpus = planner.cuda_devices(), options.gpus
    if options.dry_run:
        devices = planner.assumed_devices(found, gpus, options.memory, options.capability)
        return devices, devices != found[: len(devices)]
    if len(found) < (gpus or 1):
        raise ValueError(
            f"gpus={gpus or 1}: {len(found)} found; use fewer, --cpu to train on the CPU, or --dry_run to plan for "
            "GPUs that are not here"
        )
    return found[:gpus], False
