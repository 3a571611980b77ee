"""Values that code of a model made, as text: without endless, huge or failing conversions.

`str` of such a value may recurse without end, take all memory (twelve lists of ten references to the one before come
to 10^12 entries) or raise (integers of more than 4300 digits). Here a value is measured before it is converted. What
an object of the model's own class says of itself can still hang the process it lives in, which is why code belongs
into `MontyExecutor`.
"""

import re
import sys
from typing import Any


MAX_NESTING = 100  # of lists in lists; far below where Python itself gives up
MAX_ERROR_CHARS = 4000
SHOWN = 80  # characters of a value in an error message
BITS_PER_DIGIT = 3.33
HALF_PAIRS = re.compile("[\ud800-\udfff]")


class UnfitValueError(ValueError):
    """A value that cannot be text. The message says why, for the model."""


def text_of(value: Any, max_chars: int, quoted: bool = False) -> str:
    """`str(value)`, or `repr(value)` if quoted, without half surrogate pairs.

    Raises:
        UnfitValueError: more than `max_chars` characters, nested more than 100 deep (or in itself), an integer that
            Python does not print, or an object whose own conversion fails.
    """
    _measure(value, max_chars)
    try:
        text = repr(value) if quoted else str.__str__(value) if isinstance(value, str) else str(value)
    except Exception as error:  # an object of a class that the model wrote
        raise UnfitValueError(f"a {type(value).__name__} does not convert to text: {type(error).__name__}") from error
    if len(text) > max_chars:
        raise UnfitValueError(_too_long(max_chars))
    return whole_text(text)


def whole_text(text: str) -> str:
    """The text with each half of a surrogate pair replaced: no tokenizer, terminal or file takes those."""
    return text if text.isascii() else HALF_PAIRS.sub("\N{REPLACEMENT CHARACTER}", text)


def short(value: Any) -> str:
    """A value for an error message, whatever it is."""
    try:
        return text_of(value, 100_000, quoted=True)[:SHOWN]
    except UnfitValueError as error:
        return f"a {type(value).__name__} ({error})"


def cut_middle(text: str, most: int = MAX_ERROR_CHARS) -> str:
    """Beginning and end of an error: a traceback says at its end what went wrong, and may quote very long lines."""
    text = text if len(text) <= most else f"{text[: most // 2]}\n[cut]\n{text[-(most // 2) :]}"
    return whole_text(text)


def _measure(value: Any, max_chars: int) -> None:
    """Counts the least characters that a value takes; every visit counts, so shared parts count as often as shown."""
    chars, waiting = 0, [(value, 0)]
    most_digits = sys.get_int_max_str_digits() or max_chars
    while waiting:
        part, depth = waiting.pop()
        if depth > MAX_NESTING:
            raise UnfitValueError(f"it is nested more than {MAX_NESTING} deep, or holds itself")
        if isinstance(part, (str, bytes, bytearray)):
            chars += len(part)
        elif isinstance(part, int):
            digits = part.bit_length() / BITS_PER_DIGIT
            if digits > most_digits:
                raise UnfitValueError(
                    f"it holds an integer of about {int(digits)} digits; at most {most_digits} print"
                )
            chars += int(digits) + 1
        else:
            inner = _parts(part)
            chars += 1 + len(inner)
            if chars <= max_chars:
                waiting.extend((one, depth + 1) for one in inner)
        if chars > max_chars:
            raise UnfitValueError(_too_long(max_chars))


def _parts(value: Any) -> Any:
    """Returns the items of a container, by the method of the built-in class and not of a class of the model's own."""
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return list(kind.__iter__(value))
    return [*dict.keys(value), *dict.values(value)] if isinstance(value, dict) else []


def _too_long(max_chars: int) -> str:
    return f"it comes to more than {max_chars} characters"
