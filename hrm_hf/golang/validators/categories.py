"""Which category (go_stream.CATEGORIES) a message of Go's parser, type checker or compiler belongs to.

The wording is that of go/parser, go/scanner, go/types and cmd/compile of Go 1.19 to 1.27; ten shapes of go/parser's
messages make up most of what corrupted code gives.
"""

import re


# In order: the first that matches counts.
_SYNTAX = (
    (r"not terminated|newline in (string|rune literal)|illegal rune literal|escape", "unterminated literal"),
    (r"found 'EOF'|unexpected EOF", "missing closing"),
    (r"found 'ILLEGAL'|illegal (character|UTF-8)", "unexpected token"),
    (r"missing ','|expected ';'|at end of statement|expected comma|after top level declaration",
     "missing comma or newline"),
    (r"non-declaration|expected (declaration|statement)|must appear before|else must be", "misplaced statement"),
    (r"expected '?(\}|\)|\])|unterminated", "missing closing"),
    (r"expect(ed|ing) (operand|type|.*expression)|missing (condition|variable|constant|parameter|type|return)"
     r"|mixed named and unnamed",
     "missing operand or type"),
    (r"expected|unexpected|illegal|invalid|must not|cannot", "unexpected token"),
)  # fmt: skip
_UNDEFINED = re.compile(r"undefined|undeclared name|not declared by package|could not import|is not in (std|GOROOT)")


def syntax_category(message: str) -> str:
    """Category of a message of go/parser or of the compiler's `syntax error: ...`."""
    return next((category for pattern, category in _SYNTAX if re.search(pattern, message)), "other")


def types_category(message: str) -> str:
    """Category of a message of go/types or of the compiler: "undefined name", or "mismatched types" for the rest."""
    return "undefined name" if _UNDEFINED.search(message) else "mismatched types"
