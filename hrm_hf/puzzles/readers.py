"""Read puzzles and solutions from files for the Sudoku and maze builders, and create data set rows.

A source is a file (`.csv`, `.jsonl`, `.json`, also as `.gz`; `.parquet`), a folder with `train.*` and `test.*`, or
`hub:OWNER/NAME`, a data set on the Hub. It has one string column with puzzles and one with solutions, named as in
`COLUMN_NAMES`, and optionally a number column `rating`.

`read_unique` also removes duplicates, so no puzzle occurs twice. Puzzles are equal if they have the same clues
(Sudoku), or the same walls, S and G (mazes). It keeps the first of several equal puzzles, but prefers the test split
over training, and raises an error if their solutions differ. It also removes training puzzles with a symmetric copy in
the test split; symmetric copies within a split are kept.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..io.files import HUB_PREFIX, JSON_KINDS, csv_rows, json_object, numbered_lines, shorten
from ..resources import existing_path
from .dataset import ROW_COLUMNS, puzzle_features


if TYPE_CHECKING:
    import datasets

# Column names in the HRM authors' data sets on the Hub, in our own files, and in common Kaggle files.
COLUMN_NAMES = (("question", "answer"), ("puzzle", "solution"), ("quizzes", "solutions"))
RATING_COLUMN = "rating"
FILE_KINDS = (".csv", ".jsonl", ".json", ".parquet")
COMPARED_ROWS = 4096  # rows to compare at a time, to limit the memory for copies


@dataclass
class PuzzleTable:
    """Puzzles and solutions as text, with the location of each row for error messages.

    Attributes:
        name: File name or `hub:NAME`, for error messages.
        columns: Names of the puzzle column and the solution column in the source.
        questions, answers: One string per row.
        ratings: float32 [rows], or None if the source has no such column.
        lines: Line number of each row in a text file, from 1; None in other sources.
    """

    name: str
    columns: tuple[str, str]
    questions: list[str]
    answers: list[str]
    ratings: np.ndarray | None = None
    lines: list[int | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.questions)

    def place(self, row: int, column: int | str | None = None) -> str:
        """Return the place of a row (line number in a text file, otherwise 0-based index) and column as text."""
        where = f"{self.name}, row {row}" if self.lines[row] is None else f"{self.name}, line {self.lines[row]}"
        column = self.columns[column] if isinstance(column, int) else column
        return where if column is None else f"{where}, column {column!r}"

    def encode(self, column: int, length: int, alphabet: dict[str, int]) -> np.ndarray:
        """Encode a column as uint8 [rows, length], or raise ValueError for wrong lengths or characters.

        Args:
            column: 0 for puzzles, 1 for solutions.
            length: Required length of every string.
            alphabet: Number of each legal character.
        """
        texts = self.answers if column else self.questions
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        for row in np.flatnonzero(lengths != length)[:1]:
            text = f"{lengths[row]} characters {shorten(texts[row])}; expected {length}"
            raise ValueError(f"{self.place(row, column)}: {text}")
        lookup = np.full(256, 255, dtype=np.uint8)
        for character, number in alphabet.items():
            lookup[ord(character)] = number
        # Non-ASCII characters become "?", which no alphabet contains. The error message shows the original character.
        raw = np.frombuffer("".join(texts).encode("ascii", "replace"), dtype=np.uint8)
        numbers = lookup[raw].reshape(len(texts), length)
        for row, position in np.argwhere(numbers == 255)[:1]:
            text = f"character {texts[row][position]!r} at position {position + 1} of {shorten(texts[row])}"
            raise ValueError(f"{self.place(row, column)}: {text}; expected one of {''.join(alphabet)!r}")
        return numbers


def read_splits(source: str | Path) -> dict[str, PuzzleTable]:
    """Read a source and return its tables by split name: "train" and, if it exists, "test".

    Raises:
        FileNotFoundError: If there is no such file, or the folder has no `train.*`.
        ValueError: If the file type is unknown, a column is missing, or a line is malformed.
    """
    if str(source).startswith(HUB_PREFIX):
        return _read_hub(str(source)[len(HUB_PREFIX) :])
    source = existing_path(source)
    if source.is_dir():
        return _read_folder(source)
    return {"train": read_table(source)}


def read_table(path: str | Path) -> PuzzleTable:
    """Read one file. Raise the same errors as `read_splits`."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a file, a folder with train.* files, or hub:NAME")
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind == ".csv":
        return _table(str(path), csv_dicts(path))
    if kind in JSON_KINDS:
        lines = numbered_lines(path)
        return _table(str(path), ((int(where.rpartition(" ")[2]), json_object(line, where)) for where, line in lines))
    if kind == ".parquet" and path.suffix != ".gz":
        import pyarrow as pa
        import pyarrow.parquet

        try:
            return _from_arrow(pyarrow.parquet.read_table(path), str(path))
        except pa.ArrowException as error:
            raise ValueError(f"{path}: is not a readable Parquet file ({error})") from error
    raise ValueError(f"{path}: unknown type {path.suffix!r}; expected .csv, .jsonl, .json (plain or .gz) or .parquet")


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PuzzleRules:
    """Task-specific functions for reading puzzle tables.

    Attributes:
        parse: Returns the puzzles and solutions in a table, [rows, cells] each; raises ValueError for an invalid row.
        canonical_forms: Returns the canonical forms of puzzles and solutions [rows, cells]. Two puzzles have equal
            forms if and only if they are symmetric copies.
    """

    parse: Callable[[PuzzleTable], tuple[np.ndarray, np.ndarray]]
    canonical_forms: Callable[[np.ndarray, np.ndarray], Iterable]

    def forms_of(self, split: "PuzzleSplit") -> list[bytes]:
        """Return the canonical forms of a split's puzzles, and cache them in the split."""
        if split.forms is None:
            split.forms = [bytes(form) for form in self.canonical_forms(split.questions, split.answers)]
        return split.forms


@dataclass(frozen=True)
class HeldOut:
    """Rows to hold out if a source has no test split: the last `size`, or a fraction `share`.

    Selection by share uses `place_of_form`, so it does not depend on the order or number of rows. A smaller share
    selects a subset of a larger one, and symmetric copies go to the same split.
    """

    size: int | None = None
    share: float | None = None


@dataclass
class PuzzleSplit:
    """One split of a source: the table of its rows, and their tokens or digits, [rows, cells]."""

    table: PuzzleTable
    questions: np.ndarray
    answers: np.ndarray
    places: np.ndarray = field(default=None)  # index of each row in the table
    forms: list[bytes] | None = None  # see PuzzleRules

    def __post_init__(self):
        self.places = np.arange(len(self.questions)) if self.places is None else self.places

    def place(self, row: int) -> str:
        return self.table.place(int(self.places[row]))

    def take(self, rows: np.ndarray) -> "PuzzleSplit":
        ratings = self.table.ratings
        # The table keeps all rows, for error messages. The ratings are reduced to the selected rows.
        table = replace(self.table, ratings=None if ratings is None else ratings[rows])
        forms = self.forms and [self.forms[row] for row in rows]
        return PuzzleSplit(table, self.questions[rows], self.answers[rows], self.places[rows], forms)


def read_unique(
    source: str | Path, held_out: HeldOut, rules: Callable[[PuzzleTable], "PuzzleRules"]
) -> tuple[dict[str, PuzzleSplit], dict[str, int]]:
    """Read the splits of a source and remove duplicates. Also return the number of removed rows by reason.

    Args:
        source: Source as in `read_splits`.
        held_out: Rows to hold out if the source has no test split.
        rules: Function from the training table to its rules. It may infer the size from the first puzzle.

    Raises:
        FileNotFoundError, ValueError: As in `read_splits`, or if equal puzzles have different solutions.
    """
    tables = read_splits(source)
    game = rules(tables["train"])
    splits = {name: PuzzleSplit(table, *game.parse(table)) for name, table in tables.items()}
    repeated: dict[str, int] = {}
    _remove_equal(splits, repeated)
    splits = _hold_out(splits, held_out, game, source)
    if "test" in splits and len(splits["train"].questions):
        _remove_copies(splits, game, repeated)
    if not len(splits["train"].questions):
        raise ValueError(f"all training puzzles of {source} are copies of test puzzles; use other training puzzles")
    for what, count in repeated.items():
        logger.warning("%s: %d rows %s", source, count, what)
    return splits, repeated


def _remove_equal(splits: dict[str, PuzzleSplit], repeated: dict[str, int]) -> None:
    """Remove duplicate puzzles, keeping a test copy over a train copy. Raise ValueError if solutions differ."""
    names = sorted(splits)  # "test" comes first, so its copy of a duplicate is kept
    parts = [splits[name] for name in names]
    starts = np.cumsum([0, *(len(part.questions) for part in parts)])
    first = _first_equal(np.concatenate([part.questions for part in parts]))
    again = np.flatnonzero(first != np.arange(len(first)))
    if not len(again):
        return
    answers = np.concatenate([part.answers for part in parts])
    part_of_row, part_of_first = (np.searchsorted(starts, rows, side="right") - 1 for rows in (again, first[again]))
    for at in np.flatnonzero((answers[again] != answers[first[again]]).any(axis=1))[:1]:
        pairs = (part_of_row[at], again[at]), (part_of_first[at], first[again[at]])
        row, other = (parts[index].place(position - starts[index]) for index, position in pairs)
        raise ValueError(f"{row}: same puzzle as {other}, but a different solution; fix or remove one of them")
    for index, name in enumerate(names):
        inside = part_of_row == index
        within_split = part_of_first[inside] == index
        for same in dict.fromkeys(within_split.tolist()):  # a set that keeps the order of the rows
            reason = f"equal to another in {name}" if same else "in train and equal to one in test"
            repeated[f"{reason}, left out"] = int((within_split == same).sum())
        if inside.any():
            rows = np.arange(len(parts[index].questions))
            splits[name] = parts[index].take(np.delete(rows, again[inside] - starts[index]))


def _first_equal(rows: np.ndarray) -> np.ndarray:
    """Return, for each of `rows` [N, S], the index of the first row that is equal to it, int [N]."""
    keys = rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize))).reshape(-1)
    order = keys.argsort(kind="stable")
    is_first = np.ones(len(rows), dtype=bool)
    for start in range(1, len(rows), COMPARED_ROWS):
        some = order[start - 1 : start + COMPARED_ROWS]
        is_first[start : start + COMPARED_ROWS] = keys[some[1:]] != keys[some[:-1]]
    first = np.empty_like(order)
    first[order] = order[is_first][is_first.cumsum() - 1]
    return first


def place_of_form(form: bytes) -> float:
    """Map a canonical form to a number in [0, 1): the first 53 bits of its 8-byte BLAKE2b digest."""
    return (int.from_bytes(hashlib.blake2b(form, digest_size=8).digest(), "big") >> 11) / 2**53


def _hold_out(splits: dict[str, PuzzleSplit], held_out: HeldOut, rules: PuzzleRules, source) -> dict[str, PuzzleSplit]:
    if held_out.size is not None and held_out.share is not None:
        raise ValueError(f"test_share={held_out.share}: conflicts with test_size={held_out.size}; remove one")
    if held_out.size is None and held_out.share is None:
        return splits
    option = "--test-size" if held_out.share is None else "--test-share"
    if "test" in splits:
        count = len(splits["test"].questions)
        raise ValueError(f"{source} already has a test split ({count} rows); remove {option}")
    train, rows = splits["train"], len(splits["train"].questions)
    if held_out.share is None:
        if not 0 < held_out.size < rows:
            raise ValueError(f"test_size={held_out.size}: must be in [1, {rows - 1}]; {source} has {rows} rows")
        in_test = np.arange(rows) >= rows - held_out.size
    else:
        if not 0 < held_out.share < 1:
            raise ValueError(f"test_share={held_out.share}: must be in (0, 1)")
        in_test = np.array([place_of_form(form) < held_out.share for form in rules.forms_of(train)])
        if in_test.all() or not in_test.any():
            text = f"puts {in_test.sum()} of the {rows} rows of {source} into the test split"
            raise ValueError(f"test_share={held_out.share}: {text}; use another share")
    return {"train": train.take(np.flatnonzero(~in_test)), "test": train.take(np.flatnonzero(in_test))}


def _remove_copies(splits: dict[str, PuzzleSplit], rules: PuzzleRules, repeated: dict[str, int]) -> None:
    """Remove training puzzles that have a symmetric copy in the test split."""
    known = set(rules.forms_of(splits["test"]))
    stays = np.array([form not in known for form in rules.forms_of(splits["train"])])
    if not stays.all():
        repeated["in train and symmetric copies of puzzles in test, left out"] = int((~stays).sum())
        splits["train"] = splits["train"].take(np.flatnonzero(stays))


def make_split(
    inputs: np.ndarray, labels: np.ndarray, group_index: np.ndarray, **columns: np.ndarray
) -> "datasets.Dataset":
    """Create the rows of a split, by default as separate puzzles with the blank identifier.

    Args:
        inputs, labels: Tokens [rows, seq_len].
        group_index: int [rows], ascending, so that the rows of a group are adjacent.
        columns: `puzzle_identifiers`, `puzzle_index`, and additional columns, each an array [rows] whose dtype is also
            the name of a `datasets.Value` type.
    """
    import pyarrow as pa
    from datasets import Dataset

    rows, seq_len = inputs.shape
    given = {name: np.asarray(columns.pop(name)) for name in ROW_COLUMNS[2:] if name in columns}
    features = puzzle_features(seq_len, **{name: str(values.dtype) for name, values in columns.items()})
    default = {"puzzle_identifiers": np.zeros(rows, dtype=np.int32), "puzzle_index": np.arange(rows, dtype=np.int32)}
    grids = {"input_ids": _fixed_lists(inputs), "labels": _fixed_lists(labels)}
    columns = {**grids, **default, "group_index": np.asarray(group_index), **given, **columns}
    table = pa.table({name: columns[name] for name in features})
    return Dataset(table.cast(features.arrow_schema))


def _fixed_lists(tokens: np.ndarray):
    import pyarrow as pa

    flat = pa.array(np.ascontiguousarray(tokens, dtype=np.int8).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, tokens.shape[1])


def _read_folder(folder: Path) -> dict[str, PuzzleTable]:
    names = [split_kind + gz for split_kind in FILE_KINDS for gz in ("", ".gz")]
    tables = {}
    for split in ("train", "test"):
        files = [folder / f"{split}{name}" for name in names if (folder / f"{split}{name}").exists()]
        if len(files) > 1:
            raise ValueError(f"{folder} has several {split!r} files: {[file.name for file in files]}; keep one")
        if files:
            tables[split] = read_table(files[0])
    if "train" not in tables:
        raise FileNotFoundError(f"{folder} has no train.csv, train.jsonl, train.json or train.parquet (.gz allowed)")
    return tables


def _read_hub(name: str) -> dict[str, PuzzleTable]:
    from datasets import load_dataset

    splits = load_dataset(name)
    if "train" not in splits:
        raise ValueError(f"hub:{name} has no split 'train'; it has {sorted(splits)}")
    return {
        split: _from_arrow(splits[split].with_format(None).data.table, f"{HUB_PREFIX}{name}, split {split}")
        for split in ("train", "test")
        if split in splits
    }


def _find_columns(names: list[str], place: str) -> tuple[str, str]:
    for pair in COLUMN_NAMES:
        if set(pair) <= set(names):
            return pair
    expected = " or ".join(f"{question!r} and {answer!r}" for question, answer in COLUMN_NAMES)
    raise ValueError(f"{place}: missing column; found {list(names)}, expected {expected}")


def csv_dicts(path: str | Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line number and a dict of the fields of each row in a CSV file."""
    rows = csv_rows(path)
    header = [name.strip().lower() for name in next(rows, (1, []))[1]]
    for number, row in rows:
        if row and len(row) != len(header):
            raise ValueError(f"{path}, line {number}: {len(row)} fields; expected {len(header)} as in line 1")
        if row:
            yield number, dict(zip(header, row))


def _from_arrow(arrow_table, name: str) -> PuzzleTable:
    return _table(name, ((None, row) for batch in arrow_table.to_batches() for row in batch.to_pylist()))


def _table(name: str, rows: Iterable[tuple[int | None, dict[str, Any]]]) -> PuzzleTable:
    """Create a table from rows and their line numbers (None for sources without lines)."""
    table, ratings, rated = PuzzleTable(name, ("", ""), [], [], lines=[]), [], False
    for number, (line, row) in enumerate(rows):
        table.lines.append(line)
        if number == 0:
            table.columns, rated = _find_columns(list(row), table.place(0)), RATING_COLUMN in row
        for column, texts in zip(table.columns, (table.questions, table.answers)):
            board = row.get(column)
            if isinstance(board, list):
                board = _board_text(board)
            if not isinstance(board, str):
                raise ValueError(f"{table.place(number, column)}: {shorten(board)}; expected a string")
            texts.append(board)
        if rated:
            rating = row.get(RATING_COLUMN)
            try:
                ratings.append(float(rating))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{table.place(number, RATING_COLUMN)}: {rating!r}; expected a number") from error
    if not len(table):
        raise ValueError(f"{name} has no rows; expected at least one puzzle")
    return replace(table, ratings=np.array(ratings, dtype=np.float32)) if rated else table


def _board_text(board: list) -> str:
    """Return a board, given as a list of rows or of cells, as text with a line for each row."""
    rows = board if any(isinstance(row, list) for row in board) else [board]
    rows = [[str(cell) for cell in row] if isinstance(row, list) else [str(row)] for row in rows]
    separator = " " if all(cell.strip() for row in rows for cell in row) else ""  # a cell may be a space
    return "\n".join(map(separator.join, rows))
