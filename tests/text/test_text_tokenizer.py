"""The byte tokenizer: decoding restores every text, and AutoTokenizer loads the saved files. Referee: str.encode."""

import random

import pytest
from transformers import AutoTokenizer

from hrm_hf.text.byte_tokenizer import SPECIAL_TOKENS, byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def test_tokenizer_has_264_tokens_and_pad_is_not_eos(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 264
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert ids == [0, 1, 2, 3]
    assert tokenizer.convert_ids_to_tokens(list(range(8))) == list(SPECIAL_TOKENS)


def test_a_token_is_a_byte_with_its_number_after_the_special_ones(tokenizer):
    text = "naïve — 漢字 🙂\x00\x7f"
    assert tokenizer(text)["input_ids"] == [8 + byte for byte in text.encode()]


def test_any_text_survives_encoding_and_decoding(tokenizer):
    draw = random.Random(0)
    texts = ["", " ", "\r\n\t  x ", "a .b ,c n't", "e\u0301\u00e9\ufeff", "<|endoftext|>a<|im_start|>", "\U0010ffff"]
    for _ in range(200):
        codes = [draw.choice([draw.randrange(128), draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])]
        texts.append("".join(map(chr, codes * draw.randrange(1, 4))) + chr(draw.randrange(0x250)))
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert tokenizer.decode(tokenizer(text, split_special_tokens=True)["input_ids"]) == text


def test_saved_tokenizer_is_an_ordinary_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "ROMEO:\nÀ moi!<|endoftext|>"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (len(loaded), loaded.pad_token_id, loaded.eos_token_id) == (264, 0, 2)
    assert "hrm_hf" not in (tmp_path / "tokenizer_config.json").read_text()


def test_a_chat_is_one_closed_turn_after_the_other(tokenizer):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n<|im_start|>assistant\n"
    assert text == expected
    ids = tokenizer.apply_chat_template(chat)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
