"""Report a Go coder's evaluation: the metrics for the card and the screen, and one plot."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...hub.cards import record_evaluation
from ...trainer.plots import ACCENT, EXTRA, INK, MUTED, new_figure, save_figure


# Paths into the metrics that a card and the screen show; results.json has everything.
SHOWN = (
    "loss.code_bits_per_byte", "loss.code_perplexity", "loss.raw_text_bits_per_byte", "loss.shuffled_plan_costs",
    "greedy.intent_accuracy", "greedy.target_f1", "greedy.plan_acc", "greedy.code_exact", "greedy.code_ast",
    "greedy.parse_rate", "greedy.type_check_rate", "decisions.head.accuracy", "decisions.head.macro_f1",
    "decisions.head.rule_accuracy", "decisions.head.calibration_error", "decisions.tokens.accuracy",
    "decisions.tokens.macro_f1", "decisions.tokens.majority_accuracy", "repair.repair_exact",
    "repair.resampling_exact", "repair.repair_valid", "repair.resampling_valid", "repair.repair_tokens",
    "repair.resampling_tokens", "repair.repair_unchanged", "repair.repair_not_applied",
    "refinement.valid.refinement.success", "refinement.valid.gain_over_resampling.difference",
    "refinement.exact.refinement.success", "refinement.exact.gain_over_resampling.difference",
    "refinement.valid.refinement.average_iterations",
)  # fmt: skip
COUNTS = ("records", "cases", "type_check_records", "reference_rejected", "left_out")
BYTES = {
    "raw_text_bits_per_byte": "plain text",
    "code_bits_per_byte": "own plan",
    "code_bits_per_byte_shuffled_plan": "other plan",
    "code_bits_per_byte_none_plan": "no plan",
    "plan_and_code_bits_per_byte": "plan + code",
}


def flattened(metrics: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested metrics under names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def on_screen(result: dict[str, Any]) -> dict[str, str]:
    """Return the metrics that the screen shows: those of a card with their intervals, counts, and test sets."""
    chosen = {}
    for name, value in flattened(result["metrics"]).items():
        plain = name.removesuffix("_interval").replace(".interval", ".difference")
        if plain in SHOWN or name.rpartition(".")[2] in COUNTS or name.startswith("benchmarks."):
            chosen[name] = _rounded(value)
    return chosen


def _rounded(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_rounded, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def update_card(model: str, result: dict[str, Any], files: list[Path] | None) -> str:
    """Write the metrics into the model's card, and return its path."""
    flat, settings = flattened(result["metrics"]), {k: v for k, v in result["settings"].items() if v is not None}
    parameters, card = result["parameters"], None
    if files:
        chosen = {name.replace(".", "_"): flat[name] for name in SHOWN if flat.get(name) is not None}
        card = record_evaluation(model, chosen, str(files[0]), "test", parameters, **settings)
    for name, metrics in result["metrics"].get("benchmarks", {}).items():
        chosen = {key: value for key, value in metrics.items() if key.startswith("pass@") or key.endswith("_rate")}
        card = record_evaluation(model, chosen, name, "test", parameters, **settings)
    return str(card)


# ---- plot ----


def plot_evaluation(metrics: dict[str, Any], path: Path, title: str = "") -> Path | None:
    """Draw the sections "refinement" and "loss" as a PNG; None, and no file, if there is none of them."""
    panels = list(_panels(metrics))
    if not panels:
        return None
    figure, row = new_figure(1, len(panels), (4.2 * len(panels), 3.8))
    for axes, (draw, arguments) in zip(row[0], panels):
        draw(axes, *arguments)
    return save_figure(figure, path, title)


def _panels(metrics: dict[str, Any]) -> Iterator[tuple[Any, tuple]]:
    for name in ("valid", "exact"):
        if name in metrics.get("refinement", {}):
            yield _draw_attempts, (metrics["refinement"][name], name)
    if "code_bits_per_byte" in metrics.get("loss", {}):
        yield _draw_bytes, (metrics["loss"],)


def _draw_attempts(axes, section: dict[str, Any], name: str) -> None:
    """Draw the loop and its baseline over the same number of attempts."""
    refined = section["refinement"]
    attempts = range(1, len(refined["success_per_iteration"]) + 1)
    axes.plot(attempts, refined["success_per_iteration"], color=ACCENT, marker="o", markersize=4, label="refinement")
    axes.plot(attempts, section["resampling"], color=EXTRA[0], marker="s", markersize=4, label="any sample")
    axes.vlines(attempts[-1], *refined["success_interval"], color=ACCENT, linewidth=1)
    axes.set(xlabel="attempts", ylabel=f"{name} answers", ylim=(0, 1.05), title=f"Answers that are {name}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize="small")
    axes.grid(axis="y", color=MUTED, alpha=0.4)


def _draw_bytes(axes, section: dict[str, Any]) -> None:
    values = {label: section[name] for name, label in BYTES.items() if section.get(name) is not None}
    colors = [MUTED, ACCENT, EXTRA[0], EXTRA[1], MUTED]
    bars = axes.bar(list(values), list(values.values()), color=colors, width=0.7)
    axes.bar_label(bars, [f"{value:.3f}" for value in values.values()], color=INK, fontsize="small")
    axes.set(ylabel="bits per byte", title="Bits per byte of held-out code")
    axes.tick_params(axis="x", labelrotation=20)
