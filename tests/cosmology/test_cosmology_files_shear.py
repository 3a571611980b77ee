"""Shear of convergence maps from files: its accuracy, noise, masks and data sets.

Referees: the shear of a complete periodic sky, from which patches are cut; the convergence in the files.
"""

import json
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.cosmology.dataset.files import read_healpix_patches
from hrm_hf.cosmology.dataset.from_files import MARGIN, sheared
from hrm_hf.cosmology.dataset.info import FileSettings
from hrm_hf.cosmology.dataset.rows import load_cosmology_info, read_arrays
from hrm_hf.cosmology.simulation.fields import ARCMIN, Cosmology, lognormal_convergence, shape_noise
from hrm_hf.models.shear_operator import shear_from_convergence


SIZE = 32
SHEAR = ("--observable", "shear")


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def build(*arguments):
    """The info and the test split of a data set; its folder is the last argument."""
    result = call("data", "cosmology-files", *arguments[:-1], "--out", arguments[-1])
    assert result.exit_code == 0, (result.output, result.exception)
    return load_cosmology_info(arguments[-1]), read_arrays(arguments[-1], "test")


def shear_rows(kappa, margin, seed=0, number=0, mask=None, **survey):
    """Rows of shear, computed from convergence cutouts [rows, planes, wide, wide]."""
    settings = FileSettings("fits", SIZE, 2 * kappa.shape[1], True, 5.0, observable="shear", **survey)
    rows = {"map": kappa, "margin": np.full(len(kappa), margin), "source": np.full(len(kappa), "sky")}
    return sheared(rows if mask is None else rows | {"mask": mask}, settings, seed, number)


def random_cuts(planes=1):
    return np.random.default_rng(0).normal(0, 0.02, (4, planes, 2 * SIZE, 2 * SIZE)).astype(np.float32)


# ---- how exact ----


def missing_shear(side_deg, margins, skies=8, sky_sides=8):
    """Return rms of the missing shear / rms of the shear, [margins, 2]: with and without its mean."""
    sums = np.zeros((len(margins), 3))
    for seed in range(skies):
        side = side_deg * sky_sides * 60 * ARCMIN
        sky = lognormal_convergence(Cosmology(0.3, 0.8), SIZE * sky_sides, side, np.random.default_rng(seed))
        true = shear_from_convergence(torch.from_numpy(sky)).numpy()
        for start in (SIZE, 3 * SIZE, 5 * SIZE):
            patch = np.s_[:, start : start + SIZE, start : start + SIZE]
            for row, margin in enumerate(int(SIZE * one) for one in margins):
                cut = slice(start - margin, start + SIZE + margin)
                missing = shear_rows(sky[None, :, cut, cut], margin)["map"][0] - true[patch]
                varying = missing - missing.mean((1, 2), keepdims=True)
                sums[row] += [np.sum(one**2) for one in (missing, varying, true[patch])]
    return np.sqrt(sums[:, :2] / sums[:, 2:])


@pytest.mark.parametrize("side_deg, stated", [
    (5.0, [[0.47, 0.38], [0.24, 0.15], [0.18, 0.09], [0.10, 0.04]]),
    (2.5, [[0.56, 0.41], [0.34, 0.19], [0.27, 0.13], [0.15, 0.06]]),
])  # fmt: skip
def test_missing_shear_of_a_patch_matches_the_documented_fractions(side_deg, stated):
    assert MARGIN == 0.5
    found = missing_shear(side_deg, [0, 0.25, 0.5, 1])
    np.testing.assert_allclose(found, stated, rtol=0, atol=0.01)  # stated with two digits, for 8 random skies


# ---- noise and masks ----


def test_noise_matches_the_galaxies_of_each_plane():
    kappa = random_cuts(planes=2)
    noise = shear_rows(kappa, 16, sigma_e=0.26, galaxies_per_arcmin2=30)["map"] - shear_rows(kappa, 16)["map"]
    expected = shape_noise(0.26, 15, 5 * 60 / SIZE)
    np.testing.assert_allclose(noise.std((0, 2, 3)), expected, rtol=0.06)  # five standard errors for 4,096 pixels


def test_noise_and_mask_depend_on_seed_file_and_patch():
    def rows(**options):
        return shear_rows(random_cuts(), 16, sigma_e=0.3, mask_fraction=0.3, **options)

    first = rows()
    for name in ("map", "mask", "kappa"):
        np.testing.assert_array_equal(first[name], rows()[name])
    masks = [*first["mask"], rows(seed=1)["mask"][0], rows(number=1)["mask"][0]]
    assert len({mask.tobytes() for mask in masks}) == 6
    assert (first["map"][~np.broadcast_to(first["mask"][:, None], first["map"].shape)] == 0).all()


def test_the_mask_of_the_file_is_combined_with_the_drawn_mask():
    kappa, seen = random_cuts(), np.ones((4, 2 * SIZE, 2 * SIZE), bool)
    seen[:, 20:30, 20:50] = False
    kappa[~seen[:, None]] = 0
    rows, whole = (shear_rows(kappa, 16, mask=mask, mask_fraction=0.3) for mask in (seen, None))
    middle = seen[:, 16:-16, 16:-16]
    np.testing.assert_array_equal(rows["mask"], whole["mask"] & middle)
    hidden = ~np.broadcast_to(middle[:, None], rows["kappa"].shape)
    assert (rows["kappa"][hidden] == 0).all()
    np.testing.assert_allclose(rows["kappa"].sum((2, 3)), 0, atol=1e-4)
    with pytest.raises(ValueError, match="sky: no pixel"):
        shear_rows(kappa, 16, mask=np.zeros_like(seen))


# ---- files ----


def test_a_margin_is_the_sky_around_the_same_patch(tmp_path):
    healpy = pytest.importorskip("healpy")
    values = np.random.default_rng(0).normal(0, 0.01, 12 * 32**2).astype(np.float32)
    healpy.write_map(tmp_path / "sky.fits", values, dtype=np.float32)
    options = {"side_deg": 8, "size": 16, "centres": [(80.0, -30.0), (10.0, 60.0)]}
    alone, around = (read_healpix_patches(tmp_path / "sky.fits", margin=margin, **options) for margin in (0, 8))
    assert around.maps.shape == (2, 1, 32, 32)
    np.testing.assert_array_equal(around.maps[..., 8:-8, 8:-8], alone.maps)
    with pytest.raises(ValueError, match=r"side_deg=16\b.*\b15\b.*\b8\b.*\b16\b"):
        read_healpix_patches(tmp_path / "sky.fits", margin=8, side_deg=16, size=16)


def test_a_sky_becomes_patches_of_masked_shear(tmp_path):
    healpy = pytest.importorskip("healpy")
    latitude = healpy.pix2ang(32, np.arange(12 * 32**2), lonlat=True)[1]
    noise = np.random.default_rng(0).normal(0, 0.01, len(latitude)).astype(np.float32)
    noise[latitude > -49] = healpy.UNSEEN
    healpy.write_map(tmp_path / "sky.fits", noise, dtype=np.float32)
    shape = ("--side-deg", 10, "--size", 16, "--min-observed", 0.9)
    survey = ("--sigma-e", 0.26, "--galaxies", 30, "--mask-fraction", 0.2, "--hole-arcmin", "60,90")
    info, rows = build(tmp_path / "sky.fits", *shape, *SHEAR, *survey, tmp_path / "shear")
    plain, kappa = build(tmp_path / "sky.fits", *shape, tmp_path / "kappa")
    settings = info.settings
    assert (settings.observable, settings.sigma_e, settings.hole_arcmin) == ("shear", 0.26, (60.0, 90.0))
    assert settings.side_rad == pytest.approx(np.radians(10)) and plain.settings.observable == "convergence"
    assert settings.pixel_noise == pytest.approx(shape_noise(0.26, 30, 37.5))
    assert set(rows) == {"map", "mask", "kappa", "source", "longitude", "latitude"}
    assert rows["map"].shape[1:] == (2, 16, 16) and rows["kappa"].shape[1:] == (1, 16, 16)
    card = (tmp_path / "shear" / "README.md").read_text()
    assert "| kappa |" in card and "- margin: 8" in card and "- sigma_e: 0.26" in card
    # Patches with unobserved margins are omitted; the others show the same sky.
    place = [list(zip(one["longitude"], one["latitude"])) for one in (rows, kappa)]
    assert 0 < len(place[0]) < len(place[1])
    for number, centre in enumerate(place[0]):
        other = place[1].index(centre)
        seen, expected = kappa["mask"][other], kappa["map"][other, 0].astype(float)
        np.testing.assert_allclose(
            rows["kappa"][number, 0], np.where(seen, expected - expected[seen].mean(), 0), atol=1e-8
        )
        assert not (rows["mask"][number] & ~seen).any()
        assert (~rows["mask"][number]).sum() >= round(0.2 * 256)


@pytest.fixture
def images(tmp_path):
    """Three images of 32 x 32 pixels."""
    fits = pytest.importorskip("astropy.io.fits")
    for number in range(3):
        values = np.random.default_rng(number).normal(0, 0.02, (SIZE, SIZE))
        fits.PrimaryHDU(values).writeto(tmp_path / f"{number}.fits")
    return [tmp_path / f"{number}.fits" for number in range(3)]


def test_an_image_becomes_its_central_patch(images, tmp_path):
    info, rows = build(*images, *SHEAR, "--pixel-arcmin", 6, tmp_path / "shear")
    kappa = build(*images, tmp_path / "kappa")[1]["map"][..., 8:-8, 8:-8].astype(float)
    np.testing.assert_allclose(rows["kappa"], kappa - kappa.mean((2, 3), keepdims=True), atol=1e-8)
    assert rows["mask"].all() and (info.settings.size, info.settings.side_deg) == (16, 1.6)
    assert info.settings.options == {"margin": 0.5, "pixel_arcmin": 6.0}
    wider = build(*images, *SHEAR, "--pixel-arcmin", 6, "--margin", 1.5, tmp_path / "wider")[1]
    np.testing.assert_allclose(wider["kappa"].std(), kappa[..., 4:-4, 4:-4].std(), rtol=0.05)
    np.testing.assert_allclose(wider["map"], rows["map"][..., 4:-4, 4:-4], atol=1e-8)  # the same image


@pytest.mark.parametrize("arguments, message", [
    (("0.fits", *SHEAR), "--pixel-arcmin: pixel_arcmin"),
    (("0.fits", "--sigma-e", 0.3), "--sigma-e: sigma_e=0.3"),
    (("0.fits", *SHEAR, "--pixel-arcmin", 6, "--margin", 3), "--margin"),
    (("0.fits", *SHEAR, "--pixel-arcmin", 6, "--side-deg", 5), "--side-deg: side_deg="),
    (("0.fits", *SHEAR, "--mask-edge-share", 1.2), "mask_edge_share=1.2"),
    (("df_m_16_CIC_z=0.npy", *SHEAR), "--observable: observable='shear'"),
])  # fmt: skip
def test_bad_usage_is_rejected(images, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = call("data", "cosmology-files", *arguments, "--out", "out")
    assert result.exit_code == 2 and message in re.sub(r"[\s│]+", " ", result.output)
    assert not (tmp_path / "out").exists()


# ---- what shear from files is for ----


@pytest.fixture
def labelled(tmp_path):
    """Data set of the shear of 20 images, 5 of which are in the test split."""
    fits = pytest.importorskip("astropy.io.fits")
    table = ["file,omega_m,sigma_8"]
    for number in range(20):
        omega_m, sigma_8 = np.random.default_rng(number).uniform([0.1, 0.6], [0.5, 1.0])
        side = 2 * 5 * 60 * ARCMIN
        kappa = lognormal_convergence(Cosmology(omega_m, sigma_8), SIZE, side, np.random.default_rng(number))
        fits.PrimaryHDU(kappa).writeto(tmp_path / f"{number}.fits")
        table.append(f"{number}.fits,{omega_m},{sigma_8}")
    (tmp_path / "labels.csv").write_text("\n".join(table))
    files = [tmp_path / f"{number}.fits" for number in range(20)]
    options = ("--labels", tmp_path / "labels.csv", "--test-share", 0.25, "--pixel-arcmin", 18.75, "--sigma-e", 0.26)
    return build(*files, *SHEAR, *options, "--mask-fraction", 0.2, tmp_path / "data")[0], tmp_path / "data"


def test_mass_maps_are_reconstructed_from_shear_of_files(labelled):
    info, data = labelled
    fields = info.config_fields()
    assert (fields["num_channels"], fields["mask_channel"], fields["padding_mode"]) == (3, True, "zeros")
    result = call("eval", "cosmo-map", "--data", data, "--method", "kaiser-squires", "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    assert json.loads(result.stdout)["metrics"]["error_observed"]["value"] < 1  # an empty map has error 1
    result = call("eval", "cosmo-map", "--data", data, "--method", "wiener")
    assert result.exit_code == 2
    assert "use kaiser-squires" in re.sub(r"[\s│]+", " ", result.output)
