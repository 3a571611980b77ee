"""Generate Sudoku data sets of size 4, 6 or 9, or read them from a source, and augment them.

Tokens, options and the order of random draws in augmentation are those of the original HRM. Deliberate differences:
all random draws are seeded, source rows are validated, and an augmented training puzzle never has the solution of a
test puzzle.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from .board_text import SMALL_BOXES
from .dataset import PuzzleInfo
from .options import DEFAULT_CLUES
from .readers import HeldOut, PuzzleRules, PuzzleSplit, PuzzleTable, make_split, read_unique
from .sudoku_generation import Puzzles, all_grids_4x4, canonical_forms, generate_portions, rng_of
from .sudoku_rules import DIGIT_OFFSET, SudokuShape, obey_rules, sudoku_shape, validate_solution
from .sudoku_solver import rate_boards


if TYPE_CHECKING:
    import datasets

TEST_FRACTION = 1 / 6  # fraction of the 288 4x4 grids, and of the 4x4 canonical forms, reserved for the test split
MAX_DRAWS = 1000  # tries per training puzzle to draw symmetric copies whose solutions are not in the test split

# Independent random streams derived from one seed.
_SPLIT_STREAM, _TEST_STREAM, _TRAIN_STREAM, _AUGMENT_STREAM, _SUBSAMPLE_STREAM = range(5)


def random_symmetries(shape: SudokuShape, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw `count` symmetries as new digits, uint8 [count, size + 1], and source cells, int [count, cells].

    The draws, in the original order: a permutation of the digits; transposition with probability 1/2 (only if boxes
    are square); the order of bands and of rows within a band; the order of stacks and of columns within a stack. The
    new board is `digits[board[cells]]`.
    """
    n, (box_rows, box_cols) = shape.size, shape.box_shape
    digits = np.zeros((count, n + 1), dtype=np.uint8)
    digits[:, 1:] = rng.permuted(np.tile(np.arange(1, n + 1), (count, 1)), axis=1)
    square = box_rows == box_cols
    transposed = rng.random(count) < 0.5 if square else np.zeros(count, dtype=bool)
    rows, columns = (_random_lines(n, box, count, rng) for box in (box_rows, box_cols))
    return digits, moved_cells(rows, columns, transposed)


def augment(
    board: np.ndarray, solution: np.ndarray, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Apply `count` random symmetries to a puzzle and its solution, uint8 [count, cells] each."""
    digits, cells = random_symmetries(sudoku_shape(int(len(board) ** 0.5)), count, rng)
    return tuple(np.take_along_axis(digits, old[cells], axis=1) for old in (board, solution))


def moved_cells(rows: np.ndarray, columns: np.ndarray, transposed: np.ndarray) -> np.ndarray:
    """Return the original index of each cell of each copy, int [count, n * n], given line orders [count, n]."""
    n, rows, columns = rows.shape[1], rows[:, :, None], columns[:, None, :]
    source = np.where(transposed[:, None, None], columns * n + rows, rows * n + columns)
    return source.reshape(len(source), n * n)


def _random_lines(n: int, box: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw random orders of `n` lines, int [count, n], that keep the lines of each band together."""
    bands = rng.permuted(np.tile(np.arange(n // box), (count, 1)), axis=1)
    within = rng.permuted(np.tile(np.arange(box), (count * (n // box), 1)), axis=1).reshape(count, n // box, box)
    return (bands[:, :, None] * box + within).reshape(count, n)


def _augment_all(boards, solutions, num_aug: int, seed: int, forbidden: set[bytes]):
    """Insert `num_aug` symmetric copies after each puzzle. No copy has a solution in `forbidden`."""
    rng = rng_of((seed, _AUGMENT_STREAM))
    rows, cells = boards.shape
    new_boards, new_solutions = np.empty((2, rows, num_aug + 1, cells), dtype=np.uint8)
    for i in tqdm(range(rows), "augmenting", disable=None):
        new_boards[i, 0], new_solutions[i, 0] = boards[i], solutions[i]
        missing = np.arange(1, num_aug + 1)
        for _ in range(MAX_DRAWS):
            if not len(missing):
                break
            drawn = augment(boards[i], solutions[i], len(missing), rng)
            new_boards[i, missing], new_solutions[i, missing] = drawn
            missing = missing[[solution.tobytes() in forbidden for solution in drawn[1]]]
        else:
            text = f"all symmetries of training puzzle {i} have solutions of test puzzles; use --num-aug 0"
            raise RuntimeError(f"num_aug={num_aug}: {text}")
    return new_boards.reshape(-1, cells), new_solutions.reshape(-1, cells)


def generated_sudoku(
    size: int = 9,
    num_train: int = 1000,
    num_test: int = 1000,
    clues: int | Sequence[int] | None = None,
    *,
    num_aug: int = 0,
    mix: str | Path | None = None,
    test_share: float | None = None,
    seed: int = 0,
    workers: int = 1,
) -> "tuple[datasets.DatasetDict, PuzzleInfo]":
    """Generate a data set. Train and test share no solution grids and no symmetric copies.

    For the arguments see `options.BuildSudoku`; for clues, workers and errors also see `generate_portions`. No
    generated puzzle is a symmetric copy of a puzzle in `mix`.
    """
    clues = DEFAULT_CLUES[sudoku_shape(size).size] if clues is None else clues
    train_how, test_how, grids = {}, {}, None
    if size == 4:
        # There are few 4x4 grids, and a large test split could use them all, so divide them between the splits first.
        order = rng_of((seed, _SPLIT_STREAM)).permutation(all_grids_4x4())
        grids, others = np.split(order, [round(len(order) * TEST_FRACTION)])
        test_how = {"grids": grids, "share": (0.0, TEST_FRACTION)}
        train_how = {"grids": others, "share": (TEST_FRACTION, 1.0)}

    def draw(split: str, count: int, stream: int, **how) -> Puzzles:
        none = np.empty((0, size**2), dtype=np.uint8)
        parts = [Puzzles(none, none, np.empty(0, dtype=np.float32), none)]
        with tqdm(desc=f"{split} puzzles", total=count, disable=None) as bar:
            for portion in generate_portions(size, count, clues, (seed, stream), workers=workers, **how):
                parts.append(portion)
                bar.update(len(portion.boards))
        return Puzzles(*map(np.concatenate, zip(*parts)))

    rules = _rules(size)
    given, repeated = ({}, {}) if mix is None else read_unique(mix, HeldOut(share=test_share), lambda _: rules)
    given_forms = {form for split in given.values() for form in rules.forms_of(split)}
    test = draw("test", num_test, _TEST_STREAM, exclude_forms=given_forms, **test_how)
    used, forms = ({row.tobytes() for row in rows} for rows in (test.solutions, test.forms))
    train = draw("train", num_train, _TRAIN_STREAM, exclude_forms=given_forms | forms, exclude=used, **train_how)
    parts = {"train": tuple(train[:3]), "test": tuple(test[:3])}
    for split, name in (("train", "train"), ("test", "test_mixed")):
        if split in given:
            rows = _select(given[split], None, None, seed)
            parts[name] = [np.concatenate(both) for both in zip(parts[name], rows)] if name in parts else rows
    forbidden = used if grids is None else {grid.tobytes() for grid in grids}
    return _assemble(parts, size, num_aug, seed, forbidden, repeated)


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
) -> "tuple[datasets.DatasetDict, PuzzleInfo]":
    """Read a data set from a file, a folder or the Hub (see `readers`), and add missing ratings.

    For the arguments see `options.BuildSudoku`. Augmented puzzles inherit the rating. `min_difficulty` applies to both
    splits, `subsample_size` only to training.

    Raises:
        FileNotFoundError, ValueError: As in `read_unique`, or if a row is invalid or an option removes all rows.
    """
    splits, repeated = read_unique(
        source, HeldOut(test_size, test_share), lambda train: _rules(size or _board_size(train))
    )
    parts = {
        split: _select(rows, min_difficulty, subsample_size if split == "train" else None, seed)
        for split, rows in splits.items()
    }
    forbidden = {solution.tobytes() for solution in parts["test"][1]} if "test" in parts and num_aug else set()
    return _assemble(parts, int(parts["train"][0].shape[1] ** 0.5), num_aug, seed, forbidden, repeated)


def _board_size(table: PuzzleTable) -> int:
    text, sizes = table.questions[0], {n**2: n for n in SMALL_BOXES}
    if len(text) not in sizes:
        raise ValueError(
            f"{table.place(0, 0)}: {len(text)} characters {text!r:.100}; expected {' or '.join(map(str, sizes))}"
        )
    return sizes[len(text)]


def _rules(size: int) -> PuzzleRules:
    shape = sudoku_shape(size)
    return PuzzleRules(lambda table: _parse(table, shape), canonical_forms)


def _parse(table: PuzzleTable, shape: SudokuShape) -> tuple[np.ndarray, np.ndarray]:
    """Parse boards and solutions, uint8 [rows, cells], and check each row against the Sudoku rules."""
    alphabet = {".": 0} | {str(digit): digit for digit in range(shape.size + 1)}
    boards, solutions = (table.encode(column, shape.cells, alphabet) for column in (0, 1))
    for row in np.flatnonzero(~obey_rules(boards, solutions))[:1]:
        problems = validate_solution(table.questions[row], table.answers[row])
        text = f"{table.answers[row]!r} does not solve {table.questions[row]!r}: {'; '.join(problems[:3])}"
        raise ValueError(f"{table.place(row, 1)}: {text}")
    return boards, solutions


def _select(split: PuzzleSplit, min_difficulty: float | None, subsample_size: int | None, seed: int):
    """Filter by rating and draw a sample. Return boards, solutions and ratings, float32 [rows]."""
    boards, solutions, table = split.questions, split.answers, split.table
    ratings, rows = table.ratings, np.arange(len(boards))
    if min_difficulty is not None:
        ratings = rate_boards(boards).astype(np.float32) if ratings is None else ratings
        rows = np.flatnonzero(ratings >= min_difficulty)
        if not len(rows):
            raise ValueError(f"min_difficulty={min_difficulty}: must be <= {ratings.max()} for {table.name}")
    if subsample_size is not None:
        if not 0 < subsample_size <= len(rows):
            raise ValueError(f"subsample_size={subsample_size}: must be in [1, {len(rows)}] for {table.name}")
        rows = np.sort(rng_of((seed, _SUBSAMPLE_STREAM)).choice(rows, subsample_size, replace=False))
    boards, solutions = boards[rows], solutions[rows]
    return boards, solutions, rate_boards(boards).astype(np.float32) if ratings is None else ratings[rows]


def _assemble(parts, size, num_aug, seed, forbidden, repeated) -> "tuple[datasets.DatasetDict, PuzzleInfo]":
    from datasets import DatasetDict

    splits = DatasetDict()
    for split, (boards, solutions, ratings) in sorted(parts.items(), key=lambda part: part[0] != "train"):
        if not len(boards):
            continue
        copies = num_aug + 1 if split == "train" else 1
        if copies > 1:
            boards, solutions = _augment_all(boards, solutions, num_aug, seed, forbidden)
        groups = np.repeat(np.arange(len(ratings)), copies)
        tokens = boards + DIGIT_OFFSET, solutions + DIGIT_OFFSET
        splits[split] = make_split(*tokens, groups, rating=np.repeat(ratings, copies))
    shape = sudoku_shape(size)
    info = PuzzleInfo("sudoku", (size, size), shape.vocab_size, box_shape=shape.box_shape, repeated=repeated)
    return splits, info
