"""`hrm-hf eval go`: what a Go coder, or a baseline trained on the same stream, is worth."""

import json
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .data import report
from .evaluate_checks import (
    RESULTS_FILE,
    BadLines,
    OnBadLine,
    check_arguments,
    check_files,
    chosen_device,
    model_config,
)


# What a model card gets, as paths into the metrics.
CARD_METRICS = (
    "loss.code_bits_per_byte", "loss.raw_text_bits_per_byte", "loss.shuffled_plan_costs", "greedy.intent_accuracy",
    "greedy.target_f1", "greedy.plan_acc", "greedy.code_exact", "greedy.code_ast", "greedy.parse_rate",
    "greedy.type_check_rate", "decisions.head.accuracy", "decisions.head.macro_f1", "decisions.tokens.accuracy",
    "decisions.tokens.macro_f1", "decisions.tokens.majority_accuracy", "repair.repair_exact",
    "repair.resampling_exact", "refinement.valid.refinement.success",
    "refinement.valid.gain_over_resampling.difference",
    "refinement.exact.refinement.success", "refinement.exact.gain_over_resampling.difference",
    "refinement.valid.refinement.average_iterations",
)  # fmt: skip
# Shown beside them, and all of a benchmark; everything is in results.json.
SCREEN_METRICS = (
    *CARD_METRICS, "loss.code_bits_per_byte_shuffled_plan", "loss.code_bits_per_byte_none_plan",
    "loss.shuffled_plan_costs_interval", "greedy.records", "greedy.type_check_records", "greedy.code_exact_after",
    "decisions.head.majority_accuracy", "decisions.head.rule_accuracy", "repair.cases", "repair.exact_gain.interval",
    "loss.too_long", "refinement.records", "refinement.too_long", "refinement.reference_rejected", *(
        f"refinement.{success}.{figure}"
        for success in ("valid", "exact")
        for figure in (
            "refinement.success_per_iteration", "resampling.success_per_sample", "resampling.any_success_per_sample",
            "gain_over_resampling.interval", "gain_over_selected.interval",
        )
    ),
)  # fmt: skip


class Kind(str, Enum):
    """Validators; see `hrm_hf.golang`."""

    auto = "auto"
    tree_sitter = "tree-sitter"
    parser = "parser"
    types = "types"


def go(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a model on the Hub.")],
    records: Annotated[list[Path] | None, typer.Option(help="Held-out records (JSON Lines); repeat for more.")] = None,
    trajectories: Annotated[list[Path] | None, typer.Option(help="Held-out trajectories; repeat for more.")] = None,
    benchmark: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE of a local test set, such as humaneval-go=FILE.jsonl.gz.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="So many records and trajectories, from all over the files; tasks."),
    ] = None,
    validator: Annotated[Kind, typer.Option(help="auto: parser where Go is installed, else tree-sitter.")] = Kind.auto,
    max_iterations: Annotated[int, typer.Option(min=1, max=5, help="Attempts of the loop and of its control.")] = 3,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of everything that is sampled.")] = 0.8,
    samples: Annotated[int, typer.Option(min=1, help="Of each task and each repair; 1 is greedy.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 8,
    max_length: Annotated[
        int | None, typer.Option(min=32, help="Tokens of a sequence; the model's by default.")
    ] = None,
    problem_budget: Annotated[
        int | None, typer.Option(min=18, help="Tokens of a problem; as the Go coder was trained, or 256.")
    ] = None,
    context_budget: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a context; as the Go coder was trained, or 512.")
    ] = None,
    max_code_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of a code.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of samples and shuffled plans.")] = 0,
    on_bad_line: BadLines = OnBadLine.stop,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.json, evaluation.png and all that is written.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps, ...; the best there is by default.")] = None,
    update_card: Annotated[
        bool, typer.Option("--update-card", help="Write the results into MODEL/README.md.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
):
    """Bits per byte, plans, code, decisions, repair and refinement against resampling; pass@k of local test sets.

    Example: hrm-hf eval go runs/go_nano --records data/go/test.jsonl --trajectories data/go/test.trajectories.jsonl
    --out runs/go_nano/eval --benchmark humaneval-go=humaneval_go.jsonl.gz
    """
    check_arguments(model, out, update_card)
    if not (records or trajectories or benchmark):
        raise typer.BadParameter("nothing to evaluate on; give --records, --trajectories or --benchmark")
    if benchmark and out is None:
        raise typer.BadParameter("--benchmark keeps its samples in a folder; give --out", param_hint="--out")
    check_files(records, "--records")
    check_files(trajectories, "--trajectories")
    device = chosen_device(device)
    benchmarks = [_named_file(text) for text in benchmark or []]
    from ..golang import best_validator
    from ..golang.data.collator import GoStreamBuilder
    from ..golang.data.records import read_records
    from ..golang.evaluation.held_out import Sampling
    from ..golang.evaluation.writer import Writer, model_positions
    from ..trainer.recipes import library_versions

    read = partial(read_records, on_bad_line=on_bad_line.value, on_skip=_say_left_out)
    rows = spread(_filled(list(read(records)), records), limit) if records else []
    trials = spread(_with_attempts(list(read(trajectories)), trajectories), limit) if trajectories else []
    tasks = {name: _tasks(name, file, limit) for name, file in benchmarks}
    network, tokenizer = _load(model, device)
    length = min(max_length or 2048, model_positions(network, tokenizer))
    writer = Writer(network, tokenizer, batch_size, length, max_code_tokens=max_code_tokens)
    sampling = Sampling(temperature, max_iterations, samples, seed)
    budgets = _budgets(network, problem_budget, context_budget)
    builder = GoStreamBuilder(tokenizer, length, **budgets)
    if out:
        out.mkdir(parents=True, exist_ok=True)
    with best_validator(validator.value) as judge:
        metrics = _evaluate(writer, builder, rows, trials, judge, sampling, out)
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
        "settings": {
            "limit": limit, "validator": type(judge).__name__, "max_iterations": max_iterations,
            "temperature": temperature, "samples": samples, "max_length": length, "max_code_tokens": max_code_tokens,
            "seed": seed, **budgets,
        },
        "metrics": metrics,
        "parameters": network.num_parameters(),
        "versions": library_versions(),
    }  # fmt: skip
    written = _write(result, out, Path(model).name) if out else {}
    if update_card:
        written["card"] = _update_card(model, result, records or trajectories)
    if as_json:
        report({**result, **written}, True)
    else:
        flat = flattened(metrics)
        shown = [name for name in flat if name in SCREEN_METRICS or name.startswith("benchmarks.")]
        report({**{name: _rounded(flat[name]) for name in shown}, **written}, False)


def _say_left_out(wrong: str) -> None:
    typer.echo(f"left out: {wrong}", err=True)


def spread(rows: list, limit: int | None) -> list:
    """`limit` rows from all over a file, whose neighbors are of one package."""
    if limit is None or limit >= len(rows):
        return rows
    return [rows[index * len(rows) // limit] for index in range(limit)]


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


def _budgets(network, problem: int | None, context: int | None) -> dict[str, int]:
    """How much of problems and contexts a model is shown: what is given, else what its config says it has seen."""
    trained = {"problem_budget": 256, "context_budget": 512} | network.config.to_dict()
    given = {"problem_budget": problem, "context_budget": context}
    return {name: value or trained[name] for name, value in given.items()}


def _named_file(text: str) -> tuple[str, Path]:
    from ..golang.evaluation.benchmarks import NAMES

    name, equals, file = text.partition("=")
    if not equals or name not in NAMES:
        raise typer.BadParameter(
            f"{text!r}: expected NAME=FILE with a name of {', '.join(NAMES)}", param_hint="--benchmark"
        )
    return name, Path(file)


def _tasks(name: str, file: Path, limit: int | None):
    from ..golang.evaluation.benchmarks import load_benchmark

    return load_benchmark(name, file)[:limit]


def _load(name: str, device: str):
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoTokenizer

    config = model_config(name)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{name} is a model of type {config.model_type}; expected a Go coder or another language model"
        )
    return AutoModelForCausalLM.from_pretrained(name).to(device).eval(), AutoTokenizer.from_pretrained(name)


def _evaluate(writer, builder, records, trajectories, validator, sampling, out: Path | None) -> dict[str, Any]:
    from ..golang.evaluation import held_out as go_coder
    from ..golang.evaluation import refinement as go_refinement

    metrics: dict[str, Any] = {}
    if records:
        metrics["loss"] = go_coder.evaluate_loss(writer, builder, records, sampling.seed)
        metrics["greedy"], written = go_coder.evaluate_greedy(writer, builder, records, validator)
        if out:
            (out / "greedy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    if trajectories:
        metrics["decisions"] = go_coder.evaluate_decisions(writer, builder, trajectories)
        metrics["repair"] = go_coder.evaluate_repair(writer, builder, trajectories, validator, sampling)
    if records and go_coder.is_go_coder(writer.model):
        metrics["refinement"] = go_refinement.evaluate_refinement(writer, builder, records, validator, sampling)
    return metrics


def _run_benchmarks(writer, builder, tasks, validator, sampling, model: str, out: Path) -> dict[str, Any]:
    from ..golang.evaluation import benchmark_run as runs

    results = {}
    with runs.test_tools() as (types, runner, refused):
        judge = types or validator
        for name, chosen in tasks.items():
            run = runs.BenchmarkRun(name, model, sampling.samples, sampling.temperature, sampling.seed)
            file = out / "benchmarks" / f"{name}.samples.jsonl"
            samples = runs.write_samples(writer, builder, chosen, run, judge, file)
            unsolvable = runs.unsolvable_tasks(chosen, types) if types else []
            results[name] = runs.judge_samples(chosen, samples, judge, runner, unsolvable)
            if refused:
                results[name]["tests_refused"] = refused
            lines = [json.dumps(row) + "\n" for row in samples]
            file.with_name(f"{name}.judged.jsonl").write_text("".join(lines))
    return results


def flattened(metrics: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested figures under names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _rounded(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_rounded, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _update_card(model: str, result: dict[str, Any], files: list[Path] | None) -> str:
    from ..hub.cards import record_evaluation

    flat, settings = flattened(result["metrics"]), {k: v for k, v in result["settings"].items() if v is not None}
    parameters, card = result["parameters"], None
    if files:
        chosen = {name.replace(".", "_"): flat[name] for name in CARD_METRICS if flat.get(name) is not None}
        card = record_evaluation(model, chosen, str(files[0]), "test", parameters, **settings)
    for name, figures in result["metrics"].get("benchmarks", {}).items():
        chosen = {key: value for key, value in figures.items() if key.startswith("pass@") or key.endswith("_rate")}
        card = record_evaluation(model, chosen, name, "test", parameters, **settings)
    return str(card)


def _write(result: dict[str, Any], out: Path, name: str) -> dict[str, str]:
    from ..golang.evaluation.plots import plot_go_evaluation

    file = out / RESULTS_FILE
    file.write_text(json.dumps(result, indent=1))
    plot = plot_go_evaluation(result["metrics"], out / "evaluation.png", name)
    return {"results": str(file)} | ({"plot": str(plot)} if plot else {})
