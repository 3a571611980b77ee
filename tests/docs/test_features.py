"""The table of features is complete, and names tests that exist."""

import ast
import subprocess
import sys
from pathlib import Path

import features_table
import pytest


TESTS = Path(__file__).parents[1]
CELLS = sorted({cell for _, _, cells in features_table.rows() for cell in cells.values()})
NAMED = [cell for cell in CELLS if "::" in cell]


def test_the_page_is_what_the_table_says():
    assert features_table.PAGE.read_text() == features_table.page(), "run python tests/helpers/features_table.py"


def test_what_names_no_test_is_a_reason():
    assert [cell for cell in CELLS if "::" not in cell and len(cell.split()) < 4] == []


def test_every_test_that_is_named_is_in_its_file():
    missing = []
    for cell in NAMED:
        file, name = cell.split("[")[0].split("::")
        functions = {node.name for node in ast.parse((TESTS / file).read_text()).body if hasattr(node, "name")}
        missing += [cell] if name not in functions else []
    assert missing == []


@pytest.mark.slow
def test_every_test_that_is_named_is_found_by_pytest():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", *NAMED]
    finished = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-2000:]
