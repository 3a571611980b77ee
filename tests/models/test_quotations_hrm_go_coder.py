"""Quotations of edits are lines of the attempt: what is to be learned may be written, and all that is written applies.

Referee: `edits_between` for what must be allowed, `apply_edits` for what may never come out.
"""

import functools
import random

import pytest
import tiny_go
import torch
from transformers import LogitsProcessorList

from hrm_hf.golang.data.tokenizer import train_on_texts
from hrm_hf.golang.evaluation.writer import Writer
from hrm_hf.models.edits_hrm_go_coder import (
    APPLIED,
    PROBE,
    TOUCHES_PREFIX,
    UNCHANGED,
    apply_edits,
    edit_segment,
    edits_between,
    newline_side,
    parse_edits,
)
from hrm_hf.models.logits_process_hrm_go_coder import repetition_guards
from hrm_hf.models.processing_hrm_go_coder import (
    CATEGORIES,
    EOS,
    PAD,
    SPECIAL_TOKENS,
    TOKEN_IDS,
    Feedback,
    encode_text,
    validation_segment,
)
from hrm_hf.models.quotations_hrm_go_coder import QuotedLines


CODE, END_CODE, RETRY = (TOKEN_IDS[tag] for tag in ("<CODE>", "</CODE>", "<RETRY>"))
BEFORE, AFTER = TOKEN_IDS["<BEFORE>"], TOKEN_IDS["<AFTER>"]
LINES = ["func f(a int) int {", "\treturn (", "\treturn", "", "}", "\t}", "\tx++", " ", "\ty\u2028z", "\tx++\r", "é"]


def prompt(tokenizer, code: str, line: int | None = None, category: str = "other") -> list[int]:
    """A stream before edits; with a line, behind a verdict that names it."""
    said = Feedback(syntax_ok=False, category=category, line=line, message="found x, line 1: a := b")
    verdict = [] if line is None else validation_segment(tokenizer, said, code)
    stream = [TOKEN_IDS["<s>"], TOKEN_IDS["<PLAN>"], CODE, *encode_text(tokenizer, code), END_CODE]
    return [*stream, *verdict, RETRY, CODE]


def drawn(seed: int) -> tuple[str, str]:
    """Two codes of some of the lines, most of which occur more than once."""
    draw = random.Random(seed)
    return tuple("\n".join(draw.choices(LINES, k=draw.randrange(1, 9))) for _ in range(2))


@functools.cache
def tokenizer_of(side: str):
    """The tests' own, which wants the newline before quoted lines, and one that wants it behind them."""
    made = tiny_go.tokenizer()
    if side == "behind":
        made = train_on_texts(iter(["\n".join([*PROBE, *LINES])] * 20), 339, pre_tokenizer="qwen2")
    assert newline_side(made) == side
    return made


def allowed(processor, ids: list[int], size: int = tiny_go.VOCAB_SIZE) -> set[int]:
    scores = processor(torch.tensor([ids]), torch.zeros(1, size))[0]
    return set(torch.nonzero(scores == 0).flatten().tolist())


@pytest.mark.parametrize("side", ["before", "behind"])
@pytest.mark.parametrize("seed", range(25))
def test_no_token_of_edits_that_are_learned_is_forbidden(seed, side):
    tokenizer = tokenizer_of(side)
    before, after = drawn(seed)
    ids, processor = prompt(tokenizer, before), QuotedLines(tokenizer)
    for token in edit_segment(tokenizer, edits_between(before, after))[1:]:
        assert token in allowed(processor, ids, len(tokenizer)), (before, after, tokenizer.decode(ids))
        ids.append(token)


@pytest.mark.parametrize("side", ["before", "behind"])
@pytest.mark.parametrize("seed", range(25))
def test_whatever_is_drawn_applies_if_it_comes_to_its_end(seed, side):
    tokenizer, draw, (code, _) = tokenizer_of(side), random.Random(seed), drawn(seed)
    ids, processor, start = prompt(tokenizer, code), QuotedLines(tokenizer), len(prompt(tokenizer, code)) - 1
    while ids[-1] != END_CODE:
        choice = sorted(allowed(processor, ids, len(tokenizer)))
        marks = [token for token in choice if token < len(SPECIAL_TOKENS)]
        ids.append(draw.choice(marks if marks and (len(ids) > start + 60 or draw.random() < 0.4) else choice))
        assert len(ids) < start + 400
    outcome = apply_edits(code, parse_edits(tokenizer, ids[start:]))[1]
    assert outcome in (APPLIED, UNCHANGED), tokenizer.decode(ids)


def test_a_quotation_ends_where_its_lines_stand_alone():
    tokenizer, code = tiny_go.tokenizer(), "a\n\tb\nx\n\tb\nc"
    processor, ids = QuotedLines(tokenizer), prompt(tokenizer, code)
    assert allowed(processor, ids) == {BEFORE, END_CODE}
    quoted = [*ids, BEFORE, *encode_text(tokenizer, "\n\tb")]
    assert AFTER not in allowed(processor, quoted)  # it stands twice
    quoted += encode_text(tokenizer, "\nc")
    assert allowed(processor, quoted) == {AFTER}
    free = allowed(processor, [*quoted, AFTER])
    assert free == {BEFORE, END_CODE, *range(len(SPECIAL_TOKENS), tiny_go.VOCAB_SIZE)}
    second = [*quoted, AFTER, BEFORE, *encode_text(tokenizer, "\n\tb")]
    assert AFTER not in allowed(processor, second)  # though the other one is taken
    second += encode_text(tokenizer, "\nx")
    assert allowed(processor, second) == {AFTER}  # what comes next is taken
    assert apply_edits(code, parse_edits(tokenizer, [*second[len(ids) - 1 :], AFTER, END_CODE]))[1] == APPLIED


@pytest.mark.parametrize("category", CATEGORIES[1:])
def test_the_first_edit_begins_with_the_line_that_the_verdict_names(category):
    tokenizer, code = tiny_go.tokenizer(), "a\n\tb\nx\nc"
    processor, ids = QuotedLines(tokenizer), prompt(tokenizer, code, 3, category)
    assert allowed(processor, ids) == {BEFORE, END_CODE}
    quoted = [*ids, BEFORE]
    for token in encode_text(tokenizer, "\nx"):
        assert AFTER not in allowed(processor, quoted) and token in allowed(processor, quoted)
        quoted.append(token)
    assert allowed(processor, quoted) == {AFTER, encode_text(tokenizer, "\nc")[0]}  # it may go on
    second = allowed(processor, [*quoted, AFTER, BEFORE])
    assert {encode_text(tokenizer, line)[0] for line in ("\na", "\n\tb", "\nc")} <= second  # further edits are free


@pytest.mark.parametrize("side", ["before", "behind"])
@pytest.mark.parametrize(
    "code, line, quoted",
    [
        ("a\n\nb", 2, "a"),  # blank: the line above
        ("a\nb", 9, "b"),  # behind the end
        ("a\nx\nb\nx", 4, "b\nx"),  # it stands twice: with the line above
        ("x\na\nx\nb", 3, "x\nb"),  # with the line below
        ("x\nx", 1, "x\nx"),
        ("", 1, ""),
    ],
)
def test_a_named_line_is_quoted_with_as_few_neighbors_as_it_needs(side, code, line, quoted):
    tokenizer = tokenizer_of(side)
    processor, ids = QuotedLines(tokenizer), [*prompt(tokenizer, code, line), BEFORE]
    start = len(ids) - 2
    while AFTER not in (choice := allowed(processor, ids, len(tokenizer))):
        ids.append(min(choice, key=lambda token: len(tokenizer.decode([token]))))
    (edit,) = parse_edits(tokenizer, [*ids[start:], AFTER, END_CODE])
    assert edit.old == quoted
    assert apply_edits(code, [edit])[1] == APPLIED if code else True


def test_rows_that_are_no_edits_or_have_ended_are_left_alone():
    tokenizer, scores = tiny_go.tokenizer(), torch.randn(4, tiny_go.VOCAB_SIZE)
    ended = [*prompt(tokenizer, "a"), END_CODE]
    rows = [ended, [*ended[:-1], TOKEN_IDS[EOS]], [CODE, *encode_text(tokenizer, "a")], []]
    width = max(map(len, rows))
    rows = [[TOKEN_IDS[PAD]] * (width - len(row)) + row for row in rows]
    assert torch.equal(QuotedLines(tokenizer)(torch.tensor(rows), scores), scores)


def test_a_writers_edits_are_all_to_be_found():
    """Random weights, padded rows: without the processor not one of these would apply."""
    model = tiny_go.writer(seed=3, bias={"</CODE>": 1.0, "<AFTER>": 3.0, "<BEFORE>": 1.0})
    writer = Writer(model, tiny_go.tokenizer(), batch_size=4, max_length=512, max_code_tokens=60, progress=False)
    codes = [tiny_go.solution(number) * (1 + number % 3) for number in range(24)]
    prompts = [prompt(tiny_go.tokenizer(), code)[:-1] for code in codes]
    torch.manual_seed(0)
    written = writer.edit_ids(prompts, 1.0)
    ended = [(code, ids) for code, ids in zip(codes, written) if ids[-1] == END_CODE]
    outcomes = [apply_edits(code, parse_edits(writer.tokenizer, [CODE, *ids]))[1] for code, ids in ended]
    assert outcomes and set(outcomes) <= {APPLIED, UNCHANGED, TOUCHES_PREFIX} and APPLIED in outcomes


def test_the_repetition_guard_and_quotations_work_together():
    tokenizer, code = tiny_go.tokenizer(), "\n".join(["func f() {", *["\tx++"] * 40, "}"])
    ids, processors = prompt(tokenizer, code), None
    processors = LogitsProcessorList([*repetition_guards(len(ids)), QuotedLines(tokenizer)])
    ids += [BEFORE, *encode_text(tokenizer, "\n" + "\n".join(["\tx++"] * 40 + ["}"]))]
    assert AFTER in allowed(lambda *args: processors(*args), ids)
