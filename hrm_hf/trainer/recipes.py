"""Recipes: one YAML file is one run. Read, overridden by flags, saved fully resolved, and reported.

A recipe is a flat mapping of the fields of a script's argument dataclasses. `--recipe FILE` comes first and flags
override it; an unknown key is an error that names the nearest valid one.
"""

import difflib
import json
import platform
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import HfArgumentParser, PreTrainedConfig, TrainingArguments
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .._version import __version__
from ..io.files import load_yaml
from ..io.usage import UsageError
from ..registry import architecture_of


@dataclass
class ModelArguments:
    """Which model: saved weights, or a fresh one from a type, a preset and overrides."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Start from these weights: folder or Hub."})
    model_type: str | None = field(
        default=None, metadata={"help": "Architecture of a fresh model: hrm_puzzle, hrm_lm, hrm_cosmo, llama, ..."}
    )
    preset: str | None = field(
        default=None, metadata={"help": "Preset of our architectures, e.g. hrm-27m, hrm-lm-50m."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Config fields, e.g. hidden_size=64,H_layers=1 (in a recipe: a mapping)."}
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "sdpa, eager, flex_attention, ..."})


def parse_recipe(dataclasses: Sequence[type], args: Sequence[str] | None = None, description: str = "") -> tuple:
    """Instances of `dataclasses` from `--recipe FILE` (optional) and flags.

    Raises:
        UsageError: names the key and the nearest valid one.
    """
    parser = _Parser(dataclasses, description)
    parser.add_argument("--recipe", help="YAML file with any of the options below; flags override it.")
    args = list(sys.argv[1:] if args is None else args)
    known = {action.dest for action in parser._actions}
    given, _ = _recipe_option().parse_known_args(args)
    if given.recipe:
        try:
            values = load_recipe(given.recipe, known)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        parser.set_defaults(**values)
        for action in parser._actions:
            action.required = action.required and action.dest not in values
            if isinstance(values.get(action.dest), list) and action.nargs is None and action.type in (int, float):
                parser.error(f"{given.recipe}: {action.dest} takes one value, not the list {values[action.dest]}")
    try:
        *parsed, _namespace, unknown = parser.parse_args_into_dataclasses(args, return_remaining_strings=True)
        if given.recipe:
            _keep_overrides(parsed, values)
    except ValueError as error:  # what an argument class says about its values
        parser.error(str(error))
    if unknown:
        parser.error(_unknown_key(unknown[0].lstrip("-").split("=")[0], known, "flag"))
    return tuple(parsed)


class _Parser(HfArgumentParser):
    def __init__(self, dataclasses: Sequence[type], description: str):
        super().__init__(list(dataclasses), description=description, formatter_class=_HelpFormatter)

    def error(self, message: str):
        """Raises UsageError: the usage above a message would be hundreds of options."""
        raise UsageError(message)


class _HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Defaults beside the options, and the description in its own lines, some of which are commands."""


def load_recipe(path: str | Path, known: set[str]) -> dict[str, Any]:
    """The mapping in a recipe file. Raises ValueError for broken YAML or unknown keys."""
    values = load_yaml(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a mapping of option: value, it is a {type(values).__name__}")
    for key in values:
        if key not in known:
            raise ValueError(f"{path}: " + _unknown_key(str(key), known, "key"))
    if isinstance(values.get("config_overrides"), dict):
        values["config_overrides"] = json.dumps(values["config_overrides"])
    # As text, numbers pass through the type of their option like flags do.
    return {key: str(value) if isinstance(value, (bool, int, float)) else value for key, value in values.items()}


def _keep_overrides(parsed: Sequence[Any], recipe: dict[str, Any]) -> None:
    """A flag changes single fields of what a recipe overrides in the config of its model, and leaves the others."""
    overrides = recipe.get("config_overrides")
    for part in parsed:
        if not isinstance(part, ModelArguments) or part.config_overrides in (overrides, "", None):
            continue
        if (part.model_type, part.preset) == (recipe.get("model_type"), recipe.get("preset")):
            part.config_overrides = json.dumps(parse_overrides(overrides) | parse_overrides(part.config_overrides))


def save_recipe(path: str | Path, *arguments: Any) -> None:
    """Writes every option of a run, so that the file alone reproduces it."""
    values: dict[str, Any] = {}
    for part in arguments:
        options = part.to_dict() if isinstance(part, TrainingArguments) else asdict(part)
        for option in fields(part):
            if not option.init or option.name.endswith("_token") or option.name == "overwrite_output_dir":
                continue
            value = options[option.name]
            value = value.value if isinstance(value, Enum) else value
            # None is left out where it is the default, and kept where it says something.
            if (value is None and option.default is not None) or isinstance(value, (str, int, float, bool, list)):
                values[option.name] = value
            elif isinstance(value, dict) and value:
                values[option.name] = value
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(yaml.safe_dump(values, sort_keys=False))


def build_config(arguments: ModelArguments, **from_data: Any) -> PreTrainedConfig:
    """The config of a fresh model: preset, then what the data decide, then overrides.

    Raises:
        ValueError: unknown model type, preset or field, each with the nearest valid name.
    """
    if arguments.model_type is None:
        raise ValueError("no model: give --model_type for a fresh one, or --model_name_or_path for saved weights")
    if arguments.model_type not in CONFIG_MAPPING:
        raise ValueError(_unknown_key(str(arguments.model_type), set(CONFIG_MAPPING), "model_type"))
    config_class = CONFIG_MAPPING[arguments.model_type]
    changes = checked_overrides(config_class, arguments.config_overrides)
    # Built once from everything: some configs derive fields from others (hrm_text rewrites num_hidden_layers), so that
    # rebuilding one from its own fields would give another.
    values = {**from_data, **changes}
    if arguments.preset and architecture_of(arguments.model_type) is None:  # an architecture of transformers
        raise ValueError(f"{arguments.model_type} has no presets; set its fields with --config_overrides")
    try:
        if arguments.preset:
            return config_class.from_preset(arguments.preset, **values)
        return config_class(**values)
    except StrictDataclassError as error:
        raise ValueError(f"config_overrides {changes}: {error.__cause__ or error}") from error


def checked_overrides(config_class: type[PreTrainedConfig], overrides: str | None) -> dict[str, Any]:
    """`a=1,b=2` (or a JSON mapping) as fields of a config class, by the names that it stores.

    Raises:
        ValueError: a field that does not exist, or two names of one field with different values.
    """
    changes: dict[str, Any] = {}
    valid = {f.name for f in fields(config_class)}
    aliases = config_class.attribute_map
    for key, value in parse_overrides(overrides).items():
        name = aliases.get(key, key)
        if name not in valid:
            raise ValueError(_unknown_key(key, valid | set(aliases), f"config field of {config_class.model_type}"))
        if changes.setdefault(name, value) != value:
            raise ValueError(f"config_overrides gives {name} twice, as {changes[name]} and (by {key}) as {value}")
    return changes


def parse_overrides(overrides: str | None) -> dict[str, Any]:
    """`a=1,b=true,c=rope` as a dict with YAML scalars; JSON mappings pass through."""
    if not overrides:
        return {}
    if overrides.lstrip().startswith("{"):
        try:
            return json.loads(overrides)
        except ValueError as error:
            raise ValueError(f"config_overrides is not valid JSON ({error}): {overrides}") from error
    pairs = {}
    for item in overrides.split(","):
        key, sign, value = item.partition("=")
        if not sign:
            raise ValueError(f"config_overrides: {item!r} is not of the form field=value")
        pairs[key.strip()] = yaml.safe_load(value)
    return pairs


def write_results(folder: str | Path, task: str, metrics: dict[str, Any], **extra: Any) -> Path:
    """Writes `results.json`: task, metrics, what else is given, and the versions it was measured with."""
    path = Path(folder) / "results.json"
    path.write_text(json.dumps({"task": task, "metrics": metrics, **extra, "versions": library_versions()}, indent=1))
    return path


def hardware_of(args: Any) -> str:
    """Names the devices of a run, one a process: `NVIDIA H200`, `8 x NVIDIA H200`, `CPU, 2 threads`.

    Args:
        args: TrainingArguments.
    """
    import torch

    name = args.device.type
    if name == "cuda":
        name = torch.cuda.get_device_name(args.device)
    elif name == "cpu":
        name = f"CPU, {torch.get_num_threads()} threads"
    return name if args.world_size == 1 else f"{args.world_size} x {name}"


def library_versions() -> dict[str, str]:
    """Versions that a result depends on."""
    from importlib.metadata import version

    names = ("torch", "transformers", "accelerate", "datasets")
    # Our own is not asked of the installation: a checkout on PYTHONPATH has none.
    return {"python": platform.python_version(), "hrm_hf": __version__, **{name: version(name) for name in names}}


def _recipe_option() -> ArgumentParser:
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--recipe")
    return parser


def _unknown_key(key: str, valid: set[str], what: str) -> str:
    nearest = difflib.get_close_matches(key, valid, n=1, cutoff=0.4)
    return f"unknown {what} {key!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")
