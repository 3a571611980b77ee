"""Bounds of config fields: data beside each field, checked whenever it is set, so before anything is built from it.

    H_layers: int = bounded(4, LAYERS)

A config comes from strangers with every checkpoint. Without bounds, 1e12 layers build until memory is gone, 1e12
cycles never end, and a NaN trains to nothing. The upper bounds are generous: 10 times what published models have, or
more. They do not promise that a model of that size fits; `MAX_PARAMETERS` and `MAX_LAYER_VISITS` bound the whole.

huggingface_hub's strict data classes run the validators at each assignment; `BoundedFields` gives them the names of
their fields, and runs them once more at the end, since values given by another name of a field come in unseen.
"""

import dataclasses
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar


MAX_PARAMETERS = 10**12  # the largest dense models published have about half of it; 2 TB in bfloat16
MAX_LAYER_VISITS = 10**6  # of one forward with all its cycles and steps; HRM has 384, Huginn with 64 loops 260
MAX_DIGITS = 30  # of a number in an error message


@dataclass(frozen=True)
class Bound:
    """Least and greatest value of a number, or of each number in a list; None passes, since types say where it may be.

    `whole` refuses fractions, `lists` says how many entries a list may have (least and most), None that none is taken.
    """

    low: float
    high: float
    whole: bool = False
    lists: tuple[int, int] | None = None
    name: str = "the value"

    def __call__(self, value: Any) -> None:
        """Raises ValueError, naming the field, its value and what was expected."""
        if isinstance(value, (list, tuple)) and self.lists is not None:
            if not self.lists[0] <= len(value) <= self.lists[1]:
                expected = f"{self.lists[0]} to {self.lists[1]}" if self.lists[0] < self.lists[1] else self.lists[0]
                raise ValueError(f"{self.name} has {len(value)} entries; expected {expected}")
            for entry in value:
                self(entry)
        elif value is not None:
            self._validate(value)

    def _validate(self, value: Any) -> None:
        kinds = int if self.whole else (int, float)
        # A comparison with NaN is false.
        if isinstance(value, bool) or not isinstance(value, kinds) or not self.low <= value <= self.high:
            kind = "whole number" if self.whole else "number"
            raise ValueError(
                f"{self.name}={_short(value)}; expected a {kind} from {_plain(self.low)} to {_plain(self.high)}"
            )


@dataclass(frozen=True)
class RopeBound:
    """Every number in `rope_parameters` is finite, and those that divide or scale are positive."""

    name: str = "rope_parameters"

    def __call__(self, value: Any) -> None:
        """Raises ValueError, naming the entry, its value and what was expected."""
        for key, entry in value.items() if isinstance(value, dict) else ():
            bound = dataclasses.replace(ROPE.get(key, ROPE_OTHER), name=f"{self.name}[{str(key)[:40]!r}]")
            if isinstance(entry, dict):
                raise ValueError(f"{bound.name} is a dict; expected a number, a list of numbers or a text")
            if not isinstance(entry, (str, bool)) or key in ROPE:
                bound(entry)


def whole(low: int, high: int, lists: tuple[int, int] | None = None) -> Bound:
    """A bound of integers."""
    return Bound(low, high, whole=True, lists=lists)


def number(low: float, high: float, lists: tuple[int, int] | None = None) -> Bound:
    """A bound of integers and floats."""
    return Bound(low, high, lists=lists)


def bounded(default: Any, bound: Bound | RopeBound) -> Any:
    """A field of a config with its default and its bound."""
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata={"validator": bound})
    return dataclasses.field(default=default, metadata={"validator": bound})


# What several configs have in common, with the reason of the upper bound.
LAYERS = whole(1, 10_000)  # DeepNet has 1000
SOME_LAYERS = whole(0, 10_000)  # of a stack that a model can do without
STREAMS = whole(1, 1024)  # of hyper-connections; published models have 4
CYCLES = whole(1, 10_000)  # recursive models have up to 64
WIDTH = whole(1, 2**20)  # the widest published layers have 53,248
HEADS = whole(1, 65_536)  # 128
VOCABULARY = whole(1, 2**27)  # 262,144
POSITIONS = whole(1, 2**30)  # contexts of 10 million tokens
TOKEN_ID = whole(-1, 2**27, lists=(0, 1024))
CHUNK = whole(0, 2**30)
PROBABILITY = number(0, 1)
EPSILON = number(0, 1)
SPREAD = number(1e-12, 1e3)  # standard deviation of new weights; 0 would leave nothing to learn from
LOSS_WEIGHT = number(0, 1e6)
ANY_NUMBER = number(-1e12, 1e12)  # thresholds that nothing reaches are a way to switch off
ROPE_PARAMETERS = RopeBound()
ROPE = {
    "rope_theta": number(1e-3, 1e15),  # 1e7 for contexts of a million tokens
    "factor": number(1e-3, 1e6),
    "partial_rotary_factor": number(1e-6, 1),
    "original_max_position_embeddings": POSITIONS,
    "short_factor": number(1e-3, 1e6, lists=(1, 2**20)),
    "long_factor": number(1e-3, 1e6, lists=(1, 2**20)),
}
ROPE_OTHER = number(-1e6, 1e6, lists=(0, 2**20))
LABELS = Bound(0, 65_536, whole=True, name="num_labels")  # transformers makes a name for each


class BoundedFields:
    """For config classes whose fields are made by `bounded`. A subclass says what its model comes to:

    `parameter_estimate()`: weights, small ones left out. `layer_visits()`: layers that one forward passes through.
    """

    def __init_subclass__(cls, *args: Any, **kwargs: Any):
        for name, field in vars(cls).items():
            if isinstance(field, dataclasses.Field) and "validator" in field.metadata:
                bound = dataclasses.replace(field.metadata["validator"], name=name)
                field.metadata = MappingProxyType({**field.metadata, "validator": bound})
        super().__init_subclass__(*args, **kwargs)

    # In the package, which sets it, `pipeline` takes the package's pipelines, and not what a checkpoint carries for
    # processes without: that would have to be trusted first, and can do less.
    _has_pipelines: ClassVar[bool] = False

    def __post_init__(self, **kwargs: Any):
        LABELS(kwargs.get("num_labels"))
        if self._has_pipelines:
            kwargs.pop("custom_pipelines", None)
        super().__post_init__(**kwargs)

    def validate_all_bounds(self):
        """Part of `@strict` validation, run in the order of the names, and so before `validate_architecture`."""
        for name, validators in self.__validators__.items():
            for validator in validators:
                if isinstance(validator, (Bound, RopeBound)):
                    validator(getattr(self, name))

    def validate_size(self):
        """Part of `@strict` validation: what the fields come to together."""
        for count, most, what in (
            (self.parameter_estimate(), MAX_PARAMETERS, "parameters"),
            (self.layer_visits(), MAX_LAYER_VISITS, "visits of layers in a forward"),
        ):
            if count > most:
                raise ValueError(
                    f"this {self.model_type} has about {count:.3g} {what}, more than {most:,}; lower the fields that "
                    "it is made of (widths, layers, vocabulary, cycles, steps)"
                )


def block_parameters(width: int, inner: int, heads: int, key_heads: int, head_dim: int) -> int:
    """Weights of a Llama block: attention and SwiGLU."""
    return width * head_dim * 2 * (heads + key_heads) + 3 * width * inner


def _plain(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) and value < 10**9 else f"{value:g}"


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:  # Python refuses to print very long ones
        return f"an integer of about {int(math.log10(2) * value.bit_length())} digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
