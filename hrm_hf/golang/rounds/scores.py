"""Scores of rounds: the same held-out failures before and after each, compared, shown and drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...trainer.plots import ACCENT, EXTRA, INK, MUTED, new_figure, save_figure
from ..evaluation.metrics import paired_gain
from ..validators.categories import ERROR_CLASSES
from .failures import problem_of


def compared(scores: Sequence[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """The scores of rounds without their rows; all but the first with "gain", the difference to the first.

    Args:
        scores: of `fixer_success`, on the same failures in the same order.
        seed: of the bootstrap over problems.
    """
    problems = [problem_of(row["id"]) for row in scores[0]["rows"]]
    flags = [[row["mended"] for row in score["rows"]] for score in scores]
    shown = [{name: value for name, value in score.items() if name != "rows"} for score in scores]
    for score, ours in zip(shown[1:], flags[1:]):
        score["gain"] = paired_gain(problems, ours, flags[0], seed)
    return shown


def described(score: dict[str, Any]) -> str:
    """A line: what is mended with its interval, of each class of errors, and the gain since the first score."""
    classes = ", ".join(f"{name} {_share(part)} of {part['failures']}" for name, part in score["by_class"].items())
    line = f"{_share(score)} of {score['failures']} ({classes})"
    if "gain" not in score:
        return line
    gain = score["gain"]
    low, high = gain["interval"]
    return f"{line}; {gain['difference']:+.1%} [{low:+.1%}, {high:+.1%}], McNemar p {gain['mcnemar_p']:.2g}"


def _share(part: dict[str, Any]) -> str:
    low, high = part["mended_interval"]
    return f"{part['mended']:.1%} [{low:.1%}, {high:.1%}]"


def plot_rounds(scores: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draws the share of held-out failures that is mended after each round: all with intervals, and each class."""
    figure, axes = new_figure(1, 1, (6.4, 4.0))
    panel, rounds = axes[0][0], [score["round"] for score in scores]
    panel.plot(rounds, [score["mended"] for score in scores], color=INK, linewidth=2.5, marker="o", label="all")
    panel.vlines(rounds, *zip(*(score["mended_interval"] for score in scores)), color=INK, linewidth=1)
    styles = [(color, line) for line in ("-", "--", ":") for color in (ACCENT, *EXTRA)]
    for name, (color, line) in zip(ERROR_CLASSES, styles):
        parts = [score["by_class"].get(name) for score in scores]
        if all(parts):
            label = f"{name} ({parts[0]['failures']})"
            shares = [part["mended"] for part in parts]
            panel.plot(rounds, shares, color=color, linestyle=line, marker="o", markersize=3, label=label)
    panel.set(
        xlabel="round", ylabel="failures mended by one repair", ylim=(0, 1.05), title="The same held-out failures"
    )
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(axis="y", color=MUTED, alpha=0.4)
    panel.legend(frameon=False, fontsize="small")
    return save_figure(figure, path)
