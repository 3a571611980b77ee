"""Models are pushed to a loopback Hub and pulled by other processes, some of which are killed.

Referee: a process without `hrm_hf` and with an empty cache loads the model by name and commit; its outputs must be
equal bit for bit. Rejected files and messages are in test_hub.py.
"""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import clean_process
import every
import hub_worker
import pytest
import torch
from hub_here import NAME, call

from hrm_hf.cli import main
from hrm_hf.hub import push_checkpoint


HRM_HF = (sys.executable, "-m", "hrm_hf.cli")
PATIENCE = 240  # seconds until a test gives up
LARGE = 32 * 2**20  # bytes of a file that is fetched in several pieces


def run(hub, home, *command, token=True):
    """Output of a process that has exited successfully."""
    finished = subprocess.run(
        command, env=environment(hub, home, token), cwd=home.parent,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def environment(hub, home, token=True):
    home.mkdir(exist_ok=True, parents=True)
    # Use this process's number of threads; otherwise, sums in a different order would not be equal bit for bit.
    return {**hub.environment(home, token), "OMP_NUM_THREADS": str(torch.get_num_threads())}


@contextmanager
def held(hub, home, part, after, *command):
    """A process that the Hub stops in the middle of a body, and that is killed at the end of the block."""
    reached = hub.hold(part, after)
    process = subprocess.Popen(command, env=environment(hub, home), stderr=subprocess.PIPE, text=True)
    try:
        assert reached.wait(PATIENCE), process.stderr.read()
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        hub.release()


@pytest.fixture
def large(hub, tmp_path):
    """A checkpoint of one large file, which is on the Hub."""
    model = every.model("hrm_puzzle", num_puzzle_identifiers=LARGE // 128)
    model.save_pretrained(tmp_path / "large")
    assert (tmp_path / "large" / "model.safetensors").stat().st_size > LARGE
    push_checkpoint(tmp_path / "large", NAME)
    return tmp_path / "large"


@pytest.mark.slow
def test_a_process_without_the_package_reproduces_every_architecture_bit_for_bit(hub, tmp_path):
    expected = tmp_path / "expected"
    expected.mkdir()
    hub_worker.push(expected)
    names = hub_worker.names(every.ARCHITECTURES)
    for name in names:
        shards = [file for file in hub.files(name) if file.startswith("model-0")]
        assert len(shards) > 1 if name.endswith("sharded") else not shards, name
    home = tmp_path / "empty_home"
    loaded = clean_process.run(
        f"import runpy; runpy.run_path({hub_worker.__file__!r}, run_name='__main__')", expected,
        cwd=tmp_path, home=home, hub=environment(hub, home, token=False),
    )  # fmt: skip
    assert loaded.returncode == 0, loaded.stderr[-3000:]
    equal = [line.split()[1] for line in loaded.stdout.splitlines() if line.startswith("equal")]
    assert sorted(equal) == sorted(names)


@pytest.mark.parametrize("architecture", every.ARCHITECTURES)
def test_push_to_hub_pushes_every_head_with_our_card(architecture, hub):
    hub_worker.library(architecture)
    files = hub.files(f"org/{architecture}")
    card = files["README.md"].decode()
    assert f"# org/{architecture}" in card and f'"org/{architecture}"' in card and "of-the-caller" in card
    assert "automatically generated" not in card and "LICENSE_CODE" in files
    assert architecture in every.PUZZLES or {"tokenizer.json", "preprocessor_config.json"} & files.keys()
    assert any(file.startswith("model-0") for file in hub.files(f"org/{architecture}-base"))


def test_the_hf_command_uploads_and_downloads_a_private_model(hub, puzzle, tmp_path):
    home, hf = tmp_path / "home", str(Path(sys.executable).with_name("hf"))
    run(hub, home, hf, "upload", NAME, str(puzzle), "--private")
    run(hub, home, hf, "download", NAME, "--local-dir", str(tmp_path / "down"), token=hub.read_token)
    for file in puzzle.iterdir():
        assert (tmp_path / "down" / file.name).read_bytes() == file.read_bytes()


def test_killed_push_leaves_no_partial_model_and_can_be_repeated(hub, puzzle, tmp_path):
    first = push_checkpoint(puzzle, NAME).commit
    before = hub.files(NAME)
    every.model("hrm_puzzle", seed=4).save_pretrained(puzzle)
    push = ("push", str(puzzle), NAME, "--json")
    with held(hub, tmp_path / "home", "/upload/", 1000, *HRM_HF, *push):
        assert hub.files(NAME) == before
    assert hub.files(NAME) == before and hub.commits(NAME)[0] == first
    second = json.loads(call(*push).stdout)["commit"]
    assert hub.commits(NAME)[:2] == [second, first]
    assert hub.files(NAME)["model.safetensors"] == (puzzle / "model.safetensors").read_bytes()
    assert hub.files(NAME, first) == before


def test_a_killed_pull_leaves_no_model_and_continues_when_repeated(hub, large, tmp_path):
    home, out = tmp_path / "home", tmp_path / "pulled"
    pull = ("pull", NAME, "--out", str(out), "--json")
    with held(hub, home, "model.safetensors", 25 * 2**20, *HRM_HF, *pull):
        assert not out.exists()
    assert not out.exists()
    result = json.loads(call(*pull).stdout)
    assert result["commit"] == hub.commits(NAME)[0]
    assert (out / "model.safetensors").read_bytes() == (large / "model.safetensors").read_bytes()
    assert not (tmp_path / ".pulled.incoming").exists()


def test_full_disk_during_pull_is_reported_and_leaves_no_model(hub, large, tmp_path, monkeypatch, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted")
    monkeypatch.setattr(sys, "argv", ["hrm-hf", "pull", NAME, "--out", str(disk / "model")])
    try:
        with pytest.raises(SystemExit, match="1"):
            main()
        assert "is full (No space left on device)" in capsys.readouterr().err
        assert not (disk / "model").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
