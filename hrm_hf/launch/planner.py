"""Plan the training of a language model on the devices of one machine, and start it.

    plan = plan_run(options, flags)     batch, accumulation, learning rate, precision and command line
    start(plan)                         replaces this process with that command

The memory model (`memory.py`) sets the number of sequences per device. The recipe sets the number of sequences per
optimizer step, regardless of the number of GPUs. With `batch_table="guide"`, both come from the original launcher's
table of batches by number of GPUs.

For several machines see accelerate_configs/multi_node.yaml.
"""

import json
import math
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.generic import strtobool

from ..hub.kinds import LANGUAGE_MODEL, load_config
from ..io.files import load_yaml
from ..io.usage import UsageError, validate_extra
from ..registry import ARCHITECTURES
from ..resources import resource, typed_path
from ..text.arguments import DEFAULT_BLOCK_SIZE, LmDataArguments, LmTrainingArguments
from ..text.causal_lm import BYTE, causal_lm_config, load_tokenizer
from ..trainer.adapters import TuningArguments
from ..trainer.guide_names import HRM_LM, MODELS
from ..trainer.recipes import (
    RECIPES,
    ModelArguments,
    RecipeParser,
    build_config,
    checked_overrides,
    keep_overrides,
    load_recipe,
)
from .memory import GIB, ModelShape, largest_batch, model_shape, training_memory, usable_memory
from .options import LaunchOptions


RUN_CLM = (ModelArguments, LmDataArguments, LmTrainingArguments, TuningArguments)  # the options of run_clm.py
PLAN_FILE = "launch_plan.json"
BF16_CAPABILITY = (8, 0)  # Ampere, the first GPUs with bfloat16 arithmetic
CHECKPOINTING_FROM = 99_000_000  # at this many weights or more, checkpoint activations (hrm-lm-100m: 99,976,706)
REFERENCE_BATCH = 16  # sequences per optimizer step if there is no recipe
# Sequences per GPU in the original launcher, by number of GPUs.
GUIDE_BATCHES = {"hrm-lm-50m": {1: 8, 2: 6, 4: 4, 8: 3}, "hrm-lm-100m": {1: 4, 2: 3, 4: 2, 8: 1}}


@dataclass(frozen=True)
class Device:
    """A GPU, or one process's share of a CPU. `memory` is in bytes. On a CPU, `capability` is (0, 0)."""

    name: str
    memory: int
    capability: tuple[int, int]

    @property
    def kind(self) -> str:
        return "cuda" if self.capability > (0, 0) else "cpu"


ASSUMED_GPU = Device("assumed GPU", 24 * GIB, (8, 0))  # for --dry_run on a machine without a GPU


@dataclass(frozen=True)
class LaunchPlan:
    """Plan of a run. Memory is in bytes per device, batches are in sequences."""

    model: str
    parameters: int | None
    devices: list[Device]
    hypothetical: bool
    sequence_length: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    effective_batch: int
    base_learning_rate: float
    reference_batch: int
    learning_rate: float
    bf16: bool
    activation_checkpointing: bool
    memory: dict[str, int]
    usable_memory: int
    output_dir: str
    port: int
    command: list[str]

    @property
    def fits(self) -> bool:
        """Whether the estimated memory of a step fits; True for models whose memory cannot be estimated."""
        return sum(self.memory.values()) <= self.usable_memory

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dictionary for JSON."""
        return {**asdict(self), "fits": self.fits, "command_line": shlex.join(self.command)}


def plan_run(options: LaunchOptions, flags: Sequence[str]) -> LaunchPlan:
    """Plan a run on this machine or, with `dry_run`, on hypothetical GPUs.

    Raises:
        ImportError: the strategy needs DeepSpeed, which is not installed.
        UsageError: a model or flag is unknown.
        ValueError: the machine has fewer GPUs than requested, or the model does not fit.
    """
    run_values(options.model, flags)  # report usage errors before missing packages or GPUs
    if options.strategy.startswith("deepspeed") and not options.dry_run:
        what = f"--strategy {options.strategy} needs deepspeed"
        validate_extra("deepspeed", what, "deepspeed", instead="use fsdp2")
    if options.cpu:
        processes = options.processes or 1
        share = Device("CPU", psutil.virtual_memory().available // processes, (0, 0))
        return plan_launch(options, flags, [share] * processes)
    found, wanted = cuda_devices(), options.gpus
    if options.dry_run:
        like = found[0] if found else ASSUMED_GPU
        if options.memory:
            found, like = [], Device(ASSUMED_GPU.name, options.memory, like.capability)
        wanted = wanted or len(found) or 1
        return plan_launch(options, flags, [*found, *[like] * wanted][:wanted], hypothetical=len(found) < wanted)
    if len(found) < (wanted or 1):
        raise ValueError(
            f"gpus={wanted or 1}: found {len(found)}; use fewer GPUs, --cpu to train on the CPU, or --dry_run to plan "
            "for another machine"
        )
    return plan_launch(options, flags, found[:wanted])


def start(plan: LaunchPlan) -> None:
    """Write the plan to the run's folder, and replace this process with the command."""
    folder = Path(plan.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PLAN_FILE).write_text(json.dumps(plan.to_dict(), indent=1))
    # Put this environment's programs first in PATH, because the environment may not be activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    sys.stdout.flush()
    os.execvpe(plan.command[0], plan.command, {**os.environ, "PATH": path})


def cuda_devices() -> list[Device]:
    """List the GPUs visible to this process."""
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [Device(each.name, each.total_memory, (each.major, each.minor)) for each in found]


def free_port() -> int:
    """Return a free TCP port on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_values(model: str | None, flags: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of run_clm.py set by the model's recipe, and those set by the flags.

    `model` names a recipe (hrm-lm-50m is training/recipes/hrm_lm_50m.yaml), a preset of one of our configs, or a model
    type of transformers. The flag --recipe replaces it.

    Raises:
        UsageError: the model or a flag is unknown, or model and recipe are both given or both missing.
        ValueError: run_clm.py would reject the recipe.
    """
    parser = RecipeParser(RUN_CLM)
    given = parser.given(flags)
    if model is not None and "recipe" in given:
        raise UsageError(f"recipe={given['recipe']}: cannot be combined with --model {model}; omit one", "--recipe")
    if model is None and "recipe" not in given:
        raise UsageError(f"model=None: choose one of {', '.join(known_models())}, or use --recipe FILE", "--model")
    path = Path(given["recipe"]) if model is None else RECIPES / f"{model.replace('-', '_')}.yaml"
    if model is None or path.exists():
        return {**load_recipe(path, parser.known), "recipe": str(path)}, given
    if model in (presets := _presets()):
        return dict(zip(("model_type", "preset"), presets[model])), given
    if model in CONFIG_MAPPING:
        return {"model_type": model}, given
    if model in MODELS:
        raise UsageError(f"model={model!r}: use {MODELS[model]}; see docs/coming_from/{HRM_LM.page}.md", "--model")
    raise UsageError(f"model={model!r}: unknown; choose one of {', '.join(known_models())}", "--model")


def known_models() -> list[str]:
    """List the valid names for --model: presets of our language models, gpt2, llama, recipes of run_clm.py."""
    known = RecipeParser(RUN_CLM).known
    recipes = {path.stem.replace("_", "-"): load_yaml(path) for path in RECIPES.glob("*.yaml")}
    ours = [name for name, recipe in recipes.items() if "model_type" in recipe and set(recipe) <= known]
    return sorted({*_presets(), "gpt2", "llama", *ours})


def config_of(recipe: dict[str, Any], given: dict[str, Any] | None = None) -> PreTrainedConfig:
    """Return the config that run_clm.py would build from the results of `run_values`.

    A tokenizer on the Hub is not downloaded, so its vocabulary size is not applied.
    """
    values = recipe | (given or {})
    arguments = ModelArguments(**{each.name: values.get(each.name) for each in fields(ModelArguments)})
    keep_overrides([arguments], recipe)
    if not arguments.model_name_or_path:
        name = values.get("tokenizer_name")
        if name == BYTE or (name and Path(name).is_dir()):
            return causal_lm_config(arguments, load_tokenizer(name), block_size_of(values))
        return build_config(arguments)
    config = load_config(arguments.model_name_or_path, LANGUAGE_MODEL)
    for name, value in checked_overrides(type(config), arguments.config_overrides).items():
        setattr(config, name, value)
    return config


def guide_batch(model: str, processes: int) -> int:
    """Return the guide's sequences per GPU for this number of processes, or for the next lower one that it lists."""
    if model not in GUIDE_BATCHES:
        raise ValueError(f"model={model!r}: not in the guide's table ({', '.join(GUIDE_BATCHES)}); omit --batch_table")
    return GUIDE_BATCHES[model][max(count for count in GUIDE_BATCHES[model] if count <= processes)]


def share_batch(target: int, processes: int, most: int) -> tuple[int, int]:
    """Split `target` sequences over processes; return sequences per device and accumulation steps.

    Uses the fewest accumulation steps that give equal batches of at most `most` sequences. If `target` is not a
    multiple of `processes`, it is rounded up to the next multiple.
    """
    share = math.ceil(target / processes)
    accumulation = next(steps for steps in range(1, share + 1) if share % steps == 0 and share // steps <= most)
    return share // accumulation, accumulation


def plan_launch(
    options: LaunchOptions, flags: Sequence[str], devices: list[Device], hypothetical: bool = False
) -> LaunchPlan:
    """Plan a launch on `devices`. Options set by `flags` are kept, and the plan adapts to them.

    Raises:
        ValueError: the model or an option is unknown, or the model does not fit; the message suggests fixes.
    """
    processes, (recipe, given) = len(devices), run_values(options.model, flags)
    model = options.model or Path(recipe["recipe"]).stem.replace("_", "-")
    values, reference = recipe | given, _recipe_batch(recipe)
    length = block_size_of(values)
    by_memory = "per_device_train_batch_size" not in given and options.batch_table == "memory"
    shape = _shape(recipe, given, needed=by_memory)
    usable = usable_memory(min(device.memory for device in devices), devices[0].kind)
    step = step_options(recipe, given, shape, devices, options.strategy)
    most = largest_batch(shape, length, usable, **step) if by_memory else 0
    if by_memory and most == 0:
        raise ValueError(_does_not_fit(model, shape, length, usable, step))
    batch, accumulation = _batch(options, given, reference, processes, most)
    effective = batch * processes * accumulation
    base = rate = float(values.get("learning_rate", LmTrainingArguments.learning_rate))
    if "learning_rate" not in given:  # like the original launcher: proportional to sqrt(batch size)
        rate *= math.sqrt(max(1.0, effective / reference))
    decided = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": f"{rate:.6g}",
        "bf16": str(step["bf16"]).lower(),
        "activation_checkpointing": str(step["checkpointing"]).lower(),
        "output_dir": values.get("output_dir", f"runs/{model.replace('-', '_')}"),
    }
    if options.cpu or "use_cpu" in values:
        decided["use_cpu"] = str(options.cpu).lower()
    if "global_batch_size" in values:  # replaces the recipe's value, which would override the batch size per device
        decided["global_batch_size"] = effective
    port = free_port() if options.port is None else options.port
    return LaunchPlan(
        model=model,
        parameters=shape.parameters if shape else None,
        devices=devices,
        hypothetical=hypothetical,
        sequence_length=length,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        effective_batch=effective,
        base_learning_rate=base,
        reference_batch=reference,
        learning_rate=rate,
        bf16=step["bf16"],
        activation_checkpointing=step["checkpointing"],
        memory=training_memory(shape, batch, length, **step) if shape else {},
        usable_memory=usable,
        output_dir=str(decided["output_dir"]),
        port=port,
        command=[
            *_launcher(options, processes, port),
            typed_path(resource("training/run_clm.py")),
            *_model_flags(recipe, given),
            *(f for name, value in decided.items() if name not in given for f in (f"--{name}", str(value))),
            *flags,
        ],
    )


def step_options(recipe, given, shape: ModelShape | None, devices: Sequence[Device], strategy="ddp") -> dict[str, Any]:
    """Return the keyword arguments of `training_memory` for a training step on `devices`."""
    capable = min(device.capability for device in devices) >= BF16_CAPABILITY
    step = {"bf16": given.get("bf16", capable), "processes": len(devices), "strategy": strategy}
    usable = usable_memory(min(device.memory for device in devices), devices[0].kind)
    length = block_size_of(recipe | given)
    return step | {"checkpointing": _checkpointing(recipe, given, shape, length, usable, step)}


def block_size_of(values: dict[str, Any]) -> int:
    """Return the number of tokens per row from the options of run_clm.py, or the default."""
    return int(values.get("block_size") or DEFAULT_BLOCK_SIZE)


def _batch(options: LaunchOptions, given: dict[str, Any], base: int, processes: int, most: int) -> tuple[int, int]:
    """Return sequences per device (at most `most`, unless set by a flag or --batch_table) and accumulation steps."""
    batch, target = given.get("per_device_train_batch_size"), given.get("global_batch_size", base)
    if options.batch_table == "guide":
        listed = guide_batch(options.model, processes)
        batch, target = batch or listed, given.get("global_batch_size", listed * processes)
    if batch is None:
        batch, accumulation = share_batch(target, processes, most)
    else:
        accumulation = max(1, math.ceil(target / (batch * processes)))
    return batch, given.get("gradient_accumulation_steps", accumulation)


def _launcher(options: LaunchOptions, processes: int, port: int) -> list[str]:
    """Return the beginning of the command: the launcher and its options.

    CPU runs use torchrun, because `accelerate launch --cpu --num_processes 2` starts processes that silently fail to
    form a group and overwrite each other's output (accelerate 1.15).
    """
    if options.cpu:
        return ["torchrun", "--nproc_per_node", str(processes), "--master_port", str(port)]
    ddp = "multi_gpu" if processes > 1 else "single_gpu"
    config = ddp if options.strategy == "ddp" else options.strategy
    file = typed_path(resource(f"accelerate_configs/{config}.yaml"))
    ports = ["--main_process_port", str(port)] if processes > 1 else []
    return ["accelerate", "launch", "--config_file", file, "--num_processes", str(processes), *ports]


def _model_flags(recipe: dict[str, Any], given: dict[str, Any]) -> list[str]:
    if "recipe" in recipe:
        return [] if "recipe" in given else ["--recipe", typed_path(recipe["recipe"])]
    return [part for name, value in recipe.items() if name not in given for part in (f"--{name}", value)]


def _checkpointing(recipe, given, shape: ModelShape | None, length: int, usable: int, step: dict[str, Any]) -> bool:
    """Decide whether to checkpoint activations: by the options or, if unset, by the model's size and the memory.

    TrainingArguments accepts the old name as an alias; a flag with either name overrides the recipe.
    """
    names = ("activation_checkpointing", "gradient_checkpointing")
    chosen = [values[name] for values in (given, recipe) for name in names if name in values]
    if chosen:
        return bool(strtobool(str(chosen[0])))
    if shape is None:
        return False
    return shape.parameters >= CHECKPOINTING_FROM or largest_batch(shape, length, usable, **step) == 0


def _shape(recipe: dict[str, Any], given: dict[str, Any], needed: bool) -> ModelShape | None:
    """Return the model's shape. If its memory cannot be estimated, return None, or raise ValueError if `needed`."""
    try:
        return model_shape(config_of(recipe, given))
    except ValueError:
        if needed:
            raise
        return None


def _does_not_fit(model: str, shape: ModelShape, length: int, usable: int, options: dict) -> str:
    terms = training_memory(shape, 1, length, **options)
    largest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in terms.items() if size >= 0.05 * GIB)
    shard = "" if options["strategy"] != "ddp" or options["processes"] == 1 else ", --strategy fsdp2"
    return (
        f"{model} does not fit: one sequence of {length} tokens needs {sum(terms.values()) / GIB:.1f} GiB of the "
        f"{usable / GIB:.1f} GiB available per device ({largest} GiB); try a shorter --block_size"
        f"{'' if options['checkpointing'] else ', --activation_checkpointing true'}{shard} or devices with more memory"
    )


def _recipe_batch(recipe: dict[str, Any]) -> int:
    """Return the sequences per optimizer step for which the recipe's learning rate was chosen (on one process)."""
    if "global_batch_size" in recipe:
        return int(recipe["global_batch_size"])
    if "per_device_train_batch_size" not in recipe:
        return REFERENCE_BATCH
    return int(recipe["per_device_train_batch_size"]) * int(recipe.get("gradient_accumulation_steps", 1))


def _presets() -> dict[str, tuple[str, str]]:
    """Map names for --model (hrm-lm-50m, rlm-mhc-small) to the model type and preset for run_clm.py."""
    named = {}
    for row in ARCHITECTURES.values():
        if row.memory_shape:
            prefix = row.model_type.replace("_", "-")
            for preset in row.config.presets():
                named[preset if preset.startswith(prefix) else f"{prefix}-{preset}"] = (row.model_type, preset)
    return named
