"""Splits share no puzzles or symmetric copies: canonical forms, files, mixtures and generated sets.

Referees: the published numbers of essentially different grids (2 of 4x4; 49 of 6x6 with boxes of 2x3), all symmetries
of small boards tried one by one, and copies made by hand.
"""

import csv
import gzip
import itertools
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.puzzles import plain_sudoku
from hrm_hf.cli import app
from hrm_hf.puzzles import maze, sudoku, sudoku_generation, sudoku_rules
from hrm_hf.puzzles.arc_grids import dihedral
from hrm_hf.puzzles.dataset import load_puzzle_dataset, load_puzzle_info
from hrm_hf.puzzles.readers import PuzzleSplit, PuzzleTable, _remove_equal, place_of_form
from hrm_hf.puzzles.sudoku_generation import canonical_forms
from hrm_hf.puzzles.sudoku_solver import random_grids


HARD = Path(__file__).parents[3] / "shared/data/sudoku_hard.csv.gz"
needs_hard = pytest.mark.skipif(not HARD.exists(), reason=f"{HARD} is absent")
CLUES = {4: (5, 9), 6: (10, 20), 9: (26, 45)}


def puzzles(size, count, seed=0):
    boards, solutions = map(np.array, zip(*sudoku_generation.generate(size, count, CLUES[size], seed)))
    return boards, solutions


def as_text(rows):
    return ["".join(map(str, row)) for row in rows]


def write_csv(path, boards, solutions, ratings=None):
    columns = [as_text(boards), as_text(solutions)] + ([] if ratings is None else [map(str, ratings)])
    header = "question,answer" + ("" if ratings is None else ",rating")
    path.write_text("\n".join([header, *map(",".join, zip(*columns))]) + "\n")
    return path


def forms_of(split):
    boards, solutions = (np.array(split[name]) - 1 for name in ("input_ids", "labels"))
    return {form.tobytes() for form in canonical_forms(boards, solutions)}


def copies(boards, solutions, count, seed=0):
    """Return `count` random symmetric copies of each puzzle."""
    rng = np.random.default_rng(seed)
    made = [sudoku.augment(*puzzle, count, rng) for puzzle in zip(boards, solutions)]
    return [np.concatenate(part) for part in zip(*made)]


def smallest_by_trial(board, size):
    """Find the smallest copy of a small board by trying all symmetries, with digits renamed by first use."""
    box_rows, box_cols = sudoku_rules.sudoku_shape(size).box_shape

    def orders(box):
        within = list(itertools.permutations(range(box)))
        for bands in itertools.permutations(range(size // box)):
            for inside in itertools.product(within, repeat=size // box):
                yield [band * box + line for band, lines in zip(bands, inside) for line in lines]

    grid = board.reshape(size, size)
    found = []
    for view in [grid, grid.T] if box_rows == box_cols else [grid]:
        for rows, columns in itertools.product(orders(box_rows), list(orders(box_cols))):
            names, named = {0: 0}, []
            for digit in view[rows][:, columns].ravel().tolist():
                named.append(names.setdefault(digit, len(names)))
            found.append(named)
    return tuple(min(found))


# ---- the canonical form


@pytest.mark.parametrize("size", [4, 6, 9])
def test_all_copies_of_a_puzzle_have_the_same_form(size):
    boards, solutions = puzzles(size, 60)
    forms = canonical_forms(boards, solutions)
    again = canonical_forms(*copies(boards, solutions, 25))
    assert np.array_equal(np.repeat(forms, 25, axis=0), again)
    assert np.array_equal(canonical_forms(forms, np.stack([plain_sudoku.solve(form) for form in forms])), forms)


@pytest.mark.parametrize("size", [4, 6])
def test_puzzles_share_a_form_only_if_a_symmetry_maps_one_to_the_other(size):
    count = {4: 60, 6: 8}[size]
    boards, solutions = puzzles(size, count)
    boards, solutions = (np.concatenate(both) for both in zip((boards, solutions), copies(boards, solutions, 1)))
    classes = [smallest_by_trial(board, size) for board in boards]
    keys = [form.tobytes() for form in canonical_forms(boards, solutions)]
    assert len(set(zip(classes, keys))) == len(set(classes)) == len(set(keys))


def test_moving_or_removing_a_clue_changes_the_form():
    boards, solutions = puzzles(9, 40)
    moved = boards.copy()
    for board, solution in zip(moved, solutions):
        blank, clue = np.flatnonzero(board == 0)[0], np.flatnonzero(board)[-1]
        board[blank], board[clue] = solution[blank], 0
    fewer = np.where(np.cumsum(boards != 0, axis=1) == 1, 0, boards)
    forms = [{form.tobytes() for form in canonical_forms(some, solutions)} for some in (boards, moved, fewer)]
    assert all(len(some) == 40 for some in forms)
    assert not forms[0] & forms[1] and not forms[0] & forms[2]


def test_grid_forms_match_published_counts():
    grids = sudoku_generation.all_grids_4x4()
    assert len({form.tobytes() for form in canonical_forms(grids, grids)}) == 2
    grids = random_grids(6, 12_000, np.random.default_rng(0))
    assert len({form.tobytes() for form in canonical_forms(grids, grids)}) == 49


@needs_hard
def test_published_hard_puzzles_are_distinct_and_their_copies_are_found():
    with gzip.open(HARD, "rt") as file:
        rows = list(csv.DictReader(file))[:4000]
    boards, solutions = (
        np.stack([sudoku_rules.to_board(row[name]) for row in rows]) for name in ("puzzle", "solution")
    )
    forms = canonical_forms(boards, solutions)
    assert len({form.tobytes() for form in forms}) == 4000
    assert np.array_equal(canonical_forms(*copies(boards, solutions, 1)), forms)


# ---- files


def test_copies_of_test_puzzles_are_removed_from_training(tmp_path, caplog):
    boards, solutions = puzzles(9, 60)
    hidden, hidden_solutions = copies(boards[40:], solutions[40:], 3)
    train = np.concatenate([boards[:40], hidden]), np.concatenate([solutions[:40], hidden_solutions])
    write_csv(tmp_path / "train.csv", *train)
    write_csv(tmp_path / "test.csv", boards[40:], solutions[40:])
    splits, info = sudoku.sudoku_from_source(tmp_path)
    assert info.repeated == {"in train and symmetric copies of puzzles in test, left out": 60}
    assert "60 rows in train and symmetric copies of puzzles in test, left out" in caplog.text
    assert len(splits["train"]) == 40 and len(splits["test"]) == 20
    assert not forms_of(splits["train"]) & forms_of(splits["test"])


def tables(rows, train):
    """Split the rows into the first `train` for training and the rest for testing, as their own solutions."""
    parts = {"train": rows[:train], "test": rows[train:]}
    return {name: PuzzleSplit(PuzzleTable(name, ("q", "a"), [], [], lines=[None] * len(part)), part, part.copy())
            for name, part in parts.items()}  # fmt: skip


def test_the_first_of_equal_puzzles_is_kept():
    rows = np.random.default_rng(0).integers(0, 3, (400, 4), dtype=np.uint8)
    splits, repeated, kept, seen = tables(rows, 300), {}, {"test": [], "train": []}, {}
    _remove_equal(splits, repeated)
    for name, start, stop in (("test", 300, 400), ("train", 0, 300)):
        for row in range(start, stop):
            if seen.setdefault(rows[row].tobytes(), (name, row)) == (name, row):
                kept[name].append(row - start)
    assert {name: splits[name].places.tolist() for name in kept} == kept and kept["train"]
    assert all(np.array_equal(splits[name].questions, splits[name].answers) for name in kept)
    removed = [
        sum(count for reason, count in repeated.items() if word in reason) for word in ("another in test", "train")
    ]
    assert removed == [100 - len(kept["test"]), 300 - len(kept["train"])]


def test_removal_of_equal_puzzles_needs_little_memory():
    rows = np.random.default_rng(0).integers(0, 10, (40_000, 81), dtype=np.uint8)
    splits = tables(rows, 39_000)
    tracemalloc.start()
    _remove_equal(splits, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.2 * rows.nbytes  # with a Python object per row, the factor was 2.9


def test_copies_of_test_mazes_are_removed_from_training(tmp_path):
    pairs = [(one, two) for one, two in maze.generate(9, 9, 12, 0)]
    turned = [tuple(dihedral(grid, number % 8) for grid in pair) for number, pair in enumerate(pairs[8:], 1)]
    for name, some in (("train", pairs[:8] + turned), ("test", pairs[8:])):
        rows = "".join(f"{maze.decode(one)},{maze.decode(two)}\n" for one, two in some)
        (tmp_path / f"{name}.csv").write_text("question,answer\n" + rows)
    splits, info = maze.mazes_from_source(tmp_path)
    assert [len(splits[name]) for name in ("train", "test")] == [8, 4]
    assert info.repeated == {"in train and symmetric copies of puzzles in test, left out": 4}


def test_split_by_share_depends_only_on_the_puzzles(tmp_path):
    boards, solutions = puzzles(9, 200)
    boards, solutions = copies(boards, solutions, 2)  # two copies per puzzle
    ratings = np.arange(400)
    found = []
    for seed, share in ((0, 0.2), (1, 0.2), (2, 0.4)):
        order = np.random.default_rng(seed).permutation(400)
        path = write_csv(tmp_path / f"{seed}.csv", boards[order], solutions[order], ratings[order])
        splits, info = sudoku.sudoku_from_source(path, test_share=share)
        assert not forms_of(splits["train"]) & forms_of(splits["test"]) and not info.repeated
        assert {place_of_form(form) < share for form in forms_of(splits["test"])} == {True}
        found.append({int(rating) for rating in splits["test"]["rating"]})
        assert len(splits["train"]) + len(found[-1]) == 400
    assert found[0] == found[1] < found[2]
    assert 40 < len(found[0]) < 120  # two copies of about 40 puzzles, within 3 standard deviations


def test_a_form_and_its_place_never_change():
    # Pinned, since another form or hash would move puzzles held out before to the training split.
    board = sudoku_rules.to_board("000090000090602080740010023001000800009703400300981002007000200000407000405020107")
    (form,) = canonical_forms(board[None], plain_sudoku.solve(board)[None])
    assert as_text([form]) == ["000000780407089006600007000006010453300004000800005170061870004000000005030500620"]
    assert place_of_form(form.tobytes()) == 0.7495826857668674


def test_a_share_of_mazes_is_held_out_with_their_copies(tmp_path):
    pairs = [tuple(dihedral(grid, n) for grid in pair) for pair in maze.generate(7, 7, 20, 0) for n in (0, 5)]
    rows = "".join(f"{maze.decode(one)},{maze.decode(two)}\n" for one, two in pairs)
    (tmp_path / "m.csv").write_text("question,answer\n" + rows)
    splits, _ = maze.mazes_from_source(tmp_path / "m.csv", test_share=0.4)
    keys = [{maze.symmetry_key(np.array(row).reshape(7, 7)) for row in splits[name]["input_ids"]} for name in splits]
    assert len(splits["train"]) + len(splits["test"]) == 40 and not keys[0] & keys[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_share": 1.5}, "test_share=1.5"),
        ({"test_share": 0.1, "test_size": 1}, "test_share=0.1"),
        ({"test_share": 1e-9}, "test_share=1e-09"),
    ],
)
def test_invalid_test_shares_are_rejected(tmp_path, options, message):
    path = write_csv(tmp_path / "s.csv", *puzzles(6, 12))
    with pytest.raises(ValueError, match=message):
        sudoku.sudoku_from_source(path, **options)


# ---- generated sets


@pytest.mark.parametrize(("size", "clues"), [(4, 7), (6, 16)])
def test_generated_splits_share_no_copies(size, clues):
    splits, _ = sudoku.generated_sudoku(size, 600, 150, clues, num_aug=1)
    assert len(splits["train"]) == 1200 and len(splits["test"]) == 150
    assert not forms_of(splits["train"]) & forms_of(splits["test"])


def test_a_file_and_the_puzzles_mixed_with_it_share_no_copies(tmp_path):
    boards, solutions = puzzles(9, 60, seed=4)
    path = write_csv(tmp_path / "rated.csv", boards, solutions, np.arange(60))
    gz = tmp_path / "rated.csv.gz"
    gz.write_bytes(gzip.compress(path.read_bytes()))
    out = tmp_path / "mixed"
    options = ["--clues", "30-50", "--num-train", "40", "--num-test", "10", "--mix", str(gz), "--test-share", "0.3"]
    result = CliRunner().invoke(app, ["data", "sudoku", *options, "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["train_rows"] + report["test_mixed_rows"] == 100 and report["test_rows"] == 10
    splits = {name: load_puzzle_dataset(out, name) for name in ("train", "test", "test_mixed")}
    forms = [forms_of(split) for split in splits.values()]
    assert sum(map(len, forms)) == len(set.union(*forms)) == 110
    clues = (np.array(splits["train"]["input_ids"][:40]) > 1).sum(axis=1)
    assert clues.min() >= 30 and clues.max() <= 50
    assert set(splits["train"]["rating"][40:]) | set(splits["test_mixed"]["rating"]) == set(range(60))
    assert load_puzzle_info(out).options["mix"] == str(gz)


def test_generated_puzzles_avoid_copies_of_mixed_in_puzzles(tmp_path):
    boards, solutions = map(np.array, zip(*sudoku_generation.generate(4, 300, 4, 1)))
    forms = {form.tobytes() for form in canonical_forms(boards, solutions)}
    keep = np.array([form.tobytes() in sorted(forms)[:3] for form in canonical_forms(boards, solutions)])
    path = write_csv(tmp_path / "s.csv", boards[keep], solutions[keep])
    splits, _ = sudoku.generated_sudoku(4, 100, 0, 4, mix=path)
    train = forms_of(splits["train"].select(range(100)))
    assert len(train) > 1 and not train & set(sorted(forms)[:3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--test-share", "0.1"], "--test-share has no effect"),
        (["--mix", "absent.csv"], "absent.csv"),
        (["--source", "x.csv", "--mix", "y.csv"], "--mix has no effect"),
        (["--source", "x.csv", "--workers", "2"], "--workers has no effect"),
    ],
)
def test_options_without_effect_exit_with_status_2(tmp_path, options, message):
    result = CliRunner().invoke(app, ["data", "sudoku", *options, "--out", str(tmp_path / "o")])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
