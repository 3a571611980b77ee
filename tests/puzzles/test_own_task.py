"""Tasks of users: found by name, checked, searched, generated and solved like shipped tasks.

Referees: the definition of a Latin square, exhaustive search, and the pipeline that travels with checkpoints.
"""

import itertools
import json
import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hrm_hf import (
    AutoModelForPuzzleSolving,
    HrmPuzzleConfig,
    HrmPuzzleForSolving,
    PuzzleSolvingPipeline,
    SeRrmPuzzleConfig,
    SeRrmPuzzleForSolving,
)
from hrm_hf.cli import app
from hrm_hf.models.pipeline_puzzle import PuzzlePipeline
from hrm_hf.puzzles import backtracking, task_registry
from hrm_hf.puzzles.any_puzzle import describe, generated_puzzles
from hrm_hf.puzzles.backtracking import find
from hrm_hf.puzzles.dataset import load_puzzle_dataset, load_puzzle_info
from hrm_hf.puzzles.options import shipped_model
from hrm_hf.puzzles.plots import plot_trajectory
from hrm_hf.puzzles.readers import read_table
from hrm_hf.puzzles.task_registry import puzzle_task, task_class
from hrm_hf.puzzles.tasks import PuzzleTask


TINY = {"hidden_size": 8, "num_attention_heads": 1, "H_layers": 1, "L_layers": 1, "expansion": 1, "halt_max_steps": 2}
SOURCE = '''
import numpy as np
from hrm_hf.puzzles.tasks import PuzzleTask

class Latin(PuzzleTask):
    """Latin squares: every letter once in each row and column."""

    name = "latin"
    title = "Latin square"
    symbols = ("_", ".", "a", "b", "c", "d")
    blank = 1
    default_shape = (4, 4)
    rules_prove = True
    levels = 3

    def units(self):
        cells = np.arange(self.seq_len).reshape(self.grid_shape)
        return {"row": cells.tolist(), "column": cells.T.tolist()}

    def allowed(self, board):
        result = np.zeros((self.seq_len, self.vocab_size), dtype=bool)
        for token in range(2, 6):
            result[:, token] = self.neighbours(board == token) == 0
        return result

    def symmetries(self):
        return self.reflections()
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "latin.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def task(file):
    return describe(task_class(f"{file}:Latin"))[1]


@pytest.fixture(scope="module")
def solver(task):
    fields = vars(task.config) | TINY | {"puzzle_emb_ndim": 8}
    torch.manual_seed(0)
    return PuzzleSolvingPipeline(HrmPuzzleForSolving(HrmPuzzleConfig(**fields)))


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


def is_latin(board) -> bool:
    square = np.reshape(board, (4, 4))
    return all(sorted(line) == [2, 3, 4, 5] for line in [*square.tolist(), *square.T.tolist()])


def test_a_task_is_found_by_file_module_name_and_entry_point(file, task, monkeypatch):
    assert task_class("latin").__name__ == "Latin"
    monkeypatch.syspath_prepend(file.parent)
    assert task_class("latin:Latin").name == "latin"
    monkeypatch.delitem(task_registry.REGISTERED, "latin")
    point = EntryPoint("latin", "latin:Latin", "hrm_hf.puzzle_tasks")
    monkeypatch.setattr(task_registry, "entry_points", lambda **wanted: EntryPoints([point]).select(**wanted))
    assert task_class("latin").name == "latin"
    for name, said in (("nowhere", "'nowhere': .*'latin'.*--task"), ("no.py:A", "no.py"), ("json:loads", "'loads'")):
        with pytest.raises(ValueError, match=f"task=.*{said}"):
            task_class(name)


def test_a_config_cannot_import_a_module(file, monkeypatch):
    monkeypatch.syspath_prepend(file.parent)
    (file.parent / "evil.py").write_text("raise SystemExit('imported')")
    for name in ("evil:Task", f"{file.parent}/evil.py:Task", "evil"):
        with pytest.raises(ValueError, match="task="):
            puzzle_task(HrmPuzzleConfig(task=name))
    assert "evil" not in sys.modules


@pytest.mark.parametrize("name", ["light_up", "coloring", "nonogram", "n_queens", "kenken"])
def test_shipped_generators_draw_puzzles_with_one_solution(name):
    task = describe(task_class(name), (6, 6))[1]
    for level, seed in itertools.product((0.0, 1.0), range(2)):
        rng = np.random.default_rng(seed)
        puzzle, solution = task.generate(level, rng)
        found = find(task, puzzle, limit=2)
        assert [board.tolist() for board in found.boards] == [solution.tolist()]
        assert found.complete and found.nodes == 1  # solved without a guess
        assert task.violations(puzzle, solution) == [] and task.violations(puzzle, puzzle)
        views = task.views(task.read(task.text(puzzle)), 6, rng)
        shown = [(view.show(puzzle), view.show(solution)) for view in views]
        assert all(task.violations(*pair) == [] for pair in shown) and len({q.tobytes() for q, _ in shown}) > 3
        assert all((view.undo(answer) == solution).all() for view, (_, answer) in zip(views, shown))


def is_lit(grid) -> bool:
    """Follow rays from each bulb, and count the bulbs beside each wall."""
    lit, fine = np.zeros(grid.shape, dtype=int), True
    for row, column in np.argwhere(grid == "*"):
        lit[row, column] += 1
        for down, across in ((0, 1), (1, 0), (0, -1), (-1, 0)):
            at = row + down, column + across
            while 0 <= at[0] < len(grid) and 0 <= at[1] < len(grid[0]) and grid[at] in "*.":
                fine &= grid[at] != "*"
                lit[at] += 1
                at = at[0] + down, at[1] + across
    for row, column in np.argwhere(np.char.isdigit(grid)):
        near = [grid[r, c] for r, c in np.argwhere(grid != "") if abs(r - row) + abs(c - column) == 1]
        fine &= near.count("*") == int(grid[row, column])
    return fine and bool((lit[np.isin(grid, ["*", "."])] > 0).all())


def is_colored(grid) -> bool:
    return all(grid[a, a] != grid[b, b] for a, b in np.argwhere(grid == "#"))


def has_clued_runs(grid) -> bool:
    """Compare the runs of a 4 x 4 picture with the clues in the first two rows and columns."""
    lines = ["".join(line) for line in [*grid[2:], *grid.T[2:]]]
    return all(
        line[:2].strip("-") == ("".join(str(len(run)) for run in line[2:].split(".") if run) or "0") for line in lines
    )


def has_peaceful_queens(grid) -> bool:
    queens = np.argwhere(grid == "Q").tolist()
    pairs = itertools.combinations(queens, 2)
    return len(queens) == 6 and all(a != c and b != d and abs(a - c) != abs(b - d) for (a, b), (c, d) in pairs)


def has_right_cages(grid) -> bool:
    """Walk through each cage from its clue, and apply the clue to the digits."""
    digits, fine = grid[::2, ::2].astype(int), True
    for row, column in np.argwhere(np.char.str_len(grid[1::2, 1::2]) > 1).tolist():
        cage, ways = set(), [(row, column)]
        while ways:
            if (at := ways.pop()) not in cage:
                cage.add(at)
                for down, across in ((0, 1), (1, 0), (0, -1), (-1, 0)):
                    if grid[2 * at[0] + down, 2 * at[1] + across] == ".":
                        ways.append((at[0] + down, at[1] + across))
        values = sorted((digits[at] for at in cage), reverse=True)
        clue = grid[2 * row + 1, 2 * column + 1]
        result = {"=": values[0], "+": sum(values), "x": np.prod(values), "-": values[0] - values[-1]}
        result["/"] = values[0] / values[-1]
        fine &= result[clue[-1]] == int(clue[:-1])
    return fine and all(len(set(line)) == len(line) for line in [*digits.tolist(), *digits.T.tolist()])


@pytest.mark.parametrize(
    ("name", "shape", "definition", "tokens"),
    [
        ("light_up", (4, 5), is_lit, (2, 4)),
        ("coloring", (6, 6), is_colored, (2, 6)),
        ("nonogram", (6, 6), has_clued_runs, (2, 4)),
        ("n_queens", (6, 6), has_peaceful_queens, (2, 4)),
        ("kenken", (6, 6), has_right_cages, (2, 5)),
    ],
)
def test_rules_of_shipped_tasks_match_their_definition(name, shape, definition, tokens):
    task = describe(task_class(name), shape)[1]
    rng, right = np.random.default_rng(0), 0
    puzzles = [task.generate(0.5, rng) for _ in range(6)]
    for puzzle, solution in puzzles * 10:
        change = (puzzle == 1) & (rng.random(task.seq_len) < 0.7 / (puzzle == 1).sum())
        answer = np.where(change, rng.integers(*tokens, task.seq_len), solution)
        obeys = definition(np.array(task.grid(answer)))
        assert (task.violations(puzzle, answer) == []) == obeys, task.text(answer)
        right += obeys
    assert 10 < right < 58


def test_kenken_text_with_one_clue_per_cage_is_the_same_puzzle():
    task = describe(task_class("kenken"), (6, 6))[1]
    for seed in range(3):
        puzzle, solution = task.generate(1.0, np.random.default_rng(seed))
        repeated = task.grid(puzzle)
        grid = [list(row) for row in repeated]
        for row, column in itertools.product(range(1, 6, 2), repeat=2):  # the last cell of each cage keeps its clue
            right, below = grid[row - 1][column], grid[row][column - 1]
            if "." in (right, below):
                grid[row][column] = "."
        assert grid != repeated
        text = "\n".join(" ".join(row) for row in grid)
        assert (task.encode(text) == puzzle).all()
        assert task.violations(task.encode(text), solution) == []


def test_jigsaw_puzzles_have_one_solution_by_the_plain_rules():
    """Referee: a search that only knows that no unit has a digit twice."""
    task = describe(task_class("jigsaw"))[1]

    def allowed(self, board):
        seen = np.stack([self.neighbours(board == token) for token in range(11)], axis=1)
        return (seen == 0) & (np.arange(11) > 1)

    plain = describe(type("Plain", (type(task),), {"name": "plain_jigsaw", "allowed": allowed}))[1]
    units = [unit for kind in task.units().values() for unit in kind]
    assert [len(unit) for unit in units] == [9] * 27
    clues = []
    for level, seed in ((0.0, 0), (0.5, 1)):
        puzzle, solution = task.generate(level, np.random.default_rng(seed))
        found = find(plain, puzzle, limit=2)
        assert found.complete and [board.tolist() for board in found.boards] == [solution.tolist()]
        assert all(sorted(solution[unit]) == list(range(2, 11)) for unit in units)
        wrong = solution.copy()
        wrong[puzzle == 1] = np.roll(solution[puzzle == 1], 1)
        assert task.violations(puzzle, solution) == [] and task.violations(puzzle, wrong)
        assert (task.wrong_cells(puzzle, wrong) == plain.wrong_cells(puzzle, wrong)).all()
        clues.append((puzzle > 1).sum())
    assert clues[1] < clues[0]
    with pytest.raises(ValueError, match=r"grid_shape=\(6, 6\).*'jigsaw'"):
        describe(type(task), (6, 6))


@pytest.mark.parametrize("name", ["sudoku", "maze", "arc", "hrm_hf.puzzles.sudoku_task:SudokuTask"])
@pytest.mark.parametrize("more", [(), ("--height", 9, "--width", 9), ("--source", "boards.csv")])
def test_a_task_with_its_own_data_command_points_to_it(name, more, tmp_path):
    made = run("data", "puzzle", name, *more, "--out", tmp_path / "data")
    command = "sudoku" if ":" in name else name
    assert made.exit_code == 2 and f"`hrm-hf data {command}`" in " ".join(made.output.replace("│", "").split())


@pytest.mark.parametrize("name", ["sudoku", "generic"])
def test_a_task_cannot_take_the_name_of_a_shipped_one(name):
    with pytest.raises(ValueError, match=f"name='{name}'"):
        type("Own", (PuzzleTask,), {"name": name, "__module__": "own"})


def test_generated_puzzles_have_one_solution_and_are_harder_at_a_higher_level(task):
    clues = {}
    for level, seed in itertools.product((0.0, 1.0), range(4)):
        puzzle, solution = task.generate(level, np.random.default_rng(seed))
        given = puzzle > task.blank
        assert is_latin(solution) and (puzzle[given] == solution[given]).all()
        (only,) = find(task, puzzle, limit=2).boards
        assert only.tolist() == solution.tolist() and task.violations(puzzle, solution) == []
        clues.setdefault(level, []).append(given.sum())
    assert max(clues[1.0]) < min(clues[0.0])


def test_the_search_is_complete_and_uses_scores(task):
    blank = np.ones(16, dtype=int)
    everything = find(task, blank, limit=1000)
    assert len(everything.boards) == 576 and everything.complete  # the number of Latin squares of order 4
    right = everything.boards[300]
    guided = task.search(blank, np.eye(6)[right])
    assert guided.tokens.tolist() == right.tolist() and guided.nodes < 20
    assert task.search(np.where(np.arange(16) < 2, 2, 1)).tokens is None
    assert not task.search(blank, max_nodes=1).complete


def test_a_cell_stays_filled_if_its_search_was_cut_off(task, monkeypatch):
    solution = find(task, np.full(task.seq_len, task.blank)).boards[0]
    monkeypatch.setattr(backtracking, "find", lambda *args: backtracking.Solutions([], 1, complete=False))
    puzzle = backtracking.dig(task, solution, 1.0, np.random.default_rng(0))
    assert len(find(task, puzzle, limit=2).boards) == 1


def test_violations_name_cells(task):
    puzzle, solution = task.generate(1.0, np.random.default_rng(0))
    clue, free = np.flatnonzero(puzzle > 1)[0], np.flatnonzero(puzzle == 1)[0]
    for cell, token, said in ((free, 1, "is blank"), (free, 0, "is blank"), (clue, solution[clue] % 4 + 2, "given")):
        answer = solution.copy()
        answer[cell] = token
        problems = task.violations(puzzle, answer)
        where = f"row {cell // 4 + 1}, column {cell % 4 + 1}: "
        assert any(problem.startswith(where) and said in problem for problem in problems), problems
        assert task.wrong_cells(puzzle, answer)[cell] and not task.obeys(puzzle[None], answer[None])[0]


def test_a_generated_data_set_shares_no_solution_between_its_splits(file, tmp_path):
    made = run("data", "puzzle", f"{file}:Latin", "--num-train", 60, "--num-test", 12, "--out", tmp_path, "--json")
    assert made.exit_code == 0, made.output
    info, rows = (
        load_puzzle_info(tmp_path),
        {split: load_puzzle_dataset(tmp_path, split) for split in ("train", "test")},
    )
    assert (info.task, info.grid_shape, info.symbols) == ("latin", (4, 4), ["_", ".", "a", "b", "c", "d"])
    task = puzzle_task(SimpleNamespace(**info.config_fields()))
    forms = {split: {task.canonical_form(np.array(row)) for row in part["labels"]} for split, part in rows.items()}
    assert [len(rows[split]) for split in ("train", "test")] == [60, 12] and not forms["train"] & forms["test"]
    again = generated_puzzles(task, 60, 12)
    assert again["train"]["input_ids"][:] == rows["train"]["input_ids"][:]
    with pytest.raises(RuntimeError, match=r"only \d training and \d test .*'latin'.*num_train"):
        generated_puzzles(describe(type(task), (1, 1))[1], 5, 5)


PAIRS = [("ab\nb?", "ab\nba"), ("?a\na?", "ba\nab"), ("b?\n?b", "ba\nab")]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "numbers"])
def test_pairs_without_a_task_become_boards_of_their_symbols(kind, tmp_path):
    if kind == "csv":
        text = "puzzle,solution\n" + "".join(f'"{puzzle}","{answer}"\n' for puzzle, answer in PAIRS)
    else:
        codes = {"a": 10, "b": 2, "?": 0}

        def cells(board):
            return [[codes[cell] for cell in row] for row in board.split("\n")] if kind == "numbers" else board

        text = "".join(json.dumps({"puzzle": cells(q), "solution": cells(a)}) + "\n" for q, a in PAIRS)
    source = tmp_path / f"pairs.{'csv' if kind == 'csv' else 'jsonl'}"
    source.write_text(text)
    made = run("data", "puzzle", "generic", "--source", source, "--test-size", 1, "--out", tmp_path / "data")
    assert made.exit_code == 0, made.output
    info = load_puzzle_info(tmp_path / "data")
    symbols = ["_", "0", "2", "10"] if kind == "numbers" else ["_", "?", "a", "b"]
    assert (info.task, info.grid_shape, info.symbols) == ("generic", (2, 2), symbols)
    task = puzzle_task(SimpleNamespace(**info.config_fields()))
    row = load_puzzle_dataset(tmp_path / "data", "train")[0]
    table = read_table(source)
    assert task.text(np.array(row["input_ids"])) == table.questions[0]
    assert task.text(np.array(row["labels"])) == table.answers[0]


def test_a_pair_that_breaks_the_rules_or_has_an_unknown_symbol_is_named(file, tmp_path):
    for answer, said in (("aaaa" * 4, "line 2.*'solution'.*does not solve"), ("x" * 16, "line 2.*'x'")):
        (tmp_path / "pairs.csv").write_text(f"puzzle,solution\n{'.' * 16},{answer}\n")
        with pytest.raises(ValueError, match=said):
            run("data", "puzzle", f"{file}:Latin", "--source", tmp_path / "pairs.csv", "--out", tmp_path / "data")


def test_the_pipeline_reads_and_writes_symbols_with_and_without_the_package(solver, task, tmp_path):
    puzzle = task.text(task.generate(1.0, np.random.default_rng(1))[0])
    result = solver({"puzzle": puzzle, "solution": task.text(find(task, task.encode(puzzle)).boards[0])}, search=True)
    assert result["correct"] and result["valid"] and is_latin(task.encode(result["text"]))
    plain = solver([puzzle, puzzle.replace("\n", ""), [list(line) for line in puzzle.split("\n")]])
    assert len({each["text"] for each in plain}) == 1 and plain[0]["valid"] is (not plain[0]["violations"])
    assert solver(puzzle, votes=8)["votes"]["of"] == 8
    travelling = PuzzlePipeline(solver.model)(puzzle)
    assert (travelling["text"], travelling["grid"]) == (plain[0]["text"], plain[0]["grid"])
    states = solver(puzzle, return_trajectory=True)["trajectory"]
    assert plot_trajectory(task.encode(puzzle), states, task, tmp_path / "a.png").exists()


def test_shipped_weights_load_with_other_units():
    board = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
    units = puzzle_task(HrmPuzzleConfig(task="sudoku")).units()
    diagonal = {**units, "box": [*units["box"], list(range(0, 81, 10))]}
    answers = []
    for given in (None, units, diagonal):
        model = AutoModelForPuzzleSolving.from_pretrained(shipped_model("sudoku"), units=given)
        answers.append(PuzzleSolvingPipeline(model)(board))
    assert answers[0] == answers[1] and answers[0]["valid"]
    assert answers[2]["confidence"] != answers[0]["confidence"]


def test_a_model_with_pooling_over_units_answers_the_same_after_reload(tmp_path):
    info = describe(task_class("n_queens"), (5, 5))[0]
    fields = {"hidden_size": 8, "intermediate_size": 8, "equivariant_symbols": False, "special_symbols": True}
    config = SeRrmPuzzleConfig.from_preset("symbol-pooling", **fields, **info.config_fields())
    torch.manual_seed(0)
    model = SeRrmPuzzleForSolving(config).eval()
    for name, weight in model.named_parameters():
        if "scores" in name:
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path)
    board = torch.ones(1, 25, dtype=torch.long)
    loaded = AutoModelForPuzzleSolving.from_pretrained(tmp_path).eval()
    assert torch.equal(model.solve(board).logits, loaded.solve(board).logits)


def test_the_command_needs_the_task_of_a_checkpoint(solver, file, tmp_path, monkeypatch):
    solver.model.save_pretrained(tmp_path)
    monkeypatch.delitem(task_registry.REGISTERED, "latin")
    puzzle = "a" + "." * 15
    with pytest.raises(ValueError, match=r"'latin'.*--task FILE\.py:CLASS"):
        run("solve", tmp_path, puzzle)
    result = run("solve", tmp_path, puzzle, "--task", f"{file}:Latin", "--search")
    assert result.exit_code == 0 and "obeys the rules, found by search" in result.output
    assert "latin" in task_registry.REGISTERED
