"""Prompts of a recursive language model, and the parser of its replies (arXiv 2512.24601; wording is our own).

Only replies of the model are parsed, never the context, printed output or answers of sub-calls, so nothing in those
can end a run. They can still talk the model into something: no prompt prevents that.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from .plain_values import UnfitValueError, short, text_of


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
    "There was no code block and no FINAL(...) in that reply. Write one block that starts with ```repl and ends with "
    "```, or finish with FINAL(your answer)."
)
OPEN_BLOCK = (
    "The code block in that reply had no end, perhaps because the reply was too long, so it was not run. Write a "
    "shorter one."
)
NO_VARIABLE = "FINAL_VAR({name}): there is no such variable, or its value cannot leave the REPL."
BAD_VARIABLE = "FINAL_VAR({name}): this value cannot be the answer, because {reason}."
BAD_ANSWER = (
    'answer must stay a dict {"content": ..., "ready": ...} whose content is text, a number, a list or a dict; '
    "it is not, or the content is empty, so the run goes on."
)
UNFIT_ANSWER = "That content cannot be the answer, because {reason}. Make it a short text, so the run goes on."
SALVAGE = (
    "No more code can be run ({reason}). Reply with your best answer to the question from what you have seen, and "
    "nothing else.\n\nQuestion: {question}"
)
OLD_TURNS = "\n\n(Your {count} oldest turns are not shown any more; their variables are still there.)"
CUT = "\n[{count} more characters were printed and are not shown]"

LINE = re.compile(r"[^\n]*\n|[^\n]+")  # only \n ends a line
LANGUAGE = re.compile(r"[ \t]*(\w*)")
OPEN_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)
FINAL = re.compile(r"^[ \t]*(FINAL|FINAL_VAR)\(", re.MULTILINE)
CODE_LANGUAGES = ("repl", "python", "py")
MAX_KEYS = 20  # of a dict, named in its description
MAX_LENGTHS = 50  # of the items of a list
MAX_KEY_CHARS = 60
MAX_CONTEXT_NESTING = 200  # of lists in lists
MAX_CONTEXT_VALUES = 200_000_000  # with shared parts counted as often as they come; no message to a worker holds more


@dataclass(frozen=True)
class Reply:
    """A reply of the model, as far as it counts.

    kind: "code", "final", "final_var", "open_block" (a block without end) or "nothing".
    value: the code, the answer, or the name of the variable. text: the reply up to and with that.
    """

    kind: str
    value: str
    text: str


def parse_reply(text: str) -> Reply:
    """Finds the first code block or FINAL, whichever comes first; what follows it is the model's imagination."""
    text = drop_thinking(text)
    blocks = _fenced(text)
    block = next((one for one in blocks if one.language.lower() in CODE_LANGUAGES), None)
    hidden, shown_to = [], 0
    for one in blocks:
        hidden += [text[shown_to : one.start], " " * (one.end - one.start)]
        shown_to = one.end
    hidden = "".join([*hidden, text[shown_to:]])
    unclosed = OPEN_FENCE.search(hidden)
    final = FINAL.search(hidden[: unclosed.start()] if unclosed else hidden)
    if final and (block is None or final.start() < block.start):
        end = _closing(text, final.end())
        value = _unquoted(text[final.end() : end].strip())
        return Reply("final" if final[1] == "FINAL" else "final_var", value, text[: end + 1])
    if block:
        return Reply("code", block.code, text[: block.end])
    return Reply("open_block" if unclosed else "nothing", "", text)


class _Block(NamedTuple):
    """A fenced block: from the start of its first line to the end of its last one."""

    start: int
    end: int
    language: str
    code: str


def _fenced(text: str) -> list[_Block]:
    """The fenced blocks one after another, in one pass over the lines: a reply may hold thousands of fences."""
    blocks: list[_Block] = []
    begin: tuple[int, int, str] | None = None  # start, start of the code, language
    start = 0
    for line in LINE.findall(text):
        stripped = line.rstrip("\n")
        fence = stripped.strip(" \t")
        if begin is not None:
            if fence == "```":
                blocks.append(_Block(begin[0], start + len(stripped), begin[2], text[begin[1] : start]))
                begin = None
        elif fence.startswith("```") and "`" not in fence[3:] and line.endswith("\n"):
            begin = (start, start + len(line), LANGUAGE.match(fence, 3)[1])
        start += len(line)
    return blocks


def drop_thinking(text: str) -> str:
    """Returns the text after a reasoning model's thoughts; the start tag may have been part of the prompt."""
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def system_prompt(
    max_output_chars: int, max_turns: int, max_sub_calls: int, children: bool, window: int | None
) -> str:
    """The rules. `children`: whether rlm_query is there. `window`: tokens that a prompt may have, if known."""
    return SYSTEM.format(
        max_output_chars=max_output_chars,
        prompt_size=f" (at most about {3 * window} characters)" if window else "",
        rlm_query=RLM_QUERY if children else "",
        max_turns=max_turns,
        max_sub_calls=max_sub_calls,
    )


def describe_context(context: Any) -> str:
    """Type and size of a context: all that the model is told of it."""
    if isinstance(context, str):
        return f"a str of {len(context)} characters, {context.count(chr(10)) + 1} lines"
    if isinstance(context, dict):
        keys = ", ".join(short(key)[:MAX_KEY_CHARS] for key in list(context)[:MAX_KEYS])
        more = f" and {len(context) - MAX_KEYS} more" if len(context) > MAX_KEYS else ""
        return f"a dict of {len(context)} items with the keys {keys}{more}"
    kinds = sorted({type(item).__name__ for item in context})
    lengths = ", ".join(str(len(item)) for item in context[:MAX_LENGTHS] if isinstance(item, (str, list, dict)))
    sizes = f"; lengths of the first ones: {lengths}" if lengths else ""
    return f"a list of {len(context)} items ({', '.join(kinds) or 'empty'}){sizes}"


def validate_context(context: Any) -> None:
    """Contexts are str, list or dict of plain values, so that every executor can take them.

    Raises:
        TypeError: names the place of a value of another type, or of one that is nested without end.
    """
    if not isinstance(context, (str, list, dict)):
        raise TypeError(f"context is a {type(context).__name__}; expected str, list or dict (a file: its text)")
    if _values(context, "context", 0, {}) > MAX_CONTEXT_VALUES:
        raise TypeError(f"context comes to more than {MAX_CONTEXT_VALUES} values, since parts of it are shared")


def answer_text(value: Any, max_chars: int) -> str:
    """An answer as text.

    Raises:
        UnfitValueError: why this value can be none.
    """
    if not isinstance(value, (str, int, float, list, tuple, dict)):
        raise UnfitValueError(f"it is a {type(value).__name__}; expected text, a number, a list or a dict")
    return text_of(value, max_chars)


def _values(value: Any, place: str, depth: int, counted: dict[int, int | None]) -> int:
    """The number of values in a part of a context; a part that comes again is counted again and not walked again."""
    if value is None or isinstance(value, (str, int, float)):
        return 1
    if id(value) in counted:
        if counted[id(value)] is None:
            raise TypeError(f"{place} holds itself; expected nested str, list and dict")
        return counted[id(value)]
    if depth > MAX_CONTEXT_NESTING:
        raise TypeError(f"context is nested more than {MAX_CONTEXT_NESTING} deep; flatten it, or give it as a text")
    counted[id(value)] = None  # on the way down
    if isinstance(value, (list, tuple)):
        total = 1 + sum(_values(item, f"{place}[{i}]", depth + 1, counted) for i, item in enumerate(value))
    elif isinstance(value, dict):
        total = 1
        for key, item in value.items():
            if not isinstance(key, (str, int, float)):
                kind = type(key).__name__
                raise TypeError(f"{place} has the key {short(key)} of type {kind}; expected str or a number")
            total += _values(item, f"{place}[{short(key)}]", depth + 1, counted)
    else:
        raise TypeError(
            f"{place} is a {type(value).__name__}; expected str, int, float, bool, None, or a list or dict of these"
        )
    counted[id(value)] = total
    return total


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
