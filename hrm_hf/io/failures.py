"""How a command or a script fails: an expected failure is one line on stderr, and HRM_HF_DEBUG=1 shows its traceback.

torchrun and accelerate print pages of their own below that line. In a process of theirs it is said once more when they
have ended, so that it is the last thing on the screen.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .usage import UsageError


DEBUG = "HRM_HF_DEBUG"
LAUNCHERS = ("accelerate", "accelerate-launch", "torchrun", "accelerate.commands.launch", "torch.distributed.run")
# Arguments: a file descriptor that stands for the launcher, for how long to wait until it has ended, and the line.
REPEAT = """
import select, sys
poller = select.poll()
poller.register(int(sys.argv[1]), select.POLLIN)
if poller.poll(int(sys.argv[2])):
    sys.stderr.write(sys.argv[3] + "\\n")
"""
REPEAT_WITHIN = 60_000  # milliseconds for a launcher to end the other processes


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the process where the block fails: status 2 for bad usage and 1 for another failure that is expected.

    What nobody expects, a mistake of ours, is raised with its traceback.
    """
    try:
        yield
    except Exception as error:
        expected = _is_expected(error)
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        line = f"error: {message}" if expected else f"error: {type(error).__name__}: {message}"
        repeat_after_launcher(line)
        if os.environ.get(DEBUG) or not expected:
            raise
        sys.stderr.write(f"{line}\n")
        sys.exit(2 if isinstance(error, UsageError) else 1)


def repeat_after_launcher(line: str) -> None:
    """Says a line again when the launcher of this process has ended, unless another of its processes does so."""
    if not _is_launched() or not hasattr(os, "pidfd_open"):
        return
    first = socket.socket(socket.AF_UNIX)
    try:
        # A name that one process can have, and that is free again when its owner ends: the first failure is the cause.
        first.bind(f"\0hrm_hf-failure-of-{os.getppid()}")
        launcher = os.pidfd_open(os.getppid())
    except OSError:
        return
    handed_on = (first.fileno(), launcher)
    subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", REPEAT, str(launcher), str(REPEAT_WITHIN), line],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=handed_on,
        start_new_session=True,  # the launcher ends the processes of its own
    )


def _is_launched() -> bool:
    """Whether the parent is a launcher that will end because this process fails."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") != os.environ.get("TORCHELASTIC_MAX_RESTARTS"):
        return False  # torchrun starts its processes again
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:
        return False
    return any(Path(word).name in LAUNCHERS for word in words[:4])


def _is_expected(error: Exception) -> bool:
    from huggingface_hub.errors import StrictDataclassError  # a quarter of a second, which help does not need

    return isinstance(error, ValueError | OSError | RuntimeError | ImportError | KeyError | StrictDataclassError)
