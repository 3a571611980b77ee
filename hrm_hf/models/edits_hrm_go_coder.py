"""Repairs of the Go coder as line edits: in the token stream, found between two codes, applied to one.

    <CODE><BEFORE>old lines<AFTER>new lines<BEFORE>old lines<AFTER>new lines</CODE>

stands where whole code would, behind <RETRY>. An edit quotes whole consecutive lines of the attempt, as many as make
the quotation unique in it, and says what takes their place; without new lines they are deleted. All edits refer to the
attempt as it was, so their order says nothing, though `edits_between` gives them in order of place. No edit at all
leaves the attempt as it is. Lines end at "\\n" alone, so that every other character, "\\r" too, survives.

In the stream each text has the newline in front of its lines, or behind them: on the side where the tokenizer cuts a
quotation as it cut the code, so that quoting is copying tokens. `newline_side` finds it.

Edits are applied exactly: each quotation has one place, no line is edited twice, the given beginning of the code
stays, or else nothing is changed and the outcome says why.
"""

import difflib
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .processing_hrm_go_coder import SPECIAL_TOKENS, TOKEN_IDS, encode_text


# How a model repairs: by whole new code, or by edits of the failed attempt.
REPAIR_MODES = ("rewrite", "edits")

# What became of edits. All but the first leave the code as it was.
APPLIED = "applied"
UNCHANGED = "unchanged"  # no edit, or edits that put back what was there
NOT_FOUND = "not found"  # lines that the code does not have
AMBIGUOUS = "ambiguous"  # lines that it has more than once
OVERLAPPING = "overlapping"  # a line in two edits
TOUCHES_PREFIX = "touches the prefix"  # the result would not begin as it must
MALFORMED = "malformed"  # no list of edits, or one without its end
OUTCOMES = (APPLIED, UNCHANGED, NOT_FOUND, AMBIGUOUS, OVERLAPPING, TOUCHES_PREFIX, MALFORMED)

# Lines as gofmt sets them; the two middle ones are quoted to find the side of the newline.
PROBE = ("func f(a int) int {", "\tif a > 0 {", "\t\treturn a", "\t}", "\tb := a * 2", "\treturn b", "}")

CODE, END_CODE, BEFORE, AFTER = (TOKEN_IDS[tag] for tag in ("<CODE>", "</CODE>", "<BEFORE>", "<AFTER>"))


@dataclass(frozen=True)
class Edit:
    """Lines of a code, without the newline behind the last one, and what replaces them; an empty `new` deletes them.

    An empty `old` is an empty line.
    """

    old: str
    new: str


@dataclass(frozen=True)
class _Change:
    """before[first:last] becomes after[new_first:new_last]; quoted with its neighbors, it is before[start:stop]."""

    first: int
    last: int
    new_first: int
    new_last: int
    start: int = 0
    stop: int = 0


def edits_between(before: str, after: str, prefix: str = "") -> list[Edit]:
    """The edits that make `after` of `before`: lines that differ, and what neighbors a unique quotation needs.

    Args:
        before, after: codes that begin with `prefix`.
        prefix: the given beginning, which stays.

    Raises:
        ValueError: a code that does not begin with the prefix.
    """
    for name, code in (("before", before), ("after", after)):
        if not code.startswith(prefix):
            raise ValueError(f"{name}={code[: len(prefix)]!r}...: must begin with the prefix {prefix!r}")
    old, new = before.split("\n"), after.split("\n")
    # The ends first: difflib takes the longest run that two texts share, which need not be the one that was kept.
    head = _shared(old, new)
    tail = _shared(old[head:][::-1], new[head:][::-1])
    matcher = difflib.SequenceMatcher(None, old[head : len(old) - tail], new[head : len(new) - tail], autojunk=False)
    changes: list[_Change] = []
    for tag, *places in matcher.get_opcodes():
        if tag == "equal":
            continue
        change = _quoted(_Change(*(head + place for place in places)), old, new)
        while changes and change.start < changes[-1].stop:  # both would quote a line: they become one
            earlier = changes.pop()
            hull = _Change(earlier.first, change.last, earlier.new_first, change.new_last)
            change = _quoted(hull, old, new)
        changes.append(change)
    texts = ((old[change.start : change.stop], _replacement(change, new)) for change in changes)
    return [Edit("\n".join(quoted), "\n".join(lines)) for quoted, lines in texts]


def apply_edits(code: str, edits: Sequence[Edit] | None, prefix: str = "") -> tuple[str, str]:
    """The code after the edits, and one of OUTCOMES; with any but APPLIED the code is the one that was given.

    Args:
        code: the attempt that the edits quote.
        edits: as of `parse_edits`; None is MALFORMED.
        prefix: what the result must begin with.
    """
    if edits is None:
        return code, MALFORMED
    lines, spans = code.split("\n"), []
    for edit in edits:
        quoted = edit.old.split("\n")
        size = len(quoted)
        places = [place for place in range(len(lines) - size + 1) if lines[place : place + size] == quoted]
        if len(places) != 1:
            return code, AMBIGUOUS if places else NOT_FOUND
        spans.append((places[0], places[0] + size, edit.new))
    spans.sort()
    if any(stop > start for (_, stop, _), (start, _, _) in itertools.pairwise(spans)):
        return code, OVERLAPPING
    for start, stop, new in reversed(spans):
        lines[start:stop] = new.split("\n") if new else []
    changed = "\n".join(lines)
    if changed == code:
        return code, UNCHANGED
    return (changed, APPLIED) if changed.startswith(prefix) else (code, TOUCHES_PREFIX)


@functools.lru_cache(maxsize=8)
def newline_side(tokenizer: Any) -> str:
    """Where a quotation needs its newline for the tokens that its lines have in a code: "before" or "behind" them."""
    code = encode_text(tokenizer, "\n".join([*PROBE, ""]))
    copied = {"before": 0, "behind": 0}
    for line in PROBE[1:-1]:
        for side in copied:
            quoted = encode_text(tokenizer, _with_newline(line, side))
            copied[side] += any(code[at : at + len(quoted)] == quoted for at in range(len(code)))
    return "behind" if copied["behind"] > copied["before"] else "before"


def edit_segment(tokenizer: Any, edits: Sequence[Edit]) -> list[int]:
    """<CODE><BEFORE>old<AFTER>new...</CODE>; tags in the texts are ordinary characters."""
    side, ids = newline_side(tokenizer), [CODE]
    for edit in edits:
        ids += [BEFORE, *encode_text(tokenizer, _with_newline(edit.old, side)), AFTER]
        ids += encode_text(tokenizer, _with_newline(edit.new, side)) if edit.new else []
    return [*ids, END_CODE]


def parse_edits(tokenizer: Any, ids: Sequence[int]) -> list[Edit] | None:
    """The edits of a segment with its <CODE> and </CODE>; None if it is no such segment.

    One that was cut off has no </CODE>, and its last edit may be half of what was meant.
    """
    if len(ids) < 2 or ids[0] != CODE or ids[-1] != END_CODE:
        return None
    marks: list[int] = []
    texts: list[list[int]] = []
    for token in ids[1:-1]:
        if token in (BEFORE, AFTER):
            marks.append(token)
            texts.append([])
        elif not marks or token < len(SPECIAL_TOKENS):
            return None
        else:
            texts[-1].append(token)
    if marks != [BEFORE, AFTER] * (len(marks) // 2):
        return None
    cut = str.removeprefix if newline_side(tokenizer) == "before" else str.removesuffix
    decoded = [cut(tokenizer.decode(text), "\n") for text in texts]
    return [Edit(*pair) for pair in zip(decoded[::2], decoded[1::2])]


def _with_newline(lines: str, side: str) -> str:
    return f"\n{lines}" if side == "before" else f"{lines}\n"


def _quoted(change: _Change, old: list[str], new: list[str]) -> _Change:
    """The change with the fewest lines around it that are unique in `old`; of these the shortest that has text."""
    text = "\n".join(["", *old, ""])
    begins = list(itertools.accumulate((len(line) + 1 for line in old), initial=0))  # of the newline before each line
    for size in itertools.count(max(1, change.last - change.first)):  # all of `old` is unique in itself
        found = []
        for start in range(max(0, change.last - size), min(change.first, len(old) - size) + 1):
            run = text[begins[start] : begins[start + size] + 1]  # as text: young models repeat a line by the hundred
            is_unique = text.find(run) == begins[start] and text.find(run, begins[start] + 1) < 0
            candidate = replace(change, start=start, stop=start + size)
            # One empty line reads as none, which makes a difference unless nothing else is left.
            if is_unique and (_replacement(candidate, new) != [""] or size == len(old)):
                found.append((not run.strip(), len(run), start, candidate))
        if found:
            return min(found)[-1]


def _shared(old: list[str], new: list[str]) -> int:
    """How many lines two texts begin with alike."""
    return next((index for index, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))


def _replacement(change: _Change, new: list[str]) -> list[str]:
    """The lines that take the place of the quoted ones."""
    return new[change.new_first - (change.first - change.start) : change.new_last + change.stop - change.last]
