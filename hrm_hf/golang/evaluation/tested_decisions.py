"""Decisions after codes of which tests say whether they are right: the oracle that no validator is.

HumanEvalFix gives each task a right and a buggy solution, and nearly all of the buggy ones compile. With what two
small changes make of the right one, these are the codes after which a model decides:

    types verdict names an error                    CONTINUE, fix it
    no error, and the tests fail in the sandbox     REFINE, plan anew: nothing that the model reads tells it so
    no error, and the tests pass                    DONE

The model reads the verdict on syntax and types, never that of the tests, and its own greedy plan: the right solution
shows in nothing before the code. Tests of a benchmark judge models; as labels to train on they would be answers.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...models.processing_hrm_go_coder import Feedback, parse_plan
from ..data.collator import GoStreamBuilder
from ..data.mutations import mutants, same_code
from ..data.trajectories import decision_of, failed_record
from ..validators.go_tests import GoTestRunner
from .benchmarks import GoTask, truncated
from .decisions import decide, decisions_by_source
from .failures import is_record
from .held_out import Record, Validator
from .writer import Writer


MUTANTS = 2  # of the right solution of a task
RIGHT, BUGGY = "right", "buggy"
UNTOLD = {"source": "benchmark", "licence": "unknown", "group": "benchmark"}  # what a record has and a task has not


@dataclass(frozen=True)
class JudgedCode:
    """A code for a task, and what is known of it.

    Attributes:
        task: that it is for.
        kind: "right", "buggy", or the operator that changed the right one.
        code: the function, prefix included.
        verdict: on syntax and types, without a line: lines are those of the whole program.
        status: of its tests, as of `GoTestResult`; "" where the verdict names an error and nothing was run.
        decision: the right one, of DECISIONS.
    """

    task: GoTask
    kind: str
    code: str
    verdict: Feedback
    status: str
    decision: str

    def row(self) -> dict[str, Any]:
        """As it is written to a file."""
        verdict = {"syntax_ok": self.verdict.syntax_ok, "types_ok": self.verdict.types_ok}
        named = {"task": self.task.id, "kind": self.kind, "code": self.code, "message": self.verdict.message}
        return {**named, **verdict, "status": self.status, "decision": self.decision}


def judged_codes(
    writer: Writer, tasks: Sequence[GoTask], types: Validator, runner: GoTestRunner, seed: int = 0
) -> tuple[list[JudgedCode], list[str]]:
    """The codes of all tasks with the decisions that their tests make right.

    Args:
        writer: of the progress bar.
        tasks: with a right and a buggy solution each.
        types: validator of syntax and types.
        runner: of the tests.
        seed: of the changes.

    Returns:
        the codes, and ids of tasks whose right solution does not pass here: a toolchain too old, or tests that are
        broken. Nothing of those is used.

    Raises:
        ValueError: a task without both solutions, named.
    """
    drawn = [(task, kind, code) for task in tasks for kind, code in _drawn(task, seed)]
    verdicts = types([task.file(code) for task, _, code in drawn])
    asked = [index for index, verdict in enumerate(verdicts) if not verdict.failed]
    statuses = dict.fromkeys(range(len(drawn)), "")
    with writer.bar(len(asked), "tests") as bar:
        for start in range(0, len(asked), runner.chunk):
            chunk = asked[start : start + runner.chunk]
            ended = runner([drawn[index][0].program(drawn[index][2]) for index in chunk])
            statuses |= {index: result.status for index, result in zip(chunk, ended, strict=True)}
            bar.update(len(chunk))
    found = []
    for index, ((task, kind, code), verdict) in enumerate(zip(drawn, verdicts)):
        decision = decision_of(verdict, statuses[index] == "pass")
        found.append(JudgedCode(task, kind, code, replace(verdict, line=None), statuses[index], decision))
    broken = [one.task.id for one in found if one.kind == RIGHT and one.status != "pass"]
    return [one for one in found if one.task.id not in set(broken)], broken


def evaluate_tested_decisions(
    writer: Writer,
    builder: GoStreamBuilder,
    tasks: Sequence[GoTask],
    types: Validator,
    runner: GoTestRunner,
    seed: int = 0,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Scores of the decisions after right, buggy and changed solutions of tasks; the arguments of `judged_codes`.

    Returns:
        figures: "tasks"; "codes", how many of each kind have which right decision ("buggy.REFINE"); "left_out" by
        reason: tasks as of `judged_codes` ("right solution fails") and those for which no readable plan was written,
        codes that are too long; for "tokens" and "head" what `decisions_by_source` returns, with intervals over tasks.
        And for each code {"task", "kind", "code", "message", "syntax_ok", "types_ok", "status", "decision"}.
    """
    codes, broken = judged_codes(writer, tasks, types, runner, seed)
    plans = _plans(writer, builder, list({one.task.id: one.task for one in codes}.values()))
    rows = [_record(one, plans[one.task.id]) for one in codes]
    kept = [index for index, row in enumerate(rows) if is_record(row)]
    unreadable = {one.task.id for one in codes} - {codes[index].task.id for index in kept}
    asked = [_deciding(rows[index], codes[index].decision) for index in kept]
    found = decide(writer, builder, asked, "decisions")
    numbers = {name: number for number, name in enumerate(plans)}
    judged = [codes[kept[owner]] for owner in found.trajectory]
    found = replace(found, trajectory=np.array([numbers[one.task.id] for one in judged], dtype=int))
    figures = {
        "tasks": len({one.task.id for one in judged}),
        "codes": dict(sorted(Counter(f"{one.kind}.{one.decision}" for one in judged).items())),
        "left_out": {
            "right solution fails": len(broken),
            "plan unreadable": len(unreadable),
            "code too long": found.left_out,
        },
        **decisions_by_source(found, seed),
    }
    return figures, [one.row() for one in codes]


def _drawn(task: GoTask, seed: int) -> list[tuple[str, str]]:
    """Kind and code of what is judged of a task."""
    if task.canonical is None or task.buggy is None:
        raise ValueError(f"task {task.id} has no right and buggy solution; decisions with tests need humanevalfix-go")
    right, buggy = (truncated(task.prefix + body, task.prefix) for body in (task.canonical, task.buggy))
    changed = [
        (name, code)
        for name, code in mutants(right, task.prefix, random.Random(f"{seed}/tested/{task.id}"))
        if not same_code(code, right) and code != buggy
    ]
    return [(RIGHT, right), (BUGGY, buggy), *changed[:MUTANTS]]


def _plans(writer: Writer, builder: GoStreamBuilder, tasks: Sequence[GoTask]) -> dict[str, dict[str, Any]]:
    """The model's greedy plan for each task, by its id."""
    written = writer.plans([builder.prompt_ids(task.record()) for task in tasks])
    return {task.id: parse_plan(writer.tokenizer, ids) for task, ids in zip(tasks, written)}


def _record(one: JudgedCode, plan: dict[str, Any]) -> Record:
    """The code as an attempt, and the right solution behind it."""
    right = truncated(one.task.prefix + one.task.canonical, one.task.prefix)
    plain = {**one.task.record(), **UNTOLD, "solution": {"code": right}}
    return failed_record(plain, one.code, one.verdict, plan=plan)


def _deciding(record: Record, decision: str) -> Record:
    """The first attempt alone, with the decision after it."""
    return {**record, "attempts": [record["attempts"][0] | {"decision": decision}]}
