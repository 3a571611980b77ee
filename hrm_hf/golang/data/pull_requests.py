"""Records from pull requests, in the two JSON Lines formats of the original Go coder's pipeline.

    raw           {repo, pull_request, files [{filename, status, content_before, content_after, ...}], comments, tags}
    hierarchical  {problem {description, details}, context {file, before}, plan {steps, intent, targets},
                   solution {code, validation {syntax, tests}}}

Every .go file with content becomes a record (the original pipeline used only the first file). A known verdict becomes
the feedback of the solution; a missing test result counts as unknown (the original pipeline counted it as passed).
Review comments, pull requests by bots, and hierarchical records with code that does not parse are dropped.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...hub.licenses import UNKNOWN_LICENSE
from ...io.files import BadLineError, json_object, shorten
from ...models.processing_hrm_go_coder import INTENTS, TARGET_KINDS
from .commits import BOTS
from .edits import TASKS, Edit, edit_plan, edit_record, functions_of, path_problem, text_problem, without_trailers
from .plans import plan_of
from .records import new_record, parsed_lines
from .sources import Dropped, go_text


# Maps the CI status of a raw pull request to its test result; with any other status, the result is unknown.
CI = {"success": True, "passed": True, "failure": False, "failed": False}


def pull_request_records(
    path: str | Path, *, on_bad_line: str = "stop", dropped: Dropped | None = None
) -> Iterator[dict[str, Any]]:
    """Yield records from a `.jsonl` or `.jsonl.gz` file in either of the formats in the module docstring.

    The group is the repository. A record has an attempt only if its syntax or test result is known; solutions with
    failed tests are dropped. `dropped` counts pull requests and files without a record.

    Raises:
        FileNotFoundError: the file does not exist.
        BadLineError: a line is corrupted or has neither format, unless `on_bad_line` is "skip".
    """
    dropped = dropped or Dropped()

    def parse(line: bytes, place: str) -> list[dict[str, Any]]:
        return _of_row(json_object(line, place), place, dropped)

    skip = lambda wrong: dropped.add("broken line", shorten(wrong))  # noqa: E731
    for records in parsed_lines(path, parse, on_bad_line, skip):
        yield from records


def _of_row(row: dict[str, Any], place: str, dropped: Dropped) -> list[dict[str, Any]]:
    if isinstance(row.get("pull_request"), dict) and isinstance(row.get("files"), list):
        return _of_raw(row, place, dropped)
    if isinstance(row.get("solution"), dict) and isinstance(row.get("problem"), dict):
        return _of_hierarchical(row, place, dropped)
    raise BadLineError(
        f"{place}: neither a raw pull request (pull_request, files) nor a hierarchical record (problem, solution); "
        f"fields found: {shorten(sorted(row))}"
    )


# ---- raw ----


def _of_raw(row: dict[str, Any], place: str, dropped: Dropped) -> list[dict[str, Any]]:
    request, repo = row["pull_request"], _get(row, "repo", dict)
    name = _get(repo, "full_name") or place
    identity = f"pr:{name}#{request.get('number', place)}"
    tests = CI.get(_get(request, "ci_status").lower())
    author = _get(request, "author") or _get(request.get("author"), "login")
    if request.get("is_bot") is True or BOTS.search(author):
        dropped.add("bot", identity)
        return []
    if tests is False:
        dropped.add("tests failed", identity)
        return []
    records = []
    for file in row["files"]:
        record = _of_file(file, request, identity, name, _get(repo, "license_key"), dropped)
        if record:
            records.append(_with_feedback(record, syntax=None, tests=tests))
    return records


def _of_file(
    file: Any, request: dict[str, Any], identity: str, name: str, license: str, dropped: Dropped
) -> dict[str, Any] | None:
    path = _get(file, "filename")
    if not _get(file, "content_after"):
        dropped.add("file without content", f"{identity}:{path}")
        return None
    reason = path_problem(path)
    if reason:
        dropped.add(reason, f"{identity}:{path}")
        return None
    edit = Edit(
        id=f"{identity}:{path}",
        source="pull request",
        license=license or UNKNOWN_LICENSE,
        group=name,
        path=path,
        before=_get(file, "content_before"),
        after=_get(file, "content_after"),
        title=_get(request, "title"),
        body=without_trailers(_get(request, "body")),
    )
    return edit_record(edit, dropped)


# ---- hierarchical ----


def _of_hierarchical(row: dict[str, Any], place: str, dropped: Dropped) -> list[dict[str, Any]]:
    problem, context, solution = row["problem"], _get(row, "context", dict), row["solution"]
    validation = _get(solution, "validation", dict)
    code, before, path = _get(solution, "code"), _get(context, "before"), _get(context, "file")
    title, body = _get(problem, "description"), _get(problem, "details")
    reason = text_problem(code, before, title, body) or _solution_problem(code, validation)
    if reason:
        dropped.add(reason, place)
        return []
    repository = _get(row, "repo") or _get(_get(row, "repo", dict), "full_name") or _get(row, "repository")
    record = new_record(
        f"pr:{repository or Path(place.split(',')[0]).name}:{_get(row, 'id') or place.rpartition(' ')[2]}",
        source="pull request",
        license=_get(row, "license") or UNKNOWN_LICENSE,
        group=repository or place,
        title=title,
        body=body,
        context={"path": path, "before": before},
        plan=_plan(row.get("plan"), title, body, code),
        code=code,
    )
    return [_with_feedback(record, syntax=validation.get("syntax"), tests=validation.get("tests"))]


def _solution_problem(code: str, validation: dict[str, Any]) -> str | None:
    if not code.strip():
        return "no solution"
    if validation.get("syntax") is False or functions_of(code) is None:
        return "does not parse after"
    return "tests failed" if validation.get("tests") is False else None


def _plan(plan: Any, title: str, body: str, code: str) -> dict[str, Any]:
    """Convert the plan of a "hierarchical" record, or derive one from title and body if its intent is not ours."""
    targets = [target for target in _get(plan, "targets", list) if _is_target(target)]
    if not targets:
        targets = [function.target for function in functions_of(code)[0].values()][:1]
    intent = _get(plan, "intent").upper()
    steps = [_get(step, "description") for step in _get(plan, "steps", list)]
    if intent not in INTENTS:
        return edit_plan(title, body, targets[0] if targets else "")
    return plan_of(TASKS[intent], targets, [step for step in steps if step.strip()] or [title])


def _is_target(target: Any) -> bool:
    kind, _, name = target.partition(":") if isinstance(target, str) else ("", "", "")
    return kind in TARGET_KINDS and bool(name.strip())


# ---- shared ----


def _with_feedback(record: dict[str, Any], syntax: Any, tests: Any) -> dict[str, Any]:
    """Add the solution to the record as an attempt with its verdict, if `syntax` or `tests` is known."""
    known = [value if isinstance(value, bool) else None for value in (syntax, tests)]
    if known == [None, None]:
        return record
    # Code that passes its tests must parse.
    syntax_ok = True if known[1] else known[0]
    feedback = {"syntax_ok": syntax_ok, "types_ok": None, "tests_pass": known[1], "category": "none", "line": None}
    attempt = {"code": record["solution"]["code"], "feedback": {**feedback, "message": ""}, "decision": "DONE"}
    return {**record, "attempts": [attempt]}


def _get(parent: Any, name: str, kind: type = str) -> Any:
    """Return a field if its type is `kind`, else an empty value. Text is normalized by `go_text`."""
    value = parent.get(name) if isinstance(parent, dict) else None
    value = value if isinstance(value, kind) else kind()
    return go_text(value) if isinstance(value, str) else value
