"""Recipes: YAML first, flags override, unknown keys are named, and a saved recipe is the run it was saved from."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import docs_pages
import pytest
import typer
import yaml
from huggingface_hub.errors import StrictDataclassError

from hrm_hf import HrmPuzzleConfig, TrmPuzzleConfig
from hrm_hf.cli.data import app as data_app
from hrm_hf.cosmology.arguments import CosmoDataArguments, CosmoTrainingArguments
from hrm_hf.golang.arguments import GoDataArguments, GoTrainingArguments
from hrm_hf.io.usage import UsageError
from hrm_hf.puzzles.arguments import PuzzleDataArguments, PuzzleTrainingArguments
from hrm_hf.text.arguments import LmDataArguments, LmTrainingArguments
from hrm_hf.trainer.guide_names import COSMOLOGY, GO_CODER, HRM_LM, PERLMUTTER, RLM_MHC
from hrm_hf.trainer.recipes import (
    ModelArguments,
    RecipeParser,
    build_config,
    load_recipe,
    parse_overrides,
    parse_recipe,
    save_recipe,
    write_results,
)


FOLDER = Path(__file__).parents[2] / "training" / "recipes"
# test_run_cosmo.py has the recipes of maps.
PUZZLES = [path for path in FOLDER.glob("*.yaml") if not path.stem.startswith(("cosmo_", "mass_"))]
RECIPES = sorted(path for path in PUZZLES if "data_path" in yaml.safe_load(path.read_text()))
ROOT = Path(__file__).parents[2]
CLASSES = (ModelArguments, PuzzleDataArguments, PuzzleTrainingArguments)
FROM_DATA = {
    "task": "generic", "grid_shape": [4, 4], "box_shape": [2, 2], "seq_len": 16, "vocab_size": 6,
    "num_puzzle_identifiers": 3,
}  # fmt: skip


@dataclass
class Options:
    """Two simple options for tests."""

    needed: int = field(metadata={"help": "No default."})
    word: str = field(default="default", metadata={"help": "A word."})
    rate: float = field(default=1.0, metadata={"help": "A number."})
    flag: bool = field(default=False, metadata={"help": "A switch."})
    words: list[str] = field(default_factory=list)


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe file and return its path: `recipe(text or mapping)`."""

    def write(content):
        path = tmp_path / "recipe.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return str(path)

    return write


def refused(classes, args) -> str:
    """Return the message of a usage error."""
    with pytest.raises(UsageError) as error:
        parse_recipe(classes, args)
    return str(error.value)


# ---- reading ----


def test_flags_override_the_file(recipe):
    path = recipe({"needed": 3, "word": "file", "rate": 0.5})
    (options,) = parse_recipe([Options], ["--recipe", path, "--word", "flag"])
    assert options == Options(needed=3, word="flag", rate=0.5)
    assert parse_recipe([Options], ["--word=flag", f"--recipe={path}"]) == (options,)
    assert parse_recipe([Options], ["--needed", "1", "--flag"]) == (Options(needed=1, flag=True),)


@pytest.mark.parametrize("text", ["1.10", "1e-5", "007", "on", "2024-01-01", "12:30", "0x10", "1_000", ".inf"])
def test_text_options_keep_what_is_written(recipe, text):
    path = recipe(f"needed: 1\nflag: on\nword: {text}\nwords: [{text}, ~/a]\n")
    (options,) = parse_recipe([Options], ["--recipe", path])
    assert (options.flag, options.word, options.words) == (True, text, [text, str(Path("~/a").expanduser())])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("needed: 1\nwrod: x\n", "recipe.yaml: .*'wrod'.*'word'"),
        ("needed: [1\n", "recipe.yaml .*YAML.*flow sequence"),
        ("- needed\n", "recipe.yaml: .*mapping.* list"),
        ("", "recipe.yaml: .*mapping.* NoneType"),
        ("needed: many\n", "--needed: .*int.*'many'"),
        ("needed: 1.5\n", "--needed: .*int.*'1.5'"),
        *((f"needed: {value}\n", r"recipe\.yaml: needed=") for value in ("[1]", "{a: 1}", "null")),
        ("needed: 1\nflag: [on]\n", r"recipe\.yaml: flag=\['on'\]"),
        ("needed: 1\n7: x\n", "7"),
        ("word: x\n", "required: --needed"),
    ],
)
def test_invalid_recipe_is_bad_usage_that_names_file_and_reason(recipe, text, message):
    assert re.search(message, refused([Options], ["--recipe", recipe(text)]))


def test_a_missing_recipe_is_bad_usage(tmp_path):
    for name, nearest in (("sudoku_smal.yaml", "sudoku_small.yaml"), ("hrm-lm-50m", "hrm_lm_50m.yaml")):
        assert re.search(rf"recipe=.*{name}: .*{nearest}", refused([Options], ["--recipe", str(tmp_path / name)]))


@pytest.mark.parametrize(("old", "new"), [("warmup-ratio", "warmup_steps, .*fraction"), ("no_cuda", "use_cpu")])
def test_options_of_transformers_4_name_what_takes_their_place(old, new, recipe):
    assert re.search(f"'{old}'; use {new}", refused(CLASSES, ["--output_dir", "x", f"--{old}", "0.1"]))
    assert re.search(f"'{old}'; use {new}", refused(CLASSES, ["--recipe", recipe({old: 0.1})]))


LM, MAPS = (LmDataArguments, LmTrainingArguments), (CosmoDataArguments, CosmoTrainingArguments)
GO = (GoDataArguments, GoTrainingArguments)
GUIDES = [(HRM_LM, LM), (RLM_MHC, LM), (PERLMUTTER, CLASSES[1:]), (COSMOLOGY, MAPS), (GO_CODER, GO)]


@pytest.mark.parametrize(("guide", "classes"), GUIDES, ids=lambda value: getattr(value, "page", ""))
def test_errors_about_names_of_a_guide_name_our_options_and_the_page(guide, classes):
    parser = RecipeParser((ModelArguments, *classes))
    assert guide.option in parser.known and (ROOT / "docs" / "coming_from" / f"{guide.page}.md").exists()
    for name, here in guide.names.items():
        assert "launch.py" in here or set(re.findall(r"--(\w+)", here)) - {"out", "kind"} <= parser.known
        with pytest.raises(UsageError, match=f"use {re.escape(here)}; .*{guide.page}.md"):
            parser.validate_known([f"+{name}=1"])


@pytest.mark.parametrize(
    "classes, words, message",
    [
        (LM, ["--no-wandb"], "'no-wandb'; use --report_to none"),
        (LM, ["--lr", "1"], "'lr'; use --learning_rate"),
        (LM, ["training.max_steps=5"], "'training.max_steps'; use --max_steps; .*rlm_mhc"),
        (LM, ["max_steps=5"], "^max_steps=5: .*--max_steps 5"),
        (CLASSES[1:], ["--puzzle_emb_lrr", "1"], "'puzzle_emb_lrr'.*'puzzle_emb_lr'"),
        (CLASSES[1:], ["arch.num_heads=8"], "use --config_overrides num_attention_heads="),
        (LM, ["--model", "50m"], "'model'; use --recipe .*hrm_lm_50m.yaml"),
        (MAPS, ["--debug"], "--debug: .*; use --recipe .*cosmo_debug.yaml"),
    ],
)
def test_errors_about_unknown_flags_give_our_name_or_the_nearest(classes, words, message):
    assert re.search(message, refused([ModelArguments, *classes], ["--output_dir", "x", *words]))


def test_no_evaluation_means_no_early_stopping_and_no_best_model():
    args = LmTrainingArguments("x", do_eval=False, eval_strategy="steps", early_stopping_patience=3, use_cpu=True)
    assert (args.eval_strategy, args.early_stopping_patience, args.load_best_model_at_end) == ("no", None, False)


def test_every_recipe_that_a_script_names_exists():
    for script in (ROOT / "training").glob("*.py"):
        for name in re.findall(r"training/recipes/\w+\.yaml", script.read_text()):
            assert (ROOT / name).is_file(), (script.name, name)


# ---- configs ----


def test_overrides_may_be_a_mapping_in_the_file_a_string_or_json(recipe):
    expected = {"hidden_size": 32, "pos_encodings": "none", "halt_exploration_prob": 0.5, "mlp_t": True}
    path = recipe({"config_overrides": expected})
    (from_mapping,) = parse_recipe([ModelArguments], ["--recipe", path])
    text = "hidden_size=32, pos_encodings=none,halt_exploration_prob=0.5,mlp_t=true"
    for overrides in (from_mapping.config_overrides, text, json.dumps(expected)):
        assert parse_overrides(overrides) == expected
    assert parse_overrides(None) == parse_overrides("") == {}


def test_overrides_take_numbers_lists_and_mappings():
    assert parse_overrides("a=1e-5,b=x,c=.5,d=012") == {"a": 1e-5, "b": "x", "c": 0.5, "d": "012"}
    for text in ("a={x: 1e-3, y: [2, 3]}, b=2024-01-01", "{a: {x: 1e-3, y: [2, 3]}, b: 2024-01-01}"):
        assert parse_overrides(text) == {"a": {"x": 1e-3, "y": [2, 3]}, "b": "2024-01-01"}


def test_flag_overrides_are_merged_with_those_of_the_recipe(recipe):
    path = recipe({"model_type": "hrm_lm", "config_overrides": {"hidden_size": 32, "halt_max_steps": 2}})
    (arguments,) = parse_recipe([ModelArguments], ["--recipe", str(path), "--config_overrides", "halt_max_steps=3"])
    assert parse_overrides(arguments.config_overrides) == {"hidden_size": 32, "halt_max_steps": 3}
    other = ["--recipe", str(path), "--model_type", "llama", "--config_overrides", "num_hidden_layers=1"]
    (arguments,) = parse_recipe([ModelArguments], other)
    assert parse_overrides(arguments.config_overrides) == {"num_hidden_layers": 1}  # without the recipe's


def test_a_fresh_config_is_preset_then_data_then_overrides():
    arguments = ModelArguments(model_type="hrm_puzzle", preset="hrm-small", config_overrides="H_cycles=3,vocab_size=9")
    config = build_config(arguments, **FROM_DATA)
    assert isinstance(config, HrmPuzzleConfig)
    assert (config.hidden_size, config.seq_len, config.H_cycles, config.vocab_size) == (32, 16, 3, 9)
    assert config.grid_shape == [4, 4] and config.num_puzzle_identifiers == 3
    without_preset = build_config(ModelArguments(model_type="trm_puzzle"), **FROM_DATA)
    assert isinstance(without_preset, TrmPuzzleConfig) and without_preset.hidden_size == 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_type": "hrm_puzle"}, "model_type 'hrm_puzle'.*'hrm_puzzle'"),
        ({"preset": "hrm-27"}, "'hrm-27'.*hrm_puzzle.*'hrm-27m'"),
        ({"config_overrides": "hiden_size=4"}, "hrm_puzzle 'hiden_size'.* 'hidden_size'"),
        ({"config_overrides": "hidden_size"}, "config_overrides=hidden_size: 'hidden_size'"),
        ({"config_overrides": "hidden_size=30,num_attention_heads=4"}, "hidden_size=30.*num_attention_heads=4"),
        ({"config_overrides": "hidden_size=big"}, r"\}: .*hidden_size.*big"),
        ({"config_overrides": "seq_len=15"}, r"grid_shape=\[4, 4\].*seq_len=15"),
        ({"config_overrides": '{"hidden_size": 4'}, r'config_overrides=\{"hidden_size": 4 '),
    ],
)  # fmt: skip
def test_invalid_config_is_named(arguments, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        build_config(ModelArguments(**{"model_type": "hrm_puzzle", **arguments}), **FROM_DATA)


# ---- writing ----


def saved_and_read(tmp_path, *args):
    first = parse_recipe(CLASSES, ["--output_dir", str(tmp_path / "run"), "--report_to", "none", *args])
    save_recipe(tmp_path / "saved.yaml", *first)
    return first, parse_recipe(CLASSES, ["--recipe", str(tmp_path / "saved.yaml")])


def differences(first, second) -> dict[str, tuple]:
    found = {}
    for a, b in zip(first, second):
        for one in fields(a):
            pair = getattr(a, one.name, None), getattr(b, one.name, None)
            if one.init and pair[0] != pair[1]:
                found[one.name] = pair
    return {name: pair for name, pair in found.items() if name != "hub_token"}  # never saved


def test_a_saved_recipe_alone_gives_the_same_values(tmp_path):
    args = (
        "--model_type trm_puzzle --config_overrides hidden_size=32,mlp_t=true --data_path data/x --max_steps 7 "
        "--learning_rate 3e-4 --ema_rate 0.99 --drop_unplaced_rows true --use_cpu true --eval_strategy steps "
        "--eval_steps 4 --puzzle_emb_lr 0.02 --lr_min_ratio 0.1 --max_train_samples 5 --seed 3"
    )
    first, read = saved_and_read(tmp_path, *args.split())
    assert differences(first, read) == {} and read[-1].hub_token is None


def test_a_saved_recipe_keeps_options_that_were_switched_off(tmp_path, recipe):
    first, read = saved_and_read(tmp_path, "--recipe", recipe({"lr_min_ratio": None, "eval_split": None}))
    assert differences(first, read) == {} and read[-1].lr_min_ratio is None


def test_results_name_task_metrics_and_versions(tmp_path):
    write_results(tmp_path, "sudoku", {"exact_accuracy": 0.5}, train_seconds=1.5, parameters=7)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results.pop("versions").keys() >= {"python", "hrm_hf", "torch", "transformers", "accelerate", "datasets"}
    assert results == {"task": "sudoku", "metrics": {"exact_accuracy": 0.5}, "train_seconds": 1.5, "parameters": 7}


# ---- the package's recipes ----


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_parses_and_builds_its_model(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = {one.name for part in CLASSES for one in fields(part)}
    model_args, data_args, args = parse_recipe(CLASSES, ["--recipe", str(path), "--use_cpu", "true"])
    assert load_recipe(path, known)["output_dir"] == args.output_dir and data_args.data_path
    if model_args.model_name_or_path is None:
        assert build_config(model_args, **FROM_DATA).num_puzzle_identifiers == 3


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_data_command_of_every_recipe_is_valid(path, tmp_path):
    command = yaml.safe_load(path.read_text()).get("build_data")
    if command:
        name, *args = shlex.split(command)
        typer.main.get_command(data_app).commands[name].make_context(name, [*args, "--out", str(tmp_path / "out")])


# Shows the help of each script in turn, then prints the heavy libraries that have been loaded.
HELP = """
import contextlib, runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
print([name for name in ("torch", "accelerate", "datasets", "peft") if sys.modules.get(name)])
"""


def test_help_of_the_training_scripts_lists_every_option_and_imports_no_torch():
    pytest.importorskip("trl")
    scripts = sorted((ROOT / "training").glob("run_*.py"))
    done = subprocess.run([sys.executable, "-c", HELP, *scripts], capture_output=True, text=True, check=True)
    shown = [set(re.findall(r"--[\w-]+", each)) for each in done.stdout.split("usage: ")[1:]]
    assert done.stderr == "" and done.stdout.endswith("\n[]\n")
    wanted = [docs_pages.script_options(each.stem) - {"-h", "--help"} for each in scripts]
    assert len(shown) == 8 and all(options <= own for options, own in zip(wanted, shown))
