"""`training/pretrain.py` and `training/evaluate.py` translate and run the original's command lines.

Referees: the numbers of the original's published run (26,041 steps), the parser of run_puzzle.py for every recipe, and
run_puzzle.py itself, whose main the script runs.
"""

import json
import re
import runpy
import shlex
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import yaml
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.puzzles.arguments import PuzzleDataArguments, PuzzleTrainingArguments
from hrm_hf.puzzles.convert import convert_to_original
from hrm_hf.puzzles.dataset import load_puzzle_info, save_puzzle_dataset
from hrm_hf.puzzles.evaluation import evaluate_checkpoint
from hrm_hf.puzzles.npy_layout import read_original, write_original
from hrm_hf.puzzles.options import EvaluatePuzzles
from hrm_hf.puzzles.pretrain_options import (
    DEFAULTS,
    DataSize,
    arguments,
    build_command,
    data_size,
    epoch_steps,
    evaluation_arguments,
    machine,
    original_run,
    parse_command,
)
from hrm_hf.puzzles.sudoku import generated_sudoku
from hrm_hf.trainer.recipes import ModelArguments, build_config, parse_recipe


TRAINING = Path(__file__).parents[2] / "training"
SMALL = "arch.hidden_size=32 arch.H_layers=1 arch.L_layers=1 arch.num_heads=1 arch.expansion=2"
RATES = "lr=1e-4 puzzle_emb_lr=1e-4 weight_decay=1.0 puzzle_emb_weight_decay=1.0"
BASIC = f"data_path=data/sudoku-extreme-small epochs=500 eval_interval=100 global_batch_size=4 {RATES} {SMALL}"
ULTRA = BASIC.replace("epochs=500 eval_interval=100 global_batch_size=4", "epochs=1000 eval_interval=200 "
                      "global_batch_size=2").replace("hidden_size=32", "hidden_size=16")  # fmt: skip
FULL = f"data_path=data/sudoku-extreme-1k-aug-1000 epochs=20000 eval_interval=2000 {RATES}"
BACKGROUND = BASIC.replace("epochs=500 eval_interval=100", "epochs=1000 eval_interval=200")
SUDOKU_FULL = (
    "data_path=data/sudoku-hard-full epochs=100 eval_interval=10 lr_min_ratio=0.1 global_batch_size=2304 lr=3e-4 "
    "puzzle_emb_lr=3e-4 weight_decay=0.1 puzzle_emb_weight_decay=0.1 arch.loss.loss_type=softmax_cross_entropy "
    "arch.L_cycles=8 arch.halt_max_steps=8 arch.pos_encodings=learned"
)
HERE = {"torch_compile": False, "bf16": False, "use_cpu": True, "report_to": "none"}
SIXTEEN = DataSize(groups=16, mean_examples=1.0, fingerprint="0badcafe")


def run_of(command: str, size: DataSize = SIXTEEN, here: dict = HERE):
    options, _ = parse_command(command.split())
    return original_run(options, size, here)


def parsed(command: list[str]):
    """Parse an equivalent command line with the parser of run_puzzle.py."""
    return parse_recipe((ModelArguments, PuzzleDataArguments, PuzzleTrainingArguments), command)


def script(name: str, words: list[str], monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(TRAINING / name), run_name="as_a_module")["main"]()


@pytest.fixture
def own_signals():
    """Undo a training script's handling of preemption signals after the test."""
    kinds = (signal.SIGUSR1, signal.SIGTERM)
    mask, handlers = signal.pthread_sigmask(signal.SIG_BLOCK, ()), [signal.getsignal(kind) for kind in kinds]
    yield
    for kind, handler in zip(kinds, handlers):
        signal.signal(kind, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture(scope="module")
def original_folder(tmp_path_factory):
    """Write a data set of 4x4 boards in the original's layout."""
    splits, info = generated_sudoku(4, num_train=20, num_test=6)
    return write_original(splits, info, tmp_path_factory.mktemp("data") / "sudoku-tiny")


@pytest.mark.parametrize(
    "command, steps, interval", [(BASIC, 2000, 400), (ULTRA, 8000, 1600), (BACKGROUND, 4000, 800)]
)
def test_the_guides_commands_give_the_originals_number_of_steps(command, steps, interval):
    recipe = run_of(command)
    assert (recipe["max_steps"], recipe["eval_steps"], recipe["save_steps"]) == (steps, interval, interval)


def test_the_full_size_command_is_the_published_run_of_26041_steps():
    recipe = run_of(FULL, DataSize(1000, 1.0))
    assert (recipe["max_steps"], recipe["global_batch_size"]) == (26_041, 768)
    assert "config_overrides" not in recipe  # the config's defaults are the original's


@pytest.mark.parametrize("command", [BASIC, ULTRA, FULL, BACKGROUND, SUDOKU_FULL])
def test_run_puzzle_accepts_every_command_of_the_guide(command):
    run = run_of(command, DataSize(1000, 1.0, "f"))
    model, data, training = parsed(arguments(run))
    assert build_config(model).model_type == "hrm_puzzle"
    assert (data.data_path, training.max_steps) == (run["data_path"], run["max_steps"])


def test_every_key_of_the_original_reaches_its_option():
    run = run_of(
        f"{SUDOKU_FULL} lr_warmup_steps=7 beta1=0.8 beta2=0.99 seed=3 checkpoint_every_eval=false arch.rope_theta=500 "
        "arch.H_cycles=3 arch.halt_exploration_prob=0.3 +project_name=P ++run_name=R arch.forward_dtype=float32 "
        "arch.rms_norm_eps=1e-6 arch=hrm_v1 arch.puzzle_emb_ndim=1024",
        DataSize(100_000, 1.0),
    )
    args = parsed(arguments(run))
    config, training = build_config(args[0]), args[2]
    assert (config.loss_type, config.L_cycles, config.H_cycles, config.halt_max_steps) == ("softmax", 8, 3, 8)
    assert (config.pos_encodings, config.forward_dtype, config.rms_norm_eps) == ("learned", "float32", 1e-6)
    assert (config.rope_parameters["rope_theta"], config.puzzle_emb_ndim) == (500, 1024)
    assert config.halt_exploration_prob == 0.3
    assert (training.warmup_steps, training.adam_beta1, training.adam_beta2, training.seed) == (7, 0.8, 0.99, 3)
    assert (training.learning_rate, training.lr_min_ratio, training.puzzle_emb_lr) == (3e-4, 0.1, 3e-4)
    assert (training.weight_decay, training.puzzle_emb_weight_decay) == (0.1, 0.1)
    assert (training.save_strategy.value, training.run_name) == ("no", "R")
    assert training.output_dir == "checkpoints/P/R"
    assert args[1].data_path == "data/sudoku-hard-full" and args[1].build_data is None


@pytest.mark.parametrize(
    "words, message",
    [
        ("learning_rate=1", "learning_rate"),
        ("epochs", "'epochs'"),
        ("epochs=ten", "epochs=ten"),
        ("epochs=1.5", "epochs=1.5"),
        ("lr=fast", "lr=fast"),
        ("lr=nan", "lr=nan"),
        ("lr=-1", "lr=-1"),
        ("global_batch_size=0", "global_batch_size=0"),
        ("checkpoint_every_eval=perhaps", "checkpoint_every_eval=perhaps"),
        ("epochs=null", "epochs=null"),
        ("epochs=5 --report_to none epoch=6", "'epoch'"),
        ("arch=trm", "arch=trm"),
        ("arch.name=x@Y", "arch.name=x@Y"),
        ("eval_save_outputs=[logits]", "eval_save_outputs=[logits]"),
        ("--output_dir x", "--output_dir"),
    ],
)
def test_invalid_arguments_are_rejected_by_name(words, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_command(words.split())


@pytest.mark.parametrize("flags", ["--torch_compile", "--config_overrides a=b,c=3 --seed=3", "--optim_args lr=1"])
def test_keys_may_be_mixed_with_flags_and_the_last_wins(flags, caplog):
    options, found = parse_command(f"epochs=5 {flags} +epochs=7 arch.hidden_size=16".split())
    assert (options["epochs"], options["arch.hidden_size"], options["lr"]) == (7, 16, DEFAULTS["lr"])
    assert found == flags.split() and "last value, epochs=7" in caplog.text


@pytest.mark.parametrize("key, meant", [("arch.hiden_size", "arch.hidden_size"), ("zzzz", None)])
def test_only_a_similar_key_is_suggested(key, meant):
    suggestion = f"; did you mean {meant!r}\\?" if meant else ""
    with pytest.raises(ValueError, match=f"^unknown key {key!r}{suggestion}; --help"):
        parse_command([f"{key}=3"])


@pytest.mark.parametrize(
    "words, message",
    [
        ("arch.rope_theta=0", r"arch\.rope_theta=0"),
        ("arch.hidden_size=30 arch.num_heads=4", "hidden_size=30: .*num_attention_heads=4"),
        ("arch.loss.loss_type=hinge", "loss_type='hinge'"),
        ("arch.pos_encodings=alibi", "pos_encodings='alibi'"),
    ],
)
def test_impossible_architectures_are_rejected_before_writing(words, message):
    with pytest.raises(ValueError, match=message):
        run_of(words)


def test_an_interval_must_divide_the_epochs_and_fill_a_batch():
    assert epoch_steps(500, None, 16, 1.0, 4) == (2000, 2000)
    assert epoch_steps(20_000, 2000, 1000, 1.0, 768) == (26_041, 2604)
    with pytest.raises(ValueError, match=r"eval_interval=300: .*epochs=1000.* 250"):
        epoch_steps(1000, 300, 16, 1.0, 4)
    with pytest.raises(ValueError, match=r"eval_interval=1: .*global_batch_size=768"):
        epoch_steps(10, 1, 16, 1.0, 768)


def test_missing_data_set_error_names_the_build_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="data_path=data/sudoku-extreme-small") as stop:
        script("pretrain.py", BASIC.split(), monkeypatch)
    command = str(stop.value).splitlines()[-1].split()
    assert command[:3] == ["hrm-hf", "data", "sudoku"] and command[-1] == "data/sudoku-extreme-small"
    assert CliRunner().invoke(app, command[1:]).exit_code == 0  # the suggested command works
    assert data_size("data/sudoku-extreme-small") == (16, 1.0, None)
    assert not Path("checkpoints").exists()


def test_groups_and_examples_are_counted_alike_in_both_layouts(tmp_path):
    splits, info = generated_sudoku(4, num_train=12, num_test=2, num_aug=3)
    save_puzzle_dataset(splits, info, tmp_path / "ours")
    write_original(splits, info, tmp_path / "theirs")
    ours, theirs = data_size(tmp_path / "ours"), data_size(tmp_path / "theirs")
    assert (ours.groups, ours.mean_examples) == (theirs.groups, theirs.mean_examples) == (12, 1.0)


def test_hrm_hf_data_accepts_every_build_command():
    for name in ("sudoku-extreme-1k-aug-1000", "maze-30x30-hard-1k", "arc-aug-1000", "sudoku-extreme-full"):
        command = shlex.split(build_command(Path("data", name)))
        assert CliRunner().invoke(app, [*command[1:3], "--help"]).exit_code == 0
        assert command[-2:] == ["--out", f"data/{name}"]


def test_environment_variables_decide_the_compiler_and_not_whether_wandb_is_used():
    assert machine({"DISABLE_COMPILE": "1"})["torch_compile"] is False
    assert run_of(BASIC, here=machine({"WANDB_PROJECT": "mine"}))["report_to"] == "none"


def test_each_command_resumes_in_its_own_folder():
    commands = (BASIC, ULTRA, f"{BASIC} checkpoint_path=here")
    basic, ultra, here = (Path(run_of(command)["output_dir"]) for command in commands)
    assert basic == Path(run_of(BASIC)["output_dir"]) != ultra and here == Path("here")
    assert basic.parent == Path("checkpoints/Sudoku-extreme-small ACT-torch")


def test_a_command_trains_and_its_checkpoint_is_evaluated(original_folder, tmp_path, monkeypatch, capsys, own_signals):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISABLE_COMPILE", "1")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    words = f"{SMALL} data_path={original_folder} epochs=4 eval_interval=1 global_batch_size=4 arch.halt_max_steps=2"
    script("pretrain.py", [*words.split(), "--disable_tqdm", "true"], monkeypatch)
    printed = capsys.readouterr().out
    run = next(Path("checkpoints").glob("Sudoku-tiny*/Hier*"))
    assert "run_puzzle.py --model_type hrm_puzzle" in printed
    assert json.loads((run / "results.json").read_text())["steps"] == 20
    state = json.loads((run / "checkpoint-20" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_exact_accuracy" in entry] == [5, 10, 15, 20]
    assert {int(folder.name[11:]) for folder in run.glob("checkpoint-*")} == {5, 10, 15, 20}  # one per evaluation
    assert load_puzzle_info(yaml.safe_load((run / "recipe.yaml").read_text())["data_path"]).task == "generic"

    with pytest.raises(SystemExit) as stop:  # hrm-hf commands end with SystemExit
        script("evaluate.py", [f"checkpoint={run}/checkpoint-20", "--json", "--device", "cpu"], monkeypatch)
    assert stop.value.code == 0
    command, result = capsys.readouterr().out.strip().split("\n\n")
    assert "--halt fixed" in command
    assert json.loads(result)["metrics"]["count"] == 6

    asked, _ = parse_command([*words.split(), f"run_name={run.name}", f"checkpoint_path={run}"])
    convert_to_original(run / "checkpoint-15", "back")
    written = yaml.safe_load(Path("back", "all_config.yaml").read_text())
    assert Path("back", "step_15").exists() and written.pop("arch")["hidden_size"] == asked["arch.hidden_size"]
    assert written == {name: asked[name] for name in written}


def test_evaluation_on_original_arrays_equals_that_on_imported_data(original_folder, tmp_path):
    """Referee: `hrm-hf data import`, which writes the same puzzles in our layout."""
    splits, info = read_original(original_folder)
    save_puzzle_dataset(splits, info, tmp_path / "ours")
    fields = info.config_fields() | {"halt_max_steps": 2}
    tiny.model("hrm", **fields).save_pretrained(tmp_path / "model")
    given = {"model": str(tmp_path / "model"), "device": "cpu"}
    found = [
        evaluate_checkpoint(EvaluatePuzzles(data=str(data), **given))["metrics"]
        for data in (original_folder, tmp_path / "ours")
    ]
    for metrics in found:
        metrics.pop("puzzles_per_second", None)
    assert found[0] == found[1] and found[0]["count"] == 6
    with pytest.raises(ValueError, match=r"split 'validation'.*train or test"):
        evaluate_checkpoint(EvaluatePuzzles(data=str(original_folder), split="validation", **given))


def test_evaluation_reads_only_its_columns_in_any_order_of_the_rows(tmp_path):
    splits, info = generated_sudoku(4, num_train=1, num_test=6)
    tiny.model("hrm", **info.config_fields() | {"halt_max_steps": 2}).save_pretrained(tmp_path / "model")
    found = []
    for name, order in (("sorted", range(6)), ("shuffled", (3, 0, 5, 1, 4, 2))):
        rows = splits["test"].select(order).remove_columns("rating").add_column("rating", ["hard"] * 6)
        save_puzzle_dataset({"test": rows}, info, tmp_path / name)
        options = EvaluatePuzzles(model=str(tmp_path / "model"), data=str(tmp_path / name), device="cpu")
        found.append(evaluate_checkpoint(options)["metrics"])
    assert found[0]["count"] == 6
    for metric in ("cell_accuracy", "exact_accuracy_per_step", "steps_histogram"):
        assert found[0][metric] == pytest.approx(found[1][metric])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda rows: rows.remove_columns("labels"), "labels"),
        (lambda rows: rows.map(lambda row: {"labels": [-100] * 16}), "3 rows .*-100"),
        (lambda rows: rows.map(lambda row: {"input_ids": [9] * 16}), "input_ids .*9"),
    ],
)
def test_evaluation_errors_name_data_and_split(change, message, tmp_path):
    splits, info = generated_sudoku(4, num_train=1, num_test=3)
    tiny.model("hrm", **info.config_fields()).save_pretrained(tmp_path / "model")
    save_puzzle_dataset({"test": change(splits["test"])}, info, tmp_path / "data")
    options = EvaluatePuzzles(model=str(tmp_path / "model"), data=str(tmp_path / "data"), device="cpu")
    with pytest.raises(ValueError, match=f"^{re.escape(options.data)}, split 'test': .*{message}"):
        evaluate_checkpoint(options)


def test_original_checkpoint_is_converted_and_evaluated_on_its_data(original_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vocab_size = json.loads((original_folder / "train" / "dataset.json").read_text())["vocab_size"]
    tiny.model("hrm", vocab_size=vocab_size, num_puzzle_identifiers=1, halt_max_steps=2).save_pretrained("ours")
    convert_to_original("ours", "run", step=7)
    settings = yaml.safe_load(Path("run/all_config.yaml").read_text()) | {"data_path": str(original_folder)}
    Path("run/all_config.yaml").write_text(yaml.safe_dump(settings))
    words = evaluation_arguments(["checkpoint=run/step_7"])
    assert words[2] == "run/hrm_hf-step_7" and Path(words[2], "config.json").exists()
    result = CliRunner().invoke(app, [*words, "--json", "--device", "cpu", "--halt", "q"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "words, error, message",
    [
        (["checkpoint=nowhere"], FileNotFoundError, "nowhere"),
        (["chekpoint=x"], ValueError, "chekpoint"),
        ([], ValueError, "checkpoint=FOLDER"),
        (["checkpoint=."], FileNotFoundError, "step_N"),
    ],
)
def test_evaluate_names_the_invalid_checkpoint_argument(words, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=re.escape(message)):
        evaluation_arguments(words)


def test_help_names_every_key(monkeypatch, capsys):
    script("pretrain.py", ["--help"], monkeypatch)
    printed = capsys.readouterr().out
    assert all(f"  {name}=" in printed for name in DEFAULTS)


def test_original_arrays_load_unchanged(original_folder, tmp_path, monkeypatch):
    """Requirement N15: training reads exactly the values in the original's files."""
    monkeypatch.chdir(tmp_path)
    run = run_of(f"{BASIC} data_path={original_folder}".replace("data_path=data/sudoku-extreme-small ", ""))
    assert run["build_data"] == f"import {shlex.quote(str(original_folder))}"
    assert CliRunner().invoke(app, ["data", "import", str(original_folder), "--out", "read"]).exit_code == 0
    assert CliRunner().invoke(app, ["data", "export", "read", "--out", "back"]).exit_code == 0
    for file in original_folder.rglob("*.npy"):
        assert np.array_equal(np.load(file), np.load(Path("back") / file.relative_to(original_folder)))
