"""Measure a training step's memory for each preset and batch size, as input for `hrm-hf recommend`.

    python -m benchmarks.puzzles.presets [--quick] [--device cuda] [--out benchmarks/results]

Each measurement is a separate process that runs two uncompiled steps in float32; the second step includes the
optimizer state. On the CPU, the process reports how far its peak resident memory rises after a warm-up that loads the
libraries; on CUDA, it reports the maximum that the allocator reserved. A line fitted to the measurements gives a
constant (at least the size of weights, gradients and moments) and the bytes per sequence or map. `memory.py` counts
the tensors instead, which gives a lower bound.
"""

import argparse
import json
import multiprocessing
import re
from pathlib import Path

import numpy as np
import torch

from hrm_hf import AutoModelForPuzzleSolving, HrmPuzzleConfig
from hrm_hf.launch.recommend import GUIDE_ROWS, RESULTS
from hrm_hf.models.configuration_hrm_cosmo import HrmCosmoConfig
from hrm_hf.models.modeling_hrm_cosmo import HrmCosmoForRegression
from hrm_hf.trainer.optim import AdamATan2, CompositeOptimizer, SignSGD
from hrm_hf.trainer.recipes import library_versions


BATCHES = {"hrm-16": (2, 64, 128), "hrm-32": (4, 64, 128), "hrm-64": (8, 32, 64), "hrm-512": (8, 16, 24)}
COSMO_BATCHES = {"cosmo-64": (4, 8, 16), "cosmo-256": (1, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="measure only puzzle models with hidden sizes 16 and 32")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=RESULTS.parent)
    args = parser.parse_args()
    puzzles = dict(list(BATCHES.items())[: 2 if args.quick else None])
    maps = {} if args.quick else COSMO_BATCHES
    result = {"device": args.device, "dtype": "float32", "puzzle": {}, "cosmo": {}}
    for task, table in (("puzzle", puzzles), ("cosmo", maps)):
        for name, batches in table.items():
            points = {batch: _in_own_process(task, name, batch, args.device) for batch in batches}
            result[task][name] = row = fitted(points, counted(task, name))
            print(f"{name:10} " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    result["versions"] = library_versions()
    args.out.mkdir(parents=True, exist_ok=True)
    suffix = ("" if args.device == "cpu" else f"_{args.device}") + ("_quick" if args.quick else "")
    (args.out / f"{RESULTS.stem}{suffix}.json").write_text(json.dumps(result, indent=1))


def counted(task: str, name: str) -> int:
    """Return the bytes of a model's weights, gradients and two optimizer moments, all in float32."""
    with torch.device("meta"):
        if task == "cosmo":
            model = HrmCosmoForRegression(HrmCosmoConfig.from_preset(name))
        else:
            model = AutoModelForPuzzleSolving.from_config(puzzle_config(name))
    return 16 * sum(parameter.numel() for parameter in model.parameters())


def fitted(points: dict[int, int], least: int) -> dict:
    """Fit a line to peak memory by batch size: bytes per example, plus a constant of at least `least` bytes.

    The noise in peak memory is proportional to the memory. The constant therefore minimizes relative errors;
    otherwise, noise at the largest batch could rank a model below a smaller one. The slope minimizes absolute errors,
    because memory runs out at the largest batch.
    """
    batches, sizes = np.array(list(points)), np.array(list(points.values()))
    constant = max(least, round(np.polyfit(batches, sizes, 1, w=1 / sizes)[1]))
    return {
        "points": {str(batch): size for batch, size in points.items()},
        "fixed_bytes": constant,
        "bytes_per_example": round(float(batches @ (sizes - constant) / (batches @ batches))),
    }


def puzzle_config(name: str) -> HrmPuzzleConfig:
    """Return the 9x9 Sudoku config of the model in the row `name` of the hardware guide."""
    return HrmPuzzleConfig(**GUIDE_ROWS[name].config)


def two_steps(task: str, name: str, batch: int, device: str) -> None:
    """Run two training steps on random data."""
    torch.manual_seed(0)
    if task == "cosmo":
        config = HrmCosmoConfig.from_preset(name)
        model = HrmCosmoForRegression(config).to(device).train()
        size = (batch, config.num_channels, config.image_size, config.image_size)
        data = {"pixel_values": torch.randn(size), "labels": torch.tensor([[0.3, 0.8]]).repeat(batch, 1)}
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        config = puzzle_config(name)
        model = AutoModelForPuzzleSolving.from_config(config).to(device).train()
        grids = {
            part: torch.randint(1, config.vocab_size, (batch, config.seq_len)) for part in ("input_ids", "labels")
        }
        data = {**grids, "puzzle_identifiers": torch.zeros(batch, dtype=torch.long)}
        table = {id(p) for p in model.model.puzzle_emb.parameters()}
        weights = [p for p in model.parameters() if id(p) not in table]
        rows = [p for p in model.parameters() if id(p) in table]
        optimizer = CompositeOptimizer([*([SignSGD(rows)] if rows else []), AdamATan2(weights)])
    data = {key: value.to(device) for key, value in data.items()}
    carry = {}
    for _ in range(2):
        outputs = model(**data, **carry)
        carry = {"carry": outputs.carry} if task == "puzzle" else {}
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _in_own_process(task: str, name: str, batch: int, device: str) -> int:
    context = multiprocessing.get_context("spawn" if device == "cuda" else "fork")
    results = context.Queue()
    process = context.Process(target=_measure, args=(results, task, name, batch, device))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{name}, batch {batch}: exit status {process.exitcode}; it may have run out of memory")
    return results.get()


def _measure(results, task: str, name: str, batch: int, device: str) -> None:
    torch.set_num_threads(1)
    # Load kernels and libraries first, so that their memory is not counted as memory of the training step.
    two_steps("puzzle", "hrm-16", 1, device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        two_steps(task, name, batch, device)
        results.put(torch.cuda.max_memory_reserved())
        return
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak memory counter (VmHWM)
    before = _status("VmRSS")
    two_steps(task, name, batch, device)
    results.put(_status("VmHWM") - before)


def _status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


if __name__ == "__main__":
    main()
