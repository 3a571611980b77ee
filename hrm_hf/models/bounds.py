"""Ranges of config fields: data beside each field, checked whenever it is set.

    H_layers: int = bounded(4, COUNT)

A wrong value then raises an error that names the field. huggingface_hub's strict data classes run the validators at
each assignment; `BoundedFields` gives them the names of their fields, and runs them once more at the end, because the
strict classes do not validate values that are given by another name of a field.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any, ClassVar


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


class BoundedFields:
    """For config classes whose fields are made by `bounded`."""

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
        if self._has_pipelines:
            kwargs.pop("custom_pipelines", None)
        super().__post_init__(**kwargs)

    def validate_all_bounds(self):
        """Part of `@strict` validation, run in the order of the names, and so before `validate_architecture`."""
        for name, validators in self.__validators__.items():
            for validator in validators:
                if isinstance(validator, Bound):
                    validator(getattr(self, name))
