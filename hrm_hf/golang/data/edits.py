"""Build a record from a changed file: the old function, the author's message, and the new code.

Commits, pull requests and edit data sets from the Hub share this module. It accepts or rejects paths, finds the
changed function, and derives the plan from the verb in the subject. Edits to several functions, or to declarations
outside functions, are dropped, because a record describes a change to one function.
"""

import difflib
import re
from dataclasses import dataclass
from typing import Any

from ..validators.syntax import syntax_shape
from .functions import Declaration, declarations, parse_file, text_of
from .plans import TASK_INTENTS, plan_of
from .records import new_record
from .sources import GENERATED, MAX_BYTES, MAX_LINE, SKIPPED_FOLDERS, Dropped


MAX_CHANGED_LINES = 40  # maximum number of removed plus added lines
GENERATED_NAMES = re.compile(r"(\.pb(\.gw)?|_generated|\.gen|_gen|_string|bindata)\.go$|(^|/)zz_generated[^/]*$")
IGNORED = ("comment", "import_declaration", ";", "\n")

# The verb in a commit's subject determines the intent. These are base forms; `_verb` reduces other forms to them.
VERBS = {
    "FIX": "fix bugfix hotfix correct repair resolve prevent avoid handle ensure guard restore protect patch",
    "ADD": "add introduce implement support create allow enable expose provide feat feature export include teach",
    "REFACTOR": "refactor rename move extract split clean cleanup simplify restructure reorganize tidy inline "
    "deduplicate rewrite reuse consolidate unify rework factor merge style",
    "OPTIMIZE": "optimize optimise speed perf reduce cache accelerate preallocate",
    "UPDATE": "update change bump upgrade use make set improve replace switch adjust tweak modify increase decrease "
    "convert migrate let return pass check revert",
    "REMOVE": "remove delete drop strip eliminate disable deprecate",
}
TASKS = {intent: task for task, intent in TASK_INTENTS.items()}
INTENT_OF_VERB = {verb: intent for intent, verbs in VERBS.items() for verb in verbs.split()}
# `fix(parser)!: text` and `net/http: text`
CONVENTIONAL = re.compile(r"^(\w+)(\([^)]*\))?!?:\s+")
PACKAGE_PREFIX = re.compile(r"^[\w./*{},\- ]{1,60}:\s+")
PULL_NUMBER = re.compile(r"\s*\((?:#|GH-)\d+\)\s*$")
TRAILER = re.compile(
    r"^\s*([\w-]+-by|change-id|reviewed-on|cc|git-svn-id|see-also|(fix(es|ed)?|close[sd]?|resolve[sd]?|updates?|refs?)"
    r":?\s+(#|gh-|https?:|[\w./-]+#)).*$",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])|\n\s*[-*+]\s+|\n\s*\n")


@dataclass(frozen=True)
class Edit:
    """A change to one file.

    Attributes:
        id: id of the record.
        source: kind of source: "git", "commitpackft", ...
        license: SPDX name or "unknown".
        group: repository; all its records are in one split.
        path: path of the file in its repository.
        before, after: complete text of the file; before is "" for a new file.
        title, body: the author's message; the body may be empty.
    """

    id: str
    source: str
    license: str
    group: str
    path: str
    before: str
    after: str
    title: str
    body: str = ""


def path_problem(path: str) -> str | None:
    """Return the reason to exclude a file with this path in its repository (forward slashes), or None."""
    if not path.endswith(".go"):
        return "not a .go file"
    if set(path.split("/")[:-1]) & set(SKIPPED_FOLDERS):
        return "vendor or testdata"
    if GENERATED_NAMES.search(path):
        return "generated"
    return "test file" if path.endswith("_test.go") else None


def text_problem(*texts: str) -> str | None:
    """Return why texts are excluded (size, long lines, invalid characters), or None if they are not."""
    for text in texts:
        if len(text) > MAX_BYTES:
            return f"more than {MAX_BYTES} characters"
        if "\0" in text or text.encode(errors="replace").decode() != text:
            return "NUL character or half a surrogate pair"
        if any(len(line) > MAX_LINE for line in text.split("\n")):
            return f"line of more than {MAX_LINE} characters"
    return None


def edit_record(edit: Edit, dropped: Dropped) -> dict[str, Any] | None:
    """Return the record for an edit. If the edit is dropped, count the reason and return None.

    `context.before` is the function before the edit, and `solution` the function after it. `code_prefix` is the
    signature if the edit does not change it, else empty.
    """
    found = _changed_function(edit)
    if isinstance(found, str):
        dropped.add(found, edit.id)
        return None
    before, after = found
    same_signature = before is None or before.prefix == after.prefix
    return new_record(
        edit.id,
        source=edit.source,
        license=edit.license,
        group=edit.group,
        title=edit.title,
        body=edit.body,
        context={"path": edit.path, "before": before.code if before else ""},
        plan=edit_plan(edit.title, edit.body, after.target),
        code_prefix=after.prefix if same_signature else "",
        code=after.code,
    )


def edit_plan(title: str, body: str, target: str) -> dict[str, Any]:
    """Return the plan for an edit: the title, then sentences from the body that begin with a known verb."""
    sentences = [" ".join(part.split()).strip(" -*+") for part in SENTENCE_END.split(f"\n{body}")]
    steps = [plain_subject(title), *(text for text in sentences if _verb(text.partition(" ")[0]))]
    return plan_of(TASKS[intent_of_subject(title)], [target] if target else [], steps)


def intent_of_subject(subject: str) -> str:
    """Return the intent of a commit from its subject: its type (`fix(x): text`), its first known verb, or UPDATE."""
    typed = CONVENTIONAL.match(subject)
    verb = _verb(typed[1]) if typed else None
    verbs = [verb] if verb else [_verb(word) for word in re.findall(r"[A-Za-z]+", plain_subject(subject))]
    return next((INTENT_OF_VERB[verb] for verb in verbs if verb), "UPDATE")


def plain_subject(subject: str) -> str:
    """Remove leading `[tags]`, `type(scope):` or `package:` and trailing `(#123)` from a commit subject."""
    text = PULL_NUMBER.sub("", re.sub(r"^(\[[^\]]*\]\s*)+", "", subject.strip()))
    shorter = CONVENTIONAL.sub("", text)
    return shorter if shorter != text else PACKAGE_PREFIX.sub("", text)


def without_trailers(message: str) -> str:
    """Remove sign-off, review-link and issue-reference lines from a message body."""
    kept = [line.rstrip() for line in message.splitlines() if not TRAILER.match(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def functions_of(text: str) -> tuple[dict[str, Declaration], list[Any]] | None:
    """Return {name: function} for functions with a body, and the `syntax_shape` of every other declaration.

    Returns None if the text does not parse. Functions with the same name are numbered: "init", "init#2".
    """
    root = parse_file(text)
    if root.has_error:
        return None
    functions: dict[str, Declaration] = {}
    for function in declarations(root):
        if function.body is not None:
            name, number = function.qualified_name, 2
            while name in functions:
                name, number = f"{function.qualified_name}#{number}", number + 1
            functions[name] = function
    others = [node for node in root.children if node.type not in IGNORED and node.child_by_field_name("body") is None]
    return functions, [syntax_shape(text_of(node)) for node in others]


def _changed_function(edit: Edit) -> tuple[Declaration | None, Declaration] | str:
    """Return the one function that an edit changes, as (before or None, after), or the reason to drop the edit."""
    reason = text_problem(edit.before, edit.after, edit.title, edit.body)
    if reason:
        return reason
    if GENERATED.search(edit.before[:5000]) or GENERATED.search(edit.after[:5000]):
        return "generated"
    if not edit.title.strip():
        return "no subject"
    if not edit.after.strip():
        return "file emptied or removed"
    before, after = functions_of(edit.before), functions_of(edit.after)
    if before is None or after is None:
        return "does not parse before" if before is None else "does not parse after"
    (old, old_rest), (new, new_rest) = before, after
    changed = [name for name in {**old, **new} if name not in old or name not in new or _differ(old[name], new[name])]
    if not changed:
        return "no function changed" if old_rest != new_rest else "only comments, imports or layout changed"
    if len(changed) > 1:
        return "more than one function changed"
    if old_rest != new_rest:
        return "declarations changed outside the function"
    name = changed[0]
    if name not in new:
        return "function removed"
    lines = difflib.ndiff(*(each[name].code.splitlines() for each in (old, new))) if name in old else ()
    if sum(line[:1] in "+-" for line in lines) > MAX_CHANGED_LINES:
        return f"more than {MAX_CHANGED_LINES} changed lines"
    return old.get(name), new[name]


def _differ(old: Declaration, new: Declaration) -> bool:
    return old.code != new.code and syntax_shape(old.code) != syntax_shape(new.code)


def _verb(word: str) -> str | None:
    """Return the base form of an inflected verb ("fixes", "added", "removing"), or None if unknown."""
    word = word.lower().rstrip(":,.")
    forms = [word]
    for ending in ("s", "es", "d", "ed", "ing"):
        if word.endswith(ending):
            stem = word[: -len(ending)]
            forms += [stem, stem + "e", stem[:-1] if stem[-1:] == stem[-2:-1] else stem]
    return next((form for form in forms if form in INTENT_OF_VERB), None)
