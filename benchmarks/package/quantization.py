"""Measure how quantized weights change the size, quality, halting and speed of each architecture.

    python -m benchmarks.package.quantization --checkpoints sudoku=runs/sudoku_demo:data/sudoku lm=runs/lm:books.txt \\
        go=runs/go_nano:data/go/test.jsonl maps=runs/cosmo:data/kappa_64
    python -m benchmarks.package.quantization --quick         # untrained tiny models with generated data
    python -m benchmarks.package.quantization --markdown      # print the report as the table of docs/quantization.md

For puzzle models and regressors, DATA is a data set with a test split; for `hrm_lm` and `rlm_mhc`, a text file whose
end was held out from training; for the Go coder, held-out records. Every scheme is measured on the same rows.

Quality is the model's usual metric. Three more sensitive metrics compare a scheme with float32: `agreement` (boards
with the same answer, tokens with the same argmax), the change in bits per byte of text or code with an interval over
rows, and for regressors `shift` (how far the means move, in float32 standard deviations). They show changes that are
too small for a score over a few hundred rows. Halting is adaptive (for `hrm_lm`, the report also has results with all
segments), but boards are timed with a fixed number of steps, so every scheme does the same work. Schemes take turns;
times are median CPU seconds divided by those of float32.
"""

import argparse
import contextlib
import json
import logging
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
)
from transformers import AutoConfig, BitsAndBytesConfig, TorchAoConfig

from hrm_hf.trainer.recipes import library_versions

from ..report import machine, make_parser
from ..text.speed import interleaved
from .quantization_quick import quick_checkpoints
from .subjects import SUBJECTS, named


SCHEMES = {
    "float32": lambda: {"dtype": torch.float32},
    "bfloat16": lambda: {"dtype": torch.bfloat16},
    "bnb int8": lambda: {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
    "bnb nf4": lambda: {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")},
    "torchao int8 weights": lambda: {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())},
    "torchao int4 weights": lambda: {
        "quantization_config": TorchAoConfig(IntxWeightOnlyConfig(torch.int4, PerAxis(0)))  # one scale per row
    },
    "torchao int8 both": lambda: {"quantization_config": TorchAoConfig(Int8DynamicActivationInt8WeightConfig())},
}
LIBRARIES = ("bitsandbytes", "torchao")


def main() -> None:
    args = parse()
    if args.markdown:
        print_markdown(json.loads((args.out / "quantization.json").read_text()))
        return
    torch.set_num_threads(args.threads)
    # bitsandbytes logs a line for every matrix product
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    transformers.logging.disable_progress_bar()
    out = args.out / f"quantization{'_quick' if args.quick else ''}.json"
    report = open_report(out, args)
    with tempfile.TemporaryDirectory() if args.quick else contextlib.nullcontext() as made:
        given = quick_checkpoints(Path(made)) if args.quick else map(named, args.checkpoints)
        for name, folder, data in given:
            report["models"][name] = measure(folder, data, args)
            print_table(name, report["models"][name])
            report["models"] = dict(sorted(report["models"].items(), key=place))
            args.out.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(report, indent=1))


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--checkpoints", nargs="+", default=[], metavar="NAME=FOLDER:DATA")
    parser.add_argument("--puzzles", type=int, default=256)
    parser.add_argument("--text_bytes", type=int, default=30_000, help="evaluate on the last N bytes of the text file")
    parser.add_argument("--records", type=int, default=300, help="number of records to evaluate the Go coder on")
    parser.add_argument("--maps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="print the existing report in --out as Markdown")
    args = parser.parse_args()
    if not (args.quick or args.markdown or args.checkpoints):
        parser.error("pass --checkpoints NAME=FOLDER:DATA ..., --quick or --markdown")
    args.device = "cpu"
    if args.quick:
        args.puzzles, args.text_bytes, args.records, args.maps, args.turns = 16, 2000, 4, 16, 2
    return args


def open_report(path: Path, args) -> dict[str, Any]:
    """Load the existing report if it is from the same machine and library versions; otherwise start a new one."""
    versions = {**library_versions(), **{name: version(name) for name in LIBRARIES}}
    head = {"threads": args.threads, "turns": args.turns, "machine": machine(), "versions": versions}
    before = json.loads(path.read_text()) if path.is_file() else {}
    same = all(before.get(key) == value for key, value in head.items())
    return {**head, "models": before["models"] if same else {}}


def place(item: tuple[str, dict[str, Any]]) -> int:
    """Return the sort key of a model's row: the position of its architecture in `SUBJECTS`."""
    return list(SUBJECTS).index(item[1]["model_type"])


# ---- one model in every scheme ----


def measure(folder: str | Path, data: str | Path, args) -> dict[str, Any]:
    """Load a model in every quantization scheme, and return the measurements and the number of rows measured."""
    subject = SUBJECTS[AutoConfig.from_pretrained(folder).model_type](folder, data, args)
    models, schemes = {}, {}
    for scheme, options in SCHEMES.items():
        try:
            models[scheme] = subject.auto_class.from_pretrained(folder, **options()).eval()
        except ValueError as error:
            schemes[scheme] = {"refused": str(error)}
            continue
        schemes[scheme] = sizes(models[scheme]) | {"quality": subject.quality(models[scheme])}
        schemes[scheme] |= saved(models[scheme], subject)
    reference = subject.answers(models["float32"])
    full = schemes["float32"]
    for scheme, model in models.items():
        schemes[scheme] |= subject.compare(subject.answers(model), reference)
        for size in ("weight_bytes", "file_bytes"):
            schemes[scheme][f"{size}_over_float32"] = schemes[scheme][size] / full[size]
    for what in subject.timed:
        sides = {scheme: partial(subject.run, model, what) for scheme, model in models.items()}
        times = {scheme: cpu for scheme, (_, cpu) in interleaved(sides, args).items()}
        for scheme, seconds in times.items():
            schemes[scheme] |= {f"{what}_cpu_seconds": seconds, f"{what}_over_float32": seconds / times["float32"]}
    config = models["float32"].config
    return {"model_type": config.model_type, "rows": subject.rows, "schemes": schemes}


def sizes(model) -> dict[str, Any]:
    """Return the number of weights, the fraction that is quantized, and the bytes of weights and saved buffers."""
    total, quantized = 0, 0
    for name, parameter in model.named_parameters():
        # Two 4-bit weights share a byte, so compute their number from the layer's size, not the tensor's.
        owner = model.get_submodule(name.rpartition(".")[0])
        packed = type(parameter).__name__ == "Params4bit"
        count = owner.in_features * owner.out_features if packed else parameter.numel()
        total += count
        quantized += count if type(parameter) is not torch.nn.Parameter else 0
    return {"weights": total, "quantised_share": quantized / total, "weight_bytes": weight_bytes(model)}


def weight_bytes(model) -> int:
    """Return the bytes of the state dict, counting tied tensors once; a quantized tensor includes its scales."""
    parts = {}
    for value in model.state_dict().values():
        inner = value.__tensor_flatten__()[0] if type(value) is not torch.Tensor else ()
        for tensor in [getattr(value, name) for name in inner] or [value]:
            parts[tensor.data_ptr(), tensor.numel()] = tensor.numel() * tensor.element_size()
    return sum(parts.values())


@torch.no_grad()
def saved(model, subject) -> dict[str, Any]:
    """Save and reload a model; return the size of the file and the largest change in the logits."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        again = subject.auto_class.from_pretrained(folder).eval()
        difference = (subject.run(again).logits.float() - subject.run(model).logits.float()).abs().max()
    return {"file_bytes": size, "reloaded_max_difference": difference.item()}


def print_table(name: str, model: dict[str, Any]) -> None:
    """Print one line per scheme."""
    print(f"quantization, {name} ({model['model_type']}), {model['rows']}")
    for scheme, row in model["schemes"].items():
        if "refused" in row:
            print(f"  {scheme:21} refused: {row['refused']}")
            continue
        figures = {
            "quantized": row["quantised_share"],
            "memory": row["weight_bytes_over_float32"],
            "file": row["file_bytes_over_float32"],
            **row["quality"],
            **{key: row[key] for key in ("agreement", "shift") if key in row},
            **{key: value for key, value in row.items() if key.endswith("_change")},
            **{key: value for key, value in row.items() if key.split("_")[0] in ("solve", "forward", "decode")
               and key.endswith("over_float32")},
        }  # fmt: skip
        print(f"  {scheme:21} " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))


def print_markdown(report: dict[str, Any]) -> None:
    """Print the report as a Markdown table, with a row for each model and scheme."""
    print("| model | scheme | quantized | memory | file | quality | steps | against float32 | time |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, model in report["models"].items():
        for scheme, row in model["schemes"].items():
            if "refused" in row:
                print(f"| {name} | {scheme} | refused | | | | | | |")
                continue
            quality = {key: value for key, value in row["quality"].items() if key != "average_steps"}
            against = [f"{key} {row[key]:.3g}" for key in ("agreement", "shift") if key in row]
            against += [changed(row, key) for key in row if key.endswith("_change") and scheme != "float32"]
            times = [
                f"{what} {row[f'{what}_over_float32']:.2f}"
                for what in ("solve", "forward", "decode")
                if f"{what}_over_float32" in row
            ]
            cells = [
                name, scheme, f"{row['quantised_share']:.1%}", f"{row['weight_bytes_over_float32']:.2f}",
                f"{row['file_bytes_over_float32']:.2f}",
                ", ".join(f"{key} {value:.4g}" for key, value in quality.items()),
                f"{row['quality']['average_steps']:.2f}" if "average_steps" in row["quality"] else "",
                ", ".join(against), ", ".join(times),
            ]  # fmt: skip
            print(f"| {' | '.join(cells)} |")


def changed(row: dict[str, Any], key: str) -> str:
    """Format the change in bits per byte and its confidence interval."""
    low, high = row[f"{key}_interval"]
    return f"bits {row[key]:+.4f} ({low:+.4f} to {high:+.4f})"


if __name__ == "__main__":
    main()
