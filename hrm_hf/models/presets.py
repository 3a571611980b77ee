"""Named configurations of an architecture, as data at the end of its config class."""

from typing import Any, ClassVar


class PresetsMixin:
    """`presets()` and `from_preset(name)` for a config class with a `_presets` table: name -> fields."""

    _presets: ClassVar[dict[str, dict[str, Any]]] = {}

    @classmethod
    def presets(cls) -> list[str]:
        """Names that `from_preset` accepts."""
        return sorted(cls._presets)

    @classmethod
    def from_preset(cls, name: str, **overrides):
        """The config of a named architecture, with `overrides` applied. Raises ValueError for an unknown name."""
        if name not in cls._presets:
            raise ValueError(f"unknown preset {name!r} for {cls.model_type}; choose one of {cls.presets()}")
        return cls(**{**cls._presets[name], **overrides})
