"""Posteriors with known calibration, as used for the table of the published TARP code."""

import numpy as np


MAPS, DRAWS, REFERENCES = 2000, 400, 20
# Posteriors that are calibrated, too narrow, too wide, or shifted by half their width.
CASES = {"right": (1.0, 0.0), "narrow": (0.6, 0.0), "wide": (1.6, 0.0), "biased": (1.0, 0.5)}


def posteriors(scale: float, bias: float) -> tuple[np.ndarray, np.ndarray]:
    """Return truths [maps, 2] and draws [maps, draws, 2] of posteriors with `scale` times the right width."""
    rng = np.random.default_rng(11)  # with 0, TARP would draw the truths themselves as reference points
    mean = rng.uniform(size=(MAPS, 2))
    width = rng.uniform(0.02, 0.1, size=(MAPS, 2))
    truth = mean + width * (rng.standard_normal((MAPS, 2)) + bias)
    return truth, mean[:, None] + scale * width[:, None] * rng.standard_normal((MAPS, DRAWS, 2))
