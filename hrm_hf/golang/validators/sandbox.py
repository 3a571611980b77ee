"""Run untrusted programs in bubblewrap: no network, no user files, limits on all resources.

The program sees an empty read-only root with only the given paths, a read-only /proc, a /tmp of limited size and
number of files, and a /dev without /dev/zero (no limit counts its shared memory) and without pseudo-terminals (all
processes of the host share a limit). It runs in its own namespaces, without capabilities and with an empty
environment. Wall time, CPU time, memory, threads, file size, /tmp and output are limited. The program can make the
system calls listed in `seccomp.py` and no others: no sockets, and no processes without `processes=True`.

The program never runs as root on the host: if we are root, bubblewrap and its children run under a uid that no account
has. RLIMIT_DATA limits memory; it does not count memory that Go only reserves. RLIMIT_AS, set more than four GiB
higher, limits the page tables of memory that is only read. Both limits apply to each process. Kernel memory (pipes,
mappings, threads) counts in the control group of this process, which the sandbox does not leave.

When the program ends or times out, we kill PID 1 of its namespace and wait for it. The kernel lets PID 1 end only when
no other process of the namespace is left; if it does not end, we raise an error. When this process dies, the sandbox
dies too. If no sandbox can be created, nothing runs. Not covered: kernel bugs.
"""

import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .seccomp import ARCHITECTURES, seccomp_filter


MIB = 1 << 20
INSTALL_LINE = "`apt-get install bubblewrap util-linux mount` (dnf and pacman: bubblewrap, util-linux)"
MAX_OUTPUT = 64 * MIB  # maximum bytes of output; a program that writes more is killed
ADDRESS_SPACE = 4096 * MIB  # Go reserves address space that it does not use: over 1 GiB in newer versions
UNUSED_UID = 1_997_770_001  # systemd's documentation marks the range of this uid as unused
NOBODY = 65534
START_SECONDS = END_SECONDS = 30.0  # time limit for the kernel to set up or tear down a sandbox
REFUSAL = "refusing to run code outside of a sandbox: "
_PROGRAMS = ("bwrap", "prlimit", "unshare", "setpriv", "mount", "sh")

# Our own mount namespace with a tmpfs at /sys, which no sandbox needs. Its tmp/ becomes the sandbox's /tmp, because
# bubblewrap cannot limit the number of inodes. Files that only root can reach are bound to /sys/0, /sys/1, ...
_STAGE = """set -e
mount -n -t tmpfs -o "$1" tmpfs /sys
shift
mkdir -m 1777 /sys/tmp
number=0
while [ "$1" != -- ]; do
  if [ -d "$1" ]; then mkdir "/sys/$number"; else : > "/sys/$number"; fi
  mount -n --rbind "$1" "/sys/$number"
  number=$((number + 1))
  shift
done
shift
unset PWD OLDPWD
exec "$@"
"""


class SandboxError(RuntimeError):
    """Raised if a sandbox cannot be created, in which case nothing was run, or if it fails to terminate."""


@dataclass(frozen=True)
class Limits:
    """Limits on the resources of a program in the sandbox.

    Attributes:
        seconds: wall time; CPU time is limited to four times this.
        memory: bytes of data per process.
        disk: bytes in /tmp, and bytes per file.
        files: number of files and folders in /tmp; each takes about 1 KiB of kernel memory.
        threads: number of threads and processes.
    """

    seconds: float = 10.0
    memory: int = 1024 * MIB
    disk: int = 64 * MIB
    files: int = 16384
    threads: int = 1024


@dataclass(frozen=True)
class Run:
    """Result of running a program in the sandbox.

    Attributes:
        status: exit status; a negative signal number if a signal killed it.
        output: standard output and error; the middle of a long output is cut.
        stopped: "time" or "output" if it exceeded that limit and we killed it, else "".
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
    stdin: bytes = b"",
) -> Run:
    """Run a program in a sandbox, and wait until the program and all its children have ended.

    Args:
        command: path of the program in the sandbox, and its arguments.
        read_only: pairs (host path, sandbox path) that the program can read. If we are root, `sandbox_uid` must
            be able to read the files themselves (see `hand_over`), but not the folders above them.
        writable: pairs of paths that the program can also write.
        environment: environment variables; the program gets no others.
        directory: working directory.
        processes: whether the program may start processes.
        clip: number of characters of output to keep.
        stdin: standard input; at most 4096 bytes, which a pipe always holds.

    Raises:
        SandboxError: no sandbox can be created, or one of its processes did not end.
    """
    validate_sandbox()
    options = _options(read_only, writable, environment or {}, directory)
    return _run(options, command, limits, processes, clip, stdin)


@cache
def validate_sandbox() -> None:
    """Check that this machine can create a sandbox.

    Raises:
        SandboxError: no sandbox can be created; the message gives the reason and a fix.
    """
    if platform.machine() not in ARCHITECTURES or not hasattr(os, "fork"):
        raise SandboxError(f"{REFUSAL}a sandbox needs Linux on {' or '.join(ARCHITECTURES)}, not {platform.machine()}")
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            raise SandboxError(f"{REFUSAL}{program} (bubblewrap, util-linux) is not installed: {INSTALL_LINE}")
    system = [(path, path) for path in ("/usr", "/bin", "/lib", "/lib64") if os.path.exists(path)]
    true = shutil.which("true") or "/bin/true"
    run = _run(_options(system, (), {}, "/tmp"), [true], Limits(), False, 2000, b"")
    if run.status != 0:
        raise SandboxError(
            f"{REFUSAL}bubblewrap does not work here ({run.output.strip() or run.stopped or run.status}). It needs "
            "version 0.7 or newer, Linux 5.14 or newer, and user namespaces (sysctl "
            "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a container, a "
            "runtime that permits them); as root also CAP_SYS_ADMIN, CAP_SETUID and CAP_SETGID"
        )


@cache
def sandbox_uid() -> int | None:
    """Return the uid (and gid) for programs if we are root on the host, or None if we are not.

    Raises:
        SandboxError: we are root, and our user namespace has no other uid.
    """
    maps, uid = [_id_map("uid"), _id_map("gid")], os.geteuid()
    if not any(start <= uid < start + count and outside + uid == start for start, outside, count in maps[0]):
        return None
    for uid in (UNUSED_UID, NOBODY):
        if all(any(start <= uid < start + count for start, _, count in ranges) for ranges in maps):
            return uid
    raise SandboxError(
        f"{REFUSAL}this process is root, and its user namespace has no other uid to run the code as "
        f"(/proc/self/uid_map: {maps[0]}); run it as an ordinary user"
    )


def _id_map(kind: str) -> list[tuple[int, int, int]]:
    """Return (first id inside, first id outside, count) for each range of this namespace's uid or gid map."""
    lines = Path(f"/proc/self/{kind}_map").read_text().splitlines()
    return [tuple(int(word) for word in line.split()) for line in lines]


def hand_over(folder: Path) -> None:
    """Make the sandbox's uid the owner of a folder and its contents, if that uid differs from ours."""
    uid = sandbox_uid()
    if uid is not None:
        for parent, _, names in os.walk(folder):
            for path in (parent, *(os.path.join(parent, name) for name in names)):
                os.chown(path, uid, uid, follow_symlinks=False)


def _options(read_only, writable, environment: dict[str, str], directory: str) -> list[tuple[str, ...]]:
    """Return bubblewrap's options, one per tuple, with host paths as the bind sources."""
    bind = [("--ro-bind", os.path.abspath(outside), inside) for outside, inside in read_only]
    bind += [("--bind", os.path.abspath(outside), inside) for outside, inside in writable]
    variables = [("--setenv", name, value) for name, value in environment.items()]
    # The root and /dev are tmpfs of unlimited size, so they must be read-only.
    return [*bind, *variables, ("--remount-ro", "/dev"), ("--remount-ro", "/"), ("--chdir", directory)]


def _command(options: list[tuple[str, ...]], limits: Limits, file: Callable[[bytes], str]) -> list[str]:
    """Return the bubblewrap command with its namespaces, uid and limits. The caller appends the program.

    Args:
        file: creates an anonymous file that bubblewrap inherits, and returns its descriptor.
    """
    path = {program: shutil.which(program) for program in _PROGRAMS}
    uid, staged = sandbox_uid(), []

    def reach(source: str) -> str:
        """Return the path to bind: `source`, or our own bind of it if the sandbox's uid cannot reach `source`."""
        above = Path(os.path.realpath(source)).parents
        if uid is None or not os.path.exists(source) or all(folder.stat().st_mode & 0o001 for folder in above):
            return source
        staged.append(source)
        return f"/sys/{len(staged) - 1}"

    arguments = [
        "--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL",
        "--hostname", "sandbox", "--die-with-parent", "--new-session", "--clearenv",
        "--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", "--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts",
        "--perms", "0000", "--ro-bind-data", file(b""), "/dev/zero", "--bind", "/sys/tmp", "/tmp",
    ]  # fmt: skip
    for name, *values in options:
        arguments += [name, *([reach(values[0]), values[1]] if name.endswith("bind") else values)]
    confined = [
        path["prlimit"], f"--fsize={limits.disk}", f"--cpu={int(limits.seconds * 4) + 1}", f"--data={limits.memory}",
        f"--as={2 * limits.memory + ADDRESS_SPACE}", f"--stack={8 * MIB}", "--core=0", "--nofile=512",
        f"--nproc={limits.threads}", "--sigpending=1024", "--memlock=65536", "--msgqueue=0", "--",
        # bubblewrap reads its arguments from a file, because the program can see the command line of PID 1.
        reach(path["bwrap"]), "--args", file("".join(f"{argument}\0" for argument in arguments).encode()),
    ]  # fmt: skip
    # RLIMIT_NPROC counts all of the user's processes in the user namespace that encloses bubblewrap's. With an extra
    # namespace in between, it counts only this sandbox's processes.
    user = [path["unshare"], "--user", "--map-root-user"]
    tmpfs = f"size={limits.disk},nr_inodes={limits.files + 64},mode=755"
    stage = [path["sh"], "-c", _STAGE, "sh", tmpfs, *staged, "--"]
    if uid is None:
        return [*user, "--mount", "--", *stage, *confined]
    drop = [path["setpriv"], "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--bounding-set=-all"]
    return [path["unshare"], "--mount", "--", *stage, *drop, "--inh-caps=-all", "--", *user, "--", *confined]


def _run(options, command: Sequence[str], limits: Limits, processes: bool, clip: int, stdin: bytes) -> Run:
    with ExitStack() as stack:
        process, status, release = _start(options, command, limits, processes, stdin, stack)
        first = None
        try:
            first = _first_process(status, stack)
            if first is not None:
                with suppress(BrokenPipeError):  # bubblewrap failed; its output has the reason
                    os.write(release, b"x")
            start = time.monotonic()
            output, stopped = _watch(process, start + limits.seconds, clip)
        finally:
            _end(process, first)
    return Run(process.returncode, output, stopped, time.monotonic() - start)


def _start(options, command, limits: Limits, processes: bool, stdin: bytes, stack: ExitStack):
    """Start bubblewrap, which creates the sandbox and waits before it runs the program.

    Returns:
        bubblewrap's process, the pipe on which it reports PID 1 of the sandbox, and the pipe that releases it.
    """
    status, reporting = os.pipe()
    stack.callback(os.close, status)
    waiting, release = os.pipe()
    stack.callback(os.close, release)
    with ExitStack() as given:  # closes our copies of the descriptors once bubblewrap has started

        def hand(descriptor: int) -> int:
            given.callback(os.close, descriptor)
            return descriptor

        def file(content: bytes) -> str:
            descriptor = hand(os.memfd_create("sandbox"))
            files.append(descriptor)
            os.write(descriptor, content)
            os.lseek(descriptor, 0, os.SEEK_SET)
            return str(descriptor)

        files = [hand(reporting), hand(waiting)]
        # Use a pipe: PID 1 keeps this descriptor too, but data read from a pipe cannot be read again.
        reading, writing = os.pipe()
        hand(reading)
        os.write(writing, stdin)
        os.close(writing)
        seccomp = file(seccomp_filter(platform.machine(), processes))
        extra = [("--info-fd", str(reporting)), ("--block-fd", str(waiting)), ("--seccomp", seccomp)]
        line = _command([*options, *extra], limits, file)
        process = subprocess.Popen(
            [*line, "--", *command], stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={}, cwd="/", pass_fds=files, start_new_session=True,
        )  # fmt: skip
    return process, status, release


def _first_process(status: int, stack: ExitStack) -> int | None:
    """Return the pidfd of the sandbox's PID 1, or None if bubblewrap failed (its output has the reason).

    bubblewrap waits until we have opened the pidfd, so the pid cannot belong to another process by then.
    """
    report, deadline = b"", time.monotonic() + START_SECONDS
    while not report.rstrip().endswith(b"}"):
        if not readable(status, deadline - time.monotonic()):
            raise SandboxError(
                f"{REFUSAL}bubblewrap did not create a sandbox within {START_SECONDS:g} s; is the machine overloaded?"
            )
        data = os.read(status, 4096)
        if not data:
            break
        report += data
    if not report:
        return None
    descriptor = os.pidfd_open(json.loads(report)["child-pid"])
    stack.callback(os.close, descriptor)
    return descriptor


def readable(descriptor: int, seconds: float) -> bool:
    """Wait until a descriptor is readable or closed. Return False if this takes longer than `seconds` seconds."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _end(process: subprocess.Popen, first: int | None) -> None:
    """Kill a sandbox and wait for it.

    PID 1 of a namespace ends, and its pidfd becomes readable, only after all other processes of the namespace.

    Raises:
        SandboxError: a process did not end.
    """
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
    if first is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(first, signal.SIGKILL)
        if not readable(first, END_SECONDS):
            raise SandboxError(
                f"a program in the sandbox still exists {END_SECONDS:g} s after it was killed; look for processes "
                f"of uid {sandbox_uid() or os.geteuid()} in state D, and check the kernel log"
            )
    process.wait()


def _watch(process: subprocess.Popen, deadline: float, clip: int) -> tuple[str, str]:
    """Read the output until it ends or exceeds its limit, or until the deadline passes."""
    head, tail, total, stopped = bytearray(), bytearray(), 0, ""
    with process.stdout:
        while not stopped:
            if not readable(process.stdout.fileno(), deadline - time.monotonic()) or time.monotonic() > deadline:
                stopped = "time"
                break
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                break
            total += len(data)
            space = max(0, clip // 2 - len(head))
            head += data[:space]
            tail = (tail + data[space:])[-(clip // 2) :]
            stopped = "output" if total > MAX_OUTPUT else ""
        try:  # the program may have closed its output and still be running
            process.wait(0 if stopped else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stopped = stopped or "time"
    cut = f"\n[... {total - clip} bytes cut ...]\n" if total > clip else ""
    return re.sub("\0", "", head.decode("utf-8", "replace") + cut + tail.decode("utf-8", "replace")), stopped
