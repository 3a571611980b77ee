"""Names of a package that are loaded when they are asked for, so that one light module of it does not load all others.

A package has `__getattr__, __all__ = lazy_names(__name__, {"module": ("name", "other_name")})`.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: Mapping[str, Iterable[str]]) -> tuple[Callable[[str], Any], list[str]]:
    """The `__getattr__` and the `__all__` of a package.

    Args:
        package: its `__name__`.
        modules: the names that each of its modules lends it.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name in homes:
            return getattr(import_module(f".{homes[name]}", package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, sorted(homes)
