"""ONNX Runtime against eager torch on one thread: an ACT step and adaptive solving of a puzzle model, and cosmology.

    python benchmarks/export.py --quick
    python benchmarks/export.py --puzzle runs/sudoku_demo --data runs/data/sudoku_demo --cosmo runs/cosmology_demo

The sides take turns, so that a noisy machine slows both; medians of the CPU time of the process. Folders written by
`hrm-hf export onnx` may be given (--puzzle_onnx, --cosmo_onnx), or the models are exported first. `--quick` takes
untrained models of a few thousand weights, whose figures say nothing about speed.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import onnxruntime
import torch
from puzzle import machine

from hrm_hf import HrmCosmoConfig, HrmCosmoForRegression, TrmPuzzleConfig, TrmPuzzleForSolving
from hrm_hf.convert.onnx import export_onnx
from hrm_hf.convert.onnx_runtime import OnnxPuzzleSolver
from hrm_hf.convert.torch_export import graphs, load_exportable, random_inputs
from hrm_hf.data.puzzles import load_puzzle_dataset
from hrm_hf.recipes import library_versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--puzzle", type=Path, help="checkpoint of a puzzle model")
    parser.add_argument("--puzzle_onnx", type=Path, help="its export, if there is one")
    parser.add_argument("--data", type=Path, help="its data set, whose test split is solved; random boards without")
    parser.add_argument("--cosmo", type=Path, help="checkpoint of a cosmology model")
    parser.add_argument("--cosmo_onnx", type=Path, help="its export, if there is one")
    parser.add_argument("--batch_sizes", default="1,32")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="tiny untrained models, two turns")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.quick:
        args.turns = 2
    torch.set_num_threads(1)
    batch_sizes = [int(size) for size in args.batch_sizes.split(",")]
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        results = {}
        for name, measure in {"puzzle": puzzle_sides, "cosmo": cosmo_sides}.items():
            model, exported = prepare(name, args, Path(scratch))
            if model is None:
                continue
            result = {"architecture": model.config.model_type, "parameters": model.num_parameters()}
            for size in batch_sizes:
                for what, sides in measure(model, exported, size, args).items():
                    result[f"{what}, batch {size}"] = interleave(sides, args.turns)
            results[name] = result
    report = {
        **results,
        "trained": not args.quick,
        "turns": args.turns,
        "threads": 1,
        "machine": machine(),
        "versions": {**library_versions(), "onnxruntime": onnxruntime.__version__},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"export{'_quick' if args.quick else ''}.json").write_text(json.dumps(report, indent=1) + "\n")
    for name, result in results.items():
        for what, figures in result.items():
            if isinstance(figures, dict):
                print(f"export {name} {what:24} torch / onnxruntime {figures['torch / onnxruntime']:.2f}")


def prepare(name: str, args, scratch: Path):
    """The model, and the folder of its export; (None, None) if none was asked for."""
    folder, exported = getattr(args, name), getattr(args, f"{name}_onnx")
    if args.quick:
        folder = scratch / name
        torch.manual_seed(0)
        tiny_model(name).save_pretrained(folder)
    if folder is None:
        return None, None
    if exported is None:
        exported = scratch / f"{name}_onnx"
        export_onnx(folder, exported)
    return load_exportable(str(folder)), exported


def tiny_model(name: str):
    if name == "cosmo":
        fields = {"prior_bounds": [[0.1, 0.5], [0.6, 1.0]], "H_cycles": 1, "L_cycles": 1, "use_histogram": False}
        return HrmCosmoForRegression(HrmCosmoConfig.from_preset("test", **fields))
    fields = {"hidden_size": 32, "num_attention_heads": 2, "L_layers": 1, "H_cycles": 1, "L_cycles": 2}
    shape = {"seq_len": 16, "vocab_size": 6, "puzzle_emb_ndim": 32, "puzzle_emb_len": 1, "halt_max_steps": 4}
    return TrmPuzzleForSolving(TrmPuzzleConfig(**fields, **shape, grid_shape=[4, 4]))


def one_thread() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return options


def puzzle_sides(model, exported: Path, batch_size: int, args) -> dict:
    """One ACT step; and `solve`, where rows leave the batch when they halt."""
    solver = OnnxPuzzleSolver(exported, options=one_thread())
    step, inputs = graphs(model)["model"].module, random_inputs(model.config, batch_size)
    arrays = {name: value.numpy() for name, value in inputs.items()}
    boards = inputs["input_ids"]
    if args.data is not None:
        rows = load_puzzle_dataset(args.data, "test").with_format("torch")[:batch_size]
        boards = rows["input_ids"].long()
    return {
        "ACT step": {
            "torch": lambda: step(*inputs.values()),
            "onnxruntime": lambda: solver.session.run(None, arrays),
        },
        "solve": {"torch": lambda: model.solve(boards), "onnxruntime": lambda: solver.solve(boards.numpy())},
    }


def cosmo_sides(model, exported: Path, batch_size: int, args) -> dict:
    """All segments of halt="fixed"."""
    session = onnxruntime.InferenceSession(exported / "model.onnx", one_thread(), providers=["CPUExecutionProvider"])
    module, inputs = graphs(model)["model"].module, random_inputs(model.config, batch_size)
    arrays = {name: value.numpy() for name, value in inputs.items()}
    return {
        "forward": {"torch": lambda: module(*inputs.values()), "onnxruntime": lambda: session.run(None, arrays)},
    }


def interleave(sides: dict, turns: int) -> dict[str, float]:
    """Median milliseconds of CPU of each side, and their ratio; the first two calls do not count."""
    times = {name: [] for name in sides}
    for turn in range(turns + 2):
        for name, call in sides.items():
            start = time.process_time()
            call()
            if turn > 1:
                times[name].append((time.process_time() - start) * 1e3)
    found = {name: statistics.median(values) for name, values in times.items()}
    milliseconds = {f"{name}_ms": value for name, value in found.items()}
    return {**milliseconds, "torch / onnxruntime": found["torch"] / found["onnxruntime"]}


if __name__ == "__main__":
    main()
