"""Golden tensors of hyper-connections (transformers' deepseek_v4) and of the original RLM-mHC.

Uses the complete files if they exist next to the repository (shared/golden), otherwise the committed subset.
"""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file


COMPLETE = Path(__file__).parents[3] / "shared" / "golden"
FOLDER = COMPLETE if COMPLETE.is_dir() else Path(__file__).parents[1] / "fixtures"


@cache
def read(file: str) -> tuple[dict[str, torch.Tensor], dict]:
    """Tensors by name, and the description, of a golden file."""
    return load_file(FOLDER / f"{file}.safetensors"), json.loads((FOLDER / f"{file}.json").read_text())


def tensors(file: str, prefix: str) -> dict[str, torch.Tensor]:
    """Tensors whose names start with `prefix`, by the rest of their names."""
    return {name[len(prefix) :]: value for name, value in read(file)[0].items() if name.startswith(prefix)}
