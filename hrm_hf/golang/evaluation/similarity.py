"""Compare Go code samples by exact match and by F1 of syntax subtrees, and detect shortened code.

Exact match compares samples after gofmt or, if gofmt is missing, their tokens without comments; the result names the
method. Subtree F1 counts the syntax subtrees (tree-sitter) that two samples share, without comments.

An empty function passes every syntax and type check. Where code is kept or rewarded for passing these checks,
`is_shortened` therefore compares its number of statements with that of a reference, or of the code it repairs. It
cannot detect wrong code with enough statements; only tests can.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..validators.go_validators import GoFormatter
from ..validators.syntax import leaves, parse, walk
from ..validators.toolchain import GoNotFoundError
from .metrics import f1_score


if TYPE_CHECKING:
    from tree_sitter import Node

KEPT_SHARE = 0.8  # minimum fraction of statements to keep; code that keeps less is considered shortened
FUNCTIONS = ("function_declaration", "method_declaration")
DECLARATIONS = ("short_var_declaration", "var_declaration", "const_declaration", "type_declaration")
NOT_COUNTED = ("empty_statement", "labeled_statement")  # node types not counted as statements
# Keywords that mark a statement. If tree-sitter cannot parse a statement, only its keyword remains in the tree.
WORDS = frozenset("break continue defer fallthrough for go goto if return select switch".split())


def exact_matches(samples: Sequence[str], references: Sequence[str]) -> tuple[list[bool], str]:
    """Return which samples equal their references, and how they were compared: "gofmt" or "tokens".

    Code that does not parse never matches.
    """
    if len(samples) != len(references):
        raise ValueError(f"{len(samples)} samples and {len(references)} references; pass one reference per sample")
    try:
        with GoFormatter() as formatter:
            both, how = formatter([*samples, *references]), "gofmt"
    except GoNotFoundError:
        both, how = [code_tokens(code) for code in (*samples, *references)], "tokens"
    return [a is not None and a == b for a, b in zip(both[: len(samples)], both[len(samples) :])], how


def code_tokens(code: str) -> tuple[str, ...] | None:
    """Return the tokens of a sample, except comments and line ends, or None if it does not parse."""
    root = parse(code).root_node
    if root.has_error:
        return None
    return tuple(node.text.decode("utf-8", "replace") for node in leaves(root) if node.text.strip())


def subtree_f1(code: str, reference: str) -> float:
    """Return the F1 score of the syntax subtrees of two programs, 2 |A and B| / (|A| + |B|), ignoring comments.

    A and B are multisets. The score is 1 if neither program has subtrees. A subtree consists of node types and the
    text of its leaves. A changed leaf changes every subtree above it, so one renamed variable in a long function costs
    more than its fraction of tokens.
    """
    ours, right = _subtrees(code), _subtrees(reference)
    score = f1_score((ours & right).total(), ours.total(), right.total())[2]
    return 1.0 if score is None else score


def _subtrees(code: str) -> Counter:
    """Count subtrees by digest, ignoring comments, leaves and the root."""
    found, digests, root = Counter(), {}, parse(code).root_node
    for node in reversed(list(walk(root))):  # children before their parents
        if node.type != "comment":
            parts = (digests[child.id] for child in node.children if child.id in digests)
            content = node.type.encode() + b"\0" + (b"".join(parts) if node.children else node.text)
            digests[node.id] = hashlib.blake2b(content, digest_size=16).digest()
            found[digests[node.id]] += bool(node.children) and node.id != root.id
    return +found


# ---- shortened code ----


def is_shortened(code: str, original: str) -> bool:
    """Check whether `code` has fewer than KEPT_SHARE times as many statements as `original`.

    `original` is the attempt that `code` repairs, or the reference.
    """
    wanted = statement_count(original)
    return wanted > 0 and statement_count(code) < KEPT_SHARE * wanted


def statement_count(code: str) -> int:
    """Count distinct statements in the first function with a body, or in the text if there is none.

    Nested statements count. Repeated statements count once, and `_ = x` does not count, so neither can pad a body.
    """
    root = parse(code).root_node
    function = next((n for n in root.children if n.type in FUNCTIONS and n.child_by_field_name("body")), None)
    start = root if function is None else function.child_by_field_name("body")
    # Compare statements by their tokens, so that layout does not matter.
    return len({b" ".join(leaf.text for leaf in leaves(node)) for node in walk(start) if _is_statement(node)})


def _is_statement(node: "Node") -> bool:
    if node.type in WORDS and not node.is_named:
        return node.parent is not None and node.parent.type == "ERROR"
    if node.type in NOT_COUNTED or not (node.type.endswith("_statement") or node.type in DECLARATIONS):
        return False
    left = node.child_by_field_name("left") if node.type == "assignment_statement" else None
    return left is None or left.text.strip() != b"_"
