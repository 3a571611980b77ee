"""Two network namespaces as hosts: our launcher lines connect them, where torch's guess from names fails.

Referee: the kernel. The namespaces share only the addresses of the cable between them, and the sum over ranks needs
both. The lines come from hrm_hf/launch/slurm.py; the test sets the variables that a job script sets.
"""

import json
import os
import shutil
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
from launcher_lines import ACCELERATE, TORCHRUN


pytestmark = pytest.mark.external
ROOT = Path(__file__).parents[2]
IP = shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
ADDRESSES = ("10.99.0.1", "10.99.0.2")


def ip(*arguments: str) -> None:
    result = subprocess.run([IP, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, f"ip {' '.join(arguments)}: {result.stderr}"


@pytest.fixture(scope="module")
def hosts():
    """Names of two namespaces, connected by the interface `wire` in each."""
    if IP is None:
        pytest.skip("needs the program ip (apt-get install iproute2)")
    name = f"hrm{uuid.uuid4().hex[:6]}"
    if subprocess.run([IP, "netns", "add", f"{name}a"], capture_output=True).returncode:
        pytest.skip("may not make network namespaces (CAP_NET_ADMIN)")
    names = (f"{name}a", f"{name}b")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for host, address in zip(names, ADDRESSES):
            ip("-n", host, "address", "add", f"{address}/24", "dev", "wire")
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", "wire", "up")
        yield names
    finally:
        for host in names:
            with suppress(AssertionError):
                ip("netns", "delete", host)


def start(hosts, line: str, folder: Path, processes: int, **variables: str) -> list[subprocess.Popen]:
    """Start the launcher line on both hosts, with the variables of the job script and Slurm."""
    started = []
    for node, (host, address) in enumerate(zip(hosts, ADDRESSES)):
        environment = {
            **os.environ, "PYTHON": sys.executable, "NODES": "2", "GPUS": str(processes), "HEAD_ADDR": ADDRESSES[0],
            "PORT": "23456", "SLURM_NODEID": str(node), "NODE_ADDR": address, "SLURMD_NODENAME": host,
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "wire", **variables,
        }  # fmt: skip
        command = f"exec {line} {ROOT}/tests/hpc/all_reduce.py --folder {folder}"
        with open(folder / f"{host}.txt", "w") as output:
            started.append(
                subprocess.Popen(
                    [IP, "netns", "exec", host, "bash", "-c", command], env=environment, stdout=output, stderr=output,
                )
            )  # fmt: skip
    return started


def finish(started: list[subprocess.Popen], seconds: float) -> list[int | None]:
    """Return exit statuses, with None for processes killed after `seconds`."""
    statuses: list[int | None] = []
    for process in started:
        try:
            statuses.append(process.wait(seconds))
        except subprocess.TimeoutExpired:
            statuses.append(None)
    for process, status in zip(started, statuses):
        if status is None:
            process.terminate()
            process.wait(60)
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, variables",
    [
        pytest.param(TORCHRUN, {}, id="torchrun"),
        pytest.param(
            ACCELERATE,
            {"ACCELERATE_CONFIG": f"{ROOT}/accelerate_configs/multi_gpu.yaml", "ACCELERATE_USE_CPU": "true"},
            id="accelerate",
        ),
    ],
)
def test_two_hosts_connect_and_add_their_ranks(hosts, tmp_path, line, variables):
    statuses = finish(start(hosts, line, tmp_path, processes=1, **variables), 180)
    assert statuses == [0, 0], "\n".join((tmp_path / f"{host}.txt").read_text()[-3000:] for host in hosts)
    found = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]
    assert [(one["processes"], one["ranks"]) for one in found] == [(2, 1), (2, 1)]
    assert {one["node"] for one in found} == set(hosts)


@pytest.mark.slow  # waits for torch's timeout
def test_without_is_host_both_hosts_wait_for_the_other(hosts, tmp_path):
    flag = '--rdzv_conf "is_host=$((SLURM_NODEID == 0))"'
    assert flag in TORCHRUN
    statuses = finish(start(hosts, TORCHRUN.replace(flag, ""), tmp_path, processes=1), 180)
    assert 0 not in statuses and not list(tmp_path.glob("seen-*"))
    for host in hosts:
        assert "RendezvousConnectionError" in (tmp_path / f"{host}.txt").read_text()
