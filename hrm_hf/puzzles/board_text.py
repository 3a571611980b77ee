"""Find Sudoku boards in text with frames, comments, empty fields and various symbols for blanks."""

import re
import unicodedata
from collections.abc import Iterator


BOX_SHAPES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # (rows, columns) of a box by board size

CELLS = frozenset("0123456789.")
_FRAME = re.compile(r"[\s\ufeff\u200b|¦‖+=:;!,'\"`~<>/\\(){}\[\]\u2500-\u257f]")
_COLUMN, _EDGES = re.compile(r"[,;\t|│┃║]"), re.compile(r"^\s*[|│┃║](.*)[|│┃║]\s*$")
_BLANKS = "_?xX·□*-"  # symbols for a blank in texts that use neither `.` nor 0
_SEPARATOR, _DIGIT = re.compile(r"[\s,;:|\"'#]+"), re.compile(r"\d")
_LETTERS = re.compile(r"(?!xxx)[a-z]{3}", re.IGNORECASE)
_NOTHING = re.compile(r"\b(null|None|nan)\b")  # blanks in JSON and Python
_PROGRESS = re.compile(r"^\s*\[(state|pencilmarks)\][^\[]*", re.IGNORECASE | re.MULTILINE)  # .sdk sections to skip


def split_boards(text: str, size: int | None = None) -> list[str | dict[str, str]]:
    """Split a text into boards of `size` rows, returned as cell strings or dicts with puzzle and solution.

    A board is a single line, optionally followed by its solution and other words, or several lines of cells. Frames,
    comments and empty lines between bands are skipped. An empty line elsewhere ends an incomplete board. Without
    `size`, all lines with cells form one board.
    """
    text = _NOTHING.sub(".", _PROGRESS.sub("", unicodedata.normalize("NFKC", text)))
    cells_of_board = {rows * rows for rows in BOX_SHAPES} if size is None else {size * size}
    band = size * BOX_SHAPES[size][0] if size else 1
    boards, rows = [], []

    def end() -> None:
        boards.extend(["\n".join(rows)] if rows else [])
        rows.clear()

    for line, row in zip(text.splitlines(), _rows(text)):
        words = [each for each in _SEPARATOR.split(line) if len(each) in cells_of_board and CELLS.issuperset(each)]
        if words or len(row) in cells_of_board:
            end()
            solved = len(words) > 1 and not set(words[1]) & {".", "0"}
            boards.append({"puzzle": words[0], "solution": words[1]} if solved else (words or [row])[0])
        elif row:
            rows.append(row)
        cells = sum(map(len, rows))
        if size and (cells >= size * size or (not (row or line.strip()) and cells % band)):
            end()
    end()
    return boards


def _rows(text: str) -> list[str]:
    """Return each line's cells, with `.` for blanks, and "" for frame and comment lines."""
    lines, blank, rows = ["" if _is_comment(line) else line for line in text.splitlines()], ".", []
    if not any("." in line or "0" in line for line in lines):
        lines = list(_fill_empty_fields(lines))
        counts = {sign: sum(line.count(sign) for line in lines if _DIGIT.search(line)) for sign in _BLANKS}
        blank = max(counts, key=counts.get) if any(counts.values()) else "."
    for line in lines:
        row = "".join(cell for cell in _FRAME.sub("", line) if cell == blank or cell not in "*-")
        is_rule = blank != "." and not _DIGIT.search(row) and len(row) not in BOX_SHAPES
        rows.append("" if is_rule else row.replace(blank, "."))
    return rows


def _fill_empty_fields(lines: list[str]) -> Iterator[str]:
    """Yield the lines, filling empty fields with `.` in rows with separators and in grids of single characters."""
    wide = max(map(len, lines), default=0)
    is_grid = (wide in BOX_SHAPES and len(lines) == wide) or (len(lines) == 1 and wide in {n * n for n in BOX_SHAPES})
    for line in lines:
        fields = [field.strip() or "." for field in _COLUMN.split(_EDGES.sub(r"\1", line))]
        is_row = len(fields) in BOX_SHAPES and all(len(field) == 1 for field in fields)
        yield "".join(fields) if is_row else line.ljust(wide).replace(" ", ".") if is_grid else line


def _is_comment(line: str) -> bool:
    """Check whether a line is a header, comment or prose (it has a word and few cell characters)."""
    text = "".join(line.split())
    is_prose = _LETTERS.search(line) and sum(character in CELLS for character in text) < len(text) / 2
    return text.startswith(("#", "//")) or (text.startswith(";") and text.count(";") < 3) or bool(is_prose)
