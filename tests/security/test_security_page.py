"""docs/security.md names tests and modules that exist: a promise whose test is gone would be one in words alone."""

import ast
import re

import pytest
from docs_pages import ROOT


PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
HEADS = ("| promised |", "| fault |", "|---", "| cost |")
ROWS = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith(HEADS)]
DEFINED = {
    node.name
    for file in (ROOT / "tests").rglob("test_*.py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef)
}


def test_every_test_that_the_page_names_exists():
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 40
    assert sorted(named - DEFINED) == []


def test_every_row_names_a_test_or_a_benchmark():
    assert len(ROWS) > 30
    assert [row for row in ROWS if not re.search(r"`(test_\w+|benchmarks/[\w/]+\.py)`", row)] == []


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`([\w/]+\.(?:py|json)|[\w/]+/)`", PAGE))))
def test_every_file_that_the_page_names_exists(file):
    assert (ROOT / file).exists() or (ROOT / "hrm_hf" / file).exists()
