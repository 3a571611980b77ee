"""Tokenizer, config and weights of a causal language model, from the options of a run.

Any model type of transformers and ours goes through here. A fresh model takes its vocabulary from the tokenizer and
its positions from the length of the rows. A model and a tokenizer that do not fit are an error.
"""

from dataclasses import fields

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..models.processing_hrm_go_coder import is_go_tokenizer
from ..trainer.recipes import ModelArguments, build_config, checked_overrides
from .byte_tokenizer import PAD, byte_tokenizer


BYTE = "byte"
POSITIONS = "max_position_embeddings"


def load_tokenizer(name: str | None, model_name_or_path: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run: "byte", a folder, a tokenizer of the Hub, or by default that of the weights.

    A tokenizer for a fresh model that pads with EOS, or not at all (GPT-2), gets its own padding token: if padding and
    EOS were the same, models of the Llama kind would never train the embedding of EOS.

    Raises:
        ValueError: neither a name nor weights.
    """
    if name is None and model_name_or_path is None:
        raise ValueError(
            "no tokenizer: give --tokenizer_name byte (one token for each byte), a folder, or a name of the Hub such "
            "as openai-community/gpt2"
        )
    if name == BYTE:
        return byte_tokenizer()
    source = name or model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:
        if type(error) in (OSError, ImportError, ValueError):
            raise  # says itself what is wrong
        # What the tokenizers library says of a corrupted tokenizer.json names no file.
        raise ValueError(
            f"the tokenizer of {source} cannot be read ({type(error).__name__}: {str(error)[:200]}); its "
            "tokenizer.json is corrupted or made by another library: download or train it again"
        ) from error
    if model_name_or_path is None and tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.add_special_tokens({"pad_token": PAD})
    return tokenizer


def causal_lm_config(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, block_size: int
) -> PreTrainedConfig:
    """Make the config of a fresh model: preset, then vocabulary and special tokens of the tokenizer, then overrides.

    The number of positions is at least `block_size`.

    Raises:
        ValueError: unknown type, preset or field; a vocabulary smaller than the tokenizer's; fewer positions than
            `block_size` by an override.
    """
    from_data = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if "tagged" in _field_names(arguments.model_type):
        from_data["tagged"] = is_go_tokenizer(tokenizer)  # with other tokens, raw text is all it can be trained on
    config = build_config(arguments, **from_data)
    _validate_vocabulary(config.vocab_size, tokenizer, "set vocab_size in --config_overrides to that or more")
    positions = _positions(config)
    if positions is None or positions >= block_size:
        return config
    name = config.attribute_map.get(POSITIONS, POSITIONS)
    if name in checked_overrides(type(config), arguments.config_overrides):
        raise ValueError(
            f"config_overrides has {name}={positions}, fewer than the block_size={block_size} tokens of a row"
        )
    return build_config(arguments, **from_data, **{name: block_size})


def load_causal_lm(
    arguments: ModelArguments,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    seed: int = 0,
    quantization_config: BitsAndBytesConfig | None = None,
) -> PreTrainedModel:
    """Make a fresh model from a config, or load weights with overrides applied to their config.

    Weights are in float32, unless a `quantization_config` says that they stay frozen, under an adapter.

    Raises:
        ValueError: see `causal_lm_config`; also saved weights that do not fit the tokenizer or the rows.
    """
    set_seed(seed)
    if arguments.model_name_or_path is None:
        config = causal_lm_config(arguments, tokenizer, block_size)
        return AutoModelForCausalLM.from_config(config, attn_implementation=arguments.attn_implementation)
    config = AutoConfig.from_pretrained(arguments.model_name_or_path)
    changes = checked_overrides(type(config), arguments.config_overrides)
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model_name_or_path,
        attn_implementation=arguments.attn_implementation,
        dtype=torch.float32,  # weights that are trained; --bf16 computes in bfloat16
        quantization_config=quantization_config,
        **changes,
    )
    _validate_vocabulary(
        model.get_input_embeddings().num_embeddings, tokenizer, "use the tokenizer that the weights were trained with"
    )
    if "tagged" in _field_names(config.model_type) and model.config.tagged != is_go_tokenizer(tokenizer):
        raise ValueError(
            f"{arguments.model_name_or_path} has tagged={model.config.tagged}, but the vocabulary of the tokenizer "
            f"{'starts' if is_go_tokenizer(tokenizer) else 'does not start'} with the Go coder's tags; use the "
            "tokenizer that the weights were trained with"
        )
    positions = _positions(model.config)
    if positions is not None and positions < block_size:
        raise ValueError(
            f"{arguments.model_name_or_path} was made for {positions} positions ({POSITIONS}), a row has "
            f"block_size={block_size} tokens; lower --block_size"
        )
    return model


def continue_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, new_tokens: int, seed: int = 0
) -> str:
    """Sample a continuation of a text (temperature 0.8, the 50 likeliest tokens), with the prompt in front.

    It is shorter if the model ends the document, or if its positions end; of a long prompt the model sees the end.
    """
    set_seed(seed)
    # The tokenizer may close a text with EOS; a text to be continued is open.
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"][0]
    ids = ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids
    positions = _positions(model.config)
    if positions is not None:
        ids = ids[-max(positions // 2, positions - new_tokens) :]
        new_tokens = min(new_tokens, positions - len(ids))
    was_training = model.training
    model.eval()
    output = model.generate(
        ids[None].to(model.device),
        attention_mask=torch.ones_like(ids)[None].to(model.device),
        max_new_tokens=new_tokens,
        do_sample=True,
        temperature=0.8,
        top_k=50,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    model.train(was_training)
    return prompt + tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)


def _positions(config: PreTrainedConfig) -> int | None:
    """Longest context of a config, None for architectures without such a limit."""
    name = config.attribute_map.get(POSITIONS, POSITIONS)
    return getattr(config, name) if name in {field.name for field in fields(config)} else None


def _field_names(model_type: str | None) -> set[str]:
    return {field.name for field in fields(CONFIG_MAPPING[model_type])} if model_type in CONFIG_MAPPING else set()


def _validate_vocabulary(size: int, tokenizer: PreTrainedTokenizerBase, fix: str) -> None:
    if size < len(tokenizer):
        raise ValueError(f"vocab_size={size} is smaller than the tokenizer's {len(tokenizer)} tokens; {fix}")
