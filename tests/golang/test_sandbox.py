"""Programs that misbehave, in the sandbox: each is stopped, and the result says what stopped it."""

import os
import socket
from pathlib import Path

import pytest
from go_samples import needs_sandbox

from hrm_hf.golang import GoProgram, GoTestRunner, Limits, SandboxError, validate_sandbox
from hrm_hf.golang.validators import sandbox
from hrm_hf.golang.validators.sandbox import MIB


LIMITS = Limits(seconds=3, memory=256 * MIB, disk=16 * MIB)
SYSTEM = [(path, path) for path in ("/usr", "/bin", "/lib", "/lib64") if os.path.exists(path)]
TEST = "func TestF(t *testing.T) { F(t) }"
external = pytest.mark.external


@pytest.fixture(scope="module")
def runner():
    with GoTestRunner(LIMITS) as runner:
        yield runner


def run(runner, *bodies: str):
    return runner([GoProgram(f"func F(t *testing.T) {{\n{body}\n}}", TEST) for body in bodies])


@needs_sandbox
@external
def test_an_infinite_loop_is_stopped(runner):
    (result,) = run(runner, "for {\n}")
    assert result.status == "time"
    assert "not finished in time (3 s)" in result.message


@needs_sandbox
@external
def test_a_fork_bomb_cannot_start_its_first_process(runner):
    bomb = "for { if err := exec.Command(os.Args[0]).Start(); err != nil { t.Fatal(err) } }"
    raw = "for { if _, _, err := syscall.RawSyscall(syscall.SYS_CLONE, 17, 0, 0); err != 0 { t.Fatal(err) } }"
    first, second = run(runner, bomb, raw)
    assert first.status == "processes"
    assert "tried to start a process" in first.message
    assert second.status == "fail" and "operation not permitted" in second.message


@needs_sandbox
@external
def test_a_write_of_ten_gigabytes_is_stopped(runner):
    one = 'f, err := os.Create("/tmp/x"); if err != nil { t.Fatal(err) }\nb := make([]byte, 1<<20)\n'
    one += "for i := 0; i < 10<<10; i++ { if _, err := f.Write(b); err != nil { t.Fatal(err) } }"
    many = "b := make([]byte, 1<<20)\nfor i := 0; i < 10<<10; i++ { "
    many += 'if err := os.WriteFile(fmt.Sprint("/tmp/", i), b, 0600); err != nil { t.Fatal(err) } }'
    for result in run(runner, one, many):
        assert result.status == "disk"
        assert "wrote more to disk than it may" in result.message


@needs_sandbox
@external
def test_only_tmp_is_writable(runner):
    body = 'for _, d := range []string{"/", "/dev", "/dev/shm", "/proc", "/usr"} {\n'
    body += 'if os.WriteFile(d + "/x", nil, 0600) == nil { t.Fatal(d) } }'
    assert run(runner, body)[0].status == "pass"


@needs_sandbox
@external
def test_network_calls_reach_neither_localhost_nor_other_hosts(runner):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        local, far = run(
            runner,
            f'_, err := net.Dial("tcp", "{address}"); if err != nil {{ t.Fatal(err) }}',
            '_, err := net.Dial("tcp", "192.0.2.1:80"); if err != nil { t.Fatal(err) }',
        )
    for result in (local, far):
        assert result.status == "network"
        assert "the sandbox has no network" in result.message


@needs_sandbox
@external
def test_the_users_home_and_other_files_cannot_be_read(runner, tmp_path, monkeypatch):
    home_secret = Path.home() / f".hrm_hf_test_{os.getpid()}"
    other = tmp_path / "secret"
    other.write_text("secret")
    try:
        home_secret.write_text("secret")
        body = 'b, err := os.ReadFile("{}"); if err != nil {{ t.Fatal(err) }}; t.Fatal(string(b))'
        results = run(runner, *(body.format(path) for path in (home_secret, other, "/etc/passwd")))
    finally:
        home_secret.unlink()
    for result in results:
        assert result.status == "fail"
        assert "no such file or directory" in result.message


@needs_sandbox
@external
def test_the_environment_contains_only_variables_of_the_sandbox(runner, monkeypatch):
    monkeypatch.setenv("HRM_SECRET", "secret")
    (result,) = run(runner, "t.Fatal(os.Environ())")
    assert "HRM_SECRET" not in result.output
    assert "GOMEMLIMIT=" in result.output


@needs_sandbox
@external
def test_endless_output_is_stopped_and_truncated(runner):
    (result,) = run(runner, 'for { fmt.Println(strings.Repeat("x", 1<<16)) }')
    assert result.status == "output"
    assert len(result.output) < 20_000


@needs_sandbox
@external
def test_one_sample_cannot_affect_the_next(runner):
    vandal = 'for _, d := range []string{"/cache", "/build", "/out", "/usr/lib/go"} {\n'
    vandal += 'os.RemoveAll(d); os.MkdirAll(d, 0777); os.WriteFile(d + "/x", []byte("x"), 0666) }\nos.Exit(0)'
    results = run(runner, vandal, "panic(1)", "", "undefinedName()", "}{")
    assert [result.status for result in results] == ["fail", "fail", "pass", "build", "syntax"]
    assert run(runner, "")[0].status == "pass"


def test_missing_bubblewrap_is_an_error_that_names_the_package(monkeypatch):
    validate_sandbox.cache_clear()
    monkeypatch.setattr(sandbox.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SandboxError, match=r"bwrap .*install bubblewrap"):
        GoTestRunner()
    validate_sandbox.cache_clear()


@needs_sandbox
@external
def test_a_failing_sandbox_is_rejected_with_its_own_error(monkeypatch, tmp_path):
    validate_sandbox.cache_clear()
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'No permissions to create new namespace'\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match="No permissions to create new namespace"):
        validate_sandbox()
    validate_sandbox.cache_clear()
