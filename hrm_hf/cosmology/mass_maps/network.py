"""The answers of a model of mass maps to rows of shear: maps and posteriors, and how both change by segment."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..evaluation import CosmologyPredictions
from .metrics import MassMaps, squared_errors
from .shear_maps import ShearMaps


@dataclass(frozen=True)
class NetworkMaps:
    """Answers of a model to N shear maps.

    Attributes:
        maps: the estimates beside the truth. predictions: posteriors of the parameters.
        errors: of each map after each segment, sum over pixels of the squared error [N, segments].
        segment_means: posterior means after each segment [N, segments, R].
        shown: maps after each segment [segments, P, S, S] of the first row.
        maps_per_second: of the model alone.
    """

    maps: MassMaps
    predictions: CosmologyPredictions
    errors: np.ndarray
    segment_means: np.ndarray
    shown: np.ndarray
    maps_per_second: float


@torch.no_grad()
def map_with_network(
    model: Any,
    extractor: Any,
    rows: ShearMaps,
    *,
    halt: str = "fixed",
    max_steps: int | None = None,
    num_samples: int = 1000,
    batch_size: int = 50,
    seed: int = 0,
) -> NetworkMaps:
    """Runs a model of mass maps in eval mode.

    Args:
        halt, max_steps: as for the model's forward. num_samples: draws from each posterior. seed: of the draws.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    recurs = model.config.to_dict().get("halt_max_steps", 1) > 1  # a U-Net has no segments to choose
    depth = {"max_steps": max_steps, "halt": halt} if recurs else {}
    parts: list[tuple[np.ndarray, ...]] = []
    shown, seconds, was_training = None, 0.0, model.training
    model.eval()
    for start in tqdm(range(0, len(rows.shear), batch_size), desc="Mapping", unit="batch", disable=None, leave=False):
        chosen = slice(start, start + batch_size)
        inputs = extractor(rows.shear[chosen], mask=rows.masks[chosen])["pixel_values"].to(model.device)
        started = time.perf_counter()
        output = model(inputs, **depth)
        segments = output.segment_maps.float().cpu().numpy()  # waits for the device
        seconds += time.perf_counter() - started
        shown = segments[0] if shown is None else shown
        of_segments = [
            squared_errors(MassMaps(rows.kappa[chosen], segments[:, number]))[0] for number in range(segments.shape[1])
        ]
        tensors = (output.kappa, output.kappa_std, output.reported_means, output.reported_stds, output.steps)
        draws = model.sample_posterior(output, num_samples, generator)
        numbers = (tensor.float().cpu().numpy() for tensor in (*tensors, draws, output.segment_means))
        parts.append((*numbers, np.stack(of_segments, axis=1)))
    model.train(was_training)
    kappa, std, means, stds, steps, samples, segment_means, errors = (np.concatenate(each) for each in zip(*parts))
    names = model.config.reported_names
    truth = np.stack([rows.labels[name] for name in names], axis=1)
    return NetworkMaps(
        MassMaps(rows.kappa, kappa, rows.masks, std),
        CosmologyPredictions(names, truth, means, stds, samples, steps.astype(np.int64)),
        errors,
        segment_means,
        shown,
        len(kappa) / max(seconds, 1e-9),
    )
