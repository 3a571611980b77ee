"""`pipeline("cosmology-regression", model=...)`: maps in, posteriors of cosmological parameters out.

infer = pipeline("cosmology-regression", model="runs/cosmo")
infer("map.npy")["omega_m"]  # {"mean": 0.31, "std": 0.02, "interval_68": [0.29, 0.33], "interval_95": [...]}
"""

from collections.abc import Iterator
from pathlib import Path
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import Pipeline
from transformers.utils import logging

from .pipeline_batches import OwnBatchesMixin
from .posterior_head import CosmoRegressionOutput


logger = logging.get_logger(__name__)

POSTERIOR = ("logits", "std", "s_8", "s_8_std", "log_weights", "loc", "scale_tril")  # model outputs to return
INTERVALS = {"interval_68": 0.6827, "interval_95": 0.9545}


class CosmologyRegressionPipeline(OwnBatchesMixin, Pipeline):
    """Pipeline that infers cosmological parameters with any of the package's regression models.

    A map is an array or tensor [H, W] or [C, H, W], nested lists of numbers, the path to a .npy, .npz or .fits file
    with one map, or a dict `{"map": ..., "mask": ...}` of these; the mask is True in observed pixels. A list or
    generator of maps, an array [B, C, H, W], or a file with several maps gives a list of results.

    Parameters of the constructor and of every call:
        max_steps (`int`): maximum number of segments; `config.halt_max_steps` by default, but more are possible.
        halt (`str`, "fixed"): "fixed" runs all segments, "adaptive" stops when little gain is expected.
        num_samples (`int`, 2000): number of posterior samples, from which the intervals are computed.
        return_samples (`bool`, False): add "samples", float32 [num_samples, parameters], with columns in the order of
            the names.
        seed (`int`, 0): seed for the samples. The samples do not depend on other maps in the batch.
        batch_size (`int`): number of maps per batch.

    Returns, per map, a dict:
        for each of `config.reported_names`, a dict in physical units: mean, std, and the central credible intervals
        interval_68 and interval_95, [low, high].
        steps: number of segments.
        map_distance, max_map_distance: distance of the map's statistics from those of the training maps, and the limit
            that one in 200 training maps exceeds; only if the model has a limit. A map beyond it causes a warning.
    """

    _load_feature_extractor = True

    def _sanitize_parameters(
        self,
        max_steps: int | None = None,
        halt: str | None = None,
        num_samples: int | None = None,
        return_samples: bool | None = None,
        seed: int | None = None,
    ) -> tuple[dict, dict, dict]:
        if num_samples is not None and num_samples < 2:
            raise ValueError(f"num_samples={num_samples}: must be >= 2")
        forward = {"max_steps": max_steps, "halt": halt}
        postprocess = {"num_samples": num_samples, "return_samples": return_samples, "seed": seed}
        parts = ({}, forward, postprocess)
        return tuple({name: value for name, value in part.items() if value is not None} for part in parts)

    def __call__(self, inputs: Any, **kwargs: Any) -> dict[str, Any] | list[dict[str, Any]] | Iterator:
        """Infer the parameters of one map, or of each map in a list, file, array or generator (see the class)."""
        if isinstance(inputs, (GeneratorType, Dataset)):
            return super().__call__(inputs, **kwargs)
        if isinstance(inputs, (list, tuple)) and not len(inputs):
            return []
        items = self._read(inputs)
        single = len(items) == 1 and not _is_many(inputs)
        return super().__call__(items[0] if single else items, **kwargs)

    def _read(self, inputs: Any) -> list[dict[str, torch.Tensor]]:
        """Validate the maps in `inputs` and return one dict per map."""
        if isinstance(inputs, (list, tuple)) and isinstance(inputs[0], dict):
            return [item for one in inputs for item in self._read(one)]
        mask = None
        if isinstance(inputs, dict):
            unknown = set(inputs) - {"map", "mask"}
            if unknown or "map" not in inputs:
                raise ValueError(f"keys {sorted(inputs)}: a dict must have the key map, and optionally mask")
            inputs, mask = inputs["map"], inputs.get("mask")
        pixel_values = self.feature_extractor(inputs, mask)["pixel_values"]
        return [{"pixel_values": one[None]} for one in pixel_values]

    def preprocess(self, input_: Any) -> dict[str, torch.Tensor]:
        """Return `pixel_values`, float32 [1, C, H, W], for one map."""
        if isinstance(input_, dict) and "pixel_values" in input_:
            return input_
        items = self._read(input_)
        if len(items) != 1:
            raise ValueError(f"an item has {len(items)} maps, but must have one; pass several maps as a list")
        return items[0]

    def _run(self, batch: list[dict], forward_params: dict, postprocess_params: dict) -> Iterator[dict]:
        outputs = self.forward({"pixel_values": torch.cat([item["pixel_values"] for item in batch])}, **forward_params)
        for row in range(len(batch)):
            one = {name: value[row : row + 1] for name, value in outputs.items()}
            yield self.postprocess(one, **postprocess_params)

    def _forward(self, input_tensors: dict[str, torch.Tensor], **forward_params: Any) -> dict[str, torch.Tensor]:
        return self._answers(self.model(**input_tensors, **forward_params), input_tensors, POSTERIOR)

    def _answers(self, outputs: Any, input_tensors: dict[str, torch.Tensor], names: tuple[str, ...]) -> dict:
        """Return the output tensors in `names`, and each map's number of segments and distance from training maps.

        If the model has a distance limit, warn about maps that are unlike the training maps.
        """
        parts = {name: outputs[name].float() for name in names if name in outputs} | {"steps": outputs["steps"]}
        limit = getattr(self.model.config, "max_map_distance", None)
        if limit is None:
            return parts
        distance = self.model.map_distance(input_tensors["pixel_values"])
        if beyond := int((distance > limit).sum()):
            logger.warning(
                f"{beyond} of {len(distance)} maps are unlike the training maps: the distance of their statistics is "
                f"up to {distance.max().item():.2f}, but only one in 200 held-out maps exceeds {limit:.2f}. Their "
                "posteriors can be confident and wrong; see map_distance of each result."
            )
        return parts | {"map_distance": distance}

    def postprocess(
        self,
        model_outputs: dict[str, torch.Tensor],
        num_samples: int = 2000,
        return_samples: bool = False,
        seed: int = 0,
    ) -> dict[str, Any]:
        """Return the means, standard deviations and intervals of one map's posterior."""
        generator = torch.Generator().manual_seed(seed)
        distance = model_outputs.get("map_distance")
        model_outputs = {name: value for name, value in model_outputs.items() if name != "map_distance"}
        outputs = CosmoRegressionOutput(**model_outputs)
        samples = self.model.sample_posterior(outputs, num_samples, generator)[0].numpy()
        result: dict[str, Any] = {}
        for column, name in enumerate(self.model.config.reported_names):
            mean, std = outputs.reported_means[0, column], outputs.reported_stds[0, column]
            result[name] = {"mean": mean.item(), "std": std.item()}
            for key, share in INTERVALS.items():
                ends = np.quantile(samples[:, column], [(1 - share) / 2, (1 + share) / 2])
                result[name][key] = [float(end) for end in ends]
        result["steps"] = int(outputs.steps[0])
        if distance is not None:
            result["map_distance"] = distance[0].item()
            result["max_map_distance"] = self.model.config.max_map_distance
        return result | ({"samples": samples} if return_samples else {})


def _is_many(inputs: Any) -> bool:
    """Check whether to return a list even for a single map."""
    if isinstance(inputs, dict):
        return _is_many(inputs["map"])
    if isinstance(inputs, (str, Path)):
        return False
    listed = isinstance(inputs, (list, tuple)) and not isinstance(inputs[0], (list, tuple))
    return listed or np.ndim(inputs) == 4
