"""Estimate the memory of one training step of a causal language model from its config.

    weights 4 P + gradients 4 P + AdamW moments 8 P           16 bytes per parameter: all in float32
    + DDP gradient buckets 4 P                                with several processes
    + bfloat16 copies of weights 2 P                          kept by autocast from forward to backward
    + activations: tokens x trained layer visits x bytes per visit
    + keys and values for later segments: tokens x (M - 1) x visits per segment
    + logits: tokens x V x 12 bytes

P is the number of parameters, M the number of segments. The bytes per layer visit are what autograd saves, measured
with `torch.autograd.graph.saved_tensors_hooks`; the tests measure them again. The 12 bytes per logit come from the
peak resident memory of a CPU process with a vocabulary of 50,304: 12.2 bytes for Llama, 12.5 for hrm_lm.

The estimate omits the CUDA context, fragmentation and communication buffers; `usable_memory` reserves memory for
them. It assumes SDPA or FlashAttention, which store no T x T attention weights.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, HrmTextConfig, LlamaConfig, PreTrainedConfig

from ..models.early_exit import LOGITS_AT_ONCE
from ..registry import ARCHITECTURES, load_function


MIB, GIB = 2**20, 2**30
FREE_SHARE = 0.1  # fraction of device memory reserved for fragmentation and attention workspace

# Bytes that autograd saves per token and layer visit, as a multiple of each width (residual stream, queries, keys,
# feed-forward), in float32 and under bfloat16 autocast (where norms and the residual stream stay float32).
LLAMA_LAYER = {"float32": (24, 8, 8, 16), "bfloat16": (26, 4, 4, 8)}
GPT2_LAYER = {"float32": (24, 8, 8, 20), "bfloat16": (16, 4, 4, 10)}
HRM_TEXT_LAYER = {"float32": (36, 16, 8, 16), "bfloat16": (33, 8, 4, 8)}
GATED_LAYER = {"float32": (16, 16, 8, 16), "bfloat16": (20, 8, 4, 8)}  # hrm_lm
STACK_EXIT_BYTES = 4  # bytes saved per token and hidden unit by the norm at the end of an hrm_lm stack
MOST_SEQUENCES = 2**20  # upper bound when searching for the largest batch
LOGIT_BYTES = 12  # bytes per logit: the logit, its log-softmax and its gradient, all in float32


@dataclass(frozen=True)
class ModelShape:
    """Sizes that determine the memory of a training step. Widths are in values per token.

    Attributes:
        saved_bytes: bytes saved per layer visit, by precision; see LLAMA_LAYER.
        trained_visits, visits: layer visits per segment that carry gradients, and all layer visits per segment.
        trained_passes: stack passes per segment that carry gradients; 0 for a plain stack of layers.
        segments, trained_segments: number of segments (M), and how many of them carry gradients; 1 without segments.
        once_visits, once_passes: layer visits and stack passes that run once, before or after the segments.
        streams: residual streams n of hyper-connections; 1 for a plain residual.
        sinkhorn_iters: Sinkhorn iterations of the hyper-connections; 0 without them.
    """

    saved_bytes: dict[str, tuple[int, ...]]
    parameters: int
    hidden_size: int
    query_width: int
    key_width: int
    intermediate_size: int
    vocab_size: int
    trained_visits: int
    visits: int
    trained_passes: int = 0
    segments: int = 1
    trained_segments: int = 1
    once_visits: int = 0
    once_passes: int = 0
    streams: int = 1
    sinkhorn_iters: int = 0


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Return the shape of a causal language model, with its parameters counted on the meta device.

    Raises:
        ValueError: this model type has no memory model, so --per_device_train_batch_size must be set.
    """
    known: dict[type, Callable[[Any], dict[str, Any]]] = SHAPES | {
        row.config: load_function(row.memory_shape) for row in ARCHITECTURES.values() if row.memory_shape
    }
    if type(config) not in known:
        raise ValueError(
            f"model_type={config.model_type!r}: has no memory model; set --per_device_train_batch_size, or use one of "
            f"{sorted(one.model_type for one in known)}"
        )
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    width, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    widths = {
        "query_width": heads * head_dim,
        "key_width": (getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        "intermediate_size": getattr(config, "intermediate_size", None),
    }
    return ModelShape(
        parameters=parameters, hidden_size=width, vocab_size=config.vocab_size, **widths | known[type(config)](config)
    )


def llama_shape(config: LlamaConfig) -> dict[str, Any]:
    """Return the fields of `ModelShape` for a plain stack of Llama layers."""
    layers = config.num_hidden_layers
    return {"saved_bytes": LLAMA_LAYER, "trained_visits": layers, "visits": layers}


def gpt2_shape(config: GPT2Config) -> dict[str, Any]:
    """Return the fields of `ModelShape` for a plain stack of GPT-2 layers."""
    inner = config.n_inner or 4 * config.n_embd
    return llama_shape(config) | {"saved_bytes": GPT2_LAYER, "intermediate_size": inner}


def hrm_text_shape(config: HrmTextConfig) -> dict[str, Any]:
    """Return the fields of `ModelShape` for HRM-Text: only the last passes through its stacks have gradients."""
    return {
        "saved_bytes": HRM_TEXT_LAYER,
        "key_width": config.num_attention_heads * config.head_dim,
        "trained_visits": config.num_layers_per_stack * (config.H_cycles + sum(config.L_bp_cycles)),
        "visits": config.num_hidden_layers,
    }


def streams_shape(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of `ModelShape` for `rlm_mhc`: Llama layers over residual streams, some in a loop."""
    visits = config.num_hidden_layers
    mhc = {"streams": config.mhc_flows, "sinkhorn_iters": config.mhc_sinkhorn_iters} if config.mhc_enabled else {}
    return {"saved_bytes": LLAMA_LAYER, "trained_visits": visits, "visits": visits, **mhc}


def segments_shape(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of `ModelShape` for `hrm_lm`. Only a segment's last stack passes have gradients."""
    h_passes = 0 if config.flat_loop else min(config.H_cycles, config.bp_steps - 1)
    l_passes = config.bp_steps - h_passes
    M = config.halt_max_steps
    # The coda runs in each segment that computes logits: in all with deep supervision, otherwise in the last.
    with_logits = M if config.deep_supervision == "all" else 1
    return {
        "saved_bytes": GATED_LAYER,
        "trained_visits": h_passes * config.num_h_layers + l_passes * config.num_l_layers,
        "visits": config.segment_visits,
        "trained_passes": config.bp_steps,
        "segments": M,
        "trained_segments": M if config.bp_segments is None else min(M, config.bp_segments),
        "once_visits": config.prelude_layers + with_logits * config.coda_layers,
        "once_passes": bool(config.prelude_layers) + with_logits * bool(config.coda_layers),
    }


# Configs of transformers' models that our training scripts accept. Our own architectures are in the registry.
SHAPES = {LlamaConfig: llama_shape, GPT2Config: gpt2_shape, HrmTextConfig: hrm_text_shape}


def activation_bytes(shape: ModelShape, bf16: bool = False, checkpointing: bool = False) -> int:
    """Return the number of bytes saved per token for the backward pass, excluding logits."""
    if checkpointing:  # checkpointing saves only the inputs of layer visits and passes
        inputs = (shape.trained_visits + shape.trained_passes) * shape.trained_segments
        return 4 * shape.streams * shape.hidden_size * (inputs + shape.once_visits + shape.once_passes)
    widths = (shape.hidden_size, shape.query_width, shape.key_width, shape.intermediate_size)
    visit = sum(a * b for a, b in zip(shape.saved_bytes["bfloat16" if bf16 else "float32"], widths))
    if shape.sinkhorn_iters:  # each of a layer's two hyper-connections saves n streams, a branch output and maps
        n = shape.streams
        visit += 2 * 4 * ((n + 1) * shape.hidden_size + (2 * shape.sinkhorn_iters - 1) * n + 4 * n * n + 6 * n + 1)
    stack_exit = STACK_EXIT_BYTES * shape.hidden_size
    loops = (visit * shape.trained_visits + stack_exit * shape.trained_passes) * shape.trained_segments
    return loops + visit * shape.once_visits + stack_exit * shape.once_passes


def training_memory(
    shape: ModelShape,
    batch: int,
    sequence_length: int,
    *,
    bf16: bool = False,
    checkpointing: bool = False,
    processes: int = 1,
    strategy: str = "ddp",
) -> dict[str, int]:
    """Return the bytes that a step on `batch` sequences needs per device, broken down by purpose.

    Args:
        strategy: "ddp" shards nothing; "deepspeed_zero2" shards gradients and optimizer states, "fsdp2" and
            "deepspeed_zero3" also the weights.
    """
    tokens, P = batch * sequence_length, shape.parameters
    sharded = strategy in ("fsdp2", "deepspeed_zero3")
    value_bytes = 2 if bf16 else 4
    # Without checkpointing, the activations saved for visits with gradients already include the keys and values.
    extra_visits = shape.visits - (0 if checkpointing else shape.trained_visits)
    terms = {
        "weights": 4 * P // (processes if sharded else 1),
        "gradients": 4 * P // (1 if strategy == "ddp" else processes),
        "optimizer": 8 * P // (1 if strategy == "ddp" else processes),
        "gradient_buckets": 4 * P if strategy == "ddp" and processes > 1 else 0,
        "bf16_weights": 2 * P if bf16 and not sharded else 0,
        "activations": tokens * activation_bytes(shape, bf16, checkpointing),
        "keys_values": tokens * (shape.segments - 1) * extra_visits * 2 * shape.key_width * value_bytes,
        "logits": tokens * shape.vocab_size * LOGIT_BYTES,
    }
    if checkpointing:  # the backward pass recomputes one layer at a time
        one = {"trained_visits": 1, "trained_passes": 0, "trained_segments": 1, "once_visits": 0, "once_passes": 0}
        terms["activations"] += tokens * activation_bytes(replace(shape, **one), bf16)
    if shape.segments > 1:  # the head computes the losses of earlier segments in chunks
        terms["logits"] += min(tokens * shape.vocab_size, LOGITS_AT_ONCE) * 16
    return terms


def largest_batch(shape: ModelShape, sequence_length: int, usable: int, **options) -> int:
    """Return the largest batch that fits into `usable` bytes. `options` are passed to `training_memory`."""

    def needed(batch: int) -> int:
        return sum(training_memory(shape, batch, sequence_length, **options).values())

    return bisect_right(range(1, MOST_SEQUENCES + 1), usable, key=needed)


def usable_memory(total: int, device: str = "cuda") -> int:
    """Return the number of bytes of a device's memory that a training step may use.

    1 GiB is reserved for the CUDA context, NCCL and cuBLAS (at most half of a small device), 0.5 GiB on a CPU.
    """
    libraries = min(GIB, total // 2) if device == "cuda" else GIB // 2
    return max(0, int(total * (1 - FREE_SHARE)) - libraries)


def in_words(size: int) -> str:
    """Format a number of bytes, e.g. as 1.50 GiB or 7.2 MiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
