"""Causal language models with a few thousand weights, their text, and their trainer."""

import functools

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hrm_hf import HrmLmConfig, HrmLmForCausalLM
from hrm_hf.text.arguments import LmTrainingArguments
from hrm_hf.text.trainer import CausalLMTrainer


VOCAB_SIZE, BLOCK = 32, 12
NOT_OVER_TOKENS = {"q_halt_accuracy", "q_halt_calibration"}  # means over running segments, so not additive


def model(architecture: str, seed: int = 0, **overrides):
    """Return a seeded model in eval mode: "llama", "gpt2" (dropout) or "hrm_lm" (halts after various segments)."""
    torch.manual_seed(seed)
    if architecture == "gpt2":
        fields = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": BLOCK, "bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, **{**fields, **overrides})).eval()
    fields = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
        "max_position_embeddings": BLOCK,
    }  # fmt: skip
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**{**fields, "num_hidden_layers": 2, **overrides})).eval()
    fields |= {"num_h_layers": 1, "num_l_layers": 1, "H_cycles": 2, "L_cycles": 2, "halt_max_steps": 3, "bp_steps": 4}
    built = HrmLmForCausalLM(HrmLmConfig(**{**fields, **overrides})).eval()
    with torch.no_grad():
        built.model.q_head.weight.normal_()
        built.model.q_head.bias.zero_()
    return built


def text(rows: int, seed: int = 1, ignored: bool = False) -> Dataset:
    """Return rows of random tokens; with `ignored`, a different share of each row's labels is -100."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, VOCAB_SIZE, (rows, BLOCK), generator=generator)
    labels = input_ids.clone()
    if ignored:
        for row in range(rows):
            labels[row, : int(torch.randint(0, BLOCK - 1, (), generator=generator))] = -100
    return Dataset.from_dict({"input_ids": input_ids.tolist(), "labels": labels.tolist()})


def trainer(folder, model, train=None, evaluation=None, callbacks=None, bytes_per_token=None, **arguments):
    """Return a trainer on the CPU that logs every step."""
    options = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 6,
        "logging_steps": 1, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-2,
        "warmup_steps": 2, "save_strategy": "no",
    }  # fmt: skip
    args = LmTrainingArguments(**{**options, **arguments})
    return CausalLMTrainer(
        model,
        args,
        train_dataset=text(24) if train is None else train,
        eval_dataset=text(10, seed=2, ignored=True) if evaluation is None else evaluation,
        callbacks=callbacks,
        eval_bytes_per_token=bytes_per_token,
    )


def break_at(model, calls: set[int], part: str = "loss") -> None:
    """Make the loss (part="gradient": only the gradient) of these training calls, counted from 1, NaN."""
    original, count = model.forward, iter(range(1, 10**6))

    @functools.wraps(original)  # the trainer reads the signature
    def forward(*args, **kwargs):
        outputs = original(*args, **kwargs)
        if model.training and next(count) in calls:
            if part == "loss":
                outputs["loss"] = outputs["loss"] * float("nan")
            else:
                outputs["loss"] = outputs["loss"] + _NanGradient.apply(outputs["logits"])
        return outputs

    model.forward = forward


class _NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.shape = logits.shape
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        return grad.new_full(ctx.shape, float("nan"))


def logged(trainer) -> list[dict]:
    """Return the values logged at each training step, except times."""
    times = {"tokens_per_second", "steps_per_second", "samples_per_second"}
    return [
        {name: value for name, value in entry.items() if name not in times}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
