"""Answers of a regressor or a mass mapper to a set of maps: posteriors, maps, and how both change by segment."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from .dataset.rows import MapSet
from .evaluation import CosmologyPredictions
from .map_metrics import MassMaps, squared_errors


@dataclass(frozen=True)
class Answers:
    """Answers of a model to N maps.

    Attributes:
        predictions: posteriors of the parameters. segment_means: posterior means after each segment [N, segments, R].
        maps_per_second: of the model alone.
        mass_maps: of a mass mapper, the estimates beside the truth.
        map_errors: of its maps after each segment, sum over pixels of the squared error [N, segments].
        shown: its maps of the first row after each segment [segments, P, S, S].
    """

    predictions: CosmologyPredictions
    segment_means: np.ndarray
    maps_per_second: float
    mass_maps: MassMaps | None = None
    map_errors: np.ndarray | None = None
    shown: np.ndarray | None = None

    def rmse_per_step(self) -> dict[str, list[float]]:
        """RMSE of each parameter after each segment."""
        error = self.segment_means - self.predictions.truth[:, None]
        rmse = np.sqrt(np.mean(error**2, axis=0))
        return {name: rmse[:, column].tolist() for column, name in enumerate(self.predictions.names)}


def segments_of(config: Any) -> int:
    """Return the number of segments of recurrence that a model chooses from; 1 for a baseline."""
    return config.to_dict().get("halt_max_steps", 1)


@torch.no_grad()
def predict_maps(
    model: Any,
    extractor: Any,
    maps: MapSet,
    *,
    halt: str = "fixed",
    max_steps: int | None = None,
    num_samples: int = 1000,
    batch_size: int = 64,
    seed: int = 0,
) -> Answers:
    """Predict maps with known parameters; the model is put into eval mode and back.

    Args:
        extractor: the `CosmoMapFeatureExtractor` that was saved with the model.
        halt, max_steps: as for the model's forward. num_samples: draws from each posterior. seed: of the draws.

    Raises:
        ValueError: labels lack a parameter that the model reports, or maps that the extractor or the model reject.
    """
    names = model.config.reported_names
    missing = [name for name in names if name not in maps.labels]
    if missing:
        raise ValueError(f"the data have labels {sorted(maps.labels)}; the model also reports {', '.join(missing)}")
    generator = torch.Generator(model.device).manual_seed(seed)
    depth = {"max_steps": max_steps, "halt": halt} if segments_of(model.config) > 1 else {}
    parts: list[list[np.ndarray]] = []
    shown, seconds, was_training = None, 0.0, model.training
    model.eval()
    for start in tqdm(range(0, len(maps), batch_size), desc="Predicting", unit="batch", disable=None, leave=False):
        batch = maps[start : start + batch_size]
        inputs = extractor(batch.maps, mask=batch.masks)["pixel_values"].to(model.device)
        started = time.perf_counter()
        output = model(inputs, **depth)
        tensors = [output.reported_means, output.reported_stds, output.steps, output.segment_means]
        tensors += [output.kappa, output.kappa_std, output.segment_maps] if "segment_maps" in output else []
        found = [tensor.float().cpu().numpy() for tensor in tensors]  # waits for the device
        seconds += time.perf_counter() - started
        if "segment_maps" in output:
            segments = found.pop()
            shown = segments[0] if shown is None else shown
            pairs = [MassMaps(batch.kappa, segments[:, number]) for number in range(segments.shape[1])]
            found.append(np.stack([squared_errors(pair)[0] for pair in pairs], axis=1))
        parts.append([model.sample_posterior(output, num_samples, generator).float().cpu().numpy(), *found])
    model.train(was_training)
    samples, mean, std, steps, segment_means, *of_maps = (np.concatenate(columns) for columns in zip(*parts))
    truth = np.stack([maps.labels[name] for name in names], axis=1)
    predictions = CosmologyPredictions(names, truth, mean, std, samples, steps)
    speed = len(mean) / max(seconds, 1e-9)
    if not of_maps:
        return Answers(predictions, segment_means, speed)
    kappa, kappa_std, errors = of_maps
    mass_maps = MassMaps(maps.kappa, kappa, maps.masks, kappa_std)
    return Answers(predictions, segment_means, speed, mass_maps, errors, shown)


@torch.no_grad()
def map_distances(model: Any, extractor: Any, maps: MapSet, batch_size: int = 64) -> dict[str, float] | None:
    """Tell whether maps are like those of training: see `RecurrentHeadMixin.map_distance`.

    Returns:
        median: of the maps' distances. limit: `config.max_map_distance`. share_beyond: of the maps. None for a model
        that does not know its limit.
    """
    limit = getattr(model.config, "max_map_distance", None)
    if limit is None:
        return None
    found = []
    for start in range(0, len(maps), batch_size):
        batch = maps[start : start + batch_size]
        inputs = extractor(batch.maps, mask=batch.masks)["pixel_values"].to(model.device)
        found.append(model.map_distance(inputs).float().cpu())
    distances = torch.cat(found)
    beyond = (distances > limit).float().mean().item()
    return {"median": distances.median().item(), "limit": limit, "share_beyond": beyond}
