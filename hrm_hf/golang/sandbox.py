"""Runs programs that nobody has read, in bubblewrap: no network, no files of the user, limits on everything.

A program here sees an empty read-only root with what it is given, a fresh /proc and /dev, and a /tmp of limited size;
all namespaces are its own, it has no capabilities and an empty environment. Limits: wall time, CPU time, memory
(RLIMIT_DATA, which unlike RLIMIT_AS does not count what Go only reserves), file size and the size of /tmp, and output.
A program with `processes=False` can start threads but no process (seccomp). When bubblewrap ends, or this process
does, everything inside ends.

There is no fall-back: where no sandbox can be made, nothing is run. Left out: limits on the number of threads beyond
what CPU and wall time leave, and any defense against faults of the kernel.
"""

import os
import platform
import re
import selectors
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache


MIB = 1 << 20
INSTALL_LINE = "`apt-get install bubblewrap util-linux` (dnf and pacman have the same names)"
MAX_OUTPUT = 64 * MIB  # a program that writes more is ended

# Numbers of system calls; each starts a process, a namespace, or memory that RLIMIT_DATA does not count.
_DENIED = {
    "x86_64": {
        "fork": 57, "vfork": 58, "unshare": 272, "setns": 308, "memfd_create": 319, "shmget": 29, "ptrace": 101,
        "bpf": 321, "io_uring_setup": 425, "userfaultfd": 323, "perf_event_open": 298, "keyctl": 250, "add_key": 248,
    },
    "aarch64": {
        "unshare": 97, "setns": 268, "memfd_create": 279, "shmget": 194, "ptrace": 117, "bpf": 280,
        "io_uring_setup": 425, "userfaultfd": 282, "perf_event_open": 241, "keyctl": 219, "add_key": 217,
    },
}  # fmt: skip
_ARCHITECTURE = {"x86_64": (0xC000003E, 56, 9), "aarch64": (0xC00000B7, 220, 222)}  # audit number, clone, mmap
_CLONE3 = 435
_CLONE_THREAD, _MAP_SHARED_ANONYMOUS = 0x10000, 0x21


class SandboxError(RuntimeError):
    """No sandbox can be made here, so nothing was run."""


@dataclass(frozen=True)
class Limits:
    """What a program in the sandbox may use.

    Attributes:
        seconds: wall time; CPU time is limited to four times as much.
        memory: bytes of data of one process.
        disk: bytes in /tmp, and of one file.
    """

    seconds: float = 10.0
    memory: int = 1024 * MIB
    disk: int = 64 * MIB

    def __post_init__(self):
        for name in ("seconds", "memory", "disk"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}; expected more than 0")


@dataclass(frozen=True)
class Run:
    """How a program in the sandbox ended.

    Attributes:
        status: exit status; minus the number of a signal.
        output: standard output and error, the middle cut out if it is long.
        stopped: "time" or "output" if we ended it, else "".
        seconds: wall time.
    """

    status: int
    output: str
    stopped: str
    seconds: float


def run_sandboxed(
    command: Sequence[str],
    limits: Limits,
    *,
    read_only: Sequence[tuple[str, str]] = (),
    writable: Sequence[tuple[str, str]] = (),
    environment: dict[str, str] | None = None,
    directory: str = "/tmp",
    processes: bool = False,
    clip: int = 16384,
) -> Run:
    """Runs a program in a sandbox and waits for its end.

    Args:
        command: the program, as the sandbox names it, and its arguments.
        read_only: (path here, path in the sandbox) to be seen but not changed.
        writable: the same, to be changed too.
        environment: all of its variables.
        directory: where it starts.
        processes: it may start processes.
        clip: characters of output to keep.

    Raises:
        SandboxError: no sandbox can be made.
    """
    check_sandbox()
    return _run(_prefix(limits, read_only, writable, environment or {}, directory), command, limits, processes, clip)


@cache
def check_sandbox() -> None:
    """Makes a sandbox and runs nothing of importance in it.

    Raises:
        SandboxError: it cannot be made; the message says why and what to do.
    """
    refusal = "refusing to run code outside of a sandbox: "
    if platform.machine() not in _ARCHITECTURE or not hasattr(os, "fork"):
        raise SandboxError(f"{refusal}it is made for Linux on {' and '.join(_ARCHITECTURE)}, not {platform.machine()}")
    for program in ("bwrap", "prlimit"):
        if shutil.which(program) is None:
            raise SandboxError(f"{refusal}{program} (bubblewrap) is not installed: {INSTALL_LINE}")
    system = [(path, path) for path in ("/usr", "/bin", "/lib", "/lib64") if os.path.exists(path)]
    true = shutil.which("true") or "/bin/true"
    run = _run(_prefix(Limits(), system, (), {}, "/tmp"), [true], Limits(), False, 2000)
    if run.status != 0:
        raise SandboxError(
            f"{refusal}bubblewrap does not work here ({run.output.strip() or run.stopped or run.status}). It needs "
            "version 0.7 or newer and user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container, a runtime that permits them)"
        )


def _prefix(limits: Limits, read_only, writable, environment: dict[str, str], directory: str) -> list[str]:
    """The command line up to the program, without the filter."""
    cpu = int(limits.seconds * 4) + 1
    command = [
        "prlimit", f"--fsize={limits.disk}", f"--cpu={cpu}", f"--data={limits.memory}", "--core=0", "--nofile=512",
        "--",
        "bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL",
        "--hostname", "sandbox", "--die-with-parent", "--new-session", "--clearenv",
        "--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(limits.disk), "--tmpfs", "/tmp",
    ]  # fmt: skip
    for option, pairs in (("--ro-bind", read_only), ("--bind", writable)):
        for outside, inside in pairs:
            command += [option, outside, inside]
    for name, value in environment.items():
        command += ["--setenv", name, value]
    # The root and /dev are tmpfs without a limit of size.
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", directory]


def _run(prefix: list[str], command: Sequence[str], limits: Limits, processes: bool, clip: int) -> Run:
    filter_end, descriptors = None, ()
    if not processes:
        filter_end, writing = os.pipe()
        os.write(writing, seccomp_filter(platform.machine()))
        os.close(writing)
        prefix, descriptors = [*prefix, "--seccomp", str(filter_end)], (filter_end,)
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            [*prefix, "--", *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")}, pass_fds=descriptors, start_new_session=True,
        )  # fmt: skip
    finally:
        if filter_end is not None:
            os.close(filter_end)
    try:
        output, stopped = _watch(process, start + limits.seconds, clip)
    finally:
        if process.returncode is None:  # we were interrupted
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Run(process.returncode, output, stopped, time.monotonic() - start)


def _watch(process: subprocess.Popen, deadline: float, clip: int) -> tuple[str, str]:
    """Reads to the end; ends the sandbox at the deadline or if it writes too much."""
    head, tail, total, stopped = bytearray(), bytearray(), 0, ""
    with process.stdout, selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while not stopped:
            if not ready.select(max(0.0, deadline - time.monotonic())) or time.monotonic() > deadline:
                stopped = "time"
                break
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                break
            total += len(data)
            room = max(0, clip // 2 - len(head))
            head += data[:room]
            tail = (tail + data[room:])[-(clip // 2) :]
            stopped = "output" if total > MAX_OUTPUT else ""
        try:  # it may have closed its output and go on
            process.wait(0 if stopped else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stopped = stopped or "time"
            os.killpg(process.pid, signal.SIGKILL)  # bwrap; everything inside dies with it
            process.wait()
    cut = f"\n[... {total - clip} bytes cut ...]\n" if total > clip else ""
    return re.sub("\0", "", head.decode("utf-8", "replace") + cut + tail.decode("utf-8", "replace")), stopped


def seccomp_filter(machine: str) -> bytes:
    """The filter (classic BPF) that leaves a program threads but neither processes nor uncounted memory.

    Refused calls fail with EPERM, clone3 with ENOSYS so that libraries use clone instead.
    """
    audit, clone, mmap = _ARCHITECTURE[machine]
    load, equal, greater, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000

    def step(code: int, value: int, then: int = 0, other: int = 0) -> bytes:
        return struct.pack("<HBBI", code, then, other, value)

    # seccomp_data: number at 0, architecture at 4, low half of argument i at 16 + 8 i.
    program = [step(load, 4), step(equal, audit, 1), step(give, kill), step(load, 0)]
    if machine == "x86_64":  # the x32 calls have other numbers
        program += [step(greater, 0x40000000, 0, 1), step(give, refuse)]
    for number in _DENIED[machine].values():
        program += [step(equal, number, 0, 1), step(give, refuse)]
    program += [step(equal, _CLONE3, 0, 1), step(give, unknown)]
    program += [step(equal, clone, 0, 4), step(load, 16), step(any_bit, _CLONE_THREAD, 1), step(give, refuse)]
    program += [step(give, allow)]
    program += [step(equal, mmap, 0, 4), step(load, 16 + 8 * 3), step(0x54, _MAP_SHARED_ANONYMOUS)]
    program += [step(equal, _MAP_SHARED_ANONYMOUS, 0, 1), step(give, refuse), step(give, allow)]
    return b"".join(program)
