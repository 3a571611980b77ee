"""Sudoku and maze sources on their way to rows: files are checked, and no puzzle is in two splits or twice in one.

Rows are equal if their puzzles are (the givens of a Sudoku, the walls, S and G of a maze, however they are written).
Of equal rows the first stays, and one in the test split before one in the training split. Equal puzzles with different
solutions are an error. Training puzzles of which a symmetric copy is in the test split are left out, so a published
test split stays whole; copies within a split stay. All that is left out is counted and said. A source without such
rows gives the rows that it always gave.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from .readers import PuzzleTable, read_splits


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PuzzleRules:
    """How a task reads its tables.

    Attributes:
        parse: puzzles and solutions of a table, [rows, cells] each; raises ValueError for a row that is none.
        canonical_forms: of puzzles and solutions [rows, cells]: equal for symmetric copies, and for these only.
    """

    parse: Callable[[PuzzleTable], tuple[np.ndarray, np.ndarray]]
    canonical_forms: Callable[[np.ndarray, np.ndarray], Iterable]

    def forms_of(self, split: "PuzzleSplit") -> list[bytes]:
        """Canonical forms of a split's puzzles, computed once."""
        if split.forms is None:
            split.forms = [bytes(form) for form in self.canonical_forms(split.questions, split.answers)]
        return split.forms


@dataclass(frozen=True)
class HeldOut:
    """Which rows of a source without a test split become one; none by default.

    Attributes:
        size: number of last rows.
        share: share of the puzzles, 0 to 1, by `place_of_form`: it hangs on neither order nor number of the rows, a
            smaller share is part of a larger one, and symmetric copies are on one side.
    """

    size: int | None = None
    share: float | None = None


@dataclass
class PuzzleSplit:
    """One split of a source: where its rows are from, and their tokens or digits, [rows, cells]."""

    table: PuzzleTable
    questions: np.ndarray
    answers: np.ndarray
    places: np.ndarray = field(default=None)  # rows of the table
    forms: list[bytes] | None = None  # see PuzzleRules

    def __post_init__(self):
        self.places = np.arange(len(self.questions)) if self.places is None else self.places

    def place(self, row: int) -> str:
        return self.table.place(int(self.places[row]))

    def take(self, rows: np.ndarray) -> "PuzzleSplit":
        ratings = self.table.ratings
        # The table keeps its rows, which name places; ratings belong to the rows that stay.
        table = replace(self.table, ratings=None if ratings is None else ratings[rows])
        forms = self.forms and [self.forms[row] for row in rows]
        return PuzzleSplit(table, self.questions[rows], self.answers[rows], self.places[rows], forms)


def read_unique(
    source: str | Path,
    held_out: HeldOut,
    rules: Callable[[PuzzleTable], "PuzzleRules"],
) -> tuple[dict[str, PuzzleSplit], dict[str, int]]:
    """The splits of a source without equal rows, and how many rows repeat others, by what was done with them.

    Args:
        source: as for `readers.read_splits`.
        held_out: for a source without a test split, the rows that become one.
        rules: what the training table's first puzzle says about all.

    Raises:
        FileNotFoundError, ValueError: as `readers.read_splits`; equal puzzles with different solutions, with both
            places.
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
        raise ValueError(
            f"every training puzzle of {source} is in its test split too, or a symmetric copy of one there; nothing "
            "is left to train on"
        )
    for what, count in repeated.items():
        logger.warning("%s: %d rows %s", source, count, what)
    return splits, repeated


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


def place_of_form(form: bytes) -> float:
    """A number from 0 to below 1 for a canonical form: its place in a split by shares, the same for ever.

    It is the first 53 bits of the form's BLAKE2b digest of 8 bytes, as a fraction.
    """
    return (int.from_bytes(hashlib.blake2b(form, digest_size=8).digest(), "big") >> 11) / 2**53


def _hold_out(splits: dict[str, PuzzleSplit], held_out: HeldOut, rules: PuzzleRules, source) -> dict[str, PuzzleSplit]:
    if held_out.size is not None and held_out.share is not None:
        raise ValueError(f"test_share={held_out.share}: test_size={held_out.size} is given too; remove one")
    if held_out.size is None and held_out.share is None:
        return splits
    option = "--test-size" if held_out.share is None else "--test-share"
    if "test" in splits:
        count = len(splits["test"].questions)
        raise ValueError(f"{source} has a test split of its own ({count} rows); leave out {option}")
    train, rows = splits["train"], len(splits["train"].questions)
    if held_out.share is None:
        if not 0 < held_out.size < rows:
            raise ValueError(f"test_size={held_out.size}: must be in [1, {rows - 1}], as {source} has {rows} rows")
        in_test = np.arange(rows) >= rows - held_out.size
    else:
        if not 0 < held_out.share < 1:
            raise ValueError(f"test_share={held_out.share}: must be between 0 and 1")
        in_test = np.array([place_of_form(form) < held_out.share for form in rules.forms_of(train)])
        if in_test.all() or not in_test.any():
            raise ValueError(
                f"test_share={held_out.share}: puts {in_test.sum()} of the {rows} rows of {source} into the test "
                "split; use another share"
            )
    return {"train": train.take(np.flatnonzero(~in_test)), "test": train.take(np.flatnonzero(in_test))}


def _remove_copies(splits: dict[str, PuzzleSplit], rules: PuzzleRules, repeated: dict[str, int]) -> None:
    """Training puzzles of which a symmetric copy is in the test split go."""
    known = set(rules.forms_of(splits["test"]))
    stays = np.array([form not in known for form in rules.forms_of(splits["train"])])
    if not stays.all():
        repeated["in train and symmetric copies of puzzles in test, left out"] = int((~stays).sum())
        splits["train"] = splits["train"].take(np.flatnonzero(stays))
