"""A run with two processes, the second of which is killed during a step; for tests/trainer/test_faults.py.

torchrun --nproc_per_node 2 tests/helpers/faults_worker.py FOLDER
"""

import os
import signal
import sys

import torch
from preemption_worker import Signal, make


KILLED_IN = 4


def main(folder: str) -> None:
    torch.set_num_threads(1)
    trainer = make("lm", folder, save_strategy="steps", save_steps=2)
    if trainer.args.process_index == 1:
        trainer.add_callback(Signal(signal.SIGKILL, KILLED_IN))
    trainer.train("last-complete")
    os._exit(99)  # the run must not get here


if __name__ == "__main__":
    main(sys.argv[1])
