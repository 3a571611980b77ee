"""Command lines of the original HRM's `pretrain.py` and `evaluate.py`, said in our options.

    options, flags = parse_command(["data_path=data/sudoku-extreme-small", "epochs=500", "arch.hidden_size=32"])
    run = original_run(options, data_size(options["data_path"]), machine(os.environ))
    run.recipe        a mapping for run_puzzle.py
    run.notes         what was decided here and is not in the command line

The keys and defaults are those of the original's cfg_pretrain.yaml and arch/hrm_v1.yaml. An epoch is one puzzle of
every group; `epoch_steps` has the original's rule that turns epochs into steps.

Left out: Hydra itself (composition, sweeps, interpolation) and `eval_save_outputs`, whose counterpart is
`hrm-hf eval puzzles`.
"""

import difflib
import hashlib
import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub.errors import StrictDataclassError

from ..models.configuration_hrm_puzzle import HrmPuzzleConfig
from ..resources import ROOT, typed_path
from .dataset import INFO_FILE
from .npy_layout import META_FILE
from .original_config import LOSS_SUFFIX


SCRIPT = ROOT / "training" / "run_puzzle.py"
RECIPE_FILE = "from_pretrain.yaml"
ARCH_NAME = "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1"
LOSS_NAME = "losses@ACTLossHead"


class Key(NamedTuple):
    """A key of the original: its type, its default, and our option or config field (None: handled apart)."""

    kind: type
    default: Any
    ours: str | None = None
    optional: bool = False


RUN_KEYS = {
    "data_path": Key(str, "data/arc-aug-1000"),
    "global_batch_size": Key(int, 768, "global_batch_size"),
    "epochs": Key(int, 100_000),
    "eval_interval": Key(int, 10_000, None, True),
    "checkpoint_every_eval": Key(bool, True),
    "lr": Key(float, 1e-4, "learning_rate"),
    "lr_min_ratio": Key(float, 1.0, "lr_min_ratio"),
    "lr_warmup_steps": Key(int, 2000, "warmup_steps"),
    "beta1": Key(float, 0.9, "adam_beta1"),
    "beta2": Key(float, 0.95, "adam_beta2"),
    "weight_decay": Key(float, 0.1, "weight_decay"),
    "puzzle_emb_lr": Key(float, 1e-2, "puzzle_emb_lr"),
    "puzzle_emb_weight_decay": Key(float, 0.1, "puzzle_emb_weight_decay"),
    "seed": Key(int, 0, "seed"),
    "project_name": Key(str, None, None, True),
    "run_name": Key(str, None, None, True),
    "checkpoint_path": Key(str, None, None, True),
    "eval_save_outputs": Key(list, []),
}
ARCH_KEYS = {
    "arch.name": Key(str, ARCH_NAME),
    "arch.loss.name": Key(str, LOSS_NAME),
    "arch.loss.loss_type": Key(str, "stablemax" + LOSS_SUFFIX),
    "arch.halt_exploration_prob": Key(float, 0.1, "halt_exploration_prob"),
    "arch.halt_max_steps": Key(int, 16, "halt_max_steps"),
    "arch.H_cycles": Key(int, 2, "H_cycles"),
    "arch.L_cycles": Key(int, 2, "L_cycles"),
    "arch.H_layers": Key(int, 4, "H_layers"),
    "arch.L_layers": Key(int, 4, "L_layers"),
    "arch.hidden_size": Key(int, 512, "hidden_size"),
    "arch.num_heads": Key(int, 8, "num_attention_heads"),
    "arch.expansion": Key(float, 4.0, "expansion"),
    "arch.puzzle_emb_ndim": Key(int, None, "puzzle_emb_ndim", True),  # the hidden size
    "arch.pos_encodings": Key(str, "rope", "pos_encodings"),
    "arch.rms_norm_eps": Key(float, 1e-5, "rms_norm_eps"),
    "arch.rope_theta": Key(float, 10000.0),
    "arch.forward_dtype": Key(str, None, "forward_dtype", True),  # bfloat16, where the machine has it
}
KEYS = RUN_KEYS | ARCH_KEYS
POSITIVE = ("global_batch_size", "epochs", "eval_interval", "lr", "puzzle_emb_lr")
NOT_NEGATIVE = ("lr_min_ratio", "lr_warmup_steps", "weight_decay", "puzzle_emb_weight_decay", "seed")
# Options of run_puzzle.py that a key of the original decides, and that the recipe's place depends on.
DECIDED_BY_KEY = {"output_dir": "checkpoint_path", "data_path": "data_path", "recipe": "the keys themselves"}

SUDOKU_FILE = "training/recipes/data/sudoku_hard_small.csv"
# What builds the counterpart of a data set the original's guides name. How the guide's "small" set was drawn is not
# said anywhere; ours is 16 hard Sudokus, and 500 held out, that come with the repository.
BUILDERS = {
    "sudoku-extreme-small": f"sudoku --source {{root}}{SUDOKU_FILE} --test-size 500",
    "sudoku-extreme-1k-aug-1000": "sudoku --source hub:sapientinc/sudoku-extreme --subsample-size 1000 --num-aug 1000",
    "sudoku-extreme-full": "sudoku --source hub:sapientinc/sudoku-extreme",
    "sudoku-hard-full": "sudoku --source hub:sapientinc/sudoku-extreme",
    "maze-30x30-hard-1k": "maze --source hub:sapientinc/maze-30x30-hard-1k",
    "arc-aug-1000": "arc ARC-AGI/data ConceptARC/corpus --num-aug 1000",
    "arc-2-aug-1000": "arc ARC-AGI-2/data --num-aug 1000",
}


@dataclass(frozen=True)
class DataSize:
    """The sizes that decide the number of steps: groups of the train split, and mean examples of a puzzle.

    `layout` is "original" (.npy arrays) or "ours" (parquet); `fingerprint` changes with the files.
    """

    layout: str
    groups: int
    mean_examples: float
    fingerprint: str


@dataclass(frozen=True)
class Machine:
    """The options that the machine and environment variables decide, and why."""

    compile: bool
    bf16: bool
    cpu: bool
    wandb_project: str | None
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OriginalRun:
    """A run of the original as a recipe of run_puzzle.py, with what there is to know about it."""

    recipe: dict[str, Any]
    project: str
    notes: dict[str, str]

    @property
    def folder(self) -> Path:
        return Path(self.recipe["output_dir"])

    def command(self, flags: Sequence[str] = ()) -> str:
        """The equivalent command line, every option spelled out."""
        words = ["python", typed_path(SCRIPT)]
        for name, value in self.recipe.items():
            if isinstance(value, dict) and not any(isinstance(item, dict) for item in value.values()):
                value = ",".join(f"{key}={_as_typed(item)}" for key, item in value.items())
            words += [f"--{name}", _as_typed(value)]
        return shlex.join([*words, *flags])

    def save(self) -> Path:
        """Writes the recipe into the run's folder. Every process may: each writes the same, and replaces it whole."""
        file = self.folder / RECIPE_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".recipe-", delete=False) as own:
            yaml.safe_dump(self.recipe, own, sort_keys=False)
        Path(own.name).replace(file)
        return file


def parse_command(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Options by key, every key of the original present, and the flags for run_puzzle.py that follow.

    `key=value` (with Hydra's `+` or `++` before it if you like), then, from the first word in `--`, our own flags.

    Raises:
        ValueError: an unknown key with the nearest valid one, a value of the wrong type or sign, a key given twice.
    """
    start = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    own, flags = list(words[:start]), list(words[start:])
    for word in flags:
        name = word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""
        if name in DECIDED_BY_KEY:
            raise ValueError(f"--{name} is decided by {DECIDED_BY_KEY[name]}; give that as key=value instead")
    given: dict[str, Any] = {}
    for word in own:
        name, sign, text = word.lstrip("+").partition("=")
        if not sign:
            raise ValueError(f"{word!r} is not of the form key=value, as in epochs=500")
        if name == "arch":
            if text != "hrm_v1":
                raise ValueError(f"arch={text}: the original HRM has hrm_v1 alone; for TRM see training/recipes/trm_*")
            continue
        if name not in KEYS:
            nearest = difflib.get_close_matches(name, KEYS, n=1, cutoff=0.4)
            raise ValueError(
                f"unknown key {name!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "") + " (all: --help)"
            )
        if name in given:
            raise ValueError(f"{name} is given twice, as {given[name]} and as {text}")
        given[name] = _value(name, text)
    options = {name: key.default for name, key in KEYS.items()} | given
    _validate_values(options)
    return options, flags


def epoch_steps(
    epochs: int, eval_interval: int | None, groups: int, mean_examples: float, batch: int
) -> tuple[int, int]:
    """Steps of the whole run, and of the epochs between two evaluations, by the original's rule.

        total = int(epochs * groups * mean_examples / batch)

    and each interval ends with its last full batch. An interval that does not divide the epochs is an error.

    Raises:
        ValueError: no such division, or not even one full batch.
    """
    interval = epochs if eval_interval is None else eval_interval
    if epochs % interval:
        divisors = [n for n in range(1, epochs + 1) if epochs % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - interval))
        raise ValueError(
            f"eval_interval={interval} does not divide epochs={epochs}; the nearest that does is {nearest}"
        )
    per_epoch = groups * mean_examples
    between = int(interval * per_epoch / batch)
    if between < 1:
        raise ValueError(
            f"eval_interval={interval} epochs of {per_epoch:g} examples do not fill one batch of "
            f"global_batch_size={batch}; raise eval_interval (and epochs) or lower the batch"
        )
    return int(epochs * groups * mean_examples / batch), between


def data_size(path: str | Path) -> DataSize:
    """Reads how large the train split at `path` is, in the original's layout or in ours.

    Raises:
        FileNotFoundError: there is no data set; the message has the command that builds its counterpart.
    """
    path = Path(path)
    ours, theirs = path / INFO_FILE, path / "train" / META_FILE
    if ours.exists():
        return _size_of_ours(path)
    if not theirs.exists():
        what = "is no puzzle data set" if path.exists() else "does not exist"
        raise FileNotFoundError(
            f"data_path={path} {what}: expected the original's {Path('train', META_FILE)} or our {INFO_FILE} in it. "
            f"Copy the original's folder there, or build its counterpart with\n  {build_command(path)}"
        )
    meta = json.loads(theirs.read_text())
    try:
        groups, mean = int(meta["total_groups"]), float(meta["mean_puzzle_examples"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{theirs} lacks total_groups or mean_puzzle_examples as numbers ({error}); it has {sorted(meta)}"
        ) from error
    return DataSize("original", groups, mean, _fingerprint(path))


def build_command(path: Path) -> str:
    """The `hrm-hf data` command for the counterpart of the data set that should be at `path`."""
    arguments = BUILDERS.get(path.name, "sudoku|maze|arc ...")
    root = typed_path(ROOT)
    return f"hrm-hf data {arguments.format(root='' if root == '.' else root + '/')} --out {shlex.quote(str(path))}"


def machine(environ: Mapping[str, str]) -> Machine:
    """Compiler, precision, device and logging as the original would take them here.

    The original compiles on CUDA unless DISABLE_COMPILE is set, whatever its value, and computes in bfloat16. We
    compile wherever there is a compiler, and leave bfloat16 to GPUs that have it.
    """
    import torch

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    notes = {
        "device": f"{device.type} ({_device_name(device)})",
        "threads": _threads(environ, torch.get_num_threads()),
    }
    disabled = "DISABLE_COMPILE" in environ
    compile_ = not disabled and device.type != "mps" and _can_compile(device)
    notes["torch.compile"] = (
        "on" if compile_ else "off: DISABLE_COMPILE is set" if disabled else f"off: no compiler for {device.type}"
    )
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    notes["precision"] = "bfloat16, as the original" if bf16 else f"float32 (the original: bfloat16), on {device.type}"
    project = environ.get("WANDB_PROJECT")
    notes["W&B"] = f"project {project!r}" if project else "off (WANDB_PROJECT=... or --report_to wandb turns it on)"
    return Machine(compile_, bf16, device.type == "cpu", project, notes)


def original_run(options: dict[str, Any], size: DataSize, here: Machine) -> OriginalRun:
    """The recipe of a run of the original.

    Args:
        options: from `parse_command`.
        size: of the train split.
        here: what this machine decides.

    Raises:
        ValueError: an architecture that cannot be (heads that do not divide the hidden size, say), or epochs that
            cannot be evaluated at the interval.
    """
    batch = options["global_batch_size"]
    steps, between = epoch_steps(options["epochs"], options["eval_interval"], size.groups, size.mean_examples, batch)
    data = Path(options["data_path"])
    project = options["project_name"] or f"{data.name.capitalize()} ACT-torch"
    run_name = options["run_name"] or f"{ARCH_NAME.split('@')[1]} {_run_id(options)}"
    folder = Path(options["checkpoint_path"] or Path("checkpoints", project, run_name))
    notes = {
        "data": f"{data}: {size.groups:,} groups, {size.mean_examples:g} examples a puzzle",
        "steps": f"{steps:,} = {options['epochs']:,} epochs x {size.groups:,} groups x {size.mean_examples:g} / "
        f"{batch}; evaluation every {between:,} steps",
        **here.notes,
    }
    recipe: dict[str, Any] = {"model_type": HrmPuzzleConfig.model_type}
    if changed := _architecture(options):
        recipe["config_overrides"] = changed
    recipe["data_path"] = str(data)
    if size.layout == "original":
        recipe["data_path"] = str(folder.parent / f"data-{size.fingerprint}")
        recipe["build_data"] = shlex.join(["import", str(data)])
        notes["data"] += f", read into {recipe['data_path']}"
    recipe |= {"output_dir": str(folder), "max_steps": steps}
    recipe |= {key.ours: options[name] for name, key in RUN_KEYS.items() if key.ours}
    recipe |= {
        "per_device_eval_batch_size": max(64, batch if batch <= 512 else 512),
        "eval_strategy": "steps",
        "eval_steps": between,
        "save_strategy": "steps" if options["checkpoint_every_eval"] else "no",
        "save_steps": between,
        "logging_steps": max(1, min(100, steps // 20)),
        "torch_compile": here.compile,
        "bf16": here.bf16 and options["arch.forward_dtype"] is None,
        "use_cpu": here.cpu,
        "report_to": "wandb" if here.wandb_project else "none",
        "run_name": run_name,
    }
    return OriginalRun(recipe, here.wandb_project or project, notes)


def keys_help() -> str:
    """Every key with its default and what it becomes here, one a line."""
    handled = {
        "data_path": "--data_path, after `hrm-hf data import` if need be", "epochs": "--max_steps",
        "eval_interval": "--eval_steps, --save_steps", "checkpoint_every_eval": "--save_strategy steps or no",
        "checkpoint_path": "--output_dir", "project_name": "WANDB_PROJECT, and a folder of checkpoints/",
        "run_name": "--run_name, and a folder in that one", "eval_save_outputs": "hrm-hf eval puzzles --out",
        "arch.loss.loss_type": "config field loss_type", "arch.rope_theta": "config field rope_parameters",
        "arch.name": f"--model_type {HrmPuzzleConfig.model_type}", "arch.loss.name": "the model's own loss",
    }  # fmt: skip
    lines = []
    for name, key in KEYS.items():
        ours = key.ours and (f"--{key.ours}" if name in RUN_KEYS else f"config field {key.ours}")
        lines.append(f"  {name}={_as_typed(key.default)}".ljust(74) + f"  {ours or handled[name]}")
    return "\n".join(lines)


def _architecture(options: dict[str, Any]) -> dict[str, Any]:
    """Config fields, the defaults of the config left out. Built once here, so that a bad one is an error now."""
    fields = {key.ours: options[name] for name, key in ARCH_KEYS.items() if key.ours}
    if fields["puzzle_emb_ndim"] is None:
        fields["puzzle_emb_ndim"] = fields["hidden_size"]
    fields["loss_type"] = options["arch.loss.loss_type"].removesuffix(LOSS_SUFFIX)
    try:
        default = HrmPuzzleConfig()
        HrmPuzzleConfig(**fields)
    except StrictDataclassError as error:
        raise ValueError(f"arch: {str(error.__cause__ or error).splitlines()[-1].strip()}") from error
    changed = {name: value for name, value in fields.items() if value != getattr(default, name)}
    if options["arch.rope_theta"] != default.rope_parameters["rope_theta"]:
        changed["rope_parameters"] = {"rope_type": "default", "rope_theta": options["arch.rope_theta"]}
    return changed


def _validate_values(options: dict[str, Any]) -> None:
    for name in (*POSITIVE, *NOT_NEGATIVE):
        value, least = options[name], "above 0" if name in POSITIVE else "0 or more"
        if value is not None and (value < 0 or (value == 0 and name in POSITIVE)):
            raise ValueError(f"{name}={value} must be {least}")
    for name, valid in (("arch.name", ARCH_NAME), ("arch.loss.name", LOSS_NAME)):
        if options[name] != valid:
            raise ValueError(f"{name}={options[name]} is not the original HRM's {valid}")
    if options["eval_save_outputs"]:
        raise ValueError(
            f"eval_save_outputs={options['eval_save_outputs']}: tensors of an evaluation are not saved; results and "
            "plots are, by `hrm-hf eval puzzles MODEL DATA --out DIR`"
        )


def _value(name: str, text: str) -> Any:
    """The value of a key by its type; numbers may be written 1e-4, which YAML would take for text."""
    key = KEYS[name]
    if text.lower() in ("null", "none", "~", ""):
        if key.optional:
            return None
        raise ValueError(f"{name}={text} needs a value; its default is {_as_typed(key.default)}")
    if key.kind is str:
        return text.strip("'\"")
    if key.kind is list:
        return yaml.safe_load(text)
    if key.kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError(f"{name}={text} must be true or false")
    try:
        number = float(text)
        if key.kind is float and abs(number) < float("inf"):
            return number
        if key.kind is int and number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass  # what is no number is said below, with what is no whole one
    raise ValueError(f"{name}={text} must be a {'whole ' if key.kind is int else ''}number")


def _as_typed(value: Any) -> str:
    """As one would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _run_id(options: dict[str, Any]) -> str:
    """The same for the same command, so that a run resumes in its own folder and all processes agree on it."""
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]


def _fingerprint(path: Path) -> str:
    """Names, sizes and dates of the files of a data set: what was imported from other files is another folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    facts = [(str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([str(path.resolve()), facts]).encode()).hexdigest()[:8]


def _size_of_ours(path: Path) -> DataSize:
    import pyarrow.parquet as parquet

    files = sorted((path / "data").glob("train-*.parquet"))
    if not files:
        raise FileNotFoundError(f"{path} has no train split; build one with\n  {build_command(path)}")
    rows, puzzles, groups = 0, set(), set()
    for file in files:
        table = parquet.read_table(file, columns=["puzzle_index", "group_index"])
        rows += len(table)
        puzzles.update(table["puzzle_index"].unique().to_pylist())
        groups.update(table["group_index"].unique().to_pylist())
    if not rows:
        raise ValueError(f"{path}: the train split has no rows")
    return DataSize("ours", len(groups), rows / len(puzzles), "")


def _can_compile(device: Any) -> bool:
    from ..trainer import validate_compiler

    try:
        validate_compiler(device)
    except RuntimeError:
        return False
    return True


def _device_name(device: Any) -> str:
    import platform

    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _threads(environ: Mapping[str, str], threads: int) -> str:
    given = environ.get("OMP_NUM_THREADS")
    return f"{threads} (OMP_NUM_THREADS={given})" if given else f"{threads} (OMP_NUM_THREADS is not set)"
