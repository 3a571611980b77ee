"""Parts that our pipelines share: batches of inputs that no tokenizer pads, and random numbers that repeat."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class OwnBatchesMixin:
    """For a `transformers.Pipeline` with `_run(batch, forward_params, postprocess_params)`, which yields results.

    The library's own iteration would look for a tokenizer that pads. What is saved has the pipeline's code because the
    code of the model names it. Nothing is loaded beside the model but what a pipeline asks for.
    """

    _load_tokenizer = False
    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.model.eval()

    def save_pretrained(self, save_directory, **kwargs: Any) -> None:
        """As in transformers."""
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
        """Yields results in the order of `inputs`, `batch_size` preprocessed inputs at a time."""
        batch: list[dict] = []
        for item in inputs:
            batch.append(self.preprocess(item, **preprocess_params))
            if len(batch) == batch_size:
                yield from self._run(batch, forward_params, postprocess_params)
                batch = []
        if batch:
            yield from self._run(batch, forward_params, postprocess_params)

    def run_single(self, inputs: Any, preprocess_params, forward_params, postprocess_params) -> dict[str, Any]:
        """The result of one input."""
        return next(self.get_iterator([inputs], 0, 1, preprocess_params, forward_params, postprocess_params))


@contextmanager
def seeded(device: torch.device, *seed: int) -> Iterator[None]:
    """Random numbers of `device` and of the CPU that depend on `seed` alone; those of the caller are left alone."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        yield
