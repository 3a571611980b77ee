"""Tiny models of every kind for the app, and one page with all of them, served once for all tests."""

import os

import every
import pytest
from huggingface_hub.utils import disable_progress_bars


os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
pytest.importorskip("gradio", reason="the app needs gradio: pip install .[app]")
disable_progress_bars()

MODELS = (
    "sudoku",
    "maze",
    "arc",
    "hrm_lm",
    "rlm_mhc",
    "hrm_go_coder",
    "hrm_cosmo",
    "cosmo_cnn",
    "hrm_mass_mapping",
    "cosmo_unet",
)
SUDOKU = {"task": "sudoku", "halt_max_steps": 5}
MAZE = {"task": "maze", "seq_len": 30, "grid_shape": [5, 6], "vocab_size": 6, "halt_max_steps": 3}
ARC = {"task": "arc", "seq_len": 900, "grid_shape": [30, 30], "vocab_size": 12, "halt_max_steps": 2}
SEEDS = {"sudoku": 5}  # an answer that changes at each of five steps
SHORT = {"hrm_go_coder": {"plan_budget": 24, "code_budget": 32, "max_refinement_iterations": 2}}
PUZZLES = {"sudoku": ("hrm_puzzle", SUDOKU), "maze": ("trm_puzzle", MAZE), "arc": ("hrm_puzzle", ARC)}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Checkpoint folders by name, one for each kind of tab."""
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        if name in PUZZLES:
            architecture, fields = PUZZLES[name]
            every.model(architecture, SEEDS.get(name, 0), **fields).save_pretrained(root / name)
        else:
            every.model(name, **SHORT.get(name, {})).save_pretrained(root / name)
            every.processor(name).save_pretrained(root / name)
    return {name: root / name for name in MODELS}
