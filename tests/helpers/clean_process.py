"""Code run in a clean interpreter that cannot import this package."""

import os
import subprocess
import sys


SECONDS = 900
# Shortens the start and the end of a process: no garbage collection, and without packages that transformers imports
# if they are installed.
START = """
import atexit, gc, sys
gc.disable()
atexit.register(gc.freeze)
sys.modules.update(bitsandbytes=None, torchao=None)
"""
BLOCK = 'sys.modules["hrm_hf"] = None  # an installed one must not be found either\n'


def run(
    code: str, *arguments, cwd, home, hub: dict[str, str] | None = None, package=None, seconds: float = SECONDS
) -> subprocess.CompletedProcess:
    """Run `python -c code arguments` in `cwd` with HF_HOME=`home`, in a process that cannot import hrm_hf.

    Args:
        hub: variables of `HubServer.environment`, for a process that uses that Hub.
        package: folder whose copy of hrm_hf can be imported after all.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(hub or {}), "HF_HOME": str(home)}
    for name in ("PYTHONPATH", "HF_MODULES_CACHE", "HF_HUB_CACHE"):
        environment.pop(name, None)
    if package:
        environment["PYTHONPATH"] = str(package)
    return subprocess.run(
        [sys.executable, "-c", START + ("" if package else BLOCK) + code, *map(str, arguments)],
        cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
