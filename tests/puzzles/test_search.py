"""Search with guesses ordered by the model. Referees: published solutions, and the Sudoku solver."""

import json

import numpy as np
import pytest
import torch
from transformers import pipeline
from typer.testing import CliRunner

from benchmarks.puzzles import plain_sudoku
from hrm_hf import HrmPuzzleConfig, HrmPuzzleForSolving, PuzzleSolvingPipeline
from hrm_hf.cli import app
from hrm_hf.puzzles import maze, sudoku, sudoku_rules
from hrm_hf.puzzles.dataset import save_puzzle_dataset
from hrm_hf.puzzles.evaluation import evaluate_puzzles
from hrm_hf.puzzles.task_registry import puzzle_task


# Rated boards of the Sudoku Exchange puzzle bank (public domain), with their solutions. Singles solve none. For the
# last two, guessing digits in ascending order is bad: 62 and 85 guesses fail.
HARD = {
    "000090000090602080740010023001000800009703400300981002007000200000407000405020107":
    "528394716193672584746518923671245839289763451354981672867139245912457368435826197",
    "400000005000701000020000040030090050501000309094000160000000000005306700900207003":
    "413928675659741238827563941736192854581674329294835167372419586145386792968257413",
    "006300890900800005000001070005400002060000010200003900050200000600008001032006700":
    "516372894927864135483591276195487362368925417274613958751249683649738521832156749",
}  # fmt: skip
HARDEST = [*HARD][-1]
TINY = {"hidden_size": 8, "num_attention_heads": 1, "H_layers": 1, "L_layers": 1, "expansion": 1, "halt_max_steps": 2}
runner = CliRunner()


def model_for(task, rows, columns, vocab_size):
    shape = {"task": task, "grid_shape": [rows, columns], "seq_len": rows * columns, "vocab_size": vocab_size}
    torch.manual_seed(0)
    return HrmPuzzleForSolving(HrmPuzzleConfig(**TINY, puzzle_emb_ndim=8, **shape))


def search_sudoku(question, scores=None, **options):
    side = round(len(question) ** 0.5)
    return puzzle_task(HrmPuzzleConfig(task="sudoku", seq_len=len(question), vocab_size=side + 2)).search(
        question, scores, **options
    )


def tokens(board):
    return sudoku_rules.encode(board).astype(int)


def knowing(solution, doubt=0.0):
    """Return scores [81, 11] that favor the solution, except for another digit in a share of cells."""
    scores = np.full((81, 11), 0.01)
    scores[np.arange(81), tokens(solution)] = 1.0
    wrong = np.random.default_rng(0).random(81) < doubt
    scores[wrong] = np.roll(scores[wrong], 1, axis=1)
    return scores


@pytest.mark.parametrize("puzzle", HARD)
@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_the_only_solution_with_any_scores(puzzle, seed):
    scores = np.random.default_rng(seed).random((81, 11))
    found = search_sudoku(tokens(puzzle), scores)
    assert found.complete and found.tokens.tolist() == tokens(HARD[puzzle]).tolist() and found.nodes > 1


@pytest.mark.parametrize("puzzle", HARD)
def test_a_search_without_scores_visits_as_many_nodes_as_the_solver(puzzle):
    found = search_sudoku(tokens(puzzle))
    guesses = found.nodes - 1
    assert (found.tokens - 1).tolist() == plain_sudoku.solve(puzzle).tolist()
    failed = plain_sudoku.rate(puzzle)  # guesses that failed; the others led to the solution
    assert failed < guesses <= failed + sum(digit == "0" for digit in puzzle)


@pytest.mark.parametrize("puzzle", HARD)
def test_perfect_scores_avoid_every_wrong_guess(puzzle):
    solution = HARD[puzzle]
    guided, plain = search_sudoku(tokens(puzzle), knowing(solution)), search_sudoku(tokens(puzzle))
    assert guided.nodes < plain.nodes
    misled = search_sudoku(tokens(puzzle), -knowing(solution))
    assert misled.nodes > guided.nodes and (misled.tokens == guided.tokens).all()
    doubtful = search_sudoku(tokens(puzzle), knowing(solution, doubt=0.3))
    assert (doubtful.tokens == guided.tokens).all()


def test_a_board_that_singles_solve_takes_one_node():
    easy = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
    assert search_sudoku(tokens(easy)).nodes == 1


def test_a_search_stops_at_the_node_limit_and_reports_it():
    stopped = search_sudoku(tokens(HARDEST), max_nodes=5)
    assert stopped.tokens is None and stopped.nodes == 5 and not stopped.complete


def test_unsolvable_boards_differ_from_stopped_searches():
    none = search_sudoku(tokens("11" + "." * 14))
    assert none.tokens is None and none.complete


@pytest.mark.parametrize("options", [{}, {"votes": 3}, {"restarts": 2, "noise": 0.5}, {"prefer_valid": True}])
def test_the_pipeline_answers_hard_boards_with_an_untrained_model(options):
    solve = PuzzleSolvingPipeline(model_for("sudoku", 9, 9, 11))
    rows = [{"puzzle": puzzle, "solution": solution} for puzzle, solution in HARD.items()]
    for row, result in zip(rows, solve(rows, search=True, batch_size=3, return_trajectory=True, **options)):
        assert result["text"] == row["solution"] and result["valid"] and result["correct"]
        assert "".join(str(digit) for line in result["grid"] for digit in line) == row["solution"]
        assert result["violations"] == [] and set(result["search"]) == {
            "solved", "complete", "nodes", "nodes_without_model",
        }  # fmt: skip
        assert result["search"]["nodes_without_model"] == search_sudoku(tokens(row["puzzle"])).nodes
    assert "search" not in solve(rows[0])  # no search by default


def test_views_are_undone_before_their_probabilities_order_the_guesses():
    """The model knows the answer in every view, so no view may add a wrong guess."""
    puzzle, solution = HARDEST, HARD[HARDEST]

    class Knowing(HrmPuzzleForSolving):
        def run(self, input_ids, *args):
            found = super().run(input_ids, *args)
            right = [plain_sudoku.solve(sudoku_rules.decode(row.numpy())).astype(int) + 1 for row in input_ids]
            found.logits = 9.0 * torch.nn.functional.one_hot(torch.tensor(np.stack(right)), 11)
            return found

    model = Knowing(model_for("sudoku", 9, 9, 11).config)
    guided = search_sudoku(tokens(puzzle), knowing(solution)).nodes
    for votes in (1, 5):
        assert PuzzleSolvingPipeline(model)(puzzle, votes=votes, search=True)["search"]["nodes"] == guided


def test_a_board_without_a_solution_keeps_the_models_answer_and_violations():
    solve = PuzzleSolvingPipeline(model_for("sudoku", 4, 4, 6))
    result = solve("11" + "." * 14, search=True)
    assert result["search"]["solved"] is False and result["search"]["complete"] is True
    assert result["valid"] is False and result["violations"]


def test_search_is_rejected_for_mazes_and_generic_tokens():
    task, _ = next(iter(maze.generate(7, 7, 1)))
    with pytest.raises(ValueError, match=r"search=True: .*'maze'.*mark_shortest_path"):
        PuzzleSolvingPipeline(model_for("maze", 7, 7, 6))([maze.decode(row) for row in task], search=True)
    generic = model_for("generic", 2, 3, 5)
    with pytest.raises(ValueError, match=r"search=True: .*'generic'"):
        PuzzleSolvingPipeline(generic)([0, 1, 2, 3, 4, 0], search=True)
    with pytest.raises(ValueError, match=r"search=True: .*'generic'"):
        evaluate_puzzles(generic, [[0] * 6], [[0] * 6], search=True)


def test_an_evaluation_reports_the_search_apart_from_the_model():
    model = model_for("sudoku", 9, 9, 11)
    boards, labels = (np.stack([tokens(text) for text in texts]) for texts in (HARD, HARD.values()))
    plain = evaluate_puzzles(model, boards, labels)
    found = evaluate_puzzles(model, boards, labels, search=True)
    assert found["exact_accuracy"] == plain["exact_accuracy"] == 0 and found["search_exact_accuracy"] == 1
    nodes = [search_sudoku(board).nodes for board in boards]
    assert found["search_nodes_without_model_mean"] == np.mean(nodes)
    assert found["search_nodes_without_model_most"] == max(nodes) and found["search_nodes_most"] > 1
    assert {name for name in found if name not in plain} == {
        "search_exact_accuracy", "search_exact_accuracy_interval", "search_nodes_mean", "search_nodes_most",
        "search_nodes_without_model_mean", "search_nodes_without_model_most",
    }  # fmt: skip
    one_known = np.where(np.arange(3)[:, None] == 0, labels, -100)
    found = evaluate_puzzles(model, boards, one_known, search=True)
    assert found["search_nodes_without_model_mean"] == nodes[0]  # rows without labels do not count


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    splits, info = sudoku.generated_sudoku(4, num_train=2, num_test=5, seed=0)
    save_puzzle_dataset(splits, info, folder / "data")
    torch.manual_seed(0)
    HrmPuzzleForSolving(HrmPuzzleConfig(**TINY, puzzle_emb_ndim=8, **info.config_fields())).save_pretrained(folder)
    return folder


def test_the_command_reports_that_a_search_found_the_answer(saved):
    puzzle = "1.....3..4.....2"
    result = runner.invoke(app, ["solve", str(saved), puzzle, "--search"])
    assert result.exit_code == 0, result.output
    assert "obeys the rules, found by search (" in result.output and " without the model)" in result.output
    impossible = runner.invoke(app, ["solve", str(saved), "11" + "." * 14, "--search"])
    assert "search found that there is no solution" in impossible.output
    printed = runner.invoke(app, ["solve", str(saved), puzzle, "--search", "--json"])
    expected = pipeline("puzzle-solving", model=str(saved))(puzzle, search=True)
    assert json.loads(printed.stdout) == [expected]


def test_the_evaluation_command_searches(saved):
    result = runner.invoke(app, ["eval", "puzzles", str(saved), str(saved / "data"), "--search", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["metrics"]["search_exact_accuracy"] == 1
