"""Plans the training of a language model on the devices of one machine, and the command line that starts it.

    values = run_values("hrm-lm-50m", flags)              what the recipe and the flags say
    plan = plan_launch(options, flags, devices)           batch, accumulation, learning rate, precision, command

The memory model (`memory.py`) chooses how many sequences a device takes at once; how many an optimizer step
takes in all is a decision of the recipe, which no number of GPUs changes. The original launcher's table of batches by
number of GPUs is `batch_table="guide"`.

Left out: several machines (accelerate_configs/multi_node.yaml), and what run_clm.py says of its flags (`run.py`).
"""

import json
import math
import shlex
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.generic import strtobool

from ..hub.kinds import LANGUAGE_MODEL, load_config
from ..io.files import load_yaml
from ..io.usage import UsageError
from ..registry import ARCHITECTURES
from ..resources import ROOT, resource, typed_path
from ..text.arguments import LmDataArguments, LmTrainingArguments
from ..trainer.recipes import ModelArguments, build_config
from .memory import GIB, ModelShape, largest_batch, model_shape, training_memory, usable_memory
from .options import LaunchOptions


RECIPES = ROOT / "training" / "recipes"
BF16_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16 arithmetic
CHECKPOINTING_FROM = 99_000_000  # the guide checkpoints its 100m model; ours has 99,976,706 parameters
REFERENCE_BATCH = 16  # sequences an optimizer step takes if nothing says otherwise
# The original launcher's sequences per GPU, by number of GPUs, learning rate and warm-up.
GUIDE_BATCHES = {"hrm-lm-50m": {1: 8, 2: 6, 4: 4, 8: 3}, "hrm-lm-100m": {1: 4, 2: 3, 4: 2, 8: 1}}
ASSUMED_GPU = ("assumed GPU", 24 * GIB, (8, 0))  # for --dry_run where there is none


@dataclass(frozen=True)
class Device:
    """A GPU, or one process's share of a CPU. `memory` in bytes; `capability` is CUDA's, (0, 0) for a CPU."""

    name: str
    memory: int
    capability: tuple[int, int]

    @property
    def kind(self) -> str:
        return "cuda" if self.capability > (0, 0) else "cpu"


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that was decided, and why it fits. Memory in bytes per device; batches in sequences."""

    model: str
    parameters: int | None
    devices: list[Device]
    hypothetical: bool
    strategy: str
    sequence_length: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    effective_batch: int
    base_learning_rate: float
    reference_batch: int
    learning_rate: float
    lr_scaling: str
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


def cuda_devices() -> list[Device]:
    """The GPUs that this process may use."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(Device(properties.name, properties.total_memory, (properties.major, properties.minor)))
    return found


def cpu_devices(processes: int) -> list[Device]:
    """`processes` equal shares of the memory that is free."""
    import psutil

    return [Device("CPU", psutil.virtual_memory().available // processes, (0, 0))] * processes


def assumed_devices(found: list[Device], count: int | None, memory: int | None, capability=None) -> list[Device]:
    """GPUs to plan for: those found, changed in number, memory (bytes) or capability."""
    like = found[0] if found else Device(*ASSUMED_GPU)
    if memory is not None or capability is not None:
        like = Device(ASSUMED_GPU[0], memory or like.memory, capability or like.capability)
        return [like] * (count or len(found) or 1)
    count = count or len(found) or 1
    return found[:count] + [like] * (count - len(found))


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def given_flags(flags: Sequence[str]) -> dict[str, str]:
    """Names and values of `--name value`, `--name=value` and bare `--name` ("true"); several values with spaces."""
    given: dict[str, str] = {}
    name = None
    for part in flags:
        if part.startswith("--"):
            name, sign, value = part[2:].partition("=")
            name = name.replace("-", "_")
            given[name] = value if sign else ""
        elif name is None:
            raise ValueError(f"{part!r} stands before any flag; flags of run_clm.py are of the form --name value")
        else:
            given[name] = f"{given[name]} {part}".strip()
    return {name: value or "true" for name, value in given.items()}


def run_values(model: str, flags: Sequence[str]) -> dict[str, Any]:
    """Options of run_clm.py as recipe and flags give them, the model's own among them.

    A model is a recipe (hrm-lm-50m is training/recipes/hrm_lm_50m.yaml), a preset of one of our configs, or a model
    type of transformers.

    Raises:
        UsageError: no such model.
        ValueError: a recipe that is no mapping.
    """
    given = given_flags(flags)
    values: dict[str, Any] = {}
    recipe = given.get("recipe") or RECIPES / f"{model.replace('-', '_')}.yaml"
    if "recipe" in given or recipe.exists():
        values = load_yaml(recipe)
        if not isinstance(values, dict):
            raise ValueError(f"{recipe} must be a mapping of option: value, it is a {type(values).__name__}")
        values["recipe"] = str(recipe)
    elif model in _presets():
        values = dict(zip(("model_type", "preset"), _presets()[model]))
    elif model in CONFIG_MAPPING:
        values = {"model_type": model}
    else:
        raise UsageError(f"model={model!r}: unknown; choose one of {', '.join(known_models())}", "--model")
    return values | given


def known_models() -> list[str]:
    """Names for `--model`: presets of our language models, gpt2, llama, and recipes of run_clm.py."""
    from_recipes = [path.stem.replace("_", "-") for path in RECIPES.glob("*.yaml") if _is_lm_recipe(path)]
    return sorted({*_presets(), "gpt2", "llama", *from_recipes})


def config_of(values: dict[str, Any]) -> PreTrainedConfig:
    """The config that run_clm.py would build, but for the size of the vocabulary, which its tokenizer decides."""
    if values.get("model_name_or_path"):
        return load_config(str(values["model_name_or_path"]), LANGUAGE_MODEL)
    overrides = values.get("config_overrides")
    if isinstance(overrides, dict):
        overrides = json.dumps(overrides)
    return build_config(ModelArguments(None, values.get("model_type"), values.get("preset"), overrides))


def scaled_learning_rate(base: float, effective: int, reference: int, scaling: str) -> float:
    """`base` times (effective / reference)^(1/2) for "sqrt", ^1 for "linear"; never scaled down.

    The square root is the original launcher's rule, with its reference of 16 sequences.
    """
    ratio = max(1.0, effective / reference)
    return base * {"sqrt": math.sqrt(ratio), "linear": ratio, "none": 1.0}[scaling]


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
    model, processes = options.model, len(devices)
    values, given = run_values(model, flags), given_flags(flags)
    reference = _recipe_batch(values)
    length = int(values.get("block_size", _default(LmDataArguments, "block_size")))
    by_memory = "per_device_train_batch_size" not in given and options.batch_table == "memory"
    shape = _shape(values, needed=by_memory)
    usable = usable_memory(min(device.memory for device in devices), devices[0].kind)
    capable = min(device.capability for device in devices) >= BF16_CAPABILITY
    bf16 = bool(strtobool(given["bf16"])) if "bf16" in given else capable
    step = {"bf16": bf16, "processes": processes, "strategy": options.strategy}
    step["checkpointing"] = _checkpointing(values, given, shape, length, usable, step)

    most = largest_batch(shape, length, usable, **step) if by_memory else 0
    if by_memory and most == 0:
        raise ValueError(_does_not_fit(model, shape, length, usable, step))
    batch, accumulation = _batch(options, given, reference, processes, most)
    effective = batch * processes * accumulation
    base = float(values.get("learning_rate", _default(LmTrainingArguments, "learning_rate")))
    scaling = "none" if "learning_rate" in given else options.lr_scaling
    rate = scaled_learning_rate(base, effective, reference, scaling)
    decided = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": f"{rate:.6g}",
        "bf16": str(bf16).lower(),
        "activation_checkpointing": str(step["checkpointing"]).lower(),
        "output_dir": values.get("output_dir", f"runs/{model.replace('-', '_')}"),
    }
    cpu = devices[0].kind == "cpu"
    if cpu or "use_cpu" in values:
        decided["use_cpu"] = str(cpu).lower()
    if "global_batch_size" in values:  # a recipe's would override the batch per device
        decided["global_batch_size"] = effective
    port = free_port() if options.port is None else options.port
    return LaunchPlan(
        model=model,
        parameters=shape.parameters if shape else None,
        devices=devices,
        hypothetical=hypothetical,
        strategy=options.strategy,
        sequence_length=length,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        effective_batch=effective,
        base_learning_rate=base,
        reference_batch=reference,
        learning_rate=rate,
        lr_scaling=scaling,
        bf16=bf16,
        activation_checkpointing=step["checkpointing"],
        memory=training_memory(shape, batch, length, **step) if shape else {},
        usable_memory=usable,
        output_dir=str(decided["output_dir"]),
        port=port,
        command=[
            *_launcher(options, processes, cpu, port),
            typed_path(resource("training/run_clm.py")),
            *_model_flags(values, given),
            *(f for name, value in decided.items() if name not in given for f in (f"--{name}", str(value))),
            *flags,
        ],
    )


def _batch(
    options: LaunchOptions, given: dict[str, str], reference: int, processes: int, most: int
) -> tuple[int, int]:
    """Sequences per device and accumulated steps; at most `most` sequences fit where the memory model decides."""
    by_guide = options.batch_table == "guide"
    target = options.effective_batch
    if target is None and by_guide:
        target = guide_batch(options.model, processes) * processes
    target = target or int(given.get("global_batch_size", reference))
    if "per_device_train_batch_size" in given or by_guide:
        own = given.get("per_device_train_batch_size")
        batch = int(own) if own else guide_batch(options.model, processes)
        accumulation = max(1, math.ceil(target / (batch * processes)))
    else:
        batch, accumulation = share_batch(target, processes, most)
    return batch, int(given.get("gradient_accumulation_steps", accumulation))


def _launcher(options: LaunchOptions, processes: int, cpu: bool, port: int) -> list[str]:
    """The launcher's part of the command.

    torchrun always starts CPU processes: `accelerate launch --cpu --num_processes 2` starts processes that form no
    group and overwrite each other's output, without an error (accelerate 1.15).
    """
    strategy = options.strategy
    if cpu or options.launcher == "torchrun":
        if strategy != "ddp":
            raise ValueError(f"strategy={strategy!r}: needs GPUs and accelerate; leave it out with --cpu or torchrun")
        return ["torchrun", "--nproc_per_node", str(processes), "--master_port", str(port)]
    config = strategy if strategy != "ddp" else "multi_gpu" if processes > 1 else "single_gpu"
    file = typed_path(resource(f"accelerate_configs/{config}.yaml"))
    ports = ["--main_process_port", str(port)] if processes > 1 else []
    return ["accelerate", "launch", "--config_file", file, "--num_processes", str(processes), *ports]


def _model_flags(values: dict[str, Any], given: dict[str, str]) -> list[str]:
    if "recipe" in values:
        return [] if "recipe" in given else ["--recipe", typed_path(values["recipe"])]
    own = [name for name in ("model_type", "preset") if name in values and name not in given]
    return [part for name in own for part in (f"--{name}", str(values[name]))]


def _checkpointing(values, given, shape: ModelShape | None, length: int, usable: int, step: dict[str, Any]) -> bool:
    """As the user or the recipe says; else from 100m parameters on, as in the guide, or if no sequence fits without.

    The old name is an alias of TrainingArguments; what the user says by it takes precedence over a recipe.
    """
    names = ("activation_checkpointing", "gradient_checkpointing")
    chosen = [v[name] for v in (given, values) for name in names if name in v]
    if chosen:
        return bool(strtobool(str(chosen[0])))
    if shape is None:
        return False
    return shape.parameters >= CHECKPOINTING_FROM or largest_batch(shape, length, usable, **step) == 0


def _shape(values: dict[str, Any], needed: bool) -> ModelShape | None:
    """None where the memory of the model is unknown and the batch does not depend on it."""
    try:
        return model_shape(config_of(values))
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


def _recipe_batch(values: dict[str, Any]) -> int:
    """Sequences of an optimizer step of the recipe as one process would run it, which its learning rate belongs to."""
    recipe = load_yaml(values["recipe"]) if "recipe" in values else {}
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


def _is_lm_recipe(path: Path) -> bool:
    """A recipe of run_clm.py, which is what we launch: it has no other script's options."""
    from ..trainer.adapters import TuningArguments

    parts = (ModelArguments, LmDataArguments, LmTrainingArguments, TuningArguments)
    options = {field.name for part in parts for field in fields(part)}
    recipe = load_yaml(path)
    return "model_type" in recipe and set(recipe) <= options


def _default(arguments: type, name: str) -> Any:
    return arguments.__dataclass_fields__[name].default
