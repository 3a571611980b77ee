"""Settings of the whole test run; nothing here reaches the network."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import pytest
import torch
from rich.console import Console


torch.set_num_threads(1)  # tiny models: more threads only add noise and overhead


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Paths of temporary folders are long, and messages of the command line are not to be broken by them."""
    monkeypatch.setenv("COLUMNS", "400")
    # rich keeps the os.environ of its import, which datasets replaces after a `map` with several processes.
    monkeypatch.setattr(Console, "_environ", os.environ)
