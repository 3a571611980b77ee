"""The shear operator. Referees: derivatives of a potential, finite differences, its adjoint and its inverse."""

import numpy as np
import pytest
import torch

from hrm_hf.models.shear_operator import adjoint_shear, kaiser_squires, shear_from_convergence


def some(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def some_mask(size, seed=1):
    return torch.rand(1, size, size, generator=torch.Generator().manual_seed(seed)) > 0.3


def test_derivatives_of_a_potential():
    """psi = cos(2x + 3y) + sin(5x - y), with second derivatives by hand."""
    size = 32
    place = 2 * np.pi * torch.arange(size, dtype=torch.float64) / size
    y, x = torch.meshgrid(place, place, indexing="ij")
    kappa = -6.5 * torch.cos(2 * x + 3 * y) - 13 * torch.sin(5 * x - y)
    g1 = 2.5 * torch.cos(2 * x + 3 * y) - 12 * torch.sin(5 * x - y)
    g2 = -6 * torch.cos(2 * x + 3 * y) + 5 * torch.sin(5 * x - y)
    shear = shear_from_convergence(kappa[None])
    torch.testing.assert_close(shear, torch.stack((g1, g2)), atol=1e-10, rtol=0)


@pytest.mark.parametrize("size", [8, 9])
@pytest.mark.parametrize("masked", [False, True])
def test_adjoint(size, masked):
    mask = some_mask(size) if masked else None
    kappa, shear = some(3, 2, size, size), some(3, 4, size, size, seed=2)
    left = (shear_from_convergence(kappa, mask) * shear).sum()
    right = (kappa * adjoint_shear(shear, mask)).sum()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [6, 7])
def test_the_adjoint_is_the_gradient(size):
    """The gradient of half the squared residual is compared with finite differences and autograd."""
    mask, data, kappa = some_mask(size), some(2, size, size), some(1, size, size, seed=3).requires_grad_()

    def loss(kappa):
        return 0.5 * (shear_from_convergence(kappa, mask) - data * mask).square().sum()

    expected = adjoint_shear(shear_from_convergence(kappa, mask) - data, mask)
    (by_autograd,) = torch.autograd.grad(loss(kappa), kappa)
    torch.testing.assert_close(expected, by_autograd, rtol=1e-10, atol=1e-10)
    assert torch.autograd.gradcheck(lambda k: shear_from_convergence(k, mask), kappa)
    assert torch.autograd.gradcheck(lambda s: adjoint_shear(s, mask), data.requires_grad_())


@pytest.mark.parametrize("size", [16, 17])
def test_inverse(size):
    """Everything is recovered except the mean and, for even sizes, the mode at both Nyquist frequencies."""
    kappa = some(2, 3, size, size)
    modes = torch.fft.fft2(kappa)
    modes[..., 0, 0] = 0
    if size % 2 == 0:
        modes[..., size // 2, size // 2] = 0
    found = kaiser_squires(shear_from_convergence(kappa))
    torch.testing.assert_close(found, torch.fft.ifft2(modes).real, rtol=0, atol=1e-10)


def test_masked_pixels_are_zero_and_do_not_count():
    mask = some_mask(8)
    shear = shear_from_convergence(some(1, 8, 8), mask)
    assert (shear[:, ~mask[0]] == 0).all() and (shear[:, mask[0]] != 0).all()
    noise = some(2, 8, 8, seed=5) * ~mask
    assert torch.equal(adjoint_shear(shear + noise, mask), adjoint_shear(shear, mask))


def test_errors_name_the_shape():
    with pytest.raises(ValueError, match=r"kappa.*\[1, 8, 6\]"):
        shear_from_convergence(torch.zeros(1, 8, 6))
    with pytest.raises(ValueError, match=r"shear.* 3 channels"):
        adjoint_shear(torch.zeros(3, 8, 8))
