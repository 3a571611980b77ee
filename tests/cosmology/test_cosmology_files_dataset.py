"""Data sets of maps read from files: the table of parameters, the split by universe, the written rows."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from hrm_hf.cli import app
from hrm_hf.cosmology.dataset import from_files
from hrm_hf.cosmology.dataset.files import quijote_maps, read_quijote_cube
from hrm_hf.cosmology.dataset.from_files import LabelTable, cube_reading, write_files_dataset
from hrm_hf.cosmology.dataset.info import INFO_FILE
from hrm_hf.cosmology.dataset.rows import UNFINISHED, load_cosmology_info, read_arrays


def contrast(seed=0):
    """Return a random density contrast, which has mean 0 and no values below -1."""
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


def test_rows_of_the_quijote_table_are_found_by_folder_number(table, tmp_path):
    labels = table(QUIJOTE_TABLE, "latin_hypercube_params.txt")
    assert labels(tmp_path / "latin_hypercube" / "1" / "df_m_128_CIC_z=0.npy") == (0.2139, 0.8619)


@pytest.mark.parametrize(
    "text",
    [
        "file,omega_m,sigma_8\na/map.fits,0.3,0.8\nb/map.fits,0.4,0.7\n",
        ",file,omega_m,sigma_8\n0,a/map.fits,0.3,0.8\n1,b/map.fits,0.4,0.7\n",  # as DataFrame.to_csv writes it
        "file\tomega_m\tsigma_8\n0\ta/map.fits\t0.3\t0.8\n1\tb/map.fits\t0.4\t0.7\n",  # as R writes it
        ";Omega_m;Sigma8\na/map.fits;0,3;0,8\nb/map.fits;0,4;0,7\n",  # the index has the file names
        ",,omega_m,sigma_8\n0,a/map.fits,0.3,0.8\n1,b/map.fits,0.4,0.7\n",  # an index of two levels
        ",omega_m,sigma_8\n7,0.4,0.7\n0,0.3,0.8\n",  # an index of shuffled rows
    ],
)
def test_label_tables_match_files_by_path_suffix_or_index(table, tmp_path, text):
    assert table(text)(tmp_path / ("b" if "map" in text else "7") / "map.fits") == (0.4, 0.7)


@pytest.mark.parametrize("path", ["c/map.fits", "map.fits"])
def test_a_file_without_a_row_has_no_label(table, tmp_path, path):
    labels = table("file,omega_m,sigma_8\na/map.fits,0.3,0.8\n")
    with pytest.raises(ValueError, match=r"map\.fits: 0 rows"):
        labels(tmp_path / path)


def test_a_folder_without_a_row_has_no_label(table, tmp_path):
    labels = table(QUIJOTE_TABLE)
    for folder in ("2", "fiducial"):
        with pytest.raises(ValueError, match=f"0 to 1.*'{folder}'"):
            labels(tmp_path / folder / "df_m_128_CIC_z=0.npy")


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "no rows"),
        ("omega_m,h\n0.3,0.7\n", "0 sigma_8 columns"),
        ("omega_m,s8\n0.3,0.7\n", "0 sigma_8 columns"),  # s8 is ambiguous: it may be S_8
        ("omega_m,sigma_8\n0.3,high\n", "row 1: sigma_8=high"),
        ("omega_m,sigma_8\n0.3,0.8\n1.3,0.8\n", "row 2: omega_m=1.3"),
        ("omega_m,sigma_8\n0.3,nan\n", "row 1: sigma_8=nan"),
        ("omega_m,sigma_8\n0.3\n", "row 1: 1 fields; expected 2"),
    ],
)
def test_an_invalid_label_table_is_rejected(table, text, message):
    with pytest.raises(ValueError, match=message):
        table(text)


def test_bounds_of_a_flat_prior_are_estimated_without_bias(table):
    # The referee is the prior that the tables are drawn from.
    rng = np.random.default_rng(0)
    found = []
    for _ in range(400):
        rows = zip(rng.uniform(0.2, 0.4, 10), rng.uniform(0.6, 1.0, 10))
        found.append(table("omega_m,sigma_8\n" + "\n".join(f"{a},{b}" for a, b in rows)).bounds("sigma_8"))
    np.testing.assert_allclose(np.mean(found, 0), [0.6, 1.0], atol=0.006)  # 3 standard errors


def test_estimated_prior_bounds_stay_in_the_valid_range(table):
    low, high = table("omega_m,sigma_8\n0.1,0.8\n0.9,0.9\n").bounds("omega_m")
    assert (low, high) == (0, 1)


# data sets


def run(*arguments):
    return CliRunner().invoke(app, ["data", "cosmology-files", *map(str, arguments)])


def load(folder, split):
    from datasets import load_dataset

    return load_dataset(str(folder), split=split, cache_dir=str(folder) + ".cache").with_format("numpy")


def test_labeled_cubes_become_a_data_set_split_by_universe(save_cube, tmp_path):
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
    assert "NOT convergence" in (out / "README.md").read_text()

    # The reader for generated maps returns the same columns, including strings.
    for split, dataset in (("train", train), ("test", test)):
        rows = read_arrays(out, split)
        assert set(rows) == set(dataset.column_names)
        for name, values in rows.items():
            np.testing.assert_array_equal(values, dataset[:][name], err_msg=name)
    read = load_cosmology_info(out)
    assert (read.kind, read.counts, read.labels) == ("quijote", {"train": 36, "test": 12}, "params.txt")
    assert read.settings.options == {"slab_mpc": 250.0}
    fields = read.config_fields()
    # Four values, 0.1 and 0.05 apart: the prior extends one such distance beyond the lowest and the highest.
    np.testing.assert_allclose(fields.pop("prior_bounds"), [[0.1, 0.6], [0.65, 0.9]])
    assert fields == {
        "image_size": 16, "num_channels": 1, "mask_channel": False, "target_names": ["omega_m", "sigma_8"],
        "derived_s8": True, "pixel_mean": info["pixel_mean"], "pixel_std": info["pixel_std"], "padding_mode": "zeros",
    }  # fmt: skip


def test_an_unlabeled_sky_becomes_unlabeled_patches(tmp_path):
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
    read = load_cosmology_info(out)
    assert (read.counts, read.settings.side_deg, read.settings.has_mask) == (
        {"train": 0, "test": len(rows)},
        15.0,
        True,
    )
    assert np.array_equal(read_arrays(out, "test", ["mask"])["mask"], np.stack(rows["mask"]))
    for wanted in (read.config_fields, lambda: read.prior, lambda: read.target_names):
        with pytest.raises(ValueError, match=r"healpix.*omega_m.*sigma_8.*--labels.*pipeline"):
            wanted()
    with pytest.raises(ValueError, match=r"'train'.*\['test'\].*--labels"):
        read_arrays(out, "train")
    observed = np.stack(rows["map"])[:, 0][np.stack(rows["mask"])]
    np.testing.assert_allclose(info["pixel_std"], [observed.std()], rtol=1e-5)


def test_images_become_rows(tmp_path):
    fits = pytest.importorskip("astropy.io.fits")
    for name in ("a", "b"):
        fits.PrimaryHDU(np.random.default_rng(ord(name)).normal(size=(16, 16))).writeto(tmp_path / f"{name}.fits")
    result = run(tmp_path / "a.fits", tmp_path / "b.fits", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert load(tmp_path / "out", "test")["source"][:].tolist() == ["a.fits", "b.fits"]


def test_images_of_two_shapes_are_rejected(tmp_path):
    fits = pytest.importorskip("astropy.io.fits")
    for size in (8, 16):
        fits.PrimaryHDU(np.ones((size, size))).writeto(tmp_path / f"{size}.fits")
    result = run(tmp_path / "8.fits", tmp_path / "16.fits", "--out", tmp_path / "out")
    assert isinstance(result.exception, ValueError)
    assert re.search(r"16\.fits.*\(1, 16, 16\).*\(1, 8, 8\)", str(result.exception))
    assert not list((tmp_path / "out").rglob("*.parquet"))


def test_bad_usage_is_rejected_before_reading(save_cube, tmp_path):
    path = save_cube(contrast())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "something").touch()
    for arguments, message in (
        ((path, "--size", 64, "--out", tmp_path / "new"), "--size: size=64"),
        ((tmp_path / "df_m_16_CIC_z=0.npy", "--out", tmp_path / "new"), "Globus"),
        ((path, "--out", tmp_path / "out"), "out="),
        ((path, "--labels", tmp_path / "no.csv", "--out", tmp_path / "new"), "no.csv"),
        ((path, "--omega-m", "0.1,0.5", "--out", tmp_path / "new"), "--omega-m: omega_m=0.1,0.5"),
        ((path, "--sigma-8", "high", "--out", tmp_path / "new"), "--sigma-8: sigma_8=high"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in re.sub(r"[\s│]+", " ", result.output)


@pytest.mark.parametrize("rows, message", [("", ": .*labels"), ("omega_m,sigma_8\n0.3,0.8\n", r" of 1\b")])
def test_a_split_needs_labels_of_two_universes(save_cube, table, tmp_path, rows, message):
    readings, labels = [cube_reading(save_cube(contrast(), folder="0"), 250)], table(rows) if rows else None
    with pytest.raises(ValueError, match=rf"test_share=0\.5{message}"):
        write_files_dataset(readings, tmp_path / "out", kind="quijote", options={}, labels=labels, test_share=0.5)


@pytest.fixture
def two_cubes(save_cube, tmp_path):
    """Paths of two cubes, of a table with one omega_m and two sigma_8, and of a folder to write."""
    paths = [save_cube(contrast(seed=number), folder=str(number)) for number in range(2)]
    (tmp_path / "params.txt").write_text("#Omega_m sigma_8\n0.3175 0.8\n0.3175 0.9\n")
    return [*paths, "--labels", tmp_path / "params.txt", "--slab-mpc", 250, "--out", tmp_path / "out"]


def test_a_known_prior_is_taken_from_the_options(two_cubes, tmp_path):
    result = run(*two_cubes, "--omega-m", "0.1,0.5", "--test-share", 0.5)
    assert result.exit_code == 0, result.output
    info = load_cosmology_info(tmp_path / "out")
    assert info.prior["omega_m"] == (0.1, 0.5) and info.prior["sigma_8"] == pytest.approx((0.7, 1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), r"omega_m=0\.3175.*--omega-m LOW,HIGH"),
        (("--omega-m", "0.1,0.3"), r"omega_m=0\.3175.*params\.txt.*0\.1 to 0\.3"),
        (("--omega-m", "0.5,0.1"), r"omega_m\D+0\.5\D+0\.1\b"),
    ],
)
def test_a_prior_that_does_not_fit_the_labels_is_rejected(two_cubes, tmp_path, options, message):
    result = run(*two_cubes, *options)
    assert isinstance(result.exception, ValueError)
    assert re.search(message, str(result.exception))
    assert not (tmp_path / "out").exists()


def test_simulated_maps_are_not_written_into_a_folder_of_maps_from_files(two_cubes, tmp_path):
    assert run(*two_cubes, "--omega-m", "0.1,0.5").exit_code == 0
    command = ["data", "cosmology", "--samples", "8", "--size", "16", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2 and re.search(r"kind\b.*quijote.*lognormal", re.sub(r"[\s│]+", " ", result.output))


# interruptions


@pytest.fixture
def three_cubes(save_cube, table, tmp_path, monkeypatch):
    """Return a function that writes the maps of three cubes to three shards; it fails at cube number `broken`."""
    monkeypatch.setattr(from_files, "READS_IN_SHARD", 1)
    paths = [save_cube(contrast(seed=number), folder=str(number)) for number in range(3)]
    labels = table("omega_m,sigma_8\n0.3,0.8\n0.2,0.9\n0.4,0.7\n")
    read = []

    def write(out, broken=None, **options):
        read.clear()

        def logged(number, reading):
            def call():
                read.append(number)
                if number == broken:
                    raise OSError(28, "no space left on device")
                return reading.read()

            return from_files.Reading(reading.path, call)

        readings = [logged(number, cube_reading(path, 250)) for number, path in enumerate(paths)]
        return write_files_dataset(readings, tmp_path / out, kind="quijote", options={}, labels=labels, **options)

    write.read = read
    return write


def test_the_same_call_finishes_an_interrupted_build(three_cubes, tmp_path):
    with pytest.raises(OSError, match="Errno 28"):
        three_cubes("out", broken=2)
    left = sorted(path.name for path in (tmp_path / "out").rglob("*.*"))
    assert left == ["00000-of-00003.parquet", "00001-of-00003.parquet", UNFINISHED]
    with pytest.raises(FileNotFoundError, match=r"cosmology\.json.*interrupted"):
        load_cosmology_info(tmp_path / "out")
    kept = (tmp_path / "out" / "test" / "00001-of-00003.parquet").stat().st_mtime_ns
    info = three_cubes("out")
    assert three_cubes.read == [0, 2]  # the first cube defines the columns
    assert (tmp_path / "out" / "test" / "00001-of-00003.parquet").stat().st_mtime_ns == kept
    assert info == three_cubes("whole")
    for name, column in read_arrays(tmp_path / "whole", "test").items():
        np.testing.assert_array_equal(read_arrays(tmp_path / "out", "test")[name], column)
    assert not (tmp_path / "out" / UNFINISHED).exists()
    with pytest.raises(FileExistsError, match=r"out=.*out: "):
        three_cubes("out")


def test_a_different_call_does_not_resume_an_interrupted_build(three_cubes, tmp_path):
    with pytest.raises(OSError, match="Errno 28"):
        three_cubes("out", broken=1)
    with pytest.raises(FileExistsError, match=r"splits train.* None"):
        three_cubes("out", test_share=0.4)
