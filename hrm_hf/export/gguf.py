"""Export of checkpoints to GGUF files for llama.cpp and programs built on it.

    export_gguf("go-unified", "go-unified.gguf", dtype="q8_0")

llama.cpp only runs architectures that it implements. The unified Go coder has the Llama architecture and is
exported as `llama`; plain Llama and GPT-2 are exported as `llama` and `gpt2`; `gguf_loops.py` has the layouts of
`hrm_lm`. Tensors keep their values. The rows of q and k are reordered from the half-split rotary layout of
transformers to interleaved pairs, and GPT-2's weights are transposed to (out, in).

Not supported: the two-stack Go coder, because llama.cpp has no architecture with its cross-attention; halting, because
llama.cpp runs the same layers for every token; adapters; tokenizers other than byte-level BPE; quantization below 8
bits, which `llama-quantize` can do.
"""

import itertools
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from huggingface_hub import ModelCard
from transformers import AutoTokenizer, GPT2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel

from ..hub.kinds import load_config
from ..io.usage import validate_extra
from ..registry import architecture_of, load_function
from .checkpoint import complete_or_nothing, find_file, load_model, validate_passes
from .gguf_check import MAX_DIFFERENCE, MAX_DIFFERENCE_GELU, compare_with_llama_cpp, validate_runtime


GPT2_SETTINGS = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
}
LLAMA_SETTINGS = {
    "hidden_act": ("silu", "swish"),
    "rope_type": ("default",),
    "partial_rotary_factor": (1.0,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (None,),
}
GO_UNIFIED = 'HrmGoCoderConfig.from_preset("unified")'
# Runtimes stop generating at this tag, which ends an attempt. A validator's verdict would follow.
END_OF_ATTEMPT = "</CODE>"
# Placeholder for an empty list of merges. It never applies, because byte-level texts do not contain this character.
NO_MERGE = "\u4e00 \u4e00"


def export_gguf(
    model: str | Path,
    out: str | Path,
    dtype: str = "f16",
    layout: str | None = None,
    passes: int | None = None,
    force: bool = False,
    check: bool = False,
) -> dict[str, Any]:
    """Write a model and its tokenizer to one GGUF file. The file appears only once it is complete.

    See `ExportGguf` for the arguments. Vectors and GPT-2's position embeddings stay f32. With q8_0, matrices whose row
    length is not a multiple of 32 become f16. With `check`, `compare_with_llama_cpp` runs before `out` appears.

    Raises:
        FileExistsError: `out` exists.
        ImportError: the gguf package or, with `check`, a package with llama.cpp is missing.
        ValueError: the model is missing or corrupted, its architecture or tokenizer is unsupported, or (with `check`)
            llama.cpp's outputs differ.
    """
    validate_extra("gguf", "writing GGUF files needs gguf", "gguf")
    if check:
        validate_runtime()
    with complete_or_nothing(Path(out), force) as unfinished:
        config = load_config(str(model))
        chosen = layout_of(config, str(model), layout, passes)
        tokenizer = load_tokenizer(str(model))
        vocabulary = gguf_vocabulary(tokenizer, config.vocab_size)
        network = load_model(str(model)).float()
        tensors = gguf_tensors(network, chosen)
        kept_f16 = _write(unfinished, str(model), config, chosen, vocabulary, tensors, dtype)
        result = {
            "out": str(out),
            "architecture": chosen.architecture,
            "parameters": sum(tensor.size for tensor in tensors.values()),
            "dtype": dtype,
            "bytes": unfinished.stat().st_size,
            "tokens": len(vocabulary["tokens"]),
            "adds_bos": vocabulary["add_bos"],
        }
        forward = {}
        if chosen.segments is not None:
            result["passes"] = chosen.segments
            forward = {"num_segments": chosen.segments, "exit_criterion": "fixed"}
        if kept_f16:
            result["f16_matrices"] = kept_f16
        if check:
            exact = MAX_DIFFERENCE_GELU if chosen.architecture == "gpt2" else MAX_DIFFERENCE
            tolerance = exact if dtype == "f32" else None
            result |= compare_with_llama_cpp(unfinished, network, tokenizer, tolerance, **forward)
    return result


class Layout(NamedTuple):
    """An architecture of llama.cpp to which a model can be exported.

    Attributes:
        architecture: name in llama.cpp.
        layers: number of blocks.
        expected: the config values that it supports, by field; the first value is the one to suggest.
        keys: metadata that only this architecture has, without the prefix.
        tensors: function that returns a model's tensors by GGUF name, before q and k are reordered; None to use the
            names of transformers' Llama or GPT-2.
        segments: number of segments that the file runs, for models that have segments.
    """

    architecture: str
    layers: int
    expected: dict[str, tuple[Any, ...]]
    keys: dict[str, int | float] = {}
    tensors: Callable[[PreTrainedModel], dict[str, torch.Tensor]] | None = None
    segments: int | None = None


def layout_of(
    config: PreTrainedConfig, model: str, architecture: str | None = None, passes: int | None = None
) -> Layout:
    """Return the first layout that computes a model's outputs exactly. Raise ValueError if there is none.

    Args:
        architecture: name of the layout to use, instead of the first that fits.
        passes: number of segments that the file runs.
    """
    row = architecture_of(config)
    validate_passes(config, model, passes)
    if row is not None and row.gguf_layouts:
        layouts = load_function(row.gguf_layouts)(config, model, passes)
    elif type(config) in LAYOUTS:
        layouts = LAYOUTS[type(config)](config)
    else:
        raise ValueError(
            f"{model} is a {config.model_type}, which llama.cpp does not support; expected llama, gpt2, hrm_lm, or "
            f"hrm_go_coder with the preset `unified` ({GO_UNIFIED})"
        )
    names = [layout.architecture for layout in layouts]
    if architecture is not None and architecture not in names:
        raise ValueError(f"layout={architecture!r}: a {config.model_type} can be exported as {' or '.join(names)}")
    wrong = {}
    for layout in layouts:
        if architecture in (None, layout.architecture):
            wrong[layout.architecture] = unsupported(config, layout.expected)
            if not wrong[layout.architecture]:
                return layout
    needs = [f"llama.cpp's {name} needs {', '.join(fields)}" for name, fields in wrong.items()]
    needs += ["passes=N (--passes N) also fixes the number of segments"] * ("exit_criterion=" in str(needs))
    raise ValueError(f"{model} is a {config.model_type} that llama.cpp cannot run: " + "; ".join(needs))


def unsupported(config: PreTrainedConfig, supported: dict[str, tuple[Any, ...]]) -> list[str]:
    """Return a description of each field whose value is not among the supported ones."""
    found = {name: (_setting(config, name), expected) for name, expected in supported.items()}
    return [
        f"{name}={expected[0]!r}, not {value!r}" for name, (value, expected) in found.items() if value not in expected
    ]


def go_coder_layouts(config: PreTrainedConfig, model: str, passes: int | None) -> tuple[Layout]:
    """Return the Llama layout of a unified Go coder. Raise ValueError for a two-stack model."""
    if not config.unified:
        raise ValueError(
            f"{model} is a two-stack hrm_go_coder, and llama.cpp has no architecture with rotary cross-attention to a "
            f"second stack; train the preset `unified` ({GO_UNIFIED}), which has the Llama architecture"
        )
    return (Layout("llama", config.planner_layers, LLAMA_SETTINGS | {"planner_cycles": (1,)}),)


# Layouts of transformers architectures. The registry has the layouts of this package's architectures.
LAYOUTS: dict[type[PreTrainedConfig], Callable[[Any], tuple[Layout]]] = {
    LlamaConfig: lambda config: (Layout("llama", config.num_hidden_layers, LLAMA_SETTINGS),),
    GPT2Config: lambda config: (Layout("gpt2", config.n_layer, GPT2_SETTINGS),),
}


def gguf_tensors(network: PreTrainedModel, layout: Layout) -> dict[str, np.ndarray]:
    """Return the weights keyed by GGUF name, in f32 and in llama.cpp's row order.

    Raises:
        ValueError: a tensor has no GGUF name or is not finite.
    """
    config, tensors = network.config, {}
    for name, tensor in network.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} has NaN or infinite values; the checkpoint is corrupted or training diverged")
    for target, tensor in (layout.tensors or partial(_named_tensors, layout=layout))(network).items():
        array = tensor.detach().float().numpy()
        if layout.architecture != "hrm_text" and re.search(r"\.attn_[qk]\.(weight|bias)$", target):
            heads = config.num_attention_heads if ".attn_q." in target else config.num_key_value_heads
            array = interleave_rotary(array, heads)
        tensors[target] = np.ascontiguousarray(array)
    return tensors


def _named_tensors(network: PreTrainedModel, layout: Layout) -> dict[str, torch.Tensor]:
    """Return the weights of a Llama, a GPT-2 or a unified Go coder, keyed by GGUF tensor name."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    state, tensors = network.state_dict(), {}
    if network.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    names = get_tensor_name_map(MODEL_ARCH[layout.architecture.upper()], layout.layers)
    for name, tensor in state.items():
        target = names.get_name(name.replace("model.planner.", "model."), (".weight", ".bias"))
        if target is None:
            raise ValueError(f"GGUF has no name for the tensor {name} {tuple(tensor.shape)} of this model")
        conv1d = name.startswith("transformer.h.") and tensor.ndim == 2  # GPT-2's Conv1D stores (in, out)
        tensors[target] = tensor.T if conv1d else tensor
    return tensors


def interleave_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a q or k projection from half-split to interleaved rotary order.

    transformers rotates dimension i of a head with i + head_dim/2; llama.cpp's `llama` rotates 2i with 2i + 1.

    Args:
        weight: a weight [heads * head_dim, width], or a bias [heads * head_dim].
    """
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _setting(config: PreTrainedConfig, name: str) -> Any:
    if name in ("rope_type", "partial_rotary_factor"):
        return config.rope_parameters.get(name, 1.0)
    return getattr(config, name, None)  # only quantized checkpoints have quantization_config


def _write(
    path: Path, model: str, config: PreTrainedConfig, layout: Layout, vocabulary: dict[str, Any],
    tensors: dict[str, np.ndarray], dtype: str,
) -> int:  # fmt: skip
    """Write the file, and return the number of matrices stored as f16 because q8_0 does not support their shape."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, layout.architecture)
    try:
        _add_description(writer, model)
        _add_shape(writer, config, layout, dtype)
        add_vocabulary(writer, vocabulary)
        kept_f16 = sum(_add_tensor(writer, name, tensor, dtype) for name, tensor in tensors.items())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    return kept_f16


def _add_description(writer: Any, model: str) -> None:
    """Add the model's name, and its license if the model card states one."""
    writer.add_type("model")
    writer.add_name(Path(model).resolve().name if Path(model).exists() else model.rpartition("/")[2])
    card = find_file(model, "README.md")
    if card is not None and (license_name := ModelCard.load(card).data.license):
        writer.add_license(license_name)


def _add_shape(writer: Any, config: PreTrainedConfig, layout: Layout, dtype: str) -> None:
    from gguf import GGML_QUANT_VERSION, LlamaFileType

    file_types = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(LlamaFileType[file_types[dtype]])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_block_count(layout.layers)
    if layout.architecture == "gpt2":
        writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name, value in layout.keys.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{layout.architecture}.{name}", value)


def _add_tensor(writer: Any, name: str, tensor: np.ndarray, dtype: str) -> bool:
    """Add a tensor. Return True if f16 replaces q8_0 because the row length is not a multiple of 32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    if tensor.ndim == 1 or name == "position_embd.weight":  # llama.cpp uses these tensors in f32
        dtype = "f32"
    falls_back = dtype == "q8_0" and tensor.shape[-1] % 32 != 0
    kind = GGMLQuantizationType["F16" if falls_back else dtype.upper()]
    if kind is GGMLQuantizationType.F16 and np.abs(tensor).max() > np.finfo(np.float16).max:
        limit = np.finfo(np.float16).max
        raise ValueError(f"{name} has values beyond the f16 maximum of {limit}; export with --dtype bf16 or f32")
    writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    return falls_back


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer saved with a model. Raise ValueError if it is missing or cannot be read."""
    if find_file(model, "tokenizer.json") is None:
        raise ValueError(
            f"{model} has no tokenizer.json, but a GGUF file must include the tokenizer; save the tokenizer with the "
            "model: tokenizer.save_pretrained(folder)"
        )
    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # the tokenizers library raises a plain Exception for a corrupted file
        raise ValueError(f"the tokenizer of {model} cannot be read: {error}") from error


def gguf_vocabulary(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Return the GGUF metadata fields that describe a tokenizer.

    A GGUF file refers to a pre-tokenizer only by name. We use "gpt-2", or "smollm" for single digits, and reject
    everything except byte-level BPE with GPT-2's splitting.

    Args:
        vocab_size: number of embedding rows; ids without a token in the tokenizer become unused tokens.

    Raises:
        ValueError: llama.cpp would produce different ids.
    """
    from gguf import TokenType

    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    pre_tokenizer = _byte_level_name(backend)
    tokens_by_id = {index: token for token, index in backend["model"]["vocab"].items()}
    types_by_id = dict.fromkeys(tokens_by_id, TokenType.NORMAL)
    for added in backend["added_tokens"]:
        tokens_by_id[added["id"]] = added["content"]
        types_by_id[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    if max(tokens_by_id) >= vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {max(tokens_by_id)}, but the model embeds only {vocab_size} tokens; use the "
            "model's own tokenizer, or call resize_token_embeddings and train the model"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError("eos_token=None: llama.cpp would stop at token id 11 instead; set tokenizer.eos_token")
    add_bos, add_eos = _added_around(tokenizer)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in backend["model"]["merges"]]
    merges = merges or [NO_MERGE]  # llama.cpp rejects an empty list of merges
    return {
        "tokens": [tokens_by_id.get(index, f"[UNUSED{index}]") for index in range(vocab_size)],
        "types": [int(types_by_id.get(index, TokenType.UNUSED)) for index in range(vocab_size)],
        "pre_tokenizer": pre_tokenizer,
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
    """Add the fields of `gguf_vocabulary` to a GGUFWriter."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary["pre_tokenizer"])
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    writer.add_token_merges(vocabulary["merges"])
    writer.add_add_bos_token(vocabulary["add_bos"])
    writer.add_add_eos_token(vocabulary["add_eos"])
    for name in ("bos", "eos", "pad", "unk", "eot"):
        if vocabulary[name] is not None:
            getattr(writer, f"add_{name}_token_id")(vocabulary[name])
    template = vocabulary["chat_template"]
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def _byte_level_name(backend: dict[str, Any]) -> str:
    """Return the name of a pre-tokenizer. Raise ValueError unless it is byte-level BPE with GPT-2's splits."""
    model, split, normalizer = backend["model"], backend["pre_tokenizer"] or {}, backend["normalizer"] or {}
    name, parts = "gpt-2", split.get("pretokenizers", [])
    if len(parts) == 2 and parts[0] == {"type": "Digits", "individual_digits": True}:
        name, split = "smollm", parts[1]
    wrong = [f"{name}={model[name]}" for name in ("byte_fallback", "ignore_merges", "dropout") if model.get(name)]
    if model["type"] != "BPE":
        wrong.append(f"model={model['type']}")
    if normalizer:
        wrong.append(f"normalizer={normalizer['type']}")
    if split.get("type") != "ByteLevel":
        wrong.append(f"pre_tokenizer={split.get('type')}")
    elif split["add_prefix_space"] or (model["merges"] and not split.get("use_regex", True)):
        wrong.append(f"add_prefix_space={split['add_prefix_space']}, use_regex={split.get('use_regex', True)}")
    for added in backend["added_tokens"]:
        blanks = [name for name in ("lstrip", "rstrip", "single_word") if added[name]]
        wrong += [f"{blanks[0]} of the added token {added['content']!r}"] if blanks else []
    if wrong:
        raise ValueError(
            "the tokenizer is not byte-level BPE like GPT-2's, so llama.cpp would produce different ids: "
            f"{'; '.join(wrong)}. Train a supported tokenizer with `hrm-hf data go-tokenizer`"
        )
    return name


def _added_around(tokenizer: Any) -> tuple[bool, bool]:
    """Return whether the tokenizer adds bos before and eos after a text by default."""
    plain, full = tokenizer.encode("x", add_special_tokens=False), tokenizer.encode("x")
    for bos, eos in itertools.product((False, True), repeat=2):
        if full == [tokenizer.bos_token_id] * bos + plain + [tokenizer.eos_token_id] * eos:
            return bos, eos
    raise ValueError(f"the tokenizer turns {plain} into {full}; GGUF supports only bos before a text and eos after it")
