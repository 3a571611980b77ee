"""Manifold-constrained hyper-connections (mHC): the residual stream widened to n streams that a learned map mixes.

At a site (an attention or a feed-forward branch F), with the streams x of a token in R^{n x C}:

    v      = RMSNorm(flatten(x))                                   over all n C values, without gain
    pre    = sigmoid(scale[0] * (fn v)_pre + base_pre) + eps       [n]
    post   = 2 sigmoid(scale[1] * (fn v)_post + base_post)         [n]
    comb   = Sinkhorn(scale[2] * (fn v)_comb + base_comb)          [n, n], first index the source stream
    x_next = H_res x + post F(pre x)          with H_res = comb^T

Sinkhorn keeps H_res (nearly) doubly stochastic, so that a product of many of them neither grows nor fades: its row sums
are the forward gain, its column sums the backward gain.

Sources: Xie et al. 2026, "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880, equations 4 to 9. Names,
layouts and the place of eps are those of `deepseek_v4` in transformers, so that its weights load here directly. Other
residual maps: "birkhoff" (mHC-lite, arXiv 2601.05732), "identity" (H_res = I), "unconstrained" (hyper-connections,
arXiv 2409.19606, without the tanh; it is there to show what the constraint prevents).

Coefficients are computed in float32 (float64 for float64 streams) with autocast off; streams are mixed in their own
dtype. Left out: fused GPU kernels.
"""

import math
from itertools import permutations

import torch
from torch import nn


RES_MODES = ("sinkhorn", "birkhoff", "identity", "unconstrained")
MAX_BIRKHOFF_STREAMS = 4  # n! permutations: 24 for four streams, 40,320 for eight


class HyperConnection(nn.Module):
    """One site: reads a branch's input from n streams of width C, and writes its output back.

    Args:
        hidden_size: width C.
        num_streams: streams n; 1 is a plain residual connection whose branch is gated.
        sinkhorn_iters: normalisations of rows and columns, in "sinkhorn" mode.
        eps: floor of Sinkhorn's entries and sums and of `pre`. Rows and columns of H_res then sum to 1 - eps; 0 makes
            them exact, at the price of no floor for sharp logits.
        norm_eps: epsilon of the RMS norm.
        res_mode: "sinkhorn", "birkhoff" (at most four streams), "identity" or "unconstrained".
        alpha_init: the initial `scale`: how much the maps depend on the token at the start.
        initializer_range: std of `fn` at the start.

    Parameters (deepseek_v4's): `fn` [2n + r, n C], `base` [2n + r], `scale` [3], ordered pre, post, comb. The comb part
    has r = n * n entries (row-major, source stream first), n! in "birkhoff" mode (permutations in lexicographic order)
    and none in "identity" mode, where `scale` is [2].
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
        if res_mode not in RES_MODES:
            raise ValueError(f"res_mode={res_mode!r} is not one of {RES_MODES}")
        if res_mode == "birkhoff" and num_streams > MAX_BIRKHOFF_STREAMS:
            raise ValueError(
                f"num_streams={num_streams}: birkhoff mode needs num_streams! = {math.factorial(num_streams)} logits a "
                f"token; use at most {MAX_BIRKHOFF_STREAMS} streams, or res_mode='sinkhorn'"
            )
        self.hidden_size, self.num_streams = hidden_size, num_streams
        self.sinkhorn_iters, self.eps, self.norm_eps = sinkhorn_iters, eps, norm_eps
        self.res_mode = res_mode
        self.alpha_init, self.initializer_range = alpha_init, initializer_range
        n = num_streams
        comb_size = {"birkhoff": math.factorial(n), "identity": 0}.get(res_mode, n * n)
        self.sizes = [n, n, comb_size]
        self.fn = nn.Parameter(torch.empty(sum(self.sizes), n * hidden_size))
        self.base = nn.Parameter(torch.empty(sum(self.sizes)))
        self.scale = nn.Parameter(torch.empty(2 if res_mode == "identity" else 3))
        with torch.no_grad():
            for name, value in self.initial_values().items():
                getattr(self, name).copy_(value)

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Fresh values by parameter name: pre starts at 1/n, post at 1; a freely mixing H_res starts at I."""
        n = self.num_streams
        comb = torch.eye(n).flatten() if self.res_mode == "unconstrained" else torch.zeros(self.sizes[2])
        # `fn` must not be zero: with equal bases nothing else would ever tell the streams apart.
        return {
            "fn": torch.randn(self.fn.shape) * self.initializer_range,
            "base": torch.cat([torch.full((n,), pre_bias(n)), torch.zeros(n), comb]),
            "scale": torch.full(self.scale.shape, self.alpha_init),
        }

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The branch's input [B, S, C], `post` [B, S, n] and H_res [B, S, n, n] for streams [B, S, n, C]."""
        with torch.autocast(streams.device.type, enabled=False):
            pre, post, h_res = self.coefficients(streams)
            return torch.matmul(pre.to(streams.dtype).unsqueeze(-2), streams).squeeze(-2), post, h_res

    def merge(
        self, streams: torch.Tensor, branch: torch.Tensor, post: torch.Tensor, h_res: torch.Tensor
    ) -> torch.Tensor:
        """The next streams H_res x + post F, [B, S, n, C] in the dtype of `streams`; `branch` is F [B, S, C]."""
        dtype = streams.dtype
        with torch.autocast(streams.device.type, enabled=False):
            written = post.to(dtype).unsqueeze(-1) * branch.to(dtype).unsqueeze(-2)
            if self.res_mode == "identity":
                return streams + written
            return torch.matmul(h_res.to(dtype), streams) + written

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`pre` [B, S, n], `post` [B, S, n] and H_res [B, S, n, n], in float32 or float64."""
        shape, n = streams.shape[:2], self.num_streams
        dtype = torch.promote_types(streams.dtype, torch.float32)
        flat = streams.reshape(-1, n * self.hidden_size).to(dtype)
        # Tokens come last: elementwise work on [n, n, tokens] runs over long rows. Dividing by the norm after the
        # product instead of before saves writing the normalised streams.
        norm = torch.linalg.vector_norm(flat, dim=-1)
        projected = (self.fn.to(dtype) @ flat.T) * torch.rsqrt(norm * norm / flat.shape[-1] + self.norm_eps)
        pre, post, comb = (projected * self._per_entry(self.scale.to(dtype))).split(self.sizes)
        base_pre, base_post, base_comb = self.base.to(dtype).unsqueeze(-1).split(self.sizes)
        pre = torch.sigmoid(pre + base_pre) + self.eps
        post = 2 * torch.sigmoid(post + base_post)
        h_res = self._residual_map(comb + base_comb)
        return pre.T.view(*shape, n), post.T.view(*shape, n), h_res.permute(2, 0, 1).reshape(*shape, n, n)

    def get_connection_matrix(self, streams: torch.Tensor | None = None) -> torch.Tensor:
        """H_res: of each token [B, S, n, n] for streams [B, S, n, C], or without streams the static part [n, n]."""
        if streams is not None:
            return self.coefficients(streams)[2]
        base = self.base.to(torch.promote_types(self.base.dtype, torch.float32))
        return self._residual_map(base[2 * self.num_streams :].unsqueeze(-1))[..., 0]

    def _per_entry(self, scale: torch.Tensor) -> torch.Tensor:
        """`scale` repeated to one factor for each row of `fn`, [2n + r, 1]."""
        return torch.cat([scale[part].expand(size) for part, size in enumerate(self.sizes) if size]).unsqueeze(-1)

    def _residual_map(self, raw: torch.Tensor) -> torch.Tensor:
        """H_res [n, n, tokens] (target stream first) from raw entries [r, tokens]."""
        n = self.num_streams
        if self.res_mode == "identity":
            return torch.eye(n, dtype=raw.dtype, device=raw.device).unsqueeze(-1).expand(n, n, raw.shape[-1])
        if self.res_mode == "birkhoff":
            comb = permutation_matrices(n, raw).flatten(1).T @ torch.softmax(raw, dim=0)
        elif self.res_mode == "sinkhorn":
            return sinkhorn(raw.view(n, n, -1), self.sinkhorn_iters, self.eps).transpose(0, 1)
        else:
            comb = raw
        return comb.view(n, n, -1).transpose(0, 1)
