"""Evaluates any causal language model on a reasoning data set: accuracy by difficulty, and by the number of passes.

A row is read once, in one forward pass, and its answers are the most likely words at the places that ask. A model with
a depth of its own choosing is evaluated as it halts, and with fixed numbers of passes.
"""

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...hub.cards import record_evaluation
from ...hub.kinds import LANGUAGE_MODEL, load_config
from ...io.evaluation import chosen_device, write_results
from ...io.sources import load_split
from ...io.usage import UsageError
from ...io.words import counted
from ...trainer.intervals import wilson_interval
from ...trainer.plots import ACCENT, INK, MUTED, new_figure, save_figure
from ...trainer.recipes import library_versions
from ..causal_lm import load_tokenizer
from ..evaluation import model_positions
from ..options import EvaluateReasoning
from .build import ReasoningInfo, load_reasoning_info
from .corpus import validate_vocabulary
from .rows import PAD_ID, Rows


SPLITS = ("test", "beyond")
# Arguments of a forward pass that say how deep it is; the first one that a model has is meant.
DEPTH_ARGUMENTS = ("num_segments",)
OWN = "own"  # how a setting is called in which the model halts by itself, or has no choice
PLOT_FILE = "reasoning.png"


def depth_argument(model: PreTrainedModel) -> str | None:
    """Return the argument of a forward pass that sets the number of passes; None for a model of fixed depth."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in DEPTH_ARGUMENTS if name in parameters), None)


def evaluate_checkpoint(options: EvaluateReasoning) -> dict[str, Any]:
    """Evaluate a model on a data set of `hrm-hf data reasoning`.

    Returns:
        The content of results.json, and the names of the files that were written. `metrics` is that of
        `evaluate_rows`, with the exact and the cell accuracy of each split as the model halts.

    Raises:
        UsageError: a device or a split that does not exist, or options that do not fit the model.
        ModelError: a model that does not exist, or of another kind.
        ValueError: a tokenizer with other words, or passes of a model of one depth.
    """
    model, data = options.model, options.data
    settings, device = [None, *options.numbers], chosen_device(options.device)
    load_config(model, LANGUAGE_MODEL)
    info = load_reasoning_info(data)
    rows = {split: _load_rows(data, split, options.max_eval_samples) for split in _chosen(options.splits, info)}
    words = load_tokenizer(None, model)
    validate_vocabulary(words, data)
    network = AutoModelForCausalLM.from_pretrained(model).eval().to(device)
    for split, some in rows.items():
        length, room = some["input_ids"].shape[1], model_positions(network, words)
        if length > room:
            raise UsageError(f"rows of {split} have {length} tokens, {model} has {room} positions", "--splits")
    if (options.halting or options.passes) and depth_argument(network) is None:
        raise ValueError(f"{model} has one depth, no passes and no exit; leave out --passes and --exit-criterion")
    metrics = evaluate_rows(network, rows, settings, options.halting, options.batch_size, sys.stderr.isatty())
    chance = {(row["split"], row["difficulty"]): row["chance"] for row in info.table}
    for row in metrics["by_difficulty"]:
        row["chance"] = chance.get((row["split"], row["difficulty"]))
    kept = {"passes": options.passes or None, **options.halting, "max_eval_samples": options.max_eval_samples}
    result = {
        "task": f"reasoning-{info.task}",
        "model": model,
        "dataset": data,
        "split": ",".join(rows),
        "settings": kept,
        "metrics": metrics,
        "parameters": network.num_parameters(),
        "versions": library_versions(),
    }
    written = {}
    if options.out:
        written = write_results(result, options.out)
        title = f"{info.make_task().title}: {Path(model).name}"
        written["plot"] = str(plot_reasoning(metrics, info, options.out / PLOT_FILE, title))
    if options.update_card:
        written["card"] = _update_card(model, data, result)
    return result | written


def _chosen(text: str, info: ReasoningInfo) -> list[str]:
    if text:
        return [part.strip() for part in text.split(",")]
    return [split for split in SPLITS if len(info.difficulties(split)) and info.rows["test"]] or ["validation"]


def _load_rows(data: str, split: str, most: int | None) -> Rows:
    """Columns of a split, with the first `most` rows of each difficulty."""
    try:
        columns = load_split(data, split).select_columns(["input_ids", "labels", "steps", "difficulty"])
    except ValueError as error:
        raise UsageError(str(error), "--splits") from error
    rows = {name: np.asarray(column) for name, column in columns.with_format("numpy")[:].items()}
    if most is None:
        return rows
    difficulty = rows["difficulty"]
    kept = np.concatenate([np.flatnonzero(difficulty == one)[:most] for one in np.unique(difficulty)])
    return {name: column[kept] for name, column in rows.items()}


def evaluate_rows(
    model: PreTrainedModel,
    rows: dict[str, Rows],
    settings: Sequence[int | None] = (None,),
    halting: dict[str, Any] | None = None,
    batch_size: int = 64,
    shown: bool = False,
) -> dict[str, Any]:
    """Accuracy of a model on splits of rows.

    Args:
        rows: by split; columns as of `rows.draw_rows`.
        settings: numbers of passes; None as the model halts.
        halting: arguments of a forward pass in which the model halts.
        shown: show a progress bar.

    Returns:
        `by_difficulty`: for each split, difficulty and setting the rows, `exact_accuracy` (all answers of a row right)
        with its interval of 95 %, `cell_accuracy` (answers), and `average_steps`, the passes of the places that
        answer, where the model says them. `by_step`: for each split, number of steps of an answer and setting the
        answers, `cell_accuracy` and `average_steps`. `SPLIT_exact_accuracy`, `SPLIT_cell_accuracy` and
        `SPLIT_average_steps` of a whole split, as the model halts.
    """
    from tqdm.auto import tqdm

    batches = {split: _batches(some, batch_size) for split, some in rows.items()}
    total = len(settings) * sum(map(len, batches.values()))
    metrics: dict[str, Any] = {"by_difficulty": [], "by_step": []}
    with tqdm(total=total, desc="Evaluating", unit=" batches", disable=not shown) as bar:
        for split, some in rows.items():
            for passes in settings:
                fixed = passes and {depth_argument(model): passes, "exit_criterion": "fixed"}
                options = fixed or halting or {}
                answered = _answer(model, some, batches[split], options, bar)
                place = {"split": split, "passes": OWN if passes is None else passes}
                for name, key in (("by_difficulty", "difficulty"), ("by_step", "steps")):
                    of_rows = name == "by_difficulty"
                    for one in np.unique(answered[key]).tolist():
                        cells = {column: values[answered[key] == one] for column, values in answered.items()}
                        metrics[name].append(place | {key: one} | _shares(cells, of_rows))
                if passes is None:
                    figures = _shares(answered, of_rows=True)
                    wanted = ("exact_accuracy", "cell_accuracy", "average_steps")
                    metrics |= {f"{split}_{name}": figures[name] for name in wanted if name in figures}
    return metrics


def _batches(rows: Rows, size: int) -> list[np.ndarray]:
    """Places of rows of one difficulty, which are equally long."""
    found = []
    for one in np.unique(rows["difficulty"]):
        places = np.flatnonzero(rows["difficulty"] == one)
        found += np.split(places, range(size, len(places), size))
    return found


@torch.no_grad()
def _answer(model, rows: Rows, batches: list[np.ndarray], options: dict[str, Any], bar) -> Rows:
    """Every answer of every row: its difficulty, steps, row, whether it is right, and the passes of its place."""
    found: dict[str, list[np.ndarray]] = {}
    for places in batches:
        batch = {name: rows[name][places] for name in ("input_ids", "labels", "steps")}
        used = int((batch["input_ids"] != PAD_ID).any(axis=0).sum())
        ids = torch.from_numpy(batch["input_ids"][:, :used].astype(np.int64)).to(model.device)
        output = model(input_ids=ids, use_cache=False, **options)
        said = output.logits[:, :-1].argmax(dim=-1).cpu().numpy()
        labels = batch["labels"][:, 1:used]
        row, at = np.nonzero(labels >= 0)
        cells = {
            "difficulty": rows["difficulty"][places][row],
            "steps": batch["steps"][:, 1:used][row, at],
            "row": places[row],
            "right": (said == labels)[row, at],
        }
        if output.get("halt_steps") is not None:
            cells["passes"] = output["halt_steps"].cpu().numpy()[row, at]
        for name, values in cells.items():
            found.setdefault(name, []).append(values)
        bar.update()
    return {name: np.concatenate(values) for name, values in found.items()}


def _shares(cells: Rows, of_rows: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if of_rows:
        _, row = np.unique(cells["row"], return_inverse=True)
        wrong = np.bincount(row, weights=~cells["right"])
        exact = int((wrong == 0).sum())
        figures = {"rows": len(wrong), "exact_accuracy": exact / len(wrong)}
        figures["exact_accuracy_interval"] = wilson_interval(exact, len(wrong))
    figures |= {"answers": len(cells["right"]), "cell_accuracy": float(cells["right"].mean())}
    if "passes" in cells:
        figures["average_steps"] = float(cells["passes"].mean())
    return figures


def table(metrics: dict[str, Any]) -> str:
    """Exact and cell accuracy in Markdown: a line for each difficulty and a column for each number of passes."""
    rows = metrics["by_difficulty"]
    settings = list(dict.fromkeys(row["passes"] for row in rows))
    lines = [
        "| split | difficulty | chance | " + " | ".join(f"passes {one}" for one in settings) + " |",
        "|---" * (3 + len(settings)) + "|",
    ]
    found = {(row["split"], row["difficulty"], row["passes"]): row for row in rows}
    for split, difficulty in dict.fromkeys((row["split"], row["difficulty"]) for row in rows):
        some = [found[split, difficulty, one] for one in settings]
        chance = "" if some[0].get("chance") is None else f"{some[0]['chance']:.1%}"
        shown = [f"{row['exact_accuracy']:.1%} / {row['cell_accuracy']:.1%}" for row in some]
        if some[0]["passes"] == OWN and "average_steps" in some[0]:
            shown[0] += f" ({some[0]['average_steps']:.2f})"
        lines.append(f"| {split} | {difficulty} | {chance} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _update_card(model: str, data: str, result: dict[str, Any]) -> str:
    source = Path(data).name if Path(data).exists() else data
    settings = {name: value for name, value in result["settings"].items() if value is not None and name != "passes"}
    figures = {name: value for name, value in result["metrics"].items() if isinstance(value, float)}
    return str(record_evaluation(model, figures, source, result["split"], result["parameters"], **settings))


# ---- the plot ----


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
