"""Modules that the processes of `started.py` begin with. Its fork server imports this module."""

import gc
import sys
from importlib import import_module


# Hide these packages: importing them takes transformers a quarter of its import time.
sys.modules.update(bitsandbytes=None, torchao=None)
for name in ("datasets", "pytest", "hrm_hf.registry", "hrm_hf.puzzles.evaluation", "hrm_hf.text.trainer"):
    import_module(name)
gc.freeze()  # otherwise, the first collection of a fork would copy all these objects
