"""Translate command lines of the original HRM's `pretrain.py` and `evaluate.py` to our options.

    options, flags = parse_command(["data_path=data/sudoku-extreme-small", "epochs=500", "arch.hidden_size=32"])
    recipe = original_run(options, data_size(options["data_path"]), machine(os.environ))
    arguments(recipe)   of run_puzzle.py

The keys and defaults are those of the original cfg_pretrain.yaml and arch/hrm_v1.yaml. An epoch has one puzzle from
each group. Features of Hydra (composition, sweeps, interpolation) are not supported.
"""

import hashlib
import json
import logging
import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError

from ..io.files import load_json, load_yaml
from ..io.options import expand_home
from ..models.configuration_hrm_puzzle import HrmPuzzleConfig
from ..resources import ROOT, typed_path
from ..trainer.recipes import unknown_key
from . import original_config as original
from .dataset import INFO_FILE, load_puzzle_dataset
from .npy_layout import META_FILE


logger = logging.getLogger(__name__)

SCRIPT = ROOT / "training" / "run_puzzle.py"
ARCH_NAME = original.ARCHITECTURES["hrm"].original_name
# For puzzle_emb_ndim, None means the hidden size; for forward_dtype, it means bfloat16 if the machine supports it.
ARCH = original.REQUIRED | original.OPTIONAL | {"puzzle_emb_ndim": None, "forward_dtype": None, "name": ARCH_NAME}
ARCH |= {"rope_theta": 10000.0, "loss.name": original.LOSS_NAME, "loss.loss_type": original.DEFAULT_LOSS}
DEFAULTS = {name: default for name, (default, _) in original.RUN_KEYS.items()}
DEFAULTS |= {f"arch.{key}": value for key, value in ARCH.items()}
OPTIONAL_KEYS = {"eval_interval", *(name for name, default in DEFAULTS.items() if default is None)}
POSITIVE = ("global_batch_size", "epochs", "eval_interval", "lr", "puzzle_emb_lr")
# Options of run_puzzle.py that are set by keys of the original configuration.
DECIDED_BY_KEY = {"output_dir": "checkpoint_path", "data_path": "data_path", "recipe": "the keys themselves"}

# Arguments that build the data sets named in the original guides. "small" is our own set of 16 hard Sudokus.
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
    """Sizes of a data set that determine the number of steps."""

    groups: int
    mean_examples: float  # per puzzle
    fingerprint: str | None = None  # original layout: hash of the data's path and time stamp; our layout: None


def arguments(recipe: dict[str, Any]) -> list[str]:
    """Convert a recipe to command-line arguments of run_puzzle.py."""
    words = []
    for name, value in recipe.items():
        if isinstance(value, dict) and not any(isinstance(item, dict) for item in value.values()):
            value = ",".join(f"{key}={_as_typed(item)}" for key, item in value.items())
        words += [f"--{name}", _as_typed(value)]
    return words


def project_name(options: dict[str, Any]) -> str:
    """Return the W&B project of a run, which is also part of its checkpoint path."""
    return options["project_name"] or f"{Path(options['data_path']).name.capitalize()} ACT-torch"


def parse_command(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Parse `key=value` (or `+key=value`) arguments and flags, and fill in the original defaults.

    If a key is given twice, the last value counts, as in Hydra.

    Raises:
        ValueError: If a key is unknown, or a value has the wrong type or sign.
    """
    own, flags = _split_flags(words, {*DEFAULTS, "arch"})
    for word in flags:
        if word.startswith("--") and (name := word[2:].partition("=")[0].replace("-", "_")) in DECIDED_BY_KEY:
            raise ValueError(f"--{name} is set by {DECIDED_BY_KEY[name]}; use key=value instead")
    given: dict[str, Any] = {}
    for word in own:
        name, sign, text = word.lstrip("+").partition("=")
        if not sign:
            raise ValueError(f"{word!r}: must have the form key=value, such as epochs=500")
        if name == "arch":
            if text != "hrm_v1":
                raise ValueError(f"arch={text}: the original HRM has only hrm_v1; for TRM see training/recipes/trm_*")
            continue
        if name not in DEFAULTS:
            raise ValueError(f"{unknown_key(name, DEFAULTS, 'key')}; --help lists all keys")
        if name in given:
            logger.warning("%s is set twice; using the last value, %s=%s", name, name, text)
        given[name] = _value(name, text)
    options = DEFAULTS | given
    for name in ("arch.name", "arch.loss.name", "eval_save_outputs"):
        if options[name] != DEFAULTS[name]:
            hint = "; to save predictions, use hrm-hf eval puzzles" if name == "eval_save_outputs" else ""
            raise ValueError(f"{name}={options[name]}: only {DEFAULTS[name]} is supported{hint}")
    return options, flags


def epoch_steps(epochs: int, eval_interval: int | None, groups: int, examples: float, batch: int) -> tuple[int, int]:
    """Return the number of training steps in the run and between evaluations, counting only full batches.

    Raises:
        ValueError: If the interval does not divide the epochs, or does not fill one batch.
    """
    interval = epochs if eval_interval is None else eval_interval
    if epochs % interval:
        nearest = min((n for n in range(1, epochs + 1) if epochs % n == 0), key=lambda n: abs(n - interval))
        raise ValueError(f"eval_interval={interval}: must divide epochs={epochs}; the nearest divisor is {nearest}")
    between = int(interval * groups * examples / batch)
    if between < 1:
        raise ValueError(f"eval_interval={interval}: less than one step at global_batch_size={batch}; raise it")
    return int(epochs * groups * examples / batch), between


def data_size(path: str | Path) -> DataSize:
    """Read the sizes of the train split at `path`, in the original layout or ours."""
    path = Path(path)
    if (path / INFO_FILE).exists():
        train = load_puzzle_dataset(path, "train")
        return DataSize(len(train.unique("group_index")), len(train) / len(train.unique("puzzle_index")))
    file = path / "train" / META_FILE
    if not file.exists():
        raise FileNotFoundError(
            f"data_path={path}: there is no puzzle data set; copy the original folder to this path, or build it "
            f"with\n  {build_command(path)}"
        )
    meta = load_json(file)
    fingerprint = _digest([str(path.resolve()), file.stat().st_mtime_ns])
    return DataSize(meta["total_groups"], meta["mean_puzzle_examples"], fingerprint)


def build_command(path: Path) -> str:
    """Return the `hrm-hf data` command that builds the data set expected at `path`."""
    root = "" if typed_path(ROOT) == "." else f"{typed_path(ROOT)}/"
    arguments = BUILDERS.get(path.name, "sudoku|maze|arc ...").format(root=root)
    return f"hrm-hf data {arguments} --out {shlex.quote(str(path))}"


def machine(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of run_puzzle.py that depend on the machine and environment variables.

    As in the original code, training compiles unless DISABLE_COMPILE is set. It uses bfloat16 if the GPU supports it.
    """
    import torch

    from ..trainer import validate_compiler

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    compile_ = "DISABLE_COMPILE" not in environ and device.type != "mps"
    try:
        validate_compiler(device)
    except RuntimeError:
        compile_ = False
    bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return {"torch_compile": compile_, "bf16": bf16, "use_cpu": device.type == "cpu"}


def original_run(options: dict[str, Any], size: DataSize, here: dict[str, Any]) -> dict[str, Any]:
    """Convert a run of the original code into a recipe for run_puzzle.py.

    Args:
        options: From `parse_command`. size: Sizes of the train split. here: From `machine`.

    Raises:
        ValueError: If the architecture or the evaluation interval is invalid.
    """
    batch = options["global_batch_size"]
    steps, between = epoch_steps(options["epochs"], options["eval_interval"], size.groups, size.mean_examples, batch)
    data = Path(options["data_path"])
    # The name depends only on the command, so a run resumes in its folder and all processes use the same folder.
    run_name = options["run_name"] or f"{ARCH_NAME.split('@')[1]} {_digest(options)}"
    folder = Path(options["checkpoint_path"] or Path("checkpoints", project_name(options), run_name))
    changed, recipe = _architecture(options), {"model_type": HrmPuzzleConfig.model_type, "data_path": str(data)}
    if changed:
        recipe["config_overrides"] = changed
    if size.fingerprint:
        recipe["data_path"] = str(folder.parent / f"data-{size.fingerprint}")
        recipe["build_data"] = shlex.join(["import", str(data)])
    recipe |= {ours: options[name] for name, (_, ours) in original.RUN_KEYS.items() if ours.isidentifier()}
    recipe |= {
        "output_dir": str(folder), "run_name": run_name, "max_steps": steps,
        "per_device_eval_batch_size": min(max(64, batch), 512), "eval_strategy": "steps", "eval_steps": between,
        "save_strategy": "steps" if options["checkpoint_every_eval"] else "no", "save_steps": between,
        "save_total_limit": 0,  # the original code keeps every checkpoint
        "logging_steps": max(1, min(100, steps // 20)), "report_to": "none",
    }  # fmt: skip
    return recipe | here | {"bf16": here["bf16"] and options["arch.forward_dtype"] is None}


def keys_help() -> str:
    """Return one line per key: the key, its default and the option or config field it sets."""
    arch = {f"arch.{key}": f"config field {original.OUR_NAMES.get(key, key).removeprefix('loss.')}" for key in ARCH}
    ours = {name: f"--{text}" if text.isidentifier() else text for name, (_, text) in original.RUN_KEYS.items()} | arch
    return "\n".join(f"  {name}={_as_typed(DEFAULTS[name])}".ljust(74) + f"  {ours[name]}" for name in DEFAULTS)


def evaluation_arguments(words: Sequence[str]) -> list[str]:
    """Translate `checkpoint=... [--flags]` to `hrm-hf` arguments, and convert an original checkpoint.

    `checkpoint` is one of our run folders (or a checkpoint-N in it), or an original `step_N` or its folder. The run's
    recipe.yaml or all_config.yaml has the data path. As in the original code, all ACT steps run (`--halt fixed`).

    Raises:
        ValueError: If there is a key other than `checkpoint`, or no `checkpoint`.
        FileNotFoundError: If the checkpoint or its data set does not exist.
    """
    own, flags = _split_flags(words, {"checkpoint"})
    given = dict(word.partition("=")[::2] for word in own)
    if set(given) != {"checkpoint"}:
        raise ValueError(f"{own}: must be checkpoint=FOLDER; to choose the data, use hrm-hf eval puzzles MODEL DATA")
    checkpoint, data = Path(given["checkpoint"]).expanduser(), None
    if (checkpoint / "config.json").exists():
        model, recipes = checkpoint, [folder / "recipe.yaml" for folder in (checkpoint, checkpoint.parent)]
        data = next((load_yaml(file)["data_path"] for file in recipes if file.exists()), None)
    else:
        from .convert import convert_original, find_weights

        weights = find_weights(checkpoint)
        model = weights.with_name(f"hrm_hf-{weights.name}")
        convert_original(weights, model, "hrm")
        for data in original.data_folders(load_yaml(weights.with_name(original.CONFIG_FILE)))[:1]:
            data_size(data)  # if the data set is missing, the error gives the command that builds it
    if data is None:
        raise FileNotFoundError(f"checkpoint={checkpoint}: data path unknown; use hrm-hf eval puzzles MODEL DATA")
    return ["eval", "puzzles", str(model), str(data), "--halt", "fixed", *flags]


def _architecture(options: dict[str, Any]) -> dict[str, Any]:
    """Validate the architecture by building its config, and return the fields that differ from defaults."""
    arch = {key: options[f"arch.{key}"] for key in ARCH if not key.startswith("loss.")}
    arch["loss"] = {"loss_type": options["arch.loss.loss_type"]}
    arch["puzzle_emb_ndim"] = arch["hidden_size"] if arch["puzzle_emb_ndim"] is None else arch["puzzle_emb_ndim"]
    fields = original.config_fields(arch, "hrm", "arch")
    try:
        default = HrmPuzzleConfig()
        HrmPuzzleConfig(**fields)
    except StrictDataclassError as error:
        raise ValueError(f"arch: {str(error.__cause__ or error).splitlines()[-1].strip()}") from error
    return {name: value for name, value in fields.items() if value != getattr(default, name)}


def _split_flags(words: Sequence[str], keys: Collection[str]) -> tuple[list[str], list[str]]:
    """Split arguments, in any order, into `key=value` words (original keys) and flags with values (our options).

    After a flag, `a=b` is its value unless `a` is in `keys`; only values of --optim_args may have such names.
    """
    own, flags = [], []
    for before, word in zip(["", *words], words):
        is_named = word.lstrip("+").partition("=")[0] in keys and before != "--optim_args"
        is_value = before.startswith("-") and "=" not in before and not is_named
        is_key = not word.startswith("-") and (not flags or ("=" in word and not is_value))
        (own if is_key else flags).append(word)
    return own, flags


def _value(name: str, text: str) -> Any:
    """Parse a key's value according to the type of its default, since YAML would parse 1e-4 as text."""
    kind = int if name == "arch.puzzle_emb_ndim" else type(DEFAULTS[name])
    if text.lower() in ("null", "none", "~", ""):
        if name in OPTIONAL_KEYS:
            return None
    elif kind in (str, type(None)):
        return expand_home(text.strip("'\""))
    try:
        value = {"true": True, "false": False}[text.lower()] if kind is bool else float(text)
        valid = kind(value) == value and 0 <= value < math.inf and (value > 0 or name not in POSITIVE)
    except (KeyError, ValueError, OverflowError):  # int(inf) raises OverflowError
        valid = False
    if not valid:
        bound = "> 0" if name in POSITIVE else ">= 0"
        raise ValueError(f"{name}={text}: must be of type {kind.__name__} and {bound}, such as {DEFAULTS[name]}")
    return kind(value)


def _as_typed(value: Any) -> str:
    if value is None or isinstance(value, (bool, dict)):
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
