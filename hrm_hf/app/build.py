"""From the names of models to a page: each model gets the tabs that its row of the registry names."""

from pathlib import Path

import gradio as gr
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, pipeline

from ..export.checkpoint import load_config
from ..io.evaluation import chosen_device
from ..registry import ARCHITECTURES, architecture_of, load_function
from .limits import CACHE_SECONDS


PUZZLE_NAMES = {"sudoku": "Sudoku", "maze": "Maze", "arc": "ARC", "generic": "Puzzle"}


def build(models: list[str], title: str, device: str | None = None) -> gr.Blocks:
    """See `hrm_hf.app.build_app`."""
    if not models:
        raise ValueError("no model given; expected checkpoint folders or names on the Hub")
    configs = [_config(name) for name in models]  # of all, before one is loaded
    device = chosen_device(device)
    kept = (CACHE_SECONDS, CACHE_SECONDS)
    with gr.Blocks(title=title, analytics_enabled=False, delete_cache=kept) as demo:
        gr.Markdown(f"# {title}")
        for name, config, short in zip(models, configs, _short_names(models)):
            _add_tabs(name, config, short, device)
    return demo


def _config(name: str) -> PreTrainedConfig:
    """That of a model with a tab. Raises ValueError or OSError for anything else."""
    if (name[:1] in "./~" or Path(name).exists()) and not Path(name).expanduser().is_dir():
        raise OSError(f"{name} is no folder; expected a checkpoint (or OWNER/NAME on the Hub)")
    config = load_config(name)
    row = architecture_of(config)
    if row is None or not row.app_tabs:
        known = ", ".join(one.model_type for one in ARCHITECTURES.values() if one.app_tabs)
        raise ValueError(f"{name} is a {config.model_type}, which has no tab; expected one of {known}")
    return config


def _short_names(models: list[str]) -> list[str]:
    """The last part of each name, or all of it where two models share that."""
    short = [Path(name).resolve().name if Path(name).is_dir() else Path(name).name for name in models]
    return [last if short.count(last) == 1 else name for name, last in zip(models, short)]


def _add_tabs(name: str, config: PreTrainedConfig, short: str, device: str) -> None:
    """Loads a model and adds the tabs that its row names; `short` tells models of one kind apart."""
    row = architecture_of(config)
    if AutoModelForCausalLM in row.head_auto_classes:
        tokenizer = AutoTokenizer.from_pretrained(name)
        served = AutoModelForCausalLM.from_pretrained(name).to(device).eval(), tokenizer
    else:
        served = (pipeline(row.pipeline, model=name, device=device),)
    task = getattr(config, "task", None)
    for title, function in row.app_tabs:
        with gr.Tab(f"{PUZZLE_NAMES.get(task, task) or title} · {short}"):
            load_function(function)(*served)
