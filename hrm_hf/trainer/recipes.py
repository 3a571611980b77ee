"""Options of a training run: arguments shared by all trainers, and recipes (YAML files with options).

A recipe is a flat mapping of the fields of a script's argument dataclasses. Flags override the values of
`--recipe FILE`; an unknown key is an error that names the nearest valid one. A run saves its options as a recipe.

Each task has a subclass of the training arguments in its `arguments.py`, with its defaults and additional options. It
lacks options that only apply to other kinds of models, so setting one is an error. These modules do not import torch,
so a script's `--help` does not need it (`hrm_hf_start.start_script`).
"""

import difflib
import json
import math
import platform
import re
import sys
import time
from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

import yaml
from transformers import HfArgumentParser, SchedulerType, TrainingArguments
from transformers.hf_argparser import HfArg, string_to_bool
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from .._version import __version__
from ..io.files import load_yaml, parse_yaml, shorten
from ..io.model_names import nearest_file
from ..io.options import expand_home, wanted_checkpoint
from ..io.usage import UsageError
from ..resources import ROOT, typed_path
from .guide_names import name_of_guide


if TYPE_CHECKING:
    from transformers import PreTrainedConfig


ALL_LINEAR = "all-linear"
RECIPES = ROOT / "training" / "recipes"
# Numbers out of range are rejected before anything is built. Infinity and NaN are always rejected.
BOUNDS = {
    "at least 1": (
        lambda v: v >= 1,
        ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
         "global_batch_size", "max_nonfinite_steps", "eval_max_steps", "late_start_max_steps",
         "early_stopping_patience"),
    ),
    "at least 0": (
        lambda v: v >= 0,
        ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "puzzle_emb_lr", "puzzle_emb_weight_decay",
         "dataloader_num_workers", "early_stopping_threshold"),
    ),
    "in [0, 1]": (lambda v: 0 <= v <= 1, ("lr_min_ratio", "ema_rate", "difficulty_ramp", "late_starts")),
    "in [0, 1)": (lambda v: 0 <= v < 1, ("adam_beta1", "adam_beta2")),
    "> 0": (lambda v: v > 0, ("adam_epsilon", "num_train_epochs", "max_minutes")),
    ">= 2": (lambda v: v >= 2, ("max_length",)),
    ">= 1, or -1 to use num_train_epochs": (lambda v: v == -1 or v >= 1, ("max_steps",)),
}  # fmt: skip

# Options that transformers 5 removed, and their replacements.
REPLACED = {
    "warmup_ratio": "use warmup_steps, which is a fraction of the run if it is below 1",
    "evaluation_strategy": "use eval_strategy",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "no_cuda": "use use_cpu",
    "group_by_length": "use train_sampling_strategy group_by_length",
}


def validate_minimum(options: Any, low: int, *names: str) -> None:
    """Raise ValueError for the first option in `names` that is below `low`. Options may be None."""
    for name in names:
        if getattr(options, name) is not None and getattr(options, name) < low:
            raise ValueError(f"{name}={getattr(options, name)}: must be >= {low}")


@dataclass
class CheckedArguments:
    """Mixin for TrainingArguments or a TRL config, with the options and checks that all scripts share."""

    output_dir: str | None = HfArg(default="runs/unnamed", help="Folder for the model, checkpoints and results.")
    overwrite_output_dir: bool = HfArg(default=False, help="Delete existing checkpoints and start a new run.")
    do_eval: bool | None = HfArg(default=None, help="Set to false to disable evaluation during and after training.")

    def __post_init__(self):
        if self.do_eval is False:  # even if a recipe enables evaluation
            self.eval_strategy, self.eval_on_start, self.load_best_model_at_end = "no", False, False
            if hasattr(self, "early_stopping_patience"):
                self.early_stopping_patience = None
        for expected, (fits, names) in BOUNDS.items():
            for name in names:
                self._validate_number(name, fits, expected)
        for name in ("save", "eval", "logging"):
            strategy = getattr(self, f"{name}_strategy")
            if getattr(strategy, "value", strategy) == "steps" and (name != "eval" or self.eval_steps != 0):
                expected = "> 0: a number of steps, or a fraction of the run if below 1"
                self._validate_number(f"{name}_steps", lambda value: value > 0, expected)
        self._validate_bf16()
        self.resume_from_checkpoint = wanted_checkpoint(self.resume_from_checkpoint)
        super().__post_init__()

    def _validate_bf16(self):
        """Raise ValueError for bfloat16 without a GPU that supports it, naming the options to use instead."""
        wanted = {"bf16": not self.fp16 if self.bf16 is None else self.bf16, "bf16_full_eval": self.bf16_full_eval}
        for name in (name for name, value in wanted.items() if value):  # in TRL, None means bfloat16
            if not (self.use_cpu or is_torch_bf16_gpu_available() or is_torch_xla_available()):
                raise ValueError(
                    f"{name}=True: this machine has no GPU with bfloat16; train in float32 with --{name} false, or in "
                    "bfloat16 on the CPU with --use_cpu true"
                )

    def _validate_number(self, name: str, fits: Any, expected: str) -> None:
        value = getattr(self, name, None)
        if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value) and fits(value)):
            raise ValueError(f"{name}={value!r}: must be {expected}")


@dataclass
class HrmTrainingArguments(CheckedArguments, TrainingArguments):
    """TrainingArguments with options and defaults that all recursive models share."""

    adam_beta2: float = HfArg(default=0.95, help="beta2 of AdamATan2 or of the --optim optimizer.")
    lr_scheduler_type: SchedulerType | str = HfArg(default="cosine", help="Learning-rate schedule after the warm-up.")
    logging_steps: float = HfArg(default=10, help="Log every N steps; a value below 1 is a fraction of the run.")
    eval_steps: float | None = HfArg(default=500, help="Evaluate every N steps, with --eval_strategy steps.")
    logging_nan_inf_filter: bool = HfArg(default=False, help="Omit non-finite losses from the logged loss.")
    ddp_find_unused_parameters: bool | None = HfArg(default=False, help="Let DDP find parameters without a gradient.")
    ddp_broadcast_buffers: bool | None = HfArg(default=False, help="Let DDP synchronize the model's buffers.")
    save_total_limit: int | None = HfArg(default=3, help="Maximum number of checkpoints to keep; 0 keeps all.")

    global_batch_size: int | None = HfArg(
        default=None, help="Total number of rows per optimizer step; overrides --per_device_train_batch_size."
    )
    adam_atan2: bool = HfArg(default=False, help="Use AdamATan2 instead of the --optim optimizer.")
    lr_min_ratio: float | None = HfArg(default=0.1, help="Final learning rate of cosine decay, relative to the peak.")
    ema_rate: float = HfArg(default=0.0, help="Decay rate of the weights' moving average, e.g. 0.999; 0 disables it.")
    max_nonfinite_steps: int = HfArg(default=20, help="Stop after N non-finite steps in a row.")
    max_minutes: float | None = HfArg(default=None, help="Train for at most N minutes, then evaluate and save.")

    def __post_init__(self):
        super().__post_init__()
        self.deadline = time.monotonic() + 60 * (self.max_minutes or math.inf)
        if self.global_batch_size is not None:
            shares = self.world_size * self.gradient_accumulation_steps
            if self.global_batch_size % shares:
                raise ValueError(
                    f"global_batch_size={self.global_batch_size}: cannot be split among {self.world_size} processes "
                    f"times {self.gradient_accumulation_steps} accumulated batches; choose a multiple of {shares}"
                )
            self.per_device_train_batch_size = self.global_batch_size // shares

    @property
    def peak_learning_rate(self) -> float:
        """Learning rate of the optimizer after the warm-up."""
        return self.learning_rate


@dataclass
class CarrylessTrainingArguments(HrmTrainingArguments):
    """Training arguments for models without a carry: language models and regressors."""

    best_metric: ClassVar[str] = "eval_loss"  # default metric for early stopping and for the best model

    max_grad_norm: float = HfArg(default=1.0, help="Maximum gradient norm; 0 disables clipping.")
    # If this were None, Trainer would use every argument of the forward method whose name contains "label".
    label_names: list[str] | None = HfArg(default_factory=lambda: ["labels"], help="Names of the labels in a batch.")
    early_stopping_patience: int | None = HfArg(default=None, help="Stop after N evaluations without improvement.")
    early_stopping_threshold: float = HfArg(default=0.0, help="Minimum change that counts as an improvement.")

    def __post_init__(self):
        if self.early_stopping_patience is not None:
            if str(getattr(self.eval_strategy, "value", self.eval_strategy)) == "no":
                raise ValueError(
                    f"early_stopping_patience={self.early_stopping_patience}: needs evaluation; set --eval_strategy "
                    "steps and --eval_steps"
                )
            self.load_best_model_at_end = True
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = self.best_metric
        super().__post_init__()


@dataclass
class ModelArguments:
    """Options that select saved weights, or define a new model by type, preset and overrides."""

    model_name_or_path: str | None = HfArg(default=None, help="Folder or Hub name of the weights to start from.")
    model_type: str | None = HfArg(default=None, help="Architecture of a new model, e.g. hrm_puzzle or llama.")
    preset: str | None = HfArg(default=None, help="Preset of one of our architectures, e.g. hrm-27m or hrm-lm-50m.")
    config_overrides: str | None = HfArg(default=None, help="Config fields to set, e.g. hidden_size=64,H_layers=1.")
    attn_implementation: str | None = HfArg(default=None, help="Attention kernel: sdpa, eager, flex_attention, ...")


@dataclass
class TuningArguments:
    """Options for training an adapter instead of the weights."""

    lora_rank: int = HfArg(default=0, help="Rank of the LoRA adapters; 0 trains the weights instead.")
    lora_alpha: int | None = HfArg(default=None, help="Scale adapters by alpha / rank; if unset, alpha is 2 * rank.")
    lora_dropout: float = HfArg(default=0.0, help="Dropout on the inputs of the adapters.")
    lora_targets: str = HfArg(default=ALL_LINEAR, help="Modules to adapt; all-linear for all linear layers.")
    lora_modules_to_save: str | None = HfArg(default=None, help="Comma-separated modules to train in full.")
    use_dora: bool = HfArg(default=False, help="Use DoRA, which also learns the magnitude of each adapted row.")
    load_in: str = HfArg(default="none", help="Quantize the base weights: none, 8bit, or 4bit (QLoRA).")
    adapter: str | None = HfArg(default=None, help="Folder or Hub name of a saved adapter to continue training.")
    merge_adapter: bool = HfArg(default=False, help="Merge the adapter into the weights at the end.")

    def __post_init__(self):
        if self.load_in not in ("none", "8bit", "4bit"):
            raise ValueError(f"load_in={self.load_in!r}: must be one of none, 8bit, 4bit")
        changed = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        own = [name for name in changed if name not in ("adapter", "load_in", "merge_adapter")]
        if self.adapter and own:
            raise ValueError(f"adapter={self.adapter!r}: has its own rank and targets; remove {', '.join(own)}")
        if changed and not self.adapts:
            raise ValueError(f"{', '.join(changed)}: has no effect without an adapter; pass --lora_rank, e.g. 8")
        if self.merge_adapter and self.load_in != "none":
            raise ValueError(
                f"merge_adapter=True: with load_in={self.load_in!r} the result would be quantized; save the adapter "
                "and merge it into the unquantized base: PeftModel.from_pretrained(base, DIR).merge_and_unload()"
            )

    @property
    def adapts(self) -> bool:
        """Whether the run trains an adapter."""
        return bool(self.lora_rank or self.adapter)

    @property
    def saves_adapter(self) -> bool:
        """Whether the run saves only an adapter instead of a complete checkpoint."""
        return self.adapts and not self.merge_adapter


def parse_script(arguments: Sequence[type], description: str | None) -> tuple:
    """Parse the options of a `TrainingRun`. `arguments` are its dataclasses for data, training and other options."""
    data_class, training_class, *others = arguments
    classes = (ModelArguments, data_class, training_class, TuningArguments, *others)
    return parse_recipe(classes, description=description or "")


def parse_recipe(dataclasses: Sequence[type], args: Sequence[str] | None = None, description: str = "") -> tuple:
    """Parse `--recipe FILE` (optional) and flags into instances of `dataclasses`.

    Raises:
        UsageError: a key is unknown (the message names the nearest valid one) or a value is invalid.
    """
    parser = RecipeParser(dataclasses, description)
    args = list(sys.argv[1:] if args is None else args)
    first = ArgumentParser(add_help=False)
    first.add_argument("--recipe")
    path = first.parse_known_args(args)[0].recipe
    try:
        values = load_recipe(path, parser.known) if path else {}
        hints = {name: str(hint) for each in dataclasses for name, hint in get_type_hints(each).items()}
        for action in parser._actions:
            action.required = action.required and action.dest not in values
            if action.dest in values:
                _validate_kind(action.dest, values[action.dest], hints.get(action.dest, ""), path)
            value = values.get(action.dest)
            if isinstance(value, list) and action.nargs == "+":
                values[action.dest] = [action.type(item) if isinstance(item, str) else item for item in value]
        parser.set_defaults(**values)
        *parsed, _namespace, unknown = parser.parse_args_into_dataclasses(args, return_remaining_strings=True)
        parser.validate_known(unknown)
        if path:
            keep_overrides(parsed, values)
    except (ValueError, OSError) as error:  # an argument class rejected a value
        parser.error(str(error))
    return tuple(parsed)


class RecipeParser(HfArgumentParser):
    """Parser for a script's flags and `--recipe`. It raises UsageError instead of exiting.

    Attributes:
        known: names of all options.
    """

    def __init__(self, dataclasses: Sequence[type], description: str = ""):
        super().__init__(list(dataclasses), description=description, formatter_class=_HelpFormatter)
        self.add_argument("--recipe", help="YAML file with any of the options below; flags override it.")
        self.known = {action.dest for action in self._actions}
        for action in self._actions:
            action.type = {str: expand_home, string_to_bool: _switch}.get(action.type, action.type)

    def given(self, flags: Sequence[str]) -> dict[str, Any]:
        """Return only the options set by flags, without the parser's defaults."""
        for action in self._actions:
            action.default, action.required = SUPPRESS, False
        given, unknown = self.parse_known_args(flags)
        self.validate_known(unknown)
        return vars(given)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None):
        """Parse flags. Reject flags of the guides that argparse would mistake for abbreviations (--lr)."""
        for word in sys.argv[1:] if args is None else args:
            name = word.lstrip("-").partition("=")[0].replace("-", "_")
            if word.startswith("--") and name not in self.known and name_of_guide(name, self.known):
                self.validate_known([word])
        return super().parse_known_args(args, namespace)

    def validate_known(self, unknown: Sequence[str]) -> None:
        """Raise UsageError for arguments that the parser did not recognize."""
        if not unknown:
            return
        name, _, value = unknown[0].partition("=")
        if name in self.known:
            self.error(f"{unknown[0]}: an option starts with two hyphens; write --{name} {value or 'VALUE'}")
        self.error(unknown_key(name.lstrip("-"), self.known, "flag"))

    def error(self, message: str):
        """Raise UsageError instead of printing the usage, which lists hundreds of options."""
        of_guide = (
            name_of_guide(message.split()[1].strip("-:"), self.known) if message.startswith("argument") else None
        )
        raise UsageError(f"{message}; {of_guide}" if of_guide else message)


def _switch(text: str | bool) -> bool:
    """Convert a YAML boolean (true, yes, on, ...) to bool."""
    return string_to_bool({"on": "yes", "off": "no"}.get(str(text).lower(), text))


class _HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Formatter that shows defaults and keeps line breaks in the description, which contains commands."""


def load_recipe(path: str | Path, known: set[str]) -> dict[str, Any]:
    """Load a recipe file. Raise ValueError for a missing file, invalid YAML or unknown keys."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise ValueError(f"recipe={path}: is not a file{nearest_file(path, '*.yaml', Path(typed_path(RECIPES)))}")
    values = load_yaml(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: must be a mapping of options to values, not a {type(values).__name__}")
    for key in values:
        if key not in known:
            raise ValueError(f"{path}: " + unknown_key(str(key), known, "key"))
    texts = load_yaml(path, as_text=True)
    values = {key: _as_flag(value, texts.get(key, value)) for key, value in values.items()}
    if isinstance(values.get("config_overrides"), dict):
        values["config_overrides"] = json.dumps(values["config_overrides"])
    return values


def _validate_kind(name: str, value: Any, hint: str, path: str) -> None:
    """Raise ValueError if a recipe's value is a list, mapping or null that the option's type hint does not allow."""
    for word, kind in {"list": list, "dict": dict, "None": type(None)}.items():
        if isinstance(value, kind) and word not in hint.replace("Optional", "None") and name != "config_overrides":
            raise ValueError(f"{path}: {name}={shorten(value)}: must be one value; remove this line for the default")


def _as_flag(value: Any, text: Any) -> Any:
    """Return a recipe's value (or each item of a list) as written in the file, so that 1.10 is not read as 1.1."""
    if value is None or isinstance(value, dict):
        return value
    return list(map(_as_flag, value, text)) if isinstance(value, list) else expand_home(str(text))


def keep_overrides(parsed: Sequence[Any], recipe: dict[str, Any]) -> None:
    """Add a recipe's config overrides to those of a --config_overrides flag, which take precedence."""
    overrides = recipe.get("config_overrides")
    for part in parsed:
        if not isinstance(part, ModelArguments) or part.config_overrides in (overrides, "", None):
            continue
        if (part.model_type, part.preset) == (recipe.get("model_type"), recipe.get("preset")):
            part.config_overrides = json.dumps(parse_overrides(overrides) | parse_overrides(part.config_overrides))


def save_recipe(path: str | Path, *arguments: Any) -> None:
    """Save all options of a run as a recipe that reproduces the run."""
    values: dict[str, Any] = {}
    for part in arguments:
        options = part.to_dict() if isinstance(part, TrainingArguments) else asdict(part)
        for option in fields(part):
            if not option.init or option.name.endswith("_token") or option.name == "overwrite_output_dir":
                continue
            value = options[option.name]
            value = value.value if isinstance(value, Enum) else value
            # Omit empty mappings, and omit None where it is the default.
            if option.default is not None if value is None else value != {}:
                values[option.name] = value
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(yaml.safe_dump(values, sort_keys=False))


def build_config(arguments: ModelArguments, **from_data: Any) -> "PreTrainedConfig":
    """Build the config of a new model from its preset, values from the data, and overrides, in this order.

    Raises:
        ValueError: a model type, preset or field is unknown; the message names the nearest valid one.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from ..registry import architecture_of

    if arguments.model_type is None:
        raise ValueError(
            "model_type=None: pass --model_type for a new model, or --model_name_or_path for saved weights"
        )
    if arguments.model_type not in CONFIG_MAPPING:
        raise ValueError(unknown_key(str(arguments.model_type), set(CONFIG_MAPPING), "model_type"))
    config_class = CONFIG_MAPPING[arguments.model_type]
    changes = checked_overrides(config_class, arguments.config_overrides)
    # Build the config only once: some configs derive fields from others (hrm_text rewrites num_hidden_layers), so
    # rebuilding one from its own fields would give a different config.
    values = {**from_data, **changes}
    if arguments.preset and architecture_of(arguments.model_type) is None:  # transformers' own model types
        raise ValueError(f"preset={arguments.preset!r}: {arguments.model_type} has no presets; use --config_overrides")
    try:
        if arguments.preset:
            return config_class.from_preset(arguments.preset, **values)
        return config_class(**values)
    except StrictDataclassError as error:
        raise ValueError(f"config_overrides={changes}: {error.__cause__ or error}") from error


def checked_overrides(config_class: type["PreTrainedConfig"], overrides: str | None) -> dict[str, Any]:
    """Parse `a=1,b=2` (or a JSON mapping) into fields of a config class, replacing aliases.

    Raises:
        ValueError: a field does not exist, or two names of the same field have different values.
    """
    changes: dict[str, Any] = {}
    valid = {f.name for f in fields(config_class)}
    aliases = config_class.attribute_map
    for key, value in parse_overrides(overrides).items():
        name = aliases.get(key, key)
        if name not in valid:
            raise ValueError(unknown_key(key, valid | set(aliases), f"config field of {config_class.model_type}"))
        if name in changes and changes[name] != value:
            raise ValueError(f"config_overrides sets {name} twice, to {changes[name]} and (as {key}) to {value}")
        changes[name] = value
    return changes


def parse_overrides(overrides: str | None) -> dict[str, Any]:
    """Parse `a=1,b=true,c=[1,2]`, or a mapping in JSON or YAML, into a dict with YAML values."""
    if not overrides:
        return {}
    if overrides.lstrip().startswith("{"):
        return {str(key): value for key, value in parse_yaml(overrides, f"config_overrides={overrides}").items()}
    pairs = {}
    for item in re.split(r",(?=\s*\w+\s*=)", overrides):  # do not split at commas inside lists and mappings
        key, sign, value = item.partition("=")
        if not sign:
            raise ValueError(f"config_overrides={overrides}: {item!r} must have the form field=value")
        pairs[key.strip()] = parse_yaml(value, f"config_overrides={overrides}: {value!r}")
    return pairs


def write_results(folder: str | Path, task: str, metrics: dict[str, Any], **extra: Any) -> Path:
    """Write `results.json` with the task, metrics, extra fields and library versions."""
    path = Path(folder) / "results.json"
    path.write_text(json.dumps({"task": task, "metrics": metrics, **extra, "versions": library_versions()}, indent=1))
    return path


def hardware_of(args: Any) -> str:
    """Return the devices of a run as text: `NVIDIA H200`, `8 x NVIDIA H200` or `CPU, 2 threads`."""
    import torch

    cuda = args.device.type == "cuda"
    name = torch.cuda.get_device_name(args.device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    return name if args.world_size == 1 else f"{args.world_size} x {name}"


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that can affect a result."""
    names = ("torch", "transformers", "accelerate", "datasets")
    # Our own version is not read from package metadata, which a checkout on PYTHONPATH does not have.
    return {"python": platform.python_version(), "hrm_hf": __version__, **{name: version(name) for name in names}}


def unknown_key(key: str, valid: Collection[str], what: str) -> str:
    """Return an error message for an unknown key, with its replacement or the most similar valid key."""
    replacement = REPLACED.get(key.replace("-", "_")) or name_of_guide(key, valid) if what in ("flag", "key") else None
    if replacement:
        return f"unknown {what} {key!r}; {replacement}"
    nearest = difflib.get_close_matches(key, valid, n=1, cutoff=0.4)
    return f"unknown {what} {key!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")


def split_names(values: str | Sequence) -> list:
    """Split comma-separated names: `"a,b"`, `["a,b"]` and `["a", "b"]` give the same list."""
    values = [values] if isinstance(values, str) else values
    return [part.strip() for value in values for part in str(value).split(",") if part.strip()]
