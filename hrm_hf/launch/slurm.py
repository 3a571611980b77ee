"""Job scripts for Slurm, all written from one template (`slurm_job.sbatch.jinja`).

    job = SlurmJob.of("multi_node", nodes=4, account="m1234")     what to ask of the cluster
    job.text()                                                    the script, for sbatch

The launcher rule: `srun` starts one shell on every node, and this shell becomes torchrun or `accelerate launch`. What
differs from node to node (its number, its address) is expanded in that shell, never in the batch script. A job of one
process needs no launcher. docs/hpc.md gives the reasons.

Left out: modules and containers, which belong to a site (`setup` takes lines for them), and the choice of a network
interface, which NCCL and gloo make, or the user's NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..resources import INSTALLED, ROOT, existing_path


if TYPE_CHECKING:
    import jinja2


TEMPLATE = Path(__file__).with_name("slurm_job.sbatch.jinja")
LAUNCHERS = ("torchrun", "accelerate")
SCRIPT = "training/run_cosmo.py"
DEFAULT_LOG = "%x_%j.out"  # in the folder where sbatch was called: a log in a folder that is missing ends a job
MAX_SIGNAL_SECONDS = 65535  # Slurm's

# NERSC: nodes of 4 GPUs with 32 CPUs (two threads a core) to each; `regular` gives whole nodes, `shared` parts of one.
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
KINDS = tuple(DEFAULTS["generic"])
CLUSTERS = tuple(DEFAULTS)
TITLES = {
    "single_gpu": "Training with one GPU.",
    "multi_gpu": "Training with all GPUs of one node.",
    "multi_node": "Training with the GPUs of several nodes.",
    "generate_data": "Cosmological maps, made by all CPUs of one node. Goes on where a former run stopped.",
}


@dataclass(frozen=True)
class SlurmJob:
    """A job's demands on a cluster; `of` fills in what a kind of job asks by default.

    Attributes:
        gpus: GPUs of each node, which is also the number of processes there; 0 for `generate_data`.
        time: in one of Slurm's forms, such as 90 (minutes), 02:00:00 or 1-12.
        mem: memory of each node, such as 64G; the cluster's default without.
        log_dir: folder of the log, which has to exist when the job starts.
        signal_seconds: how long before its end the job is told to save (Slurm may be up to 60 s earlier).
        setup: shell lines that run first, such as `module load python`.
    """

    kind: str
    cluster: str
    nodes: int
    gpus: int
    cpus_per_task: int
    time: str
    account: str | None = None
    partition: str | None = None
    constraint: str | None = None
    qos: str | None = None
    mem: str | None = None
    script: str = SCRIPT
    recipe: str | None = None
    job_name: str | None = None
    log_dir: str | None = None
    signal_seconds: int = 300
    launcher: str = "torchrun"
    accelerate_config: str | None = None
    setup: tuple[str, ...] = ()

    @classmethod
    def of(cls, kind: str, cluster: str = "generic", **given: Any) -> "SlurmJob":
        """The job of a kind, with what is given (None is not given) in the place of its defaults."""
        _validate_one_of("cluster", cluster, CLUSTERS)
        _validate_one_of("kind", kind, KINDS)
        given = {name: value for name, value in given.items() if value is not None}
        return cls(kind=kind, cluster=cluster, **{**DEFAULTS[cluster][kind], **given})

    def __post_init__(self):
        _validate_one_of("launcher", self.launcher, LAUNCHERS)
        for name in ("nodes", "cpus_per_task"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.kind == "generate_data":
            self._validate_generation()
        elif self.gpus < 1:
            raise ValueError(f"gpus={self.gpus} must be at least 1; USE_CPU=1 at submission trains without GPUs")
        if self.nodes > 1 and self.kind != "multi_node":
            raise ValueError(f"nodes={self.nodes} belongs to the kind multi_node, {self.kind} has one node")
        if self.accelerate_config and self.launcher != "accelerate":
            raise ValueError(f"accelerate_config={self.accelerate_config} has no effect with launcher={self.launcher}")
        if self.mem is not None and not re.fullmatch(r"\d+[KMGT]?", self.mem):
            raise ValueError(f"mem={self.mem!r} is not of the form 64G (K, M, G or T; 0 for all of the node)")
        if not 0 < self.signal_seconds <= MAX_SIGNAL_SECONDS:
            raise ValueError(f"signal_seconds={self.signal_seconds} is not in 1..{MAX_SIGNAL_SECONDS}")
        if self.signal_seconds >= seconds_of(self.time):
            raise ValueError(f"signal_seconds={self.signal_seconds} is not within time={self.time}")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, str) and re.search(r"[\s'\"\\$`]", value):
                raise ValueError(f"{item.name}={value!r} has spaces or quotes, which a job script cannot take")

    def _validate_generation(self):
        if self.gpus:
            raise ValueError(f"gpus={self.gpus}: generate_data uses no GPU")
        for name, default in (("recipe", None), ("script", SCRIPT), ("launcher", LAUNCHERS[0])):
            if getattr(self, name) != default:
                raise ValueError(f"{name}={getattr(self, name)} has no effect on generate_data, which trains nothing")

    @property
    def name(self) -> str:
        """The job's name in the queue."""
        return self.job_name or ("cosmo_data" if self.kind == "generate_data" else f"hrm_{self.kind}")

    def text(self) -> str:
        """The job script."""
        example = "sbatch --account=ACCOUNT" if self.cluster == "perlmutter" and not self.account else "sbatch"
        changes = "DATA_TYPE=des,SEED=1" if self.kind == "generate_data" else "EPOCHS=200,BATCH_SIZE=128"
        trains = self.kind != "generate_data"
        config = f"accelerate_configs/{'multi' if self.nodes * self.gpus > 1 else 'single'}_gpu.yaml"
        recipe = f"training/recipes/cosmo_{self.kind}.yaml" if self.script == SCRIPT and trains else ""
        values = {
            "script": _place(self.script),
            "recipe": self.recipe or _place(recipe),
            "accelerate_config": self.accelerate_config or _place(config),
            "title": TITLES[self.kind],
            "example": f"{example} --export=ALL,{changes} FILE",
            "command": self.command(),
            "directives": self._directives(),
            "trains": trains,
        }
        return _template().render({**vars(self), **values})

    def command(self) -> str:
        """The command line that writes this script."""
        words = ["hrm-hf", "slurm", self.kind]
        usual = SlurmJob.of(self.kind, self.cluster)
        for item in fields(self):
            value = getattr(self, item.name)
            given = (item.name == "cluster" and value != "generic") or value != getattr(usual, item.name)
            for one in (value if item.name == "setup" else [value]) if given else ():
                words += [f"--{item.name.replace('_', '-')}", str(one)]
        return shlex.join(words)

    def _directives(self) -> list[str]:
        asked = {
            "job-name": self.name, "account": self.account, "partition": self.partition,
            "constraint": self.constraint, "qos": self.qos, "nodes": self.nodes, "ntasks-per-node": 1,
            "cpus-per-task": self.cpus_per_task, "gpus-per-node": self.gpus or None, "mem": self.mem,
            "time": self.time, "output": f"{self.log_dir}/{DEFAULT_LOG}" if self.log_dir else DEFAULT_LOG,
            "open-mode": "append", "signal": f"USR1@{self.signal_seconds}",
        }  # fmt: skip
        return [f"{name}={value}" for name, value in asked.items() if value is not None] + ["requeue"]


def seconds_of(time: str) -> int:
    """Seconds of a time limit as Slurm writes them: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises:
        ValueError: another form, or no time at all.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not match:
        raise ValueError(f"time={time!r} is not of the form 02:00:00, 1-12:00:00 or 90 (minutes)")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:
        units = (3600, 60, 1)
    else:
        units = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}[len(numbers)]
    seconds = int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units))
    if seconds == 0:
        raise ValueError(f"time={time!r} is no time")
    return seconds


def committed_files() -> dict[str, str]:
    """The files of training/slurm and their text; `make slurm` writes them."""
    return {
        f"{'' if cluster == 'generic' else cluster + '_'}{kind}.sbatch": SlurmJob.of(kind, cluster).text()
        for cluster in CLUSTERS
        for kind in KINDS
    }


@cache
def _template() -> "jinja2.Template":
    import jinja2

    options = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True, "autoescape": False}
    return jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), undefined=jinja2.StrictUndefined, **options)


def _place(name: str) -> str:
    """A file of the repository as a job finds it: in the checkout of sbatch, or in an installed package."""
    return str(existing_path(name)) if name and ROOT == INSTALLED else name


def _validate_one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")


if __name__ == "__main__":
    for name, text in committed_files().items():
        Path(sys.argv[1], name).write_text(text, encoding="utf-8")
