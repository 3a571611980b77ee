"""Metrics of the Go coder's evaluation as pure functions of predictions and references.

They cover plans, refinement decisions, iterations, pass@k, bits per byte, and confidence intervals. Every rate is in
[0, 1], and the rate of an empty list is None.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...models.processing_hrm_go_coder import DECISIONS
from ...trainer.logging import wilson_interval


RESAMPLES = 10_000  # number of bootstrap resamples


def mean(values: Sequence[float]) -> float | None:
    """Return the mean of the values (for flags, the fraction of True), or None if there are none."""
    return float(np.mean(values)) if len(values) else None


def rate_with_interval(name: str, flags: Sequence[bool]) -> dict[str, Any]:
    """Return {name: rate, name_interval: [low, high]}, with the 95% Wilson interval."""
    interval = wilson_interval(sum(map(bool, flags)), len(flags))
    return {name: mean(flags), f"{name}_interval": interval and list(interval)}


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate pass@k as 1 - C(n-c, k) / C(n, k), with c of n samples correct (Chen et al. 2021, eq. 1).

    Raises:
        ValueError: `correct` or `k` is greater than `samples`, or too small.
    """
    if not 0 <= correct <= samples:
        raise ValueError(f"correct={correct}: must be in [0, {samples}], the number of samples")
    if not 1 <= k <= samples:
        raise ValueError(f"k={k}: must be in [1, {samples}], the number of samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def pass_at_k_scores(counts: Sequence[tuple[int, int]], ks: Sequence[int], seed: int = 0) -> dict[str, Any]:
    """Return {"pass@1": mean over tasks, "pass@1_interval": [low, high], ...}, with 95% intervals.

    Args:
        counts: (number of samples, number of correct samples) for each task.
        ks: values of k; values above the smallest number of samples per task are skipped.
        seed: seed of the bootstrap over tasks. If every task has pass@k 0 or 1, the interval is Wilson's instead.
    """
    scores: dict[str, Any] = {}
    fewest = min((samples for samples, _ in counts), default=0)
    for k in (k for k in ks if k <= fewest):
        values = [pass_at_k(samples, correct, k) for samples, correct in counts]
        scores[f"pass@{k}"] = mean(values)
        if set(values) <= {0.0, 1.0}:
            interval = wilson_interval(int(sum(values)), len(values))
        else:
            interval = ratio_interval(values, np.ones(len(values)), seed)
        scores[f"pass@{k}_interval"] = list(interval)
    return scores


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of sum(numerators) / sum(denominators).

    Each numerator is resampled with its denominator. Bits per byte is such a ratio; a mean has denominators of 1.
    """
    above, below = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    generator, ratios = np.random.default_rng(seed), []
    for _ in range(0, RESAMPLES, 1000):  # 1000 resamples at a time, to limit the memory for large test sets
        rows = generator.integers(len(above), size=(1000, len(above)))
        ratios.append(above[rows].sum(axis=1) / below[rows].sum(axis=1))
    low, high = np.quantile(np.concatenate(ratios), (0.025, 0.975))
    return float(low), float(high)


def paired_difference(first: Sequence[float], second: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Return the mean of `first - second` over paired items, with its 95% bootstrap interval.

    "only_first" and "only_second" count the items with a positive and a negative difference.
    """
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    interval = list(ratio_interval(differences, np.ones(len(differences)), seed)) if len(differences) else None
    return {
        "difference": mean(differences),
        "interval": interval,
        "only_first": int((differences > 0).sum()),
        "only_second": int((differences < 0).sum()),
    }


def bits_per_byte(nats: float, size: int) -> float | None:
    """Convert a summed loss in nats to bits per byte of text. Return None if the text is empty."""
    return nats / math.log(2) / size if size else None


def plan_scores(predicted: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return intent accuracy, target precision, recall and F1, and plan accuracy.

    A target is a kind and a name; duplicates count (multisets). Precision and recall are micro-averaged: they pool the
    targets of all plans. `plan_acc` requires the correct intent and first target (or no target in either).

    Args:
        predicted: output of `parse_plan`; the intent is None if the plan has none.
        reference: plans of records.
    """
    intents = [ours["intent"] == right["intent"] for ours, right in zip(predicted, reference, strict=True)]
    first = [ours["targets"][:1] == right["targets"][:1] for ours, right in zip(predicted, reference)]
    hits = sum(
        (Counter(ours["targets"]) & Counter(right["targets"])).total() for ours, right in zip(predicted, reference)
    )
    precision, recall, f1 = f1_score(
        hits, sum(len(plan["targets"]) for plan in predicted), sum(len(plan["targets"]) for plan in reference)
    )
    most = Counter(right["intent"] for right in reference).most_common(1)
    return {
        **rate_with_interval("intent_accuracy", intents),
        "intent_majority": most[0][1] / len(reference) if most else None,
        "target_precision": precision,
        "target_recall": recall,
        "target_f1": f1,
        **rate_with_interval("plan_acc", [a and b for a, b in zip(intents, first)]),
    }


def f1_score(hits: int, predicted: int, right: int) -> tuple[float | None, float | None, float | None]:
    """Return precision, recall and F1 from counts, each None if its denominator is 0."""
    return (
        hits / predicted if predicted else None,
        hits / right if right else None,
        2 * hits / (predicted + right) if predicted + right else None,
    )


def decision_scores(predicted: Sequence[int], reference: Sequence[int], failed: Sequence[bool]) -> dict[str, Any]:
    """Return accuracy, macro-F1 and the confusion matrix of refinement decisions, with simple baselines.

    Args:
        predicted, reference: class indices into DECISIONS.
        failed: whether the verdict on each attempt has an error. `rule_accuracy` is the accuracy of predicting
            CONTINUE after an error, and the most frequent class otherwise.

    Returns:
        Scores, and "confusion" with a row per true class and a column per predicted class. Macro-F1 averages over the
        classes that occur in `predicted` or `reference`, as in scikit-learn.
    """
    confusion = np.zeros((len(DECISIONS), len(DECISIONS)), dtype=int)
    for ours, right in zip(predicted, reference, strict=True):
        confusion[right, ours] += 1
    total, hits = int(confusion.sum()), np.diag(confusion)
    both = confusion.sum(axis=0) + confusion.sum(axis=1)  # for each class, its predictions plus its true cases
    often = max(Counter(right for right, bad in zip(reference, failed) if not bad).values(), default=0)
    by_rule = often + sum(bad and DECISIONS[right] == "CONTINUE" for right, bad in zip(reference, failed))
    return {
        "decisions": total,
        **rate_with_interval("accuracy", [ours == right for ours, right in zip(predicted, reference)]),
        "macro_f1": mean(2 * hits[both > 0] / both[both > 0]),
        "majority_accuracy": float(confusion.sum(axis=1).max() / total) if total else None,
        "confusion": confusion.tolist(),
        "rule_accuracy": by_rule / total if total else None,
    }


def calibration_error(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    """Return the expected calibration error (Guo et al. 2017, arXiv 1706.04599).

    This is the mean distance between confidence and accuracy in bins of equal width, weighted by bin size.
    `probabilities` are [N, C], `labels` [N].
    """
    sure, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    bin_of = np.minimum((sure * bins).astype(int), bins - 1)
    gaps = np.bincount(bin_of, sure - right, minlength=bins)  # per bin: size times (confidence - accuracy)
    return float(np.abs(gaps).sum() / len(labels))


def answers(success: Sequence[Sequence[bool]], selected: Sequence[Sequence[bool]], most: int | None = None):
    """Check, for each record, whether the refinement loop's answer is correct.

    The answer is the last attempt that passed the validator, or else the last attempt.

    Args:
        success, selected: `[records][attempts]`, whether an attempt is correct, and whether it passed.
        most: number of attempts after which the loop stops.
    """
    chosen = []
    for flags, passed in zip(success, selected, strict=True):
        flags, passed = flags[:most], passed[:most]
        chosen.append(flags[max((i for i, good in enumerate(passed) if good), default=-1)])
    return chosen


def iteration_scores(
    success: Sequence[Sequence[bool]], selected: Sequence[Sequence[bool]], max_iterations: int
) -> dict[str, Any]:
    """Return the success rates and costs of a refinement loop.

    Args:
        success, selected: see `answers`.
        max_iterations: maximum attempts per record.

    Returns:
        "success": rate of correct answers; "success_per_iteration" [max_iterations]: "success" if the loop stopped
        after 1, 2, ... attempts; "any_success": rate of records with a correct attempt; "average_iterations";
        "premature_stop_rate": fraction of records with a wrong answer and attempts left;
        "wasted_iteration_rate": fraction of attempts after the first correct one.
    """
    answered = [answers(success, selected, most) for most in range(1, max_iterations + 1)]
    total = sum(map(len, success))
    wasted = sum(len(flags) - 1 - list(flags).index(True) for flags in success if any(flags))
    return {
        **rate_with_interval("success", answered[-1]),
        "success_per_iteration": [mean(flags) for flags in answered],
        "any_success": mean([any(flags) for flags in success]),
        "average_iterations": total / len(success) if success else None,
        "premature_stop_rate": mean(
            [not right and len(flags) < max_iterations for right, flags in zip(answered[-1], success)]
        ),
        "wasted_iteration_rate": wasted / total if total else None,
    }
