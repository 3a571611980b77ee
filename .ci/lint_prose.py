"""Check the English of the pages and of every docstring; `make quality` runs it from the repository root.

proselint finds archaic and misspelled words. WORDS lists words that this project does not use, with replacements. Code
in fences and backticks is not checked.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from proselint.checks import __register__ as checks
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, types
from proselint.tools import LintFile


PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md", "benchmarks/**/*.md")
MODULES = ("hrm_hf/**/*.py", "training/*.py", "benchmarks/**/*.py", "tests/**/*.py")
ENABLED = (
    "archaism", "malapropisms", "mondegreens", "needless_variants", "nonwords", "spelling", "uncomparables", "project",
)  # fmt: skip
WORDS = {
    r"mend(?:s|ed|ing)?": "fix",
    r"anew": "again",
    r"nowhere": "not found",
    r"at hand": "available",
    r"and kin": "and related models",
    r"(?:it|he|that|which|this|file|folder|path|name|value|key) is no": "is not a",
    r"is none of": "must be one of",
    r"of the word": "named",
    r"by the word of": "according to",
    r"whole (?:board|file|model|run|text|set|map|row|batch|page)s?": "complete",
    r"the figures of": "the metrics of",
    r"as it stands": "unchanged",
    r"such as are": "that are",
    r"behaviours?": "behavior",
    r"(?:initial|optim|regular|normal|quant|serial|token)is(?:e|es|ed|ing|ation)": "-ize",
    r"knows no": "does not know",
}  # fmt: skip
CODE = re.compile(r"^( *)```.*?^\1```|``.+?``|`[^`]+`|\]\([^)]*\)|https?://\S+|<[^>\n]+>|\$[^$\n]+\$", re.S | re.M)


def blank(text: str) -> str:
    """Replace code and addresses with spaces, so that line numbers stay the same."""
    return CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def texts() -> Iterator[tuple[Path, int, str]]:
    """Yield each page and docstring as its file, the number of lines above the text, and the text."""
    for page in sorted({page for pattern in PAGES for page in Path().glob(pattern)}):
        yield page, 0, page.read_text()
    for module in sorted({module for pattern in MODULES for module in Path().glob(pattern)}):
        if "fixtures" in module.parts:
            continue
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node, clean=False)
                if docstring:
                    yield module, node.body[0].lineno - 1, docstring


def problems() -> Iterator[str]:
    """Yield one line per problem found: file, line, check, message."""
    registry = CheckRegistry()
    registry.register_many(checks)
    words = types.PreferredForms(items=WORDS)
    registry.register(Check(check_type=words, path="project.words", message="write '{}' instead of '{}'"))
    config = {"max_errors": 1000, "checks": dict.fromkeys(ENABLED, True)}
    for file, above, text in texts():
        for found in LintFile(str(file), blank(text)).lint(config):
            yield f"{file}:{above + found.pos[0]}: {found.check_result.check_path}: {found.check_result.message}"


if __name__ == "__main__":
    found = list(problems())
    print("\n".join(found))
    sys.exit(bool(found))
