"""Sudoku and maze sources on their way to rows: files are checked, and no puzzle is in a data set twice.

Rows are equal if their puzzles are (the givens of a Sudoku, the walls, S and G of a maze, however they are written).
Of equal rows the first stays, and one in the test split before one in the training split. Equal puzzles with different
solutions are an error. Symmetric copies of test puzzles in the training split stay, for boards of 4x4 have hardly
anything else, and are counted. A source without equal rows gives the rows that it always gave.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..io.bounded_files import MAX_TABLE_LINE_BYTES, bounded_lines, check_parquet, check_table_line, csv_rows
from ..io.sources import HUB_PREFIX, parse_json
from .readers import FILE_KINDS, PuzzleTable, read_splits


logger = logging.getLogger(__name__)

SUSPICIOUS_BYTES = 10_000  # of a JSON line, from which it is parsed to see that it can be
SUSPICIOUS_BRACKETS = 50


@dataclass(frozen=True)
class PuzzleRules:
    """How a task reads its tables.

    Attributes:
        parse: puzzles and solutions of a table, [rows, cells] each; raises ValueError for a row that is none.
        symmetry_keys: of puzzles [rows, cells]: equal for symmetric copies, and for these only.
        invariants: the same, equal for symmetric copies and perhaps for others: what is cheap to tell. None: symmetric
            copies are not looked for.
    """

    parse: Callable[[PuzzleTable], tuple[np.ndarray, np.ndarray]]
    symmetry_keys: Callable[[np.ndarray], list[bytes]]
    invariants: Callable[[np.ndarray], list[bytes]] | None = None


@dataclass
class PuzzleSplit:
    """One split of a source: where its rows are from, and their tokens or digits, [rows, cells]."""

    table: PuzzleTable
    questions: np.ndarray
    answers: np.ndarray
    places: np.ndarray = field(default=None)  # rows of the table

    def __post_init__(self):
        self.places = np.arange(len(self.questions)) if self.places is None else self.places

    def place(self, row: int) -> str:
        return self.table.place(int(self.places[row]))

    def take(self, rows: np.ndarray) -> "PuzzleSplit":
        ratings = self.table.ratings
        # The table keeps its rows, which name places; ratings belong to the rows that stay.
        table = replace(self.table, ratings=None if ratings is None else ratings[rows])
        return PuzzleSplit(table, self.questions[rows], self.answers[rows], self.places[rows])


def read_unique(
    source: str | Path,
    test_size: int | None,
    rules: Callable[[PuzzleTable], "PuzzleRules"],
) -> tuple[dict[str, PuzzleSplit], dict[str, int]]:
    """The splits of a source without equal rows, and how many rows repeat others, by what was done with them.

    Args:
        source: as for `readers.read_splits`.
        test_size: for a source without a test split, the number of last rows that become one.
        rules: what the training table's first puzzle says about all.

    Raises:
        FileNotFoundError, ValueError: as `readers.read_splits`; a file that `check_source` refuses; equal puzzles with
            different solutions, with both places.
    """
    check_source(source)
    tables = read_splits(source)
    game = rules(tables["train"])
    splits = {name: PuzzleSplit(table, *game.parse(table)) for name, table in tables.items()}
    repeated: dict[str, int] = {}
    _remove_equal(splits, repeated)
    if test_size is not None:
        splits = _hold_out(splits, test_size, source)
    if not len(splits["train"].questions):
        raise ValueError(f"every training puzzle of {source} is in its test split too; nothing is left to train on")
    if "test" in splits and game.invariants is not None:
        _count_symmetric(splits, game, repeated)
    for what, count in repeated.items():
        logger.warning("%s: %d rows %s", source, count, what)
    return splits, repeated


def check_source(source: str | Path) -> None:
    """Refuses files that are packed bombs, binary, or have rows longer than any puzzle; names file and line.

    Raises:
        ValueError: see above. What is missing or of an unknown kind is for the reader to say.
    """
    path = Path(source)
    if str(source).startswith(HUB_PREFIX) or not path.exists():
        return
    names = [f"{split}{kind}{packed}" for split in ("train", "test") for kind in FILE_KINDS for packed in ("", ".gz")]
    for file in [path] if path.is_file() else [path / name for name in names if (path / name).is_file()]:
        kind = Path(file.name.removesuffix(".gz")).suffix
        if kind == ".parquet":
            check_parquet(file)
        elif kind == ".csv":
            for _ in csv_rows(file):
                pass
        elif kind == ".jsonl":
            _check_json_lines(file)


def _check_json_lines(file: Path) -> None:
    for number, line in bounded_lines(file, MAX_TABLE_LINE_BYTES):
        place = f"{file}, line {number}"
        check_table_line(line, place)
        # The reader parses every line; here only those that could end it without a word of file and line.
        if len(line) > SUSPICIOUS_BYTES or line.count(b"[") + line.count(b"{") > SUSPICIOUS_BRACKETS:
            parse_json(line, place)


def _remove_equal(splits: dict[str, PuzzleSplit], repeated: dict[str, int]) -> None:
    names = sorted(splits)  # test before train
    parts = [splits[name] for name in names]
    starts = np.cumsum([0, *(len(part.questions) for part in parts)])
    rows = np.ascontiguousarray(np.concatenate([part.questions for part in parts]))
    _, firsts, groups = np.unique(
        rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize))).reshape(-1),
        return_index=True, return_inverse=True,
    )  # fmt: skip
    first = firsts[groups]
    again = np.flatnonzero(first != np.arange(len(rows)))
    if not len(again):
        return
    answers = np.concatenate([part.answers for part in parts])
    for row in again[(answers[again] != answers[first[again]]).any(axis=1)][:1]:
        one, two = (_located(parts, starts, index) for index in (first[row], row))
        raise ValueError(
            f"{two}: the puzzle of {one} with another solution; a puzzle has one, so mend or remove a row"
        )
    for index, name in enumerate(names):
        here = (again >= starts[index]) & (again < starts[index + 1])
        in_test = here & (first[again] < starts[index])  # the other split, which comes first
        for reason, rows_left_out in (
            (f"equal to another in {name}, left out", here & ~in_test),
            ("in train and equal to one in test, left out", in_test),
        ):
            if rows_left_out.any():
                repeated[reason] = int(rows_left_out.sum())
        if here.any():
            stays = np.ones(len(parts[index].questions), dtype=bool)
            stays[again[here] - starts[index]] = False
            splits[name] = parts[index].take(np.flatnonzero(stays))


def _located(parts: list[PuzzleSplit], starts: np.ndarray, row: int) -> str:
    part = int(np.searchsorted(starts, row, side="right")) - 1
    return parts[part].place(row - starts[part])


def _hold_out(splits: dict[str, PuzzleSplit], test_size: int, source) -> dict[str, PuzzleSplit]:
    if "test" in splits:
        count = len(splits["test"].questions)
        raise ValueError(f"{source} has a test split of its own ({count} rows); leave out --test-size")
    train, rows = splits["train"], len(splits["train"].questions)
    if not 0 < test_size < rows:
        raise ValueError(f"test_size is {test_size}; expected 1 to {rows - 1} of the {rows} rows of {source}")
    cut = rows - test_size
    return {"train": train.take(np.arange(cut)), "test": train.take(np.arange(cut, rows))}


def _count_symmetric(splits: dict[str, PuzzleSplit], rules: PuzzleRules, repeated: dict[str, int]) -> None:
    """Copies are looked for among the few puzzles whose invariants are those of one in the other split."""
    train, test = splits["train"].questions, splits["test"].questions
    of_train, of_test = rules.invariants(train), rules.invariants(test)
    known, asked = set(of_test), set(of_train)
    train = train[[row for row, invariant in enumerate(of_train) if invariant in known]]
    test = test[[row for row, invariant in enumerate(of_test) if invariant in asked]]
    keys = set(rules.symmetry_keys(test))
    count = sum(key in keys for key in rules.symmetry_keys(train))
    if count:
        repeated["in train, symmetric copies of puzzles in test, kept"] = count
