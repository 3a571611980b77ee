"""Batches for pipelines whose inputs no tokenizer pads: the library's own iteration would look for one."""

from collections.abc import Iterable, Iterator
from typing import Any


class OwnBatchesMixin:
    """For a `transformers.Pipeline` with `_run(batch, forward_params, postprocess_params)`, which yields results."""

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
