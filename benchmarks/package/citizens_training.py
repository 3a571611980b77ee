"""Checks of losses in the standard `Trainer` and of PEFT adapters, which `citizens.py` runs.

References are the cross-entropy of the logits, one large batch, PEFT's Llama defaults, and the model without adapter.
"""

import tempfile

import every
import torch
import transformers
from peft import IA3Config, LoraConfig, PrefixTuningConfig, VeraConfig, get_peft_model
from tolerances import assert_equal_but_for_rounding, differ_beyond_rounding
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, Trainer


CAUSAL_LM = "CAUSAL_LM"
UNIFIED = {"hrm_go_coder": {"unified": True, "planner_layers": 2, "generator_layers": 0}}
# Head, number of outputs, and labels for four texts of two tokens.
HEADS = (
    (AutoModelForSequenceClassification, 3, torch.tensor([0, 1, 2, 0])),
    (AutoModelForSequenceClassification, 3, torch.eye(4)[:, :3]),
    (AutoModelForSequenceClassification, 1, torch.tensor([0.1, 0.5, 0.9, 2.0])),
    (AutoModelForTokenClassification, 3, torch.tensor([[-100, 1], [0, 1], [-100, -100], [2, 2]])),
)


def trainer(model, folder: str, rows: list[dict], **options) -> Trainer:
    arguments = transformers.TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1, **options
    )
    made = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    made.remove_callback(transformers.PrinterCallback)
    return made


def token_loss(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=smoothing)


def labelled(architecture: str) -> dict[str, torch.Tensor]:
    ids = every.inputs(architecture)["input_ids"]
    return {"input_ids": ids, "labels": ids.index_fill(1, torch.arange(5), -100), "use_cache": False}


def evaluation_loss(architecture: str) -> None:
    for fields in ({}, *every.VARIANTS.get(architecture, {}).values()):
        model, given = every.model(architecture, **fields), labelled(architecture)
        output = model(**given)
        assert_equal_but_for_rounding(output.loss, token_loss(output.logits, given["labels"]))


def smoothed_labels(architecture: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(every.model(architecture), folder, [], label_smoothing_factor=0.3)
    given = labelled(architecture)
    expected = token_loss(made.model(given["input_ids"]).logits, given["labels"], smoothing=0.3)
    assert_equal_but_for_rounding(made.compute_loss(made.model, dict(given)), expected)


def maps_alone(architecture: str) -> None:
    given = {**every.inputs(architecture), **every.targets(architecture)}
    expected = every.model(architecture)(given["pixel_values"], kappa=given["kappa"])
    assert expected.nll_loss is None
    for column in ("labels", "kappa"):
        rows = [{"pixel_values": maps, column: truth} for maps, truth in zip(given["pixel_values"], given["kappa"])]
        with tempfile.TemporaryDirectory() as folder:
            found = trainer(every.model(architecture), folder, rows, label_names=[column]).evaluate()["eval_loss"]
        torch.testing.assert_close(found, expected.loss.item(), rtol=1e-4, atol=1e-5)


def accumulated_classes(architecture: str) -> None:
    ids = every.inputs(architecture, rows=4)["input_ids"]
    for auto_class, num_labels, labels in HEADS:
        config = every.model(architecture, **UNIFIED.get(architecture, {}), num_labels=num_labels).config
        config.pad_token_id, config.halt_exploration_prob = 0, 0.0
        rows = [{"input_ids": row[:2], "labels": label} for row, label in zip(ids, labels)]
        found = []
        for batches in (1, 4):
            torch.manual_seed(0)
            model = every.wake(auto_class.from_config(config))
            shape = {"per_device_train_batch_size": 4 // batches, "gradient_accumulation_steps": batches}
            with tempfile.TemporaryDirectory() as folder:
                made = trainer(model, folder, rows, max_steps=1, **shape)
                made.train()
            found.append(torch.tensor([made.state.log_history[0][name] for name in ("loss", "grad_norm")]))
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=0)


# ---- PEFT ----


def adapted_loss(model, architecture: str, training: bool = True) -> torch.Tensor:
    torch.manual_seed(0)
    return model.train(training)(**labelled(architecture)).loss


def default_targets(architecture: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1}
    for kind in (LoraConfig, VeraConfig, IA3Config):
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=9, **sizes))
        model = get_peft_model(every.model(architecture), kind(task_type=CAUSAL_LM))
        found, expected = model.peft_config["default"], get_peft_model(llama, kind()).peft_config["default"]
        for name in ("target_modules", "feedforward_modules"):
            assert getattr(found, name, None) == getattr(expected, name, None), (kind, name)
        adapted_loss(model, architecture).backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert trained and all(p.grad is not None for p in trained), kind


def vocabulary_adapters(architecture: str) -> None:
    tokens = every.inputs(architecture)["input_ids"].unique()[:8].tolist()
    of_tokens = {"target_modules": ["q_proj"], "trainable_token_indices": tokens}
    for options in ({"target_modules": ["lm_head"]}, of_tokens):
        model = get_peft_model(every.model(architecture), LoraConfig(task_type=CAUSAL_LM, **options))
        before = [adapted_loss(model, architecture, training) for training in (True, False)]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and "lora_A" not in name:
                    parameter.add_(torch.randn_like(parameter))
        for training, old in zip((True, False), before):
            assert differ_beyond_rounding(adapted_loss(model, architecture, training), old), (options, training)
        adapted_loss(model, architecture).backward()
        assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.requires_grad), options


def prefix_tuning(architecture: str) -> str | None:
    plain = every.model(architecture, **UNIFIED.get(architecture, {}))
    given = every.inputs(architecture)
    expected = plain(**given).logits
    model = get_peft_model(plain, PrefixTuningConfig(task_type=CAUSAL_LM, num_virtual_tokens=3))
    adapted_loss(model, architecture).backward()
    (prefix,) = (p for p in model.parameters() if p.requires_grad)
    assert prefix.grad.abs().max() > 0
    with torch.no_grad():
        prefix.mul_(50)
        assert differ_beyond_rounding(model.eval()(**given).logits, expected)
    prompt = given["input_ids"][:, :5]
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "min_new_tokens": 3}
    assert model.generate(input_ids=prompt, max_new_tokens=3, **options).shape == (2, 8)
    return _prefix_of_too_few_slots(architecture)


def _prefix_of_too_few_slots(architecture: str) -> str | None:
    shapes = {"hrm_go_coder": ({}, "prefix tuning")}
    if architecture not in shapes:
        return None
    fields, reason = shapes[architecture]
    config = PrefixTuningConfig(task_type=CAUSAL_LM, num_virtual_tokens=3)
    try:
        adapted_loss(get_peft_model(every.model(architecture, **fields), config), architecture)
    except ValueError as error:
        assert "past_key_values: " in str(error) and reason in str(error), error
        return f"raises for {fields or 'two stacks'}"
    raise AssertionError(f"prefix tuning with {fields} raised no error")


# Claim, function, architectures, and whether the check starts processes.
CHECKS = (
    ("evaluation loss: the likelihood of the tokens", evaluation_loss, every.CAUSAL_LMS, False),
    ("Trainer: label_smoothing_factor shifts labels", smoothed_labels, every.CAUSAL_LMS, False),
    ("Trainer: true maps alone have an eval_loss", maps_alone, every.MASS_MAPPERS, False),
    ("Trainer: accumulated batches of classifiers", accumulated_classes, every.CAUSAL_LMS, False),
    ("PEFT: default target modules are Llama's", default_targets, every.CAUSAL_LMS, False),
    ("PEFT: adapters at the vocabulary count in training", vocabulary_adapters, every.CAUSAL_LMS, False),
    ("PEFT: prefix tuning works, or says why not", prefix_tuning, every.CAUSAL_LMS, False),
)
