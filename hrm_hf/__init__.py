"""Recursive reasoning models for Hugging Face. Importing the package registers all architectures."""

import gc
import sys
from importlib import import_module
from importlib.util import find_spec

from ._version import __version__  # noqa: F401 - part of the package
from .io.messages import IMPORT_MESSAGES, hide_messages


# Public names and their modules. The architectures' classes are also public, and come from `registry.py`.
_MODULES = {
    "ActCarry": "models.act",
    "AutoModelForPuzzleSolving": "registry",
    "CosmologyRegressionPipeline": "models.pipeline_cosmo",
    "MassMappingPipeline": "models.pipeline_mass_mapping",
    "PuzzleSolution": "models.solving_puzzle",
    "PuzzleSolvingOutput": "models.modeling_puzzle",
    "PuzzleSolvingPipeline": "puzzles.pipeline",
    "RlmPipeline": "text.rlm.pipeline",
    "RlmResult": "text.rlm.pipeline",
    "mHCLayer": "models.hyper_connections",
}


def _classes() -> dict[str, type]:
    from .registry import ARCHITECTURES

    return {each.__name__: each for row in ARCHITECTURES.values() for each in (row.config, *row.heads.values())}


def __getattr__(name: str):
    if name == "__all__":
        return sorted([*_MODULES, *_classes(), "__version__"])
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    if name.isidentifier() and not name.startswith("_"):
        if find_spec(f"{__name__}.{name}"):  # a module or subpackage, such as hrm_hf.export
            return import_module(f".{name}", __name__)
        if name in (classes := _classes()):
            return classes[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


def register() -> None:
    """Register every architecture and pipeline with the Auto classes and `transformers.pipeline`."""
    collects = gc.isenabled()
    gc.disable()  # the imports create a million objects but no garbage, so collecting garbage would waste time
    try:
        for name in ("registry", "puzzles.pipeline", "text.rlm.pipeline"):  # importing these modules registers classes
            import_module(f".{name}", __name__)
    finally:
        if "hrm_hf_start" in sys.modules:
            gc.freeze()  # future garbage collections skip the imported objects
        if collects:
            gc.enable()


hide_messages(IMPORT_MESSAGES)
# To start fast, our programs (which import hrm_hf_start or run as `-m hrm_hf.cli`) call `register` only when they
# load a model.
if "hrm_hf_start" not in sys.modules and not (sys.argv[:1] == ["-m"] and "hrm_hf.cli" in sys.orig_argv):
    register()
