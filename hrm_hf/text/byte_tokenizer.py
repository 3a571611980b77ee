"""A tokenizer without a vocabulary file: one token for each byte, and eight special ones.

Any UTF-8 text survives encoding and decoding unchanged, no token is ever unknown, and a text of N bytes has N tokens.
What `save_pretrained` writes is an ordinary fast tokenizer that `AutoTokenizer` loads without this package. It adds
nothing to a text by itself: whoever packs documents appends EOS.
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

# ChatML: each turn is named by its role and closed, so that a model can learn where to stop.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The byte-level tokenizer: ids 0..7 are `SPECIAL_TOKENS`, id 8 + b is byte b; 264 in all, with a chat template.

    A special token written out in a text is read as that token, as in other tokenizers; pass
    `split_special_tokens=True` to read it as bytes.
    """
    names = bytes_to_unicode()  # the printable character that stands for each byte in byte-level vocabularies
    vocabulary = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    vocabulary |= {names[byte]: len(SPECIAL_TOKENS) + byte for byte in range(256)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return fast_tokenizer(backend, chat_template=CHAT_TEMPLATE)


def fast_tokenizer(backend: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers over a backend whose vocabulary begins with `SPECIAL_TOKENS`."""
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
