"""Compare the speed of puzzle models with that of the original's arithmetic (`plain.py`), both eager and compiled.

    python -m benchmarks.puzzles.speed ROW [--turns 11] [--threads 1] [--out benchmarks/results]
    python -m benchmarks.puzzles.speed hrm-27m-b8 --device cuda --dtype bfloat16 --batch-size 384
    python -m benchmarks.puzzles.speed              # only print the table of the results in --out

A row first runs each of the four sides in a new process with an empty compiler cache, for the time of the first step
and the peak memory. Then all sides run in one process: their losses and answers are compared, and they take turns, so
a noisy machine slows all equally. Times are CPU seconds of the process, or wall time on a GPU. A ratio is the time of
the original divided by that of the package: the median over pairs of turns, with a 95 % bootstrap interval.
"""

import argparse
import copy
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ..report import machine, make_parser, write_report


ROWS = {  # preset, boards per batch, training steps to compare, training steps per turn, ACT steps to solve
    "hrm-32-b4": ("hrm-small", 4, 20, 20, 4),
    "hrm-32-b64": ("hrm-small", 64, 12, 2, 4),
    "hrm-32-b256": ("hrm-small", 256, 5, 1, 1),
    "hrm-27m-b8": ("hrm-27m", 8, 3, 1, 1),
    "trm-7m-b2": ("trm-7m", 2, 4, 1, 1),
    "trm-5m-mlp-b2": ("trm-5m-mlp", 2, 3, 1, 1),
}
SIDES = ("original, eager", "original, compiled", "package, eager", "package, compiled")
PAIRS = (SIDES[::2], SIDES[1::2], SIDES[:2])  # the last pair shows how rounding alone changes the losses
RATES = {"lr": 1e-4, "weight_decay": 1.0}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of the losses; fused kernels round bfloat16 differently
RESAMPLES = 2000


def main() -> None:
    parser = make_parser(__doc__, quick="the first row with three turns")
    parser.add_argument("row", nargs="?", choices=ROWS)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="device, cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=TOLERANCE, help="dtype of activations")
    parser.add_argument("--batch-size", type=int, help="boards per batch, instead of the row's")
    parser.add_argument("--warm", action="store_true", help="only compare in one process, with torch's compiler cache")
    parser.add_argument("--side", choices=SIDES, help="run only the first step of one side in this process")
    args = parser.parse_args()
    args.row = args.row or ("hrm-32-b4" if args.quick else None)
    if args.side:
        print(json.dumps(first_step(args.row, args)))
        return
    if args.row and args.warm:
        report = measure(args.row, args, {})
    elif args.row:
        with tempfile.TemporaryDirectory() as cache:  # shared by all sides, and later by this process
            os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            command = [sys.executable, "-m", "benchmarks.puzzles.speed", *sys.argv[1:], "--side"]
            outputs = {side: subprocess.check_output([*command, side], text=True) for side in SIDES}
            report = measure(args.row, args, {side: json.loads(text) for side, text in outputs.items()})
    if args.row:
        suffix = "" if (args.device, args.dtype) == ("cpu", "float32") else f"_{args.device}_{args.dtype}"
        write_report(args, f"puzzle_speed_{args.row}{suffix}", report)
    print_table(args)


class Package:
    """The package's model with its optimizers and carry, with the methods of `PlainReasoner`."""

    def __init__(self, model, compiled: bool):
        from hrm_hf.trainer.optim import AdamATan2, CompositeOptimizer, SignSGD

        self.model, self.carry = copy.deepcopy(model), None
        if compiled:
            self.model.compile_act_step()
            self.model.compile_solve()
        sparse = SignSGD([self.model.model.puzzle_emb.weight], 1e-4, 1.0)
        dense = AdamATan2(self.model.parameters(), **RATES)
        if compiled:
            dense.compile()
        self.optimizer = CompositeOptimizer([sparse, dense])

    def train_step(self, batch):
        if not self.model.training:
            self.model.train()
        outputs = self.model(**batch, carry=self.carry)
        self.carry = outputs.carry
        outputs.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return outputs.loss.detach()

    def solve(self, batch, max_steps):
        if self.model.training:
            self.model.eval()
        ids = (batch["input_ids"], batch["puzzle_identifiers"])
        return self.model.solve(*ids, halt="fixed", max_steps=max_steps).predictions


def prepare(row: str, args: argparse.Namespace):
    """Return the row's model, a batch of random boards, and a function that makes a side."""
    import torch

    from hrm_hf import HrmPuzzleConfig, HrmPuzzleForSolving, TrmPuzzleConfig, TrmPuzzleForSolving

    from .plain import PlainReasoner

    torch.set_num_threads(args.threads)
    torch._inductor.config.fallback_random = True  # compiled sides explore with the random numbers of the eager ones
    torch.manual_seed(0)
    preset, batch_size = ROWS[row][0], args.batch_size or ROWS[row][1]
    config_class, model_class = (
        (HrmPuzzleConfig, HrmPuzzleForSolving) if preset.startswith("hrm") else (TrmPuzzleConfig, TrmPuzzleForSolving)
    )
    model = model_class(config_class.from_preset(preset, forward_dtype=args.dtype)).to(args.device)
    batch = {
        "input_ids": torch.randint(1, 11, (batch_size, 81), dtype=torch.int32),
        "labels": torch.randint(2, 11, (batch_size, 81), dtype=torch.int32),
        "puzzle_identifiers": torch.zeros(batch_size, dtype=torch.int32),
    }
    batch = {name: value.to(args.device) for name, value in batch.items()}

    def make(side: str):
        compiled = side.endswith("compiled")
        return Package(model, compiled) if "package" in side else PlainReasoner(model, **RATES, compiled=compiled)

    return model, batch, make


def first_step(row: str, args: argparse.Namespace) -> dict[str, float]:
    """Measure the seconds (with compilation) of the first training step and solve, and the peak memory later."""
    import torch

    _, batch, make = prepare(row, args)
    runner, found = make(args.side), {}
    for name, run in (("first_step_s", runner.train_step), ("first_solve_s", lambda batch: runner.solve(batch, 2))):
        start = now(args.device, children=True)
        run(batch)
        found[name] = now(args.device, children=True) - start
    on_cpu = args.device == "cpu"
    if on_cpu:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which the compiler may have caused
    else:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        runner.train_step(batch)
    if on_cpu:
        peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 2**10
    else:
        peak = torch.cuda.max_memory_allocated() / 2**20
    return {**found, "peak_mib": peak}


def measure(row: str, args: argparse.Namespace, first: dict[str, dict]) -> dict:
    """Compare losses and answers of all sides, then time them in alternation."""
    import torch

    from hrm_hf.trainer.recipes import library_versions

    _, _, compared, per_turn, act_steps = ROWS[row]
    model, batch, make = prepare(row, args)
    sides = {side: make(side) for side in SIDES}
    losses, answers = {}, {}
    for side, runner in sides.items():
        torch.manual_seed(1)
        answers[side] = runner.solve(batch, act_steps)  # before training, so from the same weights
        losses[side] = [runner.train_step(batch).item() for _ in range(compared)]
    differences = {pair: largest_difference(*(losses[side] for side in pair)) for pair in PAIRS}
    same = min((found == answers[SIDES[0]]).float().mean().item() for found in answers.values())
    assert max(differences[pair] for pair in PAIRS[:2]) < TOLERANCE[args.dtype], losses
    assert same > 0.999 or args.dtype != "float32", same
    turns = 3 if args.quick else args.turns
    device = args.device
    train = interleave({s: lambda r=r: r.train_step(batch) for s, r in sides.items()}, per_turn, turns, device)
    solve = interleave({s: lambda r=r: r.solve(batch, act_steps) for s, r in sides.items()}, per_turn, turns, device)
    return {
        "row": row,
        "batch_size": len(batch["input_ids"]),
        "parameters": model.num_parameters(),
        "threads": args.threads,
        "act_steps_of_solve": act_steps,
        "losses": losses,
        "largest_relative_difference_of_losses": {" / ".join(pair): value for pair, value in differences.items()},
        "equal_answers": same,
        "train_step_ms": {side: statistics.median(times) for side, times in train.items()},
        "solve_step_ms": {side: statistics.median(times) / act_steps for side, times in solve.items()},
        "train_ratios": ratios(train),
        "solve_ratios": ratios(solve),
        "turns": turns,
        "first": first,
        "machine": machine(),
        "versions": library_versions(),
    }


def largest_difference(losses: list[float], others: list[float]) -> float:
    """Return the largest relative difference between the losses of two runs."""
    return max(abs(a / b - 1) for a, b in zip(losses, others))


def now(device: str, children: bool = False) -> float:
    """Return the CPU seconds of the process (and its compilers) or, on a GPU, wall-clock seconds."""
    if device == "cpu":
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + (used.ru_utime + used.ru_stime if children else 0)
    import torch

    torch.cuda.synchronize(device)
    return time.perf_counter()


def interleave(sides: dict, calls: int, turns: int, device: str) -> dict[str, list[float]]:
    """Return each side's milliseconds per call in every turn, with `calls` calls per turn."""
    times = {name: [] for name in sides}
    for function in sides.values():
        function()
    for _ in range(turns):
        for name, function in sides.items():
            start = now(device)
            for _ in range(calls):
                function()
            times[name].append((now(device) - start) / calls * 1e3)
    return times


def ratios(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return `median_ratio` of original and package, eager and compiled."""
    modes = ("eager", "compiled")
    return {how: median_ratio(times[f"original, {how}"], times[f"package, {how}"]) for how in modes}


def median_ratio(slow: list[float], fast: list[float]) -> list[float]:
    """Return the median of slow / fast over the turns, and its 95 % bootstrap interval."""
    pairs, rng = [a / b for a, b in zip(slow, fast)], random.Random(0)
    medians = sorted(statistics.median(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return [statistics.median(pairs), medians[RESAMPLES // 40], medians[-RESAMPLES // 40]]


def print_table(args: argparse.Namespace) -> None:
    """Print a markdown table of all results in --out."""
    print("| row | part | original, eager | compiled | package, eager | compiled | ratio, eager | ratio, compiled |")
    print("|" + "---|" * 8)
    for file in (args.out / f"puzzle_speed_{row}{'_quick' if args.quick else ''}.json" for row in ROWS):
        if not file.exists():
            continue
        report = json.loads(file.read_text())
        first = report["first"]
        for part, unit in (("train", "training step, ms"), ("solve", "ACT step of `solve`, ms")):
            times = [f"{report[f'{part}_step_ms'][side]:.4g}" for side in SIDES]
            found = [f"{a:.2f} ({b:.2f} to {c:.2f})" for a, b, c in report[f"{part}_ratios"].values()]
            print(f"| {report['row']} | {unit} | {' | '.join(times + found)} |")
        for key, unit in (("first_step_s", "first step, s"), ("peak_mib", "peak memory, MiB")) if first else ():
            print(f"| | {unit} | {' | '.join(f'{first[side][key]:.3g}' for side in SIDES)} | | |")


if __name__ == "__main__":
    main()
