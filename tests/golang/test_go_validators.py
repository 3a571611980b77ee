"""Validators that use Go, and their checker process. Referees: gofmt and the go tool."""

import base64
import os
import signal
import subprocess
import threading
from contextlib import closing

import pytest
from go_samples import BROKEN, FINE, corrupted_functions, gofmt_errors, needs_go

from hrm_hf.golang import (
    GoFormatter,
    GoNotFoundError,
    GoParserValidator,
    GoTypesValidator,
    TreeSitterValidator,
    best_validator,
    find_go,
)
from hrm_hf.golang.validators import toolchain
from hrm_hf.golang.validators.toolchain import CheckerProcess
from hrm_hf.models.processing_hrm_go_coder import Feedback


pytestmark = [needs_go, pytest.mark.external]


@pytest.fixture(scope="module")
def parser():
    with GoParserValidator() as validator:
        yield validator


@pytest.fixture(scope="module")
def types():
    with GoTypesValidator() as validator:
        yield validator


def test_line_and_message_match_gofmt(parser, tmp_path):
    codes = corrupted_functions(400)
    for code, feedback, error in zip(codes, parser(codes), gofmt_errors(codes, tmp_path)):
        assert feedback.syntax_ok is (error is None), code
        assert (feedback.line, feedback.message) == (error or (None, "")), code


def test_hand_made_errors_have_the_expected_category_and_line(parser):
    assert parser(FINE) == [Feedback(syntax_ok=True)] * len(FINE)
    assert parser(["//line other.go:100\n\nx := 1"])[0].line == 3  # a line directive does not move lines
    for feedback, (code, line, category) in zip(parser([code for code, _, _ in BROKEN]), BROKEN):
        assert (feedback.syntax_ok, feedback.line, feedback.category) == (False, line, category), code


def test_ten_megabytes_in_one_line_are_validated():
    code = 'var x = "' + "a" * 10_000_000 + '"'
    with GoParserValidator() as validator:
        assert [feedback.syntax_ok for feedback in validator([code, code[:-1]])] == [True, False]


@pytest.mark.parametrize(
    ("code", "category", "line"),
    [
        ("func f() int { return 1 }", "none", None),
        ("func f() int {\n\treturn y\n}", "undefined name", 2),
        ('func f() int {\n\treturn "a"\n}', "mismatched types", 2),
        ("func f() {\n\n\tx := 1\n}", "mismatched types", 3),
        ('import "os"\n\nfunc f() {}', "mismatched types", 1),
        ("func f() {\n\tstrings.NoSuchThing()\n}", "undefined name", 2),
        ("func f() {}\n\nfunc f() {}", "mismatched types", 3),
    ],
)
def test_types_are_checked_and_the_first_error_is_named(types, code, category, line):
    (feedback,) = types([code])
    assert feedback.syntax_ok is True
    assert feedback.types_ok is (category == "none")
    assert (feedback.category, feedback.line) == (category, line)


def test_a_syntax_error_leaves_types_unknown(types):
    (feedback,) = types(["func f( {"])
    assert (feedback.syntax_ok, feedback.types_ok) == (False, None)


def test_missing_imports_of_the_standard_library_are_found_by_name_and_use(types):
    code = 'func f() string { return fmt.Sprint(rand.Intn(3), template.HTML("x"), rand.Reader) }'
    good = 'func f() string { return fmt.Sprint(rand.Intn(3), template.HTML("x")) }'
    assert types([good])[0].types_ok is True
    assert types([code])[0].category == "undefined name"  # no rand package has both names


def test_third_party_imports_leave_types_unknown(types):
    (feedback,) = types(['import "github.com/x/y"\n\nfunc f() { y.Z() }'])
    assert (feedback.syntax_ok, feedback.types_ok, feedback.failed) == (True, None, False)
    assert "github.com/x/y" in feedback.message


def test_formatting_matches_gofmt():
    ugly = "func  f( a int,b  string )  {\nif a>1{ g( b ) }}"
    gofmt = find_go().root / "bin" / "gofmt"
    expected = subprocess.run([gofmt], input=ugly, capture_output=True, text=True, check=True).stdout.strip()
    with GoFormatter() as formatter:
        assert formatter([ugly, "func f(", "\n" + expected + "\n\n"]) == [expected, None, expected]


def test_imports_are_added_or_blanked_without_moving_lines():
    code = 'import (\n\t"math"\n\t"os"\n)\n\nfunc f() { os.Exit(len(strings.ToUpper("a"))) }'
    with closing(CheckerProcess()) as checker:
        (answer,) = checker.ask("imports", [code], package="main")
    text = base64.b64decode(answer["text"]).decode()
    assert text.splitlines()[0] == 'package main; import "strings"; import ('
    assert text.splitlines()[1:4] == ['\t_ "math"', '\t"os"', ")"]


def test_a_killed_checker_is_restarted():
    with GoParserValidator() as validator:
        validator(["func f() {}"])
        first = validator.checker._process.pid
        os.kill(first, signal.SIGKILL)
        assert [feedback.syntax_ok for feedback in validator(["func f() {}", "func f( {"])] == [True, False]
        assert validator.checker._process.pid != first


def test_a_sample_that_times_out_is_reported_and_others_are_validated(monkeypatch):
    patience = (("a", 60.0), ("b", 0.5), ("c", 60.0))
    with closing(CheckerProcess()) as checker:
        monkeypatch.setattr(checker, "_command", ["/bin/sh", "-c", _HANGS_AT_B])
        answers = [checker.ask("parse", [code])[0] for code, checker.seconds in patience]
    assert ["failure" in answer for answer in answers] == [False, True, False]
    assert "0.5 s" in answers[1]["failure"]


# A stand-in checker that answers every request, but hangs at code "b" (base64 Yg==).
_HANGS_AT_B = 'while read -r line; do case "$line" in *Yg==*) exec sleep 60;; *) echo "{}";; esac; done'


def test_a_sample_that_crashes_the_checker_is_retried_and_then_reported(monkeypatch):
    with closing(CheckerProcess()) as checker:
        monkeypatch.setattr(checker, "_command", ["/bin/sh", "-c", _HANGS_AT_B.replace("exec sleep 60", "exit 3")])
        answers = checker.ask("parse", ["a", "b", "c"])
    assert ["failure" in answer for answer in answers] == [False, True, False]
    assert "status 3" in answers[1]["failure"]


def test_a_thousand_requests_from_many_threads_get_matching_answers(parser):
    wrong = []

    def ask(start: int) -> None:
        codes = [f"func f() {{}}{chr(10) * number}x := 1" for number in range(start, start + 50)]
        for number, feedback in enumerate(parser(codes), start):
            if feedback.line != number + 1:
                wrong.append((number, feedback))

    threads = [threading.Thread(target=ask, args=(50 * index,)) for index in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_best_validator_is_the_go_parser_or_tree_sitter_without_go(monkeypatch):
    with best_validator() as validator:
        assert isinstance(validator, GoParserValidator)
    monkeypatch.setenv("GO", "/no/such/go")
    assert isinstance(best_validator(), TreeSitterValidator)
    with pytest.raises(GoNotFoundError, match="GO=/no/such/go"):
        best_validator("parser")
    with pytest.raises(ValueError, match="kind='lint'"):
        best_validator("lint")


def test_a_failed_build_reports_the_error_of_go(monkeypatch, tmp_path):
    (tmp_path / "go.mod").write_text("module checker\n\ngo 1.19\n")
    (tmp_path / "main.go").write_text("package main\n\nfunc main() { nonsense }\n")
    monkeypatch.setattr(toolchain, "CHECKER", tmp_path)
    with pytest.raises(GoNotFoundError, match="undefined: nonsense"):
        toolchain.build_checker(find_go())
