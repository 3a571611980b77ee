"""Reads the question/answer files of the Sudoku and maze builders, and makes rows of a puzzle data set of them.

A source is a file (`.csv`, `.jsonl`, `.parquet`; the first two also as `.gz`), a folder with `train.*` and `test.*`,
or a data set of the Hub written `hub:OWNER/NAME`. Every source has one string column with puzzles and one with
solutions, named as in `COLUMN_NAMES`, and optionally a number column `rating`. What the strings mean is the builders'
business.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..io.files import HUB_PREFIX, csv_rows, json_object, numbered_lines, shorten
from ..resources import existing_path
from .dataset import ROW_COLUMNS, puzzle_features


if TYPE_CHECKING:
    import datasets

# The Hub sets of the HRM authors, our own files, and the widespread Kaggle header.
COLUMN_NAMES = (("question", "answer"), ("puzzle", "solution"), ("quizzes", "solutions"))
RATING_COLUMN = "rating"
FILE_KINDS = (".csv", ".jsonl", ".parquet")


@dataclass
class PuzzleTable:
    """Puzzles and solutions as text, with enough memory of their origin to name a faulty row.

    Attributes:
        name: file, or `hub:NAME`, as it is shown in errors.
        columns: names of the puzzle column and the solution column in the source.
        questions, answers: one string per row.
        ratings: float32 [rows], or None where the source has no such column.
        lines: number of the line of each row in a text file, from 1; None for a row without.
    """

    name: str
    columns: tuple[str, str]
    questions: list[str]
    answers: list[str]
    ratings: np.ndarray | None = None
    lines: list[int | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.questions)

    def place(self, row: int) -> str:
        """Names a row for an error message: by its line in a text file, else by its index from 0."""
        return f"{self.name}, row {row}" if self.lines[row] is None else f"{self.name}, line {self.lines[row]}"

    def codes(self, column: int, length: int, alphabet: dict[str, int]) -> np.ndarray:
        """Translates a column into numbers.

        Args:
            column: 0 for puzzles, 1 for solutions.
            length: characters that every string must have.
            alphabet: number of each legal character.

        Returns:
            uint8 [rows, length].

        Raises:
            ValueError: a string of another length or with another character, named with its place.
        """
        texts = self.answers if column else self.questions
        where = f"column {self.columns[column]!r}"
        lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
        for row in np.flatnonzero(lengths != length)[:1]:
            raise ValueError(
                f"{self.place(row)}, {where}: {lengths[row]} characters {shorten(texts[row])}; expected {length}"
            )
        lookup = np.full(256, 255, dtype=np.uint8)
        for character, code in alphabet.items():
            lookup[ord(character)] = code
        # A character outside ASCII becomes "?", which no alphabet has; the message shows the real one.
        raw = np.frombuffer("".join(texts).encode("ascii", "replace"), dtype=np.uint8)
        codes = lookup[raw].reshape(len(texts), length)
        for row, position in np.argwhere(codes == 255)[:1]:
            raise ValueError(
                f"{self.place(row)}, {where}: character {texts[row][position]!r} at position {position + 1} of "
                f"{shorten(texts[row])}; expected one of {''.join(alphabet)!r}"
            )
        return codes


def read_splits(source: str | Path) -> dict[str, PuzzleTable]:
    """Reads a source and returns its tables by split name: "train" and, where there is one, "test".

    Args:
        source: file, folder with `train.*` and `test.*`, or `hub:OWNER/NAME`.

    Raises:
        FileNotFoundError: no such file, or a folder without `train.*`.
        ValueError: unknown kind of file, missing column, or a malformed line.
    """
    if str(source).startswith(HUB_PREFIX):
        return _read_hub(str(source)[len(HUB_PREFIX) :])
    source = existing_path(source)
    if source.is_dir():
        return _read_folder(source)
    return {"train": read_table(source)}


def read_table(path: str | Path) -> PuzzleTable:
    """Reads one file; errors as in `read_splits`."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a file, a folder with train.* files, or hub:NAME")
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind == ".csv":
        return _table(str(path), _csv_rows(path))
    if kind == ".jsonl":
        return _table(str(path), _jsonl_rows(path))
    if kind == ".parquet" and path.suffix != ".gz":
        import pyarrow as pa
        import pyarrow.parquet

        try:
            return _from_arrow(pyarrow.parquet.read_table(path), str(path))
        except pa.ArrowException as error:
            raise ValueError(f"{path}: cannot be read as Parquet ({error})") from error
    raise ValueError(f"{path}: unknown kind of file {path.suffix!r}; expected .csv[.gz], .jsonl[.gz] or .parquet")


def make_split(
    inputs: np.ndarray, labels: np.ndarray, group_index: np.ndarray, **columns: np.ndarray
) -> "datasets.Dataset":
    """Make the rows of one split; by default every puzzle is one example and has the blank identifier.

    Args:
        inputs, labels: tokens [rows, seq_len].
        group_index: int [rows], ascending; rows of one group are neighbors.
        columns: `puzzle_identifiers`, `puzzle_index`, and additional columns, each an array [rows] of a dtype that
            `datasets.Value` knows by the same name.
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
            raise ValueError(f"{folder} has several files for the split {split!r}: {[file.name for file in files]}")
        if files:
            tables[split] = read_table(files[0])
    if "train" not in tables:
        raise FileNotFoundError(f"{folder} has no train.csv, train.jsonl or train.parquet (.gz allowed)")
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
    raise ValueError(f"{place}: missing column; it has {list(names)}, expected {expected}")


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    rows = csv_rows(path)
    _, header = next(rows, (1, []))
    for number, row in rows:
        if row and len(row) != len(header):
            raise ValueError(f"{path}, line {number}: {len(row)} fields; expected {len(header)} as in line 1")
        if row:
            yield number, dict(zip(header, row))


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for place, line in numbered_lines(path):
        yield int(place.rpartition(" ")[2]), json_object(line, place)


def _from_arrow(arrow_table, name: str) -> PuzzleTable:
    return _table(name, ((None, row) for batch in arrow_table.to_batches() for row in batch.to_pylist()))


def _table(name: str, rows: Iterable[tuple[int | None, dict[str, Any]]]) -> PuzzleTable:
    """The table of rows with the numbers of their lines, None where there are no lines."""
    table, ratings, rated = PuzzleTable(name, ("", ""), [], [], lines=[]), [], False
    for number, (line, row) in enumerate(rows):
        table.lines.append(line)
        if number == 0:
            table.columns, rated = _find_columns(list(row), table.place(0)), RATING_COLUMN in row
        for column, texts in zip(table.columns, (table.questions, table.answers)):
            if not isinstance(row.get(column), str):
                raise ValueError(
                    f"{table.place(number)}, column {column!r}: {shorten(row.get(column))}; expected a string"
                )
            texts.append(row[column])
        if rated:
            rating = row.get(RATING_COLUMN)
            try:
                ratings.append(float(rating))
            except (TypeError, ValueError) as error:
                place = f"{table.place(number)}, column {RATING_COLUMN!r}"
                raise ValueError(f"{place}: {rating!r}; expected a number") from error
    if not len(table):
        raise ValueError(f"{name} has no rows; expected at least one puzzle")
    return replace(table, ratings=np.array(ratings, dtype=np.float32)) if rated else table
