"""Conversion of original checkpoints to ours and back. Referee: the original's weights and logits."""

import json
import sys

import golden
import pytest
import torch
import yaml
from golden import CASES, HRM, TRM, TRM_MLP

from hrm_hf import AutoModelForPuzzleSolving
from hrm_hf.cli import main
from hrm_hf.puzzles.convert import convert_original, convert_to_original, our_name


NAMES = {"hrm": "hrm.hrm_act_v1@HierarchicalReasoningModel_ACTV1"}
NAMES["trm"] = "recursive_reasoning.trm@TinyRecursiveReasoningModel_ACTV1"
TABLE_ROWS = 8


def original_state(case, dtype=torch.float32):
    """Return the golden state_dict with initial states in the forward's dtype, as in the original."""
    state = golden.tensors(case, "state_dict/")
    return {name: value.to(dtype) if name.endswith("_init") else value for name, value in state.items()}


@pytest.fixture
def write_original(tmp_path):
    """Return a function `write(case, state=..., arch fields=...)` that writes a folder like the original."""

    def write(case=HRM, state=None, step=10, identifiers=TABLE_ROWS, run=None, **arch):
        folder = tmp_path / "original"
        folder.mkdir(exist_ok=True)
        torch.save(original_state(case) if state is None else state, folder / f"step_{step}")
        fields = {**golden.original_arch(case), "name": NAMES[case.architecture]}
        for name in ("batch_size", "seq_len", "vocab_size", "num_puzzle_identifiers"):
            fields.pop(name)  # the original takes these from the data set's metadata
        fields = {name: value for name, value in (fields | arch).items() if value is not None}
        config = {"arch": fields, "data_path": "data/nowhere", "global_batch_size": 768, "lr": 1e-4, **(run or {})}
        (folder / "all_config.yaml").write_text(yaml.safe_dump(config))
        if identifiers:
            (folder / "identifiers.json").write_text(json.dumps(["<blank>"] + ["a"] * (identifiers - 1)))
        return folder

    return write


def first_logits(model, case):
    with torch.no_grad():
        return model(**golden.batch(case, "A")).logits


@pytest.mark.parametrize("prefix", ["model.inner.", "_orig_mod.model.inner.", "inner.", "", "model._orig_mod.inner."])
def test_converted_weights_give_the_original_logits_with_any_name_prefix(write_original, tmp_path, prefix):
    state = {name.replace("model.inner.", prefix): value for name, value in original_state(HRM).items()}
    result = convert_original(write_original(HRM, state), tmp_path / "ours", "hrm")
    model = AutoModelForPuzzleSolving.from_pretrained(tmp_path / "ours").eval()
    expected = golden.tensors(HRM, "eval/step1/")["logits"]
    torch.testing.assert_close(first_logits(model, HRM), expected, atol=1e-4, rtol=0)
    assert (model.config.task, model.config.grid_shape, model.config.box_shape) == ("sudoku", [9, 9], [3, 3])
    assert result["puzzle_identifiers"] == TABLE_ROWS and (tmp_path / "ours/identifiers.json").is_file()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_is_bit_exact(write_original, tmp_path, case, dtype):
    state = original_state(case, getattr(torch, dtype))
    folder = write_original(case, state, forward_dtype=dtype)
    convert_original(folder, tmp_path / "ours", case.architecture)
    convert_to_original(tmp_path / "ours", tmp_path / "back")
    back = torch.load(tmp_path / "back/step_10", weights_only=True)
    assert back.keys() == state.keys()
    for name, value in state.items():
        assert back[name].dtype == value.dtype and torch.equal(back[name], value), name
    before, after = (yaml.safe_load((path / "all_config.yaml").read_text()) for path in (folder, tmp_path / "back"))
    assert after["arch"] == {**before.pop("arch"), "H_layers": 0 if case.architecture == "trm" else 2}
    assert before.items() <= after.items()
    assert (tmp_path / "back/identifiers.json").read_text() == (folder / "identifiers.json").read_text()
    # the result is an original checkpoint again
    convert_original(tmp_path / "back", tmp_path / "again", case.architecture)
    again = AutoModelForPuzzleSolving.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(again[our_name(name)], value.float()) for name, value in state.items())


def test_forward_dtype_is_bfloat16_where_the_original_leaves_its_default(write_original, tmp_path):
    convert_original(write_original(HRM, forward_dtype=None), tmp_path / "ours")
    model = AutoModelForPuzzleSolving.from_pretrained(tmp_path / "ours")
    assert model.config.forward_dtype == "bfloat16" and model.dtype == torch.float32
    assert first_logits(model, HRM).dtype == torch.bfloat16


def test_every_missing_unexpected_and_misshapen_tensor_is_named_at_once(write_original, tmp_path):
    state = original_state(HRM)
    state.pop("model.inner.lm_head.weight")
    state.pop("model.inner.H_level.layers.1.mlp.down_proj.weight")
    state["model.inner.q_head.weight"] = torch.zeros(2, 65)
    state["model.inner.L_level.layers.0.mlp.dwconv.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match="do not fit") as error:
        convert_original(write_original(HRM, state), tmp_path / "ours")
    missing, unexpected, misshapen = str(error.value).splitlines()[1:]
    assert "lm_head.weight" in missing and "H_level.layers.1.mlp.down_proj.weight" in missing
    assert "L_level.layers.0.mlp.dwconv.weight" in unexpected
    assert "q_head.weight" in misshapen and "[2, 65]" in misshapen and "[2, 64]" in misshapen
    assert not (tmp_path / "ours").exists()


def test_names_that_coincide_without_prefixes_are_rejected(write_original, tmp_path):
    state = original_state(HRM) | {"lm_head.weight": torch.zeros(11, 64)}
    with pytest.raises(ValueError, match=r"several tensors.*lm_head\.weight"):
        convert_original(write_original(HRM, state), tmp_path / "ours")


def test_the_largest_step_is_the_default(write_original, tmp_path):
    folder = write_original(HRM, step=9)
    torch.save({}, folder / "step_10")
    with pytest.raises(ValueError, match="vocab_size=None"):
        convert_original(folder, tmp_path / "ours")
    assert convert_original(folder, tmp_path / "ours", step=9)["source"].endswith("step_9")
    assert convert_original(folder / "step_9", tmp_path / "ours")["source"].endswith("step_9")
    with pytest.raises(FileNotFoundError, match=r"step_3; .*\['step_9', 'step_10'\]"):
        convert_original(folder, tmp_path / "ours", step=3)


@pytest.mark.parametrize("size", [0, 3, 1000, 100_000])
def test_a_truncated_file_is_named(write_original, tmp_path, size):
    folder = write_original(HRM)
    content = (folder / "step_10").read_bytes()
    (folder / "step_10").write_bytes(content[:size])
    with pytest.raises(ValueError, match=r"step_10 .*corrupted"):
        convert_original(folder, tmp_path / "ours")


@pytest.mark.parametrize(
    "content",
    [[1, 2], {"weights": {"a": torch.zeros(1)}}, {"model": {"a": [1]}, "config": {}}],
    ids=["list", "nested", "model"],
)
def test_files_without_a_state_dict_are_rejected(write_original, tmp_path, content):
    with pytest.raises(ValueError, match="expected a state_dict"):
        convert_original(write_original(HRM, content), tmp_path / "ours")


def test_a_missing_or_broken_config_is_named(write_original, tmp_path):
    folder = write_original(HRM)
    for text, message in (("a: [", "YAML"), ("lr: 1", "arch"), ("arch: {}", "arch lacks")):
        (folder / "all_config.yaml").write_text(text)
        with pytest.raises(ValueError, match=f"all_config.yaml.*{message}"):
            convert_original(folder, tmp_path / "ours")
    (folder / "all_config.yaml").unlink()
    with pytest.raises(FileNotFoundError, match=r"all_config\.yaml .*--config FILE"):
        convert_original(folder, tmp_path / "ours")
    with pytest.raises(FileNotFoundError, match="step_N"):
        convert_original(tmp_path, tmp_path / "ours")


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ({"H_cycles": "two"}, "'H_cycles' .*'two'"),
        ({"pos_encodings": "alibi"}, "pos_encodings='alibi'"),
        ({"num_heads": 3}, "hidden_size=64: .*num_attention_heads=3"),
        ({"name": NAMES["trm"]}, "arch.name="),
        ({"loss": {"loss_type": "focal"}}, "loss_type='focal'"),
        ({"rope_theta": "fast"}, r"all_config\.yaml: arch\.rope_theta='fast'"),
        ({"rope_theta": 0}, r"arch\.rope_theta=0: "),
        ({"rope_theta": -1.5}, r"arch\.rope_theta=-1\.5"),
        ({"rope_theta": float("nan")}, r"arch\.rope_theta=nan"),
        ({"rope_theta": float("inf")}, r"arch\.rope_theta=inf"),
        ({"rope_theta": True}, r"arch\.rope_theta=True"),
        ({"hidden_size": "64"}, r"arch\.hidden_size='64'"),
        ({"num_heads": 0}, r"arch\.num_heads=0"),
        ({"head_dim": 7}, r"arch\.head_dim=7"),
        ({"puzzle_emb_ndim": "64"}, r"arch\.puzzle_emb_ndim='64'"),
        ({"seq_len": "81"}, r"arch\.seq_len='81'"),
        ({"vocab_size": 11.5}, r"arch\.vocab_size=11\.5"),
        ({"board_height": "9", "board_width": 9}, r"arch\.board_height='9'"),
    ],
)
def test_impossible_architectures_are_rejected_by_field(write_original, tmp_path, arch, message):
    with pytest.raises(ValueError, match=message):
        convert_original(write_original(HRM, **arch), tmp_path / "ours")


def test_numbers_that_yaml_reads_as_text_are_numbers(write_original, tmp_path):
    convert_original(write_original(HRM, rms_norm_eps="1e-5"), tmp_path / "ours")
    assert AutoModelForPuzzleSolving.from_pretrained(tmp_path / "ours").config.rms_norm_eps == 1e-5


def test_trm_with_a_continue_value_is_rejected(write_original, tmp_path):
    with pytest.raises(ValueError, match="no_ACT_continue=False"):
        convert_original(write_original(TRM, no_ACT_continue=False), tmp_path / "ours", "trm")


def test_unsupported_fields_are_reported(write_original, tmp_path, caplog):
    convert_original(write_original(HRM, causal=False), tmp_path / "ours")
    assert "does not have: ['causal']" in caplog.text


# Sizes that are not in all_config.yaml


def with_vocabulary(vocab_size, case=HRM):
    return {
        name: torch.zeros(vocab_size, 64) if "embed_tokens" in name or "lm_head" in name else value
        for name, value in original_state(case).items()
    }


def test_seq_len_comes_from_learned_positions_or_position_mixing(write_original, tmp_path):
    state = with_vocabulary(13) | {"model.inner.embed_pos.embedding_weight": torch.zeros(50 + 1, 64)}
    result = convert_original(write_original(HRM, state, pos_encodings="learned"), tmp_path / "learned")
    assert (result["seq_len"], result["seq_len_from"]) == (50, "embed_pos.embedding_weight")
    result = convert_original(write_original(TRM_MLP, with_vocabulary(13, TRM_MLP)), tmp_path / "mixing", "trm")
    assert result["seq_len"] == 81 and "mlp_t" in result["seq_len_from"]


def test_seq_len_comes_from_the_data_folder(write_original, tmp_path):
    (tmp_path / "data/train").mkdir(parents=True)
    meta = tmp_path / "data/train/dataset.json"
    meta.write_text(json.dumps({"seq_len": 49, "vocab_size": 13}))
    folder = write_original(HRM, with_vocabulary(13), run={"data_path": str(tmp_path / "data")})
    result = convert_original(folder, tmp_path / "ours")
    assert (result["seq_len"], result["seq_len_from"], result["task"]) == (49, str(meta), "generic")
    meta.write_text(json.dumps({"seq_len": 49, "vocab_size": 14}))
    with pytest.raises(ValueError, match="vocab_size=13"):
        convert_original(folder, tmp_path / "ours")


@pytest.mark.parametrize(("vocab_size", "task"), [(6, "maze"), (12, "arc")])
def test_seq_len_of_a_known_vocabulary(write_original, tmp_path, vocab_size, task):
    result = convert_original(write_original(HRM, with_vocabulary(vocab_size)), tmp_path / "ours")
    assert (result["seq_len"], result["task"]) == (900, task)


def test_an_unknown_seq_len_must_be_given(write_original, tmp_path):
    folder = write_original(HRM, with_vocabulary(13))
    with pytest.raises(ValueError, match="--seq-len N"):
        convert_original(folder, tmp_path / "ours")
    assert convert_original(folder, tmp_path / "ours", seq_len=25)["seq_len"] == 25


def test_a_table_without_identifiers_gives_a_warning(write_original, tmp_path, caplog):
    convert_original(write_original(HRM, identifiers=0), tmp_path / "ours")
    assert "8 rows of the puzzle table have no names" in caplog.text


def test_identifiers_of_other_data_are_rejected(write_original, tmp_path):
    with pytest.raises(ValueError, match=r"identifiers\.json .*5 puzzles, .*8 rows"):
        convert_original(write_original(HRM, identifiers=5), tmp_path / "ours")


def test_identifiers_come_from_the_data_folder_if_the_checkpoint_has_none(write_original, tmp_path):
    folder = write_original(HRM, run={"data_path": str(tmp_path / "data")})
    (tmp_path / "data").mkdir()
    (folder / "identifiers.json").rename(tmp_path / "data/identifiers.json")
    result = convert_original(folder, tmp_path / "ours")
    assert result["identifiers_file"] == str(tmp_path / "data/identifiers.json")


@pytest.mark.parametrize(
    "case, fields, message",
    [
        (HRM, {"pos_encodings": "none"}, "hrm .*: pos_encodings='none'"),
        (TRM, {"pos_encodings": "rope2d", "grid_shape": [9, 9]}, "pos_encodings='rope2d'"),
        (TRM, {"update_rate": 0.95, "noise_scale": 0.01}, "trm .*: update_rate=0.95; noise_scale=0.01"),
    ],
)
def test_fields_the_original_cannot_express_are_rejected(case, fields, message, tmp_path):
    model = golden.model(case, **fields)
    model.save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=message):
        convert_to_original(tmp_path / "ours", tmp_path / "back")
    assert not (tmp_path / "back").exists()


# Command line


def run_cli(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["hrm-hf", "convert", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_status:
        main()
    return exit_status.value.code or 0


def test_the_command_converts_in_both_directions(write_original, tmp_path, monkeypatch, capsys):
    folder = write_original(TRM)
    assert run_cli(monkeypatch, "trm", folder, "--out", tmp_path / "ours", "--json") == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == "trm_puzzle"
    assert (
        run_cli(monkeypatch, "trm", tmp_path / "ours", "--out", tmp_path / "back", "--to-original", "--step", "7") == 0
    )
    assert "weights: step_7" in capsys.readouterr().out
    assert (tmp_path / "back/step_7").is_file()


def test_the_command_exits_2_on_bad_usage_and_1_on_failure(write_original, tmp_path, monkeypatch, capsys):
    folder = write_original(TRM)
    out = tmp_path / "ours"
    assert run_cli(monkeypatch, "urm", folder, "--out", out) == 2
    assert run_cli(monkeypatch, "trm", tmp_path / "nowhere", "--out", out) == 2
    assert run_cli(monkeypatch, "trm", folder, "--out", out, "--to-original", "--seq-len", "81") == 2
    assert run_cli(monkeypatch, "trm", folder) == 2
    assert run_cli(monkeypatch, "trm", folder, "--out", out, "--seq-len", "0") == 2
    assert run_cli(monkeypatch, "hrm", folder, "--out", out) == 1
    assert "arch.name" in capsys.readouterr().err
    golden.model(HRM).save_pretrained(out)
    assert run_cli(monkeypatch, "trm", out, "--out", tmp_path / "back", "--to-original") == 1
    assert "model_type='hrm_puzzle'" in capsys.readouterr().err
