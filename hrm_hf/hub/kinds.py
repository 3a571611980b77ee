"""Kinds of models. A command that needs a puzzle solver rejects a language model before loading its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from ..io.files import load_json
from ..io.model_names import ADAPTER_CONFIG, CONFIG, ModelError, find_model


if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from ..registry import ArchitectureSpec

IS_ADAPTER = "is a PEFT adapter; merge it first (merge_and_unload) and save the complete model"


@dataclass(frozen=True)
class Kind:
    """A kind of model that some commands accept.

    Attributes:
        title: name used in messages, such as "a puzzle solver".
        commands: commands that accept this kind.
        auto_class: name of the Auto class that loads the head, in the registry and in `auto_map` of config.json.
        ability: entry of `registry.ABILITIES` that the architecture must also have, if any.
    """

    title: str
    commands: str
    auto_class: str
    ability: str | None = None

    def has(self, row: ArchitectureSpec) -> bool:
        """Check whether one of this package's architectures belongs to this kind."""
        loaded_by = {auto_class.__name__ for auto_class in row.head_auto_classes}
        return self.auto_class in loaded_by and (self.ability is None or self.ability in row.abilities)

    def takes(self, config: PreTrainedConfig) -> bool:
        """Check whether a config belongs to a model of this kind. Language models may also come from transformers."""
        from transformers import AutoModelForCausalLM

        from ..registry import architecture_of

        row = architecture_of(config)
        if row is None:
            return self is LANGUAGE_MODEL and type(config) in AutoModelForCausalLM._model_mapping
        return self.has(row)


PUZZLE_SOLVER = Kind("a puzzle solver", "solve, eval puzzles and app", "AutoModelForPuzzleSolving")
LANGUAGE_MODEL = Kind(
    "a language model",
    "eval lm, eval reasoning, rlm, serve and app (for a Go coder also go and eval go)",
    "AutoModelForCausalLM",
)
REGRESSOR = Kind("a map regressor", "eval cosmo and app", "AutoModelForImageClassification")
MASS_MAPPER = Kind("a mass mapper (a model of mass maps)", "eval cosmo-map and app", "AutoModelForImageToImage")
KINDS = (PUZZLE_SOLVER, LANGUAGE_MODEL, REGRESSOR, MASS_MAPPER)  # every model belongs to one of these kinds
GO_CODER = Kind("a Go coder", "go and eval go", "AutoModelForCausalLM", "refinement")


def validate_kind(name: str, wanted: Kind) -> None:
    """Raise ModelError if a folder's config.json is unreadable or names Auto classes of a different kind.

    This fast check accepts a config.json without Auto classes, and any model on the Hub; `load_config` checks those.
    """
    file = Path(name, CONFIG)
    try:
        stated = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if not isinstance(stated, dict):
            raise ValueError(f"{CONFIG} contains {json.dumps(stated)[:40]}; expected an object")
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(name, error) from error
    auto_map = stated.get("auto_map")
    heads = {each for each in auto_map if each.startswith("AutoModelFor")} if isinstance(auto_map, dict) else set()
    if heads and wanted.auto_class not in heads:
        own = next((kind for kind in KINDS if kind.auto_class in heads), None)
        raise _of_another_kind(name, stated.get("model_type"), wanted, own)


def load_config(name: str, wanted: Kind | None = None, adapters: bool = False) -> PreTrainedConfig:
    """Load a config from a folder or from a model on the Hub.

    Args:
        wanted: required kind of the model; None for any.
        adapters: accept a PEFT adapter, and return the config of its base model.

    Raises:
        ModelError: the model is missing, of a different kind, or a rejected adapter, or its config is unreadable.
    """
    find_model(name)
    adapter = Path(name, ADAPTER_CONFIG)
    source: str | None = name
    if adapter.is_file() and not Path(name, CONFIG).is_file():
        source = load_json(adapter)
        source = source.get("base_model_name_or_path") if isinstance(source, dict) else None
        if not (adapters and isinstance(source, str) and source):
            raise ModelError(f"{name} {IS_ADAPTER}")
    elif wanted is not None:
        validate_kind(name, wanted)
    from .. import register

    register()  # takes seconds, so the fast checks come first
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from .manifests import READ_ERRORS

    try:
        config = AutoConfig.from_pretrained(source)
    except (*READ_ERRORS, StrictDataclassError) as error:
        raise _unreadable(name, error) from error
    if wanted is not None and not wanted.takes(config):
        own = next((kind for kind in KINDS if kind.takes(config)), None)
        raise _of_another_kind(name, config.model_type, wanted, own)
    return config


def load_network(name: str, auto_class: Any, **options: Any) -> PreTrainedModel:
    """Load a model in eval mode. Raise CheckpointError for missing, unreadable, mismatched or non-finite weights."""
    from ..models.modeling_utils import broken_weights, only_errors_logged
    from .manifests import READ_ERRORS, CheckpointError

    options = {"output_loading_info": True, "ignore_mismatched_sizes": True, **options}
    try:
        with only_errors_logged():  # hides the long table of missing and mismatched weights
            network, info = auto_class.from_pretrained(name, **options)
    except READ_ERRORS as error:
        reason = shorten(str(error), 300, placeholder=" ...")
        raise CheckpointError(f"{name}: the weights cannot be read ({type(error).__name__}: {reason})") from error
    problems = {
        "missing": sorted(info["missing_keys"]),
        "of a different shape than in config.json": sorted(key for key, *_ in info["mismatched_keys"]),
        "not finite": broken_weights(network.state_dict()),
    }
    for problem, names in problems.items():
        if names:
            raise CheckpointError(f"{name}: {len(names)} weights are {problem}, e.g. {names[0]}; save the model again")
    return network.eval()


def _unreadable(name: str, error: Exception) -> ModelError:
    reason = shorten(str(error), 300, placeholder=" ...")  # transformers' messages can be long
    return ModelError(f"{name}: the model cannot be read: {reason}")


def _of_another_kind(name: str, model_type: Any, wanted: Kind, own: Kind | None) -> ModelError:
    instead = f". For {own.title}, use hrm-hf {own.commands}" if own else ""
    return ModelError(f"{name} is a model of type {model_type}; expected {wanted.title}{instead}")
