"""Checkpoints of the original RLM-mHC. Referee: outputs of the original code (golden files)."""

import mhc_golden
import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from hrm_hf import RlmMhcForCausalLM
from hrm_hf.cli import app
from hrm_hf.text.convert import convert_rlm_mhc


FILE = "rlm_mhc_model_tiny"


def write_original(folder, case="nomhc", without=(), **overrides):
    """Write a checkpoint folder as the original saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**mhc_golden.read(FILE)[1]["cases"][case]["config"], **overrides}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    state = mhc_golden.tensors(FILE, f"{case}.state.")
    save_file({name: t for name, t in state.items() if name not in without}, folder / "model.safetensors")
    return folder


def converted(tmp_path, **loading) -> RlmMhcForCausalLM:
    convert_rlm_mhc(write_original(tmp_path / "original"), tmp_path / "ours")
    return RlmMhcForCausalLM.from_pretrained(tmp_path / "ours", **loading).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_converted_model_matches_the_original(tmp_path, attention):
    model = converted(tmp_path, attn_implementation=attention)
    given, expected = mhc_golden.tensors(FILE, "nomhc.in."), mhc_golden.tensors(FILE, "nomhc.f32.")
    output = model(given["input_ids"], labels=given["labels"], output_hidden_states=True)
    torch.testing.assert_close(output.logits, expected["logits"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.loss, expected["loss"].squeeze(), atol=1e-5, rtol=1e-5)
    before_norm = torch.stack(output.hidden_states[:-1])  # our last state is normed, the original's is not
    torch.testing.assert_close(before_norm, expected["hidden_states"][:-1], atol=1e-5, rtol=1e-5)
    mask = given["attention_mask"]
    padded = model(given["input_ids"], attention_mask=mask.long()).logits
    kept = mask.bool()
    torch.testing.assert_close(padded[kept], expected["logits_right_padded"][kept], atol=1e-5, rtol=1e-5)
    moved = model(given["input_ids"], position_ids=torch.arange(3, 15).unsqueeze(0)).logits
    torch.testing.assert_close(moved, expected["logits_offset3"], atol=1e-5, rtol=1e-5)


def test_a_converted_model_generates_the_originals_tokens(tmp_path):
    model = converted(tmp_path)
    prompt = mhc_golden.tensors(FILE, "nomhc.in.")["input_ids"][:1, :5]
    tokens = model.generate(prompt, max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert torch.equal(tokens, mhc_golden.tensors(FILE, "nomhc.f32.")["greedy"])


def test_up_cycling_a_converted_model_keeps_its_logits(tmp_path):
    model = converted(tmp_path, dtype=torch.float64)
    ids = mhc_golden.tensors(FILE, "nomhc.in.")["input_ids"]
    streams = RlmMhcForCausalLM.from_llama(model, mhc_enabled=True)
    assert len(streams.get_mhc_metrics()) == 3
    torch.testing.assert_close(streams(ids).logits, model(ids).logits, atol=1e-12, rtol=0)


def test_checkpoint_with_original_mhc_is_rejected_and_nothing_is_written(tmp_path):
    folder = write_original(tmp_path / "original", mhc_enabled=True)
    with pytest.raises(ValueError, match=r"config.yaml.*mhc_enabled: true"):
        convert_rlm_mhc(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_original_mhc_tensors_are_rejected_regardless_of_the_config(tmp_path):
    folder = write_original(tmp_path / "original")
    state = mhc_golden.tensors(FILE, "nomhc.state.")
    save_file({**state, "layers.0.mhc_pre.connection_weights": torch.zeros(4, 4)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors.*mHC"):
        convert_rlm_mhc(folder, tmp_path / "ours")


def test_every_mismatched_tensor_is_named(tmp_path):
    folder = write_original(
        tmp_path / "original", without=("norm.weight", "layers.1.ffn.down_proj.weight"), ffn_dim=80
    )
    with pytest.raises(ValueError) as error:
        convert_rlm_mhc(folder, tmp_path / "ours")
    for name in ("model.norm.weight", "layers.1.mlp.down_proj.weight", "layers.0.mlp.up_proj.weight"):
        assert name in str(error.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "config.yaml").unlink(), "config.yaml is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x80\x04."), r"model\.safetensors "),
        (lambda folder: (folder / "config.yaml").write_text("a: [1"), "config.yaml.*YAML"),
        (lambda folder: (folder / "config.yaml").write_text("hidden_dim: 8"), r"lacks \['num_layers'"),
        (lambda folder: write_original(folder, rope_theta=0), r"config\.yaml: rope_theta=0"),
        (lambda folder: write_original(folder, rope_theta=None), r"config\.yaml: rope_theta=None"),
    ],
)
def test_bad_folders_are_named(tmp_path, break_it, message):
    folder = write_original(tmp_path / "original")
    break_it(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        convert_rlm_mhc(folder, tmp_path / "ours")


def test_the_command_converts(tmp_path):
    folder = write_original(tmp_path / "original")
    result = CliRunner().invoke(app, ["convert", "rlm_mhc", str(folder), "--out", str(tmp_path / "ours"), "--json"])
    assert result.exit_code == 0, result.output
    assert '"parameters": 39328' in result.output and (tmp_path / "ours" / "model.safetensors").is_file()


# The mHC layers of the original, only as a referee; our models have no such layers.


def test_the_originals_mhc_layer_is_one_matrix_on_a_single_stream():
    cases = mhc_golden.read("rlm_mhc_layer_tiny")[1]["layer"]
    for case, sizes in cases.items():
        given = mhc_golden.tensors("rlm_mhc_layer_tiny", f"layer.{case}.in.")
        expected = mhc_golden.tensors("rlm_mhc_layer_tiny", f"layer.{case}.f64.")
        weights = {name.removesuffix(".weight"): value.double() for name, value in given.items()}
        found = original_mhc(weights["x"], weights, sizes["num_flows"], sizes["sinkhorn_iters"])
        torch.testing.assert_close(found, expected["y"], atol=1e-12, rtol=0)
        single = weights["x"] @ expected["equivalent_single_matrix"].T
        torch.testing.assert_close(found, single, atol=1e-12, rtol=0)


def test_the_original_model_with_its_mhc_is_reproduced_by_a_referee(tmp_path):
    state = {name: value.double() for name, value in mhc_golden.tensors(FILE, "mhc.state.").items()}
    if not state:
        pytest.skip("not in the committed subset")
    folder = write_original(
        tmp_path / "mhc", "mhc", without=[name for name in state if "mhc" in name], mhc_enabled=False
    )
    convert_rlm_mhc(folder, tmp_path / "body")
    plain = RlmMhcForCausalLM.from_pretrained(tmp_path / "body", dtype=torch.float64).eval()
    for index, layer in enumerate(plain.model.layers):
        for site, module in (("pre", layer), ("post", layer.mlp)):
            add_original_mhc(module, layer, site, index, state)
    logits = plain(mhc_golden.tensors(FILE, "mhc.in.")["input_ids"]).logits
    torch.testing.assert_close(logits, mhc_golden.tensors(FILE, "mhc.f64.")["logits"], atol=1e-6, rtol=1e-6)


def original_mhc(x, weights, flows, iterations=20):
    """contract(mix(expand(x))) with the original's Sinkhorn, columns last."""
    mixing = weights["connection_weights"].clamp(-50, 50).exp()
    for _ in range(iterations):
        mixing = mixing / (mixing.sum(1, keepdim=True) + 1e-8)
        mixing = mixing / (mixing.sum(0, keepdim=True) + 1e-8)
    streams = (x @ weights["expand_proj"].T).unflatten(-1, (flows, -1))
    return torch.einsum("ij,...jc->...ic", mixing, streams).flatten(-2) @ weights["contract_proj"].T


def add_original_mhc(module, layer, site, index, state):
    """x += mhc(norm(x)) before the attention block (`pre`), or between attention and feed-forward (`post`)."""
    prefix = f"layers.{index}.mhc_{site}."
    weights = {name[len(prefix) :].removesuffix(".weight"): t for name, t in state.items() if name.startswith(prefix)}
    gain = state[f"layers.{index}.norm_mhc_{site}.weight"]

    def added(x):
        return x + original_mhc(F.rms_norm(x, x.shape[-1:], eps=1e-6) * gain, weights, 4)

    if site == "pre":
        layer.register_forward_pre_hook(lambda module, args: (added(args[0]), *args[1:]))
        return
    before: list[torch.Tensor] = []
    norm, mlp = layer.post_attention_layernorm, layer.mlp

    def swap_input(module, args):
        before[:] = [args[0], added(args[0])]
        return (before[1],)

    norm.register_forward_pre_hook(swap_input)
    mlp.register_forward_hook(lambda module, args, output: output + before[1] - before[0])
