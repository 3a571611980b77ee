"""Callbacks that trainers of all tasks use: averaged weights, readable progress."""

import sys

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
        mark = ">>" if any(name.startswith("eval_") for name in logs) else "  "
        line = f"{mark} step {state.global_step:>6}  " + "  ".join(parts)
        if self.training_bar is not None:
            self.training_bar.write(line)
        else:
            sys.stdout.write(line + "\n")
