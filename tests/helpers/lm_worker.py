"""Training runs of tiny language models for tests with several processes.

    torchrun --nproc_per_node 2 tests/helpers/lm_worker.py FOLDER

writes what each process found to FOLDER/RANK.pt.
"""

import itertools
import json
import sys
from pathlib import Path

import tiny_lm
import torch
from datasets import IterableDataset
from tiny_lm import logged, text, weights
from transformers import TrainerCallback

from hrm_hf.hub.manifests import find_corruption, list_checkpoints


WITHOUT_CHANCE = {
    "llama": {},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "hrm_lm": {"halt_exploration_prob": 0.0},
}
EQUAL = [("llama", 2), ("gpt2", 1), ("hrm_lm", 1), ("hrm_lm", 2)]  # micro-batches per step
EVALUATIONS = [(9, "llama"), (10, "hrm_lm"), (5, "gpt2"), (1, "llama")]  # rows; batches of 2 per process


def train_resumable(folder: str, steps: int) -> None:
    """Run with dropout, accumulation and weight averaging, and resume from the last complete checkpoint."""
    torch.set_num_threads(1)
    trainer = tiny_lm.trainer(
        folder, tiny_lm.model("gpt2"), train=text(20, ignored=True), max_steps=steps, save_strategy="steps",
        save_steps=3, gradient_accumulation_steps=2, ema_rate=0.9,
    )  # fmt: skip
    resumable = any(not find_corruption(one) for one in list_checkpoints(folder))
    trainer.train("last-complete" if resumable else None)
    trainer.save_model()
    Path(folder, "log.json").write_text(json.dumps(logged(trainer)))


def train_equal(folder, architecture: str, accumulation: int, batch_size: int) -> dict:
    """Train six steps on rows with different numbers of labels."""
    trainer = tiny_lm.trainer(
        Path(folder, f"equal-{architecture}-{accumulation}"),
        tiny_lm.model(architecture, **WITHOUT_CHANCE[architecture]),
        train=text(48, ignored=True),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-3,
        ema_rate=0.9,
        eval_strategy="steps",
        eval_steps=3,
    )
    trainer.train()
    return {"log": logged(trainer), "weights": weights(trainer.model)}


def evaluate(folder, architecture: str, rows: int) -> dict:
    """Evaluate rows that do not fill the last batch of every process."""
    model = tiny_lm.model(architecture, **WITHOUT_CHANCE[architecture])
    data = text(rows, seed=9, ignored=True)
    trainer = tiny_lm.trainer(Path(folder, "evaluation"), model, evaluation=data, per_device_eval_batch_size=2)
    times = ("runtime", "second", "preparation_time")
    return {name: value for name, value in trainer.evaluate().items() if not name.endswith(times)}


def train_nonfinite(folder, rank: int) -> dict:
    """Train with a NaN loss in the first micro-batch of the second step on process 1."""
    model, before = tiny_lm.model("llama"), []
    if rank == 1:
        tiny_lm.break_at(model, {3})

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            before.append(weights(model))

    trainer = tiny_lm.trainer(
        Path(folder, "nonfinite"),
        model,
        train=text(64),
        max_steps=4,
        gradient_accumulation_steps=2,
        callbacks=[Watch()],
    )
    trainer.train()
    before.append(weights(model))
    moved = [any(bool((a[n] != b[n]).any()) for n in a) for a, b in itertools.pairwise(before)]
    counts = [entry.get("nonfinite_steps") for entry in logged(trainer)]
    return {"moved": moved, "counts": counts, "weights": before[-1]}


def train_uneven(folder, accumulation: int) -> dict:
    """Train on shards of 34 and 18 rows, each read by one process."""
    shards = IterableDataset.from_generator(_rows_of_shards, gen_kwargs={"shards": [34, 18]})
    model = tiny_lm.model("llama")
    trainer = tiny_lm.trainer(
        Path(folder, f"uneven-{accumulation}"), model, train=shards, max_steps=7,
        gradient_accumulation_steps=accumulation, accelerator_config={"dispatch_batches": False},
    )  # fmt: skip
    trainer.train()
    return {"steps": trainer.state.global_step, "weights": weights(model)}


def _rows_of_shards(shards):
    for rows in shards:
        yield from text(rows, seed=rows)


def train_resumed(folder) -> dict:
    """Train eight steps with dropout, then again from the checkpoint of step 3."""
    options = {
        "max_steps": 8, "save_strategy": "steps", "save_steps": 3, "ema_rate": 0.9, "train": text(40, ignored=True),
    }  # fmt: skip
    whole = tiny_lm.trainer(Path(folder, "whole"), tiny_lm.model("gpt2"), **options)
    whole.train()
    resumed = tiny_lm.trainer(Path(folder, "resumed"), tiny_lm.model("gpt2", seed=5), **options)
    resumed.train(str(Path(folder, "whole", "checkpoint-3")))
    return {"log": logged(resumed), "expected": logged(whole)}


def main(folder: str) -> None:
    torch.set_num_threads(1)
    trainer = tiny_lm.trainer(Path(folder, "facts"), tiny_lm.model("llama"), max_steps=1)
    trainer.train()
    rank = trainer.args.process_index
    found = {
        "num_processes": trainer.accelerator.num_processes,
        "distributed_type": trainer.accelerator.distributed_type.value,
        "find_unused": trainer.model_wrapped.find_unused_parameters,
        "equal": {
            f"{architecture} {accumulation}": train_equal(folder, architecture, accumulation, batch_size=4)
            for architecture, accumulation in EQUAL
        },
        "evaluation": {f"{name} {rows}": evaluate(folder, name, rows) for rows, name in EVALUATIONS},
        "nonfinite": train_nonfinite(folder, rank),
        "uneven": {str(accumulation): train_uneven(folder, accumulation) for accumulation in (1, 2)},
        "resumed": train_resumed(folder),
    }
    torch.save(found, Path(folder, f"{rank}.pt"))


if __name__ == "__main__":
    main(sys.argv[1])
