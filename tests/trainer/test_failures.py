"""A process that fails says why in one line, which torchrun repeats in its report."""

import subprocess
import sys

import pytest

from hrm_hf.io.usage import UsageError, one_line_errors


SCRIPT = """
import os
import hrm_hf_start
from hrm_hf.io.usage import one_line_errors

with one_line_errors():
    raise ValueError(f"the reason, of process {os.environ.get('RANK', '0')}")
"""


def test_torchrun_reports_the_reason_below_its_own_message(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = ["torch.distributed.run", "--nproc_per_node", "1", "--standalone"]
    command = [sys.executable, "-m", *torchrun, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "error: the reason, of process 0" in done.stderr.partition("FAILED")[2]


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


def test_bug_keeps_its_traceback_and_so_does_any_error_in_debug_mode(monkeypatch):
    with pytest.raises(TypeError, match="ours"), one_line_errors():
        raise TypeError("ours")
    monkeypatch.setenv("HRM_HF_DEBUG", "1")
    with pytest.raises(ValueError, match="a value"), one_line_errors():
        raise ValueError("a value")
