"""Run the tests of untrusted Go programs, which are built in chunks and run in separate sandboxes.

Building and running are separate, because a program that can write to the build cache could corrupt the next sample.

1. Build: one `go test` builds a chunk of programs, one package each, in a sandbox with the toolchain and the shared
   build cache (in the user's cache directory). Only the compiler runs there; without cgo, no build step executes code
   from a source. The `-exec` program is a script that copies the test binary instead of running it. A package that
   does not build does not affect the others; a chunk that takes too long is split in halves.
2. Run: each binary runs in a sandbox without the toolchain, the cache or any file of this machine.

A program passes if its process ends with status 0 *and* has written a secret that is random for each run. The harness
(harness/harness.go, linked into every test binary under a random import path) reads the secret from standard input
before any code of the program runs, and writes it when every test has returned without a failure and at least one
was not skipped. So os.Exit(0), running fewer tests, or printing "PASS" does not pass. Not covered: programs that
attack the harness in their own process, because tests and code share one.
"""

import base64
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .sandbox import MIB, Limits, Run, hand_over, run_sandboxed, sandbox_uid, validate_sandbox
from .toolchain import CheckerProcess, Go, UsesChecker, find_go, user_cache


HARNESS = Path(__file__).parent / "harness"
TESTIFY = Path(__file__).parent / "testify"
TEST_MAIN = "hrmHfTestMain"  # new name for a TestMain in the tests
MESSAGE = 300  # characters
# The checker's answers for a program's code and for its tests; "text" is the source to compile, in base64.
Sources = tuple[dict[str, Any], dict[str, Any]]
_COLLECT = '#!/bin/sh\nexec cp "$1" "/out/${PWD##*/}"\n'
_COMPILER_LINE = re.compile(r"^(?:\./)?(p\d{5})/(main|main_test)\.go:(\d+)(?::\d+)?: (.*)$", re.MULTILINE)
# Patterns in a program's output that show which limit it exceeded; the first match is used.
_LIMIT_SIGNS = (
    ("time", r"test timed out after|SIGXCPU", "did not finish in time"),
    ("processes", r"failed to create new OS thread .*errno=11\)", "started too many threads"),
    ("memory", r"cannot allocate memory|failed to create new OS thread|^(fatal error|runtime): .*(out of memory"
     r"|cannot (allocate|map|remap|reserve)|failed to (allocate|reserve)|too much locked memory)",
     "used too much memory"),
    ("disk", r"SIGXFSZ|file too large|no space left on device", "wrote too much to disk"),
    ("processes", r"fork/exec .*operation not permitted", "tried to start a process, which the sandbox forbids"),
    ("network", r"socket: operation not permitted|dial (tcp|udp)|lookup .*: (dial|no such host)",
     "the sandbox has no network"),
)  # fmt: skip


@dataclass(frozen=True)
class GoProgram:
    """A code sample and its tests.

    Attributes:
        code: a file or declarations; without a package clause, it is in package main.
        tests: text of a test file with at least one `func Test...`; the only testify call is `assert.New(t).Equal`.
        stub: the code with a body that does nothing, to check whether the tests can compile at all.
    """

    code: str
    tests: str
    stub: str | None = None


@dataclass(frozen=True)
class GoTestResult:
    """Outcome of the tests of a program.

    Attributes:
        status: "pass", "fail", "syntax", "build" (code or tests do not compile), "unsolvable" (the tests do not
            compile even with the stub), or the exceeded limit: "time", "memory", "disk", "processes",
            "network", "output".
        message: one line; empty if it passed.
        line: line of the code, from 1, if known.
        output: output of the tests or the compiler; the middle of a long output is cut.
        seconds: wall time of the tests.
    """

    status: str
    message: str = ""
    line: int | None = None
    output: str = ""
    seconds: float = 0.0


class GoTestRunner(UsesChecker):
    """Runner that builds and runs tests. Its checker process (syntax, imports) persists between calls.

    Standard library packages that code or tests use without importing them are imported, and unused imports are
    allowed, because benchmark prompts have too few or too many imports.

    Args:
        limits: limits on the run of one program.
        workers: number of programs that run at the same time; defaults to the number of processors.
        chunk: number of programs per build.

    Raises:
        GoNotFoundError: there is no Go toolchain.
        SandboxError: no sandbox can be created.
    """

    def __init__(self, limits: Limits | None = None, workers: int | None = None, chunk: int = 48):
        validate_sandbox()
        self.limits, self.chunk = limits or Limits(), chunk
        self.workers = workers or len(os.sched_getaffinity(0))
        self.go = find_go()
        self.checker = CheckerProcess()

    def __call__(self, programs: Sequence[GoProgram]) -> list[GoTestResult]:
        """Run the tests of all programs, and return one result per program.

        Raises:
            ValueError: the tests of a program have no `func Test...`, or do not parse and there is no stub.
        """
        results: list[GoTestResult | None] = [None] * len(programs)
        files = self._prepare(programs, results)
        pending = [index for index, result in enumerate(results) if result is None]
        for start in range(0, len(pending), self.chunk):
            self._build_and_run({index: files[index] for index in pending[start : start + self.chunk]}, results)
        self._mark_unsolvable(programs, results)
        return results

    def _mark_unsolvable(self, programs: Sequence[GoProgram], results: list[GoTestResult]) -> None:
        """Mark programs as unsolvable if their tests do not even build with `stub` in place of the code."""
        tested = {
            index: GoProgram(program.stub, program.tests)
            for index, (program, result) in enumerate(zip(programs, results))
            if result.status == "build" and program.stub is not None
        }
        stubs = list(dict.fromkeys(tested.values()))
        broken = {stub for stub, end in zip(stubs, self(stubs) if stubs else ()) if end.status in ("build", "syntax")}
        for index, stub in tested.items():
            if stub in broken:
                results[index] = replace(results[index], status="unsolvable")

    def _prepare(self, programs: Sequence[GoProgram], results: list) -> list[Sources]:
        """Return the sources of each program, and record in `results` which programs do not parse."""
        files = []
        for index, program in enumerate(programs):
            if not re.search(r"^func Test", program.tests, re.MULTILINE):
                raise ValueError(f"tests of program {index} have no `func Test...` and would test nothing; add one")
        tests, answers = (
            self.checker.ask(
                "imports", [getattr(program, part) for program in programs], package="main", test_main=name
            )
            for part, name in (("tests", TEST_MAIN), ("code", f"{TEST_MAIN}OfCode"))
        )
        for index, (code, test) in enumerate(zip(answers, tests)):
            if not test.get("syntax"):
                where = f"line {test.get('line')}: {test.get('message') or test.get('failure')}"
                if programs[index].stub is None:
                    raise ValueError(f"tests of program {index} do not parse: {where}")
                results[index] = GoTestResult("unsolvable", f"the tests do not parse: {where}")
            elif not code.get("syntax"):
                message = code.get("message") or f"not checked: {code.get('failure')}"
                results[index] = GoTestResult("syntax", message.split("\n")[0], code.get("line"))
            files.append((code, test))
        return files

    def _build_and_run(self, files: dict[int, Sources], results: list) -> None:
        with tempfile.TemporaryDirectory(prefix="hrm_hf_go_") as folder:
            built, faults = self._build(Path(folder), files)
            with ThreadPoolExecutor(self.workers) as pool:
                for index, result in zip(built, pool.map(self._run, built.values())):
                    results[index] = result
        for index, fault in faults.items():
            results[index] = fault
        unknown = [index for index in files if results[index] is None]
        if len(files) == 1 and unknown:
            results[unknown[0]] = GoTestResult("build", "the compiler did not finish, or failed without a message")
        elif unknown:
            for half in (unknown[: len(unknown) // 2], unknown[len(unknown) // 2 :]):
                if half:
                    self._build_and_run({index: files[index] for index in half}, results)

    def _build(self, folder: Path, files: dict[int, Sources]) -> tuple[dict[int, Path], dict[int, GoTestResult]]:
        """Return the test binaries, and the results of programs that do not compile."""
        _write_module(folder, self.go, files)
        run = self._compile(folder, len(files))
        first: dict[int, GoTestResult] = {}
        for package, file, line, message in _COMPILER_LINE.findall(run.output):
            where = (None, f"with its tests (line {line}): {message}") if file == "main_test" else (int(line), message)
            lines = re.findall(rf"^(?:\./)?{package}/.*$", run.output, re.MULTILINE)
            result = GoTestResult("build", where[1][:MESSAGE], where[0], "\n".join(lines)[:16384])
            first.setdefault(int(package[1:]), result)
        built = {index: folder / "out" / f"p{index:05d}" for index in files}
        built = {index: path for index, path in built.items() if path.exists()}
        return built, {index: result for index, result in first.items() if index in files and index not in built}

    def _compile(self, folder: Path, count: int) -> Run:
        root = str(self.go.root)
        uid = sandbox_uid()
        cache = user_cache() / ("go-build" if uid is None else f"go-build-{uid}")
        cache.mkdir(exist_ok=True)
        for handed in (cache, folder / "work", folder / "out"):
            if handed.stat().st_uid != uid:
                hand_over(handed)
        paths = [path for path in ("/usr", "/bin", "/lib", "/lib64") if os.path.exists(path)]
        if not root.startswith("/usr/"):
            paths.append(root)
        environment = {
            **self.go.environment(), "PATH": f"{root}/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp",
            "GOPATH": "/tmp/gopath", "GOCACHE": "/cache", "GOFLAGS": "",
        }  # fmt: skip
        flags = ("-count=1", "-vet=off", "-ldflags=-s -w", "-exec", "/build/collect")
        return run_sandboxed(
            [f"{root}/bin/go", "test", *flags, "./..."],
            Limits(120 + 5 * count, memory=4096 * MIB, disk=4096 * MIB, files=65536, threads=32768),
            read_only=[(path, path) for path in paths] + [(str(folder / "work"), "/build")],
            writable=[(str(cache), "/cache"), (str(folder / "out"), "/out")],
            environment=environment, directory="/build", processes=True, clip=1 << 20,
        )  # fmt: skip

    def _run(self, binary: Path) -> GoTestResult:
        limits, secret = self.limits, secrets.token_hex(32)
        wall = replace(limits, seconds=limits.seconds + 2)  # Go's own timeout expires first and prints a report
        run = run_sandboxed(
            ["/program", f"-test.timeout={limits.seconds}s", "-test.paniconexit0"], wall,
            read_only=[(str(binary), "/program")], stdin=secret.encode(),
            environment={"HOME": "/tmp", "TMPDIR": "/tmp", "GOMEMLIMIT": str(int(limits.memory * 0.75))},
        )  # fmt: skip
        return judge(run, limits, secret)


def judge(run: Run, limits: Limits, secret: str) -> GoTestResult:
    """Build a result from a finished run of a test binary. The harness writes `secret` only if all tests pass."""
    output, confirmed = re.subn(rf"\n{secret}\n", "", run.output)
    if run.status == 0 and not run.stopped and confirmed:
        return GoTestResult("pass", output=output, seconds=run.seconds)
    if run.stopped:
        status, reason = run.stopped, "did not finish in time" if run.stopped == "time" else "wrote too much output"
    else:
        status, reason = next(
            ((name, text) for name, sign, text in _LIMIT_SIGNS if re.search(sign, output, re.MULTILINE)), ("fail", "")
        )
    reason += {"time": f" ({limits.seconds:g} s)", "memory": f" ({limits.memory // MIB} MiB)"}.get(status, "")
    shown = re.search(r"^\s+\w+\.go:\d+: (.*)|^(panic: .*|fatal error: .*)", output, re.MULTILINE)
    detail = (shown[1] or shown[2]).strip() if shown else ""
    if not (reason or detail):
        ended = "ended before all tests had passed" if run.status == 0 else f"ended with status {run.status}"
        detail = f"{ended}: {output.strip().splitlines()[-1] if output.strip() else 'no output'}"
    message = ": ".join(part for part in (reason, detail) if part)
    line = re.search(r"/main\.go:(\d+)", output)
    return GoTestResult(status, message[:MESSAGE], int(line[1]) if line else None, output, run.seconds)


def _write_module(folder: Path, go: Go, files: dict[int, Sources]) -> None:
    """Write the module for `go test ./...`, with one package per program, the harness, and a stand-in for testify."""
    work = folder / "work"
    shutil.copytree(TESTIFY, work / "testify")
    (folder / "out").mkdir()
    found = re.search(r"go(\d+\.\d+)", go.version)
    language = found[1] if found else "1.19"
    (work / "go.mod").write_text(
        f"module programs\n\ngo {language}\n\nrequire github.com/stretchr/testify v1.0.0\n\n"
        "replace github.com/stretchr/testify => ./testify\n"
    )
    (work / "collect").write_text(_COLLECT)
    (work / "collect").chmod(0o755)
    harness = f"h{secrets.token_hex(16)}"  # a random name, so that no program can import the harness
    shutil.copytree(HARNESS, work / harness)
    for index, (code, tests) in files.items():
        package = work / f"p{index:05d}"
        package.mkdir()
        (package / "main.go").write_bytes(base64.b64decode(code["text"]))
        (package / "main_test.go").write_bytes(base64.b64decode(tests["text"]))
        (package / "harness_test.go").write_text(
            f'package {code["package"]}\n\nimport (\n\t"testing"\n\n\t{TEST_MAIN}Harness "programs/{harness}"\n)\n\n'
            f"func TestMain(m *testing.M) {{ {TEST_MAIN}Harness.Run(m) }}\n"
        )
        if tests.get("test_main"):
            (package / "harness_main_test.go").write_text(
                f'package {tests["package"]}\n\nimport {TEST_MAIN}Harness "programs/{harness}"\n\n'
                f"func init() {{ {TEST_MAIN}Harness.Main = {TEST_MAIN} }}\n"
            )
