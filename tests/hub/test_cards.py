"""Model cards of every architecture. Referees: huggingface_hub reads the cards, Python runs their examples.

test_cli_solve.py tests `hrm-hf eval puzzles --update-card`.
"""

import json
import re
import subprocess
import sys

import every
import pytest
import yaml
from hub_server import HubServer
from huggingface_hub import ModelCard, ModelCardData, constants, parse_eval_result_entries
from huggingface_hub.repocard import metadata_load
from huggingface_hub.repocard_data import model_index_to_eval_results
from transformers import AutoModelForCausalLM

from hrm_hf import HrmPuzzleConfig, HrmPuzzleForSolving
from hrm_hf.hub.cards import card_for_repository, new_card_text, record_evaluation
from hrm_hf.models.modeling_hrm_go_coder import HrmGoCoderForCausalLM
from hrm_hf.registry import CLASSIFIERS


METRICS = {"eval_loss": 2.5, "eval_perplexity": 12.18, "eval_bits_per_byte": 1.9, "eval_runtime": 7.0, "epoch": 3.0}
TASKS = {
    **dict.fromkeys(every.PUZZLES, "puzzle-solving"),
    **dict.fromkeys(every.CAUSAL_LMS, "text-generation"),
    **dict.fromkeys(every.REGRESSORS, "cosmology-regression"),
    **dict.fromkeys(every.MASS_MAPPERS, "mass-mapping"),
}
# What only the card of this architecture and of this config says.
SAID = {
    "hrm_puzzle": "Hierarchical Reasoning Model (`hrm_puzzle`: HRM, ACT-v1",
    "trm_puzzle": "One small network updates both latent states",
    "se_rrm_puzzle": "treats all symbols alike",
    "hrm_lm": "up to 3 segments",
    "rlm_mhc": "with 4 residual streams",
    "hrm_go_coder": "A planner and a code generator for Go",
    "hrm_cosmo": "omega_m from 0.1 to 0.5 and sigma_8 from 0.6 to 1",
    "cosmo_cnn": "omega_m from 0.1 to 0.5 and sigma_8 from 0.6 to 1",
    "hrm_mass_mapping": "applies the adjoint of the lensing operator",
    "cosmo_unet": "A U-Net (`cosmo_unet`) that makes mass maps",
}
RECIPE = {
    "model_name_or_path": "someone/weights",
    "train_data": ["/home/me/tinyshakespeare.txt.gz", "allenai/c4:en", "mine.txt"],
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 2e-3, "optim": "adamw_torch",
    "lr_scheduler_type": "cosine", "warmup_steps": 50.0, "bf16": True, "seed": 7,
}  # fmt: skip
RESULTS = {"steps": 600, "tokens": 1228800, "train_seconds": 288.5, "versions": {"torch": "2.13.0"}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A saved model of each architecture with its card: folders by name."""
    root = tmp_path_factory.mktemp("checkpoints")
    folders = {name: every.save(name, root / f"my-{name}") for name in every.ARCHITECTURES}
    for folder in folders.values():
        record_evaluation(folder, METRICS, "books", "validation", None)
    return folders


@pytest.fixture
def checkpoint(tmp_path):
    return every.save("rlm_mhc", tmp_path / "my-model")


def examples(text: str) -> list[str]:
    """The Python blocks of a card."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("name", every.ARCHITECTURES)
def test_card_names_architecture_parameters_use_data_license_and_limits(name, checkpoints):
    text, model = new_card_text(checkpoints[name]), every.model(name)
    assert f"{model.num_parameters():,} parameters" in " ".join(text.split()) and f"`{name}`" in text
    assert SAID[name] in " ".join(text.split()) and "$" not in text
    field = "hidden_sizes" if name in ("cosmo_cnn", "cosmo_unet") else "hidden_size"
    assert f"| {field} | {getattr(model.config, field)} |" in text
    headings = ["Use", "Training", "Training data", "Results", "Architecture", "Limits", "License"]
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == headings
    assert "The weights: not stated" in text and "Not stated yet" in text and "trust_remote_code=True" in text
    assert 'revision="main"' in text and "None recorded yet" in text


@pytest.mark.parametrize("name", every.ARCHITECTURES)
def test_card_metadata_round_trips_through_the_library(name, checkpoints):
    raw = metadata_load(checkpoints[name] / "README.md")
    assert ModelCardData(**raw).to_dict() == raw
    assert raw["library_name"] == "transformers" and raw["license"] == "unknown" and name in raw["tags"]
    assert raw["pipeline_tag"] == TASKS[name]
    model_name, results = model_index_to_eval_results(raw["model-index"])
    assert model_name == f"my-{name}" and {result.task_type for result in results} == {TASKS[name]}


def test_the_hub_accepts_the_cards(checkpoints, tmp_path, monkeypatch):
    with HubServer(tmp_path) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for folder in checkpoints.values():
            ModelCard.load(folder / "README.md").validate()
        assert hub.requests == [("POST", "/api/validate-yaml")] * len(checkpoints)


@pytest.mark.parametrize("name", every.ARCHITECTURES)
def test_results_are_in_the_model_index_the_table_and_the_files_of_results_without_speed(name, checkpoints):
    card = ModelCard.load(checkpoints[name] / "README.md")
    wanted = {"loss": 2.5, "perplexity": 12.18, "bits_per_byte": 1.9}
    assert {result.metric_name: result.metric_value for result in card.data.eval_results} == wanted
    assert re.search(r"^\| books \| validation \| .*perplexity 12\.18[ ,].*\|$", card.text, re.MULTILINE)
    files = list((checkpoints[name] / ".eval_results").iterdir())
    entries = parse_eval_result_entries(yaml.safe_load(files[0].read_text()))
    assert [file.name for file in files] == ["books.yaml"]
    assert {entry.task_id: entry.value for entry in entries} == wanted
    assert {(entry.dataset_id, entry.notes) for entry in entries} == {("books", "split=validation")}


@pytest.mark.parametrize("name", every.ARCHITECTURES)
def test_the_examples_of_a_card_run(name, checkpoints, monkeypatch):
    if name == "hrm_go_coder":
        pytest.importorskip("tree_sitter_go")
    folder = checkpoints[name]
    monkeypatch.chdir(folder.parent)  # here, the card's model name is a folder
    blocks = examples(new_card_text(folder))
    assert len(blocks) == (3 if name == "hrm_go_coder" else 2)
    for block in blocks:
        exec(compile(block, f"card of {name}", "exec"), {})


@pytest.mark.parametrize("auto_class", CLASSIFIERS, ids=CLASSIFIERS.values())
@pytest.mark.parametrize("name", every.CAUSAL_LMS)
def test_the_card_of_a_classifier_names_its_task_and_its_examples_label(
    name, auto_class, tmp_path, monkeypatch, capsys
):
    fields = {"unified": True, "generator_layers": 0} if name == "hrm_go_coder" else {}
    config = every.model(name, **fields).config
    config.id2label = {0: "prose", 1: "verse"}
    auto_class.from_config(config).save_pretrained(tmp_path / "labels")
    every.processor(name).save_pretrained(tmp_path / "labels")
    text = new_card_text(tmp_path / "labels")
    assert (
        f"pipeline_tag: {CLASSIFIERS[auto_class]}" in text and "prose, verse" in text and "max_new_tokens" not in text
    )
    monkeypatch.chdir(tmp_path)
    for block in examples(text):
        exec(compile(block, f"card of {name}", "exec"), {})
    said = capsys.readouterr().out
    assert ("prose" in said or "verse" in said or "[]" in said) and "tensor" in said


@pytest.mark.slow
def test_the_examples_for_a_process_without_the_package_run_there(checkpoints, tmp_path):
    blocks = {
        name: [b for b in examples(new_card_text(f)) if "trust_remote_code" in b] for name, f in checkpoints.items()
    }
    assert {len(found) for found in blocks.values()} == {1}
    (tmp_path / "blocks.json").write_text(json.dumps({name: found[0] for name, found in blocks.items()}))
    script = """
import json, sys
sys.modules["hrm_hf"] = None  # importing it is an error
for name, block in json.load(open(sys.argv[1])).items():
    print("running", name, flush=True)
    exec(compile(block, name, "exec"), {})
print("all ran")
"""
    command = [sys.executable, "-c", script, str(tmp_path / "blocks.json")]
    root = checkpoints["hrm_lm"].parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and "all ran" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("task", ["sudoku", "maze", "arc"])
def test_card_example_puzzle_fits_the_model(task, tmp_path, monkeypatch):
    shapes = {"sudoku": ([9, 9], 11), "maze": ([6, 7], 6), "arc": ([30, 30], 12)}
    grid, vocabulary = shapes[task]
    fields = {"task": task, "grid_shape": grid, "seq_len": grid[0] * grid[1], "vocab_size": vocabulary}
    fields |= {"hidden_size": 16, "num_attention_heads": 1, "H_layers": 1, "L_layers": 1, "halt_max_steps": 1}
    model = HrmPuzzleForSolving(HrmPuzzleConfig(**fields, puzzle_emb_ndim=16, num_puzzle_identifiers=2))
    model.save_pretrained(tmp_path / "it")
    (tmp_path / "it" / "identifiers.json").write_text('["<blank>", "007bbfb7"]')
    monkeypatch.chdir(tmp_path)
    text = new_card_text(tmp_path / "it")
    assert ("007bbfb7" in text) == (task == "arc")
    for block in examples(text):
        exec(compile(block, task, "exec"), {})


def test_card_states_training_data_and_its_license(checkpoint):
    (checkpoint / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (checkpoint / "results.json").write_text(json.dumps(RESULTS))
    (checkpoint / "training.png").write_bytes(b"a picture")
    (checkpoint / "LICENSE").write_text("Apache License\nVersion 2.0, January 2004\n")
    text = new_card_text(checkpoint)
    for line in (
        "| weights it started from | someone/weights |",
        "| optimizer steps | 600 |",
        "| rows per step and process | 16 |",
        "| tokens seen, padding included | 1,228,800 |",
        "| optimizer | adamw_torch, learning rate 0.002 |",
        "| schedule | cosine, 50 warm-up steps |",
        "| precision | bfloat16 |",
        "| training time in seconds | 288.5 |",
        "| versions | torch 2.13.0 |",
        "| Tiny Shakespeare | public-domain text, from a repository under MIT (karpathy/char-rnn) |",
        "| C4 (allenai/c4) | ODC-BY-1.0 |",
        "| mine.txt | not stated |",
        "![Loss and metrics during training](training.png)",
        "`LICENSE` in this folder: Apache-2.0",
    ):
        assert line in text
    assert "hardware" not in text and "/home/me" not in text  # not recorded; private
    data = ModelCard(text).data
    assert (data.license, data.datasets, data.base_model) == ("apache-2.0", ["allenai/c4"], "someone/weights")


def test_card_states_recorded_hardware_puzzles_and_adapters(tmp_path):
    folder = every.save("trm_puzzle", tmp_path / "it")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"forward_dtype": "bfloat16"}))
    recipe = RECIPE | {"bf16": False, "lora_rank": 8, "use_dora": True, "load_in": "4bit"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "results.json").write_text(json.dumps(RESULTS | {"hardware": "8 x NVIDIA H200", "puzzles": 123456}))
    text = new_card_text(folder)
    for line in (
        "| hardware | 8 x NVIDIA H200 |",
        "| puzzles seen | 123,456 |",
        "| trained weights | adapters of rank 8 (DoRA), on a base loaded in 4bit |",
        "| precision | bfloat16 |",  # dtype of the activations, from the config of the puzzle model
    ):
        assert line in text


@pytest.mark.parametrize(
    "build, data, licence",
    [
        ("sudoku --size 9 --clues 50", "generated by `hrm-hf data sudoku`", "none needed"),
        ("sudoku --source hub:sapientinc/sudoku-extreme", "hub:sapientinc/sudoku-extreme", "not stated"),
        ("sudoku --source data/sudoku_hard_small.csv", "Sudoku Exchange puzzle bank", "public domain"),
        ("arc ARC-AGI/data ConceptARC/corpus --num-aug 9", "ARC-AGI-1 | Apache-2.0 |\n| ConceptARC", "MIT"),
        ("arc ARC-AGI-2/data", "ARC-AGI-2", "Apache-2.0"),
    ],
)
def test_data_build_command_is_reported_by_its_sources(build, data, licence, tmp_path):
    folder = every.save("trm_puzzle", tmp_path / "it")
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"build_data": build, "data_path": "runs/data/it"}))
    assert re.search(rf"\| {re.escape(data)}.* \| .*{licence}.*\|", new_card_text(folder))


def test_card_lists_counted_licenses_of_go_records(tmp_path):
    folder = every.save("hrm_go_coder", tmp_path / "it")
    (tmp_path / "report.json").write_text(json.dumps({"licences": {"BSD-3-Clause": 9886, "unknown": 3}}))
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"train_data": [str(tmp_path / "train.jsonl")]}))
    wanted = "| train.jsonl | BSD-3-Clause (9,886 records of the data set), unknown (3 records of the data set) |"
    assert wanted in new_card_text(folder)


def test_card_lists_licenses_of_test_sets_below_the_results(tmp_path):
    folder = every.save("hrm_go_coder", tmp_path / "it")
    text = record_evaluation(folder, {"pass@1": 0.5}, "humanevalpack-go", "test", 1).read_text()
    assert "Licenses of these data: HumanEvalPack Go, MIT" in text


def test_second_evaluation_replaces_the_first_and_keeps_edits(checkpoint):
    path = record_evaluation(checkpoint, METRICS, "books", "validation", 5)
    path.write_text(path.read_text().replace("Not stated yet", "Forty-nine old books. Not stated yet"))
    (checkpoint / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    record_evaluation(checkpoint, {**METRICS, "eval_perplexity": 9.0}, "books", "validation", 5)
    record_evaluation(checkpoint, METRICS, "org/letters", "test", 5, limit=10)
    text = path.read_text()
    assert "Forty-nine old books" in text and re.search(
        r"^\| books \| validation \| .*perplexity 9[ ,]", text, re.MULTILINE
    )
    assert text.count("| books | validation |") == text.count("| letters | test |") == 1  # a row each
    assert "| seed | 7 |" in text  # our training section is written again
    files = {file.name: yaml.safe_load(file.read_text()) for file in (checkpoint / ".eval_results").iterdir()}
    assert set(files) == {"books.yaml", "org--letters.yaml"} and len(files["books.yaml"]) == 3
    assert files["org--letters.yaml"][0]["notes"] == "split=test, limit=10"


def test_local_paths_do_not_become_hub_names(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint.parent)
    (checkpoint.parent / "runs").mkdir()
    recipe = {"model_name_or_path": "runs/base", "train_data": "runs/texts"}  # neither path exists any more
    (checkpoint / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    data = ModelCard(new_card_text(checkpoint)).data
    assert data.base_model is None and data.datasets is None
    assert "| weights it started from | base |" in new_card_text(checkpoint)


def test_a_broken_recipe_is_named(checkpoint):
    (checkpoint / "recipe.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match=r"recipe\.yaml: "):
        new_card_text(checkpoint)


def test_a_card_for_a_repository_loads_it_in_the_examples(checkpoint):
    record_evaluation(checkpoint, METRICS, "books", "validation", 5)
    text = card_for_repository(checkpoint, "org/other")
    assert 'model="org/other"' in text and 'from_pretrained("org/other"' in text and '"my-model"' not in text
    assert 'model="my-model"' in (checkpoint / "README.md").read_text()


def test_card_of_an_untagged_go_coder_mentions_no_plans(tmp_path):
    model = every.model("hrm_go_coder", tagged=False)
    model.save_pretrained(tmp_path)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), HrmGoCoderForCausalLM)
    text = new_card_text(tmp_path)
    assert "generate_with_refinement" not in text and "cannot plan" in text
