"""The tab of hyper-connections: how much a signal can grow in each layer, and on its way through all of them."""

from typing import Any

import gradio as gr
from PIL import Image

from ..trainer.plots import ACCENT, EXTRA, INK, MUTED
from .limits import MAX_TEXT, checked
from .messages import MODEL_EVENT, PAGE_EVENT
from .style import figure_image, figure_output
from .text_tab import PROMPTS, encode_prompt


COLUMNS = [
    "layer",
    "attention gain",
    "feed-forward gain",
    "smallest column",
    "product forward",
    "product backward",
]
FLAT = 0.05  # gains of a good model differ from 1 by rounding alone; no axis shows less than this around them


# ---------------------------------------------------------------------------------------------------- logic


def prompt_gains(model, tokenizer, prompt: str) -> list[dict]:
    """The dicts of `get_detailed_mhc_metrics` for the tokens of a prompt, two for each layer that runs.

    Raises:
        ValueError: an empty prompt or one too long, or a model whose hyper-connections are switched off.
    """
    ids = encode_prompt(model, tokenizer, prompt)
    if ids.shape[1] > model.config.max_position_embeddings:
        raise ValueError(
            f"the prompt has {ids.shape[1]} tokens; the model has {model.config.max_position_embeddings} positions"
        )
    sites = model.get_detailed_mhc_metrics(ids)
    if not sites:
        raise ValueError("this model was made without hyper-connections (mhc_enabled=False): there are no gains")
    return sites


def gain_rows(sites: list[dict]) -> list[list[Any]]:
    """One row for each layer, as COLUMNS: the gains that `get_mhc_metrics` gives, and those of the product so far."""
    rows = []
    for attention, feed_forward in zip(sites[::2], sites[1::2]):
        own = [max(site["forward"], site["backward"]) for site in (attention, feed_forward)]
        smallest = min(attention["min_column"], feed_forward["min_column"])
        composite = [feed_forward["composite_forward"], feed_forward["composite_backward"]]
        rows.append([attention["layer"] + 1, *(round(value, 6) for value in (*own, smallest, *composite))])
    return rows


def summary(sites: list[dict]) -> str:
    """The gains in words, as HTML."""
    most = max(max(site["composite_forward"], site["composite_backward"]) for site in sites)
    return f"<p>Largest gain of the product of all maps: {most:.6g} (1: a signal neither grows nor fades).</p>"


def gain_image(sites: list[dict], product: bool) -> Image.Image:
    """Row and column gains of each site's own map, or of the product of all maps up to it."""
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
        lines.append(("largest_entry", "largest entry (1: streams stay apart)", MUTED, "d", ":"))
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


# ---------------------------------------------------------------------------------------------------- page


def mhc_tab(model, tokenizer, shown: gr.State) -> None:
    """Adds the components and events of one model to the page that is being built.

    Its example runs when the state `shown` changes.
    """
    with gr.Row():
        prompt = gr.Textbox(
            PROMPTS[1],
            label="Prompt",
            lines=2,
            scale=5,
            min_width=320,
            info="Its tokens' maps are averaged.",
            max_length=MAX_TEXT,
        )
        start = gr.Button("Measure", variant="primary", scale=1, min_width=120)
    with gr.Row():
        examples = [gr.Button(text.strip(), size="sm", min_width=60) for text in PROMPTS]
    said = gr.HTML(elem_classes="caption")
    with gr.Row():
        pictures = [
            figure_output("Gains of each map", elem_classes="mhc-gains", min_width=320),
            figure_output("Gains of their product", elem_classes="mhc-product", min_width=320),
        ]
    table = gr.Dataframe(
        headers=COLUMNS, label="By layer", interactive=False, wrap=True, column_widths=["80px"] + ["130px"] * 5
    )

    def measure(text):
        sites = prompt_gains(model, tokenizer, text)
        return summary(sites), *(gain_image(sites, product) for product in (False, True)), gain_rows(sites)

    fn = checked(measure, prompt, lambda words: [words, None, None, None])
    asked = {"fn": fn, "inputs": prompt, "outputs": [said, *pictures, table], **MODEL_EVENT}
    start.click(**asked, api_name="mhc_gains")
    shown.change(**asked, **PAGE_EVENT)
    for text, button in zip(PROMPTS, examples):
        button.click(lambda text=text: text, None, prompt, **PAGE_EVENT).then(**asked, **PAGE_EVENT)
