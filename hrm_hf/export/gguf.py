"""Checkpoints written as GGUF files, which llama.cpp and what is built on it read.

    export_gguf("go-unified", "go-unified.gguf", dtype="q8_0")

llama.cpp computes the architectures that it knows and no others, so a model can be exported if it is one of them in
all but name. The unified Go coder has the shape of a Llama and becomes `llama`; plain Llama and GPT-2 become `llama`
and `gpt2`. Tensors keep their values; two things move: rows of q and k go from transformers' half-split rotary order
to interleaved pairs, and GPT-2's weights are transposed to (out, in). Tokenizers are byte-level BPE, whose ids
llama.cpp reproduces; others are refused.

Left out: the two-stack Go coder, whose cross-attention no architecture of llama.cpp has; recurrent models; adapters;
quantization below 8 bits, which llama.cpp's own `llama-quantize` does to our files. Nothing is ever unpickled.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import ModelCard
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel

from ..hub.kinds import load_config
from ..io.usage import validate_extra
from ..registry import architecture_of, load_function
from .checkpoint import complete_or_nothing, load_model
from .gguf_tokenizer import add_vocabulary, find_file, gguf_vocabulary, load_tokenizer


LLAMA_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GPT2_BLOCK = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
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
# Rounding moves the argmax between near ties only; a wrong layout leaves some per cent of agreement.
LEAST_AGREEMENT = 0.5
GO_UNIFIED = 'HrmGoCoderConfig.from_preset("unified")'
# Go with tabs, other alphabets, numbers, runs of blanks and the Go coder's tags: where tokenizers come apart.
CHECK_TEXTS = (
    "func readFile(path string) ([]byte, error) {\n\tf, err := os.Open(path)\n\tif err != nil {\n\t\treturn nil, err\n"
    "\t}\n\tdefer f.Close()\n\treturn io.ReadAll(f)\n}\n",
    'package main\n\nimport "fmt"\n\n// Grüße, 世界 — it\'s 3.14159e-10 , 0x1F600 😀\nvar s = `raw "text"   \n\n\t\t '
    "x`\n\nfunc main() { fmt.Printf(\"%08.3f %q\\n\", 1234567.89, '\\u00e9') }\n",
    "<PROBLEM>Sum of a slice</PROBLEM><PLAN><INTENT:ADD><TARGET:func>Sum<STEP>loop</PLAN><CODE>func Sum(",
    "  \t \n\n   x  +=  1 // they'll say we've done IT'S \r\n",
)


def export_gguf(
    model: str | Path, out: str | Path, dtype: str = "f16", force: bool = False, check: bool = False
) -> dict[str, Any]:
    """Write a model and its tokenizer to one GGUF file; either the complete file or none.

    Arguments as `options.ExportGguf`. Vectors and GPT-2's positions stay f32; with q8_0, matrices whose rows are no
    multiple of 32 long become f16. With `check` see `compare_with_llama_cpp`, which runs before `out` is there.

    Returns:
        What was written, and with `check` what was compared.

    Raises:
        FileExistsError: `out` exists.
        ImportError: the gguf package is missing, or with `check` llama-cpp-python.
        OSError: no safetensors in the model.
        ValueError: no such model, another architecture or kind of tokenizer, a corrupted checkpoint, or with `check`
            a file that llama.cpp reads otherwise. Nothing is written then.
    """
    validate_extra("gguf", "writing GGUF files needs gguf", "gguf")
    if check and find_spec("llama_cpp") is None:  # in no extra: it is compiled when it is installed
        raise ImportError("check needs llama.cpp's Python binding: pip install llama-cpp-python, or leave it out")
    with complete_or_nothing(Path(out), force) as unfinished:
        config = load_config(str(model))
        layout = layout_of(config, str(model))
        tokenizer = load_tokenizer(str(model))
        vocabulary = gguf_vocabulary(tokenizer, config.vocab_size)
        network = load_model(str(model))
        tensors = gguf_tensors(network)
        kept_f16 = _write(unfinished, str(model), config, layout, vocabulary, tensors, dtype)
        result = {
            "out": str(out),
            "architecture": layout.architecture,
            "parameters": sum(tensor.size for tensor in tensors.values()),
            "dtype": dtype,
            "bytes": unfinished.stat().st_size,
            "tokens": len(vocabulary["tokens"]),
            "adds_bos": vocabulary["add_bos"],
        }
        if kept_f16:
            result["f16_matrices"] = kept_f16
        if check:
            result |= compare_with_llama_cpp(unfinished, network, tokenizer)
    return result


@dataclass(frozen=True)
class Layout:
    """How llama.cpp computes an architecture.

    Attributes:
        architecture: its name in llama.cpp.
        layers: number of layers.
        expected: settings of the config that llama.cpp computes -> values that mean it.
    """

    architecture: str
    layers: int
    expected: dict[str, tuple[Any, ...]]


def layout_of(config: PreTrainedConfig, model: str) -> Layout:
    """The layout of a model named `model`.

    Raises:
        ValueError: llama.cpp would compute the model differently, or not at all; says why and what can be exported.
    """
    row = architecture_of(config)
    if row is not None and row.gguf_layout:
        layout = load_function(row.gguf_layout)(config, model)
    elif type(config) in LAYOUTS:
        layout = LAYOUTS[type(config)](config)
    else:
        raise ValueError(
            f"{model} is a {config.model_type}, which no architecture of llama.cpp computes, so no runtime could read "
            f"the file. Exportable are hrm_go_coder of the preset `unified` ({GO_UNIFIED}), llama and gpt2"
        )
    for name, expected in layout.expected.items():
        if (value := _setting(config, name)) not in expected:
            raise ValueError(f"{model}: llama.cpp's {layout.architecture} needs {name}={expected[0]!r}, not {value!r}")
    return layout


def go_coder_layout(config: PreTrainedConfig, model: str) -> Layout:
    """One stack of the Go coder is a Llama. Raises ValueError for a model of two stacks."""
    if not config.unified:
        raise ValueError(
            f"{model} is a two-stack hrm_go_coder: its generator attends to the states of the planner, and llama.cpp "
            "has no architecture with cross-attention to a second stack under rotary positions. Train the preset "
            f"`unified` ({GO_UNIFIED}), which has one stack in the shape of a Llama, and export that"
        )
    return Layout("llama", config.planner_layers, LLAMA_SETTINGS | {"planner_cycles": (1,)})


# Architectures of transformers; ours are named in the registry.
LAYOUTS: dict[type[PreTrainedConfig], Callable[[Any], Layout]] = {
    LlamaConfig: lambda config: Layout("llama", config.num_hidden_layers, LLAMA_SETTINGS),
    GPT2Config: lambda config: Layout("gpt2", config.n_layer, GPT2_SETTINGS),
}


def gguf_tensors(network: PreTrainedModel) -> dict[str, np.ndarray]:
    """The weights by GGUF's names, f32, as llama.cpp orders them.

    Raises:
        ValueError: a tensor that GGUF has no name for, or one that is not finite.
    """
    config, state = network.config, network.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    tensors = {}
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(
                f"{name} has values that are not finite; the checkpoint is corrupted or training diverged"
            )
        target = gguf_name(name)
        if target is None:
            raise ValueError(f"GGUF has no name for the tensor {name} {tuple(tensor.shape)} of this model")
        array = tensor.float().numpy()
        if re.search(r"\.attn_[qk]\.weight$", target):
            heads = config.num_attention_heads if ".attn_q." in target else config.num_key_value_heads
            array = interleave_rotary(array, heads)
        elif name.startswith("transformer.h.") and array.ndim == 2:
            array = array.T  # GPT-2's Conv1D holds (in, out)
        tensors[target] = np.ascontiguousarray(array)
    return tensors


def gguf_name(name: str) -> str | None:
    """GGUF's name of one of our tensors, None if it has none."""
    whole = {
        "lm_head.weight": "output.weight",
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.planner.norm.weight": "output_norm.weight",
        "transformer.wte.weight": "token_embd.weight",
        "transformer.wpe.weight": "position_embd.weight",
        "transformer.ln_f.weight": "output_norm.weight",
        "transformer.ln_f.bias": "output_norm.bias",
    }
    if name in whole:
        return whole[name]
    match = re.fullmatch(r"(?:model\.(?:planner\.)?layers|transformer\.h)\.(\d+)\.(.+)\.(weight|bias)", name)
    block = GPT2_BLOCK if name.startswith("transformer.") else LLAMA_BLOCK
    if match is None or match[2] not in block:
        return None
    return f"blk.{match[1]}.{block[match[2]]}.{match[3]}"


def interleave_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection, [heads * head_dim, width], from half-split to interleaved rotary order.

    transformers turns dimension i of a head with i + head_dim/2, llama.cpp's `llama` 2i with 2i + 1.
    """
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


@torch.no_grad()
def compare_with_llama_cpp(path: str | Path, network: PreTrainedModel, tokenizer: Any) -> dict[str, Any]:
    """Loads a GGUF file in llama.cpp and compares ids and logits with transformers' on CHECK_TEXTS.

    Returns:
        compared_tokens, argmax_agreement (0..1, of logits), max_logit_difference, max_logit (both absolute).

    Raises:
        ValueError: other ids for a text, with tags as tags or as characters; or another model: the argmax agrees at
            less than half of the positions.
    """
    import llama_cpp

    limit = min(network.config.max_position_embeddings, 512)
    # f32 keys and values: what differs is then the file's, not the runtime's cache.
    llama = llama_cpp.Llama(
        str(path), n_ctx=limit, n_batch=limit, logits_all=True, verbose=False, n_threads=torch.get_num_threads(),
        n_threads_batch=torch.get_num_threads(),
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip
    network = network.float().eval()
    differences, agreements, largest = [], [], 0.0
    for text in CHECK_TEXTS:
        for tags in (True, False):
            ids = tokenizer.encode(text, split_special_tokens=not tags)
            theirs = llama.tokenize(text.encode(), add_bos=True, special=tags)
            if ids != theirs:
                raise ValueError(
                    f"llama.cpp gives other ids for {text!r} ({'with' if tags else 'without'} tags): "
                    f"{theirs[:20]} ..., expected {ids[:20]} ...; nothing was written"
                )
            ids = ids[:limit]
            llama.reset()
            llama.eval(ids)
            theirs = torch.from_numpy(llama.scores[: len(ids)].copy())
            ours = network(torch.tensor([ids])).logits[0]
            differences.append((ours - theirs).abs().max().item())
            agreements.append(ours.argmax(-1) == theirs.argmax(-1))
            largest = max(largest, ours.abs().max().item())
    llama.close()
    agreed = torch.cat(agreements).float()
    if agreed.mean() < LEAST_AGREEMENT:
        raise ValueError(
            f"llama.cpp computes another model: the likeliest token agrees at {agreed.mean():.1%} of {len(agreed)} "
            f"positions, logits differ by up to {max(differences):.3g}; nothing was written"
        )
    return {
        "compared_tokens": len(agreed),
        "argmax_agreement": agreed.mean().item(),
        "max_logit_difference": max(differences),
        "max_logit": largest,
    }


def _setting(config: PreTrainedConfig, name: str) -> Any:
    if name in ("rope_type", "partial_rotary_factor"):
        return config.rope_parameters.get(name, 1.0)
    return getattr(config, name, None)  # quantization_config is an attribute of quantized checkpoints only


def _write(
    path: Path,
    model: str,
    config: PreTrainedConfig,
    layout: Layout,
    vocabulary: dict[str, Any],
    tensors: dict[str, np.ndarray],
    dtype: str,
) -> int:
    """Writes the file; returns how many matrices became f16 because q8_0 could not hold them."""
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
    """The name, and the license that the model card states."""
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


def _add_tensor(writer: Any, name: str, tensor: np.ndarray, dtype: str) -> bool:
    """Adds a tensor in its type; True if it is f16 for want of rows that q8_0 can cut in blocks."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    if tensor.ndim == 1 or name == "position_embd.weight":  # llama.cpp adds these to f32 states
        dtype = "f32"
    falls_back = dtype == "q8_0" and tensor.shape[-1] % 32 != 0
    kind = GGMLQuantizationType["F16" if falls_back else dtype.upper()]
    if kind is GGMLQuantizationType.F16 and np.abs(tensor).max() > np.finfo(np.float16).max:
        raise ValueError(f"{name} has values beyond f16's {np.finfo(np.float16).max}; export with --dtype bf16 or f32")
    writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    return falls_back
