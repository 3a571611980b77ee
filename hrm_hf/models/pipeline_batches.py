"""Helpers for our pipelines: batching without a tokenizer, and reproducible random numbers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .modeling_utils import broken_weights


class OwnBatchesMixin:
    """Mixin for pipelines that process batches in their `_run` method.

    `_run(batch, forward_params, postprocess_params)` yields one result per input. transformers' own iteration would
    need a tokenizer for padding.
    """

    _load_tokenizer = False
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if broken := broken_weights(dict(self.model.eval().named_parameters())):
            raise ValueError(f"{self.model.name_or_path}: {len(broken)} weights, e.g. {broken[0]}, are not finite")

    def save_pretrained(self, save_directory, **kwargs: Any) -> None:
        """Save the model, the pipeline's code and, if there is one, the feature extractor."""
        self.model.save_pretrained(save_directory, **kwargs)
        if self.feature_extractor is not None:
            self.feature_extractor.save_pretrained(save_directory, **kwargs)

    def get_iterator(
        self,
        inputs: Iterable,
        num_workers: int,
        batch_size: int,
        preprocess_params,
        forward_params,
        postprocess_params,
    ) -> Iterator[dict[str, Any]]:
        """Yield results in the order of `inputs`, processing `batch_size` inputs at a time."""
        batch: list[dict] = []
        for item in inputs:
            batch.append(self.preprocess(item, **preprocess_params))
            if len(batch) == batch_size:
                yield from self._run(batch, forward_params, postprocess_params)
                batch = []
        if batch:
            yield from self._run(batch, forward_params, postprocess_params)

    def run_single(self, inputs: Any, preprocess_params, forward_params, postprocess_params) -> dict[str, Any]:
        """Return the result for one input."""
        return next(self.get_iterator([inputs], 0, 1, preprocess_params, forward_params, postprocess_params))


@contextmanager
def seeded(device: torch.device, *seed: int) -> Iterator[None]:
    """Seed the random generators of `device` and the CPU on entry, and restore their states on exit."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        yield
