"""Readers for observed and simulated maps in local files: HEALPix mass maps, FITS images, Quijote density cubes.

Nothing is downloaded. Unobserved pixels are False in the mask and 0 in the map. Files mark them with UNSEEN, with
the header's BAD_DATA value, or with the TNULL value of an integer column.

- HEALPix: maps of the sphere like the DES Y3 mass maps (Jeffrey et al. 2021, arXiv 2105.13539), cut into flat patches
  in gnomonic projection.
- FITS images: flat maps, used unchanged.
- Quijote: cubes `df_m_{N}_{CIC|PCS}_z={Z}.npy` of the matter density (Villaescusa-Navarro et al. 2020, arXiv
  1909.05273), projected in slabs. These are density contrasts without a lensing kernel, NOT convergence, so models
  trained on convergence do not apply to them.

healpy and astropy are imported inside functions; the extra `cosmology` installs them.
"""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ...io.usage import validate_extra


HEALPIX_SOURCE = "get the DES Y3 mass maps from the data release pages of the Dark Energy Survey (arXiv 2105.13539)"
QUIJOTE_SOURCE = (
    "get Quijote cubes from 3D_cubes/ of its New York storage, by Globus or Binder "
    "(quijote-simulations.readthedocs.io, Data access)"
)
QUIJOTE_BOX = 1000.0  # side of all Quijote boxes in Mpc/h
MAX_SIDE_DEG = 30.0  # maximum side; larger gnomonic patches stretch areas in their corners by more than 25%
MAX_ZEROS = 0.01  # maximum fraction of exact zeros in a map without a mask; with more, sky is probably missing
ORDERINGS = {"RING": "RING", "NEST": "NESTED", "NESTED": "NESTED"}
COORDINATES = re.compile("(?P<galactic>G)|(?P<equatorial>C|Q|EQ|ICRS|FK5|J2000)|(?P<ecliptic>E)")  # by COORDSYS
PIXEL_NAMES = ("PIX", "HPIX", "HPX", "IPIX", "HEALPIX")  # possible names of the pixel index column
MOST = 1e20  # maximum absolute value of a map; larger values mark missing pixels
UNSEEN = -1.6375e30  # value that marks unobserved pixels in HEALPix files
QUIJOTE_NAME = re.compile(r"df_m_(\d+)_([A-Z]+)_z=([0-9.]+)\.npy")


@dataclass(frozen=True)
class SkyPatches:
    """Flat patches cut from maps of the sphere; a margin makes each side 2 * margin pixels longer.

    Attributes:
        maps: float32 [patches, channels, size, size] in the unit of the file. Rows run from south to north, columns
            from west to east.
        mask: bool [patches, size, size], True where observed in all channels.
        centres: float64 [patches, 2], longitude and latitude in degrees, in the coordinates of the file.
        skipped: number of patches with too few observed pixels.
    """

    maps: np.ndarray
    mask: np.ndarray
    centres: np.ndarray
    skipped: int

    @property
    def observed(self) -> np.ndarray:
        """Return the fraction of observed pixels in each patch, float64 [patches]."""
        return self.mask.mean((1, 2))


@dataclass(frozen=True)
class QuijoteCube:
    """Memory-mapped density cube [N, N, N]; `mean` is the mean density, or 0 if the values are density contrast."""

    values: np.ndarray
    mean: float
    scheme: str
    redshift: float

    def contrast(self, start: int, stop: int, axis: int) -> np.ndarray:
        """Return the density contrast averaged over the cells `start` to `stop` of an axis, float32 [N, N]."""
        slab = np.take(self.values, range(start, stop), axis).mean(axis, dtype=np.float64)
        return (slab / self.mean - 1 if self.mean else slab).astype(np.float32)


# ---- HEALPix ----


def read_healpix_patches(
    paths: str | Path | Sequence[str | Path],
    mask: str | Path | None = None,
    *,
    side_deg: float = 5.0,
    size: int = 64,
    margin: int = 0,
    centres: Sequence[tuple[float, float]] | None = None,
    count: int | None = None,
    min_observed: float = 0.5,
    field: int = 0,
) -> SkyPatches:
    """Cut flat patches from HEALPix maps.

    Each patch pixel is sampled on a grid at least twice as fine as the HEALPix map. Its value is the mean of the
    nearest observed HEALPix pixels, and it counts as observed if at least half of its grid points are. Patch pixels
    smaller than a HEALPix pixel repeat its value: nothing is interpolated, so the noise does not change.

    Args:
        paths: one file, or one per channel, all with the same resolution. The first HEALPix table of each is read.
        mask: a HEALPix file, above 0 where observed; None if all pixels with a value are observed.
        side_deg: side of a patch through its middle. size: pixels per side.
        margin: number of additional pixels beyond each edge; margins of neighboring patches overlap.
        centres: (longitude, latitude) in degrees; None tiles the sky in strips, almost without overlap.
        count: maximum number of patches, from south to north.
        min_observed: minimum fraction of observed pixels; other patches are skipped, or rejected if in `centres`.
        field: index of the map in each file.

    Raises ValueError for an invalid file or mask, non-finite observed pixels, or too little observed sky.
    """
    widest = MAX_SIDE_DEG * size / max(size + 2 * margin, 1)
    if not 0 < side_deg <= widest:
        limit = f"{widest:g} with a margin of {margin} pixels around {size}"
        raise ValueError(f"side_deg={side_deg}: must be above 0 and at most {limit}, because the projection is flat")
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    sky, observed = _read_sky(paths, mask, field)
    found: list[tuple] = []
    skipped = 0
    for centre in _tiles(side_deg) if centres is None else centres:
        pixels = _covered(len(observed), centre, side_deg, size, margin)
        share = observed[pixels].mean((1, 3))
        seen = share >= 0.5
        middle = seen[margin : margin + size, margin : margin + size]
        least = min(seen.mean(), middle.mean())
        if least >= min_observed:
            maps = [np.divide(one[pixels].mean((1, 3)), share, out=np.zeros_like(share), where=seen) for one in sky]
            found.append((np.array(maps, np.float32), seen, centre))
        elif centres is not None:
            raise ValueError(
                f"min_observed={min_observed:g}: only {least:.0%} of the patch at longitude {centre[0]:g}, latitude "
                f"{centre[1]:g} is observed; choose another center or lower min_observed"
            )
        else:
            skipped += 1
        if len(found) == count:
            break
    if not found:
        raise ValueError(
            f"min_observed={min_observed:g}: every patch of {side_deg:g} degrees in {paths[0]} has less observed "
            "sky; use smaller patches or lower min_observed"
        )
    maps, seen, places = map(np.array, zip(*found))
    return SkyPatches(maps, seen, places.astype(float), skipped)


def _read_sky(paths: list, mask: str | Path | None, field: int) -> tuple[np.ndarray, np.ndarray]:
    """Return maps [channels, pixels] in RING order, 0 where not observed, and the mask of observed pixels [pixels]."""
    files = [*paths, *([] if mask is None else [mask])]
    coordinates, found = zip(*[_read_healpix(path, 0 if path is mask else field) for path in files])
    known = {words: str(path) for path, words in zip(files, coordinates) if words}
    if len(known) > 1:
        raise ValueError(f"COORDSYS: files have different coordinate systems {known}; rotate them to the same one")
    read, masks = list(found[: len(paths)]), list(found[len(paths) :])
    if len(sizes := sorted({len(values) for values in read + masks})) > 1:
        raise ValueError(f"{paths[0]}: files and mask must have the same resolution, but have {sizes} pixels")
    sky = np.stack(read)
    observed = ~np.isclose(sky, UNSEEN, rtol=1e-5, atol=0).any(0)
    if masks:
        observed &= masks[0] > 0  # excludes 0 and UNSEEN, which is negative
    elif (zeros := (sky[:, observed] == 0).all(0).mean() if observed.any() else 0) > MAX_ZEROS:
        looks = f"{zeros:.0%} of the pixels are exactly 0, which looks like unobserved sky"
        raise ValueError(f"{paths[0]}: {looks}; pass the map's mask as well")
    if not observed.any():
        raise ValueError(f"the mask of {paths[0]} is empty: no pixel is observed")
    for path, values in zip(paths, sky):
        if bad := np.count_nonzero(~(np.abs(values[observed]) < MOST)):
            raise ValueError(f"{path}: {bad} observed pixels are NaN or above {MOST:g}; exclude them with the mask")
    return np.where(observed, sky, 0).astype(np.float32), observed


def _read_healpix(path: str | Path, field: int) -> tuple[str | None, np.ndarray]:
    """Read the coordinate system and one map of a HEALPix file, in RING order with UNSEEN for missing pixels."""
    healpy = _import_optional("healpy")
    with _open_fits(path, HEALPIX_SOURCE) as hdus:
        table = next(filter(_is_healpix, hdus), None)
        if table is None:
            raise ValueError(
                f"{path} has {_list_hdus(hdus)}; expected a HEALPix map, which is a table with ORDERING in its header"
            )
        ordering, columns = _header_word(table, "ORDERING"), table.columns
        if ordering not in ORDERINGS:
            raise ValueError(f"{path}: ORDERING={ordering!r}: must be one of {', '.join(ORDERINGS)}; convert the map")
        number = field + _has_pixel_numbers(table)
        if number >= len(columns):
            raise ValueError(f"field={field}: no such map in {path}; its columns, from 0: {columns.names}")
        try:
            values = np.ravel(table.data.field(number)).astype(np.float64)
            values[_missing_values(table, number)] = UNSEEN
            pixels = np.ravel(table.data.field(0)) if number > field else np.arange(len(values))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: cannot be read as a HEALPix map: {error}") from error
        stated = COORDINATES.match(_header_word(table, "COORDSYS"))
        nside = table.header.get("NSIDE", float(np.sqrt(len(values) / 12)))
    is_nested = ORDERINGS[ordering] == "NESTED"
    if not isinstance(nside, int | float) or not healpy.isnsideok(nside, nest=is_nested):
        raise ValueError(f"{path}: NSIDE={nside!r}: must be {'a power of 2' if is_nested else 'an integer'}")
    nside, total = int(nside), healpy.nside2npix(int(nside))
    if number == field and len(values) != total:
        raise ValueError(f"{path}: {len(values)} pixels without pixel indices; NSIDE={nside} requires {total}")
    if pixels.dtype.kind not in "iu":
        raise ValueError(f"{path}: its first column has dtype {pixels.dtype}; expected integer pixel indices")
    for pixel in pixels[(pixels < 0) | (pixels >= total)][:1]:
        raise ValueError(f"{path}: pixel {pixel}: must be in [0, {total - 1}] for NSIDE={nside}")
    if len(np.unique(pixels)) < len(pixels):
        raise ValueError(f"{path}: pixel indices are repeated; expected one value per pixel")
    sky = np.full(total, UNSEEN)
    sky[healpy.nest2ring(nside, pixels) if is_nested else pixels] = values
    return stated and stated.lastgroup, sky


def _header_word(hdu: Any, name: str) -> str:
    return str(hdu.header.get(name, "")).strip().upper()


def _has_pixel_numbers(table: Any) -> bool:
    """Check whether the first column contains pixel indices, as in a partial-sky map."""
    names, scheme = table.columns.names, _header_word(table, "INDXSCHM")
    if len(names) > 1 and names[0].upper().startswith(PIXEL_NAMES):
        return True  # the column's name takes precedence over the header
    return scheme == "EXPLICIT" or (scheme != "IMPLICIT" and _header_word(table, "OBJECT") == "PARTIAL")


def _missing_values(table: Any, number: int) -> np.ndarray:
    """Return bool [values], True where a column's value is BAD_DATA or its raw value is TNULL."""
    stored = np.ravel(table.data.view(np.ndarray)[table.columns.names[number]])
    bad = _bad_data(np.ravel(table.data.field(number)), table.header)
    return bad if table.columns[number].null is None else bad | (stored == table.columns[number].null)


def _bad_data(values: np.ndarray, header: Any) -> np.ndarray:
    with suppress(ValueError):
        return np.isclose(values, float(str(header.get("BAD_DATA"))), rtol=1e-5, atol=0)
    return np.zeros(values.shape, bool)


def _tiles(side_deg: float) -> Iterator[tuple[float, float]]:
    """Yield the centers of patches that tile the sphere in strips of constant latitude, from south to north."""
    strips = int(180 // side_deg)
    for latitude in (np.arange(strips) - (strips - 1) / 2) * side_deg:
        # Patches are closest to each other at the edge nearer the pole.
        across = 360 * np.cos(np.radians(min(abs(latitude) + side_deg / 2, 90)))
        tiles = max(int(across // side_deg), 1)
        for longitude in np.arange(tiles) * 360 / tiles:
            yield float(longitude), float(latitude)


def _covered(sky_pixels: int, centre: tuple[float, float], side_deg: float, size: int, margin: int) -> np.ndarray:
    """Return the HEALPix index at each subpixel of a patch, [row, subrow, column, subcolumn]."""
    healpy = _import_optional("healpy")
    nside = healpy.npix2nside(sky_pixels)
    finer = max(1, int(np.ceil(2 * side_deg / size / healpy.nside2resol(nside, arcmin=True) * 60)))
    pixels = healpy.vec2pix(nside, *gnomonic_grid(centre, side_deg, size * finer, margin * finer))
    wide = size + 2 * margin
    return pixels.reshape(wide, finer, wide, finer)


def gnomonic_grid(centre: tuple[float, float], side_deg: float, size: int, margin: int = 0) -> np.ndarray:
    """Return unit vectors [3, rows, columns] of a patch and its margin in gnomonic projection.

    Rows run north, columns east. `centre` is (longitude, latitude) and `side_deg` the middle row's angle, in degrees.
    """
    longitude, latitude = np.radians(centre)
    if not abs(latitude) <= np.pi / 2 or not np.isfinite(longitude):
        raise ValueError(f"centre={tuple(centre)}: must be (longitude, latitude) in degrees")
    half = np.tan(np.radians(side_deg / 2))
    offset = ((np.arange(-margin, size + margin) + 0.5) / size * 2 - 1) * half
    up = np.array([np.cos(latitude) * np.cos(longitude), np.cos(latitude) * np.sin(longitude), np.sin(latitude)])
    east = np.array([-np.sin(longitude), np.cos(longitude), 0])
    north = np.cross(up, east)
    vectors = up[:, None, None] + east[:, None, None] * offset + north[:, None, None] * offset[:, None]
    return vectors / np.linalg.norm(vectors, axis=0)


# ---- FITS images ----


def read_fits_image(path: str | Path, hdu: int | None = None, mask: np.ndarray | None = None) -> np.ndarray:
    """Read a flat map, float32 [channels, size, size], in the unit of the file.

    Args:
        hdu: index of the HDU with the image; None for the first image.
        mask: bool [size, size], True where observed; other pixels become 0.
    """
    with _open_fits(path) as hdus:
        images = [number for number, one in enumerate(hdus) if one.is_image and one.header.get("NAXIS")]
        chosen = (images[0] if images else None) if hdu is None else hdu
        if chosen not in images:
            raise ValueError(f"{path} has no image{'' if hdu is None else f' in HDU {hdu}'}, only {_list_hdus(hdus)}")
        image = np.asarray(hdus[chosen].data).astype(np.float32)
        image[_bad_data(image, hdus[chosen].header)] = np.nan
    image = image[None] if image.ndim == 2 else image
    if image.ndim != 3 or image.shape[1] != image.shape[2]:
        raise ValueError(f"{path} has shape {image.shape}; expected (size, size) or (channels, size, size)")
    if mask is not None:
        if mask.shape != image.shape[1:]:
            raise ValueError(f"the mask of {path} has shape {mask.shape}; expected {image.shape[1:]}")
        if not mask.any():
            raise ValueError(f"the mask of {path} is empty: no pixel is observed")
        image = np.where(mask, image, np.float32(0))
    if bad := np.count_nonzero(~(np.abs(image) < MOST)):
        raise ValueError(
            f"{path}: {bad} of {image.size} pixels are NaN, infinite or missing; exclude them with a mask"
        )
    return image


def is_healpix(path: str | Path) -> bool:
    """Check whether a FITS file contains a map of the sphere rather than an image."""
    with _open_fits(path, HEALPIX_SOURCE) as hdus:
        return any(map(_is_healpix, hdus))


def _is_healpix(hdu: Any) -> bool:
    return not hdu.is_image and ("ORDERING" in hdu.header or _header_word(hdu, "PIXTYPE") == "HEALPIX")


@contextmanager
def _open_fits(path: str | Path, source: str = "") -> Iterator[Any]:
    """Open a FITS file. Raises ValueError for a file that astropy cannot read."""
    fits = _import_optional("astropy.io.fits")
    path = _existing(path, source)
    try:
        with warnings.catch_warnings(), fits.open(path) as hdus:
            warnings.simplefilter("ignore")  # astropy warns about truncated files, then raises
            yield hdus
    except (OSError, EOFError, TypeError) as error:
        raise ValueError(f"{path}: not a FITS file, or truncated: {error}") from error


def _list_hdus(hdus: Iterable[Any]) -> str:
    return ", ".join(f"HDU {number}: {type(hdu).__name__}" for number, hdu in enumerate(hdus))


# ---- Quijote ----


def read_quijote_cube(path: str | Path) -> QuijoteCube:
    """Open and validate a cube of density contrast (mean 0) or of density (later divided by its mean)."""
    path = _existing(path, QUIJOTE_SOURCE)
    name = QUIJOTE_NAME.fullmatch(path.name)
    if name is None or name[2] not in ("CIC", "PCS"):
        raise ValueError(f"{path}: a Quijote cube must be named df_m_N_CIC_z=Z.npy or df_m_N_PCS_z=Z.npy")
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path}: not a readable array, or truncated: {error}") from error
    cells = int(name[1])
    if values.shape != (cells,) * 3 or values.dtype.kind != "f":
        raise ValueError(f"{path} is {values.dtype} {values.shape}; its name requires a float array {(cells,) * 3}")
    least, mean = float(values.min()), float(values.mean(dtype=np.float64))  # NaN if any cell is NaN
    is_contrast = abs(mean) < 1e-3 and least >= -1.001
    if not is_contrast and not (least >= 0 and mean > 0):
        raise ValueError(
            f"{path}: mean {mean:.4g} and minimum {least:.4g}; expected density contrast (mean 0, at least -1) or "
            "density (positive)"
        )
    return QuijoteCube(values, 0.0 if is_contrast else mean, name[2], float(name[3]))


def quijote_maps(cube: QuijoteCube, slab_mpc: float) -> np.ndarray:
    """Project slabs of a cube to maps, along each of the three axes.

    Args:
        slab_mpc: thickness of a slab in Mpc/h: an integer number of cells that divides the box evenly.

    Returns:
        Density contrast (not convergence), float32 [3 * slabs, 1, N, N], ordered by axis, then by slab. Slabs along
        different axes overlap.
    """
    cells = len(cube.values)
    thick = slab_mpc * cells / QUIJOTE_BOX
    depth = round(thick)
    if not (depth >= 1 and abs(thick - depth) < 1e-6 and cells % depth == 0):
        fitting = [f"{QUIJOTE_BOX / slabs:g}" for slabs in range(1, cells + 1) if cells % slabs == 0]
        raise ValueError(f"slab_mpc={slab_mpc:g}: must span whole cells of the box; use one of {', '.join(fitting)}")
    slabs = [cube.contrast(start, start + depth, axis) for axis in range(3) for start in range(0, cells, depth)]
    return np.array(slabs)[:, None]


# ---- shared ----


def _existing(path: str | Path, source: str = "") -> Path:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist, and cannot be downloaded{'; ' + source if source else ''}")
    return path


def _import_optional(name: str) -> Any:
    """Import healpy or astropy's FITS module."""
    package = name.partition(".")[0]
    validate_extra("cosmology", f"reading this file needs {package}", package)
    return import_module(name)
