"""Recipes: one YAML file is one run. Read, overridden by flags, saved fully resolved, and reported.

A recipe is a flat mapping of the fields of a script's argument dataclasses. `--recipe FILE` comes first and flags
override it; an unknown key is an error that names the nearest valid one.
"""

import difflib
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, HfArgumentParser, PreTrainedConfig, TrainingArguments
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


@dataclass
class ModelArguments:
    """Which model: saved weights, or a fresh one from a type, a preset and overrides."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Start from these weights: folder or Hub."})
    model_type: str | None = field(default=None, metadata={"help": "Architecture of a fresh model: hrm_puzzle, ..."})
    preset: str | None = field(default=None, metadata={"help": "Preset of the architecture, e.g. hrm-27m."})
    config_overrides: str | None = field(
        default=None, metadata={"help": "Config fields, e.g. hidden_size=64,H_layers=1 (in a recipe: a mapping)."}
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "sdpa, eager, flex_attention, ..."})


@dataclass
class PuzzleDataArguments:
    """Which puzzles."""

    data_path: str | None = field(default=None, metadata={"help": "Puzzle data set: folder or OWNER/NAME."})
    build_data: str | None = field(
        default=None, metadata={"help": "Arguments of `hrm-hf data` that build data_path if it does not exist."}
    )
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_split: str | None = field(default="test", metadata={"help": "Split to evaluate on; empty for none."})
    max_train_rows: int | None = field(default=None, metadata={"help": "Train on the first rows only."})
    max_eval_rows: int | None = field(default=None, metadata={"help": "Evaluate on the first rows only."})
    puzzle_embeddings: str = field(
        default="keep",
        metadata={"help": "With --model_name_or_path: keep the table, reset it (new puzzles), or extend it."},
    )
    freeze_weights: bool = field(default=False, metadata={"help": "Train the puzzle table alone."})


def parse_recipe(dataclasses: Sequence[type], args: Sequence[str] | None = None, description: str = "") -> tuple:
    """Instances of `dataclasses` from `--recipe FILE` (optional) and flags.

    Raises:
        SystemExit: bad usage, with status 2 and a message that names the key and the nearest valid one.
    """
    parser = HfArgumentParser(list(dataclasses), description=description)
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
    *parsed, _namespace, unknown = parser.parse_args_into_dataclasses(args, return_remaining_strings=True)
    if unknown:
        parser.error(_unknown_key(unknown[0].lstrip("-").split("=")[0], known, "flag"))
    return tuple(parsed)


def load_recipe(path: str | Path, known: set[str]) -> dict[str, Any]:
    """The mapping in a recipe file. Raises ValueError for broken YAML or unknown keys."""
    try:
        values = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must be a mapping of option: value, it is a {type(values).__name__}")
    for key in values:
        if key not in known:
            raise ValueError(f"{path}: " + _unknown_key(str(key), known, "key"))
    if isinstance(values.get("config_overrides"), dict):
        values["config_overrides"] = json.dumps(values["config_overrides"])
    # As text, numbers pass through the type of their option like flags do.
    return {key: str(value) if isinstance(value, (bool, int, float)) else value for key, value in values.items()}


def save_recipe(path: str | Path, *arguments: Any) -> None:
    """Writes every option of a run, so that the file alone reproduces it."""
    values: dict[str, Any] = {}
    for part in arguments:
        options = part.to_dict() if isinstance(part, TrainingArguments) else asdict(part)
        for option in fields(part):
            if not option.init or option.name.endswith("_token"):
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
    if not arguments.preset:
        config = AutoConfig.for_model(arguments.model_type, **from_data)
        return apply_overrides(config, arguments.config_overrides)
    config_class = CONFIG_MAPPING[arguments.model_type]
    return apply_overrides(config_class.from_preset(arguments.preset, **from_data), arguments.config_overrides)


def apply_overrides(config: PreTrainedConfig, overrides: str | None) -> PreTrainedConfig:
    """A config with `a=1,b=2` (or a JSON mapping) applied and validated anew."""
    changes = parse_overrides(overrides)
    valid = {f.name for f in fields(config)}
    for key in changes:
        if key not in valid:
            raise ValueError(_unknown_key(key, valid, f"config field of {config.model_type}"))
    try:
        return type(config)(**{**{name: getattr(config, name) for name in valid}, **changes})
    except StrictDataclassError as error:
        raise ValueError(f"config_overrides {changes}: {error.__cause__ or error}") from error


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


def library_versions() -> dict[str, str]:
    """Versions that a result depends on."""
    from importlib.metadata import version

    names = ("hrm_hf", "torch", "transformers", "accelerate", "datasets")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _recipe_option():
    from argparse import ArgumentParser

    parser = ArgumentParser(add_help=False)
    parser.add_argument("--recipe")
    return parser


def _unknown_key(key: str, valid: set[str], what: str) -> str:
    nearest = difflib.get_close_matches(key, valid, n=1, cutoff=0.4)
    return f"unknown {what} {key!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")
