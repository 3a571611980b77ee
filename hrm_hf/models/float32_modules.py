"""Modules that compute in float32 inside a model that was cast to half precision."""

import torch
import torch.nn.functional as F
from torch import nn


class Float32Buffers(nn.Module):
    """Its buffers follow `.to(device)` but not `.half()`, `.bfloat16()` or `.double()`; its parameters follow both.

    For constants whose differences half precision loses. (`_keep_in_fp32_modules_strict` does the same for what
    `from_pretrained(dtype=...)` reads from a file, and only for that.)
    """

    def _apply(self, fn, recurse=True):
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


class Float32Linear(nn.Linear):
    """A linear map in float32, whatever the dtype of its weights and its input. (Autocast is the caller's to stop.)"""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(features.float(), self.weight.float(), bias)
