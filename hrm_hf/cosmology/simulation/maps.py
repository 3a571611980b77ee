"""Simulation of maps from settings, two cosmological parameters and a seed.

"lognormal" is the default kind, and published results use it. Maps of kind "des" are drawn in three steps:

1. Draw log-normal convergence of the source planes, with the correct cross spectra, on a periodic sky of 1.5 times the
   patch side. Cut out the patch, so opposite edges do not match, and subtract the mean of its observed pixels.
2. Add shape noise of variance sigma_e^2 / (2 n A) to each pixel and plane, where A is the pixel area and n the galaxy
   density of one plane.
3. Apply one mask to all planes: a rough edge of the footprint, and round holes around bright stars. Unobserved pixels
   are 0 in the map and False in the mask.

Omitted: the spread of redshifts within a plane, properties that differ between planes, variable depth, intrinsic
alignments, and the correlated noise and leakage of a reconstruction from shear.

The `legacy-*` kinds are the generators of the original repository (cosmo-scanner), for compatibility tests only:

- They use a three-dimensional P(k) as a two-dimensional spectrum, without projection, Limber integral or growth. A
  pixel is 1 Mpc/h in the spectrum and 1 arcmin in the noise of "legacy-des".
- They standardize or stretch each map separately, which removes the amplitude that lensing measures. sigma_8 is
  therefore meaningless, and omega_m is the only label. "legacy-2lpt" has pixel rms 0.8, which is not sigma_8.
- Their masks are gray discs painted over the map. Only the original JPEG compression is omitted.
"""

from typing import Any

import numpy as np

from .fields import Cosmology, gaussian_convergence, lognormal_convergence
from .lpt import lpt_convergence
from .settings import EDGE_SHARE, HOLE_ARCMIN, LEGACY, MapSettings, SurveySettings


# Arguments of MapSettings similar to DES Y3: rounded values from Myles et al. 2021 (arXiv 2012.08566; mean redshifts)
# and Gatti et al. 2021 (arXiv 2011.03408; density and ellipticity of all sources), not verified against their tables.
# Each component of ellipticity has a dispersion of 0.26; sigma_e is the dispersion of both together.
DES_Y3 = {"source_redshifts": (0.34, 0.52, 0.74, 0.94), "galaxies_per_arcmin2": 5.59, "sigma_e": 0.26 * 2**0.5}
MARGIN = 1.5  # side of the periodic sky in patch sides; half a side separates a patch from its periodic copies
EDGE_ROUGHNESS = 0.1  # rms deviation of the edge from a straight line, in units of the patch side

# Constants of the legacy kinds of maps.
H = 0.7
SPECTRAL_INDEX = 0.965
DES_ARCMIN2 = 8  # galaxies per arcmin^2, and per pixel, because a pixel covers 1 arcmin^2
DES_ELLIPTICITY = 0.26
DES_BLUR = 10.0  # pixels


def generate_map(
    settings: MapSettings, omega_m: float, sigma_8: float, seed: int | np.random.SeedSequence
) -> tuple[np.ndarray, np.ndarray | None]:
    """Draw a map, float32 [channels, size, size], and its mask, bool [size, size] or None.

    The same arguments give the same map in every process. Physical kinds are dimensionless: convergence, whose
    observed pixels have mean 0 before noise, or shear; unobserved pixels are 0. Legacy kinds are gray values, 0 to 1.
    """
    columns = generate_columns(settings, omega_m, sigma_8, seed)
    return columns["map"], columns.get("mask")


def generate_columns(
    settings: MapSettings, omega_m: float, sigma_8: float, seed: int | np.random.SeedSequence
) -> dict[str, Any]:
    """Draw the columns of one map in a data set: "map", "mask" if there is one, and "kappa" for shear.

    "kappa" is the unmasked, noiseless convergence behind the shear, float32 [planes, size, size].
    """
    rng = np.random.default_rng(seed)
    if settings.observable == "shear":
        return _shear(settings, Cosmology(omega_m, sigma_8), rng)
    maps, mask = _convergence(settings, omega_m, sigma_8, rng)
    return {"map": maps} if mask is None else {"map": maps, "mask": mask}


def _shear(settings: MapSettings, cosmology: Cosmology, rng: np.random.Generator) -> dict[str, Any]:
    import torch  # imported here, because only shear needs torch and each worker would import it

    from ...models.shear_operator import shear_from_convergence

    kappa = _periodic_convergence(settings, cosmology, rng)
    shear = shear_from_convergence(torch.from_numpy(kappa)).numpy()
    shear, mask = observe_shear(shear, settings, rng)
    return {"map": shear, "mask": mask, "kappa": kappa.astype(np.float32)}


def _convergence(
    settings: MapSettings, omega_m: float, sigma_8: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray | None]:
    if settings.kind in LEGACY:
        generate = {"legacy-synthetic": legacy_synthetic, "legacy-des": legacy_des, "legacy-2lpt": legacy_2lpt}
        return generate[settings.kind](omega_m, settings.size, rng), None
    cosmology = Cosmology(omega_m, sigma_8)
    if settings.kind == "des":
        return survey_maps(cosmology, settings, rng)
    if settings.kind == "2lpt":
        kappa = _without_mean(lpt_convergence(cosmology, settings, rng))
    else:
        kappa = _periodic_convergence(settings, cosmology, rng)
    if settings.sigma_e:
        kappa = kappa + settings.pixel_noise * rng.standard_normal(kappa.shape)
    return kappa.astype(np.float32), None


def _periodic_convergence(settings: MapSettings, cosmology: Cosmology, rng: np.random.Generator) -> np.ndarray:
    draw = lognormal_convergence if settings.kind == "lognormal" else gaussian_convergence
    return _without_mean(draw(cosmology, settings.size, settings.side_rad, rng, settings.source_redshifts))


def _without_mean(kappa: np.ndarray) -> np.ndarray:
    """Subtract the mean of each map [planes, size, size].

    Shear does not determine the mean of a patch (mass-sheet degeneracy: Falco, Gorenstein & Shapiro 1985), and the
    mean of a log-normal patch would reveal its cosmic variance.
    """
    return kappa - kappa.mean((1, 2), keepdims=True)


# ---- surveys ----


def survey_maps(
    cosmology: Cosmology, settings: MapSettings, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw convergence maps of kind "des", float32 [planes, size, size], and their mask, bool [size, size]."""
    wide = int(np.ceil(MARGIN * settings.size))
    side = settings.side_rad * wide / settings.size
    kappa = lognormal_convergence(cosmology, wide, side, rng, settings.source_redshifts)
    signal = kappa[:, : settings.size, : settings.size]
    noise = settings.pixel_noise * rng.standard_normal(signal.shape) if settings.sigma_e else 0.0
    shape = settings.mask_edge_share, settings.hole_arcmin
    mask = survey_mask(settings.size, settings.pixel_arcmin, settings.mask_fraction, rng, *shape)
    # Subtract the mean of the observed pixels: neither the mean of a patch nor the hidden pixels are observable.
    kappa = signal - signal[:, mask].mean(1)[:, None, None] + noise
    return (kappa * mask).astype(np.float32), mask


def observe_shear(
    shear: np.ndarray, settings: SurveySettings, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Add shape noise to shear [2 planes, size, size] and mask it. Return float32 shear and a bool mask."""
    if settings.sigma_e:
        shear = shear + settings.pixel_noise * rng.standard_normal(shear.shape)
    shape = settings.mask_edge_share, settings.hole_arcmin
    mask = survey_mask(shear.shape[-1], settings.pixel_arcmin, settings.mask_fraction, rng, *shape)
    return (shear * mask).astype(np.float32), mask


def survey_mask(
    size: int,
    pixel_arcmin: float,
    fraction: float,
    rng: np.random.Generator,
    edge_share: float = EDGE_SHARE,
    hole_arcmin: tuple[float, float] = HOLE_ARCMIN,
) -> np.ndarray:
    """Draw a mask, bool [size, size], True where observed; it hides round(fraction * size^2) pixels.

    `edge_share` is the fraction of hidden pixels beyond the survey's edge; the rest are in holes of `hole_arcmin`.
    """
    hidden = min(round(fraction * size * size), size * size - 1)
    mask = np.ones(size * size, bool)
    beyond_edge = np.argsort(_edge(size, rng).ravel())[size * size - round(edge_share * hidden) :]
    mask[beyond_edge] = False
    mask = mask.reshape(size, size)
    left = hidden - len(beyond_edge)
    for centre in rng.permutation(size * size):  # each hole hides its center, so `left` reaches 0
        if not left:
            break
        row, column = divmod(centre, size)
        if mask[row, column]:
            left -= _punch(mask, row, column, np.exp(rng.uniform(*np.log(hole_arcmin))) / pixel_arcmin, left)
    return mask


def _punch(mask: np.ndarray, row: int, column: int, radius: float, most: int) -> int:
    """Mask a round hole that hides at most `most` observed pixels, and return the number of pixels masked."""
    reach = int(radius)
    near = np.s_[max(row - reach, 0) : row + reach + 1, max(column - reach, 0) : column + reach + 1]
    rows, columns = np.indices(mask[near].shape)
    distance = np.hypot(rows + near[0].start - row, columns + near[1].start - column)
    hole = np.argwhere(mask[near] & (distance <= radius))
    hole = hole[np.argsort(distance[tuple(hole.T)], kind="stable")][:most]
    mask[near][tuple(hole.T)] = False
    return len(hole)


def _edge(size: int, rng: np.random.Generator) -> np.ndarray:
    """Return each pixel's signed distance from a rough line across the patch, [size, size], in patch sides."""
    direction = rng.uniform(0, 2 * np.pi)
    place = (np.arange(size) + 0.5) / size - 0.5
    straight = np.cos(direction) * place[:, None] + np.sin(direction) * place
    waves = np.arange(1, 6)[:, None]  # waves of random phase, with wavelengths down to a fifth of the side
    rough = np.sin(2 * np.pi * (waves * place + rng.random((2, len(waves), 1)))).sum(1) / np.sqrt(len(waves))
    return straight + EDGE_ROUGHNESS * (rough[0][:, None] + rough[1])


# ---- legacy kinds: each takes (omega_m, size, rng) and returns gray values, float32 [1, size, size] ----


def legacy_synthetic(omega_m: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a blurred Gaussian field of contrast 0.15 with grain and 3 to 8 gray discs, in 256 gray levels."""
    field = _blur(_matter_field(omega_m, size, rng), 3.0)
    grey = 0.5 + 0.15 * _standardized(field) + _blur(0.02 * rng.standard_normal((size, size)), 0.7)
    rows, columns = np.ogrid[:size, :size]
    for _ in range(rng.integers(3, 9)):
        radius, (row, column) = rng.integers(4, 13), rng.integers(size, size=2)
        grey[(rows - row) ** 2 + (columns - column) ** 2 <= radius**2] = 0.5
    return (np.round(np.clip(grey, 0, 1) * 255) / 255).astype(np.float32)[None]


def legacy_des(omega_m: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a Gaussian field whose rms grows as omega_m^0.8, with noise and a blur, stretched to [0, 1].

    The label affects the shape of the spectrum and the signal-to-noise ratio, but not the amplitude. The ratio can be
    inferred only by accident: the blur kernel ends at 4 sigma and leaves a trace of the noise (see `_blur`).
    """
    signal = 0.02 * (omega_m / 0.3) ** 0.8 * _standardized(_matter_field(omega_m, size, rng))
    noise = DES_ELLIPTICITY / np.sqrt(2 * DES_ARCMIN2) * rng.standard_normal((size, size))
    return _stretch(_blur(signal + noise, DES_BLUR))


def legacy_2lpt(omega_m: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """Displace a 2D particle grid by second-order theory, and return its density rescaled to [0, 1]."""
    return _stretch(_deposit(*displacements(omega_m, size, rng)))


def displacements(omega_m: float, size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return displacements along rows and columns, [size, size] each, in pixels, which are 1 Mpc/h wide.

    The first order is -grad phi with laplace(phi) = delta. The second order is -3/7 omega_m^(-1/143) times the
    gradient of the potential whose Laplacian is phi_xx phi_yy - phi_xy^2. Both are in two dimensions.
    """
    delta = np.fft.rfft2(0.8 * _standardized(_matter_field(omega_m, size, rng)))
    kx, ky = _wave_numbers(size)
    over_k2 = -1 / np.where((square := kx**2 + ky**2) > 0, square, np.inf)
    phi = delta * over_k2

    def second(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.fft.irfft2(-a * b * phi, s=(size, size))

    source = np.fft.rfft2(second(kx, kx) * second(ky, ky) - second(kx, ky) ** 2)
    potential = -phi - 3 / 7 * omega_m ** (-1 / 143) * source * over_k2
    return np.fft.irfft2(1j * kx * potential, s=(size, size)), np.fft.irfft2(1j * ky * potential, s=(size, size))


def _wave_numbers(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `numpy.fft.rfft2` wave numbers along rows and columns in h/Mpc, for pixels of 1 Mpc/h."""
    return 2 * np.pi * np.fft.fftfreq(size)[:, None], 2 * np.pi * np.fft.rfftfreq(size)[None]


def _matter_field(omega_m: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a Gaussian field with spectrum k^0.965 T(k)^2; T is the BBKS transfer function (Bardeen et al. 1986)."""
    if not 0 < omega_m <= 1:
        raise ValueError(f"omega_m={omega_m}: must be in (0, 1]")
    kx, ky = _wave_numbers(size)
    k = np.hypot(kx, ky)
    k[0, 0] = 1  # avoids 0 / 0; the amplitude of this mode is set to 0 below
    q = k / (omega_m * H)
    series = 1 + 3.89 * q + (16.1 * q) ** 2 + (5.46 * q) ** 3 + (6.71 * q) ** 4
    transfer = np.log1p(2.34 * q) / (2.34 * q) * series**-0.25
    amplitude = k ** (SPECTRAL_INDEX / 2) * transfer
    amplitude[0, 0] = 0
    return np.fft.irfft2(np.fft.rfft2(rng.standard_normal((size, size))) * amplitude, s=(size, size))


def _blur(field: np.ndarray, sigma: float) -> np.ndarray:
    """Blur a periodic field with a Gaussian kernel of `sigma` pixels, truncated at 4 sigma.

    The truncation matters: it causes ripples that let white noise pass at 1e-7 of the noise amplitude. The spectrum of
    a "legacy-des" map reveals omega_m mainly through the level of this noise.
    """
    reach = int(4 * sigma + 0.5)
    offset = np.arange(-reach, reach + 1)
    weight = np.exp(-0.5 * (offset / sigma) ** 2)
    kernel = np.bincount(offset % len(field), weight / weight.sum(), len(field))
    beam = np.fft.fft(kernel)[:, None] * np.fft.rfft(kernel)
    return np.fft.irfft2(np.fft.rfft2(field) * beam, s=field.shape)


def _standardized(field: np.ndarray) -> np.ndarray:
    return (field - field.mean()) / field.std()


def _stretch(field: np.ndarray) -> np.ndarray:
    """Rescale a map to the range 0 to 1 and return it as float32 [1, size, size]."""
    field = field - field.min()
    return (field / field.max()).astype(np.float32)[None]


def _deposit(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the cloud-in-cell density [size, size] of one displaced particle per pixel."""
    size = len(rows)
    x, y = np.arange(size)[:, None] + rows, np.arange(size) + columns
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    density = np.zeros(size * size)
    for i, weight_x in ((0, 1 - (x - left)), (1, x - left)):
        for j, weight_y in ((0, 1 - (y - top)), (1, y - top)):
            cell = (left + i) % size * size + (top + j) % size
            density += np.bincount(cell.ravel(), (weight_x * weight_y).ravel(), size * size)
    return density.reshape(size, size)
