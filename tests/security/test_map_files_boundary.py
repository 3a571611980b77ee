"""Map files that promise more than they hold, or hold more than they promise: refused before they fill the memory.

Everything here runs under a limit of this process's memory, which the files of one or two kilobytes would break.
"""

import gzip
import io
import lzma
import pickle
import resource
import signal
import struct
import zipfile

import numpy as np
import pytest

from hrm_hf.models.feature_extraction_cosmo import read_map_file
from hrm_hf.models.map_files import MAX_PIXELS, validate_fits


SPARE = 2**30  # bytes beside what the process has when a test begins
SECONDS = 120  # after which a test that unpacks for ever is ended
CARD, BLOCK = 80, 2880


@pytest.fixture(autouse=True)
def little_memory():
    """No test of this file can take the machine, or the day."""

    def too_long(*_):
        raise RuntimeError(f"the test took more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    pytest.importorskip("astropy.io.fits")
    with open("/proc/self/statm") as found:
        pages = int(found.read().split()[5])  # of data, which RLIMIT_DATA bounds
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
    """A member with so many bytes of zeros behind its header, packed piece by piece."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("map.npy", "w", force_zip64=True) as member:
            member.write(npy_header(shape))
            for _ in range(count // 2**20):
                member.write(bytes(2**20))
    return buffer.getvalue()


def lying_npz(shape, content: bytes, claimed: int) -> bytes:
    """An archive whose directory says another size of its member than it unpacks to."""
    raw = bytearray(npz(map=npy_header(shape) + content))
    directory = raw.rindex(b"PK\x01\x02")
    raw[directory + 24 : directory + 28] = struct.pack("<I", claimed)
    raw[22:26] = struct.pack("<I", claimed)
    return bytes(raw)


def cards(**values) -> bytes:
    """A header of FITS; `name=value` in order."""
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


def tiled(**more) -> bytes:
    fields = {"ZIMAGE": True, "ZCMPTYPE": "GZIP_1", "ZBITPIX": -32, "ZNAXIS": 2, "TFORM1": "1PB(8)", **more}
    return table(1, 8, TTYPE1="COMPRESSED_DATA", **fields) + bytes(BLOCK)


def gzip_bomb(header: bytes, megabytes: int) -> bytes:
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1) as packed:
        packed.write(header)
        for _ in range(megabytes):
            packed.write(bytes(2**20))
    return buffer.getvalue()


def tile_bomb() -> bytes:
    """A map of 8 x 8 pixels in one tile, which unpacks to 64 MB."""
    content = gzip.compress(bytes(2**26), 1)
    header = table(
        1, 8, ZIMAGE=True, ZCMPTYPE="GZIP_1", ZBITPIX=-32, ZNAXIS=2, ZNAXIS1=8, ZNAXIS2=8, ZTILE1=8, ZTILE2=8,
        TFORM1=f"1PB({len(content)})", TTYPE1="COMPRESSED_DATA",
    ).replace(b"PCOUNT  =                    0", f"PCOUNT  = {len(content):20}".encode())  # fmt: skip
    data = struct.pack(">ii", len(content), 0) + content
    return header + data + bytes(-len(data) % BLOCK)


class Harm:
    """What unpickling would run."""

    def __reduce__(self):
        return print, ("unpickled",)


# Name of the file, its bytes, and words of the refusal.
HOSTILE = {
    "npy of 2^40 pixels": ("a.npy", lambda: npy_header((2**20, 2**20)) + bytes(64), "pixels", "max_pixels"),
    "npy with sides beyond 64 bits": ("a.npy", lambda: npy_header((10**30, 7)), "more than 10^30 pixels"),
    "npy with a side of -1": ("a.npy", lambda: npy_header((-1, 4)), "negative"),
    "npy with 3000 sides": ("a.npy", lambda: npy_header((1,) * 3000) + bytes(4), "3000 axes"),
    "npy of objects": ("a.npy", lambda: npy_header((4,), "|O") + pickle.dumps([Harm()]), "nothing is unpickled"),
    "npy of texts of 4 GB": ("a.npy", lambda: npy_header((1,), "<U1000000000"), "no readable header"),
    "npy of records": ("a.npy", lambda: npy_header((1,), [("a", "<f4")]), "expected real numbers"),
    "npy whose header is a program": (
        "a.npy", lambda: b"\x93NUMPY\x01\x00\x20\x00" + b"__import__('os').getpid()      \n", "no readable header",
    ),
    "npy whose header is 4 GB long": ("a.npy", lambda: b"\x93NUMPY\x02\x00\xff\xff\xff\xff{", "no readable header"),
    "npy that ends early": ("a.npy", lambda: npy_header((64, 64)) + bytes(100), "truncated", "16,512"),
    "a pickle": ("a.npy", lambda: pickle.dumps(Harm()), "nothing is unpickled"),
    "a pickle in npz": ("a.npz", lambda: npz(map=pickle.dumps(Harm())), "no readable header"),
    "objects in npz": (
        "a.npz", lambda: npz(map=npy_header((4,), "|O") + pickle.dumps([Harm()])), "nothing is unpickled",
    ),
    "npz of 512 MB of zeros": ("a.npz", lambda: zeros_npz((2**27,), 2**29), "134,217,728 pixels", "67,108,864"),
    "npz of a shape alone": ("a.npz", lambda: npz(map=npy_header((2**25,))), "truncated"),
    "npz whose size lies upwards": ("a.npz", lambda: lying_npz((2**25,), bytes(64), 2**27 + 128), "map"),
    "npz whose size lies downwards": ("a.npz", lambda: lying_npz((2**20,), bytes(2**22), 64), "map"),
    "npz whose mask is the bomb": (
        "a.npz", lambda: npz(map=npy_header((2, 2)) + bytes(16), mask=npy_header((2**40,), "|b1")), "mask.npy",
    ),
    "npz that is cut": ("a.npz", lambda: npz(map=npy_header((64, 64)) + bytes(2**14))[:-30], "cannot be read"),
    "npz without a map": ("a.npz", lambda: npz(other=npy_header((2, 2)) + bytes(16)), "none of map, maps"),
    "fits of 10^12 pixels": ("a.fits", lambda: image(10**6, 10**6), "1,000,000,000,000 pixels", "--max-pixels"),
    "fits with 999 axes": ("a.fits", lambda: image(*[2] * 999), "more than 10^"),
    "fits with NAXIS of 10^9": ("a.fits", lambda: cards(SIMPLE=True, BITPIX=8, NAXIS=10**9), "NAXIS=1000000000"),
    "fits with a side of -5": ("a.fits", lambda: image(-5, 5), "negative"),
    "fits with a side of 1.5": ("a.fits", lambda: image(1.5, 5), "expected an integer"),
    "fits without END": ("a.fits", lambda: image(2, 2).replace(b"END", b"   ") + b" " * BLOCK, "no END"),
    "fits with PCOUNT of -1": ("a.fits", lambda: EMPTY + cards(
        XTENSION="IMAGE", BITPIX=8, NAXIS=1, NAXIS1=4, PCOUNT=-1, GCOUNT=1), "PCOUNT=-1"),
    "fits whose second image is the bomb": (
        "a.fits", lambda: image(2, 2, EXTEND=True) + bytes(BLOCK) + cards(
            XTENSION="IMAGE", BITPIX=8, NAXIS=2, NAXIS1=10**5, NAXIS2=10**5, PCOUNT=0, GCOUNT=1), "HDU 1", "pixels",
    ),
    "tiles of 10^12 pixels": ("a.fits", lambda: tiled(ZNAXIS1=10**6, ZNAXIS2=10**6), "1,000,000,000,000 pixels"),
    "a tile larger than its map": ("a.fits", lambda: tiled(
        ZNAXIS1=8, ZNAXIS2=8, ZTILE1=10**6, ZTILE2=10**6), "a tile", "pixels"),
    "a tile that unpacks to 64 MB": ("a.fits", tile_bomb, "tile 0 unpacks to more than its 64 pixels"),
    "a sky of NSIDE 2^20": ("a.fits", lambda: table(ORDERING="RING", NSIDE=2**20) + bytes(BLOCK), "(NSIDE)", "pixels"),
    "a sky of NSIDE -1": ("a.fits", lambda: table(ORDERING="RING", NSIDE=-1) + bytes(BLOCK), "NSIDE=-1"),
    "a column of 10^12 numbers": ("a.fits", lambda: table(1, 8, TFORM1="1000000000000D"), "column 1", "pixels"),
    "gzip of a header of 10^12 pixels": ("a.fits.gz", lambda: gzip.compress(image(10**6, 10**6)), "pixels"),
    "gzip under another name": ("a.fits", lambda: gzip.compress(image(10**6, 10**6)), "pixels"),
    "xz under another name": ("a.fits", lambda: lzma.compress(image(10**6, 10**6)), "pixels"),
    "gzip with zeros behind the map": ("a.fits.gz", lambda: gzip_bomb(
        image(2, 2) + bytes(BLOCK), 512), "goes on behind its last unit"),
    "gzip with a header that never ends": ("a.fits.gz", lambda: gzip.compress(
        image(2, 2).replace(b"END", b"   ") + b" " * BLOCK * 2000), "no END in 1000 blocks"),
    "gzip that ends early": ("a.fits.gz", lambda: gzip.compress(image(64, 64) + bytes(64 * 256))[:-40], "truncated"),
    "a thousand units": ("a.fits", lambda: EMPTY + cards(
        XTENSION="IMAGE", BITPIX=8, NAXIS=0, PCOUNT=0, GCOUNT=1) * 1001, "more than 1000 units"),
    "zip that is no FITS": ("a.fits", lambda: npz(map=b""), "no readable FITS file"),
    "a name alone": ("a.fits", lambda: b"", "no readable FITS file"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_promises_too_much_is_refused_by_name(name, tmp_path, capsys):
    file, make, *words = HOSTILE[name]
    path = tmp_path / file
    path.write_bytes(make())
    with pytest.raises(ValueError, match=r"a[.]") as found:
        read_map_file(path)
    assert str(path) in str(found.value)
    assert all(word in str(found.value) for word in words), found.value
    assert "unpickled" not in capsys.readouterr().out


def test_a_packed_file_above_the_limit_in_several_units_is_refused_as_it_is_unpacked(tmp_path):
    path = tmp_path / "a.fits.gz"
    unit = cards(XTENSION="IMAGE", BITPIX=8, NAXIS=1, NAXIS1=2**20, PCOUNT=0, GCOUNT=1)
    data = bytes(-(-(2**20) // BLOCK) * BLOCK)
    path.write_bytes(gzip.compress(EMPTY + (unit + data) * 12, 1))
    with pytest.raises(ValueError, match=r"a.fits.gz unpacks to more than 9,437,184 bytes"):
        validate_fits(path, max_pixels=2**20)
    validate_fits(path, max_pixels=2**21)


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.fits", "a.fits.gz", "tiled.fits"])
def test_the_limit_is_an_argument_and_whole_files_pass(name, tmp_path):
    fits = pytest.importorskip("astropy.io.fits")
    path, values = tmp_path / name, np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    if name == "a.npy":
        np.save(path, np.asfortranarray(values))
    elif name == "a.npz":
        np.savez_compressed(path, map=values)
    elif name == "tiled.fits":
        fits.HDUList([
            fits.PrimaryHDU(), fits.CompImageHDU(values, compression_type="GZIP_2", quantize_level=0)
        ]).writeto(path)  # fmt: skip
    else:
        fits.PrimaryHDU(values).writeto(path)
    assert np.array_equal(read_map_file(path, max_pixels=4096)[0], values)
    with pytest.raises(ValueError, match=r"4,096 pixels, and the limit is 4,095.*max_pixels"):
        read_map_file(path, max_pixels=4095)


def test_the_readers_of_skies_images_and_cubes_ask_the_same_check(tmp_path):
    from hrm_hf.cosmology.dataset.files import is_healpix, read_fits_image, read_healpix_patches, read_quijote_cube

    sky, flat, cube = tmp_path / "sky.fits", tmp_path / "flat.fits", tmp_path / "df_m_4096_CIC_z=0.npy"
    sky.write_bytes(table(ORDERING="RING", NSIDE=2**15) + bytes(BLOCK))
    flat.write_bytes(image(2**15, 2**15))
    cube.write_bytes(npy_header((4096,) * 3))
    pytest.importorskip("healpy")
    for read, path in (
        (read_healpix_patches, sky), (is_healpix, sky), (read_fits_image, flat), (read_quijote_cube, cube),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"pixels, and the limit is .*--max-pixels"):
            read(path)


def test_the_pipeline_takes_the_limit(tmp_path):
    import every
    from transformers import pipeline

    import hrm_hf  # noqa: F401 - registers the pipeline

    infer = pipeline("cosmology-regression", model=str(every.save("cosmo_cnn", tmp_path / "model")))
    side = infer.feature_extractor.image_size
    np.save(tmp_path / "map.npy", np.ones((side, side), np.float32))
    assert infer(str(tmp_path / "map.npy"), max_pixels=side**2)["steps"] >= 1
    with pytest.raises(ValueError, match="max_pixels"):
        infer(str(tmp_path / "map.npy"), max_pixels=side**2 - 1)


def test_the_command_line_names_its_flag(tmp_path):
    from typer.testing import CliRunner

    from hrm_hf.cli import app

    np.save(tmp_path / "df_m_8_CIC_z=0.npy", np.zeros((8, 8, 8), np.float32))
    out = tmp_path / "out"
    arguments = ["data", "cosmology-files", str(tmp_path / "df_m_8_CIC_z=0.npy"), "--out", str(out)]
    found = CliRunner().invoke(app, [*arguments, "--max-pixels", "500"])
    assert found.exit_code == 1 and "512 pixels, and the limit is 500" in str(found.exception)
    assert CliRunner().invoke(app, [*arguments, "--max-pixels", "512"]).exit_code == 0


def test_the_limit_is_that_of_the_documents():
    assert MAX_PIXELS == 67_108_864
