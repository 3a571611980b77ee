"""Map files of users: what their headers promise is checked before anything of it is read.

A few megabytes can say that they hold terabytes: numpy's headers name a shape, zip and gzip unpack a thousandfold, a
FITS header has NAXIS1 to NAXIS999, a tile-compressed one ZNAXISn, and a partial HEALPix map becomes 12 NSIDE^2 pixels.
Every reader of the package asks here first. Nothing is unpickled.
"""

import bz2
import gzip
import io
import lzma
import math
import os
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np


MAX_PIXELS = 2**26  # of an array that a file gives: 4,096 maps of 128 x 128, half a gigabyte in float64
BLOCK, CARD = 2880, 80  # bytes of FITS
MAX_HEADER_BLOCKS = 1000
MAX_UNITS = 1000
MAX_AXES = 32  # of an array; numpy has no more than 64
PACKED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}  # by their first bytes, as astropy
PADDING = 10 * BLOCK  # zeros that may follow the last unit of a FITS file


class MapFileError(ValueError):
    """A map file that is corrupted, or says that it holds more than is allowed."""


def too_large(place: str, shape: Any, pixels: int, max_pixels: int) -> MapFileError:
    """The error for an array above the limit."""
    shown = f"{shape}" if len(f"{shape}") <= 100 else f"{f'{shape}'[:97]}..."
    return MapFileError(
        f"{place} has the shape {shown}: {_short(pixels)} pixels, and the limit is {max_pixels:,}; give a larger "
        "max_pixels (--max-pixels) if that is meant"
    )


def _short(number: int) -> str:
    return f"{number:,}" if number < 10**15 else f"more than 10^{len(str(number)) - 1}"


def _count(shape: tuple[int, ...], place: str, max_pixels: int) -> int:
    """Pixels of a shape. Raises MapFileError above the limit, or for a negative side."""
    if any(side < 0 for side in shape):
        raise MapFileError(f"{place} has the shape {shape}; no side can be negative")
    pixels = math.prod(shape)
    if pixels > max_pixels:
        raise too_large(place, shape, pixels, max_pixels)
    return pixels


# ---- numpy ----


def validate_npy(path: str | Path, max_pixels: int = MAX_PIXELS) -> None:
    """Raises MapFileError for a .npy file that is corrupted, too large, or holds no numbers."""
    with open(path, "rb") as file:
        _npy_header(file, os.path.getsize(path), str(path), max_pixels)


def read_numpy(
    path: str | Path, names: tuple[tuple[str, ...], ...] = (), max_pixels: int = MAX_PIXELS
) -> list[np.ndarray | None]:
    """The array of a .npy file; or of an .npz file, for each of several groups of names, the first that is there.

    Raises:
        MapFileError: no such file of numpy's, a corrupted one, one that is too large or holds no numbers.
    """
    path = Path(path)
    with open(path, "rb") as file:
        start = file.read(6)
    if start.startswith(b"PK"):
        return _read_npz(path, names, max_pixels)
    if start != np.lib.format.MAGIC_PREFIX:
        raise MapFileError(f"{path} is no file of numpy's: it begins with {start!r}; nothing is unpickled here")
    with open(path, "rb") as file:
        return [_read_array(file, path.stat().st_size, str(path), max_pixels)]


def _read_npz(path: Path, names: tuple[tuple[str, ...], ...], max_pixels: int) -> list[np.ndarray | None]:
    arrays: list[np.ndarray | None] = []
    with zipfile.ZipFile(path) as archive:
        inside = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        for group in names:
            found = next((inside[name] for name in group if name in inside), None)
            if found is None:
                arrays.append(None)
                continue
            with archive.open(found) as file:  # it gives no more than the size it says
                place = f"{path}, {found.filename}"
                arrays.append(_read_array(file, found.file_size, place, max_pixels))
        if names and arrays[0] is None:
            shown = sorted(inside)[:20]
            raise MapFileError(f"{path} holds {shown}, and none of {', '.join(names[0])}")
    return arrays


def _read_array(file: Any, size: int, place: str, max_pixels: int) -> np.ndarray:
    header, dtype, shape, fortran = _npy_header(file, size, place, max_pixels)
    content = bytearray()
    wanted = dtype.itemsize * math.prod(shape)
    while len(content) < wanted:  # what was not unpacked takes no memory
        part = file.read(min(2**22, wanted - len(content)))
        if not part:
            raise MapFileError(f"{place} is truncated: {header + len(content):,} bytes of {header + wanted:,}")
        content += part
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def _npy_header(file: Any, size: int, place: str, max_pixels: int) -> tuple[int, np.dtype, tuple[int, ...], bool]:
    """Bytes of the header, type, shape and order of an array whose file has `size` bytes."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    counted = _Counted(file)
    try:
        version = np.lib.format.read_magic(counted)
        if version not in readers:
            raise MapFileError(f"{place} is an array of format {version}; expected one of numbers (1.0 or 2.0)")
        shape, fortran, dtype = readers[version](counted)
    except MapFileError:
        raise
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, EOFError) as error:
        raise MapFileError(f"{place} has no readable header of an array: {str(error)[:200]}") from error
    if dtype.hasobject or dtype.kind not in "fiub":
        raise MapFileError(f"{place} holds values of type {dtype}; expected real numbers (nothing is unpickled)")
    if len(shape) > MAX_AXES:
        raise MapFileError(f"{place} has {len(shape)} axes; expected at most {MAX_AXES}")
    pixels = _count(tuple(shape), place, max_pixels)
    promised = counted.read_bytes + pixels * dtype.itemsize
    if size < promised:
        raise MapFileError(f"{place} is truncated: {size:,} bytes, its header promises {promised:,}")
    return counted.read_bytes, dtype, tuple(shape), fortran


class _Counted:
    """Counts what is read of a file; a header of numpy's is at most as long as numpy reads without trust."""

    def __init__(self, file: Any):
        self.file, self.read_bytes = file, 0

    def read(self, size: int) -> bytes:
        """Bytes of the file; at most 64 kB, which no honest header needs."""
        if size > 2**16:
            raise ValueError(f"a header of {size:,} bytes")
        part = self.file.read(size)
        self.read_bytes += len(part)
        return part


# ---- FITS ----


def validate_fits(path: str | Path, max_pixels: int = MAX_PIXELS) -> None:
    """Walks the headers of a FITS file, also a compressed one, without reading its data.

    Raises:
        MapFileError: no FITS file, a corrupted one, or one with more than `max_pixels` in an image, a tile, a column
            or the map of the sphere that a table describes; a compressed one that unpacks to over 8 bytes for each.
        ImportError: without astropy.
    """
    with open(path, "rb") as file:
        start = file.read(9)
    opener = next((opener for magic, opener in PACKED.items() if start.startswith(magic)), None)
    if opener is None and not start.startswith(b"SIMPLE  ="):
        raise MapFileError(f"{path} is no readable FITS file, or a truncated one: it begins with {start!r}")
    with open(path, "rb") if opener is None else opener(path, "rb") as stream:
        walk = _Walk(stream, str(path), max_pixels, None if opener is None else 8 * max_pixels + 2**20)
        try:
            walk.all()
        except MapFileError:
            raise
        except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, OverflowError) as error:
            raise MapFileError(f"{path} is no readable FITS file, or a truncated one: {str(error)[:200]}") from error
    if walk.tiles:
        _validate_tiles(path, walk.tiles)


class _Walk:
    """The units of a FITS stream, one after another."""

    def __init__(self, stream: BinaryIO | Any, place: str, max_pixels: int, max_bytes: int | None):
        self.stream, self.place, self.max_pixels, self.max_bytes = stream, place, max_pixels, max_bytes
        self.read = 0
        self.tiles: dict[int, int] = {}  # unit: bytes of a tile

    def all(self) -> None:
        """Every header."""
        for number in range(MAX_UNITS + 1):
            header = self._header(number)
            if header is None:
                return
            if number == MAX_UNITS:
                raise MapFileError(f"{self.place} has more than {MAX_UNITS} units; expected a file with maps")
            self._skip(self._data_bytes(header, number))

    def _take(self, size: int) -> bytes:
        self.read += size
        if self.max_bytes is not None and self.read > self.max_bytes:
            raise MapFileError(
                f"{self.place} unpacks to more than {self.max_bytes:,} bytes, 8 for each of {self.max_pixels:,} "
                "pixels; unpack it first, or give a larger max_pixels (--max-pixels)"
            )
        return self.stream.read(size)

    def _header(self, number: int):
        """The next header, or None behind the last unit."""
        from astropy.io import fits

        blocks: list[bytes] = []
        while len(blocks) < MAX_HEADER_BLOCKS:
            block = self._take(BLOCK)
            if not blocks and not number and not block.startswith(b"SIMPLE  ="):
                raise MapFileError(f"{self.place} is no readable FITS file: unpacked, it begins with {block[:9]!r}")
            if not blocks and number and not block.startswith(b"XTENSION"):
                self._validate_end(block)
                return None
            blocks.append(block)
            if len(block) < BLOCK:
                raise MapFileError(f"{self.place} is truncated: the header of unit {number} has no END")
            if any(block[at : at + CARD].rstrip() == b"END" for at in range(0, BLOCK, CARD)):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # what astropy warns of is refused when it is read
                    return fits.Header.fromstring(b"".join(blocks))
        raise MapFileError(f"{self.place}: the header of unit {number} has no END in {MAX_HEADER_BLOCKS} blocks")

    def _validate_end(self, block: bytes) -> None:
        """Raises if more follows the last unit than some padding: a reader would look for a header in all of it."""
        if self.max_bytes is None:
            return
        left = 0
        while block and left <= PADDING:
            left += len(block)
            block = self._take(BLOCK)
        if block:
            raise MapFileError(f"{self.place} goes on behind its last unit without a header; unpack and mend it")

    def _data_bytes(self, header, number: int) -> int:
        """Bytes of a unit's data, rounded up to blocks; refuses what it would become in memory."""
        place = f"{self.place}, HDU {number}"
        sides = tuple(self._int(header, f"NAXIS{axis}", place) for axis in self._axes(header, "NAXIS", place))
        extra, groups = self._int(header, "PCOUNT", place, 0), self._int(header, "GCOUNT", place, 1)
        if sides and sides[0] == 0 and header.get("GROUPS"):
            sides = sides[1:]
        if extra < 0 or groups < 0:
            raise MapFileError(f"{place} has PCOUNT={extra} and GCOUNT={groups}; neither can be negative")
        if header.get("XTENSION", "IMAGE").strip() in ("BINTABLE", "TABLE"):
            self._validate_table(header, sides, number, place)
            pixels = math.prod(sides)
            if any(side < 0 for side in sides):
                raise MapFileError(f"{place} has the shape {sides}; no side can be negative")
        else:
            pixels = _count(sides[::-1], place, self.max_pixels) if sides else 0
        size = abs(self._int(header, "BITPIX", place, 8)) // 8 * groups * (extra + pixels)
        return -(-size // BLOCK) * BLOCK

    def _validate_table(self, header, sides: tuple[int, ...], number: int, place: str) -> None:
        if header.get("ZIMAGE"):
            axes = self._axes(header, "ZNAXIS", place)
            shape = tuple(self._int(header, f"ZNAXIS{axis}", place) for axis in axes)
            tile = tuple(self._int(header, f"ZTILE{axis}", place, shape[0] if axis == 1 else 1) for axis in axes)
            _count(shape[::-1], place, self.max_pixels)
            self.tiles[number] = 8 * max(1, _count(tile[::-1], f"{place}, a tile,", self.max_pixels))
        if "NSIDE" in header or "ORDERING" in header:
            nside = self._int(header, "NSIDE", place, 0)
            if nside < 0:
                raise MapFileError(f"{place} has NSIDE={nside}; it cannot be negative")
            if 12 * nside**2 > self.max_pixels:
                raise too_large(place, f"12 x {_short(nside)}^2 (NSIDE)", 12 * nside**2, self.max_pixels)
        for column in range(1, min(self._int(header, "TFIELDS", place, 0), 999) + 1):
            words = str(header.get(f"TFORM{column}", "1E")).strip()
            repeat = words[: len(words) - len(words.lstrip("0123456789"))] or "1"
            if words[len(repeat) :][:1] not in ("P", "Q", "A", "X"):
                _count((sides[-1] if sides else 0, int(repeat[:18])), f"{place}, column {column},", self.max_pixels)

    def _axes(self, header, name: str, place: str) -> range:
        count = self._int(header, name, place)
        if not 0 <= count <= 999:
            raise MapFileError(f"{place} has {name}={count}; expected 0 to 999")
        return range(1, count + 1)

    @staticmethod
    def _int(header, name: str, place: str, default: int | None = None) -> int:
        value = header.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise MapFileError(f"{place} has {name}={value!r:.60}; expected an integer")
        return value

    def _skip(self, size: int) -> None:
        """Passes over data: by seeking in a plain file, by counted unpacking in a compressed one."""
        if self.max_bytes is None:
            self.stream.seek(size, io.SEEK_CUR)
            return
        if self.read + size > self.max_bytes:
            self._take(size)  # says so
        while size > 0:
            part = self._take(min(size, 2**22))
            if not part:
                raise EOFError("its data end early")
            size -= len(part)


def _validate_tiles(path: str | Path, tiles: dict[int, int]) -> None:
    """Refuses tiles that unpack to more than a tile of pixels: gzip and HCOMPRESS say their size themselves."""
    from astropy.io import fits

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fits.open(path, disable_image_compression=True, memmap=False) as units:
            for number, most in tiles.items():
                kind = str(units[number].header.get("ZCMPTYPE", "")).strip()
                for name, row, content in _tile_contents(units[number], kind):
                    if name == "HCOMPRESS":
                        claimed = 8 * int.from_bytes(content[2:6], "big") * int.from_bytes(content[6:10], "big")
                    else:
                        claimed = _unpacked_size(content, most)
                    if claimed > most:
                        raise MapFileError(
                            f"{path}, HDU {number}: tile {row} unpacks to more than its {most // 8:,} pixels"
                        )


def _tile_contents(unit: Any, kind: str) -> Iterator[tuple[str, int, bytes]]:
    """How each tile is packed, its number and its bytes, for those that say their size themselves."""
    for column in unit.columns.names:
        packed = "gzip" if column == "GZIP_COMPRESSED_DATA" or kind.startswith("GZIP") else kind.partition("_")[0]
        if column in ("COMPRESSED_DATA", "GZIP_COMPRESSED_DATA") and packed in ("gzip", "HCOMPRESS"):
            for row, content in enumerate(unit.data[column]):
                if len(content):
                    yield packed, row, np.asarray(content).tobytes()


def _unpacked_size(content: bytes, most: int) -> int:
    """Bytes that gzip makes of a tile; it stops counting above `most`."""
    machine = zlib.decompressobj(wbits=47)  # gzip or zlib
    try:
        return len(machine.decompress(content, most + 1))
    except zlib.error:
        return 0  # the reader says that it is corrupted


__all__ = ["MAX_PIXELS", "MapFileError", "read_numpy", "validate_fits", "validate_npy"]
