"""Machine failures: a full disk, an unwritable folder, no memory, a killed process.

Each leaves whole checkpoints, says what happened and what is left, and the run that goes on afterwards has the losses
of one that was left alone, which is the referee. Kills at random moments are in benchmarks/package/faults.py.
"""

import contextlib
import math
import os
import resource
import subprocess
import sys

import faults_worker
import preemption_worker
import psutil
import pytest
import torch
from preemption_worker import logged, make

from hrm_hf.hub.manifests import find_corruption, list_checkpoints
from hrm_hf.trainer import NonFiniteError


KINDS = ("puzzle", "lm", "go", "cosmo")
SAVES = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 99}


@pytest.fixture
def disk(tmp_path):
    """Mount (or remount) a small file system in memory, and return its folder: `disk(options)`."""
    if os.geteuid() or sys.platform != "linux":
        pytest.skip("mounts a file system, which needs root")
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str):
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        return place

    yield mount
    while place.is_mount():
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the log of an uninterrupted run of a language model."""
    one = make("lm", tmp_path_factory.mktemp("alone"))
    one.train()
    return logged(one)


def goes_on(folder, alone) -> None:
    """Every checkpoint with a manifest is complete, and the resumed run has the losses of an uninterrupted one."""
    saved = [one for one in list_checkpoints(folder) if not find_corruption(one, with_checksums=False)]
    assert saved and not any(find_corruption(one) for one in saved)
    resumed = make("lm", folder, **SAVES)
    resumed.train("last-complete")
    assert logged(resumed) == alone


# ---- disks ----


def test_full_disk_ends_the_run_and_keeps_complete_checkpoints(disk, alone):
    folder = disk("size=700k")
    with pytest.raises(OSError, match=r"checkpoint-\d: .* intact.*--resume_from_checkpoint last-complete"):
        make("lm", folder, **SAVES).train()
    disk("remount,size=20m")
    goes_on(folder, alone)


def test_unwritable_folder_ends_the_run_before_training(disk):
    folder = disk("size=1m,ro")
    one = make("lm", folder)
    with pytest.raises(OSError, match=r"Read-only file system.*--output_dir"):
        one.train()
    assert one.state.global_step == 0


# ---- memory ----


@contextlib.contextmanager
def little_memory(more: int):
    """Limit the address space of the process to `more` bytes above its current size inside the block."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not limit the memory of a process")
@pytest.mark.parametrize("by", ["torch", "Python"])
def test_out_of_memory_is_reported_and_keeps_complete_checkpoints(tmp_path, alone, by):
    one = make("lm", tmp_path, **SAVES)
    step = one.training_step

    def larger(*args, **kwargs):
        if one.state.global_step == 3:
            with little_memory(2**28):
                torch.ones(2**31) if by == "torch" else bytearray(2**33)
        return step(*args, **kwargs)

    one.training_step = larger
    expected = r"memory.*step 4 .*--per_device_train_batch_size.*checkpoint-3 .*--resume_from_checkpoint last-complete"
    with pytest.raises((RuntimeError, MemoryError), match=expected) as e:
        one.train()
    assert str(tmp_path / "checkpoint-3") in str(e.value)
    goes_on(tmp_path, alone)


# ---- processes ----


@pytest.mark.slow
def test_surviving_process_reports_a_killed_one_and_ends(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [*torchrun, faults_worker.__file__, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode not in (0, 99)
    assert f"process 0 of 2 has lost the others in step {faults_worker.KILLED_IN} (" in result.stderr
    assert f"{tmp_path / 'checkpoint-2'} is intact: " in result.stderr
    assert [one.name for one in list_checkpoints(tmp_path)] == ["checkpoint-2"]
    assert find_corruption(tmp_path / "checkpoint-2") == []


# ---- non-finite weights ----


@pytest.mark.parametrize("kind", KINDS)
def test_learning_rate_of_1e30_saves_no_nonfinite_weights_and_names_the_step(kind, tmp_path):
    one = make(kind, tmp_path, learning_rate=1e30, warmup_steps=0, **SAVES)
    with pytest.raises(NonFiniteError, match=r"weights .*step 1: .*learning rate \(1e\+30\)"):
        one.train()
    assert list_checkpoints(tmp_path) == []


def test_nonfinite_weights_keep_the_earlier_checkpoints(tmp_path, alone):
    one = make("lm", tmp_path, **{**SAVES, "save_total_limit": 2})
    step = one.training_step

    def breaks(*args, **kwargs):
        loss = step(*args, **kwargs)
        if one.state.global_step == 3:
            next(one.model.parameters()).data.view(-1)[0] = math.inf
        return loss

    one.training_step = breaks
    with pytest.raises(NonFiniteError, match=r"weights .*step 4: transformer.wte.weight"):
        one.train()
    assert [saved.name for saved in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-3"]
    goes_on(tmp_path, alone)


def test_nonfinite_weights_are_reported_at_the_end_of_a_run_without_saves(tmp_path):
    one = make("cosmo", tmp_path, learning_rate=1e30, warmup_steps=0, max_steps=3)
    with pytest.raises(NonFiniteError, match=r"weights .*step 3: "):
        one.train()


assert preemption_worker.STEPS > faults_worker.KILLED_IN  # the process is killed before the run is complete
