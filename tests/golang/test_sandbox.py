"""Misbehaving programs in the sandbox: each is stopped, and the result names the limit."""

import os
import re
import struct
import sys

import pytest
from go_samples import needs_sandbox

from hrm_hf.golang import GoProgram, GoTestRunner, Limits, SandboxError, validate_sandbox
from hrm_hf.golang.data.sources import find_go_source
from hrm_hf.golang.validators import sandbox, seccomp
from hrm_hf.golang.validators.sandbox import MIB


LIMITS = Limits(seconds=3, memory=256 * MIB, disk=16 * MIB)
TEST = "func TestF(t *testing.T) { F(t) }"
external = pytest.mark.external


@pytest.fixture(scope="module")
def runner():
    with GoTestRunner(LIMITS) as runner:
        yield runner


def run(runner, *bodies: str):
    return runner([GoProgram(f"func F(t *testing.T) {{\n{body}\n}}", TEST) for body in bodies])


# The body of a program, and the status and message of its result.
STOPPED = {
    "loop": ("for {\n}", "time", "did not finish in time (3 s)"),
    "fork_bomb": (
        "for { if err := exec.Command(os.Args[0]).Start(); err != nil { t.Fatal(err) } }",
        "processes", "tried to start a process",
    ),
    "files_of_10_gigabytes": (
        "b := make([]byte, 1<<20)\nfor i := 0; i < 10<<10; i++ {\n"
        'if err := os.WriteFile(fmt.Sprint("/tmp/", i), b, 0600); err != nil { t.Fatal(err) } }',
        "disk", "wrote too much to disk",
    ),
    **{f"network_{kind}": (f"_, err := net.{call}; if err != nil {{ t.Fatal(err) }}", "network", "has no network")
       for kind, call in {"near": 'Dial("tcp", "127.0.0.1:22")', "far": 'Dial("tcp", "192.0.2.1:80")',
                          "own": 'Listen("tcp", "127.0.0.1:0")', "unix": 'Listen("unix", "/tmp/socket")'}.items()},
    **{f"file_{number}": (f'b, err := os.ReadFile("{file}"); if err != nil {{ t.Fatal(err) }}; t.Fatal(string(b))',
                          "fail", "no such file or directory")
       for number, file in enumerate((__file__, "/etc/passwd", os.path.realpath(sys.executable)))},
    "environment": ("t.Fatal(os.Environ())", "fail", "GOMEMLIMIT="),
    "output": ('for { fmt.Println(strings.Repeat("x", 1<<16)) }', "output", "wrote too much output"),
    "time_zone": ('if _, err := time.LoadLocation("Asia/Tokyo"); err != nil { t.Fatal(err) }', "pass", ""),
    "written_elsewhere": (
        'for _, d := range []string{"/", "/dev", "/dev/shm", "/proc", "/usr"} {\n'
        'if os.WriteFile(d + "/x", nil, 0600) == nil { t.Fatal(d) } }', "pass", "",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def stopped(runner):
    """Results of all programs, built at once."""
    return dict(zip(STOPPED, run(runner, *(body for body, _, _ in STOPPED.values()))))


@needs_sandbox
@external
@pytest.mark.parametrize("name", STOPPED)
def test_program_is_stopped_at_its_limit(name, stopped):
    result, (_, status, words) = stopped[name], STOPPED[name]
    assert result.status == status and words in result.message, result.output
    assert "PATH=" not in result.output and len(result.output) < 20_000


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
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'No permissions to create new namespace'\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match="No permissions to create new namespace"):
        validate_sandbox.__wrapped__()


def verdict(program: bytes, audit: int, number: int, *arguments: int) -> int:
    """Interpret a seccomp filter and return its answer to a call."""
    steps, place, value = list(struct.iter_unpack("<HBBI", program)), 0, 0
    data = struct.pack("<IIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    while steps[place][0] != 0x06:
        code, then, other, operand = steps[place]
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        elif code == 0x54:
            value &= operand
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            place += then if holds else other
        place += 1
    return steps[place][3]


ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
# Numbers on x86_64 and aarch64, arguments, and the answers without and with `processes`.
ANSWERS = [
    (0, 63, (), ALLOW, ALLOW), (41, 198, (1, 1), EPERM, EPERM), (275, 76, (), EPERM, EPERM),  # read, socket, splice
    (56, 220, (0x50F00,), ALLOW, ALLOW), (56, 220, (17,), EPERM, ALLOW),  # clone of a thread and of a process
    (56, 220, (0x10000011,), EPERM, EPERM), (112, 157, (), EPERM, ALLOW),  # clone into a namespace, setsid
    (72, 25, (3, 6), EPERM, EPERM), (72, 25, (3, 1030), ALLOW, ALLOW),  # fcntl: lock, copy
    (9, 222, (0, 1, 3, 0x22), ALLOW, ALLOW), (9, 222, (0, 1, 3, 0x21), EPERM, EPERM),  # mmap: private, shared
    (10, 226, (0, 1, 3), EPERM, ALLOW), (435, 435, (), ENOSYS, ENOSYS), (600, 600, (), ENOSYS, ENOSYS),  # mprotect
]  # fmt: skip


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
def test_only_listed_calls_are_allowed(machine, processes):
    column, audit = list(seccomp.ARCHITECTURES).index(machine), seccomp.ARCHITECTURES[machine]
    program = seccomp.seccomp_filter(machine, processes)
    for row in ANSWERS:
        assert verdict(program, audit, row[column], *row[2]) == row[3 + processes], row
    calls = seccomp.CALLS | (seccomp.PROCESS_CALLS if processes else {})
    checked = {numbers[column] for numbers in seccomp.CHECKED_CALLS.values()} | {seccomp.CLONE3}
    for number in set(range(seccomp.FIRST_UNKNOWN)) - checked:
        listed = any(numbers[column] == number for numbers in calls.values())
        assert verdict(program, audit, number) == (ALLOW if listed else EPERM), number
    assert verdict(program, 0x40000003, 1) == KILL


@external
@pytest.mark.parametrize(("column", "name"), [(0, "amd64"), (1, "arm64")])
def test_call_numbers_match_go(column, name):
    file = find_go_source() / f"cmd/vendor/golang.org/x/sys/unix/zsysnum_linux_{name}.go"
    theirs = {found[1].lower(): int(found[2]) for found in re.finditer(r"SYS_(\w+)\s+= (\d+)", file.read_text())}
    theirs = {"fchmodat2": 452, "newfstatat": theirs.get("fstatat")} | theirs
    for call, numbers in (seccomp.CALLS | seccomp.PROCESS_CALLS | seccomp.CHECKED_CALLS).items():
        assert numbers[column] == theirs.get(call), call
