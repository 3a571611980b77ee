"""Ranges of config fields: data beside each field, checked whenever it is set; and names that are no fields.

    H_layers: int = bounded(4, COUNT)

A wrong value then raises an error that names the field. huggingface_hub's strict data classes run the validators at
each assignment; `BoundedFields` gives them the names of their fields, and runs them once more at the end, because the
strict classes do not validate values that are given by another name of a field. It also rejects names that neither the
config nor transformers reads; transformers itself would store them.
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
    """Least and greatest value of a number, or of each number in a list; None passes.

    `whole` rejects fractions; `lists` is how many entries a list may have (least and most), None for no lists.
    """

    low: float
    high: float = inf
    whole: bool = False
    lists: tuple[int, int] | None = None
    name: str = "the value"

    def __call__(self, value: Any) -> None:
        """Raise ValueError, naming the field, its value and what was expected."""
        if isinstance(value, (list, tuple)) and self.lists is not None:
            if not self.lists[0] <= len(value) <= self.lists[1]:
                raise ValueError(f"{self.name} has {len(value)} entries; expected {self.lists[0]} to {self.lists[1]}")
            for entry in value:
                self(entry)
            return
        kinds = int if self.whole else (int, float)
        number = isinstance(value, kinds) and not isinstance(value, bool)
        # A comparison with NaN is false; infinity is no value of any field.
        if value is not None and not (number and self.low <= value <= self.high and abs(value) < inf):
            kind = "whole number" if self.whole else "number"
            upper = "up" if self.high == inf else f"to {self.high:g}"
            raise ValueError(f"{self.name}={value!r}; expected a {kind} from {self.low:g} {upper}")


number, whole = Bound, partial(Bound, whole=True)


def bounded(default: Any, bound: Bound) -> Any:
    """Declare a field of a config with its default and its bound."""
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata={"validator": bound})
    return dataclasses.field(default=default, metadata={"validator": bound})


# What several configs have in common.
COUNT, SOME = whole(1), whole(0)
TOKEN_ID = whole(-1, lists=(0, 1024))
PROBABILITY = number(0, 1)
SPREAD = number(1e-12)  # standard deviation of new weights; 0 would leave nothing to learn from
LOSS_WEIGHT = number(0)
ANY_NUMBER = number(-inf)


# What a config takes beside its own fields and the public attributes of its class.
LIBRARY_FIELDS = frozenset(
    (
        # read by PreTrainedConfig when a config is built
        "attn_implementation", "experts_implementation", "partial_rotary_factor", "rope_scaling", "rope_theta",
        # read from any config by models and heads
        "classifier_dropout", "loss_type", "tie_last_hidden_states", "token_classification_bias",
        # written into config.json by the library
        "adapters", "auto_map", "compression_config", "custom_pipelines", "distributed_config", "quantization_config",
        # in the config.json of every model before transformers 5
        "add_cross_attention", "bad_words_ids", "cross_attention_hidden_size", "finetuning_task", "is_decoder",
        "prefix", "pruned_heads", "sep_token_id", "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder",
        "tie_word_embeddings", "tokenizer_class", "torchscript", "use_bfloat16",
        *vars(GenerationConfig()),
        *GenerationConfig._get_default_generation_params(),
    )
)  # fmt: skip
# What other libraries and models call a field.
OTHER_NAMES = {
    "d_ff": "intermediate_size", "d_model": "hidden_size", "dim": "hidden_size", "n_ctx": "max_position_embeddings",
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers", "n_positions": "max_position_embeddings", "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
}  # fmt: skip
MISSPELLED = 0.8  # likeness, of difflib, from which a name is another one with a mistake
MISSPELLED_FIELD = 0.86  # the same beside options of tokenizers: vocab_file is 0.8 like vocab_size


@lru_cache
def _accepted(config_class: type) -> frozenset[str]:
    """Names of the fields of a config class, their aliases, and its attributes that can be set."""
    attributes = {name: inspect.getattr_static(config_class, name) for name in dir(config_class)}
    fixed = {name for name, at in attributes.items() if inspect.isroutine(at) or getattr(at, "fset", at) is None}
    fields = {field.name for field in dataclasses.fields(config_class)}
    return LIBRARY_FIELDS | fields | set(config_class.attribute_map) | (set(attributes) - fixed)


def _unknown(config_class: type, given: dict[str, Any], cutoff: float = 0.0) -> list[str]:
    """What to say of names that neither a config class nor transformers reads, if some field is like them.

    Names with an underscore in front are the library's own.
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
    """For config classes whose fields are made by `bounded`.

    An unknown name raises TypeError with the nearest field, in `from_pretrained(folder, name=...)` only if it looks
    misspelled, because Auto classes pass on options of tokenizers. What transformers passes or has saved is accepted
    (`LIBRARY_FIELDS`, names with an underscore in front). A saved config, which has a `model_type`, is read with all
    its fields, because another version or another library may have written them; unknown ones give a warning.
    """

    def __init_subclass__(cls, *args: Any, **kwargs: Any):
        for name, field in vars(cls).items():
            if isinstance(field, dataclasses.Field) and "validator" in field.metadata:
                bound = dataclasses.replace(field.metadata["validator"], name=name)
                field.metadata = MappingProxyType({**field.metadata, "validator": bound})
        super().__init_subclass__(*args, **kwargs)

    # The package sets this, so that `pipeline` takes the package's pipelines. Those that a checkpoint carries for
    # processes without the package would have to be trusted first, and can do less.
    _has_pipelines: ClassVar[bool] = False

    def __post_init__(self, **kwargs: Any):
        if (unknown := "; ".join(_unknown(type(self), kwargs))) and "model_type" not in kwargs:
            raise TypeError(unknown)
        if unknown:
            logger.warning_once(f"A saved config has fields that this version of the code does not read: {unknown}")
        if self._has_pipelines:
            kwargs.pop("custom_pipelines", None)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """As in transformers. Raises TypeError for a misspelled field among `kwargs`."""
        if unknown := _unknown(cls, kwargs, MISSPELLED_FIELD):
            raise TypeError("; ".join(unknown))
        return super().from_dict(config_dict, **kwargs)

    def validate_all_bounds(self):
        """Part of `@strict` validation, run in the order of the names, and so before `validate_architecture`."""
        for name, validators in self.__validators__.items():
            for validator in validators:
                if isinstance(validator, Bound):
                    validator(getattr(self, name))
