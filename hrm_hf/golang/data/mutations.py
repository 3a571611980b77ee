"""Eight small ways to mutate Go code, on tree-sitter's tokens: what a model's own slips look like before it has any.

Only what follows the given prefix is touched. `trajectories.py` finds out whether the result still parses, or is the
same code after all.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..validators.syntax import parse


if TYPE_CHECKING:
    from tree_sitter import Node

# Quoted text is one token, though the parser divides it into quotes, content and escapes.
QUOTED = ("interpreted_string_literal", "raw_string_literal", "rune_literal")
IDENTIFIERS = ("identifier", "field_identifier", "type_identifier", "package_identifier")
FLIPPED = {
    "==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">", "+": "-", "-": "+", "*": "/", "/": "*",
    "%": "/", "&&": "||", "||": "&&", "&": "|", "|": "&", "<<": ">>", ">>": "<<", "+=": "-=", "-=": "+=",
    "++": "--", "--": "++", "&=": "|=", "|=": "&=",
}  # fmt: skip
# A pointer's star and an address's ampersand are no operators between two values.
BINARY_PARENTS = ("binary_expression", "assignment_statement", "inc_statement", "dec_statement")


class Token(NamedTuple):
    """A token of Go: tree-sitter's node type, text, first byte and the byte after it, and the type of its parent."""

    kind: str
    text: str
    start: int
    stop: int
    parent: str


@dataclass
class Body:
    """The whole code as bytes, and the tokens and lines of it that an operator may touch.

    Attributes:
        code: UTF-8.
        start: first byte after the prefix.
        tokens: those that begin at `start` or later, without comments.
        lines: (first byte, byte after the line break) of lines wholly after `start` that hold a token.
    """

    code: bytes
    start: int
    tokens: list[Token]
    lines: list[tuple[int, int]]

    def replaced(self, *edits: tuple[int, int, bytes]) -> str:
        """The code with bytes [start, stop) replaced by a text, for each edit; edits do not overlap."""
        code = self.code
        for start, stop, text in sorted(edits, reverse=True):
            code = code[:start] + text + code[stop:]
        return code.decode()


def go_tokens(code: str) -> list[Token]:
    """The tokens of Go code in their order, comments and automatic semicolons left out."""
    tokens: list[Token] = []
    stack: list[tuple[Node, str]] = [(parse(code).root_node, "")]
    while stack:
        node, parent = stack.pop()
        if node.children and node.type not in QUOTED:
            stack.extend((child, node.type) for child in reversed(node.children))
        elif node.type != "comment" and node.text.strip():
            tokens.append(Token(node.type, node.text.decode(), node.start_byte, node.end_byte, parent))
    return tokens


def syntax_shape(code: str) -> list[tuple[str, int, bytes]]:
    """The syntax tree in preorder as (kind, children that count, text of a leaf), comments and semicolons left out."""
    shape = []
    stack = [parse(code).root_node]
    while stack:
        node = stack.pop()
        children = [child for child in node.children if child.type not in ("comment", ";", "\n")]
        shape.append((node.type, len(children), b"" if node.children else node.text))
        stack.extend(reversed(children))
    return shape


def mutants(code: str, prefix: str, generator: random.Random) -> list[str]:
    """Mutate a code once with every operator that finds something to change.

    Args:
        code: Go code that parses: a file or declarations.
        prefix: beginning of `code` that is left alone.
        generator: the only source of chance.

    Returns:
        Mutated codes in random order, without repetitions and without `code` itself.

    Raises:
        ValueError: the code does not begin with the prefix.
    """
    body = body_of(code, prefix)
    made = [operator(body, generator) for operator in OPERATORS.values()]
    found = list(dict.fromkeys(mutant for mutant in made if mutant is not None and mutant != code))
    generator.shuffle(found)
    return found


def body_of(code: str, prefix: str) -> Body:
    """Finds the tokens and lines that an operator may touch: those after the prefix.

    Raises:
        ValueError: the code does not begin with the prefix.
    """
    if not code.startswith(prefix):
        raise ValueError(f"prefix={prefix[:60]!r}: the code does not begin with it")
    encoded, start = code.encode(), len(prefix.encode())
    tokens = [token for token in go_tokens(code) if token.start >= start]
    lines, position = [], 0
    firsts = {token.start for token in tokens}
    for line in encoded.splitlines(keepends=True):
        stop = position + len(line)
        # A token of several lines is no line's: to cut inside it would be another operator.
        if position >= start and any(first in firsts for first in range(position, stop)):
            lines.append((position, stop))
        position = stop
    return Body(encoded, start, tokens, lines)


def delete_brace(body: Body, generator: random.Random) -> str | None:
    """Remove one curly brace."""
    token = _choice([token for token in body.tokens if token.text in ("{", "}")], generator)
    return token and body.replaced((token.start, token.stop, b""))


def truncate(body: Body, generator: random.Random) -> str | None:
    """End the code before one of its tokens, as a model does that ran out of budget."""
    token = _choice(body.tokens, generator)
    return token and body.code[: token.start].decode()


def duplicate_token(body: Body, generator: random.Random) -> str | None:
    """Write one token twice, a space between."""
    token = _choice(body.tokens, generator)
    return token and body.replaced((token.stop, token.stop, b" " + token.text.encode()))


def delete_token(body: Body, generator: random.Random) -> str | None:
    """Remove one token."""
    token = _choice(body.tokens, generator)
    return token and body.replaced((token.start, token.stop, b""))


def delete_line(body: Body, generator: random.Random) -> str | None:
    """Remove one line that holds a token."""
    line = _choice(body.lines, generator)
    return line and body.replaced((*line, b""))


def swap_identifiers(body: Body, generator: random.Random) -> str | None:
    """Exchange two identifiers of different names."""
    identifiers = [token for token in body.tokens if token.kind in IDENTIFIERS]
    if len({token.text for token in identifiers}) < 2:
        return None
    first = generator.choice(identifiers)
    second = generator.choice([token for token in identifiers if token.text != first.text])
    return body.replaced(
        (first.start, first.stop, second.text.encode()), (second.start, second.stop, first.text.encode())
    )


def swap_lines(body: Body, generator: random.Random) -> str | None:
    """Exchange two neighboring lines of equal indentation."""
    pairs = [
        (upper, lower)
        for upper, lower in itertools.pairwise(body.lines)
        if upper[1] == lower[0] and _indentation(body, upper) == _indentation(body, lower)
    ]
    if not pairs:
        return None
    upper, lower = generator.choice(pairs)
    return body.replaced((*upper, body.code[slice(*lower)]), (*lower, body.code[slice(*upper)]))


def flip_operator(body: Body, generator: random.Random) -> str | None:
    """Turn one operator into its counterpart: == into !=, + into -, && into ||."""
    operators = [token for token in body.tokens if token.text in FLIPPED and token.parent in BINARY_PARENTS]
    token = _choice(operators, generator)
    return token and body.replaced((token.start, token.stop, FLIPPED[token.text].encode()))


OPERATORS: dict[str, Callable[[Body, random.Random], str | None]] = {
    "delete brace": delete_brace,
    "truncate": truncate,
    "duplicate token": duplicate_token,
    "delete token": delete_token,
    "delete line": delete_line,
    "swap identifiers": swap_identifiers,
    "swap lines": swap_lines,
    "flip operator": flip_operator,
}


def _choice(choices: list, generator: random.Random) -> Any:
    return generator.choice(choices) if choices else None


def _indentation(body: Body, line: tuple[int, int]) -> int:
    text = body.code[slice(*line)]
    return len(text) - len(text.lstrip(b" \t"))
