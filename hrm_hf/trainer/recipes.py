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
from transformers import HfArgumentParser, PreTrainedConfig, TrainingArguments
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..io.bounded_files import load_yaml


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


@dataclass
class LmDataArguments:
    """Which text, and how it becomes rows of tokens. Sources are described in `text/sources.py`."""

    train_data: list[str] = field(
        default_factory=list,
        metadata={"help": "Text: .jsonl, .txt, .parquet, .gz, folders, or OWNER/NAME:CONFIG of the Hub; with commas."},
    )
    eval_data: list[str] = field(default_factory=list, metadata={"help": "Validation text, as --train_data."})
    train_split: str = field(default="train", metadata={"help": "Split of Hub data sets to train on."})
    eval_split: str = field(default="validation", metadata={"help": "Split of Hub data sets in --eval_data."})
    validation_split_percentage: float = field(
        default=5.0, metadata={"help": "Without --eval_data: share of each source's end that is held out; 0 for none."}
    )
    mix_probabilities: list[str] = field(
        default_factory=list,
        metadata={"help": "Share of each source of --train_data, e.g. 0.7,0.3; without, one after another."},
    )
    mix_stopping: str = field(
        default="first_exhausted",
        metadata={"help": "Mixing ends when the first source does, or (all_exhausted) repeats them until the last."},
    )
    text_column: str = field(default="text", metadata={"help": "JSON key or column that holds the text."})
    document_separator: str | None = field(
        default=None, metadata={"help": "Line that separates documents of a plain text, e.g. <|endoftext|>."}
    )
    on_bad_line: str = field(default="stop", metadata={"help": "Unreadable lines: stop, or skip and count them."})
    max_document_bytes: int = field(
        default=2**25, metadata={"help": "Longest line of a file, and longest document of a plain text, in bytes."}
    )
    max_unpacked_bytes: int | None = field(
        default=None, metadata={"help": "What a packed file may unpack to; by default 64 MiB and 100 times its size."}
    )
    min_text_length: int | None = field(default=None, metadata={"help": "Drop documents of fewer characters."})
    max_text_length: int | None = field(default=None, metadata={"help": "Longest document in characters."})
    long_texts: str = field(default="drop", metadata={"help": "Above --max_text_length: drop the document or cut it."})
    deduplicate: str = field(
        default="none", metadata={"help": "Remove documents seen before: none, exact, or near (needs datasketch)."}
    )
    near_duplicate_threshold: float = field(
        default=0.8, metadata={"help": "Similarity (Jaccard, five-word sequences) from which documents are the same."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first documents only."})
    max_val_samples: int | None = field(
        default=None, metadata={"help": "Validate on the first documents only; of a stream, hold them out."}
    )
    streaming: bool = field(default=False, metadata={"help": "Read training data while training; needs --max_steps."})
    shuffle_buffer: int = field(default=1000, metadata={"help": "Rows among which a stream is shuffled; 0 for none."})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "byte, or a tokenizer of the Hub or a folder; that of the weights by default."}
    )
    block_size: int = field(default=1024, metadata={"help": "Tokens of a row."})
    chunk_overlap: int = field(default=0, metadata={"help": "Tokens that a row repeats from the last, as context."})
    drop_last_block: bool = field(default=False, metadata={"help": "Leave out the last row if it is not full."})
    document_mask: bool = field(
        default=False, metadata={"help": "Documents in one row do not see each other (models with position_ids)."}
    )
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenise."})
    data_cache_dir: str | None = field(default=None, metadata={"help": "Where converted data are kept."})
    prompt: str | None = field(default=None, metadata={"help": "Continue this text at the end of the run."})
    prompt_new_tokens: int = field(default=200, metadata={"help": "Tokens of that continuation."})

    def __post_init__(self):
        self.train_data, self.eval_data = (_listed(values) for values in (self.train_data, self.eval_data))
        self.mix_probabilities = [float(value) for value in _listed(self.mix_probabilities)]
        self._validate_choices()
        self._validate_mixing()
        self._validate_numbers()

    def _validate_choices(self):
        for name, allowed in {
            "on_bad_line": ("stop", "skip"),
            "long_texts": ("drop", "cut"),
            "deduplicate": ("none", "exact", "near"),
            "mix_stopping": ("first_exhausted", "all_exhausted"),
        }.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.streaming and self.deduplicate != "none":
            raise ValueError(f"deduplicate={self.deduplicate!r} has to see all documents first; leave out --streaming")
        held_out = self.eval_data or self.max_val_samples or not self.validation_split_percentage
        if self.streaming and not held_out:
            raise ValueError(
                f"validation_split_percentage={self.validation_split_percentage:g} of a stream is unknown: give "
                "--eval_data, hold out documents with --max_val_samples, or none with --validation_split_percentage 0"
            )

    def _validate_mixing(self):
        shares = self.mix_probabilities
        if shares and len(shares) != len(self.train_data):
            raise ValueError(
                f"mix_probabilities has {len(shares)} values for {len(self.train_data)} sources: {self.train_data}"
            )
        if shares and (min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6):
            raise ValueError(f"mix_probabilities={shares} must be positive and add up to 1, not {sum(shares):g}")

    def _validate_numbers(self):
        if not 0 <= self.validation_split_percentage < 100:
            raise ValueError(f"validation_split_percentage={self.validation_split_percentage} is outside 0..100")
        if not 0 < self.near_duplicate_threshold <= 1:
            raise ValueError(f"near_duplicate_threshold={self.near_duplicate_threshold} is outside 0..1")
        counts = ("block_size", "max_train_samples", "max_val_samples", "max_text_length", "prompt_new_tokens")
        for name in (*counts, "max_document_bytes", "max_unpacked_bytes"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.chunk_overlap < self.block_size:
            raise ValueError(
                f"chunk_overlap={self.chunk_overlap} is not from 0 to {self.block_size - 1}, a row less one"
            )
        if None not in (self.min_text_length, self.max_text_length) and self.min_text_length > self.max_text_length:
            raise ValueError(
                f"min_text_length={self.min_text_length} is above max_text_length={self.max_text_length}: nothing fits"
            )


@dataclass
class GoDataArguments:
    """Which records of Go tasks, and how they become rows of tokens. See `golang/data/collator.py`."""

    train_data: list[str] = field(
        default_factory=list, metadata={"help": "Files of records (.jsonl, .jsonl.gz) to train on; with commas."}
    )
    eval_data: list[str] = field(default_factory=list, metadata={"help": "Files of held-out records."})
    on_bad_line: str = field(default="stop", metadata={"help": "Lines that are no record: stop, or skip and count."})
    max_train_records: int | None = field(default=None, metadata={"help": "Train on the first records only."})
    max_eval_records: int | None = field(default=None, metadata={"help": "Evaluate on the first records only."})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Folder of `hrm-hf data go-tokenizer`; that of the weights by default."}
    )
    max_length: int = field(default=2048, metadata={"help": "Most tokens of a row."})
    problem_budget: int = field(default=256, metadata={"help": "Most tokens of a problem; its end is cut."})
    context_budget: int = field(default=512, metadata={"help": "Most tokens of a context; its middle is cut."})
    plan_budget: int = field(default=512, metadata={"help": "Records with a longer plan are dropped."})
    code_budget: int = field(
        default=1024, metadata={"help": "Records with a longer solution are dropped, longer failed attempts left out."}
    )
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenise."})
    data_cache_dir: str | None = field(default=None, metadata={"help": "Where converted data are kept."})

    def __post_init__(self):
        self.train_data, self.eval_data = _listed(self.train_data), _listed(self.eval_data)
        if self.on_bad_line not in ("stop", "skip"):
            raise ValueError(f"on_bad_line={self.on_bad_line!r} is not one of stop, skip")
        for name in ("max_train_records", "max_eval_records", "max_length", *BUDGETS):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def budgets(self, positions: bool = True) -> dict[str, int]:
        """What `GoStreamBuilder` takes; without `positions` the segments' alone, which a Go coder's config has too."""
        return {name: getattr(self, name) for name in (*(["max_length"] if positions else []), *BUDGETS)}


@dataclass
class CosmoDataArguments:
    """Which maps, and what is done to them. See `cosmology/dataset/collator.py`."""

    data_path: str | None = field(default=None, metadata={"help": "Cosmology data set: folder or OWNER/NAME."})
    build_data: str | None = field(
        default=None,
        metadata={"help": "Arguments of `hrm-hf data` that build or finish data_path; an error if it holds others."},
    )
    train_samples: int | None = field(
        default=None, metadata={"help": "Train on the first maps only; on all that are not held out by default."}
    )
    val_samples: int | None = field(
        default=None,
        metadata={"help": "Last maps of the train split that are held out; a tenth, at most 10,000, by default."},
    )
    test_samples: int | None = field(default=None, metadata={"help": "Test on the first maps only; 0 for none."})
    augment: bool = field(default=True, metadata={"help": "Turn and mirror training maps; move periodic ones."})
    noise_sigma: float = field(
        default=0.0,
        metadata={"help": "Standard deviation of fresh noise on each pixel of noiseless maps, in their unit."},
    )
    stretch: str = field(default="linear", metadata={"help": "linear, or asinh to tame bright pixels."})

    def __post_init__(self):
        for name, least in {"train_samples": 1, "val_samples": 0, "test_samples": 0}.items():
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not 0 <= self.noise_sigma < float("inf"):
            raise ValueError(f"noise_sigma={self.noise_sigma} must be 0 or more")
        if self.stretch not in ("linear", "asinh"):
            raise ValueError(f"stretch={self.stretch!r} is not one of linear, asinh")


@dataclass
class AnswerDataArguments:
    """Which prompts and answers a model is taught by. See `data/answers.py`."""

    train_data: list[str] = field(
        default_factory=list,
        metadata={"help": "Rows to train on: .jsonl (also .gz), .parquet, folders, or OWNER/NAME:CONFIG of the Hub."},
    )
    eval_data: list[str] = field(default_factory=list, metadata={"help": "Held-out rows, as --train_data."})
    train_split: str = field(default="train", metadata={"help": "Split of Hub data sets to train on."})
    eval_split: str = field(default="validation", metadata={"help": "Split of Hub data sets in --eval_data."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first rows only."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first rows only."})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "byte, or a tokenizer of the Hub or a folder; that of the weights by default."}
    )
    data_cache_dir: str | None = field(default=None, metadata={"help": "Where data of the Hub are kept."})

    def __post_init__(self):
        self.train_data, self.eval_data = _listed(self.train_data), _listed(self.eval_data)
        for name in ("max_train_samples", "max_eval_samples"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


BUDGETS = ("problem_budget", "context_budget", "plan_budget", "code_budget")


def _listed(values: str | Sequence) -> list:
    """`"a,b"`, `["a,b"]` and `["a", "b"]` are the same list: flags and recipes write it as they like."""
    values = [values] if isinstance(values, str) else values
    return [part.strip() for value in values for part in str(value).split(",") if part.strip()]


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
    try:
        *parsed, _namespace, unknown = parser.parse_args_into_dataclasses(args, return_remaining_strings=True)
    except ValueError as error:  # what an argument class says about its values
        parser.error(str(error))
    if unknown:
        parser.error(_unknown_key(unknown[0].lstrip("-").split("=")[0], known, "flag"))
    return tuple(parsed)


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
    if arguments.preset and not hasattr(config_class, "from_preset"):  # an architecture of transformers
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
    """What a run computes on, one device a process: `NVIDIA H200`, `8 x NVIDIA H200`, `CPU, 2 threads`.

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
