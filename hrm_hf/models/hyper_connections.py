"""Manifold-constrained hyper-connections (mHC): the residual stream widened to n streams that a learned map mixes.

At a site (an attention or a feed-forward branch F), with the streams x of a token in R^{n x C}:

    v      = RMSNorm(flatten(x))                                   over all n C values, without gain
    pre    = sigmoid(scale[0] * (fn v)_pre + base_pre) + eps       [n]
    post   = 2 sigmoid(scale[1] * (fn v)_post + base_post)         [n]
    comb   = Sinkhorn(scale[2] * (fn v)_comb + base_comb)          [n, n], first index the source stream
    x_next = H_res x + post F(pre x)          with H_res = comb^T

Sinkhorn keeps H_res (nearly) doubly stochastic, so that a product of many of them neither grows nor fades: its row
sums are the forward gain, its column sums the backward gain.

Sources: Xie et al. 2026, "mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880, equations 4 to 9. Names,
layouts and the place of eps are those of `deepseek_v4` in transformers, so that its weights load here directly. Other
residual maps: "birkhoff" (mHC-lite, arXiv 2601.05732), "identity" (H_res = I), "unconstrained" (hyper-connections,
arXiv 2409.19606, without the tanh; it is there to show what the constraint prevents).

Coefficients are computed in float32 (float64 for float64 streams) with autocast off; streams are mixed in their own
dtype. Left out: fused GPU kernels.

Decoding meets a site with a few tokens, where some 150 calls of torch cost many times what they compute. In eval mode
without gradients and on a CPU there is a shorter way for a few dozen tokens, and one in Python's own numbers for up to
three.
"""

import math
from contextlib import nullcontext
from itertools import permutations

import torch
from torch import nn


RES_MODES = ("sinkhorn", "birkhoff", "identity", "unconstrained")
MAX_BIRKHOFF_STREAMS = 4  # n! permutations: 24 for four streams, 40,320 for eight
FEW_TOKENS = 3  # up to which Python's own numbers are faster than calls on small tensors
SOME_TOKENS = 64  # up to which calls cost more than what they compute


class HyperConnection(nn.Module):
    """One site: reads a branch's input from n streams of width C, and writes its output back.

    Args:
        hidden_size: width C.
        num_streams: streams n; 1 is a plain residual connection whose branch is gated.
        sinkhorn_iters: normalizations of rows and columns, in "sinkhorn" mode.
        eps: floor of Sinkhorn's entries and sums and of `pre`. Rows and columns of H_res then sum to 1 - eps; 0 makes
            them exact, at the price of no floor for sharp logits.
        norm_eps: epsilon of the RMS norm.
        res_mode: "sinkhorn", "birkhoff" (at most four streams), "identity" or "unconstrained".
        alpha_init: the initial `scale`: how much the maps depend on the token at the start.
        initializer_range: std of `fn` at the start.

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
        if res_mode not in RES_MODES:
            raise ValueError(f"res_mode={res_mode!r} is not one of {RES_MODES}")
        if res_mode == "birkhoff" and num_streams > MAX_BIRKHOFF_STREAMS:
            raise ValueError(
                f"num_streams={num_streams}: birkhoff mode needs num_streams! = {math.factorial(num_streams)} logits "
                f"a token; use at most {MAX_BIRKHOFF_STREAMS} streams, or res_mode='sinkhorn'"
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
        if res_mode == "birkhoff":
            self.register_buffer("permutations", torch.empty(n * n, comb_size), persistent=False)
        assign_initial_values(self)

    @torch.no_grad()
    def initial_values(self) -> dict[str, torch.Tensor]:
        """Fresh values of parameters and buffers by name: pre starts at 1/n, post at 1, a freely mixing H_res at I."""
        n = self.num_streams
        base = torch.zeros_like(self.base)
        base[:n] = pre_bias(n)
        if self.res_mode == "unconstrained":
            base[2 * n :] = torch.eye(n).flatten()
        constants = {"permutations": permutation_matrices(n)} if self.res_mode == "birkhoff" else {}
        # `fn` must not be zero: with equal bases nothing else would ever tell the streams apart.
        return constants | {
            "fn": torch.randn_like(self.fn) * self.initializer_range,
            "base": base,
            "scale": torch.full_like(self.scale, self.alpha_init),
        }

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The branch's input [B, S, C], `post` [B, S, n] and H_res [B, S, n, n] for streams [B, S, n, C]."""
        with without_autocast(streams):
            pre, post, h_res = self.coefficients(streams)
            return weighted_sum(pre, streams), post, h_res

    def merge(
        self, streams: torch.Tensor, branch: torch.Tensor, post: torch.Tensor, h_res: torch.Tensor
    ) -> torch.Tensor:
        """The next streams H_res x + post F, [B, S, n, C] in the dtype of `streams`; `branch` is F [B, S, C]."""
        dtype = streams.dtype
        with without_autocast(streams):
            post, branch = post.to(dtype).unsqueeze(-1), branch.to(dtype).unsqueeze(-2)
            if self.res_mode == "identity":
                return streams + post * branch
            if torch.compiler.is_compiling():
                return weighted_sum(h_res, streams.unsqueeze(-3)) + post * branch
            return torch.matmul(h_res.to(dtype), streams).addcmul_(post, branch)

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`pre` [B, S, n], `post` [B, S, n] and H_res [B, S, n, n], in float32 or float64."""
        shape, n = streams.shape[:2], self.num_streams
        inference = not self.training and not torch.is_grad_enabled()
        in_python = self.res_mode == "birkhoff" or (self.res_mode == "sinkhorn" and n == 4)
        if in_python and inference and _is_plain(streams) and shape.numel() <= FEW_TOKENS:
            return self._coefficients_of_few(streams)
        projected = normed_projection(streams, self.fn, self.norm_eps)
        dtype = projected.dtype
        raw = torch.addcmul(self.base.to(dtype).unsqueeze(-1), projected, self._per_entry(self.scale.to(dtype)))
        pre, post, comb = raw.split(self.sizes)
        pre = torch.sigmoid(pre) + self.eps
        post = 2 * torch.sigmoid(post)
        h_res = self._residual_map(comb, inference)
        # Contiguous: a batched product of strided tiny matrices is a slow loop over the batch.
        h_res = h_res.permute(2, 0, 1).contiguous()
        return pre.T.contiguous().view(*shape, n), post.T.contiguous().view(*shape, n), h_res.view(*shape, n, n)

    def _coefficients_of_few(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same in Python's numbers once the streams are read; "birkhoff", or "sinkhorn" with four streams.

        Those are float64, so that the results are the ones of float32 up to its rounding.
        """
        x, n = streams.flatten(2).flatten(0, 1).float(), self.num_streams
        rows, norms = torch.mm(x, self.fn.float().T).tolist(), torch.linalg.vector_norm(x, dim=-1).tolist()
        scales, base = self.scale.tolist(), self.base.tolist()
        found = []
        for row, norm in zip(rows, norms):
            mean_square = norm * norm / x.shape[1] + self.norm_eps
            of_pre, of_post, of_comb = (scale / math.sqrt(mean_square or math.inf) for scale in scales)
            pre = [_sigmoid(of_pre * value + b) + self.eps for value, b in zip(row[:n], base)]
            post = [2 * _sigmoid(of_post * value + b) for value, b in zip(row[n : 2 * n], base[n : 2 * n])]
            comb = [of_comb * value + b for value, b in zip(row[2 * n :], base[2 * n :])]
            if self.res_mode == "birkhoff":
                found.append(pre + post + _birkhoff_of(comb, n))
            else:
                floor = sinkhorn_floor(self.eps, x.dtype)
                found.append(pre + post + _sinkhorn_of_4(comb, self.sinkhorn_iters, floor))
        found = torch.tensor(found, dtype=x.dtype).view(*streams.shape[:2], -1)
        pre, post, h_res = found.split_with_sizes([n, n, n * n], dim=-1)
        return pre, post, h_res.view(*streams.shape[:2], n, n)

    def get_connection_matrix(self, streams: torch.Tensor | None = None) -> torch.Tensor:
        """H_res: of each token [B, S, n, n] for streams [B, S, n, C], or without streams the static part [n, n]."""
        if streams is not None:
            return self.coefficients(streams)[2]
        base = self.base.to(torch.promote_types(self.base.dtype, torch.float32))
        return self._residual_map(base[2 * self.num_streams :].unsqueeze(-1))[..., 0]

    def _per_entry(self, scale: torch.Tensor) -> torch.Tensor:
        """`scale` repeated to one factor for each row of `fn`, [2n + r, 1]."""
        return torch.cat([scale[part].expand(size) for part, size in enumerate(self.sizes) if size]).unsqueeze(-1)

    def _residual_map(self, raw: torch.Tensor, inference: bool = False) -> torch.Tensor:
        """H_res [n, n, tokens] (target stream first) from raw entries [r, tokens]; `inference` has no gradients."""
        n = self.num_streams
        if self.res_mode == "identity":
            return torch.eye(n, dtype=raw.dtype, device=raw.device).unsqueeze(-1).expand(n, n, raw.shape[-1])
        if self.res_mode == "birkhoff":
            comb = self.permutations.to(raw.dtype) @ torch.softmax(raw, dim=0)
        elif self.res_mode == "sinkhorn":
            run = sinkhorn_forward if inference else sinkhorn
            return run(raw.view(n, n, -1), self.sinkhorn_iters, self.eps).transpose(0, 1)
        else:
            comb = raw
        return comb.view(n, n, -1).transpose(0, 1)


class HyperHead(nn.Module):
    """Reduces n streams to one by learned weights sigmoid(...) + eps, as deepseek_v4 does before its last norm.

    Parameters: `hc_fn` [n, n C], `hc_base` [n], `hc_scale` [1]. The weights start at 1/n.
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
        """Fresh values by parameter name."""
        return {
            "hc_fn": torch.randn_like(self.hc_fn) * self.initializer_range,
            "hc_base": torch.full_like(self.hc_base, pre_bias(len(self.hc_base))),
            "hc_scale": torch.full_like(self.hc_scale, self.alpha_init),
        }

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """One stream [B, S, C] from [B, S, n, C]."""
        with without_autocast(streams):
            projected = normed_projection(streams, self.hc_fn, self.norm_eps)
            dtype = projected.dtype
            weights = torch.sigmoid(projected * self.hc_scale.to(dtype) + self.hc_base.to(dtype).unsqueeze(-1))
            return weighted_sum((weights + self.eps).T.contiguous().view(streams.shape[:-1]), streams)


class mHCLayer(HyperConnection):
    """A site by the name and arguments of the RLM-mHC training guide."""

    def __init__(self, hidden_dim: int, num_flows: int = 4, sinkhorn_iters: int = 20):
        super().__init__(hidden_dim, num_flows, sinkhorn_iters)


# Arithmetic


def normed_projection(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """fn RMSNorm(flatten(x)), [rows of fn, tokens], in float32 (float64 for float64 streams [B, S, n, C])."""
    dtype = torch.promote_types(streams.dtype, torch.float32)
    x, fn = streams.flatten(2).flatten(0, 1).to(dtype), fn.to(dtype)
    return _NormedProjection.apply(x, fn, eps) if torch.is_grad_enabled() else _project(x, fn, eps)[0]


def _project(x: torch.Tensor, fn: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """fn RMSNorm(x) [rows of fn, tokens] for x [tokens, n C], and the factors [tokens] by which x is normalized."""
    norm = torch.linalg.vector_norm(x, dim=-1)
    factor = torch.rsqrt(norm * norm / x.shape[-1] + eps)
    return torch.mm(fn, x.T) * factor, factor


class _NormedProjection(torch.autograd.Function):
    """fn RMSNorm(x) for x [tokens, n C], with the division by the norm after the product (section 4.3 of the paper).

    The normalized streams are then never written, neither here nor in the backward pass. Tokens come last in the
    result: elementwise work on the few coefficients runs over long rows.
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
    """sum_i weights[..., i] streams[..., i, :], in the dtype of `streams`."""
    if torch.compiler.is_compiling():  # a compiler fuses this into one pass; uncompiled it would write every product
        return (weights.to(streams.dtype).unsqueeze(-1) * streams).sum(dim=-2)
    return torch.matmul(weights.to(streams.dtype).unsqueeze(-2), streams).squeeze(-2)


def sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """A nearly doubly stochastic matrix for each token, [n, n, tokens] like `logits`, of which the second axis is
    softmaxed first and the first axis normalized last.

    Every entry is raised by `eps` once and every sum in each of the `iterations`, as deepseek_v4 does.
    """
    return _sinkhorn(logits, iterations, sinkhorn_floor(eps, logits.dtype))[0]


def sinkhorn_floor(eps: float, dtype: torch.dtype) -> float:
    """`eps`, but not 0: a column that underflowed must not become 0 / 0. What stands in is lost in any other sum."""
    return max(eps, torch.finfo(dtype).tiny ** 0.5)


# One opaque operator: some 120 elementwise steps on tiny matrices would take a compiler 15 seconds a site, and
# autograd would keep every one of them. The backward pass undoes the divisions instead of storing their results.


@torch.library.custom_op("hrm_hf::sinkhorn", mutates_args=())
def _sinkhorn(logits: torch.Tensor, iterations: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    n, _, tokens = logits.shape
    comb = torch.softmax(logits.contiguous(), dim=1).add_(eps)
    sums = logits.new_empty(2 * iterations - 1, n, tokens)
    for step, total in enumerate(sums):
        torch.sum(comb, dim=step % 2, out=total)
        comb.div_(total.add_(eps).unsqueeze(step % 2))
    return comb, sums


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


def sinkhorn_forward(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """`sinkhorn` without gradients; for few tokens on a CPU in fewer calls, rounded to float32 only at the end."""
    return _sinkhorn_forward(logits, iterations, sinkhorn_floor(eps, logits.dtype))


@torch.library.custom_op("hrm_hf::sinkhorn_forward", mutates_args=())
def _sinkhorn_forward(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    n, _, tokens = logits.shape
    if tokens > SOME_TOKENS or not _has_numbers(logits):
        return _sinkhorn(logits, iterations, eps)[0]
    if tokens > FEW_TOKENS or n != 4:
        return _sinkhorn_of_some(logits, iterations, eps)
    maps = [_sinkhorn_of_4(token, iterations, eps) for token in logits.flatten(0, 1).T.tolist()]
    return torch.tensor(maps, dtype=logits.dtype).view(tokens, n, n).permute(2, 1, 0).contiguous()


@_sinkhorn_forward.register_fake
def _(logits, iterations, eps):
    return logits.new_empty(logits.shape)


def _is_plain(x: torch.Tensor) -> bool:
    """Whether nobody but the caller looks at what is done with `x`: no compiler and no tracer."""
    return not torch.compiler.is_compiling() and not torch.jit.is_tracing() and _has_numbers(x)


def _has_numbers(x: torch.Tensor) -> bool:
    """Whether Python can read the values of `x` at no cost, and has their precision and to spare."""
    return type(x) is torch.Tensor and x.device.type == "cpu" and x.dtype is not torch.float64


def _sinkhorn_of_some(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """The first result of `_sinkhorn`, in half as many calls, each of them slower on many tokens.

    The result is diag(r) K diag(c) with K = softmax + eps. When column j is divided by its sum + eps, 1 / c[j] becomes
    sum_i r[i] K[i, j] + eps / c[j]; so it does for rows. Unlike their products, the factors need the range of float64.
    """
    K = torch.softmax(logits.double(), dim=1).add_(eps).permute(2, 0, 1).contiguous()
    transposed = K.mT
    r, over_r, c, over_c = K.new_ones(4, *K.shape[:2], 1)
    for step in range(iterations):
        if step:
            torch.reciprocal(over_r.baddbmm_(K, c, beta=eps), out=r)
        torch.reciprocal(over_c.baddbmm_(transposed, r, beta=eps), out=c)
    return (r * K * c.mT).to(logits.dtype).permute(1, 2, 0).contiguous()


def _sinkhorn_of_4(logits: list[float], iterations: int, eps: float) -> list[float]:
    """H_res, the transpose of `sinkhorn`, for one token with 16 logits, row by row: see `_sinkhorn_of_some`.

    The letters A to D are the rows of K; `w` is 1 / r and `v` is 1 / c.
    """
    A0, A1, A2, A3 = _softmax(logits[:4], eps)
    B0, B1, B2, B3 = _softmax(logits[4:8], eps)
    C0, C1, C2, C3 = _softmax(logits[8:12], eps)
    D0, D1, D2, D3 = _softmax(logits[12:], eps)
    rA = rB = rC = rD = wA = wB = wC = wD = c0 = c1 = c2 = c3 = v0 = v1 = v2 = v3 = 1.0
    for step in range(iterations):
        if step:
            wA = A0 * c0 + A1 * c1 + A2 * c2 + A3 * c3 + eps * wA
            wB = B0 * c0 + B1 * c1 + B2 * c2 + B3 * c3 + eps * wB
            wC = C0 * c0 + C1 * c1 + C2 * c2 + C3 * c3 + eps * wC
            wD = D0 * c0 + D1 * c1 + D2 * c2 + D3 * c3 + eps * wD
            rA, rB, rC, rD = 1 / wA, 1 / wB, 1 / wC, 1 / wD
        v0 = A0 * rA + B0 * rB + C0 * rC + D0 * rD + eps * v0
        v1 = A1 * rA + B1 * rB + C1 * rC + D1 * rD + eps * v1
        v2 = A2 * rA + B2 * rB + C2 * rC + D2 * rD + eps * v2
        v3 = A3 * rA + B3 * rB + C3 * rC + D3 * rD + eps * v3
        c0, c1, c2, c3 = 1 / v0, 1 / v1, 1 / v2, 1 / v3
    return [
        rA * A0 * c0, rB * B0 * c0, rC * C0 * c0, rD * D0 * c0,
        rA * A1 * c1, rB * B1 * c1, rC * C1 * c1, rD * D1 * c1,
        rA * A2 * c2, rB * B2 * c2, rC * C2 * c2, rD * D2 * c2,
        rA * A3 * c3, rB * B3 * c3, rC * C3 * c3, rD * D3 * c3,
    ]  # fmt: skip


def _birkhoff_of(logits: list[float], n: int) -> list[float]:
    """H_res row by row for one token with n! logits, one for each permutation in lexicographic order."""
    entries = [0.0] * (n * n)
    for weight, targets in zip(_softmax(logits, 0.0), permutations(range(n))):
        for source, target in enumerate(targets):
            entries[target * n + source] += weight
    return entries


def _softmax(row: list[float], eps: float) -> list[float]:
    """softmax + eps of a few numbers."""
    highest = max(row)
    powers = [math.exp(logit - highest) for logit in row]
    total = sum(powers)
    return [power / total + eps for power in powers]


def _sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), which overflows for no x."""
    return (1 + math.tanh(x / 2)) / 2


def without_autocast(x: torch.Tensor):
    """A context in which autocast is off for the device of `x`."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def permutation_matrices(n: int) -> torch.Tensor:
    """All n! permutation matrices in lexicographic order, each flattened to a column, [n * n, n!]."""
    orders = torch.tensor(list(permutations(range(n))))
    return torch.nn.functional.one_hot(orders, n).flatten(1).T.float()


def pre_bias(n: int) -> float:
    """The logit of 1/n, from which reading weights start; for one stream, a logit whose sigmoid is 1 in any dtype."""
    return -math.log(n - 1) if n > 1 else 40.0


def assign_initial_values(module: nn.Module) -> None:
    """Writes `module.initial_values()` into its parameters and buffers, without gradient."""
    with torch.no_grad():
        for name, value in module.initial_values().items():
            getattr(module, name).copy_(value)
