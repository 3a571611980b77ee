"""Check that the files and tests named in docs and test lists exist. `make quality` runs it from the root folder.

The features page must equal the one generated from docs/features.yaml. No two test files may share a name, because
the test folders are not packages, and pytest cannot import two modules of the same name.
"""

import ast
import json
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path


TESTS = Path("tests")
sys.path.insert(0, str(TESTS / "helpers"))

import features_table  # noqa: E402
import isa  # noqa: E402


@cache
def functions(file: Path) -> set[str]:
    """Return the names of a test file's functions and classes; an empty set if the file does not exist."""
    return (
        {node.name for node in ast.parse(file.read_text()).body if hasattr(node, "name")} if file.exists() else set()
    )


def is_missing(test: str) -> bool:
    """Check whether the test FILE::FUNCTION[...] does not exist."""
    file, _, function = test.split("[")[0].partition("::")
    return function not in functions(Path(file))


def problems() -> list[str]:
    """Return one line per missing file or test, outdated page and duplicate file name."""
    page = Path("docs/security.md").read_text()
    named = set(re.findall(r"`([\w/]+\.(?:py|json)|[\w/]+/)`", page))
    found = [
        f"docs/security.md: {name}" for name in named if not any((Path(d) / name).exists() for d in (".", "hrm_hf"))
    ]
    tests = set().union(*map(functions, TESTS.rglob("test_*.py")))
    found += [f"docs/security.md: {name}" for name in set(re.findall(r"`(test_\w+)`", page)) - tests]
    cells = [
        cell for question in features_table.questions() for row in question.features.values() for cell in row.values()
    ]
    shown = {cell.test for cell in cells if cell.test}
    found += [f"docs/features.yaml: {name}" for name in shown if is_missing(f"tests/{name}")]
    if features_table.PAGE.read_text() != features_table.page():
        found.append(f"{features_table.PAGE}: run python tests/helpers/features_table.py")
    found += [f"tests/helpers/isa.py: {file}" for file in isa.NUMERIC if not (TESTS / file).is_file()]
    known = json.loads((TESTS / "slow_durations.json").read_text())
    found += [f"tests/slow_durations.json: {name}" for name in known if is_missing(name)]
    names = Counter(file.name for file in TESTS.rglob("test_*.py") if "fixtures" not in file.parts)
    return sorted(found) + [f"{name}: two test files have this name" for name, count in names.items() if count > 1]


if __name__ == "__main__":
    lines = problems()
    print("\n".join(lines) or "every file and test that is named in docs and test lists exists")
    sys.exit(bool(lines))
