"""Measure how many boards a puzzle model still solves with weights quantized to 8 and 4 bits.

    python -m benchmarks.puzzles.quantization pretrained/sudoku-9x9 DATA [--split test] [--limit 1000]
        [--steps 4 16 64] [--schemes float32 "torchao int4 weights" ...]
    python -m benchmarks.puzzles.quantization --quick

Every scheme solves the same boards with the model's own halting, at most max(--steps) steps; the report has the exact
answers after each number of steps. "lost" counts the boards that only float32 solves, "gained" those that only the
quantized model solves; "lost_at_most" is the upper end of the 95 % interval of the fraction lost. int8 and int4 have
one scale per output channel, or with "groups" one for every 32 weights; "fitted scales" minimize the error of the
weights (torchao's HQQ). "mixing in 8 bits" quantizes only the SwiGLUs to int4. nf4 has one scale per 64 weights. No
scheme needs calibration data. With --quick and no MODEL, the script uses a random model on 4x4 boards, only to check
that it works. Results: puzzle_quantization.json in --out; another model is added to it.
"""

import argparse
import json
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torchao.quantization import FqnToConfig, IntxWeightOnlyConfig, PerAxis, PerGroup
from torchao.quantization.quantize_.workflows import IntxChooseQParamsAlgorithm
from transformers import TorchAoConfig

from hrm_hf import AutoModelForPuzzleSolving
from hrm_hf.puzzles.dataset import load_puzzle_dataset
from hrm_hf.puzzles.evaluation import wilson_interval
from hrm_hf.trainer.recipes import library_versions

from ..package.quantization import LIBRARIES, SCHEMES, sizes
from ..report import machine, make_parser, write_report
from .solving import random_example


NAME = "puzzle_quantization"
FITTED = {"intx_choose_qparams_algorithm": IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY}
MIXED = {
    "_default": IntxWeightOnlyConfig(torch.int8, PerAxis(0)),
    r"re:.*\.mlp\..*": IntxWeightOnlyConfig(torch.int4, PerGroup(32), **FITTED),
}
FOUR_BITS = {
    "torchao int4, groups": IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
    "torchao int4, fitted scales": IntxWeightOnlyConfig(torch.int4, PerAxis(0), **FITTED),
    "torchao int4, groups, fitted scales": IntxWeightOnlyConfig(torch.int4, PerGroup(32), **FITTED),
    "torchao int4, groups, fitted scales, mixing in 8 bits": FqnToConfig(MIXED),
}
ALL_SCHEMES = SCHEMES | {
    name: lambda config=config: {"quantization_config": TorchAoConfig(config)} for name, config in FOUR_BITS.items()
}
DEFAULT = ("float32", "torchao int8 weights", "torchao int4 weights", *FOUR_BITS, "bnb nf4")


def main() -> None:
    parser = make_parser(__doc__, quick="a few boards; a random model if none is given")
    parser.add_argument("model", nargs="?", help="checkpoint folder")
    parser.add_argument("data", nargs="?", help="folder of a puzzle data set")
    parser.add_argument("--split", default="test")
    parser.add_argument("--limit", type=int, default=1000, help="number of boards, from the start of the split")
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--schemes", nargs="+", choices=ALL_SCHEMES, default=DEFAULT)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.quick:
        args.limit, args.steps = 10, [1, 2]
    if args.data is None and not args.quick:
        parser.error("pass MODEL and DATA, or --quick")
    args.schemes = ["float32", *(scheme for scheme in args.schemes if scheme != "float32")]
    with tempfile.TemporaryDirectory() as folder:
        if args.data is None:
            args.model = args.data = random_example(folder)
        report = measure(args)
    before = args.out / f"{NAME}.json"
    models = {} if args.quick or not before.is_file() else json.loads(before.read_text())["models"]
    name = f"{Path(args.model).name}, {args.split}"
    versions = library_versions() | {each: version(each) for each in LIBRARIES}
    write_report(args, NAME, {"models": models | {name: report}, "machine": machine(), "versions": versions})


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every scheme, print the results and return the report."""
    rows = load_puzzle_dataset(args.data, args.split).with_format("torch")[: args.limit]
    rows = {name: rows[name].long() for name in ("input_ids", "puzzle_identifiers", "labels")}
    reference, report = {}, {"boards": len(rows["labels"]), "schemes": {}}
    for scheme in args.schemes:
        model = AutoModelForPuzzleSolving.from_pretrained(args.model, **ALL_SCHEMES[scheme]()).eval()
        found, right = solved(model, rows, args.steps)
        reference = reference or right
        for step, ours in right.items():
            float32, lost = reference[step], int((reference[step] & ~ours).sum())
            found["exact"][step] |= {"lost": lost, "gained": int((ours & ~float32).sum())}
            found["exact"][step]["lost_at_most"] = wilson_interval(lost, len(ours))[1]
        report["schemes"][scheme] = sizes(model) | found
        print("quantization", scheme, found, flush=True)
    return report


@torch.no_grad()
def solved(model, rows: dict[str, torch.Tensor], steps: list[int]) -> tuple[dict[str, Any], dict[int, torch.Tensor]]:
    """Solve all boards. Return the metrics, and for each of `steps` whether each board is right by then, bool [N]."""
    start, count, parts = time.process_time(), 0, {step: [] for step in steps}
    for part in torch.arange(len(rows["labels"])).split(model.boards_per_call):
        inputs, labels = (rows[name][part] for name in ("input_ids", "labels"))
        found = model.solve(inputs, rows["puzzle_identifiers"][part], max_steps=max(steps), return_trajectory=True)
        count += int(found.steps.sum())
        for step, right in parts.items():
            right.append((found.trajectory[:step][-1] == labels).all(1))
    right = {step: torch.cat(part) for step, part in parts.items()}
    seconds, boards = time.process_time() - start, len(rows["labels"])
    exact = {
        step: {"exact": int(each.sum()), "interval": wilson_interval(int(each.sum()), boards)}
        for step, each in right.items()
    }
    return {"exact": exact, "average_steps": count / boards, "cpu_seconds": seconds}, right


if __name__ == "__main__":
    main()
