"""Options of `hrm-hf launch`, `recommend` and `preflight`; those of `hrm-hf slurm` are `slurm.SlurmJob`."""

from dataclasses import dataclass
from typing import Literal

from ..io.options import Options, option
from ..io.usage import UsageError, parse_memory


def memory_bytes(text: str, flag: str) -> int:
    """A memory such as 24GB in bytes. Raises UsageError that names the flag."""
    try:
        return parse_memory(text)
    except ValueError as error:
        raise UsageError(str(error), flag) from error


def both(name: str) -> tuple[str, str]:
    """Both spellings of a flag: the guide's launcher has underscores, our other commands have hyphens."""
    return f"--{name}", f"--{name.replace('_', '-')}"


@dataclass(kw_only=True)
class LaunchOptions(Options):
    """A run of training/run_clm.py to plan for this machine, or with `dry_run` for GPUs that may not be here."""

    model: str = option("hrm-lm-50m, rlm-mhc-small, gpt2, ...: a recipe, preset or model type.")
    gpus: int | None = option("GPUs to use; all by default.", None, min=1)
    gpu_memory: str | None = option(
        "With --dry_run: plan for GPUs of this size, e.g. 24GB.", None, flags=both("gpu_memory")
    )
    gpu_capability: str | None = option(
        "With --dry_run: compute capability, e.g. 7.5.", None, flags=both("gpu_capability")
    )
    cpu: bool = option("Train on the CPU.", False)
    processes: int | None = option("With --cpu: processes. [default: 1]", None, min=1)
    batch_table: Literal["memory", "guide"] = option(
        "Batch per device: what fits, or the guide's table.", "memory", flags=both("batch_table")
    )
    effective_batch: int | None = option(
        "Sequences a step; the recipe's, or 16.", None, min=1, flags=both("effective_batch")
    )
    lr_scaling: Literal["sqrt", "linear", "none"] = option(
        "Growth of the learning rate with a larger batch.", "sqrt", flags=both("lr_scaling")
    )
    strategy: Literal["ddp", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"] = option(
        "ddp, or how large models are sharded.", "ddp"
    )
    launcher: Literal["accelerate", "torchrun"] = option(
        "What starts GPU processes; torchrun always starts those of the CPU.", "accelerate"
    )
    port: int | None = option(
        "Port of the processes; a free one by default.", None, min=1, max=65535, flags=both("master_port")
    )
    dry_run: bool = option("Print the plan and stop.", False, flags=both("dry_run"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cpu and (self.gpus or self.gpu_memory or self.gpu_capability):
            raise UsageError("--gpus, --gpu_memory and --gpu_capability have no effect with --cpu; use --processes")
        if self.processes and not self.cpu:
            raise UsageError(f"processes={self.processes}: needs --cpu; use --gpus for GPUs", "--processes")
        if (self.gpu_memory or self.gpu_capability) and not self.dry_run:
            raise UsageError("--gpu_memory and --gpu_capability describe GPUs that are not here; add --dry_run")
        _ = self.memory, self.capability

    @property
    def memory(self) -> int | None:
        """`gpu_memory` in bytes."""
        return memory_bytes(self.gpu_memory, "--gpu_memory") if self.gpu_memory else None

    @property
    def capability(self) -> tuple[int, int] | None:
        """`gpu_capability` as two numbers."""
        if not self.gpu_capability:
            return None
        major, _, minor = self.gpu_capability.partition(".")
        if not (major.isdigit() and (minor or "0").isdigit()) or int(major) == 0:
            raise UsageError(f"gpu_capability={self.gpu_capability!r}: expected a number like 8.0", "--gpu_capability")
        return int(major), int(minor or 0)


@dataclass(kw_only=True)
class RecommendOptions(Options):
    """A memory to find settings for."""

    memory: str = option("Memory of one device: 4GB, 4GiB, 4096MB.")
    task: Literal["puzzle", "lm", "cosmo"] = option("puzzle, lm (language models) or cosmo (maps).", "puzzle")
    cpu: bool = option("Memory of a CPU, which keeps less for itself.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.size

    @property
    def size(self) -> int:
        """`memory` in bytes."""
        return memory_bytes(self.memory, "--memory")


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
        _ = self.least_free

    @property
    def least_free(self) -> int:
        """`free` in bytes."""
        return memory_bytes(self.free, "--free")
