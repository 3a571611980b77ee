"""Records from git histories that the tests create."""

import os
import shutil
import subprocess

import pytest

from hrm_hf.golang.data.commits import commit_records, repository_name
from hrm_hf.golang.data.edits import edit_plan, intent_of_subject, plain_subject, without_trailers
from hrm_hf.golang.data.records import validate_record
from hrm_hf.golang.data.sources import Dropped


pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="the git program is not installed")

CODE = """package calc

import "errors"

var ErrZero = errors.New("zero")

// Div divides.
func Div(a, b int) (int, error) {
	return a / b, nil
}

// Add adds.
func (c *Calc) Add(a int) int {
	return c.sum + a
}
"""
FIXED = CODE.replace("\treturn a / b", "\tif b == 0 {\n\t\treturn 0, ErrZero\n\t}\n\treturn a / b")
DIV = CODE[CODE.index("func Div") : CODE.index("\n\n// Add")]
FIXED_DIV = "func Div(a, b int) (int, error) {\n\tif b == 0 {\n\t\treturn 0, ErrZero\n\t}\n\treturn a / b, nil\n}"
MIT = "Permission is hereby granted, free of charge, to any person obtaining a copy\n"


class Repository:
    """A repository in a folder, to which each call of `commit` adds a commit."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments, author="Ann <ann@example.org>") -> str:
        name, _, mail = author.partition(" <")
        people = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in
                  (("NAME", name), ("EMAIL", mail.rstrip(">")))}  # fmt: skip
        environment = {**os.environ, **people, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        answer = subprocess.run(
            ["git", "-C", str(self.folder), *arguments], capture_output=True, text=True, env=environment
        )
        assert answer.returncode == 0, answer.stderr
        return answer.stdout.strip()

    def commit(self, message, files, author="Ann <ann@example.org>") -> str:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message, author=author)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path):
    made = Repository(tmp_path / "calc")
    made.commit("Start", {"calc.go": CODE, "LICENSE": MIT})
    return made


def mined(repository) -> tuple[list[dict], dict]:
    dropped = Dropped()
    records = list(commit_records(repository.folder, dropped))
    for record in records:
        validate_record(record)
    return records, dict(dropped.counts)


def test_a_commit_becomes_old_function_message_and_new_function(repository):
    message = "calc: fix division by zero (#12)\n\nReturn an error. It used to panic.\n\nSigned-off-by: Ann <a@b.c>"
    sha = repository.commit(message, {"calc.go": FIXED})
    records, dropped = mined(repository)
    assert dropped == {"file added, deleted or of another kind": 1}
    assert records == [
        {
            "id": f"git:calc@{sha[:12]}",
            "source": "git",
            "licence": "MIT",
            "group": "calc",
            "problem": {"title": "calc: fix division by zero (#12)", "body": "Return an error. It used to panic."},
            "context": {"path": "calc.go", "before": DIV},
            "plan": {
                "intent": "FIX",
                "targets": ["func:Div"],
                "steps": [
                    {"intent": "FIX", "target": "func:Div", "text": "fix division by zero"},
                    {"intent": "FIX", "target": "func:Div", "text": "Return an error."},
                ],
            },
            "attempts": [],
            "code_prefix": "func Div(a, b int) (int, error) {",
            "solution": {"code": FIXED_DIV},
        }
    ]


def test_a_changed_signature_is_not_part_of_the_prefix(repository):
    repository.commit("Make Add variadic", {"calc.go": CODE.replace("Add(a int) int", "Add(a int, more ...int) int")})
    (record,), _ = mined(repository)
    assert record["code_prefix"] == ""
    assert record["plan"]["targets"] == ["method:Calc.Add"]
    assert record["plan"]["intent"] == "UPDATE"


def test_a_new_function_has_no_code_before(repository):
    repository.commit("Add Neg", {"calc.go": f"{CODE}\nfunc Neg(a int) int {{\n\treturn -a\n}}\n"})
    (record,), _ = mined(repository)
    assert record["context"]["before"] == ""
    assert record["plan"]["intent"] == "ADD"
    assert record["solution"]["code"] == "func Neg(a int) int {\n\treturn -a\n}"
    assert record["code_prefix"] == "func Neg(a int) int {"


@pytest.mark.parametrize(
    ("files", "author", "reason"),
    [
        ({"calc.go": FIXED, "other.go": "package calc\n"}, "Ann <a@b.c>", "more than one .go file"),
        ({"calc.go": FIXED}, "dependabot[bot] <d@b.c>", "bot"),
        ({"calc.go": FIXED.replace("a / b", "a /")}, "Ann <a@b.c>", "does not parse after"),
        ({"calc.go": FIXED.replace("c.sum + a", "a + c.sum")}, "Ann <a@b.c>", "more than one function changed"),
        ({"calc.go": CODE.replace("// Div", "// Our Div")}, "Ann <a@b.c>", "only comments, imports or layout changed"),
        ({"calc.go": CODE.replace('"zero"', '"nought"')}, "Ann <a@b.c>", "no function changed"),
        ({"calc.go": FIXED.replace('"zero"', '"0"')}, "Ann <a@b.c>", "declarations changed outside the function"),
        ({"calc.go": CODE.replace("\treturn a", "\tg()\n" * 41 + "\treturn")}, "A <a>", "more than 40 changed lines"),
        ({"calc.go": CODE[: CODE.index("\n\n// Add")] + "\n"}, "Ann <a@b.c>", "function removed"),
        ({"calc.go": f"// Code generated by x. DO NOT EDIT.\n\n{FIXED}"}, "Ann <a@b.c>", "generated"),
        ({"calc.go": FIXED.encode() + b"// \xff\n"}, "Ann <a@b.c>", "missing, not UTF-8 or more than 1000000 bytes"),
        ({"calc.go": FIXED.replace("// Add", f"// {'x' * 6000}")}, "Ann <a@b.c>", "line of more than 5000 characters"),
    ],
)  # fmt: skip
def test_a_commit_that_gives_no_record_is_counted_with_its_reason(repository, files, author, reason):
    repository.commit("Change something", files, author)
    records, dropped = mined(repository)
    assert records == []
    assert dropped == {"file added, deleted or of another kind": 1, reason: 1}


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("vendor/x/calc.go", "vendor or testdata"),
        ("testdata/calc.go", "vendor or testdata"),
        ("api.pb.go", "generated"),
        ("zz_generated_deepcopy.go", "generated"),
        ("calc_test.go", "test file"),
    ],
)
def test_commits_to_excluded_paths_are_counted(repository, path, reason):
    repository.commit("New", {path: CODE})
    repository.commit("Change", {path: FIXED})
    records, dropped = mined(repository)
    assert records == []
    assert dropped[reason] == 1


def test_merges_are_skipped_and_both_parents_are_read(repository):
    repository.git("checkout", "-q", "-b", "side")
    repository.commit("Fix Div", {"calc.go": FIXED})
    repository.git("checkout", "-q", "main")
    repository.commit("Fix Add", {"calc.go": CODE.replace("c.sum + a", "a + c.sum"), "README": "calc"})
    repository.git("merge", "-q", "--no-ff", "-m", "Merge side: fix it all", "side")
    assert [r["problem"]["title"] for r in mined(repository)[0]] == ["Fix Add", "Fix Div"]


def test_unusual_names_and_messages_round_trip(repository):
    repository.commit("New", {'a b\n"ü".go': CODE})
    repository.commit("Fix\ttab :100644 é\n\n:100644 100644 a b M\n1\t2\tx.go", {'a b\n"ü".go': FIXED})
    (record,), _ = mined(repository)
    assert record["context"]["path"] == 'a b\n"ü".go'
    assert record["problem"]["title"] == "Fix\ttab :100644 é"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://example.org/ann/calc.git", "ann/calc"),
        ("git@example.org:ann/calc.git", "ann/calc"),
        ("https://example.org/ann/calc/", "ann/calc"),
        ("/somewhere/else", "calc"),
    ],
)
def test_the_group_is_the_origin_or_the_folder(repository, url, name):
    repository.git("remote", "add", "origin", url)
    assert repository_name(repository.folder) == name


def test_a_bare_clone_is_read(repository, tmp_path):
    repository.commit("Fix Div", {"calc.go": FIXED})
    repository.git("clone", "-q", "--bare", str(repository.folder), str(tmp_path / "bare.git"))
    assert len(list(commit_records(tmp_path / "bare.git", Dropped()))) == 1


def test_the_configuration_of_a_repository_does_not_start_programs(repository, tmp_path):
    mark = tmp_path / "started"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    settings = ("core.fsmonitor", "gpg.program", "diff.external", "diff.go.textconv", "core.pager", "pager.log")
    for name in settings:
        repository.git("config", name, str(program))
    repository.git("config", "log.showSignature", "true")
    (repository.folder / ".gitattributes").write_text("*.go diff=go\n")
    (repository.folder / "calc.go").write_text(FIXED)
    repository.git("-c", "core.fsmonitor=false", "add", "-A")
    repository.git("-c", "core.fsmonitor=false", "commit", "-q", "-m", "Fix Div")
    mark.unlink(missing_ok=True)
    assert len(mined(repository)[0]) == 1
    assert not mark.exists()


# ---- errors ----


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("nowhere", "does not exist"),
        ("plain", "git repository"),
        ("empty", "no commits"),
        ("calc/inner", "git repository"),
        ("shallow", "--unshallow"),
    ],
)
def test_an_incomplete_repository_is_reported_by_path(repository, tmp_path, kind, reason):
    repository.commit("Fix Div", {"calc.go": FIXED})
    for folder in ("plain", "calc/inner"):
        (tmp_path / folder).mkdir()
    Repository(tmp_path / "empty")
    repository.git("clone", "-q", "--depth", "1", f"file://{repository.folder}", str(tmp_path / "shallow"))
    with pytest.raises((ValueError, FileNotFoundError), match=f"{kind} .*{reason}"):
        list(commit_records(tmp_path / kind, Dropped()))


def test_a_missing_git_program_is_reported(repository, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="git program"):
        list(commit_records(repository.folder, Dropped()))


# ---- intents and plans ----


@pytest.mark.parametrize(
    ("subject", "intent"),
    [
        ("Fixes the panic in Div", "FIX"),
        ("feat(parser)!: generics", "ADD"),
        ("fix: add a missing check", "FIX"),
        ("perf: fewer allocations", "OPTIMIZE"),
        ("net/http: prevent a leak", "FIX"),
        ("docs: removed the old example", "REMOVE"),
        ("[backport] Renamed Foo to Bar", "REFACTOR"),
        ("Don't drop the last line", "REMOVE"),
        ("cmd, internal: implementing flags", "ADD"),
        ("Speeding up the scanner", "OPTIMIZE"),
        ("v1.2.3", "UPDATE"),
    ],
)
def test_the_verb_of_a_subject_determines_the_intent(subject, intent):
    assert intent_of_subject(subject) == intent


def test_tags_and_issue_numbers_are_removed_from_a_subject():
    assert plain_subject("[v2] net/http: close the body (#123)") == "close the body"
    assert plain_subject("fix(parser): read on") == "read on"
    assert plain_subject("close the body") == "close the body"


def test_trailers_and_issue_links_are_removed_from_the_body():
    body = "Why: it failed.\n\nFixes #12\nChange-Id: I1\nCo-authored-by: B <b@c.d>\nUpdates golang/go#1"
    assert without_trailers(body) == "Why: it failed."


def test_sentences_with_a_verb_become_steps_and_others_do_not():
    plan = edit_plan("Fix it", "It is broken. Add a check.\n- remove the old one\n\nThanks.", "func:F")
    assert [step["text"] for step in plan["steps"]] == ["Fix it", "Add a check.", "remove the old one"]
