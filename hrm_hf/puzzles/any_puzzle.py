"""Build data sets for any task, from its generator or from pairs of puzzles and solutions in a source.

    info, task = describe(task_class("queens.py:Queens"))
    splits = generated_puzzles(task, num_train=2000, num_test=200)

Without a task of their own, pairs become boards of task "generic", whose symbols are those that occur in the pairs.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from .dataset import PuzzleInfo
from .readers import HeldOut, PuzzleRules, PuzzleTable, make_split, place_of_form, read_unique
from .tasks import PuzzleTask, cells_of


if TYPE_CHECKING:
    import datasets

MAX_TRIES = 2000  # generation fails after this many consecutive draws without a new puzzle
PADDING = "_-~^"  # characters that can represent padding; the first one that is not a symbol of the task is used
MOST_SYMBOLS = 126  # limited by int8, the dtype of saved tokens


def describe(
    kind: type[PuzzleTask], shape: tuple[int, int] | None = None, symbols: list[str] | None = None
) -> tuple[PuzzleInfo, PuzzleTask]:
    """Return a data set's description and its task. `symbols` is for tasks that define no symbols."""
    shape, symbols = shape or kind.default_shape, list(kind.symbols) or symbols
    if shape is None:
        raise ValueError(f"height=None, width=None: task {kind.name!r} has no default size; pass --height and --width")
    if not symbols:
        raise ValueError(f"task={kind.name!r}: has no symbols; define `symbols`, or read puzzles with --source FILE")
    info = PuzzleInfo(kind.name, shape, len(symbols), symbols=symbols)
    task = kind(SimpleNamespace(**info.config_fields(), puzzle_emb_ndim=0))
    info.units = task.units() or None
    return info, task


def generated_puzzles(
    task: PuzzleTask, num_train: int = 1000, num_test: int = 1000, seed: int = 0
) -> "datasets.DatasetDict":
    """Generate puzzles of all difficulties. The splits share no solutions, not even symmetric copies.

    The hash of a solution's canonical form determines its split, so a task needs enough different solutions.

    Raises:
        ValueError: If the task has no generator.
        RuntimeError: If there are too few different puzzles.
    """
    if not task.generates:
        raise ValueError(f"source='generate': task {task.name!r} has no generator; use --source FILE")
    wanted = {"train": num_train, "test": num_test}
    share = num_test / max(num_train + num_test, 1)
    if 0 < share < 1:
        share = np.clip(share, 0.1, 0.9)  # each split gets some puzzles, even if there are few
    found: dict[str, dict[bytes, tuple]] = {"train": {}, "test": {}}
    number = misses = 0
    with tqdm(desc="puzzles", total=num_train + num_test, disable=None) as bar:
        while any(len(found[split]) < count for split, count in wanted.items()):
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(number,))))
            number += 1
            puzzle, solution = task.generate(rng.random(), rng)
            split = "test" if place_of_form(task.canonical_form(solution)) < share else "train"
            key = puzzle.astype(np.int8).tobytes()
            if len(found[split]) < wanted[split] and key not in found[split]:
                found[split][key], misses = (puzzle, solution), 0
                bar.update()
            elif (misses := misses + 1) == MAX_TRIES:
                counts = {name: len(rows) for name, rows in found.items()}
                raise RuntimeError(
                    f"found only {counts['train']} training and {counts['test']} test puzzles of task {task.name!r}; "
                    "use larger boards, or lower num_train or num_test"
                )
    return _splits((split, *map(np.stack, zip(*rows.values()))) for split, rows in found.items() if rows)


def puzzles_from_source(
    kind: type[PuzzleTask],
    source: str | Path,
    shape: tuple[int, int] | None = None,
    *,
    test_size: int | None = None,
    test_share: float | None = None,
) -> "tuple[datasets.DatasetDict, PuzzleInfo]":
    """Read a data set from a file, a folder or the Hub (see `readers`). Solutions must obey the task's rules, if any.

    Args:
        kind: Class of the task. Task "generic" takes the symbols that occur in the training puzzles and solutions.
        shape: Rows and columns; by default those of the first puzzle, if it has lines, or a square if possible.

    Raises:
        FileNotFoundError, ValueError: As in `read_unique`, or if a row is invalid.
    """
    info = task = None

    def rules(train: PuzzleTable) -> PuzzleRules:
        nonlocal info, task
        symbols = list(kind.symbols) or _symbols_of([*train.questions, *train.answers])
        info, task = describe(kind, shape or kind.default_shape or _shape_of(train.questions[0], symbols), symbols)
        return PuzzleRules(lambda table: _parse(task, table), lambda boards, _: map(task.canonical_form, boards))

    splits, info_repeated = read_unique(source, HeldOut(test_size, test_share), rules)
    info.repeated = info_repeated
    return _splits((name, rows.questions, rows.answers, rows.table.ratings) for name, rows in splits.items()), info


def _symbols_of(boards: list[str]) -> list[str]:
    """Return padding and the boards' symbols: words if all lines have the same word count > 1, else characters."""
    counts = {len(line.split()) for board in boards for line in board.splitlines()}
    split = str.split if len(counts) == 1 and counts != {1} else lambda board: cells_of(board, (" ",))
    symbols = sorted({cell for board in boards for cell in split(board)}, key=lambda symbol: (len(symbol), symbol))
    if len(symbols) > MOST_SYMBOLS:
        raise ValueError(f"the boards have {len(symbols)} different symbols; expected at most {MOST_SYMBOLS}")
    return [next(text for text in PADDING if text not in symbols), *symbols]


def _shape_of(board: str, symbols: list[str]) -> tuple[int, int]:
    lines, cells = board.strip("\r\n").splitlines(), len(cells_of(board, symbols))
    side = math.isqrt(cells)
    if len(lines) > 1:
        return len(lines), cells // len(lines)
    return (side, side) if side * side == cells else (1, cells)


def _parse(task: PuzzleTask, table: PuzzleTable) -> tuple[np.ndarray, np.ndarray]:
    """Encode puzzles and solutions, int8 [rows, cells] each, and check each solution against the rules."""
    boards = np.empty((2, len(table), task.seq_len), dtype=np.int8)
    for row, pair in enumerate(tqdm(zip(table.questions, table.answers), "reading", len(table), disable=None)):
        for column, text in enumerate(pair):
            try:
                boards[column, row] = task.encode(text, is_solution=bool(column))
            except ValueError as error:
                raise ValueError(f"{table.place(row, column)}: {error}") from error
        if problems := task.violations(*boards[:, row].astype(np.int64)):
            text = f"does not solve column {table.columns[0]!r}: {'; '.join(problems[:3])}"
            raise ValueError(f"{table.place(row, 1)}: {text}")
    return boards[0], boards[1]


def _splits(parts: Iterable[tuple]) -> "datasets.DatasetDict":
    from datasets import DatasetDict

    splits = DatasetDict()
    for name, questions, answers, *ratings in sorted(parts, key=lambda part: part[0] != "train"):
        more = {"rating": ratings[0]} if ratings and ratings[0] is not None else {}
        splits[name] = make_split(questions, answers, np.arange(len(questions)), **more)
    return splits
