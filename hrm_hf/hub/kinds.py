"""Kinds of models: a command that needs a puzzle solver says at once that it was given a language model."""

from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from ..io.bounded_files import load_json
from ..io.model_names import CONFIGS, ModelError, find_model
from ..registry import ARCHITECTURES, ArchitectureSpec, architecture_of
from .errors import LONGEST, printable


IS_ADAPTER = "is a PEFT adapter; merge it first (merge_and_unload) and save the whole model"


@dataclass(frozen=True)
class Kind:
    """Models that a command can do something with.

    Attributes:
        title: in a message, as "a puzzle solver".
        commands: that take such a model.
        pipeline: of its architectures in the registry.
        ability: in `registry.ABILITIES`, of the architectures that are meant where a pipeline has others too.
    """

    title: str
    commands: str
    pipeline: str
    ability: str | None = None

    def has(self, row: ArchitectureSpec) -> bool:
        """Whether an architecture of this package is of this kind."""
        return row.pipeline == self.pipeline and (self.ability is None or self.ability in row.abilities)

    def takes(self, config: PreTrainedConfig) -> bool:
        """Whether a model is of this kind; language models may also be transformers' own."""
        row = architecture_of(config)
        if row is None:
            return self is LANGUAGE_MODEL and type(config) in AutoModelForCausalLM._model_mapping
        return self.has(row)

    def __str__(self) -> str:
        types = [row.model_type for row in ARCHITECTURES.values() if self.has(row)]
        types += ["one of transformers"] if self is LANGUAGE_MODEL else []
        return f"{self.title} ({' or '.join(filter(None, (', '.join(types[:-1]), types[-1])))})"


PUZZLE_SOLVER = Kind("a puzzle solver", "solve, eval puzzles and app", "puzzle-solving")
GO_CODER = Kind("a Go coder", "go, eval go, serve and app", "text-generation", "refinement")
LANGUAGE_MODEL = Kind("a language model", "eval lm, eval reasoning, rlm, serve and app", "text-generation")
REGRESSOR = Kind("a regressor of maps", "eval cosmo and app", "cosmology-regression")
KINDS = (PUZZLE_SOLVER, GO_CODER, LANGUAGE_MODEL, REGRESSOR)  # the first that takes a model is its own


def load_config(name: str, wanted: Kind | None = None, adapters: bool = False) -> PreTrainedConfig:
    """The config of a folder or a model on the Hub, whose weights are not looked at.

    Args:
        wanted: what the model has to be; None for any.
        adapters: take a PEFT adapter, whose config is that of its base.

    Raises:
        ModelError: no such model, an adapter unless `adapters`, a config that cannot be read, or another kind.
    """
    find_model(name)
    adapter = Path(name, CONFIGS[1])
    source: str | None = name
    if adapter.is_file() and not Path(name, CONFIGS[0]).is_file():
        source = load_json(adapter).get("base_model_name_or_path")
        if not (adapters and source):
            raise ModelError(f"{name} {IS_ADAPTER}")
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        said = printable(shorten(str(error), LONGEST, placeholder=" ..."))  # of the library: a paragraph or two
        raise ModelError(f"{name} is no model that can be read: {said}") from error
    if wanted is not None and not wanted.takes(config):
        said = f"{name} is a model of type {config.model_type}; expected {wanted}"
        if own := next((kind for kind in KINDS if kind.takes(config)), None):
            said += f". For {own.title} there are hrm-hf {own.commands}"
        raise ModelError(said)
    return config
