"""Records: validation, error messages, and files that round-trip."""

import copy
import gzip
import json

import pytest
import tiny_go
from datasets import Dataset

from hrm_hf.golang.data.records import new_record, read_records, record_features, validate_record, write_records
from hrm_hf.io.files import BadLineError


CODE = "func Add(a, b int) int {\n\treturn a + b\n}"
PREFIX = "func Add(a, b int) int {"
PLAN = {"intent": "ADD", "targets": ["func:Add"], "steps": [{"intent": "ADD", "target": "func:Add", "text": "return"}]}
FAULT = {
    "syntax_ok": False,
    "types_ok": None,
    "tests_pass": None,
    "category": "missing closing",
    "line": 2,
    "message": "expected '}'",
}


def record(**changes):
    plain = new_record(
        "m/a.go:1:Add", source="m", group="m", code=CODE, title="Add adds.", plan=PLAN, code_prefix=PREFIX
    )
    return copy.deepcopy(plain) | changes


def repaired():
    failed = {"code": PREFIX + "\n\treturn a + b\n", "feedback": FAULT, "decision": "CONTINUE"}
    return record(attempts=[failed, {"code": CODE, "feedback": None, "decision": "DONE"}])


def with_value(path, value):
    """Return a repaired record with the value at a path changed, such as ("attempts", 0, "decision")."""
    changed = repaired()
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def test_records_round_trip_through_plain_and_compressed_files(tmp_path):
    records = [record(), repaired(), record(id="ü 漢", context={"path": "a.go", "before": "\x00\t\u2028\r\n"})]
    for name in ("r.jsonl", "r.jsonl.gz"):
        assert write_records(tmp_path / name, iter(records)) == 3
        assert list(read_records(tmp_path / name)) == records
    assert gzip.decompress((tmp_path / "r.jsonl.gz").read_bytes()) == (tmp_path / "r.jsonl").read_bytes()
    assert [row["id"] for row in read_records([tmp_path / "r.jsonl", tmp_path / "r.jsonl.gz"])] == [
        row["id"] for row in records * 2
    ]


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("id",), "", "id is ''"),
        (("licence",), 3, "licence is 3"),
        (("problem", "title"), None, "problem.title is None"),
        (("problem",), "x", "problem is 'x'"),
        (("plan", "intent"), "WRITE", "plan.intent is 'WRITE'.*FIX, ADD"),
        (("plan", "targets"), ["function:Add"], r"plan.targets\[0\] is 'function:Add'.*kind:name"),
        (("plan", "targets"), [None], r"plan.targets\[0\] is None"),
        (("plan", "steps", 0, "text"), 5, r"plan.steps\[0\].text is 5"),
        (("code_prefix",), "func Sub", "code_prefix is 'func Sub'.*solution.code"),
        (("solution", "code"), " \n", "solution.code is"),
        (("context", "before"), "\ud800", "context.before .*surrogate"),
        (("attempts", 0, "decision"), "DONE", r"attempts\[0\].decision is 'DONE'"),
        (("attempts", 1, "decision"), "REFINE", r"attempts\[1\].decision is 'REFINE'.*DONE"),
        (("attempts", 1, "decision"), "STOP", r"attempts\[1\].decision is 'STOP'.*CONTINUE"),
        (("attempts", 1, "code"), CODE + "\n", r"attempts\[1\].code .*solution.code"),
        (("attempts", 0, "code"), "x", r"attempts\[0\].code is 'x'.*code_prefix"),
        (("attempts", 0, "feedback"), FAULT | {"category": "typo"}, r"feedback.category is 'typo'"),
        (("attempts", 0, "feedback"), FAULT | {"line": 0}, r"feedback.line is 0"),
        (("attempts", 0, "feedback"), FAULT | {"syntax_ok": "no"}, r"feedback.syntax_ok is 'no'"),
        (("attempts", 0, "feedback"), FAULT | {"score": 1}, r"feedback is \['score'\]"),
    ],
)
def test_an_error_names_the_field_and_its_value(path, value, message):
    with pytest.raises(ValueError, match=message):
        validate_record(with_value(path, value))


def test_a_missing_feedback_counts_as_null(tmp_path):
    null, bare = (tiny_go.record(1, "rcd") for _ in range(2))
    for with_null, without in zip(null["attempts"], bare["attempts"]):
        with_null["feedback"] = None
        del without["feedback"]
    write_records(tmp_path / "r.jsonl", [bare])
    rows = Dataset.from_list(list(read_records(tmp_path / "r.jsonl")), features=record_features())
    assert rows[0] == null
    assert tiny_go.builder().build(bare) == tiny_go.builder().build(null)


@pytest.mark.parametrize("name", sorted(record()))
def test_a_missing_field_is_named(name):
    broken = record()
    del broken[name]
    with pytest.raises(ValueError, match=f"^{name} is missing"):
        validate_record(broken)


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"id": ', "broken"),
        (b"[1]", "JSON object"),
        (b'{"id": "x"}', "source .*missing"),
        (b'{"id": "\xff"}', "UTF-8"),
        (b'{"text": "package p", "path": "a.go"}', r"plain text.*run_clm\.py"),
        (b"[" * 100_000, "nested"),
        (json.dumps(record(group="")).encode(), r"group is ''"),
    ],
)
def test_a_bad_line_stops_with_file_and_line_or_is_skipped(tmp_path, line, message):
    file = tmp_path / "r.jsonl"
    good = json.dumps(record()).encode()
    file.write_bytes(good + b"\n\n" + line + b"\n" + good + b"\n")
    with pytest.raises(BadLineError, match=rf"r\.jsonl, line 3: .*{message}"):
        list(read_records(file))
    skipped = []
    assert list(read_records(file, "skip", skipped.append)) == [record()] * 2
    assert len(skipped) == 1 and "line 3" in skipped[0]
    with pytest.raises(ValueError, match="on_bad_line='ignore'"):
        list(read_records(file, "ignore"))


def test_a_truncated_gzip_file_is_named_with_the_line(tmp_path):
    file = tmp_path / "r.jsonl.gz"
    write_records(file, [record(id=str(number)) for number in range(500)])
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"r\.jsonl\.gz: .*line \d+"):
        list(read_records(file))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        list(read_records(tmp_path / "none.jsonl"))


def test_a_failed_write_keeps_the_old_file(tmp_path):
    file = tmp_path / "r.jsonl"
    write_records(file, [record()])
    with pytest.raises(ValueError, match="record 2: group is ''"):
        write_records(file, [record(), record(group="")])
    assert list(read_records(file)) == [record()]


def test_a_data_set_stores_records_unchanged():
    rows = Dataset.from_list([record(), repaired()], features=record_features())
    assert rows[1] == repaired()
    assert rows[0]["attempts"] == []
