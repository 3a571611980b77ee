"""Memory that one training step of a causal language model needs, from its config alone.

    weights 4 P + gradients 4 P + AdamW moments 8 P           16 bytes a parameter: float32 master weights
    + DDP gradient buckets 4 P                                with several processes
    + bfloat16 copies of weights 2 P                          that autocast keeps from forward to backward
    + activations: tokens x trained layer visits x bytes of a visit
    + keys and values that later segments may need: tokens x (M - 1) x visits of a segment
    + logits: tokens x V x 12 bytes

P counts parameters, M segments. The bytes of a layer visit are those that autograd saves; they were read off with
`torch.autograd.graph.saved_tensors_hooks` and the tests count them again. The 12 bytes of a logit are what a
token adds to the peak resident memory of a CPU process, for a vocabulary of 50,304: 12.2 for Llama, 12.5 for hrm_lm.

Left out: what the CUDA context, the allocator's fragmentation and communication buffers take on top; `usable_memory`
keeps a share free for these. Attention is taken to be SDPA or FlashAttention, which keep no T x T weights.
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
FREE_SHARE = 0.1  # of a device: fragmentation, attention workspace

# Bytes that autograd saves for one token in one layer visit, as multiples of the widths of (residual stream, queries,
# keys, feed-forward), in float32 and under bfloat16 autocast (where norms and the residual stream stay float32).
LLAMA_LAYER = {"float32": (24, 8, 8, 16), "bfloat16": (26, 4, 4, 8)}
GPT2_LAYER = {"float32": (24, 8, 8, 20), "bfloat16": (16, 4, 4, 10)}
HRM_TEXT_LAYER = {"float32": (36, 16, 8, 16), "bfloat16": (33, 8, 4, 8)}
GATED_LAYER = {"float32": (16, 16, 8, 16), "bfloat16": (20, 8, 4, 8)}  # of hrm_lm
STACK_EXIT_BYTES = 4  # times D: the norm at the exit of an hrm_lm stack
MOST_SEQUENCES = 2**20  # that a device is taken to hold
LOGIT_BYTES = 12  # logits, their log-softmax and its gradient, all in float32


@dataclass(frozen=True)
class ModelShape:
    """The sizes that the memory of a training step depends on. Widths are in values per token.

    Attributes:
        saved_bytes: of a layer visit, by precision, see LLAMA_LAYER.
        trained_visits, visits: layer visits of one segment with gradients, and all of them.
        trained_passes: stack passes of one segment with gradients; 0 for a plain stack of layers.
        segments, trained_segments: M, and those of them with gradients; 1 for models without.
        once_visits, once_passes: layer visits and stack passes before and behind all segments.
        streams: residual streams n of hyper-connections; 1 for a plain residual.
        sinkhorn_iters: of their mixing; 0 without them.
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
    """The shape of a causal language model, its parameters counted on the meta device.

    Raises:
        ValueError: the memory of this model type is not known; set --per_device_train_batch_size by hand.
    """
    known: dict[type, Callable[[Any], dict[str, Any]]] = SHAPES | {
        row.config: load_function(row.memory_shape) for row in ARCHITECTURES.values() if row.memory_shape
    }
    if type(config) not in known:
        raise ValueError(
            f"no memory model for model type {config.model_type!r}; expected one of "
            f"{sorted(one.model_type for one in known)}. Give --per_device_train_batch_size to choose the batch"
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
    """A plain stack of Llama's layers."""
    layers = config.num_hidden_layers
    return {"saved_bytes": LLAMA_LAYER, "trained_visits": layers, "visits": layers}


def gpt2_shape(config: GPT2Config) -> dict[str, Any]:
    """A plain stack of GPT-2's layers."""
    inner = config.n_inner or 4 * config.n_embd
    return llama_shape(config) | {"saved_bytes": GPT2_LAYER, "intermediate_size": inner}


def hrm_text_shape(config: HrmTextConfig) -> dict[str, Any]:
    """Two stacks that are applied over and over, the last passes with gradients."""
    return {
        "saved_bytes": HRM_TEXT_LAYER,
        "key_width": config.num_attention_heads * config.head_dim,
        "trained_visits": config.num_layers_per_stack * (config.H_cycles + sum(config.L_bp_cycles)),
        "visits": config.num_hidden_layers,
    }


def streams_shape(config: PreTrainedConfig) -> dict[str, Any]:
    """Llama's layers over several residual streams (`rlm_mhc`), the middle ones visited again in loops."""
    looped = (config.num_loops - 1) * (config.loop_end - config.loop_start) if config.num_loops > 1 else 0
    visits = config.num_hidden_layers + looped
    mhc = {"streams": config.mhc_flows, "sinkhorn_iters": config.mhc_sinkhorn_iters} if config.mhc_enabled else {}
    return {"saved_bytes": LLAMA_LAYER, "trained_visits": visits, "visits": visits, **mhc}


def segments_shape(config: PreTrainedConfig) -> dict[str, Any]:
    """Segments of one or two stacks (`hrm_lm`), of which the last passes of each carry gradients."""
    h_passes = 0 if config.flat_loop else min(config.H_cycles, config.bp_steps - 1)
    l_passes = config.bp_steps - h_passes
    M = config.halt_max_steps
    # A segment whose logits are asked for passes through the coda; without deep supervision only the last is.
    read = M if config.deep_supervision == "all" else 1
    return {
        "saved_bytes": GATED_LAYER,
        "trained_visits": h_passes * config.num_h_layers + l_passes * config.num_l_layers,
        "visits": config.segment_visits,
        "trained_passes": config.bp_steps,
        "segments": M,
        "trained_segments": M if config.bp_segments is None else min(M, config.bp_segments),
        "once_visits": config.prelude_layers + read * config.coda_layers,
        "once_passes": bool(config.prelude_layers) + read * bool(config.coda_layers),
    }


# Architectures of transformers that run through the same scripts; ours are named in the registry.
SHAPES = {LlamaConfig: llama_shape, GPT2Config: gpt2_shape, HrmTextConfig: hrm_text_shape}


def activation_bytes(shape: ModelShape, bf16: bool = False, checkpointing: bool = False) -> int:
    """Bytes saved per token for the backward pass, without logits. With checkpointing only the input of each visit."""
    if checkpointing:
        inputs = (shape.trained_visits + shape.trained_passes) * shape.trained_segments
        return 4 * shape.streams * shape.hidden_size * (inputs + shape.once_visits + shape.once_passes)
    widths = (shape.hidden_size, shape.query_width, shape.key_width, shape.intermediate_size)
    visit = sum(a * b for a, b in zip(shape.saved_bytes["bfloat16" if bf16 else "float32"], widths))
    if shape.sinkhorn_iters:  # two hyper-connections a layer, in float32: n streams, the branch's output, the maps
        n = shape.streams
        visit += 2 * 4 * ((n + 1) * shape.hidden_size + (2 * shape.sinkhorn_iters - 1) * n + 4 * n * n + 6 * n + 1)
    leave = STACK_EXIT_BYTES * shape.hidden_size
    loops = (visit * shape.trained_visits + leave * shape.trained_passes) * shape.trained_segments
    return loops + visit * shape.once_visits + leave * shape.once_passes


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
    """Bytes a device needs for a step on `batch` sequences, term by term.

    Args:
        strategy: "ddp"; "deepspeed_zero2" shards gradients and optimizer, "fsdp2" and "deepspeed_zero3" weights too.
    """
    tokens, P = batch * sequence_length, shape.parameters
    sharded = strategy in ("fsdp2", "deepspeed_zero3")
    value_bytes = 2 if bf16 else 4
    # A key that already lives among the saved activations is not held a second time.
    held_visits = shape.visits - (0 if checkpointing else shape.trained_visits)
    terms = {
        "weights": 4 * P // (processes if sharded else 1),
        "gradients": 4 * P // (1 if strategy == "ddp" else processes),
        "optimizer": 8 * P // (1 if strategy == "ddp" else processes),
        "gradient_buckets": 4 * P if strategy == "ddp" and processes > 1 else 0,
        "bf16_weights": 2 * P if bf16 and not sharded else 0,
        "activations": tokens * activation_bytes(shape, bf16, checkpointing),
        "keys_values": tokens * (shape.segments - 1) * held_visits * 2 * shape.key_width * value_bytes,
        "logits": tokens * shape.vocab_size * LOGIT_BYTES,
    }
    if checkpointing:  # one layer is recomputed at a time
        one = {"trained_visits": 1, "trained_passes": 0, "trained_segments": 1, "once_visits": 0, "once_passes": 0}
        terms["activations"] += tokens * activation_bytes(replace(shape, **one), bf16)
    if shape.segments > 1:  # the losses of earlier segments go through the head in chunks
        terms["logits"] += min(tokens * shape.vocab_size, LOGITS_AT_ONCE) * 16
    return terms


def largest_batch(shape: ModelShape, sequence_length: int, usable: int, **options) -> int:
    """The most sequences that fit into `usable` bytes; 0 if not even one does. `options` as in `training_memory`."""

    def needed(batch: int) -> int:
        return sum(training_memory(shape, batch, sequence_length, **options).values())

    return bisect_right(range(1, MOST_SEQUENCES + 1), usable, key=needed)


def usable_memory(total: int, device: str = "cuda") -> int:
    """The part of a device's memory that the terms of `training_memory` may take.

    CUDA's context and the buffers of NCCL and cuBLAS take a gigabyte, or half of a small device; libraries of a CPU
    process take half a gigabyte.
    """
    libraries = min(GIB, total // 2) if device == "cuda" else GIB // 2
    return max(0, int(total * (1 - FREE_SHARE)) - libraries)


def in_words(size: int) -> str:
    """Bytes as a person reads them: 1.50 GiB, 7.2 MiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
