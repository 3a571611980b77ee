"""`LossMeter`: what a trainer adds up between two logs, on the device, and the clock beside it.

Values are added to a pending step, which is kept or dropped as a whole: one that is skipped because it was not finite
must not leave its NaN in the sums. What the sums are divided by is the business of whoever drains them.
"""

import contextlib
import time

import torch


class LossMeter:
    """Sums of named 0-d tensors over micro-batches and steps, and over processes when they are read."""

    def __init__(self):
        self.sums: dict[str, torch.Tensor] = {}
        self.pending: dict[str, torch.Tensor] = {}
        self.restart(0)

    def restart(self, step: int) -> None:
        """Starts the clock at a step."""
        self.since_step, self.since = step, time.perf_counter()

    def add(self, terms: dict[str, torch.Tensor]) -> None:
        """Adds double-precision 0-d tensors to the pending step."""
        self.pending = _plus(self.pending, terms)

    def keep(self) -> None:
        """Makes the pending step part of the sums."""
        self.sums, self.pending = _plus(self.sums, self.pending), {}

    def drop(self) -> None:
        """Forgets the pending step."""
        self.pending = {}

    def drain(self, accelerator, step: int) -> tuple[dict[str, float], int, float]:
        """Sums over all processes, the steps and the seconds since the last call; starts anew. A collective call."""
        sums, self.sums = self.sums, {}
        found = {}
        if sums:  # not if every step since the last call was dropped
            found = dict(zip(sums, accelerator.reduce(torch.stack(list(sums.values())), "sum").tolist()))
        steps, seconds = step - self.since_step, time.perf_counter() - self.since
        self.restart(step)
        return found, steps, seconds

    @contextlib.contextmanager
    def paused(self):
        """The clock stands still inside the block: evaluating and saving are not training."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.since += time.perf_counter() - started


def _plus(sums: dict[str, torch.Tensor], terms: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not sums or not terms:
        return sums or terms
    if sums.keys() == terms.keys():  # one call for all: a small model is all call overhead
        return dict(zip(sums, torch._foreach_add(list(sums.values()), [terms[name] for name in sums])))
    return {name: sums.get(name, 0) + terms.get(name, 0) for name in {**sums, **terms}}
