"""`training/run_go_coder.py` from records to a results folder, for the Go coder and for baselines.

Referee of the reported metrics: the saved folder, loaded by transformers, and cross-entropy from torch.
"""

import importlib.util
import json
import math
import sys
import time
from pathlib import Path

import pytest
import started
import tiny_go
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from hrm_hf.golang.arguments import GoDataArguments, GoTrainingArguments
from hrm_hf.golang.data.streams import IGNORED, GoStreamBuilder
from hrm_hf.hub.manifests import list_checkpoints
from hrm_hf.io.files import BadLineError
from hrm_hf.io.usage import UsageError
from hrm_hf.models.processing_hrm_go_coder import DECISION_TOKENS
from hrm_hf.trainer.recipes import ModelArguments, build_config, parse_recipe


FOLDER = Path(__file__).parents[2] / "training"
WIDTHS = "hidden_size=32,intermediate_size=64,num_attention_heads=2"
MODELS = {
    "hrm_go_coder": f"{WIDTHS},planner_layers=1,generator_layers=1",
    "llama": f"{WIDTHS},num_hidden_layers=2,tie_word_embeddings=true",
    "gpt2": "n_embd=32,n_head=2,n_layer=2",
}
STEPS = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "eval_data": None}


def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return load_script("run_go_coder")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder with records, a tokenizer, raw Go text, and a cache."""
    folder = tmp_path_factory.mktemp("go")
    tiny_go.write(folder / "train.jsonl", tiny_go.records(40))
    tiny_go.write(folder / "validation.jsonl", tiny_go.records(50)[43:])
    (folder / "raw.jsonl").write_text("".join(json.dumps({"text": tiny_go.solution(n)}) + "\n" for n in range(60)))
    tiny_go.tokenizer().save_pretrained(folder / "tokenizer")
    return folder


def recipe(data: Path, out: Path, model_type: str, **options) -> Path:
    values = {
        "model_type": model_type, "config_overrides": MODELS.get(model_type),
        "tokenizer_name": str(data / "tokenizer"), "train_data": str(data / "train.jsonl"),
        "eval_data": str(data / "validation.jsonl"), "max_length": 256, "plan_budget": 48,
        "data_cache_dir": str(data / "cache"), "max_steps": 4, "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 2, "warmup_steps": 1, "learning_rate": 1e-3, "logging_steps": 1,
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "output_dir": str(out),
        **options,
    }  # fmt: skip
    path = out.with_suffix(".yaml")
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}))
    return path


@pytest.fixture
def run(script, data, tmp_path, monkeypatch, capsys):
    """Run `main()`: `run("name", model_type, option=value)` returns the output folder and the results."""

    def run_main(name, model_type="hrm_go_coder", **options):
        path = recipe(data, tmp_path / name, model_type, **options)
        monkeypatch.setattr(sys, "argv", ["run_go_coder.py", "--recipe", str(path)])
        script.main()
        results = json.loads((tmp_path / name / "results.json").read_text())
        return tmp_path / name, {**results, "printed": capsys.readouterr().out}

    return run_main


def log(out: Path, *names: str) -> dict[int, list[float]]:
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: [entry.get(name) for name in names] for entry in history if names[0] in entry}


def expected_metrics(out: Path, data: Path) -> dict[str, float]:
    """Recompute nats per target and bits per byte of code on the validation records, one by one."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    builder = GoStreamBuilder(tokenizer, max_length=256)
    sums = dict.fromkeys(("nats", "targets", "code_nats", "bytes"), 0.0)
    for line in (data / "validation.jsonl").read_text().splitlines():
        row = builder.build(json.loads(line))
        ids, labels = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        nats = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
        counted = labels != IGNORED
        if model.config.model_type == "hrm_go_coder":  # its decision tokens belong to the refinement loss
            counted &= ~torch.isin(ids, torch.tensor(tokenizer.convert_tokens_to_ids(list(DECISION_TOKENS))))
        sums["nats"] += nats[counted[1:]].sum().item()
        sums["targets"] += counted.sum().item()
        sums["code_nats"] += nats[row["code_start"] - 1 : row["code_end"] - 1].sum().item()
        sums["bytes"] += row["code_bytes"]
    return {
        "lm_loss": sums["nats"] / sums["targets"],
        "bits_per_byte": sums["code_nats"] / sums["bytes"] / math.log(2),
        "scored_bytes": sums["bytes"],
    }


@pytest.mark.parametrize("model_type", MODELS)
def test_a_run_saves_model_recipe_and_results(run, data, model_type):
    out, results = run("run", model_type)
    expected = {
        "model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "recipe.yaml", "results.json",
        "training.png", "trainer_state.json",
    }  # fmt: skip
    assert expected <= {path.name for path in out.iterdir()}
    assert results["task"] == "go-coder" and results["steps"] == 4
    assert results["data"]["train"]["kept"] == 40 and results["data"]["validation"]["kept"] == 7
    assert results["parameters"] == AutoModelForCausalLM.from_pretrained(out).num_parameters()
    assert "train: 40 of 40 records" in results["printed"]
    metrics = expected_metrics(out, data)
    assert {name: results["metrics"][name] for name in metrics} == pytest.approx(metrics, rel=1e-5)
    if model_type == "hrm_go_coder":  # our model has a card with the metrics
        assert f"{results['metrics']['bits_per_byte']:.4g}"[:4] in (out / "README.md").read_text()
        parts = {"plan_loss", "code_loss", "refinement_loss", "refinement_accuracy", "plan_tokens", "decisions"}
        assert parts <= results["metrics"].keys()


def test_a_unified_model_learns_decisions_as_tokens(run):
    overrides = f"{WIDTHS},unified=true,planner_layers=2,generator_layers=0"
    _, results = run("run", config_overrides=overrides, lr_multipliers="planner=1.0")
    assert results["metrics"]["refinement_loss"] > 0 and "refinement_accuracy" not in results["metrics"]


# Millions of parameters with a vocabulary of 50,000 (16,384 for models of nano size).
SIZES = {
    "go_nano_cpu": 10.0, "go_base": 24.75, "go_wide": 27.9, "go_unified": 25.9, "gpt2_125m_baseline": 124.24,
    "llama_26m_baseline": 25.9, "llama_10m_baseline": 9.81, "gpt2_10m_baseline": 9.93,
}  # fmt: skip
SMALL = {"go_nano_cpu": {}, "llama_10m_baseline": {"vocab_size": 16384}, "gpt2_10m_baseline": {"vocab_size": 16384}}


@pytest.mark.parametrize("name", SIZES)
def test_every_recipe_builds_a_model_of_its_stated_size(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--recipe", str(FOLDER / "recipes" / f"{name}.yaml"), "--use_cpu", "true"]
    model_args, data_args, args = parse_recipe((ModelArguments, GoDataArguments, GoTrainingArguments), arguments)
    config = build_config(model_args, **SMALL.get(name, {"vocab_size": 50000}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() / 1e6 == pytest.approx(SIZES[name], abs=0.06)
    assert args.max_steps > 0 and data_args.budgets()["plan_budget"] < data_args.max_length


def test_the_base_recipe_matches_the_guide():
    values = yaml.safe_load((FOLDER / "recipes" / "go_base.yaml").read_text())
    guide = {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "per_device_eval_batch_size": 16,
        "learning_rate": 3e-4, "lr_scheduler_type": "cosine", "warmup_steps": 1000, "weight_decay": 0.1,
        "max_steps": 125000, "logging_steps": 50, "eval_steps": 500, "save_steps": 1000, "save_total_limit": 3,
        "adam_beta1": 0.9, "adam_beta2": 0.95, "max_grad_norm": 1.0, "refinement_warmup": 5000,
        "validation_frequency": 100, "plan_loss_weight": 0.4, "code_loss_weight": 0.4, "refinement_loss_weight": 0.2,
        "dataloader_num_workers": 4, "dataloader_pin_memory": True,
    }  # fmt: skip
    assert {name: values[name] for name in guide} == guide
    multipliers = GoTrainingArguments("x", use_cpu=True, lr_multipliers=values["lr_multipliers"]).group_multipliers()
    rates = {name: 3e-4 * multipliers[name] for name in ("planner", "generator", "refinement")}
    assert rates == pytest.approx({"planner": 3.6e-4, "generator": 2.4e-4, "refinement": 3e-4})


def test_a_saved_recipe_reproduces_its_run(run, tmp_path, script, monkeypatch):
    first, _ = run("first", refinement_warmup=2, refinement_ramp=2, lr_multipliers="planner=2")
    arguments = ["--recipe", str(first / "recipe.yaml"), "--output_dir", str(tmp_path / "second")]
    monkeypatch.setattr(sys, "argv", ["run_go_coder.py", *arguments])
    script.main()
    assert log(tmp_path / "second", "loss", "plan_loss") == log(first, "loss", "plan_loss")


def train(path: str) -> None:
    """Run a recipe in another process, from its last complete checkpoint if there is one."""
    out = yaml.safe_load(Path(path).read_text())["output_dir"]
    sys.argv = ["run_go_coder.py", "--recipe", path]
    if list_checkpoints(out):
        sys.argv += ["--resume_from_checkpoint", "last-complete"]
    load_script("run_go_coder").main()


@pytest.mark.slow
def test_resuming_a_killed_run_reproduces_its_losses(run, data, tmp_path):
    options = {
        "max_steps": 24, "save_strategy": "steps", "save_steps": 3, "refinement_warmup": 8, "refinement_ramp": 6,
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "eval_data": None,
        "config_overrides": MODELS["hrm_go_coder"] + ",hidden_dropout=0.1",
    }  # fmt: skip
    alone, _ = run("alone", **options)
    out = tmp_path / "killed"
    path = recipe(data, out, "hrm_go_coder", **options)
    for wanted in (6, 15):  # kill during the warm-up in epoch 1, then in epoch 2
        process = started.process(train, str(path))
        process.start()
        while process.is_alive() and not any(int(one.name[11:]) >= wanted for one in list_checkpoints(out)):
            time.sleep(0.002)
        process.kill()
        process.join()
        assert process.exitcode == -9
    process = started.process(train, str(path))
    process.start()
    process.join()
    assert process.exitcode == 0
    metrics = ("loss", "plan_loss", "code_loss", "refinement_loss")
    assert len(log(alone, *metrics)) == 24 and log(out, *metrics) == log(alone, *metrics)


def test_code_is_generated_and_validated_during_training(run, data, tmp_path):
    out, _ = run(
        "run", validation_frequency=2, validation_prompts=3, validation_max_new_tokens=12,
        replay_file=str(tmp_path / "replay.jsonl"),
    )  # fmt: skip
    rates = log(out, "go/syntax_rate")
    assert sorted(rates) == [2, 4] and all(0 <= rate[0] <= 1 for rate in rates.values())
    replayed = [json.loads(line) for line in (tmp_path / "replay.jsonl").read_text().splitlines()]
    assert {one["id"].rpartition("@")[2] for one in replayed} <= {"2", "4"} and replayed


def test_a_run_without_held_out_records_skips_evaluations(run):
    _, results = run("run", validation_frequency=2, max_steps=2, **STEPS)
    assert results["metrics"] == {} and "eval_strategy=steps" in results["printed"]


def test_validation_during_training_does_not_change_the_losses(run):
    written, _ = run("written", validation_frequency=1, validation_prompts=2, validation_max_new_tokens=4)
    alone, _ = run("alone")
    assert log(written, "loss") == log(alone, "loss")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_data": None}, "--train_data"),
        ({"plan_loss_weight": 0.5, "model_type": "llama"}, "plan_loss_weight=0.5: LlamaForCausalLM"),
        ({"lr_multipliers": "planner=1", "model_type": "llama"}, "lr_multipliers=planner=1: LlamaForCausalLM"),
        ({"validation_frequency": 1, "replay_file": "x", "eval_data": None}, "replay_file='x'.*--eval_data"),
        ({"early_stopping_patience": 1, **STEPS}, "early_stopping_patience=1"),
        ({"tokenizer_name": "byte"}, "hrm-hf data go-tokenizer"),
    ],
)
def test_an_impossible_run_is_rejected_with_the_reason(run, options, message):
    with pytest.raises(ValueError, match=message):
        run("run", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_multipliers": "planer=1"}, "'planer'.*planner, generator, refinement, shared"),
        ({"lr_multipliers": "planner=fast"}, "'planner=fast'.*group=number"),
        ({"refinement_warmup": -1}, "refinement_warmup=-1"),
        ({"replay_file": "x"}, "replay_file='x'"),
        ({"max_length": 0}, "max_length=0"),
        ({"validator": "gofmt"}, "validator='gofmt'"),
    ],
)
def test_a_wrong_option_raises_a_usage_error(run, options, message):
    with pytest.raises(UsageError, match=message):
        run("run", **options)


def test_a_broken_record_stops_the_run_with_file_and_line(run, data):
    path = data / "broken.jsonl"
    path.write_text((data / "train.jsonl").read_text() + '{"id": 3}\n')
    with pytest.raises(BadLineError, match=r"broken\.jsonl, line 41"):
        run("stopped", train_data=str(path))
    _, results = run("skipped", train_data=str(path), on_bad_line="skip")
    assert results["data"]["train"]["bad"] == 1 and "1 unreadable lines" in results["printed"]


@pytest.mark.parametrize("tokenizer", ["byte", "tokenizer"])
def test_the_go_coder_is_pretrained_on_raw_text_and_then_on_records(run, data, tmp_path, monkeypatch, tokenizer):
    out = tmp_path / "raw"
    name = "byte" if tokenizer == "byte" else str(data / tokenizer)
    arguments = (
        f"--model_type hrm_go_coder --preset test --config_overrides {MODELS['hrm_go_coder']} --tokenizer_name {name} "
        f"--train_data {data / 'raw.jsonl'} --block_size 64 --max_steps 4 --per_device_train_batch_size 4 "
        f"--warmup_steps 1 --learning_rate 1e-2 --logging_steps 1 --use_cpu true --report_to none "
        f"--disable_tqdm true --save_strategy no --data_cache_dir {data / 'cache'} --output_dir {out}"
    )
    monkeypatch.setattr(sys, "argv", ["run_clm.py", *arguments.split()])
    load_script("run_clm").main()
    losses = [values[0] for values in log(out, "loss").values()]
    assert losses[-1] < losses[0]
    assert json.loads((out / "results.json").read_text())["metrics"]["bits_per_byte"] > 0
    assert json.loads((out / "config.json").read_text())["tagged"] is (tokenizer != "byte")
    if tokenizer != "byte":
        _, results = run("tuned", model_type="hrm_go_coder", model_name_or_path=str(out), config_overrides=None)
        _, other = run("fresh")
        assert results["metrics"]["code_loss"] < other["metrics"]["code_loss"]


def test_balanced_decisions_are_weighted_by_inverse_frequency(run, data):
    out, _ = run("balanced", balance_decisions=True, max_steps=1)
    kinds = [attempt["decision"] for number in range(40) for attempt in tiny_go.records(40)[number]["attempts"]]
    expected = [len(kinds) / (3 * kinds.count(kind)) for kind in ("CONTINUE", "REFINE", "DONE")]
    config = json.loads((out / "config.json").read_text())
    assert config["refinement_class_weights"] == pytest.approx(expected) and len(set(expected)) > 1
    with pytest.raises(ValueError, match="balance_decisions"):
        run("llama", "llama", balance_decisions=True)
