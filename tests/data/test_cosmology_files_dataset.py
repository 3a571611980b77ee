"""Data sets of maps read from files: the table of parameters, the split by universe, what is written."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.data.cosmology_files import quijote_maps, read_quijote_cube
from hrm_hf.data.cosmology_files_dataset import INFO_FILE, LabelTable, cube_reading, write_files_dataset


def contrast(seed=0):
    """A density contrast: mean 0, nothing below -1."""
    density = np.random.default_rng(seed).lognormal(0, 0.5, (16, 16, 16)).astype(np.float32)
    return density / density.mean(dtype=float).astype(np.float32) - 1


@pytest.fixture
def save_cube(tmp_path):
    def save(values, folder="."):
        path = tmp_path / folder / "df_m_16_CIC_z=0.5.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, values)
        return path

    return save


# labels

QUIJOTE_TABLE = """#Omega_m   Omega_b  h  n_s  sigma_8
0.1755 0.0668 0.7737 0.8849 0.6641
0.2139 0.0556 0.8599 0.9785 0.8619
"""


@pytest.fixture
def table(tmp_path):
    def write(text, name="labels.csv"):
        (tmp_path / name).write_text(text)
        return LabelTable(tmp_path / name)

    return write


def test_quijotes_table_is_read_by_the_number_of_the_folder(table, tmp_path):
    labels = table(QUIJOTE_TABLE, "latin_hypercube_params.txt")
    assert labels(tmp_path / "latin_hypercube" / "1" / "df_m_128_CIC_z=0.npy") == (0.2139, 0.8619)


def test_a_table_names_files_by_the_end_of_their_path(table, tmp_path):
    labels = table("file,omega_m,sigma_8\na/map.fits,0.3,0.8\nb/map.fits,0.4,0.7\n")
    assert labels(tmp_path / "b" / "map.fits") == (0.4, 0.7)


@pytest.mark.parametrize("path", ["c/map.fits", "map.fits"])
def test_a_file_without_a_row_has_no_label(table, tmp_path, path):
    labels = table("file,omega_m,sigma_8\na/map.fits,0.3,0.8\n")
    with pytest.raises(ValueError, match=r"0 rows of .* name it"):
        labels(tmp_path / path)


def test_a_folder_that_is_no_row_has_no_label(table, tmp_path):
    labels = table(QUIJOTE_TABLE)
    for folder in ("2", "fiducial"):
        with pytest.raises(ValueError, match=f"the number of a row, 0 to 1, not '{folder}'"):
            labels(tmp_path / folder / "df_m_128_CIC_z=0.npy")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "is empty"),
        ("omega_m,h\n0.3,0.7\n", "0 columns sigma_8"),
        ("omega_m,s8\n0.3,0.7\n", "0 columns sigma_8"),  # which may be S_8
        ("omega_m,sigma_8\n0.3,high\n", "row 1: sigma_8 is 'high', expected a number"),
        ("omega_m,sigma_8\n0.3,0.8\n1.3,0.8\n", r"row 2: omega_m=1.3 is not in \(0, 1\]"),
        ("omega_m,sigma_8\n0.3,nan\n", "row 1: sigma_8=nan"),
        ("omega_m,sigma_8\n0.3\n", "row 1 has 1 columns, the header has 2"),
    ],
)
def test_a_bad_table_is_refused(table, text, message):
    with pytest.raises(ValueError, match=message):
        table(text)


# data sets


def run(*arguments):
    return CliRunner().invoke(app, ["data", "cosmology-files", *map(str, arguments)])


def load(folder, split):
    from datasets import load_dataset

    return load_dataset(str(folder), split=split, cache_dir=str(folder) + ".cache").with_format("numpy")


def test_cubes_with_labels_become_a_data_set_split_by_universe(save_cube, tmp_path):
    paths = [save_cube(contrast(seed=number), folder=str(number)) for number in range(4)]
    rows = "\n".join(f"{0.2 + number / 10} {0.7 + number / 20}" for number in range(4))
    (tmp_path / "params.txt").write_text(f"#Omega_m sigma_8\n{rows}\n")
    out = tmp_path / "out"
    result = run(
        *paths, "--labels", tmp_path / "params.txt", "--slab-mpc", 250, "--test-share", 0.25, "--out", out, "--json"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["train_rows"] == 36
    train, test = load(out, "train"), load(out, "test")
    assert (len(train), len(test)) == (36, 12)
    assert not set(train["cosmology_id"]) & set(test["cosmology_id"])
    row = train[13]
    number = int(row["source"].split("/")[0])
    assert row["omega_m"] == pytest.approx(0.2 + number / 10)
    assert row["s_8"] == pytest.approx(row["sigma_8"] * (row["omega_m"] / 0.3) ** 0.5)
    expected = quijote_maps(read_quijote_cube(paths[number]), 250)[row["axis"] * 4 + row["slab"]]
    np.testing.assert_array_equal(row["map"], expected)
    info = json.loads((out / INFO_FILE).read_text())
    np.testing.assert_allclose(info["pixel_std"], [np.stack(train["map"]).std()], rtol=1e-5)
    assert "NOT convergence" in info["units"]["map"]


def test_a_sky_without_labels_becomes_patches_without_labels(tmp_path):
    healpy = pytest.importorskip("healpy")
    latitude = healpy.pix2ang(32, np.arange(12 * 32**2), lonlat=True)[1]
    noise = np.random.default_rng(0).normal(0, 0.01, len(latitude)).astype(np.float32)
    for name, values in (("sky", noise), ("mask", (latitude < -50).astype(np.float32))):
        healpy.write_map(tmp_path / f"{name}.fits", values, dtype=np.float32)
    out = tmp_path / "out"
    options = ("--mask", tmp_path / "mask.fits", "--side-deg", 15, "--size", 16)
    result = run(tmp_path / "sky.fits", *options, "--out", out)
    assert result.exit_code == 0, result.output
    rows = load(out, "test")
    assert set(rows.column_names) == {"map", "mask", "source", "longitude", "latitude"}
    assert (np.stack(rows["mask"]).mean((1, 2)) >= 0.5).all() and rows[0]["mask"].dtype == bool
    info = json.loads((out / INFO_FILE).read_text())
    assert info["skipped"] > 0 and info["labels"] is None
    observed = np.stack(rows["map"])[:, 0][np.stack(rows["mask"])]
    np.testing.assert_allclose(info["pixel_std"], [observed.std()], rtol=1e-5)


def test_images_become_rows(tmp_path):
    fits = pytest.importorskip("astropy.io.fits")
    for name in ("a", "b"):
        fits.PrimaryHDU(np.random.default_rng(ord(name)).normal(size=(16, 16))).writeto(tmp_path / f"{name}.fits")
    result = run(tmp_path / "a.fits", tmp_path / "b.fits", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert load(tmp_path / "out", "test")["source"][:].tolist() == ["a.fits", "b.fits"]


def test_images_of_two_shapes_are_refused(tmp_path):
    fits = pytest.importorskip("astropy.io.fits")
    for size in (8, 16):
        fits.PrimaryHDU(np.ones((size, size))).writeto(tmp_path / f"{size}.fits")
    result = run(tmp_path / "8.fits", tmp_path / "16.fits", "--out", tmp_path / "out")
    assert isinstance(result.exception, ValueError)
    assert "16.fits gives maps of shape (1, 16, 16), the first file (1, 8, 8)" in str(result.exception)
    assert not list((tmp_path / "out").rglob("*.parquet"))


def test_bad_usage_is_refused_before_anything_is_read(save_cube, tmp_path):
    path = save_cube(contrast())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "something").touch()
    for arguments, message in (
        ((path, "--size", 64, "--out", tmp_path / "new"), "--size has no effect on Quijote cubes"),
        ((tmp_path / "df_m_16_CIC_z=0.npy", "--out", tmp_path / "new"), "Nothing is downloaded"),
        ((path, "--out", tmp_path / "out"), "not an empty folder"),
        ((path, "--labels", tmp_path / "no.csv", "--out", tmp_path / "new"), "no.csv does not exist"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in re.sub(r"[\s│]+", " ", result.output)


def test_a_split_without_labels_is_refused(save_cube, tmp_path):
    readings = [cube_reading(save_cube(contrast()), 250)]
    with pytest.raises(ValueError, match="needs labels"):
        write_files_dataset(readings, tmp_path / "out", format="quijote", unit="", options={}, test_share=0.5)


def test_a_split_that_would_be_empty_is_refused(save_cube, table, tmp_path):
    labels = table("omega_m,sigma_8\n0.3,0.8\n")
    readings = [cube_reading(save_cube(contrast(), folder="0"), 250)]
    with pytest.raises(ValueError, match="of 1 universes leaves a split empty"):
        write_files_dataset(
            readings, tmp_path / "out", format="quijote", unit="", options={}, labels=labels, test_share=0.5
        )
