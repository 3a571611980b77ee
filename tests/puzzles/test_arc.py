"""ARC builder: sources, tokens, augmentations, splits, and error messages."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hrm_hf.puzzles.arc import (
    augmentations,
    build_arc,
    encode_task,
    parse_task,
    read_tasks,
    save_arc_dataset,
    task_identifiers,
    task_to_json,
)
from hrm_hf.puzzles.arc_grids import (
    FRAME,
    apply_augmentation,
    crop_prediction,
    encode_grid,
    encode_pair,
    parse_identifier,
    undo_augmentation,
)
from hrm_hf.puzzles.dataset import load_puzzle_dataset, load_puzzle_info


SHARED = Path(__file__).parents[3] / "shared/data"
ARC_1, ARC_2, CONCEPT = (SHARED / f"{name}.json.gz" for name in ("arc_agi_1", "arc_agi_2", "concept_arc"))
needs_bundles = pytest.mark.skipif(not ARC_1.exists(), reason="ARC bundles are not at hand")


def make_task(number: int, train: int = 2, test: int = 1) -> dict:
    """Create a task of random 3 x 4 grids, each with its mirror image as output."""
    rng = np.random.default_rng(number)
    grids = [rng.integers(0, 10, (3, 4)) for _ in range(train + test)]
    pairs = [{"input": grid.tolist(), "output": grid[:, ::-1].tolist()} for grid in grids]
    return {"train": pairs[:train], "test": pairs[train:]}


def make_bundle() -> dict:
    return {
        "training": {f"t{i}": make_task(i) for i in range(3)},
        "evaluation": {f"e{i}": make_task(10 + i, test=2) for i in range(2)},
    }


@pytest.fixture
def bundle(tmp_path) -> Path:
    file = tmp_path / "bundle.json.gz"
    file.write_bytes(gzip.compress(json.dumps(make_bundle()).encode()))
    return file


@pytest.fixture
def built(bundle, tmp_path):
    tasks = read_tasks([bundle])
    return tasks, *build_arc(tasks, num_aug=4, seed=1, cache_dir=tmp_path / "cache")


def write_folders(root: Path, reverse: bool = False) -> Path:
    """Write the tasks of `make_bundle` as one file each, created in either order."""
    files = [
        (f"{subset}/{name}.json", task) for subset, tasks in make_bundle().items() for name, task in tasks.items()
    ]
    for name, task in reversed(files) if reverse else files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps(task))
    return root


def as_json(tasks) -> dict:
    return {task.name: (task.evaluated, task_to_json(task)) for task in tasks}


# Tokens


def test_an_encoded_pair_decodes_to_its_grids():
    grid, answer = np.array([[0, 1, 2], [3, 4, 9]]), np.array([[5], [6]])
    inputs, labels = encode_pair(grid, answer)
    assert np.array_equal(crop_prediction(inputs), grid)
    assert np.array_equal(crop_prediction(np.where(labels == -100, 0, labels)), answer)


def test_end_of_grid_tokens_frame_the_grid_and_leave_the_corner_padded():
    frame = encode_grid(np.full((2, 3), 9), offset=(4, 5)).reshape(FRAME, FRAME)
    expected = np.zeros((FRAME, FRAME), dtype=int)
    expected[4:6, 5:8] = 11
    expected[6, 5:8] = 1
    expected[4:6, 8] = 1
    assert np.array_equal(frame, expected)


def test_a_grid_that_fills_the_frame_has_no_end_of_grid_tokens():
    grid = np.full((30, 30), 3)
    assert np.array_equal(encode_grid(grid), np.full(900, 5))
    assert np.array_equal(crop_prediction(encode_grid(grid)), grid)


def test_end_of_grid_is_supervised_and_padding_is_not():
    _, labels = encode_pair(np.zeros((1, 1), int), np.zeros((1, 1), int))
    assert labels[0] == 2 and labels[1] == 1 and labels[30] == 1
    assert (labels == -100).sum() == 897


def test_the_crop_is_the_largest_top_left_rectangle_and_its_width_never_grows():
    frame = np.zeros((FRAME, FRAME), dtype=int)
    frame[0, :5], frame[1, :3], frame[2, :9], frame[3, :1] = 2, 3, 4, 5
    assert np.array_equal(crop_prediction(frame), [[0] * 3, [1] * 3, [2] * 3])


def test_the_crop_prefers_fewer_rows_between_equal_areas():
    frame = np.zeros((FRAME, FRAME), dtype=int)
    frame[0, :4] = frame[1, :2] = 2
    assert crop_prediction(frame).shape == (1, 4)


def test_a_prediction_that_starts_with_no_color_crops_to_nothing():
    assert crop_prediction(np.ones(900, dtype=int)).shape == (0, 0)


# Augmentations


def test_undoing_an_augmentation_restores_every_grid():
    task = parse_task(make_task(7), "t")
    for name, pairs in augmentations(task, num_aug=60, seed=0):
        for original, shown in zip([*task.train, *task.test], pairs):
            for before, after in zip(original, shown):
                assert np.array_equal(undo_augmentation(after, name), before)
                assert np.array_equal(apply_augmentation(before, name), after)


def test_augmentations_are_distinct_and_keep_the_background():
    variants = list(augmentations(parse_task(make_task(7), "t"), num_aug=50, seed=0))
    assert len(variants) == 51
    assert (
        len({b"".join(pair.input.tobytes() + bytes(pair.input.shape) for pair in pairs) for _, pairs in variants})
        == 51
    )
    assert all(parse_identifier(name)[2][0] == 0 for name, _ in variants)
    assert {parse_identifier(name)[1] for name, _ in variants} == set(range(8))


def test_a_task_with_few_distinct_variants_yields_only_those():
    blank = {"input": [[0]], "output": [[5]]}  # symmetries change nothing, and color 5 can become any of nine colors
    variants = list(augmentations(parse_task({"train": [blank], "test": [blank]}, "t"), num_aug=100, seed=0))
    assert sorted(int(pairs[0].output[0, 0]) for _, pairs in variants) == list(range(1, 10))


@pytest.mark.parametrize("name", ["a_b|||t7|||0123456798", "a_b_t7_0123456798"])
def test_trm_and_hrm_identifiers_are_parsed(name):
    task, transform, colours = parse_identifier(name)
    assert (task, transform, colours.tolist()) == ("a_b", 7, [0, 1, 2, 3, 4, 5, 6, 7, 9, 8])


def test_a_bare_task_name_is_the_unchanged_task():
    task, transform, colours = parse_identifier("AboveBelow_10")
    assert (task, transform, colours.tolist()) == ("AboveBelow_10", 0, list(range(10)))


def test_identifiers_do_not_depend_on_directory_order_or_hash_seed(tmp_path, built):
    script = (
        # an empty parent package, since `import hrm_hf` would load torch, which takes seconds
        "import sys, types; sys.modules['hrm_hf'] = types.ModuleType('hrm_hf')\n"
        "sys.modules['hrm_hf'].__path__ = ['hrm_hf']; from hrm_hf.puzzles.arc import *\n"
        "from hrm_hf.puzzles.arc import read_tasks\n"
        "for task in read_tasks(sys.argv[1:]): print(*(name for name, _ in augmentations(task, 4, 1)))"
    )
    other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # unset: random in this process
    run = subprocess.run(
        [sys.executable, "-c", script, write_folders(tmp_path / "folders", reverse=True)],
        env={**os.environ, "PYTHONHASHSEED": other_seed},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ["<blank>", *run.stdout.split()] == built[2].identifiers


def test_variants_of_a_task_do_not_depend_on_the_other_tasks(bundle, built, tmp_path):
    alone = [task for task in built[0] if task.name == "t1"]
    splits, info = build_arc(alone, num_aug=4, seed=1, cache_dir=tmp_path / "alone")
    ids = task_identifiers("t1", built[2].identifiers)
    assert info.identifiers[1:] == list(ids.values())
    rows = built[1]["train"].filter(lambda row: row["puzzle_identifiers"] in ids)
    assert rows["input_ids"][:] == splits["train"]["input_ids"][:]


def test_variants_match_recorded_ones():
    names = [name for name, _ in augmentations(parse_task(make_task(7), "t"), num_aug=2, seed=42)]
    assert names == ["t", "t|||t5|||0684512379", "t|||t7|||0284193567"]


# Splits


def test_training_tasks_train_on_all_pairs_and_evaluated_ones_only_on_their_train_pairs(built):
    _, splits, info = built
    assert len(splits["train"]) == 3 * 5 * 3 + 2 * 5 * 2
    assert len(splits["test"]) == 2 * 5 * 2
    assert info.num_puzzle_identifiers == 1 + 5 * 5
    assert {parse_identifier(info.identifiers[i])[0] for i in splits["test"]["puzzle_identifiers"]} == {"e0", "e1"}


def test_puzzles_and_groups_are_numbered_without_gaps_within_each_split(built):
    for split, groups in zip((built[1]["train"], built[1]["test"]), (5, 2)):
        assert np.unique(split["puzzle_index"]).tolist() == list(range(groups * 5))
        assert np.unique(split["group_index"]).tolist() == list(range(groups))


def test_test_rows_are_never_shifted_and_show_the_augmented_task(built):
    tasks, splits, info = built
    tests = {task.name: [pair.input.tolist() for pair in task.test] for task in tasks}
    for row in splits["test"]:
        name = info.identifiers[row["puzzle_identifiers"]]
        assert undo_augmentation(crop_prediction(row["input_ids"]), name).tolist() in tests[parse_identifier(name)[0]]


def test_train_rows_are_shifted_together_except_one_per_puzzle(built):
    corners = {}
    for row in built[1]["train"]:
        tokens, labels = (np.array(row[column]).reshape(FRAME, FRAME) for column in ("input_ids", "labels"))
        corner, answer_corner = (np.argwhere(grid >= 2).min(axis=0).tolist() for grid in (tokens, labels))
        assert corner == answer_corner
        corners.setdefault(row["puzzle_index"], []).append(corner)
    assert all([0, 0] in puzzle for puzzle in corners.values())
    assert len({tuple(corner) for puzzle in corners.values() for corner in puzzle}) > 20


def test_another_seed_gives_other_variants_and_the_same_seed_the_same_rows(built, tmp_path):
    tasks, splits, info = built
    again, same = build_arc(tasks, num_aug=4, seed=1, cache_dir=tmp_path / "again")
    assert same.identifiers == info.identifiers
    assert again["train"][:] == splits["train"][:]
    assert build_arc(tasks, num_aug=4, seed=2, cache_dir=tmp_path / "other")[1].identifiers != same.identifiers


def test_a_written_folder_streams_and_holds_the_test_puzzles(built, tmp_path):
    tasks, splits, info = built
    folder = save_arc_dataset(splits, info, tasks, tmp_path / "out")
    row = next(iter(load_puzzle_dataset(folder, "test", streaming=True)))
    assert row == splits["test"][0]
    assert load_puzzle_info(folder).config_fields()["vocab_size"] == 12
    assert load_puzzle_info(folder).identifiers == info.identifiers
    assert json.loads((folder / "test_puzzles.json").read_text()) == make_bundle()["evaluation"]


def test_hidden_answers_become_ignored_labels(tmp_path):
    task = make_task(1)
    del task["test"][0]["output"]
    splits, _ = build_arc([parse_task(task, "h")], num_aug=1, cache_dir=tmp_path)
    assert set(np.unique(splits["test"]["labels"][:])) == {-100}


def test_one_task_becomes_model_inputs_under_any_of_its_identifiers(built):
    _, splits, info = built
    identifier, name = list(task_identifiers("e1", info.identifiers).items())[3]
    rows = [row for row in splits["test"] if row["puzzle_identifiers"] == identifier]
    inputs = encode_task(make_bundle()["evaluation"]["e1"], name)
    assert inputs["train"]["input_ids"].shape == (2, 900)
    assert inputs["test"]["input_ids"].tolist() == [row["input_ids"] for row in rows]
    assert inputs["test"]["labels"].tolist() == [row["labels"] for row in rows]


# Sources


def test_a_bundle_a_folder_and_kaggle_files_give_the_same_tasks(bundle, tmp_path):
    kaggle = tmp_path / "kaggle"
    kaggle.mkdir()
    for subset, tasks in make_bundle().items():
        solutions = {name: [pair.pop("output") for pair in task["test"]] for name, task in tasks.items()}
        (kaggle / f"arc-agi_{subset}_challenges.json").write_text(json.dumps(tasks))
        (kaggle / f"arc-agi_{subset}_solutions.json").write_text(json.dumps(solutions))
    expected = as_json(read_tasks([bundle]))
    assert list(expected) == ["e0", "e1", "t0", "t1", "t2"]
    assert as_json(read_tasks([write_folders(tmp_path / "folders")])) == expected
    assert as_json(read_tasks([kaggle])) == expected


def test_tasks_in_concept_folders_are_training_tasks(tmp_path):
    for concept in ("AboveBelow", "Center"):
        (tmp_path / "corpus" / concept).mkdir(parents=True)
        (tmp_path / "corpus" / concept / f"{concept}1.json").write_text(json.dumps(make_task(1)))
    tasks = read_tasks([tmp_path / "corpus"], evaluate=())
    assert [(task.name, task.evaluated) for task in tasks] == [("AboveBelow1", False), ("Center1", False)]


def test_a_selector_takes_only_the_named_subsets(bundle):
    assert [task.name for task in read_tasks([f"{bundle}:evaluation"])] == ["e0", "e1"]


def test_last_source_of_a_repeated_task_wins_with_a_warning(bundle, tmp_path, caplog):
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"training": {"t1": make_task(99)}}))
    tasks = {task.name: task for task in read_tasks([bundle, other])}
    assert task_to_json(tasks["t1"]) == make_task(99)
    assert "1 tasks occur in several sources" in caplog.text and "t1" in caplog.text


def test_training_on_an_evaluated_task_is_rejected(bundle, tmp_path):
    leak = tmp_path / "leak.json"
    leak.write_text(json.dumps({"training": {"e1": make_task(11)}}))
    with pytest.raises(ValueError, match=r"e1 \(e1 .*leak\.json"):
        read_tasks([bundle, leak])


@needs_bundles
def test_arc_1_evaluation_with_arc_2_training_is_rejected():
    with pytest.raises(ValueError, match=r"376 .*00576224, 009d5c81"):
        read_tasks([ARC_1, ARC_2])


@needs_bundles
def test_the_arc_1_recipe_has_960_tasks_and_its_published_pairs(tmp_path):
    tasks = read_tasks([ARC_1, CONCEPT])
    splits, info = build_arc(tasks, num_aug=0, cache_dir=tmp_path)
    assert (len(tasks), info.num_puzzle_identifiers) == (960, 961)
    assert len(splits["train"]) == 1302 + 416 + 427 + 480 + 1363
    assert len(splits["test"]) == 419


@needs_bundles
def test_the_arc_2_recipe_has_1120_tasks():
    tasks = read_tasks([ARC_2])
    assert (len(tasks), sum(task.evaluated for task in tasks)) == (1120, 120)


# Errors

GOOD = [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"train": []}, "'train' and 'test'"),
        ({"train": [], "test": []}, "train and test pairs"),
        ({"train": [{"input": GOOD, "output": GOOD}], "test": []}, "train and test pairs"),
        ({"train": [{"input": [[1] * 31], "output": GOOD}], "test": []}, "train pair 0, input .*1 x 31"),
        ({"train": [{"input": GOOD, "output": [[10]]}], "test": []}, "train pair 0, output .*color 10"),
        ({"train": [], "test": [{"input": [[1, 2], [3]]}]}, r"test pair 0, input .*\[1, 2\] cells"),
        ({"train": [{"output": GOOD}], "test": []}, "train pair 0"),
        ({"train": [{"input": [], "output": GOOD}], "test": []}, "train pair 0, input"),
        ({"train": [{"input": GOOD}], "test": [{"input": GOOD}]}, "1 training pairs .*'output'"),
    ],
)
def test_malformed_task_error_names_file_task_and_pair(tmp_path, task, message):
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation/bad.json").write_text(json.dumps(task))
    with pytest.raises(ValueError, match=f"evaluation/bad.json: task 'bad'.*{message}"):
        read_tasks([tmp_path / "evaluation"])


@pytest.mark.parametrize("name", ["a|||t9|||0123456789", "a|||t1|||0123456788", "a_t1_0123456788"])
def test_a_malformed_identifier_is_rejected(name):
    with pytest.raises(ValueError, match=f"identifier .*{name[-10:]}'"):
        parse_identifier(name)
    with pytest.raises(ValueError, match=r"'a_t1_0123456789': "):
        parse_task(make_task(1), "a_t1_0123456789")


def test_errors_name_missing_sources_and_available_subsets(bundle):
    with pytest.raises(FileNotFoundError, match=r"nowhere .*PATH:SUBSET"):
        read_tasks(["nowhere"])
    with pytest.raises(ValueError, match=r"'test'.*\['evaluation', 'training'\]"):
        read_tasks([f"{bundle}:test"])
    with pytest.raises(ValueError, match=r"evaluate=\['evaluation'\]: .*\['training'\]"):
        read_tasks([f"{bundle}:training"])


def test_solutions_that_do_not_match_their_challenges_are_rejected(tmp_path):
    (tmp_path / "arc_evaluation_challenges.json").write_text(json.dumps({"a": make_task(1)}))
    (tmp_path / "arc_evaluation_solutions.json").write_text(json.dumps({"a": []}))
    with pytest.raises(ValueError, match=r"solutions\.json: task 'a' has 0 .*challenges\.json has 1 "):
        read_tasks([tmp_path])


def test_negative_num_aug_and_an_empty_task_list_are_rejected(bundle):
    with pytest.raises(ValueError, match=r"num_aug.*-1"):
        build_arc(read_tasks([bundle]), num_aug=-1)
    with pytest.raises(ValueError, match=r"tasks=\[\]"):
        build_arc([])


# Command line


def test_the_command_builds_a_folder_and_rejects_mixed_builds(bundle, tmp_path):
    from hrm_hf.cli import app

    command = ["data", "arc", str(bundle), "--out", str(tmp_path / "out"), "--json", "--num-aug"]
    first = CliRunner().invoke(app, [*command, "2"])
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout.splitlines()[-1])["train_rows"] == 3 * 3 * 3 + 2 * 3 * 2
    assert CliRunner().invoke(app, [*command, "3"]).exit_code == 2
    assert CliRunner().invoke(app, ["data", "arc", "nowhere", "--out", str(tmp_path / "x")]).exit_code == 2
