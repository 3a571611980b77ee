"""Options of `hrm-hf launch`, `recommend` and `preflight`; those of `hrm-hf slurm` are `slurm.SlurmJob`."""

import re
from dataclasses import dataclass
from typing import Literal

from ..io.options import Options, option
from ..io.usage import UsageError


def parse_memory(text: str, flag: str) -> int:
    """Return `24GB`, `24GiB`, `24` or `800MB` in bytes; GB means binary gigabytes, as GPUs are sold.

    Raises:
        UsageError: another form, or no memory at all.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GM])?i?B?", text.strip(), re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise UsageError(f"memory {text!r} is not of the form 24GB or 800MB", flag)
    return int(float(match[1]) * (2**20 if (match[2] or "G").upper() == "M" else 2**30))


def both(name: str) -> tuple[str, str]:
    """Both spellings of a flag: the guide's launcher has underscores, our other commands have hyphens."""
    return f"--{name}", f"--{name.replace('_', '-')}"


@dataclass(kw_only=True)
class LaunchOptions(Options):
    """A run of training/run_clm.py to plan for this machine, or with `dry_run` for GPUs that may not be here."""

    model: str | None = option(
        "hrm-lm-50m, rlm-mhc-small, gpt2, ...: a recipe, preset or model type; or give --recipe FILE.", None
    )
    gpus: int | None = option("GPUs to use; all by default.", None, min=1)
    gpu_memory: str | None = option(
        "With --dry_run: plan for GPUs of this size, e.g. 24GB.", None, flags=both("gpu_memory")
    )
    cpu: bool = option("Train on the CPU.", False)
    processes: int | None = option("With --cpu: processes. [default: 1]", None, min=1)
    batch_table: Literal["memory", "guide"] = option(
        "Batch per device: what fits, or the guide's table.", "memory", flags=both("batch_table")
    )
    strategy: Literal["ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"] = option(
        "ddp, or how large models are sharded.", "ddp"
    )
    port: int | None = option(
        "Port of the processes; a free one by default.", None, min=1, max=65535, flags=both("master_port")
    )
    dry_run: bool = option("Print the plan and stop.", False, flags=both("dry_run"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cpu and (self.gpus or self.gpu_memory or self.strategy != "ddp"):
            raise UsageError("--cpu cannot be combined with --gpus, --gpu_memory or --strategy; use --processes")
        if self.processes and not self.cpu:
            raise UsageError(f"processes={self.processes}: needs --cpu; use --gpus for GPUs", "--processes")
        if self.gpu_memory and not self.dry_run:
            raise UsageError("--gpu_memory describes GPUs that are not here; add --dry_run", "--gpu_memory")
        self.memory = parse_memory(self.gpu_memory, "--gpu_memory") if self.gpu_memory else None


@dataclass(kw_only=True)
class RecommendOptions(Options):
    """A memory to find settings for."""

    memory: str = option("Memory of one device: 4GB, 4GiB, 4096MB.")
    task: Literal["puzzle", "lm", "cosmo"] = option("puzzle, lm (language models) or cosmo (maps).", "puzzle")
    cpu: bool = option("Memory of a CPU, which keeps less for itself.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.size = parse_memory(self.memory, "--memory")


@dataclass(kw_only=True)
class PreflightOptions(Options):
    """A run that a machine is checked for."""

    processes: int = option("Training processes of this machine.", 2, min=1)
    port: int | None = option("Port of the rendezvous; it must be free then.", None, min=1, max=65535)
    out: str = option("Output folder of the run.", "runs")
    free: str = option("Space that must be free there, e.g. 20GB.", "1GB")
    require_gpu: bool = option("Fail without a GPU.", False)
    timeout: float = option("Seconds until processes must have met.", 60.0, min=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.least_free = parse_memory(self.free, "--free")
