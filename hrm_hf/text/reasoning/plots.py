"""A picture of an evaluation on the reasoning suite: accuracy by difficulty and by steps, and the passes used."""

from pathlib import Path
from typing import Any

from ...io.words import counted
from ...trainer.plots import ACCENT, INK, MUTED, new_figure, save_figure
from .build import ReasoningInfo


def plot_reasoning(metrics: dict[str, Any], info: ReasoningInfo, path: str | Path, title: str = "") -> Path:
    """Draws what `evaluate_rows` returns, a line for each number of passes, and returns the path."""
    from matplotlib import colormaps

    settings = list(dict.fromkeys(row["passes"] for row in metrics["by_difficulty"]))
    numbers = [one for one in settings if isinstance(one, int)]
    shades = {
        one: colormaps["viridis"](0.9 * (1 - place / max(1, len(numbers) - 1))) for place, one in enumerate(numbers)
    }
    halting = [row for row in metrics["by_step"] if row["passes"] not in shades and "average_steps" in row]
    figure, axes = new_figure(1, 3 if halting else 2, (5 * (3 if halting else 2), 3.8))
    what = info.make_task().difficulty_is
    panels = [
        (axes[0, 0], metrics["by_difficulty"], "difficulty", "exact_accuracy", f"All answers of a row, by {what}"),
        (axes[0, 1], metrics["by_step"], "steps", "cell_accuracy", f"Answers, by the {what} that they take"),
    ]
    for panel, rows, key, measure, heading in panels:
        for passes in settings:
            line = sorted((row[key], row[measure]) for row in _once(rows, key) if row["passes"] == passes)
            panel.plot(
                *zip(*line),
                color=shades.get(passes, INK),
                linestyle="-" if passes in shades else "--",
                marker="o",
                markersize=3,
                label=_label(passes, bool(halting)),
            )
        panel.set(xlabel=what, ylabel=measure.replace("_", " "), ylim=(0, 1.05), title=heading)
        _mark_training(panel, info)
    axes[0, 0].legend(frameon=False, fontsize=8)
    if halting:
        line = sorted((row["steps"], row["average_steps"]) for row in _once(halting, "steps"))
        axes[0, 2].plot(*zip(*line), color=ACCENT, marker="o", markersize=3)
        axes[0, 2].set(
            xlabel=what, ylabel="passes", ylim=(0, None), title=f"Passes of an answer, by the {what} it takes"
        )
        _mark_training(axes[0, 2], info)
    return save_figure(figure, path, title)


def _label(passes: int | str, halting: bool) -> str:
    if isinstance(passes, int):
        return counted(passes, "pass", "passes")
    return "as the model halts" if halting else "the model"


def _once(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """One row for each place of a line: of the first split that has it, as test has easy steps and beyond too."""
    return list({(row["passes"], row[key]): row for row in reversed(rows)}.values())


def _mark_training(panel, info: ReasoningInfo) -> None:
    """Shades what was trained on."""
    low, high = info.trained
    panel.axvspan(low - 0.5, high + 0.5, color=MUTED, alpha=0.2, linewidth=0)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(axis="y", color=MUTED, alpha=0.4)
