"""The fused head and loss. Referees: torch's linear layer and cross_entropy, and finite differences."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from hrm_hf.models import heads_hrm_go_coder as module
from hrm_hf.models.heads_hrm_go_coder import linear_cross_entropy


TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5}  # the losses are float32 throughout


def inputs(rows: int = 11, width: int = 6, vocab: int = 17, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    return hidden, weight, targets, torch.rand(rows, generator=generator)


def both(hidden, weight, targets, token_weights):
    """Return (sum, losses, gradients) of our function and of torch's."""
    found, losses = linear_cross_entropy(hidden, weight, targets, token_weights)
    expected_losses = cross_entropy((hidden @ weight.T).float(), targets, reduction="none")
    expected = (expected_losses * token_weights).sum()
    return [
        (total.detach(), each.detach(), *torch.autograd.grad(3 * total, (hidden, weight)))
        for total, each in ((found, losses), (expected, expected_losses))
    ]


@pytest.mark.parametrize("chunk", [1, 4, 11, 512])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_loss_and_gradients_match_torch_for_any_chunk(chunk, dtype, monkeypatch):
    monkeypatch.setattr(module, "LOSS_CHUNK", chunk)
    found, expected = both(*inputs(dtype=dtype))
    torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_gradients_match_finite_differences():
    hidden, weight, targets, token_weights = inputs(rows=4, width=3, vocab=5)
    # The losses are float32, so the step has to be coarse, and the tolerances too.
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, token_weights)[0].double(), (hidden, weight),
        eps=1e-2, atol=2e-3, rtol=1e-2,
    )  # fmt: skip


def test_no_rows_give_zero_with_zero_gradients():
    hidden, weight, targets, token_weights = inputs(rows=0)
    total, losses = linear_cross_entropy(hidden, weight, targets, token_weights)
    total.backward()
    assert total == 0 and losses.shape == (0,)
    assert hidden.grad.shape == (0, 6) and torch.equal(weight.grad, torch.zeros_like(weight))


def test_large_logits_neither_overflow_nor_lose_the_loss():
    hidden, weight, targets, token_weights = inputs(dtype=torch.float32)
    with torch.no_grad():
        hidden *= 1000
    found, expected = both(hidden, weight, targets, token_weights)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_agrees_within_its_precision(weight_dtype):
    hidden, weight, targets, token_weights = inputs(dtype=torch.float32)
    expected = both(hidden, weight, targets, token_weights)[1]
    weight = weight.detach().to(weight_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        total, losses = linear_cross_entropy(hidden, weight, targets, token_weights)
    gradients = torch.autograd.grad(3 * total, (hidden, weight))
    assert total.dtype == losses.dtype == torch.float32
    assert [gradient.dtype for gradient in gradients] == [torch.float32, weight_dtype]
    for one, other in zip((total, losses, *gradients), expected):
        torch.testing.assert_close(one.float(), other, atol=0.05, rtol=0.05)
