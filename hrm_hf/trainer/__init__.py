"""Base class of all trainers, imported on first use because loading a checkpoint needs no trainer."""

from ..io import lazy_names


__getattr__, __all__ = lazy_names(__name__, {"base": ("HrmTrainer", "NonFiniteError", "validate_compiler")})
