"""Sudoku data sets of size 4, 6 and 9: generator, augmentation, and the way from a source to rows.

Tokens, options and the order of the augmentation's draws are those of the original HRM. Deliberately different: every
random draw hangs on a seed, source rows are checked, and an augmented training puzzle never has the solution of a test
puzzle (with 4x4 boards it otherwise would: only 288 solved grids exist). Rules and solver are in `sudoku_rules.py`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .dataset import PuzzleInfo
from .readers import PuzzleTable, make_split, progress_bar, with_progress
from .sources import HeldOut, PuzzleRules, PuzzleSplit, read_unique
from .sudoku_batch import rate_boards
from .sudoku_generation import WHOLE, Puzzles, all_grids_4x4, generate, generate_portions, rng_of
from .sudoku_rules import (
    BOX_SHAPES,
    DIGIT_OFFSET,
    SudokuShape,
    count_solutions,
    decode,
    decode_grid,
    encode,
    rate,
    solve,
    sudoku_shape,
    to_board,
    validate_solution,
)
from .sudoku_symmetry import canonical_forms, symmetry_keys


if TYPE_CHECKING:
    import datasets

__all__ = [
    "SudokuShape",
    "all_grids_4x4",
    "augment",
    "canonical_forms",
    "count_solutions",
    "decode",
    "decode_grid",
    "encode",
    "generate",
    "generated_sudoku",
    "rate",
    "solve",
    "sudoku_from_source",
    "sudoku_shape",
    "to_board",
    "validate_solution",
]

DEFAULT_CLUES = {4: 8, 6: 14, 9: 30}
MAX_DRAWS = 1000  # of a symmetry of a training puzzle before all are said to have solutions of test puzzles
CHECK_ROWS = 100_000  # rows checked at once: bounds memory for the millions of rows of the Hub set

# Independent random streams of one seed.
_SPLIT_STREAM, _TEST_STREAM, _TRAIN_STREAM, _AUGMENT_STREAM, _SUBSAMPLE_STREAM = range(5)


# ---------------------------------------------------------------------------------------------------- augmentation


def augment(
    board: np.ndarray, solution: np.ndarray, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draws `count` random symmetries of Sudoku and applies them to a puzzle and its solution.

    The draws, in the original's order: a permutation of the digits; transposition with probability 1/2 (only where
    boxes are square, since it would turn 2x3 boxes into 3x2); the order of the bands and of the rows in each; the
    order of the stacks and of the columns in each. Then new[i, j] = digits[old[rows[i], columns[j]]].

    Args:
        board, solution: digits [size * size].

    Returns:
        Puzzles and solutions, uint8 [count, size * size].
    """
    shape = sudoku_shape(int(len(board) ** 0.5))
    n, (box_rows, box_cols) = shape.size, shape.box_shape
    digits = np.zeros((count, n + 1), dtype=np.uint8)  # column 0: a blank stays blank
    digits[:, 1:] = rng.permuted(np.tile(np.arange(1, n + 1), (count, 1)), axis=1)
    square = box_rows == box_cols
    transposed = rng.random(count) < 0.5 if square else np.zeros(count, dtype=bool)
    rows, columns = (_random_lines(n, box, count, rng) for box in (box_rows, box_cols))
    source = moved_cells(rows, columns, transposed)
    new_board, new_solution = (np.take_along_axis(digits, old[source], axis=1) for old in (board, solution))
    return new_board, new_solution


def moved_cells(rows: np.ndarray, columns: np.ndarray, transposed: np.ndarray) -> np.ndarray:
    """Where each cell of a symmetric board comes from, int [count, n * n], from orders of lines [count, n]."""
    n, rows, columns = rows.shape[1], rows[:, :, None], columns[:, None, :]
    source = np.where(transposed[:, None, None], columns * n + rows, rows * n + columns)
    return source.reshape(len(source), -1)


def _random_lines(n: int, box: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random orders of `n` lines that keep the lines of a band together, int [count, n]."""
    bands = rng.permuted(np.tile(np.arange(n // box), (count, 1)), axis=1)
    within = rng.permuted(np.tile(np.arange(box), (count * (n // box), 1)), axis=1).reshape(count, n // box, box)
    return (bands[:, :, None] * box + within).reshape(count, n)


def _augment_all(boards, solutions, num_aug: int, seed: int, forbidden: set[bytes], progress: bool):
    """Each puzzle followed by `num_aug` symmetries of it whose solutions are not in `forbidden`."""
    rng = rng_of((seed, _AUGMENT_STREAM))
    rows, cells = boards.shape
    new_boards, new_solutions = np.empty((2, rows, num_aug + 1, cells), dtype=np.uint8)
    for i in with_progress(range(rows), "augmenting", progress):
        new_boards[i, 0], new_solutions[i, 0] = boards[i], solutions[i]
        missing = np.arange(1, num_aug + 1)
        for _ in range(MAX_DRAWS):
            if not len(missing):
                break
            drawn = augment(boards[i], solutions[i], len(missing), rng)
            new_boards[i, missing], new_solutions[i, missing] = drawn
            missing = missing[[solution.tobytes() in forbidden for solution in drawn[1]]]
        else:
            raise RuntimeError(
                f"the symmetries of training puzzle {i} all have solutions of test puzzles; use --num-aug 0"
            )
    return new_boards.reshape(-1, cells), new_solutions.reshape(-1, cells)


# ---------------------------------------------------------------------------------------------------- data sets


def generated_sudoku(
    size: int = 9,
    num_train: int = 1000,
    num_test: int = 1000,
    clues: int | Sequence[int] | None = None,
    *,
    test_fraction: float = 1 / 6,
    num_aug: int = 0,
    mix: str | Path | None = None,
    test_share: float | None = None,
    seed: int = 0,
    workers: int = 1,
    store: Path | None = None,
    progress: bool = False,
) -> "tuple[datasets.DatasetDict, PuzzleInfo]":
    """Generates a data set whose train and test puzzles share no solution grid, and are no copies of one another.

    Args:
        clues: as for `generate`; None for 8, 14 or 30, by size.
        test_fraction: of 4x4 boards, the share of the 288 solution grids, and of the canonical forms of puzzles, that
            is kept for the test split.
        num_aug: symmetries added to each training puzzle.
        mix: a source (see `readers`) whose training puzzles are added to the training split, and whose test puzzles
            become the split `test_mixed`. No generated puzzle is a copy of one of them.
        test_share: for a `mix` without a test split, the share of its puzzles that become one; see `sources.HeldOut`.
        workers, store: as for `generate_portions`; the puzzles do not depend on them.
        progress: show a progress bar on stderr.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: as `generate` and `sudoku_from_source`.
    """
    clues = DEFAULT_CLUES[sudoku_shape(size).size] if clues is None else clues
    train_grids = test_grids = None
    if size == 4:
        order = rng_of((seed, _SPLIT_STREAM)).permutation(all_grids_4x4())
        held_out = round(len(order) * test_fraction)
        if not 0 < held_out < len(order):
            raise ValueError(f"test_fraction is {test_fraction}; expected a share between 0 and 1 of the 288 grids")
        test_grids, train_grids = order[:held_out], order[held_out:]

    def draw(split: str, count: int, stream: int, **options) -> Puzzles:
        how = {"workers": workers, "store": store, **options}
        portions = generate_portions(size, count, clues, (seed, stream), **how)
        return _collect(portions, count, size, f"{split} puzzles", progress)

    rules = _rules(size)
    given, repeated = ({}, {}) if mix is None else read_unique(mix, HeldOut(share=test_share), lambda _: rules)
    given_forms = {form for split in given.values() for form in rules.forms_of(split)}
    # Of 4x4 there are few puzzles that are no copies: a test split of many would hold them all, so each has its side.
    sides = {"test": (0.0, test_fraction), "train": (test_fraction, 1.0)} if size == 4 else {}
    how = {"grids": test_grids, "exclude_forms": given_forms, "share": sides.get("test", WHOLE)}
    test = draw("test", num_test, _TEST_STREAM, **how)
    used, forms = ({row.tobytes() for row in rows} for rows in (test.solutions, test.forms))
    how = {"grids": train_grids, "exclude_forms": given_forms | forms, "share": sides.get("train", WHOLE)}
    train = draw("train", num_train, _TRAIN_STREAM, exclude=used, **how)
    parts = {"train": tuple(train[:3]), "test": tuple(test[:3])}
    for split, name in (("train", "train"), ("test", "test_mixed")):
        if split in given:
            rows = _select(given[split], None, None, seed, progress)
            parts[name] = [np.concatenate(both) for both in zip(parts[name], rows)] if name in parts else rows

    options = {"source": "generate", "size": size, "num_train": num_train, "num_test": num_test, "clues": clues}
    options |= {"test_fraction": test_fraction, "num_aug": num_aug, "seed": seed}
    options |= {} if mix is None else {"mix": str(mix), "test_share": test_share}
    forbidden = {grid.tobytes() for grid in test_grids} if size == 4 else used
    made, info = _assemble(parts, size, num_aug, seed, forbidden, options, progress)
    info.repeated = repeated
    return made, info


def sudoku_from_source(
    source: str | Path,
    size: int | None = None,
    *,
    subsample_size: int | None = None,
    min_difficulty: float | None = None,
    num_aug: int = 0,
    test_size: int | None = None,
    test_share: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> "tuple[datasets.DatasetDict, PuzzleInfo]":
    """Reads a data set from a file, a folder or the Hub (see `readers`); ratings it lacks are computed with `rate`.

    Args:
        size: board size; found from the length of the first puzzle if None.
        subsample_size: number of training puzzles to keep, drawn without replacement.
        min_difficulty: lowest rating to keep, in both splits.
        num_aug: symmetries added to each training puzzle; they inherit its rating.
        test_size, test_share: for a source without a test split, the number of last rows that become one, or the
            share of puzzles that do so by a hash of their canonical form; see `sources.HeldOut`.

    Raises:
        FileNotFoundError, ValueError: as `puzzle_sources.read_unique`; or a row that is no board, a solution that
            breaks the rules or its puzzle's clues, or an option that leaves no rows.
    """
    options = {"source": str(source), "size": size, "subsample_size": subsample_size}
    options |= {"min_difficulty": min_difficulty, "num_aug": num_aug, "test_size": test_size, "seed": seed}
    options |= {} if test_share is None else {"test_share": test_share}
    splits, repeated = read_unique(
        source, HeldOut(test_size, test_share), lambda train: _rules(size or _board_size(train))
    )
    shape = sudoku_shape(int(splits["train"].questions.shape[1] ** 0.5))
    parts = {}
    for split, rows in splits.items():
        keep = subsample_size if split == "train" else None
        parts[split] = _select(rows, min_difficulty, keep, seed, progress)
    forbidden = {solution.tobytes() for solution in parts["test"][1]} if "test" in parts and num_aug else set()
    made, info = _assemble(parts, shape.size, num_aug, seed, forbidden, options, progress)
    info.repeated = repeated
    return made, info


def _board_size(table: PuzzleTable) -> int:
    text, sizes = table.questions[0], {n**2: n for n in BOX_SHAPES}
    if len(text) not in sizes:
        where = f"{table.place(0)}, column {table.columns[0]!r}"
        raise ValueError(f"{where}: {len(text)} characters {text!r:.100}; expected {' or '.join(map(str, sizes))}")
    return sizes[len(text)]


def _rules(size: int) -> PuzzleRules:
    shape = sudoku_shape(size)
    return PuzzleRules(lambda table: _parse(table, shape), symmetry_keys)


def _parse(table: PuzzleTable, shape: SudokuShape) -> tuple[np.ndarray, np.ndarray]:
    """Boards and solutions, uint8 [rows, cells], every row checked against the rules."""
    alphabet = {".": 0} | {str(digit): digit for digit in range(shape.size + 1)}
    boards, solutions = (table.codes(column, shape.cells, alphabet) for column in (0, 1))
    for start in range(0, len(table), CHECK_ROWS):
        rows = slice(start, start + CHECK_ROWS)
        for bad in np.flatnonzero(~_are_valid(boards[rows], solutions[rows], shape))[:1]:
            row = start + bad
            problems = validate_solution(table.questions[row], table.answers[row])
            raise ValueError(
                f"{table.place(row)}, column {table.columns[1]!r}: {table.answers[row]!r} does not solve "
                f"{table.questions[row]!r}: {'; '.join(problems[:3])}"
            )
    return boards, solutions


def _are_valid(boards: np.ndarray, solutions: np.ndarray, shape: SudokuShape) -> np.ndarray:
    """Whether each row's solution obeys the rules and the clues, bool [rows]."""
    valid = ((boards == 0) | (boards == solutions)).all(axis=1)
    bits = np.left_shift(1, solutions, dtype=np.uint16)
    every_digit = (1 << (shape.size + 1)) - 2
    for _, cells in shape.units:
        valid &= np.bitwise_or.reduce(bits[:, cells], axis=1) == every_digit
    return valid


def _select(split: PuzzleSplit, min_difficulty, subsample_size, seed: int, progress: bool):
    """Filters by rating, then draws a sample; returns boards, solutions and ratings float32 [rows]."""
    boards, solutions, table = split.questions, split.answers, split.table
    ratings, rows = table.ratings, np.arange(len(boards))
    if min_difficulty is not None:
        ratings = _rate_all(boards, progress) if ratings is None else ratings
        rows = np.flatnonzero(ratings >= min_difficulty)
        if not len(rows):
            raise ValueError(
                f"min_difficulty {min_difficulty} leaves no puzzle of {table.name}: max is {ratings.max()}"
            )
    if subsample_size is not None:
        if not 0 < subsample_size <= len(rows):
            raise ValueError(f"subsample_size is {subsample_size}; expected 1 to {len(rows)} puzzles of {table.name}")
        rows = np.sort(rng_of((seed, _SUBSAMPLE_STREAM)).choice(rows, subsample_size, replace=False))
    boards, solutions = boards[rows], solutions[rows]
    return boards, solutions, _rate_all(boards, progress) if ratings is None else ratings[rows]


def _rate_all(boards: np.ndarray, progress: bool) -> np.ndarray:
    starts = range(0, len(boards), CHECK_ROWS)
    parts = [rate_boards(boards[at : at + CHECK_ROWS]) for at in with_progress(starts, "rating", progress)]
    return np.concatenate(parts).astype(np.float32)


def _collect(portions: Iterator[Puzzles], count: int, size: int, title: str, progress: bool) -> Puzzles:
    """All puzzles of the portions, with a progress bar that counts puzzles."""
    none = np.empty((0, size**2), dtype=np.uint8)
    parts = [Puzzles(boards=none, solutions=none, ratings=np.empty(0, dtype=np.float32), forms=none)]
    with progress_bar(title, progress, count) as bar:
        for portion in portions:
            parts.append(portion)
            bar.update(len(portion.boards))
    return Puzzles(*map(np.concatenate, zip(*parts)))


def _assemble(parts, size, num_aug, seed, forbidden, options, progress) -> "tuple[datasets.DatasetDict, PuzzleInfo]":
    from datasets import DatasetDict

    splits = DatasetDict()
    for split, (boards, solutions, ratings) in sorted(parts.items(), key=lambda part: part[0] != "train"):
        if not len(boards):
            continue
        copies = num_aug + 1 if split == "train" else 1
        if copies > 1:
            boards, solutions = _augment_all(boards, solutions, num_aug, seed, forbidden, progress)
        groups = np.repeat(np.arange(len(ratings)), copies)
        tokens = boards + DIGIT_OFFSET, solutions + DIGIT_OFFSET
        splits[split] = make_split(*tokens, groups, rating=np.repeat(ratings, copies))
    shape = sudoku_shape(size)
    info = PuzzleInfo("sudoku", (size, size), shape.vocab_size, box_shape=shape.box_shape, options=options)
    return splits, info
