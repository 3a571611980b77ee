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


# Classes of errors that people know, for reports; the ids of `CATEGORIES` are a model's.
_CLASSES = (
    (r"imported and not used|imported but not used", "unused import"),
    (r"declared (and|but) not used", "unused variable"),
    (r"not enough return values|too many return values|missing return|too many arguments to return"
     r"|not enough arguments to return|wrong result count|no result values expected",
     "return count"),
)  # fmt: skip
ERROR_CLASSES = ("syntax", "undeclared name", "unused import", "unused variable", "return count", "types", "other")


def error_class(syntax_ok: bool | None, types_ok: bool | None, category: str, message: str) -> str:
    """One of ERROR_CLASSES for what a validator says of a code that it does not pass."""
    if syntax_ok is False:
        return "syntax"
    if types_ok is not False:
        return "other"
    if category == "undefined name":
        return "undeclared name"
    return next((name for pattern, name in _CLASSES if re.search(pattern, message)), "types")


def syntax_category(message: str) -> str:
    """Category of a message of go/parser or of the compiler's `syntax error: ...`."""
    return next((category for pattern, category in _SYNTAX if re.search(pattern, message)), "other")


def types_category(message: str) -> str:
    """Category of a message of go/types or of the compiler: "undefined name", or "mismatched types" for the rest."""
    return "undefined name" if _UNDEFINED.search(message) else "mismatched types"
