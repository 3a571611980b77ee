"""Build the page from model names. Each model gets a summary and the tabs listed in its registry row.

Cards and recipes may come from untrusted authors. The page therefore shows only the text, lists, tables and links of a
card. It omits HTML, and also images, because the browser would fetch them from other servers.
"""

import html
import math
import re
import textwrap
from pathlib import Path

import gradio as gr
import torch
from markdown_it import MarkdownIt
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, pipeline

from ..export.checkpoint import find_file
from ..hub.cards import CARD_FILE, read_run, training_data
from ..hub.kinds import load_config, load_network
from ..io.evaluation import chosen_device
from ..io.model_names import ModelError
from ..registry import ARCHITECTURES, architecture_of, load_function
from .limits import CACHE_SECONDS, PAGE_EVENT


MAX_DATA_WORDS = 300  # characters
# Two random tensors differ in mean or spread by at most this many standard errors, except for one pair in a million.
SAMPLING_ERRORS = 5.0
ROUNDING = 1e-6
UNTRAINED = '<span class="hrm-badge bad">untrained</span> Its weights are random, so its answers are meaningless.'


def build(models: list[str], title: str, device: str | None = None) -> gr.Blocks:
    """Build the page that `hrm_hf.app.build_app` returns."""
    if not models:
        raise ValueError("models=[]: must not be empty; pass checkpoint folders or names on the Hub")
    configs = [_config(name) for name in models]  # check all models before loading any
    device = chosen_device(device)
    kept = (CACHE_SECONDS, CACHE_SECONDS)
    with gr.Blocks(title=title, analytics_enabled=False, delete_cache=kept) as demo:
        gr.Markdown(f"# {title}")
        # By default, gradio moves excess tabs to a menu, which is hard to find on a phone.
        with gr.Tabs(overflow_behavior="wrap"):
            shown = [
                state
                for name, config, short in zip(models, configs, _short_names(models))
                for state in _add_tabs(name, config, short, device)
            ]
        demo.load(lambda: True, None, shown[0], **PAGE_EVENT)  # no selection event fires for the first tab
    return demo


def _config(name: str) -> PreTrainedConfig:
    """Load the config of a model. Raise ModelError if the app has no tab for this type of model."""
    config = load_config(name)
    row = architecture_of(config)
    if row is None or not row.app_tabs:
        known = ", ".join(one.model_type for one in ARCHITECTURES.values() if one.app_tabs)
        raise ModelError(f"{name}: the app has no tab for model_type={config.model_type!r}; choose from {known}")
    return config


def _short_names(models: list[str]) -> list[str]:
    """Return the last part of each name, or the complete name if two models have the same last part."""
    short = [Path(name).resolve().name if Path(name).is_dir() else Path(name).name for name in models]
    return [last if short.count(last) == 1 else name for name, last in zip(models, short)]


def _add_tabs(name: str, config: PreTrainedConfig, short: str, device: str) -> list[gr.State]:
    """Load a model, add its tabs with `short` in their titles, and return one state per tab.

    Each state becomes true when a visitor first opens its tab. The tab then runs its example.
    """
    row = architecture_of(config)
    if AutoModelForCausalLM in row.head_auto_classes:
        tokenizer = AutoTokenizer.from_pretrained(name)
        served = load_network(name, AutoModelForCausalLM).to(device), tokenizer
    else:
        served = (pipeline(row.pipeline, model=name, device=device),)
    task = getattr(served[0], "puzzle_task", None)
    about = model_html(name, short, served[0] if isinstance(served[0], PreTrainedModel) else served[0].model)
    states = []
    for title, function in row.app_tabs:
        with gr.Tab(f"{task.title if task else title} · {short}") as tab:
            shown = gr.State(False)
            gr.HTML(about)
            load_function(function)(*served, shown=shown)
        tab.select(lambda: True, None, shown, **PAGE_EVENT)
        states.append(shown)
    return states


def model_html(name: str, short: str, model: PreTrainedModel) -> str:
    """Return the description of a model as HTML. `name` is a folder or a Hub name, `short` the name to display."""
    kind, size = html.escape(model.config.model_type), f"{model.num_parameters():,}"
    trained = training_html(name, model)
    parts = [f"<p><b>{html.escape(short)}</b>: <code>{kind}</code>, {size} parameters. {trained}</p>"]
    card = card_html(name)
    hub = ""
    if not Path(name).is_dir():
        address = html.escape(f"https://huggingface.co/{name}")
        hub = f'<p><a href="{address}" target="_blank" rel="noopener noreferrer">{html.escape(name)}</a></p>'
    if card or hub:
        parts.append(f"<details><summary>Model card</summary>{hub}{card}</details>")
    else:
        parts.append("<p>It has no model card.</p>")
    return f'<div class="hrm-about">{"".join(parts)}</div>'


def training_html(name: str, model: PreTrainedModel) -> str:
    """Return HTML that states a model's training data and steps or, if unknown, whether it looks untrained."""
    files = [find_file(name, file) for file in ("config.json", "recipe.yaml", "results.json")]
    try:
        recipe, results = read_run(Path(files[0]).parent)
        data, started_from = training_data(recipe)
    except (ValueError, OSError):  # OSError: a data set name in a hand-written recipe is too long for a path
        return "How it was trained is unknown: recipe.yaml or results.json cannot be read."
    if not data or results.get("steps") == 0:
        return UNTRAINED if is_untrained(model) else "How it was trained is not recorded."
    words = f"Trained on {' and '.join(map(_code, data))}"
    if isinstance(steps := results.get("steps"), int):
        words += f", {steps:,} {'step' if steps == 1 else 'steps'}"
    return words + (f", from the weights of {_code(started_from)}." if started_from else ".")


def _code(words: str) -> str:
    """Return text as an HTML <code> element that wraps only between words, never after the dashes of a flag."""
    spans = (f"<span>{html.escape(word)}</span>" for word in textwrap.shorten(words, MAX_DATA_WORDS).split())
    return f"<code>{' '.join(spans)}</code>"


def is_untrained(model: PreTrainedModel) -> bool:
    """Check whether each weight tensor has the mean and standard deviation of a freshly initialized one.

    The first training step changes constant weights (zeros in heads, ones in norms).
    """
    if getattr(model, "is_quantized", False):  # quantized weights cannot be compared
        return False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fresh = dict(type(model)(model.config).named_parameters())
    return all(
        _same_draw(weight.detach().cpu().double(), fresh[name].detach().double())
        for name, weight in model.named_parameters()
    )


def _same_draw(weight: torch.Tensor, fresh: torch.Tensor) -> bool:
    count, spread = fresh.numel(), fresh.std(correction=0).item()
    mean_apart = abs(weight.mean() - fresh.mean()).item()
    spread_apart = abs(weight.std(correction=0).item() - spread)
    return (
        mean_apart <= SAMPLING_ERRORS * spread * math.sqrt(2 / count) + ROUNDING
        and spread_apart <= SAMPLING_ERRORS * spread / math.sqrt(count) + ROUNDING
    )


def card_html(name: str) -> str:
    """Return a model card's text as HTML, or "" if the model has no card."""
    file = find_file(name, CARD_FILE)
    if file is None:
        return ""
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    text = re.sub(r"\A---\n.*?\n---\n", "", text, count=1, flags=re.DOTALL)
    return _markdown().render(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))


def _markdown() -> MarkdownIt:
    """Return a Markdown parser that escapes HTML and replaces images with their captions."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")

    def caption(self, tokens, index, options, env) -> str:
        return html.escape(f"(picture: {tokens[index].content})") if tokens[index].content else ""

    def link(self, tokens, index, options, env) -> str:
        tokens[index].attrs |= {"target": "_blank", "rel": "noopener noreferrer"}
        return self.renderToken(tokens, index, options, env)

    reader.add_render_rule("image", caption)
    reader.add_render_rule("link_open", link)
    return reader
