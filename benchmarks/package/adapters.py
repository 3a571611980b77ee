"""Measure how merging LoRA and DoRA changes each model's outputs, and where the rounding differences come from.

    python -m benchmarks.package.adapters --checkpoints sudoku=runs/sudoku_demo:data/sudoku lm=runs/lm:books.txt
    python -m benchmarks.package.adapters --quick       # only untrained tiny models
    python -m benchmarks.package.adapters --markdown    # print the report as the table of docs/tuning.md

Every architecture is measured on an untrained tiny model and on the given trained checkpoints (DATA as in
`quantization.py`). Adapters of rank 8 get random weights, large enough to change the outputs; nothing is trained. The
outputs are logits (for puzzle models, after two ACT steps), or means and posterior parameters for regressors. Each
column is a maximum difference, and `relative` is `float32` divided by the largest output:

    float32           adapter against merged weights, both as used in practice
    float64           the same with weights, adapters, merging and all arithmetic in float64
    adapter_rounding  adapter in float32 against float64
    merged_rounding   merged weights in float32 against the adapter in float64
    weights_rounding  merged float32 weights with float64 arithmetic, against the adapter in float64
    merged_once       adapter against weights that were merged in float64 and rounded once, in float32
    next_float32      merged weights against a copy with each adapted weight moved to the next float32 number

If `float64` is about 1e-9 times `float32`, adapter and merged weights compute the same function. If `adapter_rounding`
is as large as `float32`, no merging method can do better, because the adapter's own rounding errors are as large.
"""

import argparse
import copy
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig

from hrm_hf.trainer.adapters import TuningArguments, with_adapters
from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser, write_report
from .quantization_quick import quick_checkpoints
from .subjects import SUBJECTS, Regressor, named


METHODS = {"lora": False, "dora": True}
NAMES = {"lora": "LoRA", "dora": "DoRA"}
RANK = 8
STD = 0.005  # standard deviation of the B matrices, which PEFT initializes to zero
MAGNITUDE_STD = 0.01  # standard deviation of the relative change in DoRA's magnitudes
PREFIX = "base_model.model."  # prefix that PEFT adds to module names
SETTINGS = {"puzzles": 32, "text_bytes": 2000, "records": 4, "maps": 32}
SHOWN = ("float32", "relative", "float64", "adapter_rounding", "weights_rounding", "merged_once", "next_float32")


def main() -> None:
    args = parse()
    if args.markdown:
        print_markdown(json.loads((args.out / "adapters.json").read_text()))
        return
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    report: dict[str, Any] = {"rank": RANK, "machine": machine()}
    report["versions"] = {**library_versions(), "peft": version("peft")}
    with tempfile.TemporaryDirectory() as made:
        report["tiny"] = dict(measure(*given) for given in quick_checkpoints(Path(made)))
    report["trained"] = dict(measure(*named(given)) for given in args.checkpoints)
    write_report(args, "adapters", report)


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, quick="only tiny models")
    parser.add_argument("--checkpoints", nargs="+", default=[], metavar="NAME=FOLDER:DATA")
    parser.add_argument("--markdown", action="store_true", help="print the existing report in --out as Markdown")
    args = parser.parse_args()
    if not (args.quick or args.markdown or args.checkpoints):
        parser.error("pass --checkpoints NAME=FOLDER:DATA ..., --quick or --markdown")
    if args.quick and args.checkpoints:
        parser.error("--checkpoints cannot be combined with --quick, which uses tiny models; omit one of them")
    return args


def measure(name: str, folder: str | Path, data: str | Path) -> tuple[str, dict[str, Any]]:
    """Measure LoRA and DoRA on one checkpoint; return its name and the measurements."""
    subject = SUBJECTS[AutoConfig.from_pretrained(folder).model_type](folder, data, argparse.Namespace(**SETTINGS))
    figures: dict[str, Any] = {}
    for method, use_dora in METHODS.items():
        base = subject.auto_class.from_pretrained(folder, dtype=torch.float32).eval()
        figures["model_type"] = base.config.model_type
        if base.config.model_type in ("hrm_puzzle", "trm_puzzle"):
            base.config.forward_dtype = None
        figures[method] = compare(base, subject, use_dora)
        shown = ", ".join(f"{key} {value:.1e}" for key, value in figures[method].items())
        print(f"adapters {name} {method}: {shown}", flush=True)
    return name, figures


@torch.no_grad()
def compare(base: nn.Module, subject, use_dora: bool) -> dict[str, float]:
    """Compare an adapter with its merged weights; return the maximum differences that the module docstring lists."""
    before = outputs(base, subject)
    adapter = with_adapters(base, TuningArguments(lora_rank=RANK, use_dora=use_dora)).eval()
    randomize(adapter)
    adapted = [
        name.removeprefix(PREFIX) for name, module in adapter.named_modules() if isinstance(module, BaseTunerLayer)
    ]
    adapter64 = in_float64(adapter)
    merged, merged64 = (copy.deepcopy(model).merge_and_unload() for model in (adapter, adapter64))
    once, moved = copy.deepcopy(merged), copy.deepcopy(merged)
    once.load_state_dict(merged64.state_dict())  # rounds
    for name in adapted:
        weight = moved.get_submodule(name).weight
        weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))

    ours, theirs, exact = outputs(adapter, subject), outputs(merged, subject), outputs64(adapter64, subject)
    largest = exact.abs().max().item()
    differences = {
        "float32": (ours, theirs),
        "float64": (exact, outputs64(merged64, subject)),
        "adapter_rounding": (ours, exact),
        "merged_rounding": (theirs, exact),
        "weights_rounding": (outputs64(in_float64(merged), subject), exact),
        "merged_once": (ours, outputs(once, subject)),
        "next_float32": (theirs, outputs(moved, subject)),
        "moved_by_adapter": (ours, before),
    }
    found = {name: (a - b).abs().max().item() for name, (a, b) in differences.items()}
    return {"largest_output": largest, "relative": found["float32"] / largest, **found}


def randomize(adapter: nn.Module) -> None:
    """Set random adapter weights that imitate a trained adapter."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapter.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=STD, generator=generator)
        elif "lora_magnitude" in name:
            parameter.mul_(1 + MAGNITUDE_STD * torch.randn(parameter.shape, generator=generator))


def outputs(model: nn.Module, subject) -> torch.Tensor:
    """Run a model and return all its outputs, converted to float64."""
    found = subject.run(model)
    if isinstance(subject, Regressor):
        return torch.cat([getattr(found, name).flatten() for name in ("logits", "loc", "scale_tril")]).double()
    return found.logits.double()


# ---- in float64 ----


def in_float64(model: nn.Module) -> nn.Module:
    """Return a copy with every weight and buffer in float64, including buffers that `double()` leaves unchanged."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.double())
    return model


def outputs64(model: nn.Module, subject) -> torch.Tensor:
    """Return the outputs of a model from `in_float64`, computed entirely in float64."""
    if isinstance(subject, Regressor):
        subject = copy.copy(subject)
        subject.pixels = subject.pixels.double()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            return outputs(model, subject)
    finally:
        torch.set_default_dtype(torch.float32)


class Float64(TorchFunctionMode):
    """Mode that uses float64 where model code requests float32, as in norms, softmax and rotary tables."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(wide(value) for value in args)
        return func(*args, **{name: wide(value) for name, value in (kwargs or {}).items()})


def wide(value: Any) -> Any:
    """Return torch.float64 if `value` is the dtype torch.float32, and any other value unchanged."""
    return torch.float64 if value is torch.float32 else value


def print_markdown(report: dict[str, Any]) -> None:
    """Print the report as a Markdown table, with a row for each trained model and method."""
    print("| model | | largest output | change | " + " | ".join(name.replace("_", " ") for name in SHOWN) + " |")
    print("|---" * (4 + len(SHOWN)) + "|")
    for name, figures in report["trained"].items():
        for method in METHODS:
            row = figures[method]
            cells = [f"`{name}`", NAMES[method], f"{row['largest_output']:.3g}", f"{row['moved_by_adapter']:.2g}"]
            print("| " + " | ".join(cells + [f"{row[key]:.1e}" for key in SHOWN]) + " |")


if __name__ == "__main__":
    main()
