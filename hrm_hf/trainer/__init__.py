"""The base of the trainers of all tasks, and the folder that their runs write into.

`base.py` has `HrmTrainer`, the base of a trainer a task, `saving.py` how any trainer saves and resumes complete
checkpoints, `run_folder.py` who may write into a run's folder. Names of `base` are loaded when they are asked for:
reading or pushing a checkpoint needs no trainer.
"""

from ..io import lazy_names


__getattr__, __all__ = lazy_names(__name__, {"base": ("HrmTrainer", "NonFiniteError", "validate_compiler")})
