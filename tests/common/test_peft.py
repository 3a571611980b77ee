"""PEFT on our language models by its own functions, without `hrm_hf.trainer.adapters`.

Referees: PEFT's defaults for Llama, and the same model without an adapter.
"""

import every
import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, VeraConfig, get_peft_model
from tiny_lm import model as tiny_lm
from tolerances import differ_beyond_rounding


each_lm = pytest.mark.parametrize("architecture", every.CAUSAL_LMS)
CAUSAL_LM = "CAUSAL_LM"


def adapted(architecture: str, config, **fields):
    return get_peft_model(every.model(architecture, **fields), config)


def labelled(architecture: str) -> dict[str, torch.Tensor]:
    ids = every.inputs(architecture)["input_ids"]
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def loss(model, architecture: str, training: bool) -> torch.Tensor:
    torch.manual_seed(0)
    return model.train(training)(**labelled(architecture)).loss


@each_lm
@pytest.mark.parametrize("kind", [LoraConfig, IA3Config, VeraConfig])
def test_default_target_modules_are_those_of_llama(kind, architecture):
    model = adapted(architecture, kind(task_type=CAUSAL_LM))
    found, llama = (one.peft_config["default"] for one in (model, get_peft_model(tiny_lm("llama"), kind())))
    assert found.target_modules == llama.target_modules
    assert getattr(found, "feedforward_modules", None) == getattr(llama, "feedforward_modules", None)
    loss(model, architecture, training=True).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None for p in trained)


@each_lm
@pytest.mark.parametrize(
    "options", [{"target_modules": ["lm_head"]}, {"target_modules": ["q_proj"], "trainable_token_indices": None}]
)
def test_adapters_at_the_vocabulary_count_in_training_and_evaluation(options, architecture):
    tokens = every.inputs(architecture)["input_ids"].unique()[:8].tolist()
    options = {name: tokens if value is None else value for name, value in options.items()}
    model = adapted(architecture, LoraConfig(task_type=CAUSAL_LM, **options))
    before = [loss(model, architecture, training) for training in (True, False)]
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_A" not in name:
                parameter.add_(torch.randn_like(parameter))
    for training, old in zip((True, False), before):
        assert differ_beyond_rounding(loss(model, architecture, training), old)
    loss(model, architecture, training=True).backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [("hrm_lm", {}), ("rlm_mhc", {}), ("hrm_go_coder", {"unified": True, "planner_layers": 2, "generator_layers": 0})],
)
def test_prefix_tuning_trains_and_generates(architecture, fields):
    model = adapted(architecture, PrefixTuningConfig(task_type=CAUSAL_LM, num_virtual_tokens=3), **fields)
    loss(model, architecture, training=True).backward()
    (prefix,) = (p for p in model.parameters() if p.requires_grad)
    assert prefix.grad.abs().max() > 0
    prompt = every.inputs(architecture)["input_ids"][:, :5]
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "min_new_tokens": 3}
    assert model.eval().generate(input_ids=prompt, max_new_tokens=3, **options).shape == (2, 8)
    with torch.no_grad():
        prefix.mul_(50)
        logits = model(**every.inputs(architecture)).logits
    assert differ_beyond_rounding(logits, every.model(architecture, **fields)(**every.inputs(architecture)).logits)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("hrm_go_coder", {}, "past_key_values: .*phases.*LoRA"),
        ("rlm_mhc", {"num_hidden_layers": 4, "num_loops": 2}, "past_key_values: 4 layers.* 6 .*num_layers=6"),
    ],
)
def test_prefix_tuning_with_too_few_slots_says_why(architecture, fields, message):
    config = PrefixTuningConfig(task_type=CAUSAL_LM, num_virtual_tokens=3)
    with pytest.raises(ValueError, match=message):
        loss(adapted(architecture, config, **fields), architecture, training=True)
    if "num_layers" in message:
        config = PrefixTuningConfig(task_type=CAUSAL_LM, num_virtual_tokens=3, num_layers=6)
        assert loss(adapted(architecture, config, **fields), architecture, training=True).isfinite()
