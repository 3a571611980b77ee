"""Lists of tests outside the tests themselves name files and functions that exist."""

import ast
import json
from functools import cache
from pathlib import Path

import isa


TESTS = Path(__file__).parents[1]


@cache
def functions(file: Path) -> set[str]:
    """Names of the test functions of a file; none if it does not exist."""
    return (
        {node.name for node in ast.parse(file.read_text()).body if hasattr(node, "name")} if file.exists() else set()
    )


def test_every_file_of_the_numeric_tests_exists():
    assert [file for file in isa.NUMERIC if not (TESTS / file).is_file()] == []


def test_every_test_whose_duration_is_known_exists():
    """One that does not would leave its successor without a duration, and the parts of `make test-slow` unequal."""
    known = json.loads((TESTS / "slow_durations.json").read_text())
    named = [name.split("[")[0].split("::") for name in known]
    assert [f"{file}::{name}" for file, name in named if name not in functions(TESTS.parent / file)] == []


def test_no_test_file_has_the_name_of_another():
    """Tests are no packages: of two files of one name pytest could import but one."""
    names = [file.name for file in TESTS.rglob("test_*.py") if "fixtures" not in file.parts]
    assert sorted({name for name in names if names.count(name) > 1}) == []
