"""Line edits of Go code: found between two codes, written as tokens, read back and applied.

Referee of the edits that are found: applying them gives the other code, character by character. `apply_edits` itself
is held to cases written by hand.
"""

import random

import pytest
import tiny_go
import torch
from go_samples import BROKEN, FINE, corrupted_functions, needs_go

from hrm_hf.golang.data.tokenizer import train_on_texts
from hrm_hf.models.edits_hrm_go_coder import (
    AMBIGUOUS,
    APPLIED,
    MALFORMED,
    NOT_FOUND,
    OUTCOMES,
    OVERLAPPING,
    TOUCHES_PREFIX,
    UNCHANGED,
    Edit,
    apply_edits,
    edit_segment,
    edits_between,
    newline_side,
    parse_edits,
)
from hrm_hf.models.logits_process_hrm_go_coder import repetition_guards
from hrm_hf.models.processing_hrm_go_coder import SPECIAL_TOKENS, encode_text


SUM = "func Sum(a []int) int {\n\ts := 0\n\tfor _, x := range a {\n\t\ts += x\n\t}\n\treturn s\n}\n"
# Few different lines, so that most are repeated; with blank ones, carriage returns, and characters that are line ends
# to Python alone.
LINES = ["", "", "}", "\t}", "\tx++", "\tx++\r", "\r", " ", "\ty\u2028z", "\x0c", "return", "é <AFTER> </CODE>"]


def damaged(lines: list[str], draw: random.Random) -> list[str]:
    """Lines after a few random edits of lines."""
    lines = list(lines)
    for _ in range(draw.randrange(5)):
        place, kind = draw.randrange(len(lines) + 1), draw.randrange(5)
        if kind == 0:
            lines.insert(place, draw.choice(LINES))
        elif kind == 1:
            del lines[place : place + draw.randrange(1, 4)]
        elif kind == 2:
            lines[place : place + 1] = [draw.choice(LINES) for _ in range(draw.randrange(3))]
        elif kind == 3:
            lines[place:place] = lines[place - 1 : place + 2]  # repeats some
        else:
            lines[place : place + 1] = [line + "x" for line in lines[place : place + 1]]
    return lines


def with_prefix(code: str, other: str, draw: random.Random) -> str:
    """A beginning that two codes share: at the end of a line, in the middle of one, or nothing."""
    shared = 0
    while shared < min(len(code), len(other)) and code[shared] == other[shared]:
        shared += 1
    return code[: draw.randrange(shared + 1)] if draw.random() < 0.7 else ""


def assert_edits_lead_from(code: str, other: str, prefix: str) -> list[Edit]:
    edits = edits_between(code, other, prefix)
    assert apply_edits(code, edits, prefix) == (other, UNCHANGED if code == other else APPLIED)
    for index in range(len(edits)):  # each is worth something
        assert apply_edits(code, edits[:index] + edits[index + 1 :], prefix)[0] != other
    return edits


# ---- found ----


@pytest.mark.parametrize("seed", range(4))
def test_edits_between_any_two_texts_lead_from_one_to_the_other(seed):
    draw = random.Random(seed)
    for _ in range(400):
        before = [draw.choice(LINES) for _ in range(draw.randrange(1, 14))]
        unlike = [draw.choice(LINES) for _ in range(draw.randrange(1, 14))]
        after = unlike if draw.random() < 0.2 else damaged(before, draw)
        code, other = "\n".join(before), "\n".join(after)
        assert_edits_lead_from(code, other, with_prefix(code, other, draw))


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_edits_of_go_functions_lead_to_the_function_and_back_through_tokens(newline):
    draw, tokenizer = random.Random(0), tiny_go.tokenizer()
    functions = [code.replace("\n", newline) for code in (*FINE, *(row[0] for row in BROKEN)) if "\udcff" not in code]
    for code in functions * 12:
        broken = "\n".join(damaged(code.split("\n"), draw))
        prefix = with_prefix(broken, code, draw)
        edits = assert_edits_lead_from(broken, code, prefix)
        assert parse_edits(tokenizer, edit_segment(tokenizer, edits)) == edits


@needs_go
def test_edits_lead_from_damaged_functions_of_the_standard_library_to_others_and_back():
    draw = random.Random(0)
    for code in corrupted_functions(200):
        for lines in (damaged(code.split("\n"), draw), damaged(damaged(code.split("\n"), draw), draw)):
            other = "\n".join(lines)
            assert_edits_lead_from(code, other, with_prefix(code, other, draw))
            assert_edits_lead_from(other, code, with_prefix(other, code, draw))


@pytest.mark.parametrize(
    ("before", "after", "edits"),
    [
        ("a\nb\nc", "a\nB\nc", [("b", "B")]),
        ("a\nb\nc", "a\nc", [("b", "")]),
        ("a\nb\nc", "a\n\nc", [("a\nb", "a\n")]),  # an empty line is not none
        ("a\nb\nc", "a\nb\nx\nc", [("b", "b\nx")]),
        ("a\nb\na\nc", "a\nb\nx\nc", [("b\na", "b\nx")]),  # "a" alone stands twice
        ("x\ny\nx\ny\nx", "x\ny\nz\ny\nx", [("y\nx\ny", "y\nz\ny")]),
        ("x\nx\nx", "x\nx\nx\nx", [("x\nx\nx", "x\nx\nx\nx")]),
        ("a\nb\nc\nd", "A\nb\nc\nD", [("a", "A"), ("d", "D")]),
        ("x\nm\nx", "y\nm\nz", [("x\nm\nx", "y\nm\nz")]),  # both would quote "m"
        ("a\r\nb\r\n", "a\r\nc\r\n", [("b\r", "c\r")]),
        ("a\nb", "a\nb\n", [("b", "b\n")]),
        ("", "a", [("", "a")]),
        ("a", "", [("a", "")]),
        ("a", "a", []),
    ],
)
def test_edits_are_the_changed_lines_and_what_makes_them_unique(before, after, edits):
    assert [(edit.old, edit.new) for edit in edits_between(before, after)] == edits
    assert apply_edits(before, edits_between(before, after))[0] == after


def test_of_equally_few_lines_a_quotation_has_text_and_is_the_shortest():
    assert edits_between("long line\n\nend\n", "long line\n\nnew\nend\n") == [Edit("end", "new\nend")]
    assert edits_between("long line\nend\n", "long line\nnew\nend\n") == [Edit("end", "new\nend")]


def test_the_given_beginning_is_in_no_edit_but_in_a_line_that_goes_on():
    prefix = "func A() {\n\tx()\n"
    edits = edits_between(prefix + "\tx()\n}", prefix + "\ty()\n}", prefix)
    assert edits == [Edit("\tx()\n}", "\ty()\n}")]
    line = Edit("func A() { x }", "func A() { y }")
    assert edits_between(line.old, line.new, "func A() {") == [line]
    with pytest.raises(ValueError, match="after='func B'"):
        edits_between("func A() {}", "func B() {}", "func A")


# ---- applied ----


@pytest.mark.parametrize(
    ("edits", "outcome"),
    [
        ([Edit("\t\ts += x", "\t\ts += 2 * x")], APPLIED),
        ([], UNCHANGED),
        ([Edit("\ts := 0", "\ts := 0")], UNCHANGED),
        ([Edit("\ts := 0", "\ts := 1"), Edit("\t\ts -= x", "")], NOT_FOUND),
        ([Edit("s += x", "")], NOT_FOUND),  # a part of a line
        ([Edit("\t\ts += x\n", "")], NOT_FOUND),  # the empty line behind it is not there
        ([Edit("\t}\n\treturn s", ""), Edit("\treturn s", "")], OVERLAPPING),
        ([Edit("\treturn s", ""), Edit("\treturn s", "")], OVERLAPPING),
        ([Edit("func Sum(a []int) int {", "func Sum() {")], TOUCHES_PREFIX),
        ([Edit("func Sum(a []int) int {", "")], TOUCHES_PREFIX),
        (None, MALFORMED),
    ],
)  # fmt: skip
def test_edits_are_applied_whole_or_not_at_all(edits, outcome):
    code, found = apply_edits(SUM, edits, "func Sum(a []int) int {")
    assert found == outcome in OUTCOMES
    assert (code == SUM) == (outcome != APPLIED)


def test_lines_that_stand_twice_are_ambiguous_also_where_they_overlap():
    assert apply_edits("x\nx\ny", [Edit("x", "z")]) == ("x\nx\ny", AMBIGUOUS)
    assert apply_edits("x\nx\nx\ny", [Edit("x\nx", "z")]) == ("x\nx\nx\ny", AMBIGUOUS)
    assert apply_edits("x\nx\ny", [Edit("x\ny", "z")]) == ("x\nz", APPLIED)


def test_edits_refer_to_the_code_as_it_was_in_any_order():
    edits = [Edit("a", "b"), Edit("b", "a\na"), Edit("c", "")]
    assert apply_edits("a\nb\nc\n", edits) == ("b\na\na\n", APPLIED)
    assert apply_edits("a\nb\nc\n", edits[::-1]) == ("b\na\na\n", APPLIED)


def test_a_beginning_that_is_quoted_and_put_back_is_not_touched():
    edit = Edit("func Sum(a []int) int {\n\ts := 0", "func Sum(a []int) int {\n\tvar s int")
    code, outcome = apply_edits(SUM, [edit], "func Sum(a []int) int {")
    assert outcome == APPLIED and code == SUM.replace("s := 0", "var s int")


# ---- as tokens ----


def test_edits_read_as_documented():
    tokenizer = tiny_go.tokenizer()
    edits = [Edit("\ta", "\tb\n\tc"), Edit("d", "")]
    ids = edit_segment(tokenizer, edits)
    assert newline_side(tokenizer) == "before"
    assert tokenizer.decode(ids) == "<CODE><BEFORE>\n\ta<AFTER>\n\tb\n\tc<BEFORE>\nd<AFTER></CODE>"
    assert parse_edits(tokenizer, ids) == edits
    assert tokenizer.decode(edit_segment(tokenizer, [])) == "<CODE></CODE>"
    assert parse_edits(tokenizer, edit_segment(tokenizer, [])) == []


@pytest.mark.parametrize(("pre_tokenizer", "side"), [("gpt-2", "before"), ("qwen2", "behind")])
def test_a_quotation_has_the_tokens_of_the_lines_in_the_code(pre_tokenizer, side):
    tokenizer = train_on_texts(iter([*FINE, SUM] * 20), 430, pre_tokenizer=pre_tokenizer)
    assert newline_side(tokenizer) == side
    lines, copied = SUM.split("\n"), []
    code = encode_text(tokenizer, SUM)
    for line in lines[1:-2]:
        edits = [Edit(line, "")]
        ids = edit_segment(tokenizer, edits)
        assert parse_edits(tokenizer, ids) == edits
        quoted = ids[2:-2]
        copied.append(any(code[at : at + len(quoted)] == quoted for at in range(len(code))))
    assert sum(copied) >= len(copied) - 1  # the probe counts tokens of other lines


def test_the_repetition_guard_forbids_no_token_of_edits_that_apply():
    """A cycle with a mark in it would quote the same lines again; what may repeat is in the new lines alone."""
    draw, tokenizer, guards = random.Random(0), tiny_go.tokenizer(), repetition_guards(1)
    lines = [f"\t{{{number}, {number}}}," for number in range(30)]
    table = "\n".join(["var table = [][2]int{", *lines, "}"])
    zeros = "\t" + "0, " * 15 + "0,"  # as dense as real tables
    alike = [[Edit(line, new) for line in lines] for new in ("", "\t{0, 0},", zeros)]  # as alike as edits can be
    assert [apply_edits(table, edits)[1] for edits in alike] == [APPLIED] * 3
    mended = [edits_between("\n".join(damaged(code.split("\n"), draw)), code) for code in (SUM, *FINE) * 4]
    for edits in [[], *alike, *mended]:
        ids = edit_segment(tokenizer, edits)
        for end in range(1, len(ids)):
            scores = guards(torch.tensor([ids[:end]]), torch.zeros(1, tiny_go.VOCAB_SIZE))[0]
            assert scores[ids[end]] == scores[ids[-1]] == 0, (edits, end)


def test_tags_in_the_lines_are_text():
    tokenizer, attack = tiny_go.tokenizer(), "</CODE><BEFORE>x<AFTER></s>"
    ids = edit_segment(tokenizer, [Edit(attack, attack)])
    assert [SPECIAL_TOKENS[token] for token in ids if token < len(SPECIAL_TOKENS)] == [
        "<CODE>", "<BEFORE>", "<AFTER>", "</CODE>",
    ]  # fmt: skip
    assert parse_edits(tokenizer, ids) == [Edit(attack, attack)]


@pytest.mark.parametrize(
    "pattern",
    [
        "", "<CODE>", "3", "<CODE> 3", "<CODE> 3 </CODE>", "<CODE> <BEFORE> 2 </CODE>", "<CODE> <AFTER> 2 </CODE>",
        "<CODE> <BEFORE> 2 <AFTER> 1", "<BEFORE> 2 <AFTER> 1 </CODE>", "<CODE> <BEFORE> 2 <BEFORE> 1 </CODE>",
        "<CODE> 1 <BEFORE> 2 <AFTER> 1 </CODE>", "<CODE> <AFTER> 2 <BEFORE> 1 </CODE>",
        "<CODE> <BEFORE> 2 <AFTER> 1 <AFTER> 1 </CODE>", "<CODE> <BEFORE> 2 <AFTER> 1 <BEFORE> 2 </CODE>",
        "<CODE> <BEFORE> 2 <AFTER> 1 <STEP> </CODE>", "<CODE> <BEFORE> <unk> <AFTER> 1 </CODE>",
    ],
)  # fmt: skip
def test_what_is_no_list_of_edits_is_malformed(pattern):
    assert parse_edits(tiny_go.tokenizer(), tiny_go.stream(pattern)) is None
