"""The validator that needs no Go toolchain: syntax only, by tree-sitter."""

from collections.abc import Sequence

from ...models.processing_hrm_go_coder import Feedback
from .syntax import first_fault, go_parser, to_bytes


MAX_BYTES = 1 << 20  # of one code; what is longer is not looked at


def too_long(code: str, max_bytes: int) -> Feedback | None:
    """The feedback for a code that is too long to be looked at."""
    size = len(code) if len(code) > max_bytes else len(to_bytes(code))
    if size <= max_bytes:
        return None
    return Feedback(category="other", message=f"not checked: the code is longer than {max_bytes} bytes")


class TreeSitterValidator:
    """Says whether code parses; `types_ok` and `tests_pass` stay None.

    Against gofmt it has no false alarm and misses a few errors in a hundred; the line is that where the grammar was
    left, which is not always the one gofmt names. See benchmarks/golang/validators.py.

    Args:
        max_bytes: codes longer than this are not looked at (all flags None, category "other").

    Raises:
        ImportError: tree-sitter is not installed.
    """

    title = "tree-sitter"

    def __init__(self, max_bytes: int = MAX_BYTES):
        go_parser()
        self.max_bytes = max_bytes

    def __call__(self, codes: Sequence[str]) -> list[Feedback]:
        return [self._one(code) for code in codes]

    def _one(self, code: str) -> Feedback:
        refused = too_long(code, self.max_bytes)
        if refused is not None:
            return refused
        fault = first_fault(code)
        return Feedback(syntax_ok=True) if fault is None else fault.feedback()

    def close(self) -> None:
        """Nothing to close; all validators have it."""

    def __enter__(self) -> "TreeSitterValidator":
        return self

    def __exit__(self, *_) -> None:
        self.close()
