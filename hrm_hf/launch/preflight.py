"""Checks a machine before a long run: what is missing, what is worth knowing, and how to fix it.

    checks = run_checks(PreflightOptions(processes=2, port=29500))
    any(check.status == "fail" for check in checks)

Where possible things are tried rather than asked: processes meet and add numbers, a port is bound, a file is written.
Nothing is left behind. Run it where training will run: on a compute node, inside the job.

Left out: what only several machines together show, the fabric between them; `srun` it on all nodes for each's part.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from ..io.usage import counted
from .options import PreflightOptions


PACKAGE = "hrm_hf"
TORCHRUN_PORT = 29500  # torchrun's and accelerate's own, when they are told none
PROBE_BYTES = 2**20
# One rank of the all-reduce. Its own text, so that a process imports torch and not this package.
RANK_PROGRAM = """
import datetime, sys, torch, torch.distributed as dist
backend, seconds = sys.argv[1], float(sys.argv[2])
dist.init_process_group(backend, timeout=datetime.timedelta(seconds=seconds))
device = torch.device("cuda", dist.get_rank()) if backend == "nccl" else torch.device("cpu")
number = torch.tensor([dist.get_rank() + 1.0], device=device)
dist.all_reduce(number)
n = dist.get_world_size()
assert number.item() == n * (n + 1) / 2, f"the sum of 1..{n} came out as {number.item()}"
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Check:
    """One line of the table. `status` is "ok", "note" or "fail"; `fix` says what to do about the last two."""

    name: str
    status: str
    found: str
    fix: str = ""


def run_checks(options: PreflightOptions, environ: Mapping[str, str] = os.environ) -> list[Check]:
    """Every check, in the order of the table.

    Without a port the launchers' default is checked, and only noted if it is taken. The output folder need not exist.
    """
    return [
        *versions(),
        *gpus(options.require_gpu),
        *backends(options.processes, options.timeout, environ),
        port_check(options.port),
        *output_folder(Path(options.out), options.least_free),
        *interfaces(environ),
        hostname(),
        slurm(environ),
        compiler(),
        threads(options.processes, environ),
    ]


def versions() -> list[Check]:
    """Installed packages against what this package declares that it needs."""
    from packaging.requirements import Requirement

    checks = []
    for requirement in map(Requirement, metadata.requires(PACKAGE) or []):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        fix = f"pip install '{requirement.name}{requirement.specifier}'"
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            checks.append(Check(requirement.name, "fail", "not installed", fix))
            continue
        if requirement.specifier.contains(found, prereleases=True):
            checks.append(Check(requirement.name, "ok", found))
        else:
            checks.append(Check(requirement.name, "fail", f"{found}, needed {requirement.specifier}", fix))
    return checks


def gpus(required: bool = False) -> list[Check]:
    """GPUs that torch can use, and their free memory."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    driver = _driver()
    if not count and driver:
        fix = f"torch {torch.__version__} cannot use them: install its CUDA build, or a newer driver"
        return [Check("GPU", "fail", f"the driver {driver} sees GPUs, torch none", fix)]
    if not count:
        fix = "on Slurm ask for one (-C gpu -G 1); for the CPU add --use_cpu true"
        return [Check("GPU", "fail" if required else "note", f"none ({torch.__version__})", fix)]
    checks = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        low = free < 0.9 * total
        fix = "another process uses this GPU: see nvidia-smi" if low else ""
        checks.append(Check(f"GPU {index}", "note" if low else "ok", text, fix))
    return [*checks, Check("driver", "ok", f"{driver or 'unknown'}, torch built for CUDA {torch.version.cuda}")]


def backends(processes: int, timeout: float, environ: Mapping[str, str]) -> list[Check]:
    """Tries gloo and NCCL by adding a number over `processes` processes."""
    if not torch.distributed.is_available():
        return [Check("torch.distributed", "fail", "not in this build of torch", "install torch from pytorch.org")]
    if not torch.distributed.is_gloo_available():
        return [Check("gloo", "fail", "not in this build of torch", "install torch from pytorch.org")]
    checks = [_all_reduce("gloo", processes, timeout, environ)]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count and not torch.distributed.is_nccl_available():
        checks.append(Check("nccl", "fail", "not in this build of torch", "install torch's CUDA build"))
    elif count:
        checks.append(_all_reduce("nccl", min(processes, count), timeout, environ))
    else:
        built = "built in" if torch.distributed.is_nccl_available() else "not in this build of torch"
        checks.append(Check("nccl", "note", f"{built}; without a GPU it cannot be tried", "run this on a GPU node"))
    return checks


def port_check(port: int | None) -> Check:
    """Whether the port of the rendezvous can be bound."""
    number = TORCHRUN_PORT if port is None else port
    try:
        with socket.socket() as probe:
            probe.bind(("", number))
    except OSError as error:
        fix = "take another: --master_port, --main_process_port (hrm-hf slurm takes one from the job's number)"
        return Check("port", "note" if port is None else "fail", f"{number} cannot be bound: {error.strerror}", fix)
    return Check("port", "ok", f"{number} is free")


def output_folder(out: Path, min_free: int = 0) -> list[Check]:
    """Whether files can be written there, and how many bytes and files still fit."""
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not place.is_dir():
        return [Check("output", "fail", f"{place} is a file", "choose another --out, or rename the file")]
    usage, files = shutil.disk_usage(place), os.statvfs(place)
    text = f"{usage.free / 2**30:,.1f} of {usage.total / 2**30:,.1f} GiB free in {place}"
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(os.urandom(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        fix = "free some space there, or choose another --out" if error.errno == 28 else "choose another --out"
        return [Check("output", "fail", f"cannot write into {place}: {error.strerror}", fix)]
    checks = [Check("output", "ok", f"{place} takes files")]
    enough = usage.free >= min_free
    fix = "" if enough else f"{min_free / 2**30:,.1f} GiB are asked for (--free); delete checkpoints or choose another"
    checks.append(Check("disk", "ok" if enough else "fail", text, fix))
    if files.f_files and not files.f_favail:
        checks.append(Check("files", "fail", f"no file more fits into {place}", "delete files: the quota is used up"))
    return checks


def interfaces(environ: Mapping[str, str]) -> list[Check]:
    """Network interfaces, and whether those that NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name are there and up.

    NCCL's value is a list of prefixes; `=` before it means complete names, `^` all but these.
    """
    import psutil

    up = [name for name, state in psutil.net_if_stats().items() if state.isup]
    checks = [Check("interfaces", "ok" if up else "fail", ", ".join(up) or "none is up")]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environ.get(variable)
        if not value:
            fix = f"several machines: export {variable}=NAME of the network that joins them"
            checks.append(Check(variable, "note", "not set", fix))
            continue
        named = value.lstrip("^=").split(",")
        missing = [each for each in named if not any(name.startswith(each) for name in up)]
        if missing and not value.startswith("^"):
            fix = f"unset {variable}, or name one of {', '.join(up)}"
            checks.append(Check(variable, "fail", f"{','.join(missing)} is not here, or down", fix))
        else:
            checks.append(Check(variable, "ok", value))
    return checks


def hostname() -> Check:
    """Whether this machine's own name leads to itself, which torchrun's rendezvous goes by."""
    import psutil

    name = socket.gethostname()
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(name, None)}
    except OSError as error:
        fix = f"add '127.0.1.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return Check("hostname", "fail", f"{name} does not resolve: {error.strerror}", fix)
    own = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    here = {address for address in found if address.partition("%")[0] in own or address.startswith("127.")}
    if not here:
        fix = "torchrun would wait for another machine: --rdzv_conf is_host=1 on the first node, is_host=0 elsewhere"
        return Check("hostname", "fail", f"{name} is {', '.join(sorted(found))}, none of which is here", fix)
    if all(address.startswith("127.") or address == "::1" for address in here):
        fix = "fine on one machine; on several set GLOO_SOCKET_IFNAME, and --rdzv_conf is_host=1 on the first"
        return Check("hostname", "note", f"{name} is {', '.join(sorted(here))}, which others cannot reach", fix)
    return Check("hostname", "ok", f"{name} is {', '.join(sorted(here))}")


def slurm(environ: Mapping[str, str]) -> Check:
    """The job this runs in, if it runs in one."""
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        here = shutil.which("sbatch") is not None
        fix = "train inside a job, not on a login node: hrm-hf slurm --help" if here else ""
        return Check("Slurm", "note" if here else "ok", "not inside a job" if here else "not used here", fix)
    known = ("NNODES", "NTASKS", "CPUS_PER_TASK", "GPUS_ON_NODE", "JOB_PARTITION", "RESTART_COUNT")
    found = {name: environ[f"SLURM_{name}"] for name in known if f"SLURM_{name}" in environ}
    text = f"job {job}: " + ", ".join(f"{name.lower()} {value}" for name, value in found.items())
    if int(found.get("NNODES", "1")) > 1 and shutil.which("scontrol") is None:
        fix = "the address of the first node comes from `scontrol show hostnames`: put Slurm's programs on PATH"
        return Check("Slurm", "fail", f"{text}; scontrol is not here", fix)
    return Check("Slurm", "ok", text)


def compiler() -> Check:
    """Whether torch.compile would find what it needs."""
    from ..trainer import validate_compiler

    fix = "DISABLE_COMPILE=1 (pretrain.py), --torch_compile false (others), or install it"
    if torch.cuda.is_available() and not find_spec("triton"):
        return Check("torch.compile", "note", "lacks triton", fix)
    try:
        validate_compiler(torch.device("cpu"))
    except RuntimeError:
        return Check("torch.compile", "note", "lacks a C++ compiler (g++)", fix)
    return Check("torch.compile", "ok", "has a compiler")


def threads(processes: int, environ: Mapping[str, str]) -> Check:
    """OMP_NUM_THREADS of all processes against the cores they may use."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    value, share = environ.get("OMP_NUM_THREADS"), max(1, cores // processes)
    fix = f"export OMP_NUM_THREADS={share}"
    if value is None:
        text = f"not set: each of {processes} processes takes {cores} cores (torchrun: 1)"
        return Check("OMP_NUM_THREADS", "note" if processes > 1 else "ok", text, fix if processes > 1 else "")
    if not value.isdigit() or int(value) < 1:
        return Check("OMP_NUM_THREADS", "fail", f"{value!r} is no number of threads", fix)
    text = f"{value} x {processes} processes on {cores} cores"
    over = int(value) * processes > cores
    return Check("OMP_NUM_THREADS", "note" if over else "ok", text, fix if over else "")


def _driver() -> str | None:
    """Version of the GPUs' driver, None if nvidia-smi finds no GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return None  # a driver that hangs is found by the all-reduce
    return (answer.stdout.split() or [None])[0] if answer.returncode == 0 else None


def _all_reduce(backend: str, processes: int, timeout: float, environ: Mapping[str, str]) -> Check:
    """`processes` processes of this machine add up their numbers; each ends by itself or is killed."""
    from .planner import free_port

    shared = {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    command = [sys.executable, "-c", RANK_PROGRAM, backend, str(timeout)]
    ranks = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):  # one gave up; the others would wait for it
            break
        time.sleep(0.05)
    failed = [rank for rank in ranks if rank.poll()]
    late = [rank for rank in ranks if rank.poll() is None]
    for rank in late:
        rank.kill()
    said = [rank.communicate()[1] for rank in ranks]
    count = counted(processes, "process", "processes")
    if late and not failed:
        fix = f"try {backend.upper()}_SOCKET_IFNAME=lo, and look for a firewall; on a slow machine --timeout"
        return Check(backend, "fail", f"{count} did not meet in {timeout:g} s", fix)
    if failed:
        text = said[ranks.index(failed[0])]
        lines = [line.strip() for line in text.splitlines() if "Error" in line] or ["no message"]
        fix = f"see {backend.upper()}_SOCKET_IFNAME and hostname below; {backend.upper()}_DEBUG=INFO says more"
        return Check(backend, "fail", f"{count}: {lines[-1][:200]}", fix)
    return Check(backend, "ok", f"{count} added their numbers")
