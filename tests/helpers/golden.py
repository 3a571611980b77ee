"""Tensors computed with the original code, and our models with their weights.

Uses the complete files if they exist next to the repository (shared/golden), otherwise the committed subset.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from hrm_hf import HrmPuzzleConfig, HrmPuzzleForSolving, TrmPuzzleConfig, TrmPuzzleForSolving
from hrm_hf.puzzles.convert import our_name


COMPLETE = Path(__file__).parents[3] / "shared" / "golden"
FOLDER = COMPLETE if COMPLETE.is_dir() else Path(__file__).parents[1] / "fixtures"
BATCH_SIZE = 4


@dataclass(frozen=True)
class Case:
    """A model of the golden files: the location of its tensors, and our classes."""

    file: str
    prefix: str
    architecture: str

    @property
    def classes(self) -> tuple[type, type]:
        if self.architecture == "hrm":
            return HrmPuzzleConfig, HrmPuzzleForSolving
        return TrmPuzzleConfig, TrmPuzzleForSolving

    def __str__(self) -> str:
        return f"{self.architecture}-{self.prefix}".strip("-/")


CASES = (Case("hrm_act_v1_tiny", "", "hrm"), Case("trm_tiny", "attn/", "trm"), Case("trm_tiny", "mlp_t/", "trm"))
HRM, TRM, TRM_MLP = CASES


@cache
def _read(file: str) -> tuple[dict, dict]:
    return load_file(FOLDER / f"{file}.safetensors"), json.loads((FOLDER / f"{file}.json").read_text())


def group(file: str, start: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file whose names start with `start`, without that prefix."""
    return {name[len(start) :]: value for name, value in _read(file)[0].items() if name.startswith(start)}


def tensors(case: Case, start: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a case whose names start with `start`, without that prefix."""
    return group(case.file, case.prefix + start)


def variants(file: str) -> dict[str, dict]:
    """Return the original's `arch` fields of each EqR or SE-RRM variant in the file."""
    kept, info = _read(file)
    return {name: fields for name, fields in info["variants"].items() if f"{name}/batch/inputs" in kept}


def original_arch(case: Case) -> dict:
    """Return the original's `arch` fields of a case."""
    info = _read(case.file)[1]
    arch = dict(info["variants"][case.prefix]["config"] if case.prefix else info["config"])
    return {**arch, "loss": {"name": "losses@ACTLossHead", "loss_type": info["loss_type"]}}


def variant(case: Case) -> dict:
    """Return the original's `arch` fields of an EqR or SE-RRM case."""
    return dict(_read(case.file)[1]["variants"][case.prefix.strip("/")])


def our_config(case: Case, **overrides):
    arch = original_arch(case)
    for name in ("batch_size", "loss", "no_ACT_continue"):
        arch.pop(name, None)
    arch["rope_parameters"] = {"rope_type": "default", "rope_theta": arch.pop("rope_theta")}
    return case.classes[0](**{**arch, "num_attention_heads": arch.pop("num_heads"), **overrides})


def model(case: Case, attention: str = "sdpa", extra_weights: dict | None = None, **overrides):
    """Return our model in eval mode with golden weights, extra weights (original names) and overrides."""
    config = our_config(case, **overrides)
    config._attn_implementation = attention
    loaded = case.classes[1](config).eval()
    state = {
        our_name(name): value for name, value in {**tensors(case, "state_dict/"), **(extra_weights or {})}.items()
    }
    if config.puzzle_emb_ndim == 0:
        del state["model.puzzle_emb.weight"]
    loaded.load_state_dict(state)
    return loaded


def batch(case: Case, letter: str) -> dict[str, torch.Tensor]:
    """Return batch A, B or C as keyword arguments of our forward."""
    return {re.sub("^inputs$", "input_ids", name): value for name, value in tensors(case, f"batch_{letter}/").items()}
