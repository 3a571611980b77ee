"""`training/run_clm.py` from a text file to a results folder, for every causal language model.

Referee of the reported figures: the saved folder, loaded by transformers alone, and cross-entropy from torch.
"""

import importlib.util
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from hrm_hf.io.files import BadLineError


SCRIPT = Path(__file__).parents[2] / "training" / "run_clm.py"
WIDTHS = "hidden_size=32,intermediate_size=64,num_attention_heads=2"
MODELS = {
    "llama": f"{WIDTHS},num_hidden_layers=2",
    "gpt2": "n_embd=32,n_head=2,n_layer=2",
    "hrm_text": f"{WIDTHS},head_dim=16,num_hidden_layers=1",
    "hrm_lm": f"{WIDTHS},num_h_layers=1,num_l_layers=1,L_cycles=2,bp_steps=3,halt_max_steps=2",
    "rlm_mhc": f"{WIDTHS},num_hidden_layers=2",
}
BLOCK = 32


@pytest.fixture(scope="module")
def script():
    """Import the script as a module."""
    spec = importlib.util.spec_from_file_location("run_clm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write a folder with 120 short documents in a JSON Lines file and a cache."""
    folder = tmp_path_factory.mktemp("data")
    lines = [{"text": f"Document {number}: the cat é sat on mat {number % 7}.\n"} for number in range(120)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def run(script, data, tmp_path, monkeypatch, capsys):
    """Run `main()`, and return folder and results: `run("name", option=value, ...)`."""

    def run_main(name, model_type="llama", **options):
        out = tmp_path / name
        recipe = {
            "model_type": model_type, "config_overrides": MODELS[model_type], "tokenizer_name": "byte",
            "train_data": str(data / "train.jsonl"), "data_cache_dir": str(data / "cache"), "block_size": BLOCK,
            "max_steps": 4, "per_device_train_batch_size": 4, "warmup_steps": 1, "learning_rate": 1e-3,
            "logging_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
            "output_dir": str(out), **options,
        }  # fmt: skip
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in recipe.items() if value is not None}))
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--recipe", str(path)])
        script.main()
        results = json.loads((out / "results.json").read_text())
        return out, {**results, "printed": capsys.readouterr().out}

    return run_main


def losses(out: Path) -> dict[int, float]:
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def held_out_loss(out: Path) -> tuple[float, float]:
    """Recompute nats and UTF-8 bytes per token of the last 5 % of the documents from the saved model."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    texts = [f"Document {number}: the cat é sat on mat {number % 7}.\n" for number in range(114, 120)]
    tokens = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    total = count = 0
    for start in range(0, len(tokens), BLOCK):
        ids = torch.tensor(tokens[start : start + BLOCK])
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        total += torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum").item()
        count += len(ids) - 1
    return total / count, len("".join(texts).encode()) / len(tokens)


def test_interrupt_in_the_final_evaluation_names_the_saved_model(run, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("hrm_hf.text.trainer.CausalLMTrainer.evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt, match=f"saved in {tmp_path}/run"):
        run("run", max_steps=1, validation_split_percentage=5)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").num_parameters() > 0


@pytest.mark.parametrize("model_type", MODELS)
def test_run_saves_the_model_and_all_result_files(run, model_type):
    out, results = run("run", model_type, prompt="Doc", prompt_new_tokens=8)
    expected = {
        "model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "recipe.yaml", "results.json",
        "training.png", "trainer_state.json",
    }  # fmt: skip
    assert expected <= {path.name for path in out.iterdir()}
    assert results["task"] == "causal-lm" and results["steps"] == 4 and results["tokens"] == 4 * 4 * BLOCK
    assert results["bad_lines"] == 0 and results["data"]["train"]["documents"] == 114
    assert results["parameters"] == AutoModelForCausalLM.from_pretrained(out).num_parameters()
    assert results["sample"].startswith("Doc") and results["sample"] in results["printed"]
    assert (out / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((out / "config.json").read_text())["use_cache"] is True

    if model_type in ("hrm_lm", "rlm_mhc"):  # our models have a card with the metrics
        assert f"{results['metrics']['bits_per_byte']:.4g}"[:4] in (out / "README.md").read_text()

    loss, bytes_per_token = held_out_loss(out)
    metrics = results["metrics"]
    assert metrics["lm_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(loss / math.log(2) / bytes_per_token, rel=1e-5)


def test_a_run_without_a_recipe_prints_its_options_and_logs_loss_and_amax(run):
    """A small version of the RLM-mHC guide's quick test, with fewer steps than --logging_steps and warm-up."""
    given = dict.fromkeys(("disable_tqdm", "warmup_steps", "logging_steps", "learning_rate"))
    with pytest.warns(UserWarning, match="^warmup_steps=1000: .* 4 steps"):
        _, results = run("run", "rlm_mhc", config_overrides=f"{MODELS['rlm_mhc']},vocab_size=300", **given)
    options = r"4 steps, 4 rows.*learning rate 0\.0003 \(cosine, warm-up 1,000 steps\)"
    for text in (options, "36 unused", r"step +4  loss +\d", r"step +4  Amax pre \d.*post \d.*composite \d"):
        assert re.search(text, results["printed"])


def test_a_saved_recipe_repeats_its_run(run, tmp_path, script, monkeypatch):
    first, _ = run("first", document_mask=True, mix_probabilities=[1.0])
    arguments = ["--recipe", str(first / "recipe.yaml"), "--output_dir", str(tmp_path / "second")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    script.main()
    assert losses(tmp_path / "second") == losses(first)


@pytest.mark.parametrize("streaming", [False, True])
def test_resumed_run_has_the_losses_of_an_uninterrupted_run(run, streaming):
    source = {"streaming": True, "max_eval_samples": 3, "shuffle_buffer": 8} if streaming else {}
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5, **source}
    whole, _ = run("whole", "hrm_lm", **options)
    run("whole", "hrm_lm", **options, resume_from_checkpoint=str(whole / "checkpoint-2"))
    resumed = losses(whole)
    alone, _ = run("alone", "hrm_lm", **options)
    assert sorted(resumed) == [1, 2, 3, 4, 5] and resumed == losses(alone)


def test_a_rejected_resume_leaves_the_recipe_of_the_run(run):
    options = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    out, results = run("run", **options)
    before = (out / "recipe.yaml").read_text()
    with pytest.raises(ValueError, match=r"^max_steps=3, .*checkpoint-4"):
        run("run", **options, max_steps=3, resume_from_checkpoint="last")
    assert (out / "recipe.yaml").read_text() == before and "(constant, no warm-up)" in results["printed"]


def test_saved_weights_are_trained_further(run):
    positions = {"config_overrides": f"{MODELS['llama']},max_position_embeddings={BLOCK}"}
    first, before = run("first", **positions)
    options = {"tokenizer_name": None, "config_overrides": None, "block_size": None}
    second, after = run("second", model_name_or_path=str(first), **options)
    assert losses(second)[1] < losses(first)[1] and after["parameters"] == before["parameters"]
    assert yaml.safe_load((second / "recipe.yaml").read_text())["block_size"] == BLOCK  # the default is the maximum


def test_the_best_model_is_kept_and_training_stops_when_it_gets_no_better(run):
    out, results = run(
        "run", max_steps=40, learning_rate=30.0, eval_strategy="steps", eval_steps=1, early_stopping_patience=2,
        save_strategy="steps", save_steps=1,
    )  # fmt: skip
    state = json.loads((out / "trainer_state.json").read_text())
    evaluations = [entry["eval_lm_loss"] for entry in state["log_history"] if "eval_lm_loss" in entry]
    assert results["steps"] < 40 and state["best_metric"] == min(evaluations)
    assert results["metrics"]["lm_loss"] == pytest.approx(min(evaluations), rel=1e-6)


def test_a_broken_line_stops_the_run_or_is_counted_in_the_results(run, data):
    path = data / "broken.jsonl"
    path.write_text((data / "train.jsonl").read_text() + '{"text": \n' + json.dumps({"text": 5}) + "\n")
    with pytest.raises(BadLineError, match=r"broken.jsonl, line 121: .*character 10"):
        run("stopped", train_data=str(path))
    _, results = run("skipped", train_data=str(path), on_bad_line="skip")
    assert results["bad_lines"] == 2
    assert "broken.jsonl, line 122: 'text' is 5" in results["data"]["train"]["bad_lines"][1]
    assert "line 121" in results["printed"]


def test_run_without_text_names_the_missing_option(run):
    with pytest.raises(ValueError, match="--train_data"):
        run("run", train_data=None)
