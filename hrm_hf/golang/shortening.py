"""Whether code got rid of what was asked for: the fewer statements there are, the less can be wrong with them.

Who deletes a function's body passes every check of syntax and types. Where code is kept or rewarded because a checker
passes it, `is_shortened` is therefore asked as well: it compares the statements of the function with those of the
code that it repairs, or of a reference. Code that is broken is read as far as tree-sitter can tell its parts.

Left out: meaning. Other statements, as many, pass here; tests are what tells them apart.
"""

from typing import TYPE_CHECKING

from .validators.syntax import leaves, parse, walk


if TYPE_CHECKING:
    from tree_sitter import Node

KEPT_SHARE = 0.8  # of the statements; with fewer a code is shortened
FUNCTIONS = ("function_declaration", "method_declaration")
DECLARATIONS = ("short_var_declaration", "var_declaration", "const_declaration", "type_declaration")
NOTHING = ("empty_statement", "labeled_statement")  # the statement behind a label counts by itself
# In a part that tree-sitter cannot read, the word alone is left of a statement.
WORDS = frozenset("break continue defer fallthrough for go goto if return select switch".split())


def is_shortened(code: str, than: str) -> bool:
    """Whether `code` has lost statements: none is left, or fewer than KEPT_SHARE of those of `than`.

    Args:
        code: a function, or a file that begins with it.
        than: the attempt that it repairs, or the reference. Without statements of its own it asks for none.
    """
    wanted = statement_count(than)
    return wanted > 0 and statement_count(code) < KEPT_SHARE * wanted


def statement_count(code: str) -> int:
    """Different statements of the first function that has a body; of the whole text where no function can be told.

    Nested statements count too. A statement that is written twice counts once, and `_ = x`, which does nothing, does
    not, so that a body cannot be filled up with either.
    """
    root = parse(code).root_node
    function = next((n for n in root.children if n.type in FUNCTIONS and n.child_by_field_name("body")), None)
    start = root if function is None else function.child_by_field_name("body")
    # By their tokens, so that layout makes no second one.
    return len({b" ".join(leaf.text for leaf in leaves(node)) for node in walk(start) if _is_statement(node)})


def _is_statement(node: "Node") -> bool:
    if node.type in WORDS and not node.is_named:
        return node.parent is not None and node.parent.type == "ERROR"
    if node.type in NOTHING or not (node.type.endswith("_statement") or node.type in DECLARATIONS):
        return False
    left = node.child_by_field_name("left") if node.type == "assignment_statement" else None
    return left is None or left.text.strip() != b"_"
