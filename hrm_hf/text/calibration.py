"""A threshold for an exit criterion, chosen on a text so that halting early costs no more than is allowed.

The text should be another one than that whose figures are reported: a threshold is fitted to the tokens it was chosen
on. Halting later never costs more on average, so the threshold is found by bisection.
"""

import math
from collections.abc import Callable
from typing import Any

from ..models.early_exit import exit_class


STEPS = 8  # of the bisection: the range of a criterion is then known to 1 part in 256
LEAST, MOST = 1e-6, 10.0  # of thresholds of changes; those of probabilities are between 0 and 1


def calibrate_exit(
    measure: Callable[[float | None], dict[str, Any]], criterion: str, allowed_loss: float
) -> dict[str, Any]:
    """The threshold that saves most segments at no more than `allowed_loss` more loss than always thinking to the end.

    Args:
        measure: `lm_loss` and `average_steps` on the calibration text at a threshold of the criterion; None for a
            criterion that never halts.
        criterion: a name in `EXIT_CRITERIA` that has a threshold.
        allowed_loss: share of the loss, such as 0.005.

    Returns:
        exit_criterion, exit_threshold, lm_loss, average_steps; always_lm_loss of all segments; allowed_loss.

    Raises:
        ValueError: a criterion without a threshold.
    """
    kind = exit_class(criterion)
    if kind.default_threshold is None:
        raise ValueError(f"exit_criterion={criterion!r} has no threshold that could be chosen")
    is_probability = not math.isinf(kind.highest_threshold)

    def at(place: float) -> float:
        """The threshold at a place between 0 (never halt) and 1 (halt at once)."""
        return 1 - place if is_probability else LEAST * (MOST / LEAST) ** place

    always = measure(None)
    most = always["lm_loss"] * (1 + allowed_loss)
    late, early, best = 0.0, 1.0, {"exit_threshold": at(0.0), **always}
    for _ in range(STEPS):
        middle = (late + early) / 2
        found = measure(at(middle))
        if found["lm_loss"] <= most:
            late, best = middle, {"exit_threshold": at(middle), **found}
        else:
            early = middle
    figures = {name: best[name] for name in ("exit_threshold", "lm_loss", "average_steps")}
    chosen = {"exit_criterion": criterion, "always_lm_loss": always["lm_loss"], "allowed_loss": allowed_loss}
    return chosen | figures
