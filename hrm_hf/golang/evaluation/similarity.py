"""Compare two Go code samples: equal after gofmt, or how many syntax subtrees they share.

Exact match is of whole codes after gofmt; without gofmt it is of their tokens without comments, and the result says
which it was. Subtree F1 counts the syntax subtrees (tree-sitter) that two codes share, comments apart; it is a measure
of its own and never makes an exact match. Behaviour is not compared here.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence

from ..validators.go_validators import GoFormatter
from ..validators.syntax import leaves, parse
from ..validators.toolchain import GoNotFoundError
from .metrics import f1_score


def exact_matches(codes: Sequence[str], references: Sequence[str]) -> tuple[list[bool], str]:
    """Return which samples equal their references, and after what: "gofmt", or "tokens" without gofmt.

    Code that does not parse equals nothing. Where only tokens are compared, comments and the layout say nothing.
    """
    if len(codes) != len(references):
        raise ValueError(f"{len(codes)} codes and {len(references)} references; expected one reference for each code")
    try:
        with GoFormatter() as formatter:
            both, how = formatter([*codes, *references]), "gofmt"
    except GoNotFoundError:
        both, how = [code_tokens(code) for code in (*codes, *references)], "tokens"
    return [a is not None and a == b for a, b in zip(both[: len(codes)], both[len(codes) :])], how


def code_tokens(code: str) -> tuple[str, ...] | None:
    """Return the tokens of a sample without comments and line ends; None if it does not parse."""
    root = parse(code).root_node
    if root.has_error:
        return None
    return tuple(node.text.decode("utf-8", "replace") for node in leaves(root) if node.text.strip())


def subtree_f1(code: str, reference: str) -> float:
    """Return 2 |A and B| / (|A| + |B|) of the multisets of syntax subtrees without comments; 1 if there are none.

    A subtree is its node types and the text of its leaves. A changed leaf changes every subtree above it, so that one
    renamed variable in a long function costs more than its share of the tokens.
    """
    ours, right = _subtrees(code), _subtrees(reference)
    score = f1_score((ours & right).total(), ours.total(), right.total())[2]
    return 1.0 if score is None else score


def _subtrees(code: str) -> Counter:
    """Count the digests of all subtrees with children, except the root."""
    found, done, stack = Counter(), {}, [(parse(code).root_node, False)]
    root = stack[0][0].id
    while stack:
        node, visited = stack.pop()
        if node.type == "comment":
            continue
        if node.children and not visited:
            stack.append((node, True))
            stack.extend((child, False) for child in node.children)
            continue
        parts = [done[child.id] for child in node.children if child.id in done]
        content = b"".join(parts) if node.children else node.text
        done[node.id] = hashlib.blake2b(node.type.encode() + b"\0" + content, digest_size=16).digest()
        if node.children and node.id != root:
            found[done[node.id]] += 1
    return found
