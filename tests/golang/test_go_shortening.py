"""Detection of code that dropped its statements."""

import pytest


pytest.importorskip("tree_sitter_go")

from hrm_hf.golang.evaluation.similarity import KEPT_SHARE, is_shortened, statement_count


FUNCTION = """func Sum(values []int) (total int) {
	for i := 0; i < len(values); i++ {
		total += values[i]
	}
	if total < 0 {
		return 0
	}
	return total
}
"""


def body(*lines):
    return "func F(x int) int {\n" + "".join(f"\t{line}\n" for line in lines) + "}\n"


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        ((), 0),
        (("// return x",), 0),
        ((";;",), 0),
        (("return x",), 1),
        (("x := 1", "var y int", "return x"), 3),
        (("if x > 0 {", "return 1", "}", "return 2"), 3),
        (("x++", "x++", "x  ++", "return x"), 2),  # one statement, three times
        (("_ = x", "_ = 1", "return x"), 1),
        (("L:", "for {", "break L", "}"), 2),
        (("f := func() { g() }", "f()"), 3),
        (('s := "return; return 1"', "return s"), 2),
    ],
)
def test_each_statement_is_counted_once(lines, count):
    assert statement_count(body(*lines)) == count


def test_layout_and_other_functions_do_not_change_the_count():
    assert statement_count(FUNCTION) == 7  # with i := 0 and i++
    assert statement_count(FUNCTION + body("a()", "b()", "c()")) == 7
    assert statement_count("package p\n\n// Sum adds.\n" + FUNCTION.replace("\t", "    ")) == 7


@pytest.mark.parametrize(
    "damage", [("return total", "return total +"), ("}\n", "\n"), ("{\n\tfor", "\n\tfor"), ("i++", "i+")]
)
def test_broken_code_keeps_about_its_statement_count(damage):
    broken = FUNCTION.replace(*damage, 1)
    assert broken != FUNCTION and abs(statement_count(broken) - 7) <= 1
    assert not is_shortened(FUNCTION, broken)


@pytest.mark.parametrize(
    "code",
    [
        "func Sum(values []int) (total int) {\n}\n",
        "func Sum(values []int) (total int) {\n\treturn\n}\n",
        "func Sum(values []int) (total int) {\n\treturn 0\n}\n\n" + FUNCTION.replace("Sum", "Other"),
        "func Sum(values []int) (total int) {\n" + "\t_ = values\n" * 9 + "\treturn\n}\n",
        "func Sum(values []int) (total int) {\n" + "\ttotal++\n" * 9 + "\treturn\n}\n",
        "",
    ],
)
def test_an_empty_or_padded_body_is_shortened(code):
    assert is_shortened(code, FUNCTION)


def test_the_kept_share_threshold_is_exact():
    lines = [f"f{number}()" for number in range(10)]
    kept = round(10 * KEPT_SHARE)
    assert not is_shortened(body(*lines[:kept]), body(*lines))
    assert is_shortened(body(*lines[: kept - 1]), body(*lines))
    assert not is_shortened(body(*lines), body(*lines[:2])) and not is_shortened(body(), body())
