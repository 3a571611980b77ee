"""Find Sudoku boards in text with frames, comments, empty fields and various symbols for blanks."""

import re
import unicodedata
from collections.abc import Collection, Iterator


SMALL_BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # (rows, columns) of a box by board size
LARGE_BOXES = {12: (3, 4), 16: (4, 4), 25: (5, 5)}
BOX_SHAPES = SMALL_BOXES | LARGE_BOXES
SYMBOLS = "123456789ABCDEFGHIJKLMNOP"  # characters for the values 1 to 25 of a cell

CELLS = frozenset("0123456789.")
_FRAME = re.compile(r"[\s\ufeff\u200b|¦‖+=:;!,'\"`~<>/\\(){}\[\]\u2500-\u257f]")
_COLUMN, _EDGES = re.compile(r"[,;\t|│┃║]"), re.compile(r"^\s*[|│┃║](.*)[|│┃║]\s*$")
_BLANKS = "_?xX·□*-"  # symbols for a blank in texts that use neither `.` nor 0
_SEPARATOR, _DIGIT = re.compile(r"[\s,;:|\"'#]+"), re.compile(r"\d")
_LETTERS = re.compile(r"(?!xxx)[a-z]{3}", re.IGNORECASE)
_NOTHING = re.compile(r"\b(null|None|nan)\b")  # words for a blank in JSON and Python
_LARGE_FRAME = re.compile(r"[\s|¦‖,;:\"'(){}\[\]│┃║]+")
_LARGE_CELLS = frozenset("0123456789.ABCDEFGHIJKLMNOPQRSTUVWXY")
_NO_BLANKS = str.maketrans("_?*-·□", "......")  # blanks to replace; x and X are digits on large boards
_PROGRESS = re.compile(r"^\s*\[(state|pencilmarks)\][^\[]*", re.IGNORECASE | re.MULTILINE)  # .sdk sections to skip


def split_boards(text: str, size: int | None = None) -> list[str | dict[str, str]]:
    """Split a text into boards of `size` rows, returned as cell strings or dicts with puzzle and solution.

    A board is a single line, optionally followed by its solution and other words, or several lines of cells. Frames,
    comments and empty lines between bands are skipped. An empty line elsewhere ends an incomplete board. Without
    `size`, all lines with cells form one board. Boards of size 12, 16 and 25 are returned as words, one per cell.
    """
    if size not in SMALL_BOXES and (large := list(_large_boards(text, size))):
        return large
    text = _NOTHING.sub(".", _PROGRESS.sub("", unicodedata.normalize("NFKC", text)))
    cells_of_board = {rows * rows for rows in SMALL_BOXES} if size is None else {size * size}
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


def _large_boards(text: str, size: int | None) -> Iterator[str | dict[str, str]]:
    """Yield the boards of size 12, 16 or 25 (or of `size`) in a text, or nothing if there are none.

    A cell is a number or one of `SYMBOLS`, which may touch if every cell in the row has one character. Letters alone
    count from A = 1.
    """
    sizes = LARGE_BOXES if size is None else (size,)
    squares = [n * n for n in sizes]
    rows: list[list[str]] = []
    for line in unicodedata.normalize("NFKC", _NOTHING.sub(".", text)).splitlines():
        words = [] if line.startswith(("#", "//")) else _LARGE_FRAME.sub(" ", line).upper().split()
        boards = [cells for each in [words, *([word] for word in words)] if (cells := _large_cells(each, squares))]
        if boards:
            names = ("puzzle", "solution")
            texts = [" ".join(_as_numbers(cells)) for cells in boards[-2:]]
            yield dict(zip(names, texts)) if len(texts) == 2 and "." not in texts[1] else texts[0]
        elif row := _large_cells(words, sizes):
            rows.append(row)
            if len(rows) == len(row) and all(len(each) == len(row) for each in rows):
                cells = _as_numbers([cell for each in rows for cell in each])
                if size or max(map(int, set(cells) - {"."}), default=0) > 4:  # otherwise, each line is a 4x4 board
                    yield " ".join(cells)
                rows.clear()


def _large_cells(words: list[str], lengths: Collection[int]) -> list[str] | None:
    """Return a line's cells, with "." for blanks, or None if the line is not a row with a length in `lengths`."""
    size = next((n for n in (len(words), sum(map(len, words))) if n in lengths), None)
    if size is None:
        return None
    cells = [each if each.isdecimal() else each.translate(_NO_BLANKS) for each in words]
    cells = cells if len(cells) == size else list("".join(cells))
    is_rule = not any(sign.isalnum() or sign in "._" for sign in "".join(words))
    is_row = not is_rule and all(cell.isdecimal() or len(cell) == 1 for cell in cells)
    return cells if is_row and all(cell in _LARGE_CELLS or cell.isdecimal() for cell in cells) else None


def _as_numbers(cells: list[str]) -> list[str]:
    """Return the cells of a board as decimal numbers, with "." for blanks.

    Raises:
        ValueError: If both 0 and another sign are used for blanks, as in hexadecimal boards with the digit 0.
    """
    if "0" in cells and "." in cells:
        raise ValueError("the board has both 0 and '.'; use one of them for blanks, and 1 to 9, A to G for symbols")
    start = 64 if not any(cell.isdecimal() and int(cell) for cell in cells) else 55  # A is 1, or 10 if digits occur
    return ["." if cell in (".", "0") else cell if cell.isdecimal() else str(ord(cell) - start) for cell in cells]


def _rows(text: str) -> list[str]:
    """Return each line's cells, with `.` for blanks, and "" for frame and comment lines."""
    lines, blank, rows = ["" if _is_comment(line) else line for line in text.splitlines()], ".", []
    if not any("." in line or "0" in line for line in lines):
        lines = list(_fill_empty_fields(lines))
        counts = {sign: sum(line.count(sign) for line in lines if _DIGIT.search(line)) for sign in _BLANKS}
        blank = max(counts, key=counts.get) if any(counts.values()) else "."
    for line in lines:
        row = "".join(cell for cell in _FRAME.sub("", line) if cell == blank or cell not in "*-")
        is_rule = blank != "." and not _DIGIT.search(row) and len(row) not in SMALL_BOXES
        rows.append("" if is_rule else row.replace(blank, "."))
    return rows


def _fill_empty_fields(lines: list[str]) -> Iterator[str]:
    """Yield the lines, filling empty fields with `.` in rows with separators and in grids of single characters."""
    wide = max(map(len, lines), default=0)
    is_line = len(lines) == 1 and wide in {n * n for n in SMALL_BOXES}
    is_grid = is_line or (wide in SMALL_BOXES and len(lines) == wide)
    for line in lines:
        fields = [field.strip() or "." for field in _COLUMN.split(_EDGES.sub(r"\1", line))]
        is_row = len(fields) in SMALL_BOXES and all(len(field) == 1 for field in fields)
        yield "".join(fields) if is_row else line.ljust(wide).replace(" ", ".") if is_grid else line


def _is_comment(line: str) -> bool:
    """Check whether a line is a header, comment or prose (it has a word and few cell characters)."""
    text = "".join(line.split())
    is_prose = _LETTERS.search(line) and sum(character in CELLS for character in text) < len(text) / 2
    return text.startswith(("#", "//")) or (text.startswith(";") and text.count(";") < 3) or bool(is_prose)
