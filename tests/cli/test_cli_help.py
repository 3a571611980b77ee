"""Help, the version, usage errors and completion load nothing that takes seconds."""

import json
import os
import re
import subprocess
import sys

import pytest

import hrm_hf


COMMANDS = {
    "--help": 0, "--version": 0, "data --help": 0, "data sudoku --help": 0, "eval --help": 0, "eval lm --help": 0,
    "demo --help": 0, "launch --help": 0, "recommend --help": 0, "slurm --help": 0, "": 2, "no-such-command": 2,
    "data sudoku": 2, "solve": 2, "solve ./no_folder": 2, "recommend": 2, "-h": 0, "solve -h": 0, "eval puzzles -h": 0,
    "recommend --memory 1XB": 2, "preflight --free much": 2, "demo --model none": 2, "solve 1 --out a.pdf": 2,
    "launch --model x --processes 2": 2, "export onnx .": 2, "convert rlm_mhc a --out b --step 2": 2,
    "launch --model gpt2 --dry_run --gpu_memory 24XB": 2, "convert hrm nosuch --out x": 2,
    "go MODEL": 2, "go MODEL x --prefix a --prefix b": 2, "eval go MODEL": 2, "eval go MODEL --benchmark x=y": 2,
    "eval lm MODEL --data x --exit-threshold 1": 2, "eval lm MODEL": 2, "eval lm MODEL --data x --nosuch": 2,
    "eval puzzles MODEL nosuch": 2, "eval cosmo MODEL --data nosuch": 2, "push nosuch me/x": 2,
    "data export nosuch --out x": 2, "retrofit --help": 0, "retrofit ./nosuch --out x": 2,
    "eval cosmo-baseline --data nosuch --method spectrum-gp": 2, "eval cosmo-map --data nosuch --method wiener": 2,
    "eval cosmo-map MODEL --data nosuch": 2, "eval cosmo-map --data x": 2,
    "eval cosmo-map MODEL --data x --method wiener": 2, "eval cosmo-map MODEL --data x --draws 0": 2,
}  # fmt: skip
# Runs each command, and prints the heavy packages that are loaded afterwards.
SCRIPT = """
import contextlib, io, json, sys
import hrm_hf_start
from hrm_hf.cli import main
HEAVY = ("torch", "transformers", "datasets", "numpy", "matplotlib", "huggingface_hub")
commands, model, found = json.loads(sys.argv[1]), sys.argv[2], {}
for command in commands:
    sys.argv = ["hrm-hf", *command.replace("MODEL", model).split()]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code or 0
    heavy = [name for name in HEAVY if name in sys.modules]
    found[command] = [code, out.getvalue() + err.getvalue(), heavy]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text("{}")
    command = [sys.executable, "-c", SCRIPT, json.dumps(list(COMMANDS)), str(model)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)


@pytest.mark.parametrize(("command", "code"), COMMANDS.items(), ids=[name or "nothing" for name in COMMANDS])
def test_help_and_usage_errors_load_nothing_heavy(found, command, code):
    assert found[command][0] == code and found[command][2] == []


def test_version_is_that_of_the_package(found):
    assert found["--version"][1].strip() == hrm_hf.__version__


def test_help_lists_every_command(found):
    for name in ("app", "convert", "data", "demo", "demo-go", "eval", "export", "go", "launch", "preflight", "pull",
                 "push", "recommend", "retrofit", "rlm", "serve", "slurm", "solve"):  # fmt: skip
        assert f" {name} " in found["--help"][1]


@pytest.mark.parametrize("module", ["hrm_hf_start", "hrm_hf.cli"])
def test_unknown_command_suggests_the_nearest(found, module):
    assert "No such command" in found["no-such-command"][1]
    command = [sys.executable, "-X", "importtime", "-m", module, "slove"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "Did you mean 'solve'" in done.stderr
    assert not set(re.findall(r"\| +(\w+)$", done.stderr, re.MULTILINE)) & {"torch", "transformers"}


def completions(words: str) -> list[str]:
    """Return the shell's completions of the last word."""
    asked = {"_HRM_HF_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    program = "import sys; sys.argv[0] = 'hrm-hf'; from hrm_hf_start import main; main()"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=os.environ | asked, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [("hrm-hf so", ["solve"]), ("hrm-hf eval pu", ["puzzles"]), ("hrm-hf eval puzzles --hal", ["--halt"])],
)
def test_a_shell_completes_commands_and_options(words, offered):
    assert completions(words) == offered


def test_completion_is_installed_for_a_shell(tmp_path):
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environment = kept | {"HOME": str(tmp_path)}
    program = (
        "import sys; sys.argv = ['hrm-hf', '--install-completion', 'bash']; from hrm_hf_start import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "complete_bash" in (tmp_path / ".bash_completions" / "hrm-hf.sh").read_text()


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [("pass", 0, ""), ("sys.exit(3)", 3, ""), ("sys.exit('no')", 1, "apart"), ("sys.nothing", 1, "apart")],
)
def test_command_exits_with_its_status_without_module_teardown(end, status, said):
    program = (
        "import atexit, sys, weakref, hrm_hf_start\nclass Kept:\n    def __del__(self): print('apart', end='')\n"
        f"kept = Kept()\ndef run():\n    atexit.register(print, 'atexit', end=' ')\n    {end}\n"
        "hrm_hf_start.run_and_leave(run)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, f"atexit {said}")
