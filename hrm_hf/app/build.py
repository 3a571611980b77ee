"""From the names of models to a page: what each one is, and the tabs it gets."""

from pathlib import Path

import gradio as gr
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, pipeline

from ..export.checkpoint import load_config
from .cosmology_tab import cosmology_tab
from .go_tab import go_tab
from .limits import CACHE_SECONDS
from .mhc_tab import mhc_tab
from .puzzle_tab import puzzle_tab
from .text_tab import text_tab


PUZZLES = ("hrm_puzzle", "trm_puzzle")
COSMOLOGY = ("hrm_cosmo", "cosmo_cnn")
LANGUAGE = ("hrm_lm", "rlm_mhc", "hrm_go_coder")
PUZZLE_NAMES = {"sudoku": "Sudoku", "maze": "Maze", "arc": "ARC", "generic": "Puzzle"}


def build(models: list[str], title: str) -> gr.Blocks:
    """See `hrm_hf.app.build_app`."""
    if not models:
        raise ValueError("no model given; expected checkpoint folders or names on the Hub")
    configs = [_config(name) for name in models]  # of all, before one is loaded
    kept = (CACHE_SECONDS, CACHE_SECONDS)
    with gr.Blocks(title=title, analytics_enabled=False, delete_cache=kept) as demo:
        gr.Markdown(f"# {title}")
        for name, config, short in zip(models, configs, _short_names(models)):
            _add_tabs(name, config, short)
    return demo


def _config(name: str) -> PreTrainedConfig:
    """That of a model with a tab. Raises ValueError or OSError for anything else."""
    if (name[:1] in "./~" or Path(name).exists()) and not Path(name).expanduser().is_dir():
        raise OSError(f"{name} is no folder; expected a checkpoint (or OWNER/NAME on the Hub)")
    config = load_config(name)
    if config.model_type not in (*PUZZLES, *LANGUAGE, *COSMOLOGY):
        known = ", ".join((*PUZZLES, *LANGUAGE, *COSMOLOGY))
        raise ValueError(f"{name} is a {config.model_type}, which has no tab; expected one of {known}")
    return config


def _short_names(models: list[str]) -> list[str]:
    """The last part of each name, or all of it where two models share that."""
    short = [Path(name).resolve().name if Path(name).is_dir() else Path(name).name for name in models]
    return [last if short.count(last) == 1 else name for name, last in zip(models, short)]


def _add_tabs(name: str, config: PreTrainedConfig, short: str) -> None:
    """Loads a model and adds its tabs; `short` tells models of one kind apart."""
    kind = config.model_type
    if kind in PUZZLES:
        with gr.Tab(f"{PUZZLE_NAMES.get(config.task, config.task)} · {short}"):
            puzzle_tab(pipeline("puzzle-solving", model=name))
    elif kind in COSMOLOGY:
        with gr.Tab(f"Cosmology · {short}"):
            cosmology_tab(pipeline("cosmology-regression", model=name))
    else:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name).to(_device()).eval()
        if kind == "hrm_go_coder":
            with gr.Tab(f"Go coder · {short}"):
                go_tab(model, tokenizer)
            return
        with gr.Tab(f"Text · {short}"):
            text_tab(model, tokenizer)
        if kind == "rlm_mhc":
            with gr.Tab(f"mHC · {short}"):
                mhc_tab(model, tokenizer)


def _device() -> torch.device:
    """Where pipelines put their models too: the accelerator, if there is one."""
    return torch.accelerator.current_accelerator() or torch.device("cpu")
