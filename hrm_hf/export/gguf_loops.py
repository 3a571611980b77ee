"""How the loops of `hrm_lm` are stored as layers of llama.cpp's architectures.

llama.cpp runs two looped architectures, and some loops unroll into a Llama:

- `nanbeige`: a flat loop without input injection, of which the file stores one copy;
- `hrm_text`: two stacks whose low-level stack does not read x, or a flat loop that reads x in every pass and whose
  coda has as many blocks as the loop and reads z + x;
- `llama`: prelude, loop and coda without input injection and without norms between passes; the file stores one copy of
  the loop per pass.

llama.cpp always runs the same number of passes for every token.
"""

from collections.abc import Iterator
from functools import partial

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..models.hrm_lm_layers import LEARNED, HrmLmStack
from .gguf import LLAMA_SETTINGS, Layout


MOST_VISITS = 512  # maximum number of layer visits per token in llama.cpp
BLOCK_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.gate_proj": "attn_gate", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")
BRANCH_ENDS = ("self_attn.o_proj", "mlp.down_proj")  # projections whose outputs `pass_gains` scales
# Stacks in the order in which they run, each with its pass number, or None if the file stores the stack only once.
Visits = list[tuple[HrmLmStack, int | None]]
STATIC_ROPE = ("default", "llama3")  # rotary types whose frequencies do not depend on text length
SHARED = LLAMA_SETTINGS | {
    "norm_position": ("pre_exit",), "qk_norm": (False,), "mhc_flows": (1,), "step_vectors": (False,),
    "kv_layout": ("per_segment",), "pass_lora_rank": (0,),
}  # fmt: skip
FLAT = {"num_h_layers": (0,), "input_injection": ("none",), "loop_step": ("replace",), "attention_gate": (False,)}


def hrm_lm_layouts(config: PreTrainedConfig, model: str, passes: int | None) -> tuple[Layout, ...]:
    """Return the layouts of an `hrm_lm`, best first, with the config values that each of them needs.

    Args:
        passes: number of segments per token in the exported model; None for `config.halt_max_steps`.
    """
    segments = passes or config.halt_max_steps
    shared = {**SHARED}
    if passes is None and segments > 1:
        shared["exit_criterion"] = ("fixed",)
    visits = config.prelude_layers + config.coda_layers + segments * config.segment_visits
    if visits > MOST_VISITS:
        raise ValueError(
            f"passes={segments}: {model} would visit {visits} layers per token, but llama.cpp supports at most "
            f"{MOST_VISITS}; choose fewer passes"
        )
    return (
        _nanbeige(config, segments, shared),
        _hrm_text(config, segments, visits, shared),
        _unrolled_llama(config, segments, visits, shared),
    )


def _nanbeige(config: PreTrainedConfig, segments: int, shared: dict[str, tuple]) -> Layout:
    """Return the layout for a loop without input injection. The file stores the loop once."""
    expected = {
        **FLAT, "prelude_layers": (0,), "coda_layers": (0,), "pass_gains": (False,), **shared,
        "attention_bias": (False, "qkv"), "rope_type": STATIC_ROPE,
    }  # fmt: skip
    keys = {"num_loops": segments * config.L_cycles, "skip_loop_final_norm": config.exit_norms == "last"}
    return Layout("nanbeige", config.num_l_layers, expected, keys, _nanbeige_tensors, segments)


def _hrm_text(config: PreTrainedConfig, segments: int, visits: int, shared: dict[str, tuple]) -> Layout:
    """Return the layout for two stacks of equal depth: H and L, or a flat loop (with input injection) and its coda."""
    expected = {"prelude_layers": (0,), "attention_gate": (True,), "norm_affine": (False,), "exit_norms": ("every",)}
    if config.flat_loop:
        cycles = (1, segments * config.L_cycles)
        expected |= {
            "input_injection": ("add",), "loop_step": ("replace",), "coda_layers": (config.num_l_layers,),
            "coda_input": ("state+input",),
        }  # fmt: skip
    else:
        cycles = (segments * config.H_cycles, config.L_cycles)
        expected |= {
            "input_injection": ("none",), "num_h_layers": (config.num_l_layers,), "coda_layers": (0,),
        }  # fmt: skip
    keys = {
        "hrm.layers_per_stack": config.num_l_layers, "hrm.h_cycles": cycles[0], "hrm.l_cycles": cycles[1],
        "hrm.prefix_lm": False, "embedding_scale": float(config.embedding_scale),
    }  # fmt: skip
    expected |= {"pass_gains": (False,), **shared}
    return Layout("hrm_text", visits, expected, keys, _hrm_text_tensors, segments)


def _unrolled_llama(config: PreTrainedConfig, segments: int, visits: int, shared: dict[str, tuple]) -> Layout:
    """Return the layout that stores the prelude, one copy of the loop per pass, and the coda."""
    expected = {
        **FLAT, "exit_norms": ("last",), **shared, "attention_bias": (False, True, "qkv"), "rope_type": STATIC_ROPE,
    }  # fmt: skip
    if segments * config.L_cycles == 1:
        expected |= {"input_injection": ("none", *LEARNED), "loop_step": ("replace", "damped", "rescaled")}
    return Layout("llama", visits, expected, {}, partial(_unrolled_tensors, segments), segments)


def _nanbeige_tensors(network: PreTrainedModel) -> dict[str, torch.Tensor]:
    model = network.model
    norm = model.L_module.exit_norm if network.config.exit_norms == "every" else model.state_norm
    return _llama_tensors(network, [(model.L_module, None)], norm)


def _unrolled_tensors(segments: int, network: PreTrainedModel) -> dict[str, torch.Tensor]:
    model = network.model
    visits = [(model.L_module, number) for number in range(segments * network.config.L_cycles)]
    if model.prelude is not None:
        visits.insert(0, (model.prelude, None))
    if model.coda is None:
        return _llama_tensors(network, visits, model.state_norm)
    return _llama_tensors(network, [*visits, (model.coda, None)], model.coda.exit_norm)


def _hrm_text_tensors(network: PreTrainedModel) -> dict[str, torch.Tensor]:
    model, config = network.model, network.config
    start = torch.zeros(config.hidden_size) if model.z_L_init is None else model.z_L_init
    tensors = {"token_embd.weight": model.embed_tokens.weight, "hrm.z_l_init": start}
    if not config.tie_word_embeddings:
        tensors["output.weight"] = network.lm_head.weight
    last = model.coda if config.flat_loop else model.H_module
    return tensors | dict(_blocks([(model.L_module, None), (last, None)]))


def _llama_tensors(network: PreTrainedModel, visits: Visits, norm: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a Llama's tensors: scaled embeddings, the blocks of each visit in order, and a gain for every norm."""
    model, config = network.model, network.config
    tensors = {"token_embd.weight": model.embed_tokens.weight * config.embedding_scale, **dict(_blocks(visits))}
    if not config.tie_word_embeddings or config.embedding_scale != 1:
        tensors["output.weight"] = network.lm_head.weight
    if config.rope_parameters["rope_type"] == "llama3":
        halves = torch.arange(0, config.head_dim, 2) / config.head_dim
        tensors["rope_freqs.weight"] = config.rope_parameters["rope_theta"] ** -halves / model.rotary_emb.inv_freq
    ones = torch.ones(config.hidden_size)
    tensors["output_norm.weight"] = ones if norm.weight is None else norm.weight
    if not config.norm_affine:
        number = sum(len(stack.layers) for stack, _ in visits)
        tensors |= {f"blk.{block}.{BLOCK_NAMES[name]}.weight": ones for block in range(number) for name in NORMS}
    return tensors


def _blocks(visits: Visits) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the GGUF name and value of every weight. Weights in `BRANCH_ENDS` are multiplied by their pass's gains."""
    block = 0
    for stack, number in visits:
        for index, layer in enumerate(stack.layers):
            for name, tensor in layer.state_dict().items():
                module, _, kind = name.rpartition(".")
                if stack.pass_gains is not None and number is not None and module in BRANCH_ENDS:
                    gains = stack.pass_gains[min(number, stack.num_passes - 1), index]
                    tensor = tensor * (1 + gains[BRANCH_ENDS.index(module)])
                yield f"blk.{block}.{BLOCK_NAMES[module]}.{kind}", tensor
            block += 1
