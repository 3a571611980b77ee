"""Servers of `hrm-hf serve` for tests, in a thread or in a separate process."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from started import free_port


NEEDED = ("fastapi", "uvicorn", "openai")  # transformers requires all of them


@contextmanager
def served_here(model: str, **options):
    """Yield the address of a server in a thread of this process."""
    for name in NEEDED:
        pytest.importorskip(name)
    from hrm_hf.text.options import ServeOptions
    from hrm_hf.text.serving import make_server

    port = free_port()
    server = make_server(ServeOptions(model=model, port=port, device="cpu", **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        _wait(f"http://localhost:{port}/health", thread.is_alive)
        yield f"http://localhost:{port}"
    finally:
        server.server.should_exit = True
        thread.join()


@contextmanager
def serving(folder: Path, model: str, *options: str):
    """Yield the address and the process id of `hrm-hf serve` in a fresh interpreter."""
    for name in NEEDED:
        pytest.importorskip(name)
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "hrm_hf.cli", "serve", model, "--port", str(port), "--device", "cpu", *options]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait(f"http://localhost:{port}/health", lambda: server.poll() is None)
        yield f"http://localhost:{port}", server.pid
    finally:
        server.terminate()
        server.wait(120)


def _wait(url: str, is_alive) -> None:
    limit = time.monotonic() + 150
    while time.monotonic() < limit and is_alive():
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"no answer from {url}")


def post(url: str, **body) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=120))
