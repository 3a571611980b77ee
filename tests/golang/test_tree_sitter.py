"""The validator that does not need Go. Referee: gofmt, if it is installed."""

import sys

import pytest
from go_samples import BROKEN, FINE, corrupted_functions, gofmt_errors, needs_go

from hrm_hf.golang import TreeSitterValidator
from hrm_hf.golang.validators.go_validators import syntax_category, types_category
from hrm_hf.golang.validators.syntax import first_fault, go_parser, parse, walk
from hrm_hf.models.processing_hrm_go_coder import Feedback


@pytest.mark.parametrize(("code", "line", "category"), BROKEN)
def test_an_error_has_its_category_and_line(code, line, category):
    (feedback,) = TreeSitterValidator()([code])
    assert feedback.syntax_ok is False
    assert (feedback.line, feedback.category) == (line, category)
    assert feedback.message
    assert feedback.types_ok is None and feedback.tests_pass is None


@pytest.mark.parametrize("code", FINE)
def test_valid_code_is_accepted(code):
    assert TreeSitterValidator()([code]) == [Feedback(syntax_ok=True)]


@pytest.mark.parametrize(
    ("code", "good"),
    [
        ("func f() {\n\tx := a.\n\t\tb()\n}", True),
        ("func f() {\n\tx := a\n\t\t.b()\n}", False),
        ("func f() {\n\tif x {\n\t}\n\telse {\n\t}\n}", False),
        ("func f()\n{\n}", False),
        ("func f() {\n\tx := (a\n\t\t+ b)\n}", False),
        ("func f() {\n\tx := (a +\n\t\tb)\n}", True),
        ("func f() {\n\tswitch x\n\t{\n\t}\n}", True),  # as `switch x; {`
        ("func f() {\n\tswitch x := x.(type)\n\t{\n\t}\n}", True),
        ("func f() {\n\tfor i := 0\n\ti < 3; i++ {\n\t}\n}", False),
        ("func f(\n\ta int, // why\n) {\n}", True),
        ("func f(\n\ta int // why\n) {\n}", False),
        ("const (\n\ta = iota\n\tb\n)\nvar (\n\tc int\n)\ntype (\n\td int\n)", True),
        ('import ("fmt"; "os")\nconst (a = (1))\nvar (b, c int; d = f(1))\ntype (e int)\n', True),
    ],
)
def test_newlines_are_semicolons_as_in_the_go_specification(code, good):
    assert (first_fault(code) is None) is good


def test_only_declarations_are_accepted_outside_functions():
    assert first_fault('func f() {}\nimport "fmt"\n').category == "misplaced statement"
    assert first_fault("func f() {}\npackage p\n").category == "misplaced statement"
    assert first_fault('package p\nimport "fmt"\nvar x = fmt.Sprint()') is None


def test_ten_megabytes_in_one_line_are_parsed():
    code = 'var x = "' + "a" * 10_000_000 + '"'
    assert TreeSitterValidator()([code, code[:-1]])[0].syntax_ok
    assert first_fault(code[:-1]).category == "unterminated literal"


def test_deep_nesting_is_parsed():
    assert first_fault("var x = " + "(" * 100_000).category == "missing closing"
    assert sum(1 for _ in walk(parse("var x = " + "(" * 3000 + "1" + ")" * 3000).root_node)) > 9000


def test_a_missing_grammar_is_an_error_that_names_the_extra(monkeypatch):
    go_parser.cache_clear()
    monkeypatch.setitem(sys.modules, "tree_sitter_go", None)
    with pytest.raises(ImportError, match=r"\.\[go\]"):
        TreeSitterValidator()
    go_parser.cache_clear()


@pytest.mark.parametrize(
    ("message", "category"),
    [
        ("expected ';', found x", "missing comma or newline"),
        ("expected declaration, found 'if'", "misplaced statement"),
        ("expected operand, found ')'", "missing operand or type"),
        ("expected '(', found name", "unexpected token"),
        ("expected statement, found ')'", "misplaced statement"),
        ("expected ')', found x", "missing closing"),
        ("missing ',' in argument list", "missing comma or newline"),
        ("missing ',' before newline in composite literal", "missing comma or newline"),
        ("expected '{', found 'EOF'", "missing closing"),
        ("expected 'IDENT', found 5", "unexpected token"),
        ("expected 1 expression", "missing operand or type"),
        ("string literal not terminated", "unterminated literal"),
        ("illegal character U+0023 '#'", "unexpected token"),
    ],
)
def test_messages_of_the_go_parser_map_to_their_category(message, category):
    assert syntax_category(message) == category


def test_messages_of_old_and_new_type_checkers_map_to_their_category():
    for message in ("undeclared name: x", "undefined: x", "Foo not declared by package strings"):
        assert types_category(message) == "undefined name"
    for message in ('cannot use "a" as int value', "x declared but not used", "missing return"):
        assert types_category(message) == "mismatched types"


@needs_go
@pytest.mark.external
def test_tree_sitter_agrees_with_gofmt_on_corrupted_functions(tmp_path):
    codes = corrupted_functions(400)
    referee = gofmt_errors(codes, tmp_path)
    found = [first_fault(code) for code in codes]
    false_alarms = [code for code, fault, error in zip(codes, found, referee) if fault and not error]
    errors = [fault for fault, error in zip(found, referee) if error]
    assert not false_alarms
    assert len(errors) > 200
    assert sum(fault is not None for fault in errors) / len(errors) >= 0.94
