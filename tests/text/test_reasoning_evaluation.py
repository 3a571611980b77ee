"""`hrm-hf eval reasoning`, and training on reasoning data.

Referees: the answers of the same model, row by row and without padding, some of which are then called wrong; and
torch's cross-entropy of the labels.
"""

import json
import subprocess
import sys
from pathlib import Path

import every
import numpy as np
import pytest
import tiny_lm
import torch
from hub_server import HubServer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.io.files import load_split
from hrm_hf.text.arguments import LmDataArguments
from hrm_hf.text.byte_tokenizer import byte_tokenizer
from hrm_hf.text.corpus import load_text_corpus
from hrm_hf.text.options import BuildReasoning
from hrm_hf.text.reasoning.build import build_reasoning, draw_rows
from hrm_hf.text.reasoning.evaluation import evaluate_rows
from hrm_hf.text.reasoning.tasks import ID, TASKS, WORDS, reasoning_tokenizer
from hrm_hf.text.run import is_reasoning_data, load_reasoning_corpus


ROOT = Path(__file__).parents[2]
LENGTH = 14  # BOS, four arrows, four starts with a blank each, EOS
POINTERS = {"size": 4, "difficulty": "1-2", "num_train": 64, "num_validation": 8, "num_test": 5}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Build a data set of pointers with four nodes: one and two hops, and three hops beyond."""
    folder = tmp_path_factory.mktemp("reasoning") / "pointers"
    build_reasoning(BuildReasoning(task="pointers", out=folder, **POINTERS))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Save a model of each architecture with the tokenizer of the suite."""
    root = tmp_path_factory.mktemp("models")
    for name, options in {"llama": {}, "hrm_lm": {}, "short": {"max_position_embeddings": 10}}.items():
        kind = "llama" if name == "short" else name
        fields = {"vocab_size": len(WORDS), "max_position_embeddings": 64, **options}
        tiny_lm.model(kind, **fields).save_pretrained(root / name)
        reasoning_tokenizer().save_pretrained(root / name)
    return root


def run(*arguments):
    return CliRunner().invoke(app, ["eval", "reasoning", *map(str, arguments), "--device", "cpu"])


# ---- metrics ----


@torch.no_grad()
def said(model, ids: np.ndarray, **options):
    """Return predictions and segments at each word of one row, computed alone and without padding."""
    ids = ids[ids != ID["<|pad|>"]]
    output = model(input_ids=torch.from_numpy(ids)[None], use_cache=False, **options)
    steps = output.get("halt_steps")
    return output.logits[0].argmax(-1).numpy(), None if steps is None else steps[0].numpy()


@pytest.mark.parametrize("name", ["llama", *every.CAUSAL_LMS])
def test_batched_metrics_match_rows_evaluated_one_by_one(name):
    fields = {"vocab_size": len(WORDS), "max_position_embeddings": 64}
    model = every.wake((tiny_lm if name == "llama" else every).model(name, **fields))
    is_deep = name == "hrm_lm"
    rows = draw_rows(TASKS["pointers"](size=4), np.arange(30) % 3 + 1, np.random.default_rng(0))
    rng, asked = np.random.default_rng(1), rows["labels"] != -100
    for row, ids in enumerate(rows["input_ids"]):  # labels: mostly the model's own answers, some wrong
        words, _ = said(model, ids)
        for place in np.flatnonzero(asked[row]):
            wrong = rng.random() > 0.8
            rows["labels"][row, place] = (words[place - 1] + wrong) % len(WORDS)
    settings = [None, 1, 2] if is_deep else [None]
    metrics = evaluate_rows(model, {"test": rows}, settings, batch_size=4)
    for passes in settings:
        cells = answers_one_by_one(model, rows, passes)
        for number in (1, 2, 3):
            some = [cell for cell in cells if cell["difficulty"] == number]
            wrong = {cell["row"] for cell in some if not cell["right"]}
            found = one_of(metrics["by_difficulty"], passes, "difficulty", number)
            assert found["rows"] == 10 and found["exact_accuracy"] == pytest.approx(1 - len(wrong) / 10)
            assert found["cell_accuracy"] == pytest.approx(mean(some, "right"))
            assert found["exact_accuracy_interval"][0] <= found["exact_accuracy"]
            assert found["exact_accuracy_interval"][1] >= found["exact_accuracy"]
            some = [cell for cell in cells if cell["steps"] == number]
            found = one_of(metrics["by_step"], passes, "steps", number)
            assert found["answers"] == len(some) and found["cell_accuracy"] == pytest.approx(mean(some, "right"))
            assert not is_deep or found["average_steps"] == pytest.approx(mean(some, "used"))
        if passes is None:
            assert metrics["test_cell_accuracy"] == pytest.approx(mean(cells, "right"))
            assert 0.5 < metrics["test_cell_accuracy"] < 1  # not all answers are right or wrong
    assert not is_deep or metrics["test_average_steps"] not in (1, 2, 3)


def answers_one_by_one(model, rows, passes: int | None) -> list[dict]:
    options = {} if passes is None else {"num_segments": passes, "exit_criterion": "fixed"}
    cells = []
    for row, ids in enumerate(rows["input_ids"]):
        words, used = said(model, ids, **options)
        for place in np.flatnonzero(rows["labels"][row] != -100):
            cell = {"row": row, "difficulty": rows["difficulty"][row], "steps": rows["steps"][row, place]}
            cell["used"] = 0 if used is None else used[place - 1]
            cells.append(cell | {"right": words[place - 1] == rows["labels"][row, place]})
    return cells


def mean(cells: list[dict], key: str) -> float:
    return float(np.mean([cell[key] for cell in cells]))


def one_of(rows: list[dict], passes: int | None, key: str, number: int) -> dict:
    (found,) = [row for row in rows if row["passes"] == (passes or "own") and row[key] == number]
    return found


# ---- the command ----


def test_command_writes_metrics_a_plot_and_the_card(data, models, tmp_path):
    out = tmp_path / "eval"
    result = run(models / "hrm_lm", data, "--passes", "2,1", "--out", out, "--update-card", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["task"] == "reasoning-pointers" and told["split"] == "test,beyond"
    assert json.loads((out / "results.json").read_text())["metrics"] == told["metrics"]
    assert (out / "reasoning.png").stat().st_size > 10_000
    rows = told["metrics"]["by_difficulty"]
    assert [(row["split"], row["difficulty"], row["passes"]) for row in rows] == [
        (split, difficulty, passes)
        for split, difficulties in (("test", (1, 2)), ("beyond", (3,)))
        for passes in ("own", 1, 2)
        for difficulty in difficulties
    ]
    assert all(row["rows"] == 5 for row in rows)
    fixed = [row for row in rows if row["passes"] != "own"]
    assert all(row["average_steps"] == row["passes"] for row in fixed)
    assert "exact_accuracy" in (models / "hrm_lm" / "README.md").read_text()
    screen = run(models / "llama", data, "--splits", "beyond")
    assert screen.exit_code == 0 and "| beyond | 3 |" in screen.output and "passes own" in screen.output


@pytest.mark.slow
def test_hub_data_set_gives_the_metrics_of_its_folder(data, models, tmp_path):
    """Referee: the folder that was uploaded, evaluated here."""
    program = (
        "import sys\n"
        "from huggingface_hub import HfApi\n"
        "from hrm_hf.cli import main\n"
        "HfApi().create_repo('org/pointers', repo_type='dataset')\n"
        "HfApi().upload_folder(folder_path=sys.argv.pop(1), repo_id='org/pointers', repo_type='dataset')\n"
        "main()\n"
    )
    arguments = [data, "eval", "reasoning", models / "llama", "org/pointers", "--device", "cpu", "--json"]
    with HubServer(tmp_path / "hub") as hub:
        environment = hub.environment(tmp_path / "home") | {"PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-c", program, *map(str, arguments)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    local = run(models / "llama", data, "--json")
    assert json.loads(done.stdout)["metrics"] == json.loads(local.stdout)["metrics"]


@pytest.mark.parametrize(
    ("model", "options", "said", "status"),
    [
        ("llama", ["--passes", "1,2"], "fixed depth", 1),
        ("llama", ["--exit-criterion", "kl"], "fixed depth", 1),
        ("hrm_lm", ["--passes", "one"], "passes='one'", 2),
        ("hrm_lm", ["--splits", "tests"], "no split 'tests'", 2),
        ("short", [], "14 tokens", 2),
        ("bytes", [], "vocabulary", 1),
    ],
)
def test_mismatched_models_and_options_are_named(data, models, model, options, said, status):
    if model == "bytes":
        tiny_lm.model("llama", vocab_size=264).save_pretrained(models / model)
        byte_tokenizer().save_pretrained(models / model)
    result = run(models / model, data, *options)
    told = " ".join((result.output + str(result.exception or "")).replace("│", " ").split())
    assert result.exit_code == status and said in told


def test_folder_without_reasoning_data_is_rejected(models, tmp_path):
    result = run(models / "llama", tmp_path)
    assert result.exit_code == 1 and "reasoning.json is missing" in str(result.exception)


# ---- training ----


def test_run_uses_the_stored_rows_unchanged(data):
    assert is_reasoning_data([str(data)])
    corpus = load_reasoning_corpus(LmDataArguments(train_data=[str(data)]), reasoning_tokenizer())
    stored = load_split(data, "train")
    assert corpus.train.column_names == ["input_ids", "labels"]
    assert corpus.train["input_ids"][:].tolist() == stored["input_ids"][:]
    assert corpus.train["labels"][:].tolist() == stored["labels"][:]
    assert len(corpus.validation) == POINTERS["num_validation"] and corpus.row_length == LENGTH
    asked = sum(label != -100 for row in stored["labels"] for label in row)
    assert corpus.sizes["train"] == {"rows": 64, "tokens_per_row": LENGTH, "answers": asked}


def test_rows_of_two_tasks_are_padded_to_one_length(data, tmp_path):
    rows = {"num_train": 9, "num_validation": 4, "num_test": 0}
    build_reasoning(BuildReasoning(task="addition", out=tmp_path, size=1, difficulty="2", **rows))
    options = LmDataArguments(train_data=[str(tmp_path), str(data)], max_eval_samples=6)
    corpus = load_reasoning_corpus(options, reasoning_tokenizer())
    rows = corpus.train[:]
    assert rows["input_ids"].shape == rows["labels"].shape == (9 + 64, LENGTH) and len(corpus.validation) == 6
    short = load_split(tmp_path, "train")
    length = len(short[0]["input_ids"])
    assert rows["input_ids"][:9, :length].tolist() == short["input_ids"][:] and length < LENGTH
    assert set(rows["input_ids"][:9, length:].flatten().tolist()) == {ID["<|pad|>"]}
    assert set(rows["labels"][:9, length:].flatten().tolist()) == {-100}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_size": 13}, "block_size=13"),
        ({"document_mask": True}, "document_mask=True"),
        ({"text_column": "words"}, "text_column='words'"),
        ({"train_split": "training"}, "no split 'training'"),
    ],
)
def test_document_options_are_rejected(data, options, said):
    with pytest.raises(ValueError, match=said):
        load_reasoning_corpus(LmDataArguments(train_data=[str(data)], **options), reasoning_tokenizer())


def test_reasoning_data_are_never_taken_for_text(data, tmp_path):
    (tmp_path / "a.txt").write_text("some text\n")
    with pytest.raises(ValueError, match=r"a\.txt"):
        is_reasoning_data([str(data), str(tmp_path / "a.txt")])
    with pytest.raises(ValueError, match="hrm-hf data reasoning"):
        load_text_corpus(LmDataArguments(train_data=[str(data)]), byte_tokenizer())
    with pytest.raises(ValueError, match="vocabulary"):
        load_reasoning_corpus(LmDataArguments(train_data=[str(data)]), byte_tokenizer())


@pytest.mark.slow
def test_a_fresh_process_builds_trains_and_evaluates(tmp_path):
    """Run all three commands in one process. Referee: torch's cross-entropy."""
    script = ROOT / "training" / "run_clm.py"
    steps = [
        "hrm-hf data reasoning permutations --size 3 --difficulty 1-2 --num-train 400 --num-validation 40 "
        "--num-test 20 --seed 5 --out data",
        f"{script} --model_type llama --train_data data --output_dir run --max_steps 30 --learning_rate 1e-2 "
        "--per_device_train_batch_size 32 --warmup_steps 3 --use_cpu --report_to none --disable_tqdm true "
        "--config_overrides hidden_size=32,intermediate_size=64,num_attention_heads=2,num_hidden_layers=2",
        "hrm-hf eval reasoning run data --device cpu --out eval --json",
    ]
    program = (
        "import runpy, sys\n"
        "from hrm_hf.cli import app\n"
        f"for words in {[step.split() for step in steps]!r}:\n"
        "    sys.argv = words\n"
        "    app(words[1:], standalone_mode=False) if words[0] == 'hrm-hf' else "
        "runpy.run_path(words[0], run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])["metrics"]
    assert {row["difficulty"] for row in told["by_difficulty"]} == {1, 2, 3, 4}
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    logits, labels = {}, {}
    for split in ("validation", "test"):
        rows = load_split(tmp_path / "data", split).with_format("torch")[:]
        with torch.no_grad():
            logits[split] = model(input_ids=rows["input_ids"]).logits[:, :-1].flatten(0, 1)
        labels[split] = rows["labels"][:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(logits["validation"], labels["validation"])
    assert results["metrics"]["lm_loss"] == pytest.approx(loss.item(), rel=1e-4)
    asked = labels["test"] != -100
    right = logits["test"].argmax(-1)[asked] == labels["test"][asked]
    assert told["test_cell_accuracy"] == pytest.approx(right.double().mean().item()) and right.any()
    assert results["tokens"] == 30 * 32 * rows["input_ids"].shape[1] and "bits_per_byte" not in results["metrics"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run")) == len(WORDS)
    assert (tmp_path / "run" / "recipe.yaml").read_text().count("tokenizer_name: data") == 1
