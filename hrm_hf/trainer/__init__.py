"""Shared base of all trainers, imported lazily because loading a checkpoint does not need it."""

from ..io import lazy_names


__getattr__, __all__ = lazy_names(__name__, {"base": ("HrmTrainer", "NonFiniteError", "validate_compiler")})
