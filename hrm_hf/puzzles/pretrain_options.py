"""Command lines of the original HRM's `pretrain.py` and `evaluate.py`, translated to our options.

    options, flags = parse_command(["data_path=data/sudoku-extreme-small", "epochs=500", "arch.hidden_size=32"])
    recipe = original_run(options, data_size(options["data_path"]), machine(os.environ))
    arguments(recipe)   of run_puzzle.py

The keys and defaults are those of the original's cfg_pretrain.yaml and arch/hrm_v1.yaml. An epoch is one puzzle of
every group; `epoch_steps` has the original's rule that turns epochs into steps. Left out: Hydra itself (composition,
sweeps, interpolation).
"""

import difflib
import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError

from ..io.files import load_json, load_yaml
from ..models.configuration_hrm_puzzle import HrmPuzzleConfig
from ..resources import ROOT, typed_path
from .dataset import INFO_FILE, load_puzzle_dataset
from .npy_layout import META_FILE
from .original_config import (
    ARCHITECTURES,
    CONFIG_FILE,
    DEFAULT_LOSS,
    LOSS_NAME,
    OPTIONAL,
    OUR_NAMES,
    REQUIRED,
    config_fields,
    data_folders,
)


SCRIPT = ROOT / "training" / "run_puzzle.py"

# Keys with the original's defaults, and the options of run_puzzle.py that take the value as it is, or in words what
# becomes of it.
RUN_KEYS = {
    "data_path": ("data/arc-aug-1000", "--data_path, after `hrm-hf data import` if need be"),
    "global_batch_size": (768, "global_batch_size"),
    "epochs": (100_000, "--max_steps"),
    "eval_interval": (10_000, "--eval_steps, --save_steps"),
    "checkpoint_every_eval": (True, "--save_strategy steps or no"),
    "lr": (1e-4, "learning_rate"),
    "lr_min_ratio": (1.0, "lr_min_ratio"),
    "lr_warmup_steps": (2000, "warmup_steps"),
    "beta1": (0.9, "adam_beta1"),
    "beta2": (0.95, "adam_beta2"),
    "weight_decay": (0.1, "weight_decay"),
    "puzzle_emb_lr": (1e-2, "puzzle_emb_lr"),
    "puzzle_emb_weight_decay": (0.1, "puzzle_emb_weight_decay"),
    "seed": (0, "seed"),
    "project_name": (None, "WANDB_PROJECT, and a folder of checkpoints/"),
    "run_name": (None, "--run_name, and a folder in that one"),
    "checkpoint_path": (None, "--output_dir"),
    "eval_save_outputs": ("[]", "hrm-hf eval puzzles --out"),
}
ARCH_NAME = ARCHITECTURES["hrm"].original_name
# puzzle_emb_ndim: the hidden size. forward_dtype: bfloat16, where the machine has it.
ARCH = REQUIRED | OPTIONAL | {"puzzle_emb_ndim": None, "forward_dtype": None, "name": ARCH_NAME, "rope_theta": 10000.0}
ARCH |= {"loss.name": LOSS_NAME, "loss.loss_type": DEFAULT_LOSS}
DEFAULTS = {name: default for name, (default, _) in RUN_KEYS.items()} | {f"arch.{key}": ARCH[key] for key in ARCH}
OPTIONAL_KEYS = {"eval_interval", *(name for name, default in DEFAULTS.items() if default is None)}
POSITIVE = ("global_batch_size", "epochs", "eval_interval", "lr", "puzzle_emb_lr")
# Options of run_puzzle.py that a key of the original decides.
DECIDED_BY_KEY = {"output_dir": "checkpoint_path", "data_path": "data_path", "recipe": "the keys themselves"}

# What builds the counterpart of a data set the original's guides name. How the guide's "small" set was drawn is not
# documented; ours is 16 hard Sudokus, and 500 held out, that come with the repository.
BUILDERS = {
    "sudoku-extreme-small": "sudoku --source {root}training/recipes/data/sudoku_hard_small.csv --test-size 500",
    "sudoku-extreme-1k-aug-1000": "sudoku --source hub:sapientinc/sudoku-extreme --subsample-size 1000 --num-aug 1000",
    "sudoku-extreme-full": "sudoku --source hub:sapientinc/sudoku-extreme",
    "sudoku-hard-full": "sudoku --source hub:sapientinc/sudoku-extreme",
    "maze-30x30-hard-1k": "maze --source hub:sapientinc/maze-30x30-hard-1k",
    "arc-aug-1000": "arc ARC-AGI/data ConceptARC/corpus --num-aug 1000",
    "arc-2-aug-1000": "arc ARC-AGI-2/data --num-aug 1000",
}


class DataSize(NamedTuple):
    """The sizes that decide the number of steps."""

    groups: int
    mean_examples: float  # of a puzzle
    fingerprint: str | None = None  # changes with the files of the original's layout; None for a data set of ours


def arguments(recipe: dict[str, Any]) -> list[str]:
    """The options of run_puzzle.py, every one spelled out."""
    words = []
    for name, value in recipe.items():
        if isinstance(value, dict) and not any(isinstance(item, dict) for item in value.values()):
            value = ",".join(f"{key}={_as_typed(item)}" for key, item in value.items())
        words += [f"--{name}", _as_typed(value)]
    return words


def project_name(options: dict[str, Any]) -> str:
    """The W&B project of a run, and a folder of its checkpoints."""
    return options["project_name"] or f"{Path(options['data_path']).name.capitalize()} ACT-torch"


def parse_command(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Parse options by key, every key of the original present, and the flags for run_puzzle.py that follow.

    `key=value` (with Hydra's `+` or `++` before it if you like), then, from the first word in `--`, our own flags.

    Raises:
        ValueError: an unknown key with the nearest valid one, a value of the wrong type or sign, a key given twice.
    """
    own, flags = _split_flags(words)
    for word in flags:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
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
        if name not in DEFAULTS:
            nearest = difflib.get_close_matches(name, DEFAULTS, n=1, cutoff=0.4)
            raise ValueError(
                f"unknown key {name!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "") + " (all: --help)"
            )
        if name in given:
            raise ValueError(f"{name} is given twice, as {given[name]} and as {text}")
        given[name] = _value(name, text)
    options = DEFAULTS | given
    for name in ("arch.name", "arch.loss.name", "eval_save_outputs"):
        if options[name] != DEFAULTS[name]:
            raise ValueError(f"{name}={options[name]}: must be {DEFAULTS[name]}; for outputs use hrm-hf eval puzzles")
    return options, flags


def epoch_steps(
    epochs: int, eval_interval: int | None, groups: int, mean_examples: float, batch: int
) -> tuple[int, int]:
    """Steps of the complete run, and of the epochs between two evaluations, by the original's rule.

    Each interval ends with its last full batch.

    Raises:
        ValueError: the interval does not divide the epochs, or has not even one full batch.
    """
    interval = epochs if eval_interval is None else eval_interval
    if epochs % interval:
        divisors = [n for n in range(1, epochs + 1) if epochs % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - interval))
        raise ValueError(f"eval_interval={interval}: must divide epochs={epochs}; the nearest that does is {nearest}")
    between = int(interval * groups * mean_examples / batch)
    if between < 1:
        raise ValueError(f"eval_interval={interval}: does not fill one batch of global_batch_size={batch}; raise it")
    return int(epochs * groups * mean_examples / batch), between


def data_size(path: str | Path) -> DataSize:
    """Read how large the train split at `path` is, in the original's layout or in ours.

    Raises:
        FileNotFoundError: there is no data set; the message has the command that builds its counterpart.
    """
    path = Path(path)
    if (path / INFO_FILE).exists():
        train = load_puzzle_dataset(path, "train")
        return DataSize(len(train.unique("group_index")), len(train) / len(train.unique("puzzle_index")))
    file = path / "train" / META_FILE
    if not file.exists():
        raise FileNotFoundError(
            f"data_path={path}: there is no puzzle data set; copy the original's folder there, or build its "
            f"counterpart with\n  {build_command(path)}"
        )
    meta = load_json(file)
    fingerprint = _digest([str(path.resolve()), file.stat().st_mtime_ns])
    return DataSize(meta["total_groups"], meta["mean_puzzle_examples"], fingerprint)


def build_command(path: Path) -> str:
    """The `hrm-hf data` command for the counterpart of the data set that should be at `path`."""
    arguments = BUILDERS.get(path.name, "sudoku|maze|arc ...")
    root = typed_path(ROOT)
    return f"hrm-hf data {arguments.format(root='' if root == '.' else root + '/')} --out {shlex.quote(str(path))}"


def machine(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of run_puzzle.py that the machine and environment variables decide.

    The original compiles on CUDA unless DISABLE_COMPILE is set, whatever its value, and computes in bfloat16. We
    compile wherever there is a compiler, and leave bfloat16 to GPUs that have it.
    """
    import torch

    from ..trainer import validate_compiler

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    compile_ = "DISABLE_COMPILE" not in environ and device.type != "mps"
    try:
        validate_compiler(device)
    except RuntimeError:
        compile_ = False
    return {
        "torch_compile": compile_,
        "bf16": device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False),
        "use_cpu": device.type == "cpu",
        "report_to": "wandb" if environ.get("WANDB_PROJECT") else "none",
    }


def original_run(options: dict[str, Any], size: DataSize, here: dict[str, Any]) -> dict[str, Any]:
    """Translate a run of the original into the recipe of run_puzzle.py.

    Args:
        options: from `parse_command`.
        size: of the train split.
        here: from `machine`.

    Raises:
        ValueError: an architecture that cannot be (heads that do not divide the hidden size, say), or epochs that
            cannot be evaluated at the interval.
    """
    batch = options["global_batch_size"]
    steps, between = epoch_steps(options["epochs"], options["eval_interval"], size.groups, size.mean_examples, batch)
    data = Path(options["data_path"])
    # The same name for the same command, so that a run resumes in its own folder and all processes agree on it.
    run_name = options["run_name"] or f"{ARCH_NAME.split('@')[1]} {_digest(options)}"
    folder = Path(options["checkpoint_path"] or Path("checkpoints", project_name(options), run_name))
    recipe: dict[str, Any] = {"model_type": HrmPuzzleConfig.model_type}
    if changed := _architecture(options):
        recipe["config_overrides"] = changed
    recipe["data_path"] = str(data)
    if size.fingerprint:
        recipe["data_path"] = str(folder.parent / f"data-{size.fingerprint}")
        recipe["build_data"] = shlex.join(["import", str(data)])
    recipe |= {"output_dir": str(folder), "max_steps": steps}
    recipe |= {ours: options[name] for name, (_, ours) in RUN_KEYS.items() if ours.isidentifier()}
    recipe |= {
        "per_device_eval_batch_size": min(max(64, batch), 512),
        "eval_strategy": "steps",
        "eval_steps": between,
        "save_strategy": "steps" if options["checkpoint_every_eval"] else "no",
        "save_steps": between,
        "logging_steps": max(1, min(100, steps // 20)),
        "run_name": run_name,
    }
    return recipe | here | {"bf16": here["bf16"] and options["arch.forward_dtype"] is None}


def keys_help() -> str:
    """Every key with its default and what it becomes here, one a line."""
    arch = {f"arch.{key}": f"config field {OUR_NAMES.get(key, key).removeprefix('loss.')}" for key in ARCH}
    ours = {name: f"--{text}" if text.isidentifier() else text for name, (_, text) in RUN_KEYS.items()} | arch
    return "\n".join(f"  {name}={_as_typed(DEFAULTS[name])}".ljust(74) + f"  {ours[name]}" for name in DEFAULTS)


def evaluation_arguments(words: Sequence[str]) -> list[str]:
    """Arguments of `hrm-hf` for `checkpoint=... [--flags of eval puzzles]`; converts model and data where it must.

    `checkpoint` is one of our run folders (or a checkpoint-N in one), or the original's `step_N` or its folder. The
    data are those of the run: our recipe.yaml or the original's all_config.yaml names them. All ACT steps are taken
    (`--halt fixed`), as the original does, unless the flags say otherwise.

    Raises:
        ValueError: another key, or none.
        FileNotFoundError: no such checkpoint, or its data are not where its configuration says.
    """
    own, flags = _split_flags(words)
    given = dict(word.partition("=")[::2] for word in own)
    if set(given) != {"checkpoint"}:
        raise ValueError(f"{own}: must be checkpoint=FOLDER; for other data use hrm-hf eval puzzles MODEL DATA")
    checkpoint = Path(given["checkpoint"])
    if (checkpoint / "config.json").exists():
        files = [file for file in (checkpoint / "recipe.yaml", checkpoint.parent / "recipe.yaml") if file.exists()]
        model, data = checkpoint, Path(load_yaml(files[0])["data_path"]) if files else None
    else:
        from .convert import convert_original, find_weights

        weights = find_weights(checkpoint)
        model = weights.with_name(f"hrm_hf-{weights.name}")
        convert_original(weights, model, "hrm")
        data = next(iter(data_folders(load_yaml(weights.with_name(CONFIG_FILE)))), None)
        if data is not None:
            data_size(data)  # or the command that builds it
    if data is None:
        raise FileNotFoundError(f"checkpoint={checkpoint}: nothing names its data; use hrm-hf eval puzzles MODEL DATA")
    halt = [] if any(flag.partition("=")[0] == "--halt" for flag in flags) else ["--halt", "fixed"]
    return ["eval", "puzzles", str(model), str(data), *halt, *flags]


def _architecture(options: dict[str, Any]) -> dict[str, Any]:
    """Config fields that differ from the config's defaults. Built once here, so that a bad one is an error now."""
    loss = {"loss_type": options["arch.loss.loss_type"]}
    arch = {"puzzle_emb_ndim": options["arch.hidden_size"], "loss": loss}
    for key in ARCH:
        if options[f"arch.{key}"] is not None and not key.startswith("loss."):
            arch[key] = options[f"arch.{key}"]
    fields = config_fields(arch, "hrm", "arch")
    fields["forward_dtype"] = options["arch.forward_dtype"]
    try:
        default = HrmPuzzleConfig()
        HrmPuzzleConfig(**fields)
    except StrictDataclassError as error:
        raise ValueError(f"arch: {str(error.__cause__ or error).splitlines()[-1].strip()}") from error
    return {name: value for name, value in fields.items() if value != getattr(default, name)}


def _split_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of the original, and ours, which begin with the first that starts with a hyphen."""
    start = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    return list(words[:start]), list(words[start:])


def _value(name: str, text: str) -> Any:
    """The value of a key by the type of its default; numbers may be written 1e-4, which YAML would take for text."""
    kind = int if name == "arch.puzzle_emb_ndim" else type(DEFAULTS[name])
    missing = text.lower() in ("null", "none", "~", "")
    if missing and name in OPTIONAL_KEYS:
        return None
    if kind in (str, type(None)) and not missing:
        return text.strip("'\"")
    if kind is bool:
        value = {"true": True, "false": False}.get(text.lower())
    else:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        value = int(value) if kind is int and value.is_integer() else value
    if type(value) is not kind or not 0 <= value < math.inf or (value == 0 and name in POSITIVE):
        bound = "above 0" if name in POSITIVE else "not negative"
        raise ValueError(f"{name}={text}: must be of type {kind.__name__} and {bound}, such as {DEFAULTS[name]}")
    return value


def _as_typed(value: Any) -> str:
    """As one would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return json.dumps(value)
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
