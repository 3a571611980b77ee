"""Records from Go source trees: one for each documented function.

The doc comment is the problem (its first sentence is the title), the signature up to its "{" is the code prefix, and
the function is the solution. Parsing uses tree-sitter and needs no Go installation. Functions that are short, do not
parse, or lack a body or doc comment are dropped and counted. `selection.py` removes duplicates and makes splits.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...hub.licenses import UNKNOWN_LICENSE, license_of
from ..validators.syntax import parse
from .plans import derived_steps, doc_plan, sentences
from .records import new_record
from .sources import Dropped, GoFile, go_files, license_of_header


if TYPE_CHECKING:
    from tree_sitter import Node

MIN_DOC_CHARACTERS, MIN_BODY_LINES = 20, 2
MAX_TYPE = 20_000  # maximum characters of a receiver's type, which is repeated in the context of each method
DIRECTIVE = re.compile(r"//(go:|line |export |[a-z0-9]+:[a-z0-9])")  # directives for tools are not documentation


def function_records(
    root: str | Path, dropped: Dropped | None = None, split_by: str = "package"
) -> Iterator[dict[str, Any]]:
    """Yield records from a source tree, one for each documented function and method.

    The context is the package clause and the type of a method's receiver. The license comes from the nearest
    LICENSE file, else from the file's header.

    Args:
        root: folder with Go files, or a file.
        dropped: counts functions and files without a record.
        split_by: what forms a group: "package", or "repository" (the module).
    """
    dropped = dropped or Dropped()
    source, tree_license = source_name(root), license_of(root)
    for folder, files in groupby(go_files(root, dropped), key=lambda file: file.path.parent):
        nearest = license_of(folder, levels=0)
        known = nearest if nearest != UNKNOWN_LICENSE else tree_license
        parsed = [(file, parse_file(file.text)) for file in files]
        declared = _types_of_package(parsed)
        for file, tree in parsed:
            clause = [text_of(node) for node in tree.named_children if node.type == "package_clause"]
            shared = {
                "source": source,
                "license": known if known != UNKNOWN_LICENSE else license_of_header(file.text),
                "group": file.package if split_by == "package" else file.module,
            }
            for part in declarations(tree):
                if reason := part.problem():
                    dropped.add(reason, f"{file.name}:{part.line}")
                else:
                    yield documented_record(
                        f"{file.package}/{file.path.name}:{part.line}:{part.qualified_name}",
                        part,
                        context={"path": file.name, "before": _before(clause, part, declared)},
                        **shared,
                    )


def source_name(root: str | Path) -> str:
    """Return the Go version ("go1.19.8") if the tree is from an installation, else the folder name."""
    root = Path(root).expanduser()
    above = root.resolve().parent
    # An installation has a file VERSION next to src. On Debian, src is a link to, for example, /usr/share/go-1.19/src;
    # VERSION is next to the link or, if root is the target of the link, in /usr/lib/go-1.19.
    for place in (root.absolute().parent, above, Path("/usr/lib", above.name)):
        version = place / "VERSION"
        if version.is_file() and (first := version.read_text(encoding="utf-8", errors="replace").split()):
            if first[0].startswith("go1"):
                return first[0]
    return root.resolve().name


def documented_record(id: str, part: "Declaration", **shared: Any) -> dict[str, Any]:
    """Return the record for a documented declaration. `shared` is passed on to `new_record`."""
    title, *rest = sentences(part.doc, keep_layout=True)
    return new_record(
        id,
        title=title,
        body="".join(rest).strip("\n"),
        plan=doc_plan(part.doc, part.name, [part.target], derived_steps(part.body) if part.body else []),
        code_prefix=part.prefix,
        code=part.code,
        **shared,
    )


# ---- parsing ----


def parse_file(code: str) -> "Node":
    """Return the root node of the syntax tree. Raises ImportError if tree-sitter is not installed."""
    return parse(code).root_node


class Declaration:
    """A function or method in a file, with its doc comment.

    Attributes:
        doc: the comment's text without slashes and tool directives.
        name, qualified_name: "Grow", "Builder.Grow".
        target: "kind:name", as in a plan.
        code, prefix: the complete declaration, and its text up to the opening brace of the body.
        body: block of the function; None for a function without one.
        line: line number, from 1.
        receiver: name of the receiver's type, "" if there is none.
    """

    def __init__(self, node: "Node", doc: str):
        self.node, self.doc = node, doc
        self.line = node.start_point[0] + 1
        self.broken = node.has_error
        self.code = text_of(node)
        self.name = text_of(node.child_by_field_name("name"))
        self.receiver = receiver_type(node)
        self.qualified_name = f"{self.receiver}.{self.name}" if self.receiver else self.name
        self.target = f"{'method' if self.receiver else 'func'}:{self.qualified_name}"
        self.body = node.child_by_field_name("body")
        opened = self.body.start_byte + 1 - node.start_byte if self.body else None
        self.prefix = node.text[:opened].decode()

    def problem(self) -> str | None:
        """Return the reason to drop the function, or None."""
        if self.broken:
            return "syntax error"
        if self.code == self.prefix:
            return "no body"
        if not self.doc:
            return "no doc comment"
        if len(self.doc) < MIN_DOC_CHARACTERS:
            return f"doc comment below {MIN_DOC_CHARACTERS} characters"
        inside = self.code[len(self.prefix) :].rstrip().removesuffix("}")
        if sum(1 for line in inside.split("\n") if line.strip()) < MIN_BODY_LINES:
            return f"fewer than {MIN_BODY_LINES} body lines"
        return None


def declarations(root: "Node") -> Iterator[Declaration]:
    """Yield functions and methods in file order."""
    comments: list[Node] = []
    last_line = -1  # last line of the previous declaration; a comment on that line belongs to that declaration
    for node in root.children:
        if node.type == "comment":
            if node.start_point[0] == last_line:
                continue
            if comments and node.start_point[0] > comments[-1].end_point[0] + 1:
                comments = []
            comments.append(node)
            continue
        if node.type in ("function_declaration", "method_declaration"):
            attached = comments and comments[-1].end_point[0] + 1 == node.start_point[0]
            yield Declaration(node, comment_text(comments) if attached else "")
        if node.is_named:
            comments, last_line = [], node.end_point[0]


def comment_text(comments: list["Node"]) -> str:
    """Return comment text as `go doc` shows it: no slashes, directives, or blank lines at either end."""
    lines: list[str] = []
    for comment in comments:
        text = text_of(comment)
        if text.startswith("/*"):
            lines += [line.strip() for line in text[2:-2].split("\n")]
        elif not DIRECTIVE.match(text):
            lines.append(text[2:].removeprefix(" ").rstrip())
    return "\n".join(lines).strip("\n")


def text_of(node: "Node") -> str:
    return node.text.decode()


def receiver_type(node: "Node") -> str:
    """Return the type name of a method's receiver without `*` or type parameters, or "" for a function."""
    receiver = node.child_by_field_name("receiver")
    if receiver is None:
        return ""
    found = re.search(r"(\w+)\s*(\[[^\]]*\])?\s*,?\s*\)$", text_of(receiver))
    return found[1] if found else ""


# ---- context ----


def _types_of_package(parsed: list[tuple[GoFile, "Node"]]) -> dict[str, str]:
    """Return {type name: declaration} for the types in a package."""
    declared: dict[str, str] = defaultdict(str)
    for _, root in parsed:
        for node in root.named_children:
            if node.type == "type_declaration" and not node.has_error:
                for spec in node.named_children:
                    if spec.type == "type_spec":
                        declared[text_of(spec.child_by_field_name("name"))] = f"type {text_of(spec)}"
    return declared


def _before(clause: list[str], part: Declaration, declared: dict[str, str]) -> str:
    """Return the text before a declaration: the package clause and, for methods, the start of the receiver's type."""
    receiver = [declared[part.receiver][:MAX_TYPE]] if part.receiver in declared else []
    return "\n\n".join(clause + receiver) + "\n"
