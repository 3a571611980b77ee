"""4-bit weights of bitsandbytes on the CPU: right for every width, and trained through after an evaluation.

bitsandbytes 0.50 has three faults there, found by measurement; its GPU code has none of them.

- Where the inputs of a map are no multiple of the block (64), weights come back wrong: a relative error of 0.2 to 0.6
  instead of 0.09, without a word. The values are packed in blocks that run on over the ends of rows; the CPU's kernel
  begins a new block in each. Read as one long row they are right.
- On CPUs with AVX512-BF16, the first call in eval mode repacks weights for a bfloat16 product, which fails for inputs
  that are no multiple of 64 and outputs that are no multiple of 32;
- and a map that is repacked passes no gradient on when training goes on.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


def mend_4bit_maps(model: nn.Module) -> None:
    """Keeps the 4-bit maps of a model that was just loaded off the kernels that fail; nothing for other models."""
    if not getattr(model, "is_loaded_in_4bit", False):
        return
    for module in model.modules():
        if type(module).__name__ != "Linear4bit":  # by name: bitsandbytes is not needed where it is not used
            continue
        module.support_avx512bf16_for_cpu = False
        on_cpu = module.weight.device.type == "cpu"
        if on_cpu and module.in_features % module.weight.quant_state.blocksize:
            module.forward = partial(_multiply, module)


def _multiply(module: nn.Linear, hidden_states: torch.Tensor) -> torch.Tensor:
    """The map's product in its compute dtype; the result has the dtype of `hidden_states`."""
    dtype = module.compute_dtype or hidden_states.dtype
    bias = None if module.bias is None else module.bias.to(dtype)
    return F.linear(hidden_states.to(dtype), unpacked_weight(module.weight).to(dtype), bias).to(hidden_states.dtype)


def unpacked_weight(weight: torch.Tensor) -> torch.Tensor:
    """float32 [out, in] of bitsandbytes' 4-bit `weight`, on any device and for any width."""
    state, operators = weight.quant_state, torch.ops.bitsandbytes
    scales = state.absmax
    if state.nested:  # scales that are themselves in 8 bits
        inner = state.state2
        scales = operators.dequantize_blockwise(scales, inner.absmax, inner.code, inner.blocksize, torch.float32)
        scales = scales + state.offset
    row = [1, math.prod(state.shape)]
    flat = operators.dequantize_4bit(weight.data, scales, state.blocksize, state.quant_type, row, torch.float32)
    return flat.view(tuple(state.shape))
