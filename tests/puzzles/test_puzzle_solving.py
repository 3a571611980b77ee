"""Pipeline: reading, voting and restarts, with random models and oracles (referee: the Sudoku solver)."""

import json
import logging
from dataclasses import asdict

import numpy as np
import pytest
import torch
from transformers import pipeline

import hrm_hf
from benchmarks.puzzles import plain_sudoku
from hrm_hf import HrmPuzzleConfig, HrmPuzzleForSolving, PuzzleSolution, PuzzleSolvingPipeline, TrmPuzzleForSolving
from hrm_hf.puzzles import maze, sudoku_generation, sudoku_rules
from hrm_hf.puzzles.arc_grids import FRAME, SEQ_LEN, crop_prediction, encode_grid
from hrm_hf.puzzles.candidates import Candidate
from hrm_hf.puzzles.task_registry import puzzle_task


PUZZLE_9 = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
TINY = {"hidden_size": 8, "num_attention_heads": 1, "H_layers": 1, "L_layers": 1, "expansion": 1, "halt_max_steps": 3}


def config(task, rows, columns, vocab_size, **fields):
    shape = {"task": task, "grid_shape": [rows, columns], "seq_len": rows * columns, "vocab_size": vocab_size}
    return HrmPuzzleConfig(**{**TINY, "puzzle_emb_ndim": 8, **shape, **fields})


SUDOKU_4 = config("sudoku", 4, 4, 6)


class Oracle(HrmPuzzleForSolving):
    """Model that answers with `answer(tokens [S]) -> tokens [S]` and records its calls."""

    def __init__(self, config, answer, q_halt=lambda row, noise: 2.0):
        super().__init__(config)
        self.answer, self.q_halt, self.calls = answer, q_halt, []

    def run(self, input_ids, puzzle_identifiers, settings, until=None, return_trajectory=False):
        noise = settings.noise
        self.calls.append({"rows": len(input_ids), "identifiers": puzzle_identifiers.tolist(), **asdict(settings)})
        predictions = torch.stack([torch.as_tensor(np.asarray(self.answer(row.numpy()))) for row in input_ids]).long()
        q_halt = torch.tensor([float(self.q_halt(row.numpy(), noise)) for row in input_ids])
        sure = 9.0 * torch.nn.functional.one_hot(predictions, self.config.vocab_size)
        solution = PuzzleSolution(predictions, torch.full((len(input_ids),), 2), q_halt, logits=sure)
        if return_trajectory:
            solution.trajectory = torch.stack([input_ids, predictions, predictions])
            solution.q_trajectory = torch.stack([q_halt] * 3)
        return solution


def solver_of(config, answer, **kwargs):
    model = Oracle(config, answer, **kwargs)
    return PuzzleSolvingPipeline(model), model


def solve_sudoku(tokens):
    return plain_sudoku.solve(sudoku_rules.decode(tokens)).astype(int) + 1


def solve_maze(tokens, shape):
    return maze.mark_shortest_path(np.asarray(tokens).reshape(shape)).reshape(-1)


def puzzles_4x4(count):
    return ["".join(map(str, board)) for board, _ in sudoku_generation.generate(4, count, 6, seed=3)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    HrmPuzzleForSolving(SUDOKU_4).save_pretrained(folder)
    return folder


def test_pipeline_loads_a_folder_by_task_name_without_a_tokenizer(saved):
    solve = pipeline("puzzle-solving", model=str(saved))
    result = solve("1...............")
    assert isinstance(solve, PuzzleSolvingPipeline)
    assert set(result) == {"grid", "text", "steps", "confidence", "sure", "valid", "violations", "votes"}
    assert result["sure"] is None  # not calibrated
    assert result["valid"] is (not result["violations"])
    assert np.shape(result["grid"]) == (4, 4)


def test_answers_are_those_of_model_solve():
    torch.manual_seed(0)
    model = TrmPuzzleForSolving(hrm_hf.TrmPuzzleConfig(**{**SUDOKU_4.to_dict(), "puzzle_emb_len": 2, "L_cycles": 2}))
    with torch.no_grad():
        model.q_head.weight.normal_()
    puzzles = puzzles_4x4(5)
    results = PuzzleSolvingPipeline(model)(puzzles, batch_size=2, max_steps=4)
    expected = model.eval().solve(
        torch.from_numpy(np.stack([sudoku_rules.encode(p) for p in puzzles])).long(), max_steps=4
    )
    digits = (expected.predictions - 1).clamp(min=0).reshape(-1, 4, 4).tolist()
    assert [result["grid"] for result in results] == digits
    assert [result["steps"] for result in results] == expected.steps.tolist()
    assert [r["confidence"] for r in results] == pytest.approx(expected.q_halt.sigmoid().tolist(), rel=1e-5)


@pytest.mark.parametrize("size, clues", [(4, 6), (6, 14), (9, 40)])
def test_votes_of_a_perfect_sudoku_model_agree_in_all_symmetries(size, clues):
    solve, model = solver_of(config("sudoku", size, size, size + 2), solve_sudoku)
    board, solution = next(iter(sudoku_generation.generate(size, 1, clues, seed=1)))
    result = solve("".join(map(str, board)), votes=12)
    assert result["votes"] == {"agree": 12, "of": 12, "answers": 1}
    assert result["text"] == "".join(map(str, solution)) and result["valid"]
    assert model.calls[0]["rows"] == 12


def test_sudoku_views_differ_from_each_other_and_repeat_with_the_seed():
    task = puzzle_task(config("sudoku", 9, 9, 11))
    puzzle = task.read(PUZZLE_9)
    views, again, other = (task.views(puzzle, 6, np.random.default_rng(seed)) for seed in (0, 0, 1))
    shown = [view.show(puzzle.questions[0]).tobytes() for view in views]
    assert len(set(shown)) == 6
    assert shown == [view.show(puzzle.questions[0]).tobytes() for view in again]
    assert shown[1:] != [view.show(puzzle.questions[0]).tobytes() for view in other][1:]


@pytest.mark.parametrize("shape, votes", [((9, 9), 8), ((7, 11), 4)])
def test_votes_of_a_perfect_maze_model_agree_in_all_symmetries(shape, votes):
    solve, _ = solver_of(config("maze", *shape, 6), lambda tokens: solve_maze(tokens, shape))
    puzzle, solution = next(iter(maze.generate(*shape, 1, seed=2, min_path_length=6)))
    lines = [maze.decode(row) for row in puzzle]
    result = solve("\n".join(lines), votes=votes)
    assert result["votes"]["agree"] == votes and result["valid"], result["violations"]
    assert result["text"] == "\n".join(maze.decode(row) for row in solution)


def test_more_votes_than_a_maze_has_symmetries_is_an_error():
    solve, _ = solver_of(config("maze", 7, 11, 6), lambda tokens: tokens)
    puzzle, _ = next(iter(maze.generate(7, 11, 1)))
    with pytest.raises(ValueError, match=r"votes=8.*7 x 11 .*votes=4"):
        solve([maze.decode(row) for row in puzzle], votes=8)


def test_votes_are_weighted_by_confidence():
    puzzle, first = puzzles_4x4(1)[0], []

    def answer(tokens):  # correct in the first view, the same wrong answer (all blank) in the others
        first.append(tokens)
        return solve_sudoku(tokens) if len(first) == 1 else np.ones_like(tokens)

    def q_halt(row, noise):
        return 4.0 if (row == first[0]).all() else -4.0

    solve, _ = solver_of(SUDOKU_4, answer, q_halt=q_halt)
    result = solve(puzzle, votes=4)
    assert result["valid"] and result["votes"] == {"agree": 1, "of": 4, "answers": 2}
    assert result["confidence"] == pytest.approx(1 / (1 + np.exp(-4)))


def test_prefer_valid_lets_an_answer_that_obeys_the_rules_win():
    puzzle = puzzles_4x4(1)[0]

    def make():
        first = []

        def answer(tokens):
            first.append(tokens)
            return solve_sudoku(tokens) if len(first) == 1 else np.ones_like(tokens)

        return solver_of(SUDOKU_4, answer)[0]

    assert not make()(puzzle, votes=4)["valid"]
    assert make()(puzzle, votes=4, prefer_valid=True)["valid"]


def test_the_first_run_has_no_noise_and_q_halt_ranks_restarts():
    answers = iter([np.full(16, 2), np.full(16, 3), np.full(16, 4)])
    q_values = iter([0.0, 3.0, 1.0])
    solve, model = solver_of(SUDOKU_4, lambda tokens: next(answers), q_halt=lambda row, noise: next(q_values))
    result = solve(puzzles_4x4(1)[0], restarts=3, noise=0.5)
    assert result["text"] == "2" * 16  # token 3 is the digit 2
    assert [(call["rows"], call["noise"]) for call in model.calls] == [(1, 0.0), (2, 0.5)]


def test_the_same_seed_gives_the_same_restarts():
    torch.manual_seed(0)
    solve = PuzzleSolvingPipeline(HrmPuzzleForSolving(SUDOKU_4))
    puzzle = puzzles_4x4(1)[0]
    torch.manual_seed(1)
    first = solve(puzzle, restarts=3, noise=2.0, seed=5)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert solve(puzzle, restarts=3, noise=2.0, seed=5) == first
    assert torch.equal(torch.get_rng_state(), state)  # the caller's random state is unchanged


@pytest.mark.parametrize("options", [{"restarts": 2, "noise": 0.0}, {"noise": 0.3}])
def test_noise_and_restarts_need_each_other(options):
    solve, _ = solver_of(SUDOKU_4, solve_sudoku)
    with pytest.raises(ValueError, match=f"noise={options['noise']}"):
        solve(puzzles_4x4(1)[0], **options)


def run_of(answers, q_values):
    """Return an oracle whose runs give these answers and q values, one board at a time."""
    answers, q_values = iter(answers), iter(q_values)
    return solver_of(SUDOKU_4, lambda tokens: next(answers), q_halt=lambda row, noise: next(q_values))


def test_each_choose_option_picks_its_restart():
    puzzle = puzzles_4x4(1)[0]
    right = solve_sudoku(sudoku_rules.encode(puzzle))
    answers = [np.full(16, 2), np.full(16, 3), right, np.full(16, 2)]
    for options, expected in (
        ({"choose": "q"}, answers[1]),
        ({"choose": "vote"}, answers[0]),
        ({"choose": "rules"}, right),
        ({"prefer_valid": True}, right),
        ({}, answers[1]),
    ):
        solve, _ = run_of(answers, [0.0, 3.0, 1.0, -1.0])
        result = solve(puzzle, restarts=4, noise=0.5, **options)
        assert result["text"] == sudoku_rules.decode(expected), options


@pytest.mark.parametrize("right_run, found_by, runs", [(0, "model", 1), (4, "restarts", 9), (None, "search", 9)])
def test_until_valid_goes_on_with_restarts_and_then_search(right_run, found_by, runs):
    puzzle, runs_made = puzzles_4x4(1)[0], []

    def answer(tokens):
        runs_made.append(tokens)
        return solve_sudoku(tokens) if len(runs_made) - 1 == right_run else np.full(16, 2)

    solve, _ = solver_of(SUDOKU_4, answer)
    result = solve(puzzle, until_valid=True)
    assert (result["valid"], result["found_by"], len(runs_made)) == (True, found_by, runs)
    assert result["text"] == sudoku_rules.decode(solve_sudoku(sudoku_rules.encode(puzzle)))
    assert ("search" in result) is (found_by == "search")


def test_until_valid_needs_rules_that_prove_an_answer():
    solve, _ = solver_of(config("generic", 2, 3, 5), lambda tokens: tokens)
    with pytest.raises(ValueError, match=r"until_valid=True.*'generic'"):
        solve([0, 1, 2, 3, 4, 0], until_valid=True)


@pytest.mark.parametrize("sure_votes, invalid, expected", [(3, False, True), (1, False, False), (3, True, False)])
def test_an_answer_is_sure_if_most_votes_agree_and_no_rule_is_violated(sure_votes, invalid, expected):
    task = puzzle_task(SUDOKU_4)
    puzzle = task.read(puzzles_4x4(1)[0])
    right, other = (np.full(16, 2) if invalid else solve_sudoku(puzzle.questions[0])), np.full(16, 3)
    found = [Candidate(right, 1, 5.0, sure=True)] * sure_votes + [Candidate(other, 1, -5.0, sure=False)] * 2
    assert task.result(puzzle, [found], prefer_valid=False)["sure"] is expected


def test_q_chooses_restarts_of_tasks_without_rules():
    solve, model = solver_of(config("generic", 2, 3, 5), lambda tokens: tokens)
    answers, q_values = iter([np.full(6, n) for n in (1, 2, 3)]), iter([0.0, 2.0, 1.0])
    model.answer, model.q_halt = lambda tokens: next(answers), lambda row, noise: next(q_values)
    assert solve([0, 1, 2, 3, 4, 0], restarts=3, choose="rules")["grid"] == [[2] * 3] * 2


def test_settings_reach_the_model():
    solve, model = solver_of(SUDOKU_4, solve_sudoku)
    asked = {"max_steps": 40, "min_steps": 2, "halt": "fixed", "noise_at": "every_step", "exit_when_still": 1e-3}
    solve(puzzles_4x4(3), restarts=2, noise=0.4, batch_size=3, **asked)
    assert [(call["rows"], call["noise"]) for call in model.calls] == [(3, 0.0), (3, 0.4)]
    assert all(asked.items() <= call.items() for call in model.calls)


@pytest.mark.parametrize("size", [4, 6, 9])
def test_the_fast_check_of_answers_agrees_with_the_rules(size):
    task, rng = puzzle_task(config("sudoku", size, size, size + 2)), np.random.default_rng(0)
    pairs = [np.stack(pair) + 1 for pair in sudoku_generation.generate(size, 20, {4: 6, 6: 14, 9: 40}[size], seed=1)]
    questions, answers = np.stack(pairs, axis=1).astype(int)
    answers[5:15, 0] = rng.integers(0, size + 2, 10)  # change one cell to another digit, a blank or padding
    answers[15:] = np.roll(answers[15:], 1, axis=0)  # valid boards of other puzzles
    expected = [not task.violations(*pair) for pair in zip(questions, answers)]
    assert task.obeys(questions, answers).tolist() == expected
    assert sum(expected[:5]) == 5 and not any(expected[15:]) and not all(expected[5:15])


def test_the_check_of_mazes_agrees_with_the_rules():
    task = puzzle_task(config("maze", 7, 7, 6))
    mazes = np.stack([np.stack(pair) for pair in maze.generate(7, 7, 4, seed=1)], axis=1).reshape(2, 4, 49)
    questions, answers = mazes.astype(int)
    answers[0] = answers[1]
    assert task.obeys(questions, answers).tolist() == [False, True, True, True]


def test_trajectory_shows_the_winning_view_in_the_original_orientation():
    rising = iter(range(5))  # the last view, a random one, has the highest confidence
    solve, _ = solver_of(SUDOKU_4, solve_sudoku, q_halt=lambda row, noise: next(rising))
    puzzle = puzzles_4x4(1)[0]
    result = solve(puzzle, votes=5, return_trajectory=True)
    assert np.array_equal(result["trajectory"][0], sudoku_rules.encode(puzzle))
    assert np.array_equal(np.array(result["trajectory"][1]) - 1, np.concatenate(result["grid"]))
    assert len(result["trajectory"]) == len(result["confidences"]) == result["steps"] == 2


def test_every_sudoku_notation_is_parsed_alike():
    solve, _ = solver_of(SUDOKU_4, solve_sudoku)
    text = puzzles_4x4(1)[0]
    flat = [int(digit) for digit in text]
    rows = [flat[i : i + 4] for i in range(0, 16, 4)]
    lines = [text[i : i + 4] for i in range(0, 16, 4)]
    forms = [text, text.replace("0", "."), flat, rows, lines, "\n".join(lines), np.array(rows), {"question": text}]
    assert len({solve(form)["text"] for form in forms}) == 1
    assert len(solve([text, rows, flat])) == 3
    assert solve([]) == []


def test_a_changed_clue_is_a_violation():
    solve, _ = solver_of(SUDOKU_4, lambda tokens: np.roll(solve_sudoku(tokens), 4))
    result = solve(puzzles_4x4(1)[0])
    assert not result["valid"] and any("clue" in problem for problem in result["violations"])


@pytest.mark.parametrize(
    "puzzle, message",
    [("123", "16 cells; .*3"), ("x" + "." * 15, "'x'"), ([[9] + [0] * 3] + [[0] * 4] * 3, "digit 9 .*4")],
)
def test_an_invalid_sudoku_is_rejected(puzzle, message):
    solve, _ = solver_of(SUDOKU_4, solve_sudoku)
    with pytest.raises(ValueError, match=message):
        solve(puzzle)


def test_a_model_without_weights_of_the_size_solves_boards_of_any_size(tmp_path):
    """Referee: the same weights in a model of each size."""
    torch.manual_seed(0)
    fields = {"hidden_size": 8, "intermediate_size": 16, "task": "sudoku", "halt_max_steps": 2}
    model = hrm_hf.SeRrmPuzzleForSolving(hrm_hf.SeRrmPuzzleConfig.from_preset("symbol-pooling", **fields)).eval()
    solve, boards = PuzzleSolvingPipeline(model), ["1" + "." * 15, PUZZLE_9, "G" + "." * 255, "4" + "." * 15]
    for board, result in zip(boards, solve(boards)):
        tokens = torch.from_numpy(sudoku_rules.encode(board)).long()
        shape = sudoku_rules.sudoku_shape(round(len(board) ** 0.5))
        expected = model.for_board([shape.size] * 2, shape.box_shape, shape.vocab_size).solve(tokens[None])
        assert result["text"] == sudoku_rules.decode(expected.predictions[0]) and len(result["grid"]) == shape.size
        assert (result["text"] == solve(board)["text"]) and result["valid"] == (not result["violations"])
    rows = ["G" + "." * 15, *["." * 16] * 15]
    assert solve(rows)["text"] == solve(boards[2])["text"]
    for name, lines, count in (("large", [*rows, "", *rows], 2), ("small", ["1" + "." * 15] * 3, 3)):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
        assert len(solve(str(tmp_path / f"{name}.txt"))) == count
    with pytest.raises(ValueError, match="81 cells; got 80"):
        solve(PUZZLE_9[:-1])


def test_an_error_in_a_list_names_the_puzzle():
    solve, _ = solver_of(SUDOKU_4, solve_sudoku)
    with pytest.raises(ValueError, match=r"puzzle 1: .*'y'"):
        solve(["." * 16, "y" * 16])


@pytest.mark.parametrize(
    "change, message", [(("G", " "), "1 S and 0 G"), (("#", "x"), "'x'"), ((" ", "o"), "contains 'o'")]
)
def test_an_invalid_maze_is_rejected(change, message):
    solve, _ = solver_of(config("maze", 7, 7, 6), lambda tokens: tokens)
    puzzle, _ = next(iter(maze.generate(7, 7, 1)))
    with pytest.raises(ValueError, match=message):
        solve([maze.decode(row).replace(*change) for row in puzzle])


def test_generic_tokens_have_no_rules_and_no_votes():
    solve, _ = solver_of(config("generic", 2, 3, 5), lambda tokens: tokens[::-1].copy())
    result = solve([0, 1, 2, 3, 4, 0])
    assert result["grid"] == [[0, 4, 3], [2, 1, 0]] and result["valid"] is None
    with pytest.raises(ValueError, match=r'votes=2.*task="generic"'):
        solve([0, 1, 2, 3, 4, 0], votes=2)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_file_of_puzzles_with_solutions_is_scored(kind, tmp_path):
    rows = [tuple("".join(map(str, board)) for board in pair) for pair in sudoku_generation.generate(4, 3, 6, seed=9)]
    rows[1] = (rows[1][0], rows[0][1])
    file = tmp_path / f"puzzles.{kind}"
    if kind == "csv":
        file.write_text("puzzle,solution\n" + "".join(f"{a},{b}\n" for a, b in rows))
    else:
        file.write_text("".join(json.dumps({"question": a, "answer": b}) + "\n" for a, b in rows))
    solve, _ = solver_of(SUDOKU_4, solve_sudoku)
    assert [result["correct"] for result in solve(str(file))] == [True, False, True]


def test_a_generator_is_solved_lazily():
    solve, model = solver_of(SUDOKU_4, solve_sudoku)
    results = solve(puzzle for puzzle in puzzles_4x4(3))
    next(results)
    assert len(model.calls) == 1


TASK = {"train": [{"input": [[1]], "output": [[1]]}], "test": [{"input": [[1, 2, 3], [0, 4, 0]]}]}
ARC_NAMES = ["<blank>", "abc", "abc|||t1|||0234567891", "abc|||t6|||0987654321"]


def flip_columns(tokens):
    """Rotate by 180 degrees, an ARC rule that commutes with symmetries and colors."""
    return encode_grid(np.rot90(crop_prediction(tokens), 2)).astype(int)


def arc_config(**fields):
    return config("arc", FRAME, FRAME, 12, num_puzzle_identifiers=4, **fields)


def test_arc_votes_use_the_augmentations_and_rows_that_the_model_knows():
    model = Oracle(arc_config(), flip_columns)
    solve = PuzzleSolvingPipeline(model, identifiers=ARC_NAMES)
    result = solve({**TASK, "name": "abc"}, votes=3)
    assert result["grid"] == [[0, 4, 0], [3, 2, 1]] == result["attempts"][0]
    assert result["votes"] == {"agree": 3, "of": 3, "answers": 1}
    assert [identifier for call in model.calls for identifier in call["identifiers"]] == [1, 2, 3]


def test_identifiers_are_found_next_to_the_checkpoint(tmp_path):
    HrmPuzzleForSolving(arc_config()).save_pretrained(tmp_path)
    (tmp_path / "identifiers.json").write_text(json.dumps(ARC_NAMES))
    assert pipeline("puzzle-solving", model=str(tmp_path)).puzzle_task.identifiers == ARC_NAMES


def test_an_unknown_arc_task_takes_the_blank_row_and_warns(tmp_path, caplog):
    model = Oracle(arc_config(), flip_columns)
    solve = PuzzleSolvingPipeline(model, identifiers=ARC_NAMES)
    file = tmp_path / "other.json"
    file.write_text(json.dumps(TASK))
    with caplog.at_level(logging.WARNING, logger="hrm_hf"):
        result = solve(str(file), votes=4)
    assert "'other' has no row" in caplog.text
    assert set(model.calls[0]["identifiers"]) == {0}
    assert result["votes"] == {"agree": 4, "of": 4, "answers": 1}


def test_arc_attempts_are_the_two_answers_with_most_votes():
    model = Oracle(arc_config(), lambda tokens: tokens)
    solve = PuzzleSolvingPipeline(model, identifiers=ARC_NAMES)
    other = encode_grid(np.full((2, 2), 5)).astype(int)
    model.answer = lambda tokens: tokens if crop_prediction(tokens).shape == (3, 2) else other
    solved = {**TASK, "test": [{**TASK["test"][0], "output": TASK["test"][0]["input"]}]}
    result = solve({**solved, "name": "abc"}, votes=3)
    assert result["attempts"] == [[[1, 2, 3], [0, 4, 0]], [[5, 5], [5, 5]]]
    assert result["correct"] and result["votes"]["agree"] == 2


def test_an_arc_task_with_two_tests_gives_both_answers():
    solve = PuzzleSolvingPipeline(Oracle(arc_config(), flip_columns), identifiers=ARC_NAMES)
    result = solve(
        {"train": TASK["train"], "test": [{"input": [[1, 2]]}, {"input": [[3, 4]]}], "name": "abc"}, votes=3
    )
    assert [test["grid"] for test in result["tests"]] == [[[2, 1]], [[4, 3]]]


def test_an_answer_without_a_grid_is_invalid():
    solve = PuzzleSolvingPipeline(Oracle(arc_config(), lambda tokens: np.zeros(SEQ_LEN)), identifiers=ARC_NAMES)
    result = solve({**TASK, "name": "abc"})
    assert result["grid"] == [] and not result["valid"]


def test_identifiers_of_another_model_are_rejected():
    with pytest.raises(ValueError, match=r"identifiers\.json .*2 names, .*4 rows"):
        PuzzleSolvingPipeline(HrmPuzzleForSolving(arc_config()), identifiers=["<blank>", "abc"])


def test_a_config_that_fits_no_sudoku_board_is_rejected():
    with pytest.raises(ValueError, match=r"vocab_size=5: .*seq_len=16, vocab_size=6"):
        PuzzleSolvingPipeline(HrmPuzzleForSolving(config("sudoku", 4, 4, 5)))
