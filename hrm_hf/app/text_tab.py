"""Tabs for a causal language model: text with tokens colored by number of segments, and mHC gains.

A model with adaptive halting reports the number of segments it ran for each token (`halt_steps`). Text from other
models has no colors. The gains of hyper-connections measure how much each layer, or all layers, can amplify a signal.
"""

import html
import math
from collections.abc import Iterator
from typing import Any

import gradio as gr
import torch
from PIL import Image

from ..models.early_exit import EXIT_CRITERIA
from ..registry import architecture_of
from ..text.options import WriteText
from ..trainer.plots import ACCENT, EXTRA, INK, MUTED
from .limits import MAX_SEED, MAX_TEXT, PAGE_EVENT, ask
from .style import figure_image, figure_output


TOKENS_AT_ONCE = 8  # number of tokens between page updates
SHALLOW, DEEP = (0xEA, 0xF1, 0xFA), (0x1D, 0x4F, 0x91)
UNFINISHED = "�"
COLUMNS = ["layer", "attention gain", "feed-forward gain", "smallest column", "product forward", "product backward"]
FLAT = 0.05  # the gain axis covers at least 1 ± FLAT, because a good model's gains differ from 1 only by rounding
PROMPTS = ("ROMEO:\n", "To be, or not to be,", "Once upon a time")


def write(model, tokenizer, prompt: str, options: WriteText) -> Iterator[list[int]]:
    """Generate text and, every few tokens, yield all ids so far, including those of the prompt.

    The ids equal those from one call to `model.generate` after `torch.manual_seed(options.seed)`. Raises ValueError if
    the prompt is empty or leaves too few positions for the new tokens.
    """
    ids = encode_prompt(model, tokenizer, prompt)
    room = model.config.max_position_embeddings - ids.shape[1]
    if options.max_new_tokens > room:
        raise ValueError(
            f"max_new_tokens={options.max_new_tokens}: the prompt has {ids.shape[1]} tokens, but the model has only "
            f"{model.config.max_position_embeddings} positions; shorten the prompt, or use at most {max(room, 0)}"
        )
    start, cache = ids.shape[1], None
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else ends or []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        while ids.shape[1] - start < options.max_new_tokens and (cache is None or ids[0, -1] not in ends):
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(TOKENS_AT_ONCE, options.max_new_tokens - (ids.shape[1] - start)),
                past_key_values=cache,
                return_dict_in_generate=True,
                **options.sampling,
                **options.thinking,
            )
            ids, cache = output.sequences, output.past_key_values
            yield ids[0].tolist()


def encode_prompt(model, tokenizer, prompt: str) -> torch.Tensor:
    """Tokenize a prompt and return ids [1, S] on the model's device. Raise ValueError if there are no tokens."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids.long()
    if not ids.numel():
        raise ValueError("the prompt is empty; type the beginning of a text")
    return ids.to(model.device)


@torch.no_grad()
def token_depths(model, ids: list[int], options: WriteText) -> list[int] | None:
    """Return the number of segments of each token (`halt_steps`), or None if the model does not halt."""
    if not architecture_of(model).halts:
        return None
    output = model(torch.tensor([ids], device=model.device), use_cache=False, **options.thinking)
    return output.halt_steps[0].tolist()


def read_threshold(text: str | None) -> float | None:
    """Parse a typed threshold, or return None (the default) for empty text. Raise ValueError if it is not a number."""
    try:
        found = float(text) if text and text.strip() else None
        if found is not None and not math.isfinite(found):
            raise ValueError
        return found
    except ValueError as error:
        raise ValueError(f"{text!r:.40} is not a number; enter a threshold, or clear the field") from error


def text_pieces(tokenizer, ids: list[int]) -> list[tuple[str, int, int]]:
    """Split ids into the shortest runs that decode to complete characters. Return (text, start, stop) for each run."""
    pieces, start = [], 0
    for stop in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:stop])
        if UNFINISHED in text and stop < len(ids) and stop - start < 4:
            continue
        pieces.append((text, start, stop))
        start = stop
    return pieces


def text_html(tokenizer, ids: list[int], prompt_tokens: int, depths: list[int] | None, most: int) -> str:
    """Return prompt and continuation as HTML. Colors and tooltips show the number of segments of each token."""
    spans = []
    for text, start, stop in text_pieces(tokenizer, ids):
        classes, style, title = ["prompt"] if start < prompt_tokens else [], "", ""
        if depths is not None:
            depth = max(depths[start:stop])
            classes += ["depth", "deep"] if (depth - 1) / max(most - 1, 1) > 0.5 else ["depth"]
            style = f' style="background: {depth_color(depth, most)}" data-depth="{depth}"'
            title = f' title="{depth} of {most} segments"'
        spans.append(f'<span class="{" ".join(classes)}"{style}{title}>{html.escape(text)}</span>')
    return f'<div class="hrm-text">{"".join(spans)}</div>{_legend(depths, most)}'


def depth_color(depth: int, most: int) -> str:
    """Return the color for a number of segments, from pale (one) to dark (the maximum)."""
    share = min(1.0, (depth - 1) / max(most - 1, 1))
    return "#" + "".join(f"{round(low + share * (high - low)):02x}" for low, high in zip(SHALLOW, DEEP))


def _legend(depths: list[int] | None, most: int) -> str:
    items = ['<span><u style="text-decoration-style: dotted">dotted</u>: the prompt</span>']
    if depths is not None:
        for depth in range(1, most + 1):
            share = sum(found == depth for found in depths) / len(depths)
            words = "segment" if depth == 1 else "segments"
            color = depth_color(depth, most)
            items.append(f'<span><i style="background: {color}"></i>{depth} {words}: {share:.0%} of tokens</span>')
        items.append(f"<span>{sum(depths) / len(depths):.2f} segments on average, to predict the next token</span>")
    return f'<div class="hrm-legend">{"".join(items)}</div>'


def text_tab(model, tokenizer, shown: gr.State) -> None:
    """Build the tab that continues text. Its example runs when the tab is first displayed."""
    halts = architecture_of(model).halts
    with gr.Row():
        with gr.Column(scale=4, min_width=340):
            prompt = gr.Textbox(PROMPTS[0], label="Prompt", lines=3, max_length=MAX_TEXT)
            with gr.Row():
                start = gr.Button("Write", variant="primary", min_width=120)
                stop = gr.Button("Stop", min_width=120)
            examples = _examples(prompt)
            thinking = _thinking(model) if halts else []
            controls = _sampling(model) + thinking
        with gr.Column(scale=6, min_width=420):
            text = gr.HTML("<p>The text appears here.</p>", elem_classes="shown-text")
            size = {"lines": 4, "max_lines": 10}
            plain = gr.Textbox(label="As plain text", buttons=["copy"], elem_classes="plain-text", **size)

    def stream(begins, most_new, temperature, top_p, top_k, seed, *chosen):  # one value per input component
        segments, criterion, threshold = chosen or (None, None, None)
        options = WriteText(
            max_new_tokens=int(most_new), temperature=float(temperature), top_p=float(top_p), top_k=int(top_k),
            seed=int(seed), num_segments=segments, exit_criterion=criterion, exit_threshold=read_threshold(threshold),
        )  # fmt: skip
        prompt_tokens = encode_prompt(model, tokenizer, begins).shape[1]
        most = options.num_segments or (model.config.halt_max_steps if halts else 1)
        for ids in write(model, tokenizer, begins, options):
            depths = token_depths(model, ids, options)
            yield text_html(tokenizer, ids, prompt_tokens, depths, most), tokenizer.decode(ids)

    def refused(words):
        return [words, ""]

    running = ask(stream, [prompt, *controls], [text, plain], refused, start, shown, "write", examples)
    stop.click(None, cancels=running, **PAGE_EVENT)


def _examples(prompt: gr.Textbox) -> list[tuple]:
    """Add a button for each prompt in PROMPTS, and return the buttons as `examples` for `ask`."""
    with gr.Row():
        return [(gr.Button(text.strip(), size="sm", min_width=60), lambda text=text: text, prompt) for text in PROMPTS]


def _sampling(model) -> list:
    most = model.config.max_position_embeddings
    with gr.Accordion("Sampling", open=False):
        with gr.Row():
            new = gr.Slider(8, max(16, most - 8), value=min(240, most // 2), step=1, label="New tokens")
            temperature = gr.Slider(0, 2, value=0.8, step=0.05, label="Temperature", info="0: greedy.")
        with gr.Row():
            top_p = gr.Slider(0.05, 1, value=1, step=0.05, label="Top p")
            top_k = gr.Slider(0, 200, value=0, step=1, label="Top k", info="0: off.")
            seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=MAX_SEED)
    return [new, temperature, top_p, top_k, seed]


def _thinking(model) -> list:
    config = model.config
    with gr.Accordion("Depth", open=True):
        most = config.halt_max_steps
        segments = gr.Slider(1, most, value=most, step=1, label="Maximum segments per token")
        with gr.Row():
            criterion = gr.Dropdown(
                [name for name, kind in EXIT_CRITERIA.items() if config.halt_max_steps > 1 or not kind.learned],
                value=config.exit_criterion,
                label="Exit criterion",
                info="fixed: run all segments.",
            )
            threshold = gr.Textbox(
                "" if config.exit_threshold is None else str(config.exit_threshold),
                label="Exit threshold",
                info="Not used by q and fixed.",
                placeholder="default",
                max_length=40,
            )
    return [segments, criterion, threshold]


def prompt_gains(model, tokenizer, prompt: str) -> list[dict]:
    """Return the result of `get_detailed_mhc_metrics` for a prompt: two dicts per layer.

    Raises ValueError if the prompt is empty or too long, or if the model has no hyper-connections.
    """
    ids = encode_prompt(model, tokenizer, prompt)
    if ids.shape[1] > model.config.max_position_embeddings:
        most = model.config.max_position_embeddings
        raise ValueError(f"the prompt has {ids.shape[1]} tokens, but the model has only {most} positions; shorten it")
    sites = model.get_detailed_mhc_metrics(ids)
    if not sites:
        raise ValueError("mhc_enabled=False: this model has no hyper-connections, so it has no gains to show")
    return sites


def gain_rows(sites: list[dict]) -> list[list[Any]]:
    """Return a row of COLUMNS per layer: gains and smallest column sum of H_res, and gains of the product so far."""
    rows = []
    for attention, feed_forward in zip(sites[::2], sites[1::2]):
        own = [max(site["forward"], site["backward"]) for site in (attention, feed_forward)]
        smallest = min(attention["min_column"], feed_forward["min_column"])
        composite = [feed_forward["composite_forward"], feed_forward["composite_backward"]]
        rows.append([attention["layer"] + 1, *(round(value, 6) for value in (*own, smallest, *composite))])
    return rows


def gain_summary(sites: list[dict]) -> str:
    """Return a summary of the gains as HTML."""
    most = max(max(site["composite_forward"], site["composite_backward"]) for site in sites)
    return f"<p>Largest gain of the product of all maps: {most:.6g} (1: a signal neither grows nor fades).</p>"


def gain_image(sites: list[dict], product: bool) -> Image.Image:
    """Plot the row and column gains of H_res at each mHC site, or of the product of all H_res up to each site."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 3.6), layout="constrained")
    axes = figure.subplots()
    depth = range(1, len(sites) + 1)
    prefix = "composite_" if product else ""
    lines = [
        (f"{prefix}forward", "row gain (forward)", ACCENT, "o", "-"),
        (f"{prefix}backward", "column gain (backward)", EXTRA[0], "s", "-"),
        (f"{prefix}min_column", "smallest column", EXTRA[1], "v", "-"),
    ]
    if not product:
        lines.append(("largest_entry", "largest entry (1: streams do not mix)", MUTED, "d", ":"))
    for name, label, color, marker, style in lines:
        values = [site[name] for site in sites]
        axes.plot(depth, values, color=color, marker=marker, markersize=4, linestyle=style, label=label)
    axes.legend(frameon=False, fontsize="small")
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle="--")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 1 - FLAT), max(high, 1 + FLAT))
    axes.set_xticks([site + 0.5 for site in depth][::2], [str(site["layer"] + 1) for site in sites[::2]])
    axes.grid(axis="y", color=MUTED, alpha=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="layer (attention, then feed-forward)", ylabel="gain (1: neither grows nor fades)")
    axes.set_title("Product of all maps so far" if product else "Map of each site")
    return figure_image(figure)


def mhc_tab(model, tokenizer, shown: gr.State) -> None:
    """Build the tab that measures the gains of hyper-connections. Its example runs when the tab is first displayed."""
    with gr.Row():
        prompt = gr.Textbox(
            PROMPTS[1], label="Prompt", lines=2, scale=5, min_width=320, info="The maps are averaged over its tokens.",
            max_length=MAX_TEXT,
        )  # fmt: skip
        start = gr.Button("Measure", variant="primary", scale=1, min_width=120)
    examples = _examples(prompt)
    said = gr.HTML(elem_classes="caption")
    with gr.Row():
        pictures = [
            figure_output("Gains of each map", elem_classes="mhc-gains", min_width=320),
            figure_output("Gains of their product", elem_classes="mhc-product", min_width=320),
        ]
    widths = ["80px"] + ["130px"] * 5
    table = gr.Dataframe(headers=COLUMNS, label="By layer", interactive=False, wrap=True, column_widths=widths)

    def measure(text):
        sites = prompt_gains(model, tokenizer, text)
        return gain_summary(sites), *(gain_image(sites, product) for product in (False, True)), gain_rows(sites)

    def refused(words):
        return [words, None, None, None]

    ask(measure, prompt, [said, *pictures, table], refused, start, shown, "mhc_gains", examples)
