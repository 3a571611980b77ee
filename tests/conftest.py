"""Settings of the whole test run; nothing here reaches the network."""

import gc
import os
import shutil
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
# For this process and its children. One thread, since tests run in parallel and models are tiny.
os.environ["OMP_NUM_THREADS"] = os.environ.get("HRM_HF_TEST_THREADS", "1")  # isa.py also tests with two

import pytest
import torch
from rich.console import Console


torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
gc.disable()  # while tests are collected: garbage collection would take a quarter of that time


def pytest_collection_finish():
    gc.enable()


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """Widen the terminal, so that long temporary paths do not wrap the messages of commands."""
    monkeypatch.setenv("COLUMNS", "400")
    # rich keeps the os.environ it was imported with, but datasets replaces it after a parallel `map`.
    monkeypatch.setattr(Console, "_environ", os.environ)


@pytest.fixture(scope="module", autouse=True)
def imports_out_of_garbage_collection():
    """Exclude modules and collected tests from garbage collection, before a file's first test.

    Each Trainer calls `gc.collect` when it starts; among a million objects that live as long as the process, this
    took longer than the training of most tests. What a test makes is collected as ever.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A loopback Hub, which huggingface_hub in this process uses."""
    # Imported here, since most tests need no Hub.
    from hub_here import TOKEN, point_at
    from hub_server import HubServer

    with HubServer(tmp_path / "hub", token=TOKEN) as server:
        point_at(server, monkeypatch, tmp_path)
        yield server


@pytest.fixture(scope="session")
def saved_puzzle(tmp_path_factory):
    """A checkpoint that no test changes."""
    import every

    return every.save("hrm_puzzle", tmp_path_factory.mktemp("puzzle"))


@pytest.fixture
def puzzle(saved_puzzle, tmp_path):
    """A puzzle checkpoint that a test may change."""
    return Path(shutil.copytree(saved_puzzle, tmp_path / "puzzle"))
