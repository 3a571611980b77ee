"""Hostile programs in the Go sandbox: they cannot escape, exceed limits, survive a run or forge results.

Each program is real Go, built and run like any sample. A successful attack calls t.Fatal("escaped"), so an attack has
failed if its test passes, or if it ended at the limit that its row names.
"""

import os
import platform
import signal
import threading
from pathlib import Path

import pytest
from go_samples import SYSTEM, needs_sandbox

from hrm_hf.golang import GoProgram, GoTestRunner, Limits, SandboxError
from hrm_hf.golang.validators import sandbox
from hrm_hf.golang.validators.go_tests import judge
from hrm_hf.golang.validators.sandbox import MIB, Run, run_sandboxed


pytestmark = [pytest.mark.external, needs_sandbox]

LIMITS = Limits(seconds=20, memory=256 * MIB, disk=16 * MIB)
TEST = "func TestF(t *testing.T) { F(t) }"


def function(body: str) -> str:
    return f"func F(t *testing.T) {{\n{body}\n}}"


# Files that the host's root could open for writing in a writable /proc.
PROC_FILES = [
    "sys/kernel/core_pattern", "sys/kernel/panic", "sys/vm/drop_caches", "sys/net/ipv4/ip_forward", "sysrq-trigger",
    "self/mem", "thread-self/mem", "1/mem", "1/oom_score_adj",
]  # fmt: skip
# Calls that must fail with EPERM: numbers on x86_64 and aarch64, arguments.
CALLS = {
    "ptrace": (101, 117, "16, 1, 0, 0, 0, 0"), "process_vm_writev": (311, 271, "1, iov, 1, iov, 1, 0"),
    "unshare": (272, 97, "0x10000000, 0, 0, 0, 0, 0"), "memfd_create": (319, 279, "name, 0, 0, 0, 0, 0"),
    "shmget": (29, 194, "0, 1<<20, 0x3b6, 0, 0, 0"), "mq_open": (240, 180, "name, 0x42, 0x180, 0, 0, 0"),
    "setxattr": (188, 5, "tmp, name, name, 1, 0, 0"), "mount": (165, 40, "name, tmp, name, 0, 0, 0"),
    "io_uring_setup": (425, 425, "8, 0, 0, 0, 0, 0"), "landlock_create_ruleset": (444, 444, "0, 0, 1, 0, 0, 0"),
    "seccomp": (317, 277, "2, 0, iov, 0, 0, 0"), "filter by prctl": (157, 167, "22, 2, iov, 0, 0, 0"),
    "splice": (275, 76, "0, 0, 1, 0, 1, 0"), "vmsplice": (278, 75, "1, iov, 1, 0, 0, 0"),
    "sendfile": (40, 71, "1, 0, 0, 1, 0, 0"), "larger pipe": (72, 25, "0, 1031, 1<<20, 0, 0, 0"),
    "file lock": (72, 25, "0, 6, iov, 0, 0, 0"), "terminal input": (16, 29, "0, 0x5412, name, 0, 0, 0"),
    "AF_VSOCK": (41, 198, "40, 1, 0, 0, 0, 0"), "socketpair": (53, 199, "1, 1, 0, iov, 0, 0"),
    "thread with its own files": (56, 220, "0x10900, 0, 0, 0, 0, 0"), "fork": (57, 220, "17, 0, 0, 0, 0, 0"),
    "limits of PID 1": (302, 261, "1, 7, 0, iov, 0, 0"), "mprotect to writable": (10, 226, "page, 4096, 3, 0, 0, 0"),
    "huge pages": (9, 222, "0, 1<<21, 3, 0x40022, ^uintptr(0), 0"),
}  # fmt: skip
CALL = """number = uintptr(%d)
_, _, err = syscall.RawSyscall6(number, %s)
fmt.Println(map[bool]string{true: "refused", false: "escaped"}[err == syscall.EPERM], "%s")
"""
ARGUMENTS = """address := func(x []byte) uintptr { return uintptr(unsafe.Pointer(&x[0])) }
buffer := make([]byte, 64)
vector := []uintptr{address(buffer), 8}
iov, name, tmp := uintptr(unsafe.Pointer(&vector[0])), address([]byte("user.x\\x00")), address([]byte("/tmp\\x00"))
mapped, _ := syscall.Mmap(-1, 0, 4096, 1, syscall.MAP_PRIVATE|syscall.MAP_ANON)
page, number, err := address(mapped), uintptr(0), syscall.Errno(0)
"""
# Memory above the limit of 256 MiB; each touches 1 GiB, or 64 GiB if only page tables fill up.
TOUCH = """if err != nil { return }
for i := 0; i < len(b); i += 4096 { b[i] = 1 }
t.Fatal("escaped")"""
MEMORY = {
    "dev_zero_shared": 'f, err := os.OpenFile("/dev/zero", os.O_RDWR, 0); if err != nil { return }\n'
    "b, err := syscall.Mmap(int(f.Fd()), 0, 1<<30, 3, syscall.MAP_SHARED)\n" + TOUCH,
    "anonymous_shared": "b, err := syscall.Mmap(-1, 0, 1<<30, 3, syscall.MAP_SHARED|syscall.MAP_ANON)\n" + TOUCH,
    "grows_down": "b, err := syscall.Mmap(-1, 0, 1<<30, 3, syscall.MAP_PRIVATE|syscall.MAP_ANON|0x100)\n" + TOUCH,
    "writable_afterwards": "b, err := syscall.Mmap(-1, 0, 1<<30, 1, syscall.MAP_PRIVATE|syscall.MAP_ANON)\n"
    "if err == nil { err = syscall.Mprotect(b, 3) }\n" + TOUCH,
    "page_tables": "b, err := syscall.Mmap(-1, 0, 1<<36, 1, syscall.MAP_PRIVATE|syscall.MAP_ANON|0x4000)\n"
    "if err != nil { return }\nfor i := 0; i < len(b); i += 1 << 21 { if b[i] == 1 { return } }\n"
    't.Fatal("escaped")',
}
# Loops that end at a limit: body and status.
WALLS = {
    "heap": ("b := make([]byte, 1<<20); for j := range b { b[j] = 1 }; kept = append(kept, b)", "memory"),
    "one_large_slice": ("b := make([]byte, 1<<40); kept = append(kept, b)", "memory"),
    "folders": ('if err := os.Mkdir(fmt.Sprint("/tmp/", i), 0700); err != nil { t.Fatal(err) }', "disk"),
    "empty_files": ('if err := os.WriteFile(fmt.Sprint("/tmp/", i), nil, 0600); err != nil { t.Fatal(err) }', "disk"),
    "hard_links": (
        'if i == 0 { os.WriteFile("/tmp/x", nil, 0600) }\n'
        'if err := os.Link("/tmp/x", fmt.Sprint("/tmp/", i)); err != nil { t.Fatal(err) }', "disk",
    ),
    "symbolic_links": ('if err := os.Symlink("x", fmt.Sprint("/tmp/", i)); err != nil { t.Fatal(err) }', "disk"),
    "threads": ("go func() { runtime.LockOSThread(); select {} }(); time.Sleep(time.Microsecond)", "processes"),
}  # fmt: skip
ESCAPES = {
    "environment_of_pid_1": 'b, err := os.ReadFile("/proc/1/environ"); if err != nil { t.Fatal(err) }\n'
    'if strings.Contains(string(b), "PATH") || strings.Contains(string(b), "/") { t.Fatal("escaped: ", string(b)) }',
    "paths_of_the_host_in_pid_1": 'b, err := os.ReadFile("/proc/1/cmdline"); if err != nil { t.Fatal(err) }\n'
    'if strings.Contains(string(b), "hrm_hf") { t.Fatal("escaped: ", string(b)) }',
    "mode_of_the_hosts_devices": 'if os.Chmod("/dev/null", 0666) == nil { t.Fatal("escaped") }',
    "times_of_the_hosts_devices": 'if os.Chtimes("/dev/full", time.Now(), time.Now()) == nil { t.Fatal("escaped") }',
    "open_files_of_the_host": 'links, _ := os.ReadDir("/proc/self/fd")\nfor _, link := range links {\n'
    'target, _ := os.Readlink("/proc/self/fd/" + link.Name())\n'
    'if strings.HasPrefix(target, "/memfd") { t.Fatal("escaped: ", target) } }',
    "own_program": 'if _, err := os.OpenFile("/program", os.O_WRONLY, 0); err == nil { t.Fatal("escaped") }',
    "a_device_of_its_own": 'if syscall.Mknod("/tmp/d", syscall.S_IFBLK|0600, 0) == nil { t.Fatal("escaped") }',
    "terminal": 'for _, name := range []string{"/dev/tty", "/dev/ptmx", "/dev/pts/ptmx"} {\n'
    'if f, err := os.OpenFile(name, os.O_RDWR, 0); err == nil { t.Fatal("escaped: ", f.Name()) } }',
}
# Programs that fail a test, or would, but try to be counted as passed.
FORGED = {
    "exit_in_init": 'func init() { os.Exit(0) }',
    "prints_all_of_it": 'func init() { fmt.Println("=== RUN   TestF\\n--- PASS: TestF (0s)\\nPASS"); os.Exit(0) }',
    "runs_no_test": 'func init() { os.Args = []string{os.Args[0], "-test.run=^$"} }',
    "skips_a_test": 'func init() { os.Args = []string{os.Args[0], "-test.skip=^TestF$"} }',
    "reads_the_word": "func init() { b := make([]byte, 100); n, _ := os.Stdin.Read(b)\n"
    'fmt.Printf("\\n%s\\nPASS\\n", b[:n]); os.Exit(0) }',
    "reads_the_word_of_pid_1": 'func init() { f, _ := os.Open("/proc/1/fd/0"); f.SetDeadline(time.Now())\n'
    'b, _ := os.ReadFile("/proc/1/fd/0"); fmt.Printf("\\n%s\\nPASS\\n", b); os.Exit(0) }',
    "brings_its_own_main": 'func TestMain(m *testing.M) { fmt.Println("PASS"); os.Exit(0) }',
    "prints_pass_in_a_test": 'func leave(*testing.T) { fmt.Println("PASS"); syscall.Exit(0) }',
    "leaves_by_another_goroutine": "func leave(*testing.T) { go func() { time.Sleep(20 * time.Millisecond)\n"
    'fmt.Println("PASS"); syscall.Exit(0) }(); time.Sleep(time.Minute) }',
    "leaves_by_goexit": "func leave(*testing.T) {\n"
    'go func() { for { fmt.Println("PASS"); syscall.Exit(0) } }(); runtime.Goexit() }',
    "kills_everything": "func leave(*testing.T) { for _, pid := range []int{1, -1, 0} {\n"
    "syscall.Kill(pid, syscall.SIGKILL) } }",
}  # fmt: skip
FORGED_TEST = 'func TestF(t *testing.T) { leave(t); t.Fatal("not as it should be") }\nfunc TestG(t *testing.T) {}'


def _programs() -> dict[str, GoProgram]:
    write = 'if _, err := os.OpenFile("/proc/%s", os.O_WRONLY, 0); err == nil { fmt.Println("escaped", "%s") } else\n'
    write += '{ fmt.Println("refused", "%s") }\n'
    column = platform.machine() == "aarch64"
    calls = (CALL % (row[column], row[2], name) for name, row in CALLS.items())
    bodies = {"proc": "".join(write % (name, name, name) for name in PROC_FILES), "calls": ARGUMENTS + "".join(calls)}
    bodies |= {f"memory {name}": body for name, body in MEMORY.items()}
    bodies |= {
        f"wall {name}": f"var kept [][]byte\nfor i := 0; i < 100000; i++ {{\n{body}\n}}\n_ = kept"
        for name, (body, _) in WALLS.items()
    }
    bodies |= {f"escape {name}": body for name, body in ESCAPES.items()}
    found = {name: GoProgram(function(body), TEST) for name, body in bodies.items()}
    for name, code in FORGED.items():
        rest = "" if "func leave" in code else "\nfunc leave(*testing.T) {}"
        found[f"forged {name}"] = GoProgram(code + rest, FORGED_TEST)
    return found


@pytest.fixture(scope="module")
def runner():
    with GoTestRunner(LIMITS, chunk=100) as runner:
        yield runner


@pytest.fixture(scope="module")
def results(runner):
    """Build all programs at once, which takes a quarter of the time."""
    programs = _programs()
    return dict(zip(programs, runner(list(programs.values()))))


@pytest.mark.parametrize("name", PROC_FILES)
def test_nothing_in_proc_can_be_written(results, name):
    assert f"refused {name}\n" in results["proc"].output


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_escape_or_take_uncounted_memory_are_rejected(results, name):
    assert f"refused {name}\n" in results["calls"].output


@pytest.mark.parametrize("name", MEMORY)
def test_no_kind_of_memory_escapes_the_limit(results, name):
    result = results[f"memory {name}"]
    assert result.status in ("pass", "memory"), result.output


@pytest.mark.parametrize("name", WALLS)
def test_kernel_memory_use_is_limited(results, name):
    result = results[f"wall {name}"]
    assert result.status == WALLS[name][1], result.output


@pytest.mark.parametrize("name", ESCAPES)
def test_sandbox_neither_sees_nor_changes_the_host(results, name):
    result = results[f"escape {name}"]
    assert result.status == "pass", result.output


@pytest.mark.parametrize("name", FORGED)
def test_forged_pass_is_a_failure(results, name):
    result = results[f"forged {name}"]
    assert result.status == "fail", result.output


def test_test_main_runs_and_cannot_hide_a_failure(runner):
    main = 'func TestMain(m *testing.M) { ready = true; code := m.Run(); fmt.Println("closed", code); os.Exit(%s) }\n'
    tests = 'var ready bool\nfunc TestF(t *testing.T) { if !ready || F() != 1 { t.Fatal("bad") } }\n'
    right, wrong = "func F() int { return 1 }", "func F() int { return 2 }"
    found = runner(
        [
            GoProgram(right, main % "code" + tests),
            GoProgram(right, "package main_test; " + (main % "code" + tests).replace("|| F() != 1", "")),
            GoProgram(wrong, main % "code" + tests),
            GoProgram(wrong, main % "0" + tests),
            GoProgram(right + "\nfunc TestMain(m *testing.M) { os.Exit(0) }", main % "code" + tests),
        ]
    )
    assert [result.status for result in found] == ["pass", "pass", "fail", "fail", "pass"]
    assert "closed 0" in found[0].output


def test_all_skipped_tests_are_a_failure(runner):
    skip = 'func TestF(t *testing.T) { t.Skip("not here") }\n'
    some = skip + 'func TestG(t *testing.T) { t.Run("x", func(t *testing.T) { t.Parallel() }) }'
    found = runner([GoProgram("func F() {}", skip), GoProgram("func F() {}", some), GoProgram(function(""), TEST)])
    assert [result.status for result in found] == ["fail", "pass", "pass"]
    assert found[2].output == "PASS\n"  # the harness's marker is removed


# Messages in runtime/*.go of Go 1.5 to 1.27.
ALLOCATION_FAILURES = [
    "runtime: out of memory: cannot allocate 4194304-byte block (3833856 in use)\nfatal error: out of memory",
    "fatal error: runtime: cannot allocate memory", "fatal error: runtime: cannot map pages in arena address space",
    "runtime: cannot reserve arena virtual address space\nfatal error: ...",
    "fatal error: failed to reserve page summary memory", "fatal error: out of memory (stackalloc)",
    "fatal error: failed to allocate aligned heap memory; too many retries",
    "runtime: mmap: too much locked memory (check 'ulimit -l').",
    "runtime: failed to create new OS thread (have 12 already; errno=12)\nfatal error: newosproc",
]  # fmt: skip


@pytest.mark.parametrize("output", ALLOCATION_FAILURES)
def test_failed_allocation_is_reported_as_memory(output):
    result = judge(Run(2, f"{output}\n\ngoroutine 1 [running]:\n", "", 0.1), LIMITS, "word")
    assert result.status == "memory"
    assert "(256 MiB)" in result.message


def test_program_output_about_memory_is_not_a_memory_failure():
    output = "--- FAIL: TestF (0.00s)\n    main_test.go:4: got out of memory, want cannot map"
    assert judge(Run(1, output, "", 0.1), LIMITS, "word").status == "fail"


def processes_with(mark: str) -> dict[int, tuple[str, ...]]:
    """Return name, uids and control group, as seen by the host, of the processes with a mark in their command."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "cmdline").read_bytes():
                texts = [(folder / name).read_text() for name in ("comm", "status", "cgroup")]
                found[int(folder.name)] = (texts[0].strip(), texts[1].partition("Uid:")[2].split("\n")[0], texts[2])
        except OSError:  # it has ended in the meantime
            continue
    return found


@pytest.mark.parametrize("processes", [False, True], ids=["run", "build"])
def test_the_host_sees_no_uid_0_in_a_sandbox_and_its_own_control_group(processes):
    mark = f"110.{os.getpid()}{int(processes)}"
    given, options = (["/usr/bin/sleep", mark], Limits(120)), {"read_only": SYSTEM, "processes": processes}
    thread = threading.Thread(target=run_sandboxed, args=given, kwargs=options)
    thread.start()
    sleeping, seen = [], {}
    while not sleeping and thread.is_alive():
        seen = processes_with(mark)
        sleeping = [pid for pid, (name, _, _) in seen.items() if name == "sleep"]
    for pid in sleeping:
        os.kill(pid, signal.SIGKILL)
    thread.join()
    assert sleeping and {group for _, _, group in seen.values()} == {Path("/proc/self/cgroup").read_text()}
    assert not any("0" in uids.split() for _, uids, _ in seen.values()), seen


ENDINGS = {
    "in_its_own_session": "setsid sleep MARK & exit 0",
    "by_a_child_of_a_child": "(setsid sh -c 'sleep MARK & sleep MARK' &) ; exit 0",
    "deaf_to_signals": "trap '' TERM HUP INT QUIT; (trap '' TERM HUP; sleep MARK) & sleep MARK",
    "with_its_output_closed": "exec >&- 2>&-; sleep MARK & sleep MARK",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_no_process_survives_a_run(name):
    mark = f"61.{os.getpid()}{list(ENDINGS).index(name)}"
    command = ["/bin/sh", "-c", ENDINGS[name].replace("MARK", mark)]
    run_sandboxed(command, Limits(seconds=1), read_only=SYSTEM, processes=True)
    assert processes_with(mark) == {}


def test_hanging_sandbox_is_an_error(monkeypatch):
    alive, kill = [], signal.pidfd_send_signal
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda pidfd, _: alive.append(os.dup(pidfd)))
    monkeypatch.setattr(sandbox, "END_SECONDS", 0.0)
    try:
        with pytest.raises(SandboxError, match=r"sandbox .*\b0 s\b"):
            run_sandboxed(["/usr/bin/sleep", "20"], Limits(seconds=0.2), read_only=SYSTEM)
    finally:
        for pidfd in alive:
            kill(pidfd, signal.SIGKILL)
            os.close(pidfd)


def test_inputs_may_lie_in_private_folders(tmp_path):
    closed = tmp_path / "closed"
    (closed / "out").mkdir(parents=True)
    (closed / "text").write_text("given")
    closed.chmod(0o700)
    sandbox.hand_over(closed / "out")
    command = ["/bin/sh", "-c", "cat /text; echo made > /out/new; echo more > /text"]
    given = {"read_only": [*SYSTEM, (str(closed / "text"), "/text")], "writable": [(str(closed / "out"), "/out")]}
    run = run_sandboxed(command, Limits(), processes=True, **given)
    assert run.output.startswith("given") and "Read-only file system" in run.output
    assert (closed / "out" / "new").read_text() == "made\n"
    assert (closed / "text").read_text() == "given"


@pytest.mark.parametrize("outside", [0, 1000])
def test_root_without_another_uid_is_rejected_and_an_ordinary_user_keeps_its_uid(monkeypatch, outside):
    monkeypatch.setattr(sandbox, "_id_map", lambda kind: [(os.geteuid(), outside, 1)])
    if outside:
        assert sandbox.sandbox_uid.__wrapped__() is None
    else:
        with pytest.raises(SandboxError, match="ordinary user"):
            sandbox.sandbox_uid.__wrapped__()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_has_the_same_sandbox():
    uid, (reading, writing) = sandbox.sandbox_uid(), os.pipe()
    child = os.fork()
    if not child:  # not another interpreter, which may be readable only by root
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            sandbox.sandbox_uid.cache_clear()
            script = "echo > /proc/sys/kernel/panic; mkdir /tmp/x && ulimit -p; cat /dev/zero; echo done"
            run = run_sandboxed(["/bin/sh", "-c", script], Limits(threads=77), read_only=SYSTEM, processes=True)
            os.write(writing, f"{sandbox.sandbox_uid()} {run.status} {run.output}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert said.startswith("None 0 ")
    assert "Read-only file system" in said and "77\n" in said and "Permission denied" in said
    assert said.endswith("done\n")
