"""RLM-mHC models: referees are transformers' Llama, the same model run another way, and algebra."""

import copy

import pytest
import tiny_mhc
import torch
from huggingface_hub.errors import StrictDataclassError
from tiny_mhc import LOOPS, VARIANTS
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from hrm_hf import RlmMhcConfig, RlmMhcForCausalLM


RES_MODES = ("sinkhorn", "birkhoff", "identity", "unconstrained")
each_variant = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())


def llama(dtype=torch.float32, **overrides) -> LlamaForCausalLM:
    fields = tiny_mhc.config().to_dict()
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    kept = {name: fields[name] for name in (*names, "intermediate_size", "max_position_embeddings", "pad_token_id")}
    torch.manual_seed(0)
    built = LlamaForCausalLM(LlamaConfig(**{**kept, "initializer_range": 0.2, **overrides}))
    return built.to(dtype).eval()


# Config


def test_the_guides_field_names_are_aliases_and_not_saved(tmp_path):
    config = RlmMhcConfig(
        hidden_dim=256, num_layers=4, num_heads=4, ffn_dim=683, max_seq_len=512, dropout=0.1, hc_mult=2
    )
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (256, 4, 4)
    assert (config.intermediate_size, config.max_position_embeddings) == (683, 512)
    assert (config.hidden_dropout, config.mhc_flows) == (0.1, 2)
    assert config.head_dim == 64 and config.num_key_value_heads == 4  # derived from the values of the aliases
    config.hidden_dim = 512
    assert config.hidden_size == config.hidden_dim == 512
    config.save_pretrained(tmp_path)
    saved = (tmp_path / "config.json").read_text()
    assert not [alias for alias in RlmMhcConfig.attribute_map if f'"{alias}"' in saved]
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.to_diff_dict() == config.to_diff_dict()


def test_two_names_of_a_field_may_agree_but_not_differ():
    assert RlmMhcConfig(hidden_dim=64, hidden_size=64, num_heads=4).hidden_size == 64
    with pytest.raises(ValueError, match="hidden_dim=64, hidden_size=2048"):
        RlmMhcConfig(hidden_dim=64, hidden_size=2048)  # rejected even though 2048 is the default


def test_rope_theta_is_accepted():
    assert tiny_mhc.config(rope_theta=5e5).rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mhc_res_mode": "log"}, "mhc_res_mode.*log"),
        ({"mhc_reduce": "max"}, "mhc_reduce.*max"),
        ({"mhc_flows": 0}, "mhc_flows=0"),
        ({"mhc_flows": 5, "mhc_res_mode": "birkhoff"}, "mhc_flows=5.*birkhoff.* 4 "),
        ({"num_loops": 2, "loop_start": 1, "loop_end": 1}, "loop_start < loop_end"),
        ({"hidden_dim": 30}, "hidden.size.*30"),
    ],
)
def test_impossible_fields_are_rejected_by_name(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        RlmMhcConfig(**fields)


@pytest.mark.parametrize(
    ("preset", "with_mhc", "without"),
    [
        ("small", 111_299_976, 109_529_856),
        ("base", 1_282_985_232, 1_273_546_752),
        ("base-aligned", 1_289_325_840, 1_279_887_360),
        ("large", 6_598_694_592, 6_573_527_040),
        ("large-aligned", 6_632_511_168, 6_607_343_616),
    ],
)
def test_presets_have_their_number_of_parameters(preset, with_mhc, without):
    for enabled, expected in ((True, with_mhc), (False, without)):
        with torch.device("meta"):
            model = RlmMhcForCausalLM(RlmMhcConfig.from_preset(preset, mhc_enabled=enabled))
        assert model.num_parameters() == expected


# Llama


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_without_mhc_it_matches_llama_with_weights_loaded_both_ways(attention):
    reference = llama()
    config = tiny_mhc.config(mhc_enabled=False, tie_word_embeddings=False)
    model = RlmMhcForCausalLM(config).eval()
    assert {n: t.shape for n, t in model.state_dict().items()} == {
        n: t.shape for n, t in reference.state_dict().items()
    }
    model.load_state_dict(reference.state_dict())
    reference.load_state_dict(model.state_dict())
    model.set_attn_implementation(attention)
    reference.set_attn_implementation(attention)
    ids = tiny_mhc.ids()
    found, expected = (m(ids, labels=ids) for m in (model, reference))
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)


def test_mhc_adds_only_the_weights_of_its_sites():
    plain, mhc = (set(tiny_mhc.model(mhc_enabled=enabled).state_dict()) for enabled in (False, True))
    sites = [f"model.layers.{i}.{site}_hc" for i in range(2) for site in ("attn", "ffn")]
    assert mhc - plain == {f"{site}.{name}" for site in sites for name in ("fn", "base", "scale")}
    head = set(tiny_mhc.model(mhc_reduce="head").state_dict())
    assert head - mhc == {"model.hc_head.hc_fn", "model.hc_head.hc_base", "model.hc_head.hc_scale"}


@pytest.mark.parametrize(
    "fields", [*[{"mhc_res_mode": mode} for mode in RES_MODES], {"mhc_reduce": "head"}, {"mhc_flows": 1}]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_from_llama_keeps_the_logits(dtype, fields):
    reference, ids = llama(dtype), tiny_mhc.ids()
    model = RlmMhcForCausalLM.from_llama(reference, **fields)
    assert model.dtype == dtype and not model.training
    difference = (model(ids).logits - reference(ids).logits).abs().max()
    assert difference <= (1e-12 if dtype == torch.float64 else 1e-5)


def test_from_llama_rejects_unequal_options_and_other_models():
    with pytest.raises(ValueError, match="mhc_reduce='sum'"):
        RlmMhcForCausalLM.from_llama(llama(), mhc_reduce="sum")
    with pytest.raises(ValueError, match=r"unexpected.*q_proj\.bias"):
        RlmMhcForCausalLM.from_llama(llama(attention_bias=True), attention_bias=False)


def test_an_upcycled_model_learns_its_scale_and_its_streams_diverge():
    model = RlmMhcForCausalLM.from_llama(llama()).train()
    ids = tiny_mhc.ids()
    site = model.model.layers[1].attn_hc
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    streams = []
    hook = model.model.layers[1].register_forward_pre_hook(lambda module, args: streams.append(args[0].detach()))
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    hook.remove()
    assert site.scale.abs().min() > 0
    assert torch.equal(streams[0][:, :, 0], streams[0][:, :, 1])
    assert (streams[1][:, :, 0] - streams[1][:, :, 1]).abs().max() > 0


# Streams


def test_streams_persist_from_layer_to_layer():
    """Regression test: an implementation must not reduce to one stream inside a block."""
    model, ids = tiny_mhc.model(), tiny_mhc.ids()
    seen = []
    model.model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(ids)
    change = model.model.layers[0].register_forward_hook(
        lambda module, args, output: output + torch.tensor([0.0, 0.0, 1.0, 0.0]).view(1, 1, 4, 1)
    )
    model(ids)
    change.remove()
    difference = seen[1] - seen[0]
    assert torch.equal(difference[:, :, [0, 1, 3]], torch.zeros(2, 12, 3, 32)) and (difference[:, :, 2] != 0).all()


@each_variant
def test_a_later_token_never_changes_an_earlier_one(fields):
    model, ids = tiny_mhc.model(**fields), tiny_mhc.ids()
    changed = ids.clone()
    changed[:, 7:] = ids[:, 7:].flip(1)
    first, second = model(ids).logits, model(changed).logits
    assert torch.equal(first[:, :7], second[:, :7]) and not torch.equal(first[:, 7:], second[:, 7:])


@each_variant
def test_every_parameter_gets_a_gradient(fields):
    model, ids = tiny_mhc.model(**fields).train(), tiny_mhc.ids()
    model(ids, labels=ids).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


# Caches, masks and generation


def test_loops_have_a_cache_slot_for_each_visit_and_repeat_only_the_middle():
    model, ids = tiny_mhc.model(**LOOPS), tiny_mhc.ids()
    assert model.config.layer_order == [0, 1, 2, 1, 2, 1, 2, 3]
    cache = model(ids, use_cache=True).past_key_values
    assert len(cache) == 8 and cache.get_seq_length() == 12
    assert len({layer.keys.sum().item() for layer in cache.layers}) == 8
    once = copy.deepcopy(model)
    once.config.num_loops = 1
    assert once.config.layer_order == [0, 1, 2, 3] and not torch.equal(once(ids).logits, model(ids).logits)


def test_logits_to_keep_and_the_token_count_of_the_loss():
    model, ids = tiny_mhc.model(), tiny_mhc.ids()
    full = model(ids, labels=ids)
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, full.logits[:, -3:])
    summed = model(ids, labels=ids, num_items_in_batch=torch.tensor(44)).loss
    torch.testing.assert_close(summed, full.loss * 22 / 44)  # 2 x 11 predicted tokens


@pytest.mark.parametrize("fields", [{}, LOOPS], ids=["mhc", "loops"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(fields, reentrant):
    model, ids = tiny_mhc.model(**fields).train(), tiny_mhc.ids()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-5)


# Recorded states


@pytest.mark.parametrize("fields", tiny_mhc.VARIANTS.values(), ids=tiny_mhc.VARIANTS)
def test_hidden_states_are_the_layer_inputs_and_the_last_state(fields):
    model, ids, read = tiny_mhc.model(**fields), tiny_mhc.ids(), []
    for layer in model.model.layers:
        layer.input_layernorm.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    output = model(ids, output_hidden_states=True, output_streams=True)
    *states, last = output.hidden_states
    assert len(states) == len(model.config.layer_order) and all(map(torch.equal, states, read))
    assert {tuple(state.shape) for state in output.hidden_states} == {(2, 12, 32)}
    assert torch.equal(model.lm_head(last), output.logits)

    assert len(output.streams) == len(states)
    normed = model.model.norm(model.model.reduce(output.streams[-1]))
    assert torch.equal(normed, last)
    assert model(ids).hidden_states is None and model(ids).streams is None


def test_hidden_states_without_mhc_match_llama():
    reference, model = llama(), tiny_mhc.model(mhc_enabled=False, tie_word_embeddings=False)
    model.load_state_dict(reference.state_dict())
    found, expected = (m(tiny_mhc.ids(), output_hidden_states=True).hidden_states for m in (model, reference))
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


# dtypes and files


@pytest.mark.parametrize("fields", tiny_mhc.VARIANTS.values(), ids=tiny_mhc.VARIANTS)
def test_every_module_kept_in_float32_exists(fields):
    model = tiny_mhc.model(**fields)
    there = {part for name, _ in model.named_modules() for part in name.split(".")}
    named = model._keep_in_fp32_modules_strict
    assert named <= there and ("attn_hc" in named) == model.config.mhc_enabled


def test_a_bfloat16_model_keeps_its_sites_in_float32_through_saving(tmp_path):
    model = tiny_mhc.model(mhc_reduce="head", dtype="bfloat16")
    model.save_pretrained(tmp_path)
    loaded = RlmMhcForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        expected = torch.float32 if "_hc." in name or "hc_head." in name else torch.bfloat16
        assert parameter.dtype == expected, name
    for name, parameter in model.named_parameters():
        if "_hc." in name:
            assert torch.equal(parameter, loaded.get_parameter(name))
    assert loaded(tiny_mhc.ids()).logits.dtype == torch.bfloat16


# Metrics


def test_metrics_have_two_floats_per_layer_and_none_without_mhc():
    model, ids = tiny_mhc.model(mhc_eps=0.0), tiny_mhc.ids()
    for metrics in (model.get_mhc_metrics(), model.get_mhc_metrics(ids), model.model.get_mhc_metrics(ids)):
        assert len(metrics) == 2 and all(type(value) is float for pair in metrics for value in pair)
        assert all(0.99 < value < 2.0 for pair in metrics for value in pair)
    assert model.get_mhc_metrics()[0] == pytest.approx((1.0, 1.0), abs=1e-5)
    off = tiny_mhc.model(mhc_enabled=False)
    assert off.get_mhc_metrics() == off.get_mhc_metrics(ids) == off.get_detailed_mhc_metrics(ids) == []


def test_metrics_of_a_known_map_are_its_sums():
    model = tiny_mhc.model(mhc_res_mode="unconstrained", mhc_flows=2)
    with torch.no_grad():
        model.model.layers[0].ffn_hc.base[4:] = torch.tensor(
            [1.0, -3.0, 0.5, 1.0]
        )  # comb entries, source stream first
        model.model.layers[1].attn_hc.base[4:] = torch.tensor([2.0, 0.0, 0.0, 2.0])
    assert model.get_mhc_metrics() == [(1.0, 2.0), (2.0, 1.0)]
    sites = model.get_detailed_mhc_metrics()
    assert [(site["layer"], site["site"]) for site in sites] == [
        (0, "attention"), (0, "feed_forward"), (1, "attention"), (1, "feed_forward"),
    ]  # fmt: skip
    second = sites[1]
    assert (second["forward"], second["backward"], second["min_column"], second["largest_entry"]) == (
        2.0,
        2.0,
        -2.0,
        3.0,
    )
    assert (sites[-1]["composite_forward"], sites[-1]["composite_backward"]) == (4.0, 4.0)


def test_averaged_maps_skip_padding_and_keep_training_mode():
    model, ids = tiny_mhc.model(mhc_res_mode="unconstrained").train(), tiny_mhc.ids()
    padded = torch.cat([ids, torch.zeros(2, 5, dtype=torch.long)], dim=1)
    mask = (padded != 0).long()
    found = model.get_detailed_mhc_metrics(padded, attention_mask=mask)
    assert model.training
    for site, expected in zip(found, model.get_detailed_mhc_metrics(ids)):
        assert [site.pop(name) for name in ("layer", "site")] == [expected.pop(name) for name in ("layer", "site")]
        assert site == pytest.approx(expected, rel=1e-4)


def test_recorded_maps_are_those_of_the_sites_in_order():
    model, ids = tiny_mhc.model(**LOOPS), tiny_mhc.ids()
    output = model(ids, output_mhc_matrices=True, output_streams=True)
    assert len(output.mhc_matrices) == 16 and output.mhc_matrices[0].shape == (2, 12, 4, 4)
    before = [model.model.expand(model.get_input_embeddings()(ids)), *output.streams]
    for visit, layer in enumerate(model.config.layer_order):
        found = model.model.layers[layer].attn_hc.get_connection_matrix(before[visit])
        assert torch.equal(output.mhc_matrices[2 * visit], found)
    assert model(ids).mhc_matrices is None
    assert len(model.get_mhc_metrics(ids)) == 8  # one entry for each layer visit


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"num_hidden_layers": 1}, {"num_loops": 2, "num_hidden_layers": 3}], ids=["mhc", "loops"]
)
def test_the_model_compiles_as_one_graph_with_equal_logits_and_gradients(fields):
    model, ids = tiny_mhc.model(mhc_sinkhorn_iters=3, **fields).train(), tiny_mhc.ids()
    torch._dynamo.reset()
    results = []
    for run in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        output = run(input_ids=ids, labels=ids, use_cache=False)
        output.loss.backward()
        results.append((output.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)
