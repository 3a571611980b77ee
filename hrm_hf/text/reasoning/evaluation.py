"""Evaluate any causal LM on a reasoning data set: accuracy by difficulty and number of passes.

Each row takes one forward pass; its answers are the most likely words at the positions with labels.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...hub.cards import record_evaluation
from ...hub.kinds import LANGUAGE_MODEL, load_config, load_network
from ...io.evaluation import chosen_device, write_results
from ...io.files import load_split
from ...io.usage import UsageError, as_usage_errors
from ...registry import has_ability
from ...trainer.logging import wilson_interval
from ...trainer.plots import INK, MUTED, new_figure, save_figure
from ...trainer.recipes import library_versions
from ..causal_lm import load_tokenizer
from ..evaluation import model_positions
from ..options import EvaluateReasoning
from .build import INFO_FILE, PAD_ID, ReasoningInfo, Rows, load_reasoning_info, validate_vocabulary


SPLITS = ("test", "beyond")
OWN = "own"  # value of `passes` in results if the model, not the user, determines the number of passes


def evaluate_checkpoint(options: EvaluateReasoning) -> dict[str, Any]:
    """Evaluate a model on a reasoning data set, and return the results and the written files.

    Raises:
        UsageError: the device or a split does not exist, or the rows are too long for the model.
        ModelError, ValueError: the model does not exist, is not a language model, or has a different tokenizer.
    """
    model, data = options.model, options.data
    device = chosen_device(options.device)
    load_config(model, LANGUAGE_MODEL)
    info = load_reasoning_info(data)
    usual = [split for split in SPLITS if info.difficulties(split) and info.rows["test"]] or ["validation"]
    chosen = [part.strip() for part in options.splits.split(",")] if options.splits else usual
    rows = {split: as_usage_errors(_load_rows, data, split) for split in chosen}
    tokenizer = load_tokenizer(None, model)
    validate_vocabulary(tokenizer, data)
    network = load_network(model, AutoModelForCausalLM).to(device)
    for split, some in rows.items():
        length, positions = some["input_ids"].shape[1], model_positions(network, tokenizer)
        if length > positions:
            raise UsageError(f"splits={split}: rows have {length} tokens; {model} accepts {positions}", "--splits")
    if (options.halting or options.passes) and not has_ability(network, "recurrent_depth"):
        raise ValueError(f"{model} has a fixed depth; remove --passes and --exit-criterion")
    metrics = evaluate_rows(network, rows, [None, *options.numbers], options.halting, options.batch_size)
    result = {
        "task": f"reasoning-{info.task}",
        "model": model,
        "dataset": data,
        "split": ",".join(rows),
        "settings": {"passes": options.passes or None, **options.halting},
        "metrics": metrics,
        "parameters": network.num_parameters(),
        "versions": library_versions(),
    }
    written = {}
    if options.out:
        written = write_results(result, options.out)
        title = f"{info.make_task().title}: {Path(model).name}"
        written["plot"] = str(plot_reasoning(metrics, info, options.out / "reasoning.png", title))
    if options.update_card:
        source = Path(data).name if Path(data).exists() else data
        card_metrics = {name: value for name, value in metrics.items() if isinstance(value, float)}
        card = record_evaluation(model, card_metrics, source, result["split"], result["parameters"], **options.halting)
        written["card"] = str(card)
    return result | written


def _load_rows(data: str, split: str) -> Rows:
    columns = load_split(data, split, info=INFO_FILE).select_columns(["input_ids", "labels", "steps", "difficulty"])
    return {name: np.asarray(column) for name, column in columns.with_format("numpy")[:].items()}


def evaluate_rows(
    model: PreTrainedModel,
    rows: dict[str, Rows],
    settings: Sequence[int | None] = (None,),
    halting: dict[str, Any] | None = None,
    batch_size: int = 64,
) -> dict[str, Any]:
    """Measure a model's accuracy on each split. Rows have the columns that `build.draw_rows` returns.

    Args:
        settings: numbers of passes to evaluate; None lets the model halt.
        halting: arguments of the forward pass for the setting None.

    Returns:
        `by_difficulty`: for each split, difficulty and setting, the number of rows, `exact_accuracy` (fraction of rows
        without a wrong answer) with its 95% interval, `cell_accuracy` (fraction of correct answers), and
        `average_steps` (passes at positions with labels, if reported). `by_step`: the same by number of steps to an
        answer. `SPLIT_exact_accuracy`, `SPLIT_cell_accuracy`, `SPLIT_average_steps`: for the setting None, per split.
    """
    metrics: dict[str, Any] = {"by_difficulty": [], "by_step": []}
    for split, some in rows.items():
        for passes in settings:
            options = {"num_segments": passes, "exit_criterion": "fixed"} if passes else halting or {}
            cells = _answer(model, some, options, batch_size)
            place = {"split": split, "passes": passes or OWN}
            for name, key in (("by_difficulty", "difficulty"), ("by_step", "steps")):
                for one in np.unique(cells[key]).tolist():
                    chosen = {column: values[cells[key] == one] for column, values in cells.items()}
                    metrics[name].append(place | {key: one} | _shares(chosen))
            if passes is None:
                shares = _shares(cells)
                metrics |= {f"{split}_{name}": value for name, value in shares.items() if isinstance(value, float)}
    return metrics


@torch.no_grad()
def _answer(model: PreTrainedModel, rows: Rows, options: dict[str, Any], batch_size: int) -> Rows:
    """Return difficulty, steps, row, correctness and (if the model reports them) passes for every answer."""
    from tqdm.auto import tqdm

    difficulties = [np.flatnonzero(rows["difficulty"] == one) for one in np.unique(rows["difficulty"])]
    batches = [places[start : start + batch_size] for places in difficulties  # one difficulty per batch
               for start in range(0, len(places), batch_size)]  # fmt: skip
    found: list[Rows] = []
    for places in tqdm(batches, desc="Evaluating", unit=" batches", disable=None):
        ids = rows["input_ids"][places]
        used = int((ids != PAD_ID).any(axis=0).sum())
        ids = torch.from_numpy(ids[:, :used].astype(np.int64)).to(model.device)
        output = model(input_ids=ids, use_cache=False, **options)
        predicted = output.logits[:, :-1].argmax(dim=-1).cpu().numpy()
        labels = rows["labels"][places, 1:used]
        row, at = np.nonzero(labels >= 0)
        cells = {
            "difficulty": rows["difficulty"][places][row],
            "steps": rows["steps"][places, 1:used][row, at],
            "row": places[row],
            "right": (predicted == labels)[row, at],
        }
        if output.get("halt_steps") is not None:
            cells["passes"] = output["halt_steps"].cpu().numpy()[row, at]
        found.append(cells)
    return {name: np.concatenate([cells[name] for cells in found]) for name in found[0]}


def _shares(cells: Rows) -> dict[str, Any]:
    _, row = np.unique(cells["row"], return_inverse=True)
    wrong = np.bincount(row, weights=~cells["right"])
    exact = int((wrong == 0).sum())
    shares = {
        "rows": len(wrong),
        "exact_accuracy": exact / len(wrong),
        "exact_accuracy_interval": wilson_interval(exact, len(wrong)),
        "answers": len(cells["right"]),
        "cell_accuracy": float(cells["right"].mean()),
    }
    return shares | ({"average_steps": float(cells["passes"].mean())} if "passes" in cells else {})


def table(metrics: dict[str, Any]) -> str:
    """Format exact and cell accuracy as a Markdown table, by difficulty and number of passes."""
    rows = metrics["by_difficulty"]
    settings = list(dict.fromkeys(row["passes"] for row in rows))
    lines = [
        "| split | difficulty | " + " | ".join(f"passes {one}" for one in settings) + " |",
        "|---" * (2 + len(settings)) + "|",
    ]
    found = {(row["split"], row["difficulty"], row["passes"]): row for row in rows}
    for split, difficulty in dict.fromkeys((row["split"], row["difficulty"]) for row in rows):
        some = [found[split, difficulty, one] for one in settings]
        shown = [f"{row['exact_accuracy']:.1%} / {row['cell_accuracy']:.1%}" for row in some]
        if some[0]["passes"] == OWN and "average_steps" in some[0]:
            shown[0] += f" ({some[0]['average_steps']:.2f})"
        lines.append(f"| {split} | {difficulty} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


# ---- the plot ----


def plot_reasoning(metrics: dict[str, Any], info: ReasoningInfo, path: str | Path, title: str = "") -> Path:
    """Plot metrics from `evaluate_rows`, with a line for each number of passes, and return the path.

    The panels show exact accuracy by difficulty, and cell accuracy and passes by the steps that an answer takes.
    """
    from matplotlib import colormaps

    settings = list(dict.fromkeys(row["passes"] for row in metrics["by_difficulty"]))
    figure, axes = new_figure(1, 3, (15, 3.8))
    panels = ("by_difficulty", "exact_accuracy"), ("by_step", "cell_accuracy"), ("by_step", "average_steps")
    for panel, (name, measure) in zip(axes[0], panels):
        key = "difficulty" if name == "by_difficulty" else "steps"
        for place, passes in enumerate(settings):
            # If both splits have a value for a number of steps, the reverse order keeps the first split's value.
            rows = [row for row in reversed(metrics[name]) if row["passes"] == passes and measure in row]
            line = sorted({row[key]: row[measure] for row in rows}.items())
            color = INK if passes == OWN else colormaps["viridis"](0.9 * (1 - place / len(settings)))
            style = "--" if passes == OWN else "-"
            if line:  # a model with a fixed depth does not report passes
                panel.plot(*zip(*line), style, color=color, marker="o", markersize=3, label=f"passes: {passes}")
        panel.set(xlabel=f"{info.make_task().difficulty_unit} of {'a row' if key == 'difficulty' else 'an answer'}")
        panel.set(ylabel=measure.replace("_", " "), ylim=(0, 1.05 if measure.endswith("accuracy") else None))
        panel.axvspan(info.trained[0] - 0.5, info.trained[1] + 0.5, color=MUTED, alpha=0.2, linewidth=0)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(axis="y", color=MUTED, alpha=0.4)
    axes[0, 0].legend(frameon=False, fontsize=8)
    return save_figure(figure, path, title)
