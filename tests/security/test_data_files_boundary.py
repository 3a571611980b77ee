"""Data files: whatever a file contains, the error names the file (and line), and no code runs.

Text, CSV, Go records, Sudoku, mazes, ARC, parquet, JSON and YAML. Cosmology maps have their own tests.
"""

import gzip
import json
import random
import shutil

import pytest
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.cli.ask import read_context
from hrm_hf.cosmology.dataset.rows import read_arrays
from hrm_hf.golang.data.pull_requests import pull_request_records
from hrm_hf.golang.data.records import read_records
from hrm_hf.golang.data.sources import Dropped
from hrm_hf.golang.data.streams import _read
from hrm_hf.io.files import CHECKSUMS, FolderInUseError, building, load_split
from hrm_hf.puzzles import maze, sudoku, sudoku_generation, sudoku_rules
from hrm_hf.puzzles.arc import read_tasks
from hrm_hf.puzzles.arc_pipeline import load_test_puzzles
from hrm_hf.puzzles.dataset import load_puzzle_dataset, load_puzzle_info
from hrm_hf.puzzles.npy_layout import read_original
from hrm_hf.puzzles.pipeline import read_puzzle_file
from hrm_hf.text.causal_lm import load_tokenizer
from hrm_hf.text.sources import open_source
from hrm_hf.trainer.recipes import load_recipe


BOARD, SOLVED = "12..34....4...21", "1234341221434321"
HEADER = "puzzle,solution\n"
ROW = f"{BOARD},{SOLVED}\n"
DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 20_000


def binary(size: int = 5000) -> bytes:
    return random.Random(0).randbytes(size)


def text(path):
    return list(open_source(str(path), streaming=True))


def sudoku_of(path):
    return sudoku.sudoku_from_source(path)


def converted(path):
    return open_source(str(path), cache_dir=str(path.parent))


def records(path):
    return list(read_records(path))


def go_streams(path):
    return _read([str(path)], "stop", str(path.parent / "cache"))


def arc(path):
    return read_tasks([path])


def recipe(path):
    return load_recipe(path, set("abcdefghi"))


def pull_requests(path):
    return list(pull_request_records(path, dropped=Dropped()))


# (description, file name, content, reader, message)
FILES = [
    ("half a gzip file", "a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 9999)[:80], text, r"gz: corrupted"),
    ("a gzip file that is none", "a.txt.gz", b"hello\n", text, r"a\.txt\.gz: corrupted"),
    ("UTF-16 without its mark", "a.txt", "hello".encode("utf-16-le"), text, r"a\.txt, line 1: .*NUL"),
    ("binary text", "a.txt", binary(), text, r"a\.txt, line 1: .*UTF-8"),
    ("deep JSON", "a.jsonl", f'{{"text": {DEEP}}}\n'.encode(), text, r"line 1: broken JSON"),
    ("an integer of 20,000 digits", "a.jsonl", f'{{"text": {DIGITS}}}\n'.encode(), text, r"line 1: broken JSON"),
    ("half a surrogate pair", "a.jsonl", b'{"text": "\\ud800"}\n', text, r"line 1: 'text'"),
    ("an empty text", "a.jsonl", b"", converted, r"a\.jsonl contains no text"),
    ("parquet that is none", "a.parquet", binary(), text, r"a\.parquet"),
    ("a quote that nothing closes", "s.csv", (HEADER + f'"{BOARD},{SOLVED}\n' + ROW * 9000).encode(), sudoku_of,
     r"s\.csv, line \d+"),
    ("a CSV in Latin-1", "s.csv", HEADER.encode() + b"caf\xe9,1\n", sudoku_of, r"s\.csv, line \d+"),
    ("a CSV with too few columns", "s.csv", (HEADER + ROW + "1\n").encode(), sudoku_of, r"s\.csv, line 3"),
    ("Sudoku in deep JSON", "s.jsonl", f'{{"puzzle": {DEEP}}}\n'.encode(), sudoku_of, r"s\.jsonl, line 1"),
    ("puzzles to solve in deep JSON", "p.jsonl", DEEP.encode(), read_puzzle_file, r"p\.jsonl, line 1: broken JSON"),
    ("Go records in deep JSON", "g.jsonl", DEEP.encode(), records, r"g\.jsonl, line 1: broken"),
    ("an empty file of Go records", "g.jsonl", b"\n", go_streams, r"g\.jsonl has no records"),
    ("pull requests with long integers", "g.jsonl", f"[{DIGITS}]".encode(), pull_requests, r"g\.jsonl, line 1"),
    ("ARC in deep JSON", "arc.json", DEEP.encode(), arc, r"arc\.json is not valid JSON"),
    ("half a packed ARC file", "arc.json.gz", gzip.compress(binary())[:900], arc, r"arc\.json\.gz"),
    ("a context in deep JSON", "c.json", DEEP.encode(), read_context, r"c\.json is not valid JSON"),
    ("a deep recipe", "r.yaml", b"[" * 5000 + b"]" * 5000, recipe, r"r\.yaml is not valid YAML"),
    ("a recipe that runs code", "r.yaml", b"a: !!python/object/apply:os.system ['true']\n", recipe,
     r"r\.yaml .*YAML: .*constructor"),
    ("a binary recipe", "r.yaml", binary(), recipe, r"r\.yaml is not valid YAML"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "read", "message"), [case[1:] for case in FILES],
                         ids=[case[0].replace(" ", "-") for case in FILES])  # fmt: skip
def test_malformed_file_is_named(name, content, read, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read(path)
    assert name in str(caught.value)


INFO = {"task": "sudoku", "grid_shape": [4, 4], "vocab_size": 6, "options": {}}
PUZZLE_FOLDERS = {
    "info-deep": ("puzzle.json", DEEP),
    "info-list": ("puzzle.json", "[1]"),
    "info-huge-board": ("puzzle.json", json.dumps({**INFO, "grid_shape": [10**9, 10**9]})),
    "info-text-board": ("puzzle.json", json.dumps({**INFO, "grid_shape": "ab"})),
    "info-true-vocabulary": ("puzzle.json", json.dumps({**INFO, "vocab_size": 10**12})),
    "info-without-task": ("puzzle.json", json.dumps({"grid_shape": [4, 4], "vocab_size": 6})),
    "names-deep": ("identifiers.json", DEEP),
    "names-numbers": ("identifiers.json", "[1, 2]"),
    "names-20000-digits": ("identifiers.json", DIGITS),
}


@pytest.mark.parametrize("case", PUZZLE_FOLDERS)
def test_hostile_puzzle_folder_is_rejected_by_file_name(case, tmp_path):
    name, content = PUZZLE_FOLDERS[case]
    files = {"puzzle.json": json.dumps(INFO), "identifiers.json": '["<blank>"]', name: content}
    for file, text_of_file in files.items():
        (tmp_path / file).write_text(text_of_file)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        load_puzzle_info(tmp_path)


@pytest.mark.parametrize("change", [{"seq_len": 0}, {"vocab_size": True}, {"sets": "all"}, {"seq_len": "81"}])
def test_hostile_metadata_of_the_original_layout_is_rejected_by_file_name(change, tmp_path):
    meta = {"pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": 6, "seq_len": 16}
    (tmp_path / "identifiers.json").write_text('["<blank>"]')
    (tmp_path / "train").mkdir()
    meta = {**meta, "num_puzzle_identifiers": 1, "sets": [], **change}
    (tmp_path / "train" / "dataset.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=r"dataset\.json: "):
        read_original(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", DEEP.encode(), b'{"version": "1.0", "model": 3}', binary()])
def test_corrupted_tokenizer_is_reported_with_its_folder(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises((ValueError, OSError)) as caught:
        load_tokenizer(str(tmp_path), None)
    assert str(tmp_path) in str(caught.value)


# ---- changed data sets, and concurrent builders ----

GO_FILE = "package p\n\n// Double returns twice the number.\nfunc Double(a int) int {\n\ta *= 2\n\treturn a\n}\n"
# Builder of a small data set, its info file, a data file, and its reader.
SETS = {
    "sudoku": ("--size 4 --clues 8 --num-train 4 --num-test 2", "puzzle.json", "data/train-00000.parquet",
               lambda out: load_puzzle_dataset(out, "train")),
    "cosmology": ("--size 16 --samples 4 --test-samples 2", "cosmology.json", "train/00000-of-00001.parquet",
                  lambda out: read_arrays(out, "train")),
    "reasoning": ("pointers --num-train 8 --num-validation 2 --num-test 2", "reasoning.json",
                  "data/test-00000.parquet", lambda out: load_split(out, "test", info="reasoning.json")),
    "go": ("{0}/a.go --trajectories 1 --text {0}/text", "report.json", "trajectories/train.jsonl",
           lambda out: records(out / "trajectories" / "train.jsonl")),
    "arc": ("{0}/arc.json --num-aug 0 --evaluate training", "puzzle.json", "test_puzzles.json", load_test_puzzles),
}  # fmt: skip


def build_small(task, tmp_path, out):
    (tmp_path / "a.go").write_text(GO_FILE)
    pair = {"input": [[1]], "output": [[2]]}
    (tmp_path / "arc.json").write_text(json.dumps({"training": {"a": {"train": [pair], "test": [pair]}}}))
    return CliRunner().invoke(app, ["data", task, *SETS[task][0].format(tmp_path).split(), "--out", str(out)])


@pytest.mark.parametrize("task", SETS)
def test_a_changed_file_is_named_until_its_set_is_built_again_by_one_builder(task, tmp_path, monkeypatch):
    _, info, name, read = SETS[task]
    monkeypatch.setattr("hrm_hf.io.files.SECONDS_TO_WAIT", 0.0)
    out = tmp_path / "out"
    for folder, option in ((out, "--out"), *([(tmp_path / "text", "--text")] if task == "go" else [])):
        with building(folder):
            result = build_small(task, tmp_path, out)
        assert isinstance(result.exception, FolderInUseError) and option in str(result.exception) and not out.exists()
    assert (result := build_small(task, tmp_path, out)).exit_code == 0, result.output
    read(out)
    if name.endswith(".parquet"):  # only these are found by a pattern
        added = shutil.copy(out / name, out / name.replace("00000", "00001", 1))
        with pytest.raises(ValueError, match=rf"{added.name} .*{info}"):
            read(out)
        added.unlink()
    content = (out / name).read_bytes()
    middle = len(content) // 2
    (out / name).write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(ValueError, match=rf"{name} .*{info}"):
        read(out)
    assert (result := build_small(task, tmp_path, out)).exit_code == 0, result.output
    read(out)
    known = json.loads((out / info).read_text())
    assert name in known.pop(CHECKSUMS)
    (out / info).write_text(json.dumps(known))  # as written by an older version
    read(out)
    assert not list(out.glob(".build.lock"))


def test_an_ordinary_recipe_with_anchors_is_read(tmp_path):
    (tmp_path / "r.yaml").write_text("a: &rate 0.5\nb: *rate\n")
    assert load_recipe(tmp_path / "r.yaml", {"a", "b"}) == {"a": "0.5", "b": "0.5"}


# ---- repeated puzzles


def boards(count: int) -> list[tuple[str, str]]:
    pairs = sudoku_generation.generate(9, count, 40, seed=5)
    return [("".join(map(str, board)), "".join(map(str, solution))) for board, solution in pairs]


def write_csv(path, rows):
    path.write_text(HEADER + "".join(f"{one},{two}\n" for one, two in rows))
    return path


def shown(split) -> list[str]:
    return [sudoku_rules.decode(row) for row in split["input_ids"]]


def with_dots(board: str) -> str:
    return board.replace("0", ".")


def test_equal_puzzles_do_not_land_in_both_train_and_test(tmp_path):
    a, b, c, d = boards(4)
    dotted = (with_dots(a[0]), a[1])  # the same puzzle in another notation
    splits, info = sudoku.sudoku_from_source(write_csv(tmp_path / "s.csv", [a, b, dotted, c, b, d, a]), test_size=2)
    assert shown(splits["train"]) == [with_dots(one[0]) for one in (a, b)]
    assert shown(splits["test"]) == [with_dots(one[0]) for one in (c, d)]
    assert info.repeated == {"equal to another in train, left out": 3}


def test_training_puzzles_in_the_given_test_split_are_removed_and_counted(tmp_path):
    a, b, c = boards(3)
    write_csv(tmp_path / "train.csv", [a, b, c])
    write_csv(tmp_path / "test.csv", [b])
    splits, info = sudoku.sudoku_from_source(tmp_path)
    assert shown(splits["train"]) == [with_dots(a[0]), with_dots(c[0])] and len(splits["test"]) == 1
    assert info.repeated == {"in train and equal to one in test, left out": 1}


def test_symmetric_copies_of_test_puzzles_are_removed_from_training_and_counted(tmp_path):
    a, b, c = boards(3)
    renamed = tuple(text.translate(str.maketrans("123456789", "912345678"))[::-1] for text in a)  # and rotated
    splits, info = sudoku.sudoku_from_source(write_csv(tmp_path / "s.csv", [a, b, c, renamed]), test_size=1)
    assert shown(splits["train"]) == [with_dots(one[0]) for one in (b, c)]
    assert info.repeated == {"in train and symmetric copies of puzzles in test, left out": 1}


def test_puzzle_with_two_solutions_is_rejected_with_both_lines(tmp_path):
    first, second = ("1234341221434321", "1234341243212143")
    puzzle = "".join(x if x == y else "." for x, y in zip(first, second))
    path = write_csv(tmp_path / "s.csv", [(BOARD, SOLVED), (puzzle, first), (puzzle, second)])
    with pytest.raises(ValueError, match=r"s\.csv, line 4: .*s\.csv, line 3, .*solution"):
        sudoku.sudoku_from_source(path)


def test_equal_mazes_are_skipped_and_conflicting_ones_rejected(tmp_path):
    one, other = ("S  #  G  ", "So #o Go "), ("S  ## G  ", "Soo##oGoo")
    splits, info = maze.mazes_from_source(write_csv(tmp_path / "m.csv", [one, other, one]), test_size=1)
    assert [len(splits[name]) for name in ("train", "test")] == [1, 1]
    assert info.repeated["equal to another in train, left out"] == 1
    detour = ("S  #  G  ", "Soo# oGoo")
    with pytest.raises(ValueError, match=r"m\.csv, line 3: .*line 2, .*solution"):
        maze.mazes_from_source(write_csv(tmp_path / "m.csv", [one, detour]))


def test_rows_without_repetitions_are_unchanged(tmp_path):
    rows = boards(6)
    splits, info = sudoku.sudoku_from_source(write_csv(tmp_path / "s.csv", rows), test_size=2)
    assert shown(splits["train"]) + shown(splits["test"]) == [with_dots(one[0]) for one in rows]
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["data", "sudoku", "--source", str(tmp_path / "s.csv"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "repeated" not in json.loads((out / "puzzle.json").read_text()) and not info.repeated


def test_command_reports_the_number_of_repeated_rows(tmp_path):
    a, b = boards(2)
    path = write_csv(tmp_path / "s.csv", [a, a, b])
    result = CliRunner().invoke(app, ["data", "sudoku", "--source", str(path), "--out", str(tmp_path / "o"), "--json"])
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["train_rows"] == 2 and report["repeated"] == {"equal to another in train, left out": 1}
    assert "equal to another in train, left out: 1 rows" in (tmp_path / "o" / "README.md").read_text()
    assert load_puzzle_info(tmp_path / "o").repeated == report["repeated"]


def test_evaluated_arc_task_renamed_in_training_is_reported(tmp_path, caplog):
    pair, other = {"input": [[1]], "output": [[2]]}, {"input": [[3]], "output": [[4]]}
    task = {"train": [pair], "test": [other]}
    bundle = {"training": {"a": task, "b": {"train": [other], "test": [other]}}, "evaluation": {"c": task}}
    (tmp_path / "arc.json").write_text(json.dumps(bundle))
    assert [one.name for one in read_tasks([tmp_path / "arc.json"])] == ["a", "b", "c"]
    assert "training task a of arc.json is identical to evaluated task c" in caplog.text
