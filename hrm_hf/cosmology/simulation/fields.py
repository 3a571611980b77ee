"""A flat Lambda-CDM universe, and Gaussian and log-normal convergence on a periodic flat patch of sky, in numpy.

Units: distances in comoving Mpc/h, wave numbers k in h/Mpc, power spectra in (Mpc/h)^3, angles in radians, angular
power spectra in steradians. The model has no neutrinos, no background radiation, and only linear growth: nonlinearity
enters through the maps (log-normal, 2LPT), not through P(k).

Sources: Eisenstein & Hu 1998, ApJ 496, 605 (astro-ph/9709112), eqs. 2-24 for the transfer function; Carroll, Press &
Turner 1992 for growth; Kaiser 1992 and LoVerde & Afshordi 2008 for Limber's approximation; Coles & Jones 1991 and
Xavier et al. 2016 (FLASK, arXiv 1602.08503), section 3, for log-normal fields.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np


ARCMIN = np.pi / 180 / 60  # radians
LOGNORMAL_SHIFT = 0.4  # fraction of |empty-beam convergence| that reproduces the skewness of ray-traced maps
HUBBLE_DISTANCE = 2997.92458  # c / H0 in Mpc/h
CMB_TEMPERATURE = 2.7255  # K
PRIOR = {"omega_m": (0.1, 0.5), "sigma_8": (0.6, 1.0)}  # default bounds of the flat prior
# The integrands below are smooth, so 64 Gauss-Legendre nodes on [0, 1] are accurate to about 1e-10.
_NODES, _WEIGHTS = (np.polynomial.legendre.leggauss(64)[0] + 1) / 2, np.polynomial.legendre.leggauss(64)[1] / 2


@dataclass(frozen=True)
class Cosmology:
    """A flat Lambda-CDM universe.

    Args:
        omega_m: matter density divided by the critical density today. omega_b: the same for baryons.
        sigma_8: rms linear density contrast in spheres of 8 Mpc/h today.
        h: Hubble constant in units of 100 km/s/Mpc. n_s: slope of the primordial spectrum.
    """

    omega_m: float
    sigma_8: float
    h: float = 0.7
    omega_b: float = 0.046
    n_s: float = 0.96

    def __post_init__(self):
        ends = {
            "omega_m": (0, 1),
            "sigma_8": (0, np.inf),
            "h": (0, np.inf),
            "omega_b": (0, 1),
            "n_s": (-np.inf, np.inf),
        }
        for name, (low, high) in ends.items():
            value = getattr(self, name)
            if not (low < value <= high and np.isfinite(value)):  # this form also rejects NaN
                raise ValueError(f"{name}={value}: must be in ({low}, {high}] and finite")
        if self.omega_b >= self.omega_m:
            raise ValueError(f"omega_b={self.omega_b}: must be below omega_m={self.omega_m}, which includes baryons")

    def hubble(self, z: np.ndarray | float) -> np.ndarray:
        """Return H(z) / H0."""
        return np.sqrt(self.omega_m * (1 + np.asarray(z, float)) ** 3 + 1 - self.omega_m)

    def comoving_distance(self, z: np.ndarray | float) -> np.ndarray:
        """Return the comoving distance in Mpc/h to redshift z >= 0."""
        z = np.asarray(z, float)
        return HUBBLE_DISTANCE * z * (_WEIGHTS / self.hubble(z[..., None] * _NODES)).sum(-1)

    def growth(self, z: np.ndarray | float) -> np.ndarray:
        """Return the linear growth factor, 1 today; D(a) is proportional to H(a) times the integral of (a H)^-3."""
        return self._unnormalized_growth(np.asarray(z, float)) / self._unnormalized_growth(np.zeros(()))

    def _unnormalized_growth(self, z: np.ndarray) -> np.ndarray:
        a = 1 / (1 + z)
        # Substituting a' = a t^2 turns the a'^(3/2) of the early universe into a polynomial in t.
        inner = a[..., None] * _NODES**2
        integrand = (inner * self.hubble(1 / inner - 1)) ** -3.0 * 2 * a[..., None] * _NODES
        return self.hubble(z) * (_WEIGHTS * integrand).sum(-1)

    def transfer(self, k: np.ndarray | float) -> np.ndarray:
        """Return the Eisenstein & Hu 1998 transfer function (with baryon wiggles), 1 for k -> 0; k in h/Mpc."""
        k = np.asarray(k, float)
        return _eisenstein_hu(k * self.h, self.omega_m, self.omega_b, self.h)

    @cached_property
    def _amplitude(self) -> float:
        k = np.geomspace(1e-4, 50, 2048)
        return (self.sigma_8 / _sigma(k, k**self.n_s * self.transfer(k) ** 2, 8.0)) ** 2

    def linear_power(self, k: np.ndarray | float, z: np.ndarray | float = 0.0) -> np.ndarray:
        """Return the linear matter power spectrum in (Mpc/h)^3 at k in h/Mpc; k and z broadcast."""
        k = np.asarray(k, float)
        return self._amplitude * k**self.n_s * self.transfer(k) ** 2 * self.growth(z) ** 2


def lensing_kernel(cosmology: Cosmology, z: np.ndarray, source_redshift: float) -> np.ndarray:
    """Return the weight W in kappa = int W delta dchi, in h/Mpc; 0 behind the source.

    W = 3/2 omega_m (H0/c)^2 (1 + z) chi (chi_s - chi) / chi_s (Bartelmann & Schneider 2001, eq. 6.18).
    """
    chi, source = cosmology.comoving_distance(z), cosmology.comoving_distance(source_redshift)
    prefactor = 1.5 * cosmology.omega_m / HUBBLE_DISTANCE**2
    return prefactor * (1 + np.asarray(z)) * chi * np.clip(1 - chi / source, 0, None)


def empty_beam(cosmology: Cosmology, source_redshift: float) -> float:
    """Return the convergence along a line of sight without matter, which is the minimum (negative) value of kappa."""
    z = source_redshift * _NODES
    dchi = HUBBLE_DISTANCE / cosmology.hubble(z) * source_redshift
    return -float((_WEIGHTS * dchi * lensing_kernel(cosmology, z, source_redshift)).sum())


def convergence_power(
    cosmology: Cosmology, ell: np.ndarray, source_redshift: float, other_redshift: float | None = None
) -> np.ndarray:
    """Return the angular (cross) power spectrum of the convergence at multipoles ell > 0, in steradians.

    Uses Limber's approximation, C(ell) = int W_1 W_2 / chi^2 P((ell + 1/2) / chi, z) dchi, with the linear P.
    """
    other = source_redshift if other_redshift is None else other_redshift
    ell = np.asarray(ell, float)
    z = min(source_redshift, other) * _NODES
    chi = cosmology.comoving_distance(z)
    weight = lensing_kernel(cosmology, z, source_redshift) * lensing_kernel(cosmology, z, other) / chi**2
    weight = weight * _WEIGHTS * HUBBLE_DISTANCE / cosmology.hubble(z) * min(source_redshift, other)
    weight = weight * cosmology.growth(z) ** 2
    k = (ell[..., None] + 0.5) / chi
    table = np.geomspace(k.min(), k.max(), 1024)  # interpolating is cheaper than evaluating the power at every k
    power = np.exp(np.interp(np.log(k), np.log(table), np.log(cosmology.linear_power(table))))
    return (weight * power).sum(-1)


def _sigma(k: np.ndarray, power: np.ndarray, radius: float) -> float:
    """Return the rms contrast in top-hat spheres of `radius`, from a spectrum at logarithmically spaced k."""
    x = k * radius
    window = np.where(x < 1e-2, 1 - x**2 / 10, 3 * (np.sin(x) - x * np.cos(x)) / np.maximum(x, 1e-12) ** 3)
    return np.sqrt(np.trapezoid(power * window**2 * k**3, np.log(k)) / (2 * np.pi**2))


def _eisenstein_hu(k: np.ndarray, omega_m: float, omega_b: float, h: float) -> np.ndarray:
    """Return the transfer function T(k), k in 1/Mpc; equation numbers refer to Eisenstein & Hu 1998."""
    matter, baryons = omega_m * h**2, omega_b * h**2
    share = omega_b / omega_m
    theta = CMB_TEMPERATURE / 2.7
    z_eq = 2.5e4 * matter * theta**-4  # (2)
    k_eq = 7.46e-2 * matter * theta**-2  # (3), 1/Mpc
    b1 = 0.313 * matter**-0.419 * (1 + 0.607 * matter**0.674)  # (4)
    b2 = 0.238 * matter**0.223
    z_drag = 1291 * matter**0.251 / (1 + 0.659 * matter**0.828) * (1 + b1 * baryons**b2)
    r_drag = 31.5 * baryons * theta**-4 * 1e3 / z_drag  # (5)
    r_eq = 31.5 * baryons * theta**-4 * 1e3 / z_eq
    sound = 2 / (3 * k_eq) * np.sqrt(6 / r_eq)  # (6), Mpc
    sound = sound * np.log((np.sqrt(1 + r_drag) + np.sqrt(r_drag + r_eq)) / (1 + np.sqrt(r_eq)))
    k_silk = 1.6 * baryons**0.52 * matter**0.73 * (1 + (10.4 * matter) ** -0.95)  # (7)
    q = k / (13.41 * k_eq)  # (10)
    x = k * sound

    a1 = (46.9 * matter) ** 0.670 * (1 + (32.1 * matter) ** -0.532)  # (11)
    a2 = (12.0 * matter) ** 0.424 * (1 + (45.0 * matter) ** -0.582)
    alpha_c = a1**-share * a2 ** (-(share**3))
    b1 = 0.944 / (1 + (458 * matter) ** -0.708)  # (12)
    b2 = (0.395 * matter) ** -0.0266
    beta_c = 1 / (1 + b1 * ((1 - share) ** b2 - 1))
    mix = 1 / (1 + (x / 5.4) ** 4)  # (18)
    cdm = mix * _pressureless(q, 1.0, beta_c) + (1 - mix) * _pressureless(q, alpha_c, beta_c)  # (17)

    y = (1 + z_eq) / (1 + z_drag)
    root = np.sqrt(1 + y)
    g = y * (-6 * root + (2 + 3 * y) * np.log((root + 1) / (root - 1)))  # (15)
    alpha_b = 2.07 * k_eq * sound * (1 + r_drag) ** -0.75 * g  # (14)
    beta_node = 8.41 * matter**0.435  # (23)
    beta_b = 0.5 + share + (3 - 2 * share) * np.sqrt((17.2 * matter) ** 2 + 1)  # (24)
    with np.errstate(divide="ignore"):
        shifted = x / (1 + (beta_node / x) ** 3) ** (1 / 3)  # equation 22: k times the shifted sound horizon
        suppressed = alpha_b / (1 + (beta_b / x) ** 3) * np.exp(-((k / k_silk) ** 1.4))
    wiggles = np.sinc(shifted / np.pi)
    baryon = (_pressureless(q, 1.0, 1.0) / (1 + (x / 5.2) ** 2) + suppressed) * wiggles  # (21)
    return share * baryon + (1 - share) * cdm  # (16)


def _pressureless(q: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """Evaluate equations 19 and 20 of Eisenstein & Hu 1998."""
    c = 14.2 / alpha + 386 / (1 + 69.9 * q**1.08)
    log = np.log(np.e + 1.8 * beta * q)
    return log / (log + c * q**2)


# ---- fields ----


def multipole_grid(size: int, side_rad: float) -> np.ndarray:
    """Return |ell| of the `numpy.fft.rfft2` modes of a patch, [size, size // 2 + 1]."""
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
    """Draw Gaussian convergence maps with the power spectra of `cosmology`, [bins, size, size]."""
    return _correlated_fields(spectra_on_modes(cosmology, size, side_rad, source_redshifts), size, side_rad, rng)


def lognormal_convergence(
    cosmology: Cosmology,
    size: int,
    side_rad: float,
    rng: np.random.Generator,
    source_redshifts: tuple[float, ...] = (1.0,),
) -> np.ndarray:
    """Draw log-normal convergence, kappa = shift (exp(g - var(g) / 2) - 1), float64 [bins, size, size].

    The Gaussian field g has the correlation ln(1 + xi_kappa / shift^2), so kappa has the power spectra of `cosmology`.
    """
    shifts, spectra, variance = gaussian_under_lognormal(cosmology, size, side_rad, source_redshifts)
    g = _correlated_fields(spectra, size, side_rad, rng)
    return shifts[:, None, None] * np.expm1(g - variance[:, None, None] / 2)


def gaussian_under_lognormal(
    cosmology: Cosmology, size: int, side_rad: float, source_redshifts: tuple[float, ...] = (1.0,)
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute the statistics of the Gaussian field g that `lognormal_convergence` exponentiates.

    Returns:
        The shifts [bins], the spectra of g on the modes [bins, bins, size, size // 2 + 1] in steradians, and the
        variance of g [bins].
    """
    shifts = np.array([-LOGNORMAL_SHIFT * empty_beam(cosmology, z) for z in source_redshifts])
    spectra = spectra_on_modes(cosmology, size, side_rad, source_redshifts)
    modes = size**2 / side_rad**2  # spectrum * modes is the transform of the correlation function on the pixels
    correlation = np.fft.irfft2(spectra * modes, s=(size, size))
    gaussian = gaussian_correlation(correlation, (shifts[:, None] * shifts)[..., None, None])
    variance = np.einsum("iixy->ixy", gaussian)[:, 0, 0]
    # Negative power arises only from rounding and from the finite pixel size.
    return shifts, np.fft.rfft2(gaussian).real / modes, variance


def gaussian_correlation(correlation: np.ndarray, shifts: np.ndarray | float) -> np.ndarray:
    """Return the correlation of the Gaussian fields behind log-normal fields, given the product of their shifts."""
    return np.log1p(correlation / shifts)


def map_power_spectrum(
    field: np.ndarray, side_rad: float, bins: int = 13, other: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Measure the power spectrum of a periodic map in bins of equal width in log(ell) up to Nyquist.

    Args:
        field: [..., size, size], in any unit. other: second field of the same shape, for the cross spectrum.

    Returns:
        Mean multipole [bins] and power [..., bins] in steradians times the square of the unit. Bins without modes are
        merged into the next bin, so there may be fewer than `bins`.
    """
    size = field.shape[-1]
    ell = multipole_grid(size, side_rad)
    weight = np.full(ell.shape, 2.0)  # 2 for a mode and its conjugate, which rfft2 omits
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
    """Return the shape noise of a pixel, sigma_e / sqrt(2 n A) (Van Waerbeke 2000, eq. 12)."""
    return sigma_e / np.sqrt(2 * galaxies_per_arcmin2 * pixel_arcmin**2)


@lru_cache(maxsize=1)  # one cache entry is enough, because maps of the same cosmology are drawn consecutively
def spectra_on_modes(
    cosmology: Cosmology, size: int, side_rad: float, source_redshifts: tuple[float, ...]
) -> np.ndarray:
    """Return auto and cross spectra at the modes of a patch, [bins, bins, size, size // 2 + 1]; 0 at ell = 0."""
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
    """Draw Gaussian fields [bins, size, size] with spectra [bins, bins, size, size // 2 + 1] in steradians."""
    white = np.fft.rfft2(rng.standard_normal((len(spectra), size, size)))
    root = lower_roots(spectra)
    shaped = np.stack([sum(root[i, j] * white[j] for j in range(i + 1)) for i in range(len(spectra))])
    return np.fft.irfft2(shaped * size / side_rad, s=(size, size))


def lower_roots(spectra: np.ndarray) -> np.ndarray:
    """Return the lower triangular L for every mode, such that L L^T = spectra [bins, bins, ...].

    `numpy.linalg.cholesky` fails for negative eigenvalues, which a log-normal field has at ell = 0. Here negative
    power is clipped to 0 and correlations to [-1, 1], which leaves all other auto spectra unchanged.
    """
    rest, root = spectra.copy(), np.zeros_like(spectra)
    for j in range(len(spectra)):
        most = np.sqrt(np.clip(np.einsum("iixy->ixy", rest)[j:], 0, None))
        root[j, j] = most[0]
        below = np.divide(rest[j + 1 :, j], most[0], out=np.zeros_like(most[1:]), where=most[0] > 0)
        root[j + 1 :, j] = np.clip(below, -most[1:], most[1:])
        rest[j + 1 :, j + 1 :] -= root[j + 1 :, None, j] * root[None, j + 1 :, j]
    return root
