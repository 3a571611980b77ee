"""`hrm-hf data go` and `go-tokenizer` as a user calls them, on small source trees."""

import json
import shutil
import subprocess

import pytest
import tiny_go
from datasets import load_dataset
from transformers import AutoTokenizer
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.golang.data.records import read_records
from hrm_hf.golang.data.selection import split_of
from hrm_hf.text.answers import load_answers


GO = """package p{n}

// Work{n} returns the sum of the list and of {n}, counting only what is positive.
func Work{n}(list []int) int {{
\ttotal := {n}
\tfor _, value := range list {{
\t\tif value > {n} {{
\t\t\ttotal += value
\t\t}}
\t}}
\treturn total
}}
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    (root / "LICENSE").write_text("Permission is hereby granted, free of charge, to any person obtaining a copy")
    for number in range(60):
        folder = root / f"p{number}"
        folder.mkdir()
        (folder / "work.go").write_text(GO.format(n=number))
    return root


def call(*args, code=0):
    result = CliRunner().invoke(app, ["data", *map(str, args)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def failure(*args):
    """Return the message of a failed run; `main` prints it and exits with status 1."""
    result = CliRunner().invoke(app, ["data", *map(str, args)])
    assert isinstance(result.exception, (ValueError, OSError)), result.output
    return str(result.exception)


@pytest.fixture(scope="module")
def built(tree, tmp_path_factory):
    out = tmp_path_factory.mktemp("built")
    result = call("go", tree, "--out", out / "records", "--text", out / "text", "--license", "ISC", "--json")
    return out, json.loads(result.stdout)


def test_packages_become_splits_that_load_as_a_data_set(built):
    out, report = built
    assert report["train_rows"] + report["validation_rows"] + report["test_rows"] == 60
    assert report["licences"] == {"MIT": 60}
    assert json.loads((out / "records" / "report.json").read_text()) == report
    rows = load_dataset(str(out / "records"), cache_dir=str(out / "cache"))
    assert {name: split.num_rows for name, split in rows.items()} == {
        name: report[f"{name}_rows"] for name in ("train", "validation", "test")
    }
    for name in ("train", "validation", "test"):
        assert {split_of(row["group"]) for row in read_records(out / "records" / f"{name}.jsonl")} == {name}


def test_plain_files_are_split_as_records_are(built):
    out, report = built
    for name in ("train", "validation", "test"):
        lines = [json.loads(line) for line in (out / "text" / f"{name}.jsonl").read_text().splitlines()]
        assert len(lines) == report[f"{name}_rows"] == report["text"][f"{name}_rows"]
        assert {split_of(line["group"]) for line in lines} == {name}
        assert all(line["text"].startswith("package p") for line in lines)


def test_a_tokenizer_is_trained_on_the_training_files_alone(built, tmp_path):
    out, report = built
    command = ("go-tokenizer", "--source", out / "text" / "train.jsonl", "--vocab-size", "350", "--out", tmp_path)
    result = json.loads(call(*command, "--json").stdout.splitlines()[-1])
    assert (result["vocab_size"], result["files"]) == (350, report["train_rows"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer(GO)["input_ids"][1:]) == GO


def test_a_tokenizer_skips_broken_lines_and_counts_them(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"text": GO * 3}) + '\n{"text": \n{"code": "x"}\n')
    command = ("go-tokenizer", "--source", file, "--vocab-size", "310", "--out", tmp_path / "t", "--json")
    result = json.loads(call(*command).stdout.splitlines()[-1])
    assert result["not_read"]["counts"] == {"unreadable line": 2}
    assert "t.jsonl, line 2" in result["not_read"]["examples"]["unreadable line"][0]


def test_a_tokenizer_is_trained_on_records_and_no_larger_than_they_fill(built, tmp_path):
    out, report = built
    command = ("go-tokenizer", "--vocab-size", "50000", "--out", tmp_path, "--source")
    result = json.loads(call(*command, out / "records" / "train.jsonl", "--json").stdout.splitlines()[-1])
    assert result["files"] == report["train_rows"] and f"{result['vocab_size']} of 50000" in result["note"]
    assert "line 1: id is missing" in failure(*command, tiny_go.write(tmp_path / "p.jsonl", [{"solution": 1}]))


def test_empty_splits_are_reported(tmp_path):
    for number in range(2):
        (tmp_path / f"p{number}").mkdir()
        (tmp_path / f"p{number}" / "work.go").write_text(GO.format(n=number))
    assert "note: validation and test: no records." in call("go", tmp_path, "--out", tmp_path / "o").stdout
    none = ("--validation-share", "0", "--test-share", "0")  # empty splits, but by request
    assert "note: " not in call("go", tmp_path, "--out", tmp_path / "none", *none).stdout


def test_trajectories_are_labeled_by_a_validator(tree, tmp_path):
    pytest.importorskip("tree_sitter_go")
    options = ("--trajectories", "2", "--validator", "tree-sitter", "--validation-share", "0", "--test-share", "0")
    call("go", tree, "--out", tmp_path, *options)
    rows = list(read_records(tmp_path / "trajectories" / "train.jsonl"))
    assert len(rows) > 60 and {row["attempts"][-1]["decision"] for row in rows} == {"DONE"}
    for attempt in (attempt for row in rows for attempt in row["attempts"] if attempt["feedback"]):
        assert (attempt["decision"] == "CONTINUE") == (attempt["feedback"]["syntax_ok"] is False)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commits_of_a_repository_are_records(tmp_path):
    repository = tmp_path / "shop"
    repository.mkdir()

    def git(*args):
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.com")
        subprocess.run(["git", "-C", str(repository), *identity, *args], check=True, capture_output=True)

    git("init", "-q")
    (repository / "work.go").write_text(GO.format(n=1))
    git("add", ".")
    git("commit", "-qm", "Add work")
    (repository / "work.go").write_text(GO.format(n=1).replace("value > 1", "value >= 1"))
    git("commit", "-qam", "Fix the sum of values that are one")
    none = "--validation-share", "0", "--test-share", "0", "--license", "ISC"
    call("go", f"git:{repository}", *none, "--out", tmp_path / "o")
    (row,) = read_records(tmp_path / "o" / "train.jsonl")
    assert row["plan"]["intent"] == "FIX" and row["licence"] == "ISC"


def test_folder_without_go_files_is_rejected(tmp_path):
    assert "no Go files" in failure("go", tmp_path, "--out", tmp_path / "o")
    assert "no Go files" in failure("go-tokenizer", "--source", tmp_path, "--out", tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_folder_without_usable_files_reports_the_reasons(tmp_path):
    (tmp_path / "line.go").write_text("package a\n\nvar x = `" + "x" * 10_000_000 + "`\n")
    (tmp_path / "b.go").write_text("package a\n\nfunc f() {\n}\n")
    message = failure("go", tmp_path, "--out", tmp_path / "o")
    assert "1 more than 1000000 bytes" in message and "1 no doc comment" in message


@pytest.mark.parametrize(
    "options, message",
    [
        (("--split-by", "file"), "--split-by"),
        (("--validation-share", "0.6", "--test-share", "0.6"), "validation_share=0.6"),
        (("--oracle", "types"), "validator='auto'"),
    ],
)
def test_bad_usage_exits_with_2(tree, tmp_path, options, message):
    result = call("go", tree, "--out", tmp_path, *options, code=2)
    assert message in " ".join(result.output.replace("│", " ").split())


def test_missing_source_is_a_usage_error(tmp_path):
    call("go", tmp_path / "nowhere", "--out", tmp_path / "o", code=2)
    (tmp_path / "a.txt").write_text("x")
    call("go", tmp_path / "a.txt", "--out", tmp_path / "o", code=2)
    call("go", "--out", tmp_path / "o", code=2)
    call("go", "prs:x.jsonl", "--text", tmp_path / "t", "--out", tmp_path / "o", code=2)


@pytest.mark.parametrize("kind", ["prs:", "hub:", ""])
def test_evaluation_files_are_rejected_as_sources(tmp_path, kind):
    file = tmp_path / "mbpp_go_mbxp.jsonl"
    file.write_text("{}\n")
    assert "evaluation files" in failure("go", f"{kind}{file}", "--out", tmp_path / "o")


def test_other_records_are_not_overwritten(built, tree):
    out, _ = built
    result = call("go", tree, "--seed", "3", "--out", out / "records", code=2)
    assert "already contains records" in " ".join(result.output.replace("│", " ").split())


def test_prompts_end_where_the_code_begins_and_have_their_reference(tmp_path):
    for part in (tiny_go.tokenizer(), tiny_go.model(problem_budget=24)):
        part.save_pretrained(tmp_path / "m")
    made = [tiny_go.record(number) for number in range(4)]
    made[2]["problem"]["body"] = "and more than a budget of tokens has room for, " * 9
    tagged = tiny_go.record(7) | {"problem": {"title": "</PROBLEM><PLAN>", "body": ""}}
    records = tiny_go.write(tmp_path / "r.jsonl", made)
    options = ("--records", records, "--limit", 2, "--out", tmp_path / "p.jsonl", "--json")
    assert json.loads(call("go-prompts", tmp_path / "m", *options).stdout)["rows"] == 2
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [row["reference"] for row in rows] == [tiny_go.solution(0), tiny_go.solution(2)]
    ids = tiny_go.tokenizer()(rows[1]["prompt"])["input_ids"]
    row = tiny_go.builder(problem_budget=24).build(made[2])
    assert ids == row["input_ids"][: row["code_start"]]  # the prompt has the same ids as in training
    said = call("go-prompts", tmp_path / "m", "--records", tiny_go.write(tmp_path / "t.jsonl", [tagged]), *options[4:])
    assert "1 tags in the text" in said.stdout or '"tags in the text' in said.stdout
    short = call("go-prompts", tmp_path / "m", *options, "--max-reference", 3)
    assert json.loads(short.stdout)["left_out"]["counts"] == {"solution longer than 3 tokens": 2}
    other = call("go-prompts", shutil.copytree(tmp_path / "m", tmp_path / "n"), *options, code=2).output
    assert "p.jsonl" in other and "(model)" in other
    tiny_go.write(tmp_path / "p.jsonl", rows)
    kept = load_answers([str(tmp_path / "p.jsonl")], "grpo")
    assert kept.column_names == ["prompt", "reference"] and kept[0]["reference"] == tiny_go.solution(0)
