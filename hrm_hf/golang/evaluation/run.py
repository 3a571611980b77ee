"""Evaluate a saved Go coder or a baseline on records, trajectories and test sets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...hub.cards import record_evaluation
from ...hub.kinds import LANGUAGE_MODEL, load_config
from ...io.evaluation import chosen_device, write_results
from ...trainer.recipes import library_versions
from ..data.records import read_records, spread, write_lines
from ..data.streams import GoStreamBuilder
from ..options import EvaluateGo
from ..validators.go_validators import best_validator
from . import benchmarks, held_out
from .held_out import Record, Validator
from .writer import Writer, is_go_coder, load_writer


# Metrics shown in the model card and on screen; results.json has all metrics.
SHOWN = (
    "loss.code_bits_per_byte", "loss.code_perplexity", "greedy.intent_accuracy", "greedy.target_f1",
    "greedy.plan_acc", "greedy.code_exact", "greedy.code_ast", "greedy.parse_rate", "greedy.type_check_rate",
    "decisions.head.accuracy", "decisions.head.macro_f1", "decisions.head.rule_accuracy",
    "decisions.head.calibration_error", "decisions.tokens.accuracy", "decisions.tokens.macro_f1",
    "decisions.tokens.majority_accuracy", "repair.repair_exact", "repair.resampling_exact", "repair.repair_valid",
    "repair.resampling_valid", "repair.repair_tokens", "repair.resampling_tokens", "repair.repair_unchanged",
    "refinement.valid.refinement.success", "refinement.valid.gain_over_resampling.difference",
    "refinement.exact.refinement.success", "refinement.exact.gain_over_resampling.difference",
    "refinement.valid.refinement.average_iterations",
)  # fmt: skip
COUNTS = ("records", "cases", "type_check_records", "reference_rejected", "left_out")


def evaluate_checkpoint(options: EvaluateGo, on_skip: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Evaluate a Go coder: bits per byte, plans, code, decisions, repairs, refinement and pass@k.

    Args:
        on_skip: called with the error of each corrupted line that is skipped.

    Returns:
        The content of results.json, and the names of the files that were written.

    Raises:
        UsageError: the device does not exist.
        ModelError: the model is not found, or is of a different kind.
        ValueError: a file has no records.
    """
    load_config(options.model, LANGUAGE_MODEL)
    device = chosen_device(options.device)
    found = _read(options, on_skip)
    tasks = {name: benchmarks.load_benchmark(name, file)[: options.limit] for name, file in options.benchmarks()}
    writer, builder = load_writer(options, device)
    with best_validator(options.validator) as judge:
        metrics = _measure(writer, builder, found, judge, options)
        if tasks:
            metrics["benchmarks"] = _run_benchmarks(writer, builder, tasks, judge, options)
    shown = ("limit", "max_iterations", "temperature", "samples", "max_code_tokens", "repetition_guard", "seed")
    settings = {name: getattr(options, name) for name in shown} | {
        "validator": type(judge).__name__, "max_length": writer.max_length,
        "problem_budget": builder.problem_budget, "context_budget": builder.context_budget,
    }  # fmt: skip
    files = [*(options.records or []), *(options.trajectories or []), *(file for _, file in options.benchmarks())]
    result = {
        "task": "go-coder",
        "model": options.model,
        "dataset": ", ".join(map(str, files)),
        "split": "test",
        "settings": settings,
        "metrics": metrics,
        "parameters": writer.model.num_parameters(),
        "versions": library_versions(),
    }
    written = write_results(result, options.out) if options.out else {}
    if options.update_card:
        written["card"] = update_card(options.model, result, options.records or options.trajectories)
    return result | written


def _read(options: EvaluateGo, on_skip: Callable[[str], None] | None) -> tuple[list[Record], list[Record]]:
    """Read the records and the trajectories. At least one trajectory must have attempts."""
    found = []
    for files in (options.records or [], options.trajectories or []):
        rows = list(read_records(files, on_bad_line=options.on_bad_line, on_skip=on_skip))
        if files and not rows:
            raise ValueError(f"{', '.join(map(str, files))}: no records; expected JSON Lines from hrm-hf data go")
        found.append(spread(rows, options.limit))
    if options.trajectories and not any(row.get("attempts") for row in found[1]):
        raise ValueError(
            f"{', '.join(map(str, options.trajectories))}: no record has attempts; pass plain records to --records"
        )
    return found[0], found[1]


def _measure(writer: Writer, builder: GoStreamBuilder, found: tuple, judge: Validator, options: EvaluateGo) -> dict:
    (records, trajectories), metrics = found, {}
    if records:
        metrics["loss"] = held_out.evaluate_loss(writer, builder, records)
        metrics["greedy"], rows = held_out.evaluate_greedy(writer, builder, records, judge)
        if options.out:
            write_lines(options.out / "greedy.jsonl", rows)
    if trajectories:
        metrics["decisions"] = held_out.evaluate_decisions(writer, builder, trajectories)
        metrics["repair"] = held_out.evaluate_repair(writer, builder, trajectories, judge, options.seed)
    if records and is_go_coder(writer.model):
        metrics["refinement"] = held_out.evaluate_refinement(writer, records, judge, options)
    return metrics


def _run_benchmarks(writer: Writer, builder: GoStreamBuilder, tasks: dict, judge: Validator, options: EvaluateGo):
    results = {}
    with benchmarks.test_tools() as (types, runner, unavailable):
        judge = types or judge
        for name, chosen in tasks.items():
            samples = benchmarks.write_samples(writer, builder, chosen, judge, options, name == benchmarks.REPAIR)
            unsolvable = benchmarks.unsolvable_tasks(chosen, types) if types else []
            results[name] = benchmarks.judge_samples(chosen, samples, judge, runner, unsolvable)
            if unavailable:
                results[name]["tests_refused"] = unavailable
            write_lines(options.out / f"{name}.jsonl", samples)
    return results


# ---- report ----


def flattened(metrics: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested metrics, joining names with dots."""
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def on_screen(result: dict[str, Any]) -> dict[str, str]:
    """Return the metrics to show on screen: `SHOWN` with intervals, counts, and all benchmark metrics."""
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
    """Write the metrics to the model's card, and return its path."""
    flat, settings = flattened(result["metrics"]), {k: v for k, v in result["settings"].items() if v is not None}
    parameters, card = result["parameters"], None
    if files:
        chosen = {name.replace(".", "_"): flat[name] for name in SHOWN if flat.get(name) is not None}
        card = record_evaluation(model, chosen, str(files[0]), "test", parameters, **settings)
    for name, metrics in result["metrics"].get("benchmarks", {}).items():
        chosen = {key: value for key, value in metrics.items() if key.startswith("pass@") or key.endswith("_rate")}
        card = record_evaluation(model, chosen, name, "test", parameters, **settings)
    return str(card)
