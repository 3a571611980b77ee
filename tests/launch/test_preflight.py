"""`hrm-hf preflight`: each check with and without its fault.

Referees: a listening socket, /proc (which is not writable), and real processes that can or cannot connect.
"""

import json
import os
import socket
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.launch import preflight
from hrm_hf.launch.preflight import Check, backends, gpus, hostname, interfaces, output_folder, port_check, threads


LOOPBACK = next(name for name, state in psutil.net_if_stats().items() if name.startswith("lo") and state.isup)


def named(checks: list[Check], name: str) -> Check:
    return next(check for check in checks if check.name == name)


def test_command_prints_a_table_and_exits_0_when_all_checks_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_all_reduce", lambda *args: Check("gloo", "ok", "tried below"))
    result = CliRunner().invoke(app, ["preflight", "--out", str(tmp_path), "--free", "1MB", "--json"])
    checks = json.loads(result.output)
    assert result.exit_code == 0 and checks["ready"], result.output
    names = {check["name"] for check in checks["checks"]}
    assert {"torch", "accelerate", "gloo", "nccl", "port", "disk", "hostname", "torch.compile"} <= names
    assert all(check["fix"] for check in checks["checks"] if check["status"] == "fail")


def test_failed_check_exits_1_and_prints_its_fix_below(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_all_reduce", lambda *args: Check("gloo", "ok", "tried below"))
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["preflight", "--out", str(tmp_path), "--port", str(port)])
    assert result.exit_code == 1
    lines = result.output.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("fail  port"))
    assert f"{port} cannot be bound" in lines[at] and "-> choose another" in lines[at + 1]


def test_two_processes_connect_and_add_their_numbers(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert named(backends(2, 120), "gloo") == Check("gloo", "ok", "2 processes completed an all-reduce")


def test_processes_that_cannot_connect_fail_without_hanging(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    check = named(backends(2, 60), "gloo")
    assert check.status == "fail" and "nosuch0" in check.found and "GLOO_SOCKET_IFNAME" in check.fix


def test_missing_process_fails_after_the_timeout(monkeypatch):
    monkeypatch.setattr(preflight, "RANK_PROGRAM", "import time; time.sleep(600)")
    check = named(backends(2, 1.5), "gloo")
    assert (check.status, check.found) == ("fail", "2 processes did not connect within 1.5 s")


def test_port_in_use_fails_if_requested_and_is_a_note_otherwise(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port_check(port).status == "fail"
        monkeypatch.setattr(preflight, "TORCHRUN_PORT", port)
        assert port_check(None).status == "note"
    assert port_check(port).status == "ok"


@pytest.mark.parametrize("variable", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_missing_interface_fails_and_lists_the_others(variable, monkeypatch):
    for value, status in ((LOOPBACK, "ok"), ("^nosuch", "ok"), ("", "note"), ("nosuch0", "fail")):
        monkeypatch.setenv(variable, value)
        check = named(interfaces(), variable)
        assert check.status == status
    assert "nosuch0" in check.found and LOOPBACK in check.fix


def test_unwritable_folder_fails():
    (check,) = output_folder(Path("/proc/nowhere/runs"))  # unwritable even for root
    assert check.status == "fail" and "cannot write to /proc" in check.found and "--out" in check.fix


def test_low_disk_space_fails_and_leaves_no_files(tmp_path):
    assert {check.status for check in output_folder(tmp_path / "new", 1)} == {"ok"}
    check = named(output_folder(tmp_path, 2**62), "disk")
    assert check.status == "fail" and "--free" in check.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_a_note_unless_one_is_required():
    assert (gpus()[0].status, gpus(required=True)[0].status) == ("note", "fail")


def test_unresolvable_or_foreign_hostname_fails(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert "does not resolve" in hostname().found
    elsewhere = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("198.51.100.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args: elsewhere)
    assert hostname().status == "fail" and "is_host=1" in hostname().fix


def test_threads_are_counted_over_processes(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    assert (threads(2).status, threads(1).status) == ("note", "ok")
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert threads(1).status == "fail"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads(2).fix.startswith("export OMP_NUM_THREADS=")


def test_invalid_size_is_bad_usage():
    result = CliRunner().invoke(app, ["preflight", "--free", "lots"])
    assert result.exit_code == 2 and "lots" in result.output
