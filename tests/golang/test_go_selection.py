"""Splits, duplicates and overlap with evaluation tasks. Referees: hand-made copies and given shares."""

import gzip
import hashlib
import json

import pytest

from hrm_hf.golang.data.records import new_record
from hrm_hf.golang.data.selection import (
    NGRAM,
    SPLITS,
    Selection,
    evaluation_ngrams,
    normalized_code,
    split_of,
    validate_no_evaluation_file,
)


PREFIX = "func F(list []int) int {"
BODY = """
\t// Adds what is positive.
\ttotal := 0
\tfor _, value := range list {
\t\tif value > 0 {
\t\t\ttotal += value
\t\t}
\t}
\tlog.Printf("positive numbers have the sum %d", total)
\treturn total
}"""
PLAN = {"intent": "ADD", "targets": ["func:F"], "steps": []}


def record(id, group="g", body=BODY, title="F adds."):
    return new_record(id, source="s", group=group, code=PREFIX + body, code_prefix=PREFIX, title=title, plan=PLAN)


def groups_in(split, count=3):
    return [name for name in map(str, range(1000)) if split_of(name) == split][:count]


def test_a_group_is_in_one_split_and_shares_are_kept():
    names = [f"package/{number}" for number in range(4000)]
    splits = [split_of(name, 1, 0.1, 0.2) for name in names]
    assert splits == [split_of(name, 1, 0.1, 0.2) for name in names]
    assert abs(splits.count("validation") / 4000 - 0.1) < 0.02
    assert abs(splits.count("test") / 4000 - 0.2) < 0.02
    assert splits != [split_of(name, 2, 0.1, 0.2) for name in names]


def test_records_are_in_the_split_of_their_group():
    records = [record(f"{name}/{n}", name, f"\n\treturn {name}{n}\n}}") for name in map(str, range(200)) for n in "12"]
    splits = Selection().split(records)
    assert sum(map(len, splits.values())) == 400
    for name in SPLITS:
        assert {split_of(row["group"]) for row in splits[name]} == {name}


def test_code_comparison_ignores_comments_and_layout_but_not_strings():
    assert normalized_code('x:=1// c\n/* d\n */ y = "// no  comment"') == 'x : = 1 y = "// no  comment"'
    assert normalized_code("s := `a  //b`") == "s : = `a  //b`"


def test_training_records_that_duplicate_held_out_code_are_removed():
    train, test = groups_in("train")[0], groups_in("test")[0]
    copied = BODY.replace("// Adds what is positive.", "/* Otherwise said. */").replace("\t\t\ttotal", "  total")
    selection = Selection()
    splits = selection.split([record("a", train), record("b", test, copied), record("c", train)])
    assert [len(splits[name]) for name in SPLITS] == [0, 0, 1]
    assert selection.dropped.examples == {"exact duplicate": ["a", "c"]}


def test_near_duplicates_are_removed_and_other_records_stay():
    pytest.importorskip("datasketch")
    longer = BODY.replace("return total", "".join(f"call{n}(total)\n\t" for n in range(60)) + "return total")
    records = [record("a", body=longer), record("b", body=longer.replace("call7(total)", "call7(value)")), record("c")]
    selection = Selection(deduplicate="near", near_threshold=0.8)
    assert [row["id"] for row in selection.split(records)["train"]] == ["a", "c"]
    assert selection.dropped.examples == {"near duplicate": ["b"]}
    assert len(Selection(deduplicate="none").split(records)["train"]) == 3


def test_an_id_is_used_once():
    selection = Selection(deduplicate="none")
    assert len(selection.split([record("a"), record("a")])["train"]) == 1
    assert selection.dropped.counts == {"id seen before": 1}


def test_records_that_overlap_with_an_evaluation_task_are_skipped(tmp_path):
    words = " ".join(f"word{number}" for number in range(NGRAM))
    tasks = [{"task_id": "1", "prompt": f"package a\n// {words}\nfunc G()"}, {"canonical_solution": BODY}]
    file = tmp_path / "tasks.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, tasks)).encode()))
    selection = Selection(evaluation_ngrams=evaluation_ngrams([file]))
    other = "\n\treturn len(list)\n}"
    records = [
        record("same code"),
        record("same words", body=other, title=f"F is asked for {words} as well."),
        record("fewer words", body=other, title=f"F is asked for {words.rpartition(' ')[0]} as well."),
    ]
    assert [row["id"] for row in selection.split(records)["train"]] == ["fewer words"]
    assert selection.dropped.examples == {"overlap with evaluation tasks": ["same code", "same words"]}


def test_an_evaluation_file_without_texts_is_an_error(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"task_id": "1"}\n')
    with pytest.raises(ValueError, match=r"tasks\.jsonl .*prompt, canonical_solution"):
        evaluation_ngrams([file])
    with pytest.raises(FileNotFoundError):
        evaluation_ngrams([tmp_path / "none.jsonl"])


def test_evaluation_files_are_rejected_by_name_and_by_content(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"humanevalpack_go\.jsonl\.gz"):
        validate_no_evaluation_file("elsewhere/humanevalpack_go.jsonl.gz")
    content = b'{"prompt": "x"}\n'
    digest = "4f8c2b7a"  # not its hash
    monkeypatch.setattr("hrm_hf.golang.data.selection.EVALUATION_FILES", {"t": digest})
    (tmp_path / "renamed.jsonl").write_bytes(content)
    (tmp_path / "renamed.jsonl.gz").write_bytes(gzip.compress(content))
    validate_no_evaluation_file(tmp_path / "renamed.jsonl")
    monkeypatch.setattr("hrm_hf.golang.data.selection.EVALUATION_FILES", {"t": hashlib.sha256(content).hexdigest()})
    for name in ("renamed.jsonl", "renamed.jsonl.gz"):
        with pytest.raises(ValueError, match=name):
            validate_no_evaluation_file(tmp_path / name)
    (tmp_path / "broken.gz").write_bytes(b"no gzip")
    validate_no_evaluation_file(tmp_path / "broken.gz")  # reading it will report the error
