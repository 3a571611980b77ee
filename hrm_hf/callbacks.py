"""What is optional around training, as transformers callbacks: moving average of weights, readable progress."""

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


class PuzzleProgressCallback(ProgressCallback):
    """A progress bar whose log lines are aligned figures instead of a dict; evaluation lines are marked."""

    SHOWN = {
        "loss": "loss {:.3f}",
        "exact_accuracy": "exact {:6.1%}",
        "average_steps": "steps {:4.1f}",
        "puzzles_per_second": "{:6.1f} puzzles/s",
        "eval_exact_accuracy": "held-out exact {:6.1%}",
        "eval_cell_accuracy": "cells {:6.1%}",
        "eval_average_steps": "steps {:4.1f}",
    }

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        parts = [text.format(logs[name]) for name, text in self.SHOWN.items() if name in logs]
        if not parts:
            return
        mark = ">>" if any(name.startswith("eval_") for name in logs) else "  "
        line = f"{mark} step {state.global_step:>6}  " + "  ".join(parts)
        if self.training_bar is not None:
            self.training_bar.write(line)
        else:
            sys.stdout.write(line + "\n")
