"""`hrm-hf eval` for language models on text, and the common format of all results.

Referees: cross-entropy computed here from the logits, and the rows that training would hold out. `eval puzzles` is in
test_cli_solve.py.
"""

import json
import math

import every
import pyarrow.parquet as pq
import pytest
import tiny_cosmo
import tiny_go
import tiny_lm
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig
from typer.testing import CliRunner

from hrm_hf import HrmPuzzleConfig, HrmPuzzleForSolving
from hrm_hf.cli import app
from hrm_hf.puzzles import sudoku
from hrm_hf.puzzles.dataset import save_puzzle_dataset
from hrm_hf.text.arguments import LmDataArguments
from hrm_hf.text.byte_tokenizer import byte_tokenizer
from hrm_hf.text.corpus import load_evaluation_text, load_text_corpus


LINES = [f"func Add{n}(a, b int) int {{ return a + b + {n} }} // Größe {n}\n" for n in range(60)]
BLOCK = 64


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "go.txt"
    file.write_text("".join(LINES))
    return file


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of our causal language models and of a Llama, by name."""
    root = tmp_path_factory.mktemp("models")
    folders = {name: every.save(name, root / name) for name in every.CAUSAL_LMS}
    words = byte_tokenizer()
    tiny_lm.model("llama", vocab_size=len(words), max_position_embeddings=256).save_pretrained(root / "llama")
    words.save_pretrained(root / "llama")
    return folders | {"llama": root / "llama"}


def run(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def evaluated(*arguments) -> dict:
    result = run(*arguments, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # stdout contains nothing else


@pytest.mark.parametrize("name", [*every.CAUSAL_LMS, "llama"])
def test_perplexity_and_bits_per_byte_follow_from_the_logits(name, models, text):
    metrics = evaluated("lm", models[name], "--data", text, "--block-size", BLOCK, "--batch-size", 3)["metrics"]
    model, words = (auto.from_pretrained(models[name]) for auto in (AutoModelForCausalLM, AutoTokenizer))
    options = LmDataArguments(eval_data=[str(text)], block_size=BLOCK)
    corpus = load_evaluation_text(options, words)
    rows = corpus.validation[:]
    with torch.no_grad():
        logits = model.eval()(input_ids=rows["input_ids"]).logits
    nats = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).double(), rows["labels"][:, 1:].flatten().long(), reduction="none"
    )
    counted = rows["labels"][:, 1:].ne(-100).sum().item()
    mean = nats.sum().item() / counted
    assert metrics["tokens"] == counted
    assert metrics["lm_loss"] == pytest.approx(mean, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)
    size = len("".join(LINES).encode()) / corpus.sizes["validation"]["tokens"]
    assert metrics["bits_per_byte"] == pytest.approx(mean / math.log(2) / size, rel=1e-5)


@pytest.mark.parametrize(
    "options, steps",
    [
        (("--num-segments", 1), 1),
        (("--exit-criterion", "fixed"), 3),
        (("--exit-criterion", "fixed", "--num-segments", 2), 2),
        (("--exit-criterion", "latent_diff", "--exit-threshold", 1e9), 2),  # no previous state in segment 1
    ],
)
def test_options_limit_the_number_of_segments(options, steps, models, text):
    found = evaluated("lm", models["hrm_lm"], "--data", text, "--block-size", BLOCK, "--limit", 5, *options)
    assert found["metrics"]["average_steps"] == pytest.approx(steps)


def int8_of_torchao():
    return TorchAoConfig(pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig())


@pytest.mark.parametrize(
    "architecture, config",
    [
        ("hrm_lm", lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
        ("rlm_mhc", lambda: BitsAndBytesConfig(load_in_8bit=True)),
        ("hrm_go_coder", int8_of_torchao),
    ],
    ids=["nf4", "int8", "torchao"],
)
def test_quantized_model_is_evaluated_as_saved(architecture, config, models, text, tmp_path):
    pytest.importorskip("bitsandbytes")
    model = AutoModelForCausalLM.from_pretrained(models[architecture], quantization_config=config())
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(models[architecture]).save_pretrained(tmp_path)
    options = ("--data", text, "--block-size", BLOCK, "--limit", 4)
    whole, rounded = (evaluated("lm", folder, *options)["metrics"] for folder in (models[architecture], tmp_path))
    assert rounded["tokens"] == whole["tokens"]
    assert rounded["lm_loss"] == pytest.approx(whole["lm_loss"], rel=0.02) and rounded["lm_loss"] != whole["lm_loss"]


def test_evaluation_uses_the_end_of_the_text_that_training_holds_out(text):
    options = LmDataArguments(train_data=[str(text)], validation_split_percentage=20, block_size=BLOCK)
    trained_beside = load_text_corpus(options, byte_tokenizer()).validation
    alone = load_evaluation_text(LmDataArguments(eval_data=[str(text)], block_size=BLOCK), byte_tokenizer(), 20)
    assert torch.equal(trained_beside[:]["input_ids"], alone.validation[:]["input_ids"])


def test_results_are_written_and_go_into_the_card(models, text, tmp_path):
    folder = every.save("hrm_lm", tmp_path / "it")
    options = ("--block-size", BLOCK, "--num-segments", 2, "--out", tmp_path / "out", "--update-card")
    shown = run("lm", folder, "--data", text, *options)
    assert shown.exit_code == 0 and "bits_per_byte: " in shown.output, shown.output
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    results = {one.metric_name: one for one in ModelCard.load(folder / "README.md").data.eval_results}
    assert set(results) == {"lm_loss", "perplexity", "bits_per_byte", "token_accuracy", "average_steps"}
    assert results["perplexity"].metric_value == pytest.approx(written["metrics"]["perplexity"], abs=1e-6)
    assert results["perplexity"].metric_args == {"block_size": BLOCK, "num_segments": 2}
    assert results["perplexity"].dataset_type == "go.txt"  # no local path is published


@pytest.mark.parametrize(
    "model, options, code, message",
    [
        ("llama", ("--block-size", 64, "--overlap", 64), 2, "overlap=64"),
        ("llama", ("--num-segments", 2), 1, "remove --num-segments"),
        ("hrm_lm", ("--exit-threshold", 0.5), 2, "exit_threshold="),
        ("hrm_lm", ("--block-size", 300), 2, "has 256 positions"),
        ("hrm_lm", ("--exit-criterion", "kl", "--exit-threshold", -3), 2, "exit_threshold="),
        ("hrm_lm", ("--exit-criterion", "cdf", "--exit-threshold", 2), 2, "exit_threshold="),
        ("hrm_lm", ("--device", "cuda:9"), 2, "cuda:9"),
        ("hrm_lm", ("--device", "abacus"), 2, "abacus"),
        ("nowhere", (), 2, "error: ./nowhere"),
        ("puzzle", (), 2, "type hrm_puzzle; expected"),
    ],
)
def test_bad_usage_is_explained(model, options, code, message, models, text, tmp_path):
    if model == "puzzle":
        folder = every.save("hrm_puzzle", tmp_path / "puzzle")
    else:
        folder = models.get(model, "./nowhere")
    result = run("lm", folder, "--data", text, *options)
    assert result.exit_code == code and message in (result.output + str(result.exception))


def test_missing_text_file_is_named(models):
    result = run("lm", models["llama"], "--data", "./nothing.txt")
    assert result.exit_code == 1 and "nothing.txt" in str(result.exception)


def test_empty_text_file_is_named_and_broken_lines_can_be_skipped(models, tmp_path):
    (tmp_path / "nothing.txt").write_text("")
    result = run("lm", models["llama"], "--data", tmp_path / "nothing.txt")
    assert result.exit_code == 1 and "nothing.txt contains no text" in str(result.exception)
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"body": "func A() {}"}) + '\n{"body": "bro\n')
    result = run("lm", models["llama"], "--data", lines, "--text-column", "body")
    assert "--on_bad_line skip" in str(result.exception)
    found = evaluated("lm", models["llama"], "--data", lines, "--text-column", "body", "--on-bad-line", "skip")
    assert found["metrics"]["tokens"] == len("func A() {}")


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """Models and data, and folders and files that look like them."""
    root = tmp_path_factory.mktemp("bad")
    for name in ("hrm_puzzle", "hrm_go_coder", "cosmo_cnn"):
        every.save(name, root / name)
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text("{}")
    splits, info = sudoku.generated_sudoku(4, num_train=2, num_test=3, seed=0)
    save_puzzle_dataset(splits, info, root / "boards")
    save_puzzle_dataset(splits, info, root / "no_labels")
    file = next((root / "no_labels" / "data").glob("test-*"))
    pq.write_table(pq.read_table(file).drop(["labels"]), file)
    save_puzzle_dataset(splits, info, root / "no_rows")
    file = next((root / "no_rows" / "data").glob("test-*"))
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    for name in ("no_labels", "no_rows"):  # without checksums, as other programs write them
        file = root / name / "puzzle.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "sha256": {}}))
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "H_layers": 1, "L_layers": 1, "halt_max_steps": 1}
    solver = HrmPuzzleForSolving(HrmPuzzleConfig(**sizes, puzzle_emb_ndim=0, **info.config_fields()))
    solver.save_pretrained(root / "solver")
    tiny_go.write(root / "records.jsonl", [tiny_go.records(1)[0] | {"attempts": []}])
    (root / "empty.jsonl").write_text("")
    return root


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        ("puzzles solver boards --device cuda:9", 2, "cuda:9"),
        ("puzzles solver boards --out empty.jsonl/here", 2, "empty.jsonl is a file"),
        ("puzzles solver empty.jsonl", 2, "empty.jsonl is not a folder"),
        ("puzzles solver ./nothing", 2, "./nothing is not a folder"),
        ("puzzles empty.jsonl boards", 2, "empty.jsonl is not a folder"),
        ("puzzles adapter boards", 2, "adapter is a PEFT"),
        ("puzzles cosmo_cnn boards", 2, "type cosmo_cnn; expected"),
        ("puzzles solver no_labels", 1, "columns ['labels']"),
        ("puzzles solver no_rows", 1, "has no rows"),
        ("cosmo cosmo_cnn --data boards --device cuda:9", 2, "cuda:9"),
        ("cosmo cosmo_cnn --data boards --shift-data ./nothing", 2, "./nothing is not a folder"),
        ("cosmo cosmo_cnn --data boards --out empty.jsonl", 2, "empty.jsonl is a file"),
        ("cosmo-baseline --data boards --method spectrum-ridge --out empty.jsonl", 2, "empty.jsonl is a file"),
        ("go hrm_go_coder --records records.jsonl --device cuda:9", 2, "cuda:9"),
        ("go hrm_go_coder --records records.jsonl --out empty.jsonl", 2, "empty.jsonl is a file"),
        ("go hrm_go_coder --records boards", 2, "boards is a folder"),
        ("go hrm_go_coder --records empty.jsonl", 1, "empty.jsonl: no record"),
        ("go hrm_go_coder --trajectories records.jsonl", 1, "record has attempts"),
        ("go hrm_puzzle --records records.jsonl", 2, "type hrm_puzzle; expected"),
        ("lm adapter --data records.jsonl", 2, "adapter is a PEFT"),
    ],
)
def test_invalid_evaluations_are_rejected_before_any_work(arguments, code, message, bad, monkeypatch):
    monkeypatch.chdir(bad)
    result = run(*arguments.split())
    assert result.exit_code == code, result.output + str(result.exception)
    assert message in (result.output + str(result.exception))


def test_every_evaluation_has_one_format(models, text, tmp_path):
    splits, info = sudoku.generated_sudoku(4, num_train=2, num_test=3, seed=0)
    save_puzzle_dataset(splits, info, tmp_path / "boards")
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "H_layers": 1, "L_layers": 1, "halt_max_steps": 1}
    solver = HrmPuzzleForSolving(HrmPuzzleConfig(**sizes, puzzle_emb_ndim=0, **info.config_fields()))
    solver.save_pretrained(tmp_path / "solver")
    records = tiny_go.write(tmp_path / "test.jsonl", tiny_go.records(2))
    maps = tiny_cosmo.build(tmp_path / "maps", 4, 4)
    sky = {"observable": "shear", "sigma_e": 0.26, "galaxies_per_arcmin2": 30.0, "mask_fraction": 0.3}
    shear = tiny_cosmo.build(tmp_path / "shear", 4, 4, **sky)
    regressor, mapper = (every.save(name, tmp_path / name) for name in ("cosmo_cnn", "hrm_mass_mapping"))
    found = {
        "sudoku": evaluated("puzzles", tmp_path / "solver", tmp_path / "boards"),
        "causal-lm": evaluated("lm", models["rlm_mhc"], "--data", text, "--limit", 2),
        "go-coder": evaluated(
            "go", models["hrm_go_coder"], "--records", records, "--validator", "tree-sitter", "--max-code-tokens", 4
        ),
        "cosmology-regression": evaluated("cosmo", regressor, "--data", maps, "--num-samples", 100),
        "mass-mapping": evaluated("cosmo-map", mapper, "--data", shear, "--num-samples", 100),
    }
    for task, result in found.items():
        assert {"task", "model", "dataset", "split", "metrics", "parameters", "versions"} <= set(result), task
        assert (result["task"], result["split"]) == (task, "test")
        assert result["parameters"] > 1000 and isinstance(result["dataset"], str)
        assert {"hrm_hf", "torch"} <= set(result["versions"]) and result["metrics"]
