"""Original .npy layout: reading, exact round trips, and errors for inconsistent files."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from typer.testing import CliRunner

from hrm_hf.puzzles.dataset import PuzzleInfo, puzzle_features
from hrm_hf.puzzles.npy_layout import guess_task, read_original, write_original


SEQ_LEN, VOCAB = 6, 5
GROUPS, PUZZLES = [0, 2, 3], [0, 1, 3, 4]  # group 0 has puzzles 0 and 1; puzzle 1 has two rows


def write_set(folder: Path, name: str, seed: int, **changes: np.ndarray) -> None:
    """Return a set of four rows, three puzzles and two groups, as the original builders save it."""
    rng = np.random.default_rng(seed)
    arrays = {
        "inputs": rng.integers(0, VOCAB, (4, SEQ_LEN), dtype=np.uint8),
        "labels": rng.integers(0, VOCAB, (4, SEQ_LEN), dtype=np.uint8),
        "puzzle_identifiers": np.array([1, 2, 3], dtype=np.int32),
        "puzzle_indices": np.array(PUZZLES, dtype=np.int32),
        "group_indices": np.array(GROUPS, dtype=np.int32),
        **changes,
    }
    for array_name, values in arrays.items():
        np.save(folder / f"{name}__{array_name}.npy", values)


def write_layout(root: Path, sets=("all",), meta: dict | None = None, **changes: np.ndarray) -> Path:
    """Write a complete folder, with `changes` to the train split and `meta` fields in every dataset.json."""
    for seed, split in enumerate(("train", "test")):
        (root / split).mkdir(parents=True)
        for i, name in enumerate(sets):
            write_set(root / split, name, 10 * seed + i, **(changes if split == "train" else {}))
        fields = {"pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": VOCAB, "seq_len": SEQ_LEN}
        fields |= {"num_puzzle_identifiers": 4, "total_groups": 2 * len(sets), "mean_puzzle_examples": 4 / 3}
        fields |= {"total_puzzles": 3 * len(sets), "sets": list(sets)}
        (root / split / "dataset.json").write_text(json.dumps(fields | (meta or {})))
    (root / "identifiers.json").write_text(json.dumps(["<blank>", "a", "a|||t1|||0123456789", "b"]))
    return root


def content(root: Path) -> dict:
    """Read all files of a layout, as arrays with their dtype or parsed JSON."""
    return {
        str(file.relative_to(root)): (np.load(file).dtype.str, np.load(file).tolist())
        if file.suffix == ".npy"
        else json.loads(file.read_text())
        for file in sorted(root.rglob("*.*"))
    }


@pytest.mark.parametrize("sets", [("all",), ("easy", "hard"), ("all", "very_hard")])
@pytest.mark.parametrize("ignore_label_id", [0, None])
def test_reading_and_writing_back_gives_the_same_files(tmp_path, sets, ignore_label_id):
    source = write_layout(tmp_path / "source", sets, {"ignore_label_id": ignore_label_id})
    splits, info = read_original(source)
    assert content(write_original(splits, info, tmp_path / "back")) == content(source)


def test_rows_carry_their_identifier_puzzle_and_group(tmp_path):
    splits, info = read_original(write_layout(tmp_path / "source"))
    assert splits["train"]["puzzle_identifiers"][:] == [1, 2, 2, 3]
    assert splits["train"]["puzzle_index"][:] == [0, 1, 1, 2]
    assert splits["train"]["group_index"][:] == [0, 0, 0, 1]
    assert splits["train"].features == puzzle_features(SEQ_LEN)
    assert info.identifiers[2] == "a|||t1|||0123456789"


def test_ignored_labels_become_minus_100_and_nothing_else_does(tmp_path):
    source = write_layout(tmp_path / "source")
    labels = np.load(source / "train/all__labels.npy").astype(int)
    splits, _ = read_original(source)
    assert splits["train"]["labels"][:] == np.where(labels == 0, -100, labels).tolist()


def test_selected_rows_are_written_with_new_offsets(tmp_path):
    splits, info = read_original(write_layout(tmp_path / "source"))
    out = write_original(DatasetDict(train=splits["train"].select([1, 2, 3])), info, tmp_path / "back")
    assert np.load(out / "train/all__puzzle_indices.npy").tolist() == [0, 2, 3]
    assert np.load(out / "train/all__group_indices.npy").tolist() == [0, 1, 2]
    assert np.load(out / "train/all__puzzle_identifiers.npy").tolist() == [2, 3]


def test_an_empty_split_survives_the_round_trip(tmp_path):
    splits, info = read_original(write_layout(tmp_path / "source"))
    empty = DatasetDict(train=splits["train"], test=splits["test"].select([]))
    again, _ = read_original(write_original(empty, info, tmp_path / "back"))
    assert (len(again["train"]), len(again["test"])) == (4, 0)
    assert again["test"].features == puzzle_features(SEQ_LEN)


def test_the_task_is_guessed_from_length_and_vocabulary():
    assert guess_task(81, 11) == ("sudoku", (9, 9), (3, 3))
    assert guess_task(900, 6) == ("maze", (30, 30), None)
    assert guess_task(900, 12) == ("arc", (30, 30), None)
    assert guess_task(900, 7) == ("generic", (30, 30), None)
    assert guess_task(12, 11) == ("generic", (1, 12), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"puzzle_indices": [0, 3, 1, 4]}, "puzzle_indices.npy"),
        ({"group_indices": [0, 0, 3]}, "group_indices.npy"),
        ({"puzzle_indices": [0, 1, 2, 3]}, "puzzle_indices.npy: .* 0 to 4"),
        ({"group_indices": [0, 2]}, "group_indices.npy: .* 0 to 3"),
        ({"puzzle_indices": [0, 4]}, r"puzzle_indices.npy .*\(2,\); .*\(4,\)"),
        ({"labels": np.zeros((3, SEQ_LEN), int)}, r"labels.npy .*\(3, 6\); .*\(4, 6\)"),
        ({"inputs": np.zeros((4, 7), int)}, r"inputs.npy .*\(4, 7\); .*\(4, 6\)"),
        ({"inputs": np.full((4, SEQ_LEN), 9)}, "train inputs .*9 to 9"),
        ({"puzzle_identifiers": [1, 2, 4]}, "puzzle_identifiers.npy .*1 to 4"),
        ({"inputs": np.zeros((4, SEQ_LEN))}, "inputs.npy .*float64"),
    ],
)
def test_inconsistent_arrays_are_rejected_by_name(tmp_path, changes, message):
    source = write_layout(tmp_path / "s", **{name: np.asarray(values) for name, values in changes.items()})
    with pytest.raises(ValueError, match=message):
        read_original(source)


@pytest.mark.parametrize("name", ["identifiers.json", "test/dataset.json", "train/all__labels.npy"])
def test_a_missing_file_is_named(tmp_path, name):
    source = write_layout(tmp_path / "s")
    (source / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        read_original(source)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"num_puzzle_identifiers": 9}, "num_puzzle_identifiers=9"),
        ({"pad_id": 3}, "pad_id=3"),
        ({"vocab_size": 300}, "vocab_size=300"),
        ({"sets": ["very-hard"]}, r"sets=\['very-hard'\]"),
    ],
)
def test_invalid_dataset_json_is_rejected(tmp_path, meta, message):
    with pytest.raises(ValueError, match=message):
        read_original(write_layout(tmp_path / "s", meta=meta))


def test_pickled_arrays_are_never_loaded(tmp_path):
    source = write_layout(tmp_path / "s", puzzle_identifiers=np.array([{}, {}, {}], dtype=object))
    with pytest.raises(ValueError, match=r"puzzle_identifiers.npy .*objects"):
        read_original(source)


def rows(puzzle_index, group_index, label=1) -> Dataset:
    n = len(puzzle_index)
    columns = {"input_ids": [[1, 2]] * n, "labels": [[label, -100]] * n, "puzzle_identifiers": [0] * n}
    columns |= {"puzzle_index": puzzle_index, "group_index": group_index}
    return Dataset.from_dict(columns, features=puzzle_features(2))


@pytest.mark.parametrize(
    ("split", "dataset", "message"),
    [
        ("train", rows([0, 1, 0], [0, 0, 0]), "puzzle_index .*row 1"),
        ("train", rows([0, 0], [0, 1]), "group_index .*puzzle 0"),
        ("train", rows([0], [0], label=0), "ignore_label_id=0"),
        ("validation", rows([0], [0]), "split 'validation' .*train or test"),
    ],
)
def test_rows_the_layout_cannot_store_are_rejected(tmp_path, split, dataset, message):
    with pytest.raises(ValueError, match=message):
        write_original(DatasetDict({split: dataset}), PuzzleInfo("generic", (1, 2), 4), tmp_path / "out")


def test_an_existing_layout_is_not_overwritten(tmp_path):
    source = write_layout(tmp_path / "s")
    splits, info = read_original(source)
    with pytest.raises(FileExistsError, match="already has"):
        write_original(splits, info, source)


def test_import_and_export_commands_round_trip(tmp_path):
    from hrm_hf.cli import app

    source, ours, back = write_layout(tmp_path / "s"), tmp_path / "ours", tmp_path / "back"
    imported = CliRunner().invoke(app, ["data", "import", str(source), "--out", str(ours), "--json"])
    assert json.loads(imported.stdout.splitlines()[-1])["train_rows"] == 4
    assert CliRunner().invoke(app, ["data", "export", str(ours), "--out", str(back)]).exit_code == 0
    assert content(back) == content(source)
    assert CliRunner().invoke(app, ["data", "import", str(tmp_path / "no"), "--out", "x"]).exit_code == 2
    assert CliRunner().invoke(app, ["data", "export", str(tmp_path / "no"), "--out", "x"]).exit_code == 2
