"""Logging: accumulated metrics, progress lines, confidence intervals, the original code's metric names, GPU memory.

transformers' callbacks log every value under `train/` or `eval/`. Values that have a different name in the original
code are logged again under that name: `train/lr`, and grouped values such as `mhc/amax_pre` or `go/syntax_rate`.
"""

import contextlib
import math
import sys
import time
from datetime import timedelta

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm
from transformers import IntervalStrategy, Trainer, TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback
from transformers.trainer_callback import ProgressCallback


GIB = 2**30
Z_95 = 1.959963984540054
STEP = "train/global_step"  # name of the x axis that transformers' callbacks set in the experiment trackers


class MetricAccumulator:
    """Sums of named 0-d tensors over micro-batches and steps, reduced over processes when read.

    Values are added to a pending step, which is then kept or dropped, so a skipped step adds no NaN to the sums.
    """

    def __init__(self):
        self.sums: dict[str, torch.Tensor] = {}
        self.pending: dict[str, torch.Tensor] = {}
        self.restart(0)

    def restart(self, step: int) -> None:
        """Restart the clock, and count steps from `step`."""
        self.since_step, self.since = step, time.perf_counter()

    def add(self, terms: dict[str, torch.Tensor]) -> None:
        """Add double-precision 0-d tensors to the pending step."""
        self.pending = _plus(self.pending, terms)

    def keep(self) -> None:
        """Add the pending step to the sums."""
        self.sums, self.pending = _plus(self.sums, self.pending), {}

    def drop(self) -> None:
        """Discard the values of the pending step."""
        self.pending = {}

    def drain(self, accelerator, step: int) -> tuple[dict[str, float], int, float]:
        """Return and reset the sums over all processes, and the steps and seconds since the last call (collective)."""
        sums, self.sums = self.sums, {}
        found = {}
        if sums:  # empty if every step since the last call was dropped
            found = dict(zip(sums, accelerator.reduce(torch.stack(list(sums.values())), "sum").tolist()))
        steps, seconds = step - self.since_step, time.perf_counter() - self.since
        self.restart(step)
        return found, steps, seconds

    @contextlib.contextmanager
    def paused(self):
        """Stop the clock during a `with` block, because evaluating and saving are not training."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.since += time.perf_counter() - started


def _plus(sums: dict[str, torch.Tensor], terms: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not sums or not terms:
        return sums or terms
    if sums.keys() == terms.keys():  # one fused call, because call overhead dominates for small models
        return dict(zip(sums, torch._foreach_add(list(sums.values()), [terms[name] for name in sums])))
    return {name: sums.get(name, 0) + terms.get(name, 0) for name in {**sums, **terms}}


class LogLineCallback(ProgressCallback):
    """Progress bar with aligned log lines and the remaining time. Evaluation lines are marked with >>.

    Args:
        log_format: names and formats of the logged values to show, in order.
    """

    def __init__(self, log_format: dict[str, str]):
        super().__init__()
        self.log_format = log_format

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        parts = [text.format(logs[name]) for name, text in self.log_format.items() if name in logs]
        if not parts:
            return
        if "steps_per_second" in logs and logs["steps_per_second"] and state.max_steps > state.global_step:
            seconds = round((state.max_steps - state.global_step) / logs["steps_per_second"])
            parts.append(f"ETA {timedelta(seconds=seconds)}")
        mark = ">>" if any(name.startswith("eval_") for name in logs) else "  "
        tqdm.write(f"{mark} step {state.global_step:>6}  " + "  ".join(parts))  # print above all progress bars
        sys.stdout.flush()  # otherwise, the line would appear late if stdout is a file


class LastStepCallback(TrainerCallback):
    """Callback that logs the last step, so runs shorter than --logging_steps log their loss."""

    def on_step_end(self, args, state, control, **kwargs):
        if args.logging_strategy == IntervalStrategy.STEPS and state.global_step >= state.max_steps:
            control.should_log = True


class OriginalNamesCallback(TrainerCallback):
    """Callback that repeats logged values under their original names in TensorBoard, Trackio and W&B.

    Args:
        trainer: gives access to the trackers, which a callback cannot reach otherwise.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_log(self, args, state, control, logs=None, **kwargs):
        values = original_names(logs or {})
        if not state.is_world_process_zero or not values:
            return
        for tracker in self.trainer.callback_handler.callbacks:
            if isinstance(tracker, TensorBoardCallback) and tracker.tb_writer is not None:
                for name, value in values.items():
                    tracker.tb_writer.add_scalar(name, value, state.global_step)
            elif isinstance(tracker, WandbCallback):
                tracker._wandb.log({**values, STEP: state.global_step})
            elif isinstance(tracker, TrackioCallback):
                tracker._trackio.log({**values, STEP: state.global_step})


def original_names(logs: dict[str, float]) -> dict[str, float]:
    """Return the values that are logged under their original names: learning rate and names that contain "/"."""
    rate = {"train/lr": logs["learning_rate"]} if "learning_rate" in logs else {}
    return {name: value for name, value in logs.items() if "/" in name} | rate


def gpu_memory(accelerator: Accelerator) -> dict[str, float]:
    """Return the highest peak memory of all GPUs in GiB, and each GPU's if there are several (collective)."""
    device = accelerator.device
    if device.type != "cuda":
        return {}
    peaks = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)]
    found = accelerator.gather(torch.tensor([peaks], device=device)) / GIB
    names = ("peak_memory_gib", "reserved_memory_gib")
    logs = dict(zip(names, found.amax(0).tolist()))
    for number, of_one in enumerate(found.tolist() if len(found) > 1 else ()):
        logs |= {f"gpu_{number}/{name}": value for name, value in zip(names, of_one)}
    return logs


def wilson_interval(successes: int, trials: int) -> tuple[float, float] | None:
    """Return the 95 % score interval of a proportion (Wilson 1927), or None if there are no trials.

    Unlike the normal approximation, it stays within [0, 1] and has positive width for 0 successes.
    """
    if not trials:
        return None
    share, weight = successes / trials, Z_95 * Z_95 / trials
    centre = (share + weight / 2) / (1 + weight)
    half = Z_95 * math.sqrt(share * (1 - share) / trials + weight / (4 * trials)) / (1 + weight)
    # Rounding must not exclude 0 (no successes) or 1 (only successes) from the interval.
    return (max(0.0, centre - half) if successes else 0.0, min(1.0, centre + half) if successes < trials else 1.0)
