"""Random fields on a periodic flat patch of sky: Gaussian and log-normal convergence with given angular spectra.

Fields of several source planes are drawn together, with the right cross spectra.

Sources: Coles & Jones 1991 and Xavier et al. 2016 (FLASK), arXiv 1602.08503, section 3, for log-normal fields.
"""

from functools import lru_cache

import numpy as np

from .background import Cosmology, convergence_power, empty_beam


ARCMIN = np.pi / 180 / 60  # radians
LOGNORMAL_SHIFT = 0.4  # over the convergence of an empty beam; gives the skewness of ray-traced maps


def multipole_grid(size: int, side_rad: float) -> np.ndarray:
    """|ell| of the modes that `numpy.fft.rfft2` returns for a patch, [size, size // 2 + 1]."""
    step = 2 * np.pi / side_rad
    rows, columns = np.fft.fftfreq(size, 1 / size) * step, np.arange(size // 2 + 1) * step
    return np.hypot(rows[:, None], columns)


def gaussian_convergence(
    cosmology: Cosmology,
    size: int,
    side_rad: float,
    rng: np.random.Generator,
    source_redshifts: tuple[float, ...] = (1.0,),
) -> np.ndarray:
    """Gaussian convergence maps with the power spectra of `cosmology`, [bins, size, size]."""
    return _correlated_fields(spectra_on_modes(cosmology, size, side_rad, source_redshifts), size, side_rad, rng)


def lognormal_convergence(
    cosmology: Cosmology,
    size: int,
    side_rad: float,
    rng: np.random.Generator,
    source_redshifts: tuple[float, ...] = (1.0,),
) -> np.ndarray:
    """Draw log-normal convergence, kappa = shift (exp(g - var(g) / 2) - 1), float64 [bins, size, size].

    The Gaussian field g has the correlation ln(1 + xi_kappa / shift^2), which gives the power spectra of `cosmology`.
    """
    shifts, spectra, variance = gaussian_under_lognormal(cosmology, size, side_rad, source_redshifts)
    g = _correlated_fields(spectra, size, side_rad, rng)
    return shifts[:, None, None] * np.expm1(g - variance[:, None, None] / 2)


def gaussian_under_lognormal(
    cosmology: Cosmology, size: int, side_rad: float, source_redshifts: tuple[float, ...] = (1.0,)
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Describe the Gaussian field g that `lognormal_convergence` exponentiates.

    Returns:
        The shifts [bins], the spectra of g on the modes [bins, bins, size, size // 2 + 1] in steradian, and the
        variances of g [bins].
    """
    shifts = np.array([-LOGNORMAL_SHIFT * empty_beam(cosmology, z) for z in source_redshifts])
    spectra = spectra_on_modes(cosmology, size, side_rad, source_redshifts)
    modes = size**2 / side_rad**2  # a spectrum times this is the transform of a correlation function on the pixels
    correlation = np.fft.irfft2(spectra * modes, s=(size, size))
    gaussian = gaussian_correlation(correlation, (shifts[:, None] * shifts)[..., None, None])
    variance = np.einsum("iixy->ixy", gaussian)[:, 0, 0]
    # A correlation function of a log-normal field has no negative power but for rounding and the pixels' cut.
    return shifts, np.fft.rfft2(gaussian).real / modes, variance


def gaussian_correlation(correlation: np.ndarray, shifts: np.ndarray | float) -> np.ndarray:
    """Correlation of the Gaussian fields under log-normal ones with this correlation and product of shifts."""
    return np.log1p(correlation / shifts)


def map_power_spectrum(
    field: np.ndarray, side_rad: float, bins: int = 13, other: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Measure the power spectrum of a periodic map in rings of equal width in log(ell) up to Nyquist.

    Args:
        field: [..., size, size], in any unit. other: a second such field, for the cross spectrum.

    Returns:
        Mean multipole [bins] and power [..., bins] in steradian times the square of the unit. Rings without a mode
        are merged into the next, so there may be fewer than `bins`.
    """
    size = field.shape[-1]
    ell = multipole_grid(size, side_rad)
    weight = np.full(ell.shape, 2.0)  # modes that rfft2 leaves out are the conjugates of these
    weight[:, 0] = 1
    if size % 2 == 0:
        weight[:, -1] = 1
    fundamental, nyquist = 2 * np.pi / side_rad, np.pi * size / side_rad
    edges = np.geomspace(fundamental * (1 - 1e-9), nyquist * (1 + 1e-9), bins + 1)
    ring = np.digitize(ell, edges) - 1
    kept = (ring >= 0) & (ring < bins)
    counts = np.bincount(ring[kept], weight[kept], bins)
    edges = np.delete(edges, np.flatnonzero(counts[:-1] == 0) + 1) if (counts == 0).any() else edges
    ring = np.digitize(ell, edges) - 1
    count = len(edges) - 1
    kept = (ring >= 0) & (ring < count)
    total = np.bincount(ring[kept], weight[kept], count)
    mean_ell = np.bincount(ring[kept], (weight * ell)[kept], count) / total
    modes = np.fft.rfft2(field)
    power = np.abs(modes) ** 2 if other is None else (modes * np.fft.rfft2(other).conj()).real
    power *= (side_rad / size**2) ** 2
    onto_rings = np.zeros((kept.sum(), count))
    onto_rings[np.arange(kept.sum()), ring[kept]] = weight[kept]
    return mean_ell, power[..., kept] @ onto_rings / total


def shape_noise(sigma_e: float, galaxies_per_arcmin2: float, pixel_arcmin: float) -> float:
    """Return a pixel's shape noise sigma_e / sqrt(2 n A) (Van Waerbeke 2000, eq. 12)."""
    return sigma_e / np.sqrt(2 * galaxies_per_arcmin2 * pixel_arcmin**2)


@lru_cache(maxsize=1)  # maps of one cosmology are drawn one after another
def spectra_on_modes(
    cosmology: Cosmology, size: int, side_rad: float, source_redshifts: tuple[float, ...]
) -> np.ndarray:
    """Auto and cross spectra on the modes of a patch, [bins, bins, size, size // 2 + 1]; 0 at ell = 0."""
    ell = multipole_grid(size, side_rad)
    low, high = 2 * np.pi / side_rad, ell.max()
    table = np.geomspace(low * 0.999, high * 1.001, 96)
    bins = len(source_redshifts)
    spectra = np.zeros((bins, bins, *ell.shape))
    for i in range(bins):
        for j in range(i, bins):
            curve = np.log(convergence_power(cosmology, table, source_redshifts[i], source_redshifts[j]))
            spectra[i, j][ell > 0] = np.exp(np.interp(np.log(ell[ell > 0]), np.log(table), curve))
            spectra[j, i] = spectra[i, j]
    return spectra


def _correlated_fields(spectra: np.ndarray, size: int, side_rad: float, rng: np.random.Generator) -> np.ndarray:
    """Gaussian fields [bins, size, size] with spectra [bins, bins, size, size // 2 + 1] in steradian."""
    white = np.fft.rfft2(rng.standard_normal((len(spectra), size, size)))
    root = lower_roots(spectra)
    shaped = np.stack([sum(root[i, j] * white[j] for j in range(i + 1)) for i in range(len(spectra))])
    return np.fft.irfft2(shaped * size / side_rad, s=(size, size))


def lower_roots(spectra: np.ndarray) -> np.ndarray:
    """Return the lower triangular L of every mode, L L^T = spectra [bins, bins, ...].

    `numpy.linalg.cholesky` rejects a negative eigenvalue, which a log-normal field has at ell = 0. Here a negative
    power counts as 0 and a correlation beyond 1 as 1, so that no auto spectrum changes.
    """
    rest, root = spectra.copy(), np.zeros_like(spectra)
    for j in range(len(spectra)):
        most = np.sqrt(np.clip(np.einsum("iixy->ixy", rest)[j:], 0, None))
        root[j, j] = most[0]
        below = np.divide(rest[j + 1 :, j], most[0], out=np.zeros_like(most[1:]), where=most[0] > 0)
        root[j + 1 :, j] = np.clip(below, -most[1:], most[1:])
        rest[j + 1 :, j + 1 :] -= root[j + 1 :, None, j] * root[None, j + 1 :, j]
    return root
