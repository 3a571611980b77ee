"""`hrm-hf slurm`: the committed job scripts, their options, and bad usage. tests/hpc submits the scripts.

Referees: bash for the scripts, and the parsers of torchrun and accelerate for the launcher lines.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from launcher_lines import ACCELERATE, TORCHRUN
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.launch.slurm import SlurmJob, committed_files


FOLDER = Path(__file__).parents[2] / "training" / "slurm"
FILES = sorted(committed_files())


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["slurm", *arguments])


def directives(text: str) -> dict[str, str]:
    """Return the #SBATCH lines; later lines must have none."""
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE)
    assert len(found) == text.count("#SBATCH")
    return dict(found)


def expanded(line: str) -> list[str]:
    """Return the words of a launcher line on the second of two nodes."""
    variables = "PYTHON=python NODES=2 GPUS=4 HEAD_ADDR=n1 PORT=12345 NODE_ADDR=n2 SLURM_NODEID=1"
    variables += " ACCELERATE_CONFIG=accelerate_configs/multi_gpu.yaml"
    words = subprocess.run(["bash", "-uc", f"{variables}; printf '%s\\n' {line}"], capture_output=True, text=True)
    return words.stdout.splitlines()


@pytest.mark.parametrize("name", FILES)
def test_the_committed_file_is_what_the_command_writes(name):
    text = (FOLDER / name).read_text()
    command = re.search(r"Written by:\n#     hrm-hf slurm (.+)", text)[1]
    assert invoke(*shlex.split(command)).output == text == committed_files()[name]


def test_no_other_script_is_committed():
    assert sorted(path.name for path in FOLDER.iterdir()) == FILES


@pytest.mark.parametrize("name", FILES)
def test_bash_parses_the_file(name):
    result = subprocess.run(["bash", "-n", FOLDER / name], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_bash_parses_every_variation(launcher):
    job = SlurmJob(
        kind="multi_node", cluster="perlmutter", account="m1", launcher=launcher,
        setup=["module load python", "export A=1"], script="training/run_clm.py",
        recipe="training/recipes/hrm_lm_50m.yaml", mem="64G", log_dir="logs",
    )  # fmt: skip
    result = subprocess.run(["bash", "-n"], input=job.text(), capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert "{{" not in job.text() and "{%" not in job.text()


@pytest.mark.parametrize("name", FILES)
def test_no_script_names_an_interface_a_port_or_a_local_folder(name):
    text = (FOLDER / name).read_text()
    for forbidden in ("BASH_SOURCE", "29500", "ib0", "hsn", "eth0", "mkdir"):
        assert forbidden not in text
    assert not re.search(r"export .*SOCKET_IFNAME", text)
    asked = directives(text)
    assert asked["output"] == "%x_%j.out" and asked["open-mode"] == "append" and "requeue" in asked
    assert asked["signal"] == "USR1@300"  # sent to the tasks; with B: only to the batch shell


def test_every_sbatch_directive_can_be_set():
    asked = directives(
        SlurmJob(
            kind="multi_node", account="m1", partition="p", constraint="a100", qos="regular", gpus=8, nodes=4,
            cpus_per_task=96, mem="0", time="1-12", job_name="mine", log_dir="logs/slurm", signal_seconds=120,
        ).text()
    )  # fmt: skip
    assert asked == {
        "job-name": "mine", "account": "m1", "partition": "p", "constraint": "a100", "qos": "regular", "nodes": "4",
        "ntasks-per-node": "1", "cpus-per-task": "96", "gpus-per-node": "8", "mem": "0", "time": "1-12",
        "output": "logs/slurm/%x_%j.out", "open-mode": "append", "signal": "USR1@120", "requeue": "",
    }  # fmt: skip


def test_perlmutter_nodes_have_four_gpus_with_32_cpus_each():
    for kind, gpus, nodes in (("single_gpu", 1, 1), ("multi_gpu", 4, 1), ("multi_node", 4, 2)):
        asked = directives((FOLDER / f"perlmutter_{kind}.sbatch").read_text())
        assert (asked["constraint"], asked["gpus-per-node"], asked["nodes"]) == ("gpu", str(gpus), str(nodes))
        assert int(asked["cpus-per-task"]) == 32 * gpus
    asked = directives((FOLDER / "perlmutter_generate_data.sbatch").read_text())
    assert asked["constraint"] == "cpu" and "gpus-per-node" not in asked


def test_torchrun_parses_its_command():
    python, module, name, *flags = expanded(TORCHRUN)
    assert (python, module, name) == ("python", "-m", "torch.distributed.run")
    args = get_args_parser().parse_args([*flags, "train.py"])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_endpoint) == ("2", "4", "n1:12345")
    assert (args.rdzv_conf, args.local_addr, args.rdzv_backend) == ("is_host=0", "n2", "c10d")


def test_accelerate_parses_its_command():
    python, module, name, *flags = expanded(ACCELERATE)
    assert (python, module, name) == ("python", "-m", "accelerate.commands.launch")
    args = launch_command_parser().parse_args([*flags, "train.py"])
    assert (args.num_machines, args.machine_rank, args.num_processes) == (2, 1, 8)
    assert (args.main_process_ip, args.main_process_port, args.rdzv_backend) == ("n1", 12345, "static")


@pytest.fixture
def started(tmp_path):
    """`started(*flags, KEY=VALUE)` runs a committed script without Slurm, as job 12, and returns its command."""
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "12", "SLURM_JOB_NAME": "sweep", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}

    def start(*flags: str, file: str = "single_gpu.sbatch", without: str = "", **keys: str) -> list[str]:
        path = f"{tmp_path}:{os.environ['PATH']}"
        settings = {**job, "SLURM_SUBMIT_DIR": str(tmp_path), "PROJECT": str(FOLDER.parents[1]), "PATH": path, **keys}
        settings.pop(without, None)
        script = ["bash", str(FOLDER / file), *flags]
        result = subprocess.run(script, env=settings, capture_output=True, text=True, cwd=tmp_path)
        (line,) = re.findall("^arguments +(.+)", result.stdout, re.MULTILINE) or [result.stderr]
        return shlex.split(line)

    return start


def folder_of(arguments: list[str]) -> str:
    assert arguments.count("--output_dir") == 1
    return arguments[arguments.index("--output_dir") + 1]


def test_every_job_has_its_own_output_folder(started):
    assert folder_of(started()) == folder_of(started(SLURM_RESTART_COUNT="1")) == "runs/sweep_12"
    assert folder_of(started(SLURM_JOB_ID="13", SCRIPT="training/run_clm.py")) == "runs/sweep_13"
    assert folder_of(started(OUTPUT_DIR="runs/mine")) == "runs/mine"
    assert folder_of(started("--output_dir", "runs/flag")) == "runs/flag"
    assert folder_of(started(EXTRA_ARGS="--seed 1 --output_dir runs/extra")) == "runs/extra"
    assert "--output_dir" not in started(SCRIPT="training/pretrain.py")  # has no such option


def test_resuming_job_uses_the_folder_of_its_run(started):
    arguments = started(RESUME="runs/sweep_7/checkpoint-50")
    assert folder_of(arguments) == "runs/sweep_7"
    assert arguments[arguments.index("--resume_from_checkpoint") + 1] == "runs/sweep_7/checkpoint-50"
    assert folder_of(started(RESUME="last-complete", OUTPUT_DIR="runs/sweep_7")) == "runs/sweep_7"
    assert "OUTPUT_DIR=runs/NAME_JOB" in started(RESUME="last-complete")  # an error: no folder to resume from


@pytest.mark.parametrize("text", ["\n  --a 1\n\t--b 2\n", "--a 1 # c\r\n--b 2\r\n", "--a 1 \\\n--b 2 \\\n"])
def test_every_line_of_extra_args_reaches_the_program(started, text):
    assert started(EXTRA_ARGS=text)[-4:] == ["--a", "1", "--b", "2"]
    assert "EXTRA_ARGS=--seed" in started(EXTRA_ARGS="--seed 1 --run_name='my run'")  # an error


@pytest.mark.parametrize("name", ["JOB_NAME", "JOB_NUM_NODES", "JOB_NODELIST", "SUBMIT_DIR", "CPUS_PER_TASK"])
def test_job_runs_without_variables_that_an_allocation_may_lack(started, name):
    arguments = started(file="generate_data.sbatch", SLURM_JOB_CPUS_PER_NODE="72(x2),36", without=f"SLURM_{name}")
    assert folder_of(started(without=f"SLURM_{name}")) and "36" in arguments


def test_command_writes_the_file_and_creates_its_log_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(
        "single_gpu", "--script", "training/run_puzzle.py", "--log-dir", "logs/slurm", "--out", "a/job.sbatch"
    )
    assert result.exit_code == 0, result.output
    text = (tmp_path / "a" / "job.sbatch").read_text()
    assert directives(text)["output"] == "logs/slurm/%x_%j.out" and (tmp_path / "logs" / "slurm").is_dir()
    assert "SCRIPT=${SCRIPT:-training/run_puzzle.py}" in text


def test_submit_without_slurm_names_the_login_node(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = invoke("single_gpu", "--submit")
    assert isinstance(result.exception, OSError) and "login node" in str(result.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["three_gpus"], "single_gpu"),
        (["multi_gpu", "--gpus", "0"], "gpus=0"),
        (["multi_node", "--nodes", "0"], "--nodes"),
        (["multi_gpu", "--nodes", "2"], "nodes=2"),
        (["single_gpu", "--mem", "64 GB"], "mem='64 GB'"),
        (["single_gpu", "--signal-seconds", "70000"], "65535"),
        (["single_gpu", "--account", "a b"], "account='a b'"),
        (["single_gpu", "--accelerate-config", "x.yaml"], "accelerate_config=x.yaml"),
        (["generate_data", "--gpus", "1"], "gpus=1"),
        (["generate_data", "--recipe", "x.yaml"], "recipe=x.yaml"),
        (["single_gpu", "--cluster", "frontier"], "perlmutter"),
        (["single_gpu", "--submit", "--out", "x"], "--submit"),
    ],
)
def test_bad_usage_names_the_option(arguments, message):
    result = invoke(*arguments)
    plain = re.sub(r"[│\s]+", " ", result.output)
    assert result.exit_code == 2 and message in plain, result.output
