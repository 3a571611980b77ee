"""Intervals of shares, which every task reports with its rates."""

import math


Z_95 = 1.959963984540054


def wilson_interval(successes: int, trials: int, z: float = Z_95) -> tuple[float, float] | None:
    """Score interval of a share (Wilson 1927), 95 % by default; None for no trials.

    Unlike the normal approximation it stays within 0 and 1 and says something of 0 successes: 0 of 154 is at
    most 2.4 %.

    Args:
        z: quantile of the standard normal distribution.

    Raises:
        ValueError: fewer than no successes, or more than trials.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials; expected 0 to {trials}")
    if not trials:
        return None
    share, weight = successes / trials, z * z / trials
    centre = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials)) / (1 + weight)
    # Rounding must not leave 0 or 1 out of the interval of none or all.
    return (max(0.0, centre - half) if successes else 0.0, min(1.0, centre + half) if successes < trials else 1.0)
