"""Sudoku: notation, solver, generator, augmentation, readers, command line.

Independent referees: the 20,000 published puzzles in shared/data (rated by another solver), and the brute-force solver
below, which uses only the rules.
"""

import csv
import gzip
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.puzzles import plain_sudoku
from hrm_hf.cli import app
from hrm_hf.puzzles import sudoku, sudoku_generation, sudoku_rules
from hrm_hf.puzzles.sudoku_solver import rate_boards, search


HARD = Path(__file__).parents[3] / "shared/data/sudoku_hard.csv.gz"
BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}
SOLVED_4 = "1234341221434321"
needs_hard = pytest.mark.skipif(not HARD.exists(), reason=f"{HARD} is absent")


def brute_force(board, limit):
    """Find up to `limit` solutions by trying every digit in the first blank cell."""
    size = int(len(board) ** 0.5)
    box_rows, box_cols = BOXES[size]
    if 0 not in board:
        return [tuple(board)]
    cell = board.index(0)
    row, column = divmod(cell, size)
    taken = set()
    for other, digit in enumerate(board):
        r, c = divmod(other, size)
        if r == row or c == column or (r // box_rows == row // box_rows and c // box_cols == column // box_cols):
            taken.add(digit)
    found = []
    for digit in set(range(1, size + 1)) - taken:
        found += brute_force([*board[:cell], digit, *board[cell + 1 :]], limit - len(found))
        if len(found) >= limit:
            break
    return found


def grids_by_permutations():
    """Return every solved 4x4 board, from all choices of four rows."""
    rows = list(itertools.permutations((1, 2, 3, 4)))
    grids = set()
    for four in itertools.product(rows, repeat=4):
        if any(four[0][i] == four[1][i] or four[2][i] == four[3][i] for i in range(4)):
            continue
        grid = np.array(four)
        if all(len(set(column)) == 4 for column in grid.T.tolist()) and all(
            len(set(grid[r : r + 2, c : c + 2].ravel().tolist())) == 4 for r in (0, 2) for c in (0, 2)
        ):
            grids.add(tuple(grid.ravel().tolist()))
    return grids


def read_hard(count):
    with gzip.open(HARD, "rt") as file:
        return list(itertools.islice(csv.DictReader(file), count))


def write_csv(path, rows, header="question,answer"):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


# notation


def test_tokens_survive_a_round_trip_from_every_notation():
    text = "12..3.1.2.4.4.2."
    nested = [[int(c) if c != "." else 0 for c in text[i : i + 4]] for i in range(0, 16, 4)]
    for form in (text, text.replace(".", "0"), nested, "\n".join(text[i : i + 4] for i in range(0, 16, 4))):
        assert sudoku_rules.decode(sudoku_rules.encode(form)) == text
    assert sudoku_rules.encode("." + "1234" + "." * 11)[:5].tolist() == [1, 2, 3, 4, 5]


BOARD = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
ROWS = [BOARD[i : i + 9] for i in range(0, 81, 9)]
LINES, RULE = ["|".join(row[i : i + 3] for i in (0, 3, 6)) for row in ROWS], "+-------+-------+-------+"
OURS = "\n".join([RULE, *(f"| {' '.join(line)} |" for line in LINES), RULE])
WRITTEN = {
    "bands": "\n\n".join("\n".join(ROWS[i : i + 3]) for i in (0, 3, 6)),
    "ours": f"{OURS}\n16 steps, confidence 0.998, obeys the rules\n",
    "bars": "\n".join([*LINES[:3], "-----------", *LINES[3:6], "---+---+---", *LINES[6:]]),
    "Simple Sudoku": "*-----------*\n" + "\n".join(f"|{line}|" for line in LINES) + "\n*-----------*",
    "sdk": "#AMe\n#B12-04-2009\n[Puzzle]\n" + "\n".join(ROWS) + "\n[State]\n" + "1" * 81,
    "table": "\n".join(f"| {' | '.join(row)} |" for row in ROWS).replace(".", " "),
    "CSV": "\n".join(map(";".join, ROWS)).replace(".", ""),
    "columns": BOARD.replace(".", " "),
    "width": OURS.translate({digit: digit + 0xFEE0 for digit in range(0x30, 0x3A)}),
    "Python": str([[None if cell == "." else int(cell) for cell in row] for row in ROWS]),
    **{f"blank {sign}": OURS.replace(".", sign) for sign in "_xX?·0-"},
    "two lines": f"{BOARD}\r\n{BOARD}\n",
    "two of ours": f"{OURS}\n2 steps, confidence 0.5\n\n{OURS}\n\n2 puzzles, 2.50 steps on average",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_boards_with_frames_and_comments_are_read(name):
    boards = sudoku_rules.split_boards(WRITTEN[name], 9)
    assert len(boards) == 1 + name.startswith("two")
    assert {sudoku_rules.decode(sudoku_rules.encode(board)) for board in boards} == {BOARD}


def large_board(size, share=0.5):
    """Return a board with cells emptied at random and its solution, uint8 [cells]."""
    (rows, columns), line = sudoku_rules.BOX_SHAPES[size], np.arange(size)
    solution = ((columns * (line % rows) + line // rows)[:, None] + line) % size + 1
    blank = np.random.default_rng(size).random(size**2) < share
    blank[size : 2 * size] = True
    return np.where(blank, 0, solution.reshape(-1)).astype(np.uint8), solution.reshape(-1).astype(np.uint8)


def large_forms(board, size):
    """Write a board in all notations, in which its digits are numbers or letters."""
    rows = board.reshape(size, size).tolist()
    text = sudoku_rules.decode(board.astype(int) + 1)
    lines = [text[i : i + size] for i in range(0, size**2, size)]
    width = sudoku_rules.sudoku_shape(size).box_shape[1]
    boxes = ["| " + " | ".join(" ".join(line[i : i + width]) for i in range(0, size, width)) + " |" for line in lines]
    letters = "".join(chr(64 + digit) if digit else "." for digit in board)
    return {
        "line": text, "lower case": text.lower(), "rows": "\n".join(lines), "list of rows": lines,
        "underscores": "\n".join(lines).replace(".", "_"), "frames": "\n".join([*boxes, "-" * 4 * size]),
        "letters": letters, "rows of letters": "\n".join(letters[i : i + size] for i in range(0, size**2, size)),
        "numbers": "\n".join(" ".join(str(cell or ".") for cell in row) for row in rows),
        "CSV": "\n".join(",".join(map(str, row)) for row in rows), "Python": str(rows),
        "nested list": rows, "flat list": board.tolist(), "array": board,
    }  # fmt: skip


@pytest.mark.parametrize("size", [12, 16, 25])
def test_large_boards_are_read_in_every_notation(size):
    board, solution = large_board(size)
    for name, form in large_forms(board, size).items():
        for given in (None, size):
            assert (sudoku_rules.to_board(form, given) == board).all(), name
        if isinstance(form, str):
            two = sudoku_rules.split_boards(f"{form}\n16 steps, confidence 0.998\n\n{form}\n", size)
            assert [sudoku_rules.to_board(each).tolist() for each in two] == [board.tolist()] * 2, name
    texts = [sudoku_rules.decode(each.astype(int) + 1) for each in (board, solution)]
    assert sudoku_rules.split_boards(",".join(texts), size)[0].keys() == {"puzzle", "solution"}
    assert not sudoku_rules.validate_solution(*texts)
    assert sudoku_rules.obey_rules(board[None].astype(int), solution[None].astype(int)).all()


def test_a_large_board_with_two_signs_for_blanks_is_rejected():
    with pytest.raises(ValueError, match=r"0 and '\.'"):
        sudoku_rules.to_board("0.A" + "1" * 253)


@pytest.mark.parametrize("size, share", [(12, 0.5), (16, 0.4), (25, 0.3)])
def test_large_boards_are_searched(size, share):
    board, _ = large_board(size, share)
    found = search(board[None], scores=np.random.default_rng(0).random((1, size**2, size)))
    assert found.counts[0] and sudoku_rules.obey_rules(board[None].astype(int), found.solutions[0].astype(int)).all()


@pytest.mark.parametrize("last, message", [("l", "row 9, column 9: 'l'"), ("x", "'x'"), ("", "got 80")])
def test_error_names_the_invalid_board_in_a_file(last, message):
    wrong, right = sudoku_rules.split_boards(f"{BOARD[:-1]}{last}\n\n{BOARD},{'1' * 81}", 9)
    assert right == {"puzzle": BOARD, "solution": "1" * 81}
    with pytest.raises(ValueError, match=message):
        sudoku_rules.encode(wrong, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("123", "16 or 36 or 81 or 144 or 256 or 625 cells; .*3"),
        ("12x4" + "." * 12, "row 1, column 3: 'x' .*1 to 4"),
        ("...." * 3 + "...5", "row 4, column 4: digit 5 .*4"),
    ],
)
def test_malformed_board_error_names_the_cell(text, message):
    with pytest.raises(ValueError, match=message):
        sudoku_rules.encode(text)


def test_a_token_outside_the_vocabulary_cannot_be_decoded():
    with pytest.raises(ValueError, match=r"row 1, column 2: token 6; .*0 to 5"):
        sudoku_rules.decode([1, 6] + [1] * 14)


@pytest.mark.parametrize(
    "board, answer, problems",
    [
        ("1...", SOLVED_4, []),
        ("....", "2" + SOLVED_4[1:], [f"{unit} 1 has 2 2 times" for unit in ("row", "column", "box")]),
        (
            "4" + "." * 15,
            SOLVED_4[:15] + ".",
            ["row 4, column 4 is blank", "row 1, column 1: clue 4 was changed to 1"],
        ),
    ],
)
def test_violations_of_rules_and_clues_are_listed(board, answer, problems):
    assert sudoku_rules.validate_solution(board.ljust(16, "."), answer) == problems


def test_boxes_of_6x6_boards_are_two_rows_by_three_columns():
    boxes = [cells for name, cells in sudoku_rules.sudoku_shape(6).units if name.startswith("box")]
    assert boxes[0] == [0, 1, 2, 6, 7, 8]
    assert boxes[1] == [3, 4, 5, 9, 10, 11]


# solver


def test_brute_force_finds_the_same_288_grids():
    assert {tuple(grid) for grid in sudoku_generation.all_grids_4x4().tolist()} == grids_by_permutations()


@pytest.mark.parametrize(("board", "count"), [("." * 81, 2), ("11" + "." * 14, 0)])
def test_solutions_are_counted_up_to_the_limit(board, count):
    assert search(sudoku_rules.to_board(board)[None], limit=2).counts.tolist() == [count]


@needs_hard
def test_published_hard_puzzles_are_solved_uniquely_and_rated_alike():
    rows = read_hard(500)  # row 82 has a cell that is the only place of its two candidates
    boards, solutions = (
        np.stack([sudoku_rules.to_board(row[name]) for row in rows]) for name in ("puzzle", "solution")
    )
    assert np.array_equal(search(boards).solutions[:, 0], solutions)
    assert (search(boards, limit=2).counts == 1).all()
    assert rate_boards(boards).tolist() == [int(row["rating"]) for row in rows]


# generator


@pytest.mark.parametrize(("size", "count", "clues"), [(4, 200, 6), (6, 10, 14), (9, 2, 34)])
def test_generated_puzzles_have_one_solution_by_brute_force(size, count, clues):
    for board, solution in sudoku_generation.generate(size, count, clues, seed=3):
        assert brute_force(board.tolist(), 2) == [tuple(solution.tolist())]
        assert np.count_nonzero(board) == clues


def test_generated_puzzles_are_distinct():
    boards = [board.tobytes() for board, _ in sudoku_generation.generate(4, 3000, 5)]
    assert len(set(boards)) == 3000


def test_a_clue_range_is_used_from_end_to_end():
    counts = {int(np.count_nonzero(board)) for board, _ in sudoku_generation.generate(4, 200, (5, 8))}
    assert counts == {5, 6, 7, 8}


def test_every_4x4_puzzle_with_the_fewest_clues_can_be_reached():
    assert all(np.count_nonzero(board) == 4 for board, _ in sudoku_generation.generate(4, 50, 4))


@pytest.mark.parametrize(("size", "clues", "least"), [(4, 3, 4), (6, 7, 8), (9, 16, 17)])
def test_fewer_clues_than_possible_are_rejected(size, clues, least):
    with pytest.raises(ValueError, match=f"clues={clues}: .* {least} to {size**2}"):
        sudoku_generation.generate(size, 1, clues)


def test_running_out_of_puzzles_is_an_error():
    with pytest.raises(RuntimeError, match="288 of 289"):
        list(sudoku_generation.generate(4, 289, 16))


@pytest.mark.parametrize("num_aug", [0, 3])
def test_train_and_test_share_no_4x4_solution_grid(num_aug):
    splits, _ = sudoku.generated_sudoku(4, 400, 100, 8, num_aug=num_aug)
    train, test = ({tuple(row) for row in splits[name]["labels"]} for name in ("train", "test"))
    assert len(train) > 150 and len(test) > 30
    assert not train & test


DIGEST = """
import hashlib
from hrm_hf.puzzles import maze, sudoku_generation
pairs = [pair for how in ((4, 50, 6), (6, 3, 14), (9, 2, 30)) for pair in sudoku_generation.generate(*how, 1)]
pairs += maze.generate(11, 12, 3, 1)
digest = hashlib.sha256(b"".join(a.tobytes() + b.tobytes() for a, b in pairs)).hexdigest()
"""
# The builders need neither torch nor datasets; an empty hrm_hf package avoids importing them.
BARE_PACKAGE = """
import sys, types
sys.modules["hrm_hf"] = types.ModuleType("hrm_hf")
sys.modules["hrm_hf"].__path__ = [sys.argv[1]]
"""


def test_generation_is_reproducible_across_processes_and_hash_seeds():
    here: dict = {}
    exec(DIGEST, here)
    code = BARE_PACKAGE + DIGEST + "print(digest, 'datasets' in sys.modules, 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(Path(sudoku.__file__).parents[1])]
    env = {**os.environ, "PYTHONHASHSEED": "1234"}
    there = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()
    assert there == [here["digest"], "False", "False"]


def test_another_seed_gives_other_puzzles():
    first, second = ([board.tobytes() for board, _ in sudoku_generation.generate(4, 20, 8, seed)] for seed in (0, 1))
    assert first != second


# augmentation


@pytest.mark.parametrize(("size", "clues"), [(4, 6), (6, 14), (9, 32)])
def test_augmented_puzzles_stay_valid_and_uniquely_solvable(size, clues):
    board, solution = next(sudoku_generation.generate(size, 1, clues))
    boards, solutions = sudoku.augment(board, solution, 20, np.random.default_rng(0))
    for new_board, new_solution in zip(boards, solutions):
        assert sudoku_rules.validate_solution(new_board, new_solution) == []
        assert plain_sudoku.count_solutions(new_board) == 1
        assert np.count_nonzero(new_board) == clues
    assert len({new.tobytes() for new in boards}) > 15


def test_augmentation_transposes_about_half_of_the_square_boards():
    # The marked cells fill row 1. In a copy, they fill one row or, if the copy is transposed, one column.
    solution = next(sudoku_generation.generate(9, 1, 40))[1]
    marked = np.where(np.arange(81) < 9, solution, 0)
    boards, _ = sudoku.augment(marked, solution, 400, np.random.default_rng(0))
    in_a_row = (boards.reshape(-1, 9, 9) != 0).all(axis=2).any(axis=1)
    in_a_column = (boards.reshape(-1, 9, 9) != 0).all(axis=1).any(axis=1)
    assert (in_a_row ^ in_a_column).all()
    assert 160 < in_a_column.sum() < 240  # 4 standard deviations around 200


def test_the_first_puzzle_of_each_group_is_the_original(tmp_path):
    rows = [("." + SOLVED_4[1:], SOLVED_4), (".." + SOLVED_4[2:], SOLVED_4)]
    splits, _ = sudoku.sudoku_from_source(write_csv(tmp_path / "s.csv", rows), num_aug=4)
    train = splits["train"]
    assert train["group_index"][:] == [0] * 5 + [1] * 5
    assert train["puzzle_index"][:] == list(range(10))
    assert [sudoku_rules.decode(train[i]["input_ids"]) for i in (0, 5)] == [row[0] for row in rows]


def test_augmentation_that_would_copy_every_test_solution_is_an_error(tmp_path):
    grids = ["".join(map(str, grid)) for grid in sudoku_generation.all_grids_4x4().tolist()]
    write_csv(tmp_path / "train.csv", [("." + grids[0][1:], grids[0])])
    write_csv(tmp_path / "test.csv", [(grid, grid) for grid in grids])
    with pytest.raises(RuntimeError, match=r"num_aug=1: .*--num-aug 0"):
        sudoku.sudoku_from_source(tmp_path, num_aug=1)


# readers


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(dict(zip(("question", "answer"), row))) + "\n" for row in rows))
    return path


def write_parquet(path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(dict(zip(("puzzle", "solution"), map(list, zip(*rows))))), path)
    return path


@pytest.mark.parametrize("name", ["s.csv", "s.jsonl", "s.json", "s.parquet", "s.csv.gz", "s.jsonl.gz"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    rows = [("." + SOLVED_4[1:], SOLVED_4), (".." + SOLVED_4[2:], SOLVED_4)]
    plain = tmp_path / name.removesuffix(".gz")
    {".csv": write_csv, ".jsonl": write_jsonl, ".json": write_jsonl, ".parquet": write_parquet}[plain.suffix](
        plain, rows
    )
    if name.endswith(".gz"):
        content = plain.read_text().replace("question,", "Question,").replace(",", ";" if ".csv" in name else ",")
        (tmp_path / name).write_bytes(gzip.compress(content.encode()))
    splits, info = sudoku.sudoku_from_source(tmp_path / name)
    assert info.grid_shape == (4, 4) and info.box_shape == (2, 2) and info.vocab_size == 6
    assert [sudoku_rules.decode(ids) for ids in splits["train"]["input_ids"]] == [row[0] for row in rows]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quiz,answer\n1,2\n", r"line 2: .*\['quiz', 'answer'\]"),
        ("question,answer\n12,34\n", "line 2, column 'question': 2 characters"),
        (f"question,answer\n{SOLVED_4},{SOLVED_4}\n{SOLVED_4},123\n", "line 3, column 'answer': 3 characters"),
        (f"question,answer\n{SOLVED_4},{SOLVED_4[:15]}9\n", "line 2, column 'answer': character '9'"),
        (f"question,answer\n{'.' * 16},{'1' * 16}\n", "line 2, column 'answer': .*row 1 has 1 4"),
        (f"question,answer\n2{'.' * 15},{SOLVED_4}\n", "line 2, .*clue 2 .*to 1"),
        (f"question,answer\n{SOLVED_4}\n", "line 2: 1 fields"),
        (f"question,answer,rating\n{SOLVED_4},{SOLVED_4},x\n", "line 2, column 'rating': 'x'"),
        ("question,answer\n", "no rows"),
    ],
)
def test_csv_errors_name_line_column_and_value(tmp_path, text, message):
    path = tmp_path / "s.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"s\.csv.*{message}"):
        sudoku.sudoku_from_source(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": ', "line 2: broken JSON"),
        ("[1]", r"line 2: .*\[1\]"),
        ('{"question": "1"}', "line 2, column 'answer': None"),
    ],
)
def test_jsonl_errors_name_the_line(tmp_path, line, message):
    path = write_jsonl(tmp_path / "s.jsonl", [(SOLVED_4, SOLVED_4)])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=message):
        sudoku.sudoku_from_source(path)


def test_an_unknown_file_type_is_rejected(tmp_path):
    (tmp_path / "s.xlsx").touch()
    with pytest.raises(ValueError, match=r"'\.xlsx'; .*\.csv, \.jsonl"):
        sudoku.sudoku_from_source(tmp_path / "s.xlsx")


def test_the_last_rows_become_the_test_split(tmp_path):
    grids = ["".join(map(str, grid)) for grid in sudoku_generation.all_grids_4x4()[:10].tolist()]
    # Each has a different number of blanks, because symmetric copies of test puzzles would be omitted.
    path = write_csv(tmp_path / "s.csv", [("." * blanks + grid[blanks:], grid) for blanks, grid in enumerate(grids)])
    splits, _ = sudoku.sudoku_from_source(path, test_size=3)
    assert [sudoku_rules.decode(ids) for ids in splits["test"]["labels"]] == grids[7:]
    assert len(splits["train"]) == 7


def test_test_size_with_a_test_split_is_rejected(tmp_path):
    for name in ("train.csv", "test.csv"):
        write_csv(tmp_path / name, [(SOLVED_4, SOLVED_4)])
    with pytest.raises(ValueError, match=r"\(1 rows\).*--test-size"):
        sudoku.sudoku_from_source(tmp_path, test_size=1)


def test_min_difficulty_filters_both_splits_before_sampling(tmp_path):
    grids = ["".join(map(str, grid)) for grid in sudoku_generation.all_grids_4x4()[:40].tolist()]
    rows = [(g if i < 30 else "." + g[1:], g, i % 2) for i, g in enumerate(grids)]
    path = write_csv(tmp_path / "s.csv", rows, "question,answer,rating")
    splits, _ = sudoku.sudoku_from_source(path, min_difficulty=1, subsample_size=5, test_size=10)
    assert splits["train"]["rating"][:] == [1.0] * 5
    assert splits["test"]["rating"][:] == [1.0] * 5
    assert len({tuple(row) for row in splits["train"]["labels"]}) == 5


def test_a_sample_larger_than_the_source_is_rejected(tmp_path):
    path = write_csv(tmp_path / "s.csv", [(SOLVED_4, SOLVED_4)])
    with pytest.raises(ValueError, match="subsample_size=2: "):
        sudoku.sudoku_from_source(path, subsample_size=2)


def test_a_hub_set_is_read_from_its_two_splits(monkeypatch):
    import datasets

    boards = {"train": "." + SOLVED_4[1:], "test": ".." + SOLVED_4[2:]}
    rows = {"source": ["x"], "answer": [SOLVED_4], "rating": [7]}
    hub = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({**rows, "question": [board]}) for name, board in boards.items()}
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda name: {"org/extreme": hub}[name])
    splits, _ = sudoku.sudoku_from_source("hub:org/extreme", num_aug=0)
    assert {name: split["rating"][:] for name, split in splits.items()} == {"train": [7.0], "test": [7.0]}


@needs_hard
def test_missing_ratings_are_computed(tmp_path):
    rows = read_hard(5)
    path = write_csv(tmp_path / "s.csv", [(row["puzzle"], row["solution"]) for row in rows], "puzzle,solution")
    splits, _ = sudoku.sudoku_from_source(path)
    assert splits["train"]["rating"][:] == [float(row["rating"]) for row in rows]


# command line


def test_the_command_writes_a_folder_that_load_dataset_streams(tmp_path):
    from datasets import load_dataset

    from hrm_hf.puzzles.dataset import load_puzzle_info

    out = str(tmp_path / "s4")
    options = ["--size", "4", "--clues", "7-9", "--num-train", "30", "--num-test", "10", "--out", out, "--json"]
    result = CliRunner().invoke(app, ["data", "sudoku", *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["train_rows"] == 30
    rows = list(load_dataset(out, split="test", streaming=True))
    assert len(rows) == 10
    for row in rows:
        assert (
            sudoku_rules.validate_solution(sudoku_rules.decode(row["input_ids"]), sudoku_rules.decode(row["labels"]))
            == []
        )
        assert row["puzzle_identifiers"] == 0
    info = load_puzzle_info(out)
    assert info.task == "sudoku" and info.identifiers == ["<blank>"] and info.options["clues"] == "7-9"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "5"], "size=5"),
        (["--size", "4", "--clues", "3"], "clues=(3, 3)"),
        (["--clues", "many"], "clues='many'"),
        (["--test-size", "5"], "--test-size has no effect"),
        (["--source", "x.csv", "--num-train", "5"], "--num-train has no effect"),
        (["--source", "absent.csv"], "absent.csv"),
    ],
)
def test_bad_usage_exits_with_status_2(tmp_path, options, message):
    result = CliRunner().invoke(app, ["data", "sudoku", *options, "--out", str(tmp_path / "o")])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_folder_with_other_options_is_rejected_before_the_build(tmp_path):
    out = str(tmp_path / "s4")
    for seed, status in (("0", 0), ("0", 0), ("1", 2)):
        options = ["--size", "4", "--num-train", "5", "--num-test", "5", "--seed", seed, "--out", out]
        assert CliRunner().invoke(app, ["data", "sudoku", *options]).exit_code == status


@needs_hard
def test_the_published_set_becomes_9x9_rows(tmp_path):
    out = str(tmp_path / "s9")
    options = ["--source", str(HARD), "--test-size", "100", "--subsample-size", "50", "--num-aug", "3", "--out", out]
    result = CliRunner().invoke(app, ["data", "sudoku", *options, "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert (summary["train_rows"], summary["test_rows"]) == (200, 100)
