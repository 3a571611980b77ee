"""Check a machine before a long run and suggest fixes for the problems found.

    checks = run_checks(PreflightOptions(processes=2, port=29500))
    any(check.status == "fail" for check in checks)

The checks try things out where possible: processes connect and add numbers, a port is bound, a file is written and
deleted. Run them where training will run: on a compute node, inside the job.

They do not check whether installed versions are compatible (see `pip check`), or the network between machines. To
check each machine, start the command with `srun` on all nodes.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from ..io.usage import counted
from ..trainer.recipes import library_versions
from .options import PreflightOptions


TORCHRUN_PORT = 29500  # default port of torchrun and accelerate
PROBE_BYTES = 2**20
# Program that each rank of the all-reduce runs. It imports torch but not this package.
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
    """Result of a check. `status` is "ok", "note" or "fail"; `fix` suggests what to do about a note or failure."""

    name: str
    status: str
    found: str
    fix: str = ""


def run_checks(options: PreflightOptions) -> list[Check]:
    """Run all checks and return the results in the order in which they are printed.

    Without a port, a taken default port of the launchers is reported as a note. The output folder need not exist.
    """
    return [
        *(Check(name, "ok", version) for name, version in library_versions().items()),
        *gpus(options.require_gpu),
        *backends(options.processes, options.timeout),
        port_check(options.port),
        *output_folder(Path(options.out), options.least_free),
        *interfaces(),
        hostname(),
        compiler(),
        threads(options.processes),
    ]


def gpus(required: bool = False) -> list[Check]:
    """Check the GPUs that torch can use, and their free memory."""
    if not torch.cuda.is_available():
        fix = "if nvidia-smi lists a GPU, install torch's CUDA build; on Slurm request a GPU; or use --use_cpu true"
        return [Check("GPU", "fail" if required else "note", f"none (torch {torch.__version__})", fix)]
    checks = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        low = free < 0.9 * total
        fix = "another process uses this GPU: see nvidia-smi" if low else ""
        checks.append(Check(f"GPU {index}", "note" if low else "ok", text, fix))
    return checks


def backends(processes: int, timeout: float) -> list[Check]:
    """Check gloo and NCCL with an all-reduce over `processes` processes."""
    gloo = _all_reduce("gloo", processes, timeout)
    if not torch.cuda.is_available():
        return [gloo, Check("nccl", "note", "not tested without a GPU", "run this on a GPU node")]
    if not torch.distributed.is_nccl_available():
        return [gloo, Check("nccl", "fail", "not in this build of torch", "install torch's CUDA build")]
    return [gloo, _all_reduce("nccl", min(processes, torch.cuda.device_count()), timeout)]


def port_check(port: int | None) -> Check:
    """Check whether the rendezvous port can be bound."""
    number = TORCHRUN_PORT if port is None else port
    try:
        with socket.socket() as probe:
            probe.bind(("", number))
    except OSError as error:
        fix = "choose another with --master_port or --main_process_port (hrm-hf slurm derives it from the job ID)"
        return Check("port", "note" if port is None else "fail", f"{number} cannot be bound: {error.strerror}", fix)
    return Check("port", "ok", f"{number} is free")


def output_folder(out: Path, min_free: int = 0) -> list[Check]:
    """Check whether `out` is writable and has enough free space."""
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(os.urandom(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        fix = "check its permissions and free space, or choose another --out"
        return [Check("output", "fail", f"cannot write to {place}: {error.strerror}", fix)]
    usage = shutil.disk_usage(place)
    text = f"{usage.free / 2**30:,.1f} of {usage.total / 2**30:,.1f} GiB free in {place}"
    enough = usage.free >= min_free
    fix = "" if enough else f"--free requires {min_free / 2**30:,.1f} GiB; delete checkpoints or choose another --out"
    return [Check("output", "ok", f"{place} is writable"), Check("disk", "ok" if enough else "fail", text, fix)]


def interfaces() -> list[Check]:
    """Check that network interfaces are up, including those in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME.

    NCCL_SOCKET_IFNAME is a list of prefixes. A leading `=` requires exact names, and a leading `^` excludes names.
    """
    up = [name for name, state in psutil.net_if_stats().items() if state.isup]
    checks = [Check("interfaces", "ok" if up else "fail", ", ".join(up) or "none is up")]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = os.environ.get(variable)
        if not value:
            fix = f"for several machines: export {variable}=NAME, where NAME is the interface that connects them"
            checks.append(Check(variable, "note", "not set", fix))
            continue
        missing = [each for each in value.lstrip("^=").split(",") if not any(name.startswith(each) for name in up)]
        if missing and not value.startswith("^"):
            fix = f"unset {variable}, or name one of {', '.join(up)}"
            checks.append(Check(variable, "fail", f"{','.join(missing)}: does not exist or is down", fix))
        else:
            checks.append(Check(variable, "ok", value))
    return checks


def hostname() -> Check:
    """Check whether the hostname resolves to this machine, as torchrun's rendezvous expects."""
    name = socket.gethostname()
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(name, None)}
    except OSError as error:
        fix = f"add '127.0.1.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return Check("hostname", "fail", f"{name} does not resolve: {error.strerror}", fix)
    own = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    local = {address for address in found if address.startswith("127.") or address == "::1"}
    here = local | {address for address in found if address.partition("%")[0] in own}
    text = f"{name} is {', '.join(sorted(here or found))}"
    if not here:
        fix = "torchrun would wait for another machine: --rdzv_conf is_host=1 on the first node, is_host=0 elsewhere"
        return Check("hostname", "fail", f"{text}, not an address of this machine", fix)
    if here == local:
        fix = "fine for one machine; for several, set GLOO_SOCKET_IFNAME, and --rdzv_conf is_host=1 on the first"
        return Check("hostname", "note", f"{text}, which other machines cannot reach", fix)
    return Check("hostname", "ok", text)


def compiler() -> Check:
    """Check whether torch.compile would find a compiler and triton."""
    from ..trainer import validate_compiler

    fix = "install it, or set DISABLE_COMPILE=1 (pretrain.py) or --torch_compile false (other scripts)"
    if torch.cuda.is_available() and not find_spec("triton"):
        return Check("torch.compile", "note", "triton is not installed", fix)
    try:
        validate_compiler(torch.device("cpu"))
    except RuntimeError:
        return Check("torch.compile", "note", "no C++ compiler (g++)", fix)
    return Check("torch.compile", "ok", "compiler found")


def threads(processes: int) -> Check:
    """Compare the OpenMP threads of all processes with the cores they may use."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    value = os.environ.get("OMP_NUM_THREADS", "")
    fix = f"export OMP_NUM_THREADS={max(1, cores // processes)}"
    if not value.isdigit() or int(value) < 1:
        status = "fail" if value else "note" if processes > 1 else "ok"
        return Check("OMP_NUM_THREADS", status, f"{value!r} must be a positive integer" if value else "not set", fix)
    over = int(value) * processes > cores
    text = f"{value} x {processes} processes on {cores} cores"
    return Check("OMP_NUM_THREADS", "note" if over else "ok", text, fix if over else "")


def _all_reduce(backend: str, processes: int, timeout: float) -> Check:
    """Run an all-reduce over `processes` local processes, and kill those that hang."""
    from .planner import free_port

    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
    shared = {**os.environ, **shared, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, backend, str(timeout)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    deadline, statuses = time.monotonic() + timeout, [None]
    while time.monotonic() < deadline and None in statuses and not any(statuses):  # if one rank fails, the others hang
        time.sleep(0.05)
        statuses = [rank.poll() for rank in ranks]
    for rank in ranks:
        rank.kill()
    failures = [text for code, text in zip(statuses, [rank.communicate()[1] for rank in ranks]) if code]
    count = counted(processes, "process", "processes")
    if failures:
        lines = [line.strip() for line in failures[0].splitlines() if "Error" in line] or ["no message"]
        fix = f"see {backend.upper()}_SOCKET_IFNAME and hostname below; {backend.upper()}_DEBUG=INFO shows more"
        return Check(backend, "fail", f"{count}: {lines[-1][:200]}", fix)
    if None in statuses:
        fix = f"try {backend.upper()}_SOCKET_IFNAME=lo, check for a firewall, or raise --timeout on a slow machine"
        return Check(backend, "fail", f"{count} did not connect within {timeout:g} s", fix)
    return Check(backend, "ok", f"{count} completed an all-reduce")
