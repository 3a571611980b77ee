"""Compare every architecture on the GPU with the CPU, and measure speed and memory on the GPU: `make gpu-check`.

    python -m benchmarks.package.gpu_check [--quick] [--device cuda|cpu] [--only outputs losses ...]

The comparisons (`comparisons.py`) cover the outputs of each architecture in float32 and bfloat16, each available
attention implementation, decoding with each cache, and the losses of 20 training steps; with several GPUs, also the
losses of two processes with DDP and FSDP2. The script then measures HRM 27M, TRM 7M and a 100M language model, on a
GPU in bfloat16: the time and peak memory of a training step, eager and compiled (and compares their losses), and the
puzzles or tokens per second of training, solving and decoding with a cache, the last two also with CUDA graphs (and
compares their outputs). This takes about ten minutes on a GPU.
Without a GPU, the comparisons that need none run on the CPU, with small models: bfloat16 against float32, attention,
caches, and two processes.

The script prints one table and writes one JSON file. The exit status is 1 if a comparison fails.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from hrm_hf import HrmPuzzleConfig, HrmPuzzleForSolving, TrmPuzzleConfig, TrmPuzzleForSolving
from hrm_hf.trainer.recipes import library_versions

from ..puzzles import speed as puzzles
from ..report import machine, make_parser, write_report
from ..text import speed as text
from ..text.decoding import compiled_decoder
from ..text.models import build, peer_config
from .comparisons import (
    CHECKS,
    STEPS,
    Checkpoints,
    Comparison,
    apart,
    attempt,
    check_losses,
    check_processes,
    every,
)


PUZZLES = {"hrm": (HrmPuzzleForSolving, HrmPuzzleConfig), "trm": (TrmPuzzleForSolving, TrmPuzzleConfig)}
SMALL = {"hidden_size": 32, "num_attention_heads": 1, "puzzle_emb_ndim": 32}
# Name, architecture, preset, config fields, boards per batch.
ON_A_GPU = [("HRM 27M", "hrm", "hrm-27m", {}, 384), ("TRM 7M", "trm", "trm-7m", {}, 384)]
ON_A_CPU = [("HRM small", "hrm", "hrm-small", {}, 4), ("TRM small", "trm", "trm-7m", SMALL, 4)]
ACT_STEPS = 16
COMPILED_MOST = 5e-2  # relative tolerance for losses: bfloat16 keeps 8 bits, and fused kernels round differently
SECTIONS = (*CHECKS, "processes", "puzzles", "language")


def main() -> int:
    parser = make_parser(__doc__, quick="one architecture of each kind, 3 training steps, one process; on the CPU")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), help="device to check; by default a GPU if available")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION", help=str(SECTIONS))
    args = parser.parse_args()
    args.device = args.device or ("cpu" if args.quick else here)
    if args.device == "cuda" and here == "cpu":
        parser.error("--device cuda: torch finds no GPU; use --device cpu")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.device == "cpu":
        print("no GPU: the half of the check that needs none" if here == "cpu" else "on the CPU, as asked for")
        torch.set_num_threads(1)
    rows, seconds = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name, section in sections(args, Checkpoints(folder)).items():
            start = time.monotonic()
            with attempt(name, "", "") as whole:
                for row in section():
                    rows.append(row)
                    print(row.line() if isinstance(row, Comparison) else speed_line(row), flush=True)
            if whole.error:
                rows.append(whole)
                print(whole.line(), flush=True)
            seconds[name] = round(time.monotonic() - start, 1)
    compared = [row for row in rows if isinstance(row, Comparison)]
    failed = [row for row in compared if not row.ok]
    report = {
        "device": args.device, "failed": len(failed), "seconds": seconds,
        "comparisons": [row.as_dict() for row in compared],
        "speed": [row for row in rows if not isinstance(row, Comparison)],
        "machine": machine(), "versions": library_versions(),
    }  # fmt: skip
    write_report(args, "gpu_check" if args.device == "cuda" else "gpu_check_cpu", report)
    print(f"{len(compared) - len(failed)} of {len(compared)} comparisons are within their bounds")
    return int(bool(failed))


def sections(args: argparse.Namespace, checkpoints: Checkpoints) -> dict[str, Callable[[], Iterator]]:
    """Return the selected sections as functions that yield their results."""
    kinds = (every.PUZZLES, every.CAUSAL_LMS, every.REGRESSORS, every.MASS_MAPPERS)
    architectures = [kind[0] for kind in kinds] if args.quick else every.ARCHITECTURES

    def of_all(check: Callable) -> Callable[[], Iterator[Comparison]]:
        options = {"steps": 3 if args.quick else STEPS} if check is check_losses else {}
        return lambda: (row for name in architectures for row in check(checkpoints, name, args.device, **options))

    found = {name: of_all(check) for name, check in CHECKS.items()}
    several = args.device == "cpu" or torch.cuda.device_count() > 1
    if several and not args.quick:
        found["processes"] = lambda: check_processes(checkpoints, args.device)
    found |= {"puzzles": lambda: puzzle_speed(args), "language": lambda: language_speed(args)}
    return {name: section for name, section in found.items() if name in args.only}


# ---- speed ----


def puzzle_speed(args: argparse.Namespace) -> Iterator[Comparison | dict[str, Any]]:
    """Time training and solving of the puzzle models; compare the losses of compiled and eager training."""
    gpu = args.device == "cuda"
    for name, kind, preset, fields, boards in ON_A_GPU if gpu else ON_A_CPU:
        model_class, config_class = PUZZLES[kind]
        config = config_class.from_preset(preset, forward_dtype="bfloat16" if gpu else "float32", **fields)
        torch.manual_seed(0)
        batch = {
            "input_ids": torch.randint(1, 11, (boards, 81), dtype=torch.int32),
            "labels": torch.randint(2, 11, (boards, 81), dtype=torch.int32),
            "puzzle_identifiers": torch.zeros(boards, dtype=torch.int32),
        }
        batch = {field: value.to(args.device) for field, value in batch.items()}

        def make_step(compiled: bool, batch=batch, config=config, model_class=model_class):
            package = puzzles.Package(model_class(config).to(args.device), compiled)
            return lambda: package.train_step(batch)

        yield from steps(name, make_step, boards, "puzzles", args)
        model = model_class(config).to(args.device).eval()

        def solve(model=model, ids=batch["input_ids"]):
            return model.solve(ids, halt="fixed", max_steps=ACT_STEPS)

        yield speed(name, f"solving, {ACT_STEPS} ACT steps", solve, boards, "puzzles", args)
        if gpu:
            yield from graph_solving(name, model, batch["input_ids"], args)


def graph_solving(name: str, model, ids: torch.Tensor, args: argparse.Namespace) -> Iterator:
    """Measure solving with a CUDA graph, and compare the logits after one ACT step with those of eager mode."""

    def solve(steps: int):
        return model.solve(ids, halt="fixed", max_steps=steps)

    row = None
    with attempt("solving", name, "CUDA graph") as comparison:
        expected = solve(1).logits.float()
        model.compile_solve(mode="reduce-overhead")
        comparison.distance, comparison.most = apart(solve(1).logits.float(), expected), COMPILED_MOST
        comparison.of = "logits"
        what = f"solving, {ACT_STEPS} ACT steps, CUDA graph"
        row = speed(name, what, lambda: solve(ACT_STEPS), len(ids), "puzzles", args)
    yield comparison
    if row:
        yield row


def language_speed(args: argparse.Namespace) -> Iterator[Comparison | dict[str, Any]]:
    """Time training and cached decoding of a language model; compare the losses of compiled and eager training."""
    gpu = args.device == "cuda"
    size = "100m" if gpu else "tiny"
    config, name, new = peer_config("hrm_lm", size, 1024 if gpu else 64), f"hrm_lm {size}", 32 if gpu else 4
    options = argparse.Namespace(
        device=args.device, dtype="bfloat16" if gpu else "float32", batch_size=8 if gpu else 2,
        block_size=1024 if gpu else 64,
    )  # fmt: skip

    def make_step(compiled: bool):
        return text.train_step(build(config).to(args.device), options, compiled)

    yield from steps(name, make_step, options.batch_size * options.block_size, "tokens", args)
    model = build(config).to(args.device, getattr(torch, options.dtype)).eval()
    with torch.no_grad():
        for rows in (1, 8):
            decode = text.decoder(model, rows, 128, new, args.device)
            yield speed(name, f"decoding with a cache, {rows} at a time", decode, rows * new, "tokens", args)
            if gpu:
                yield from graph_decoding(name, model, rows, new, args)


def graph_decoding(name: str, model, rows: int, new: int, args: argparse.Namespace) -> Iterator:
    """Measure decoding with a static cache and a CUDA graph, and compare the last logits with those of eager mode."""
    row, decoders = None, {}
    with attempt("decoding", name, f"CUDA graph, {rows} at a time") as comparison:
        for how, options in (("eager", {"disable": True}), ("graph", {"mode": "reduce-overhead"})):
            torch.manual_seed(0)  # so that both draw the same prompt
            decoders[how] = compiled_decoder(model, rows, 128, new, args.device, **options)
        expected, found = (decode().float() for decode in decoders.values())
        comparison.distance, comparison.most, comparison.of = apart(found, expected), COMPILED_MOST, "logits"
        what = f"decoding with a CUDA graph, {rows} at a time"
        row = speed(name, what, decoders["graph"], rows * new, "tokens", args)
    yield comparison
    if row:
        yield row


def steps(name: str, make_step: Callable, items: int, unit: str, args: argparse.Namespace) -> Iterator:
    """Measure the speed and memory of an eager step and, on a GPU, of a compiled one; compare their losses."""
    gpu, eager = args.device == "cuda", None
    for compiled in (False, True) if gpu else (False,):
        what, row, step, before = f"training step, {'compiled' if compiled else 'eager'}", None, None, 0
        with attempt("losses", name, "compiled, 3 steps" if compiled else "eager") as comparison:
            if gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            torch.manual_seed(0)
            step = make_step(compiled)
            torch.manual_seed(1)
            losses = torch.stack([step().float() for _ in range(3)])
            eager = losses if eager is None else eager
            comparison.distance, comparison.most, comparison.of = apart(losses, eager), COMPILED_MOST, "loss"
            row = speed(name, what, step, items, unit, args)
            row |= {"peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20} if gpu else {}
        if compiled or not comparison.ok:
            yield comparison
        if row:
            yield row


def speed(name: str, what: str, call: Callable, items: int, unit: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the median time of a call in milliseconds, and the number of items per second."""
    turns = 3 if args.quick or args.device == "cpu" else 15
    milliseconds = statistics.median(puzzles.interleave({"": call}, 1, turns, args.device)[""])
    return {"model": name, "what": what, "ms": milliseconds, f"{unit}_per_s": items / milliseconds * 1e3}


def speed_line(row: dict[str, Any]) -> str:
    """Format a row of the speed table."""
    rates = [f"{value:11,.0f} {key.removesuffix('_per_s')}/s" for key, value in row.items() if key.endswith("_per_s")]
    memory = [f"{row['peak_mib']:9,.0f} MiB at its peak"] if "peak_mib" in row else []
    return f"{'':6} {row['model']:13} {row['what']:34} {row['ms']:10,.1f} ms {' '.join(rates + memory)}"


if __name__ == "__main__":
    sys.exit(main())
