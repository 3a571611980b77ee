"""The Go coder's refinement head, helpers that locate plans and code, and a chunked cross-entropy.

`processing_hrm_go_coder.py` lists the tags that open code and plans.
"""

import torch
from torch import nn

from .configuration_hrm_go_coder import HrmGoCoderConfig
from .processing_hrm_go_coder import CATEGORIES, DECISIONS, LINE_BUCKETS, PLANNER_OPENERS, RESERVED, TOKEN_IDS


IGNORED = -100
LOSS_CHUNK = 512  # number of positions per chunk of logits; 100 MB in float32 with a vocabulary of 50,000


class HrmGoCoderFeedbackEncoder(nn.Module):
    """Encodes validator feedback (two verdicts, error category, error line) as a vector.

    A separate learned vector means "no validator", so the model can tell this case from feedback without errors.
    """

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__()
        half = config.hidden_size // 2
        self.flags = nn.Linear(2, half)
        self.category = nn.Embedding(len(CATEGORIES), half)
        self.projection = nn.Linear(2 * half, config.hidden_size)
        self.line = nn.Embedding(LINE_BUCKETS, config.hidden_size)
        self.no_validator = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, feedback_ids: torch.Tensor) -> torch.Tensor:
        """Encode feedback ids [..., 4] from `Feedback.token_ids` as vectors [..., C]."""
        syntax, tests, category, line = feedback_ids.unbind(dim=-1)
        # Map 0 (unknown), 1 (good) and 2 (bad) to 0, 1 and -1.
        flags = torch.stack([syntax, tests], dim=-1)
        flags = torch.where(flags == 2, -1, flags).to(self.no_validator.dtype)
        encoded = self.projection(torch.cat([self.flags(flags), self.category(category)], dim=-1))
        encoded = nn.functional.gelu(encoded) + self.line(line)
        nobody = ((syntax == 0) & (tests == 0)).unsqueeze(-1)
        return torch.where(nobody, self.no_validator.to(encoded.dtype), encoded)


class HrmGoCoderRefinementHead(nn.Module):
    """Classifies an attempt as CONTINUE, REFINE or DONE, from the states at its </CODE> token."""

    def __init__(self, config: HrmGoCoderConfig):
        super().__init__()
        self.hidden = nn.Linear(4 * config.hidden_size, config.hidden_size // 2)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.classes = nn.Linear(config.hidden_size // 2, len(DECISIONS))

    def forward(self, planner, generator, plan, feedback) -> torch.Tensor:
        """Compute logits [..., 3] from planner state, generator state, plan and feedback, each [..., C]."""
        features = torch.cat([planner, generator, plan, feedback], dim=-1)
        return self.classes(self.dropout(nn.functional.gelu(self.hidden(features))))


def decision_loss(
    logits: torch.Tensor, labels: torch.LongTensor, class_weights: list[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the class-weighted cross-entropy of logits [B, K, 3], and the number of labeled decisions."""
    weight, flat = logits.new_tensor(class_weights, dtype=torch.float), labels.flatten()
    known = flat != IGNORED
    total = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), flat, weight, ignore_index=IGNORED, reduction="sum"
    )
    return total / weight[flat.clamp(min=0)].mul(known).sum().clamp(min=1e-9), known.sum()


def plan_means(planner_states: torch.Tensor, input_ids: torch.LongTensor, positions: torch.LongTensor) -> torch.Tensor:
    """Return the mean planner state [B, K, C] over the last plan before each position, or 0 without a plan."""
    indices = torch.arange(input_ids.shape[1], device=input_ids.device)
    openers = last_openers(input_ids)[0]
    plans = torch.where(input_ids == TOKEN_IDS["<PLAN>"], indices, -1).cummax(dim=1).values
    last = plans.gather(1, positions)
    members = (openers.unsqueeze(1) == last.unsqueeze(-1)) & (last >= 0).unsqueeze(-1)
    shares = members.to(planner_states.dtype)
    return shares @ planner_states / shares.sum(dim=-1, keepdim=True).clamp(min=1)


def last_openers(input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index [B, T] of the last opening tag so far (-1 if none), and a mask of <CODE> tokens."""
    opens_code = input_ids == TOKEN_IDS["<CODE>"]
    opens = opens_code | (within(input_ids, PLANNER_OPENERS) & ~within(input_ids, RESERVED))
    indices = torch.arange(input_ids.shape[1], device=input_ids.device)
    return torch.where(opens, indices, -1).cummax(dim=1).values, opens_code


def within(input_ids: torch.Tensor, tags: tuple[str, ...]) -> torch.Tensor:
    """Return a mask of the ids in the range from the first to the last tag, inclusive."""
    return (input_ids >= TOKEN_IDS[tags[0]]) & (input_ids <= TOKEN_IDS[tags[-1]])


def at(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Gather values [B, T, C] at positions [B, K] into [B, K, C]."""
    return values.gather(1, positions.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


# ---- cross-entropy without logits ----

# With a vocabulary of 50,000, a small model's logits are much larger than its other tensors. Here they exist for one
# chunk of positions at a time. The forward pass computes the loss and the gradients of a chunk together and keeps only
# the gradients, so nothing is computed twice. The idea is from "Cut Your Losses" (Wijmans et al. 2024, arXiv
# 2411.09009) and Liger (arXiv 2410.10989); this version is plain torch for any device.


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, token_weights):
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        head = weight.to(dtype)
        needs_grad = any(ctx.needs_input_grad)
        losses = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if needs_grad else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        with torch.autocast(device, enabled=False):
            for begin in range(0, len(targets), LOSS_CHUNK):
                rows = slice(begin, begin + LOSS_CHUNK)
                part, target = hidden[rows].to(dtype), targets[rows, None]
                logits = (part @ head.T).float()
                largest = logits.amax(dim=-1, keepdim=True)
                chosen = logits.gather(1, target) - largest
                exponentials = logits.sub_(largest).exp_()
                total = exponentials.sum(dim=-1, keepdim=True)
                losses[rows] = (total.log() - chosen)[:, 0]
                if needs_grad:
                    scale = token_weights[rows, None]
                    grad = exponentials.mul_(scale / total).scatter_add_(1, target, -scale).to(dtype)
                    hidden_grad[rows] = (grad @ head).to(hidden.dtype)
                    weight_grad += grad.T @ part
        if needs_grad:
            ctx.save_for_backward(hidden_grad, weight_grad.to(weight.dtype))
        ctx.mark_non_differentiable(losses)
        return (losses * token_weights).sum(), losses

    @staticmethod
    def backward(ctx, grad_total, _grad_losses):
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grad_total, weight_grad * grad_total, None, None


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, token_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sum_i token_weights[i] * CE(hidden[i] @ weight.T, targets[i]), and the CE of each token.

    Args:
        hidden: [N, C].
        weight: [V, C] of a head without bias.
        targets: [N], each 0..V-1.
        token_weights: [N] float32; no gradient flows to them.

    Returns:
        The weighted sum (0-d, with gradients for `hidden` and `weight`) and the losses [N] in nats (detached).
    """
    return _LinearCrossEntropy.apply(hidden, weight, targets, token_weights)
