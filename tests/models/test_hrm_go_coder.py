"""The Go coder without generation. Referees: transformers' Llama, other ways to run the model, and plain loops."""

import pytest
import tiny_go
import torch
from huggingface_hub.errors import StrictDataclassError
from tiny_go import ONE_ATTEMPT, PLAIN, REPAIRED, WITH_RESERVED_TAGS
from tolerances import assert_equal_but_for_rounding
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hrm_hf.models.configuration_hrm_go_coder import HrmGoCoderConfig
from hrm_hf.models.modeling_hrm_go_coder import HrmGoCoderForCausalLM, HrmGoCoderModel
from hrm_hf.models.processing_hrm_go_coder import PLANNER_OPENERS, TOKEN_IDS, Feedback


each_variant = pytest.mark.parametrize("fields", tiny_go.VARIANTS.values(), ids=tiny_go.VARIANTS.keys())
STREAMS = (REPAIRED, WITH_RESERVED_TAGS, ONE_ATTEMPT, PLAIN)


def is_code(ids) -> list[bool]:
    """Return whether each token is code: True before the first opener, then as the last opener says."""
    phase, found = True, []
    for token in ids:
        if token == TOKEN_IDS["<CODE>"]:
            phase = True
        elif token in [TOKEN_IDS[opener] for opener in PLANNER_OPENERS]:
            phase = False
        found.append(phase)
    return found


# Config and sizes


@pytest.mark.parametrize(
    ("preset", "fields", "expected"),
    [
        ("test", {}, 314_787),
        ("nano", {}, 10_009_475),
        ("base", {}, 24_747_139),
        ("wide", {}, 27_878_563),
        ("wide", {"generator_layers": 5}, 29_528_163),
        ("medium", {}, 53_885_379),
        ("unified", {}, 25_917_760),
    ],
)
def test_presets_have_their_number_of_parameters(preset, fields, expected):
    with torch.device("meta"):
        model = HrmGoCoderForCausalLM(HrmGoCoderConfig.from_preset(preset, **fields))
    assert model.num_parameters() == expected
    if preset in ("base", "wide", "unified"):
        assert 20e6 <= model.num_parameters() <= 30e6


def test_base_is_the_default_and_a_fifth_of_gpt2_with_its_vocabulary():
    assert HrmGoCoderConfig().to_dict() == HrmGoCoderConfig.from_preset("base").to_dict()
    with torch.device("meta"):
        gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50000, n_positions=1024))
    assert gpt2.num_parameters() == 124_242_432


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"planner_layers": 0}, "planner_layers=0"),
        ({"generator_cycles": 0}, "generator_cycles=0"),
        ({"generator_layers": 0}, "unified=False"),
        ({"unified": True}, "unified=True"),
        ({"unified": True, "generator_layers": 0, "generator_cycles": 2}, "generator_cycles=2"),
        ({"max_refinement_iterations": 6}, "max_refinement_iterations=6"),
        ({"refinement_threshold": 1.5}, "refinement_threshold=1.5"),
        ({"refinement_class_weights": [1.0, 1.0]}, "refinement_class_weights"),
        ({"hidden_size": 30}, "hidden.size.*30"),
    ],
)
def test_impossible_fields_are_rejected_by_name(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        HrmGoCoderConfig(**fields)


def test_a_saved_config_is_the_same_when_loaded(tmp_path):
    config = tiny_go.model(**tiny_go.VARIANTS["cycles"], refinement_class_weights=[2.0, 1.0, 0.5]).config
    config.save_pretrained(tmp_path)
    assert HrmGoCoderConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()


def test_every_parameter_belongs_to_a_group():
    model = tiny_go.model()
    groups = {name: model.parameter_group(name) for name, _ in model.named_parameters()}
    assert {name for name, group in groups.items() if group == "shared"} == {"model.embed_tokens.weight"}
    for group, start in (("planner", "model.planner."), ("generator", "model.generator.")):
        assert {name for name, each in groups.items() if each == group} == {n for n in groups if n.startswith(start)}
    assert (
        groups["model.feedback_encoder.no_validator"] == groups["model.refinement_head.classes.bias"] == "refinement"
    )
    assert model.parameter_group("module.lm_head.weight") == "shared"  # as DistributedDataParallel names it


# Logits


def llama_of(model) -> LlamaForCausalLM:
    """Return transformers' Llama with the weights of the planner."""
    fields = {name: getattr(model.config, name) for name in ("vocab_size", *tiny_go.SIZES)}
    llama = LlamaForCausalLM(LlamaConfig(**fields, num_hidden_layers=model.config.planner_layers)).eval()
    state = {"model.embed_tokens.weight": model.model.embed_tokens.weight, "lm_head.weight": model.lm_head.weight}
    state |= {f"model.{name}": tensor for name, tensor in model.model.planner.state_dict().items()}
    llama.load_state_dict(state)
    return llama


def test_a_unified_model_is_a_llama():
    model, batch = tiny_go.model(awake=True, **tiny_go.VARIANTS["unified"]), tiny_go.batch(*STREAMS, side="right")
    assert_equal_but_for_rounding(model(**batch).logits, llama_of(model)(**batch).logits)
    assert "refinement" not in {model.parameter_group(name) for name, _ in model.named_parameters()}


def test_outside_code_the_planner_predicts_as_a_llama():
    model, batch = tiny_go.model(awake=True, planner_layers=2), tiny_go.batch(REPAIRED)
    code = torch.tensor([is_code(batch["input_ids"][0].tolist())])
    found, planner = model(**batch).logits, llama_of(model)(**batch).logits
    assert_equal_but_for_rounding(found[~code], planner[~code])
    assert ((found - planner)[code].abs().amax(dim=-1) > 0.1).all()


def attend(module, query, keys, values, model, at: int, positions: list[int]) -> torch.Tensor:
    """Attend from one query [C] at position `at` to keys and values [C] at `positions`, head by head."""
    heads, width = model.config.num_attention_heads, model.config.head_dim

    def turned(state, position):
        cos, sin = model.model.rotary_emb(state, torch.tensor([[position]]))
        return apply_rotary_pos_emb(state.view(1, heads, 1, width), state.view(1, heads, 1, width), cos, sin)[0].view(
            heads, width
        )

    q = turned(module.q_proj(query), at)
    k = torch.stack([turned(module.k_proj(key), position) for key, position in zip(keys, positions)])
    v = torch.stack([module.v_proj(value).view(heads, width) for value in values])
    shares = (torch.einsum("hd,shd->hs", q, k) / width**0.5).softmax(-1)
    return module.o_proj(torch.einsum("hs,shd->hd", shares, v).flatten())


@torch.no_grad()
def test_code_sees_code_and_the_planner_at_its_own_and_earlier_planner_positions():
    model, ids = tiny_go.model(awake=True), tiny_go.stream(REPAIRED)
    outputs = model.model(torch.tensor([ids]))
    layer, code, states = model.model.generator.layers[0], is_code(ids), outputs.planner_states[0]
    embeds = model.model.embed_tokens(torch.tensor(ids))
    normed = layer.input_layernorm(embeds)
    for at in [index for index in range(len(ids)) if code[index]]:
        own = [index for index in range(at + 1) if code[index]]
        hidden = embeds[at] + attend(layer.self_attn, normed[at], normed[own], normed[own], model, at, own)
        read = [index for index in range(at) if not code[index]] + [at]
        query = layer.cross_attention_layernorm(hidden)
        hidden = hidden + attend(layer.cross_attn, query, states[read], states[read], model, at, read)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        expected = model.model.generator.norm(hidden)
        assert_equal_but_for_rounding(outputs.generator_states[0, at], expected)


def test_phases_follow_the_last_opener():
    model, batch = tiny_go.model(), tiny_go.batch(*STREAMS, side="right")
    for row, ids in zip(model.model(**batch).phases.tolist(), batch["input_ids"].tolist()):
        assert row == is_code(ids)


def test_the_decision_reads_the_last_plan_the_attempt_and_the_feedback():
    model, ids = tiny_go.model(awake=True), tiny_go.stream(REPAIRED)
    ends = [index for index, token in enumerate(ids) if token == TOKEN_IDS["</CODE>"]]
    said = [Feedback(False, category="other", line=2).token_ids(4), [0, 0, 0, 0], Feedback(True).token_ids(4)]
    outputs = model.model(
        torch.tensor([ids]), decision_positions=torch.tensor([ends]), feedback_ids=torch.tensor([said])
    )
    plans = [index for index, token in enumerate(ids) if token == TOKEN_IDS["<PLAN>"]]
    closes = [index for index, token in enumerate(ids) if token == TOKEN_IDS["</PLAN>"]]
    encoder, planner = model.model.feedback_encoder, outputs.planner_states[0]
    for number, (end, plan) in enumerate(zip(ends, (0, 0, 1))):
        mean = planner[plans[plan] : closes[plan] + 1].mean(dim=0)
        feedback = encoder.no_validator if number == 1 else encoder(torch.tensor(said[number]))
        features = torch.cat([planner[end], outputs.generator_states[0, end], mean, feedback])
        hidden = torch.nn.functional.gelu(model.model.refinement_head.hidden(features))
        expected = model.model.refinement_head.classes(hidden)
        assert_equal_but_for_rounding(outputs.refinement_logits[0, number], expected)


def test_a_decision_without_a_plan_or_feedback_is_finite():
    model, ids = tiny_go.model(awake=True), tiny_go.stream("<CODE> 3 </CODE>")
    logits = model.model(torch.tensor([ids]), decision_positions=torch.tensor([[4]])).refinement_logits
    assert logits.shape == (1, 1, 3) and logits.isfinite().all()


# The same model run another way


@each_variant
@pytest.mark.parametrize("opener", ["<CODE>", "<PLAN>", None], ids=["code", "plan", "text"])
def test_no_token_changes_a_logit_before_it(fields, opener, monkeypatch):
    # Run the generator on all positions, because the number of code positions changes the shapes and so the rounding.
    monkeypatch.setattr(HrmGoCoderModel, "_code_positions", lambda *_: None)
    model, ids = tiny_go.model(awake=True, **fields), torch.tensor([tiny_go.stream(REPAIRED)])
    with torch.no_grad():
        first = model(ids, use_cache=False).logits
        for index in range(1, ids.shape[1], 3):
            changed = ids.clone()
            changed[0, index] = 77 if opener is None else TOKEN_IDS[opener]
            second = model(changed, use_cache=False).logits
            assert torch.equal(first[:, :index], second[:, :index])
            if changed[0, index] != ids[0, index]:
                assert not torch.equal(first[:, index:], second[:, index:])


@each_variant
def test_eager_and_sdpa_attention_agree(fields):
    model, batch = tiny_go.model(awake=True, **fields), tiny_go.batch(*STREAMS, side="right")
    results = []
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        results.append(model(**batch).logits[batch["attention_mask"].bool()])
    assert_equal_but_for_rounding(results[0], results[1])


def test_running_the_generator_on_code_only_keeps_states_and_gradients(monkeypatch):
    model, batch = tiny_go.model(awake=True, **tiny_go.VARIANTS["cycles"]), tiny_go.batch(*STREAMS, side="right")
    lengths, results = [], []
    model.model.generator.layers[0].register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    for compacted in (True, False):
        model.zero_grad()
        if not compacted:
            monkeypatch.setattr(HrmGoCoderModel, "_code_positions", lambda *_: None)
        states = model.model(**batch, use_cache=False).last_hidden_state[batch["attention_mask"].bool()]
        states.pow(3).sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append((states.detach(), gradients))
    torch.testing.assert_close(results[0], results[1], atol=1e-3, rtol=1e-4)
    most = max(sum(is_code(tiny_go.stream(pattern))) for pattern in STREAMS)
    assert set(lengths) == {most, batch["input_ids"].shape[1]}


def test_embeddings_instead_of_ids_are_one_segment_of_code():
    for fields, pattern in (({}, "12"), ({"tagged": False}, REPAIRED)):
        model, ids = tiny_go.model(awake=True, **fields), torch.tensor([tiny_go.stream(pattern)])
        found = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
        assert_equal_but_for_rounding(found, model(ids).logits)


def test_without_tags_every_id_is_code():
    untagged, tagged = tiny_go.model(awake=True, tagged=False), tiny_go.model(awake=True)
    plain, stream = (torch.tensor([tiny_go.stream(pattern)]) for pattern in ("12", REPAIRED))
    assert torch.equal(untagged(plain).logits, tagged(plain).logits)
    assert untagged.model(stream).phases.all() and not tagged.model(stream).phases.all()


def test_logits_to_keep_returns_the_last_logits():
    model, batch = tiny_go.model(awake=True), tiny_go.batch(*STREAMS)
    torch.testing.assert_close(model(**batch, logits_to_keep=3).logits, model(**batch).logits[:, -3:])


def test_a_cache_has_a_slot_for_each_visit_the_planners_states_and_the_phases():
    model, batch = tiny_go.model(**tiny_go.VARIANTS["cycles"]), tiny_go.batch(*STREAMS)
    cache = model(**batch, use_cache=True).past_key_values
    assert len(cache) == model.config.cache_slots["end"] == 2 + 3 + 1 + 1
    assert {layer.get_seq_length() for layer in cache.layers} == {batch["input_ids"].shape[1]}
    assert cache.layers[-1].keys.shape[-1] == 1


@pytest.mark.parametrize("fields", [tiny_go.VARIANTS["cycles"], tiny_go.VARIANTS["unified"]], ids=["two", "unified"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(fields, reentrant):
    model, batch = tiny_go.model(awake=True, **fields).train(), tiny_go.batch(*STREAMS, side="right")
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert_equal_but_for_rounding(gradients[1][name], gradient, msg=name)


PLANNED = "<s> <PROBLEM> {} </PROBLEM> <PLAN> <INTENT:ADD> 2 </PLAN> <CODE> {}"
BATCHES = {
    "other lengths": ([PLANNED.format(4, 9), PLANNED.format(7, 6), PLANNED.format(2, 11)], "left"),
    "several attempts": ([REPAIRED, WITH_RESERVED_TAGS, ONE_ATTEMPT], "left"),
    "no opener": ([PLAIN, "9"], "left"),
    "padded on the right": ([PLANNED.format(4, 9), PLANNED.format(3, 2)], "right"),
}


@torch.no_grad()
def token_by_token(model, ids, mask, cache):
    """Logits [B, S, V] of every token alone."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    steps = [
        model(
            ids[:, at : at + 1], attention_mask=mask[:, : at + 1], position_ids=positions[:, at : at + 1],
            past_key_values=cache, use_cache=True,
        ).logits
        for at in range(ids.shape[1])
    ]  # fmt: skip
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "fields", [tiny_go.VARIANTS[name] for name in ("two stacks", "cycles")], ids=["one", "cycles"]
)
@pytest.mark.parametrize(("rows", "side"), BATCHES.values(), ids=BATCHES.keys())
def test_cached_tokens_have_the_logits_of_the_full_stream(rows, side, fields, attention):
    model, batch = tiny_go.model(awake=True, **fields), tiny_go.batch(*rows, side=side)
    model.set_attn_implementation(attention)
    ids, mask = batch.values()
    found = token_by_token(model, ids, mask, DynamicCache(config=model.config))
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
    assert_equal_but_for_rounding(found[mask.bool()], expected[mask.bool()])


def test_cropped_tokens_leave_no_trace_in_the_cache():
    """As in assisted generation, some tokens are cropped and replaced by others."""
    model = tiny_go.model(awake=True)
    batch, other = tiny_go.batch(PLANNED.format(4, 9)), tiny_go.batch(REPAIRED)["input_ids"]
    ids, mask = batch.values()
    cache = DynamicCache(config=model.config)
    token_by_token(model, ids, mask, cache)
    kept = ids.shape[1] - 12  # a position in the plan
    cache.crop(kept - ids.shape[1])
    joined = torch.cat([ids[:, :kept], other[:, 5:]], dim=1)
    with torch.no_grad():
        found = [
            model(joined[:, begin:end], past_key_values=cache, use_cache=True).logits
            for begin, end in [(i, i + 1) for i in range(kept, kept + 5)] + [(kept + 5, joined.shape[1])]
        ]
        expected = model(joined, use_cache=False).logits
    assert_equal_but_for_rounding(torch.cat(found, dim=1), expected[:, kept:])
