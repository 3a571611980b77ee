"""Reading documents: every kind of source, and errors for broken ones. Parquet files are written by pandas."""

import gzip
import json
import re

import pandas
import pytest

from hrm_hf.io.files import BadLineError, is_hub_source
from hrm_hf.text.filters import TextFilter
from hrm_hf.text.sources import open_source


GOOD = [{"text": "first"}, {"text": "second é"}, {"text": ""}]


@pytest.fixture
def read(tmp_path):
    """Return the texts and errors of a source: `read(path, **options)`."""

    def read_source(source, **options):
        rows = list(open_source(str(source), cache_dir=str(tmp_path / "cache"), **options))
        return [row["text"] for row in rows], [row["error"] for row in rows]

    return read_source


@pytest.fixture
def write(tmp_path):
    """Write a file and return its path: `write(name, content)`."""

    def write_file(name, content):
        data = content if isinstance(content, bytes) else content.encode()
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write_file


def json_lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "list.json", "list.jsonl.gz"])
def test_json_lines_and_lists_are_documents(write, read, name, streaming):
    lines = json_lines(GOOD) + "\n  \n" + json.dumps(last := {"text": "no line break at the end"})
    path = write(name, "\ufeff" + (json.dumps([*GOOD, last], indent=1) if "list" in name else lines))
    expected = ["first", "second é", "", "no line break at the end"]
    assert read(path, streaming=streaming) == (expected, [None] * 4)


def test_another_column_holds_the_text(write, read):
    path = write("a.jsonl", json_lines([{"text": 1, "body": "b"}]))
    assert read(path, column="body")[0] == ["b"]


BROKEN = [
    (b'{"text": "cut', "line 2: broken JSON .*character 10"),
    (b'{"body": "x"}', r"line 2: .*'text'.*\['body'\].*--text_column"),
    (b'{"text": null}', "line 2: 'text' is None"),
    (b'{"text": ["x"]}', r"line 2: 'text' is \['x'\]"),
    (b'"x"', "line 2: 'x'"),
    (b'{"text": "caf\xe9"}', "line 2: .*UTF-8.* 0xe9 .*position 14"),
    (b'{"text": "a\\ud800"}', "line 2: 'text' .*character 2"),
    (b"[" * 100_000, "line 2: broken JSON"),
]


@pytest.mark.parametrize(("line", "message"), BROKEN)
def test_broken_line_is_an_error_with_file_and_line(write, read, line, message):
    path = write("a.jsonl", b'{"text": "x"}\n' + line + b'\n{"text": "y"}\n')
    for streaming in (False, True):
        with pytest.raises(BadLineError, match=f"{re.escape(str(path))}, {message}"):
            read(path, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_broken_lines_are_skipped_and_counted_if_requested(write, tmp_path, streaming):
    path = write("a.jsonl", b'{"text": "x"}\n' + b"\n".join(line for line, _ in BROKEN) + b'\n{"text": "y"}\n')
    chosen = TextFilter(on_bad_line="skip")
    rows = open_source(str(path), on_bad_line="skip", streaming=streaming, cache_dir=str(tmp_path / "cache"))
    kept = chosen.apply_to_stream(rows) if streaming else chosen.apply(rows)
    assert [row["text"] for row in kept] == ["x", "y"]
    assert chosen.counts == {"kept": 2, "bad": len(BROKEN)}
    assert f"{path}, line 3: key 'text' is missing" in chosen.bad_lines[1]


def test_changed_file_is_read_again(write, read):
    path = write("a.jsonl", json_lines(GOOD))
    read(path)
    write("a.jsonl", json_lines([{"text": "new"}]))
    assert read(path)[0] == ["new"]


def test_plain_text_is_one_unchanged_document(write, read):
    text = "one\r\n\ntwo\n<|endoftext|>\nthree\n\n"
    assert read(write("a.txt", text))[0] == [text]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.md"])
def test_a_line_separates_documents(write, read, name):
    path = write(name, "one\n\nstill one\n<|endoftext|>\ntwo\n<|endoftext|>\n<|endoftext|>\nthree")
    assert read(path, separator="<|endoftext|>")[0] == ["one\n\nstill one", "two", "three"]


def test_empty_lines_may_separate_documents(write, read):
    assert read(write("a.txt", "a\nb\n\n\nc\n"), separator="")[0] == ["a\nb", "c"]


def test_a_broken_line_of_a_plain_text_is_named(write, read):
    path = write("a.txt", b"good\nb\xffd\ngood again\n")
    with pytest.raises(BadLineError, match=r"a\.txt, line 2: .*UTF-8.* 0xff .*position 2"):
        read(path)
    texts, errors = read(path, on_bad_line="skip")
    assert texts == [None, "good\ngood again\n"] and "line 2" in errors[0]


def test_a_truncated_gzip_file_is_an_error_with_its_line(write, read, tmp_path):
    whole = gzip.compress(json_lines([{"text": str(number)} for number in range(5000)]).encode())
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut.jsonl.gz: .* line \d"):
        read(path)


@pytest.mark.parametrize("streaming", [False, True])
def test_parquet_files_are_read_and_rows_without_text_named(read, tmp_path, streaming):
    path = tmp_path / "a.parquet"
    pandas.DataFrame({"text": ["x", None, "z"], "number": [1, 2, 3]}).to_parquet(path)
    texts, errors = read(path, streaming=streaming)
    assert texts == ["x", None, "z"]
    assert errors == [None, f"{path}, row 1: 'text' is empty (null); expected a string", None]
    with pytest.raises(ValueError, match=r"'body'.*\['text', 'number'\]"):
        read(path, column="body", streaming=streaming)
    with pytest.raises(ValueError, match=r"'number'.*int64"):
        read(path, column="number", streaming=streaming)


def test_folder_yields_its_known_files_in_order(write, read, tmp_path):
    write("in/b.txt", "two")
    write("in/a.jsonl", json_lines([{"text": "one"}]))
    write("in/deep/c.txt.gz", "three")
    write("in/notes.csv", "no")
    pandas.DataFrame({"text": ["four"]}).to_parquet(tmp_path / "in" / "deep" / "d.parquet")
    assert read(tmp_path / "in")[0] == ["one", "two", "three", "four"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_repository_is_read_by_name_and_configuration(read, write, tmp_path, streaming):
    card = "---\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n    path: en/*.parquet\n---\n"
    write("set/README.md", card)
    (tmp_path / "set" / "en").mkdir()
    pandas.DataFrame({"text": ["x", "y"]}).to_parquet(tmp_path / "set" / "en" / "0.parquet")
    assert read(f"hub:{tmp_path / 'set'}:en", streaming=streaming)[0] == ["x", "y"]


def test_missing_and_unknown_sources_are_named(read, write, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none.jsonl does not exist"):
        read("none.jsonl")
    with pytest.raises(FileNotFoundError, match=r"nobody/nothing is neither a file"):
        read("nobody/nothing")
    with pytest.raises(ValueError, match=r"a.csv: .*'\.csv'.*\.jsonl, \.json, \.txt"):
        read(write("a.csv", "x"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty contains no file"):
        read(tmp_path / "empty")


@pytest.mark.parametrize(
    ("source", "expected"),
    [("allenai/c4:en", True), ("owner/name", True), ("hub:wikitext:x", True), ("data/a.jsonl", False),
     ("/data/set", False), ("./data/set", False), ("a.txt", False), ("wikitext", False)],
)  # fmt: skip
def test_hub_names_are_distinguished_from_paths(source, expected):
    assert is_hub_source(source) == expected
