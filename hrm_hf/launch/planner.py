"""Plans the training of a language model on the devices of one machine, and starts it.

    plan = plan_run(options, flags)     batch, accumulation, learning rate, precision and command line
    start(plan)                         becomes that command

The memory model (`memory.py`) chooses how many sequences a device takes at once. The recipe decides how many an
optimizer step takes in all, and the number of GPUs does not change that. `batch_table="guide"` uses the original
launcher's table of batches by number of GPUs instead.

Left out: several machines (accelerate_configs/multi_node.yaml).
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
from ..text.arguments import LmDataArguments, LmTrainingArguments
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
BF16_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16 arithmetic
CHECKPOINTING_FROM = 99_000_000  # the guide checkpoints its 100m model; ours has 99,976,706 parameters
REFERENCE_BATCH = 16  # sequences of an optimizer step without a recipe
# The original launcher's sequences per GPU, by number of GPUs.
GUIDE_BATCHES = {"hrm-lm-50m": {1: 8, 2: 6, 4: 4, 8: 3}, "hrm-lm-100m": {1: 4, 2: 3, 4: 2, 8: 1}}


@dataclass(frozen=True)
class Device:
    """A GPU, or one process's share of a CPU. `memory` in bytes; `capability` is CUDA's, (0, 0) for a CPU."""

    name: str
    memory: int
    capability: tuple[int, int]

    @property
    def kind(self) -> str:
        return "cuda" if self.capability > (0, 0) else "cpu"


ASSUMED_GPU = Device("assumed GPU", 24 * GIB, (8, 0))  # for --dry_run where there is none


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that was decided, and why it fits. Memory in bytes per device; batches in sequences."""

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
        """Whether the memory model says that the step fits (True where it knows nothing)."""
        return sum(self.memory.values()) <= self.usable_memory

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "fits": self.fits, "command_line": shlex.join(self.command)}


def plan_run(options: LaunchOptions, flags: Sequence[str]) -> LaunchPlan:
    """Plan a run on this machine, or with `dry_run` on GPUs that may not be here.

    Raises:
        ImportError: DeepSpeed is to train, and it is not installed.
        UsageError: an unknown model or flag.
        ValueError: fewer GPUs than asked for, or a model that does not fit.
    """
    run_values(options.model, flags)  # usage comes before what this machine lacks
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
            f"gpus={wanted or 1}: {len(found)} found; use fewer, --cpu to train on the CPU, or --dry_run to plan for "
            "GPUs that are not here"
        )
    return plan_launch(options, flags, found[:wanted])


def start(plan: LaunchPlan) -> None:
    """Writes the plan into the run's folder and becomes the command, so that signals and exit status are its own."""
    folder = Path(plan.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PLAN_FILE).write_text(json.dumps(plan.to_dict(), indent=1))
    # The programs of this environment first: the launcher may run without its environment being activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    sys.stdout.flush()
    os.execvpe(plan.command[0], plan.command, {**os.environ, "PATH": path})


def cuda_devices() -> list[Device]:
    """The GPUs that this process may use."""
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [Device(each.name, each.total_memory, (each.major, each.minor)) for each in found]


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_values(model: str | None, flags: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of run_clm.py: those that a model's recipe gives, and those that flags give.

    A model is a recipe (hrm-lm-50m is training/recipes/hrm_lm_50m.yaml), a preset of one of our configs, or a model
    type of transformers. The flag --recipe replaces it.

    Raises:
        UsageError: no such model, both or neither of model and recipe, or a flag that run_clm.py does not know.
        ValueError: a recipe that run_clm.py would reject.
    """
    parser = RecipeParser(RUN_CLM)
    given = parser.given(flags)
    if model is not None and "recipe" in given:
        raise UsageError(f"recipe={given['recipe']}: --model {model} names another; give only one", "--recipe")
    if model is None and "recipe" not in given:
        raise UsageError(f"no model; choose one of {', '.join(known_models())}, or give --recipe FILE", "--model")
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
    """Names for `--model`: presets of our language models, gpt2, llama, and recipes of run_clm.py."""
    known = RecipeParser(RUN_CLM).known
    recipes = {path.stem.replace("_", "-"): load_yaml(path) for path in RECIPES.glob("*.yaml")}
    ours = [name for name, recipe in recipes.items() if "model_type" in recipe and set(recipe) <= known]
    return sorted({*_presets(), "gpt2", "llama", *ours})


def config_of(recipe: dict[str, Any], given: dict[str, Any] | None = None) -> PreTrainedConfig:
    """The config that run_clm.py would build, but for the vocabulary of a tokenizer of the Hub, which is not fetched.

    Args:
        recipe, given: what `run_values` returns.
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
    """The original launcher's sequences per GPU; between the counts it lists, that of the next lower one."""
    if model not in GUIDE_BATCHES:
        raise ValueError(f"the guide has no batch table for {model!r}, only for {', '.join(GUIDE_BATCHES)}")
    return GUIDE_BATCHES[model][max(count for count in GUIDE_BATCHES[model] if count <= processes)]


def share_batch(target: int, processes: int, most: int) -> tuple[int, int]:
    """Sequences per device and accumulated steps whose product with `processes` is `target`, or just above it.

    The fewest accumulated steps whose batches are at most `most` and exactly equal; where `target` is no multiple of
    the processes, each takes one sequence more than its share.
    """
    share = math.ceil(target / processes)
    accumulation = next(steps for steps in range(1, share + 1) if share % steps == 0 and share // steps <= most)
    return share // accumulation, accumulation


def plan_launch(
    options: LaunchOptions, flags: Sequence[str], devices: list[Device], hypothetical: bool = False
) -> LaunchPlan:
    """Decide everything a launch needs. What `flags` give is taken as it is and planned around.

    Raises:
        ValueError: an unknown model or option, or a model that does not fit, with what would help.
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
    if "learning_rate" not in given:  # the original launcher's rule, whose reference is 16 sequences
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
    if "global_batch_size" in values:  # a recipe's would override the batch per device
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
    """Return precision, checkpointing and sharding of a step on these devices, as `training_memory` takes them."""
    capable = min(device.capability for device in devices) >= BF16_CAPABILITY
    step = {"bf16": given.get("bf16", capable), "processes": len(devices), "strategy": strategy}
    usable = usable_memory(min(device.memory for device in devices), devices[0].kind)
    length = block_size_of(recipe | given)
    return step | {"checkpointing": _checkpointing(recipe, given, shape, length, usable, step)}


def block_size_of(values: dict[str, Any]) -> int:
    """Return the tokens of a row, which options of run_clm.py give or leave to its default."""
    return int(values.get("block_size", LmDataArguments.block_size))


def _batch(
    options: LaunchOptions, given: dict[str, Any], reference: int, processes: int, most: int
) -> tuple[int, int]:
    """Sequences per device and accumulated steps; at most `most` sequences fit where the memory model decides."""
    batch, target = given.get("per_device_train_batch_size"), given.get("global_batch_size", reference)
    if options.batch_table == "guide":
        of_guide = guide_batch(options.model, processes)
        batch, target = batch or of_guide, given.get("global_batch_size", of_guide * processes)
    if batch is None:
        batch, accumulation = share_batch(target, processes, most)
    else:
        accumulation = max(1, math.ceil(target / (batch * processes)))
    return batch, given.get("gradient_accumulation_steps", accumulation)


def _launcher(options: LaunchOptions, processes: int, port: int) -> list[str]:
    """The launcher's part of the command.

    torchrun starts CPU processes: `accelerate launch --cpu --num_processes 2` starts processes that form no group and
    overwrite each other's output, without an error (accelerate 1.15).
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
    """As flags or the recipe say; else from 100m parameters on, as in the guide, or if no sequence fits without.

    The old name is an alias of TrainingArguments; a flag of either name takes precedence over a recipe.
    """
    names = ("activation_checkpointing", "gradient_checkpointing")
    chosen = [values[name] for values in (given, recipe) for name in names if name in values]
    if chosen:
        return bool(strtobool(str(chosen[0])))
    if shape is None:
        return False
    return shape.parameters >= CHECKPOINTING_FROM or largest_batch(shape, length, usable, **step) == 0


def _shape(recipe: dict[str, Any], given: dict[str, Any], needed: bool) -> ModelShape | None:
    """None where the memory of the model is unknown and the batch does not depend on it."""
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
        f"{usable / GIB:.1f} GiB that a device can give ({largest} GiB); try a shorter --block_size"
        f"{'' if options['checkpointing'] else ', --activation_checkpointing true'}{shard} or devices with more memory"
    )


def _recipe_batch(recipe: dict[str, Any]) -> int:
    """Sequences of an optimizer step of the recipe as one process would run it, which its learning rate belongs to."""
    if "global_batch_size" in recipe:
        return int(recipe["global_batch_size"])
    if "per_device_train_batch_size" not in recipe:
        return REFERENCE_BATCH
    return int(recipe["per_device_train_batch_size"]) * int(recipe.get("gradient_accumulation_steps", 1))


def _presets() -> dict[str, tuple[str, str]]:
    """Name for --model -> model type and preset, where run_clm.py trains ours: hrm-lm-50m, rlm-mhc-small."""
    named = {}
    for row in ARCHITECTURES.values():
        if row.memory_shape:
            prefix = row.model_type.replace("_", "-")
            for preset in row.config.presets():
                named[preset if preset.startswith(prefix) else f"{prefix}-{preset}"] = (row.model_type, preset)
    return named
