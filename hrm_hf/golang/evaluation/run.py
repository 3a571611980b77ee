"""Evaluate a saved Go coder, or a baseline trained on the same stream, on records, trajectories and test sets.

Load, measure, report: `writer.py` loads the model; `loss.py`, `held_out.py`, `decisions.py` and `benchmarks.py` each
measure one thing; `report.py` writes the card and the plot.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...hub.kinds import LANGUAGE_MODEL, load_config
from ...io.evaluation import chosen_device, write_results
from ...trainer.recipes import library_versions
from ..data.records import read_records, spread
from ..data.streams import GoStreamBuilder
from ..validators.go_validators import best_validator
from . import benchmarks, held_out
from .benchmarks import GoTask, load_benchmark
from .decisions import evaluate_decisions
from .held_out import Record, Validator
from .loss import evaluate_loss
from .options import EvaluateGo
from .report import plot_evaluation, update_card
from .writer import Writer, is_go_coder, load_writer


def evaluate_checkpoint(options: EvaluateGo, on_skip: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Evaluate bits per byte, plans, code, decisions, repair and refinement, and pass@k of local test sets.

    Args:
        on_skip: called with what is wrong with each corrupt line that is skipped.

    Returns:
        What results.json holds, and the names of the files that were written.

    Raises:
        UsageError: the device does not exist.
        ModelError: the model is not found, or of another kind.
        ValueError: a file has no records.
    """
    load_config(options.model, LANGUAGE_MODEL)
    device = chosen_device(options.device)
    records, trajectories = _read(options, on_skip)
    tasks = {name: load_benchmark(name, file)[: options.limit] for name, file in options.benchmarks()}
    writer, builder = load_writer(
        options.model, device, batch_size=options.batch_size, max_length=options.max_length,
        problem_budget=options.problem_budget, context_budget=options.context_budget,
        max_code_tokens=options.max_code_tokens,
        repetition_guard=options.repetition_guard,
    )  # fmt: skip
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    with best_validator(options.validator) as judge:
        metrics = _measure(writer, builder, records, trajectories, judge, options)
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
    if options.out and (plot := plot_evaluation(metrics, options.out / "evaluation.png", Path(options.model).name)):
        written["plot"] = str(plot)
    if options.update_card:
        written["card"] = update_card(options.model, result, options.records or options.trajectories)
    return result | written


def _read(options: EvaluateGo, on_skip: Callable[[str], None] | None) -> tuple[list[Record], list[Record]]:
    """Read the records and the trajectories; at least one trajectory must have attempts."""
    found = []
    for files in (options.records or [], options.trajectories or []):
        rows = list(read_records(files, on_bad_line=options.on_bad_line, on_skip=on_skip))
        if files and not rows:
            raise ValueError(f"{', '.join(map(str, files))}: no record; expected JSON Lines of hrm-hf data go")
        found.append(spread(rows, options.limit))
    if options.trajectories and not any(row.get("attempts") for row in found[1]):
        raise ValueError(
            f"{', '.join(map(str, options.trajectories))}: no record has attempts; pass plain records to --records"
        )
    return found[0], found[1]


def _measure(
    writer: Writer,
    builder: GoStreamBuilder,
    records: list[Record],
    trajectories: list[Record],
    judge: Validator,
    options: EvaluateGo,
) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    if records:
        metrics["loss"] = evaluate_loss(writer, builder, records, options.seed)
        metrics["greedy"], rows = held_out.evaluate_greedy(writer, builder, records, judge)
        if options.out:
            _write_rows(options.out / "greedy.jsonl", rows)
    if trajectories:
        metrics["decisions"] = evaluate_decisions(writer, builder, trajectories)
        metrics["repair"] = held_out.evaluate_repair(writer, builder, trajectories, judge, options.seed)
    if records and is_go_coder(writer.model):
        metrics["refinement"] = held_out.evaluate_refinement(writer, builder, records, judge, options)
    return metrics


def _run_benchmarks(
    writer: Writer, builder: GoStreamBuilder, tasks: dict[str, list[GoTask]], judge: Validator, options: EvaluateGo
) -> dict[str, Any]:
    results = {}
    with benchmarks.test_tools() as (types, runner, refused):
        judge = types or judge
        for name, chosen in tasks.items():
            samples = benchmarks.write_samples(writer, builder, chosen, judge, options, name == benchmarks.REPAIR)
            unsolvable = benchmarks.unsolvable_tasks(chosen, types) if types else []
            results[name] = benchmarks.judge_samples(chosen, samples, judge, runner, unsolvable)
            if refused:
                results[name]["tests_refused"] = refused
            _write_rows(options.out / f"{name}.jsonl", samples)
    return results


def _write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
