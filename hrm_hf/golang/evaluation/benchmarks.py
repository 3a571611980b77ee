"""HumanEval-Go, MBXP Go and HumanEvalFix-Go from local files: tasks, and the programs that test their solutions.

Three layouts of JSON Lines (also gzipped): MultiPL-E (`tests`), mxeval's HumanEval and MBXP (`test`, `description`),
HumanEvalPack (`docstring`, `buggy_solution`; as writing and as repair). Nothing is downloaded, and these files belong
in no training set. Writing solutions and running tests is in `go_benchmark_run`.

A task is given as a record of the training data: doc comment = problem, signature = given prefix, helpers = context.
Imports are left out everywhere and found anew by the test runner, because a solution need not use those of the prompt;
all are of the standard library, but for testify, which the runner has a stand-in for.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...io.sources import json_object, numbered_lines
from ..data.plans import sentences
from ..validators.go_tests import GoProgram
from ..validators.syntax import first_fault
from .similarity import function_end
from .sources import BENCHMARKS


REPAIR = "humanevalfix-go"
IMPORTS = re.compile(r"^import\s*(?:\(.*?\)|[^\n(]+)[ \t]*$", re.DOTALL | re.MULTILINE)
PACKAGE = re.compile(r"^\s*package\s+\w+", re.MULTILINE)
FUNC = re.compile(r"^func\b", re.MULTILINE)
DOC = re.compile(r"(?:^[ \t]*//[^\n]*\n)+\Z", re.MULTILINE)
OWN_TEST = re.compile(r"^func (?:main|Test\w*)\(", re.MULTILINE)
MAIN_TEST = "\nfunc TestMainOfTask(t *testing.T) { main() }\n"
TESTIFY = 'import "github.com/stretchr/testify/assert"\n\n'


@dataclass(frozen=True)
class GoTask:
    """One task of a test set.

    Attributes:
        id: of the test set.
        doc: what is asked for, without comment marks.
        prefix: the function up to and including its first brace.
        helpers: declarations before it.
        tests: of a test file; at least one func Test...
        canonical, buggy: bodies after the prefix, their closing brace included; None where there is none.
    """

    id: str
    doc: str
    prefix: str
    helpers: str
    tests: str
    canonical: str | None = None
    buggy: str | None = None

    def record(self) -> dict[str, Any]:
        """Returns the task as a record of the training data."""
        title, *rest = sentences(self.doc, keep_layout=True) or [self.prefix]
        return {
            "id": self.id,
            "problem": {"title": title, "body": "".join(rest).strip("\n")},
            "context": {"path": "", "before": "\n\n".join(filter(None, ("package main", self.helpers)))},
            "code_prefix": self.prefix,
        }

    def file(self, code: str) -> str:
        """The function `code` (prefix included) with the declarations that it needs."""
        return "\n\n".join(filter(None, (self.helpers, code)))

    def program(self, code: str) -> GoProgram:
        """The same with its tests."""
        return GoProgram(self.file(code), self.tests)


def load_benchmark(name: str, path: str | Path) -> list[GoTask]:
    """Tasks of a test set.

    Args:
        name: one of BENCHMARKS; the layout follows from it.
        path: JSON Lines, gzipped if it ends in .gz.

    Raises:
        ValueError: unknown name; a line that is no JSON object or lacks a field (file and line number are named).
        FileNotFoundError: no such file; nothing is downloaded.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"benchmark {name!r} is none of {', '.join(BENCHMARKS)}")
    tasks, read = [], _layout(name)
    for place, line in numbered_lines(path):
        row = json_object(line, place)
        try:
            tasks.append(read(row))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{place}: no task of {name} ({type(error).__name__}: {error}); its fields are {', '.join(row)}"
            ) from error
    if not tasks:
        raise ValueError(f"{path} holds no task")
    return tasks


def _layout(name: str) -> Callable[[dict[str, Any]], GoTask]:
    if name == "humaneval-go":
        return lambda row: _task(row["name"], row["prompt"], row["tests"])
    if name in ("humaneval-go-mxeval", "mbxp-go"):
        return lambda row: _task(row["task_id"], row["prompt"], row["test"] + MAIN_TEST, doc=row["description"])
    return lambda row: _task(
        row["task_id"],
        row["prompt"],
        TESTIFY + row["test"],
        doc=row["docstring"],
        canonical=row["canonical_solution"],
        buggy=row["buggy_solution"],
    )


def _task(
    id: str, prompt: str, tests: str, doc: str = "", canonical: str | None = None, buggy: str | None = None
) -> GoTask:
    rest = PACKAGE.sub("", IMPORTS.sub("", prompt), count=1)
    start = [match.start() for match in FUNC.finditer(rest)][-1]
    comment = DOC.search(rest[:start])
    lines = comment[0].splitlines() if comment else []
    written = "\n".join(line.strip().removeprefix("//").removeprefix(" ") for line in lines)
    return GoTask(
        id=str(id),
        doc=(doc or written).strip(),
        prefix=rest[start:].rstrip(),
        helpers=rest[: comment.start() if comment else start].strip(),
        tests=tests.strip(),
        canonical=canonical and "\n" + canonical.rstrip(),
        buggy=buggy and "\n" + buggy.rstrip(),
    )


def truncated(code: str, prefix: str) -> str:
    """The code without a `main` or tests of its own, and up to the end of its function if it does not parse.

    A model that does not stop writes on until its tokens are spent; helpers behind a function that are whole stay.
    """
    own = OWN_TEST.search(code, len(prefix))
    code = code[: own.start()] if own else code
    if first_fault(code) is None:
        return code
    # The prefix ends in the brace that opens the body; parameters may hold braces of their own (interface{}).
    end = function_end(code, len(prefix) - 1)
    return code if end is None else code[:end]
