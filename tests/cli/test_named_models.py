"""Commands report a missing model, or one of another kind, in one line at once."""

import json
import subprocess
import sys

import every
import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.hub import kinds
from hrm_hf.hub.manifests import CheckpointError
from hrm_hf.io.model_names import ModelError, find_model, is_path


# Each command, with MODEL for the model's name. They check the model first.
COMMANDS = (
    "solve MODEL 123", "eval puzzles MODEL data", "eval lm MODEL --data text.txt", "eval go MODEL --records r.jsonl",
    "eval cosmo MODEL --data .", "go MODEL x", "rlm MODEL --question q --context-file here.txt", "serve MODEL",
    "app MODEL", "export onnx MODEL --out out", "export torch MODEL --out out.pt2",
    "export gguf MODEL --out out.gguf", "export hrm-text MODEL --out out",
    "convert hrm MODEL --out out", "convert trm MODEL --out out --to-original",
)  # fmt: skip
# Runs each command: prints its status, its output, and the heavy packages that are loaded afterwards.
SCRIPT = """
import contextlib, io, json, sys
import hrm_hf_start
from hrm_hf.cli import main
hrm_hf_start.start_program()
found = {}
for command in json.loads(sys.argv[1]):
    sys.argv = ["hrm-hf", *command.split()]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code
    heavy = [name for name in ("torch", "transformers", "datasets") if name in sys.modules]
    found[command] = [code, said.getvalue(), heavy]
print(json.dumps(found))
"""
UNREACHABLE = "http://127.0.0.1:9"  # the port of the discard service, where nothing listens


@pytest.fixture(scope="module")
def nowhere(tmp_path_factory):
    """The output of every command for a missing local model, and for a model on an unreachable Hub."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "runs").mkdir()
    (folder / "here.txt").write_text("x")
    commands = [command.replace("MODEL", "runs/nothere") for command in COMMANDS]
    commands.append("solve nobody/nothing 123")
    environment = {"PATH": "", "HF_ENDPOINT": UNREACHABLE, "HF_HOME": str(folder / "home"), "COLUMNS": "80"}
    environment["PYTHONPATH"] = ":".join(sys.path)
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)], cwd=folder, env=environment, capture_output=True,
        text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "Retrying" not in process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_path_is_named_in_one_line_before_heavy_imports(nowhere, command):
    code, said, heavy = nowhere[command.replace("MODEL", "runs/nothere")]
    assert code == 2 and said.count("\n") == 1 and not set(heavy) & {"torch", "datasets"}
    assert said.startswith(("error: runs/nothere is not a folder", "error: runs/nothere does not exist"))


def test_unreachable_hub_is_queried_once(nowhere):
    code, said, heavy = nowhere["solve nobody/nothing 123"]
    assert code == 2 and said.count("\n") == 1 and "torch" not in heavy
    assert "nobody/nothing is" in said and f"({UNREACHABLE})" in said


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in ("trm_puzzle", "hrm_lm", "cosmo_cnn"):
        every.save(name, root / name)
    configs = {"bert": '{"model_type": "bert"}', "strange": '{"model_type": "x"}', "broken": "{", "null": "null"}
    for name, config in configs.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(config)
    (root / "run" / "checkpoint-9").mkdir(parents=True)
    (root / "run" / "checkpoint-20").mkdir()
    for step in ("checkpoint-9", "checkpoint-20"):
        (root / "run" / step / "config.json").write_text("{}")
    (root / "here.txt").write_text("x")
    return root


SOLVER, CODER, LM = "a puzzle solver", "a Go coder", "a language model"


@pytest.mark.parametrize(
    "command, model, wanted, instead",
    [
        ("solve MODEL 123", "hrm_lm", SOLVER, "hrm-hf eval lm, eval reasoning, rlm, serve and app"),
        ("eval puzzles MODEL data", "cosmo_cnn", SOLVER, "hrm-hf eval cosmo and app"),
        ("convert trm MODEL --out out --to-original", "hrm_lm", SOLVER, "eval lm"),
        ("go MODEL x", "trm_puzzle", CODER, "hrm-hf solve, eval puzzles and app"),
        ("go MODEL x", "hrm_lm", CODER, "hrm-hf eval lm"),
        ("eval go MODEL --records r.jsonl", "trm_puzzle", LM, "hrm-hf solve"),
        ("eval lm MODEL --data text.txt", "cosmo_cnn", LM, "hrm-hf eval cosmo"),
        ("rlm MODEL --question q --context-file here.txt", "trm_puzzle", LM, "hrm-hf solve"),
        ("serve MODEL", "trm_puzzle", LM, "hrm-hf solve"),
        ("eval cosmo MODEL --data .", "hrm_lm", "a map regressor", "hrm-hf eval lm"),
    ],
)
def test_wrong_model_kind_is_reported_with_the_commands_for_it(models, monkeypatch, command, model, wanted, instead):
    monkeypatch.chdir(models)
    found = CliRunner().invoke(app, command.replace("MODEL", model).split())
    assert found.exit_code == 2 and found.output.count("\n") == 1
    assert f"error: {model} is a model of type {model}; expected {wanted}" in found.output
    assert instead in found.output


def test_auto_map_tells_the_kind_before_heavy_imports(models):
    commands = ["solve hrm_lm 123", "eval puzzles hrm_lm x", "go trm_puzzle x", "eval cosmo hrm_lm --data .",
                "eval lm trm_puzzle --data x", "eval go cosmo_cnn --records x", "serve cosmo_cnn"]  # fmt: skip
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)], cwd=models, capture_output=True, text=True, check=True
    )
    for command, (code, said, heavy) in json.loads(process.stdout.splitlines()[-1]).items():
        assert code == 2 and "; expected a" in said and not heavy, (command, said, heavy)


def test_kind_without_auto_map_comes_from_the_registry(models, tmp_path):
    config = json.loads((models / "hrm_lm" / "config.json").read_text())
    del config["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    kinds.validate_kind(str(tmp_path), kinds.PUZZLE_SOLVER)
    with pytest.raises(ModelError, match=r"type hrm_lm;.*puzzle solver.*hrm-hf eval lm"):
        kinds.load_config(str(tmp_path), kinds.PUZZLE_SOLVER)


@pytest.mark.parametrize(
    "name, said",
    [
        ("hrm_ml", "hrm_ml .*HF_HUB_OFFLINE"),
        ("./hrm_ml", r"\./hrm_ml .* hrm_lm\?"),
        ("run", r"run .*config\.json.* run/checkpoint-20\b"),
        ("here.txt", r"here\.txt .*OWNER/NAME"),
        ("a b/c", "'a b/c'"),
    ],
)
def test_invalid_model_names_are_explained(models, monkeypatch, name, said):
    monkeypatch.chdir(models)
    with pytest.raises(ModelError, match=said):
        find_model(name)


@pytest.mark.parametrize("name, said", [("strange", "`x`"), ("broken", "valid JSON"), ("null", "null")])
def test_unreadable_config_is_reported_in_one_line(models, name, said):
    with pytest.raises(ModelError, match=f"{name}: .*{said}") as error:
        kinds.load_config(str(models / name), kinds.PUZZLE_SOLVER if name == "null" else None)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("said", ["cannot be read", "are missing", "are not finite", "of a different shape"])
@pytest.mark.parametrize("name, command", [("trm_puzzle", "solve MODEL 0"), ("hrm_lm", "eval lm MODEL --data TEXT")])
def test_unusable_weights_are_an_error(tmp_path, name, command, said):
    file, text = every.save(name, tmp_path / "model") / "model.safetensors", tmp_path / "text.txt"
    text.write_text("some text\n" * 40)
    first = min(weights := load_file(file))
    changed = {"are missing": {}, "are not finite": {first: weights.pop(first) * float("nan")}}
    save_file(weights | changed.get(said, {first: torch.ones(1, 1)}), file, {"format": "pt"})
    if said == "cannot be read":  # the header claims more bytes than the file has
        file.write_bytes(file.read_bytes()[:-40])
    found = CliRunner().invoke(app, command.replace("MODEL", str(file.parent)).replace("TEXT", str(text)).split())
    assert isinstance(found.exception, CheckpointError) and "\n" not in str(found.exception), found.output
    assert f"{file.parent}: " in str(found.exception) and said in str(found.exception)


def test_only_language_models_may_come_from_transformers(models):
    assert kinds.load_config(str(models / "bert"), kinds.LANGUAGE_MODEL).model_type == "bert"
    with pytest.raises(ModelError, match=r"type bert;.*puzzle solver"):
        kinds.load_config(str(models / "bert"), kinds.PUZZLE_SOLVER)


def test_adapter_has_the_kind_of_its_base_model(models, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(models / "trm_puzzle")}))
    assert kinds.load_config(str(tmp_path), kinds.PUZZLE_SOLVER, adapters=True).model_type == "trm_puzzle"
    with pytest.raises(ModelError, match=r"type trm_puzzle;.*Go coder"):
        kinds.load_config(str(tmp_path), kinds.GO_CODER, adapters=True)
    with pytest.raises(ModelError, match="PEFT adapter"):
        kinds.load_config(str(tmp_path), kinds.PUZZLE_SOLVER)


def test_hub_is_queried_once_for_a_name_and_never_for_a_path(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ModelError, match=r"me/nothing .*does not exist on the Hub"):
        find_model("me/nothing")
    assert len([path for _, path in hub.requests if "/me/nothing" in path]) == 1
    asked = len(hub.requests)
    for name in ("runs/nothing", "./me", "a/b/c"):
        assert is_path(name)
        with pytest.raises(ModelError, match=f"^{name} "):
            find_model(name)
    assert len(hub.requests) == asked


def test_hub_model_is_found_and_its_kind_is_checked(hub, models):
    api = HfApi()
    api.create_repo("me/maps")
    api.upload_file(
        path_or_fileobj=models / "cosmo_cnn" / "config.json", path_in_repo="config.json", repo_id="me/maps"
    )
    find_model("me/maps")
    with pytest.raises(ModelError, match=r"me/maps .*cosmo_cnn;.*puzzle solver"):
        kinds.load_config("me/maps", kinds.PUZZLE_SOLVER)
