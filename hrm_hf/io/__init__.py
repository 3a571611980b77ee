"""Shared helpers: options, usage errors, files and model names. Importing this package does not load torch."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, Iterable[str]]) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` and `__all__` for a package that imports its names on first use.

    __getattr__, __all__ = lazy_names(__name__, {"module": ("name", "other_name")})
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name in homes:
            return getattr(import_module(f".{homes[name]}", package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, sorted(homes)
