"""Range checks for config fields, run whenever a field is set, and a check for unknown field names.

    H_layers: int = bounded(4, COUNT)

A value out of range raises an error that names the field. huggingface_hub's strict dataclasses run the validators at
each assignment. `BoundedFields` tells each validator the name of its field, and runs all validators again at the end,
because strict dataclasses skip values that are passed under an alias. It also rejects names that neither the config
nor transformers reads; transformers alone would store them silently.
"""

import dataclasses
import difflib
import inspect
import reprlib
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf
from types import MappingProxyType
from typing import Any, ClassVar

from transformers import GenerationConfig
from transformers.utils import logging


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Bound:
    """Valid range of a number, or of each number in a list. None is always valid.

    `whole` allows only integers. `lists` gives the minimum and maximum length of a list; None rejects lists.
    """

    low: float
    high: float = inf
    whole: bool = False
    lists: tuple[int, int] | None = None
    name: str = "the value"

    def __call__(self, value: Any) -> None:
        """Raise ValueError for an invalid value. The message names the field and its range."""
        if isinstance(value, (list, tuple)) and self.lists is not None:
            if not self.lists[0] <= len(value) <= self.lists[1]:
                raise ValueError(f"{self.name} has {len(value)} entries: must have {self.lists[0]} to {self.lists[1]}")
            for entry in value:
                self(entry)
            return
        kinds = int if self.whole else (int, float)
        number = isinstance(value, kinds) and not isinstance(value, bool)
        # NaN fails every comparison, and no field may be infinite.
        if value is not None and not (number and self.low <= value <= self.high and abs(value) < inf):
            kind = "an integer" if self.whole else "a number"
            bounds = f">= {self.low:g}" if self.high == inf else f"in [{self.low:g}, {self.high:g}]"
            raise ValueError(f"{self.name}={value!r}: must be {kind} {bounds}")


number, whole = Bound, partial(Bound, whole=True)


def bounded(default: Any, bound: Bound) -> Any:
    """Declare a config field with its default and its bound."""
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata={"validator": bound})
    return dataclasses.field(default=default, metadata={"validator": bound})


# Bounds that several configs share.
COUNT, SOME = whole(1), whole(0)
TOKEN_ID = whole(-1, lists=(0, 1024))
PROBABILITY = number(0, 1)
SPREAD = number(1e-12)  # standard deviation of initial weights; with 0, the weights could not learn
LOSS_WEIGHT = number(0)
ANY_NUMBER = number(-inf)


# Names that a config accepts in addition to its own fields and the public attributes of its class.
LIBRARY_FIELDS = frozenset(
    (
        # read by PreTrainedConfig when a config is built
        "attn_implementation", "experts_implementation", "partial_rotary_factor", "rope_scaling", "rope_theta",
        # fields that models and heads of transformers read from any config
        "classifier_dropout", "loss_type", "tie_last_hidden_states", "token_classification_bias",
        # written into config.json by transformers
        "adapters", "auto_map", "compression_config", "custom_pipelines", "distributed_config", "quantization_config",
        # present in every config.json saved before transformers 5
        "add_cross_attention", "bad_words_ids", "cross_attention_hidden_size", "finetuning_task", "is_decoder",
        "prefix", "pruned_heads", "sep_token_id", "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder",
        "tie_word_embeddings", "tokenizer_class", "torchscript", "use_bfloat16",
        *vars(GenerationConfig()),
        *GenerationConfig._get_default_generation_params(),
    )
)  # fmt: skip
# Names that other libraries and models use for our fields.
OTHER_NAMES = {
    "d_ff": "intermediate_size", "d_model": "hidden_size", "dim": "hidden_size", "n_ctx": "max_position_embeddings",
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers", "n_positions": "max_position_embeddings", "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
}  # fmt: skip
MISSPELLED = 0.8  # minimum difflib similarity for a name to count as misspelled
# The minimum is higher if tokenizer options are also accepted, because vocab_file resembles vocab_size (0.8).
MISSPELLED_FIELD = 0.86


@lru_cache
def _accepted(config_class: type) -> frozenset[str]:
    """Return the names and aliases of a config class's fields, and its other settable attributes."""
    attributes = {name: inspect.getattr_static(config_class, name) for name in dir(config_class)}
    fixed = {name for name, at in attributes.items() if inspect.isroutine(at) or getattr(at, "fset", at) is None}
    fields = {field.name for field in dataclasses.fields(config_class)}
    return LIBRARY_FIELDS | fields | set(config_class.attribute_map) | (set(attributes) - fixed)


def _unknown(config_class: type, given: dict[str, Any], cutoff: float = 0.0) -> list[str]:
    """Return an error message for each unknown name that resembles a config field.

    Names with a leading underscore are internal to transformers and accepted.
    """
    accepted, found = _accepted(config_class), []
    for name in [name for name in given if name not in accepted and not name.startswith("_")]:
        public = sorted(one for one in accepted if not one.startswith("_"))
        near = [OTHER_NAMES[name]] if OTHER_NAMES.get(name) in accepted else []
        near += difflib.get_close_matches(name, public, n=1, cutoff=cutoff)
        if near:
            value = reprlib.repr(given[name])
            found.append(f"{name}={value}: {config_class.__name__} has no such field; did you mean {near[0]}?")
    return found


class BoundedFields:
    """Mixin for config classes with fields declared by `bounded`.

    An unknown name raises TypeError with the closest field. `from_pretrained(folder, name=...)` raises it only for
    likely misspellings, because Auto classes also pass on tokenizer options. Names that transformers passes or saves
    are accepted (`LIBRARY_FIELDS` and names with a leading underscore). For a saved config (one with a `model_type`),
    unknown names only give a warning, because another version or another library may have written them.
    """

    def __init_subclass__(cls, *args: Any, **kwargs: Any):
        for name, field in vars(cls).items():
            if isinstance(field, dataclasses.Field) and "validator" in field.metadata:
                bound = dataclasses.replace(field.metadata["validator"], name=name)
                field.metadata = MappingProxyType({**field.metadata, "validator": bound})
        super().__init_subclass__(*args, **kwargs)

    # The package sets this to make `pipeline` use the package's pipelines. The pipelines in a checkpoint are for
    # processes without the package: they need trust_remote_code and have fewer features.
    _has_pipelines: ClassVar[bool] = False

    def __post_init__(self, **kwargs: Any):
        if (unknown := "; ".join(_unknown(type(self), kwargs))) and "model_type" not in kwargs:
            raise TypeError(unknown)
        if unknown:
            logger.warning_once(f"The saved config has fields that this version of hrm_hf does not read: {unknown}")
        if self._has_pipelines:
            kwargs.pop("custom_pipelines", None)
        if "rope_theta" in kwargs:  # transformers ignores rope_theta if rope_parameters is set
            self.rope_parameters = {**(self.rope_parameters or {}), "rope_theta": kwargs["rope_theta"]}
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """Load a config as transformers does, but raise TypeError if `kwargs` contains a misspelled field."""
        if unknown := _unknown(cls, kwargs, MISSPELLED_FIELD):
            raise TypeError("; ".join(unknown))
        return super().from_dict(config_dict, **kwargs)

    def validate_all_bounds(self):
        """Check all bounds. `@strict` sorts validators by name, so `validate_architecture` runs after this one."""
        for name, validators in self.__validators__.items():
            for validator in validators:
                if isinstance(validator, Bound):
                    validator(getattr(self, name))
        if isinstance(rope := getattr(self, "rope_parameters", None), dict):
            number(1e-6, name="rope_parameters['rope_theta']")(rope.get("rope_theta", 1) or 0)
