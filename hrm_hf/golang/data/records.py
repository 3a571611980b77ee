"""Record format of the Go coder's training data, and functions to validate, read and write records.

A record is one JSON object per line (`.jsonl`, or `.jsonl.gz`):

    id           unique name with the origin: "net/http/client.go:570:Client.Do"
    source       origin: "go1.19.8", a repository, a data set
    licence      SPDX name, or "unknown"
    group        package path or repository; all records of a group are in one split
    problem      {title, body}: description of the task
    context      {path, before}: file the code belongs to, and code it builds on or replaces
    plan         {intent, targets ["kind:name"], steps [{intent, target, text}]}
    attempts     [{code, feedback, decision}], empty if there is only the solution; feedback may be null or missing
                 feedback {syntax_ok, types_ok, tests_pass, category, line, message}: a `Feedback`
    code_prefix  given beginning of the code, usually the signature up to its "{"
    solution     {code}: the complete code, including code_prefix

Reading validates every line; an error names the file, line and field. It also verifies the checksums of a
`report.json` in the same folder or the one above. This module does not need torch.
"""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...io.files import BadLineError, complete_file, json_object, numbered_lines, shorten, validate_unchanged
from ...models.processing_hrm_go_coder import CATEGORIES, DECISIONS, INTENTS, TARGET_KINDS, Feedback


if TYPE_CHECKING:
    from datasets import Features

REPORT = "report.json"
# Type or allowed values of each field. A bool or int may be null; the feedback may be null or missing.
FEEDBACK = {
    "syntax_ok": bool, "types_ok": bool, "tests_pass": bool, "category": CATEGORIES, "line": int, "message": str
}  # fmt: skip
SCHEMA = {
    "id": str,
    "source": str,
    "licence": str,
    "group": str,
    "problem": {"title": str, "body": str},
    "context": {"path": str, "before": str},
    "plan": {"intent": INTENTS, "targets": [str], "steps": [{"intent": INTENTS, "target": str, "text": str}]},
    "attempts": [{"code": str, "feedback": FEEDBACK, "decision": DECISIONS}],
    "code_prefix": str,
    "solution": {"code": str},
}


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
    """Create a record without attempts, and validate it.

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
    """Validate every field of a record, ignoring unknown fields.

    Raises:
        ValueError: a field is missing or invalid; the message names it, its value and what was expected.
    """
    _check(record, SCHEMA, "")
    for name in ("id", "group"):
        _expect(record[name] != "", name, "", "a non-empty string")
    plan, code, prefix = record["plan"], record["solution"]["code"], record["code_prefix"]
    targets = [(f"plan.targets[{number}]", target) for number, target in enumerate(plan["targets"])]
    targets += [(f"plan.steps[{number}].target", step["target"]) for number, step in enumerate(plan["steps"])]
    for place, target in targets:
        kind, _, name = target.partition(":")
        valid = (kind in TARGET_KINDS and name != "") or (target == "" and "steps" in place)
        _expect(valid, place, target, f'"kind:name", where kind is one of {", ".join(TARGET_KINDS)}')
    _expect(code.strip() != "", "solution.code", code, "non-empty code")
    _expect(code.startswith(prefix), "code_prefix", prefix, "the beginning of solution.code")
    for number, attempt in enumerate(record["attempts"], start=1):
        place, last, decision = f"attempts[{number - 1}]", number == len(record["attempts"]), attempt["decision"]
        _expect(attempt["code"].startswith(prefix), f"{place}.code", attempt["code"], "code_prefix at the start")
        expected = "DONE for the last attempt, and only for that one"
        _expect((decision == "DONE") == last, f"{place}.decision", decision, expected)
        _expect(not last or attempt["code"] == code, f"{place}.code", attempt["code"], "solution.code")


def _check(value: Any, schema: Any, place: str) -> None:
    """Check a value and, recursively, its content against a schema."""
    if schema is FEEDBACK and isinstance(value, dict):
        unknown = sorted(set(value) - set(FEEDBACK))
        _expect(not unknown, place, unknown, f"the fields {', '.join(FEEDBACK)}")
        value = asdict(Feedback()) | value
    if isinstance(schema, dict) and not (schema is FEEDBACK and value is None):
        _expect(isinstance(value, dict), place or "the record", value, "an object")
        for name, inner in schema.items():
            field = f"{place}.{name}" if place else name
            if name not in value and inner is not FEEDBACK:
                raise ValueError(f"{field} is missing; fields found: {shorten(sorted(value))}")
            _check(value.get(name), inner, field)
    elif isinstance(schema, list):
        _expect(isinstance(value, list), place, value, "a list")
        for number, each in enumerate(value):
            _check(each, schema[0], f"{place}[{number}]")
    elif isinstance(schema, tuple):
        _expect(value in schema, place, value, f"one of {', '.join(schema)}")
    elif schema is str:
        _expect(isinstance(value, str), place, value, "a string")
        half = not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value)
        _expect(not half, place, value, "a string without lone surrogates")
    elif schema is bool:
        _expect(value is None or isinstance(value, bool), place, value, "true, false or null")
    elif schema is int:
        _expect(value is None or (type(value) is int and value >= 1), place, value, "an integer >= 1, or null")


def _expect(holds: bool, field: str, value: Any, expected: str) -> None:
    if not holds:
        raise ValueError(f"{field} is {shorten(value)}; expected {expected}")


# ---- files ----


def read_records(
    paths: str | Path | Iterable[str | Path], on_bad_line: str = "stop", on_skip: Callable[[str], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the records in files (`.jsonl` or `.jsonl.gz`), reading one line at a time.

    Args:
        paths: one file or several.
        on_bad_line: "stop" raises at the first invalid line, "skip" skips invalid lines.
        on_skip: called with the error of each line that is skipped.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file has changed since it was built.
        BadLineError: a line is not a valid record; the message names the file, line and field.
    """
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        for folder in path.parents[:2] if path.is_file() else ():
            validate_unchanged(folder / REPORT, [path])
        yield from parsed_lines(path, _record_of, on_bad_line, on_skip)


def parsed_lines(
    path: str | Path,
    parse: Callable[[bytes, str], Any],
    on_bad_line: str,
    on_skip: Callable[[str], None] | None = None,
) -> Iterator[Any]:
    """Yield `parse(line, place)` for each line of a file. Raise or skip BadLineErrors, as set by `on_bad_line`."""
    if on_bad_line not in ("stop", "skip"):
        raise ValueError(f"on_bad_line={on_bad_line!r}: must be stop or skip")
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
    if "problem" not in record and isinstance(record.get("text"), str):
        raise BadLineError(f"{place}: plain text, not a record; use training/run_clm.py to train on text")
    try:
        validate_record(record)
    except ValueError as error:
        raise BadLineError(f"{place}: {error}") from None
    return record


def problem_text(record: dict[str, Any]) -> str:
    """Return a record's title and body, joined as in the token stream."""
    return "\n\n".join(filter(None, (record["problem"]["title"], record["problem"]["body"])))


def spread(rows: list, limit: int | None) -> list:
    """Return `limit` evenly spaced rows. Neighboring rows are often from the same package."""
    if limit is None or limit >= len(rows):
        return rows
    return [rows[index * len(rows) // limit] for index in range(limit)]


def write_records(path: str | Path, records: Iterable[dict[str, Any]]) -> int:
    """Validate and write records, and return their number. The file appears only when it is complete.

    Raises:
        ValueError: a record is invalid; the message names its number and field.
    """

    def checked() -> Iterator[dict[str, Any]]:
        for number, record in enumerate(records, start=1):
            try:
                validate_record(record)
            except ValueError as error:
                raise ValueError(f"record {number}: {error}") from None
            yield record

    return write_lines(path, checked())


def write_lines(path: str | Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as JSON Lines (gzipped if the name ends in .gz), and return their number."""
    path, count = Path(path), 0
    with (
        complete_file(path) as stream,
        gzip.open(stream, "wb") if path.suffix == ".gz" else nullcontext(stream) as file,
    ):
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            count += 1
    return count


def record_features() -> "Features":
    """Return the `datasets.Features` of a data set of records."""
    from datasets import Features, List, Value

    def column(schema: Any) -> Any:
        if isinstance(schema, dict):
            return {name: column(inner) for name, inner in schema.items()}
        if isinstance(schema, list):
            return List(column(schema[0]))
        return Value({bool: "bool", int: "int32"}.get(schema, "string"))

    return Features(column(SCHEMA))
