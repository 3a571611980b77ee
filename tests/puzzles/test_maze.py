"""Mazes: notation, paths, generator, symmetries, readers, command line.

Referee for paths: the relaxation below.
"""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.puzzles import maze
from hrm_hf.puzzles.arc_grids import dihedral, inverse_dihedral


PUZZLE = ["S  ", "#  ", "G  "]
SOLUTION = ["So ", "#o ", "Go "]


def shortest_by_relaxation(grid):
    """Return the length and number of shortest paths, from powers of the step relation (without a queue)."""
    walkable = grid != maze.WALL
    reached = np.where(grid == maze.START, 1, 0).astype(object)
    for steps in range(grid.size):
        if reached[grid == maze.GOAL][0]:
            return steps, reached[grid == maze.GOAL][0]
        framed = np.pad(reached, 1, constant_values=0)
        reached = (framed[:-2, 1:-1] + framed[2:, 1:-1] + framed[1:-1, :-2] + framed[1:-1, 2:]) * walkable
    return None


def write_csv(path, rows):
    path.write_text("question,answer\n" + "".join(f"{question},{answer}\n" for question, answer in rows))
    return path


# symmetries


def test_the_symmetries_are_numbered_as_in_the_original_and_act_on_the_last_two_axes():
    grid = np.arange(9).reshape(3, 3)
    expected = [grid, *(np.rot90(grid, k) for k in (1, 2, 3)), np.fliplr(grid), np.flipud(grid), grid.T]
    expected.append(np.fliplr(np.rot90(grid)))
    for transform, other in enumerate(expected):
        assert np.array_equal(dihedral(np.stack([grid, grid + 9]), transform), np.stack([other, other + 9]))
        assert np.array_equal(inverse_dihedral(dihedral(grid[:2], transform), transform), grid[:2])


# notation and checking


def test_tokens_follow_the_original_character_set():
    assert maze.encode("# SGo####").reshape(-1)[:5].tolist() == [1, 2, 3, 4, 5]
    assert maze.decode(range(6)) == "?# SGo"


def test_lines_and_flat_strings_are_the_same_maze():
    for form in ("\n".join(PUZZLE), "".join(PUZZLE), maze.encode(PUZZLE), maze.encode(PUZZLE).reshape(-1)):
        assert np.array_equal(maze.encode(form), maze.encode(PUZZLE))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("S G#x####", "'x' at position 5"),
        ("S G##", "5 cells"),
        (["S G", "#"], r"\[1, 3\]"),
        ([[1, 9], [1, 1]], "token 9"),
    ],
)
def test_a_malformed_maze_is_rejected(text, message):
    with pytest.raises(ValueError, match=message):
        maze.encode(text)


@pytest.mark.parametrize(
    ("solution", "message"),
    [
        (["So ", " o ", "Go "], "row 2, column 1: '#' became ' '"),
        (["S  ", "o  ", "G  "], "the marked path does not connect S and G"),
        (["oo ", "#o ", "Go "], "row 1, column 1: 'S' became 'o'"),
        (["Soo", "# o", "Goo"], "the path has 6 steps; the shortest has 4"),
        (["Soo", "#o ", "Go "], "1 marked cells are not on the path"),
    ],
)
def test_each_violation_is_reported(solution, message):
    assert maze.validate_solution(PUZZLE, SOLUTION) == []
    assert message in maze.validate_solution(PUZZLE, solution)


def test_a_predicted_padding_token_is_a_violation():
    answer = maze.encode(SOLUTION)
    answer[0, 2] = maze.PAD
    assert maze.validate_solution(PUZZLE, answer) == ["row 1, column 3: ' ' became '?'"]


def test_a_maze_without_goal_cannot_be_checked():
    with pytest.raises(ValueError, match="1 S and 0 G"):
        maze.validate_solution("S   ", "S   ")


def test_a_shortest_path_is_marked_and_a_blocked_goal_gives_none():
    assert maze.decode(maze.mark_shortest_path(maze.encode(PUZZLE))) == "".join(SOLUTION)
    assert maze.mark_shortest_path(maze.encode("S##G")) is None


# generator


@pytest.mark.parametrize("shape", [(10, 10), (11, 14), (30, 30)])
def test_generated_mazes_have_one_shortest_path_which_is_marked(shape):
    for puzzle, solution in maze.generate(*shape, 5, seed=2, openings=0.2):
        assert puzzle.shape == shape
        assert shortest_by_relaxation(puzzle) == ((solution == maze.PATH).sum() + 1, 1)
        assert maze.validate_solution(puzzle, solution) == []


def test_openings_create_several_paths():
    for openings, cycles in ((0.0, False), (0.3, True)):
        puzzle, _ = next(maze.generate(15, 15, 1, openings=openings))
        cells = puzzle != maze.WALL
        edges = (cells[1:] & cells[:-1]).sum() + (cells[:, 1:] & cells[:, :-1]).sum()
        assert (edges > cells.sum() - 1) == cycles  # a tree has one edge fewer than nodes


def test_the_minimum_path_length_is_respected():
    lengths = [(solution == maze.PATH).sum() + 1 for _, solution in maze.generate(30, 30, 10, min_path_length=110)]
    assert min(lengths) >= 110


def test_an_unreachable_path_length_is_an_error():
    with pytest.raises(RuntimeError, match=r"24 .*min_path_length"):
        list(maze.generate(5, 5, 1, min_path_length=24))


def test_no_test_maze_is_a_symmetry_of_a_training_maze():
    splits, _ = maze.generated_mazes(5, 5, 60, 60, aug=True)
    train, test = ({tuple(row) for row in splits[name]["input_ids"]} for name in ("train", "test"))
    assert not train & test


def test_augmented_mazes_are_solved_and_follow_their_original():
    splits, info = maze.generated_mazes(8, 8, 3, 2, aug=True)
    plain, _ = maze.generated_mazes(8, 8, 3, 2)
    train = splits["train"]
    assert train["group_index"][:] == [0] * 8 + [1] * 8 + [2] * 8
    assert len(splits["test"]) == 2
    assert [train[i]["input_ids"] for i in (0, 8, 16)] == plain["train"]["input_ids"][:]
    for row in train:
        assert maze.validate_solution(np.array(row["input_ids"]), np.array(row["labels"])) == []
    assert (info.task, info.grid_shape, info.vocab_size) == ("maze", (8, 8), 6)


def test_augmentation_of_an_oblong_grid_is_rejected():
    with pytest.raises(ValueError, match="5 x 7"):
        maze.generated_mazes(5, 7, 1, 1, aug=True)


# readers


def test_a_file_in_the_hub_schema_becomes_rows(tmp_path):
    upside_down = ("".join(PUZZLE[::-1]), "".join(SOLUTION[::-1]))
    mirrored = tuple("".join(row[::-1] for row in rows) for rows in (PUZZLE, SOLUTION))
    path = write_csv(tmp_path / "m.csv", [upside_down, mirrored, ("S  ## G  ", "Soo##oGoo")])
    splits, info = maze.mazes_from_source(path, test_size=1)
    assert info.grid_shape == (3, 3)
    assert maze.decode(splits["train"][0]["labels"]) == "".join(SOLUTION[::-1])
    assert (splits["train"]["path_length"][:], splits["test"]["path_length"][:]) == ([4, 4], [6])


def test_an_oblong_source_needs_its_shape(tmp_path):
    path = write_csv(tmp_path / "m.csv", [("S G", "SoG")])
    with pytest.raises(ValueError, match="3 characters"):
        maze.mazes_from_source(path)
    assert maze.mazes_from_source(path, (1, 3))[1].grid_shape == (1, 3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("S G#", "SoG"), "line 2, column 'answer': 3 .*'SoG'; .*4"),
        (("S xG", "S oG"), "line 2, column 'question': .*'x' .*3"),
        (("S# G", "So G"), "line 2, column 'answer': .*column 'question': row 1, column 2: '#'"),
        (("S  G", "S  G"), "line 2, column 'answer': .* S and G"),
        (("S  S", "S  S"), "line 2, column 'question': .*2 S and 0 G"),
    ],
)
def test_invalid_row_error_names_line_and_column(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        maze.mazes_from_source(write_csv(tmp_path / "m.csv", [row]), (2, 2))


def test_a_minimum_path_length_filters_a_source(tmp_path):
    path = write_csv(tmp_path / "m.csv", [("SG##", "SG##"), ("S #G", "So#G")])
    splits, _ = maze.mazes_from_source(path, min_path_length=2)
    assert splits["train"]["path_length"][:] == [2]


# command line


def test_the_command_writes_a_folder_that_load_dataset_streams(tmp_path):
    from datasets import load_dataset

    out = str(tmp_path / "m")
    options = ["--height", "9", "--width", "9", "--num-train", "4", "--num-test", "2", "--aug", "--out", out, "--json"]
    result = CliRunner().invoke(app, ["data", "maze", *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["train_rows"] == 32
    assert [len(row["input_ids"]) for row in load_dataset(out, split="test", streaming=True)] == [81, 81]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--height", "2", "--width", "9"], "--height"),
        (["--openings", "2"], "--openings"),
        (["--height", "5", "--width", "7", "--aug"], "5 x 7"),
        (["--source", "m.csv", "--height", "5"], "--height and --width"),
    ],
)
def test_bad_usage_exits_with_status_2(tmp_path, options, message):
    result = CliRunner().invoke(app, ["data", "maze", *options, "--out", str(tmp_path / "o")])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
