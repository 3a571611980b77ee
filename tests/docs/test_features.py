"""The feature page matches its index of tests, whose names .ci/lint_docs.py checks."""

import subprocess
import sys
from pathlib import Path

import every
import features_table
import pytest
from features_table import DOES_NOT_ARISE, WORKS, Cell, Question


TESTS = Path(__file__).parents[1]
QUESTIONS = features_table.questions()
CELLS = {cell for question in QUESTIONS for cells in question.features.values() for cell in cells.values()}
NAMED = sorted({cell.test for cell in CELLS if cell.test})


def test_page_merges_equal_cells_and_names_no_test():
    text = features_table.page()
    same, _, rest = text.partition("## It depends on the model")
    assert same.count("| ✓ |\n") >= 10 and "::" not in text
    rows = [line.split(" | ")[1:] for line in rest.splitlines() if line.startswith("| Can ")]
    assert len(rows) >= 10 and all(len(set(row)) > 1 for row in rows)


def test_every_question_links_to_its_guide_and_is_asked_once():
    assert all("](" in question.text and question.text.endswith("?") for question in QUESTIONS)
    assert len({question.text for question in QUESTIONS}) == len(QUESTIONS)


@pytest.mark.parametrize(
    ("cells", "answer"),
    [
        ([Cell("yes", test="a.py::test"), Cell("yes", "the same code as")], WORKS),
        ([Cell("n/a", "writes no text"), Cell("yes", test="a.py::test")], WORKS),
        ([Cell("n/a", "writes no text")], DOES_NOT_ARISE),
        ([Cell("no", "is refused"), Cell("no", "is refused")], "No: is refused."),
        ([Cell("no", "is refused"), Cell("yes", test="a.py::test")], "In part: is refused."),
        ([Cell("part", "one preset"), Cell("no", "is refused")], "In part: one preset; is refused."),
    ],
)
def test_question_takes_the_worst_answer_of_its_features(cells, answer):
    features = {str(number): {"hrm_lm": cell} for number, cell in enumerate(cells)}
    assert Question("Can I?", features).answer("hrm_lm") == answer


@pytest.mark.parametrize("text", ["works", "maybe: who knows what", "yes:", "puzzles/test_maze.py"])
def test_cell_without_test_or_reason_is_rejected(text):
    with pytest.raises(ValueError, match=r"FILE\.py::TEST.*n/a"):
        features_table.read_cell(text)


def test_cells_without_a_test_give_a_reason():
    assert [cell for cell in CELLS if not cell.test and len(cell.reason.split()) < 3] == []


def test_every_question_has_a_test_for_some_model():
    for question in QUESTIONS:
        assert any(cell.test for cells in question.features.values() for cell in cells.values()), question.text
        assert all(cells.keys() == set(every.ARCHITECTURES) for cells in question.features.values())


@pytest.mark.slow
def test_pytest_finds_every_named_test():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", *NAMED]
    finished = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-2000:]
