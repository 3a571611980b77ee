"""What the tabs compute, without a browser; referees are direct calls of the pipelines and models."""

import json
import re
from unittest.mock import Mock

import every
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from benchmarks.puzzles import plain_sudoku
from hrm_hf import HrmCosmoConfig, HrmPuzzleConfig
from hrm_hf.app import build_app
from hrm_hf.app.go_tab import attempts_html, validator_of, verdict_of
from hrm_hf.app.limits import MAX_PUZZLE_TEXT, checked
from hrm_hf.app.maps_tab import infer, map_image, posterior_image, posterior_rows, read_map, sample_map, true_values
from hrm_hf.app.puzzle_tab import (
    SolvedBoard,
    board_html,
    caption,
    confidence_chart,
    example,
    first_example,
    read_board,
    show_step,
    solve_board,
)
from hrm_hf.app.text_tab import (
    depth_color,
    gain_image,
    gain_rows,
    prompt_gains,
    text_html,
    text_pieces,
    token_depths,
    write,
)
from hrm_hf.cosmology.simulation.maps import MapSettings, generate_columns
from hrm_hf.golang.generate import tasks_of, write_tasks
from hrm_hf.golang.options import WriteGo
from hrm_hf.io.model_names import ModelError
from hrm_hf.models.processing_hrm_go_coder import Feedback
from hrm_hf.models.refinement_hrm_go_coder import Attempt, RefinementOutput
from hrm_hf.puzzles import maze, sudoku_rules
from hrm_hf.puzzles.options import shipped_model
from hrm_hf.puzzles.task_registry import puzzle_task
from hrm_hf.text.byte_tokenizer import byte_tokenizer
from hrm_hf.text.options import WriteText


@pytest.fixture(scope="module")
def solver(checkpoints):
    return pipeline("puzzle-solving", model=str(checkpoints["sudoku"]))


@pytest.fixture(scope="module")
def maze_solver(checkpoints):
    return pipeline("puzzle-solving", model=str(checkpoints["maze"]))


@pytest.fixture(scope="module")
def regressor(checkpoints):
    return pipeline("cosmology-regression", model=str(checkpoints["hrm_cosmo"]))


@pytest.fixture(scope="module")
def language(checkpoints):
    def load(name):
        folder = checkpoints[name]
        return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

    return {name: load(name) for name in ("hrm_lm", "rlm_mhc", "hrm_go_coder")}


# ---- puzzles ----


def test_a_typed_board_is_answered_as_the_pipeline_answers_it(solver):
    typed = ["1", "", "", "", "", "", "3", "", "", "4", "", "", "", "", "", "2"]
    (board,) = solve_board(solver, typed, votes=2, seed=3)
    expected = solver("1.....3..4.....2", votes=2, seed=3)
    assert board.result["grid"] == expected["grid"]
    assert solver.puzzle_task.answer_text(board.result).replace("\n", "") == expected["text"].replace(".", "0")
    assert board.last_step == expected["steps"]
    assert solver.puzzle_task.text(board.states[-1]) == expected["text"]
    assert solve_board(solver, "1.....3..4.....2", votes=2, seed=3)[0].result == board.result  # a string, not a list
    with pytest.raises(ValueError, match=r"characters; the limit is"):
        solve_board(solver, "." * (MAX_PUZZLE_TEXT + 1))


def test_a_board_is_solved_with_the_options_of_restarts(solver):
    options = {"restarts": 3, "noise": 0.5, "noise_at": "every_step", "choose": "vote", "exit_when_still": 0.01}
    (board,) = solve_board(solver, ["1", *[""] * 15], seed=3, max_steps=6, **options)
    expected = solver("1" + "." * 15, seed=3, max_steps=6, **options)
    assert board.result["grid"] == expected["grid"] and board.last_step == expected["steps"]


@pytest.mark.parametrize(("cell", "message"), [("10", r".*10.* 4"), ("ab", "'ab'"), ("x", "'x'.* 1 to 4")])
def test_invalid_digit_is_reported_with_its_cell(solver, cell, message):
    with pytest.raises(ValueError, match=f"row 1, column 2: {message}"):
        solve_board(solver, ["1", cell, *[""] * 14])


def test_the_rendered_board_marks_given_changed_and_wrong_cells(solver):
    task = solver.puzzle_task
    (board,) = solve_board(solver, ["1", *[""] * 15], halt="fixed")
    for step in range(board.last_step + 1):
        page = board_html(task, board, step)
        classes = [found.split() for found in re.findall(r'<span class="([^"]*)" style="" title=', page)]
        tokens = board.states[step]
        assert len(classes) == 16
        assert [("given" in found) for found in classes] == [True, *[False] * 15]
        wrong = task.wrong_cells(board.puzzle, tokens) if step else np.zeros(16, bool)
        changed = (tokens != board.states[step - 1]) & ~wrong if step > 1 else np.zeros(16, bool)
        changed[0] = False  # the clue
        assert [("wrong" in found) for found in classes] == wrong.tolist()
        assert [("changed" in found) for found in classes] == changed.tolist()
        shown = re.findall(r'title="row \d, column \d">([^<]*)</span>', page)
        assert "".join(text or "." for text in shown) == task.text(tokens)


def test_a_given_cell_is_never_marked_as_changed():
    """A clue that the model overwrites is shown as wrong, and once it is restored, as given, not as changed."""
    sudoku_task = puzzle_task(every.model("hrm_puzzle", task="sudoku").config)
    given, other = sudoku_task.encode("1" + "." * 15), sudoku_task.encode("21" + "." * 14)
    board = SolvedBoard(np.array([given, other, given, other]), [0.5] * 3, {})
    marks = [re.findall(r'<span class="([^"]*)"', board_html(sudoku_task, board, step))[:2] for step in (2, 3)]
    assert marks == [["given", "filled wrong box-right"], ["given wrong", "filled changed box-right"]]
    maze_task = puzzle_task(every.model("trm_puzzle", task="maze", seq_len=30, grid_shape=[5, 6], vocab_size=6).config)
    walls = maze_task.encode("S ####" + "\n######" * 3 + "\n#####G")
    opened = np.where(np.arange(30) == 2, maze.OPEN, walls)
    board = SolvedBoard(np.array([walls, opened, walls]), [0.5] * 2, {})
    assert "changed" not in board_html(maze_task, board, 2).split("hrm-legend")[0]


def test_caption_lists_broken_rules(solver):
    (board,) = solve_board(solver, ["1", "1", *[""] * 14], halt="fixed")
    said = caption(solver.puzzle_task, board, board.last_step)
    assert sudoku_rules.validate_solution("11..............", board.result["text"])[0] in said
    assert re.search(r"; and \d+ more", said)
    assert "sure" not in said  # the model is not calibrated
    board.result["sure"] = False
    assert "not sure" in caption(solver.puzzle_task, board, board.last_step)


def test_the_chart_has_one_bar_for_each_step_and_marks_the_shown_one():
    page = confidence_chart([0.1, 0.5, 0.9], 2)
    assert re.findall(r"<title>([^<]*)</title>", page) == ["step 1: 0.100", "step 2: 0.500", "step 3: 0.900"]
    bars = re.findall(r'height="([\d.]+)" fill="([^"]*)"', page)
    assert [color == "#2563a8" for _, color in bars] == [False, True, False]
    assert float(bars[2][0]) == pytest.approx(9 * float(bars[0][0]), abs=0.5)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_examples_are_puzzles_with_one_solution_and_fewer_clues_when_harder(solver, level):
    typed = example(solver, level, seed=5)
    assert plain_sudoku.count_solutions("".join(cell or "." for cell in typed)) == 1
    assert sum(bool(cell) for cell in typed) == (10, 8, 6)[level]


@pytest.mark.parametrize(("size", "box"), [(12, (3, 4)), (16, (4, 4)), (25, (5, 5))])
def test_examples_of_other_sizes_obey_the_rules(size, box):
    shape = {"grid_shape": [size, size], "box_shape": [*box]}
    config = HrmPuzzleConfig(seq_len=size**2, vocab_size=size + 2, task="sudoku", **shape)
    task = puzzle_task(config)
    for level, share in enumerate((0.7, 0.6, 0.5)):
        board = task.example(level, seed=5)
        assert (board > 1).mean() == pytest.approx(share, abs=0.15)
        assert not task.wrong_cells(board, board)[board > 1].any()


def test_the_first_example_is_the_hardest_that_the_model_solves_by_the_rules(solver):
    assert first_example(solver) == example(solver, 0, 0)  # random weights solve nothing
    trained = pipeline("puzzle-solving", model=shipped_model("sudoku"))
    first = first_example(trained)
    assert sum(map(bool, first)) == 32
    assert solve_board(trained, first)[0].result["valid"]


def test_maze_is_typed_as_rows_and_wrong_rows_are_reported(maze_solver):
    typed = example(maze_solver, 0, seed=1)
    (board,) = solve_board(maze_solver, typed)
    assert maze_solver.puzzle_task.text(board.puzzle) == typed
    assert board.result["text"] == maze_solver(typed)["text"]
    page, _, chart = show_step(maze_solver.puzzle_task, board, 99)
    assert page.startswith(f'<div data-step="{board.last_step}">')
    legend = re.findall(r'<i style="([^"]*)"></i>([^<]*)', page)
    assert {words for _, words in legend} >= {"wall", "open", "S, the start", "G, the goal", "path of the model"}
    assert "q_halt" not in chart and "ACT" not in chart
    with pytest.raises(ValueError, match=r"4 lines of .6..* 5 of 6"):
        solve_board(maze_solver, "\n".join(typed.splitlines()[:4]))


def test_an_arc_task_is_json_and_each_test_input_has_its_board(checkpoints):
    solver = pipeline("puzzle-solving", model=str(checkpoints["arc"]))
    task = json.loads(example(solver, 0, 0))
    task["test"].append({"input": [[5]]})
    boards = solve_board(solver, json.dumps(task))
    assert [board.result["grid"] for board in boards] == [answer["grid"] for answer in solver(task)["tests"]]
    assert len(re.findall("title=", board_html(solver.puzzle_task, boards[0], 0))) < 900  # large boards are cut off
    with pytest.raises(ValueError, match=r"JSON.* line 1"):
        read_board(solver, "{'train'}")


# ---- text ----


@pytest.mark.parametrize("name", ["hrm_lm", "rlm_mhc"])
def test_streamed_text_equals_one_call(language, name):
    model, tokenizer = language[name]
    options = WriteText(max_new_tokens=21, temperature=0.9, top_k=40, seed=4)
    parts = list(write(model, tokenizer, "abc", options))
    torch.manual_seed(4)
    whole = model.generate(
        **tokenizer("abc", return_tensors="pt"),
        max_new_tokens=21,
        do_sample=True,
        temperature=0.9,
        top_k=40,
        top_p=1.0,
    )
    assert parts[-1] == whole[0].tolist()
    assert [len(part) for part in parts] == [11, 19, 24]


def test_depths_are_the_halt_steps_of_the_model_and_color_the_tokens(language):
    model, tokenizer = language["hrm_lm"]
    ids = tokenizer("Recursive reasoning").input_ids
    depths = token_depths(model, ids, WriteText())
    with torch.no_grad():
        assert depths == model(torch.tensor([ids])).halt_steps[0].tolist()
    assert len(set(depths)) > 1
    page = text_html(tokenizer, ids, 9, depths, 3)
    assert [int(found) for found in re.findall(r'data-depth="(\d)"', page)] == depths
    colors = re.findall(r'background: (#\w{6})" data-depth', page)
    assert colors == [depth_color(depth, 3) for depth in depths]
    assert page.count('class="prompt') == 9


def test_chosen_segments_and_criteria_reach_the_model(language):
    model, tokenizer = language["hrm_lm"]
    ids = tokenizer("abcdef").input_ids
    assert token_depths(model, ids, WriteText(num_segments=1)) == [1] * 6
    assert token_depths(model, ids, WriteText(exit_criterion="fixed")) == [3] * 6
    assert token_depths(model, ids, WriteText(exit_criterion="latent_diff", exit_threshold=1e6)) == [2] * 6


def test_pieces_are_complete_characters_and_markup_is_escaped():
    tokenizer = byte_tokenizer()
    text = "<b>é🙂 &"
    ids = tokenizer(text).input_ids
    pieces = text_pieces(tokenizer, ids)
    assert [piece for piece, _, _ in pieces] == list(text)
    assert pieces[4] == ("🙂", 5, 9)
    assert "&lt;</span>" in text_html(tokenizer, ids, 0, None, 1)


def test_empty_and_too_long_prompts_are_rejected(language):
    model, tokenizer = language["rlm_mhc"]
    for prompt, message in (("", "prompt is empty"), ("a" * 250, r"^max_new_tokens=10: .* 250 .*at most 6")):
        with pytest.raises(ValueError, match=message):
            next(write(model, tokenizer, prompt, WriteText(max_new_tokens=10)))


# ---- Go ----


def test_every_attempt_is_shown_with_plan_verdict_and_decision(language, monkeypatch):
    coder, tokenizer = language["hrm_go_coder"]
    monkeypatch.setattr(coder.config, "plan_budget", 16)  # leaves room for a new plan after the first attempt

    def validator(codes):
        return [Feedback(syntax_ok=False, category="unexpected token", line=1, message="a < b")] * len(codes)

    options = WriteGo(
        model="",
        prompts=["Add two numbers"],
        prefix=["func Add() {"],
        max_iterations=2,
        max_new_tokens=8,
        threshold=1.0,
    )
    result = write_tasks(coder, tokenizer, validator, options, tasks_of(options))
    page = attempts_html(result)
    assert page.count('class="hrm-attempt failed"') == len(result.attempts[0]) == 2
    assert "unexpected token, line 1: a &lt; b" in page
    assert '<span class="bad-line">func Add() {' in page
    for attempt in result.attempts[0]:
        assert f"{attempt.decision}, P(DONE) {attempt.done_probability:.2f}" in page


def test_every_attempt_after_the_first_is_called_a_repair():
    plan = {"intent": "ADD", "targets": [], "steps": []}
    attempts = [Attempt("x", plan, None, "CONTINUE", 0.1, 1)] * 2
    page = attempts_html(RefinementOutput(["x"], [[""] * 2], [attempts], [2], ["context"]))
    assert re.findall("<h4>(.*?)</h4>", page) == ["Attempt 1", "Attempt 2: repair"]
    assert "2 attempts; the stream is full." in page


def test_verdicts_distinguish_passed_failed_and_not_checked():
    assert verdict_of(None) == ("no validator was used", "")
    assert verdict_of(Feedback(syntax_ok=True)) == ("no errors", "passed")
    assert verdict_of(Feedback(category="other", message="not checked: too long")) == ("not checked: too long", "")


def test_page_reports_missing_go_and_tree_sitter(monkeypatch):
    monkeypatch.setattr("hrm_hf.app.go_tab.best_validator", Mock(side_effect=ImportError("no tree-sitter")))
    validator_of.cache_clear()
    validator, words = validator_of("auto")
    validator_of.cache_clear()
    assert validator is None and "syntax is not checked" in words


# ---- mHC ----


def test_gains_of_a_prompt_equal_the_models(language):
    model, tokenizer = language["rlm_mhc"]
    sites = prompt_gains(model, tokenizer, "To be")
    pairs = model.get_mhc_metrics(**tokenizer("To be", return_tensors="pt"))
    rows = gain_rows(sites)
    assert [row[1:3] for row in rows] == [pytest.approx(pair, abs=1e-5) for pair in pairs]
    assert rows[-1][4:] == pytest.approx([sites[-1]["composite_forward"], sites[-1]["composite_backward"]], abs=1e-5)
    assert all(gain_image(sites, product).size[0] > 500 for product in (False, True))


def test_gains_of_a_model_without_hyper_connections_are_rejected():
    model = every.model("rlm_mhc", mhc_enabled=False)
    with pytest.raises(ValueError, match="mhc_enabled=False"):
        prompt_gains(model, byte_tokenizer(), "abc")


# ---- cosmology ----


def test_a_drawn_map_gives_the_posterior_of_the_pipeline(regressor):
    item = sample_map(regressor.model.config, 0.3, 0.8, seed=1)
    result = infer(regressor, item, 2, "fixed")
    expected = regressor(item["map"], max_steps=2, num_samples=4000)
    assert {name: result[name] for name in expected} == expected
    rows = posterior_rows(result, regressor.model.config.reported_names, true_values(0.3, 0.8))
    assert [row[0] for row in rows] == ["omega_m", "sigma_8", "s_8"]
    assert rows[2][1] == f"{expected['s_8']['mean']:.3f}" and rows[2][5] == "0.800"
    low, high = expected["omega_m"]["interval_95"]
    assert rows[0][4] == f"{low:.3f} to {high:.3f}"
    for image in (map_image(item), posterior_image(result, regressor.model.config.reported_names, {})):
        assert np.asarray(image.convert("L")).std() > 10  # not blank


def test_multichannel_maps_are_drawn_as_shear_only_on_request():
    config = HrmCosmoConfig.from_preset("test", num_channels=3, mask_channel=True)
    item = sample_map(config, 0.3, 0.8, seed=1, observable="shear")
    expected = generate_columns(MapSettings(size=16, observable="shear", sigma_e=0.0), 0.3, 0.8, seed=1)
    assert item.keys() == {"map", "mask"}
    np.testing.assert_array_equal(item["map"], expected["map"])
    drawn = sample_map(config, 0.3, 0.8, seed=1)
    assert drawn["map"].shape == (2, 16, 16) and not np.allclose(drawn["map"], item["map"])
    without_mask = HrmCosmoConfig.from_preset("test", num_channels=4)
    item = sample_map(without_mask, 0.3, 0.8, seed=1, observable="shear")
    assert item.keys() == {"map"} and item["map"].shape == (4, 16, 16)


def test_invalid_map_file_is_named(regressor, tmp_path):
    np.save(tmp_path / "small.npy", np.zeros((8, 8)))
    with pytest.raises(ValueError, match=r"^small\.npy: .*\[8, 8\].* \[16, 16\]"):
        read_map(regressor, str(tmp_path / "small.npy"))
    (tmp_path / "sky.fits").write_bytes(b"no FITS at all")
    with pytest.raises(ValueError, match=r"^sky\.fits"):
        read_map(regressor, str(tmp_path / "sky.fits"))
    np.save(tmp_path / "three.npy", np.zeros((3, 16, 16)))
    item, count = read_map(regressor, str(tmp_path / "three.npy"))
    assert count == 3 and item["map"].shape == (1, 16, 16)


# ---- the page ----


def test_expected_errors_become_warnings_without_markup_and_clear_the_outputs(monkeypatch):
    said = []
    monkeypatch.setattr("gradio.Warning", lambda message, title: said.append(message))

    def failing(text):
        raise ValueError(f"{text} is wrong")

    def streaming(text):
        yield "first"
        raise OSError("gone")

    def refused(words):
        return [words, None]

    page, answer = checked(failing, [None], refused)("<b>")
    assert page == '<p class="hrm-refused"><b>Not possible:</b> &lt;b&gt; is wrong</p>' and answer is None
    first, (page, answer) = checked(streaming, [None], refused)("x")
    assert first == "first" and "gone" in page and answer is None
    assert said == ["&lt;b&gt; is wrong", "gone"]
    with pytest.raises(ZeroDivisionError):
        checked(lambda: 1 / 0, [], refused)()


def test_each_kind_of_model_gets_its_tabs(checkpoints):
    demo = build_app([str(folder) for folder in checkpoints.values()])
    labels = [block.label for block in demo.blocks.values() if block.get_block_name() == "tabitem"]
    assert labels == [
        "Sudoku · sudoku", "Maze · maze", "ARC · arc", "Text · hrm_lm", "Text · rlm_mhc", "mHC · rlm_mhc",
        "Go coder · hrm_go_coder", "Cosmology · hrm_cosmo", "Cosmology · cosmo_cnn",
        "Mass map · hrm_mass_mapping", "Mass map · cosmo_unet",
    ]  # fmt: skip
    about = [block.value for block in demo.blocks.values() if "hrm-about" in str(getattr(block, "value", ""))]
    assert len(about) == len(labels)
    public = {function.api_name for function in demo.fns.values() if function.api_visibility == "public"}
    assert {"solve", "write", "write_go", "mhc_gains", "infer", "map_mass"} <= public


def test_missing_models_and_models_without_a_tab_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"models=\[\]"):
        build_app([])
    with pytest.raises(ModelError, match=r"/nothing "):
        build_app([str(tmp_path / "nothing")])
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="model_type='gpt2'"):
        build_app([str(tmp_path)])
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="adapter is a PEFT"):
        build_app([str(tmp_path / "adapter")])


def test_models_with_equal_folder_names_are_distinguished_by_path(tmp_path, monkeypatch):
    for run in ("first", "second"):
        every.save("cosmo_cnn", tmp_path / run / "model")
    monkeypatch.chdir(tmp_path / "first" / "model")
    names = [".", str(tmp_path / "second" / "model")]
    labels = [block.label for block in build_app(names).blocks.values() if block.get_block_name() == "tabitem"]
    assert labels == [f"Cosmology · {name}" for name in names]
    one = build_app(names[:1])
    assert "Cosmology · model" in [getattr(block, "label", None) for block in one.blocks.values()]
