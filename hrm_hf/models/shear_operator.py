"""Weak-lensing shear from convergence on a periodic flat sky, with adjoint and inverse.

With the lensing potential psi, kappa = (psi_xx + psi_yy) / 2, g1 = (psi_xx - psi_yy) / 2 and g2 = psi_xy, so in
Fourier space g1 = (lx^2 - ly^2) / l^2 kappa and g2 = 2 lx ly / l^2 kappa (Kaiser & Squires 1993, ApJ 404, 441).
x runs along the last axis, y along the one before it. Shear is linear, not reduced.

No inverse can recover the mean of the map (the mass-sheet degeneracy) or, for an even number of pixels, the mode at
the Nyquist frequency of both axes.
"""

import torch


def shear_from_convergence(kappa: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Apply the forward operator A: compute shear from convergence maps. Unobserved pixels are set to 0.

    Args:
        kappa: [..., planes, size, size].
        mask: [..., 1, size, size], 1 or True in observed pixels; None if all pixels are observed.

    Returns:
        [..., 2 planes, size, size]: g1 and g2 of the first plane, then of the next, in at least float32.
    """
    _validate_square(kappa, "kappa")
    kappa = _full_precision(kappa)
    modes = torch.fft.rfft2(kappa).unsqueeze(-3) * _multipliers(kappa)
    shear = torch.fft.irfft2(modes, s=kappa.shape[-2:]).flatten(-4, -3)
    return shear if mask is None else shear * mask


def adjoint_shear(shear: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Apply the adjoint A^T to masked shear [..., 2 planes, S, S]. The result is [..., planes, S, S].

    Without a mask, this is the Kaiser-Squires estimate, except for modes at a Nyquist frequency.
    """
    return _combined(shear, mask, inverse=False)


def kaiser_squires(shear: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the least-squares convergence with mean 0. Arguments are as in `adjoint_shear`.

    Unobserved pixels count as zero shear, so with a mask the result is the usual first estimate, not the best map.
    """
    return _combined(shear, mask, inverse=True)


def _combined(shear: torch.Tensor, mask: torch.Tensor | None, inverse: bool) -> torch.Tensor:
    _validate_square(shear, "shear")
    if shear.shape[-3] % 2:
        raise ValueError(
            f"shear has {shear.shape[-3]} channels: must be an even number, with g1 and g2 of each plane in turn"
        )
    shear = _full_precision(shear)
    shear = shear if mask is None else shear * mask
    multipliers = _multipliers(shear)
    modes = (torch.fft.rfft2(shear).unflatten(-3, (-1, 2)) * multipliers).sum(-3)
    if inverse:
        # The power is 0 for modes that do not affect shear, < 1 at Nyquist frequencies (where g2 vanishes), else 1.
        power = multipliers.square().sum(0)
        modes = torch.where(power > 0, modes / power.clamp_min(torch.finfo(power.dtype).tiny), 0)
    return torch.fft.irfft2(modes, s=shear.shape[-2:])


def _multipliers(maps: torch.Tensor) -> torch.Tensor:
    """Return the factors that convert kappa to g1 and g2 at each `rfft2` mode, [2, size, size // 2 + 1]."""
    size = maps.shape[-1]
    # Compute in double precision on the CPU to get the same numbers on every device.
    real = {"dtype": torch.float64, "device": "cpu"}
    y = torch.fft.fftfreq(size, 1 / size, **real)[:, None]
    x = torch.arange(size // 2 + 1, **real)
    square = (x**2 + y**2).clamp_min(1)  # avoids 0 / 0 at zero frequency
    # At an axis's Nyquist frequency, l and -l are the same mode, so the sign of 2 lx ly is undefined.
    signed = (2 * y.abs() < size) & (2 * x < size)
    return torch.stack(((x**2 - y**2) / square, 2 * x * y / square * signed)).to(maps)


def _full_precision(maps: torch.Tensor) -> torch.Tensor:
    return maps if maps.dtype in (torch.float32, torch.float64) else maps.float()


def _validate_square(maps: torch.Tensor, name: str) -> None:
    if maps.dim() < 3 or maps.shape[-1] != maps.shape[-2]:
        raise ValueError(f"{name} has shape {list(maps.shape)}: must be [..., planes, size, size]")


__all__ = ["adjoint_shear", "kaiser_squires", "shear_from_convergence"]
