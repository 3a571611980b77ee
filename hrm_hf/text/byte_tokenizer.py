"""Byte-level tokenizer without a vocabulary file: one token per byte, and eight special tokens.

Encoding and decoding reproduce any UTF-8 text exactly, no token is ever unknown, and a text of N bytes has N tokens.
`save_pretrained` writes an ordinary fast tokenizer, which `AutoTokenizer` loads without this package. The tokenizer
adds no special tokens; code that packs documents appends EOS.
"""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


PAD, BOS, EOS, UNK = "<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|unk|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
SPARE = ("<|spare_0|>", "<|spare_1|>")
SPECIAL_TOKENS = (PAD, BOS, EOS, UNK, TURN_START, TURN_END, *SPARE)

# ChatML: each turn starts with its role and ends with an end token, so a model can learn where to stop.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Create the byte-level tokenizer, which has 264 tokens and a chat template.

    Ids 0 to 7 are `SPECIAL_TOKENS`, id 8 + b is byte b. A special token spelled out in a text is encoded as that
    token, as in other tokenizers; pass `split_special_tokens=True` to encode it as bytes.
    """
    names = bytes_to_unicode()  # the printable character that byte-level vocabularies use for each byte
    vocabulary = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    vocabulary |= {names[byte]: len(SPECIAL_TOKENS) + byte for byte in range(256)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return fast_tokenizer(backend, chat_template=CHAT_TEMPLATE)


def fast_tokenizer(backend: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    """Wrap a backend in a transformers tokenizer. The backend's vocabulary must begin with `SPECIAL_TOKENS`."""
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=[TURN_START, TURN_END, *SPARE],
        clean_up_tokenization_spaces=False,
        **options,
    )
