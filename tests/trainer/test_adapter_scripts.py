"""Adapters and new puzzles through the training scripts; everything that loads models loads their folders.

Referees: PEFT's and transformers' own loading, and `evaluate_puzzles` and cross-entropy on what was saved.
"""

import json
import runpy
import sys

import every
import numpy as np
import pytest
import tiny
import tiny_cosmo
import tiny_go
import torch
import yaml
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from script_runs import RECIPE, SCRIPTS, losses, names, renamed_boards
from tolerances import assert_equal_but_for_rounding, differ_beyond_rounding
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer, pipeline

from hrm_hf import AutoModelForPuzzleSolving
from hrm_hf.puzzles.dataloader import PuzzleRows
from hrm_hf.text.arguments import LmDataArguments, LmTrainingArguments
from hrm_hf.trainer.adapters import TuningArguments
from hrm_hf.trainer.recipes import ModelArguments, load_recipe, parse_recipe


ADAPTER = {"adapter_config.json", "adapter_model.safetensors", "recipe.yaml", "results.json", "trainer_state.json"}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a script in this process, and return its output folder: `run("run_clm", "name", option=value, ...)`."""

    def start(script, name, **options):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**RECIPE, "output_dir": str(tmp_path / name), **options}))
        monkeypatch.setattr(sys, "argv", [script, "--recipe", str(path)])
        # Not as "__main__", which would block the signals of the tests.
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name=script)["main"]()
        return tmp_path / name

    return start


def logits(architecture: str, model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**every.inputs(architecture)).logits


# ---- language models ----


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"Line {number}: the cat sat on mat {number % 7}.\n" for number in range(200)))
    return {"train_data": str(path), "data_cache_dir": str(path.parent / "cache"), "block_size": 32}


def test_language_model_adapter_loads_everywhere(run, text, tmp_path):
    base = every.save("rlm_mhc", tmp_path / "base")
    out = run("run_clm", "adapter", model_name_or_path=str(base), lora_rank=4, prompt="Line", **text)
    assert ADAPTER | {"tokenizer_config.json", "training.png"} <= names(out)
    assert not names(out) & {"model.safetensors", "config.json"}
    assert yaml.safe_load((out / "recipe.yaml").read_text())["lora_rank"] == 4
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    expected = logits("rlm_mhc", PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out))
    for loaded in (AutoPeftModelForCausalLM.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)):
        assert_equal_but_for_rounding(logits("rlm_mhc", loaded), expected)
    writer = pipeline("text-generation", model=str(out), tokenizer=AutoTokenizer.from_pretrained(out))
    assert_equal_but_for_rounding(logits("rlm_mhc", writer.model), expected)
    assert writer("Line", max_new_tokens=4, do_sample=False)[0]["generated_text"].startswith("Line")

    # Training continues from it, and the merged result is an ordinary checkpoint.
    more = run("run_clm", "more", adapter=str(out), merge_adapter=True, **text)
    assert {"model.safetensors", "config.json", "README.md"} <= names(more)
    assert not names(more) & {"adapter_config.json", "adapter_model.safetensors"}
    assert yaml.safe_load((more / "recipe.yaml").read_text())["model_name_or_path"] == str(base)
    assert losses(more)[0] < losses(out)[0]
    assert differ_beyond_rounding(logits("rlm_mhc", AutoModelForCausalLM.from_pretrained(more)), expected)


def test_quantized_weights_train_through_the_script(run, text, tmp_path):
    pytest.importorskip("bitsandbytes")
    base = every.save("hrm_lm", tmp_path / "base")
    out = run("run_clm", "qlora", model_name_or_path=str(base), lora_rank=4, load_in="4bit", max_steps=2, **text)
    assert ADAPTER <= names(out)
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (base, out))
    assert differ_beyond_rounding(logits("hrm_lm", before), logits("hrm_lm", after))


def test_the_go_coder_trains_an_adapter(run, tmp_path):
    base = every.save("hrm_go_coder", tmp_path / "base")
    tiny_go.write(tmp_path / "train.jsonl", tiny_go.records(12))
    options = {"train_data": str(tmp_path / "train.jsonl"), "max_length": 256, "plan_budget": 48}
    options |= {"model_name_or_path": str(base), "lora_rank": 4, "refinement_ramp": 0, "max_steps": 2}
    out = run("run_go_coder", "adapter", **options, eval_data=str(tmp_path / "train.jsonl"))
    assert ADAPTER | {"tokenizer_config.json"} <= names(out) and "config.json" not in names(out)
    saved = load_file(out / "adapter_model.safetensors")
    assert any("refinement_head" in name for name in saved)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert differ_beyond_rounding(logits("hrm_go_coder", loaded), logits("hrm_go_coder", every.model("hrm_go_coder")))


# ---- regressors ----


@pytest.fixture(scope="module")
def maps(tmp_path_factory):
    return tiny_cosmo.build(tmp_path_factory.mktemp("data") / "maps")


@pytest.mark.parametrize("preset", ["hrm_cosmo", "cosmo_cnn"])
def test_a_regressor_trains_an_adapter_and_merges_one(run, maps, preset, tmp_path):
    options = {"data_path": maps, "val_samples": 10, "max_test_samples": 0, "max_steps": 2}
    base = run("run_cosmo", "base", model_type=preset, preset="test", **options)
    options |= {"model_name_or_path": str(base), "lora_rank": 4}
    out = run("run_cosmo", "adapter", **options)
    assert ADAPTER | {"preprocessor_config.json"} <= names(out) and "config.json" not in names(out)
    scale = json.loads((base / "config.json").read_text())["posterior_scale"]
    assert json.loads((out / "results.json").read_text())["posterior_scale"] == scale  # the model that a loader finds
    loaded = AutoModelForImageClassification.from_pretrained(out)
    base_logits = logits(preset, AutoModelForImageClassification.from_pretrained(base))
    assert differ_beyond_rounding(logits(preset, loaded), base_logits)
    merged = run("run_cosmo", "merged", merge_adapter=True, **options)
    results = json.loads((merged / "results.json").read_text())
    assert json.loads((merged / "config.json").read_text())["posterior_scale"] == results["posterior_scale"] != scale


# ---- puzzles ----


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Save a data set with as many identifiers as the tiny models have, and a model."""
    folder = tmp_path_factory.mktemp("known")
    tiny.model("trm", task="sudoku", box_shape=[2, 2], undecided=False, halt_max_steps=2).save_pretrained(
        folder / "base"
    )
    return {"base": str(folder / "base"), "data": renamed_boards(folder / "boards", tiny.PUZZLES)}


def test_an_adapter_of_a_puzzle_model_contains_its_table(run, known, tmp_path):
    options = {"model_name_or_path": known["base"], "data_path": known["data"], "lora_rank": 4, "use_dora": False}
    out = run("run_puzzle", "adapter", **options, puzzle_emb_lr=0.1)
    assert ADAPTER | {"identifiers.json", "evaluation.png"} <= names(out) and "model.safetensors" not in names(out)
    base = AutoModelForPuzzleSolving.from_pretrained(known["base"])
    expected = PeftModel.from_pretrained(AutoModelForPuzzleSolving.from_pretrained(known["base"]), out)
    table = load_file(out / "adapter_model.safetensors")["base_model.model.model.puzzle_emb.weight"]
    moved = (table - base.model.puzzle_emb.weight).abs().amax(dim=1) > 0
    assert not moved[0] and moved[1:].any()  # the blank identifier is in no row
    loaded = AutoModelForPuzzleSolving.from_pretrained(out)
    assert_equal_but_for_rounding(logits("trm_puzzle", loaded), logits("trm_puzzle", expected))
    assert differ_beyond_rounding(logits("trm_puzzle", loaded), logits("trm_puzzle", base))
    solver = pipeline("puzzle-solving", model=str(out))
    assert_equal_but_for_rounding(logits("trm_puzzle", solver.model), logits("trm_puzzle", expected))
    assert len(solver([[1, 0, 0, 0], [0, 0, 3, 0], [0, 4, 0, 0], [0, 0, 0, 2]])["grid"]) == 4


def test_adapters_and_puzzle_tables_of_other_sizes_do_not_mix(run, known, tmp_path):
    more = renamed_boards(tmp_path / "more", 8)
    options = {"model_name_or_path": known["base"], "data_path": more, "puzzle_embeddings": "extend", "max_steps": 1}
    with pytest.raises(ValueError, match=r"puzzle identifiers.*\b8\b.*\b5\b.*adapter"):
        run("run_puzzle", "refused", **options, lora_rank=4)
    merged = run("run_puzzle", "merged", **options, lora_rank=4, merge_adapter=True)
    assert AutoModelForPuzzleSolving.from_pretrained(merged).config.num_puzzle_identifiers == 8
    with pytest.raises(ValueError, match=r"freeze_weights.*lora_rank"):
        run("run_puzzle", "both", **options, lora_rank=4, merge_adapter=True, freeze_weights=True)


def test_the_table_alone_learns_new_puzzles(run, known, tmp_path):
    """New digit permutations for a model trained on others: the weights stay bit-identical."""
    many = renamed_boards(tmp_path / "many", 17)
    options = {"logging_steps": 50, "per_device_train_batch_size": 16, "eval_max_steps": 2}
    base = run(
        "run_puzzle", "base", model_name_or_path=known["base"], data_path=many, puzzle_embeddings="extend",
        max_steps=160, learning_rate=3e-3, puzzle_emb_lr=1e-2, weight_decay=0.1, **options,
    )  # fmt: skip
    new = renamed_boards(tmp_path / "new", 7, seed=5)
    out = run(
        "run_puzzle", "table", model_name_or_path=str(base), data_path=new, puzzle_embeddings="reset",
        freeze_weights=True, max_steps=60, puzzle_emb_lr=2e-2, puzzle_emb_weight_decay=0.0, **options,
    )  # fmt: skip
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    table = "model.puzzle_emb.weight"
    for name in before.keys() - {table}:
        assert torch.equal(before[name], after[name]), name
    assert after[table].shape == (7, 32) and len(after[table][1:].unique(dim=0)) == 6

    untrained = AutoModelForPuzzleSolving.from_pretrained(base)
    untrained.adapt_puzzle_embeddings(7, "reset")
    trained = AutoModelForPuzzleSolving.from_pretrained(out)
    from hrm_hf.puzzles.dataset import load_puzzle_dataset

    held_out = PuzzleRows(load_puzzle_dataset(new, "test"))
    rows = held_out.batch(np.arange(len(held_out)))
    nats, right = [], []
    for model in (untrained.eval(), trained.eval()):
        with torch.no_grad():
            found = model.solve(rows["input_ids"], rows["puzzle_identifiers"], halt="fixed").logits.flatten(0, 1)
        labels = rows["labels"].long().flatten()
        nats.append(torch.nn.functional.cross_entropy(found, labels).item())
        right.append((found.argmax(-1) == labels).double().mean().item())
    print(f"held-out cells of new puzzles: {nats} nats, {right} right, with an untrained table and a trained one")
    assert nats[1] < nats[0] and right[1] > right[0] + 0.2
    results = json.loads((out / "results.json").read_text())
    assert results["metrics"]["count"] == 40 and results["steps"] == 60
    assert json.loads((out / "identifiers.json").read_text())[1] == "renaming 1"


# ---- the recipe ----


def test_the_recipe_of_an_adapter_parses():
    path = SCRIPTS / "recipes" / "hrm_lm_lora_cpu.yaml"
    classes = (ModelArguments, LmDataArguments, LmTrainingArguments, TuningArguments)
    model_args, _, args, tuning_args = parse_recipe(classes, ["--recipe", str(path)])
    assert tuning_args.lora_rank and tuning_args.saves_adapter and model_args.model_name_or_path
    assert load_recipe(path, {"lora_rank", *yaml.safe_load(path.read_text())})["output_dir"] == args.output_dir
