"""Cosmology data sets on disk: their content, which neither workers nor interruptions change.

Referees: `datasets` and `pyarrow` for the files, `generate_map` for single maps, numpy for means and deviations, a
small tmpfs for the full disk.
"""

import copy
import errno
import json
import os
import shutil
import signal
import subprocess
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Array2D, Array3D, load_dataset

from hrm_hf.cosmology.dataset import build as cosmology_build
from hrm_hf.cosmology.dataset.build import build_cosmology_dataset
from hrm_hf.cosmology.dataset.info import TEST_ID, info_from_json
from hrm_hf.cosmology.dataset.rows import load_cosmology_info, read_arrays
from hrm_hf.cosmology.simulation.maps import MapSettings, generate_map
from hrm_hf.io import workers as worker_processes


SMALL = MapSettings(size=16)
COUNTS = (50, 20)  # three blocks in the largest shard; the last one is smaller
FORM = {"shard_size": 20}


def build(out, settings=SMALL, counts=COUNTS, **options):
    return build_cosmology_dataset(settings, out, *counts, **(FORM | options))


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def stop_at(monkeypatch, shard: int, error: BaseException):
    """Make a build fail in the middle of the shard with this index."""
    written = []

    def write(file, features, blocks):
        def failing():
            for number, block in enumerate(blocks):
                if len(written) == shard and number == 1:
                    raise error
                yield block

        original(file, features, failing())
        written.append(file)

    original = cosmology_build.write_shard
    monkeypatch.setattr(cosmology_build, "write_shard", write)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("built") / "set"
    return out, build(out)


@pytest.fixture
def copied(built, tmp_path):
    """A copy that a test may modify."""
    return Path(shutil.copytree(built[0], tmp_path / "copy"))


# ---- what a data set holds ----


def test_a_stored_seed_reproduces_its_map(built):
    rows = read_arrays(built[0], "test")
    for row in (0, 19):
        parameters = float(rows["omega_m"][row]), float(rows["sigma_8"][row])
        assert np.array_equal(generate_map(SMALL, *parameters, int(rows["seed"][row]))[0], rows["map"][row])


def test_arrays_match_rows_decoded_by_datasets(built):
    rows, dataset = read_arrays(built[0], "train"), load_dataset(str(built[0]), split="train").with_format("numpy")
    assert set(rows) == set(dataset.column_names) and dataset.features["map"] == Array3D((1, 16, 16), "float32")
    for name, values in rows.items():
        assert values.dtype == dataset[0][name].dtype
        assert np.array_equal(values, dataset[:][name])


def test_splits_share_no_cosmology(built):
    train, test = (read_arrays(built[0], split, ["omega_m", "cosmology_id"]) for split in ("train", "test"))
    assert not set(train["omega_m"]) & set(test["omega_m"])
    assert test["cosmology_id"].tolist() == list(range(TEST_ID, TEST_ID + 20))


def test_parameters_fill_the_prior_and_determine_s8(tmp_path):
    prior = {"omega_m": (0.2, 0.3), "sigma_8": (0.9, 0.95)}
    rows = (build(tmp_path, counts=(200, 0), prior=prior), read_arrays(tmp_path, "train"))[1]
    for name, (low, high) in prior.items():
        assert low <= rows[name].min() < low + 0.05 * (high - low) and high - 0.05 * (high - low) < rows[name].max()
    assert np.allclose(rows["s_8"], rows["sigma_8"] * np.sqrt(rows["omega_m"] / 0.3), rtol=1e-6)


def test_maps_of_one_cosmology_differ_only_in_their_noise(tmp_path):
    build(tmp_path, counts=(6, 0), maps_per_cosmology=3)
    rows = read_arrays(tmp_path, "train")
    assert rows["cosmology_id"].tolist() == [0, 0, 0, 1, 1, 1]
    assert len(set(rows["omega_m"])) == 2 and len(set(rows["seed"])) == 6
    assert len(np.unique(rows["map"].reshape(6, -1), axis=0)) == 6


def test_a_larger_data_set_begins_with_the_smaller_one_for_any_shard_size(built, tmp_path):
    build(tmp_path, counts=(12, 5), shard_size=5)
    for split, count in (("train", 12), ("test", 5)):
        large, small = read_arrays(built[0], split), read_arrays(tmp_path, split)
        assert all(np.array_equal(large[name][:count], small[name]) for name in large)


def test_pixel_statistics_match_the_train_split_for_any_shard_size(built, tmp_path):
    maps = read_arrays(built[0], "train")["map"].astype(np.float64)
    assert np.allclose(built[1].pixel_mean, maps.mean((0, 2, 3)), atol=1e-9)
    assert np.allclose(built[1].pixel_std, maps.std((0, 2, 3)), rtol=1e-8)
    info = build(tmp_path, shard_size=7)
    assert (info.pixel_mean, info.pixel_std) == (built[1].pixel_mean, built[1].pixel_std)


def test_statistics_ignore_unobserved_pixels_and_masks_round_trip(tmp_path, monkeypatch):
    def draw(settings, omega_m, sigma_8, seed):
        rng = np.random.default_rng(seed)
        mask = rng.random((16, 16)) < 0.7
        return {"map": np.where(mask, rng.normal(3, 2, (2, 16, 16)), 1e6).astype(np.float32), "mask": mask}

    monkeypatch.setattr(cosmology_build, "generate_columns", draw)
    settings = MapSettings(kind="des", size=16, source_redshifts=(0.5, 1.0), mask_fraction=0.3)
    info = build(tmp_path, settings)
    rows = read_arrays(tmp_path, "train")
    seen = np.moveaxis(rows["map"], 1, 0)[:, rows["mask"]].astype(np.float64)
    assert rows["mask"].dtype == bool and 0.6 < rows["mask"].mean() < 0.8
    assert np.allclose(info.pixel_mean, seen.mean(1)) and np.allclose(info.pixel_std, seen.std(1))
    dataset = load_dataset(str(tmp_path), split="train").with_format("numpy")
    assert dataset.features["mask"] == Array2D((16, 16), "bool")
    assert np.array_equal(dataset[:]["mask"], rows["mask"])
    fields = info.config_fields()
    assert (fields["num_channels"], fields["mask_channel"], fields["padding_mode"]) == (3, True, "zeros")


def test_legacy_maps_are_labeled_with_omega_m_only(tmp_path):
    info = build(tmp_path, MapSettings(kind="legacy-synthetic", size=32), (5, 0))
    assert set(read_arrays(tmp_path, "train")) == {"map", "omega_m", "seed", "cosmology_id"}
    fields = info.config_fields()
    assert (fields["target_names"], fields["derived_s8"], fields["prior_bounds"]) == (["omega_m"], False, [[0.1, 0.5]])


def test_the_info_file_round_trips(built):
    assert load_cosmology_info(built[0]) == built[1]
    values = json.loads((built[0] / "cosmology.json").read_text())
    before = copy.deepcopy(values)
    assert info_from_json(values) == built[1] and values == before


def test_the_data_set_determines_config_fields(built):
    assert built[1].config_fields() == {
        "image_size": 16, "num_channels": 1, "mask_channel": False, "target_names": ["omega_m", "sigma_8"],
        "derived_s8": True, "prior_bounds": [[0.1, 0.5], [0.6, 1.0]], "pixel_mean": list(built[1].pixel_mean),
        "pixel_std": list(built[1].pixel_std), "padding_mode": "circular",
    }  # fmt: skip


# ---- workers and interruptions ----


def test_two_workers_draw_the_same_masked_tomographic_maps_as_one(tmp_path):
    settings = MapSettings(kind="des", size=16, source_redshifts=(0.5, 1.0), sigma_e=0.26, mask_fraction=0.2)
    for workers in (1, 2):
        build(tmp_path / str(workers), settings, (20, 0), workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert read_arrays(tmp_path / "2", "train")["mask"].shape == (20, 16, 16)


@pytest.mark.parametrize("shard", [0, 3])
def test_a_resumed_build_equals_an_uninterrupted_one(built, tmp_path, monkeypatch, shard):
    out = tmp_path / "set"
    stop_at(monkeypatch, shard, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        build(out)
    monkeypatch.undo()
    left = sorted(file.name for file in out.rglob("*") if file.is_file())
    assert len([name for name in left if name.endswith(".parquet")]) == shard and "cosmology.json" not in left
    with pytest.raises(FileNotFoundError, match=r"cosmology\.json.*interrupted"):
        load_cosmology_info(out)
    times = {file: file.stat().st_mtime_ns for file in out.rglob("*.parquet")}
    build(out)
    assert contents(out) == contents(built[0])
    assert all(file.stat().st_mtime_ns == time for file, time in times.items()), "a finished shard was written again"


def test_a_killed_worker_leaves_complete_shards(built, tmp_path, monkeypatch):
    class Killed(ProcessPoolExecutor):
        def submit(self, function, *args):
            future = super().submit(function, *args)
            if args:
                os.kill(next(iter(self._processes)), signal.SIGKILL)
            return future

    monkeypatch.setattr(worker_processes, "ProcessPoolExecutor", Killed)
    with pytest.raises(BrokenProcessPool):
        build(tmp_path / "set", workers=2)
    monkeypatch.undo()
    build(tmp_path / "set")
    assert contents(tmp_path / "set") == contents(built[0])


def test_partial_files_of_a_killed_build_are_removed(copied, built):
    (copied / "train" / ".00001-of-00003.parquet.123.tmp").write_bytes(b"half")
    (copied / "train" / "00001-of-00003.parquet").unlink()
    (copied / "cosmology.json").rename(copied / "unfinished.json")
    build(copied)
    assert contents(copied) == contents(built[0])


@pytest.mark.external
def test_a_full_disk_keeps_finished_shards(built, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]  # the data set has about 80 kB
    if shutil.which("mount") is None or subprocess.run(options, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted")
    try:
        with pytest.raises(OSError) as caught:
            build(disk / "set")
        assert caught.value.errno == errno.ENOSPC
        assert not list(disk.rglob("*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=2m", str(disk)], check=True)
        build(disk / "set")
        assert contents(disk / "set") == contents(built[0])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# ---- errors ----


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, r"seed\D+0\D+1\b"),
        ({"settings": replace(SMALL, sigma_e=0.26)}, r"sigma_e\D+0\.0\D+0\.26"),
        ({"counts": (60, 20)}, r"train\D+50\D+60"),
    ],
)
@pytest.mark.parametrize("told_by", ["cosmology.json", "unfinished.json"])
def test_a_folder_with_other_settings_is_rejected_with_the_difference(copied, changed, message, told_by):
    if told_by == "unfinished.json":
        (copied / "cosmology.json").rename(copied / told_by)
    before = contents(copied)
    with pytest.raises(FileExistsError, match=message):
        build(copied, **changed)
    assert contents(copied) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior": {"omega_m": (0.5, 0.1), "sigma_8": (0.6, 1.0)}}, r"omega_m\D+0\.5\D+0\.1\b"),
        ({"prior": {"omega_m": (0.01, 0.5), "sigma_8": (0.6, 1.0)}}, r"omega_b=0\.046.*omega_m=0\.01"),
    ],
)
def test_invalid_plans_are_rejected_before_writing(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path / "set", **options)
    assert not (tmp_path / "set").exists()


def test_a_failed_map_is_named_in_the_error(tmp_path, monkeypatch):
    def draw(settings, omega_m, sigma_8, seed):
        return {"map": np.full((1, 16, 16), np.nan, np.float32)}

    monkeypatch.setattr(cosmology_build, "generate_columns", draw)
    with pytest.raises(ValueError, match=r"train map 0 \(.*omega_m.*seed \d+\): 256\b"):
        build(tmp_path)


def test_a_truncated_shard_is_named(copied):
    file = copied / "train" / "00001-of-00003.parquet"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"00001-of-00003\.parquet .*cosmology\.json"):
        read_arrays(copied, "train")


def test_maps_with_an_unexpected_shape_are_reported(built, tmp_path):
    build(tmp_path, replace(SMALL, size=32))
    info = json.loads((built[0] / "cosmology.json").read_text())
    (tmp_path / "cosmology.json").write_text(json.dumps(info | {"sha256": {}}))
    with pytest.raises(ValueError, match=r"32, 32.*cosmology\.json.*16, 16"):
        read_arrays(tmp_path, "train")


def test_a_missing_shard_is_reported_and_rebuilt(copied, built):
    (copied / "train" / "00002-of-00003.parquet").unlink()
    with pytest.raises(ValueError, match=r"\b40\b.*cosmology\.json.*\b50\b"):
        read_arrays(copied, "train")
    build(copied)
    assert contents(copied) == contents(built[0])


def test_errors_for_unknown_paths_splits_and_columns_list_valid_values(built, tmp_path):
    for path in (tmp_path / "nowhere", "data/kappa/of/mine", "nobody/no-such-set"):
        with pytest.raises(FileNotFoundError, match=r"hrm-hf data cosmology"):
            load_cosmology_info(path)
    with pytest.raises(ValueError, match=r"'validation'.*\['train', 'test'\]"):
        read_arrays(built[0], "validation")
    with pytest.raises(ValueError, match="'tau'"):
        read_arrays(built[0], "train", ["tau"])


def test_an_invalid_info_file_is_reported(copied):
    info = json.loads((copied / "cosmology.json").read_text())
    (copied / "cosmology.json").write_text(json.dumps(info | {"flavour": 3}))
    with pytest.raises(ValueError, match=r"cosmology\.json.*flavour"):
        load_cosmology_info(copied)
