"""Recommend models and batch sizes for a given amount of memory.

    advice = recommend(RecommendOptions(memory="4GB", task="puzzle"))
    advice.rows       every preset: its memory, and the largest batch that fits
    advice.commands   the command lines to run

Puzzle and map models were measured by `benchmarks/puzzles/presets.py` on one device, uncompiled, in float32; larger
batches are extrapolated linearly. For puzzles, the advice also includes the guide's own recommendation. For language
models it uses the row length, precision and checkpointing that `hrm-hf launch` would plan for a GPU with bfloat16.
"""

import json
import shlex
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..registry import architecture_of
from ..resources import ROOT, resource, typed_path
from .memory import GIB, in_words, largest_batch, model_shape, training_memory, usable_memory
from .options import RecommendOptions
from .planner import ASSUMED_GPU, Device, block_size_of, config_of, known_models, run_values, step_options


RESULTS = ROOT / "benchmarks" / "results" / "puzzle_presets.json"
LARGEST_BATCH = {"puzzle": 768, "cosmo": 256, "lm": 64}  # the original projects' batch sizes; larger ones are untested
WORTH_TRAINING = {"puzzle": 32, "cosmo": 8, "lm": 1}  # smallest useful batch; 1 for lm, which accumulates gradients
RATES = "lr=1e-4 puzzle_emb_lr=1e-4 weight_decay=1.0 puzzle_emb_weight_decay=1.0"
COSMO_RECIPES = {"cosmo-64": "cosmo_lognormal_64_cpu", "cosmo-256": "cosmo_single_gpu"}


class GuideRow(NamedTuple):
    """Row of the guide's memory table. `epochs` is (total, between evaluations).

    The guide does not specify the number of heads for hidden size 64; we use two heads of width 32.
    """

    batch: int
    config: dict[str, Any]
    title: str
    epochs: tuple[int, int]


_SMALL = {"H_layers": 1, "L_layers": 1, "num_attention_heads": 1, "expansion": 2}
_MEDIUM = {"H_layers": 2, "L_layers": 2, "num_attention_heads": 2, "expansion": 4}
GUIDE_ROWS = {
    "hrm-16": GuideRow(2, {"hidden_size": 16, "puzzle_emb_ndim": 16, **_SMALL}, "hidden 16, 1+1 layers", (1000, 200)),
    "hrm-32": GuideRow(4, {"hidden_size": 32, "puzzle_emb_ndim": 32, **_SMALL}, "hidden 32, 1+1 layers", (500, 100)),
    "hrm-64": GuideRow(8, {"hidden_size": 64, "puzzle_emb_ndim": 64, **_MEDIUM}, "hidden 64, 2+2 layers", (500, 100)),
    "hrm-512": GuideRow(768, {}, "the defaults: hidden 512, 4+4 layers", (20000, 2000)),
}


@dataclass(frozen=True)
class Row:
    """Memory of a preset: fixed bytes, bytes per example, largest measured batch, and largest batch that fits."""

    name: str
    title: str
    fixed: int
    per_example: int
    measured_batch: int
    largest_batch: int

    def size(self, batch: int) -> int:
        """Return the number of bytes that a step with this batch needs."""
        return self.fixed + batch * self.per_example


@dataclass(frozen=True)
class Advice:
    """Recommended runs for a task and a memory size.

    `guide` is set only for puzzles. `best` is the largest model that fits with a batch of `worth` examples, or the
    smallest model that fits at all.
    """

    task: str
    memory: int
    usable: int
    measured_on: str
    rows: list[Row]
    guide: Row | None
    guide_batch: int | None
    best: Row
    commands: dict[str, str]
    tried: int  # the largest batch size that was tested
    worth: int  # the smallest useful batch


def recommend(options: RecommendOptions) -> Advice:
    """Recommend settings for a device, or raise ValueError if no model fits into its memory."""
    memory, task = options.size, options.task
    device = Device("CPU", memory, (0, 0)) if options.cpu else Device("GPU", memory, ASSUMED_GPU.capability)
    usable = usable_memory(memory, device.kind)
    rows, source = _language_models(device) if task == "lm" else _measured(task, usable)
    fitting = [row for row in rows if row.largest_batch]
    if not fitting:
        least = min(row.size(1) for row in rows)
        raise ValueError(
            f"memory={options.memory!r}: a step can use {in_words(usable)} ({in_words(memory - usable)} is reserved "
            f"for context, libraries, fragmentation), but the smallest model needs {in_words(least)}; use more memory"
        )
    best = [row for row in fitting if row.largest_batch >= WORTH_TRAINING[task]][-1:] or fitting[:1]
    commands, guide, guide_batch = {}, None, None
    if task == "puzzle":
        guide = next(row for row in rows if row.name == guide_row(memory))
        guide_batch = GUIDE_ROWS[guide.name].batch
        if guide.size(guide_batch) <= usable:
            commands["guide"] = command(task, guide.name, guide_batch)
    cpu = " --cpu" if task == "lm" and options.cpu else ""
    commands["what fits"] = command(task, best[0].name, best[0].largest_batch) + cpu
    caps = LARGEST_BATCH[task], WORTH_TRAINING[task]
    return Advice(task, memory, usable, source, rows, guide, guide_batch, best[0], commands, *caps)


def guide_row(memory: int) -> str:
    """Return the name of the hardware guide's row for [0, 2), [2, 5), [5, 10] or above 10 GiB of memory."""
    size = memory / GIB
    if size < 5:
        return "hrm-16" if size < 2 else "hrm-32"
    return "hrm-64" if size <= 10 else "hrm-512"


def command(task: str, name: str, batch: int) -> str:
    """Return the command line that trains a preset with this batch."""
    if task == "lm":
        return f"{_script('launch')} --model {name}"
    if task == "cosmo":
        recipe = shlex.quote(typed_path(resource(f"training/recipes/{COSMO_RECIPES[name]}.yaml")))
        return f"{_script('run_cosmo')} --recipe {recipe} --preset {name} --per_device_train_batch_size {batch}"
    row = GUIDE_ROWS[name]
    data = "sudoku-extreme-small" if row.config else "sudoku-extreme-1k-aug-1000"
    names = {"num_attention_heads": "num_heads"}
    arch = [f"arch.{names.get(key, key)}={value}" for key, value in row.config.items() if key != "puzzle_emb_ndim"]
    schedule = "epochs={} eval_interval={}".format(*row.epochs)
    words = [f"data_path=data/{data}", schedule, f"global_batch_size={batch}", RATES, *arch]
    return " ".join([_script("pretrain"), *words])


def _script(name: str) -> str:
    return f"python {shlex.quote(typed_path(resource(f'training/{name}.py')))}"


def _measured(task: str, usable: int) -> tuple[list[Row], str]:
    measured, rows = json.loads(RESULTS.read_text()), []
    for name, sizes in measured[task].items():
        fixed, each = sizes["fixed_bytes"], sizes["bytes_per_example"]
        title = GUIDE_ROWS[name].title if task == "puzzle" else name
        fits = _power_of_two((usable - fixed) // each, LARGEST_BATCH[task])
        rows.append(Row(name, title, fixed, each, max(map(int, sizes["points"])), fits))
    on = f"peak of real steps on {measured['device']}, {measured['dtype']}, torch {measured['versions']['torch']}"
    return rows, on


def _language_models(device: Device) -> tuple[list[Row], str]:
    """Return memory estimates for our language models, smallest first, and a description of their source."""
    rows, usable = [], usable_memory(device.memory, device.kind)
    for name in known_models():
        recipe, given = run_values(name)
        config = config_of(recipe)
        if architecture_of(config) is None or name.endswith("-cpu"):  # skip other libraries' models and CPU demos
            continue
        shape, length = model_shape(config), block_size_of(recipe)
        step = step_options(recipe, given, shape, [device])
        one, two = (sum(training_memory(shape, batch, length, **step).values()) for batch in (1, 2))
        fits = _power_of_two(largest_batch(shape, length, usable, **step), LARGEST_BATCH["lm"])
        title = f"{shape.parameters:,} parameters, {length:,} tokens, {'bf16' if step['bf16'] else 'float32'}"
        title += ", checkpointing" if step["checkpointing"] else ""
        rows.append((shape.parameters, Row(name, title, 2 * one - two, two - one, 0, fits)))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])], "bytes saved per layer, measured (memory.py)"


def _power_of_two(most: int, limit: int) -> int:
    """Return `limit` if `most` >= `limit`, else the largest power of two <= `most`, or 0 if `most` < 1."""
    if most >= limit:
        return limit
    return 2 ** (most.bit_length() - 1) if most > 0 else 0
