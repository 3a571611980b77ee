"""Lets a model write solutions of benchmark tasks, runs their tests in the sandbox, and gives pass@k.

Samples go to a JSON Lines file as they come, so that a run that was stopped goes on where it was; each batch has a
seed of its own, so that it writes the same samples as a run that was not. Code of a model runs in the sandbox of
`hrm_hf.golang` or not at all: without one the tests are refused, and parse and type-check rates are what remains.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...models.processing_hrm_go_coder import (
    CONTINUE,
    DECISION_TOKENS,
    REFINE,
    TOKEN_IDS,
    Feedback,
    code_segment,
    validation_segment,
)
from ..data.collator import GoStreamBuilder
from ..validators.go_tests import GoTestRunner
from ..validators.go_validators import GoTypesValidator
from ..validators.sandbox import SandboxError
from ..validators.toolchain import GoNotFoundError
from .benchmarks import REPAIR, GoTask, truncated
from .metrics import pass_at_k_scores, rate_with_interval
from .writer import Writer


PASS_AT = (1, 5, 10, 100)
STUB = '\n\tpanic("not written")\n}'
FAILED_TEST = Feedback(syntax_ok=True, types_ok=True, tests_pass=False, category="other", message="test failed")
Validator = Callable[[Sequence[str]], list[Feedback]]


@dataclass(frozen=True)
class BenchmarkRun:
    """How samples are drawn.

    Attributes:
        name: of the benchmark.
        model: name of the model; samples of another model are never taken up.
        samples: of each task; one sample is greedy.
        temperature: of several samples.
        seed: of the first batch.
    """

    name: str
    model: str
    samples: int = 1
    temperature: float = 0.8
    seed: int = 0


@contextmanager
def test_tools() -> Iterator[tuple[GoTypesValidator | None, GoTestRunner | None, str]]:
    """Yields the type checker, the test runner, and the reason why there is no runner ("" if there is one)."""
    with ExitStack() as stack:
        try:
            types = stack.enter_context(GoTypesValidator())
        except GoNotFoundError as error:
            yield None, None, str(error)
            return
        try:
            runner, refused = stack.enter_context(GoTestRunner()), ""
        except SandboxError as error:
            runner, refused = None, str(error)
        yield types, runner, refused


def unsolvable_tasks(tasks: Sequence[GoTask], types: Validator) -> list[str]:
    """Ids of tasks that no solution can pass: function and tests do not type-check even without a solution.

    Tests that import testify are beyond the type checker, and count as solvable.
    """
    verdicts = types([f"{task.tests}\n\n{task.file(task.prefix + STUB)}" for task in tasks])
    return [task.id for task, verdict in zip(tasks, verdicts) if verdict.failed]


def write_samples(
    writer: Writer,
    builder: GoStreamBuilder,
    tasks: Sequence[GoTask],
    run: BenchmarkRun,
    validator: Validator,
    file: Path,
) -> list[dict[str, Any]]:
    """Solutions of all tasks, from `file` as far as they are there.

    Args:
        validator: judges the buggy code of repair tasks.
        file: JSON Lines; the first line holds the settings.

    Returns:
        {"task", "sample", "code"} of each sample of each task, in this order.

    Raises:
        ValueError: `file` holds samples of other settings, or a line that is none of ours.
    """
    settings = {**run.__dict__, "tasks": len(tasks), "max_code_tokens": writer.max_code_tokens}
    done = _read_samples(file, settings)
    prompts = _repair_prompts(writer, tasks, validator) if run.name == REPAIR else None
    with file.open("a") as out, writer.bar(len(tasks) * run.samples, run.name) as bar:
        quiet = replace(writer, progress=False)
        for sample in range(run.samples):
            for start in range(0, len(tasks), writer.batch_size):
                batch = range(start, min(start + writer.batch_size, len(tasks)))
                keys = [(tasks[index].id, sample) for index in batch]
                if not all(key in done for key in keys):
                    torch.manual_seed(run.seed + sample * len(tasks) + start)
                    codes = _solve(
                        quiet, builder, [tasks[i] for i in batch], prompts and [prompts[i] for i in batch], run
                    )
                    for key, code in zip(keys, codes):
                        done[key] = code
                        out.write(json.dumps({"task": key[0], "sample": sample, "code": code}) + "\n")
                    out.flush()
                bar.update(len(batch))
    return [
        {"task": task.id, "sample": sample, "code": done[task.id, sample]}
        for task in tasks
        for sample in range(run.samples)
    ]


def _read_samples(file: Path, settings: dict[str, Any]) -> dict[tuple[str, int], str]:
    """Samples of a stopped run; a last line without an end is thrown away. A new file gets the settings."""
    if not file.exists() or not file.stat().st_size:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"settings": settings}) + "\n")
        return {}
    text = file.read_text()
    lines = text.split("\n")
    if lines.pop():  # the run was stopped within a line
        file.write_text("".join(line + "\n" for line in lines))
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: not JSON ({error}); remove the file to begin anew") from error
    found = rows[0].get("settings") if rows else None
    if found != settings:
        wrong = sorted(name for name in settings if (found or {}).get(name) != settings[name])
        raise ValueError(
            f"{file} holds samples of another run (other {', '.join(wrong)}); give another --out, or remove it"
        )
    return {(row["task"], row["sample"]): row["code"] for row in rows[1:]}


def _solve(writer: Writer, builder, tasks: Sequence[GoTask], given, run: BenchmarkRun) -> list[str]:
    temperature = run.temperature if run.samples > 1 else 0.0
    prefixes = [task.prefix for task in tasks]
    prompts = [builder.prompt_ids(task.record()) for task in tasks]
    if given is None:
        _, codes = writer.planned_codes(prompts, prefixes, temperature)
    else:
        codes = _repaired(writer, prompts, prefixes, given, temperature)
    return [truncated(code, prefix) for code, prefix in zip(codes, prefixes)]


def _repaired(writer: Writer, prompts, prefixes, given, temperature: float) -> list[str]:
    """Plan, the buggy code with its verdict, after <REFINE> another plan, then the code."""
    close = TOKEN_IDS["</PLAN>"]
    plans = writer.plans(prompts, temperature)
    starts = [[*prompt, *plan, close, *attempt] for prompt, plan, attempt in zip(prompts, plans, given)]
    refining = [i for i, ids in enumerate(starts) if ids[-1] == TOKEN_IDS[DECISION_TOKENS[REFINE]]]
    for i in refining:
        starts[i].append(TOKEN_IDS["<PLAN>"])
    for i, plan in zip(refining, writer.plans([starts[i] for i in refining], temperature)):
        starts[i] += [*plan, close]
    return writer.codes(starts, prefixes, temperature)


def _repair_prompts(writer: Writer, tasks: Sequence[GoTask], validator: Validator) -> list[list[int]]:
    """<CODE>buggy</CODE><VALIDATE>verdict</VALIDATE>, then <RETRY> for what does not compile, else <REFINE>.

    Lines of a verdict are those of the program, not of the function, so they are left out.
    """
    if any(task.buggy is None for task in tasks):
        raise ValueError(f"{REPAIR} needs a buggy solution of every task; {tasks[0].id} comes from another test set")
    verdicts = validator([task.file(task.prefix + task.buggy) for task in tasks])
    prompts = []
    for task, verdict in zip(tasks, verdicts):
        found = replace(verdict, line=None) if verdict.failed else FAILED_TEST
        decision = DECISION_TOKENS[CONTINUE if verdict.failed else REFINE]
        code, _ = code_segment(writer.tokenizer, task.prefix, task.buggy)
        prompts.append([*code, *validation_segment(writer.tokenizer, found), TOKEN_IDS[decision]])
    return prompts


def judge_samples(
    tasks: Sequence[GoTask],
    samples: Sequence[dict[str, Any]],
    validator: Validator,
    runner: GoTestRunner | None,
    unsolvable: Sequence[str] = (),
) -> dict[str, Any]:
    """Figures of samples.

    Args:
        samples: as `write_samples` returns them; each that is run gets "status" and "message" of its tests.
        validator: for parse and type-check rates.
        runner: None runs nothing.
        unsolvable: ids of tasks that are counted apart and in no rate.

    Returns:
        "tasks", "unsolvable", rates with intervals; with a runner "pass@k" and "statuses", how many samples ended as
        `GoTestResult.status` says ("build" is a solution that does not compile, or not with the tests).
    """
    by_id, left_out = {task.id: task for task in tasks}, set(unsolvable)
    counted = [sample for sample in samples if sample["task"] not in left_out]
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
    ended = runner([by_id[sample["task"]].program(sample["code"]) for sample in counted])
    drawn, passed = Counter(), Counter()
    for sample, end in zip(counted, ended, strict=True):
        sample |= {"status": end.status, "message": end.message}
        drawn[sample["task"]] += 1
        passed[sample["task"]] += end.status == "pass"
    result["statuses"] = dict(Counter(end.status for end in ended))
    return result | pass_at_k_scores([(drawn[task], passed[task]) for task in drawn], PASS_AT)
