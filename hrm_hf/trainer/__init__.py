"""The base of the trainers of all tasks, and the folder that their runs write into.

`base.py` has `HrmTrainer`, the base of a trainer a task, `saving.py` how any trainer saves and resumes complete
checkpoints, `run_folder.py` who may write into a run's folder. Names of `base` are loaded when they are asked for:
reading or pushing a checkpoint needs no trainer.
"""

from importlib import import_module
from typing import Any


__all__ = ["HrmTrainer", "NonFiniteError", "validate_compiler"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(".base", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
