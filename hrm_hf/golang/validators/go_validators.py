"""The validators and the formatter that ask Go itself, through the resident checker."""

import base64
from collections.abc import Sequence
from typing import Any

from ...models.processing_hrm_go_coder import Feedback
from .categories import syntax_category, types_category
from .checker_process import CheckerProcess
from .toolchain import GoNotFoundError
from .tree_sitter_validator import MAX_BYTES, TreeSitterValidator, too_long


class _CheckerValidator:
    """The base of the two validators: a checker process, and feedback made of its answers."""

    title: str
    _mode: str

    def __init__(self, max_bytes: int, seconds: float):
        self.max_bytes = max_bytes
        self.checker = CheckerProcess(seconds)

    def __call__(self, codes: Sequence[str]) -> list[Feedback]:
        found = [too_long(code, self.max_bytes) for code in codes]
        asked = [index for index, feedback in enumerate(found) if feedback is None]
        answers = self.checker.ask(self._mode, [codes[index] for index in asked], **self._options())
        for index, answer in zip(asked, answers):
            found[index] = to_feedback(answer)
        return found

    def _options(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Ends the checker process; the next call starts another."""
        self.checker.close()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()


class GoParserValidator(_CheckerValidator):
    """Says whether code parses, by go/parser: the same errors, with the same words, as `gofmt -e`.

    `types_ok` and `tests_pass` stay None.

    Args:
        max_bytes: codes longer than this are not looked at (all flags None, category "other").
        seconds: most time for one code; then all flags are None and the message says so.

    Raises:
        GoNotFoundError: there is no Go toolchain, or it cannot build the checker.
    """

    title = "go/parser"
    _mode = "parse"

    def __init__(self, max_bytes: int = MAX_BYTES, seconds: float = 60.0):
        super().__init__(max_bytes, seconds)


class GoTypesValidator(_CheckerValidator):
    """Says whether code parses and type-checks, by go/types with the sources of the standard library.

    A code is checked as a package of its own: names that other files of its package declare are undefined. Unused
    variables and imports are errors, as for the compiler. Code that imports what is not in the standard library is
    parsed only (`types_ok` None, the message names the import). `tests_pass` stays None.

    Args:
        auto_import: packages of the standard library that are used but not imported count as imported, as functions
            mostly come without their file's imports. Of namesakes the one that has the names used is taken.
        max_bytes: codes longer than this are not looked at (all flags None, category "other").
        seconds: most time for one code; then all flags are None and the message says so.

    Raises:
        GoNotFoundError: there is no Go toolchain, or it cannot build the checker.
    """

    title = "go/types"
    _mode = "types"

    def __init__(self, auto_import: bool = True, max_bytes: int = MAX_BYTES, seconds: float = 60.0):
        super().__init__(max_bytes, seconds)
        self.auto_import = auto_import

    def _options(self) -> dict[str, Any]:
        return {"auto_import": self.auto_import}


class GoFormatter:
    """Go source as gofmt writes it, and the imports it lacks.

    Raises:
        GoNotFoundError: there is no Go toolchain, or it cannot build the checker.
    """

    def __init__(self, seconds: float = 60.0):
        self.checker = CheckerProcess(seconds)

    def __call__(self, codes: Sequence[str]) -> list[str | None]:
        """Each code (a file or declarations) as gofmt writes it, white space at its ends removed.

        None for code that does not parse, so that an exact match is never one of two broken codes.
        """
        answers = self.checker.ask("format", codes)
        return [_text(answer).strip() if answer.get("syntax") else None for answer in answers]

    def with_imports(self, codes: Sequence[str], package: str = "main") -> list[str | None]:
        """Each code as a file that lacks no import and has none too many, with the lines that it had.

        Code without a package clause gets one; standard packages that are used but not imported are imported on the
        line of that clause; imports that nothing uses become blank (`_ "math"`). None for code that does not parse.
        """
        answers = self.checker.ask("imports", codes, package=package, auto_import=True)
        return [_text(answer) if answer.get("syntax") else None for answer in answers]

    def close(self) -> None:
        """Ends the checker process; the next call starts another."""
        self.checker.close()

    def __enter__(self) -> "GoFormatter":
        return self

    def __exit__(self, *_) -> None:
        self.close()


VALIDATORS = {"tree-sitter": TreeSitterValidator, "parser": GoParserValidator, "types": GoTypesValidator}
VALIDATOR_CHOICES = ("auto", *VALIDATORS)


def best_validator(kind: str = "auto") -> TreeSitterValidator | GoParserValidator | GoTypesValidator:
    """A validator of `VALIDATORS`; "auto" is "parser" where Go is, else "tree-sitter".

    Types are never looked at unasked: a function that was cut out of a package uses names that are not there.

    Raises:
        ValueError: an unknown kind.
        GoNotFoundError: "parser" or "types" without Go.
    """
    if kind not in VALIDATOR_CHOICES:
        raise ValueError(f"validator kind={kind!r} is not one of {', '.join(VALIDATOR_CHOICES)}")
    if kind != "auto":
        return VALIDATORS[kind]()
    try:
        return GoParserValidator()
    except GoNotFoundError:
        return TreeSitterValidator()


def to_feedback(answer: dict[str, Any]) -> Feedback:
    """Converts an answer of the checker to feedback."""
    if "failure" in answer:
        return Feedback(category="other", message=f"not checked: {answer['failure']}")
    syntax, types, message = answer["syntax"], answer["types"], answer["message"].split("\n")[0]
    category = "none"
    if syntax is False:
        category = syntax_category(message)
    elif types is False:
        category = types_category(message)
    elif message:
        category = "other"
    return Feedback(syntax_ok=syntax, types_ok=types, category=category, line=answer["line"] or None, message=message)


def _text(answer: dict[str, Any]) -> str:
    return base64.b64decode(answer.get("text", "")).decode()
