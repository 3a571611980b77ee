"""Rows of prompts and answers: supported formats, and error messages for all others."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hrm_hf.io.files import BadLineError
from hrm_hf.text.answers import is_conversation, load_answers


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
PAIR = {"prompt": "a", "completion": "b"}


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("kind", "row", "talks"),
    [
        ("sft", PAIR, False),
        ("sft", {"messages": TURNS}, True),
        ("sft", {"text": "a"}, False),
        ("sft", {"prompt": TURNS[:1], "completion": TURNS[1:]}, True),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, False),
        ("dpo", {"chosen": TURNS, "rejected": TURNS}, True),
        ("grpo", {"prompt": "a"}, False),
    ],
)
def test_rows_of_every_format_keep_only_its_keys(tmp_path, kind, row, talks):
    rows = load_answers([write(tmp_path / "rows.jsonl", {**row, "source": 7}, "", row)], kind)
    assert rows.to_list() == [row, row] and is_conversation(rows) is talks


def test_files_of_all_kinds_and_folders_are_concatenated(tmp_path):
    write(tmp_path / "a.json", json.dumps([PAIR], indent=1))
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "__MACOSX" / "._a.json").write_bytes(b"\0\5\26\7")
    (tmp_path / "README.md").write_text("About the rows.")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({**PAIR, "prompt": "é"}).encode("utf-16")))
    pq.write_table(pa.Table.from_pylist([{**PAIR, "prompt": "c"}]), tmp_path / "c.parquet")
    assert load_answers([str(tmp_path)], "sft")["prompt"][:] == ["a", "é", "c"]
    assert load_answers([str(tmp_path), str(tmp_path / "a.json")], "sft", limit=2)["prompt"][:] == ["a", "é"]


@pytest.mark.parametrize(
    ("kind", "rows", "message"),
    [
        ("sft", [PAIR, '{"prompt": "a", '], r"rows.jsonl, line 2: broken JSON"),
        ("sft", [PAIR, "[1]"], r"rows.jsonl, line 2: .*\[1\]"),
        ("sft", [PAIR, {"prompt": "a"}], r"rows.jsonl, line 2: .*'completion'.*\['prompt'\]"),
        ("sft", [PAIR, {**PAIR, "completion": None}], r"rows.jsonl, line 2: 'completion' is None"),
        ("sft", [PAIR, {**PAIR, "prompt": TURNS}], "rows.jsonl, line 2: 'prompt' is"),
        ("sft", [{"messages": []}], r"line 1: 'messages' is \[\]"),
        ("sft", [{"messages": [{"role": "user"}]}], "line 1: 'messages' is"),
        ("sft", [{"prompt": "a", "completion": TURNS}], "line 1: prompt, completion"),
        ("dpo", [PAIR], r"line 1: .*\['prompt', 'completion'\].*\"chosen\".*\"rejected\""),
        ("grpo", [{"text": "a"}], r"line 1: .*\['text'\].*run_clm\.py"),
        ("sft", [PAIR, {**PAIR, "completion": "b\ud83d"}], "line 2: 'completion' .*surrogate.* 2"),
        ("sft", [{"messages": [{"role": "user", "content": "\udc00"}]}], "line 1: 'messages' .*surrogate.* 1"),
        ("grpo", [{"prompt": "a", "tests": "\ud800"}], "line 1: 'tests' .*surrogate"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path, kind, rows, message):
    with pytest.raises(BadLineError, match=message):
        load_answers([write(tmp_path / "rows.jsonl", *rows)], kind)


def test_files_without_rows_and_of_other_kinds_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"rows.jsonl: no rows.*\{\"prompt\": ...\}"):
        load_answers([write(tmp_path / "rows.jsonl")], "grpo")
    with pytest.raises(ValueError, match="no source"):
        load_answers([], "grpo")
    with pytest.raises(ValueError, match=r"text.txt.*\.jsonl"):
        load_answers([write(tmp_path / "text.txt", "a")], "sft")
    with pytest.raises(ValueError, match=r"broken.parquet is not a Parquet"):
        load_answers([write(tmp_path / "broken.parquet", "a")], "sft")
    with pytest.raises(FileNotFoundError, match=r"none.jsonl does not exist"):
        load_answers([str(tmp_path / "none.jsonl")], "sft")
