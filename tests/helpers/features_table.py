"""Generate docs/features.md from features.yaml: `python tests/helpers/features_table.py`."""

import re
from dataclasses import dataclass
from pathlib import Path

import every
import yaml


DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "features.md"
WORKS, DOES_NOT_ARISE = "✓", "\N{EN DASH}"
SAID = {"no": "No", "part": "In part"}
HEAD = f"""# What works with which model

{WORKS} works; {DOES_NOT_ARISE} does not apply to this kind of model; a number refers to a note below.
Tests on a CPU verify each answer: `docs/features.yaml`, from which this page is generated, lists them.
"""
PAGES = {"cosmo_cnn": "hrm_cosmo", "cosmo_unet": "hrm_mass_mapping"}  # architectures without their own page


@dataclass(frozen=True)
class Cell:
    """Entry of features.yaml for a feature and an architecture: yes, no, part or n/a, the reason, and the test."""

    word: str
    reason: str = ""
    test: str = ""


@dataclass(frozen=True)
class Question:
    """Row of the page: Markdown with a link to the guide, and the cells by feature and architecture."""

    text: str
    features: dict[str, dict[str, Cell]]

    def answer(self, architecture: str) -> str:
        """`WORKS`, `DOES_NOT_ARISE`, or the text of the cell."""
        cells = [cells[architecture] for cells in self.features.values()]
        found = {word for word in ("no", "part", "yes") if any(cell.word == word for cell in cells)}
        if not found:
            return DOES_NOT_ARISE
        if found == {"yes"}:
            return WORKS
        reasons = dict.fromkeys(cell.reason for cell in cells if cell.word in SAID)
        return f"{SAID['no' if found == {'no'} else 'part']}: {'; '.join(reasons)}."


def read_cell(text: str) -> Cell:
    """Parse a cell of the file.

    Raises:
        ValueError: the text is neither a test nor one of the words with a reason.
    """
    if re.fullmatch(r"[\w/]+\.py::.+", text):
        return Cell("yes", test=text)
    match = re.fullmatch(r"(yes|no|part|n/a): (.+?)(?:; shown by ([\w/]+\.py::.+))?", text)
    if not match:
        raise ValueError(f"{text!r}: expected FILE.py::TEST, or yes, no, part or n/a with a colon and a reason")
    return Cell(*(part or "" for part in match.groups()))


def questions() -> list[Question]:
    """Return the rows of the page.

    Raises:
        ValueError: a cell is missing, cannot be parsed, or is for an unknown architecture.
    """
    return [
        Question(row["question"], {entry["feature"]: _cells(entry) for entry in row["features"]})
        for row in yaml.safe_load((DOCS / "features.yaml").read_text())
    ]


def _cells(entry: dict[str, str]) -> dict[str, Cell]:
    feature = entry["feature"]
    if unknown := set(entry) - {"feature", "all", *every.ARCHITECTURES}:
        raise ValueError(f"{feature}: {', '.join(sorted(unknown))} is not an architecture")
    if missing := [a for a in every.ARCHITECTURES if not {a, "all"} & entry.keys()]:
        raise ValueError(f"{feature}: no cell for {', '.join(missing)}")
    return {a: read_cell(entry.get(a, entry.get("all", "")).format(a=a)) for a in every.ARCHITECTURES}


def page() -> str:
    """Return the page: features equal for all models, then the rest, with one column for equal models."""
    rows = {question.text: [question.answer(a) for a in every.ARCHITECTURES] for question in questions()}
    same = {text: answers[0] for text, answers in rows.items() if len(set(answers)) == 1}
    rest = {text: answers for text, answers in rows.items() if text not in same}
    columns: dict[tuple, list[str]] = {}
    for name, answers in zip(every.ARCHITECTURES, zip(*rest.values())):
        columns.setdefault(answers, []).append(name)
    notes: list[str] = []

    def shown(answer: str) -> str:
        if answer in (WORKS, DOES_NOT_ARISE):
            return answer
        if answer not in notes:
            notes.append(answer)
        return f"[^{notes.index(answer) + 1}]"

    models = ["<br>".join(f"[`{a}`](architectures/{PAGES.get(a, a)}.md)" for a in names) for names in columns.values()]
    tables = [
        "## The same for every model",
        _table(["", "all"], [[text, shown(answer)] for text, answer in same.items()]),
        "## It depends on the model\n",
        # The site rotates model names, so that columns are narrow and each question fits on one line.
        '<div class="turned" markdown>',
        _table(["", *models], [[text, *map(shown, answers)] for text, *answers in zip(rest, *columns)]),
        "</div>\n",
        "\n".join(f"[^{number}]: {note}" for number, note in enumerate(notes, 1)) + "\n",
    ]
    return "\n".join([HEAD, *tables])


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *[":-:"] * (len(head) - 1)], *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
