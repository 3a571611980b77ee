"""A lexer of Go that reads a text byte by byte and says at each byte whether a Go text can go on with it.

Its states are small and hashable, so that a state can be kept for every beginning of a text; `lexical.py` forbids the
tokens of a language model by it. The rules are those of the Go specification, "Lexical elements": comments, strings,
runes, escapes, numbers, identifiers and the characters of operators. Brackets are counted too, which are no matter of
lexing but of every text that parses. Left out: which operators there are (`+-*` is three), an identifier that follows
a number (`1abc`, two tokens), and a byte order mark, which may open a file and which no model needs to write.

Letters and digits beyond ASCII are Python's (`str.isalpha`, `str.isdecimal`), whose version of Unicode may be another
than Go's.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np


IMPOSSIBLE, CODE = 0, 1  # places that every automaton has: no text goes on here; between two tokens of Go
CLOSES = {ord(")"): "(", ord("]"): "[", ord("}"): "{"}
BRACKETS = {*CLOSES, *map(ord, CLOSES.values())}

DIGITS, OCTAL, BINARY = b"0123456789", b"01234567", b"01"
HEX = DIGITS + b"abcdefABCDEF"
LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_"
OPERATORS = b"+-*%&|^<>=!:;,~()[]{}"
NO_TEXT = b"\0"  # the one ASCII character that stands nowhere, not in comments either
BYTE_ORDER_MARK = 0xFEFF

# Places within a number: by which characters it goes on, and where to. A number of the first table may end there: what
# is not in its row is read as between tokens. Those of the second may not.
NUMBERS: dict[str, dict[bytes, str]] = {
    "zero": {
        OCTAL: "octal", b"89": "not octal", b"_": "octal_", b"xX": "0x", b"oO": "0o", b"bB": "0b", b".": "point",
        b"eE": "e", b"i": "code", b"pP": "impossible",
    },
    # 0123 is octal, and 0189 must become a float or an imaginary number.
    "octal": {
        OCTAL: "octal", b"89": "not octal", b"_": "octal_", b".": "point", b"eE": "e", b"i": "code",
        b"pP": "impossible",
    },
    "decimal": {
        DIGITS: "decimal", b"_": "decimal_", b".": "point", b"eE": "e", b"i": "code", b"pP": "impossible",
    },
    "point": {DIGITS: "fraction", b"_": "impossible", b"eE": "e", b"i": "code", b"pP": "impossible"},
    "fraction": {DIGITS: "fraction", b"_": "fraction_", b"eE": "e", b"i": "code", b"pP": "impossible"},
    "exponent": {DIGITS: "exponent", b"_": "exponent_", b"i": "code"},
    "hex": {HEX: "hex", b"_": "hex_", b".": "hex point", b"pP": "e", b"i": "code"},
    "0o1": {OCTAL: "0o1", b"89.eEpP": "impossible", b"_": "0o_", b"i": "code"},
    "0b1": {BINARY: "0b1", b"23456789.eEpP": "impossible", b"_": "0b_", b"i": "code"},
}  # fmt: skip
UNFINISHED_NUMBERS: dict[str, dict[bytes, str]] = {
    "octal_": {OCTAL: "octal", b"89": "not octal"},
    "not octal": {DIGITS: "not octal", b"_": "not octal_", b".": "point", b"eE": "e", b"i": "code"},
    "not octal_": {DIGITS: "not octal"},
    "decimal_": {DIGITS: "decimal"},
    "fraction_": {DIGITS: "fraction"},
    "e": {DIGITS: "exponent", b"+-": "e-"},
    "e-": {DIGITS: "exponent"},
    "exponent_": {DIGITS: "exponent"},
    "0x": {HEX: "hex", b"_": "hex_", b".": "0x."},
    "hex_": {HEX: "hex"},
    "hex point": {HEX: "hex fraction", b"pP": "e"},
    "0x.": {HEX: "hex fraction"},
    "hex fraction": {HEX: "hex fraction", b"_": "hex fraction_", b"pP": "e"},
    "hex fraction_": {HEX: "hex fraction"},
    "0o": {OCTAL: "0o1", b"_": "0o_"},
    "0o_": {OCTAL: "0o1"},
    "0b": {BINARY: "0b1", b"_": "0b_"},
    "0b_": {BINARY: "0b1"},
}


class LexicalState(NamedTuple):
    """The state of a text that has been read up to some byte.

    Attributes:
        place: a row of the automaton: within which literal, comment, number or character the text is.
        opened: the open brackets, e.g. "{(".
        fragment: the text begins within brackets, so that it may close more than it opened.
    """

    place: int = CODE
    opened: str = ""
    fragment: bool = False

    def step(self, byte: int) -> "LexicalState | None":
        """The state behind one more byte; None if no Go text can have it here."""
        place = automaton().rows[self.place][byte]
        if place == IMPOSSIBLE:
            return None
        if place != CODE or byte not in BRACKETS:  # a bracket within a literal or a comment leads not to code
            return LexicalState(place, self.opened, self.fragment)
        if byte not in CLOSES:
            return LexicalState(place, self.opened + chr(byte), self.fragment)
        if self.opened.endswith(CLOSES[byte]):
            return LexicalState(place, self.opened[:-1], self.fragment)
        return LexicalState(place, "", True) if self.fragment and not self.opened else None

    def read(self, text: bytes) -> "LexicalState":
        """The state behind more text, whatever it is: a byte that cannot stand where it does begins the code anew.

        A bracket that closes what was not opened, or not like this, shows a text that begins within brackets.
        """
        state = self
        for byte in text:
            behind = state.step(byte)
            if behind is None:
                anew = LexicalState(CODE, state.opened, state.fragment)
                behind = anew.step(byte) or (LexicalState(CODE, "", True) if byte in CLOSES else anew)
            state = behind
        return state

    def may_end(self, balanced: bool = False) -> bool:
        """Whether the text may end here: in no literal or comment, and, if `balanced`, with all brackets closed."""
        return automaton().may_end[self.place] and not (balanced and self.opened)


def first_fault(code: str | bytes, balanced: bool = True) -> int | None:
    """Offset of the first byte (of UTF-8) that no Go text can have there; None if there is none.

    The length of the code stands for an end where the text may not end; `balanced` counts open brackets to that.
    """
    state, text = LexicalState(), code.encode() if isinstance(code, str) else code
    for offset, byte in enumerate(text):
        behind = state.step(byte)
        if behind is None:
            return offset
        state = behind
    return None if state.may_end(balanced) else len(text)


@dataclass(frozen=True)
class Automaton:
    """The places of a Go text and what each byte makes of them.

    Attributes:
        rows: place behind each place and byte, as lists.
        table: the same, [places, 256].
        may_end: places at which a text may end.
    """

    rows: list[list[int]]
    table: np.ndarray
    may_end: list[bool]


@cache
def automaton() -> Automaton:
    """The automaton of Go, made once."""
    return _Builder().build()


class _Builder:
    """Writes the rows of the automaton; places are numbered as they are named."""

    def __init__(self):
        self.rows: list[list[int]] = []
        self.may_end: list[bool] = []
        self.numbers: dict[object, int] = {}
        for name in ("impossible", "code"):
            self.place(name)
        characters = [chr(point) for point in range(sys.maxunicode + 1)]
        text = bytearray(b"\1") * len(characters)
        text[0xD800:0xE000] = bytes(0x800)  # surrogates are no characters
        text[BYTE_ORDER_MARK] = 0
        # A byte for each code point, 1 if it is of the kind.
        self.kinds = {
            "letter": bytes(map(str.isalpha, characters)),
            "name": bytes(one.isalpha() or one.isdecimal() for one in characters),
            "text": bytes(text),
        }

    def place(self, name: object) -> int:
        """The number of a place, whose row is all impossible until it is written."""
        if name not in self.numbers:
            self.numbers[name] = len(self.rows)
            self.rows.append([IMPOSSIBLE] * 256)
            self.may_end.append(False)
        return self.numbers[name]

    def write(self, name: object, *parts: dict[bytes, object], may_end: bool = False) -> None:
        """Writes a row; later parts go over earlier ones."""
        number = self.place(name)
        self.may_end[number] = may_end
        for part in parts:
            for characters, target in part.items():
                following = self.place(target)
                for byte in characters:
                    self.rows[number][byte] = following

    def build(self) -> Automaton:
        self.code()
        self.comments()
        self.literals()
        return Automaton(self.rows, np.array(self.rows, dtype=np.int16), self.may_end)

    def code(self) -> None:
        """Between tokens, and in those that may end anywhere: what does not go on with them begins the next one."""
        between = {
            b" \t\r\n" + OPERATORS: "code", LETTERS: "name", b"0": "zero", b"123456789": "decimal", b'"': "string",
            b"'": "rune", b"`": "raw", b"/": "/", b".": ".", **self.beyond_ascii("letter", "name"),
        }  # fmt: skip
        going_on = {
            "code": {},
            "name": {DIGITS: "name", **self.beyond_ascii("name", "name")},
            "/": {b"/": "line comment", b"*": "comment"},
            ".": {DIGITS: "fraction", b".": ".."},
            "..": {DIGITS: "fraction", b".": "code"},
            **NUMBERS,
        }
        for name, row in going_on.items():
            self.write(name, between, row, may_end=True)
        for name, row in UNFINISHED_NUMBERS.items():
            self.write(name, row)

    def comments(self) -> None:
        self.write("line comment", self.text("line comment"), {b"\n": "code"}, may_end=True)
        self.write("comment", self.text("comment"), {b"*": "comment *"})
        self.write("comment *", self.text("comment"), {b"*": "comment *", b"/": "code"})

    def literals(self) -> None:
        self.write("raw", self.text("raw"), {b"`": "code"})
        self.write("string", self.text("string"), {b"\n": "impossible", b'"': "code", b"\\": ("\\", "string")})
        self.escapes("string", b'"')
        self.write("rune", self.text("rune end"), {b"\n'": "impossible", b"\\": ("\\", "rune end")})
        self.escapes("rune end", b"'")
        self.write("rune end", {b"'": "code"})

    def escapes(self, behind: str, quote: bytes) -> None:
        r"""Escapes, behind which is `behind`: \n and its like, \377, \xff, and code points but for surrogates."""

        def digits(count: int) -> object:  # that many hexadecimal ones
            return ("hex digits", count, behind) if count else behind

        for count in (1, 2, 3, 4):
            self.write(digits(count), {HEX: digits(count - 1)})
        simple, octal, point = b"abfnrtv\\" + quote, ("octal", behind), ("u", behind)
        longest = [("U", number, behind) for number in range(3)]
        backslash = {simple: behind, b"0123": octal, b"x": digits(2), b"u": point, b"U": longest[0]}
        self.write(("\\", behind), backslash)
        self.write(octal, {OCTAL: (*octal, "last")})
        self.write((*octal, "last"), {OCTAL: behind})
        self.write(point, {HEX: digits(3), b"dD": (*point, "d")})
        self.write((*point, "d"), {OCTAL: digits(2)})  # \ud800 to \udfff are surrogates
        # Eight digits: 0000 and four as above, 0001 to 0010 and any four.
        self.write(longest[0], {b"0": longest[1]})
        self.write(longest[1], {b"0": longest[2]})
        self.write(longest[2], {b"0": (*longest[2], 0), b"1": (*longest[2], 1)})
        self.write((*longest[2], 0), {HEX: digits(4), b"0": point})
        self.write((*longest[2], 1), {b"0": digits(4)})

    def text(self, target: str) -> dict[bytes, object]:
        """A row in which every character leads to `target`."""
        ascii_text = bytes(range(128)).replace(NO_TEXT, b"")
        return {ascii_text: target, **self.beyond_ascii("text", target)}

    def beyond_ascii(self, kind: str, target: str) -> dict[bytes, object]:
        """The first bytes of UTF-8 of the characters of a kind, and where each leads; behind the last is `target`."""
        behind = self.place(target)
        flags, last = self.kinds[kind], {}  # of each 64 characters, which differ in the last byte alone
        ends = []
        for start in range(0, len(flags), 64):
            block = flags[start : start + 64]
            if block not in last:
                last[block] = self.row_of(behind if flag else IMPOSSIBLE for flag in block)
            ends.append(last[block])
        leads = {bytes([0xC0 + lead]): ends[lead] for lead in range(2, 32)}
        overlong = [IMPOSSIBLE] * 32  # of what two bytes can write
        leads |= {
            bytes([0xE0 + lead]): self.row_of(ends[64 * lead : 64 * lead + 64] if lead else overlong + ends[32:64])
            for lead in range(16)
        }
        for lead in range(5):  # up to U+10FFFF
            thirds = [
                self.row_of(ends[4096 * lead + 64 * third : 4096 * lead + 64 * third + 64])
                for third in range(64)
                if 4096 * lead + 64 * third < len(ends)
            ]
            thirds += [IMPOSSIBLE] * (64 - len(thirds))
            leads[bytes([0xF0 + lead])] = self.row_of(thirds if lead else [IMPOSSIBLE] * 16 + thirds[16:])
        return {lead: ("row", number) for lead, number in leads.items()}

    def row_of(self, targets: Iterable[int]) -> int:
        """The place from which the bytes 0x80 to 0xBF lead to these places; one for all that are alike."""
        targets = tuple(targets)
        if not any(targets):
            number = IMPOSSIBLE
        else:
            number = self.place(targets)
            self.rows[number][0x80:0xC0] = targets
        self.numbers["row", number] = number
        return number
