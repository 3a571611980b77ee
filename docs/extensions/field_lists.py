"""Shows the fields of a config as lists in the API reference. Loaded by mkdocstrings, see mkdocs.yml.

Our configs and pipelines describe their fields as transformers does, several to a line, under titles of their own:

    Halting:
        halt_margin (`float`, defaults to 0.0): a token halts if q_halt - q_continue is above it.
        halt_min_steps (1): fewest segments of a token.

Read as Google style, such sections would run into one paragraph. Here each becomes a title and a list in Markdown.
Options of the training scripts have their description in the field itself, `HfArg(default=..., help=...)`; they are
listed below the text of their class.
"""

import ast
import re

from griffe import Attribute, Class, Extension


# What only these docstrings have: a type in backticks, or a default in parentheses, behind the name of a field.
FIELD = re.compile(r"\w \(`\w+`|^ +[a-z]\w*_\w+ \([^()]+\): ", re.MULTILINE)
TITLE = re.compile(r"[A-Z][^`]*:$")
ITEM = re.compile(r"([\w, ]+?)( \(|: )")


class FieldLists(Extension):
    """Rewrites the docstrings of classes that describe fields in transformers' way."""

    def on_class(self, *, cls: Class, **kwargs) -> None:
        """Add the list of fields to a class; griffe calls this for each class."""
        if not cls.docstring:
            return
        if FIELD.search(cls.docstring.value):
            cls.docstring.value = as_lists(cls.docstring.value)
        if options := [line for name, attribute in cls.attributes.items() if (line := option(name, attribute))]:
            cls.docstring.value += "\n\n**Options:**\n\n" + "\n".join(options)


def option(name: str, attribute: Attribute) -> str | None:
    """Return the list item of a field with a help text; None for other attributes."""
    if not str(attribute.value).startswith("HfArg("):
        return None
    given = {each.arg: each.value for each in ast.parse(str(attribute.value), mode="eval").body.keywords}
    default = f", `{ast.unparse(given['default'])}`" if "default" in given else ""
    return f"- **{name}** (`{attribute.annotation}`{default}): {text_of(given['help'])}"


def text_of(node: ast.expr) -> str:
    """Return a string, or an f-string with its expressions as code."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.FormattedValue):
        return f"`{ast.unparse(node.value)}`"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    raise ValueError(f"a help text is a string or an f-string, not {ast.unparse(node)}")


def as_lists(text: str) -> str:
    """Convert `Title:` and the indented items below it in a docstring to Markdown."""
    lines, inside = [], False
    for line in text.splitlines():
        item = line.strip()
        if TITLE.match(line):
            lines += ["", f"**{line}**", ""]
            inside = True
        elif not inside or (item and not line.startswith(" ")):
            lines.append(line)
            inside = False
        elif line.startswith(" " * 5) or not ITEM.match(item):
            lines[-1] += f" {item}" if lines[-1] else item
        else:
            lines.append("- " + ITEM.sub(r"**\1**\2", item, count=1))
    return "\n".join(lines)
