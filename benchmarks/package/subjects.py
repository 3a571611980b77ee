"""Held-out data and metrics for each architecture, for benchmarks that compare versions of a trained model.

A subject contains held-out rows. `quality(model)` computes metrics over all rows, `compare` compares the `answers` of
two models, and `run` is the call whose logits and time are compared. This module neither trains nor changes models.
"""

import argparse
import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from transformers import AutoConfig, AutoFeatureExtractor, AutoTokenizer

from hrm_hf.cosmology.dataset.rows import MapSet, load_cosmology_info
from hrm_hf.cosmology.evaluation import parameter_metrics
from hrm_hf.cosmology.evaluation_run import predict_maps
from hrm_hf.golang.data.records import read_records
from hrm_hf.golang.data.streams import GoStreamBuilder, TooLongError
from hrm_hf.golang.evaluation.metrics import ratio_interval
from hrm_hf.golang.evaluation.writer import Writer
from hrm_hf.puzzles.dataloader import PuzzleRows
from hrm_hf.puzzles.dataset import load_puzzle_dataset
from hrm_hf.puzzles.evaluation import evaluate_puzzles


CONTEXT = 256  # tokens per row of text if the model's recipe has no block_size
STEPS = 2  # ACT steps per timed board
BATCH = 8


@dataclass
class Puzzles:
    """Evaluate a puzzle model on boards from the test split of a data set."""

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
    """Evaluate a causal language model on the end of a text, in rows as long as its training rows."""

    folder: str | Path
    data: str | Path
    args: argparse.Namespace
    auto_class = transformers.AutoModelForCausalLM
    timed = ("forward", "decode")
    unit = "bits_per_byte"

    def __post_init__(self):
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.found: dict[int, tuple[np.ndarray, torch.Tensor]] = {}
        self.read()

    def read(self) -> None:
        """Read the text; set `ids` [N, T], `sizes` (bytes to predict per row), `inputs` (for `run`) and `rows`."""
        context = trained_length(self.folder) or CONTEXT
        text = Path(self.data).read_bytes()[-self.args.text_bytes :].decode(errors="ignore")
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
        self.ids = ids[: len(ids) // context * context].view(-1, context)
        self.sizes = [len(self.tokenizer.decode(row).encode()) for row in self.ids[:, 1:]]
        self.inputs = self.ids[:4]
        self.rows = {"bytes": sum(self.sizes), "context": context}

    def quality(self, model) -> dict[str, float]:
        nats, likeliest, segments = self.losses(model)
        self.found[id(model)] = np.array(nats), torch.cat(likeliest)
        figures = {self.unit: bits(nats, self.sizes)}
        if segments:
            figures["bits_per_byte_all_segments"] = bits(self.losses(model, exit_criterion="fixed")[0], self.sizes)
            figures["average_steps"] = torch.cat(segments).mean().item()
        return figures

    @torch.no_grad()
    def losses(self, model, **thinking) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
        """Return the loss of each row in nats, the argmax tokens [N, T], and for `hrm_lm` the segments used [N, T]."""
        nats, likeliest, segments = [], [], []
        for ids in self.ids.split(BATCH):
            outputs = model(input_ids=ids, use_cache=False, **thinking)
            logits = outputs.logits[:, :-1].float().transpose(1, 2)
            nats += torch.nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none").sum(1).tolist()
            likeliest.append(outputs.logits.argmax(-1))
            if model.config.model_type == "hrm_lm":
                segments.append(outputs.halt_steps.float())
        return nats, likeliest, segments

    def answers(self, model) -> tuple[np.ndarray, torch.Tensor]:
        return self.found[id(model)]

    def compare(self, mine, theirs) -> dict[str, Any]:
        """Return the fraction of equal argmax tokens, and the change in loss with its 95 % interval over rows."""
        more = (mine[0] - theirs[0]) / math.log(2)
        return {
            "agreement": (mine[1] == theirs[1]).float().mean().item(),
            f"{self.unit}_change": float(more.sum() / sum(self.sizes)),
            f"{self.unit}_change_interval": list(ratio_interval(more, self.sizes)),
        }

    @torch.no_grad()
    def run(self, model, what: str = "forward"):
        if what == "forward":
            return model(input_ids=self.inputs, use_cache=False)
        prompt = self.inputs[:1, :32]
        options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


@dataclass
class GoCoder(CausalLm):
    """Evaluate a Go coder on held-out records, evenly spaced in the file: it predicts code from problem and plan."""

    unit = "code_bits_per_byte"

    def read(self) -> None:
        config = AutoConfig.from_pretrained(self.folder)
        self.builder = GoStreamBuilder(self.tokenizer, min(768, config.max_position_embeddings))
        built = []
        for record in read_records([Path(self.data)]):
            with contextlib.suppress(TooLongError):
                built.append(self.builder.build(record, refinement=False))
        wanted = min(self.args.records, len(built))
        built = [built[i * len(built) // wanted] for i in range(wanted)]
        self.codes = [row["input_ids"][: row["code_end"]] for row in built]
        self.starts = [row["code_start"] for row in built]
        self.sizes = [row["code_bytes"] for row in built]
        stream = [token for row in built for token in row["input_ids"]]
        repeated = stream * -(-4 * CONTEXT // len(stream))
        self.ids = self.inputs = torch.tensor(repeated[: 4 * CONTEXT]).view(4, CONTEXT)
        self.rows = {"records": wanted, "bytes": sum(self.sizes)}

    def losses(self, model, **thinking) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
        """Return the loss of each record's code in nats, and the argmax tokens of four packed rows."""
        writer = Writer(model, self.tokenizer, BATCH, self.builder.max_length, progress=False)
        return writer.nats(self.codes, self.starts), [self.run(model).logits.argmax(-1)], []


def trained_length(folder: str | Path) -> int | None:
    """Return `block_size` from a checkpoint's recipe, or None if it is not set or there is no recipe."""
    recipe = Path(folder) / "recipe.yaml"
    return yaml.safe_load(recipe.read_text()).get("block_size") if recipe.is_file() else None


def bits(nats: list[float], sizes: list[int]) -> float:
    """Convert losses in nats to bits per byte."""
    return sum(nats) / math.log(2) / sum(sizes)


@dataclass
class Regressor:
    """Evaluate a regressor on maps from the test split of a data set."""

    folder: str | Path
    data: str | Path
    args: argparse.Namespace
    auto_class = transformers.AutoModelForImageClassification
    timed = ("forward",)

    def __post_init__(self):
        self.extractor = AutoFeatureExtractor.from_pretrained(self.folder)
        self.config = AutoConfig.from_pretrained(self.folder)
        self.prior = load_cosmology_info(self.data).prior
        self.maps = MapSet.read(self.data, "test", self.args.maps)
        self.labels = self.maps.labels
        self.pixels = self.extractor(self.maps.maps, return_tensors="pt")["pixel_values"]
        self.rows = {"maps": len(self.maps)}
        self.found: dict[int, Any] = {}

    @torch.no_grad()
    def quality(self, model) -> dict[str, float]:
        adaptive = self.config.model_type == "hrm_cosmo"
        halt = {"halt": "adaptive"} if adaptive else {}
        found = predict_maps(model, self.extractor, self.maps, num_samples=200, **halt).predictions
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
    "hrm_puzzle": Puzzles, "trm_puzzle": Puzzles, "se_rrm_puzzle": Puzzles, "hrm_lm": CausalLm, "rlm_mhc": CausalLm,
    "hrm_go_coder": GoCoder, "hrm_cosmo": Regressor, "cosmo_cnn": Regressor,
}  # fmt: skip


def named(text: str) -> tuple[str, str, str]:
    """Split NAME=FOLDER:DATA into NAME, FOLDER and DATA."""
    name, _, rest = text.partition("=")
    folder, _, data = rest.partition(":")
    if not (name and folder and data):
        raise SystemExit(f"--checkpoints {text}: expected NAME=FOLDER:DATA")
    return name, folder, data
