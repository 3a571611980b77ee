"""From the names of models to a page: each model gets the tabs that its row of the registry names."""

from pathlib import Path

import gradio as gr
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, pipeline

from ..hub.kinds import load_config
from ..io.evaluation import chosen_device
from ..io.model_names import ModelError
from ..registry import ARCHITECTURES, architecture_of, load_function
from .about import model_html
from .limits import CACHE_SECONDS
from .messages import PAGE_EVENT


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
        with gr.Tabs(overflow_behavior="wrap"):  # the other is a menu, which a visitor with a phone has to find
            shown = [
                state
                for name, config, short in zip(models, configs, _short_names(models))
                for state in _add_tabs(name, config, short, device)
            ]
        demo.load(lambda: True, None, shown[0], **PAGE_EVENT)  # nobody selects the first tab
    return demo


def _config(name: str) -> PreTrainedConfig:
    """That of a model with a tab. Raises ModelError for anything else."""
    config = load_config(name)
    row = architecture_of(config)
    if row is None or not row.app_tabs:
        known = ", ".join(one.model_type for one in ARCHITECTURES.values() if one.app_tabs)
        raise ModelError(f"{name} is a model of type {config.model_type}, which has no tab; expected one of {known}")
    return config


def _short_names(models: list[str]) -> list[str]:
    """The last part of each name, or all of it where two models share that."""
    short = [Path(name).resolve().name if Path(name).is_dir() else Path(name).name for name in models]
    return [last if short.count(last) == 1 else name for name, last in zip(models, short)]


def _add_tabs(name: str, config: PreTrainedConfig, short: str, device: str) -> list[gr.State]:
    """Loads a model and adds the tabs that its row names; `short` tells models of one kind apart.

    Each tab has a state that becomes true when the tab is first shown to a visitor, and runs its example then: not all
    tabs at once, since a model answers one question at a time.
    """
    row = architecture_of(config)
    if AutoModelForCausalLM in row.head_auto_classes:
        tokenizer = AutoTokenizer.from_pretrained(name)
        served = AutoModelForCausalLM.from_pretrained(name).to(device).eval(), tokenizer
    else:
        served = (pipeline(row.pipeline, model=name, device=device),)
    task = getattr(config, "task", None)
    about = model_html(name, short, served[0] if isinstance(served[0], PreTrainedModel) else served[0].model)
    states = []
    for title, function in row.app_tabs:
        with gr.Tab(f"{PUZZLE_NAMES.get(task, task) or title} · {short}") as tab:
            shown = gr.State(False)
            gr.HTML(about)
            load_function(function)(*served, shown=shown)
        tab.select(lambda: True, None, shown, **PAGE_EVENT)
        states.append(shown)
    return states
