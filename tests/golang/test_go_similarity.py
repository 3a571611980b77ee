"""Exact match after gofmt, and subtree F1, on code samples of known similarity."""

import shutil

import pytest

from hrm_hf.golang import GoNotFoundError
from hrm_hf.golang.evaluation import similarity as go_similarity
from hrm_hf.golang.evaluation.similarity import code_tokens, exact_matches, subtree_f1


ONE = "func f(x int) int {\n\ty := x + 1 // more\n\treturn y\n}"
SAME = "func f(x int) int {\n  y:=x+1\n  return y }"
OTHER = "func f(x int) int {\n\ty := x + 2\n\treturn y\n}"
BROKEN = "func f(x int) int {\n\treturn (\n}"


@pytest.fixture
def no_go(monkeypatch):
    def missing():
        raise GoNotFoundError("no Go here")

    monkeypatch.setattr(go_similarity, "GoFormatter", missing)


@pytest.mark.external
@pytest.mark.skipif(not shutil.which("go"), reason="Go is not installed")
def test_exact_matches_ignore_layout_but_not_comments():
    without = ONE.replace(" // more", "")
    found, how = exact_matches([SAME, SAME, OTHER, BROKEN], [without, ONE, without, BROKEN])
    assert found == [True, False, False, False] and how == "gofmt"


def test_exact_matches_fall_back_to_tokens_without_go(no_go):
    found, how = exact_matches([SAME, OTHER, BROKEN], [ONE, ONE, BROKEN])
    assert found == [True, False, False] and how == "tokens"


def test_different_numbers_of_samples_and_references_are_rejected():
    with pytest.raises(ValueError, match=r"2 samples.* 1 references"):
        exact_matches([ONE, SAME], [ONE])


def test_tokens_keep_strings_and_drop_comments_and_line_ends():
    assert code_tokens('var s = "a // b"\n// c') == code_tokens('var s="a // b"')
    assert code_tokens('var s = "a  b"') != code_tokens('var s = "a b"')


def test_subtree_f1_ignores_layout_and_comments():
    assert subtree_f1(ONE, SAME) == 1.0


def test_subtree_f1_of_a_hand_worked_example():
    # x + 1: an expression list with a binary expression; the operands are equal except for the literal.
    tree = "var a = x + 1"
    # Subtrees with children: var_declaration, var_spec, expression_list, binary_expression; all contain the literal.
    assert subtree_f1(tree, "var a = x + 2") == 0.0
    # Of two functions one is shared: its 5 subtrees (declaration, parameters, block, statement list, call statement,
    # call, arguments) are in both; the other's differ.
    both, half = "func f() { g() }\nfunc h() { i() }", "func f() { g() }"
    ours, theirs = (sum(go_similarity._subtrees(code).values()) for code in (both, half))
    assert subtree_f1(both, half) == pytest.approx(2 * theirs / (ours + theirs))


def test_a_subtree_that_occurs_twice_counts_twice():
    once, twice = "func f() { g(1) }", "func f() { g(1); g(1) }"
    assert 0 < subtree_f1(once, twice) < 1
    assert subtree_f1(once, twice) == subtree_f1(twice, once)


def test_subtree_f1_is_defined_for_broken_and_empty_code():
    assert subtree_f1(BROKEN, BROKEN) == 1.0 and subtree_f1("", "") == 1.0 and subtree_f1("", ONE) == 0.0
    assert 0 < subtree_f1(BROKEN, ONE) < 1


def test_deep_nesting_does_not_overflow_the_stack():
    deep = "var a = " + "(" * 3000 + "1" + ")" * 3000
    assert subtree_f1(deep, deep) == 1.0
