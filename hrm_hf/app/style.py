"""Appearance of the page: a theme with system fonts, a style sheet, and figures as images."""

import io
from typing import Any

import gradio as gr
from PIL import Image


THEME = gr.themes.Default(
    primary_hue="blue",
    neutral_hue="slate",
    font=("system-ui", "-apple-system", "Segoe UI", "sans-serif"),
    font_mono=("ui-monospace", "SFMono-Regular", "Menlo", "monospace"),
).set(  # the theme's gray is too pale for small text
    block_info_text_color="*neutral_500",
    body_text_color_subdued="*neutral_500",
    input_placeholder_color="*neutral_500",
)

# Boards keep their colors in dark mode, so each color keeps its meaning.
CSS = """
.html-container { padding: 0 !important; container-type: inline-size; }
.hrm-mono textarea { font-family: var(--font-mono); }
.hrm-board { --cell: min(var(--most), calc((100cqw - 4px) / var(--columns) - 1px)); display: inline-grid;
  grid-template-columns: repeat(var(--columns), var(--cell)); background: #c3ccd5; gap: 1px;
  border: 2px solid #1f2933; color: #1f2933; }
.hrm-board > * { width: var(--cell); height: var(--cell); box-sizing: border-box; display: flex; align-items: center;
  justify-content: center; background: #ffffff; font-size: calc(var(--cell) * 0.52); line-height: 1; margin: 0; }
.hrm-board > .box-right { border-right: 2px solid #1f2933; }
.hrm-board > .box-bottom { border-bottom: 2px solid #1f2933; }
.hrm-board > .given { background: #e3e8ee; font-weight: 700; }
.hrm-board > .filled { color: #1d4f91; }
.hrm-board.symbols > .changed { background: #ffe08a; }
.hrm-board.symbols > .wrong { background: #f6b3ab; }
.hrm-board.colors > span { color: #ffffff; font-weight: 700; }
.hrm-board.colors > .changed { box-shadow: inset 0 0 0 2px #f5c518; }
.hrm-board.colors > .wrong { box-shadow: inset 0 0 0 2px #e0201b; }
.hrm-board > input { border: 0; border-radius: 0; padding: 0; text-align: center; color: #1f2933; font-weight: 700; }
.hrm-board > input.box-right, .hrm-board > input.box-bottom { border-radius: 0; }
.hrm-board > input:focus { outline: 3px solid #2563a8; outline-offset: -3px; }
.hrm-board > input:not(:placeholder-shown) { background: #e3e8ee; }
.hrm-legend { display: flex; flex-wrap: wrap; gap: 4px 14px; margin-top: 8px; font-size: 13px;
  color: var(--body-text-color); }
.hrm-legend i { display: inline-block; width: 13px; height: 13px; margin-right: 5px; vertical-align: -2px;
  border: 1px solid #9aa5b1; box-sizing: border-box; }
.hrm-chart { width: 100%; max-width: 460px; height: auto; display: block; }
.hrm-chart text { font: 11px system-ui, sans-serif; fill: var(--body-text-color); }
.hrm-text { white-space: pre-wrap; overflow-wrap: anywhere; font: 14px/1.75 ui-monospace, Menlo, monospace;
  border: 1px solid var(--border-color-primary); border-radius: 6px; padding: 10px 12px; min-height: 120px;
  color: var(--body-text-color); }
.hrm-text .depth { color: #1f2933; border-radius: 2px; }
.hrm-text .depth.deep { color: #ffffff; }
.hrm-text .prompt { text-decoration: underline dotted; text-underline-offset: 4px; }
.hrm-refused { border-left: 4px solid #b3261e; padding: 6px 12px; color: var(--body-text-color);
  overflow-wrap: anywhere; }
.hrm-about { font-size: 14px; color: var(--body-text-color); overflow-wrap: anywhere; }
.hrm-about p { margin: 0 0 4px; }
.hrm-about summary { cursor: pointer; padding: 6px 0; }
.hrm-about details[open] { border: 1px solid var(--border-color-primary); border-radius: 6px; padding: 4px 14px 12px;
  max-height: 70vh; overflow: auto; }
.hrm-about :is(h1, h2, h3) { font-weight: 600; margin: 14px 0 4px; }
.hrm-about h1 { font-size: 18px; }
.hrm-about h2 { font-size: 16px; }
.hrm-about :is(ul, ol) { padding-left: 20px; list-style: disc; }
.hrm-about pre { overflow-x: auto; padding: 8px 10px; background: var(--background-fill-secondary); }
.hrm-about code { font-family: ui-monospace, Menlo, monospace; font-size: 13px; }
.hrm-about table { border-collapse: collapse; display: block; overflow-x: auto; }
.hrm-about :is(td, th) { border: 1px solid var(--border-color-primary); padding: 2px 8px; }
.hrm-about code > span { display: inline-block; max-width: 100%; }
.hrm-about a { text-decoration: underline; }
.hrm-attempt { border: 1px solid var(--border-color-primary); border-left: 4px solid #2563a8; border-radius: 6px;
  padding: 10px 14px; margin-bottom: 12px; color: var(--body-text-color); }
.hrm-attempt.failed { border-left-color: #c8372d; }
.hrm-attempt.passed { border-left-color: #2a9d4a; }
.hrm-attempt h4 { margin: 0 0 6px; font-size: 15px; font-weight: 600; }
.hrm-attempt h5 { margin: 8px 0 2px; font-size: 12px; font-weight: 600; text-transform: uppercase;
  letter-spacing: 0.04em; opacity: 0.75; }
.hrm-attempt ul { margin: 0; padding-left: 20px; list-style: disc; }
.hrm-attempt li { margin: 0 !important; }
.hrm-attempt pre { background: #f3f5f8; color: #1f2933; border-radius: 4px; padding: 8px 10px; margin: 2px 0;
  overflow-x: auto; font: 13px/1.5 ui-monospace, Menlo, monospace; tab-size: 4; }
.hrm-attempt pre .bad-line { background: #f6b3ab; display: inline-block; min-width: 100%; }
.hrm-badge { display: inline-block; border-radius: 10px; padding: 1px 9px; font-size: 12px; font-weight: 600;
  color: #ffffff; background: #52606d; }
.hrm-badge.good { background: #1f7a39; }
.hrm-badge.bad { background: #b3261e; }
/* Phones: small margins, and buttons that are large enough to tap. */
@media (max-width: 640px) {
  .gradio-container > .main { padding: 16px !important; }
  button:is(.sm, .md, .lg, .label-wrap, [role=tab]) { min-height: 40px; align-items: center; }
  h1 { font-size: 22px !important; }
  .hrm-figure { height: auto !important; }
}
"""


def figure_output(label: str, **options: Any) -> gr.Image:
    """Add an image component for a figure. The label is for screen readers, since the figure has a title."""
    classes = f"hrm-figure {options.pop('elem_classes', '')}".split()
    return gr.Image(
        label=label, show_label=False, type="pil", format="png", buttons=["download", "fullscreen"],
        elem_classes=classes, **options,
    )  # fmt: skip


def figure_image(figure) -> Image.Image:
    """Render a matplotlib figure as an image at 110 dpi."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png")
    image = Image.open(buffer)
    image.load()
    return image
