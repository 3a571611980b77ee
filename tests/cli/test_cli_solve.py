"""`hrm-hf solve`, `hrm-hf eval puzzles` and the model card they write, on a small random model."""

import json
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from huggingface_hub import ModelCard
from transformers import pipeline
from typer.testing import CliRunner

from hrm_hf import HrmPuzzleConfig, HrmPuzzleForSolving, TrmPuzzleConfig, TrmPuzzleForSolving
from hrm_hf.cli import app, ask
from hrm_hf.hub.cards import END, START, new_card_text, record_evaluation
from hrm_hf.puzzles import maze, sudoku
from hrm_hf.puzzles.arc import build_arc, parse_task, save_arc_dataset
from hrm_hf.puzzles.dataset import load_puzzle_dataset, save_puzzle_dataset
from hrm_hf.puzzles.options import SolvePuzzles, shipped_model
from hrm_hf.puzzles.pipeline import puzzles_of_text
from hrm_hf.puzzles.task_registry import puzzle_task


TINY = {
    "hidden_size": 8, "num_attention_heads": 1, "H_layers": 1, "L_layers": 1, "expansion": 1, "puzzle_emb_ndim": 8,
    "halt_max_steps": 2,
}  # fmt: skip
PUZZLE = "1...............".replace(".", "0")
runner = CliRunner()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    splits, info = sudoku.generated_sudoku(4, num_train=4, num_test=6, seed=0)
    save_puzzle_dataset(splits, info, folder)
    return folder, info


@pytest.fixture
def model(data, tmp_path):
    folder = tmp_path / "my-model"
    HrmPuzzleForSolving(HrmPuzzleConfig(**TINY, **data[1].config_fields())).save_pretrained(folder)
    return folder


def run(*arguments, **options):
    result = runner.invoke(app, [str(argument) for argument in arguments], **options)
    return result


@pytest.mark.parametrize(("file", "plain"), [("config.json", False), ("adapter_config.json", False), ("x", True)])
def test_solve_imports_accelerate_only_for_adapters_and_quantized_weights(file, plain, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text('{"quantization_config": {}}')
    monkeypatch.setattr(ask, "sys", SimpleNamespace(modules={}))
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")  # kept
    ask._spare_cpu(str(tmp_path))
    assert ("accelerate" in ask.sys.modules) is plain


def test_solve_prints_the_board_and_rule_violations(model):
    result = run("solve", model, PUZZLE)
    assert result.exit_code == 0, result.output
    assert "+-----+-----+" in result.output
    assert "2 steps, confidence" in result.output
    assert "breaks the rules: " in result.output and " more" in result.output


def test_solve_says_that_it_is_not_sure_and_searches_when_asked(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "sure_confidence": 0.9}))
    result = run("solve", model, PUZZLE, "--until-valid")
    assert result.exit_code == 0, result.output
    assert "not sure, obeys the rules, found by search" in result.output
    assert "breaks the rules" not in result.output


def test_solve_reads_stdin_and_prints_json(model):
    result = run("solve", model, "-", "--json", "--votes", 3, input=f"{PUZZLE}\n{PUZZLE}\n")
    answers = json.loads(result.stdout)
    assert len(answers) == 2 and answers[0]["votes"]["of"] == 3


def test_solve_reads_a_file_and_prints_a_summary(model, tmp_path):
    (tmp_path / "puzzles.csv").write_text(f"puzzle,solution\n{PUZZLE},1234341221434321\n{PUZZLE},\n")
    result = run("solve", model, "--file", tmp_path / "puzzles.csv")
    assert result.exit_code == 0, result.output
    assert "2 puzzles, 2.00 steps on average, 0 of 2 valid, 0 of 1 correct" in result.output


@pytest.mark.parametrize("name", ["win.txt", "win.sdm", "lines.txt", "list.json"])
def test_solve_reads_files_of_boards(model, tmp_path, name):
    row = json.dumps({"puzzle": PUZZLE})
    text = {"list.json": f"[{row}, {row}]", "lines.txt": f"{row}\n{row}"}.get(name, f"{PUZZLE}\r\n{PUZZLE}\r\n")
    content = text.encode("utf-16" if name == "win.sdm" else "utf-8-sig")
    (tmp_path / name).write_bytes(content)
    for words in (["-"], [tmp_path / name], ["--file", tmp_path / name]):
        assert len(json.loads(run("solve", model, *words, "--json", input=content).stdout)) == 2


@pytest.mark.parametrize(
    "content, message",
    [(b'{"boards": 3}', "puzzle 0: .*boards"), (b"\xff\xd8\xff", "boards: not valid"), (b"12l4" + b"." * 12, "'l'")],
)
def test_unreadable_file_of_boards_is_named(model, tmp_path, content, message):
    (tmp_path / "boards").write_bytes(content)
    for name, said in (("boards", message), ("nowhere.sdm", "nowhere.sdm does not exist")):
        with pytest.raises((ValueError, OSError), match=said):
            run("solve", model, tmp_path / name, catch_exceptions=False)


@pytest.mark.parametrize("word, model", [("win.txt", "sudoku"), ("#S #\n# X#\n# G#", "maze"), ("org/name", None)])
def test_first_word_is_a_model_unless_it_is_a_puzzle_or_a_file_of_puzzles(word, model):
    options = SolvePuzzles(words=[word, "-"])
    assert options.puzzles == ([word, "-"] if model else ["-"])
    assert options.model == (shipped_model(model) if model else word)


BREADTH = {"restarts": 3, "noise": 0.4, "noise_at": "every_step", "choose": "vote", "exit_when_still": 0.01}
FLAGS = [word for name, value in BREADTH.items() for word in (f"--{name.replace('_', '-')}", value)]


def test_solve_takes_restart_options(model):
    result = run("solve", model, PUZZLE, "--json", "--max-steps", 5, "--seed", 3, *FLAGS)
    assert result.exit_code == 0, result.output
    solve = pipeline("puzzle-solving", model=str(model))
    assert json.loads(result.stdout) == [solve(PUZZLE, max_steps=5, seed=3, **BREADTH)]


def test_eval_takes_restart_options_and_the_card_states_them(model, data):
    result = run("eval", "puzzles", model, data[0], "--json", "--update-card", *FLAGS)
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout)["metrics"]
    assert {name: metrics[name] for name in BREADTH} == BREADTH
    assert metrics["average_steps_of_all_runs"] > metrics["average_steps"]
    results = ModelCard.load(model / "README.md").data.eval_results
    assert all(BREADTH.items() <= result.metric_args.items() for result in results)
    assert "restarts" not in {result.metric_type for result in results}


@pytest.mark.parametrize("kind", ["png", "gif"])
def test_solve_plots_the_steps(kind, model, tmp_path):
    result = run("solve", model, PUZZLE, "--out", tmp_path / f"steps.{kind}")
    assert result.exit_code == 0, result.output
    assert (tmp_path / f"steps.{kind}").stat().st_size > 1000


def test_solve_writes_the_results_that_it_prints(model, tmp_path):
    printed = run("solve", model, PUZZLE, "--json", "--device", "cpu", "--out", tmp_path / "new" / "results.json")
    assert json.loads((tmp_path / "new" / "results.json").read_text()) == json.loads(printed.stdout)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "no puzzle given"),
        ((PUZZLE, "--out", "a.pdf"), "out=a.pdf"),
        ((PUZZLE, PUZZLE, "--out", "a.png"), "out=a.png"),
        ((PUZZLE, "--device", "cuda:9"), "cuda:9"),
    ],
)
def test_solve_explains_bad_usage(arguments, message, model):
    result = run("solve", model, *arguments)
    assert result.exit_code == 2 and message in result.output


@pytest.mark.parametrize("command", [("solve", "./nowhere", PUZZLE), ("eval", "puzzles", "./nowhere", "data")])
def test_missing_checkpoint_folder_is_a_usage_error(command):
    result = run(*command)
    assert result.exit_code == 2 and "error: ./nowhere" in result.output


def test_blank_rows_of_a_maze_on_stdin_do_not_end_it():
    task = puzzle_task(HrmPuzzleConfig(task="maze", grid_shape=[3, 3], seq_len=9, vocab_size=6))
    assert puzzles_of_text(b"S##\n   \n##G\n", task, "") == ["S##\n   \n##G"]


def test_boards_are_drawn_with_box_lines():
    grid = (np.arange(36).reshape(6, 6) % 7).tolist()
    lines = puzzle_task(HrmPuzzleConfig(task="sudoku", seq_len=36, vocab_size=8)).board_text(grid).splitlines()
    assert lines[:2] == ["+-------+-------+", "| . 1 2 | 3 4 5 |"] and len(lines) == 10
    maze_grid = [list(maze.decode(row)) for row in next(iter(maze.generate(5, 5, 1)))[0]]
    task = puzzle_task(HrmPuzzleConfig(task="maze", seq_len=25))
    assert task.board_text(maze_grid).splitlines()[0] == "".join(maze_grid[0])


def test_eval_writes_results_and_a_plot(model, data, tmp_path):
    result = run(
        "eval", "puzzles", model, data[0], "--halt", "fixed", "--limit", 5, "--out", tmp_path / "eval", "--json"
    )
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "eval" / "results.json").read_text())
    assert results["metrics"]["count"] == 5 and results["metrics"]["average_steps"] == 2
    assert {"task", "metrics", "parameters", "versions"} <= set(results)
    assert json.loads(result.stdout)["metrics"] == results["metrics"]
    assert (tmp_path / "eval" / "evaluation.png").exists()


def test_eval_by_difficulty_prints_a_table_and_keeps_it(model, data, tmp_path):
    result = run("eval", "puzzles", model, data[0], "--by-difficulty", "--out", tmp_path / "eval")
    assert result.exit_code == 0, result.output
    metrics = json.loads((tmp_path / "eval" / "results.json").read_text())["metrics"]
    rows = load_puzzle_dataset(data[0], "test")
    clues = [sum(token > 1 for token in row) for row in rows["input_ids"]]
    assert {row["low"]: row["count"] for row in metrics["by_difficulty"]["clues"]} == dict(Counter(clues))
    assert {row["low"]: row["count"] for row in metrics["by_difficulty"]["rating"]} == dict(Counter(rows["rating"]))
    (row,) = metrics["by_difficulty"]["clues"]
    low, high = row["exact_accuracy_interval"]
    line = f"  {clues[0]:>14}  {len(clues):7}  {row['exact_accuracy']:7.1%}  {low:.1%} to {high:.1%}"
    assert line in result.stdout and "by rating: " in result.stdout and "per_step" not in result.stdout


def test_eval_by_difficulty_needs_a_difficulty(tmp_path):
    raw = {"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[3]], "output": [[4]]}]}
    tasks = [parse_task(raw, "abc")]
    splits, info = build_arc(tasks, num_aug=0, cache_dir=tmp_path / "cache")
    save_arc_dataset(splits, info, tasks, tmp_path / "arc")
    HrmPuzzleForSolving(HrmPuzzleConfig(**TINY, **info.config_fields())).save_pretrained(tmp_path / "model")
    result = run("eval", "puzzles", tmp_path / "model", tmp_path / "arc", "--by-difficulty")
    assert result.exit_code == 2 and "path_length" in " ".join(result.output.split())


def test_eval_rejects_data_of_another_shape(model, tmp_path):
    splits, info = sudoku.generated_sudoku(6, num_train=1, num_test=1, clues=20)
    save_puzzle_dataset(splits, info, tmp_path / "six")
    result = run("eval", "puzzles", model, tmp_path / "six")
    assert result.exit_code == 1 and "seq_len (16 and 36)" in str(result.exception)


def test_eval_of_arc_votes(tmp_path):
    raw = {"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[3, 1]], "output": [[4, 2]]}]}
    tasks = [parse_task(raw, "abc")]
    splits, info = build_arc(tasks, num_aug=3, cache_dir=tmp_path / "cache")
    save_arc_dataset(splits, info, tasks, tmp_path / "arc")
    HrmPuzzleForSolving(HrmPuzzleConfig(**TINY, **info.config_fields())).save_pretrained(tmp_path / "model")
    result = run("eval", "puzzles", tmp_path / "model", tmp_path / "arc", "--json", "--max-steps", 1)
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout)["metrics"]
    assert metrics["hrm/pass@2"] == 0 and metrics["tasks"] == 1 and metrics["test_inputs_without_votes"] == 0


def test_eval_writes_a_card_once_and_then_updates_it(model, data):
    command = ("eval", "puzzles", model, data[0], "--update-card")
    assert run(*command).exit_code == 0
    card = model / "README.md"
    card.write_text(card.read_text() + "\nMy own words.\n")
    assert run(*command).exit_code == 0
    assert run(*command, "--halt", "fixed").exit_code == 0
    loaded = ModelCard.load(card)
    exact = [result for result in loaded.data.eval_results if result.metric_type == "exact_accuracy"]
    assert sorted(result.metric_args["halt"] for result in exact) == ["fixed", "q"]
    assert "My own words." in loaded.text and loaded.text.count(START) == loaded.text.count(END) == 1
    rows = re.findall(rf"^\| {data[0].name} \| test \| (.*) \|$", loaded.text, re.MULTILINE)
    assert len(rows) == 2  # one row per evaluation; each has an interval
    assert all(re.search(r"exact_accuracy \S+ \(95 %: \S+ to \S+\)", row) and "_low" not in row for row in rows)
    assert {result.dataset_type for result in exact} == {data[0].name}  # no local path is published
    assert loaded.data.library_name == "transformers"


@pytest.mark.parametrize(
    "model_class, config_class, words",
    [
        (HrmPuzzleForSolving, HrmPuzzleConfig, "Hierarchical Reasoning Model"),
        (TrmPuzzleForSolving, TrmPuzzleConfig, "Tiny Recursive Model"),
    ],
)
def test_a_new_card_states_the_architecture(model_class, config_class, words, data, tmp_path):
    fields = {**TINY, **data[1].config_fields(), "puzzle_emb_len": 2}
    model = model_class(config_class(**fields))
    model.save_pretrained(tmp_path)
    text = new_card_text(tmp_path)
    assert words in text and "Sudoku on boards of 4 x 4" in text
    assert f"{model.num_parameters():,} parameters" in text.replace("\n", " ")


def test_results_are_appended_to_a_handwritten_card(model):
    (model / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n\nWords.\n")
    record_evaluation(model, {"exact_accuracy": 0.5}, "data/sudoku", "test", 1)
    loaded = ModelCard.load(model / "README.md")
    assert loaded.text.strip().startswith("# Mine\n\nWords.\n\n## Results") and "exact_accuracy 0.5 |" in loaded.text
    assert loaded.data.license == "mit" and loaded.data.eval_results[0].metric_value == 0.5


def test_card_without_a_model_is_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        record_evaluation(tmp_path, {"exact_accuracy": 1.0}, "data", "test", 1)
