"""`hrm-hf serve` in a process of its own on 127.0.0.1, for tests: forked, awaited and ended here."""

import json
import os
import resource
import socket
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import forked
import pytest


NEEDED = ("fastapi", "uvicorn", "openai")  # transformers asks for all of them
MEMORY = 6 * 2**30  # bytes that a server may take, so that a test of its bounds cannot take the machine


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def serving(folder: Path, *arguments: str, threads: int = 1):
    """The address of a server (http://localhost:PORT) and its process, which ends with the block.

    What it prints is in `folder`.
    """
    for name in NEEDED:
        pytest.importorskip(name)
    port, log = free_port(), folder / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    server = forked.process(
        _serve, [*arguments, "--port", str(port), "--device", "cpu"], folder / "home",
        environment=environment, output=log,
    )  # fmt: skip
    server.start()
    try:
        _wait(f"http://localhost:{port}/health", server, log)
        yield f"http://localhost:{port}", server.pid
    finally:
        server.terminate()
        server.join(20)
        if server.is_alive():
            server.kill()
            server.join()


def _serve(arguments: list[str], home: Path) -> None:
    """`hrm-hf serve`, whose home of the Hub's files is set where the variables have been read already."""
    from huggingface_hub import constants

    from hrm_hf.cli import main

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    assert constants.HF_HUB_OFFLINE
    os.environ["HF_HOME"] = constants.HF_HOME = str(home)
    constants.HF_HUB_CACHE = str(home / "hub")
    sys.argv = ["hrm-hf", "serve", *arguments]
    main()


def _wait(url: str, server, log: Path) -> None:
    limit = time.monotonic() + 150
    while time.monotonic() < limit:
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except OSError:
            assert server.is_alive(), _printed(log)
            time.sleep(0.1)
    raise AssertionError(f"no answer from {url}: {_printed(log)[-2000:]}")


def _printed(log: Path) -> str:
    return "".join(path.read_text() for path in (log.with_suffix(".out"), log.with_suffix(".err")) if path.exists())


def post(url: str, **body) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=120))
