"""The record of the Go coder's training data: its fields, and how records are validated, read and written.

A record is one JSON object a line (`.jsonl`, or `.jsonl.gz`):

    id           unique, says where it comes from: "net/http/client.go:570:Client.Do"
    source       what it was taken from: "go1.19.8", a repository, a data set
    licence      SPDX name, or "unknown"
    group        package path or repository; a group is in one split only
    problem      {title, body}: what is asked for
    context      {path, before}: file the code belongs to, and code it builds on or replaces
    plan         {intent, targets ["kind:name"], steps [{intent, target, text}]}
    attempts     [{code, feedback | null, decision}], without an entry if there is only the solution
                 feedback {syntax_ok, types_ok, tests_pass, category, line, message}: as go_stream.Feedback
    code_prefix  beginning of the code that is given, mostly the signature up to its "{"
    solution     {code}: the complete code, code_prefix included

Reading checks every line; an error names file, line and field. Nothing here needs torch.
"""

import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...io.files import BadLineError, json_object, numbered_lines, shorten
from ...models.processing_hrm_go_coder import CATEGORIES, DECISIONS, INTENTS, TARGET_KINDS, Feedback


if TYPE_CHECKING:
    from datasets import Features

FEEDBACK_FIELDS = tuple(field.name for field in fields(Feedback))
KINDS = {str: "a text", dict: "an object", list: "a list"}


def new_record(
    id: str,
    *,
    source: str,
    group: str,
    code: str,
    plan: dict[str, Any],
    license: str = "unknown",
    title: str = "",
    body: str = "",
    context: dict[str, str] | None = None,
    code_prefix: str = "",
) -> dict[str, Any]:
    """Make a record without attempts, and validate it.

    Raises:
        ValueError: see `validate_record`.
    """
    record = {
        "id": id,
        "source": source,
        "licence": license,
        "group": group,
        "problem": {"title": title, "body": body},
        "context": context or {"path": "", "before": ""},
        "plan": plan,
        "attempts": [],
        "code_prefix": code_prefix,
        "solution": {"code": code},
    }
    validate_record(record)
    return record


def validate_record(record: Any) -> None:
    """Check every field of a record; unknown fields are ignored.

    Raises:
        ValueError: names the field, its value and what was expected.
    """
    _expect(isinstance(record, dict), "the record", record, "a JSON object")
    for name in ("id", "group"):
        _expect(_get(record, name, str) != "", name, "", "a text that is not empty")
    for name in ("source", "licence", "code_prefix"):
        _get(record, name, str)
    for name, parts in (("problem", ("title", "body")), ("context", ("path", "before")), ("solution", ("code",))):
        inner = _get(record, name, dict)
        for part in parts:
            _get(inner, part, str, f"{name}.")
    _validate_plan(_get(record, "plan", dict))
    code, prefix = record["solution"]["code"], record["code_prefix"]
    _expect(code.strip() != "", "solution.code", code, "code")
    _expect(code.startswith(prefix), "code_prefix", prefix, "the beginning of solution.code")
    attempts = _get(record, "attempts", list)
    for number, attempt in enumerate(attempts):
        place, last = f"attempts[{number}]", number == len(attempts) - 1
        _expect(isinstance(attempt, dict), place, attempt, "an object")
        found = _get(attempt, "code", str, f"{place}.")
        _expect(found.startswith(prefix), f"{place}.code", found, "code_prefix at its beginning")
        decision = _choice(attempt, "decision", f"{place}.", DECISIONS)
        _validate_feedback(attempt.get("feedback"), f"{place}.feedback")
        expected = "DONE at the last attempt, and there only"
        _expect((decision == "DONE") == last, f"{place}.decision", decision, expected)
        _expect(not last or found == code, f"{place}.code", found, "solution.code, at the last attempt")


def _validate_plan(plan: dict) -> None:
    _choice(plan, "intent", "plan.", INTENTS)
    targets = [(f"plan.targets[{n}]", target) for n, target in enumerate(_get(plan, "targets", list, "plan."))]
    for number, step in enumerate(_get(plan, "steps", list, "plan.")):
        place = f"plan.steps[{number}]"
        _expect(isinstance(step, dict), place, step, "an object")
        _choice(step, "intent", f"{place}.", INTENTS)
        _get(step, "text", str, f"{place}.")
        if target := _get(step, "target", str, f"{place}."):
            targets.append((f"{place}.target", target))
    for place, target in targets:
        kind, _, name = target.partition(":") if isinstance(target, str) else ("", "", "")
        expected = f'"kind:name" with a kind of {", ".join(TARGET_KINDS)}'
        _expect(kind in TARGET_KINDS and name != "", place, target, expected)


def _validate_feedback(feedback: Any, place: str) -> None:
    if feedback is None:
        return
    _expect(isinstance(feedback, dict), place, feedback, "an object or null")
    unknown = sorted(set(feedback) - set(FEEDBACK_FIELDS))
    _expect(not unknown, place, unknown, f"the fields {', '.join(FEEDBACK_FIELDS)}")
    for name in ("syntax_ok", "types_ok", "tests_pass"):
        value = feedback.get(name)
        _expect(value is None or isinstance(value, bool), f"{place}.{name}", value, "true, false or null")
    category, line, message = feedback.get("category"), feedback.get("line"), feedback.get("message", "")
    _expect(category in CATEGORIES, f"{place}.category", category, f"one of {', '.join(CATEGORIES)}")
    valid = line is None or (isinstance(line, int) and not isinstance(line, bool) and line >= 1)
    _expect(valid, f"{place}.line", line, "a line number from 1, or null")
    _expect(isinstance(message, str), f"{place}.message", message, "a text")


def _expect(holds: bool, field: str, value: Any, expected: str) -> None:
    if not holds:
        raise ValueError(f"{field} is {shorten(value)}; expected {expected}")


def _get(parent: dict, name: str, kind: type, place: str = "") -> Any:
    """Return a field of a JSON object that must be a str (which UTF-8 can encode), a dict or a list."""
    if name not in parent:
        raise ValueError(f"{place}{name} is missing; there are {shorten(sorted(parent))}")
    value = parent[name]
    _expect(isinstance(value, kind), f"{place}{name}", value, KINDS[kind])
    if kind is str and not value.isascii():
        half = any("\ud800" <= character <= "\udfff" for character in value)
        _expect(not half, f"{place}{name}", value, "text without half surrogate pairs")
    return value


def _choice(parent: dict, name: str, place: str, values: tuple[str, ...]) -> str:
    value = _get(parent, name, str, place)
    _expect(value in values, f"{place}{name}", value, f"one of {', '.join(values)}")
    return value


# ---- files ----


def read_records(
    paths: str | Path | Iterable[str | Path],
    on_bad_line: str = "stop",
    on_skip: Callable[[str], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the records of one file, or of several one after the other; only one line is in memory at a time.

    Args:
        paths: `.jsonl` or `.jsonl.gz`.
        on_bad_line: "stop" raises at the first line that is no record, "skip" skips it.
        on_skip: called with what is wrong with each line that is skipped.

    Raises:
        FileNotFoundError: no such file.
        BadLineError: a line is no record; names file, line and field.
    """
    for path in [paths] if isinstance(paths, str | Path) else paths:
        yield from parsed_lines(path, _record_of, on_bad_line, on_skip)


def parsed_lines(
    path: str | Path,
    parse: Callable[[bytes, str], Any],
    on_bad_line: str,
    on_skip: Callable[[str], None] | None = None,
) -> Iterator[Any]:
    """Yield what `parse(line, place)` returns for each line of a file; it raises BadLineError at a bad line."""
    for place, line in numbered_lines(path):
        try:
            parsed = parse(line, place)
        except BadLineError as error:
            if on_bad_line == "stop":
                raise
            if on_skip is not None:
                on_skip(str(error))
        else:
            yield parsed


def _record_of(line: bytes, place: str) -> dict[str, Any]:
    record = json_object(line, place)
    try:
        validate_record(record)
    except ValueError as error:
        raise BadLineError(f"{place}: {error}") from None
    return record


def spread(rows: list, limit: int | None) -> list:
    """Return `limit` rows from all over a file, because neighbors are of one package."""
    if limit is None or limit >= len(rows):
        return rows
    return [rows[index * len(rows) // limit] for index in range(limit)]


def write_records(path: str | Path, records: Iterable[dict[str, Any]]) -> int:
    """Validate and write records, and return their number; the file appears only when all are written.

    Raises:
        ValueError: what is wrong with a record; names its number and field.
    """
    return write_lines(path, _checked(records))


def _checked(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, record in enumerate(records, start=1):
        try:
            validate_record(record)
        except ValueError as error:
            raise ValueError(f"record {number}: {error}") from None
        yield record


def write_lines(path: str | Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as JSON Lines (gzip by the name), and return their number."""
    path, count = Path(path), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with gzip.open(partial, "wb") if path.suffix == ".gz" else partial.open("wb") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            count += 1
    os.replace(partial, path)
    return count


def record_features() -> "Features":
    """Return the columns of a data set of records."""
    from datasets import Features, List, Value

    text, flag = Value("string"), Value("bool")
    feedback = {"syntax_ok": flag, "types_ok": flag, "tests_pass": flag}
    feedback |= {"category": text, "line": Value("int32"), "message": text}
    steps = List({"intent": text, "target": text, "text": text})
    return Features(
        {
            "id": text,
            "source": text,
            "licence": text,
            "group": text,
            "problem": {"title": text, "body": text},
            "context": {"path": text, "before": text},
            "plan": {"intent": text, "targets": List(text), "steps": steps},
            "attempts": List({"code": text, "feedback": feedback, "decision": text}),
            "code_prefix": text,
            "solution": {"code": text},
        }
    )
