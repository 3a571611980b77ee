"""`CosmoMapFeatureExtractor`, which turns sky maps (arrays or files) into `pixel_values`.

Maps are scaled by the mean and standard deviation of the data set, never of a single map, because a map's amplitude
is the signal. Maps are not resized, because the model has learned the angular size of a pixel.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature, FeatureExtractionMixin


STRETCHES = ("linear", "asinh")
FILE_KINDS = (".npy", ".npz", ".fits", ".fits.gz", ".fit")
MOST = 1e20  # larger absolute values mark missing pixels, e.g. HEALPix's UNSEEN = -1.6375e30
MAP_NAMES, MASK_NAMES = ("map", "maps", "kappa"), ("mask", "masks")


class CosmoMapFeatureExtractor(FeatureExtractionMixin):
    """Feature extractor that scales maps with training-set statistics and appends the mask as a channel.

    Args:
        image_size: side of a map in pixels.
        pixel_mean, pixel_std: mean and standard deviation of each map channel over the training set, in the units of
            the maps.
        mask_channel: whether the model has an additional channel for the mask (1: observed, 0: not observed).
        stretch: "linear" for (map - mean) / std, or "asinh" for its asinh, which compresses bright pixels.
    """

    model_input_names = ["pixel_values"]

    def __init__(
        self,
        image_size: int = 64,
        pixel_mean: list[float] | None = None,
        pixel_std: list[float] | None = None,
        mask_channel: bool = False,
        stretch: str = "linear",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.image_size, self.mask_channel, self.stretch = image_size, mask_channel, stretch
        self.pixel_mean = [0.0] if pixel_mean is None else [float(value) for value in pixel_mean]
        self.pixel_std = [1.0] * len(self.pixel_mean) if pixel_std is None else [float(value) for value in pixel_std]
        if len(self.pixel_mean) != len(self.pixel_std):
            raise ValueError(f"pixel_std={self.pixel_std}: must have {len(self.pixel_mean)} entries, like pixel_mean")
        if not np.isfinite(self.pixel_mean).all() or not all(0 < value < np.inf for value in self.pixel_std):
            raise ValueError(f"pixel_mean={self.pixel_mean}, pixel_std={self.pixel_std}: must be finite, with std > 0")
        if stretch not in STRETCHES:
            raise ValueError(f"stretch={stretch!r}: must be one of {', '.join(STRETCHES)}")

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> "CosmoMapFeatureExtractor":
        """Build the feature extractor that matches a model's config."""
        mean = config.pixel_mean or [0.0] * config.num_map_channels
        return cls(config.image_size, mean, config.pixel_std, config.mask_channel, **kwargs)

    @property
    def num_map_channels(self) -> int:
        """Number of channels, excluding the mask."""
        return len(self.pixel_mean)

    def __call__(self, maps: Any, mask: Any = None, return_tensors: str | None = "pt") -> BatchFeature:
        """Validate and scale maps.

        Args:
            maps: one or several maps: an array or tensor [H, W], [C, H, W] or [B, C, H, W] (with one channel also
                [B, H, W]), nested lists of numbers, the path to a .npy, .npz or .fits file, or a list of any of these.
            mask: observed pixels, [H, W] for all maps or [B, H, W]. None uses the mask of the file or masked array, if
                there is one, or treats all pixels as observed. Unobserved pixels may have any value.

        Returns:
            `pixel_values` float32 [B, C (+ 1), H, W].

        Raises:
            ValueError: a shape, mask or pixel is invalid.
            FileNotFoundError: a file does not exist.
        """
        values, masks = self.read(maps, mask)
        return BatchFeature({"pixel_values": self.scale(values, masks)}, tensor_type=return_tensors)

    def scale(self, maps: torch.Tensor, masks: torch.Tensor | None = None) -> torch.Tensor:
        """Scale maps, float32 [B, C, H, W], and append masks, bool [B, H, W] or None. Nothing is validated."""
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device=maps.device)[:, None, None]
            for values in (self.pixel_mean, self.pixel_std)
        )
        scaled = (maps - mean) / std
        if self.stretch == "asinh":
            scaled = scaled.asinh()
        if not self.mask_channel:
            return scaled
        if masks is None:
            masks = torch.ones(len(maps), *maps.shape[-2:], dtype=torch.bool, device=maps.device)
        observed = masks[:, None]
        return torch.cat([torch.where(observed, scaled, 0.0), observed.to(scaled.dtype)], dim=1)

    # ---- reading and validation ----

    def read(self, maps: Any, mask: Any = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read and validate maps. Return maps, float32 [B, C, H, W], and masks, bool [B, H, W] or None."""
        parts = [self._one(item, place) for item, place in _items(maps)]
        values = np.concatenate([part for part, _, _ in parts])
        places = [
            f"{place}{f'map {i}: ' if len(part) > 1 else ''}" for part, _, place in parts for i in range(len(part))
        ]
        if mask is None and any(found is not None for _, found, _ in parts):
            mask = np.concatenate([
                np.ones((len(part), *part.shape[-2:]), bool) if found is None else found for part, found, _ in parts
            ])  # fmt: skip
        masks = None if mask is None else self._masks(mask, len(values), places)
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(values, dtype=np.float32)
        _validate_finite(values, masks, places)
        if masks is None:
            return torch.from_numpy(values), None
        return torch.from_numpy(np.where(masks[:, None], values, np.float32(0))), torch.from_numpy(masks)

    def _one(self, item: Any, place: str) -> tuple[np.ndarray, np.ndarray | None, str]:
        """Return the maps [B, C, H, W] and mask [B, H, W] of an item, and its location for error messages."""
        mask = None
        if isinstance(item, (str, Path)):
            place = f"{place}{item}: "
            item, mask = read_map_file(item)
        values, hidden = self._shaped(_numbers(item, place), place), _masked(item)
        if hidden.any():
            if not self.mask_channel:
                raise ValueError(
                    f"{place}{hidden.sum()} pixels are masked, but this model has mask_channel=False; fill them, or "
                    "train with masked maps"
                )
            hidden = self._shaped(np.broadcast_to(hidden, np.shape(item)), place)
            values, mask = np.where(hidden, np.nan, values), ~hidden.any(1)
        if mask is not None:
            mask = self._masks(mask, len(values), [place] * len(values)) if self.mask_channel else None
        return values, mask, place

    def _shaped(self, values: np.ndarray, place: str) -> np.ndarray:
        channels, size = self.num_map_channels, self.image_size
        shape = values.shape
        if values.ndim == 2 and channels == 1:
            values = values[None, None]
        elif values.ndim == 3:
            values = values[:, None] if channels == 1 and shape[0] != 1 else values[None]
        if values.ndim != 4 or values.shape[1:] != (channels, size, size) or not len(values):
            one = f"[{size}, {size}] or [1, {size}, {size}]" if channels == 1 else f"[{channels}, {size}, {size}]"
            raise ValueError(
                f"{place}maps have shape {list(shape)}: must be {one}, or [maps, {channels}, ...] for several; cut "
                "patches of this size, with the angular scale of the training maps"
            )
        return values

    def _masks(self, mask: Any, count: int, places: list[str]) -> np.ndarray:
        if not self.mask_channel:
            raise ValueError("mask: this model has mask_channel=False; remove the mask, or train with masked maps")
        values = mask.detach().cpu().numpy() if torch.is_tensor(mask) else np.ma.filled(mask, 0)
        size = self.image_size
        if values.ndim == 4 and values.shape[1] == 1:
            values = values[:, 0]
        if values.shape not in ((size, size), (count, size, size)):
            found = f"the mask has shape {list(values.shape)}"
            raise ValueError(f"{places[0]}{found}: must be [{size}, {size}] or [{count}, {size}, {size}]")
        if values.dtype != bool and not np.isin(values, (0, 1)).all():
            raise ValueError(f"{places[0]}mask has values {np.unique(values)[:5]}: must be 1 (observed) or 0")
        values = np.broadcast_to(values.astype(bool), (count, size, size)).copy()
        for place, observed in zip(places, values):
            if not observed.any():
                raise ValueError(f"{place}the mask is empty: no pixel is observed")
        return values


def read_map_file(path: str | Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Read maps and an optional mask from .npy, .npz (`map` and `mask`) or FITS (image and `MASK`) files.

    Raises:
        FileNotFoundError: the file does not exist.
        ImportError: it is a FITS file, and astropy is not installed.
        ValueError: it is not a valid map file.
    """
    path = Path(path)
    if not path.name.lower().endswith(FILE_KINDS):
        raise ValueError(f"{path} is not a map file; it must end with one of {', '.join(FILE_KINDS)}")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; pass the path of a map file ({', '.join(FILE_KINDS)})")
    try:
        return _read_numpy(path) if path.suffix.lower() in (".npy", ".npz") else _read_fits(path)
    except ImportError as error:
        raise ImportError(f'{path}: FITS files require astropy; run pip install ".[cosmology]" in hrm_hf') from error
    except Exception as error:  # for corrupted files, numpy, zipfile, zlib and astropy raise many error types
        raise ValueError(f"cannot read maps from {path}: {error or type(error).__name__}") from error


def _read_numpy(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    found = np.load(path, allow_pickle=False)
    if isinstance(found, np.ndarray):
        return found, None
    with found:
        maps, mask = (
            next((found[name] for name in names if name in found), None) for names in (MAP_NAMES, MASK_NAMES)
        )
        if maps is None:
            raise ValueError(f"the file has the arrays {found.files[:20]}; one must be named {', '.join(MAP_NAMES)}")
    return maps, mask


def _read_fits(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    from astropy.io import fits

    with fits.open(path, memmap=False) as units:
        images = [unit for unit in units if unit.is_image and unit.header.get("NAXIS")]
        tables = [unit.name or "table" for unit in units if not unit.is_image]
        others = [unit for unit in images if unit.name.lower() not in MASK_NAMES]
        named = [unit for unit in others if unit.name.lower() in MAP_NAMES]
        maps = next((_with_gaps(unit.data, unit.header.get("BAD_DATA")) for unit in named or others), None)
        mask = next((unit.data for unit in images if unit.name.lower() in MASK_NAMES), None)
    if maps is None:
        found = f" but a table {tables[0]}; if this is a HEALPix map, cut patches from it" if tables else ""
        raise ValueError(f"the file has no image{found}")
    return _native(maps), None if mask is None else _native(mask)


def _with_gaps(data: np.ndarray, bad: Any) -> np.ndarray:
    """Set pixels whose value is `bad`, the header's BAD_DATA, to NaN. If `bad` is not a number, change nothing."""
    with suppress(ValueError):
        return np.where(np.isclose(data, float(str(bad)), rtol=1e-5, atol=0), np.nan, data)
    return data


def _native(data: np.ndarray) -> np.ndarray:
    """Convert big-endian FITS data to this machine's byte order."""
    return data.astype(data.dtype.newbyteorder("="))


def _items(maps: Any) -> list[tuple[Any, str]]:
    """Return the items in a list of maps or files, with their locations for error messages."""
    listed = isinstance(maps, (list, tuple)) and len(maps)
    if listed and isinstance(maps[0], (str, Path, np.ndarray, torch.Tensor)):
        return [(item, f"item {i}: " if len(maps) > 1 else "") for i, item in enumerate(maps)]
    return [(maps, "")]


def _numbers(item: Any, place: str) -> np.ndarray:
    try:
        values = item.detach().cpu().float().numpy() if torch.is_tensor(item) else np.asarray(item)
    except ValueError as error:  # raised for rows of different lengths
        raise ValueError(f"{place}the map is not a regular array of numbers ({error})") from error
    if values.dtype.kind not in "fiu":
        raise ValueError(f"{place}the map has values of type {values.dtype}: must be real numbers")
    return values


def _masked(item: Any) -> np.ndarray:
    """Return the mask of a masked array or of a list of masked arrays, or False if nothing is masked."""
    if isinstance(item, (list, tuple)):
        parts = [_masked(each) for each in item]
        if not any(part.any() for part in parts):
            return np.array(False)
        return np.array([np.broadcast_to(part, np.shape(each)) for part, each in zip(parts, item)])
    return np.asarray(np.ma.getmask(item))


def _validate_finite(values: np.ndarray, masks: np.ndarray | None, places: list[str]) -> None:
    bad = ~(np.abs(values) < MOST)
    if masks is not None:
        bad &= masks[:, None]
    if bad.any():
        row, channel, y, x = np.argwhere(bad)[0]
        kinds = "NaN, UNSEEN, infinite or too large for float32"
        count = f"{bad[row].sum()} of {bad[row].size} pixels are not finite ({kinds})"
        hint = "; pass a mask if these pixels are unobserved" if masks is None else ", although observed"
        raise ValueError(f"{places[row]}{count}, the first at [{channel}, {y}, {x}]{hint}")


__all__ = ["CosmoMapFeatureExtractor", "read_map_file"]
