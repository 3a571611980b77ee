"""Shared by tests of hrm_hf.golang: marks for missing programs, errors, corrupted functions."""

import os
import random
import re
import subprocess
from pathlib import Path

import pytest

from hrm_hf.golang import GoNotFoundError, SandboxError, find_go, validate_sandbox


def _reason(check) -> str:
    try:
        check()
    except (GoNotFoundError, SandboxError) as error:
        return str(error)
    return ""


GO_MISSING = _reason(find_go)
SANDBOX_MISSING = GO_MISSING or _reason(validate_sandbox)
SYSTEM = [(path, path) for path in ("/usr", "/bin", "/lib", "/lib64") if os.path.exists(path)]  # for /bin/sh
needs_go = pytest.mark.skipif(bool(GO_MISSING), reason=GO_MISSING or "Go is there")
needs_sandbox = pytest.mark.skipif(bool(SANDBOX_MISSING), reason=SANDBOX_MISSING or "a sandbox is there")

# Code, line (from 1) and category of its first error; the comment has the message of gofmt in Go 1.19.
BROKEN = [
    ("func f() {\n\tx := 1", 2, "missing closing"),  # expected '}', found 'EOF'
    ("func f() {\n\tg(1\n\t)\n}", 2, "missing comma or newline"),  # missing ',' before newline in argument list
    ("var a = []int{\n\t1,\n\t2\n}", 3, "missing comma or newline"),  # missing ',' before newline in composite literal
    ('func f() {\n\n\ts := "abc\n}', 3, "unterminated literal"),  # string literal not terminated
    ("func f() {\n\t/* no end\n}", 2, "unterminated literal"),  # comment not terminated
    ("x := 1", 1, "misplaced statement"),  # expected declaration, found x
    ("func f() {}\n\nreturn\n", 3, "misplaced statement"),  # expected declaration, found 'return'
    ("func f() {\n\x00}", 2, "unexpected token"),  # illegal character NUL
    ("func f() {\n\t_ = \udcff\n}", 2, "unexpected token"),  # illegal UTF-8 encoding
    ("package p\n\nfunc f() {\n\tx := a[1)\n}", 4, "missing closing"),  # expected ']', found ')'
]
FINE = [
    "",
    "func f() int { return 1 }",
    "package p\n\n// f does it.\nfunc f(a,\n\tb int) (x struct {\n\ty int\n}) {\n\treturn\n}\n",
    'import (\n\t"fmt"\n)\n\ntype T interface {\n\tM()\n}\n\nvar s = `\nraw {\n`\n',
    "func f(x any) {\n\tswitch x := x.(type) {\n\tcase int,\n\t\tstring: // a comment\n\t\t_ = x\n\t}\nloop:\n"
    "\tfor {\n\t\tbreak loop /* with\n two lines */\n\t}\n}\n",
    "func f[T any](t T) T { return t } // no newline at the end",
]


def corrupted_functions(count: int, seed: int = 0) -> list[str]:
    """Return functions of the standard library, each with one corruption.

    A token is deleted or doubled, a bracket deleted, a newline inserted, or the end cut off.
    """
    generator = random.Random(seed)
    paths = sorted((find_go().root / "src" / "strings").glob("*.go"))
    paths += sorted((find_go().root / "src" / "net" / "http").glob("*.go"))
    found = [
        function[0] for path in paths if not path.name.endswith("_test.go")
        for function in re.finditer(r"^func .*?^}\n", path.read_text(), re.MULTILINE | re.DOTALL)
    ]  # fmt: skip
    return [_corrupt(text, generator) for text in generator.sample(found, count)]


def _corrupt(text: str, generator: random.Random) -> str:
    kind = generator.randrange(5)
    if kind == 4:
        return text[: generator.randrange(10, len(text))]
    spots = list(re.finditer((r"\w+|[^\w\s]", r"\w+|[^\w\s]", r"[{}()\[\]]", r"(?<=\S) ")[kind], text))
    spot = generator.choice(spots)
    new = ("", f"{spot[0]} {spot[0]}", "", "\n")[kind]
    return text[: spot.start()] + new + text[spot.end() :]


def gofmt_errors(codes: list[str], folder: Path) -> list[tuple[int, str] | None]:
    """Return line (in the code) and message of gofmt's first error in each sample, or None."""
    for index, code in enumerate(codes):
        (folder / f"{index}.go").write_text("package p; " + code)
    command = [find_go().root / "bin" / "gofmt", "-e", "-l", *(f"{index}.go" for index in range(len(codes)))]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    errors: list[tuple[int, str] | None] = [None] * len(codes)
    for index, line, message in re.findall(r"^(\d+)\.go:(\d+):\d+: (.*)$", run.stderr, re.MULTILINE):
        errors[int(index)] = errors[int(index)] or (int(line), message)
    return errors
