"""Cell and exact accuracy, the arithmetic that evaluation, the `evaluate` metric and reports share.

Shares of puzzles come with their Wilson interval of 95 %, as NAME_interval: [low, high]. The accuracy of cells has
none: the cells of a puzzle are not independent trials.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..trainer.logging import wilson_interval


IGNORE_LABEL = -100
MOST_VALUES = 36  # of a measure of difficulty that are bins of their own
NUM_BINS = 8  # of one with more values, each with about as many puzzles
CALIBRATION_BINS = 10  # of confidence


def correct_cells(predictions: Any, labels: Any) -> tuple[Any, Any]:
    """Correct and labelled cells per row.

    Args:
        predictions, labels: token ids [..., S], both numpy arrays or both tensors; -100 is no label.

    Returns:
        Two integer arrays (or tensors) [...].
    """
    labelled = labels != IGNORE_LABEL
    return ((predictions == labels) & labelled).sum(-1), labelled.sum(-1)


def accuracies(num_correct: Sequence[int] | np.ndarray, num_labels: Sequence[int] | np.ndarray) -> dict[str, float]:
    """Accuracies of rows, from what `correct_cells` gives; arrays [N].

    Cell accuracy is the mean over rows of each row's share, as in the original. Rows without labels do not count.

    Returns:
        `{"cell_accuracy", "exact_accuracy", "exact_accuracy_interval", "count"}`.

    Raises:
        ValueError: no row has a label.
    """
    num_correct, num_labels = np.asarray(num_correct), np.asarray(num_labels)
    kept = num_labels > 0
    if not kept.any():
        raise ValueError(f"none of {len(kept)} rows has a label (all are {IGNORE_LABEL}); there is nothing to score")
    share = num_correct[kept] / num_labels[kept]
    return {
        "cell_accuracy": float(share.mean()),
        **share_of("exact_accuracy", num_correct[kept] == num_labels[kept]),
        "count": int(kept.sum()),
    }


def share_of(name: str, flags: Any) -> dict[str, Any]:
    """`{name: share of true ones, name_interval: [low, high]}` of bool [N], N at least 1."""
    right = int(np.sum(flags))
    return {name: right / len(flags), f"{name}_interval": list(wilson_interval(right, len(flags)))}


def accuracy_by_difficulty(difficulty: np.ndarray, right: np.ndarray) -> list[dict[str, Any]]:
    """Exact accuracy in bins of a measure of difficulty.

    Up to `MOST_VALUES` values are a bin each; more are put into at most `NUM_BINS` bins of about equal counts.

    Args:
        difficulty: a number for each puzzle [N].
        right: whether it was solved, bool [N].

    Returns:
        `[{"low", "high", "count", "exact_accuracy", "exact_accuracy_interval"}, ...]`, easiest first; both ends are
        values that occur in the bin.
    """
    difficulty, right = np.asarray(difficulty, dtype=float), np.asarray(right, dtype=bool)
    values = np.unique(difficulty)
    lowest = values
    if len(values) > MOST_VALUES:
        lowest = np.unique(np.quantile(difficulty, np.arange(NUM_BINS) / NUM_BINS, method="higher"))
    bins = np.searchsorted(lowest, difficulty, side="right") - 1
    table = []
    for number in range(len(lowest)):
        inside = bins == number
        ends = {"low": float(difficulty[inside].min()), "high": float(difficulty[inside].max())}
        table.append({**ends, "count": int(inside.sum()), **share_of("exact_accuracy", right[inside])})
    return table


def with_bounds(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics and, for logs and cards, which hold numbers only, exact_accuracy_low and _high of its interval."""
    bounds = metrics.get("exact_accuracy_interval") or ()
    return metrics | dict(zip(("exact_accuracy_low", "exact_accuracy_high"), bounds))


def calibration(confidence: np.ndarray, right: np.ndarray, num_bins: int = CALIBRATION_BINS) -> dict[str, Any]:
    """Reliability table, with Wilson intervals of 95 % of its accuracies, and expected calibration error.

    Args:
        confidence: [N], 0 to 1. right: bool [N].

    Returns:
        `{"reliability": [{"low", "high", "count", "confidence", "accuracy", "accuracy_interval"}, ...], "ece"}`; empty
        bins have no means.
    """
    bins = np.minimum((confidence * num_bins).astype(int), num_bins - 1)
    table, error = [], 0.0
    for i in range(num_bins):
        inside = bins == i
        row = {"low": i / num_bins, "high": (i + 1) / num_bins, "count": int(inside.sum())}
        means = (float(confidence[inside].mean()), float(right[inside].mean())) if inside.any() else (None, None)
        interval = wilson_interval(int(right[inside].sum()), row["count"])
        row |= {"confidence": means[0], "accuracy": means[1], "accuracy_interval": interval and list(interval)}
        table.append(row)
        error += abs(means[0] - means[1]) * row["count"] if inside.any() else 0.0
    return {"reliability": table, "ece": error / len(confidence)}
