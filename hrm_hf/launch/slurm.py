"""Job scripts for Slurm, all written from one template (`slurm_job.sbatch.jinja`).

    job = SlurmJob(kind="multi_node", nodes=4, account="m1234")   resources to request
    job.text()                                                    the script, for sbatch

`srun` starts one shell per node, which replaces itself with torchrun or `accelerate launch`. Values that differ from
node to node (rank, address) are expanded in that shell, never in the batch script. A job with one process needs no
launcher. docs/hpc.md gives the reasons.

Modules and containers depend on the site; add them with `setup`. NCCL and gloo choose the network interface, unless
NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME are set.
"""

import re
import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ..io.options import Options, flag, option
from ..io.usage import UsageError
from ..resources import INSTALLED, ROOT, existing_path


TEMPLATE = Path(__file__).with_name("slurm_job.sbatch.jinja")
SCRIPT = "training/run_cosmo.py"
DEFAULT_LOG = "%x_%j.out"  # has no folder, because a job fails if the folder of its log does not exist

# NERSC: 4 GPUs per node, 32 CPUs (hardware threads) per GPU. `regular` allocates full nodes, `shared` single GPUs.
_PERLMUTTER = {"constraint": "gpu", "qos": "regular", "time": "24:00:00"}
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "generic": {
        "single_gpu": {"nodes": 1, "gpus": 1, "cpus_per_task": 12, "time": "48:00:00"},
        "multi_gpu": {"nodes": 1, "gpus": 4, "cpus_per_task": 48, "time": "48:00:00"},
        "multi_node": {"nodes": 2, "gpus": 4, "cpus_per_task": 48, "time": "48:00:00"},
        "generate_data": {"nodes": 1, "gpus": 0, "cpus_per_task": 64, "time": "04:00:00"},
    },
    "perlmutter": {
        "single_gpu": {**_PERLMUTTER, "nodes": 1, "gpus": 1, "cpus_per_task": 32, "qos": "shared"},
        "multi_gpu": {**_PERLMUTTER, "nodes": 1, "gpus": 4, "cpus_per_task": 128},
        "multi_node": {**_PERLMUTTER, "nodes": 2, "gpus": 4, "cpus_per_task": 128},
        "generate_data": {
            **_PERLMUTTER, "nodes": 1, "gpus": 0, "cpus_per_task": 128, "constraint": "cpu", "time": "04:00:00",
        },
    },
}  # fmt: skip
TITLES = {
    "single_gpu": "Training with one GPU.",
    "multi_gpu": "Training with all GPUs of one node.",
    "multi_node": "Training with the GPUs of several nodes.",
    "generate_data": "Generate cosmological maps on all CPUs of one node. Continues an interrupted run.",
}


@dataclass(kw_only=True)
class SlurmJob(Options):
    """A Slurm job, and the options of `hrm-hf slurm`.

    Fields that are None take the cluster's defaults for the job's kind. `gpus` is also the number of processes per
    node, 0 for `generate_data`. The log folder must exist when the job starts. Slurm may send the signal up to
    60 s earlier than `signal_seconds` before the end.
    """

    kind: Literal["single_gpu", "multi_gpu", "multi_node", "generate_data"] = option("Kind of job.", argument=True)
    cluster: Literal["generic", "perlmutter"] = option("Use the defaults of this cluster.", "generic")
    account: str | None = option("Project to charge.", None)
    partition: str | None = option("Partition to submit to.", None)
    constraint: str | None = option("Node feature to require, e.g. gpu.", None)
    qos: str | None = option("Quality of service, e.g. regular, interactive.", None)
    gpus: int | None = option("GPUs per node; one process runs on each.", None)
    nodes: int | None = option("Number of nodes; more than one only with multi_node.", None, min=1)
    cpus_per_task: int | None = option("CPUs per node (each node runs one task).", None, min=1)
    mem: str | None = option("Memory per node, e.g. 64G; 0 for all of it.", None)
    time: str | None = option("Time limit: 02:00:00, 1-12:00:00 or 90 (minutes).", None)
    script: str = option("Training script.", SCRIPT)
    recipe: str | None = option("Recipe for the training script.", None)
    job_name: str | None = option("Name of the job in the queue.", None)
    log_dir: str | None = option("Log folder. [default: logs/slurm with --submit, else where sbatch runs]", None)
    signal_seconds: int = option("Save and stop N seconds before the time limit.", 300, min=1, max=65535)
    launcher: Literal["torchrun", "accelerate"] = option("Program that starts the processes on each node.", "torchrun")
    accelerate_config: str | None = option("Config file for --launcher accelerate (see accelerate_configs/).", None)
    setup: list[str] = option('Shell line to run first, e.g. "module load python"; repeatable.', [])

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in DEFAULTS[self.cluster][self.kind].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.kind == "generate_data":
            for name, default in (("gpus", 0), ("recipe", None), ("script", SCRIPT), ("launcher", "torchrun")):
                if getattr(self, name) != default:
                    raise UsageError(f"{name}={getattr(self, name)}: not valid for generate_data; remove it")
        elif self.gpus < 1:
            raise UsageError(f"gpus={self.gpus}: must be at least 1; to use the CPU, submit with USE_CPU=1", "--gpus")
        if self.nodes > 1 and self.kind != "multi_node":
            raise UsageError(f"nodes={self.nodes}: {self.kind} runs on one node; use multi_node for more", "--nodes")
        if self.accelerate_config and self.launcher != "accelerate":
            message = f"accelerate_config={self.accelerate_config}: no effect with {self.launcher}"
            raise UsageError(f"{message}; use --launcher accelerate", "--accelerate-config")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, str) and re.search(r"[\s'\"\\$`]", value):
                raise UsageError(f"{item.name}={value!r}: must not contain spaces or any of ' \" \\ $ `", flag(item))

    @property
    def name(self) -> str:
        """Name of the job in the queue."""
        return self.job_name or ("cosmo_data" if self.kind == "generate_data" else f"hrm_{self.kind}")

    def text(self) -> str:
        """Return the job script."""
        from jinja2 import StrictUndefined, Template

        trains = self.kind != "generate_data"
        account = "--account=ACCOUNT " if self.cluster == "perlmutter" and not self.account else ""
        changes = "EPOCHS=200,BATCH_SIZE=128" if trains else "DATA_TYPE=des,SEED=1"
        config = f"accelerate_configs/{'multi' if self.nodes * self.gpus > 1 else 'single'}_gpu.yaml"
        recipe = f"training/recipes/cosmo_{self.kind}.yaml" if self.script == SCRIPT and trains else ""
        values = {
            "script": _place(self.script),
            "recipe": self.recipe or _place(recipe),
            "accelerate_config": self.accelerate_config or _place(config),
            "title": TITLES[self.kind],
            "example": f"sbatch {account}--export=ALL,{changes} FILE",
            "command": self.command(),
            "name": self.name,
            "directives": self._directives(),
            "trains": trains,
        }
        template = Template(
            TEMPLATE.read_text(encoding="utf-8"),
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            undefined=StrictUndefined,
        )
        return template.render({**vars(self), **values})

    def command(self) -> str:
        """Return the command line that writes this script."""
        words = ["hrm-hf", "slurm", self.kind]
        default = SlurmJob(kind=self.kind, cluster=self.cluster)
        for item in fields(SlurmJob):
            value = getattr(self, item.name)
            given = (item.name == "cluster" and value != "generic") or value != getattr(default, item.name)
            for one in (value if item.name == "setup" else [value]) if given else ():
                words += [flag(item), str(one)]
        return shlex.join(words)

    def _directives(self) -> list[str]:
        values = {
            "job-name": self.name, "account": self.account, "partition": self.partition,
            "constraint": self.constraint, "qos": self.qos, "nodes": self.nodes, "ntasks-per-node": 1,
            "cpus-per-task": self.cpus_per_task, "gpus-per-node": self.gpus or None, "mem": self.mem,
            "time": self.time, "output": f"{self.log_dir}/{DEFAULT_LOG}" if self.log_dir else DEFAULT_LOG,
            "open-mode": "append", "signal": f"USR1@{self.signal_seconds}",
        }  # fmt: skip
        return [f"{name}={value}" for name, value in values.items() if value is not None] + ["requeue"]


def committed_files() -> dict[str, str]:
    """Return the texts of the files in training/slurm, keyed by name. `make slurm` writes these files."""
    return {
        f"{'' if cluster == 'generic' else cluster + '_'}{kind}.sbatch": SlurmJob(kind=kind, cluster=cluster).text()
        for cluster, kinds in DEFAULTS.items()
        for kind in kinds
    }


def _place(name: str) -> str:
    """Return the path of a repository file for a job: in the job's checkout or in the installed package."""
    return str(existing_path(name)) if name and ROOT == INSTALLED else name


if __name__ == "__main__":
    for name, text in committed_files().items():
        Path(sys.argv[1], name).write_text(text, encoding="utf-8")
