"""Measure how cost grows with batch size, context, board size, passes, processes and data.

    python -m benchmarks.package.growth [--quick] [--curves batch,context,...] [--turns 5]

Every curve has several series of small models. A series is measured at sizes that double or nearly double, in turn, so
a noisy machine slows all sizes equally. A cost is the lowest CPU time of one thread over the turns, because other jobs
can only add to it. The curve "processes" trains on one and two processes (DDP, gloo) with the same rows per step: its
costs are the CPU time of all processes and the wall time, per step.

The report and the plot state the exponent of each series: the slope of log cost over log size in the upper half of the
sizes, where constant costs matter least. Up to 1.1, the growth is called linear.
"""

import contextlib
import math
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hrm_hf import (
    HrmPuzzleConfig,
    HrmPuzzleForSolving,
    SeRrmPuzzleConfig,
    SeRrmPuzzleForSolving,
    TrmPuzzleConfig,
    TrmPuzzleForSolving,
)
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report
from ..text.models import build, image_folder, peer_config


LINEAR = 1.1  # largest exponent that is called linear
UNITS = {"batch": "rows or boards", "context": "tokens", "board": "cells", "passes": "passes", "data": "rows"}
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")
Series = dict[str, dict[int, Callable[[], Any]]]  # for each label, a function to time for each size


def main() -> None:
    parser = make_parser(__doc__, quick="two sizes of each curve, one turn, one process")
    parser.add_argument("--curves", default=",".join([*CURVES, "processes"]))
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    curves = {}
    for name in args.curves.split(","):
        if name != "processes":
            curves[name] = measure(CURVES[name](2 if args.quick else None), 1 if args.quick else args.turns)
        elif not args.quick:
            curves[name] = processes(args.turns)
        for label, series in curves.get(name, {}).items():
            series["exponent"] = exponent(series["sizes"], series["costs_ms"])
            growth = (
                "linear or less" if series["exponent"] <= LINEAR else f"size to the power {series['exponent']:.2f}"
            )
            largest = f"{series['costs_ms'][-1]:.4g} ms at {series['sizes'][-1]}"
            print(f"{name:10} {label:34} exponent {series['exponent']:5.2f}, {growth}; {largest}", flush=True)
    about = {"turns": args.turns, "threads": 1, "machine": machine(), "versions": library_versions()}
    write_report(args, "growth", {"curves": curves, **about})
    plot(curves, image_folder(args.out) / f"growth{'_quick' if args.quick else ''}.png")


def measure(series: Series, turns: int) -> dict[str, dict]:
    """Return sizes and lowest CPU milliseconds by label. Every function first runs once without being timed."""
    times = {(label, size): [] for label, functions in series.items() for size in functions}
    for turn in range(turns + 1):
        for (label, size), found in times.items():
            start = time.process_time()
            series[label][size]()
            if turn:
                found.append(1e3 * (time.process_time() - start))
    return {
        label: {"sizes": list(functions), "costs_ms": [min(times[label, size]) for size in functions]}
        for label, functions in series.items()
    }


def exponent(sizes: list[int], costs: list[float]) -> float:
    """Return the slope of log cost over log size in the upper half of the sizes (at least two)."""
    upper = min(len(sizes) // 2, len(sizes) - 2)
    return float(np.polyfit(np.log(sizes[upper:]), np.log(costs[upper:]), 1)[0])


# ---- curves ----


def batch(most: int | None) -> Series:
    """Train and decode with a language model, and train a puzzle model, by batch size."""
    model, puzzle = build(peer_config("hrm_lm", "1m")), HrmPuzzleForSolving(HrmPuzzleConfig.from_preset("hrm-small"))
    ids, boards = tokens(32, 64), torch.randint(1, 11, (128, 81), dtype=torch.int32)
    sizes, more = (1, 2, 4, 8, 16, 32)[:most], (1, 4, 16, 32, 64, 128)[:most]
    return {
        "hrm_lm, training step of 64 tokens": {size: training(model, ids[:size]) for size in sizes},
        "hrm_lm, decoding 8 tokens": {size: decoding(model, ids[:size]) for size in sizes},
        "HRM puzzle, ACT step in training": {
            size: lambda size=size: puzzle_step(puzzle, boards[:size]) for size in more
        },
    }


def context(most: int | None) -> Series:
    """Read a prompt, and decode 8 tokens after it, by the number of tokens in the prompt."""
    sizes, found = (128, 256, 512, 1024, 2048, 4096)[:most], {}
    for peer, name in {"hrm_lm": "hrm_lm", "rlm_mhc_on": "rlm_mhc", "llama": "Llama"}.items():
        model = build(peer_config(peer, "1m", changes={"max_position_embeddings": 8192})).eval()
        found[f"{name}, prompt"] = {size: reading(model, tokens(1, size)) for size in sizes}
        found[f"{name}, 8 tokens after it"] = {size: decoding(model, tokens(1, size)) for size in sizes}
    return found


def board(most: int | None) -> Series:
    """Solve a board of 4x4 to 25x25 in one ACT step, with models that mix cells in different ways."""
    sides, found = (4, 9, 16, 25)[:most], {"HRM, attention over cells": {}, "TRM, mixing by an MLP": {}}
    mixed = SeRrmPuzzleForSolving(SeRrmPuzzleConfig.from_preset("se-rrm-small"))
    units = SeRrmPuzzleForSolving(SeRrmPuzzleConfig.from_preset("symbol-units-small"))
    found |= {"SE-RRM, attention over cells": {}, "SE-RRM, mixing by units": {}}
    for side in sides:
        sizes = {"seq_len": side**2, "vocab_size": side + 2}
        mlp = TrmPuzzleConfig.from_preset("trm-5m-mlp", **sizes, hidden_size=64, puzzle_emb_ndim=64)
        box = (int(side**0.5), int(side**0.5))
        models = [HrmPuzzleForSolving(HrmPuzzleConfig.from_preset("hrm-small", **sizes)), TrmPuzzleForSolving(mlp)]
        models += [model.for_board((side, side), box, side + 2) for model in (mixed, units)]
        boards = torch.randint(1, side + 2, (1, side**2), dtype=torch.int32)
        for series, model in zip(found.values(), models):
            series[side**2] = solving(model.eval(), boards, 1)
    return found


def passes(most: int | None) -> Series:
    """Run a language model with more and more segments, and a puzzle model with more and more ACT steps."""
    sizes = (1, 2, 4, 8, 16)[:most]
    config = peer_config("hrm_lm+halt_max_steps=16+exit_criterion=fixed", "tiny")
    model, ids = build(config), tokens(4, 128)
    puzzle = HrmPuzzleForSolving(HrmPuzzleConfig.from_preset("hrm-small")).eval()
    boards = torch.randint(1, 11, (16, 81), dtype=torch.int32)
    return {
        "hrm_lm, training step": {size: training(model, ids, num_segments=size) for size in sizes},
        "hrm_lm, decoding 8 tokens": {size: decoding(model, ids, num_segments=size) for size in sizes},
        "HRM puzzle, solving": {size: solving(puzzle, boards, size) for size in sizes},
    }


def data(most: int | None) -> Series:
    """Generate puzzles, iterate over an epoch of a puzzle data set, and pack documents of 1,000 bytes."""
    sizes = (500, 1000, 2000, 4000, 8000, 16000)[:most]
    return {
        "generate 9x9 Sudoku": {size: lambda size=size: generate(size) for size in sizes},
        "load rows, and batches of an epoch": {size: epoch_over(size) for size in sizes},
        "tokenize and pack documents": {size: lambda size=size: pack(size) for size in sizes},
    }


CURVES = {"batch": batch, "context": context, "board": board, "passes": passes, "data": data}


# ---- what is timed ----


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(8, 264, (rows, length), generator=torch.Generator().manual_seed(0))


def training(model, ids: torch.Tensor, **options: Any) -> Callable:
    """Return a function that computes a loss and its gradients."""

    def step():
        model.train()(input_ids=ids, labels=ids, use_cache=False, **options).loss.backward()
        model.zero_grad()

    return step


def reading(model, ids: torch.Tensor) -> Callable:
    """Return a function that reads a prompt into a new cache."""
    return torch.no_grad()(lambda: model.eval()(input_ids=ids, use_cache=True, logits_to_keep=1))


def decoding(model, ids: torch.Tensor, new: int = 8, **options: Any) -> Callable:
    """Return a function that decodes `new` tokens after a prompt and then removes them from the cache.

    The prompt is read in the first call, which is not timed. Sizes of a series differ only by a constant factor.
    """
    cache: list = []

    @torch.no_grad()
    def decode():
        model.eval()
        if not cache:
            cache.append(model(input_ids=ids, use_cache=True, logits_to_keep=1, **options).past_key_values)
        for _ in range(new):
            model(input_ids=ids[:, -1:], past_key_values=cache[0], use_cache=True, logits_to_keep=1, **options)
        cache[0].crop(-new)

    return decode


def solving(model, boards: torch.Tensor, steps: int) -> Callable:
    return lambda: model.solve(boards, halt="fixed", max_steps=steps)


def puzzle_step(model, boards: torch.Tensor) -> None:
    identifiers = torch.zeros(len(boards), dtype=torch.int32)
    model.train()(input_ids=boards, labels=boards, puzzle_identifiers=identifiers).loss.backward()
    model.zero_grad()


def generate(count: int) -> None:
    from hrm_hf.puzzles.sudoku_generation import generate_portions

    for _ in generate_portions(9, count, (36, 50)):
        pass


def epoch_over(count: int) -> Callable:
    from datasets import Dataset

    from hrm_hf.puzzles.dataloader import CarryDataLoader, PuzzleRows

    grids = np.random.default_rng(0).integers(1, 11, (count, 81), dtype=np.int8)
    rows = {"input_ids": list(grids), "labels": list(grids), "puzzle_identifiers": [0] * count}
    dataset = Dataset.from_dict(rows)

    def run():
        for _ in CarryDataLoader(PuzzleRows(dataset), 64, 0):
            pass

    return run


def pack(count: int) -> None:
    from datasets import Dataset, disable_progress_bars

    from hrm_hf.text.byte_tokenizer import byte_tokenizer
    from hrm_hf.text.corpus import Packing, pack_documents, tokenize_documents

    disable_progress_bars()
    documents = Dataset.from_dict({"text": [f"{number:08d} " + "word " * 198 for number in range(count)]})
    with tempfile.TemporaryDirectory() as folder:
        pack_documents(tokenize_documents(documents, byte_tokenizer()), Packing(1024, 0), folder)


# ---- processes ----


def processes(turns: int) -> dict[str, dict]:
    """Return the CPU and wall time of a training step with 16 rows on one and two processes."""
    costs: dict[str, list[float]] = {"hrm_lm, CPU time of all processes": [], "hrm_lm, wall time": []}
    for world in (1, 2):
        with tempfile.TemporaryDirectory() as folder, contextlib.closing(_queue()) as queue:
            torch.multiprocessing.spawn(worker, (world, folder, turns, queue), nprocs=world)
            cpu, wall = zip(*(queue.get() for _ in range(world)))
        for found, value in zip(costs.values(), (sum(cpu), max(wall))):
            found.append(value)
    return {label: {"sizes": [1, 2], "costs_ms": found} for label, found in costs.items()}


def _queue():
    return torch.multiprocessing.get_context("spawn").SimpleQueue()


def worker(rank: int, world: int, folder: str, turns: int, queue) -> None:
    """Train on this process's rows. Put the lowest CPU and wall milliseconds of a step into the queue."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    model = torch.nn.parallel.DistributedDataParallel(build(peer_config("hrm_lm", "1m")))
    step, times = training(model, tokens(16, 128)[rank::world]), []
    for _ in range(turns + 2):
        torch.distributed.barrier()
        start = time.process_time(), time.perf_counter()
        step()
        times.append((1e3 * (time.process_time() - start[0]), 1e3 * (time.perf_counter() - start[1])))
    queue.put(tuple(min(clock) for clock in zip(*times[2:])))
    torch.distributed.destroy_process_group()


# ---- plot ----


def plot(curves: dict[str, dict], path) -> None:
    """Draw one panel per curve, both axes logarithmic, with a dotted line of linear growth."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    columns = min(3, len(curves))
    lines = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(4.4 * columns, 3.6 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    panels = np.ravel(figure.subplots(lines, columns))
    for axes, (name, series) in zip(panels, curves.items()):
        in_pairs = any("after it" in label for label in series)  # prompt and tokens of a model have the same color
        for index, (label, one) in enumerate(series.items()):
            style = "--" if "after it" in label else "-"
            color = COLORS[index // 2 if in_pairs else index]
            text = f"{label}: {one['exponent']:.2f}"
            axes.plot(one["sizes"], one["costs_ms"], style, marker="o", markersize=3, color=color, label=text)
        ticks = np.array(sorted({size for one in series.values() for size in one["sizes"]}))
        start = min(one["costs_ms"][0] for one in series.values())
        axes.plot(ticks, ticks * start / ticks[0], ":", color="gray", label="linear growth: 1")
        axes.set(xscale="log", yscale="log", xlabel=UNITS.get(name, name), ylabel="milliseconds", title=name)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.tick_params(which="minor", bottom=False, labelbottom=False, labelleft=False)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(frameon=False, fontsize="x-small")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[len(curves) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
