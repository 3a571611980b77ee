"""Records from pull requests in the two formats of the original Go coder's pipeline."""

import json

import pytest

from hrm_hf.golang.data.pull_requests import pull_request_records
from hrm_hf.golang.data.records import validate_record
from hrm_hf.golang.data.sources import Dropped
from hrm_hf.io.files import BadLineError


OLD = "package calc\n\nfunc Div(a, b int) int {\n\treturn a / b\n}\n"
NEW = "package calc\n\nfunc Div(a, b int) int {\n\tif b == 0 {\n\t\treturn 0\n\t}\n\treturn a / b\n}\n"
NEW_FUNCTION = NEW.removeprefix("package calc\n\n").rstrip()


def file(name: str, before: str | None = OLD, after: str | None = NEW) -> dict:
    return {
        "filename": name, "status": "modified", "additions": 3, "deletions": 0, "patch": "@@",
        "content_before": before, "content_after": after, "sha": "c0ffee", "valid_syntax": True,
    }  # fmt: skip


def raw(files: list, **changes) -> dict:
    request = {
        "number": 7, "title": "Fix division by zero", "body": "It used to panic.\n\nFixes #3", "state": "closed",
        "author": "ann", "merged": True, "base_sha": "a", "head_sha": "b", "ci_status": "success", "is_bot": False,
    }  # fmt: skip
    repo = {"full_name": "ann/calc", "html_url": "https://example.org", "stars": 5, "license_key": "mit"}
    return {"repo": repo, "pull_request": {**request, **changes}, "comments": [], "files": files, "tags": ["NAT"]}


def hierarchical(**changes) -> dict:
    step = {"intent": "FIX", "target": "func:Div", "description": "check b"}
    record = {
        "problem": {"description": "Fix division by zero", "details": "It used to panic."},
        "context": {"file": "calc.go", "before": OLD},
        "plan": {"steps": [step], "intent": "FIX", "targets": ["func:Div", "func", "package:calc"]},
        "solution": {"code": NEW, "validation": {"syntax": True, "tests": None}},
    }
    return {**record, **changes}


def read(tmp_path, *rows, **options) -> tuple[list[dict], dict]:
    path = tmp_path / "prs.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    dropped = Dropped()
    records = list(pull_request_records(path, dropped=dropped, **options))
    for record in records:
        validate_record(record)
    return records, dict(dropped.counts)


def test_every_go_file_with_content_becomes_a_record(tmp_path):
    files = [file("README.md"), file("calc.go"), file("sub/calc.go"), file("gone.go", after=None), file("a_test.go")]
    records, dropped = read(tmp_path, raw(files))
    assert [record["id"] for record in records] == ["pr:ann/calc#7:calc.go", "pr:ann/calc#7:sub/calc.go"]
    assert dropped == {"not a .go file": 1, "file without content": 1, "test file": 1}
    first = records[0]
    assert (first["group"], first["licence"]) == ("ann/calc", "mit")
    assert first["problem"] == {"title": "Fix division by zero", "body": "It used to panic."}
    assert first["solution"]["code"] == NEW_FUNCTION
    assert (first["plan"]["intent"], first["plan"]["targets"]) == ("FIX", ["func:Div"])


@pytest.mark.parametrize(("status", "passed"), [("success", True), (None, None), ("pending", None), ("unknown", None)])
def test_tests_passed_is_set_only_if_ci_passed(tmp_path, status, passed):
    (record,), _ = read(tmp_path, raw([file("calc.go")], ci_status=status))
    assert [attempt["feedback"]["tests_pass"] for attempt in record["attempts"]] == ([True] if passed else [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"ci_status": "failure"}, "tests failed"), ({"is_bot": True}, "bot"), ({"author": "renovate[bot]"}, "bot")],
)
def test_failed_and_bot_pull_requests_are_skipped(tmp_path, changes, reason):
    assert read(tmp_path, raw([file("calc.go")], **changes)) == ([], {reason: 1})


def test_a_hierarchical_record_keeps_its_plan_as_far_as_it_fits(tmp_path):
    (record,), _ = read(tmp_path, hierarchical(repo="ann/calc"))
    assert record["group"] == "ann/calc"
    assert record["plan"] == {
        "intent": "FIX",
        "targets": ["func:Div"],
        "steps": [{"intent": "FIX", "target": "func:Div", "text": "check b"}],
    }
    assert record["context"] == {"path": "calc.go", "before": OLD}
    assert record["solution"]["code"] == NEW
    feedback = record["attempts"][0]["feedback"]
    assert (feedback["syntax_ok"], feedback["tests_pass"]) == (True, None)


def test_a_hierarchical_record_without_a_known_plan_gets_one_from_its_title(tmp_path):
    (record,), _ = read(tmp_path, hierarchical(plan={"intent": "MAGIC", "steps": "none"}))
    assert record["plan"]["intent"] == "FIX"
    assert record["plan"]["targets"] == ["func:Div"]
    assert [step["text"] for step in record["plan"]["steps"]] == ["Fix division by zero"]


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ({"code": "func ("}, "does not parse after"),
        ({"code": ""}, "no solution"),
        ({"code": NEW, "validation": {"tests": False}}, "tests failed"),
        ({"code": "// \ud800"}, "NUL character or half a surrogate pair"),
    ],
)
def test_a_hierarchical_record_without_a_valid_solution_is_counted(tmp_path, solution, reason):
    assert read(tmp_path, hierarchical(solution=solution)) == ([], {reason: 1})


def test_lines_with_wrong_types_are_counted_and_do_not_raise(tmp_path):
    rows = [
        raw([None, 7, {}, {"filename": 3, "content_after": ["x"]}]),
        {**raw([file("calc.go")]), "repo": None},
        raw([file("calc.go")], title=None, author={"login": None}, ci_status=3),
        hierarchical(context=None, plan=[1], solution={"code": 5, "validation": "yes"}),
        hierarchical(plan={"intent": 5, "targets": [None, "func:"], "steps": [None, {"description": 1}]}),
    ]
    records, dropped = read(tmp_path, *rows)
    assert len(records) == 2
    assert dropped == {"file without content": 4, "no subject": 1, "no solution": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "prs.jsonl, line 2: broken"),
        ("[1]", "prs.jsonl, line 2: .*JSON object"),
        ('{"text": "x"}', r"prs\.jsonl, line 2: .*\['text'\]"),
    ],
)
def test_an_invalid_line_is_named_by_file_and_line_or_counted(tmp_path, line, message):
    rows = [raw([file("calc.go")]), line, hierarchical()]
    with pytest.raises(BadLineError, match=message):
        read(tmp_path, *rows)
    records, dropped = read(tmp_path, *rows, on_bad_line="skip")
    assert len(records) == 2
    assert dropped == {"broken line": 1}


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        list(pull_request_records(tmp_path / "none.jsonl", dropped=Dropped()))
