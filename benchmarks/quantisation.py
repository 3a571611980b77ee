"""What quantised weights cost and save: size, quality, halting and speed of each architecture, on this machine.

    python benchmarks/quantisation.py --checkpoints sudoku=runs/sudoku_demo:data/sudoku lm=runs/lm:books.txt \\
        go=runs/go_nano:data/go/test.jsonl maps=runs/cosmo:data/kappa_64
    python benchmarks/quantisation.py --quick         # tiny models without training, data made on the spot
    python benchmarks/quantisation.py --markdown      # the report as the table of docs/quantisation.md

DATA of a puzzle model is its data set (split "test"), of `hrm_lm` and `rlm_mhc` a text file whose end was held out, of
the Go coder held-out records, of a regressor its set of maps (split "test"). Every scheme sees the same rows.

Quality is the model's own measure; beside it, `agreement` with the float32 model (boards with the same answer, tokens
with the same likeliest successor) or, for regressors, `shift`: how far means move, in float32 standard deviations.
Small changes show there before they show in a score over some hundred rows. Halting is adaptive in all of these, and
fixed where time is taken, so that every scheme does the same work. Schemes take turns; times are medians of CPU
seconds, given over float32's.
"""

import argparse
import contextlib
import json
import logging
import math
import tempfile
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from lm import interleaved
from puzzle import machine
from quantisation_quick import quick_checkpoints
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
from transformers import AutoConfig, AutoFeatureExtractor, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig

from hrm_hf.data.cosmology_dataset import load_cosmology_info, read_arrays
from hrm_hf.data.go_collator import GoStreamBuilder, TooLongError
from hrm_hf.data.go_records import read_records
from hrm_hf.data.puzzles import load_puzzle_dataset
from hrm_hf.data.row_stream import PuzzleRows
from hrm_hf.evaluation.cosmology import parameter_metrics, predict_maps
from hrm_hf.evaluation.go_coder import evaluate_loss
from hrm_hf.evaluation.go_writer import Writer
from hrm_hf.evaluation.puzzles import evaluate_puzzles
from hrm_hf.recipes import library_versions


SCHEMES = {
    "float32": lambda: {"dtype": torch.float32},
    "bfloat16": lambda: {"dtype": torch.bfloat16},
    "bnb int8": lambda: {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
    "bnb nf4": lambda: {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")},
    "torchao int8 weights": lambda: {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())},
    "torchao int8 both": lambda: {"quantization_config": TorchAoConfig(Int8DynamicActivationInt8WeightConfig())},
}
LIBRARIES = ("bitsandbytes", "torchao")
CONTEXT = 256  # tokens of a row of text
STEPS = 2  # ACT steps of a timed board


def main() -> None:
    args = parse()
    if args.markdown:
        print_markdown(json.loads((args.out / "quantisation.json").read_text()))
        return
    torch.set_num_threads(args.threads)
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # a line for every product
    transformers.logging.disable_progress_bar()
    out = args.out / f"quantisation{'_quick' if args.quick else ''}.json"
    report = open_report(out, args)
    with tempfile.TemporaryDirectory() if args.quick else contextlib.nullcontext() as made:
        given = quick_checkpoints(Path(made)) if args.quick else map(named, args.checkpoints)
        for name, folder, data in given:
            report["models"][name] = measure(folder, data, args)
            print_table(name, report["models"][name])
            args.out.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(report, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", nargs="+", default=[], metavar="NAME=FOLDER:DATA")
    parser.add_argument("--puzzles", type=int, default=256)
    parser.add_argument("--text_bytes", type=int, default=30_000, help="from the end of the file")
    parser.add_argument("--records", type=int, default=32, help="of the Go coder")
    parser.add_argument("--maps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="measure nothing, print the report in --out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if not (args.quick or args.markdown or args.checkpoints):
        parser.error("give --checkpoints NAME=FOLDER:DATA ..., --quick or --markdown")
    args.device = "cpu"
    if args.quick:
        args.puzzles, args.text_bytes, args.records, args.maps, args.turns = 16, 2000, 4, 16, 2
    return args


def open_report(path: Path, args) -> dict[str, Any]:
    """The report so far, if it was made on this machine with these versions: models may be measured one by one."""
    versions = {**library_versions(), **{name: version(name) for name in LIBRARIES}}
    head = {"threads": args.threads, "turns": args.turns, "machine": machine(), "versions": versions}
    before = json.loads(path.read_text()) if path.is_file() else {}
    same = all(before.get(key) == value for key, value in head.items())
    return {**head, "models": before["models"] if same else {}}


def named(text: str) -> tuple[str, str, str]:
    """NAME, FOLDER, DATA of NAME=FOLDER:DATA."""
    name, _, rest = text.partition("=")
    folder, _, data = rest.partition(":")
    if not (name and folder and data):
        raise SystemExit(f"--checkpoints {text}: expected NAME=FOLDER:DATA")
    return name, folder, data


# ---- one model in every scheme ----


def measure(folder: str | Path, data: str | Path, args) -> dict[str, Any]:
    """Figures of every scheme, and what they were measured on."""
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
    """Bytes of weights and saved buffers in memory, and the share of weights that is quantised."""
    total, quantised = 0, 0
    for name, parameter in model.named_parameters():
        # Two 4-bit weights lie in a byte; the others keep their shape.
        owner = model.get_submodule(name.rpartition(".")[0])
        packed = type(parameter).__name__ == "Params4bit"
        count = owner.in_features * owner.out_features if packed else parameter.numel()
        total += count
        quantised += count if type(parameter) is not torch.nn.Parameter else 0
    return {"weights": total, "quantised_share": quantised / total, "weight_bytes": weight_bytes(model)}


def weight_bytes(model) -> int:
    """Of the state dict, tied tensors once; a quantised tensor is what it is made of, scales included."""
    parts = {}
    for value in model.state_dict().values():
        inner = value.__tensor_flatten__()[0] if type(value) is not torch.Tensor else ()
        for tensor in [getattr(value, name) for name in inner] or [value]:
            parts[tensor.data_ptr(), tensor.numel()] = tensor.numel() * tensor.element_size()
    return sum(parts.values())


@torch.no_grad()
def saved(model, subject) -> dict[str, Any]:
    """Size of the weights' file, and how far the logits of the model that is read from it are from this one's."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        again = subject.auto_class.from_pretrained(folder).eval()
        difference = (subject.run(again).logits.float() - subject.run(model).logits.float()).abs().max()
    return {"file_bytes": size, "reloaded_max_difference": difference.item()}


# ---- what is asked of each kind ----


@dataclass
class Puzzles:
    """Boards of a data set's test split."""

    folder: str | Path
    data: str | Path
    args: argparse.Namespace
    auto_class = transformers.AutoModelForMaskedLM
    timed = ("solve",)

    def __post_init__(self):
        split = PuzzleRows(load_puzzle_dataset(self.data, "test"))
        self.boards = split.batch(np.arange(min(self.args.puzzles, len(split))))
        self.rows = {"puzzles": len(self.boards["input_ids"])}
        self.found: dict[int, torch.Tensor] = {}

    def quality(self, model) -> dict[str, float]:
        predictions = []
        result = evaluate_puzzles(
            model,
            self.boards["input_ids"],
            self.boards["labels"],
            self.boards["puzzle_identifiers"],
            on_batch=lambda ids, puzzles, solution: predictions.append(solution.predictions),
        )
        self.found[id(model)] = torch.cat(predictions)
        wanted = ("exact_accuracy", "cell_accuracy", "average_steps", "q_halt_accuracy")
        return {name: result[name] for name in wanted}

    def answers(self, model) -> torch.Tensor:
        return self.found[id(model)]

    def compare(self, mine, theirs) -> dict[str, float]:
        return {"agreement": (mine == theirs).all(1).float().mean().item()}

    @torch.no_grad()
    def run(self, model, what: str = "solve"):
        ids, puzzles = (self.boards[name][:32].long() for name in ("input_ids", "puzzle_identifiers"))
        return model.solve(ids, puzzles, halt="fixed", max_steps=STEPS)


@dataclass
class CausalLm:
    """Rows of `CONTEXT` tokens from the end of a text."""

    folder: str | Path
    data: str | Path
    args: argparse.Namespace
    auto_class = transformers.AutoModelForCausalLM
    timed = ("forward", "decode")

    def __post_init__(self):
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.ids = self.read()
        self.inputs = self.ids[:4, :CONTEXT]

    def read(self) -> torch.Tensor:
        text = Path(self.data).read_bytes()[-self.args.text_bytes :].decode(errors="ignore")
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        ids = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
        self.rows = {"bytes": sum(len(self.tokenizer.decode(row).encode()) for row in ids[:, 1:])}
        return ids

    @torch.no_grad()
    def quality(self, model) -> dict[str, float]:
        nats, segments = 0.0, []
        for ids in self.ids.split(8):
            outputs = model(input_ids=ids, use_cache=False)
            logits = outputs.logits[:, :-1].float().flatten(0, 1)
            nats += torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum").item()
            if model.config.model_type == "hrm_lm":
                segments.append(outputs.halt_steps.float().mean(1))
        steps = {"average_steps": torch.cat(segments).mean().item()} if segments else {}
        return {"bits_per_byte": nats / math.log(2) / self.rows["bytes"], **steps}

    def answers(self, model) -> torch.Tensor:
        return self.run(model).logits.argmax(-1)

    def compare(self, mine, theirs) -> dict[str, float]:
        return {"agreement": (mine == theirs).float().mean().item()}

    @torch.no_grad()
    def run(self, model, what: str = "forward"):
        if what == "forward":
            return model(input_ids=self.inputs, use_cache=False)
        prompt = self.inputs[:1, :32]
        options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


@dataclass
class GoCoder(CausalLm):
    """Held-out records, whose code the model reads after problem and plan."""

    def read(self) -> torch.Tensor:
        config = AutoConfig.from_pretrained(self.folder)
        self.builder = GoStreamBuilder(self.tokenizer, min(768, config.max_position_embeddings))
        self.records, streams = [], []
        for record in read_records([Path(self.data)]):
            with contextlib.suppress(TooLongError):
                streams += self.builder.build(record)["input_ids"]
                self.records.append(record)
            if len(self.records) == self.args.records:
                break
        self.rows = {"records": len(self.records)}
        repeated = streams * -(-4 * CONTEXT // len(streams))
        return torch.tensor(repeated[: 4 * CONTEXT]).view(4, CONTEXT)

    def quality(self, model) -> dict[str, float]:
        writer = Writer(model, self.tokenizer, 8, self.builder.max_length, progress=False)
        result = evaluate_loss(writer, self.builder, self.records)
        return {name: result[name] for name in ("code_bits_per_byte", "raw_text_bits_per_byte")}


@dataclass
class Regressor:
    """Maps of a set's test split."""

    folder: str | Path
    data: str | Path
    args: argparse.Namespace
    auto_class = transformers.AutoModelForImageClassification
    timed = ("forward",)

    def __post_init__(self):
        self.extractor = AutoFeatureExtractor.from_pretrained(self.folder)
        self.config = AutoConfig.from_pretrained(self.folder)
        self.prior = load_cosmology_info(self.data).prior
        arrays = {name: value[: self.args.maps] for name, value in read_arrays(self.data, "test").items()}
        self.maps = arrays["map"]
        self.labels = {name: arrays[name] for name in self.config.reported_names if name in arrays}
        self.pixels = self.extractor(self.maps, return_tensors="pt")["pixel_values"]
        self.rows = {"maps": len(self.maps)}
        self.found: dict[int, Any] = {}

    @torch.no_grad()
    def quality(self, model) -> dict[str, float]:
        adaptive = self.config.model_type == "hrm_cosmo"
        halt = {"halt": "adaptive"} if adaptive else {}
        found, _, _ = predict_maps(model, self.extractor, self.maps, self.labels, num_samples=200, **halt)
        self.found[id(model)] = found
        truth = torch.tensor(np.stack([self.labels[name] for name in self.config.target_names], axis=1))
        losses = [
            (model(pixel_values=maps, labels=labels.float(), **halt).nll_loss.item(), len(maps))
            for maps, labels in zip(self.pixels.split(64), truth.split(64))
        ]
        figures = {
            f"rmse_{name}": parameter_metrics(found, name, self.prior)["rmse"]
            for name in ("omega_m", "s_8")
            if name in found.names
        }
        nll = sum(loss * count for loss, count in losses) / len(self.maps)
        return {**figures, "nll": nll, **({"average_steps": float(found.steps.mean())} if adaptive else {})}

    def answers(self, model):
        return self.found[id(model)]

    def compare(self, mine, theirs) -> dict[str, float]:
        return {"shift": float((np.abs(mine.mean - theirs.mean) / theirs.std).mean())}

    @torch.no_grad()
    def run(self, model, what: str = "forward"):
        return model(pixel_values=self.pixels[:32])


SUBJECTS = {
    "hrm_puzzle": Puzzles, "trm_puzzle": Puzzles, "hrm_lm": CausalLm, "rlm_mhc": CausalLm, "hrm_go_coder": GoCoder,
    "hrm_cosmo": Regressor, "cosmo_cnn": Regressor,
}  # fmt: skip


def print_table(name: str, model: dict[str, Any]) -> None:
    """One line a scheme."""
    print(f"quantisation, {name} ({model['model_type']}), {model['rows']}")
    for scheme, row in model["schemes"].items():
        if "refused" in row:
            print(f"  {scheme:21} refused: {row['refused']}")
            continue
        figures = {
            "quantised": row["quantised_share"],
            "memory": row["weight_bytes_over_float32"],
            "file": row["file_bytes_over_float32"],
            **row["quality"],
            **{key: row[key] for key in ("agreement", "shift") if key in row},
            **{key: value for key, value in row.items() if key.split("_")[0] in ("solve", "forward", "decode")
               and key.endswith("over_float32")},
        }  # fmt: skip
        print(f"  {scheme:21} " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))


def print_markdown(report: dict[str, Any]) -> None:
    """A row for each model and scheme."""
    print("| model | scheme | quantised | memory | file | quality | steps | against float32 | time |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, model in report["models"].items():
        for scheme, row in model["schemes"].items():
            if "refused" in row:
                print(f"| {name} | {scheme} | refused | | | | | | |")
                continue
            quality = {key: value for key, value in row["quality"].items() if key != "average_steps"}
            against = [f"{key} {row[key]:.3g}" for key in ("agreement", "shift") if key in row]
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


if __name__ == "__main__":
    main()
