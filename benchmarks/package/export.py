"""Compare exported models with eager torch: speed for puzzles and cosmology, outputs for language models.

    python -m benchmarks.package.export --quick
    python -m benchmarks.package.export --puzzle runs/sudoku_demo --data runs/data/sudoku_demo \\
        --cosmo runs/cosmology_demo
    python -m benchmarks.package.export --texts lm=runs/lm:books.txt

Speed: an ACT step and adaptive solving of a puzzle model, and a forward of a regressor, are timed in ONNX Runtime and
torch on one thread. The two sides take turns, so a noisy machine slows both; results are medians of the process's CPU
time. The script exports the models first, unless --puzzle_onnx and --cosmo_onnx name folders written by `hrm-hf export
onnx`. `--quick` uses untrained models with a few thousand weights, so its times are not meaningful.

Outputs: the logits, argmax tokens, segments and greedy continuations of the .pt2 and the ONNX file are compared with
eager torch, on rows from the end of a text (records for the Go coder). Earlier measurements from the same machine and
versions stay in the report.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime
import torch

from hrm_hf import HrmCosmoConfig, HrmCosmoForRegression, TrmPuzzleConfig, TrmPuzzleForSolving
from hrm_hf.export.graphs import graphs, random_inputs
from hrm_hf.export.onnx import export_onnx
from hrm_hf.export.onnx_runtime import OnnxPuzzleSolver
from hrm_hf.export.torch_export import export_torch, load_exportable
from hrm_hf.puzzles.dataset import load_puzzle_dataset
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report
from .quantization_quick import text_models
from .subjects import SUBJECTS, named


PROMPT, NEW_TOKENS = 32, 32


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    report = open_report(args)
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        for name, measure in {"puzzle": puzzle_sides, "cosmo": cosmo_sides}.items():
            model, exported = prepare(name, args, Path(scratch))
            if model is not None:
                report[name] = timed(model, exported, measure, args)
                print_times(name, report[name])
                write_report(args, "export", report)
        given = [next(text_models(Path(scratch)))] if args.quick else map(named, args.texts)
        for name, folder, data in given:
            report["texts"][name] = differences(folder, data, args, Path(scratch) / name)
            print_differences(name, report["texts"][name])
            write_report(args, "export", report)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, quick="tiny untrained models, two turns")
    parser.add_argument("--puzzle", type=Path, help="puzzle checkpoint")
    parser.add_argument("--puzzle_onnx", type=Path, help="ONNX export of --puzzle; created if not given")
    parser.add_argument("--data", type=Path, help="data set with a test split to solve; random boards by default")
    parser.add_argument("--cosmo", type=Path, help="cosmology checkpoint")
    parser.add_argument("--cosmo_onnx", type=Path, help="ONNX export of --cosmo; created if not given")
    parser.add_argument("--texts", nargs="+", default=[], metavar="NAME=FOLDER:DATA", help="causal LMs to compare")
    parser.add_argument("--text_bytes", type=int, default=8000, help="evaluate on the last N bytes of a text")
    parser.add_argument("--records", type=int, default=32, help="number of records to evaluate the Go coder on")
    parser.add_argument("--batch_sizes", default="1,32")
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    if args.quick:
        args.turns, args.text_bytes = 2, 1000
    return args


def report_file(args) -> Path:
    return args.out / f"export{'_quick' if args.quick else ''}.json"


def open_report(args) -> dict[str, Any]:
    """Load the existing report if it is from the same machine and library versions; otherwise start a new one."""
    head = {
        "trained": not args.quick,
        "turns": args.turns,
        "threads": 1,
        "machine": machine(),
        "versions": {**library_versions(), "onnxruntime": onnxruntime.__version__},
    }
    before = json.loads(report_file(args).read_text()) if report_file(args).is_file() else {}
    same = all(before.get(key) == value for key, value in head.items())
    return {"texts": {}, **(before if same else {}), **head}


def timed(model, exported: Path, measure, args) -> dict[str, Any]:
    """Time torch and ONNX Runtime at every batch size; return their median CPU times in milliseconds."""
    result: dict[str, Any] = {"architecture": model.config.model_type, "parameters": model.num_parameters()}
    for size in map(int, args.batch_sizes.split(",")):
        for what, sides in measure(model, exported, size, args).items():
            result[f"{what}, batch {size}"] = interleave(sides, args.turns)
    return result


def print_times(name: str, result: dict[str, Any]) -> None:
    for what, figures in result.items():
        if isinstance(figures, dict):
            print(f"export {name} {what:24} torch / onnxruntime {figures['torch / onnxruntime']:.2f}")


def prepare(name: str, args, scratch: Path):
    """Return the model and the folder of its export, or (None, None) if no model was given."""
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
    """Return functions that run one ACT step and `solve` (which drops halted boards) in torch and ONNX Runtime."""
    solver = OnnxPuzzleSolver(exported, sess_options=one_thread())
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
    """Return functions that run a forward pass with all segments (halt="fixed") in torch and ONNX Runtime."""
    session = onnxruntime.InferenceSession(exported / "model.onnx", one_thread(), providers=["CPUExecutionProvider"])
    module, inputs = graphs(model)["model"].module, random_inputs(model.config, batch_size)
    arrays = {name: value.numpy() for name, value in inputs.items()}
    return {
        "forward": {"torch": lambda: module(*inputs.values()), "onnxruntime": lambda: session.run(None, arrays)},
    }


def interleave(sides: dict, turns: int) -> dict[str, float]:
    """Run the functions in turn; return the median CPU times (ms) and their ratio, ignoring the first two turns."""
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


# ---- language models: compare the outputs of the exported file ----


def differences(folder: str | Path, data: str | Path, args, scratch: Path) -> dict[str, Any]:
    """Compare a causal language model's torch.export and ONNX files with eager torch on held-out rows."""
    model = load_exportable(str(folder))
    subject = SUBJECTS[model.config.model_type](folder, data, args)
    outputs = graphs(model)["model"].outputs
    exports = {"torch.export": torch_export_of(folder, scratch), "onnxruntime": onnx_of(folder, scratch)}

    def eager(ids: torch.Tensor) -> list[torch.Tensor]:
        found = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return [getattr(found, name) for name in outputs]

    expected, tokens = batched(eager, subject.ids), greedy(eager, subject.ids[:4, :PROMPT])
    logits = expected[0]
    result = {"architecture": model.config.model_type, "parameters": model.num_parameters()}
    result |= {
        "tokens": logits[..., 0].numel(),
        "context": logits.shape[1],
        "largest_logit": logits.abs().max().item(),
    }
    for name, run in exports.items():
        found = batched(run, subject.ids)
        result[name] = {
            "max_difference": (found[0] - logits).abs().max().item(),
            "same_likeliest": equal(found[0].argmax(-1), logits.argmax(-1)),
            **{f"same_{output}": equal(a, b) for output, a, b in zip(outputs[1:], found[1:], expected[1:])},
            "same_greedy_tokens": equal(greedy(run, subject.ids[:4, :PROMPT]), tokens),
        }
    if "halt_steps" in outputs:
        result["average_steps"] = expected[outputs.index("halt_steps")].float().mean().item()
    return result


def torch_export_of(folder: str | Path, scratch: Path):
    """Export a checkpoint to a .pt2 file, and return a function that runs the exported program on token ids."""
    scratch.mkdir(parents=True, exist_ok=True)
    export_torch(folder, scratch / "model.pt2")
    program = torch.export.load(scratch / "model.pt2").module()
    return lambda ids: list(program(ids, torch.ones_like(ids)))


def onnx_of(folder: str | Path, scratch: Path):
    """Export a checkpoint to ONNX, and return a function that runs the exported model on token ids."""
    export_onnx(folder, scratch / "onnx")
    session = onnxruntime.InferenceSession(
        scratch / "onnx/model.onnx", one_thread(), providers=["CPUExecutionProvider"]
    )

    def run(ids: torch.Tensor) -> list[torch.Tensor]:
        given = {"input_ids": ids.numpy(), "attention_mask": torch.ones_like(ids).numpy()}
        return [torch.from_numpy(value) for value in session.run(None, given)]

    return run


def batched(run, ids: torch.Tensor) -> list[torch.Tensor]:
    """Run all rows in batches of eight and return the outputs."""
    return [torch.cat(parts) for parts in zip(*(run(rows) for rows in ids.split(8)))]


def greedy(run, ids: torch.Tensor) -> torch.Tensor:
    """Decode greedily without a cache; return the new tokens [rows, NEW_TOKENS]."""
    start = ids.shape[1]
    for _ in range(NEW_TOKENS):
        ids = torch.cat((ids, run(ids)[0][:, -1:].argmax(-1)), dim=1)
    return ids[:, start:]


def equal(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the fraction of entries that are equal in both tensors."""
    return (mine == theirs).float().mean().item()


def print_differences(name: str, result: dict[str, Any]) -> None:
    for kind in ("torch.export", "onnxruntime"):
        figures = ", ".join(f"{key} {value:.3g}" for key, value in result[kind].items())
        print(
            f"export {name} {kind}: {figures}; logits up to {result['largest_logit']:.3g}, {result['tokens']} tokens"
        )


if __name__ == "__main__":
    main()
