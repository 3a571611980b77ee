"""Stand-in that runs the ranks of tensor-parallel and FSDP tests as local CPU processes (gloo)."""

import os
import socket
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_distributed_backend() -> str:
    return "gloo"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int) -> None:
    """Do nothing: CPU ranks share a device."""


def _start_rank_processes(function, args, nprocs: int) -> None:
    """Call `function(rank, *args)` in `nprocs` new processes; the first error ends all and is raised here."""
    mp.spawn(function, args=args, nprocs=nprocs)


def _run_rank(rank: int, world_size: int, port: int, function, args) -> None:
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {name: str(value) for name, value in (addresses | {"WORLD_SIZE": world_size}).items()}
    dist.init_process_group(_get_distributed_backend(), rank=rank, world_size=world_size)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _launch(world_size: int, function, *args) -> None:
    _start_rank_processes(_run_rank, (world_size, _free_port(), function, args), world_size)


def run_distributed(world_size: int):
    """`run_distributed(2)(function)(*args)` calls `function(rank, *args)` in two processes of one group."""
    return lambda function: partial(_launch, world_size, function)
