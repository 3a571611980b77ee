"""Manifold-constrained hyper-connections (mHC): n residual streams mixed by learned maps.

At a site (an attention or feed-forward branch F), with the streams x of a token in R^{n x C}:

    v      = RMSNorm(flatten(x))                                   over all n C values, without gain
    pre    = sigmoid(scale[0] * (fn v)_pre + base_pre) + eps       [n]
    post   = 2 sigmoid(scale[1] * (fn v)_post + base_post)         [n]
    comb   = Sinkhorn(scale[2] * (fn v)_comb + base_comb)          [n, n], first index the source stream
    x_next = H_res x + post F(pre x)          with H_res = comb^T

Sinkhorn keeps H_res (nearly) doubly stochastic, so a product of many maps neither grows nor vanishes. Row sums are the
forward gain, column sums the backward gain.

Sources: Xie et al. 2026, "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880, equations 4 to 9. Names,
layouts and the position of eps follow `deepseek_v4` in transformers, so its weights load directly. Other residual
maps are "birkhoff" (mHC-lite, arXiv 2601.05732), "identity" (H_res = I) and "unconstrained" (hyper-connections, arXiv
2409.19606, without the tanh), which shows what the constraint prevents.

Coefficients are computed in float32 (float64 for float64 streams) without autocast; streams are mixed in their own
dtype. There are no fused GPU kernels.

Gains (`MhcMetricsMixin`) measure how much a signal can grow on its way through the streams. The forward gain is the
largest absolute row sum of H_res, the backward gain the largest absolute column sum; both are 1 for a doubly
stochastic map. Composite gains are those of the product of all maps up to a site. Maps are averaged over tokens before
summing. The paper calls these gains "Amax Gain Magnitude". We add the smallest column sum, because gains do not show
vanishing signals.
"""

import math
from contextlib import nullcontext
from itertools import accumulate, permutations

import numpy as np
import torch
from torch import nn


SITES = ("attention", "feed_forward")  # locations of a layer's hyper-connections, in execution order


class HyperConnection(nn.Module):
    """Hyper-connection at one site, between n streams of width C and a branch.

    Args:
        hidden_size: width C.
        num_streams: number n of streams; 1 gives a plain residual connection with a gated branch.
        sinkhorn_iters: number of row and column normalizations in "sinkhorn" mode.
        eps: floor of `pre` and of Sinkhorn's entries and sums. The rows and columns of H_res then sum to 1 - eps; with
            0 the sums are exact, but sharp logits have no floor.
        norm_eps: epsilon of the RMS norm.
        res_mode: "sinkhorn", "birkhoff" (at most four streams), "identity" or "unconstrained".
        alpha_init: initial `scale`, i.e. how much the maps initially depend on the token.
        initializer_range: initial std of `fn`.

    Parameters (deepseek_v4's): `fn` [2n + r, n C], `base` [2n + r], `scale` [3], ordered pre, post, comb. The comb
    part has r = n * n entries (row-major, source stream first), n! in "birkhoff" mode (permutations in lexicographic
    order) and none in "identity" mode, where `scale` is [2].
    """

    def __init__(
        self,
        hidden_size: int,
        num_streams: int = 4,
        sinkhorn_iters: int = 20,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
        res_mode: str = "sinkhorn",
        alpha_init: float = 0.01,
        initializer_range: float = 0.02,
    ):
        super().__init__()
        self.hidden_size, self.num_streams = hidden_size, num_streams
        self.sinkhorn_iters, self.eps, self.norm_eps = sinkhorn_iters, eps, norm_eps
        self.res_mode, self.alpha_init, self.initializer_range = res_mode, alpha_init, initializer_range
        n = num_streams
        comb_size = {"birkhoff": math.factorial(n), "identity": 0}.get(res_mode, n * n)
        self.sizes = [n, n, comb_size]
        self.fn = nn.Parameter(torch.empty(sum(self.sizes), n * hidden_size))
        self.base = nn.Parameter(torch.empty(sum(self.sizes)))
        self.scale = nn.Parameter(torch.empty(2 if res_mode == "identity" else 3))
        if res_mode == "birkhoff":
            self.register_buffer("permutations", torch.empty(n * n, comb_size), persistent=False)
        assign_initial_values(self)

    @torch.no_grad()
    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return initial parameters and buffers: pre = 1/n, post = 1 and, if unconstrained, H_res = I."""
        n = self.num_streams
        base = torch.zeros_like(self.base)
        base[:n] = pre_bias(n)
        if self.res_mode == "unconstrained":
            base[2 * n :] = torch.eye(n).flatten()
        constants = {}
        if self.res_mode == "birkhoff":  # each column is a flattened permutation matrix
            orders = torch.tensor(list(permutations(range(n))))
            constants["permutations"] = nn.functional.one_hot(orders, n).flatten(1).T.float()
        # If `fn` were zero, the initial values would treat all streams alike, so equal streams would never diverge.
        return constants | {
            "fn": torch.randn_like(self.fn) * self.initializer_range,
            "base": base,
            "scale": torch.full_like(self.scale, self.alpha_init),
        }

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the branch's input [B, S, C], `post` [B, S, n] and H_res [B, S, n, n] for the streams."""
        with without_autocast(streams):
            pre, post, h_res = self.coefficients(streams)
            return weighted_sum(pre, streams), post, h_res

    def merge(
        self, streams: torch.Tensor, branch: torch.Tensor, post: torch.Tensor, h_res: torch.Tensor
    ) -> torch.Tensor:
        """Compute the next streams H_res x + post F, [B, S, n, C], where `branch` is F [B, S, C]."""
        dtype = streams.dtype
        with without_autocast(streams):
            post, branch = post.to(dtype).unsqueeze(-1), branch.to(dtype).unsqueeze(-2)
            if self.res_mode == "identity":
                return streams + post * branch
            if torch.compiler.is_compiling():
                return weighted_sum(h_res, streams.unsqueeze(-3)) + post * branch
            return torch.matmul(h_res.to(dtype), streams).addcmul_(post, branch)

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `pre` [B, S, n], `post` [B, S, n] and H_res [B, S, n, n] in float32 or float64."""
        shape, n = streams.shape[:2], self.num_streams
        projected = normed_projection(streams, self.fn, self.norm_eps)
        dtype = projected.dtype
        base, scales = self.base.to(dtype).unsqueeze(-1), self.scale.to(dtype).unbind()  # no third scale in "identity"
        parts = zip(base.split(self.sizes), projected.split(self.sizes), scales)
        pre, post, *comb = (torch.addcmul(constant, part, scale) for constant, part, scale in parts)
        pre = torch.sigmoid(pre) + self.eps
        post = 2 * torch.sigmoid(post)
        # Make H_res contiguous, because torch multiplies batches of tiny strided matrices in a slow loop.
        h_res = self._residual_map(comb[0] if comb else projected).permute(2, 0, 1).contiguous()
        return pre.T.contiguous().view(*shape, n), post.T.contiguous().view(*shape, n), h_res.view(*shape, n, n)

    def get_connection_matrix(self, streams: torch.Tensor | None = None) -> torch.Tensor:
        """Return H_res [B, S, n, n] for streams [B, S, n, C], or its static part [n, n] if streams is None."""
        if streams is not None:
            return self.coefficients(streams)[2]
        base = self.base.to(torch.promote_types(self.base.dtype, torch.float32))
        return self._residual_map(base[2 * self.num_streams :].unsqueeze(-1))[..., 0]

    def _residual_map(self, raw: torch.Tensor) -> torch.Tensor:
        """Compute H_res [n, n, tokens] (target stream first) from raw entries [r, tokens]."""
        n = self.num_streams
        if self.res_mode == "identity":
            return torch.eye(n, dtype=raw.dtype, device=raw.device).unsqueeze(-1).expand(n, n, raw.shape[-1])
        if self.res_mode == "birkhoff":
            raw = self.permutations.to(raw.dtype) @ torch.softmax(raw, dim=0)
        comb = raw.view(n, n, -1)
        if self.res_mode == "sinkhorn":
            comb = sinkhorn(comb, self.sinkhorn_iters, self.eps)
        return comb.transpose(0, 1)


class HyperHead(nn.Module):
    """Reduces n streams to one with learned weights, as deepseek_v4 does before its final norm.

    Parameters: `hc_fn` [n, n C], `hc_base` [n], `hc_scale` [1]. The weights, sigmoid(...) + eps, start at 1/n.
    """

    def __init__(
        self,
        hidden_size: int,
        num_streams: int = 4,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
        alpha_init: float = 0.01,
        initializer_range: float = 0.02,
    ):
        super().__init__()
        self.eps, self.norm_eps = eps, norm_eps
        self.alpha_init, self.initializer_range = alpha_init, initializer_range
        self.hc_fn = nn.Parameter(torch.empty(num_streams, num_streams * hidden_size))
        self.hc_base = nn.Parameter(torch.empty(num_streams))
        self.hc_scale = nn.Parameter(torch.empty(1))
        assign_initial_values(self)

    @torch.no_grad()
    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return initial values by parameter name."""
        return {
            "hc_fn": torch.randn_like(self.hc_fn) * self.initializer_range,
            "hc_base": torch.full_like(self.hc_base, pre_bias(len(self.hc_base))),
            "hc_scale": torch.full_like(self.hc_scale, self.alpha_init),
        }

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Reduce streams [B, S, n, C] to one stream [B, S, C]."""
        with without_autocast(streams):
            projected = normed_projection(streams, self.hc_fn, self.norm_eps)
            dtype = projected.dtype
            weights = torch.sigmoid(projected * self.hc_scale.to(dtype) + self.hc_base.to(dtype).unsqueeze(-1))
            return weighted_sum((weights + self.eps).T.contiguous().view(streams.shape[:-1]), streams)


class mHCLayer(HyperConnection):
    """`HyperConnection` with the name and arguments that the RLM-mHC training guide uses."""

    def __init__(self, hidden_dim: int, num_flows: int = 4, sinkhorn_iters: int = 20):
        super().__init__(hidden_dim, num_flows, sinkhorn_iters)


# Arithmetic


def normed_projection(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """Return fn @ RMSNorm(flatten(x)) [rows of fn, tokens] for streams x [B, S, n, C], in at least float32."""
    dtype = torch.promote_types(streams.dtype, torch.float32)
    x, fn = streams.flatten(2).flatten(0, 1).to(dtype), fn.to(dtype)
    return _NormedProjection.apply(x, fn, eps) if torch.is_grad_enabled() else _project(x, fn, eps)[0]


def _project(x: torch.Tensor, fn: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fn @ RMSNorm(x) [rows of fn, tokens] for x [tokens, n C], and the norm factors [tokens]."""
    norm = torch.linalg.vector_norm(x, dim=-1)
    factor = torch.rsqrt_((norm * norm).div_(x.shape[-1]).add_(eps))
    return torch.mm(fn, x.T) * factor, factor


class _NormedProjection(torch.autograd.Function):
    """Computes fn @ RMSNorm(x) for x [tokens, n C], dividing by the norm after the matrix product.

    As in section 4.3 of the paper, the normalized streams are never stored, neither here nor in the backward pass.
    Tokens are the last axis of the result, so elementwise operations on the few coefficients run over long rows.
    """

    @staticmethod
    def forward(ctx, x, fn, eps):
        projected, factor = _project(x, fn, eps)
        ctx.save_for_backward(x, fn, factor, projected)
        return projected

    @staticmethod
    def backward(ctx, gradient):
        x, fn, factor, projected = ctx.saved_tensors
        along_x = (gradient * projected).sum(0) * factor * factor / x.shape[-1]
        gradient = gradient * factor
        return torch.mm(gradient.T, fn) - along_x.unsqueeze(-1) * x, torch.mm(gradient, x), None


def weighted_sum(weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """Return sum_i weights[..., i] streams[..., i, :] in the dtype of `streams`."""
    if torch.compiler.is_compiling():  # one fused pass; in eager mode, this would store every product
        return (weights.to(streams.dtype).unsqueeze(-1) * streams).sum(dim=-2)
    return torch.matmul(weights.to(streams.dtype).unsqueeze(-2), streams).squeeze(-2)


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Normalize `logits` [n, n, tokens] to a nearly doubly stochastic matrix for each token.

    The first step is a softmax over the second axis, the last a normalization over the first axis. As in deepseek_v4,
    `eps` is added once to every entry, and to every sum in each of the `iterations`. An `eps` of 0 is replaced with a
    tiny number, which prevents 0 / 0 in underflowed columns and is negligible in other sums.
    """
    eps = max(eps, torch.finfo(logits.dtype).tiny ** 0.5)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return _sinkhorn(logits, iterations, eps)[0]
    return _normalized(logits, iterations, eps)[0]


def _normalized(logits: torch.Tensor, iterations: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalized matrices [n, n, tokens] and all divisors [2 * iterations - 1, n, tokens]."""
    comb = torch.softmax(logits.contiguous(), dim=1).add_(eps)
    sums = comb.new_empty(2 * iterations - 1, *comb.shape[1:])
    if type(comb) is torch.Tensor and comb.device.type == "cpu":  # NumPy is three times as fast as torch on a CPU
        array = comb.numpy()
        for step, total in enumerate(sums.numpy()):
            np.add.reduce(array, step % 2, out=total, initial=eps)
            array /= total[:, None] if step % 2 else total
    else:
        for step, total in enumerate(sums):
            torch.sum(comb, step % 2, out=total)
            comb.div_(total.add_(eps).unsqueeze(step % 2))
    return comb, sums


# This is a custom operator, because compiling some 120 elementwise steps would take 15 seconds per site, and autograd
# would store every step. The backward pass undoes the divisions instead of storing their results.


@torch.library.custom_op("hrm_hf::sinkhorn", mutates_args=())
def _sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return _normalized(logits, iterations, eps)


@_sinkhorn.register_fake
def _(logits, iterations, eps):
    n, _, tokens = logits.shape
    return logits.new_empty(logits.shape), logits.new_empty(2 * iterations - 1, n, tokens)


@torch.library.custom_op("hrm_hf::sinkhorn_backward", mutates_args=())
def _sinkhorn_backward(
    gradient: torch.Tensor, logits: torch.Tensor, comb: torch.Tensor, sums: torch.Tensor
) -> torch.Tensor:
    gradient, comb = gradient.clone(memory_format=torch.contiguous_format), comb.clone()
    for step in range(len(sums) - 1, -1, -1):
        axis, total = step % 2, sums[step].unsqueeze(step % 2)
        gradient.sub_((gradient * comb).sum(axis, keepdim=True)).div_(total)
        comb.mul_(total)
    softmax = torch.softmax(logits, dim=1)
    return gradient.sub_((gradient * softmax).sum(1, keepdim=True)).mul_(softmax)


@_sinkhorn_backward.register_fake
def _(gradient, logits, comb, sums):
    return logits.new_empty(logits.shape)


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], *output)


def _differentiate(ctx, gradient, _):
    return _sinkhorn_backward(gradient, *ctx.saved_tensors), None, None


_sinkhorn.register_autograd(_differentiate, setup_context=_save)


def without_autocast(x: torch.Tensor):
    """Return a context manager that disables autocast on the device of `x`."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def pre_bias(n: int) -> float:
    """Return the logit of 1/n, the initial `pre`. For n = 1, return a finite logit with a sigmoid of 1."""
    return -math.log(n - 1) if n > 1 else 40.0


def assign_initial_values(module: nn.Module) -> None:
    """Copy `module.initial_values()` into its parameters and buffers, without gradients."""
    with torch.no_grad():
        for name, value in module.initial_values().items():
            getattr(module, name).copy_(value)


# Gains


def forward_gain(matrix: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute row sum of [..., n, n], the maximum amplification in the forward pass."""
    return matrix.sum(-1).abs().amax(-1)


def backward_gain(matrix: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute column sum of [..., n, n], the maximum amplification of gradients."""
    return matrix.sum(-2).abs().amax(-1)


def min_column_sum(matrix: torch.Tensor) -> torch.Tensor:
    """Return the smallest column sum of [..., n, n]. A value below 1 shrinks the gradient of a stream."""
    return matrix.sum(-2).amin(-1)


def composite_maps(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the running products H_l ... H_1 of maps [..., n, n], which are in execution order."""
    return list(accumulate(matrices, lambda product, matrix: matrix @ product))


class MhcMetricsMixin:
    """Mixin that measures how much the hyper-connections `attn_hc` and `ffn_hc` amplify the streams."""

    def get_mhc_metrics(self, input_ids: torch.Tensor | None = None, **inputs) -> list[tuple[float, float]]:
        """Return the gains of each layer's attention map and feed-forward map, in execution order.

        1.0 is ideal; the training guide warns of instability above 2.0. The list is empty without mHC.

        Args:
            input_ids: tokens [B, S] over which maps are averaged; None for the static part of the maps.
            inputs: further arguments for the forward; `attention_mask` excludes padding from the average.
        """
        sites = self.get_detailed_mhc_metrics(input_ids, **inputs)
        gains = [max(site["forward"], site["backward"]) for site in sites]
        return list(zip(gains[::2], gains[1::2]))

    def get_detailed_mhc_metrics(self, input_ids: torch.Tensor | None = None, **inputs) -> list[dict]:
        """Return a dict of metrics per site in execution order. Takes the arguments of `get_mhc_metrics`.

        Keys: `layer`; `site` ("attention" or "feed_forward"); for the site's map, `forward` and `backward` (gains),
        `min_column` (smallest column sum) and `largest_entry`; for the product of all maps up to this site,
        `composite_forward`, `composite_backward` and `composite_min_column`.
        """
        pairs = self._maps(input_ids, inputs)
        products = composite_maps([matrix for matrix, _ in pairs])
        sites = []
        for index, ((matrix, weights), product) in enumerate(zip(pairs, products)):
            site = {"layer": self.config.layer_order[index // 2], "site": SITES[index % 2]}
            for prefix, maps in (("", matrix), ("composite_", product)):
                mean = maps if weights is None else torch.einsum("bsij,bs->ij", maps, weights)
                site |= {
                    f"{prefix}forward": forward_gain(mean).item(),
                    f"{prefix}backward": backward_gain(mean).item(),
                    f"{prefix}min_column": min_column_sum(mean).item(),
                }
                site.setdefault("largest_entry", mean.abs().amax().item())
            sites.append(site)
        return sites

    @torch.no_grad()
    def _maps(self, input_ids, inputs) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return H_res of each site, in execution order, and weights [B, S] of its tokens (None if it is static)."""
        base = self.base_model
        if not self.config.mhc_enabled:
            return []
        if input_ids is None and not inputs:
            layers = [base.layers[layer] for layer in self.config.layer_order]
            return [(hc.get_connection_matrix(), None) for layer in layers for hc in (layer.attn_hc, layer.ffn_hc)]
        training = base.training
        base.eval()  # disables dropout, and checkpointing, which would call the hooks twice
        try:
            matrices = base(input_ids, **inputs, use_cache=False, output_mhc_matrices=True).mhc_matrices
        finally:
            base.train(training)
        mask = inputs.get("attention_mask")
        weights = torch.ones(matrices[0].shape[:2], device=matrices[0].device) if mask is None else mask
        return [(matrix, (weights / weights.sum()).to(matrix)) for matrix in matrices]
