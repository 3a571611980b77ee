"""Repairs of failures that are worth learning: they pass, change little and drop nothing.

After break-it-fix-it (Yasunaga and Liang 2021, arXiv 2106.06600): a fixer's own repairs, filtered by the critic that
the failures come from, are better examples than synthetic damage.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from difflib import SequenceMatcher
from typing import Any

from ...models.edits_hrm_go_coder import APPLIED
from ...models.processing_hrm_go_coder import Feedback
from ..data.collator import GoStreamBuilder, TooLongError
from ..evaluation.failures import usable_records
from ..evaluation.held_out import Record, Try, Validator, edit_tries
from ..evaluation.metrics import rate_with_interval
from ..evaluation.writer import Writer
from ..shortening import is_shortened
from ..validators.categories import ERROR_CLASSES, error_class
from ..validators.syntax import leaves, parse
from .shards import Made


MENDED = "mended"
MAX_CHANGE = 0.3  # of the tokens; a repair that changes more is another code


def collected_fixes(
    writer: Writer,
    builder: GoStreamBuilder,
    failures: Sequence[Record],
    validator: Validator,
    *,
    samples: int,
    temperature: float,
    max_change: float = MAX_CHANGE,
) -> Made:
    """For each failure the first of `samples` repairs that passes, changes little and is not shortened.

    The first try is greedy, the likeliest repair, and the others are drawn at `temperature`.
    A fix is the failure's record with the repaired code as its solution, so that it teaches the edits between them.
    """
    usable, counts = _repairable(builder, failures, validator)
    made: dict[int, dict[str, Any]] = {}
    for number in range(samples):
        open_rows = [index for index in range(len(usable)) if index not in made]
        if not open_rows:
            break
        asked = [usable[i] for i in open_rows]
        tries, verdicts = _repaired(writer, builder, asked, validator, temperature if number else 0.0)
        for index, one, verdict in zip(open_rows, tries, verdicts):
            record = usable[index][0]
            reason = _why_not(record["attempts"][0]["code"], one, verdict, max_change)
            counts["tries"] += 1
            counts[reason or "kept"] += 1
            if not reason:
                made[index] = _fixed(record, one.code, verdict)
    counts["fixes"] = len(made)
    return [made[index] for index in sorted(made)], counts


def fixer_success(
    writer: Writer, builder: GoStreamBuilder, failures: Sequence[Record], validator: Validator
) -> dict[str, Any]:
    """Share of failures that one greedy repair mends, and of each class of errors, with Wilson intervals.

    Mended: it passes and is not shortened. Failures that do not fit count as not mended. "outcomes" counts what became
    of the repairs; "rows" says it of each failure, so that two models can be compared on the same ones.
    """
    usable, counts = _repairable(builder, failures, validator)
    tries, verdicts = _repaired(writer, builder, usable, validator, 0.0) if usable else ([], [])
    outcomes = {
        record["id"]: _why_not(record["attempts"][0]["code"], one, verdict, 1.0) or MENDED
        for (record, _), one, verdict in zip(usable, tries, verdicts)
    }
    rows = []
    for record in failures:
        outcome = outcomes.get(record["id"], "not asked")
        rows.append({"id": record["id"], "class": _class_of(record), "outcome": outcome, "mended": outcome == MENDED})
    figures = {"failures": len(rows), **_rate(rows), "dropped": dict(counts)}
    figures["outcomes"] = dict(Counter(row["outcome"] for row in rows))
    figures["by_class"] = {
        name: {"failures": len(chosen), **_rate(chosen)}
        for name in ERROR_CLASSES
        if (chosen := [row for row in rows if row["class"] == name])
    }
    return figures | {"rows": rows}


def _class_of(failure: Record) -> str:
    said = failure["attempts"][0]["feedback"]
    return error_class(said["syntax_ok"], said["types_ok"], said["category"], said["message"])


def _rate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return rate_with_interval("mended", [row["mended"] for row in rows])


def changed_share(code: str, other: str) -> float:
    """Share of tokens, comments apart, that two codes do not have in common (1 - difflib's ratio)."""
    ours, theirs = ([node.text for node in leaves(parse(text).root_node)] for text in (code, other))
    return 1.0 - SequenceMatcher(None, ours, theirs, autojunk=False).ratio()


def _repairable(
    builder: GoStreamBuilder, failures: Sequence[Record], validator: Validator
) -> tuple[list[tuple[Record, bool]], Counter]:
    """Failures whose prompt fits, with whether types say nothing of them, and counts of the rest."""
    usable, counts = [], Counter(failures=len(failures))
    for record, alone in usable_records(failures, validator):
        try:
            builder.edit_prompt_ids(record)
        except TooLongError:
            counts["too long"] += 1
        else:
            usable.append((record, alone))
    counts["reference rejected"] = len(failures) - len(usable) - counts["too long"]
    return usable, counts


def _repaired(
    writer: Writer,
    builder: GoStreamBuilder,
    usable: Sequence[tuple[Record, bool]],
    validator: Validator,
    temperature: float,
) -> tuple[list[Try], list[Feedback]]:
    records = [record for record, _ in usable]
    given = [builder.edit_prompt_ids(record) for record in records]
    attempts = [record["attempts"][0]["code"] for record in records]
    tries = edit_tries(writer, given, attempts, [record["code_prefix"] or "" for record in records], temperature)
    verdicts = validator([one.code for one in tries])
    return tries, [said.of_syntax() if alone else said for said, (_, alone) in zip(verdicts, usable)]


def _why_not(attempt: str, one: Try, verdict: Feedback, max_change: float) -> str:
    """Why a repair is not kept; "" for one that is."""
    if one.outcome != APPLIED:
        return f"edits {one.outcome}"
    if verdict.failed or not verdict.syntax_ok:  # what nobody has looked at does not pass
        return "does not pass"
    if is_shortened(one.code, attempt):
        return "shortened"
    return "changes too much" if changed_share(attempt, one.code) > max_change else ""


def _fixed(record: Record, code: str, verdict: Feedback) -> dict[str, Any]:
    right = {"code": code, "feedback": asdict(verdict), "decision": "DONE"}
    attempts = [record["attempts"][0], right]
    return {**record, "id": f"{record['id']}@fix", "attempts": attempts, "solution": {"code": code}}
