"""Callbacks that trainers of all tasks use: averaged weights, readable progress."""

import sys
import time

from transformers import TrainerCallback
from transformers.trainer_callback import ProgressCallback

from .optim import WeightAverage


class WeightAverageCallback(TrainerCallback):
    """Updates a moving average of the weights after every optimizer step."""

    def __init__(self, average: WeightAverage):
        self.average = average

    def on_step_end(self, args, state, control, **kwargs):
        self.average.update()


class LogLineCallback(ProgressCallback):
    """A progress bar whose log lines are aligned values instead of a dict; evaluation lines are marked.

    Args:
        log_format: the format of each logged value that is shown, in order.
        compiles: the first step compiles the model, which takes long; says so, and how long it took.
    """

    def __init__(self, log_format: dict[str, str], compiles: bool = False):
        super().__init__()
        self.log_format, self.compiles = log_format, compiles

    def on_step_begin(self, args, state, control, **kwargs):
        if self.compiles and state.is_world_process_zero:
            self._write("Compiling the model: the first step may take a minute.")
            self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if self.compiles and state.is_world_process_zero:
            self._write(f"Compiled, and made the first step, in {time.perf_counter() - self.began:.0f} s.")
        self.compiles = False
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        parts = [text.format(logs[name]) for name, text in self.log_format.items() if name in logs]
        if not parts:
            return
        mark = ">>" if any(name.startswith("eval_") for name in logs) else "  "
        self._write(f"{mark} step {state.global_step:>6}  " + "  ".join(parts))

    def _write(self, line: str) -> None:
        if self.training_bar is not None:
            self.training_bar.write(line)
        else:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()  # at once, where the output is a file
