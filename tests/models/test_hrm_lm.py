"""`hrm_lm` as a Hugging Face model: sizes, initial values, saving, variants, errors."""

import pytest
import tiny_hrm_lm
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from hrm_hf import HrmLmConfig, HrmLmForCausalLM


# name: parameters, KiB of keys and values per token and segment in bfloat16, layer visits per segment
PRESETS = {
    "hrm-lm-10m-byte": (11_603_714, 36, 24),
    "hrm-lm-25m": (26_985_218, 24, 16),
    "hrm-lm-50m": (50_136_066, 48, 24),
    "hrm-lm-100m": (99_976_706, 96, 32),
    "hrm-lm-350m": (357_173_250, 352, 88),
    "hrm-lm-1b": (1_058_737_154, 768, 128),
    "hrm-lm-loop-100k-tasks": (107_186, 224 / 1024, 1),
    "hrm-lm-loop-10m-byte": (11_603_714, 3, 2),
    "hrm-lm-loop-25m": (26_985_218, 3, 2),
    "hrm-lm-loop-50m": (50_136_066, 4, 2),
    "hrm-lm-loop-100m": (99_976_706, 12, 4),
    "hrm-lm-loop-25m-served-hrm-text": (26_985_218, 3, 2),
    "hrm-lm-loop-50m-served-hrm-text": (50_136_066, 6, 3),
    "hrm-lm-loop-25m-served-nanbeige": (26_398_850, 6, 4),
    "hrm-lm-loop-50m-served-nanbeige": (48_569_858, 12, 6),
}


@pytest.mark.parametrize("name", HrmLmConfig.presets())
def test_a_preset_has_its_published_size(name):
    parameters, kib, visits = PRESETS[name]
    config = HrmLmConfig.from_preset(name)
    with torch.device("meta"):
        model = HrmLmForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert config.segment_visits == visits
    once = config.prelude_layers + config.coda_layers
    assert config.num_hidden_layers == once + visits * config.halt_max_steps
    assert visits * 2 * config.num_key_value_heads * config.head_dim * 2 == kib * 1024


# Starting values


def rms(x):
    return x.square().mean(-1).sqrt()


@pytest.mark.parametrize("norm_position", ["pre_exit", "post"])
def test_states_leave_a_stack_with_a_root_mean_square_of_one(norm_position):
    model, seen = tiny_hrm_lm.model(norm_position=norm_position), []
    for stack in (model.model.H_module, model.model.L_module):
        stack.register_forward_hook(lambda module, inputs, output: seen.append(rms(output)))
    with torch.no_grad():
        model(tiny_hrm_lm.tokens())
    torch.testing.assert_close(torch.stack(seen), torch.ones(3 * 8, 2, 10), atol=1e-4, rtol=0)


def test_embeddings_enter_with_a_root_mean_square_of_one():
    for initializer_range in (None, 0.02):
        model = tiny_hrm_lm.model(initializer_range=initializer_range, vocab_size=2000)
        scaled = model.get_input_embeddings().weight * model.config.embedding_scale
        assert rms(scaled.flatten()).item() == pytest.approx(1, abs=0.02)


def starts_undecided(model):
    """Check that the halt value starts at -5, and the gate sigmoid(halt - continue) at 5 %."""
    bias, weight = model.model.q_head.bias, model.model.q_head.weight
    gate = torch.sigmoid(bias[0] - bias[1]).item()
    return bias[0] == -5.0 and gate == pytest.approx(0.05, rel=1e-4) and weight.abs().max() == 0


def test_a_new_gate_continues_however_the_model_is_built(tmp_path):
    config = tiny_hrm_lm.config()
    assert starts_undecided(HrmLmForCausalLM(config))
    model = AutoModelForCausalLM.from_config(config)
    assert starts_undecided(model)
    with torch.no_grad():
        q = model(tiny_hrm_lm.tokens()).q_logits
    assert torch.equal(q, model.model.q_head.bias.expand_as(q))
    with torch.device("meta"):
        model = HrmLmForCausalLM(config)
    model.to_empty(device="cpu")
    model.init_weights()
    assert starts_undecided(model)
    # Loading a checkpoint without the head goes through the meta device and must initialize the head.
    tiny_hrm_lm.model(halt_max_steps=1).save_pretrained(tmp_path)
    assert starts_undecided(HrmLmForCausalLM.from_pretrained(tmp_path, halt_max_steps=3))


def test_initial_logits_are_of_order_one_at_any_width():
    for width in (32, 256):
        model = tiny_hrm_lm.model(hidden_size=width, vocab_size=500)
        with torch.no_grad():
            assert 0.5 < model(tiny_hrm_lm.tokens()).logits.std() < 2


def test_the_low_level_state_starts_at_a_saved_random_vector(tmp_path):
    model = tiny_hrm_lm.model(hidden_size=256)
    start = model.model.z_L_init
    assert start.std().item() == pytest.approx(1, abs=0.2)
    model.save_pretrained(tmp_path)
    assert torch.equal(HrmLmForCausalLM.from_pretrained(tmp_path).model.z_L_init, start)
    assert not torch.equal(tiny_hrm_lm.model(seed=1, hidden_size=256).model.z_L_init, start)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_bfloat16_model_trains_and_generates_with_finite_numbers(attention):
    model, ids = tiny_hrm_lm.model(attention=attention).to(torch.bfloat16), tiny_hrm_lm.tokens()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    output = model.train()(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    output.loss.backward()
    assert output.logits.dtype == torch.bfloat16 and output.logits.isfinite().all()
    assert output.loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())
    written = model.eval().generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert written.shape == (2, 13)


# Saving and loading


def test_tied_weights_are_saved_once_and_tied_again(tmp_path):
    model = tiny_hrm_lm.model()
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.get_input_embeddings().weight
    model.resize_token_embeddings(60)
    assert model.lm_head.weight is model.get_input_embeddings().weight and model.lm_head.weight.shape == (60, 32)


# Outputs


def test_states_and_attentions_of_every_layer_visit_are_returned_on_request():
    model, ids = tiny_hrm_lm.model(attention="eager"), tiny_hrm_lm.tokens()
    output = model(ids, output_hidden_states=True, output_attentions=True, exit_criterion="fixed")
    visits = 3 * model.config.segment_visits
    assert len(output.attentions) == visits and output.attentions[0].shape == (2, 4, 10, 10)
    assert len(output.hidden_states) in (visits, visits + 1) and output.hidden_states[0].shape == (2, 10, 32)


def test_logits_of_each_segment_are_returned_on_request_and_stop_changing_where_a_token_halts():
    model, ids = tiny_hrm_lm.model(), tiny_hrm_lm.tokens()
    with torch.no_grad():
        output = model(ids, output_segment_logits=True)
        fixed = model(ids, output_segment_logits=True, exit_criterion="fixed")
    assert output.segment_logits.shape == (2, 3, 10, tiny_hrm_lm.VOCAB_SIZE)
    assert torch.equal(output.segment_logits[:, 0], fixed.segment_logits[:, 0])
    for row, position in output.halt_steps.new_ones(2, 10).nonzero().tolist():
        for m in range(output.halt_steps[row, position], 3):
            assert torch.equal(output.segment_logits[row, m, position], output.logits[row, position])


def test_fewer_logits_are_computed_on_request():
    model, ids = tiny_hrm_lm.model(), tiny_hrm_lm.tokens()
    with torch.no_grad():
        whole = model(ids).logits
        torch.testing.assert_close(model(ids, logits_to_keep=2).logits, whole[:, -2:])
        torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([0, 5])).logits, whole[:, [0, 5]])


def test_the_seed_determines_the_training_loss():
    model, ids = tiny_hrm_lm.model(halt_exploration_prob=0.5, hidden_dropout=0.1).train(), tiny_hrm_lm.tokens()
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(model(ids, labels=ids).loss.item())
    assert losses[0] == losses[1] != losses[2]


# Variants

SMALL = {"num_h_layers": 1, "L_cycles": 1, "bp_steps": 3, "halt_max_steps": 2}
VARIANTS = {
    "one key head": {"num_key_value_heads": 1},
    "as many key heads": {"num_key_value_heads": 4},
    "default key heads": {"num_key_value_heads": None},
    "wide heads": {"head_dim": 16},
    "normalized queries": {"qk_norm": True},
    "post norm": {"norm_position": "post"},
    "gains": {"norm_affine": True, "qk_norm": True},
    "no gate": {"attention_gate": False},
    "dropout": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "untied": {"tie_word_embeddings": False},
    "fixed std": {"initializer_range": 0.02},
    "one pass": {"H_cycles": 1, "L_cycles": 1, "bp_steps": 2},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "correct": {"q_target": "correct", "ponder_type": "geometric_kl", "ds_schedule": "uniform"},
    "cdf": {"exit_criterion": "cdf", "ponder_type": "neg_entropy", "deep_supervision": "last"},
    "one segment": {"halt_max_steps": 1},
    "last visit": {"kv_layout": "last_visit"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_learns_a_sentence_and_decodes_it_with_the_cache(variant, tmp_path):
    model = tiny_hrm_lm.model(undecided=False, **{**SMALL, **VARIANTS[variant]}).train()
    ids = torch.tensor([[2, 10, 20, 30, 11, 21, 31, 12, 22, 32]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    for _ in range(40):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.1:
            break
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.generate(ids[:, :2], max_new_tokens=8, do_sample=False, eos_token_id=None), ids)


# Errors


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_position": "pre"}, {"exit_criterion": "cosine"}, {"kv_layout": "shared"}, {"deep_supervision": "none"},
        {"ds_schedule": "cosine"}, {"q_target": "exact"}, {"ponder_type": "kl"}, {"initial_state": "ones"},
        {"segment_sampling": "uniform"}, {"num_l_layers": 0}, {"H_cycles": 2, "num_h_layers": 0}, {"L_cycles": 0},
        {"bp_steps": 5, "num_h_layers": 0, "H_cycles": 1}, {"bp_steps": 1}, {"bp_steps": 9}, {"mhc_flows": 4},
        {"bp_segments": 2}, {"halt_max_steps": 0}, {"num_attention_heads": 4, "num_key_value_heads": 3},
        {"head_dim": 7}, {"halt_min_steps": 4}, {"halt_exploration_prob": 1.5}, {"label_smoothing": -0.1},
        {"hidden_size": "wide"},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_with_an_impossible_value_is_rejected_by_field(fields):
    name, value = next(iter(fields.items()))
    with pytest.raises((StrictDataclassError, ValueError, TypeError), match=f"{name}.*{value}"):
        tiny_hrm_lm.config(**fields)


def test_an_unknown_preset_is_rejected_with_the_known_presets():
    with pytest.raises(ValueError, match=r"hrm-lm-7b.*hrm-lm-100m"):
        HrmLmConfig.from_preset("hrm-lm-7b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_segments": 0}, "num_segments=0"),
        ({"num_segments": 4, "use_cache": True}, "num_segments=4"),
        ({"input_ids": None}, "input_ids and inputs_embeds"),
        ({"inputs_embeds": torch.zeros(2, 10, 32)}, "input_ids and inputs_embeds"),
        ({"exit_criterion": "cosine"}, "exit_criterion='cosine'"),
    ],
)
def test_an_impossible_argument_is_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_hrm_lm.model()(**{"input_ids": tiny_hrm_lm.tokens(), **arguments})


# Compiled


@pytest.mark.slow
@pytest.mark.parametrize("exit_criterion", ["fixed", "q"])
def test_a_compiled_forward_equals_the_eager_one(exit_criterion):
    model, ids = tiny_hrm_lm.model(exit_criterion=exit_criterion, **SMALL), tiny_hrm_lm.tokens()
    with torch.no_grad():
        eager = model(ids, use_cache=False)
        compiled = torch.compile(model, fullgraph=True)(ids, use_cache=False)
    torch.testing.assert_close(compiled.logits, eager.logits, atol=1e-4, rtol=0)
    assert torch.equal(compiled.halt_steps, eager.halt_steps)
