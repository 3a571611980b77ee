"""Draw a random sample of the repository's texts, for raters who judge the English.

    python benchmarks/package/prose_sample.py --seed 1 --count 200 [--root DIR] [--kinds message help]

The population is the text that users and maintainers read in `hrm_hf/`, `hrm_hf_start.py`, `training/` and
`benchmarks/`: the first paragraph of each docstring, each block of comments, each help text, and the text of each
error, warning, log line and printed line. Each text is printed with its kind and location: the file, the line, and the
class, function or variable that it belongs to. Expressions in f-strings stay in braces. The script needs only the
standard library, so it runs on any commit. It does not rate the texts.
"""

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


PLACES = ("hrm_hf", "hrm_hf_start.py", "training", "benchmarks")
KINDS = ("docstring", "comment", "message", "help")
SPEAKERS = re.compile(
    r"(.*\.)?(print|echo|secho|warn|warn_once|warning|warning_once|info|debug|error|exception|critical|fail|BadParameter"
    r"|\w*Error|Rejection)"
)
PRAGMA = re.compile(r"#\s*(noqa|type:|fmt:|pragma|ruff:|!)")


class Item(NamedTuple):
    """A text with its kind and location."""

    file: Path
    line: int
    kind: str
    text: str
    owner: str = ""


def text_of(node: ast.AST) -> str:
    """Return the text of a string, an f-string or concatenated strings; "" for any other expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = (
            text_of(part) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            for part in node.values
        )
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return ""


def is_sentence(text: str) -> bool:
    """Check whether a text has at least three words besides placeholders, code, options and names."""
    return len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\{[^}]*\}|`[^`]*`|--\S+|\w+_\w+", "", text))) >= 3


def comments(file: Path, source: str) -> Iterator[Item]:
    """Yield comments, joining comments on consecutive lines into one."""
    block: list[str] = []
    start = last = -1
    joins = False  # whether the comments in `block` stand on lines of their own
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or PRAGMA.match(token.string):
            continue
        alone = not token.line[: token.start[1]].strip()
        if block and not (joins and alone and token.start[0] == last + 1):
            yield Item(file, start, "comment", " ".join(block))
            block = []
        if not block:
            start, joins = token.start[0], alone
        block.append(token.string.lstrip("# ").rstrip())
        last = token.start[0]
    if block:
        yield Item(file, start, "comment", " ".join(block))


def docstrings(file: Path, tree: ast.AST) -> Iterator[Item]:
    """Yield the first paragraph of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield Item(file, node.body[0].lineno, "docstring", " ".join(docstring.split("\n\n")[0].split()))


def spoken(file: Path, tree: ast.AST) -> Iterator[Item]:
    """Yield help texts, and the texts of errors, warnings, log lines and printed lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            pairs = ((key, value) for key, value in zip(node.keys, node.values) if key is not None)
            helps = [value for key, value in pairs if text_of(key) == "help"]
            yield from (Item(file, value.lineno, "help", text_of(value)) for value in helps)
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        helps = [keyword.value for keyword in node.keywords if keyword.arg == "help"]
        if name.rpartition(".")[2] in ("option", "Option", "Argument", "HfArg"):
            helps += node.args[:1]
        yield from (Item(file, value.lineno, "help", text_of(value)) for value in helps)
        if SPEAKERS.fullmatch(name):
            yield from (Item(file, value.lineno, "message", text_of(value)) for value in node.args)


def named_spans(tree: ast.AST) -> Iterator[tuple[int, int, str]]:
    """Yield the first line, the last line and the name of classes, functions and assignments, outer ones first."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield start, node.end_lineno, node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield node.lineno, node.end_lineno, ast.unparse(target)


def owner_of(item: Item, spans: list[tuple[int, int, str]], source: list[str]) -> str:
    """Return the dotted name of the classes, function and variable that a text belongs to."""
    line = item.line
    while item.kind == "comment" and source[line - 1].lstrip().startswith("#"):
        line += 1  # a comment above a statement belongs to that statement
    return ".".join(name for start, end, name in spans if start <= line and item.line <= end)


def items(root: Path) -> list[Item]:
    """List every text of at least three words in a checkout, in a fixed order."""
    found: list[Item] = []
    for place in PLACES:
        for file in [root / place] if (root / place).is_file() else sorted((root / place).rglob("*.py")):
            source = file.read_text()
            tree = ast.parse(source)
            lines, spans = source.splitlines(), list(named_spans(tree))
            for one in (*docstrings(file, tree), *comments(file, source), *spoken(file, tree)):
                owner = owner_of(one, spans, lines)
                found.append(one._replace(file=file.relative_to(root), owner=owner))
    return sorted(item for item in set(found) if is_sentence(item.text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sample")
    parser.add_argument("--count", type=int, default=200, help="number of texts to draw")
    parser.add_argument("--root", type=Path, default=Path(), help="checkout to read; by default the current folder")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of text to draw from")
    args = parser.parse_args()
    population = [item for item in items(args.root) if item.kind in args.kinds]
    if not population:
        parser.error(f"--root {args.root}: no texts found; pass the root of a checkout")
    sample = random.Random(args.seed).sample(population, min(args.count, len(population)))
    for number, item in enumerate(sample, 1):
        owner = f" {item.owner}" if item.owner else ""
        print(f"{number}. [{item.kind}] {item.file}:{item.line}{owner}\n   {item.text}\n")
    print(f"{len(sample)} of {len(population):,} texts, seed {args.seed}")


if __name__ == "__main__":
    main()
