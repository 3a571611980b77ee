"""Parse Go source with tree-sitter and find the first syntax error. No Go toolchain is needed.

The grammar of tree-sitter-go accepts more than Go does, so this module adds two checks: the semicolons that Go
inserts at line ends (specification, "Semicolons"), and the statements that may appear outside functions. It does not
check rules that Go's parser applies beyond the grammar, such as where a `range` clause may appear.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ...io.usage import validate_extra
from ...models.processing_hrm_go_coder import Feedback


if TYPE_CHECKING:
    from tree_sitter import Node, Parser, Tree

DECLARATIONS = frozenset(
    ("function_declaration", "method_declaration", "const_declaration", "var_declaration", "type_declaration")
)
# A newline that ends a statement or a member is a direct child of one of these nodes, after the token that opens the
# list or, if this token is None, anywhere in the node.
_LISTS = {
    "source_file": None, "statement_list": None, "comment": None, "raw_string_literal": None,
    "raw_string_literal_content": None, "block": None, "field_declaration_list": None, "import_spec_list": None,
    "var_spec_list": None, "const_declaration": "(", "var_declaration": "(", "type_declaration": "(",
    "interface_type": "{", "expression_switch_statement": None, "type_switch_statement": None, "select_statement": "{",
    "expression_case": ":", "type_case": ":", "communication_case": ":", "default_case": ":",
}  # fmt: skip
_COMMA_LISTS = {
    "argument_list": "argument list", "literal_value": "composite literal", "parameter_list": "parameter list"
}  # fmt: skip
_ENDING_KEYWORDS = frozenset((b"break", b"continue", b"fallthrough", b"return"))
_KEYWORDS = frozenset(
    b"break case chan const continue default defer else fallthrough for func go goto if import interface map package "
    b"range return select struct switch type var".split()
)
_LINE_END = re.compile(rb"([^\s])[ \t\r]*\n")
_WORD = re.compile(rb"[\w\x80-\xff]+\Z", re.ASCII)
_OPENERS = {b"{": b"}", b"(": b")", b"[": b"]"}
# Strings, comments and brackets. The unterminated forms come after the terminated ones.
_LEXEME = re.compile(
    rb'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|`[^`]*`|\'[^\'\\\n]*(?:\\.[^\'\\\n]*)*\'|//[^\n]*|/\*.*?\*/|(?P<open>["`\']|/\*)'
    rb"|(?P<newline>\n)|[{}()\[\]]",
    re.DOTALL,
)
_COMMENT = re.compile(rb"//.*|/\*.*?\*/", re.DOTALL)
_TOP_LEVEL = re.compile(rb"(?:func|type|var|const|import)\b")
_GROUP = re.compile(rb"\b(?:type|var|const|import)\s*\Z")
_STATEMENT_WORDS = re.compile(rb"\s*(?:if|for|switch|select|return|go|defer|goto|break|continue|else|case|range)\b")


@dataclass(frozen=True)
class SyntaxFault:
    """A syntax error: its category (one of CATEGORIES), its 1-based line, and a one-line message."""

    category: str
    line: int
    message: str

    def feedback(self) -> Feedback:
        return Feedback(syntax_ok=False, category=self.category, line=self.line, message=self.message)


@cache
def go_parser() -> "Parser":
    """Return tree-sitter's parser for Go.

    Raises:
        ImportError: tree-sitter or its Go grammar is not installed.
    """
    validate_extra("go", "reading Go source needs tree-sitter and tree-sitter-go", "tree_sitter", "tree_sitter_go")
    import tree_sitter
    import tree_sitter_go

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_go.language()))


def to_bytes(code: str) -> bytes:
    """Encode as UTF-8, and restore bytes that were decoded as surrogate escapes."""
    try:
        return code.encode()
    except UnicodeEncodeError:
        lone = re.search("[\\ud800-\\udc7f\\udd00-\\udfff]", code)  # surrogates that are not escaped bytes
        return code.encode("utf-8", "surrogatepass" if lone else "surrogateescape")


def parse(code: str | bytes) -> "Tree":
    """Return the syntax tree of a file or of declarations, with offsets into `code` in UTF-8."""
    return go_parser().parse(to_bytes(code) if isinstance(code, str) else code)


def walk(node: "Node") -> Iterator["Node"]:
    """Yield a node and its descendants in text order, without recursion, because code may nest deeply."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children))


def leaves(root: "Node") -> list["Node"]:
    """Return the tokens of a syntax tree in text order, without comments."""
    return [node for node in walk(root) if not node.children and node.text and node.type != "comment"]


def syntax_shape(code: str) -> list[tuple[str, int, bytes]]:
    """Return (kind, child count, leaf text) of each node in preorder, except comments and semicolons."""
    shape, stack = [], [parse(code).root_node]
    while stack:
        node = stack.pop()
        children = [child for child in node.children if child.type not in ("comment", ";", "\n")]
        shape.append((node.type, len(children), b"" if node.children else node.text))
        stack.extend(reversed(children))
    return shape


def first_fault(code: str | bytes) -> SyntaxFault | None:
    """Return the first syntax error in a file or in declarations, or None."""
    text = to_bytes(code) if isinstance(code, str) else code
    fault = _bad_bytes(text)
    if fault is not None:
        return fault
    if not text.endswith(b"\n"):  # unlike Go, the grammar requires a newline at the end of the file
        text += b"\n"
    root = parse(text).root_node
    if root.has_error:
        closed = _end_groups(text)
        if closed != text:
            text, root = closed, parse(closed).root_node
    if root.has_error:
        return _describe(text, _first_error(root))
    return _misplaced(root) or _inserted_semicolon(text, root)


def _line(text: bytes, offset: int) -> int:
    return text.count(b"\n", 0, offset) + 1


def _bad_bytes(text: bytes) -> SyntaxFault | None:
    at = text.find(b"\0")
    if at >= 0:
        return SyntaxFault("unexpected token", _line(text, at), "illegal character NUL")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return SyntaxFault("unexpected token", _line(text, error.start), "illegal UTF-8 encoding")
    return None


def _first_error(root: "Node") -> "Node":
    node = root
    while not (node.is_error or node.is_missing):
        below = next((child for child in node.children if child.has_error or child.is_missing), None)
        if below is None:
            break
        node = below
    return node


def _describe(text: bytes, node: "Node") -> SyntaxFault:
    """Return the syntax error at a tree-sitter node. The node has the error's location but rarely its category."""
    opened = _brackets(text)
    if opened is not None and opened.category == "unterminated literal":
        return opened
    line = node.start_point[0] + 1
    if node.is_missing:
        kind = node.type
        if kind in ("}", ")", "]"):
            return opened or SyntaxFault("missing closing", line, f"expected '{kind}'")
        if kind in (",", ";", "\n"):
            return SyntaxFault("missing comma or newline", line, f"expected {kind!r}")
        if kind.endswith("identifier"):
            return SyntaxFault("missing operand or type", line, "expected operand or type")
        return SyntaxFault("unexpected token", line, f"expected {kind}")
    if opened is not None:
        return opened
    found = text[node.start_byte : node.end_byte]
    word = found.split(None, 1)[0][:40].decode("utf-8", "replace") if found.strip() else "text"
    if node.parent is None or node.parent.type == "source_file":
        if _STATEMENT_WORDS.match(found):
            return SyntaxFault("misplaced statement", line, f"expected declaration, found {word}")
    return SyntaxFault("unexpected token", line, f"unexpected {word}")


def _brackets(text: bytes) -> SyntaxFault | None:
    """Find the first unterminated literal, unmatched bracket, or line that ends inside parentheses."""
    stack: list[tuple[bytes, str]] = []  # each opening bracket with the bracket that must close it
    line, code_end = 1, 0
    for match in _LEXEME.finditer(text):
        found = match[0]
        if match["open"]:
            what = {b"/*": "comment", b"'": "rune literal"}.get(found, "string literal")
            return SyntaxFault("unterminated literal", line, f"{what} not terminated")
        if match["newline"]:
            code = _COMMENT.sub(b"", text[code_end : match.start()]).rstrip()
            if stack and stack[-1][0] in b"([" and _ends_statement(code):
                return SyntaxFault("missing comma or newline", line, "unexpected newline")
            line, code_end = line + 1, match.end()
            if stack and _TOP_LEVEL.match(text, code_end):  # gofmt puts only declarations in column 0
                return SyntaxFault("missing closing", line, f"expected '{stack[-1][1]}' before this declaration")
        elif found in _OPENERS:
            group = found == b"(" and _GROUP.search(text[max(0, match.start() - 20) : match.start()])
            stack.append((b"group" if group else found, _OPENERS[found].decode()))
        elif found in (b"}", b")", b"]"):
            if not stack:
                return SyntaxFault("unexpected token", line, f"unexpected '{found.decode()}'")
            expected = stack.pop()[1]
            if found.decode() != expected:
                return SyntaxFault("missing closing", line, f"expected '{expected}', found '{found.decode()}'")
        else:
            line += found.count(b"\n")
    if stack:
        last = line - text.endswith(b"\n")
        return SyntaxFault("missing closing", last, f"expected '{stack[-1][1]}', found the end")
    return None


def _end_groups(text: bytes) -> bytes:
    """Insert a semicolon before the `)` of `const (a = 1)`, which tree-sitter-go requires and Go does not."""
    stack, parts, done = [], [], 0
    for match in _LEXEME.finditer(text):
        if match[0] == b"(":
            stack.append(_GROUP.search(text, max(0, match.start() - 20), match.start()))
        elif match[0] == b")" and stack and stack.pop():
            before = text[max(0, match.start() - 200) : match.start()].rstrip(b" \t\r")
            if before[-1:] not in (b"\n", b";", b"("):
                parts.append(text[done : match.start()])
                done = match.start()
    return b";".join([*parts, text[done:]])


def _ends_statement(code: bytes) -> bool:
    """Check whether Go inserts a semicolon after a line that ends in this code."""
    word = _WORD.search(code)
    if word is not None:
        return word[0] not in _KEYWORDS or word[0] in _ENDING_KEYWORDS
    return code.endswith((b")", b"]", b"}", b'"', b"`", b"'", b"++", b"--"))


def _misplaced(root: "Node") -> SyntaxFault | None:
    """Find a top-level node that is out of order: the package clause comes first, then imports, then declarations."""
    allowed = {"package_clause", "import_declaration"} | DECLARATIONS
    for node in root.children:
        if node.type == "comment" or node.type == ";" or node.start_byte == node.end_byte:
            continue
        line = node.start_point[0] + 1
        if node.type not in allowed:
            return SyntaxFault("misplaced statement", line, "non-declaration statement outside function body")
        allowed.discard("package_clause")
        if node.type in DECLARATIONS:
            allowed.discard("import_declaration")
    return None


def _inserted_semicolon(text: bytes, root: "Node") -> SyntaxFault | None:
    """Find a line end where Go inserts a semicolon that is not allowed there."""
    for match in _LINE_END.finditer(text):
        newline = match.end() - 1
        place = root.descendant_for_byte_range(newline, newline + 1)
        if place is None or _may_end(place, newline):
            continue
        last = _last_token(root, text, match.start())
        if last is not None and _ends_statement(text[last.start_byte : last.end_byte]):
            line, where = _line(text, newline), _COMMA_LISTS.get(place.type)
            if where:
                return SyntaxFault("missing comma or newline", line, f"missing ',' before newline in {where}")
            return SyntaxFault("unexpected token", line, "unexpected newline")
    return None


def _may_end(place: "Node", newline: int) -> bool:
    if place.type not in _LISTS:
        return False
    mark = _LISTS[place.type]
    return mark is None or any(child.type == mark and child.end_byte <= newline for child in place.children)


def _last_token(root: "Node", text: bytes, at: int) -> "Node | None":
    """Return the last token of a line, ignoring comments, given the offset of the line's last character."""
    while True:
        node = root.descendant_for_byte_range(at, at + 1)
        if node is None or node.type != "comment":
            return node
        start = text.rfind(b"\n", 0, node.start_byte) + 1
        before = text[start : node.start_byte].rstrip()
        if not before:
            return None
        at = start + len(before) - 1
