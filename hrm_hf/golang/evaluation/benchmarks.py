"""HumanEval-Go, MBXP Go and HumanEvalFix-Go from local files: tasks, sampled solutions and pass@k.

It reads three JSON Lines layouts (plain or gzipped): MultiPL-E (`tests`), mxeval's HumanEval and MBXP (`test`,
`description`), and HumanEvalPack (`docstring`, `buggy_solution`), for writing and for repair. It downloads nothing. Do
not train on these files.

The model gets a task in the format of a training record: the doc comment is the problem, the signature is the prefix
of the code, and helper functions are the context. Imports are dropped, and the test runner adds them back, because a
solution need not use the prompt's imports. All of them are in the standard library except testify, which the runner
replaces with a stand-in.

Generated code runs only in the sandbox. Without one, no tests run, and results have only parse and type-check rates.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...io.files import json_object, numbered_lines
from ...models.processing_hrm_go_coder import CONTINUE, REFINE, TOKEN_IDS, Feedback, code_segment, decision_segment
from ..data.plans import sentences
from ..data.sources import go_text
from ..data.streams import GoStreamBuilder
from ..options import EvaluateGo
from ..validators.go_tests import GoProgram, GoTestRunner
from ..validators.go_validators import GoTypesValidator
from ..validators.sandbox import SandboxError
from ..validators.syntax import first_fault, parse
from ..validators.toolchain import GoNotFoundError
from .held_out import Validator
from .metrics import pass_at_k_scores, rate_with_interval
from .writer import Writer


REPAIR = "humanevalfix-go"
IMPORTS = re.compile(r"^import\s*(?:\(.*?\)|[^\n(]+)[ \t]*$", re.DOTALL | re.MULTILINE)
PACKAGE = re.compile(r"^\s*package\s+\w+", re.MULTILINE)
FUNCTIONS = ("function_declaration", "method_declaration")
FUNC = re.compile(r"^func\b", re.MULTILINE)
DOC = re.compile(r"(?:^[ \t]*//[^\n]*\n)+\Z", re.MULTILINE)
OWN_TEST = re.compile(r"^func (?:main|Test\w*)\(", re.MULTILINE)
MAIN_TEST = "\nfunc TestMainOfTask(t *testing.T) { main() }\n"
TESTIFY = 'import "github.com/stretchr/testify/assert"\n\n'
PASS_AT = (1, 5, 10, 100)
STUB = '\n\tpanic("not written")\n}'
FAILED_TEST = Feedback(syntax_ok=True, types_ok=True, tests_pass=False, category="other", message="test failed")


@dataclass(frozen=True)
class GoTask:
    """One task in a test set.

    Attributes:
        id: id in the test set.
        doc: description of the task, without comment marks.
        prefix: the function up to and including its first brace.
        helpers: declarations before the function.
        tests: text of a test file with at least one `func Test...`.
        canonical, buggy: code after the prefix, including the closing brace; None if the set has none.
    """

    id: str
    doc: str
    prefix: str
    helpers: str
    tests: str
    canonical: str | None = None
    buggy: str | None = None

    def record(self) -> dict[str, Any]:
        """Return the task in the format of a training record."""
        title, *rest = sentences(self.doc, keep_layout=True) or [self.prefix]
        return {
            "id": self.id,
            "problem": {"title": title, "body": "".join(rest).strip("\n")},
            "context": {"path": "", "before": "\n\n".join(filter(None, ("package main", self.helpers)))},
            "code_prefix": self.prefix,
        }

    def file(self, code: str) -> str:
        """Return the helper declarations, followed by the function `code`, which includes its prefix."""
        return "\n\n".join(filter(None, (self.helpers, code)))

    def program(self, code: str) -> GoProgram:
        """Return a program with the function `code`, its helpers and its tests."""
        return GoProgram(self.file(code), self.tests, self.file(self.prefix + STUB))


def load_benchmark(name: str, path: str | Path) -> list[GoTask]:
    """Load the tasks in a test set.

    Args:
        name: one of `options.BENCHMARKS`, which determines the layout.
        path: JSON Lines file, gzipped if its name ends in .gz.

    Raises:
        ValueError: a line is not a JSON object or lacks a field (the message names file and line number).
        FileNotFoundError: the file does not exist; nothing is downloaded.
    """
    tasks, read = [], _layout(name)
    for place, line in numbered_lines(path):
        row = json_object(line, place)
        try:
            tasks.append(read(row))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{place}: not a task of {name} ({type(error).__name__}: {error}); its fields are {', '.join(row)}"
            ) from error
    if not tasks:
        raise ValueError(f"{path}: no tasks; the file is empty")
    return tasks


def _layout(name: str) -> Callable[[dict[str, Any]], GoTask]:
    if name == "humaneval-go":
        return lambda row: _task(row["name"], row["prompt"], row["tests"])
    if name in ("humaneval-go-mxeval", "mbxp-go"):
        return lambda row: _task(row["task_id"], row["prompt"], row["test"] + MAIN_TEST, doc=row["description"])
    return lambda row: _task(
        row["task_id"], row["prompt"], TESTIFY + row["test"], row["docstring"], row["canonical_solution"],
        row["buggy_solution"],
    )  # fmt: skip


def _task(
    id: str, prompt: str, tests: str, doc: str = "", canonical: str | None = None, buggy: str | None = None
) -> GoTask:
    rest = PACKAGE.sub("", IMPORTS.sub("", go_text(prompt)), count=1)
    start = [match.start() for match in FUNC.finditer(rest)][-1]
    comment = DOC.search(rest[:start])
    lines = comment[0].splitlines() if comment else []
    written = "\n".join(line.strip().removeprefix("//").removeprefix(" ") for line in lines)
    return GoTask(
        id=str(id),
        doc=(go_text(doc) or written).strip(),
        prefix=rest[start:].rstrip(),
        helpers=rest[: comment.start() if comment else start].strip(),
        tests=go_text(tests).strip(),
        canonical=canonical and "\n" + go_text(canonical).rstrip(),
        buggy=buggy and "\n" + go_text(buggy).rstrip(),
    )


def truncated(code: str, prefix: str) -> str:
    """Remove `main` and tests that the model wrote. If the rest does not parse, cut it after its first function.

    A model that does not stop uses up its token budget. Helpers after the function stay if they parse.
    """
    own = OWN_TEST.search(code, len(prefix))
    code = code[: own.start()] if own else code
    if first_fault(code) is None:
        return code
    text = code.encode()
    function = next((node for node in parse(text).root_node.children if node.type in FUNCTIONS), None)
    return code if function is None or function.has_error else text[: function.end_byte].decode()


# ---- samples ----


def write_samples(
    writer: Writer,
    builder: GoStreamBuilder,
    tasks: Sequence[GoTask],
    validator: Validator,
    options: EvaluateGo,
    repair: bool = False,
) -> list[dict[str, Any]]:
    """Generate `options.samples` solutions for each task, greedily if there is only one.

    Args:
        validator: validates the buggy code of repair tasks.
        repair: whether the model is given the buggy solution.

    Returns:
        {"task", "sample", "code"} for each sample of each task.
    """
    temperature = options.temperature if options.samples > 1 else 0.0
    given = _repair_prompts(writer, tasks, validator) if repair else None
    torch.manual_seed(options.seed)
    rounds = [_solve(writer, builder, tasks, given, temperature) for _ in range(options.samples)]
    return [
        {"task": task.id, "sample": sample, "code": written[index]}
        for index, task in enumerate(tasks)
        for sample, written in enumerate(rounds)
    ]


def _solve(writer: Writer, builder, tasks: Sequence[GoTask], given, temperature: float) -> list[str]:
    """Generate a plan and code for each task.

    With `given`, an attempt follows the plan. If the attempt ends in <REFINE>, the model writes a new plan after it.
    """
    prefixes = [task.prefix for task in tasks]
    prompts = [builder.prompt_ids(task.record()) for task in tasks]
    plans = writer.plans(prompts, temperature)
    starts = [[*prompt, *plan, TOKEN_IDS["</PLAN>"]] for prompt, plan in zip(prompts, plans)]
    if given is not None:
        starts = writer.replanned([[*start, *attempt] for start, attempt in zip(starts, given)], temperature)
    written = writer.code(starts, prefixes, temperature)
    return [truncated(code, prefix) for code, prefix in zip(written, prefixes)]


def _repair_prompts(writer: Writer, tasks: Sequence[GoTask], validator: Validator) -> list[list[int]]:
    """Encode each buggy solution and its verdict, then <RETRY> if it fails to compile, else <REFINE>.

    Verdicts have no line numbers here, because those would refer to the program and not to the function.
    """
    verdicts = validator([task.file(task.prefix + task.buggy) for task in tasks])
    prompts = []
    for task, verdict in zip(tasks, verdicts):
        found = replace(verdict, line=None) if verdict.failed else FAILED_TEST
        code, _ = code_segment(writer.tokenizer, task.prefix, task.buggy)
        decision = CONTINUE if verdict.failed else REFINE
        prompts.append([*code, *decision_segment(writer.tokenizer, found, decision)])
    return prompts


# ---- scores ----


@contextmanager
def test_tools() -> Iterator[tuple[GoTypesValidator | None, GoTestRunner | None, str]]:
    """Yield the type checker, the test runner, and the reason why there is no runner ("" if there is one)."""
    with ExitStack() as stack:
        try:
            types = stack.enter_context(GoTypesValidator())
        except GoNotFoundError as error:
            yield None, None, str(error)
            return
        try:
            runner, unavailable = stack.enter_context(GoTestRunner()), ""
        except SandboxError as error:
            runner, unavailable = None, str(error)
        yield types, runner, unavailable


def unsolvable_tasks(tasks: Sequence[GoTask], types: Validator) -> list[str]:
    """Return the ids of tasks that no solution can pass, because their tests do not type-check.

    The type checker cannot check tests that import testify; `judge_samples` finds those tasks when it runs the tests.
    """
    verdicts = types([f"{task.tests}\n\n{task.file(task.prefix + STUB)}" for task in tasks])
    return [task.id for task, verdict in zip(tasks, verdicts) if verdict.failed]


def judge_samples(
    tasks: Sequence[GoTask],
    samples: Sequence[dict[str, Any]],
    validator: Validator,
    runner: GoTestRunner | None,
    unsolvable: Sequence[str] = (),
) -> dict[str, Any]:
    """Run each sample's tests, and compute parse rate, type-check rate and pass@k.

    Args:
        samples: output of `write_samples`; each sample that runs gets the "status" and "message" of its tests.
        validator: for parse and type-check rates.
        runner: test runner; None runs no tests.
        unsolvable: ids of tasks that are counted separately and excluded from all rates.

    Returns:
        "tasks", "unsolvable", and rates with intervals; with a runner also "pass@k" and "statuses", the number of
        samples with each `GoTestResult.status`.
    """
    by_id, left_out = {task.id: task for task in tasks}, set(unsolvable)
    counted = [sample for sample in samples if sample["task"] not in left_out]
    if runner is not None:
        ended = runner([by_id[sample["task"]].program(sample["code"]) for sample in counted])
        for sample, end in zip(counted, ended, strict=True):
            sample |= {"status": end.status, "message": end.message}
        left_out |= {sample["task"] for sample in counted if sample["status"] == "unsolvable"}
        counted = [sample for sample in counted if sample["task"] not in left_out]
    verdicts = validator([by_id[sample["task"]].file(sample["code"]) for sample in counted])
    result: dict[str, Any] = {
        "tasks": len(tasks) - len(left_out),
        "unsolvable": len(left_out),
        **rate_with_interval("parse_rate", [bool(verdict.syntax_ok) for verdict in verdicts]),
    }
    if isinstance(validator, GoTypesValidator):
        result |= rate_with_interval("type_check_rate", [bool(verdict.types_ok) for verdict in verdicts])
    if runner is None:
        return result
    drawn = Counter(sample["task"] for sample in counted)
    passed = Counter(sample["task"] for sample in counted if sample["status"] == "pass")
    result["statuses"] = dict(Counter(sample["status"] for sample in counted))
    return result | pass_at_k_scores([(drawn[task], passed[task]) for task in drawn], PASS_AT)
