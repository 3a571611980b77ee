"""Options of `hrm-hf launch`, `recommend` and `preflight`; for `hrm-hf slurm` see `slurm.SlurmJob`."""

import re
from dataclasses import dataclass
from typing import Literal

from ..io.options import Options, option
from ..io.usage import UsageError


def parse_memory(text: str, flag: str) -> int:
    """Convert `24GB`, `24GiB`, `24` or `800MB` to bytes. GB means GiB, as in GPU specifications.

    Raises:
        UsageError: the text is not a size, or the size is 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GM])?i?B?", text.strip(), re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise UsageError(f"{text!r}: must be a size, for example 24GB or 800MB", flag)
    return int(float(match[1]) * (2**20 if (match[2] or "G").upper() == "M" else 2**30))


def spellings(name: str) -> tuple[str, str]:
    """Return both spellings of a flag: with underscores (original launcher) and with hyphens (our commands)."""
    return f"--{name}", f"--{name.replace('_', '-')}"


@dataclass(kw_only=True)
class LaunchOptions(Options):
    """Options of `hrm-hf launch`, which plans and starts a run of training/run_clm.py."""

    model: str | None = option("Recipe, preset or model type, e.g. hrm-lm-50m, gpt2; or use --recipe FILE.", None)
    gpus: int | None = option("Number of GPUs. [default: all]", None, min=1)
    gpu_memory: str | None = option(
        "With --dry_run: memory of each hypothetical GPU, e.g. 24GB.", None, flags=spellings("gpu_memory")
    )
    cpu: bool = option("Train on the CPU.", False)
    processes: int | None = option("With --cpu: number of processes. [default: 1]", None, min=1)
    batch_table: Literal["memory", "guide"] = option(
        "memory: use the largest batch that fits; guide: use the batch size in the original project's guide.",
        "memory",
        flags=spellings("batch_table"),
    )
    strategy: Literal["ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"] = option(
        "Data parallelism without sharding (ddp), or a way to shard a large model.", "ddp"
    )
    port: int | None = option(
        "Port for the rendezvous; a free one by default.", None, min=1, max=65535, flags=spellings("master_port")
    )
    dry_run: bool = option("Print the plan and stop.", False, flags=spellings("dry_run"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cpu and (self.gpus or self.gpu_memory or self.strategy != "ddp"):
            raise UsageError("--cpu cannot be combined with --gpus, --gpu_memory or --strategy; use --processes")
        if self.processes and not self.cpu:
            raise UsageError(f"processes={self.processes}: requires --cpu; use --gpus for GPUs", "--processes")
        if self.gpu_memory and not self.dry_run:
            raise UsageError(f"gpu_memory={self.gpu_memory}: requires --dry_run", "--gpu_memory")
        self.memory = parse_memory(self.gpu_memory, "--gpu_memory") if self.gpu_memory else None


@dataclass(kw_only=True)
class RecommendOptions(Options):
    """Options of `hrm-hf recommend`."""

    memory: str = option("Memory of one device, e.g. 4GB, 4GiB or 4096MB.")
    task: Literal["puzzle", "lm", "cosmo"] = option("Task: puzzle, lm (language models) or cosmo (maps).", "puzzle")
    cpu: bool = option("Plan for a CPU, which needs less reserved memory than a GPU.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.size = parse_memory(self.memory, "--memory")


@dataclass(kw_only=True)
class PreflightOptions(Options):
    """Options of `hrm-hf preflight`, which describe the planned run."""

    processes: int = option("Number of training processes on this machine.", 2, min=1)
    port: int | None = option("Port for the rendezvous; the check fails if it is taken.", None, min=1, max=65535)
    out: str = option("Output folder of the run.", "runs")
    free: str = option("Disk space that must be free in the output folder, e.g. 20GB.", "1GB")
    require_gpu: bool = option("Fail if there is no GPU.", False)
    timeout: float = option("Time limit for the processes to connect, in seconds.", 60.0, min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.least_free = parse_memory(self.free, "--free")
