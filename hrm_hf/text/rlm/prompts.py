"""Prompts for a recursive language model, and the parser for its replies (arXiv 2512.24601).

The wording is our own. Only the model's replies are parsed, never the context, printed output or answers of sub-calls,
so none of these can end a run. They can still influence the model (prompt injection); no prompt prevents that.
"""

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
to finish; FINAL(value) does both

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
    "There was no complete code block in that reply. Write one short block that starts with ```repl and ends with "
    "```; to finish, call FINAL(your answer) in it."
)
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

CODE_LANGUAGES = ("repl", "python", "py")
MAX_KEYS, MAX_LENGTHS = 20, 50  # maximum number of keys and of item lengths in the description of a context
MAX_CONTEXT_VALUES = 10_000_000
MAX_CHARS = 1_000_000  # maximum length of an answer, and of the value shown for a block's last line
MAX_PROMPT_CHARS = 20_000_000  # limit for a sub-call's prompts; tokenizing them takes 100 times as much memory
MAX_ERROR_CHARS, SHOWN = 4000, 80  # limits for an error message, and for a value that it quotes


def parse_reply(text: str) -> tuple[str | None, str]:
    """Return the first code block of a reply (or None), and the reply up to the end of the block."""
    text = drop_thinking(text)
    lines, start, runs = text.split("\n"), None, False
    for number, line in enumerate(lines):
        fence = line.strip()
        if start is None and fence.startswith("```") and "`" not in fence[3:]:
            start, runs = number + 1, fence[3:].strip().partition(" ")[0].lower() in CODE_LANGUAGES
        elif start is not None and fence == "```":
            if runs:
                return "\n".join(lines[start:number]), "\n".join(lines[: number + 1])
            start = None
    return None, text


def drop_thinking(text: str) -> str:
    """Strip the reasoning from a reply. Its start tag may have been part of the prompt."""
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def describe_context(context: Any) -> str:
    """Describe the type and size of a context. The model is told nothing else about it."""
    if isinstance(context, str):
        return f"a str of {len(context)} characters, {context.count(chr(10)) + 1} lines"
    if isinstance(context, dict):
        keys = ", ".join(short(key) for key in list(context)[:MAX_KEYS])
        return f"a dict of {len(context)} items with the keys {keys}{', ...' if len(context) > MAX_KEYS else ''}"
    kinds = ", ".join(sorted({type(item).__name__ for item in context})) or "empty"
    lengths = [len(item) for item in context[:MAX_LENGTHS] if isinstance(item, (str, list, dict))]
    sizes = f"; lengths of the first ones: {', '.join(map(str, lengths))}" if lengths else ""
    return f"a list of {len(context)} items ({kinds}){sizes}"


def validate_context(context: Any) -> None:
    """Raise ValueError unless a context is a str, list or dict of at most 10 million values."""
    if not isinstance(context, (str, list, dict)):
        kind = type(context).__name__
        raise ValueError(f"context is a {kind}; expected str, list or dict; to use a file, pass its text")
    if _size(context, MAX_CONTEXT_VALUES) > MAX_CONTEXT_VALUES:
        raise ValueError(f"context contains more than {MAX_CONTEXT_VALUES} values; shorten it")


def answer_text(value: Any) -> str:
    """Convert an answer to text. Raise ValueError if the value has the wrong type or is too long."""
    if not isinstance(value, (str, int, float, list, tuple, dict)):
        raise ValueError(f"the value is a {type(value).__name__}; expected text, a number, a list or a dict")
    return text_of(value)


def text_of(value: Any, quoted: bool = False) -> str:
    """Return `str(value)`, or `repr(value)` if `quoted`. Raise ValueError if this fails or the text is too long.

    The size is checked first: nested lists with shared elements can be small in memory but print as 10^12 items.
    """
    size = _size(value, MAX_CHARS, of_text=True)
    try:
        text = "" if size > MAX_CHARS else repr(value) if quoted else str(value)
    except (ValueError, RecursionError) as error:  # raised for integers of over 4300 digits and deeply nested lists
        raise ValueError(f"a {type(value).__name__} cannot be converted to text: {error}") from error
    if max(size, len(text)) > MAX_CHARS:
        raise ValueError(f"the text has more than {MAX_CHARS} characters")
    return text


def _size(value: Any, most: int, of_text: bool = False) -> int:
    """Count nested values (characters if `of_text`), including repeated ones, up to about `most`."""
    total, parts = 0, [value]
    while parts and total <= most:
        part = parts.pop()
        part = getattr(part, "attributes", part)  # an instance of a REPL class has its fields in `attributes`
        total += len(part) if of_text and isinstance(part, str) else 1
        if isinstance(part, dict):
            parts += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple, set, frozenset)):
            parts += part
    return total


def short(value: Any) -> str:
    """Return the beginning of a value's text, for an error message."""
    try:
        return text_of(value, quoted=True)[:SHOWN]
    except ValueError as error:
        return f"a {type(value).__name__} ({error})"


def cut_middle(text: str, most: int = MAX_ERROR_CHARS) -> str:
    """Cut the middle out of a long error message, which may quote very long lines and ends with the cause."""
    return text if len(text) <= most else f"{text[: most // 2]}\n[cut]\n{text[-(most // 2) :]}"
