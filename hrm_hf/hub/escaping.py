"""Names of somebody's in a model card: as words, as code, and nothing else.

The templates of cards write every value with `in_markdown`, unless a filter has made it `Verbatim`.
"""

import html
import json
import shlex
from typing import Any


class Verbatim(str):
    """A text that stands in a card as it is: it has been escaped for its place, or is the package's own."""


def in_markdown(value: Any) -> str:
    """A name as words of a line or of a cell: without HTML, links, code, cells or lines of its own."""
    if isinstance(value, Verbatim):
        return value
    text = html.escape("".join(c for c in " ".join(str(value).split()) if c.isprintable()), quote=False)
    return text.replace("|", "\\|").replace("`", "\\`").replace("](", "]\\(")


def in_code(value: Any) -> Verbatim:
    """The same between backticks, where nothing can be escaped."""
    return Verbatim("".join(c for c in " ".join(str(value).split()) if c.isprintable() and c not in "`|"))


def in_python(value: Any) -> Verbatim:
    """A text as a Python expression, in double quotes."""
    return Verbatim(json.dumps(str(value), ensure_ascii=False))


def in_shell(value: Any) -> Verbatim:
    """A name as one word of a command that stands between backticks."""
    return in_code(shlex.quote(in_code(value)))
