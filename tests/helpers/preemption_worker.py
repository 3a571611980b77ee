"""Runs in one or two processes that a signal stops, and that resume; for tests/trainer/test_preemption.py.

    torchrun --nproc_per_node 1 tests/helpers/started.py tests/helpers/preemption_worker.py FOLDER

exits like a training script that was stopped.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import tiny
import tiny_cosmo
import tiny_go
import tiny_lm
import torch
from datasets import Dataset
from transformers import TrainerCallback

from hrm_hf.golang.data.streams import GoCoderCollator
from hrm_hf.golang.trainer import GoCoderTrainer, GoTrainingArguments
from hrm_hf.puzzles.dataloader import PuzzleRows
from hrm_hf.puzzles.sudoku import generated_sudoku
from hrm_hf.puzzles.trainer import PuzzleTrainer, PuzzleTrainingArguments
from hrm_hf.trainer import HrmTrainer
from hrm_hf.trainer.preemption import exit_if_preempted


STEPS, STOPPED_AT = 6, 3
NOT_REPEATED = {"tokens_per_second", "puzzles_per_second", "maps_per_second", "steps_per_second", "samples_per_second"}
OPTIONS = {
    "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": STEPS, "logging_steps": 1,
    "per_device_train_batch_size": 4, "learning_rate": 1e-3, "warmup_steps": 2, "save_strategy": "no",
}  # fmt: skip


class Signal(TrainerCallback):
    """Sends a signal to this process in the middle of a step."""

    def __init__(self, number: int, step: int = STOPPED_AT):
        self.number, self.step = number, step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), self.number)


def make(kind: str, folder, **options) -> HrmTrainer:
    """Return a trainer ("puzzle", "lm", "go" or "cosmo") of a tiny model whose losses depend on random numbers."""
    options = {**OPTIONS, "output_dir": str(folder), **options}
    if kind == "lm":
        return tiny_lm.trainer(folder, tiny_lm.model("gpt2"), train=tiny_lm.text(40, ignored=True), **options)
    if kind == "cosmo":
        return tiny_cosmo.trainer(folder, **options)
    if kind == "go":
        rows = [tiny_go.builder().build(record) for record in tiny_go.records(24)]
        rows = Dataset.from_list(rows).remove_columns(["code_start", "code_end"])
        args, collator = GoTrainingArguments(**options), GoCoderCollator(tiny_go.tokenizer().pad_token_id)
        return GoCoderTrainer(tiny_go.model(), args, train_dataset=rows, data_collator=collator)
    rows = PuzzleRows(generated_sudoku(4, num_train=24, num_test=0)[0]["train"])
    rows.puzzle_identifiers = np.arange(24) % tiny.PUZZLES
    model = tiny.model("hrm", halt_exploration_prob=0.5)
    return PuzzleTrainer(model, PuzzleTrainingArguments(**options), train_dataset=rows)


def logged(trainer: HrmTrainer) -> list[dict]:
    """Return the values logged at each training step, except times."""
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{name: value for name, value in entry.items() if name not in NOT_REPEATED} for entry in history]


def main(folder: str) -> None:
    """Write the results of this process of a group to FOLDER/RANK.json. Only the last process gets the signal."""
    found = {}
    for kind in ("puzzle", "lm"):
        alone = make(kind, Path(folder, kind, "alone"))
        alone.train("last-complete")
        run = Path(folder, kind, "run")
        stopped = make(kind, run)
        if stopped.args.process_index == stopped.args.world_size - 1:
            stopped.add_callback(Signal(signal.SIGUSR1))
        stopped.train("last-complete")
        resumed = make(kind, run)
        resumed.train("last-complete")
        found[kind] = {
            "stopped": [stopped.preemption.preempted, stopped.state.global_step],
            "resumed": [resumed.preemption.preempted, resumed.state.global_step],
            "alone": logged(alone),
            "log": logged(resumed),
        }
    Path(folder, f"{stopped.args.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    torch.set_num_threads(1)
    trainer = make("lm", sys.argv[1])
    trainer.add_callback(Signal(signal.SIGUSR1))
    trainer.train()
    exit_if_preempted(trainer)
