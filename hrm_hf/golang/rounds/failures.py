"""Failures to learn repairs from: codes of a model's own, and good codes that a learned breaker has damaged."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ...models.edits_hrm_go_coder import APPLIED
from ..data.collator import GoStreamBuilder, TooLongError
from ..data.trajectories import failed_record
from ..evaluation.failures import own_failures, usable_records
from ..evaluation.held_out import Record, Validator, edit_tries
from ..evaluation.writer import Writer
from .shards import Made


OWN = "@own"  # and a number, behind the id of the problem that a failure is of


def problem_of(failure: str) -> str:
    """The id of the record that a sampled failure of this id was written for."""
    return failure.rpartition(OWN)[0] or failure


def sampled_failures(
    writer: Writer,
    builder: GoStreamBuilder,
    records: Sequence[Record],
    validator: Validator,
    *,
    samples: int,
    temperature: float,
) -> Made:
    """`samples` plans and codes for each record: those that do not pass, as trajectories that end in the reference."""
    usable = usable_records(records, validator)
    made, seen = [], set()
    counts = Counter({"records": len(records), "reference rejected": len(records) - len(usable)})
    for number in range(samples if usable else 0):
        found, said = own_failures(writer, builder, usable, validator, temperature, seen)
        made += [{**one.record, "id": f"{one.record['id']}{OWN}{number}"} for one in found]
        counts.update(said)
    counts["failures"] = len(made)
    return made, counts


def broken_solutions(
    writer: Writer,
    builder: GoStreamBuilder,
    records: Sequence[Record],
    validator: Validator,
    *,
    samples: int,
    temperature: float,
) -> Made:
    """Solutions that a breaker has edited so that they do not pass, as trajectories back to the solution."""
    usable = usable_records(records, validator)
    counts = Counter({"records": len(records), "reference rejected": len(records) - len(usable)})
    prompts = {}
    for record, _ in usable:
        try:
            prompts[record["id"]] = builder.edit_prompt_ids(to_be_broken(record))
        except TooLongError:
            counts["too long"] += 1
    usable = [(record, alone) for record, alone in usable if record["id"] in prompts]
    made, seen = [], set()
    for number in range(samples if usable else 0):
        solutions = [record["solution"]["code"] for record, _ in usable]
        prefixes = [record["code_prefix"] or "" for record, _ in usable]
        given = [prompts[record["id"]] for record, _ in usable]
        tries = edit_tries(writer, given, solutions, prefixes, temperature)
        verdicts = validator([one.code for one in tries])
        for (record, alone), one, verdict in zip(usable, tries, verdicts):
            verdict = verdict.of_syntax() if alone else verdict
            counts["attempts"] += 1
            if one.outcome != APPLIED:
                counts[f"edits {one.outcome}"] += 1
            elif not verdict.failed:
                counts["passed"] += 1
            elif (record["id"], one.code) in seen:
                counts["repeated"] += 1
            else:
                seen.add((record["id"], one.code))
                made.append(failed_record(record, one.code, verdict, f"@broken{number}"))
    counts["failures"] = len(made)
    return made, counts


def to_be_broken(record: Record, bad: str | None = None) -> dict[str, Any]:
    """A record whose good solution is to be edited into bad code: what a breaker learns, and what it is asked.

    Args:
        bad: the code that it becomes, for training; the solution again if there is none yet.
    """
    good = record["solution"]["code"]
    bad = good if bad is None else bad
    attempts = [
        {"code": good, "feedback": None, "decision": "CONTINUE"},
        {"code": bad, "feedback": None, "decision": "DONE"},
    ]
    return {**record, "attempts": attempts, "solution": {"code": bad}}
