"""Plots of evaluations and training runs."""

from pathlib import Path
from typing import Any


INK, ACCENT, MUTED = "#1f2933", "#2563a8", "#b8c4d0"
EXTRA = ("#c2571a", "#4d8b31")


def new_figure(rows: int, columns: int, size: tuple[float, float]):
    """Create a matplotlib figure and its axes without a display. `size` is (width, height) in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(colors=INK)
    return figure, axes


def save_figure(figure, path: str | Path, title: str = "") -> Path:
    """Add a title to a figure, save it in the format given by the path's suffix, and return the path."""
    if title:
        figure.suptitle(title, color=INK)
    figure.savefig(path, dpi=120)
    return Path(path)


def plot_evaluation(metrics: dict[str, Any], path: str | Path, title: str = "") -> Path:
    """Plot metrics from `evaluate_puzzles`: accuracy per ACT step, steps used and q_halt reliability."""
    tables = metrics.get("by_difficulty", {})
    figure, axes = new_figure(1, 3 + len(tables), (4 * (3 + len(tables)), 3.8))
    curve, histogram, reliability, *others = axes[0]
    steps, accuracy = range(1, metrics["max_steps"] + 1), metrics["exact_accuracy_per_step"]
    curve.plot(steps, accuracy, color=ACCENT, marker="o", markersize=4)
    curve.fill_between(steps, *zip(*metrics["exact_accuracy_per_step_interval"]), color=ACCENT, alpha=0.2, linewidth=0)
    curve.set(xlabel="ACT step", ylim=(0, 1.05), title=f"Solved after each step, {accuracy[-1]:.1%} in the end")
    histogram.bar(steps, metrics["steps_histogram"], color=ACCENT, width=0.85)
    histogram.axvline(metrics["average_steps"], color=INK, linestyle="--", linewidth=1)
    average = f"Average {metrics['average_steps']:.2f} steps"
    histogram.set(xlabel="ACT steps used", ylabel="puzzles", title=average, xlim=(0.3, steps[-1] + 0.7))
    for panel in (curve, histogram):
        panel.xaxis.get_major_locator().set_params(integer=True)

    bins = [row for row in metrics["reliability"] if row["count"]]
    confidence = [row["confidence"] for row in bins]
    reliability.plot([0, 1], [0, 1], color=MUTED, linestyle="--", linewidth=1)
    _draw_accuracies(reliability, bins, confidence, "accuracy")
    reliability.set(xlabel="confidence, sigmoid(q_halt)", title=f"Reliability, ECE {metrics['ece']:.3f}")
    for panel, (measure, table) in zip(others, tables.items()):
        places = range(len(table))
        _draw_accuracies(panel, table, places, "exact_accuracy")
        names = [f"{row['low']:g}" + (f"-{row['high']:g}" if row["high"] > row["low"] else "") for row in table]
        every = -(-len(table) // 10)  # more than ten labels would overlap
        panel.set_xticks(places[::every], names[::every], rotation=30 if len(table) > 5 else 0)
        panel.set(xlabel=measure, title=f"By {measure}")
    return save_figure(figure, path, title)


def _draw_accuracies(axes, rows: list[dict[str, Any]], places, name: str) -> None:
    """Plot the accuracy `name` of each row, with its confidence interval `<name>_interval`."""
    ends = [row[f"{name}_interval"] for row in rows]
    axes.vlines(places, [low for low, _ in ends], [high for _, high in ends], color=ACCENT, linewidth=1, alpha=0.6)
    axes.plot(places, [row[name] for row in rows], color=ACCENT, marker="o", markersize=4, linestyle="")
    axes.set(ylabel="exact accuracy", ylim=(0, 1.05))
    axes.grid(axis="y", color=MUTED, alpha=0.4)


def plot_training(log_history: list[dict[str, Any]], path: str | Path) -> Path:
    """Plot a puzzle trainer's `log_history`: loss, training and held-out accuracy, and ACT steps."""
    panels = {
        "Loss": ("lm_loss", "q_halt_loss", "q_continue_loss"),
        "Exact accuracy": ("exact_accuracy", "eval_exact_accuracy"),
        "ACT steps": ("average_steps", "eval_average_steps"),
    }
    return _plot_history(log_history, path, panels, from_zero=panels.keys())


def plot_lm_training(log_history: list[dict[str, Any]], path: str | Path) -> Path:
    """Plot a language model's `log_history`: loss, bits per byte, and loss components or gradient norm."""
    logged = {name for entry in log_history for name in entry if name.endswith("_loss")}
    components = sorted(name for name in logged - {"lm_loss", "train_loss"} if not name.startswith("eval_"))
    panels = {
        "Loss (nats per token)": ("lm_loss", "eval_lm_loss"),
        "Bits per byte": ("eval_bits_per_byte",),
        ("Loss components" if components else "Gradient norm"): components or ("grad_norm",),
    }
    return _plot_history(log_history, path, panels, from_zero=("Loss components", "Gradient norm"))


def plot_reward_training(log_history: list[dict[str, Any]], path: str | Path) -> Path:
    """Plot a GRPO `log_history`: rewards, fraction of prompts with equal rewards, and completion length."""
    logged = {name for entry in log_history for name in entry}
    each = sorted(name for name in logged if name.startswith("rewards/") and name.endswith("/mean"))
    panels = {
        "Reward": ("reward", "eval_reward", *each) if len(each) > 1 else ("reward", "eval_reward"),
        "Prompts with identical rewards": ("frac_reward_zero_std",),
        "Tokens per completion": ("completions/mean_length", "eval_completions/mean_length"),
    }
    return _plot_history(log_history, path, panels, from_zero=panels.keys())


def plot_cosmo_training(log_history: list[dict[str, Any]], path: str | Path) -> Path:
    """Plot a regressor's `log_history`: negative log-likelihood, held-out errors and calibration."""
    logged = sorted({name for entry in log_history for name in entry if name.startswith("eval_rmse_")})
    panels = {
        "Negative log likelihood (nats)": ("nll_loss", "eval_nll_loss"),
        "Held-out RMSE": logged or ("grad_norm",),
        "Mean z² (1: calibrated)": ("z_squared", "eval_z_squared"),
    }
    return _plot_history(log_history, path, panels, from_zero=("Held-out RMSE",))


def _plot_history(log_history, path: str | Path, panels: dict[str, Any], from_zero) -> Path:
    figure, row = new_figure(1, len(panels), (12, 3.8))
    for axes, (title, names) in zip(row[0], panels.items()):
        colors = (MUTED, ACCENT) if len(names) <= 2 else (MUTED, ACCENT, INK, *EXTRA)
        for name, color in zip(names, colors):
            points = [(entry["step"], entry[name]) for entry in log_history if name in entry]
            if points:
                held_out = name.startswith("eval_")
                shown = ACCENT if held_out and len(names) <= 2 else color
                axes.plot(*zip(*points), color=shown, marker="o" if held_out else None, markersize=4, label=name)
            ends = ("step", f"{name}_low", f"{name}_high")
            if interval := [[entry[end] for end in ends] for entry in log_history if ends[1] in entry]:
                axes.fill_between(*zip(*interval), color=color, alpha=0.2, linewidth=0)
        axes.set(xlabel="optimizer step", title=title)
        if title in from_zero:
            axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize="small") if axes.has_data() else None
        axes.grid(axis="y", color=MUTED, alpha=0.4)
    return save_figure(figure, path)
