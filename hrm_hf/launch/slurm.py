"""Job scripts for Slurm, all written from one template (`slurm_job.sbatch`).

    job = SlurmJob.of("multi_node", nodes=4, account="m1234")     what to ask of the cluster
    job.text()                                                    the script, for sbatch

The launcher rule: `srun` starts one shell on every node, and this shell becomes `TORCHRUN` or `ACCELERATE`. What
differs from node to node (its number, its address) is expanded in that shell, never in the batch script. A job of one
process needs no launcher. docs/hpc.md gives the reasons.

Left out: modules and containers, which belong to a site (`setup` takes lines for them), and the choice of a network
interface, which NCCL and gloo make, or the user's NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.
"""

import re
import shlex
import string
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


TEMPLATE = Path(__file__).with_name("slurm_job.sbatch")
LAUNCHERS = ("torchrun", "accelerate")
SCRIPT = "training/run_cosmo.py"
DEFAULT_LOG = "%x_%j.out"  # in the folder where sbatch was called: a log in a folder that is missing ends a job
MAX_SIGNAL_SECONDS = 65535  # Slurm's

# Both launchers read NODES, GPUS (processes per node), HEAD_ADDR, PORT, PYTHON and SLURM_NODEID.
# is_host: node 0 opens the port because it is told to. torch guesses from host names, and where a node has several
# names every node waits for another (pytorch issue 73656).
TORCHRUN = r"""
"$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc_per_node "$GPUS" \
  --rdzv_id "$PORT" --rdzv_backend c10d --rdzv_endpoint "$HEAD_ADDR:$PORT" \
  --rdzv_conf "is_host=$((SLURM_NODEID == 0))" --local_addr "$NODE_ADDR"
""".strip()
# Static rendezvous: each machine is told its rank, so that no name is guessed.
ACCELERATE = r"""
"$PYTHON" -m accelerate.commands.launch --config_file "$ACCELERATE_CONFIG" \
  --num_machines "$NODES" --machine_rank "$SLURM_NODEID" --num_processes "$((NODES * GPUS))" \
  --main_process_ip "$HEAD_ADDR" --main_process_port "$PORT" --rdzv_backend static \
  --deepspeed_multinode_launcher standard
""".strip()

TRAIN_START = r"""
  if [[ $USE_CPU != 1 ]]; then
    local found
    found=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
    ((found >= GPUS)) || fail "$(hostname): nvidia-smi shows $found GPUs and $GPUS are wanted; ask for them" \
      "(sbatch --gpus-per-node=$GPUS FILE), change GPUS, or train on the CPU: --export=ALL,USE_CPU=1"
  fi
""".strip("\n")
TRAIN_TORCHRUN = r"""
  if ((NODES * GPUS == 1)); then exec "$PYTHON" "$@"; fi
  NODE_ADDR=$(address_of "$SLURMD_NODENAME")
  exec %s "$@"
""".strip("\n")
TRAIN_ACCELERATE = r"""
  if [[ $USE_CPU == 1 ]]; then export ACCELERATE_USE_CPU=true; fi
  exec %s "$@"
""".strip("\n")

# Where generated maps are, and where the recipes cosmo_*_gpu and cosmo_multi_node look for those of lognormal.
DATA_FOLDER = "runs/data/${DATA_TYPE/#lognormal/kappa}_${SIZE:-256}"

TRAIN_DEFAULTS = r"""
SCRIPT=${SCRIPT:-%s}
RECIPE=${RECIPE:-%s}
GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-%d}} # processes on each node
USE_CPU=${USE_CPU:-0}                   # 1: they train on the CPU
""".strip()
TRAIN_OPTIONS = r"""
if [[ -z ${OUTPUT_DIR:-} && ${SCRIPT##*/} == run_*.py && " ${EXTRA_ARGS:-} $*" != *" --output_dir"* ]]; then
  case ${RESUME:-} in
    "") OUTPUT_DIR=runs/${SLURM_JOB_NAME}_$SLURM_JOB_ID ;; # the recipe's would be that of every job, and of a sweep
    last | last-whole) fail "RESUME=$RESUME needs the folder of the run that goes on: OUTPUT_DIR=runs/NAME_JOB" ;;
    *) OUTPUT_DIR=$(dirname "$RESUME") ;;
  esac
fi
option RECIPE --recipe
option OUTPUT_DIR --output_dir
option EPOCHS --num_train_epochs
option MAX_STEPS --max_steps
option BATCH_SIZE --per_device_train_batch_size
option LR --learning_rate
option NUM_WORKERS --dataloader_num_workers
option SEED --seed
case ${SCRIPT##*/} in
  run_cosmo.py)
    option TRAIN_SAMPLES --train_samples
    option VAL_SAMPLES --val_samples
    # What generate_data.sbatch wrote for the same key; nothing is generated while GPUs wait.
    if [[ -n ${DATA_TYPE:-} ]]; then arguments+=(--data_path "%s" --build_data ""); fi
    ;;
  run_puzzle.py)
    option TRAIN_SAMPLES --max_train_rows
    option VAL_SAMPLES --max_eval_rows
    unused DATA_TYPE
    ;;
  run_clm.py)
    option TRAIN_SAMPLES --max_train_samples
    option VAL_SAMPLES --max_val_samples
    unused DATA_TYPE
    ;;
  run_go_coder.py)
    option TRAIN_SAMPLES --max_train_records
    option VAL_SAMPLES --max_eval_records
    unused DATA_TYPE
    ;;
  *) unused TRAIN_SAMPLES VAL_SAMPLES DATA_TYPE ;;
esac
if [[ -n ${EPOCHS:-} && -z ${MAX_STEPS:-} ]]; then arguments+=(--max_steps -1); fi # a recipe's would win over epochs
if [[ -n ${BATCH_SIZE:-} ]] && grep -qs '^global_batch_size:' "${RECIPE:-}"; then
  fail "BATCH_SIZE=$BATCH_SIZE has no effect, because $RECIPE gives the batch of all processes;" \
    "change that: EXTRA_ARGS='--global_batch_size $((BATCH_SIZE * GPUS * SLURM_JOB_NUM_NODES))'"
fi
if [[ $USE_CPU == 1 ]]; then arguments+=(--use_cpu true); fi
read -ra extra <<<"${EXTRA_ARGS:-}" || true
arguments+=(${extra[@]+"${extra[@]}"} "$@")
# Started again: on from the newest whole checkpoint, or from the beginning if there is none yet.
if ((${SLURM_RESTART_COUNT:-0} > 0)); then RESUME=last-whole; fi
option RESUME --resume_from_checkpoint
threads=$((${SLURM_CPUS_PER_TASK:-1} / GPUS))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# What a launcher that got SIGTERM leaves its processes for saving, in seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-%d}
""".strip()

GENERATE_DEFAULTS = r"""
DATA_TYPE=${DATA_TYPE:-lognormal}
SAMPLES=$((${TRAIN_SAMPLES:-100000} + ${VAL_SAMPLES:-10000})) # training holds out the last maps of its split
TEST_SAMPLES=${TEST_SAMPLES:-10000}
SIZE=${SIZE:-256} # pixels a side
NUM_WORKERS=${NUM_WORKERS:-$SLURM_CPUS_PER_TASK}
OUTPUT_DIR=${OUTPUT_DIR:-%s}
GPUS=1    # one process on the node, which starts NUM_WORKERS
USE_CPU=1
""".strip()
GENERATE_OPTIONS = r"""
option DATA_TYPE --kind
option SAMPLES --samples
option TEST_SAMPLES --test-samples
option SIZE --size
option NUM_WORKERS --workers
option SEED --seed
option OUTPUT_DIR --out
unused RECIPE EPOCHS BATCH_SIZE LR
read -ra extra <<<"${EXTRA_ARGS:-}" || true
arguments+=(${extra[@]+"${extra[@]}"} "$@")
export OMP_NUM_THREADS=1 # the workers are the parallelism
""".strip()

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


class _Template(string.Template):
    delimiter = "%%"  # the shell needs the dollar


@dataclass(frozen=True)
class SlurmJob:
    """What is asked of a cluster; `of` fills in what a kind of job asks by default.

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
        _one_of("cluster", cluster, CLUSTERS)
        _one_of("kind", kind, KINDS)
        given = {name: value for name, value in given.items() if value is not None}
        return cls(kind=kind, cluster=cluster, **{**DEFAULTS[cluster][kind], **given})

    def __post_init__(self):
        _one_of("launcher", self.launcher, LAUNCHERS)
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
        return _Template(TEMPLATE.read_text()).substitute(
            title=TITLES[self.kind],
            example=f"{example} --export=ALL,{changes} FILE",
            command=self.command(),
            directives="\n".join(f"#SBATCH --{line}" for line in self._directives()),
            setup="\n".join(self.setup) or '# (lines of `hrm-hf slurm --setup "module load ..."` stand here)',
            **(self._generation() if self.kind == "generate_data" else self._training()),
        )

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

    def _training(self) -> dict[str, Any]:
        recipe = self.recipe or (f"training/recipes/cosmo_{self.kind}.yaml" if self.script == SCRIPT else "")
        defaults = TRAIN_DEFAULTS % (self.script, recipe, self.gpus)
        if self.launcher == "torchrun":
            start = TRAIN_TORCHRUN % _indented(TORCHRUN)
        else:
            start = TRAIN_ACCELERATE % _indented(ACCELERATE)
            processes = self.nodes * self.gpus
            config = self.accelerate_config or f"accelerate_configs/{'multi' if processes > 1 else 'single'}_gpu.yaml"
            defaults += f"\nexport ACCELERATE_CONFIG=${{ACCELERATE_CONFIG:-{config}}}"
        return {
            "defaults": defaults,
            "landmark": "$SCRIPT",
            "program": '"$SCRIPT"',
            "options": TRAIN_OPTIONS % (DATA_FOLDER, self.signal_seconds),
            "before_start": "trap '' USR1 # also for the launcher; the training processes install their own handler",
            "start": f"{TRAIN_START}\n{start}",
            "stopped_status": 85,
            "by_hand": "sbatch --export=ALL,RESUME=last-whole${OUTPUT_DIR:+,OUTPUT_DIR=$OUTPUT_DIR} FILE",
        }

    def _generation(self) -> dict[str, Any]:
        return {
            "defaults": GENERATE_DEFAULTS % DATA_FOLDER,
            "landmark": "/",
            "program": "data cosmology",
            "options": GENERATE_OPTIONS,
            "before_start": "# USR1 ends the generator here and now: what is whole on the disk is kept.",
            "start": '  exec "$PYTHON" -m hrm_hf.cli "$@"',
            "stopped_status": "138",  # 128 + SIGUSR1
            "by_hand": "the same command",
        }


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


def committed_files() -> dict[str, SlurmJob]:
    """The files of training/slurm, each with the job that it is written from."""
    return {
        f"{'' if cluster == 'generic' else cluster + '_'}{kind}.sbatch": SlurmJob.of(kind, cluster)
        for cluster in CLUSTERS
        for kind in KINDS
    }


def _indented(command: str) -> str:
    return command.replace("\n", "\n  ")


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")
