"""Records from small local files with the columns of the Hub's code data sets."""

import gzip
import json

import datasets
import pytest

from hrm_hf.golang.data.hub_sets import hub_records
from hrm_hf.golang.data.records import validate_record
from hrm_hf.golang.data.sources import Dropped
from hrm_hf.io.files import BadLineError


OLD = "package calc\n\nfunc Div(a, b int) int {\n\treturn a / b\n}\n"
NEW = "package calc\n\nfunc Div(a, b int) int {\n\tif b == 0 {\n\t\treturn 0\n\t}\n\treturn a / b\n}\n"
DOC = "Div divides a by b. It gives 0 for b = 0."
NEW_FUNCTION = NEW.removeprefix("package calc\n\n").rstrip()

# Columns as in the data set cards.
COMMITPACKFT = {
    "commit": "c0ffee",
    "old_file": "calc.go",
    "new_file": "calc.go",
    "old_contents": OLD,
    "new_contents": NEW,
    "subject": "Fix division by zero",
    "message": "Fix division by zero\n\nIt used to panic.\n\nChange-Id: I1\n",
    "lang": "Go",
    "license": "mit",
    "repos": "ann/calc,bob/calc",
}
EDITPACKFT = {**COMMITPACKFT, "config": "go", "content": "<before>...<after>..."}
CODE_SEARCH_NET = {
    "repository_name": "ann/calc",
    "func_path_in_repository": "calc.go",
    "func_name": "Div",
    "whole_func_string": NEW_FUNCTION,
    "language": "go",
    "func_code_string": NEW_FUNCTION,
    "func_code_tokens": ["func", "Div"],
    "func_documentation_string": DOC,
    "func_documentation_tokens": ["Div", "divides"],
    "split_name": "train",
    "func_code_url": "https://example.org/ann/calc/blob/c0ffee/calc.go#L3-L8",
}
STACK_SMOL = {
    "content": NEW.replace("func Div", f"// {DOC}\nfunc Div") + "\nfunc plain() int {\n\ta := 1\n\treturn a\n}\n",
    "path": "calc.go",
    "repository_name": "ann/calc",
    "licenses": ["MIT"],
    "lang": "Go",
    "size": 200,
}


def written(tmp_path, *rows, name="rows.jsonl"):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if name.endswith(".parquet"):
        datasets.Dataset.from_list(list(rows)).to_parquet(str(path))
    else:
        content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def read(path, **options) -> tuple[list[dict], dict]:
    dropped = Dropped()
    records = list(hub_records(str(path), dropped=dropped, **options))
    for record in records:
        validate_record(record)
    return records, dict(dropped.counts)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet", "folder/rows.parquet"])
@pytest.mark.parametrize("row", [COMMITPACKFT, EDITPACKFT], ids=["commitpackft", "EditPackFT"])
def test_an_edit_becomes_the_same_record_as_a_commit(tmp_path, row, name):
    path = written(tmp_path, row, name=name)
    (record,), _ = read(path if "/" not in name else path.parent)
    assert record["id"].endswith(":c0ffee")
    assert (record["group"], record["licence"]) == ("ann/calc", "mit")
    assert record["problem"] == {"title": "Fix division by zero", "body": "It used to panic."}
    assert record["context"] == {"path": "calc.go", "before": OLD.removeprefix("package calc\n\n").rstrip()}
    assert record["solution"]["code"] == NEW_FUNCTION
    assert record["code_prefix"] == "func Div(a, b int) int {"
    assert (record["plan"]["intent"], record["plan"]["targets"]) == ("FIX", ["func:Div"])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_documented_function_becomes_a_record_of_its_doc_comment(tmp_path, name):
    (record,), _ = read(written(tmp_path, CODE_SEARCH_NET, name=name))
    assert record["problem"] == {"title": "Div divides a by b.", "body": "It gives 0 for b = 0."}
    assert record["solution"]["code"] == NEW_FUNCTION
    assert record["code_prefix"] == "func Div(a, b int) int {"
    assert record["group"] == "ann/calc"
    assert record["plan"]["intent"] == "ADD"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_documented_functions_become_records_and_others_are_counted(tmp_path, name):
    (record,), dropped = read(written(tmp_path, STACK_SMOL, name=name))
    assert record["problem"]["title"] == "Div divides a by b."
    assert (record["licence"], record["group"]) == ("MIT", "ann/calc")
    assert dropped == {"no doc comment": 1}


@pytest.mark.parametrize("row", [COMMITPACKFT, CODE_SEARCH_NET, STACK_SMOL])
def test_windows_text_gives_the_same_records(tmp_path, row):
    windows = json.loads(json.dumps(row).replace("\\n", "\\r\\n"))
    assert read(written(tmp_path, windows)) == read(written(tmp_path, row))


def test_a_missing_column_is_named_with_the_available_ones(tmp_path):
    with pytest.raises(ValueError, match=r"old_contents, note.* after \(new_contents\), title"):
        read(written(tmp_path, {"old_contents": OLD, "note": ""}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lang": "Python"}, "another language"),
        ({"new_file": "calc.py"}, "not a .go file"),
        ({"new_file": "vendor/a/calc.go"}, "vendor or testdata"),
        ({"new_contents": "package calc\n\nfunc Div( {"}, "does not parse after"),
        ({"new_contents": ""}, "file emptied or removed"),
        ({"subject": " "}, "no subject"),
        ({"new_contents": NEW.replace("calc", "\ud800")}, "NUL character or half a surrogate pair"),
        ({"new_contents": f'package calc\n\nvar x = "{"x" * 10_000_000}"\n'}, "more than 1000000 characters"),
        ({"new_contents": None}, "file emptied or removed"),
    ],
)
def test_a_row_that_gives_no_record_is_counted_with_its_reason(tmp_path, change, reason):
    records, dropped = read(written(tmp_path, {**COMMITPACKFT, **change}, COMMITPACKFT))
    assert len(records) == 1
    assert dropped == {reason: 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"func_documentation_string": "Div."}, "doc comment below 20 characters"),
        ({"whole_func_string": "func Div(a, b int) int {\n\tif {\n\treturn a\n}"}, "syntax error"),
        ({"whole_func_string": "func Div(a, b int) int"}, "no body"),
        ({"whole_func_string": "func Div(a, b int) int {\n\treturn a / b\n}"}, "fewer than 2 body lines"),
        ({"whole_func_string": "var x = 1"}, "no function"),
    ],
)
def test_a_function_that_gives_no_record_is_counted_with_its_reason(tmp_path, change, reason):
    records, dropped = read(written(tmp_path, {**CODE_SEARCH_NET, **change}))
    assert records == []
    assert dropped == {reason: 1}


def test_a_broken_line_is_named_by_file_and_line_or_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(COMMITPACKFT)}\n{{broken\n{json.dumps(COMMITPACKFT)}\n")
    with pytest.raises(BadLineError, match=r"rows\.jsonl, line 2: .*JSON"):
        read(path)
    records, dropped = read(path, on_bad_line="skip")
    assert len(records) == 2
    assert dropped == {"broken line": 1}


def test_unsupported_files_and_empty_folders_are_rejected_by_path(tmp_path):
    (tmp_path / "rows.txt").write_text("x")
    for path in (tmp_path / "rows.txt", tmp_path):
        with pytest.raises(ValueError, match=str(path)):
            read(path)


def test_hub_data_sets_are_loaded_with_their_go_subset(monkeypatch):
    requests = []

    def load_dataset(name, config, **options):
        requests.append((name, config, options))
        return [COMMITPACKFT]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("bigcode/commitpackft", "code-search-net/code_search_net", "ann/edits"):
        assert len(list(hub_records(name, dropped=Dropped()))) == 1
    assert requests == [
        ("bigcode/commitpackft", None, {"split": "train", "streaming": True, "data_files": "data/go/data.jsonl"}),
        ("code-search-net/code_search_net", "go", {"split": "train", "streaming": True}),
        ("ann/edits", None, {"split": "train", "streaming": True}),
    ]


def test_an_unknown_hub_data_set_is_named():
    with pytest.raises(FileNotFoundError, match="nobody/nothing"):
        list(hub_records("nobody/nothing", dropped=Dropped()))
