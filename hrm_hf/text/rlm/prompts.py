"""Prompts of a recursive language model, the parser of its replies, and values as text (arXiv 2512.24601).

The wording is our own. Only replies of the model are parsed, never the context, printed output or answers of
sub-calls, so nothing in those can end a run. They can still persuade the model: no prompt prevents that.
"""

import re
from dataclasses import dataclass
from typing import Any


SYSTEM = """\
You answer a question about a context that is too long to read at once. It is the variable `context` in a Python \
REPL, and you see only what your code prints.

In each turn, say briefly what you will do and write one code block:

```repl
print(type(context), len(context))
```

The block is run and you are shown what it printed, at most {max_output_chars} characters, so print excerpts and \
never the whole context. Variables stay from turn to turn. Only the first block of a turn is run.

The REPL has
- context: what the question is about
- llm_query(prompt): asks a language model and returns its answer, a string. It sees nothing but the prompt, so put \
the text into it{prompt_size}
- llm_query_batched(prompts): the same for a list of prompts; returns the answers in order, much faster than a loop
{rlm_query}\
- answer = {{"content": "", "ready": False}}: put your answer into answer["content"], then set answer["ready"] = True \
to finish

You may also finish outside of code, on a line of its own, with FINAL(your answer), or with FINAL_VAR(name) for the \
value of a variable.

Look at the context first: its size, its start, what separates its parts. Search it with code where you can, and ask \
llm_query about parts that must be understood. The REPL is plain Python: no files, no network, no packages; re, json, \
math, collections and datetime are there. Call the functions directly, not through map(). You have {max_turns} turns \
and {max_sub_calls} calls of language models."""

RLM_QUERY = """\
- rlm_query(question, context): asks a model that has a REPL of its own around that context (a string, list or dict); \
for parts that are themselves too long to read at once
"""

QUESTION = "Question: {question}\n\nThe variable context is {description}."
OUTPUT = "The block printed:\n{output}\n\n({left} turns left)"
NO_BLOCK = (
    "There was no complete code block and no FINAL(...) in that reply. Write one short block that starts with ```repl "
    "and ends with ```, or finish with FINAL(your answer)."
)
NO_VARIABLE = "FINAL_VAR({name}): there is no such variable, or its value cannot leave the REPL."
BAD_ANSWER = (
    'answer must stay a dict {"content": ..., "ready": ...} whose content is text, a number, a list or a dict; '
    "it is not, or the content is empty, so the run goes on."
)
UNFIT_ANSWER = "That value cannot be the answer, because {reason}. Make it a short text; the run goes on."
SALVAGE = (
    "No more code can be run ({reason}). Reply with your best answer to the question from what you have seen, and "
    "nothing else.\n\nQuestion: {question}"
)
OLD_TURNS = "\n\n(Your {count} oldest turns are not shown any more; their variables are still there.)"
CUT = "\n[{count} more characters were printed and are not shown]"

LINE = re.compile(r"[^\n]*\n|[^\n]+")  # only \n ends a line
FINAL = re.compile(r"[ \t]*(FINAL|FINAL_VAR)\(")
HALF_PAIRS = re.compile("[\ud800-\udfff]")
CODE_LANGUAGES = ("repl", "python", "py")
MAX_KEYS, MAX_LENGTHS = 20, 50  # shown in the description of a context
MAX_NESTING, MAX_CONTEXT_NESTING = 100, 200  # of lists in lists
MAX_CONTEXT_VALUES = 10_000_000
MAX_ERROR_CHARS, SHOWN = 4000, 80  # of an error, and of a value in an error message


@dataclass(frozen=True)
class Reply:
    """A reply of the model, as far as it counts.

    kind: "code", "final", "final_var" or "nothing".
    value: the code, the answer, or the name of the variable. text: the reply up to and with that.
    """

    kind: str
    value: str
    text: str


def parse_reply(text: str) -> Reply:
    """Find the first code block or FINAL, whichever comes first; what follows it is the model's imagination."""
    text = drop_thinking(text)
    block = None  # (start of its code, whether it is to be run)
    end = 0
    for line in LINE.findall(text):
        start, end = end, end + len(line)
        fence = line.strip()
        if block is not None:
            if fence == "```" and block[1]:
                return Reply("code", text[block[0] : start], text[: end - line.endswith("\n")])
            block = None if fence == "```" else block
        elif fence.startswith("```") and "`" not in fence[3:]:
            block = end, fence[3:].strip().partition(" ")[0].lower() in CODE_LANGUAGES
        elif final := FINAL.match(line):
            opening = start + final.end()
            closing = _closing(text, opening)
            value = _unquoted(text[opening:closing].strip())
            return Reply("final" if final[1] == "FINAL" else "final_var", value, text[: closing + 1])
    return Reply("nothing", "", text)


def drop_thinking(text: str) -> str:
    """Return the text after a reasoning model's thoughts; the start tag may have been part of the prompt."""
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def describe_context(context: Any) -> str:
    """Return type and size of a context: all that the model is told of it."""
    if isinstance(context, str):
        return f"a str of {len(context)} characters, {context.count(chr(10)) + 1} lines"
    if isinstance(context, dict):
        keys = ", ".join(short(key) for key in list(context)[:MAX_KEYS])
        return f"a dict of {len(context)} items with the keys {keys}{', ...' if len(context) > MAX_KEYS else ''}"
    kinds = ", ".join(sorted({type(item).__name__ for item in context})) or "empty"
    lengths = [len(item) for item in context[:MAX_LENGTHS] if isinstance(item, (str, list, dict))]
    sizes = f"; lengths of the first ones: {', '.join(map(str, lengths))}" if lengths else ""
    return f"a list of {len(context)} items ({kinds}){sizes}"


# ---- values that the model's code made ----


class UnfitValueError(ValueError):
    """A value that cannot be a text or a context. The message says why, for the model."""


def validate_context(context: Any) -> None:
    """Raise UnfitValueError unless a context is a str, list or dict of plain values, as every executor needs."""
    if not isinstance(context, (str, list, dict)):
        raise UnfitValueError(f"context is a {type(context).__name__}; expected str, list or dict (a file: its text)")
    if _count(context, MAX_CONTEXT_VALUES, MAX_CONTEXT_NESTING, plain=True) > MAX_CONTEXT_VALUES:
        raise UnfitValueError(f"context holds more than {MAX_CONTEXT_VALUES} values")


def answer_text(value: Any, max_chars: int) -> str:
    """Return an answer as text. Raise UnfitValueError if the value cannot be an answer."""
    if not isinstance(value, (str, int, float, list, tuple, dict)):
        raise UnfitValueError(f"it is a {type(value).__name__}; expected text, a number, a list or a dict")
    return text_of(value, max_chars)


def text_of(value: Any, max_chars: int, quoted: bool = False) -> str:
    """Return `str(value)`, or `repr(value)` if quoted, without half surrogate pairs.

    A value is measured before it is converted: twelve lists of ten references to the one before print as 10^12 items.

    Raises:
        UnfitValueError: more than `max_chars` characters, nested more than 100 deep, or a conversion that fails.
    """
    too_long = f"it comes to more than {max_chars} characters"
    if _count(value, max_chars, MAX_NESTING) > max_chars:
        raise UnfitValueError(too_long)
    try:
        text = repr(value) if quoted else str.__str__(value) if isinstance(value, str) else str(value)
    except Exception as error:  # an integer of more than 4300 digits, or a class that the model wrote
        raise UnfitValueError(f"a {type(value).__name__} does not convert to text: {error}") from error
    if len(text) > max_chars:
        raise UnfitValueError(too_long)
    return whole_text(text)


def _count(value: Any, most: int, deepest: int, plain: bool = False) -> int:
    """Count the characters of a value, or the values of a context, which must be `plain`; stop above `most`.

    Shared parts count every time. The methods of a class that the model wrote are not called.
    """
    if isinstance(value, str):
        return 1 if plain else len(value)
    if isinstance(value, dict):
        parts = [part for pair in dict.items(value) for part in pair]
        if plain and not all(isinstance(key, (str, int, float)) for key in parts[::2]):
            raise UnfitValueError("context has keys that are neither str nor numbers")
    elif isinstance(value, (list, tuple)):
        parts = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
    elif not plain or value is None or isinstance(value, (int, float)):
        return 1
    else:
        raise UnfitValueError(f"context holds a {type(value).__name__}; expected plain values, lists and dicts")
    if deepest == 0:
        raise UnfitValueError("it is nested too deep, or holds itself")
    total = 1
    for part in parts:
        total += _count(part, most - total, deepest - 1, plain)
        if total > most:
            break
    return total


def short(value: Any) -> str:
    """Return the beginning of a value, for a message."""
    try:
        return text_of(value, 100_000, quoted=True)[:SHOWN]
    except UnfitValueError as error:
        return f"a {type(value).__name__} ({error})"


def whole_text(text: str) -> str:
    """Return the text with each half of a surrogate pair replaced: no tokenizer, terminal or file takes those."""
    return text if text.isascii() else HALF_PAIRS.sub("\N{REPLACEMENT CHARACTER}", text)


def cut_middle(text: str, most: int = MAX_ERROR_CHARS) -> str:
    """Return beginning and end of an error, which says at its end what went wrong and may quote very long lines."""
    text = text if len(text) <= most else f"{text[: most // 2]}\n[cut]\n{text[-(most // 2) :]}"
    return whole_text(text)


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one before `start`, or else of the last one, or the end."""
    depth = 1
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    last = text.rfind(")")
    return last if last >= start else len(text)


def _unquoted(text: str) -> str:
    for quote in ('"""', "'''", '"', "'"):
        inner = text[len(quote) : -len(quote)]
        if text == f"{quote}{inner}{quote}" and quote not in inner:
            return inner
    return text
