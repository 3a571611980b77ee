"""Cell and exact accuracy, the arithmetic that evaluation, the `evaluate` metric and reports share."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


IGNORE_LABEL = -100


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
    """`{"cell_accuracy", "exact_accuracy", "count"}` of rows, from what `correct_cells` gives; arrays [N].

    Cell accuracy is the mean over rows of each row's share, as in the original. Rows without labels do not count.

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
        "exact_accuracy": float((num_correct[kept] == num_labels[kept]).mean()),
        "count": int(kept.sum()),
    }


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Score interval of a share (Wilson 1927), 95 % by default; within 0 and 1. Raises ValueError for no trials."""
    if trials < 1:
        raise ValueError(f"trials={trials}; an interval needs at least one")
    share, weight = successes / trials, z * z / trials
    centre = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials)) / (1 + weight)
    return max(0.0, centre - half), min(1.0, centre + half)
