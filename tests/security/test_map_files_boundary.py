"""Uploaded map files that declare more than they contain are rejected before they fill the memory.

Nothing is unpickled, there or by the readers of files that the user chose to open.
"""

import gzip
import io
import pickle
import resource
import signal
import struct
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest

from hrm_hf.app.limits import UPLOAD_PIXELS
from hrm_hf.app.maps_tab import read_map
from hrm_hf.models.feature_extraction_cosmo import CosmoMapFeatureExtractor


SPARE = 2**30  # bytes above the process's memory at the start of a test
SECONDS = 120  # after which a test that never ends is killed
CARD, BLOCK = 80, 2880
PAGE = SimpleNamespace(feature_extractor=CosmoMapFeatureExtractor(64))


@pytest.fixture(autouse=True)
def little_memory():
    """Limit memory and time of every test in this file."""

    def too_long(*_):
        raise RuntimeError(f"the test took more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    pytest.importorskip("astropy.io.fits")
    with open("/proc/self/statm") as found:
        pages = int(found.read().split()[5])  # data pages, which RLIMIT_DATA limits
    old = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (pages * resource.getpagesize() + SPARE, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, old)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# ---- files ----


def npy_header(shape, descr="<f4", version=1):
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text


def npz(**members) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def zeros_npz(shape, count) -> bytes:
    """Return an archive whose member has this many zero bytes after its header, compressed in pieces."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("map.npy", "w", force_zip64=True) as member:
            member.write(npy_header(shape))
            for _ in range(count // 2**20):
                member.write(bytes(2**20))
    return buffer.getvalue()


def lying_npz(shape, content: bytes, claimed: int) -> bytes:
    """Return an archive whose directory states a wrong size of its member."""
    raw = bytearray(npz(map=npy_header(shape) + content))
    directory = raw.rindex(b"PK\x01\x02")
    raw[directory + 24 : directory + 28] = struct.pack("<I", claimed)
    raw[22:26] = struct.pack("<I", claimed)
    return bytes(raw)


def cards(**values) -> bytes:
    """Return a FITS header; `name=value` in order."""
    lines = []
    for name, value in values.items():
        shown = "FT"[value] if isinstance(value, bool) else value
        lines.append(f"{name:8}= '{value:8}'" if isinstance(value, str) else f"{name:8}= {shown!s:>20}")
    text = "".join(line.ljust(CARD) for line in [*lines, "END"])
    return text.ljust(-(-len(text) // BLOCK) * BLOCK).encode()


def image(*sides, **more) -> bytes:
    axes = {f"NAXIS{number}": side for number, side in enumerate(sides, 1)}
    return cards(SIMPLE=True, BITPIX=-32, NAXIS=len(sides), **axes, **more)


EMPTY = cards(SIMPLE=True, BITPIX=8, NAXIS=0, EXTEND=True)


def table(rows=1, width=8, **more) -> bytes:
    fields = {"TFIELDS": 1, "TFORM1": "1D", **more}
    return EMPTY + cards(
        XTENSION="BINTABLE", BITPIX=8, NAXIS=2, NAXIS1=width, NAXIS2=rows, PCOUNT=0, GCOUNT=1, **fields
    )  # fmt: skip


class Harm:
    """Prints when unpickled."""

    def __reduce__(self):
        return print, ("unpickled",)


# File name and content.
HOSTILE = {
    "npy of 2^40 pixels": ("a.npy", lambda: npy_header((2**20, 2**20)) + bytes(64)),
    "npy with sides beyond 64 bits": ("a.npy", lambda: npy_header((10**30, 7))),
    "npy of objects": ("a.npy", lambda: npy_header((4,), "|O") + pickle.dumps([Harm()])),
    "npy whose header is 4 GB long": ("a.npy", lambda: b"\x93NUMPY\x02\x00\xff\xff\xff\xff{"),
    "npy that ends early": ("a.npy", lambda: npy_header((64, 64)) + bytes(100)),
    "a pickle": ("a.npy", lambda: pickle.dumps(Harm())),
    "a pickle in npz": ("a.npz", lambda: npz(map=pickle.dumps(Harm()))),
    "objects in npz": ("a.npz", lambda: npz(map=npy_header((4,), "|O") + pickle.dumps([Harm()]))),
    "npz of 512 MB of zeros": ("a.npz", lambda: zeros_npz((2**27,), 2**29)),
    "npz of a shape alone": ("a.npz", lambda: npz(map=npy_header((2**25,)))),
    "npz whose size lies upwards": ("a.npz", lambda: lying_npz((2**25,), bytes(64), 2**27 + 128)),
    "npz whose size lies downwards": ("a.npz", lambda: lying_npz((2**20,), bytes(2**22), 64)),
    "npz whose mask is the bomb": (
        "a.npz", lambda: npz(map=npy_header((2, 2)) + bytes(16), mask=npy_header((2**40,), "|b1")),
    ),
    "npz that is cut": ("a.npz", lambda: npz(map=npy_header((64, 64)) + bytes(2**14))[:-30]),
    "fits of 10^12 pixels": ("a.fits", lambda: image(10**6, 10**6)),
    "fits with 999 axes": ("a.fits", lambda: image(*[2] * 999)),
    "fits with NAXIS of 10^9": ("a.fits", lambda: cards(SIMPLE=True, BITPIX=8, NAXIS=10**9)),
    "fits with a side of -5": ("a.fits", lambda: image(-5, 5)),
    "fits without END": ("a.fits", lambda: image(2, 2).replace(b"END", b"   ") + b" " * BLOCK),
    "fits whose second image is the bomb": (
        "a.fits", lambda: image(2, 2, EXTEND=True) + bytes(BLOCK) + cards(
            XTENSION="IMAGE", BITPIX=8, NAXIS=2, NAXIS1=10**5, NAXIS2=10**5, PCOUNT=0, GCOUNT=1),
    ),
    "a compressed image": ("a.fits", lambda: table(ZIMAGE=True, ZNAXIS=1, ZNAXIS1=10**9) + bytes(BLOCK)),
    "gzip of a header of 10^12 pixels": ("a.fits.gz", lambda: gzip.compress(image(10**6, 10**6))),
    "a thousand units": ("a.fits", lambda: EMPTY + cards(
        XTENSION="IMAGE", BITPIX=8, NAXIS=0, PCOUNT=0, GCOUNT=1) * 1001),
    "zip that is no FITS": ("a.fits", lambda: npz(map=b"")),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_page_rejects_hostile_map_files_by_name(name, tmp_path, capsys):
    file, make = HOSTILE[name]
    path = tmp_path / file
    path.write_bytes(make())
    with pytest.raises(ValueError, match=file) as found:
        read_map(PAGE, str(path))
    assert str(tmp_path) not in str(found.value) and "unpickled" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.fits"])
def test_page_reads_files_up_to_its_limit(name, tmp_path):
    fits = pytest.importorskip("astropy.io.fits")
    path, values = tmp_path / name, np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    write = {"a.npy": np.save, "a.npz": lambda path, map: np.savez_compressed(path, map=map)}
    write.get(name, lambda path, map: fits.PrimaryHDU(map).writeto(path))(path, values)
    assert np.array_equal(read_map(PAGE, str(path))[0]["map"][0], values)
    write.get(name, lambda path, map: fits.PrimaryHDU(map).writeto(path, overwrite=True))(
        path, np.zeros(UPLOAD_PIXELS + 1, np.uint8)
    )
    with pytest.raises(ValueError, match=f"{UPLOAD_PIXELS:,}"):
        read_map(PAGE, str(path))


@pytest.mark.parametrize("name", ["npy of objects", "a pickle", "a pickle in npz", "objects in npz"])
def test_no_reader_unpickles(name, tmp_path, capsys):
    file, make = HOSTILE[name]
    (tmp_path / file).write_bytes(make())
    with pytest.raises(ValueError, match=file):
        CosmoMapFeatureExtractor(64)(tmp_path / file)
    assert "unpickled" not in capsys.readouterr().out
