"""Compare a device with the CPU. `gpu_check.py` and the tests marked `gpu` run these checks.

The reference is the same checkpoint on the CPU, in float32, with eager attention, no cache and one process. The
largest difference allowed comes from a measurement: the reference is computed again from weights, maps and labels
perturbed by up to the epsilon of the tested dtype. Rounding happens at every operation, so it may change a result
`FACTOR` times as much as this perturbation of the inputs does. The limit therefore depends on how sensitive the model
and its training are.

The models are the tiny ones in tests/helpers/every.py, so every newly registered architecture is checked.
`gpu_check.py` measures speed and memory.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

import every
import torch
import transformers
from datasets import Dataset
from transformers import DynamicCache, PrinterCallback, StaticCache
from transformers.utils import is_flash_attn_2_available

from hrm_hf.cosmology.trainer import (
    CosmoTrainingArguments,
    MassMapTrainer,
    MassMapTrainingArguments,
    RegressionTrainer,
)
from hrm_hf.puzzles.trainer import PuzzleTrainer, PuzzleTrainingArguments
from hrm_hf.text.arguments import LmTrainingArguments
from hrm_hf.text.trainer import CausalLMTrainer


ROOT = Path(__file__).parents[2]
FACTOR = 8
# Training steps to compare, with one process and with several. From the fifth step on, several processes draw
# different puzzles than one process does.
STEPS, MULTI_PROCESS_STEPS = 20, 4
ROWS = 4
FLEX_LEAST = 16  # smallest head width for which torch compiles flex_attention
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CACHES = {"growing cache": DynamicCache, "static cache": StaticCache}
# No random exploration, because the GPU and the CPU generate different random numbers.
WITHOUT_CHANCE = {"halt_exploration_prob": 0.0}
TRAINERS = {
    "puzzle-solving": (PuzzleTrainer, PuzzleTrainingArguments),
    "text-generation": (CausalLMTrainer, LmTrainingArguments),
    "cosmology-regression": (RegressionTrainer, CosmoTrainingArguments),
    "mass-mapping": (MassMapTrainer, MassMapTrainingArguments),
}

Values = dict[str, torch.Tensor]


@dataclass
class Comparison:
    """Relative difference between a result and the reference, and the largest difference allowed.

    Attributes:
        of: name of the value whose difference is largest relative to the limit.
        error: why there is no result; None if there is one.
    """

    check: str
    architecture: str
    setting: str
    distance: float = float("nan")
    most: float = 0.0
    of: str = ""
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the difference is within the limit; False if the result is not finite."""
        return self.error is None and self.distance <= self.most

    def line(self) -> str:
        """Format the comparison as a row of the table."""
        found = self.error or f"{self.distance:8.1e} of at most {self.most:.1e}, {self.of}"
        return f"{'ok' if self.ok else 'FAILED':6} {self.check:9} {self.architecture:13} {self.setting:24} {found}"

    def as_dict(self) -> dict:
        """Return a dictionary for JSON, with None in place of NaN or infinity."""
        distance = self.distance if math.isfinite(self.distance) else None
        return asdict(self) | {"distance": distance, "ok": self.ok}


@dataclass
class Reference:
    """Reference values, and the same values computed from slightly perturbed weights."""

    values: Values
    noisy: list[Values]
    epsilon: float

    def only(self, name: str) -> "Reference":
        """Return a reference that compares only one value."""
        return Reference({name: self.values[name]}, self.noisy, self.epsilon)

    def compare(self, found: Values) -> dict:
        """Return the measured fields of a `Comparison`. Raise ValueError if the names of the values differ."""
        if found.keys() != self.values.keys():
            raise ValueError(f"expected the values {', '.join(self.values)}; found {', '.join(found)}")
        rows = []
        for name, value in self.values.items():
            most = FACTOR * (max(apart(other[name], value) for other in self.noisy) + self.epsilon)
            distance = apart(found[name], value)
            if most < 1 or not math.isfinite(distance):  # a limit of 1 or more would accept a result of zeros
                rows.append((distance / most if math.isfinite(distance) else math.inf, distance, most, name))
        if not rows:
            raise ValueError(f"{', '.join(self.values)}: too sensitive to the rounding of the weights to be compared")
        _, distance, most, name = max(rows)
        return {"distance": distance, "most": most, "of": name}


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the rms of the differences divided by the rms of the expected values."""
    return (found - expected).norm().item() / (expected.norm().item() or 1.0)


class Checkpoints:
    """Checkpoints of all architectures, saved when first loaded, and their cached reference values."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        torch.backends.cudnn.allow_tf32 = False  # otherwise, float32 convolutions use TF32 (10 bits of precision)
        self.outputs = cache(self._outputs)
        self.losses = cache(self._losses)

    def load(
        self, architecture: str, dtype=torch.float32, attention: str = "eager", off_by: float = 0.0, seed: int = 0
    ):
        """Load a model on the CPU; multiply each weight by a random factor between `1 - off_by` and `1 + off_by`."""
        folder, row = self.folder / architecture, every.ROWS[architecture]
        if not folder.exists():
            known = {field.name for field in fields(row.config)}
            chosen = {name: value for name, value in WITHOUT_CHANCE.items() if name in known}
            every.model(architecture, **chosen).save_pretrained(folder)
        options = {"attn_implementation": attention} if row.head._supports_sdpa else {}
        auto_class = getattr(transformers, every.AUTO_CLASSES[architecture])
        model = auto_class.from_pretrained(folder, dtype=dtype, **options).eval()
        if off_by:
            with torch.no_grad():
                blur(model.parameters(), off_by, seed)
        return model

    def _reference(self, architecture: str, dtype: torch.dtype, measure: Callable, times: int) -> Reference:
        epsilon = torch.finfo(dtype).eps
        noisy = [measure(self.load(architecture, off_by=epsilon, seed=seed), epsilon) for seed in range(times)]
        return Reference(measure(self.load(architecture), 0.0), noisy, epsilon)

    def _outputs(self, architecture: str, dtype: torch.dtype) -> Reference:
        return self._reference(architecture, dtype, lambda model, off: outputs(model, architecture, "cpu", off), 3)

    def _losses(self, architecture: str, dtype: torch.dtype, steps: int) -> Reference:
        def measure(model, off_by):
            return training_losses(model, architecture, "cpu", torch.float32, steps)

        return self._reference(architecture, dtype, measure, 2)


# ---- measurements ----


def blur(values: Iterable[torch.Tensor], off_by: float, seed: int = 0) -> None:
    """Multiply each entry of the tensors by a random factor between `1 - off_by` and `1 + off_by`, in place."""
    generator = torch.Generator().manual_seed(seed)
    for value in values:
        value.mul_(1 + off_by * (2 * torch.rand(value.shape, generator=generator) - 1))


@torch.no_grad()
def outputs(model, architecture: str, device: str, off_by: float = 0.0) -> Values:
    """Run a model on test inputs and labels; return all floating-point outputs as float32 on the CPU.

    `off_by` perturbs maps and labels, because a loss that subtracts nearly equal numbers depends on their rounding.
    """
    arguments = every.inputs(architecture) | every.targets(architecture)
    if off_by:
        blur([value for value in arguments.values() if value.is_floating_point()], off_by)
    model = model.to(device)
    if "pixel_values" in arguments:
        arguments["pixel_values"] = arguments["pixel_values"].to(model.dtype)
    found = model(**{name: value.to(device) for name, value in arguments.items()})
    return {
        name: value.cpu().float()
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


@torch.no_grad()
def cached_logits(model, architecture: str, device: str, kind: type) -> Values:
    """Feed half of a text in one call and the rest token by token, with a cache; return the logits."""
    model, ids = model.to(device), every.inputs(architecture)["input_ids"].to(device)
    length = ids.shape[1]
    cached = kind(config=model.config, **({"max_cache_len": length} if kind is StaticCache else {}))
    ends = [length // 2, *range(length // 2 + 1, length + 1)]
    pieces = [
        model(ids[:, start:end], past_key_values=cached, use_cache=True).logits for start, end in zip([0, *ends], ends)
    ]
    return {"logits": torch.cat(pieces, dim=1).cpu().float()}


def training_losses(model, architecture: str, device: str, dtype: torch.dtype, steps: int) -> Values:
    """Train on all rows in every step; return the loss of each step, averaged over processes."""
    trainer_class, arguments_class = TRAINERS[every.ROWS[architecture].pipeline]
    columns = every.inputs(architecture, ROWS) | every.targets(architecture, ROWS)
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_class(
            output_dir=folder, max_steps=steps, use_cpu=device == "cpu", bf16=dtype == torch.bfloat16,
            per_device_train_batch_size=ROWS // int(os.environ.get("WORLD_SIZE", "1")), learning_rate=1e-3,
            lr_scheduler_type="constant", train_sampling_strategy="sequential", logging_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True,
        )  # fmt: skip
        if arguments.n_gpu > 1:
            arguments._n_gpu = 1  # one GPU per process, even if the machine has more
        rows = Dataset.from_dict({name: value.tolist() for name, value in columns.items()})
        trainer = trainer_class(model.train(), arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"loss": torch.tensor(losses)}


# ---- checks, each for one architecture on one device ----


def check_outputs(checkpoints: Checkpoints, architecture: str, device: str) -> Iterator[Comparison]:
    """Load the model in each dtype and compare its outputs with the reference."""
    for name, dtype in dtypes(device):
        with attempt("outputs", architecture, name) as comparison:
            found = outputs(checkpoints.load(architecture, dtype), architecture, device)
            vars(comparison).update(checkpoints.outputs(architecture, dtype).compare(found))
        yield comparison


def check_attention(checkpoints: Checkpoints, architecture: str, device: str) -> Iterator[Comparison]:
    """Compare each available attention implementation other than eager with the CPU reference."""
    head = every.ROWS[architecture].head
    flex = head._supports_flex_attn and narrowest_head(checkpoints.load(architecture).config) >= FLEX_LEAST
    here = [("sdpa", "float32")] if head._supports_sdpa else []
    if device != "cpu":
        here += [("sdpa", "bfloat16")] if head._supports_sdpa else []
        here += [("flex_attention", "float32")] if flex else []
        flash = head._supports_flash_attn and is_flash_attn_2_available()
        here += [("flash_attention_2", "bfloat16")] if flash else []
    for attention, name in here:
        with attempt("attention", architecture, f"{attention}, {name}") as comparison:
            found = outputs(checkpoints.load(architecture, DTYPES[name], attention), architecture, device)
            vars(comparison).update(checkpoints.outputs(architecture, DTYPES[name]).compare(found))
        yield comparison


def check_cached(checkpoints: Checkpoints, architecture: str, device: str) -> Iterator[Comparison]:
    """Decode a text with each kind of cache and compare a language model's logits with the reference."""
    for setting, kind in CACHES.items() if architecture in every.CAUSAL_LMS else ():
        with attempt("cached", architecture, setting) as comparison:
            found = cached_logits(checkpoints.load(architecture, attention="sdpa"), architecture, device, kind)
            reference = checkpoints.outputs(architecture, torch.float32).only("logits")
            vars(comparison).update(reference.compare(found))
        yield comparison


def check_losses(checkpoints: Checkpoints, architecture: str, device: str, steps: int = STEPS) -> Iterator[Comparison]:
    """Compare training losses with the reference, once in float32 and once with --bf16."""
    for name, dtype in dtypes(device):
        with attempt("losses", architecture, f"{name}, {steps} steps") as comparison:
            found = training_losses(checkpoints.load(architecture), architecture, device, dtype, steps)
            vars(comparison).update(checkpoints.losses(architecture, dtype, steps).compare(found))
        yield comparison


def check_processes(checkpoints: Checkpoints, device: str, processes: int = 2) -> Iterator[Comparison]:
    """Train in several processes with DDP (on GPUs, LMs also with FSDP2) and compare the losses with the reference.

    Architectures with batch norm are skipped, because its statistics depend on the rows in each process.
    """
    divisible = [name for name in every.ARCHITECTURES if not has_batch_norms(checkpoints.load(name))]
    launchers = {"DDP": (["torch.distributed.run", "--standalone", "--nproc_per_node"], divisible)}
    if device != "cpu":
        fsdp = ["accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs" / "fsdp2.yaml")]
        launchers["FSDP2"] = ([*fsdp, "--num_processes"], every.CAUSAL_LMS)
    for setting, (launcher, architectures) in launchers.items():
        setting, found, error = f"{setting}, {processes} processes", {}, None
        with tempfile.TemporaryDirectory() as folder:
            losses = Path(folder, "losses.json")
            worker = ["-m", __spec__.name, checkpoints.folder, losses, device, *architectures]
            words = [sys.executable, "-m", *launcher, processes, *worker]
            done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
            if done.returncode:
                error = f"status {done.returncode}: {done.stderr.strip()[-2000:]}"
            else:
                found = json.loads(losses.read_text())
        for architecture in architectures:
            with attempt("processes", architecture, setting) as comparison:
                if error:
                    raise RuntimeError(error)
                reference = checkpoints.losses(architecture, torch.float32, MULTI_PROCESS_STEPS)
                vars(comparison).update(reference.compare({"loss": torch.tensor(found[architecture])}))
            yield comparison


def worker(folder: str, out: str, device: str, *architectures: str) -> None:
    """Train each architecture as one of several processes; the process of rank 0 writes the losses."""
    torch.set_num_threads(1)
    checkpoints = Checkpoints(folder)
    losses = {}
    for name in architectures:
        found = training_losses(checkpoints.load(name), name, device, torch.float32, MULTI_PROCESS_STEPS)
        losses[name] = found["loss"].tolist()
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(losses))


def dtypes(device: str) -> list[tuple[str, torch.dtype]]:
    """List the dtypes to compare, except float32 on the CPU, which is the reference itself."""
    return [(name, dtype) for name, dtype in DTYPES.items() if (device, name) != ("cpu", "float32")]


def narrowest_head(config) -> int:
    return min(getattr(config, name) for name in ("head_dim", "symbol_head_dim") if hasattr(config, name))


def has_batch_norms(model) -> bool:
    return any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules())


@contextlib.contextmanager
def attempt(check: str, architecture: str, setting: str) -> Iterator[Comparison]:
    """Yield a comparison to fill in. An exception is stored as its error, so the other comparisons still run."""
    comparison = Comparison(check, architecture, setting)
    try:
        yield comparison
    except Exception as error:  # any exception is reported, and the check fails
        comparison.error = f"{type(error).__name__}: {error}"


CHECKS = {"outputs": check_outputs, "attention": check_attention, "cached": check_cached, "losses": check_losses}


if __name__ == "__main__":
    worker(*sys.argv[1:])
