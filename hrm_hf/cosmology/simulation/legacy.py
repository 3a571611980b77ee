"""The three map generators of the original repository (cosmo-scanner), for compatibility tests only.

They are kept so that results stated for them can be repeated; no claim of this package rests on them, because they are
not physics:

- A three-dimensional P(k) is drawn as a two-dimensional spectrum: no projection, no Limber integral, no growth. A
  pixel is 1 Mpc/h in the spectrum and 1 arcmin in the noise of `legacy_des`.
- Each map is standardized or stretched to [0, 1] by itself. That deletes the amplitude, which is what lensing
  measures: only the shape of P(k) tells omega_m, sigma_8 has no meaning, and omega_m is the one label.
- In `legacy_2lpt` every map has pixel rms 0.8, which is no sigma_8: in discs of 8 Mpc/h the rms falls with omega_m.
- Masks are grey discs painted over the map, without a flag that says where.

A Gaussian field holds nothing beyond its power spectrum, so no network can beat the best estimator from the spectrum
on the first two. The JPEG files in which the original stores maps are left out: grey values of `legacy_synthetic` are
rounded to 256 levels as there, but not compressed. Edges are periodic.

Every generator takes (omega_m, size in pixels, rng) and returns grey values in [0, 1], float32 [1, size, size].
"""

import numpy as np


H = 0.7
SPECTRAL_INDEX = 0.965
DES_ARCMIN2 = 8  # galaxies per arcmin^2 and per pixel, for pixels are 1 arcmin there
DES_ELLIPTICITY = 0.26
DES_BLUR = 10.0  # pixels


def legacy_synthetic(omega_m: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """The original's "synthetic": a blurred Gaussian field of contrast 0.15 with grain and 3 to 8 grey discs."""
    field = _blur(_matter_field(omega_m, size, rng), 3.0)
    grey = 0.5 + 0.15 * _standardise(field) + _blur(0.02 * rng.standard_normal((size, size)), 0.7)
    rows, columns = np.ogrid[:size, :size]
    for _ in range(rng.integers(3, 9)):
        radius, (row, column) = rng.integers(4, 13), rng.integers(size, size=2)
        grey[(rows - row) ** 2 + (columns - column) ** 2 <= radius**2] = 0.5
    return (np.round(np.clip(grey, 0, 1) * 255) / 255).astype(np.float32)[None]


def legacy_des(omega_m: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """The original's "des": a Gaussian field whose rms grows as omega_m^0.8, white noise, a blur, stretched to [0, 1].

    The label sits in the shape of the spectrum and in the ratio of signal to noise, not in the amplitude. That the
    ratio can be read is an accident: the blur's kernel ends at 4 sigma and leaves a trace of the noise (see `_blur`).
    """
    signal = 0.02 * (omega_m / 0.3) ** 0.8 * _standardise(_matter_field(omega_m, size, rng))
    noise = DES_ELLIPTICITY / np.sqrt(2 * DES_ARCMIN2) * rng.standard_normal((size, size))
    return _stretch(_blur(signal + noise, DES_BLUR))


def legacy_2lpt(omega_m: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """The original's "2lpt": particles of a two-dimensional grid moved by second-order theory, stretched to [0, 1]."""
    return _stretch(_deposit(*displacements(omega_m, size, rng)))


def displacements(omega_m: float, size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Displacements of `legacy_2lpt` along rows and columns in pixels (Mpc/h), [size, size] each.

    First order -grad phi with laplace(phi) = delta; second order -3/7 omega_m^(-1/143) times the gradient of the
    potential whose Laplacian is phi_xx phi_yy - phi_xy^2, all in two dimensions.
    """
    delta = np.fft.rfft2(0.8 * _standardise(_matter_field(omega_m, size, rng)))
    kx, ky = _wave_numbers(size)
    over_k2 = -1 / np.where((square := kx**2 + ky**2) > 0, square, np.inf)
    phi = delta * over_k2

    def second(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.fft.irfft2(-a * b * phi, s=(size, size))

    source = np.fft.rfft2(second(kx, kx) * second(ky, ky) - second(kx, ky) ** 2)
    potential = -phi - 3 / 7 * omega_m ** (-1 / 143) * source * over_k2
    return np.fft.irfft2(1j * kx * potential, s=(size, size)), np.fft.irfft2(1j * ky * potential, s=(size, size))


def _wave_numbers(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Wave numbers of `numpy.fft.rfft2` along rows and columns in h/Mpc, for pixels of 1 Mpc/h."""
    return 2 * np.pi * np.fft.fftfreq(size)[:, None], 2 * np.pi * np.fft.rfftfreq(size)[None]


def _matter_field(omega_m: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """A Gaussian field with spectrum k^0.965 T(k)^2, T of Bardeen et al. 1986 (BBKS), in no particular unit."""
    if not 0 < omega_m <= 1:
        raise ValueError(f"omega_m={omega_m} is not in (0, 1]")
    kx, ky = _wave_numbers(size)
    k = np.hypot(kx, ky)
    k[0, 0] = 1  # any number: the mean is taken out below
    q = k / (omega_m * H)
    series = 1 + 3.89 * q + (16.1 * q) ** 2 + (5.46 * q) ** 3 + (6.71 * q) ** 4
    transfer = np.log1p(2.34 * q) / (2.34 * q) * series**-0.25
    amplitude = k ** (SPECTRAL_INDEX / 2) * transfer
    amplitude[0, 0] = 0
    return np.fft.irfft2(np.fft.rfft2(rng.standard_normal((size, size))) * amplitude, s=(size, size))


def _blur(field: np.ndarray, sigma: float) -> np.ndarray:
    """Periodic Gaussian blur with standard deviation `sigma` in pixels; the kernel ends at 4 sigma.

    The cut matters: its ripples let white noise through at 1e-7 of its amplitude, and most of what a spectrum says of
    omega_m on `legacy_des` is the level of that noise beside the signal.
    """
    reach = int(4 * sigma + 0.5)
    offset = np.arange(-reach, reach + 1)
    weight = np.exp(-0.5 * (offset / sigma) ** 2)
    kernel = np.bincount(offset % len(field), weight / weight.sum(), len(field))
    beam = np.fft.fft(kernel)[:, None] * np.fft.rfft(kernel)
    return np.fft.irfft2(np.fft.rfft2(field) * beam, s=field.shape)


def _standardise(field: np.ndarray) -> np.ndarray:
    return (field - field.mean()) / field.std()


def _stretch(field: np.ndarray) -> np.ndarray:
    """Least value to 0 and greatest to 1, float32 [1, size, size]; standardising before it would change nothing."""
    field = field - field.min()
    return (field / field.max()).astype(np.float32)[None]


def _deposit(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Density of one particle for each pixel, moved by so many pixels: cloud in cell, periodic, [size, size]."""
    size = len(rows)
    x, y = np.arange(size)[:, None] + rows, np.arange(size) + columns
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    density = np.zeros(size * size)
    for i, weight_x in ((0, 1 - (x - left)), (1, x - left)):
        for j, weight_y in ((0, 1 - (y - top)), (1, y - top)):
            cell = (left + i) % size * size + (top + j) % size
            density += np.bincount(cell.ravel(), (weight_x * weight_y).ravel(), size * size)
    return density.reshape(size, size)
