"""A causal LM that plays back its replies, for tests of recursive inference."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hrm_hf import RlmPipeline
from hrm_hf.text.rlm.executors import MontyExecutor


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DONE = 'answer["content"] = {}\nanswer["ready"] = True'


def tokenizer_of(chat_template=TEMPLATE):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "extra_special_tokens": ["<|im_start|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, chat_template=chat_template, **special)


def config_of(**fields):
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaConfig(**{"vocab_size": 259, "max_position_embeddings": 200_000, **small, **fields})


class Scripted(LlamaForCausalLM):
    """Play back `replies` for prompts with the REPL's rules, and answer others by `sub_call(prompt)`."""

    def __init__(self, replies, sub_call=lambda prompt: "?", tokenizer=None, **fields):
        super().__init__(config_of(**fields))
        self.replies, self.sub_call, self.calls = iter(replies), sub_call, []
        self.spoken = tokenizer or tokenizer_of()

    def generate(self, input_ids, attention_mask, **kwargs):
        prompts = [self.spoken.decode(row[mask.bool()]) for row, mask in zip(input_ids, attention_mask)]
        self.calls.append({"prompts": prompts, "mask": attention_mask, **kwargs})
        texts = [next(self.replies) if "Python REPL" in prompt else self.sub_call(user(prompt)) for prompt in prompts]
        ids = [self.spoken(reply)["input_ids"] for reply in texts]
        width = max(map(len, ids))
        padded = [row + [self.spoken.pad_token_id] * (width - len(row)) for row in ids]
        return torch.cat([input_ids, torch.tensor(padded, dtype=torch.long).reshape(len(ids), width)], dim=1)


def user(prompt):
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def code(*lines):
    return "I look.\n```repl\n" + "\n".join(lines) + "\n```"


def ask_of(replies, executor=None, **kwargs):
    if executor is None:
        pytest.importorskip("pydantic_monty")
        executor = MontyExecutor(block_seconds=1, max_memory=2**28)
    model = Scripted(replies, **kwargs)
    return RlmPipeline(model, tokenizer_of(), executor=executor), model


def events(result, name):
    return [event for event in result.trajectory if event["event"] == name]
