"""`hrm-hf convert` on files in the layouts of the public checkpoints, served by a loopback Hub.

Referees: the originals' golden tensors, or, for layouts without them, the model that was written to the file.
docs/pretrained.md lists the checkpoints and their layouts.
"""

import json
import os
import re
from collections import defaultdict

import golden
import pytest
import tiny
import torch
import yaml
from golden import HRM, TRM, TRM_MLP, Case
from hub_here import call
from huggingface_hub import HfApi
from public_checkpoints import arch_section, compiled, publish, run_config, saved, training_state
from safetensors.torch import save as save_safetensors
from tolerances import assert_copied

from hrm_hf import AutoModelForPuzzleSolving, TrmPuzzleConfig, TrmPuzzleForSolving
from hrm_hf.models.act import ActCarry
from hrm_hf.puzzles.convert import convert_original, convert_to_original, original_name


EQR = Case("eqr_tiny", "rope2d/", "eqr")
SE_RRM = [Case("se_rrm_tiny", f"{name}/", "se_rrm") for name in ("puzzle_emb", "not_equivariant")]
FIRST_STEP = 1e-4  # tolerance that the golden files suggest
IDENTIFIERS = json.dumps(["<blank>"] + ["a"] * 7).encode()


def convert(architecture, source, tmp_path, *options):
    """Run the command, and return its output and the converted model."""
    out = tmp_path / "ours"
    result = json.loads(call("convert", architecture, source, "--out", out, *options, "--json").stdout)
    return result, AutoModelForPuzzleSolving.from_pretrained(out).eval()


def assert_golden(model, case):
    with torch.no_grad():
        logits = model(**golden.batch(case, "A")).logits
    torch.testing.assert_close(logits, golden.tensors(case, "eval/step1/")["logits"], rtol=0, atol=FIRST_STEP)


def fields_of(case):
    return golden.original_arch(case)


# ---- HRM: sapientinc/HRM-checkpoint-*, bnsh/HRM-checkpoint-sudoku-full ----


def test_an_hrm_repository_gives_the_golden_logits(hub, tmp_path):
    files = {
        "checkpoint": saved(compiled(HRM)),
        "all_config.yaml": run_config("hrm", fields_of(HRM)),
        "README.md": b"-",
    }
    commit = publish("sapientinc/HRM-checkpoint-sudoku-extreme", {**files, "identifiers.json": IDENTIFIERS})
    result, model = convert("hrm", "sapientinc/HRM-checkpoint-sudoku-extreme", tmp_path)
    assert_golden(model, HRM)
    assert result["repository"] == "sapientinc/HRM-checkpoint-sudoku-extreme" and result["commit"] == commit
    assert (tmp_path / "ours/identifiers.json").read_bytes() == IDENTIFIERS
    assert not any("README" in path for method, path in hub.requests)  # only the required files are downloaded


@pytest.mark.parametrize(
    "name, fields, task",
    [
        ("sapientinc/HRM-checkpoint-maze-30x30-hard", {"vocab_size": 6, "seq_len": 900}, "maze"),
        ("sapientinc/HRM-checkpoint-ARC-2", {"vocab_size": 12, "seq_len": 900, "num_puzzle_identifiers": 9}, "arc"),
        (
            "bnsh/HRM-checkpoint-sudoku-full",
            {"vocab_size": 11, "seq_len": 81, "pos_encodings": "learned", "loss_type": "softmax"},
            "sudoku",
        ),
    ],
)
def test_other_hrm_repositories_restore_their_model(name, fields, task, hub, tmp_path):
    made = tiny.model("hrm", task="generic", grid_shape=None, box_shape=None, **fields)
    made.save_pretrained(tmp_path / "made")
    convert_to_original(tmp_path / "made", tmp_path / "original")
    files = {"checkpoint": (tmp_path / "original/step_0").read_bytes()}
    publish(name, {**files, "all_config.yaml": (tmp_path / "original/all_config.yaml").read_bytes()})
    result, model = convert("hrm", name, tmp_path)
    assert_copied(dict(model.named_parameters()), dict(made.named_parameters()))
    kept = ("seq_len", "vocab_size", "num_puzzle_identifiers", "pos_encodings", "loss_type", "halt_max_steps")
    assert {key: getattr(model.config, key) for key in kept} == {key: getattr(made.config, key) for key in kept}
    assert result["task"] == task and result["identifiers_file"] is None


# ---- TRM: alphaXiv/trm-model-* have weights and no configuration ----


@pytest.fixture
def alphaxiv(hub):
    """Serve repositories with weights of two kinds under the released names and nothing else."""
    files = {"step_32550_sudoku_epoch50k": TRM_MLP, "step_39060_sudoku_60k_epoch_attn_type": TRM}
    publish("alphaXiv/trm-model-sudoku", {name: saved(compiled(case)) for name, case in files.items()})


def test_weights_without_a_configuration_use_a_preset(alphaxiv, tmp_path, monkeypatch):
    fields = golden.our_config(TRM_MLP).to_dict()
    same = ("hidden_size", "num_attention_heads", "H_cycles", "L_cycles", "puzzle_emb_ndim", "puzzle_emb_len",
            "halt_max_steps", "mlp_t", "pos_encodings", "expansion")  # fmt: skip
    preset = {**{name: fields[name] for name in same}, "forward_dtype": "float32"}
    monkeypatch.setitem(TrmPuzzleConfig._presets, "trm-5m-mlp", preset)  # the real one has the released sizes
    source = "alphaXiv/trm-model-sudoku/step_32550_sudoku_epoch50k"
    result, model = convert("trm", source, tmp_path, "--config", "trm-5m-mlp")
    assert_golden(model, TRM_MLP)
    assert result["config"] == "preset trm-5m-mlp" and result["seq_len"] == 81


@pytest.mark.parametrize(
    "name, preset, task",
    [
        ("alphaXiv/trm-model-sudoku/step_39060_sudoku_60k_epoch_attn_type", "trm-7m", "sudoku"),
        ("alphaXiv/trm-model-maze/maze_hard_step_32550", "trm-7m-maze", "maze"),
        ("alphaXiv/trm-model-arc-agi-1/step_259320_arc_ag1_attn_type_h3l4", "trm-7m-arc", "arc"),
    ],
)
def test_each_preset_fits_the_weights_of_its_task(name, preset, task, hub, tmp_path, monkeypatch):
    width = {"hidden_size": 32, "num_attention_heads": 2, "puzzle_emb_ndim": 32}
    monkeypatch.setitem(TrmPuzzleConfig._presets, preset, {**TrmPuzzleConfig._presets[preset], **width})
    made = TrmPuzzleForSolving(TrmPuzzleConfig.from_preset(preset, num_puzzle_identifiers=3))
    repo, _, file = name.rpartition("/")
    state = {f"_orig_mod.{original_name(key)}": value for key, value in made.state_dict().items()}
    publish(repo, {file: saved(state)})
    result, model = convert("trm", name, tmp_path, "--config", preset)
    assert_copied(model.state_dict(), made.state_dict())
    kept = ("seq_len", "vocab_size", "H_cycles", "L_cycles", "num_puzzle_identifiers")
    assert {key: getattr(model.config, key) for key in kept} == {key: getattr(made.config, key) for key in kept}
    assert (result["task"], model.config.forward_dtype) == (task, "bfloat16")


def test_weights_without_a_configuration_use_the_originals_arch_file(alphaxiv, tmp_path):
    arch = arch_section("trm", fields_of(TRM))
    arch["puzzle_emb_ndim"] = "${.hidden_size}"
    (tmp_path / "trm.yaml").write_text(yaml.safe_dump(arch))
    source = "https://huggingface.co/alphaXiv/trm-model-sudoku/resolve/main/step_39060_sudoku_60k_epoch_attn_type"
    _, model = convert("trm", source, tmp_path, "--config", tmp_path / "trm.yaml")
    assert_golden(model, TRM)


def test_errors_list_the_weights_and_presets_to_choose_from(alphaxiv, tmp_path):
    failed = call("convert", "trm", "alphaXiv/trm-model-sudoku", "--out", tmp_path / "ours", status=1).exception
    assert "step_32550_sudoku_epoch50k" in str(failed) and "step_39060_sudoku_60k_epoch_attn_type" in str(failed)
    source = "alphaXiv/trm-model-sudoku/step_32550_sudoku_epoch50k"
    assert "trm-5m-mlp, trm-7m" in str(call("convert", "trm", source, "--out", tmp_path / "ours", status=1).exception)
    failed = call("convert", "trm", source, "--out", tmp_path / "ours", "--config", "trm-6m", status=1).exception
    assert "config=trm-6m" in str(failed) and "trm-5m-mlp, trm-7m, trm-7m-arc, trm-7m-maze" in str(failed)


def test_a_preset_of_other_puzzles_gives_a_warning_and_no_sizes(tmp_path, caplog):
    torch.save({name: value[:6] if "embed" in name or "lm_head" in name else value
                for name, value in compiled(TRM).items()}, tmp_path / "maze_hard_step_32550")  # fmt: skip
    arch = {**arch_section("trm", fields_of(TRM)), "vocab_size": 11, "seq_len": 81}
    (tmp_path / "trm.yaml").write_text(yaml.safe_dump(arch))
    result = convert_original(tmp_path, tmp_path / "ours", "trm", config=tmp_path / "trm.yaml")
    assert (result["vocab_size"], result["seq_len"], result["task"]) == (6, 900, "maze")
    assert re.search(r"vocab_size is 11\b.*\b6 in the weights", caplog.text)


# ---- EqR: locuslab/EqR-model ----


@pytest.mark.parametrize("as_nodes", [True, False], ids=["OmegaConf", "plain"])
def test_a_training_state_of_eqr_gives_its_average_and_the_golden_states(hub, tmp_path, as_nodes):
    average = compiled(EQR)
    raw = {name: torch.zeros_like(value) for name, value in average.items()}
    config = {"arch": {**arch_section("eqr", golden.variant(EQR)), "short_name": "EqR"}, "data_path": "data/x"}
    publish("locuslab/EqR-model", {"sudoku-extreme/eqr.pth": training_state(raw, average, config, as_nodes)})
    result, model = convert("eqr", "locuslab/EqR-model/sudoku-extreme", tmp_path)
    assert result["averaged_weights"] and result["architecture"] == "trm_puzzle"
    assert (model.config.update_rate, model.config.noise_scale) == (0.95, 0.0)
    assert model.config.random_initial_states and model.config.grid_shape == [9, 9]
    batch = {name: golden.tensors(EQR, f"batch/{original}")[""].long()
             for name, original in (("input_ids", "inputs"), ("labels", "labels"))}  # fmt: skip
    fresh = model.initial_carry(**batch)
    states = (golden.tensors(EQR, f"start/{name}")[""] for name in ("z_H", "z_L"))
    carry = ActCarry(*states, fresh.steps, torch.zeros_like(fresh.halted), fresh.current_data | batch)
    with torch.no_grad():
        output = model(**batch, carry=carry)
    expected = golden.tensors(EQR, "eval/step1/")
    torch.testing.assert_close(output.logits, expected["logits"], rtol=0, atol=FIRST_STEP)
    torch.testing.assert_close(output.carry.z_H, expected["z_H"], rtol=0, atol=FIRST_STEP)


@pytest.mark.parametrize(
    "file, puzzles, positions",
    [
        ("sudoku-extreme/eqr.pth", {"vocab_size": 11, "seq_len": 81}, {"mlp_t": True, "pos_encodings": "none"}),
        ("maze-unique/eqr.pth", {"vocab_size": 6, "seq_len": 900}, {"mlp_t": False, "pos_encodings": "rope"}),
    ],
)
def test_tensors_missing_from_the_eqr_average_come_from_the_model(file, puzzles, positions, hub, tmp_path):
    """As in the released files, the puzzle table is not a parameter and therefore is not averaged."""
    fields = {"L_layers": 1, "hidden_size": 32, "puzzle_emb_ndim": 32, "puzzle_emb_len": 2, **positions}
    made = TrmPuzzleForSolving(
        TrmPuzzleConfig(**fields, **puzzles, num_attention_heads=1, random_initial_states=True, update_rate=0.9)
    )
    made.model.puzzle_emb.weight.normal_()
    arch = {**fields, "num_heads": 1, "H_layers": 0, "H_cycles": 3, "L_cycles": 6, "expansion": 4, "lambda_": 0.9,
            "halt_max_steps": 16, "halt_exploration_prob": 0.1}  # fmt: skip
    state = {f"_orig_mod.{original_name(name)}": value for name, value in made.state_dict().items()}
    average = {name: value for name, value in state.items() if "puzzle_emb" not in name}
    raw = {name: value if "puzzle_emb" in name else value + 1 for name, value in state.items()}
    config = {"arch": arch, "dataset": {"data_path": "data/maze-30x30-unique-1k"}}
    publish("locuslab/EqR-model", {file: training_state(raw, average, config)})
    _, model = convert("eqr", f"locuslab/EqR-model/{file}", tmp_path)
    assert_copied(model.state_dict(), made.state_dict())
    kept = {**puzzles, "update_rate": 0.9, "noise_scale": 0.01, "forward_dtype": "bfloat16"}
    assert {name: getattr(model.config, name) for name in kept} == kept


def test_error_names_weights_in_subfolders(hub, tmp_path):
    publish("locuslab/EqR-model", {"sudoku-extreme/eqr.pth": b"-", "maze-unique/eqr.pth": b"-"})
    failed = str(call("convert", "eqr", "locuslab/EqR-model", "--out", tmp_path / "ours", status=1).exception)
    assert "locuslab/EqR-model/maze-unique/eqr.pth" in failed and "locuslab/EqR-model/sudoku-extreme/eqr.pth" in failed


# ---- SE-RRM ----


@pytest.mark.parametrize("case", SE_RRM, ids=str)
def test_se_rrm_gives_the_golden_logits(case, hub, tmp_path):
    state = golden.tensors(case, "state_dict/")
    files = {"step_7": saved(state), "all_config.yaml": run_config("se_rrm", golden.variant(case))}
    publish("some/se-rrm", files)
    result, model = convert("se_rrm", "some/se-rrm", tmp_path, "--seq-len", "16")
    assert result["architecture"] == "se_rrm_puzzle" and result["vocab_size"] == 6
    names = {"input_ids": "inputs", "labels": "labels", "puzzle_identifiers": "puzzle_identifiers"}
    batch = {ours: golden.tensors(case, f"batch/{name}")[""].long() for ours, name in names.items()}
    with torch.no_grad():
        logits = model(**batch).logits
    torch.testing.assert_close(logits, golden.tensors(case, "eval/step1/")["logits"], rtol=0, atol=FIRST_STEP)


def without_table(case=SE_RRM[0]):
    state = {name: value for name, value in golden.tensors(case, "state_dict/").items() if "puzzle_emb" not in name}
    return state, {**golden.variant(case), "puzzle_emb_ndim": 0}


def test_se_rrm_vocabulary_comes_from_its_data_or_an_argument(tmp_path, caplog):
    state, fields = without_table()
    (tmp_path / "run").mkdir()
    torch.save(state, tmp_path / "run/step_7")
    config = tmp_path / "run/all_config.yaml"
    config.write_bytes(run_config("se_rrm", fields))
    with pytest.raises(ValueError, match="vocab_size=None"):
        convert_original(tmp_path / "run", tmp_path / "ours", "se_rrm")
    result = convert_original(tmp_path / "run", tmp_path / "4x4", "se_rrm", seq_len=16, vocab_size=6)
    assert (result["seq_len"], result["vocab_size"], caplog.text) == (16, 6, "")
    config.write_bytes(run_config("se_rrm", fields, data_paths=["data/sudoku-extreme-1k-aug-1000"]))
    result = convert_original(tmp_path / "run", tmp_path / "9x9", "se_rrm")
    assert (result["seq_len"], result["vocab_size"], result["task"], caplog.text) == (81, 11, "sudoku", "")


def test_tensors_that_do_not_fit_se_rrm_are_named(tmp_path):
    state, fields = without_table()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/all_config.yaml").write_bytes(run_config("se_rrm", fields))
    name = "model.inner.L_level.layers.0.attn.qkv_proj.weight"
    for value, message in (
        ({"model.inner.embed_symbol_tokens": None}, r"model\.embed\.tokens"),
        ({name: None}, r"Missing .*model.L_level.layers.0.self_attn.qkv_proj.weight"),
        ({name: torch.zeros(7, 32)}, "do not fit"),
    ):
        changed = {key: each for key, each in {**state, **value}.items() if each is not None}
        torch.save(changed, tmp_path / "run/step_7")
        with pytest.raises(ValueError, match=message):
            convert_original(tmp_path / "run", tmp_path / "ours", "se_rrm", seq_len=16, vocab_size=6)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("architecture", ["eqr", "se_rrm"])
def test_conversion_back_to_the_successors_is_rejected(architecture, puzzle, tmp_path):
    failed = call("convert", architecture, puzzle, "--out", tmp_path / "back", "--to-original", status=2)
    assert f"{architecture} cannot be converted back" in failed.stderr
    with pytest.raises(ValueError, match=f"model_type=.*{architecture} "):
        convert_to_original(puzzle, tmp_path / "back", architecture=architecture)


# ---- any repository ----


@pytest.mark.parametrize(
    "weights, config, prefix",
    [
        ("model.safetensors", "model.yaml", "model.inner."),
        ("trm.pt", "all_config.yaml", "_orig_mod.model.inner."),
        ("runs/a/best.ckpt", "runs/a/config.yaml", "model."),
        ("step_9", "step_9.yaml", "module._orig_mod.model.inner._orig_mod."),
    ],
)
def test_weights_and_configuration_are_found_by_their_names(weights, config, prefix, hub, tmp_path):
    state = {name.replace("model.inner.", prefix): value for name, value in golden.tensors(TRM, "state_dict/").items()}
    content = save_safetensors(state) if weights.endswith("safetensors") else saved(state)
    wandb = {"arch": {"desc": None, "value": arch_section("trm", fields_of(TRM))}}  # as W&B writes it
    publish("some/trm", {weights: content, config: yaml.safe_dump(wandb).encode()})
    source = "some/trm/" + weights.rpartition("/")[0]
    _, model = convert("trm", source.rstrip("/"), tmp_path)
    assert_golden(model, TRM)


def test_a_revision_is_fetched(hub, tmp_path):
    files = {"step_1": saved(compiled(HRM)), "all_config.yaml": run_config("hrm", fields_of(HRM))}
    publish("org/hrm", {"README.md": b"-"})
    HfApi().create_branch("org/hrm", branch="weights")
    for name, content in files.items():
        HfApi().upload_file(path_or_fileobj=content, path_in_repo=name, repo_id="org/hrm", revision="weights")
    result, _ = convert("hrm", "org/hrm", tmp_path, "--revision", "weights")
    assert result["commit"] == hub.commits("org/hrm", revision="weights")[0]
    result, _ = convert("hrm", f"{hub.url}/org/hrm/tree/weights", tmp_path)
    assert result["commit"] == hub.commits("org/hrm", revision="weights")[0]
    assert "found none" in str(call("convert", "hrm", "org/hrm", "--out", tmp_path / "ours", status=1).exception)


@pytest.mark.parametrize(
    "source, revision",
    [
        ("https://example.org/org/model/resolve/main/step_1", None),
        ("https://huggingface.co@example.org/org/model", None),
        ("file:///etc/passwd", None),
        ("https://huggingface.co/datasets/org/model", None),
        ("https://huggingface.co/org", None),
        ("https://huggingface.co/org/model/commits/main", None),
        ("https://huggingface.co/org/model/tree/a", "b"),
        ("org/mo del", None),
        ("./folder", "main"),
        ("nowhere", None),
    ],
)
def test_invalid_model_names_exit_with_status_2_without_requests(source, revision, hub, tmp_path):
    options = ["--revision", revision] if revision else []
    call("convert", "hrm", source, "--out", tmp_path / "ours", *options, status=2)
    assert not hub.requests


def test_unknown_model_name_is_reported(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a folder without `runs`
    said = call("convert", "hrm", "runs/typo", "--out", tmp_path / "ours", status=2).stderr
    assert "runs/typo" in said and "private" in said


def test_language_model_conversion_downloads_only_its_folder(hub, tmp_path):
    publish("org/text", {"final/config.json": b"{}", "final/model.safetensors": save_safetensors({}), "x": b"-"})
    failed = call("convert", "hrm_lm", "org/text/final", "--out", tmp_path / "ours", status=1).exception
    assert "/final/" in str(failed) and "token_embeddings" in str(failed)
    assert not any(path.endswith("/x") for method, path in hub.requests)


# ---- guesses ----


def guessing(tmp_path, vocab_size, **run):
    made = tiny.model("hrm", vocab_size=vocab_size, seq_len=900, grid_shape=None, box_shape=None)
    made.save_pretrained(tmp_path / "made")
    convert_to_original(tmp_path / "made", tmp_path / "run")
    file = tmp_path / "run/all_config.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "data_path": None, **run}))
    return tmp_path / "run"


def test_an_unconfirmed_guess_gives_a_warning_with_the_fix(tmp_path, caplog):
    run = guessing(tmp_path, 12)
    assert convert_original(run, tmp_path / "ours")["seq_len"] == 900
    assert "vocab_size=12 matches arc, so seq_len=900" in caplog.text and "--seq-len N" in caplog.text


@pytest.mark.parametrize("options, run", [({"seq_len": 49}, {}), ({}, {"data_path": "data/arc-aug-1000"})])
def test_known_sizes_give_no_warning(options, run, tmp_path, caplog):
    convert_original(guessing(tmp_path, 12, **run), tmp_path / "ours", **options)
    assert "a guess" not in caplog.text


def test_data_of_another_vocabulary_at_data_path_give_a_warning(tmp_path, caplog):
    (tmp_path / "data/train").mkdir(parents=True)
    (tmp_path / "data/train/dataset.json").write_text(json.dumps({"seq_len": 49, "vocab_size": 14}))
    (tmp_path / "data/identifiers.json").write_text(json.dumps(["<blank>"] * 3))
    result = convert_original(guessing(tmp_path, 12, data_path=str(tmp_path / "data")), tmp_path / "ours")
    assert result["seq_len"] == 900 and result["identifiers_file"] is None
    assert "vocab_size=14, but the checkpoint has 12" in caplog.text
    assert "names 3 puzzles" in caplog.text


def test_unknown_architecture_with_fitting_tensors_gives_a_warning(tmp_path, caplog):
    (tmp_path / "run").mkdir()
    torch.save(golden.tensors(TRM, "state_dict/"), tmp_path / "run/step_1")
    config = yaml.safe_load(run_config("trm", fields_of(TRM)))
    config["arch"]["name"] = "recursive_reasoning.trm_singlez@TinyRecursiveReasoningModel_ACTV1_SingleZ"
    (tmp_path / "run/all_config.yaml").write_text(yaml.safe_dump(config))
    convert_original(tmp_path / "run", tmp_path / "ours", "trm")
    assert "SingleZ" in caplog.text and "compare the accuracy" in caplog.text


# ---- malicious files ----


class Malicious:
    def __reduce__(self):
        return os.mkdir, (os.environ["HRM_HF_TEST_TARGET"],)


@pytest.mark.parametrize(
    "content",
    [
        {"model.inner.lm_head.weight": Malicious()},
        {"model": {"a": torch.zeros(1)}, "config": Malicious()},
        {"model": {"a": torch.zeros(1)}, "config": defaultdict(dict, arch=Malicious())},
    ],
    ids=["weights", "configuration", "in a dict"],
)
def test_code_in_a_checkpoint_is_rejected_and_not_run(content, tmp_path, monkeypatch):
    monkeypatch.setenv("HRM_HF_TEST_TARGET", str(tmp_path / "pwned"))
    (tmp_path / "eqr.pth").write_bytes(saved(content))
    with pytest.raises(ValueError, match="never loaded"):
        convert_original(tmp_path / "eqr.pth", tmp_path / "ours", "eqr")
    assert not (tmp_path / "pwned").exists()
