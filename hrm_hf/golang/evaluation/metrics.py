"""Figures of the Go coder's evaluation, as pure functions of what was predicted and what was right.

Plans, refinement decisions, iterations, pass@k, bits per byte, and the intervals that go with them. Nothing here knows
a model, a tokenizer or Go; how two codes compare is in `go_similarity`. Every rate is a share from 0 to 1, and a rate
of nothing is None, never 0.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...models.processing_hrm_go_coder import DECISIONS
from ...trainer.intervals import wilson_interval


RESAMPLES = 10_000  # of a bootstrap


def rate(flags: Sequence[bool]) -> float | None:
    """Share of true ones; None for no flags."""
    return sum(map(bool, flags)) / len(flags) if len(flags) else None


def mean(values: Sequence[float]) -> float | None:
    """Mean; None for no values."""
    return float(np.mean(values)) if len(values) else None


def rate_with_interval(name: str, flags: Sequence[bool]) -> dict[str, Any]:
    """{name: share, name_interval: Wilson interval of 95 %, as a list}."""
    interval = wilson_interval(sum(map(bool, flags)), len(flags))
    return {name: rate(flags), f"{name}_interval": interval and list(interval)}


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples passes: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    Raises:
        ValueError: fewer samples than k, or more correct ones than samples.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {correct} correct among {samples} samples; expected 1 <= k <= samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def pass_at_k_scores(counts: Sequence[tuple[int, int]], ks: Sequence[int], seed: int = 0) -> dict[str, Any]:
    """pass@k over tasks, with intervals of 95 %.

    Args:
        counts: samples and correct samples of each task.
        ks: those above the fewest samples of a task are left out.
        seed: of the bootstrap over tasks; one sample for each task gives Wilson's interval instead, which is not empty
            when nothing passes.

    Returns:
        {"pass@1": mean over tasks, "pass@1_interval": [low, high], ...}; nothing for no tasks.
    """
    scores: dict[str, Any] = {}
    fewest = min((samples for samples, _ in counts), default=0)
    for k in (k for k in ks if k <= fewest):
        values = [pass_at_k(samples, correct, k) for samples, correct in counts]
        scores[f"pass@{k}"] = float(np.mean(values))
        if set(values) <= {0.0, 1.0}:
            interval = wilson_interval(int(sum(values)), len(values))
        else:
            interval = bootstrap_interval(values, seed)
        scores[f"pass@{k}_interval"] = list(interval)
    return scores


def bootstrap_interval(values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Percentile bootstrap of 95 % of a mean."""
    return ratio_interval(values, np.ones(len(values)), seed, resamples)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Percentile bootstrap of 95 % of sum(numerators) / sum(denominators), pairs drawn together.

    Bits per byte is such a ratio; a paired difference is one with differences above.
    """
    above, below = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    generator, ratios = np.random.default_rng(seed), []
    for start in range(0, resamples, 1000):  # 1000 rows of indices at a time: a large test set must fit
        rows = generator.integers(len(above), size=(min(1000, resamples - start), len(above)))
        ratios.append(above[rows].sum(axis=1) / below[rows].sum(axis=1))
    low, high = np.quantile(np.concatenate(ratios), (0.025, 0.975))
    return float(low), float(high)


def paired_difference(first: Sequence[float], second: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Mean of first - second over the same items, with a bootstrap interval of 95 % over items.

    Returns:
        {"difference", "interval", "only_first", "only_second"}: the last two count the items where it is above and
        below 0.
    """
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    if not len(differences):
        return {"difference": None, "interval": None, "only_first": 0, "only_second": 0}
    return {
        "difference": float(differences.mean()),
        "interval": list(bootstrap_interval(differences, seed)),
        "only_first": int((differences > 0).sum()),
        "only_second": int((differences < 0).sum()),
    }


def mcnemar_test(only_first: int, only_second: int) -> float:
    """Exact two-sided p of McNemar's test (1947): of pairs that differ, either side is as likely to be the right one.

    Args:
        only_first, only_second: pairs in which only the first, only the second is right.
    """
    discordant, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(discordant, k) for k in range(fewer + 1)) / 2**discordant
    return min(1.0, 2 * tail)


def paired_gain(groups: Sequence[str], ours: Sequence[bool], theirs: Sequence[bool], seed: int = 0) -> dict[str, Any]:
    """Difference of two shares over the same items, of which those of a group are alike.

    Args:
        groups: the group of each item, such as the problem that a code was written for.

    Returns:
        "difference", its "interval" of 95 % (a bootstrap over groups, weighted by their items), the items that
        "only_first" and "only_second" have right, and "mcnemar_p" of these.
    """
    rows: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        rows.setdefault(group, []).append(index)
    scale = len(rows) / max(1, len(groups))  # so that the mean over groups is the mean over items
    sums = [[sum(flags[i] for i in items) * scale for items in rows.values()] for flags in (ours, theirs)]
    only_first = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    only_second = sum(b and not a for a, b in zip(ours, theirs))
    return paired_difference(*sums, seed) | {
        "only_first": only_first,
        "only_second": only_second,
        "mcnemar_p": mcnemar_test(only_first, only_second),
    }


def bits_per_byte(nats: float, size: int) -> float | None:
    """Loss summed over tokens, in bits, for each byte of the text; None for an empty text."""
    return nats / math.log(2) / size if size else None


def plan_scores(predicted: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Intent accuracy, target precision, recall and F1, and plan accuracy.

    A target is kind and name; one that is written twice counts twice (multisets). Precision and recall are over the
    targets of all plans together (micro). `plan_acc`: intent and first target both right, or no target in either.

    Args:
        predicted: plans as `go_stream.parse_plan` gives them; intent None where there is none.
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
    """Precision, recall and F1 from counts; None where there is nothing to count."""
    return (
        hits / predicted if predicted else None,
        hits / right if right else None,
        2 * hits / (predicted + right) if predicted + right else None,
    )


def f1_of(confusion: np.ndarray) -> float | None:
    """Macro-F1 over the classes that occur, of a table with the right classes as rows; None for an empty one."""
    hits = np.diag(confusion)
    both = confusion.sum(axis=0) + confusion.sum(axis=1)  # each class: as often predicted as, and right
    return float(np.mean(2 * hits[both > 0] / both[both > 0])) if both.any() else None


def decision_scores(
    predicted: Sequence[int], reference: Sequence[int], failed: Sequence[bool] | None = None
) -> dict[str, Any]:
    """Accuracy, macro-F1 and confusion of refinement decisions, beside what needs no model.

    Args:
        predicted, reference: classes, indices of DECISIONS.
        failed: the validator found something wrong with the attempt. Whoever reads the verdict knows CONTINUE from it;
            `rule_accuracy` is that rule with the most frequent other class for the rest, and `valid_accuracy` counts
            the attempts without a failure only, beside `valid_majority`.

    Returns:
        With "confusion": rows are the right class, columns the predicted one. Macro-F1 is over the classes that occur
        in either (as scikit-learn's).
    """
    confusion = np.zeros((len(DECISIONS), len(DECISIONS)), dtype=int)
    for ours, right in zip(predicted, reference, strict=True):
        confusion[right, ours] += 1
    total = int(confusion.sum())
    scores = {
        "decisions": total,
        **rate_with_interval("accuracy", [ours == right for ours, right in zip(predicted, reference)]),
        "macro_f1": f1_of(confusion),
        "majority_accuracy": float(confusion.sum(axis=1).max() / total) if total else None,
        "confusion": confusion.tolist(),
    }
    if failed is None:
        return scores
    valid = [(ours, right) for ours, right, bad in zip(predicted, reference, failed, strict=True) if not bad]
    often = Counter(right for _, right in valid).most_common(1)
    by_rule = (often[0][1] if often else 0) + sum(
        bad and DECISIONS[right] == "CONTINUE" for right, bad in zip(reference, failed)
    )
    return scores | {
        "rule_accuracy": by_rule / total if total else None,
        "valid_accuracy": rate([ours == right for ours, right in valid]),
        "valid_majority": often[0][1] / len(valid) if valid else None,
    }


def iteration_scores(
    success: Sequence[Sequence[bool]], selected: Sequence[Sequence[bool]], max_iterations: int
) -> dict[str, Any]:
    """Scores a loop of attempts: success and cost.

    Args:
        success: for each record, whether each attempt was right.
        selected: whether each attempt passed the validator. The answer is the last attempt that did, or else the last.
        max_iterations: most attempts of a record.

    Returns:
        "success": of the answers; "success_per_iteration" [max_iterations]: of the answers if the loop had been
        stopped after that many attempts; "any_success": some attempt was right, as if a judge had chosen;
        "average_iterations"; "premature_stop_rate": records whose answer was wrong with attempts left, of all records;
        "wasted_iteration_rate": attempts after the first right one, of all attempts.
    """
    answered = [
        [flags[_answer(good, i + 1)] for flags, good in zip(success, selected, strict=True)]
        for i in range(max_iterations)
    ]
    total = sum(map(len, success))
    first_right = [_until_first(flags) for flags in success]
    return {
        **rate_with_interval("success", answered[-1]),
        "success_per_iteration": [rate(flags) for flags in answered],
        "any_success": rate([any(flags) for flags in success]),
        "average_iterations": total / len(success) if success else None,
        "premature_stop_rate": rate(
            [not right and len(flags) < max_iterations for right, flags in zip(answered[-1], success)]
        ),
        "wasted_iteration_rate": sum(len(f) - n for f, n in zip(success, first_right)) / total if total else None,
    }


def _answer(selected: Sequence[bool], attempts: int) -> int:
    """Index of the last attempt that passed among the first `attempts`, or else of the last of them."""
    seen = list(selected[:attempts])
    return max((i for i, good in enumerate(seen) if good), default=len(seen) - 1)


def _until_first(flags: Sequence[bool]) -> int:
    """How many there are up to the first true one, itself included; all of them without one."""
    return list(flags).index(True) + 1 if any(flags) else len(flags)


def resampling_scores(success: Sequence[Sequence[bool]], selected: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Scores independent samples: the control that refinement is measured against.

    Args:
        success: `[records][samples]`, in the order they were drawn.
        selected: `[records][samples]`, the sample passed the validator. Samples are drawn until one does, and that
            one, or else the last, is the answer.

    Returns:
        "any_success_per_sample" [samples]: one of the first i samples was right; "success_per_sample": the answer
        among the first i was right (the same, where success is passing the validator); "average_samples": drawn until
        one passed.
    """
    most = max(map(len, success), default=0)
    until = [_until_first(flags) for flags in selected]
    return {
        "any_success_per_sample": [rate([any(flags[: i + 1]) for flags in success]) for i in range(most)],
        "success_per_sample": [
            rate([flags[min(i + 1, n) - 1] for flags, n in zip(success, until)]) for i in range(most)
        ],
        "average_samples": sum(until) / len(until) if until else None,
    }
