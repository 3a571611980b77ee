"""Plans from doc comments and bodies, against hand-worked examples."""

import pytest

from hrm_hf.golang.data.functions import declarations, parse_file
from hrm_hf.golang.data.plans import (
    MAX_STEP,
    MAX_STEPS,
    TASK_INTENTS,
    derived_steps,
    doc_plan,
    plan_of,
    sentences,
    verb_class,
)
from hrm_hf.models.processing_hrm_go_coder import INTENTS


def steps_of(body):
    (function,) = declarations(parse_file(f"package a\nfunc f() {{\n{body}\n}}\n"))
    return derived_steps(function.body)


@pytest.mark.parametrize(
    "doc, name, expected",
    [
        ("Index returns the index of substr.", "Index", "return"),
        ("IsNil reports whether v is nil.", "IsNil", "check"),
        ("parseInt parses a number.", "parseInt", "read"),
        ("Copies all bytes.", "x", "create"),
        ("The close function closes it.", "close", "remove"),
        ("Applies f to each.", "x", "compute"),
        ("TODO", "x", "do"),
    ],
)
def test_the_verb_of_a_doc_comment_determines_the_kind_of_function(doc, name, expected):
    assert verb_class(doc, name) == expected


def test_sentences_end_at_periods_and_empty_lines_but_not_in_abbreviations():
    text = "F does it, e.g. for A. Smith. Really?\nYes\n\nLast 1.5 part"
    assert sentences(text) == ["F does it, e.g. for A. Smith.", "Really?", "Yes", "Last 1.5 part"]
    assert sentences("One\nline. Then\n\n\tcode", keep_layout=True) == ["One line.", "Then\n\n\tcode"]
    assert sentences("Only one", keep_layout=True) == ["Only one"]


@pytest.mark.parametrize(
    "body, steps",
    [
        ("for i, x := range list.items {\n}", ["loop over list.items"]),
        ("for i := 0; i < n; i++ {\n}", ["loop while i < n"]),
        ("for more() {\n}", ["loop while more()"]),
        ("for {\n}", ["loop"]),
        ("if x, ok := m[k]; ok {\n\tf()\n}", ["if ok"]),
        ("switch x.(type) {\n}", ["switch on the type of x"]),
        ("switch mode {\ncase 1:\n}", ["switch on mode"]),
        ("select {\n}", ["select"]),
        ("n, err := strconv.Atoi(s)\nreturn n, err", ["call strconv.Atoi", "return n, err"]),
        ("defer mu.Unlock()\ngo func() { g() }()", ["defer mu.Unlock", "go a function literal"]),
        ("x = 1\nvar y int\ny++", []),
        ("f()\nf()", ["call f"]),
        ("return T{a: 1,\n\tb: 2}", ["return T{}"]),
        ("// nothing", []),
    ],
)
def test_steps_are_derived_from_the_statements_of_a_body(body, steps):
    assert steps_of(body) == [f"derived: {step}" for step in steps]


def test_a_plan_contains_verb_then_sentences_then_derived_steps():
    derived = [f"derived: call f{number}" for number in range(9)]
    plan = doc_plan("Do runs it. Slowly. Twice. Thrice.", "Do", ["func:Do"], derived)
    assert [step["text"] for step in plan["steps"]] == [
        "run",
        "Slowly.",
        "Twice.",
        "derived: call f0",
        "derived: call f1",
    ]
    assert plan["intent"] == "ADD" and plan["targets"] == ["func:Do"]
    assert {(step["intent"], step["target"]) for step in plan["steps"]} == {("ADD", "func:Do")}
    assert len(plan["steps"]) == MAX_STEPS


def test_steps_are_short_and_end_with_a_word():
    (step,) = plan_of("repair", [], ["word " * 100])["steps"]
    assert len(step["text"]) <= MAX_STEP and step["text"].endswith("word")
    assert (step["intent"], step["target"]) == ("FIX", "")


def test_every_intent_has_a_task():
    assert sorted(TASK_INTENTS.values()) == sorted(INTENTS)
