"""Load the tokenizer, config and weights of a causal language model from a run's options.

This works for all causal LMs of transformers and of this package. A new model takes its vocabulary size from the
tokenizer and its number of positions from the row length. A tokenizer that does not fit the model is an error.
"""

from dataclasses import fields
from pathlib import Path

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
from transformers.trainer_utils import align_special_tokens

from ..models.modeling_utils import only_errors_logged
from ..models.processing_hrm_go_coder import is_go_tokenizer
from ..trainer.recipes import ModelArguments, build_config, checked_overrides
from .arguments import DEFAULT_BLOCK_SIZE
from .byte_tokenizer import PAD, byte_tokenizer


BYTE = "byte"
POSITIONS = "max_position_embeddings"


def load_tokenizer(name: str | None, model_name_or_path: str | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer ("byte", a folder or a Hub name), by default the one saved with the weights.

    For a new model, a tokenizer that pads with EOS, or has no padding token (GPT-2), gets a separate padding token. If
    padding and EOS were the same token, Llama-style models would never train the embedding of EOS.

    Raises:
        ValueError: neither a name nor weights are passed, or the tokenizer cannot be read.
    """
    if name is None and model_name_or_path is None:
        raise ValueError(
            "tokenizer_name=None: a new model needs a tokenizer; pass --tokenizer_name byte (one token per byte), a "
            "folder, or a Hub name such as openai-community/gpt2"
        )
    if name == BYTE:
        return byte_tokenizer()
    source = name or model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:
        if type(error) in (OSError, ImportError, ValueError):
            raise  # transformers' own error messages are clear
        # The tokenizers library does not name the file if tokenizer.json is corrupted.
        raise ValueError(
            f"the tokenizer of {source} cannot be read ({type(error).__name__}: {str(error)[:200]}); its "
            "tokenizer.json is corrupted or was made by another library; download it or train it again"
        ) from error
    if model_name_or_path is None and tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.add_special_tokens({"pad_token": PAD})
    return tokenizer


def causal_lm_config(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, block_size: int
) -> PreTrainedConfig:
    """Build the config of a new model from its preset; the tokenizer and then the overrides change its fields.

    The model gets at least `block_size` positions.

    Raises:
        ValueError: a type, preset or field is unknown, the vocabulary is smaller than the tokenizer's, or an override
            sets fewer positions than `block_size`.
    """
    from_data = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if "tagged" in _field_names(arguments.model_type):
        from_data["tagged"] = is_go_tokenizer(tokenizer)  # without tags, the Go coder can train only on raw text
    config = build_config(arguments, **from_data)
    _validate_vocabulary(config.vocab_size, tokenizer, "set vocab_size in --config_overrides to that or more")
    positions = _positions(config)
    if positions is None or positions >= block_size:
        return config
    name = config.attribute_map.get(POSITIONS, POSITIONS)
    if name in checked_overrides(type(config), arguments.config_overrides):
        raise ValueError(
            f"config_overrides: {name}={positions} must be >= block_size={block_size}, the tokens per row"
        )
    return build_config(arguments, **from_data, **{name: block_size})


def load_causal_lm(
    arguments: ModelArguments,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    seed: int = 0,
    quantization_config: BitsAndBytesConfig | None = None,
) -> PreTrainedModel:
    """Create a new model, or load saved weights and apply the overrides to their config.

    Weights are float32 unless `quantization_config` quantizes them; quantized weights are frozen and need an adapter.
    The special tokens of saved weights become those of the tokenizer.

    Raises:
        ValueError: see `causal_lm_config`; also if saved weights do not fit the tokenizer or the row length.
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
        dtype=torch.float32,  # trained weights stay float32; --bf16 affects only computation
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
            f"block_size={block_size}: {arguments.model_name_or_path} has {positions} positions ({POSITIONS}); lower "
            "--block_size"
        )
    with only_errors_logged():  # Trainer would align the special tokens later and print a warning
        align_special_tokens(model, tokenizer)
    return model


def default_block_size(model: str | Path) -> int:
    """Return the default number of tokens per row for a saved model: its context length, at most 1024."""
    positions = _positions(AutoConfig.from_pretrained(model))
    return DEFAULT_BLOCK_SIZE if positions is None else min(positions, DEFAULT_BLOCK_SIZE)


def continue_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, new_tokens: int, seed: int = 0
) -> str:
    """Return a prompt followed by a sampled continuation (temperature 0.8, top-k 50).

    It is shorter if the model ends the document or has no positions left. A long prompt is truncated on the left.
    """
    set_seed(seed)
    # The tokenizer may append EOS. Remove it, because the model would not continue after it.
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
    """Return a config's maximum context length, or None if the architecture has no limit."""
    name = config.attribute_map.get(POSITIONS, POSITIONS)
    return getattr(config, name) if name in {field.name for field in fields(config)} else None


def _field_names(model_type: str | None) -> set[str]:
    return {field.name for field in fields(CONFIG_MAPPING[model_type])} if model_type in CONFIG_MAPPING else set()


def _validate_vocabulary(size: int, tokenizer: PreTrainedTokenizerBase, fix: str) -> None:
    if size < len(tokenizer):
        raise ValueError(f"vocab_size={size} is smaller than the tokenizer's {len(tokenizer)} tokens; {fix}")
