"""Help, the version and usage errors load nothing that takes seconds."""

import json
import subprocess
import sys

import pytest

import hrm_hf


COMMANDS = {
    "--help": 0, "--version": 0, "data --help": 0, "data sudoku --help": 0, "eval --help": 0, "eval lm --help": 0,
    "demo --help": 0, "launch --help": 0, "recommend --help": 0, "slurm --help": 0, "": 2, "no-such-command": 2,
    "data sudoku": 2, "solve": 2, "solve ./no_folder": 2, "recommend": 2,
}  # fmt: skip
# Each command in turn, and which of the heavy packages are loaded after it.
SCRIPT = """
import contextlib, io, json, sys
from hrm_hf.cli import main
found = {}
for command in json.loads(sys.argv[1]):
    sys.argv = ["hrm-hf", *command.split()]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code or 0
    heavy = [name for name in ("torch", "transformers", "datasets", "numpy", "matplotlib") if name in sys.modules]
    found[command] = [code, out.getvalue() + err.getvalue(), heavy]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, "-c", SCRIPT, json.dumps(list(COMMANDS))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)


@pytest.mark.parametrize(("command", "code"), COMMANDS.items(), ids=[name or "nothing" for name in COMMANDS])
def test_help_and_usage_errors_load_nothing_heavy(found, command, code):
    assert found[command][0] == code and found[command][2] == []


def test_the_version_is_the_package_s(found):
    assert found["--version"][1].strip() == hrm_hf.__version__


def test_help_lists_every_command(found):
    for name in ("app", "convert", "data", "demo", "demo-go", "eval", "export", "go", "launch", "preflight", "pull",
                 "push", "recommend", "rlm", "serve", "slurm", "solve"):  # fmt: skip
        assert f" {name} " in found["--help"][1]
