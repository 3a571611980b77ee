"""Processes for tests: clean interpreters that call a function or run a script, alone or as a gloo group.

    torchrun --nproc_per_node 1 tests/helpers/started.py SCRIPT ARGUMENTS

runs a script in the same way.

Tests of the launchers' own processes are in tests/hpc, tests/launch and trainer/test_accelerate_configs.py.
"""

import atexit
import gc
import multiprocessing
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path


_context = multiprocessing.get_context("spawn")


def process(function, *args, environment: dict[str, str] | None = None, output: Path | None = None):
    """Return an unstarted process that calls `function` in this process's folder and environment."""
    environment = dict(os.environ if environment is None else environment)
    return _context.Process(target=_call, args=(environment, os.getcwd(), output, pickle.dumps(function), args))


def script(path: Path | str, arguments: list[str], **options):
    """Return an unstarted process of `python path arguments`."""
    return process(_main, str(path), arguments, **options)


def run_script(path: Path | str, arguments: list[str], processes: int = 1, **options) -> subprocess.CompletedProcess:
    """Run `python path arguments` in one process or a group."""
    return run(_main, str(path), arguments, processes=processes, **options)


def run(function, *args, processes: int = 1, environment=None, timeout: float = 300) -> subprocess.CompletedProcess:
    """Call a function in one process or a gloo group; return the output and the worst status.

    As with torchrun, a failed process ends the others. The group has torchrun's variables.
    """
    environment = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory() as folder:
        started, outputs = [], [Path(folder, str(rank)) for rank in range(processes)]
        port = free_port()
        try:
            for rank, output in enumerate(outputs):
                variables = _group_variables(rank, processes, port) if processes > 1 else {}
                one = process(function, *args, environment={**environment, **variables}, output=output)
                one.start()
                started.append(one)
            status = _wait(started, timeout)
        finally:
            for one in started:
                one.kill()
                one.join()
        printed, errors = (
            "".join(
                output.with_suffix(stream).read_text() for output in outputs if output.with_suffix(stream).exists()
            )
            for stream in (".out", ".err")
        )
    if status is None:
        raise subprocess.TimeoutExpired(str(function), timeout, printed, errors)
    return subprocess.CompletedProcess([function.__name__, *map(str, args)], status, printed, errors)


def _wait(started: list, timeout: float) -> int | None:
    """Return the first nonzero status, 0 if all succeeded, or None after the timeout."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [one.exitcode for one in started]
        if failed := [code for code in codes if code]:
            return failed[0]
        if None not in codes:
            return 0
        time.sleep(0.02)
    return None


def _group_variables(rank: int, processes: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _call(environment: dict[str, str], folder: str, output: Path | None, function: bytes, args) -> None:
    """Body of the process. The function is pickled, so that its module is imported here."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # Reset the start method, with which children (data loader workers) would each import everything.
    multiprocessing.set_start_method(None, force=True)
    if output is not None:
        for number, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(output.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    _shorten_imports()
    import torch  # the test process imports this module too, sometimes before torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    call = pickle.loads(function)
    gc.enable()
    call(*args)


def _shorten_imports() -> None:
    """Halve the time that a process needs to import transformers' trainer and to end."""
    sys.modules.update(bitsandbytes=None, torchao=None)  # transformers imports them if they are installed
    gc.disable()  # imports create no garbage
    atexit.register(gc.freeze)  # Python's last collection then has little to do


def _main(script: str, arguments: list[str]) -> None:
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _shorten_imports()
    _main(sys.argv[1], sys.argv[2:])
