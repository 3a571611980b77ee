"""The files in accelerate_configs as `accelerate launch --config_file` reads them."""

from pathlib import Path

from accelerate.commands import launch
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env


FOLDER = Path(__file__).parents[2] / "accelerate_configs"


def launch_arguments(name: str, processes: int = 2):
    """Return the arguments of `accelerate launch` with this file in accelerate_configs."""
    flags = ["--config_file", str(FOLDER / f"{name}.yaml"), "--num_processes", str(processes), "train.py"]
    return launch._validate_launch_command(launch.launch_command_parser().parse_args(flags))


def environment(name: str) -> dict[str, str]:
    """Return the variables that accelerate would set for the processes of a launch with this file."""
    args, defaults, _ = launch_arguments(name)
    args.main_process_port = 0
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)  # as launch_command does
        return prepare_deepspeed_cmd_env(args)[1]
    return prepare_multi_gpu_env(args)
