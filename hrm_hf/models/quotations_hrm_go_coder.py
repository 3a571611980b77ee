"""A logits processor that lets the Go coder quote only lines that can be found.

An edit applies if its quotation is complete lines of the attempt, found once, and in no other edit
(`edits_hrm_go_coder.py`). Small models copy erroneous lines badly, token by token. So behind <BEFORE> only bytes are
allowed with which some stretch of lines goes on, and <AFTER> only where the stretch is complete and unique. What
replaces the lines is free.

Where the verdict names a line, the first edit begins with it, or with the shortest unique stretch that has it: small
models would edit other lines, and their repairs then pass much more rarely (docs/results.md).
"""

import functools
import itertools
import re
from typing import Any

import torch
from transformers import LogitsProcessor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .edits_hrm_go_coder import AFTER, BEFORE, CODE, END_CODE, newline_side
from .logits_process_hrm_go_coder import forbid
from .processing_hrm_go_coder import EOS, SPECIAL_TOKENS, TOKEN_IDS


VALIDATE = TOKEN_IDS["<VALIDATE>"]
NEWLINE = ord("\n")
# As `validation_segment` writes it behind the category, which is a word or a few.
NAMED_LINE = re.compile(rb"[a-z ]*, line (\d+):")


class QuotedLines(LogitsProcessor):
    """Lets edits quote lines of the attempt before them, each line once and unmistakably, and lets the list end whole.

    For rows that end in `<CODE>attempt</CODE>verdict<RETRY><CODE>` and the edits behind it; the first edit begins at
    the line that the verdict names, if it names one. Of the special tokens those alone remain that can come next in a
    list of edits; rows that have ended, or without an attempt, stay as they are.

    Args:
        tokenizer: of the model; byte-level, as `hrm-hf data go-tokenizer` makes them.
    """

    def __init__(self, tokenizer: Any):
        self.texts, self.tokens = _vocabulary(tokenizer)
        self.longest = max(map(len, self.tokens))
        self.behind = newline_side(tokenizer) == "behind"

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        forbidden = torch.zeros_like(scores, dtype=torch.bool)
        for row, ids in enumerate(input_ids.tolist()):
            allowed, text = self._allowed(ids)
            if allowed is None:
                continue
            forbidden[row, : len(SPECIAL_TOKENS) if text else None] = True
            forbidden[row, sorted(allowed)] = False
        return forbid(scores, forbidden)

    def _allowed(self, ids: list[int]) -> tuple[set[int] | None, bool]:
        """The tokens that may follow, and whether all of text may; None for a row that is none of edits, or ended."""
        begin = _last(ids, CODE, len(ids))
        close = _last(ids, END_CODE, begin)
        opened = _last(ids, CODE, close)
        written = ids[begin + 1 :]
        if opened < 0 or {END_CODE, TOKEN_IDS[EOS]} & set(written):
            return None, True
        lines = _lines(self._bytes(ids[opened:close]), self.behind)
        marks = [place for place, token in enumerate(written) if token in (BEFORE, AFTER)]
        quoted = tuple(
            self._bytes(written[start:stop])
            for start, stop in itertools.pairwise([*marks, len(written)])
            if written[start] == BEFORE
        )
        if not marks or written[marks[-1]] == AFTER:
            return {END_CODE, *([BEFORE] if lines.starts(quoted) else ())}, bool(marks)
        named = self._named_line(ids[close:begin]) if len(quoted) == 1 else None
        starts, least = (lines.starts(quoted[:-1]), 1) if named is None else lines.with_line(named)
        return self._continued(lines, starts, least, quoted[-1]), False

    def _continued(self, lines: "_Lines", starts: list[tuple[int, int]], least: int, quoted: bytes) -> set[int]:
        """The tokens with which a quotation goes on, or ends if it has `least` bytes."""
        allowed, found = set(), lines.found(quoted) if len(quoted) >= least else []
        for start, limit in starts:
            if not lines.text.startswith(quoted, start, limit):
                continue
            rest = lines.text[start + len(quoted) : min(limit, start + len(quoted) + self.longest)]
            for size in range(1, len(rest) + 1):
                allowed.update(self.tokens.get(rest[:size], ()))
            if found == [start]:
                allowed.add(AFTER)
        return allowed

    def _named_line(self, verdict: list[int]) -> int | None:
        """The line, from 1, that the verdict names."""
        opened = _last(verdict, VALIDATE, len(verdict))
        named = NAMED_LINE.match(self._bytes(verdict[opened + 1 :])) if opened >= 0 else None
        return None if named is None else int(named[1])

    def _bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.texts[token] or b"" for token in ids)


@functools.lru_cache(maxsize=8)
def _vocabulary(tokenizer: Any) -> tuple[list[bytes | None], dict[bytes, list[int]]]:
    """The bytes of each token of a byte-level tokenizer, None for tags, and the tokens of text with these bytes."""
    byte_of = {name: byte for byte, name in bytes_to_unicode().items()}
    names = tokenizer.convert_ids_to_tokens(range(len(SPECIAL_TOKENS), len(tokenizer)))
    texts: list[bytes | None] = [None] * len(SPECIAL_TOKENS)
    texts += [bytes(byte_of[character] for character in name) for name in names]
    tokens: dict[bytes, list[int]] = {}
    for token, text in enumerate(texts):
        if text:
            tokens.setdefault(text, []).append(token)
    return texts, tokens


def _last(ids: list[int], token: int, stop: int) -> int:
    """The last place of a token before `stop`; -1 if there is none."""
    return next((place for place in range(stop - 1, -1, -1) if ids[place] == token), -1)


@functools.lru_cache(maxsize=64)
def _lines(code: bytes, behind: bool) -> "_Lines":
    return _Lines(code, behind)


class _Lines:
    """The lines of a code as bytes, each with the newline before it, or with that behind it.

    Attributes:
        text: the code with a newline at both ends.
        places: where lines begin, and where the last one ends.
    """

    def __init__(self, code: bytes, behind: bool):
        self.text = b"\n%s\n" % code
        self.places = [place + behind for place, byte in enumerate(self.text) if byte == NEWLINE]
        self.ends = set(self.places[1:])
        self.known: dict[tuple[bytes, ...], list[tuple[int, int]]] = {}
        self.named: dict[int, tuple[list[tuple[int, int]], int]] = {}

    def starts(self, quoted: tuple[bytes, ...]) -> list[tuple[int, int]]:
        """Where an unmistakable quotation can begin and how far it can go, apart from lines that are quoted already.

        The longest quotation is found most rarely: where even that is found twice, none from there can end.
        """
        if quoted not in self.known:
            taken = [(start, start + len(run)) for run in quoted for start in self.found(run)[:1]]
            free = [place for place in self.places[:-1] if not any(first <= place < stop for first, stop in taken)]
            limits = [min([first for first, _ in taken if first > place] or self.places[-1:]) for place in free]
            pairs = zip(free, limits)
            self.known[quoted] = [pair for pair in pairs if self.found(self.text[slice(*pair)]) == [pair[0]]]
        return self.known[quoted]

    def with_line(self, number: int) -> tuple[list[tuple[int, int]], int]:
        """As `starts`, the one of the shortest stretch that is found once and holds a line, and its length.

        Args:
            number: of the line, from 1; a blank one, or one behind the end, is the one above it.
        """
        if number not in self.named:
            count = len(self.places) - 1
            line = max(0, min(number, count) - 1)
            while line and not self._stretch(line, 1).strip():
                line -= 1
            stretches = (
                (first, size)
                for size in range(1, count + 1)
                for first in range(min(line, count - size), max(-1, line - size), -1)
            )
            first, size = next(
                each for each in stretches if self.found(self._stretch(*each)) == [self.places[each[0]]]
            )
            self.named[number] = [(self.places[first], self.places[-1])], len(self._stretch(first, size))
        return self.named[number]

    def _stretch(self, first: int, size: int) -> bytes:
        return self.text[self.places[first] : self.places[first + size]]

    def found(self, run: bytes) -> list[int]:
        """Where a text is whole lines."""
        return [
            place for place in self.places[:-1]
            if place + len(run) in self.ends and self.text.startswith(run, place)
        ]  # fmt: skip
