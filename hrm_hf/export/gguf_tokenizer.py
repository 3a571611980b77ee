"""Tokenizers as GGUF files hold them: byte-level BPE split as GPT-2 does, which is llama.cpp's "gpt-2".

Left out: every other kind. llama.cpp knows a tokenizer's way of splitting and normalizing by name only, and a wrong
name gives other ids without a word, so what is not exactly this kind is refused.
"""

import json
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import cached_file


# Here the Go coder has said what it has to say: what follows is a validator's. Runtimes stop at it, as they cannot by
# the tag's text, which they do not print.
END_OF_ATTEMPT = "</CODE>"


def load_tokenizer(model: str) -> Any:
    """The tokenizer saved with a model.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    if find_file(model, "tokenizer.json") is None:
        raise ValueError(
            f"{model} has no tokenizer.json, and a GGUF file holds the tokenizer too; save it with the model: "
            "tokenizer.save_pretrained(folder)"
        )
    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # the Rust library raises Exception itself for a broken file
        raise ValueError(f"the tokenizer of {model} cannot be read: {error}") from error


def gguf_vocabulary(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Fields of a GGUF file that describe a tokenizer.

    Args:
        tokenizer: a fast tokenizer with byte-level BPE, split as GPT-2 does.
        vocab_size: rows of the embedding; ids beyond the tokenizer's become unused tokens.

    Returns:
        tokens (list of str by id), types (list of int, of gguf's TokenType), merges (list of "left right"),
        add_bos and add_eos (whether a plain call adds them), bos, eos, pad, unk and eot (id or None), chat_template.

    Raises:
        ValueError: llama.cpp would give other ids.
    """
    from gguf import TokenType

    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    _validate_byte_level(backend)
    tokens_by_id = {index: token for token, index in backend["model"]["vocab"].items()}
    types_by_id = dict.fromkeys(tokens_by_id, TokenType.NORMAL)
    for added in backend["added_tokens"]:
        tokens_by_id[added["id"]] = added["content"]
        types_by_id[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    if max(tokens_by_id) >= vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {max(tokens_by_id)}, the model embeds {vocab_size}: they do not belong "
            "together, or the model needs resize_token_embeddings and training"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos token, and llama.cpp would stop at id 11; set tokenizer.eos_token")
    add_bos, add_eos = _added_around(tokenizer)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in backend["model"]["merges"]]
    return {
        "tokens": [tokens_by_id.get(index, f"[UNUSED{index}]") for index in range(vocab_size)],
        "types": [int(types_by_id.get(index, TokenType.UNUSED)) for index in range(vocab_size)],
        "merges": merges,
        "add_bos": add_bos,
        "add_eos": add_eos,
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
        "unk": tokenizer.unk_token_id,
        "eot": next((added["id"] for added in backend["added_tokens"] if added["content"] == END_OF_ATTEMPT), None),
        "chat_template": tokenizer.chat_template,
    }


def add_vocabulary(writer: Any, vocabulary: dict[str, Any]) -> None:
    """Adds what `gguf_vocabulary` returned to a GGUFWriter."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    writer.add_token_merges(vocabulary["merges"])
    writer.add_add_bos_token(vocabulary["add_bos"])
    writer.add_add_eos_token(vocabulary["add_eos"])
    add_id = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "pad": writer.add_pad_token_id,
        "unk": writer.add_unk_token_id,
        "eot": writer.add_eot_token_id,
    }
    for name, add in add_id.items():
        if vocabulary[name] is not None:
            add(vocabulary[name])
    template = vocabulary["chat_template"]
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def _validate_byte_level(backend: dict[str, Any]) -> None:
    """llama.cpp's "gpt-2" tokenizer is byte-level BPE after GPT-2's split, without anything else."""
    model, split, normalizer = backend["model"], backend["pre_tokenizer"] or {}, backend["normalizer"] or {}
    wrong = [f"{name}={model[name]}" for name in ("byte_fallback", "ignore_merges", "dropout") if model.get(name)]
    if model["type"] != "BPE":
        wrong.append(f"model={model['type']}")
    if normalizer:
        wrong.append(f"normalizer={normalizer['type']}")
    if split.get("type") != "ByteLevel":
        wrong.append(f"pre_tokenizer={split.get('type')}")
    elif split["add_prefix_space"] or not split.get("use_regex", True):
        wrong.append(f"add_prefix_space={split['add_prefix_space']}, use_regex={split.get('use_regex', True)}")
    for added in backend["added_tokens"]:
        blanks = [name for name in ("lstrip", "rstrip", "single_word") if added[name]]
        wrong += [f"{blanks[0]} of the added token {added['content']!r}"] if blanks else []
    if wrong:
        raise ValueError(
            "the tokenizer is not byte-level BPE as GPT-2's, the only kind exported here, and llama.cpp would give "
            f"other ids: {'; '.join(wrong)}. `hrm-hf data go-tokenizer` trains one"
        )


def _added_around(tokenizer: Any) -> tuple[bool, bool]:
    """Whether a plain call puts bos before and eos after a text."""
    plain, full = tokenizer.encode("x", add_special_tokens=False), tokenizer.encode("x")
    for add_bos in (False, True):
        for add_eos in (False, True):
            if full == [tokenizer.bos_token_id] * add_bos + plain + [tokenizer.eos_token_id] * add_eos:
                return add_bos, add_eos
    raise ValueError(f"the tokenizer makes {plain} into {full}; a GGUF file can only say bos before and eos after")


def find_file(model: str, name: str) -> str | None:
    """Path of a file of a model, in its folder or from the Hub; None if it has none."""
    return cached_file(
        model, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
