"""Matter density in second-order Lagrangian perturbation theory (2LPT), and its convergence along a light cone.

Particles on a cubic lattice q move to x = q - D1 grad phi1 + D2 grad phi2, with laplace phi1 = delta (the linear
density contrast today), laplace phi2 = sum over i > j of phi1_ii phi1_jj - phi1_ij^2, D1 the growth factor and
D2 = -3/7 D1^2 Omega_m(z)^(-1/143) (Bouchet et al. 1995, A&A 296, 575; Scoccimarro 1998, MNRAS 299, 1097, appendix D;
Jenkins 2010, MNRAS 403, 1859). The convergence uses the Born approximation on a flat sky: density layers are weighted
with the lensing kernel, without deflection of the rays.

Copies of one periodic box are stacked along the line of sight, each rotated, mirrored and shifted at random, and each
particle is displaced by the growth at its own redshift. Omitted: structure below the lattice spacing, waves longer
than the box, continuity between copies, and virialized halos, so there is too little power on small scales.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

from .fields import Cosmology, lensing_kernel
from .settings import MapSettings


LAYER_MPC = 32.0  # maximum thickness of a layer in Mpc/h; halving it changes the power of the maps by about 1%


@dataclass(frozen=True)
class LptBox:
    """Displacements of the particles in a periodic box. A particle is at q + D1 * first + D2 * second.

    `side` is in Mpc/h; `first` = -grad phi1 and `second` = grad phi2 are in Mpc/h, float32 [3, grid, grid, grid].
    """

    side: float
    first: np.ndarray
    second: np.ndarray

    @property
    def grid(self) -> int:
        return self.first.shape[-1]


def linear_density(cosmology: Cosmology, side: float, grid: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a Gaussian density contrast [grid] * 3 with today's linear power in a box of `side` Mpc/h."""
    white = np.fft.rfftn(rng.standard_normal((grid, grid, grid), dtype=np.float32))
    k = np.sqrt(sum(component**2 for component in _wave_numbers(grid, side)))
    # Interpolating is cheaper than evaluating the spectrum at every mode.
    table = np.geomspace(np.pi / side, 2 * k.max(), 1024)
    amplitude = np.sqrt(cosmology.linear_power(table) * (grid / side) ** 3)
    scale = np.exp(np.interp(np.log(np.maximum(k, table[0])), np.log(table), np.log(amplitude))).astype(np.float32)
    scale[0, 0, 0] = 0  # the mean density contrast is 0
    return np.fft.irfftn(white * scale, s=(grid, grid, grid), axes=(0, 1, 2))


def displace(delta: np.ndarray, side: float) -> LptBox:
    """Compute first- and second-order displacements from today's linear density contrast [grid, grid, grid]."""
    waves = _wave_numbers(delta.shape[0], side)
    squared = sum(component**2 for component in waves)
    squared[0, 0, 0] = 1  # avoids 0 / 0; the mean causes no displacement
    potential = -np.fft.rfftn(delta) / squared

    def derivative(field: np.ndarray, *axes: int) -> np.ndarray:
        for axis in axes:
            field = field * (1j * waves[axis])
        return np.fft.irfftn(field, s=delta.shape, axes=(0, 1, 2))

    xx, yy, zz = (derivative(potential, axis, axis) for axis in range(3))
    source = xx * yy + yy * zz + zz * xx
    for axes in ((0, 1), (1, 2), (2, 0)):
        source -= derivative(potential, *axes) ** 2
    second_potential = -np.fft.rfftn(source) / squared
    first, second = (
        np.stack([derivative(field, axis) for axis in range(3)]) for field in (-potential, second_potential)
    )
    return LptBox(side, first, second)


def second_growth(cosmology: Cosmology, z: np.ndarray | float) -> np.ndarray:
    """Return D2 = -3/7 D1^2 Omega_m(z)^(-1/143)."""
    matter = cosmology.omega_m * (1 + np.asarray(z, float)) ** 3 / cosmology.hubble(z) ** 2
    return -3 / 7 * cosmology.growth(z) ** 2 * matter ** (-1 / 143)


def lpt_convergence(cosmology: Cosmology, settings: MapSettings, rng: np.random.Generator) -> np.ndarray:
    """Draw convergence maps, float32 [bins, size, size], along a light cone through copies of a 2LPT box."""
    validate_width(cosmology, settings.box_mpc, settings)
    box = displace(linear_density(cosmology, settings.box_mpc, settings.box_grid, rng), settings.box_mpc)
    farthest = float(cosmology.comoving_distance(max(settings.source_redshifts)))
    redshifts = np.linspace(0, max(settings.source_redshifts), 512)
    light_cone = (cosmology.comoving_distance(redshifts), redshifts)
    layers = int(np.ceil(box.side / LAYER_MPC))
    thickness = box.side / layers
    angles = (np.arange(settings.size) + 0.5 - settings.size / 2) * (settings.side_rad / settings.size)
    kappa = np.zeros((len(settings.source_redshifts), settings.size, settings.size))
    for start in np.arange(0, farthest, box.side):
        planes = _rotated_layers(cosmology, box, start, layers, light_cone, rng)
        mirrors, origin = rng.choice((-1, 1), 2), rng.uniform(0, box.grid, 2)
        for number, plane in enumerate(planes):
            chi = start + (number + 0.5) * thickness
            if chi >= farthest:
                break
            z = np.interp(chi, *light_cone)
            rows, columns = ((angles * chi * (box.grid / box.side)) * mirrors[:, None]) + origin[:, None]
            contrast = _sample(plane, rows, columns)
            for channel, source in enumerate(settings.source_redshifts):
                kappa[channel] += lensing_kernel(cosmology, z, source) * thickness * contrast
    return kappa.astype(np.float32)


def _rotated_layers(
    cosmology: Cosmology,
    box: LptBox,
    start: float,
    layers: int,
    light_cone: tuple[np.ndarray, np.ndarray],
    rng: np.random.Generator,
) -> np.ndarray:
    """Project a randomly rotated box, placed with its near face at `start` Mpc/h, onto layers of density contrast.

    `light_cone` is a table of comoving distances and their redshifts. Returns [layers, grid, grid].
    """
    axes = rng.permutation(3)
    cells = box.grid / box.side
    # Position of each lattice plane along the line of sight, in cells from the near face, and its redshift.
    depth = (np.arange(box.grid) + rng.uniform(0, box.grid)) % box.grid
    z = np.interp(start + depth / cells, *light_cone)
    growths = [_along(0, factor * cells) for factor in (cosmology.growth(z), second_growth(cosmology, z))]
    lattice, depth = np.arange(box.grid), _along(0, depth)
    counts = np.zeros((layers, box.grid, box.grid), np.float32)
    step = max(1, 2**15 // box.grid**2)  # about 32,000 particles at a time, so the arrays fit in the CPU cache
    for part in (slice(first, first + step) for first in range(0, box.grid, step)):
        depths, rows, columns = (
            box.first[axis].transpose(axes)[part] * growths[0][part]
            + box.second[axis].transpose(axes)[part] * growths[1][part]
            for axis in axes
        )
        layer = np.floor((depths + depth[part]) * np.float32(layers / box.grid)).astype(int) % layers
        _deposit(counts, layer, [rows + _along(1, lattice), columns + _along(2, lattice)])
    return _sharpen(counts / (box.grid / layers) - 1)


def _deposit(counts: np.ndarray, layer: np.ndarray, positions: list[np.ndarray]) -> None:
    """Add particles to `counts` [layers, grid, ...] by cloud-in-cell over all axes except the first.

    `layer` is the index along the first axis; `positions` are the periodic coordinates in cells along the others.
    """
    grid = counts.shape[-1]
    floors = [np.floor(position) for position in positions]
    shares = [position - floor for position, floor in zip(positions, floors)]
    lows = [floor.astype(int) % grid for floor in floors]
    corners = [((low, 1 - share), ((low + 1) % grid, share)) for low, share in zip(lows, shares)]
    for corner in product(*corners):
        index, weight = layer, np.float32(1)
        for place, share in corner:
            index, weight = index * grid + place, weight * share
        np.add.at(counts.reshape(-1), index.ravel(), weight.ravel())


def _sharpen(planes: np.ndarray) -> np.ndarray:
    """Undo the blur from the cloud-in-cell deposit and from the interpolation; both multiply modes by squared sincs.

    Modes beyond the Nyquist circle, where noise would be amplified, are dropped.
    """
    grid = planes.shape[-1]
    rows, columns = np.fft.fftfreq(grid)[:, None], np.fft.rfftfreq(grid)
    blur = (np.sinc(rows) * np.sinc(columns)) ** 4
    return np.fft.irfft2(np.fft.rfft2(planes) * (np.hypot(rows, columns) <= 0.5) / blur, s=(grid, grid))


def _sample(plane: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Interpolate a periodic plane bilinearly on the grid of `rows` and `columns` (in cells)."""
    for axis, position in enumerate((rows, columns)):
        low = np.floor(position).astype(int)
        share = np.expand_dims(position - low, 1 - axis)
        near, far = (plane.take(index, axis, mode="wrap") for index in (low, low + 1))
        plane = near + (far - near) * share
    return plane


def _along(axis: int, values: np.ndarray) -> np.ndarray:
    """Convert a vector to float32 and place it along one of three axes, for broadcasting."""
    return np.expand_dims(values.astype(np.float32), tuple(other for other in range(3) if other != axis))


def _wave_numbers(grid: int, side: float) -> tuple[np.ndarray, ...]:
    """Return the components of k (h/Mpc) of the `numpy.fft.rfftn` modes, float32, in broadcastable shapes."""
    full, half = np.fft.fftfreq(grid, side / grid / (2 * np.pi)), np.fft.rfftfreq(grid, side / grid / (2 * np.pi))
    return _along(0, full), _along(1, full), _along(2, half)


def validate_width(cosmology: Cosmology, side: float, settings: MapSettings) -> None:
    """Reject a box (side in Mpc/h) that is narrower than the patch at the farthest source.

    Distances in Mpc/h are largest for the lowest omega_m, so it is enough to validate the lower end of the prior.
    """
    farthest = max(settings.source_redshifts)
    width = float(cosmology.comoving_distance(farthest)) * settings.side_rad
    if width > side:
        raise ValueError(
            f"box_mpc={side}: narrower than the patch of side_deg={settings.side_deg} at the farthest source "
            f"(redshift {farthest}), which is {width:.1f} Mpc/h wide for omega_m={cosmology.omega_m}; set box_mpc to "
            f"at least {np.ceil(width):.0f} (and scale box_grid to keep the resolution), or use a smaller patch, "
            "nearer sources, or a higher lower bound for omega_m"
        )
