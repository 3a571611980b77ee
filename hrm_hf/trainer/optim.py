"""Optimizers for recursive models: AdamATan2, sign descent for sparse rows, and their combination.

The module also has a weight average and the schedule of the original HRM code. All other optimizers come from
transformers. The last functions replace the settings saved in a checkpoint with the options of the resumed run.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback


class AdamATan2(torch.optim.Optimizer):
    """Adam that bounds its step with atan2 instead of dividing by a root plus epsilon.

    At step t: p *= 1 - lr * wd; m, v as in Adam; p -= lr / (1 - b1^t) * atan2(m, sqrt(v) / sqrt(1 - b2^t)). There is
    no epsilon, and the update does not depend on the scale of the loss. As in the published CUDA kernel, the bias
    correction of m multiplies the step and is not inside atan2. Closures are not supported; lr = 0 is allowed.

    Source: Everett et al. 2024, "Scaling Exponents Across Parameterizations and Optimizers", arXiv 2407.05872;
    kernel imoneoi/adam-atan2.
    """

    _compiled: Callable | None = None

    def __init__(
        self, params: Iterable, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.1
    ):
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def compile(self, **kwargs: Any) -> None:
        """Compile the update to one pass over the weights, passing keyword arguments to `torch.compile`."""
        self._compiled = torch.compile(_adam_atan2, fullgraph=True, **kwargs)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            by_step: dict[int, list[torch.Tensor]] = {}  # parameters that joined later have taken fewer steps
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                by_step.setdefault(state["step"], []).append(p)
            for step, params in by_step.items():
                self._update(params, step, group)

    def _update(self, params: list[torch.Tensor], step: int, group: dict) -> None:
        beta1, beta2 = group["betas"]
        tensors = [params, [p.grad for p in params]]
        tensors += [[self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq")]
        scales = [
            1 - group["lr"] * group["weight_decay"],
            1 / math.sqrt(1 - beta2**step),
            group["lr"] / (1 - beta1**step),
        ]
        if self._compiled is None:
            _adam_atan2(*tensors, beta1, beta2, *scales)
        else:  # as tensors, because a graph is compiled for each value of a number
            self._compiled(*tensors, beta1, beta2, *torch.tensor(scales, dtype=torch.float32).unbind())


def _adam_atan2(params, grads, means, squares, beta1: float, beta2: float, decay, root_scale, rate) -> None:
    """Update lists of parameters and moments in place."""
    torch._foreach_mul_(params, decay)
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_mul_(roots, root_scale)
    updates = [torch.atan2(mean, root) for mean, root in zip(means, roots)]
    torch._foreach_mul_(updates, rate)
    torch._foreach_sub_(params, updates)


class SignSGD(torch.optim.Optimizer):
    """Sign descent on the rows of a sparse gradient: w = w * (1 - lr * wd) - lr * sign(sum of gradients).

    Rows outside the batch do not change, not even by weight decay. Under torch.distributed, the (row, id) pairs are
    gathered from all processes, so every process makes the same update. The step sets the gradient to None.

    Source: Bernstein et al. 2018, "signSGD", arXiv 1802.04434; as used for puzzle embeddings by HRM.
    """

    def __init__(self, params: Iterable, lr: float = 1e-2, weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the rows in each parameter's sparse gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not p.grad.is_sparse:
                    raise TypeError(
                        f"SignSGD requires sparse gradients; this gradient is dense, with shape {tuple(p.grad.shape)}"
                    )
                ids, grads = _sum_rows(*_gather_rows(p.grad._indices()[0], p.grad._values()))
                rows = p[ids] * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * grads.sign()
                p[ids] = rows
                p.grad = None


def _sum_rows(ids: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the unique ids, and for each id the sum of its gradient rows [n, D]."""
    unique, inverse = torch.unique(ids, return_inverse=True)
    return unique, grads.new_zeros(len(unique), grads.shape[1]).index_add_(0, inverse, grads)


def _gather_rows(ids: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate ids [n] and rows [n, D] from all processes. All must have the same n."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ids, grads
    gathered = []
    for tensor in (ids.contiguous(), grads.contiguous()):
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        gathered.append(torch.cat(parts))
    return gathered[0], gathered[1]


class CompositeOptimizer(torch.optim.Optimizer):
    """Optimizer that combines several others. It has all their parameter groups and steps them in order."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]):
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        # Share the optimizers' dict objects, so that a scheduler that sets `lr` here also sets it in each optimizer.
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def step(self, closure: None = None) -> None:
        """Step each optimizer once."""
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict:
        """Return the state of each optimizer, in order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore each optimizer. Raise ValueError if the number of optimizers differs."""
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]


def cosine_with_min_ratio(warmup_steps: int, total_steps: int, min_ratio: float) -> Callable[[int], float]:
    """Return the schedule of the original HRM code: linear warm-up, then cosine decay to `min_ratio`.

    The result maps the number of steps taken (LambdaLR starts with 0) to a learning-rate factor. The original code
    counts steps from 1, so the first update uses the factor for step 1.
    """

    def factor(steps_taken: int) -> float:
        step = steps_taken + 1
        if step < warmup_steps:
            return step / max(1, warmup_steps)
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor


class WeightAverage(TrainerCallback):
    """Exponential moving average of a model's trainable parameters and batch-norm statistics.

    shadow = rate * shadow + (1 - rate) * p after each optimizer step; `swap` exchanges raw and averaged weights in
    place. Other buffers, including the puzzle table, are not averaged. In contrast, torch's `AveragedModel` copies the
    complete model, including frozen weights, starts after the first step, and averages either all buffers or none.
    """

    def __init__(self, model: torch.nn.Module, rate: float):
        self.rate = rate
        self.averaged = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for prefix, module in model.named_modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                for name in ("running_mean", "running_var"):
                    self.averaged[f"{prefix}.{name}".lstrip(".")] = getattr(module, name)
        self.shadow = {name: p.detach().clone() for name, p in self.averaged.items()}

    def on_step_end(self, *args, **kwargs):
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights."""
        if self.shadow:
            get_ema_multi_avg_fn(self.rate)(list(self.shadow.values()), list(self.averaged.values()), None)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange raw and averaged weights in place."""
        for name, p in self.averaged.items():
            raw = p.detach().clone()
            p.copy_(self.shadow[name])
            self.shadow[name].copy_(raw)

    def load(self, shadow: dict[str, torch.Tensor]) -> None:
        """Restore a saved average. Raise ValueError if tensors are missing or unknown."""
        if differing := sorted(shadow.keys() ^ self.shadow.keys()):
            raise ValueError(
                f"the saved average and the model have different tensors; only one of them has {differing[:8]}"
            )
        for name, value in shadow.items():
            self.shadow[name].copy_(value)


SCHEDULE_OPTIONS = ("lr_scheduler_type", "lr_scheduler_kwargs", "lr_min_ratio", "warmup_steps")
WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau")  # schedules without a warm-up
STEP_OPTIONS = (  # options that determine the number of steps and what each step does
    "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "world_size",
    "max_grad_norm", "ema_rate", "seed",
)  # fmt: skip
# Keys of a parameter group that belong to the checkpoint's state, or only select a kernel.
NOT_SETTINGS = ("params", "param_names", "lr", "fused", "foreach", "capturable", "differentiable")


def group_settings(optimizer: Any) -> list[dict[str, Any]]:
    """Return each parameter group's settings, including `initial_lr`, which the schedule scales."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])  # some schedules do not set initial_lr
    return [{k: v for k, v in group.items() if k not in NOT_SETTINGS} for group in optimizer.param_groups]


def optimization_record(args: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return the optimizer and schedule settings that a checkpoint stores for comparison on resuming."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):  # unwrap accelerate's wrapper
        optimizer = optimizer.optimizer
    kinds = [type(one) for one in getattr(optimizer, "optimizers", [optimizer])]
    unused = {"num_train_epochs"} if args.max_steps > 0 else set()
    unused |= {"warmup_steps"} if args.lr_scheduler_type in WITHOUT_WARMUP else set()
    unused |= {"lr_min_ratio"} if args.lr_scheduler_type != "cosine" else set()
    names = (*SCHEDULE_OPTIONS, *STEP_OPTIONS)
    options = {name: None if name in unused else getattr(args, name, None) for name in names}
    return {
        "optim": " and ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds),
        "scheduler": type(scheduler).__name__,
        "learning_rate": [group["initial_lr"] for group in optimizer.param_groups],
        **{name: str(getattr(value, "value", value)) for name, value in options.items()},
    }


def validate_resumable(saved: dict[str, Any], present: dict[str, Any], folder: str) -> None:
    """Raise ValueError if the checkpoint has a different optimizer, or a scheduler that cannot adopt new options."""
    is_function_of_steps = saved["scheduler"] == present["scheduler"] == LambdaLR.__name__
    for name in ("optim",) if is_function_of_steps else ("optim", "learning_rate", *SCHEDULE_OPTIONS):
        if present[name] != saved[name]:
            raise ValueError(
                f"{name}={present[name]}: {folder} was saved with {saved[name]}, and its state is valid only for that "
                "value; resume with the options of the saved run (--optim, --adam_atan2, --lr_scheduler_type, ...), "
                f"or start a new run from its weights with --model_name_or_path {folder}"
            )


def apply_settings(optimizer: Any, scheduler: Any, settings: list[dict[str, Any]]) -> list[str]:
    """Replace settings loaded from a checkpoint with those of the run's options, and return the changes."""
    changes, several = [], len({group.get("name") for group in optimizer.param_groups}) > 1
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        for name, value in values.items():
            old = tuple(group[name]) if isinstance(group.get(name), list) else group.get(name)
            if name in group and old != value:
                of = f" of {group.get('name')}" if several else ""
                changes.append(f"{'learning rate' if name == 'initial_lr' else name}{of} {old} -> {value}")
            group[name] = value
    if not isinstance(scheduler, LambdaLR):
        return changes
    bases = [group["initial_lr"] for group in optimizer.param_groups]
    rates = [base * factor(scheduler.last_epoch) for base, factor in zip(bases, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler.load_state_dict({**scheduler.state_dict(), "base_lrs": bases, "_last_lr": rates})
    return list(dict.fromkeys(changes))
