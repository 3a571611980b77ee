"""Evaluates a saved Go coder, or a baseline trained on the same stream, on records, trajectories and benchmarks."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ...hub.cards import record_evaluation
from ...hub.kinds import LANGUAGE_MODEL, load_config
from ...io.evaluation import chosen_device, validate_evaluation, write_results
from ...trainer.recipes import library_versions
from ..data.records import read_records, spread
from ..validators.go_validators import best_validator
from . import benchmark_run, decisions, equal_tokens, held_out, loss, policies, refinement, tested_decisions
from .benchmarks import REPAIR, load_benchmark
from .held_out import Sampling
from .load import load_writer
from .plots import plot_go_evaluation
from .sources import validate_sources


# What a model card gets, as paths into the metrics.
CARD_METRICS = (
    "loss.code_bits_per_byte", "loss.raw_text_bits_per_byte", "loss.shuffled_plan_costs", "greedy.intent_accuracy",
    "greedy.target_f1", "greedy.plan_acc", "greedy.code_exact", "greedy.code_ast", "greedy.parse_rate",
    "greedy.type_check_rate", "decisions.head.accuracy", "decisions.head.macro_f1",
    "decisions.head.calibration_error",
    "decisions.tokens.accuracy", "decisions.tokens.macro_f1", "decisions.tokens.majority_accuracy",
    "repair.repair_exact", "repair.resampling_exact", "refinement.valid.refinement.success",
    "refinement.valid.gain_over_resampling.difference",
    "refinement.exact.refinement.success", "refinement.exact.gain_over_resampling.difference",
    "refinement.valid.refinement.average_iterations", "equal_tokens.edits.kept", "equal_tokens.resampling.kept",
    "equal_tokens.edits_gain.difference", "equal_tokens.tokens_ratio",
)  # fmt: skip
# Shown beside them, and all of a benchmark; everything is in results.json.
SCREEN_METRICS = (
    *CARD_METRICS, "loss.code_bits_per_byte_shuffled_plan", "loss.code_bits_per_byte_none_plan",
    "loss.shuffled_plan_costs_interval", "greedy.records", "greedy.type_check_records", "greedy.code_exact_after",
    "decisions.head.macro_f1_interval", "decisions.head.temperature", "decisions.head.calibration_error_calibrated",
    "decisions.tokens.calibration_error", "decisions.head.majority_accuracy", "decisions.head.rule_accuracy",
    "repair.cases", "repair.exact_gain.interval",
    "repair.repair_mode", "repair.repair_tokens", "repair.resampling_tokens", "repair.repair_unchanged",
    "repair.repair_not_applied", "repair.attempt_ast", "repair.repair_ast",
    *(
        f"policies.{policy}.{figure}"
        for policy in ("model", "fix", "resample", "verdict")
        for figure in ("valid", "tokens", "valid_per_1000_tokens", "valid_per_1000_tokens_interval")
    ),
    "equal_tokens.failures", "equal_tokens.budget", "equal_tokens.attempt_subtree_f1", *(
        f"equal_tokens.{policy}.{figure}"
        for policy in equal_tokens.POLICIES
        for figure in (
            "valid", "valid_interval", "kept", "kept_interval", "complete", "complete_interval", "shortened",
            "subtree_f1", "tokens",
        )
    ),
    "equal_tokens.edits_complete_gain.interval", "equal_tokens.half_complete_gain.interval",
    "equal_tokens.edits_gain.interval", "equal_tokens.edits_gain.mcnemar_p", "equal_tokens.half_gain.difference",
    "equal_tokens.half_gain.interval", "equal_tokens.half_gain.mcnemar_p",
    "loss.in_windows", "refinement.records", "refinement.cut", "refinement.reference_rejected", *(
        f"refinement.{success}.{figure}"
        for success in ("valid", "exact")
        for figure in (
            "refinement.success_per_iteration", "resampling.success_per_sample", "resampling.any_success_per_sample",
            "gain_over_resampling.interval", "gain_over_selected.interval",
        )
    ),
)  # fmt: skip


def evaluate_checkpoint(
    model: str,
    *,
    records: list[Path] | None = None,
    trajectories: list[Path] | None = None,
    calibrate_on: list[Path] | None = None,
    benchmark: list[str] | None = None,
    limit: int | None = None,
    validator: str = "auto",
    max_iterations: int = 3,
    temperature: float = 0.8,
    samples: int = 1,
    batch_size: int = 8,
    max_length: int | None = None,
    problem_budget: int | None = None,
    context_budget: int | None = None,
    max_code_tokens: int = 512,
    repair_mode: str | None = None,
    repetition_guard: bool = True,
    failures: int = 0,
    token_budget: int = 512,
    seed: int = 0,
    on_bad_line: str = "stop",
    on_skip: Callable[[str], None] | None = None,
    out: Path | None = None,
    device: str | None = None,
    update_card: bool = False,
) -> dict[str, Any]:
    """Evaluates bits per byte, plans, code, decisions, repair and refinement; pass@k of local test sets.

    Args:
        records, trajectories: held-out files.
        calibrate_on: other trajectories, on which the temperature of decisions is found.
        benchmark: local test sets, each NAME=FILE.
        limit: so many records and trajectories, from all over the files; tasks.
        max_iterations: attempts of the loop and of its control.
        samples: of each task and each repair; 1 is greedy.
        max_length: tokens of a sequence; the model's by default.
        problem_budget, context_budget: tokens of problems and contexts; as the model was trained by default.
        repair_mode: "rewrite" or "edits"; as the model was trained by default.
        repetition_guard: plans and codes may not go round in circles.
        failures: so many failed codes of the model's own are repaired and written anew at equal tokens; 0 for none.
        token_budget: new tokens for each of them.
        on_skip: called with what is wrong with each line that is left out.
        out: folder for results.json, evaluation.png and all that is written.

    Returns:
        What results.json holds, and the names of the files that were written.

    Raises:
        UsageError: nothing to evaluate on, or a path or a device that is none.
        ModelError: a model that is nowhere, or of another kind.
        ValueError: files without records.
    """
    validate_evaluation(model, out, update_card)
    load_config(model, LANGUAGE_MODEL)
    benchmarks = validate_sources(records, trajectories, benchmark, out, failures, calibrate_on)
    device = chosen_device(device)
    read = partial(read_records, on_bad_line=on_bad_line, on_skip=on_skip)
    rows = spread(_filled(list(read(records)), records), limit) if records else []
    trials = spread(_with_attempts(list(read(trajectories)), trajectories), limit) if trajectories else []
    other = _with_attempts(list(read(calibrate_on)), calibrate_on) if calibrate_on else []
    tasks = {name: load_benchmark(name, file)[:limit] for name, file in benchmarks}
    writer, builder = load_writer(
        model, device, batch_size=batch_size, max_length=max_length, problem_budget=problem_budget,
        context_budget=context_budget, repair_mode=repair_mode, max_code_tokens=max_code_tokens,
        repetition_guard=repetition_guard,
    )  # fmt: skip
    sampling = Sampling(temperature, max_iterations, samples, seed)
    if out:
        out.mkdir(parents=True, exist_ok=True)
    with best_validator(validator) as judge:
        metrics = _evaluate(writer, builder, rows, trials, other, judge, sampling, out)
        if failures:
            file = out / "equal_tokens.jsonl" if out else None
            metrics["equal_tokens"] = equal_tokens.evaluate_equal_tokens(
                writer, builder, rows, judge, sampling, failures, token_budget, file
            )
        if benchmarks:
            metrics["benchmarks"] = _run_benchmarks(writer, builder, tasks, judge, sampling, model, out)
    files = [*(records or []), *(trajectories or []), *(file for _, file in benchmarks)]
    result = {
        "task": "go-coder",
        "model": model,
        "dataset": ", ".join(map(str, files)),
        "split": "test",
        "records": [str(path) for path in records or []],
        "trajectories": [str(path) for path in trajectories or []],
        "calibrate_on": [str(path) for path in calibrate_on or []],
        "settings": {
            "limit": limit, "validator": type(judge).__name__, "max_iterations": max_iterations,
            "temperature": temperature, "samples": samples, "max_length": writer.max_length,
            "max_code_tokens": max_code_tokens,
            "repair_mode": builder.repairs, "repetition_guard": repetition_guard, "seed": seed,
            "problem_budget": builder.problem_budget, "context_budget": builder.context_budget,
        },
        "metrics": metrics,
        "parameters": writer.model.num_parameters(),
        "versions": library_versions(),
    }  # fmt: skip
    written = write_results(result, out) if out else {}
    if out and (plot := plot_go_evaluation(metrics, out / "evaluation.png", Path(model).name)):
        written["plot"] = str(plot)
    if update_card:
        written["card"] = _update_card(model, result, records or trajectories)
    return result | written


def _filled(rows: list, files: list[Path]) -> list:
    if not rows:
        raise ValueError(f"{', '.join(map(str, files))}: no record; expected JSON Lines of hrm-hf data go")
    return rows


def _with_attempts(rows: list, files: list[Path]) -> list:
    """Records of trajectories, of which at least one has attempts to judge."""
    if not any(row.get("attempts") for row in _filled(rows, files)):
        raise ValueError(
            f"{', '.join(map(str, files))}: no record has attempts; expected trajectories (hrm-hf data go writes "
            "*.trajectories.jsonl), plain records go to --records"
        )
    return rows


def _evaluate(writer, builder, records, trajectories, other, validator, sampling, out: Path | None) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    if records:
        metrics["loss"] = loss.evaluate_loss(writer, builder, records, sampling.seed)
        metrics["greedy"], written = held_out.evaluate_greedy(writer, builder, records, validator)
        if out:
            (out / "greedy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    if trajectories:
        metrics["decisions"] = decisions.evaluate_decisions(writer, builder, trajectories, other, sampling.seed)
        metrics["repair"] = held_out.evaluate_repair(writer, builder, trajectories, validator, sampling)
    if records and held_out.is_go_coder(writer.model):
        metrics["refinement"] = refinement.evaluate_refinement(writer, builder, records, validator, sampling)
        if builder.repairs == "edits":
            metrics["policies"] = policies.evaluate_policies(writer, builder, records, validator, sampling)
    return metrics


def _run_benchmarks(writer, builder, tasks, validator, sampling, model: str, out: Path) -> dict[str, Any]:
    results = {}
    with benchmark_run.test_tools() as (types, runner, refused):
        judge = types or validator
        for name, chosen in tasks.items():
            run = benchmark_run.BenchmarkRun(name, model, sampling.samples, sampling.temperature, sampling.seed)
            file = out / "benchmarks" / f"{name}.samples.jsonl"
            samples = benchmark_run.write_samples(writer, builder, chosen, run, judge, file)
            unsolvable = benchmark_run.unsolvable_tasks(chosen, types) if types else []
            results[name] = benchmark_run.judge_samples(chosen, samples, judge, runner, unsolvable)
            if refused:
                results[name]["tests_refused"] = refused
            written = {"judged": samples}
            if runner and name == REPAIR:
                results[name]["decisions"], written["decisions"] = tested_decisions.evaluate_tested_decisions(
                    writer, builder, chosen, types, runner, sampling.seed
                )
            for what, rows in written.items():
                lines = [json.dumps(row) + "\n" for row in rows]
                file.with_name(f"{name}.{what}.jsonl").write_text("".join(lines))
    return results


def flattened(metrics: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested figures under names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _update_card(model: str, result: dict[str, Any], files: list[Path] | None) -> str:
    flat, settings = flattened(result["metrics"]), {k: v for k, v in result["settings"].items() if v is not None}
    parameters, card = result["parameters"], None
    if files:
        chosen = {name.replace(".", "_"): flat[name] for name in CARD_METRICS if flat.get(name) is not None}
        card = record_evaluation(model, chosen, str(files[0]), "test", parameters, **settings)
    for name, figures in result["metrics"].get("benchmarks", {}).items():
        chosen = {key: value for key, value in figures.items() if key.startswith("pass@") or key.endswith("_rate")}
        card = record_evaluation(model, chosen, name, "test", parameters, **settings)
    return str(card)
