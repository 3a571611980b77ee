"""Posteriors whose calibration is known, as the table of the published TARP code was made of."""

import numpy as np


MAPS, DRAWS, REFERENCES = 2000, 400, 20
# Posteriors that are right, too narrow, too wide, and off by half of their width.
CASES = {"right": (1.0, 0.0), "narrow": (0.6, 0.0), "wide": (1.6, 0.0), "biased": (1.0, 0.5)}


def posteriors(scale: float, bias: float) -> tuple[np.ndarray, np.ndarray]:
    """Truths [maps, 2] and draws [maps, draws, 2] of posteriors whose widths are `scale` times the right ones."""
    rng = np.random.default_rng(11)  # not 0, by which TARP would draw the truths themselves as its points
    mean = rng.uniform(size=(MAPS, 2))
    width = rng.uniform(0.02, 0.1, size=(MAPS, 2))
    truth = mean + width * (rng.standard_normal((MAPS, 2)) + bias)
    return truth, mean[:, None] + scale * width[:, None] * rng.standard_normal((MAPS, DRAWS, 2))
