"""HRMText1 checkpoints become starting weights. Referee: the original block, written out here with correct attention.

The checkpoint is made up, since the published ones are large; names and shapes are those of the original's state_dict.
"""

import json
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from hrm_hf import HrmLmForCausalLM
from hrm_hf.cli import main
from hrm_hf.models.visited_attention import rotary_tables
from hrm_hf.text.convert import convert_hrm_text1


WIDTH, HEADS, UNITS, FF, VOCAB = 16, 2, 3, 24, 40
CONFIG = {
    "vocab_size": VOCAB, "block_size": 32, "n_embd": WIDTH, "n_head": HEADS, "n_layers": UNITS, "d_ff": FF,
    "dropout": 0.1, "use_rotary_embeddings": True, "tokenizer_type": "huggingface", "pad_token_id": 7,
}  # fmt: skip


def original_state():
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape, scale=0.3, around=0.0):
        return torch.randn(*shape, generator=generator) * scale + around

    state = {"token_embeddings.weight": drawn(VOCAB, WIDTH, scale=0.02), "final_norm.weight": drawn(WIDTH, around=1.0)}
    state["lm_head.weight"] = state["token_embeddings.weight"].clone()
    for unit in range(UNITS):
        for level in "HL":
            block = f"layers.{unit}.{level}_module."
            for norm in ("norm1", "norm2"):
                state[f"{block}{norm}.weight"] = drawn(WIDTH, around=1.0)
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                state[f"{block}attn.{name}.weight"] = drawn(WIDTH, WIDTH)
            state[f"{block}attn.rotary_emb.inv_freq"] = 10000.0 ** -(torch.arange(4) / 4)
            state[f"{block}mlp.w1.weight"], state[f"{block}mlp.w2.weight"] = drawn(FF, WIDTH), drawn(FF, WIDTH)
            state[f"{block}mlp.w3.weight"] = drawn(WIDTH, FF)
            state[f"layers.{unit}.{level.lower()}_prediction_head.weight"] = drawn(VOCAB, WIDTH)
        for name, width in (("q_network", 2), ("ponder_network", 1)):
            for layer, shape in ((0, (4, WIDTH)), (2, (width, 4))):
                state[f"layers.{unit}.{name}.{layer}.weight"] = drawn(*shape)
                state[f"layers.{unit}.{name}.{layer}.bias"] = drawn(shape[0])
    return state


@pytest.fixture
def write_original(tmp_path):
    """Write a folder like the original: `write(state, file name, config fields)`."""

    def write(state=None, file="pytorch_model.bin", **fields):
        folder = tmp_path / "original"
        folder.mkdir(exist_ok=True)
        state = original_state() if state is None else state
        save_file(state, folder / file) if file.endswith("safetensors") else torch.save(state, folder / file)
        config = {name: value for name, value in {**CONFIG, **fields}.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def original_block(state, block, x):
    """Pre-norm attention and SwiGLU of one sequence [T, WIDTH], with the original's norm: x / |x| times a gain."""

    def norm(x, name):
        return x / x.norm(dim=-1, keepdim=True) * state[f"{block}.{name}.weight"]

    def heads(name, h):
        return (h @ state[f"{block}.attn.{name}_proj.weight"].T).view(len(x), HEADS, -1).transpose(0, 1)

    def rotated(h):
        angle = torch.arange(len(x))[:, None] * state[f"{block}.attn.rotary_emb.inv_freq"]
        first, second = h.chunk(2, dim=-1)
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)

    h = norm(x, "norm1")
    query, key, value = rotated(heads("q", h)), rotated(heads("k", h)), heads("v", h)
    scores = query @ key.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
    seen = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf")).softmax(-1) @ value
    x = x + seen.transpose(0, 1).reshape(len(x), WIDTH) @ state[f"{block}.attn.out_proj.weight"].T
    h, mlp = norm(x, "norm2"), f"{block}.mlp"
    return (
        x + (F.silu(h @ state[f"{mlp}.w1.weight"].T) * (h @ state[f"{mlp}.w2.weight"].T)) @ state[f"{mlp}.w3.weight"].T
    )


class NoCache:
    def update(self, key, value):
        return key, value


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_each_block_matches_the_original_with_correct_attention(write_original, tmp_path, file):
    convert_hrm_text1(write_original(file=file), tmp_path / "ours")
    model, state = HrmLmForCausalLM.from_pretrained(tmp_path / "ours").eval(), original_state()
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
    positions = rotary_tables(*model.model.rotary_emb(x[None], torch.arange(6)[None]))
    for level, stack in (("H", model.model.H_module), ("L", model.model.L_module)):
        assert len(stack.layers) == UNITS
        for unit, layer in enumerate(stack.layers):
            with torch.no_grad():
                where = {"key_values": NoCache(), "pass_number": 0}
                ours = layer(x[None], position_embeddings=positions, attention_mask=None, **where)
            expected = original_block(state, f"layers.{unit}.{level}_module", x)
            torch.testing.assert_close(ours[0], expected, atol=1e-5, rtol=1e-4)


def test_embeddings_final_norm_and_config_are_converted(write_original, tmp_path):
    result = convert_hrm_text1(write_original(H_cycles=1, L_cycles=2, rotary_embedding_base=500), tmp_path / "ours")
    model, state = HrmLmForCausalLM.from_pretrained(tmp_path / "ours"), original_state()
    config = model.config
    assert torch.equal(model.get_input_embeddings().weight, state["token_embeddings.weight"])
    assert model.lm_head.weight is model.get_input_embeddings().weight
    h = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = h / h.norm(dim=-1, keepdim=True) * state["final_norm.weight"]
    torch.testing.assert_close(model.model.H_module.exit_norm(h), expected, atol=1e-5, rtol=1e-4)
    assert (config.H_cycles, config.L_cycles, config.bp_steps, config.rope_parameters["rope_theta"]) == (1, 2, 3, 500)
    assert (config.norm_affine, config.attention_gate, config.hidden_dropout, config.pad_token_id) == (
        True, False, 0.1, 7,
    )  # fmt: skip
    halt, go_on = model.model.q_head.bias.tolist()
    assert (halt, go_on) == (-5.0, pytest.approx(-5 - math.log(0.05 / 0.95))) and model.model.z_L_init.std() > 0
    scaled = model.get_input_embeddings().weight * config.embedding_scale
    assert scaled.square().mean().sqrt().item() == pytest.approx(1)
    heads = UNITS * 2 * VOCAB * WIDTH
    networks = UNITS * (2 * (4 * WIDTH + 4) + (2 * 4 + 2) + (4 + 1))
    assert result["dropped_parameters"] == heads + networks
    assert (result["units"], result["architecture"]) == (UNITS, "hrm_lm")


def test_a_converted_model_trains_and_generates(write_original, tmp_path):
    convert_hrm_text1(write_original(), tmp_path / "ours")
    model = HrmLmForCausalLM.from_pretrained(tmp_path / "ours")
    ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    assert (model.config.H_cycles, model.config.L_cycles) == (2, 3)  # not in the original's config.json
    model(ids, labels=ids).loss.backward()
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 11)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_prefixes_of_wrappers_are_removed(write_original, tmp_path, prefix):
    state = {prefix + name: tensor for name, tensor in original_state().items()}
    assert convert_hrm_text1(write_original(state), tmp_path / "ours")["units"] == UNITS


def test_tokenizer_files_are_copied(write_original, tmp_path):
    folder = write_original()
    (folder / "tokenizer.json").write_text("{}")
    convert_hrm_text1(folder, tmp_path / "ours")
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == "{}"


def test_conversion_notes_why_outputs_cannot_match(write_original, tmp_path):
    result = convert_hrm_text1(write_original(), tmp_path / "ours")
    for reason in ("outputs cannot match", "attends to later tokens", "merges heads", "shifted twice", "L2 norm"):
        assert reason in result["note"]


def test_the_command_converts(write_original, tmp_path, capsys, monkeypatch):
    command = ["hrm-hf", "convert", "hrm_lm", str(write_original()), "--out", str(tmp_path / "ours"), "--json"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as exit_status:
        main()
    assert exit_status.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["parameters"] == HrmLmForCausalLM.from_pretrained(tmp_path / "ours").num_parameters()


# Errors


def without(name):
    state = original_state()
    del state[name]
    return state


def changed(name, tensor):
    return {**original_state(), name: tensor}


@pytest.mark.parametrize(
    ("state", "fields", "message"),
    [
        (without("layers.1.L_module.mlp.w2.weight"), {}, "model.L_module.layers.1.mlp.up_proj.weight"),
        (without("final_norm.weight"), {}, "model.H_module.exit_norm.weight"),
        (without("token_embeddings.weight"), {}, "lacks token_embeddings.weight"),
        (changed("router.weight", torch.zeros(2, 3)), {}, "router.weight"),
        (
            changed("layers.0.H_module.attn.q_proj.weight", torch.zeros(16, 8)), {},
            "model.H_module.layers.0.self_attn.q_proj.weight",
        ),
        ({"token_embeddings.weight": torch.zeros(4, 4)}, {}, r"layers \[\]"),
        (changed("pos_embeddings.weight", torch.zeros(32, 16)), {}, r"learned positions \(pos_embeddings.weight"),
        (None, {"use_rotary_embeddings": False}, "use_rotary_embeddings"),
        (None, {"n_head": None}, "n_head=None"),
        (None, {"rotary_embedding_base": -1}, r"config\.json: rotary_embedding_base=-1"),
        (None, {"rotary_embedding_base": "fast"}, r"config\.json: rotary_embedding_base='fast'"),
    ],
)  # fmt: skip
def test_mismatched_checkpoint_is_rejected_by_tensor_or_field(write_original, tmp_path, state, fields, message):
    with pytest.raises(ValueError, match=message):
        convert_hrm_text1(write_original(state, **fields), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_missing_or_corrupted_files_are_named(write_original, tmp_path):
    folder = write_original()
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json is missing"):
        convert_hrm_text1(folder, tmp_path / "ours")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json.*JSON"):
        convert_hrm_text1(folder, tmp_path / "ours")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"model.safetensors.*\['config.json'\]"):
        convert_hrm_text1(folder, tmp_path / "ours")
    write_original()
    (folder / "model.safetensors").write_bytes(b"\x01" * 20)
    with pytest.raises(ValueError, match=r"model\.safetensors "):
        convert_hrm_text1(folder, tmp_path / "ours")


class Harmful:
    def __reduce__(self):
        return print, ("code has run",)


def test_pickled_code_is_not_run(write_original, tmp_path, capsys):
    folder = write_original({"token_embeddings.weight": Harmful()})
    with pytest.raises(ValueError, match="Python objects"):
        convert_hrm_text1(folder, tmp_path / "ours")
    assert "code has run" not in capsys.readouterr().out
