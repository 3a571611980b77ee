"""Readers of HEALPix maps, FITS images and Quijote cubes.

healpy, astropy and numpy write the files. The referee of the projection is astropy's WCS.
"""

import sys

import numpy as np
import pytest

from hrm_hf.cosmology.dataset.files import (
    QUIJOTE_BOX,
    gnomonic_grid,
    quijote_maps,
    read_fits_image,
    read_healpix_patches,
    read_quijote_cube,
)


NSIDE = 64  # pixels of 55 arcmin


@pytest.fixture(scope="module")
def healpy():
    return pytest.importorskip("healpy")


@pytest.fixture(scope="module")
def fits():
    return pytest.importorskip("astropy.io.fits")


@pytest.fixture
def write_sky(healpy, tmp_path):
    """Write a HEALPix file and return its path."""

    def write(values, name="sky.fits", **options):
        path = tmp_path / name
        healpy.write_map(path, values, dtype=np.asarray(values).dtype, **options)
        return path

    return write


@pytest.fixture
def write_table(fits, tmp_path):
    """Write a table of columns (name, format, values) after an image and return its path."""

    def write(*columns, **header):
        table = fits.BinTableHDU.from_columns([fits.Column(n, form, array=values) for n, form, values in columns])
        table.header.update({"PIXTYPE": "HEALPIX", "ORDERING": "RING", **header})
        fits.HDUList([fits.PrimaryHDU(), fits.ImageHDU(np.zeros((4, 4))), table]).writeto(tmp_path / "table.fits")
        return tmp_path / "table.fits"

    return write


@pytest.fixture
def sky(healpy):
    """Longitude and latitude of every pixel, in degrees."""
    return healpy.pix2ang(NSIDE, np.arange(12 * NSIDE**2), lonlat=True)


@pytest.fixture
def noise():
    return np.random.default_rng(0).normal(0, 0.01, 12 * NSIDE**2).astype(np.float32)


# projection


@pytest.mark.parametrize("centre", [(30.0, -45.0), (359.0, 3.0), (120.0, 88.0)])
def test_pixel_positions_match_astropy(centre):
    wcs = pytest.importorskip("astropy.wcs").WCS(naxis=2)
    size, side = 16, 8.0
    # FITS counts pixels from 1; the step of the tangent plane is in degrees.
    wcs.wcs.crpix, wcs.wcs.crval = [(size + 1) / 2] * 2, centre
    wcs.wcs.cdelt = [np.degrees(2 * np.tan(np.radians(side / 2))) / size] * 2
    wcs.wcs.ctype = ["RA---TAN", "DEC--TAN"]
    rows, columns = np.indices((size, size))
    longitude, latitude = np.radians(wcs.wcs_pix2world(columns.ravel(), rows.ravel(), 0))
    expected = [np.cos(latitude) * np.cos(longitude), np.cos(latitude) * np.sin(longitude), np.sin(latitude)]
    np.testing.assert_allclose(gnomonic_grid(centre, side, size).reshape(3, -1), expected, atol=1e-12)


def test_rows_run_north_and_columns_east(write_sky, sky):
    longitude, latitude = sky
    for values, axis in ((longitude, 1), (latitude, 0)):
        path = write_sky(values.astype(np.float32), overwrite=True)
        patch = read_healpix_patches(path, side_deg=20, size=8, centres=[(100.0, 10.0)]).maps[0, 0]
        assert (np.diff(patch, axis=axis) > 0).all()


# HEALPix


@pytest.mark.parametrize("options", [{}, {"nest": True}, {"partial": True}], ids=["ring", "nested", "partial"])
@pytest.mark.parametrize("ordering", ["", "NEST", "nested "])
def test_each_pixel_takes_the_value_of_its_healpix_pixel(healpy, fits, write_sky, noise, options, ordering):
    expected = noise.copy()
    if options.get("nest"):
        noise = healpy.reorder(noise, r2n=True)
    path = write_sky(noise, **options)
    if ordering:
        fits.setval(path, "ORDERING", value=ordering if options.get("nest") else "Ring ", ext=1)
    patches = read_healpix_patches(path, side_deg=5, size=32, centres=[(80.0, -30.0)])
    pixels = healpy.vec2pix(NSIDE, *gnomonic_grid((80.0, -30.0), 5, 32))
    np.testing.assert_array_equal(patches.maps[0, 0], expected[pixels])
    assert patches.mask.all() and patches.skipped == 0


def test_a_coarse_pixel_is_the_mean_of_the_pixels_it_covers(write_sky, noise):
    path = write_sky(1 + noise)
    coarse = read_healpix_patches(path, side_deg=20, size=4, centres=[(80.0, -30.0)]).maps[0, 0]
    # A pixel of 5 degrees covers about 30 HEALPix pixels of standard deviation 0.01.
    np.testing.assert_allclose(coarse, 1, atol=0.007)
    assert coarse.std() > 1e-4


@pytest.mark.parametrize(
    ("form", "missing", "header"),
    [
        ("f4", -1.6375e30, {}),
        ("f4", -1e30, {"BAD_DATA": -1e30}),
        ("f8", -999, {"BAD_DATA": "-999"}),
        ("i2", -32768, {"TNULL2": -32768, "TSCAL2": 1e-4}),
        ("i4", 7, {"TNULL2": 7, "TSCAL2": 1e-4, "TZERO2": 5.0, "INDXSCHM": "IMPLICIT"}),
    ],
)
def test_pixels_without_a_value_are_masked_and_zero(write_table, sky, noise, form, missing, header):
    stored = np.where(sky[1] > 0, missing, (noise * 1e5).astype(int) * 10).astype(form)
    column = ("T", {"f4": "E", "f8": "D", "i2": "I", "i4": "J"}[form], stored)
    path = write_table(("HPIX", "J", np.arange(len(noise))), column, NSIDE=NSIDE, **header)
    patches = read_healpix_patches(path, side_deg=10, size=40, centres=[(50.0, 0.0)])
    assert not patches.mask[0, 22:].any() and patches.mask[0, :18].all()
    assert (patches.maps[0, 0][~patches.mask[0]] == 0).all()
    np.testing.assert_allclose(patches.observed, 0.5, atol=0.06)


@pytest.mark.parametrize(
    ("pixels", "header", "message"),
    [
        ([0, 47], {"ORDERING": "NUNIQ"}, "ORDERING='NUNIQ'.*RING, NEST"),
        ([0, 47], {"NSIDE": 3, "ORDERING": "NEST"}, "NSIDE=3: .*power of 2"),
        ([0, 99], {}, r"pixel 99: .*\[0, 47\].*NSIDE=2"),
        ([5, 6], {"INDXSCHM": "IMPLICIT"}, "2 pixels .*NSIDE=2 .*48"),
    ],
)
def test_tables_that_are_no_map_of_their_resolution_are_rejected(write_table, pixels, header, message):
    with pytest.raises(ValueError, match=message):
        header = {"NSIDE": 2, "INDXSCHM": "EXPLICIT", **header}
        read_healpix_patches(write_table(("N", "J", pixels), ("T", "E", np.ones(2)), **header))


def test_maps_and_masks_in_other_coordinates_are_rejected(write_sky, noise):
    paths = [write_sky(noise, f"{system}.fits", coord=system) for system in "GC"]
    with pytest.raises(ValueError, match=r"COORDSYS: .*.galactic.: .*G\.fits.*equatorial.*C\.fits"):
        read_healpix_patches(paths[0], paths[1])


def test_files_of_several_bins_are_channels(write_sky, noise):
    paths = [write_sky(noise * factor, f"bin{factor}.fits") for factor in (1, 2)]
    maps = read_healpix_patches(paths, side_deg=5, size=8, centres=[(10.0, 10.0), (20.0, -60.0)]).maps
    assert maps.shape == (2, 2, 8, 8) and maps.dtype == np.float32
    np.testing.assert_allclose(maps[:, 1], 2 * maps[:, 0], rtol=1e-6)


def test_tiles_cover_the_sky_without_overlap(write_sky, noise):
    patches = read_healpix_patches(write_sky(noise), side_deg=15, size=8)
    area = 4 * np.pi * np.degrees(1) ** 2
    assert 0.8 < len(patches.maps) * 15**2 / area <= 1.02
    longitude, latitude = np.radians(patches.centres.T)
    vectors = np.array([np.cos(latitude) * np.cos(longitude), np.cos(latitude) * np.sin(longitude), np.sin(latitude)])
    angles = np.degrees(np.arccos(np.clip(vectors.T @ vectors, -1, 1)))[~np.eye(len(latitude), dtype=bool)]
    assert angles.min() > 14.9


def test_patches_with_little_sky_are_skipped_and_counted(write_sky, sky, noise):
    mask = write_sky((sky[1] < -20).astype(np.float32), "mask.fits")
    whole = read_healpix_patches(write_sky(noise), side_deg=15, size=8)
    south = read_healpix_patches(write_sky(noise, overwrite=True), mask, side_deg=15, size=8, min_observed=0.6)
    assert south.skipped > 0 and len(south.maps) + south.skipped == len(whole.maps)
    assert (south.mask.mean((1, 2)) >= 0.6).all() and (south.centres[:, 1] < -20).all()


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (lambda sky: sky[1] < 0, {"centres": [(0.0, 60.0)]}, r"\b0%.*latitude 60\b"),
        (lambda sky: sky[1] < -99, {}, "mask.*empty"),
        (lambda sky: np.ones(12 * 32**2), {}, r"\[12288, 49152\]"),
        (None, {"field": 3}, "field=3"),
        (None, {"side_deg": 45}, "side_deg=45"),
        (None, {"side_deg": float("nan")}, "side_deg=nan"),
    ],
)
def test_options_and_masks_that_give_no_patch_are_rejected(write_sky, sky, noise, mask, options, message):
    mask = None if mask is None else write_sky(mask(sky).astype(np.float32), "mask.fits")
    with pytest.raises(ValueError, match=message):
        read_healpix_patches(write_sky(noise), mask, **options)


def test_maps_with_many_zeros_require_a_mask(write_sky, sky, noise):
    noise[sky[1] > 0] = 0
    with pytest.raises(ValueError, match=r"exactly 0.*mask"):
        read_healpix_patches(write_sky(noise))


def test_errors_for_missing_files_name_where_to_get_them(healpy, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.fits.*DES Y3"):
        read_healpix_patches(tmp_path / "no.fits")
    with pytest.raises(FileNotFoundError, match=r"df_m_16_CIC_z=0\.npy.*Globus"):
        read_quijote_cube(tmp_path / "df_m_16_CIC_z=0.npy")


@pytest.mark.parametrize("missing", [np.nan, -1e30])
def test_pixels_without_a_value_are_rejected_unless_masked(write_sky, sky, noise, missing):
    noise[sky[1] > 60] = missing
    path = write_sky(noise)
    with pytest.raises(ValueError, match=r"sky\.fits: \d+ .*NaN"):
        read_healpix_patches(path)
    mask = write_sky((sky[1] < 60).astype(np.float32), "mask.fits")
    assert np.isfinite(read_healpix_patches(path, mask, side_deg=10, size=8).maps).all()


def test_missing_healpy_is_an_error_that_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "healpy", None)
    with pytest.raises(ImportError, match=r"healpy.*\.\[cosmology\]"):
        read_healpix_patches(tmp_path / "no.fits")


# FITS images


@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 8)])
def test_an_image_is_read_unchanged(fits, tmp_path, shape):
    image = np.random.default_rng(0).normal(size=shape)
    fits.HDUList([fits.PrimaryHDU(), fits.ImageHDU(image)]).writeto(tmp_path / "map.fits")
    for hdu in (None, 1):
        read = read_fits_image(tmp_path / "map.fits", hdu)
        assert read.dtype == np.dtype("=f4")
        np.testing.assert_array_equal(read, image.astype(np.float32).reshape(-1, 8, 8))


def test_errors_list_the_hdus_of_files_without_an_image_or_healpix_map(healpy, fits, tmp_path):
    table = fits.BinTableHDU.from_columns([fits.Column("a", "E", array=np.ones(5))])
    fits.HDUList([fits.PrimaryHDU(), fits.ImageHDU(np.ones((8, 8)))]).writeto(tmp_path / "map.fits")
    table.writeto(tmp_path / "table.fits")
    for read, name, options, message in (
        (read_healpix_patches, "map.fits", {}, "HDU 0: PrimaryHDU, HDU 1: ImageHDU.*HEALPix"),
        (read_fits_image, "map.fits", {"hdu": 0}, "HDU 0.*HDU 0: PrimaryHDU, HDU 1: ImageHDU"),
        (read_fits_image, "map.fits", {"hdu": 7}, "HDU 7"),
        (read_fits_image, "table.fits", {}, "HDU 0: PrimaryHDU, HDU 1: BinTableHDU"),
    ):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name, **options)


@pytest.mark.parametrize(
    ("shape", "mask", "message"),
    [
        ((8,), None, r"\(8,\)"),
        ((8, 9), None, r"\(1, 8, 9\)"),
        ((1, 1, 8, 8), None, r"\(1, 1, 8, 8\)"),
        ((8, 8), np.zeros((8, 8), bool), "empty"),
        ((8, 8), np.ones((4, 4), bool), r"\(4, 4\)"),
    ],
)
def test_images_and_masks_of_other_shapes_are_rejected(fits, tmp_path, shape, mask, message):
    fits.PrimaryHDU(np.ones(shape)).writeto(tmp_path / "map.fits")
    with pytest.raises(ValueError, match=message):
        read_fits_image(tmp_path / "map.fits", mask=mask)


def test_nan_pixels_of_an_image_are_rejected_unless_masked(fits, tmp_path):
    image = np.ones((8, 8), np.float32)
    image[2, 3:7] = np.nan, np.inf, -1.6375e30, -99
    fits.PrimaryHDU(image, fits.Header({"BAD_DATA": -99.0})).writeto(tmp_path / "map.fits")
    with pytest.raises(ValueError, match=r"4 of 64 .*NaN"):
        read_fits_image(tmp_path / "map.fits")
    masked = read_fits_image(tmp_path / "map.fits", mask=image == 1)
    np.testing.assert_array_equal(masked[0], image == 1)


@pytest.mark.parametrize("content", [b"", b"no FITS at all " * 400, None], ids=["empty", "text", "truncated"])
def test_a_broken_fits_file_is_rejected(fits, tmp_path, content):
    path = tmp_path / "map.fits"
    fits.PrimaryHDU(np.ones((64, 64))).writeto(path)
    path.write_bytes(path.read_bytes()[:9000] if content is None else content)
    with pytest.raises(ValueError, match=r"map\.fits\b.*FITS"):
        read_fits_image(path)


# Quijote


def contrast(cells=16, seed=0):
    """Return a random density contrast, which has mean 0 and no values below -1."""
    density = np.random.default_rng(seed).lognormal(0, 0.5, (cells,) * 3).astype(np.float32)
    return density / density.mean(dtype=float).astype(np.float32) - 1


@pytest.fixture
def save_cube(tmp_path):
    def save(values, name="df_m_16_CIC_z=0.5.npy", folder="."):
        path = tmp_path / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, values)
        return path

    return save


def test_name_and_contents_of_a_cube_are_read_without_loading_it(save_cube):
    cube = read_quijote_cube(save_cube(contrast()))
    assert (cube.scheme, cube.redshift, cube.mean) == ("CIC", 0.5, 0.0)
    assert isinstance(cube.values, np.memmap)


def test_slabs_are_means_over_cells_along_each_axis(save_cube):
    delta = contrast()
    maps = quijote_maps(read_quijote_cube(save_cube(delta)), slab_mpc=250)  # slabs of 4 cells of 62.5 Mpc/h each
    assert maps.shape == (12, 1, 16, 16) and maps.dtype == np.float32
    np.testing.assert_allclose(maps[1, 0], delta[4:8].mean(0), atol=1e-6)
    np.testing.assert_allclose(maps[4, 0], delta[:, :4].mean(1), atol=1e-6)
    np.testing.assert_allclose(maps[11, 0], delta[:, :, 12:].mean(2), atol=1e-6)


def test_density_is_converted_to_contrast(save_cube):
    delta = contrast()
    maps = quijote_maps(read_quijote_cube(save_cube(40 * (1 + delta))), QUIJOTE_BOX / 4)
    expected = quijote_maps(read_quijote_cube(save_cube(delta)), QUIJOTE_BOX / 4)
    np.testing.assert_allclose(maps, expected, atol=1e-5)


@pytest.mark.parametrize("slab", [0, 100, 62.5 * 3, 2000, -62.5])
def test_a_slab_that_does_not_divide_the_box_is_rejected_with_valid_sizes(save_cube, slab):
    with pytest.raises(ValueError, match=rf"slab_mpc={slab:g}\b.* 1000, 500, 250, 125, 62\.5"):
        quijote_maps(read_quijote_cube(save_cube(contrast())), slab)


@pytest.mark.parametrize(
    ("values", "name", "message"),
    [
        (contrast(), "cube.npy", "df_m_N_CIC_z=Z.npy"),
        (contrast(), "df_m_16_TSC_z=0.npy", "df_m_N_CIC_z=Z.npy"),
        (np.zeros((16, 16)), None, r"float array \(16, 16, 16\)"),
        (np.zeros((8, 8, 8)), None, r"float array \(16, 16, 16\)"),
        (np.zeros((16, 16, 16), int), None, r"float array \(16, 16, 16\)"),
        (np.where(np.arange(16) == 3, np.nan, contrast()), None, "mean nan"),
        (np.random.default_rng(0).normal(size=(16, 16, 16)), None, "density contrast"),
    ],
)
def test_cubes_not_from_quijote_are_rejected(save_cube, values, name, message):
    with pytest.raises(ValueError, match=message):
        read_quijote_cube(save_cube(values, name or "df_m_16_CIC_z=0.5.npy"))


def test_pickled_and_truncated_cubes_are_rejected(save_cube):
    path = save_cube(np.array([{}], object))
    with pytest.raises(ValueError, match="readable array"):
        read_quijote_cube(path)
    save_cube(contrast())
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match="readable array"):
        read_quijote_cube(path)
