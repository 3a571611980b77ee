"""Optimizers of recursive models: AdamATan2 for weights, sign descent for sparsely used rows, and both as one.

Also the schedule and the moving average of weights that the original recipes use. What transformers or torch already
have (AdamW, cosine schedules, ...) is not repeated: pass `optim=` to the trainer for those.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.optim.swa_utils import get_ema_multi_avg_fn


SMALL_MODEL = 2**20  # weights; above it, the arithmetic and not the calls takes the time


class AdamATan2(torch.optim.Optimizer):
    """Adam whose step is bounded by atan2 instead of divided by an epsilon-guarded root.

    At step t: p *= 1 - lr * wd; m, v as in Adam; p -= lr / (1 - b1^t) * atan2(m, sqrt(v) / sqrt(1 - b2^t)). There is
    no epsilon, and the update does not depend on the scale of the loss. The bias correction of m multiplies the step
    and is not inside atan2, as in the published CUDA kernel. lr = 0 is legal (the first step of a warm-up).

    Source: Everett et al. 2024, "Scaling Exponents Across Parameterizations and Optimizers", arXiv 2407.05872;
    kernel imoneoi/adam-atan2.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
    ):
        _validate_range("lr", lr, 0, math.inf)
        _validate_range("weight_decay", weight_decay, 0, math.inf)
        for beta in betas:
            _validate_range("betas", beta, 0, 1)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Updates every parameter that has a gradient."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(params, group)
        return loss

    def _update(self, params: list[torch.Tensor], group: dict) -> None:
        states = [self.state[p] for p in params]
        if not all(states):
            self._create_moments([p for p, state in zip(params, states) if not state])
        for state in states:
            state["step"] += 1
        beta1, beta2 = group["betas"]
        decay, step_size = 1 - group["lr"] * group["weight_decay"], -group["lr"]
        steps = {state["step"] for state in states}
        moments = self._flat_moments(states) if len(steps) == 1 else None
        torch._foreach_mul_(params, decay)
        if moments is not None:  # a small model is all call overhead: one call for all its parameters
            step = steps.pop()
            gradient = torch.cat([p.grad.view(-1) for p in params])
            angles = _moment_angles(*moments, gradient, beta1, beta2, step)
            updates = [angle.view_as(p) for p, angle in zip(params, angles.split([p.numel() for p in params]))]
            torch._foreach_add_(params, updates, alpha=step_size / (1 - beta1**step))
            return
        for p, state in zip(params, states):
            angle = _moment_angles(state["exp_avg"], state["exp_avg_sq"], p.grad, beta1, beta2, state["step"])
            p.add_(angle, alpha=step_size / (1 - beta1 ** state["step"]))

    def _create_moments(self, params: list[torch.Tensor]) -> None:
        """Zero moments; those of a small model are views of one tensor each, which `_flat_moments` recognizes."""
        sizes = [p.numel() for p in params]
        plain = all(type(p) is torch.nn.Parameter and p.is_contiguous() for p in params)
        same = len({(p.dtype, p.device) for p in params}) == 1
        if plain and same and sum(sizes) <= SMALL_MODEL:
            flat = [params[0].new_zeros(sum(sizes)).split(sizes) for _ in range(2)]
            moments = [(m.view_as(p), v.view_as(p)) for p, m, v in zip(params, *flat)]
        else:
            moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
        for p, (exp_avg, exp_avg_sq) in zip(params, moments):
            self.state[p].update(step=0, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)

    @staticmethod
    def _flat_moments(states: list[dict]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The two tensors that all moments are views of, in order and without gaps; None if they are not."""
        flat = []
        for name in ("exp_avg", "exp_avg_sq"):
            views = [state[name] for state in states]
            base, offset = views[0]._base, 0
            if base is None or base.dim() != 1:
                return None
            for view in views:
                if view._base is not base or view.storage_offset() != offset:
                    return None
                offset += view.numel()
            if offset != base.numel():
                return None
            flat.append(base)
        return flat[0], flat[1]

    def load_state_dict(self, state_dict: dict) -> None:
        """As in torch; the moments of a small model become views of one tensor again."""
        super().load_state_dict(state_dict)
        loaded = {p: dict(state) for p, state in self.state.items() if state}
        for group in self.param_groups:
            params = [p for p in group["params"] if p in loaded]
            if params:
                self._create_moments(params)
        for p, state in loaded.items():
            for name in ("exp_avg", "exp_avg_sq"):
                self.state[p][name].copy_(state[name])
            self.state[p]["step"] = state["step"]


def _moment_angles(exp_avg, exp_avg_sq, grad, beta1: float, beta2: float, step: int) -> torch.Tensor:
    """Moves both moments and returns atan2(m, sqrt(v) / sqrt(1 - b2^t))."""
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**step))
    return torch.atan2(exp_avg, denominator, out=denominator)


class SignSGD(torch.optim.Optimizer):
    """Sign descent on the rows that a sparse gradient names: w = w * (1 - lr * wd) - lr * sign(sum of gradients).

    Rows absent from the batch do not move and do not decay. Under torch.distributed the (row, id) pairs of all
    processes are gathered, so that every process makes the same update. The gradient is used up by the step.

    Source: Bernstein et al. 2018, "signSGD", arXiv 1802.04434; as used for puzzle embeddings by HRM.
    """

    def __init__(self, params: Iterable, lr: float = 1e-2, weight_decay: float = 0.1):
        _validate_range("lr", lr, 0, math.inf)
        _validate_range("weight_decay", weight_decay, 0, math.inf)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Updates the rows named by each parameter's sparse gradient."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not p.grad.is_sparse:
                    raise TypeError(
                        f"SignSGD needs a sparse gradient of rows; this one is dense, {tuple(p.grad.shape)}"
                    )
                ids, grads = _sum_rows(*_gather_rows(p.grad._indices()[0], p.grad._values()))
                rows = p[ids] * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * grads.sign()
                p[ids] = rows
                p.grad = None
        return loss


def _sum_rows(ids: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unique ids and the sum of the gradient rows [n, D] of each."""
    unique, inverse = torch.unique(ids, return_inverse=True)
    return unique, torch.zeros(len(unique), grads.shape[1], dtype=grads.dtype, device=grads.device).index_add_(
        0, inverse, grads
    )


def _gather_rows(ids: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenates ids [n] and rows [n, D] over all processes; n is the per-device batch size, the same everywhere."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ids, grads
    gathered = []
    for tensor in (ids.contiguous(), grads.contiguous()):
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        gathered.append(torch.cat(parts))
    return gathered[0], gathered[1]


class CompositeOptimizer(torch.optim.Optimizer):
    """Several optimizers that a trainer and a scheduler see as one: the groups of all, stepped in order."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]):
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        # The same dict objects: a scheduler that sets `lr` here sets it for the optimizer that owns the group.
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def step(self, closure: Callable | None = None):
        """Steps each optimizer once."""
        loss = _evaluate(closure)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict:
        """The state of each optimizer, in order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restores each optimizer; raises ValueError if their number differs."""
        states = state_dict["optimizers"]
        if len(states) != len(self.optimizers):
            raise ValueError(f"the saved state has {len(states)} optimizers, this run {len(self.optimizers)}")
        for optimizer, state in zip(self.optimizers, states):
            optimizer.load_state_dict(state)
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]


def embeddings_in_32_bits(model: torch.nn.Module, options: dict) -> None:
    """Has bitsandbytes keep 32-bit states for embeddings, as transformers' trainer does with its own groups.

    Nothing for other optimizers than 8-bit ones of bitsandbytes, by the `options` the optimizer was made with. Rows of
    rare tokens get few gradients, which is what 8-bit states bear badly.
    """
    if options.get("optim_bits") != 8:
        return
    from bitsandbytes.optim import GlobalOptimManager

    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            GlobalOptimManager.get_instance().register_module_override(module, "weight", {"optim_bits": 32})


def cosine_with_min_ratio(warmup_steps: int, total_steps: int, min_ratio: float) -> Callable[[int], float]:
    """Learning-rate factor of the original recipes as a function of the steps already taken.

    The original counts steps from 1, so the factor of the first update is that of step 1 (LambdaLR asks with 0).
    Linear warm-up to 1, then a cosine down to `min_ratio`; min_ratio = 1 is constant after the warm-up.
    """

    def factor(steps_taken: int) -> float:
        step = steps_taken + 1
        if step < warmup_steps:
            return step / max(1, warmup_steps)
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor


class WeightAverage:
    """Exponential moving average of a model's trainable parameters, and of the running statistics of batch norms.

    Those statistics are of the activations that raw weights make, and far from those of averaged weights: the average
    of both belongs together. Other buffers, so the puzzle table too, stay out.

    shadow = rate * shadow + (1 - rate) * p after each optimizer step. Raw and averaged weights are kept side by side;
    `swap` exchanges them in place. torch's `AveragedModel` holds a copy of the whole model, frozen weights and puzzle
    table too, starts from the weights after the first step, and averages all buffers or none.
    """

    def __init__(self, model: torch.nn.Module, rate: float):
        _validate_range("ema_rate", rate, 0, 1)
        self.rate = rate
        self.averaged = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for prefix, module in model.named_modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                for name in ("running_mean", "running_var"):
                    self.averaged[f"{prefix}.{name}".lstrip(".")] = getattr(module, name)
        self.shadow = {name: p.detach().clone() for name, p in self.averaged.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Moves the average towards the present weights."""
        if not self.shadow:  # every weight is frozen
            return
        get_ema_multi_avg_fn(self.rate)(list(self.shadow.values()), list(self.averaged.values()), None)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges raw and averaged weights in place."""
        for name, p in self.averaged.items():
            raw = p.detach().clone()
            p.copy_(self.shadow[name])
            self.shadow[name].copy_(raw)

    def load(self, shadow: dict[str, torch.Tensor]) -> None:
        """Restores a saved average. Raises ValueError naming tensors that are missing or unknown."""
        if shadow.keys() != self.shadow.keys():
            raise ValueError(f"saved average does not fit: {sorted(shadow.keys() ^ self.shadow.keys())[:8]} differ")
        for name, value in shadow.items():
            self.shadow[name].copy_(value)


def _evaluate(closure: Callable | None):
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _validate_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is outside {low}..{high}")
