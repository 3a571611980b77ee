"""Derive the plan of a function from its doc comment and its body.

Doc comments describe code rather than plan it, so the intent comes from the task (ADD for writing, FIX for repairing),
and the first step is only the class of the verb. Steps from the body begin with "derived:".
"""

import re
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from tree_sitter import Node

MAX_STEPS = 5
MAX_SENTENCE_STEPS = 2  # maximum number of steps taken from the later sentences of a doc comment
MAX_STEP = 80  # characters
DERIVED = "derived: "
TASK_INTENTS = {
    "write": "ADD",
    "repair": "FIX",
    "rewrite": "UPDATE",
    "delete": "REMOVE",
    "restructure": "REFACTOR",
    "speed up": "OPTIMIZE",
    "keep": "PRESERVE",
}
# Verbs in doc comments, without the final "s", grouped by what the function does.
VERB_CLASSES = {
    "return": "return get give yield provide retrieve look lookup find fetch load",
    "check": "report is check test has determine verify validate ensure assert contain compare match can must",
    "set": "set assign update change modify adjust configure register mark enable disable replace reset init",
    "create": "create make new build construct allocate generate clone copy open start begin setup",
    "read": "read parse scan decode unmarshal consume receive accept extract split tokenize unquote",
    "write": "write print encode marshal emit format output send flush append dump log quote render store save record",
    "convert": "convert transform translate map cast turn rewrite expand normalize lower clean encode trim join",
    "remove": "remove delete drop clear close stop free release discard strip unlock shut cancel",
    "add": "add insert push put install include attach merge combine extend grow increment",
    "compute": "compute calculate evaluate estimate count sum hash measure multiply divide subtract size sort apply",
    "run": "run execute call invoke handle process visit walk iterate traverse wait serve dispatch perform try lock",
    "implement": "implement define satisfy represent describe wrap act use like work",
}
VERBS = {verb: name for name, verbs in VERB_CLASSES.items() for verb in verbs.split()}
# A sentence ends at a ., ! or ? before white space, except after a single capital or a common abbreviation.
SENTENCE_END = re.compile(r"(?<!\b[A-Z])(?<!\be\.g)(?<!\bi\.e)(?<!\betc)(?<!\bvs)(?<!\bcf)[.!?](?=\s)|\n[ \t]*\n")


def sentences(text: str, keep_layout: bool = False) -> list[str]:
    """Return the sentences of a doc comment. A sentence also ends at an empty line.

    Args:
        text: the comment without slashes.
        keep_layout: return only the first sentence and, if there is more text, the unchanged rest.
    """
    if keep_layout:
        end = SENTENCE_END.search(text)
        cut = end.end() if end else len(text)
        rest = text[cut:].lstrip(" ") if end else ""
        return [" ".join(text[:cut].split()), *([rest] if rest.strip() else [])]
    found, start = [], 0
    for end in SENTENCE_END.finditer(text):
        found.append(text[start : end.end()])
        start = end.end()
    return [" ".join(part.split()) for part in (*found, text[start:]) if part.strip()]


def verb_class(doc: str, name: str) -> str:
    """Return the class of the first known verb in a doc comment, or "do" if it has none.

    Go's doc comments begin with the function's name and a verb: "Grow grows the buffer".
    """
    words = re.findall(r"[A-Za-z]+", doc[:200].replace(f"{name} ", " ", 1) if doc.startswith(name) else doc[:200])
    for word in words[:6]:
        word = word.lower()
        for stem in (word, word.removesuffix("s"), word.removesuffix("es"), f"{word.removesuffix('ies')}y"):
            if stem in VERBS:
                return VERBS[stem]
    return "do"


def plan_of(task: str, targets: list[str], steps: list[str]) -> dict[str, Any]:
    """Return the plan for a task, with "kind:name" targets and at most `MAX_STEPS` short steps."""
    intent, target = TASK_INTENTS[task], targets[0] if targets else ""
    texts = [_short(step) for step in steps[:MAX_STEPS]]
    return {
        "intent": intent,
        "targets": targets,
        "steps": [{"intent": intent, "target": target, "text": text} for text in texts],
    }


def doc_plan(doc: str, name: str, targets: list[str], derived: list[str], task: str = "write") -> dict[str, Any]:
    """Return a declaration's plan: steps from the first verb and later sentences of `doc`, then from `derived`."""
    later = [part for part in sentences(doc)[1:] if len(part) > 3][:MAX_SENTENCE_STEPS]
    remaining = MAX_STEPS - 1 - len(later)
    return plan_of(task, targets, [verb_class(doc, name), *later, *derived[:remaining]])


def _short(text: str) -> str:
    text = " ".join(text.split())
    if len(text) <= MAX_STEP:
        return text
    return text[:MAX_STEP].rsplit(" ", 1)[0]


def derived_steps(body: "Node") -> list[str]:
    """Return distinct steps for a function's top-level statements, such as "derived: loop over range x"."""
    found: dict[str, None] = {}
    block = next((node for node in body.named_children if node.type == "statement_list"), body)
    for statement in block.named_children:
        step = _step(statement)
        if step:
            found.setdefault(_short(f"{DERIVED}{step}"))
    return list(found)


def _step(statement: "Node") -> str | None:
    kind = statement.type
    if kind == "for_statement":
        clause = next((node for node in statement.named_children if node.type != "block"), None)
        inner = None if clause is None else clause.child_by_field_name("right")
        if inner is not None:
            return f"loop over {_text(inner)}"
        whole = clause is None or clause.type != "for_clause"
        condition = clause if whole else clause.child_by_field_name("condition") or clause
        return "loop" if condition is None else f"loop while {_text(condition)}"
    if kind == "if_statement":
        return f"if {_text(statement.child_by_field_name('condition'))}"
    if kind == "expression_switch_statement":
        value = statement.child_by_field_name("value")
        return "switch" if value is None else f"switch on {_text(value)}"
    if kind == "type_switch_statement":
        return f"switch on the type of {_text(statement.child_by_field_name('value'))}"
    if kind == "select_statement":
        return "select"
    if kind == "return_statement":
        return f"return {_text(statement.named_children[0])}" if statement.named_children else "return"
    if kind in ("defer_statement", "go_statement"):
        called = _called(statement)
        return f"{kind.removesuffix('_statement')} {called}" if called else None
    if kind in ("expression_statement", "short_var_declaration", "assignment_statement"):
        called = _called(statement)
        return f"call {called}" if called else None
    return None


def _called(node: "Node") -> str | None:
    """Return the name of the first function called in a statement, outside of function literals."""
    if node.type == "call_expression":
        function = node.child_by_field_name("function")
        return "a function literal" if function.type == "func_literal" else _text(function)
    if node.type == "func_literal":
        return None
    return next(filter(None, map(_called, node.named_children)), None)


def _text(node: "Node") -> str:
    """Return the text of a node, with "{}" in place of any braces and their content."""
    return re.sub(r"\{.*\}", "{}", node.text.decode(), flags=re.DOTALL)
