"""Compare the speed of training and solving puzzle models with that of a plain eager implementation.

    python -m benchmarks.puzzles.speed [--quick] [--config tiny|27m] [--threads 1] [--out benchmarks/results]
    python -m benchmarks.puzzles.speed --device cuda --dtype bfloat16 --config 27m --batch-size 384

Both sides do the same arithmetic on the same data (their losses are compared first) and take turns, so a noisy machine
slows both equally. Results are medians of the process's CPU time, or of wall time on a GPU. `plain` is the code in
`plain.py`. The original trains in bfloat16, like "plain, fused attention, compiled".
"""

import argparse
import copy
import statistics
import tempfile
import time

import torch
from transformers import TrainerCallback

from hrm_hf import HrmPuzzleConfig, HrmPuzzleForSolving
from hrm_hf.puzzles.trainer import PuzzleTrainer, PuzzleTrainingArguments
from hrm_hf.trainer.optim import AdamATan2, CompositeOptimizer, SignSGD
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report
from .plain import PlainReasoner


# preset, batch size, steps per repetition, repetitions
CONFIGS = {"tiny": ("hrm-small", 4, 20, 30), "27m": ("hrm-27m", 8, 1, 5)}
RATES = {"lr": 1e-4, "weight_decay": 1.0}


def main() -> None:
    parser = make_parser(__doc__, quick="the tiny configuration, few turns")
    parser.add_argument("--config", choices=[*CONFIGS, "all"], default="all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="device, cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of activations")
    parser.add_argument("--batch-size", type=int, help="boards per batch (default 4 for tiny, 8 for 27m)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = ["tiny"] if args.quick else list(CONFIGS) if args.config == "all" else [args.config]
    for name in names:
        report = {"config": name, "threads": args.threads, "device": args.device, "dtype": args.dtype}
        report |= measure(name, args) | {"machine": machine(), "versions": library_versions()}
        cpu = (args.device, args.dtype) == ("cpu", "float32")
        write_report(args, f"puzzle_{name}" if cpu else f"puzzle_{name}_{args.device}_{args.dtype}", report)
        for line, value in report["ratios"].items():
            print(f"puzzle {name:5} {line:45} {value:.3f}")


def measure(name: str, args: argparse.Namespace) -> dict:
    """Time training and solving with each implementation; return the milliseconds and their ratios to `plain`."""
    preset, batch_size, steps, turns = CONFIGS[name]
    batch_size, turns = args.batch_size or batch_size, 6 if args.quick else turns
    torch.manual_seed(0)
    model = HrmPuzzleForSolving(HrmPuzzleConfig.from_preset(preset, forward_dtype=args.dtype)).train().to(args.device)
    batch = {
        "input_ids": torch.randint(1, 11, (batch_size, 81), dtype=torch.int32),
        "labels": torch.randint(2, 11, (batch_size, 81), dtype=torch.int32),
        "puzzle_identifiers": torch.zeros(batch_size, dtype=torch.int32),
    }
    batch = {name: value.to(args.device) for name, value in batch.items()}
    plain = PlainReasoner(model, **RATES)
    fused = PlainReasoner(model, fused_attention=True, **RATES)
    compiled = PlainReasoner(model, fused_attention=True, compiled=True, **RATES)
    sides = {
        "plain": lambda: plain.train_step(batch),
        "plain, fused attention": lambda: fused.train_step(batch),
        "plain, fused attention, compiled": lambda: compiled.train_step(batch),
        "package, eager": package_step(copy.deepcopy(model), batch),
        "package, compiled": package_step(copy.deepcopy(model), batch, compiled=True),
    }
    losses = {side: [] for side in sides}
    for side, step in sides.items():
        torch.manual_seed(1)
        losses[side] = [step().item() for _ in range(3)]
    most = 1e-3 if args.dtype == "float32" else 5e-2  # bfloat16 keeps 8 bits, and fused kernels round differently
    for side, values in losses.items():
        assert max(abs(a - b) for a, b in zip(values, losses["plain"])) < most, (side, values, losses["plain"])
    train = interleave(sides, steps, turns, model.device)
    loop = loop_milliseconds(copy.deepcopy(model), batch, 400 if name == "tiny" else 6)
    solver = copy.deepcopy(model).eval()
    solve = interleave(
        {
            "plain": lambda: plain_solve(plain, batch),
            "package": lambda: solver.solve(batch["input_ids"], halt="fixed", max_steps=4),
        },
        1,
        turns,
        model.device,
    )
    ratios = {
        f"train step, {side} / plain": value / train["plain"] for side, value in train.items() if side != "plain"
    }
    ratios["training loop / compiled step"] = loop / train["package, compiled"]
    ratios["solve 4 fixed steps, package / plain"] = solve["package"] / solve["plain"]
    return {
        "batch_size": batch_size,
        "parameters": model.num_parameters(),
        "train_step_ms": train,
        "training_loop_ms_per_step": loop,
        "solve_ms": solve,
        "ratios": ratios,
        "losses": losses,
    }


def package_step(model, batch, compiled: bool = False):
    """Return a function that runs one training step of the package: forward, backward, both optimizers."""
    if compiled:
        model.compile_act_step()
    sparse = SignSGD([model.model.puzzle_emb.weight], 1e-4, 1.0)
    optimizer = CompositeOptimizer([sparse, AdamATan2(model.parameters(), **RATES)])
    carry = None

    def step():
        nonlocal carry
        outputs = model(**batch, carry=carry)
        carry = outputs.carry
        outputs.loss.backward()
        optimizer.step()
        model.zero_grad()
        return outputs.loss.detach()

    return step


def plain_solve(plain: PlainReasoner, batch) -> torch.Tensor:
    """Run four ACT steps of the plain model without gradients; return the argmax of the last logits."""
    with torch.no_grad():
        shape = (len(batch["input_ids"]), plain.config.max_position_embeddings, plain.config.hidden_size)
        z_H, z_L = (state.to(plain.dtype).expand(shape) for state in (plain.H_init, plain.L_init))
        rows = plain.table[batch["puzzle_identifiers"].long()]
        for _ in range(4):
            z_H, z_L, logits, _, _ = plain.inner(batch, rows, z_H, z_L)
    return logits.argmax(-1)


def loop_milliseconds(model, batch, steps: int) -> float:
    """Return the milliseconds per step of compiled `PuzzleTrainer.train`, logging included, after warm-up."""
    from datasets import Dataset

    rows = {name: value.repeat(16, *[1] * (value.dim() - 1)).tolist() for name, value in batch.items()}
    with tempfile.TemporaryDirectory() as folder:
        args = PuzzleTrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=len(batch["input_ids"]),
            torch_compile=True,
            use_cpu=model.device.type == "cpu",
            bf16=model.config.forward_dtype == "bfloat16",
            logging_steps=100,
            save_strategy="no",
            report_to="none",
        )
        trainer = PuzzleTrainer(model=model, args=args, train_dataset=Dataset.from_dict(rows))
        clock = []

        class Clock(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                clock.append(now(model.device))

        trainer.add_callback(Clock)
        trainer.train()
    warm = len(clock) // 4
    return (clock[-1] - clock[warm]) / (len(clock) - 1 - warm) * 1e3


def now(device: torch.device) -> float:
    """Return the CPU seconds of the process or, after synchronizing with a GPU, wall-clock seconds."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def interleave(sides: dict, steps: int, turns: int, device: torch.device) -> dict[str, float]:
    """Return each implementation's median milliseconds per call. They alternate, with `steps` calls per turn."""
    times = {name: [] for name in sides}
    for function in sides.values():
        function()
    for _ in range(turns):
        for name, function in sides.items():
            start = now(device)
            for _ in range(steps):
                function()
            times[name].append((now(device) - start) / steps * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
