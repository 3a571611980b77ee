"""The files in accelerate_configs: accelerate reads each, and those that can run on the CPU train with two processes.

Referee: the losses of one process on the complete batch. accelerate computes the environment that its launcher would
set; the processes are started by torchrun, because `accelerate launch` forms no group on the CPU.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import launched_training
import pytest
import yaml
from accelerate import DistributedType
from accelerate.commands import launch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from accelerate_launch import FOLDER, environment, launch_arguments


TYPES = {
    "cpu": DistributedType.NO,
    "single_gpu": DistributedType.NO,
    "multi_gpu": DistributedType.MULTI_GPU,
    "multi_node": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "deepspeed_zero2": DistributedType.DEEPSPEED,
    "deepspeed_zero3": DistributedType.DEEPSPEED,
}
# as in the launcher's line of hrm_hf/launch/slurm.py
JOB_FLAGS = ["--rdzv_backend", "static", "--deepspeed_multinode_launcher", "standard"]
DEEPSPEED = ("deepspeed>=0.19", "einops", "hjson", "msgpack", "ninja", "py-cpuinfo")  # --no-deps avoids a second torch


def train(out: Path, processes: int, env: dict[str, str]) -> list[dict]:
    """Run the worker and return the results of its processes."""
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    result = subprocess.run(
        [*command, launched_training.__file__, str(out)],
        env={**os.environ, **env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    assert result.returncode == 0, result.stderr.decode()[-3000:]
    return [json.loads((out / f"seen-{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Return the losses of one process on the complete batch."""
    folder = tmp_path_factory.mktemp("one")
    launched_training.main(str(folder))
    return json.loads((folder / "seen-0.json").read_text())["losses"]


def test_every_file_is_tested():
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(TYPES)


@pytest.mark.parametrize("name", TYPES)
def test_accelerate_reads_the_file_and_knows_its_keys(name):
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    assert isinstance(config, ClusterConfig)  # rejects unknown keys
    assert config.distributed_type == TYPES[name]


@pytest.mark.parametrize("name", TYPES)
def test_the_launcher_knows_every_option_of_the_file(name):
    # Keys of fsdp_config and deepspeed_config are not checked by ClusterConfig: an unknown one is silently ignored.
    fields = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    known = set(vars(launch.launch_command_parser().parse_args(["train.py"])))
    for section in ("fsdp_config", "deepspeed_config"):
        assert set(fields.get(section, {})) <= known


@pytest.mark.parametrize("flags", [[], JOB_FLAGS], ids=["by hand", "in a job"])
@pytest.mark.parametrize("name", ["multi_node", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_each_of_several_nodes_starts_its_processes_and_finds_the_first(name, flags):
    nodes = ["--num_machines", "2", "--num_processes", "8", "--machine_rank", "1"]
    nodes += ["--main_process_ip", "10.0.0.1", "--main_process_port", "23456"]
    file = ["--config_file", str(FOLDER / f"{name}.yaml")]
    args = launch.launch_command_parser().parse_args([*file, *nodes, *flags, "train.py"])
    args, defaults, _ = launch._validate_launch_command(args)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        command, _ = prepare_deepspeed_cmd_env(args)
        assert command is None  # DeepSpeed's own launcher would log in to the other nodes
    else:
        prepare_multi_gpu_env(args)
    assert (args.nnodes, args.node_rank, args.nproc_per_node, args.rdzv_backend) == ("2", 1, "4", "static")
    assert args.rdzv_endpoint == "10.0.0.1:23456"


@pytest.mark.parametrize("name", TYPES)
def test_precision_comes_from_the_recipe(name):
    assert launch_arguments(name)[0].mixed_precision == "no"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["multi_gpu", "fsdp2"])
def test_two_cpu_processes_train_by_ddp_regardless_of_the_file(name, tmp_path, one_process):
    # On the CPU, accelerate does not shard with fsdp2.yaml; the file says so.
    for seen in train(tmp_path / "run", 2, environment(name)):
        assert (seen["num_processes"], seen["distributed_type"], seen["backend"]) == (2, "MULTI_CPU", "gloo")
        assert seen["losses"] == pytest.approx(one_process, abs=1e-6)


@pytest.fixture(scope="module")
def deepspeed(tmp_path_factory) -> dict[str, str]:
    """Return environment variables with which processes find DeepSpeed, installed into a folder if necessary."""
    if importlib.util.find_spec("deepspeed"):
        return {}
    folder = str(tmp_path_factory.mktemp("deepspeed"))
    command = f"-m pip install --quiet --no-deps --no-build-isolation --target {folder}"
    environment = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    if subprocess.run([sys.executable, *command.split(), *DEEPSPEED], env=environment).returncode:
        pytest.skip("pip cannot install DeepSpeed here")
    return {"PYTHONPATH": os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.mark.slow  # installs DeepSpeed, and compiles a small C++ library at first
@pytest.mark.parametrize("name", ["deepspeed_zero2", "deepspeed_zero3"])
def test_two_cpu_processes_train_by_deepspeed(name, tmp_path, one_process, deepspeed):
    seen = train(tmp_path / "run", 2, {**environment(name), **deepspeed, "DS_ACCELERATOR": "cpu"})
    for process in seen:
        assert (process["num_processes"], process["distributed_type"]) == (2, "DEEPSPEED")
        assert process["losses"] == pytest.approx(one_process, abs=1e-6)
    assert (tmp_path / "run" / "model.safetensors").stat().st_size > 1000
