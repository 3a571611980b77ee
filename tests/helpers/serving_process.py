"""`hrm-hf serve` in a process of its own on 127.0.0.1, for tests: started, awaited and ended here."""

import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest


NEEDED = ("fastapi", "uvicorn", "openai")  # transformers asks for all of them
MEMORY = 6 * 2**30  # bytes that a server may take, so that a test of its bounds cannot take the machine


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def serving(folder: Path, *arguments: str, threads: int = 1):
    """The address of a server (http://localhost:PORT), whose process ends with the block; its log is in `folder`."""
    for name in NEEDED:
        pytest.importorskip(name)
    port, log = free_port(), folder / "log"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "hrm_hf.cli", "serve", *arguments, "--port", str(port), "--device", "cpu"]
    with open(log, "w") as output:
        server = subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        resource.prlimit(server.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))
        try:
            _wait(f"http://localhost:{port}/health", server, log)
            yield f"http://localhost:{port}"
        finally:
            server.terminate()
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait(url: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except OSError:
            assert server.poll() is None, log.read_text()
            time.sleep(0.5)
    raise AssertionError(f"no answer from {url}: {log.read_text()[-2000:]}")


def post(url: str, **body) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=120))
