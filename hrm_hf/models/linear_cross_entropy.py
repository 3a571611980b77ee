"""Cross-entropy of a linear head without its logits.

A head over 50,000 tokens makes logits many times larger than all else in a small model. Here they exist for a chunk of
positions at a time; the forward computes loss and gradients of a chunk together and keeps the gradients alone, so that
no arithmetic is done twice. The idea is that of "Cut Your Losses" (Wijmans et al. 2024, arXiv 2411.09009) and Liger
(arXiv 2410.10989), in plain torch for any device.
"""

import torch


LOSS_CHUNK = 512  # positions whose logits exist at a time; 100 MB of float32 logits at 50,000 tokens


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
    """sum_i token_weights[i] * CE(hidden[i] @ weight.T, targets[i]), and each CE without a gradient.

    Args:
        hidden: [N, C].
        weight: [V, C] of a head without bias.
        targets: [N], each 0..V-1.
        token_weights: [N] float32; no gradient flows to them.

    Returns:
        The weighted sum (0-d, with gradients for `hidden` and `weight`) and the losses [N] in nats (detached).
    """
    return _LinearCrossEntropy.apply(hidden, weight, targets, token_weights)
