"""The Go demo: train a coder from scratch on a laptop, from sources to repaired code."""

import json
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

import torch

from ..io.usage import counted, run_process
from ..models.configuration_hrm_go_coder import HrmGoCoderConfig
from ..models.modeling_hrm_go_coder import HrmGoCoderForCausalLM
from ..resources import resource
from .data.sources import find_go_source
from .options import DemoGo


# Above this many bits per byte of held-out code, the demo calls the model undertrained and shows only one function.
# The nano run in docs/results.md reached 2.16 after 1.35M tokens and ended at 1.69, with 62% of its code parsing.
READABLE = 2.0
BATCH, ROW = 16, 340  # rows per step, and mean tokens per row of standard-library records
EVALUATION = 0.3  # time to evaluate a row, as a fraction of the time to train on it
QUICK = 10  # minutes; demos shorter than this build no repair trajectories, and use fewer rows
START = 12.0  # seconds that a program takes to load its libraries and a checkpoint
WRITE = 5.0  # seconds to write a function; demos of at least QUICK minutes reserve time for 24 functions


def run_demo(options: DemoGo, stream: TextIO | None = None) -> dict[str, Any]:
    """Train the nano Go coder on the CPU, then write, validate and repair held-out functions with it.

    Args:
        stream: where the demo and the programs it starts print their progress; standard output if None.

    Returns:
        {"out", "steps", "bits_per_byte", "readable"}: folder of the run, training steps, bits per byte of held-out
        code, and whether that value is at most `READABLE`.

    Raises:
        FileNotFoundError: there are no Go sources on this machine.
        CalledProcessError: a step failed; its output says why.
    """
    end = time.monotonic() + 60 * options.minutes
    out = options.out
    tell = partial(print, file=stream, flush=True)  # flushed, to stay in order with the output of child processes
    run = partial(run_process, out=stream)
    tool = [sys.executable, "-m", "hrm_hf.cli"]
    _make_data(options, partial(run, *tool, "data"), tell)
    step = seconds_per_step(options.vocab_size)
    left = end - time.monotonic()
    evaluated, others = (64, WRITE) if options.minutes < QUICK else (200, 24 * WRITE)
    steps = steps_for(left - others, evaluated, step)
    tell(f"\n3. Training: {counted(steps, 'step')} of {step:.1f} seconds; {max(left, 0) / 60:.1f} minutes left")
    flags = _flags(options, steps, evaluated)
    # If other programs slow down training, `max_minutes` ends it before `max_steps`.
    seconds = left - others / 2 - EVALUATION * step * evaluated / BATCH - 2 * START
    flags += ["--max_minutes", round(max(seconds / 60, 0.01), 2)]
    run(sys.executable, resource("training") / "run_go_coder.py", *flags, *shlex.split(options.extra))
    bits = json.loads((out / "results.json").read_text())["metrics"]["bits_per_byte"]
    write = [*tool, "go", out, "--records", out / "data" / "test.jsonl"]
    if bits > READABLE:
        tell(
            f"\n4. This model is undertrained: {bits:.2f} bits per byte of held-out code, and code begins to parse at "
            f"about {READABLE:g}. The function below shows this. Train longer with more --minutes and a new --out"
        )
        run(*write, "--limit", 1, "--max-iterations", 1, "--max-new-tokens", 60)
    else:
        tell(f"\n4. Another process loads the checkpoint ({bits:.2f} bits per byte) and writes three unseen functions")
        run(*write, "--max-iterations", 3, "--max-new-tokens", 160)
        tell("\n5. A failed attempt at a held-out function, and its repair")
        run(*write, "--max-iterations", 3, "--repair", "--max-new-tokens", 160)
    tell(f"\nMore: hrm-hf go {out} 'Max returns the larger of a and b.' --prefix 'func Max(a, b int) int {{'")
    tell(f"      hrm-hf eval go {out} --records {out / 'data' / 'test.jsonl'}")
    return {"out": str(out), "steps": steps, "bits_per_byte": bits, "readable": bits <= READABLE}


def _make_data(options: DemoGo, build: Callable[..., None], tell: Callable[[str], None]) -> None:
    """Build records and a tokenizer, unless an earlier run of the demo left them in the folder."""
    source, data, tokenizer = options.source, options.out / "data", options.out / "tokenizer"
    if not (data / "report.json").exists():
        if source == "std":
            tell(f"Go sources: {find_go_source()}")
        repairs = options.minutes >= QUICK
        tell(f"1. Records from {source}: documented functions by package{', and repair trajectories' * repairs}")
        build("go", source, "--out", data, "--text", data / "text", "--trajectories", int(repairs))
    if not (tokenizer / "tokenizer.json").exists():
        tell("\n2. A tokenizer from the training split")
        files = ["--source", data / ("train.jsonl" if options.minutes < QUICK else "text/train.jsonl")]
        build("go-tokenizer", *files, "--vocab-size", options.vocab_size, "--out", tokenizer)


def _flags(options: DemoGo, steps: int, evaluated: int) -> list[Any]:
    """Return the flags for run_go_coder.py."""
    out, data = options.out, options.out / "data"
    flags = {
        "recipe": resource("training") / "recipes" / "go_nano_cpu.yaml",
        "tokenizer_name": out / "tokenizer",
        "train_data": ",".join(map(str, [data / "train.jsonl", *data.glob("trajectories/train.jsonl")])),
        "eval_data": data / "validation.jsonl",
        "max_eval_samples": evaluated,
        "per_device_train_batch_size": BATCH,
        "max_train_samples": 2048
        if options.minutes < QUICK
        else None,  # so that data preparation fits in a short demo
        "max_steps": steps,
        "warmup_steps": min(100, steps // 10),
        "lr_scheduler_kwargs": json.dumps({"num_decay_steps": steps // 4, "min_lr_ratio": 0.05}),
        "refinement_warmup": steps // 8,
        "refinement_ramp": max(1, steps // 8),
        "logging_steps": max(1, min(10, steps // 10)),
        # Evaluate once halfway if there is time. The run also evaluates at the end.
        "eval_steps": steps // 2 + 1 if options.minutes >= QUICK else steps + 1,
        "validation_frequency": 0,  # generates no code during training; the demo does so afterwards
        "resume_from_checkpoint": "last" if any(out.glob("checkpoint-*")) else None,
        "output_dir": out,
    }
    return [part for name, value in flags.items() if value is not None for part in (f"--{name}", value)]


def steps_for(seconds: float, evaluated: int, per_step: float) -> int:
    """Return how many training steps fit in the time left after two evaluations and two program starts."""
    evaluations = 2 * EVALUATION * per_step * evaluated / BATCH
    return max(8, round((seconds - evaluations - 2 * START) / per_step))


def seconds_per_step(vocab_size: int) -> float:
    """Estimate the seconds per step of the nano preset on this machine by timing a quarter of a batch."""
    model = HrmGoCoderForCausalLM(HrmGoCoderConfig.from_preset("nano", vocab_size=vocab_size)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    ids = torch.randint(64, vocab_size, (BATCH // 4, ROW))
    labels = torch.where(torch.arange(ROW) > ROW // 2, ids, -100)
    for step in range(3):
        if step == 1:  # do not time the first step, which allocates memory
            started = time.perf_counter()
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return 4 * (time.perf_counter() - started) / 2
