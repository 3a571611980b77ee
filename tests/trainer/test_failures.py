"""How a process that fails is seen to fail: one line, and the last one under a launcher too."""

import subprocess
import sys

import pytest

from hrm_hf.io.failures import one_line_errors
from hrm_hf.io.usage import UsageError


SCRIPT = """
import os
from hrm_hf.io.failures import one_line_errors

with one_line_errors():
    raise ValueError(f"the reason, of process {os.environ.get('RANK', '0')}")
"""
ACCELERATE = ("accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no")  # fmt: skip
TORCHRUN = ("torch.distributed.run", "--nproc_per_node", "2", "--standalone")


@pytest.mark.skipif(sys.platform != "linux", reason="nothing else says when another process has ended")
@pytest.mark.parametrize("launcher, processes", [(ACCELERATE, 1), (TORCHRUN, 2)], ids=["accelerate", "torchrun"])
def test_the_reason_is_the_last_line_under_a_launcher_and_said_there_once(launcher, processes, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", *launcher, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and lines[-1].startswith("error: the reason, of process ")
    assert any("Traceback" in line or "FAILED" in line for line in lines[:-1])  # what the launcher says
    said = [line for line in lines if line.startswith("error: the reason")]
    assert 2 <= len(said) <= processes + 1  # each process that came to it, and one of them again


@pytest.mark.parametrize(
    "error, code, said",
    [
        (ValueError("a value"), 1, "error: a value\n"),
        (KeyError("a key"), 1, "error: a key\n"),
        (UsageError("a flag"), 2, "error: a flag\n"),
    ],
)
def test_an_expected_failure_is_one_line_with_its_status(error, code, said, capsys):
    with pytest.raises(SystemExit) as stop, one_line_errors():
        raise error
    assert (stop.value.code, capsys.readouterr().err) == (code, said)


def test_a_mistake_of_ours_keeps_its_traceback_and_so_does_any_with_the_variable(monkeypatch):
    with pytest.raises(TypeError, match="ours"), one_line_errors():
        raise TypeError("ours")
    monkeypatch.setenv("HRM_HF_DEBUG", "1")
    with pytest.raises(ValueError, match="a value"), one_line_errors():
        raise ValueError("a value")
