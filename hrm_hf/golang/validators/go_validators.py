"""Validators for Go code (tree-sitter, Go's parser, Go's type checker), and gofmt.

A validator is called with code samples and returns a `Feedback` for each. The category of a message (`CATEGORIES`)
follows from its wording in go/parser, go/scanner, go/types and cmd/compile of Go 1.19 to 1.27.
"""

import base64
import re
from collections.abc import Sequence
from typing import Any, get_args

from ...models.processing_hrm_go_coder import Feedback
from ..options import GoValidator
from .syntax import first_fault, go_parser
from .toolchain import CheckerProcess, GoNotFoundError, UsesChecker


# The first matching pattern gives the category.
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


class TreeSitterValidator(UsesChecker):
    """Validator that checks whether code parses with tree-sitter. `types_ok` and `tests_pass` stay None.

    Compared to gofmt, it has no false alarms, misses a few percent of errors, and may report a different line (see
    benchmarks/golang/validators.py). Raises ImportError if tree-sitter is not installed.
    """

    title = "tree-sitter"

    def __init__(self):
        go_parser()

    def __call__(self, samples: Sequence[str]) -> list[Feedback]:
        faults = map(first_fault, samples)
        return [Feedback(syntax_ok=True) if fault is None else fault.feedback() for fault in faults]


class GoParserValidator(UsesChecker):
    """Validator that checks whether code parses with go/parser. Its messages match `gofmt -e`.

    `types_ok` and `tests_pass` stay None. Without an answer in 60 s, all flags are None and the message says so.

    Raises:
        GoNotFoundError: there is no Go toolchain, or it cannot build the checker.
    """

    title = "go/parser"
    _mode = "parse"

    def __init__(self):
        self.checker = CheckerProcess()

    def __call__(self, samples: Sequence[str]) -> list[Feedback]:
        return [_feedback(answer) for answer in self.checker.ask(self._mode, samples)]


class GoTypesValidator(GoParserValidator):
    """Validator that parses and type-checks code with go/types and the standard library's sources.

    Each code sample is checked as a separate package: names declared in other files of its package are undefined.
    Unused variables and imports are errors. Standard library packages that are used but not imported count as
    imported; among packages with the same name, the one with the used names is chosen. Code that imports other
    packages is only parsed (`types_ok` is None, and the message names the import). `tests_pass` stays None.
    """

    title = "go/types"
    _mode = "types"


class GoFormatter(UsesChecker):
    """Formatter that works like gofmt. Raises GoNotFoundError if no Go toolchain can build the checker."""

    def __init__(self):
        self.checker = CheckerProcess()

    def __call__(self, samples: Sequence[str]) -> list[str | None]:
        """Return each sample formatted by gofmt and stripped, or None if it does not parse."""
        answers = self.checker.ask("format", samples)
        return [
            base64.b64decode(answer["text"]).decode().strip() if answer.get("syntax") else None for answer in answers
        ]


VALIDATORS = {"tree-sitter": TreeSitterValidator, "parser": GoParserValidator, "types": GoTypesValidator}
VALIDATOR_CHOICES = get_args(GoValidator)


def best_validator(kind: str = "auto") -> TreeSitterValidator | GoParserValidator:
    """Return the validator called `kind`. "auto" selects "parser" if Go is installed, else "tree-sitter".

    "auto" never checks types, because a function without the rest of its package may use undefined names.

    Raises:
        ValueError: unknown kind.
        GoNotFoundError: `kind` is "parser" or "types", and Go is not installed.
    """
    if kind not in VALIDATOR_CHOICES:
        raise ValueError(f"kind={kind!r}: unknown validator; must be one of {', '.join(VALIDATOR_CHOICES)}")
    if kind != "auto":
        return VALIDATORS[kind]()
    try:
        return GoParserValidator()
    except GoNotFoundError:
        return TreeSitterValidator()


def syntax_category(message: str) -> str:
    """Return the category of a message from go/parser or a `syntax error: ...` from the compiler."""
    return next((category for pattern, category in _SYNTAX if re.search(pattern, message)), "other")


def types_category(message: str) -> str:
    """Categorize a type error from go/types or the compiler: "undefined name" or "mismatched types"."""
    return "undefined name" if _UNDEFINED.search(message) else "mismatched types"


def _feedback(answer: dict[str, Any]) -> Feedback:
    """Convert the checker's answer for a code sample to feedback."""
    if "failure" in answer:
        return Feedback(category="other", message=f"not checked: {answer['failure']}")
    syntax, types, message = answer["syntax"], answer["types"], answer["message"].split("\n")[0]
    category = "other" if message else "none"
    if syntax is False:
        category = syntax_category(message)
    elif types is False:
        category = types_category(message)
    return Feedback(syntax_ok=syntax, types_ok=types, category=category, line=answer["line"] or None, message=message)
