"""One picture of a Go coder's evaluation: attempts and repairs beside their controls, bits per byte, decisions."""

from pathlib import Path
from typing import Any

from ...models.processing_hrm_go_coder import DECISIONS
from ...trainer.plots import ACCENT, EXTRA, INK, MUTED, new_figure, save_figure


BYTES = {
    "raw_text_bits_per_byte": "plain text",
    "code_bits_per_byte": "own plan",
    "code_bits_per_byte_shuffled_plan": "other plan",
    "code_bits_per_byte_none_plan": "no plan",
    "plan_and_code_bits_per_byte": "plan + code",
}


def plot_go_evaluation(metrics: dict[str, Any], path: str | Path, title: str = "") -> Path | None:
    """Draws what there is of the sections "refinement", "equal_tokens", "loss" and "decisions" as a PNG.

    Returns:
        `path`; None if there is none of them, and then nothing is written.
    """
    panels = []
    for name in ("valid", "exact"):
        if name in metrics.get("refinement", {}):
            panels.append((_draw_attempts, (metrics["refinement"][name], name)))
    if "equal_tokens" in metrics:
        panels.append((_draw_equal_tokens, (metrics["equal_tokens"],)))
    if "code_bits_per_byte" in metrics.get("loss", {}):
        panels.append((_draw_bytes, (metrics["loss"],)))
    decisions = metrics.get("decisions", {})
    for source in ("head", "tokens"):
        if decisions.get(source, {}).get("decisions"):
            panels.append((_draw_confusion, (decisions[source], source)))
            break
    if not panels:
        return None
    figure, row = new_figure(1, len(panels), (4.2 * len(panels), 3.8))
    for axes, (draw, arguments) in zip(row[0], panels):
        draw(axes, *arguments)
    return save_figure(figure, path, title)


def _draw_attempts(axes, section: dict[str, Any], name: str) -> None:
    """Both curves have the same number of attempts; the dotted one knows which of its samples is right."""
    refined, resampled = section["refinement"], section["resampling"]
    attempts = range(1, len(refined["success_per_iteration"]) + 1)
    axes.plot(attempts, refined["success_per_iteration"], color=ACCENT, marker="o", markersize=4, label="refinement")
    curves = {"success_per_sample": ("-", "resampling, first valid"), "any_success_per_sample": (":", "any sample")}
    for curve, (style, label) in curves.items():
        axes.plot(attempts, resampled[curve], color=EXTRA[0], linestyle=style, marker="s", markersize=4, label=label)
    interval = refined["success_interval"]
    axes.vlines(attempts[-1], *interval, color=ACCENT, linewidth=1)
    axes.set(xlabel="attempts", ylabel=f"{name} answers", ylim=(0, 1.05), title=f"Answers that are {name}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize="small")
    axes.grid(axis="y", color=MUTED, alpha=0.4)


def _draw_equal_tokens(axes, section: dict[str, Any]) -> None:
    styles = {"edits": (ACCENT, "o"), "resampling": (EXTRA[0], "s"), "half": (EXTRA[1], "^")}
    labels = {"edits": "edits", "resampling": "new attempts", "half": "half of each"}
    for policy, (color, marker) in styles.items():
        curve, (low, high) = section[policy]["curve"], section[policy]["valid_interval"]
        tokens = curve["tokens"]
        axes.plot(tokens, curve["valid"], color=color, marker=marker, markersize=4, label=labels[policy])
        axes.vlines(tokens[-1], low, high, color=color, linewidth=1)
    title = f"{section['failures']} failures of its own"
    axes.set(xlabel="new tokens for each", ylabel="valid answers", ylim=(0, 1.05), title=title)
    axes.legend(frameon=False, fontsize="small")
    axes.grid(axis="y", color=MUTED, alpha=0.4)


def _draw_bytes(axes, section: dict[str, Any]) -> None:
    names = [name for name in BYTES if section.get(name) is not None]
    values = [section[name] for name in names]
    bars = axes.bar(
        [BYTES[name] for name in names], values, color=[MUTED, ACCENT, EXTRA[0], EXTRA[1], MUTED], width=0.7
    )
    axes.bar_label(bars, [f"{value:.3f}" for value in values], color=INK, fontsize="small")
    axes.set(ylabel="bits per byte", title="Bits per byte of held-out code")
    axes.tick_params(axis="x", labelrotation=20)


def _draw_confusion(axes, scores: dict[str, Any], source: str) -> None:
    counts = scores["confusion"]
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, line in enumerate(counts):
        for column, count in enumerate(line):
            ink = "white" if shares[row][column] > 0.6 else INK
            axes.text(column, row, str(count), ha="center", va="center", color=ink)
    axes.set(xticks=range(3), yticks=range(3), xlabel="decided", ylabel="right", title=f"Decisions ({source})")
    axes.set_xticklabels(DECISIONS, fontsize="small")
    axes.set_yticklabels(DECISIONS, fontsize="small", rotation=90, va="center")
