"""Continuous batching (`generate_batch`), which has its own paged cache, against `generate`."""

import pytest
import tiny_go
import tiny_hrm_lm
import tiny_mhc
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, HrmTextConfig, HrmTextForCausalLM

from hrm_hf.models import segment_plan
from hrm_hf.models.recurrent_cache import RecurrentCache


OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
FLAT = {**tiny_hrm_lm.LOOP, "L_cycles": 2, "norm_affine": True}  # 1 - 2 x 2 - 1 layers
HALTING = {"halt_max_steps": 4, "exit_criterion": "latent_diff", "exit_threshold": 1.2}  # most tokens halt early
CASES = {
    "flat": FLAT,
    "retrofit": {**FLAT, "input_injection": "none", "initial_state": "zero", "exit_norms": "last"},
    "two stacks": {"H_cycles": 2, "L_cycles": 2, "halt_max_steps": 2},
    "flat, halting": {**FLAT, **HALTING},
    "two stacks, halting": HALTING,
    "gate": {"halt_max_steps": 4, "exit_criterion": "q"},
}


def hrm_lm(attention: str = "sdpa", **fields):
    fields = {"exit_criterion": "fixed", "initializer_range": 0.3, "eos_token_id": None, **fields}
    return tiny_hrm_lm.model(attention=attention, **fields).double()  # rounding cannot change a token


def texts(*lengths: int) -> list[list[int]]:
    return [tiny_hrm_lm.tokens(1, length, seed=length)[0].tolist() for length in lengths]


def generated(model, prompts: list[list[int]], **options) -> list[list[int]]:
    """Return the new tokens of `generate` for each prompt alone."""
    settings = GenerationConfig(**OPTIONS)
    rows = [model.generate(torch.tensor([ids]), generation_config=settings, **options)[0] for ids in prompts]
    return [row[len(ids) :].tolist() for row, ids in zip(rows, prompts)]


def batched(model, prompts: list[list[int]], fields=(), pages=(), **options) -> list[list[int]]:
    """Return the new tokens of `generate_batch`. A step has few tokens, so prompts are read in chunks."""
    pages = ContinuousBatchingConfig(**{"num_blocks": 24, "page_size": 8, "max_batch_tokens": 16, **dict(pages)})
    settings = GenerationConfig(**{**OPTIONS, "eos_token_id": -1, **dict(fields)})
    answers = model.generate_batch(prompts, settings, pages, **options).values()
    assert [answer.error for answer in answers] == [None] * len(prompts)
    return [answer.generated_tokens for answer in answers]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_batches_give_the_tokens_of_generate(case, attention):
    model, prompts = hrm_lm(attention, **CASES[case]), texts(21, 5)
    assert batched(model, prompts) == generated(model, prompts)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", ["mhc", "loops", "unified", "unified cycles"])
def test_batches_of_other_architectures_give_the_tokens_of_generate(variant, attention):
    if variant in tiny_go.VARIANTS:
        model, options = tiny_go.model(awake=True, **tiny_go.VARIANTS[variant]), {"plan_first": False}
    else:
        model, options = tiny_mhc.model(**tiny_mhc.VARIANTS[variant]), {}
    model.double().set_attn_implementation(attention)
    model.generation_config.eos_token_id = None
    prompts = texts(21, 5)
    assert batched(model, prompts) == generated(model, prompts, **options)


@pytest.mark.parametrize("case", ["flat, halting", "two stacks, halting"])
def test_halting_tokens_fill_the_slots_of_skipped_segments(monkeypatch, case):
    """Without these copies, later tokens would read slots that were never written."""
    model, prompts = hrm_lm(**CASES[case]), texts(21, 5)
    expected = generated(model, prompts)
    monkeypatch.setattr(RecurrentCache, "copy_to_later_segments", lambda *args: None)
    assert batched(model, prompts) != expected


def test_halting_works_where_control_flow_must_not_depend_on_values(monkeypatch):
    """As in a CUDA graph, where every step runs all segments."""
    model, prompts = hrm_lm(**CASES["flat, halting"]), texts(21, 5)
    expected = generated(model, prompts)
    monkeypatch.setattr(segment_plan, "_traced", lambda active: True)
    assert batched(model, prompts) == expected


def test_batches_share_the_blocks_of_equal_prefixes():
    model, (shared, *ends) = hrm_lm(**CASES["flat, halting"]), texts(32, 3, 4, 5)
    prompts = [shared + end for end in ends]
    assert batched(model, prompts, pages={"allow_block_sharing": True}) == generated(model, prompts)


@pytest.mark.parametrize("case", ["flat", "two stacks", "flat, halting"])
def test_batches_run_fewer_segments_on_request(case):
    model, prompts = hrm_lm(**CASES[case]), texts(21, 5)
    expected = generated(model, prompts, num_segments=1)
    assert expected != generated(model, prompts)
    assert batched(model, prompts, num_segments=1) == expected
    assert batched(model, prompts, fields={"num_segments": 1}) == expected
    model.generation_config.num_segments = 1
    assert model.generate(torch.tensor(prompts[:1]), **OPTIONS)[0, 21:].tolist() == expected[0]


def test_visits_that_share_a_slot_give_other_tokens():
    model, prompts = hrm_lm(**FLAT), texts(21, 5)
    expected = generated(model, prompts)
    for layer in model.model.L_module.layers:
        for visit in layer.self_attn.visits:
            visit.layer_idx = layer.self_attn.visits[0].layer_idx
    assert batched(model, prompts) != expected


@pytest.mark.parametrize(
    "fields, options, match",
    [
        ({"kv_layout": "last_segment"}, {}, "kv_layout='last_segment'"),
        ({"kv_layout": "last_visit"}, {}, "kv_layout='last_visit'"),
        ({}, {"num_segments": 4}, "num_segments=4"),
        ({"attention": "flash_attention_2", **HALTING}, {}, "exit_criterion='latent_diff'"),
        ({"attention": "flash_attention_2"}, {"num_segments": 2}, "num_segments=2"),
        ({"attention": "flash_attention_2"}, {"exit_criterion": "kl"}, "exit_criterion='kl'"),
    ],
)
def test_batches_reject_options_of_hrm_lm_that_would_differ_from_generate(fields, options, match):
    fields = dict(fields)
    attention = fields.pop("attention", "sdpa")
    model = hrm_lm(**fields)
    model.config._attn_implementation_internal = attention  # flash attention itself needs a GPU
    with pytest.raises(ValueError, match=match):
        model.generate_batch(texts(5), **options)


def test_batches_reject_a_go_coder_with_two_stacks():
    with pytest.raises(ValueError, match="unified=False"):
        tiny_go.model().generate_batch(texts(5))


@pytest.mark.xfail(strict=True, reason="transformers 5.23 keys all visits to a layer by the same layer_idx")
def test_hrm_text_gives_the_tokens_of_generate():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16, "vocab_size": 50}
    model = HrmTextForCausalLM(HrmTextConfig(**sizes, num_hidden_layers=1, initializer_range=0.3)).eval()
    prompts = texts(21, 5)
    assert batched(model, prompts) == generated(model, prompts)
