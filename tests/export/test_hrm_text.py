"""Export to transformers' `hrm_text`. Referee: transformers, loading the folder without this package's code."""

import pytest
import torch
from safetensors import safe_open
from test_gguf_loops import INPUT, TWO_STACKS, save
from transformers import AutoModelForCausalLM, AutoTokenizer, HrmTextForCausalLM

from hrm_hf.export.hrm_text import export_hrm_text


HEADS = {"num_key_value_heads": 4}


@pytest.mark.parametrize(
    "fields, passes",
    [
        (INPUT | {"L_cycles": 2, "initial_state": "learned"}, None),
        (INPUT | {"initial_state": "zero", "tie_word_embeddings": False, "exit_criterion": "q"}, 5),
        (TWO_STACKS, None),
    ],
)
def test_transformers_gives_the_same_logits_and_greedy_tokens(tmp_path, fields, passes):
    model = save(tmp_path / "model", **fields | HEADS | {"rope_parameters": {"rope_theta": 500.0}})
    result = export_hrm_text(tmp_path / "model", tmp_path / "out", passes=passes, check=True)
    assert result["max_difference"]["logits"] < 1e-5
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=False).eval()
    assert type(loaded) is HrmTextForCausalLM
    ids, options = torch.arange(8, 38)[None], {"num_segments": passes, "exit_criterion": "fixed"}
    with torch.no_grad():
        ours = model(ids, use_cache=False, **options).logits
        torch.testing.assert_close(loaded(ids).logits, ours, atol=1e-5, rtol=0)
    if passes is None:
        greedy = {"max_new_tokens": 8, "do_sample": False}
        assert loaded.generate(ids, **greedy).tolist() == model.generate(ids, **greedy).tolist()
    text = "func 世界() {}"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode(text) == [8 + byte for byte in text.encode()]


def test_projections_are_fused_on_disk(tmp_path):
    save(tmp_path / "model", **TWO_STACKS | HEADS)
    export_hrm_text(tmp_path / "model", tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert {"attn.gqkv_proj.weight", "mlp.gate_up_proj.weight"} <= {name.split(".", 4)[-1] for name in file.keys()}


def test_every_unsupported_field_is_named_and_nothing_is_written(tmp_path):
    save(tmp_path / "model", **INPUT | {"coda_input": "state", "pass_gains": True})
    message = r"hrm_text needs coda_input='state\+input', not 'state', .*pass_gains=.*num_key_value_heads=4, not 2"
    with pytest.raises(ValueError, match=message):
        export_hrm_text(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
