"""Optimizers of recursive models: AdamATan2 for weights, sign descent for sparsely used rows, and both as one.

Also the schedule and the moving average of weights that the original recipes use. What transformers or torch already
have (AdamW, cosine schedules, ...) is not repeated: pass `optim=` to the trainer for those.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback


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
        (beta1, beta2), grads = group["betas"], [p.grad for p in params]
        for p in params:
            if not self.state[p]:
                self.state[p].update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            self.state[p]["step"] += 1
        names = ("exp_avg", "exp_avg_sq", "step")
        means, squares, steps = zip(*([self.state[p][name] for name in names] for p in params))
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [math.sqrt(1 - beta2**step) for step in steps])
        for p, mean, root, step in zip(params, means, roots, steps):
            p.add_(torch.atan2(mean, root, out=root), alpha=-group["lr"] / (1 - beta1**step))


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


class WeightAverageCallback(TrainerCallback):
    """Updates a moving average of the weights after every optimizer step."""

    def __init__(self, average: WeightAverage):
        self.average = average

    def on_step_end(self, args, state, control, **kwargs):
        self.average.update()


def _evaluate(closure: Callable | None):
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _validate_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is outside {low}..{high}")
