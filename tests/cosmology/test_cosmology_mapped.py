"""Memory-mapped maps equal maps in memory for all rows, shards and kinds of columns.

Referees: `read_arrays`; the private memory that Linux counts for a process.
"""

import subprocess
import sys

import numpy as np
import pytest

from hrm_hf.cosmology.arguments import CosmoDataArguments
from hrm_hf.cosmology.dataset.build import build_cosmology_dataset
from hrm_hf.cosmology.dataset.collator import MapRows
from hrm_hf.cosmology.dataset.rows import MappedColumn, map_arrays, read_arrays
from hrm_hf.cosmology.run import load_maps
from hrm_hf.cosmology.simulation.maps import MapSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Masked shear in three shards."""
    folder = tmp_path_factory.mktemp("shear")
    settings = MapSettings(size=16, observable="shear", sigma_e=0.3, mask_fraction=0.2, source_redshifts=(0.5, 1.0))
    build_cosmology_dataset(settings, folder, 23, 4, shard_size=9)
    return folder


def test_mapped_rows_equal_rows_in_memory(folder):
    mapped, arrays = map_arrays(folder, "train"), read_arrays(folder, "train")
    assert list(mapped) == list(arrays)
    chosen = np.array([22, 0, 8, 9, 9, 17, 18])  # both ends of shards, and one twice
    for name, expected in arrays.items():
        assert mapped[name].shape == expected.shape and mapped[name].dtype == expected.dtype
        np.testing.assert_array_equal(mapped[name][chosen], expected[chosen])
    assert {name for name, column in mapped.items() if isinstance(column, MappedColumn)} == {"map", "mask", "kappa"}


def test_columns_not_requested_are_skipped(folder):
    assert list(map_arrays(folder, "train", ["map", "omega_m"])) == ["map", "omega_m"]
    with pytest.raises(ValueError, match="'gamma'"):
        map_arrays(folder, "train", ["gamma"])


def test_training_reads_mapped_columns(folder):
    maps = load_maps(CosmoDataArguments(data_path=str(folder), val_samples=4))
    arrays = read_arrays(folder, "train")
    labels = np.stack([arrays["omega_m"], arrays["sigma_8"]], axis=1)
    expected = MapRows(arrays["map"], labels, arrays["mask"], rows=np.arange(19), training=True)
    assert isinstance(maps.train.maps, MappedColumn) and len(maps.validation) == 4
    found, expected = (rows.__getitems__([3, 18, 0]) for rows in (maps.train, expected))
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc")
@pytest.mark.slow
def test_all_rows_are_read_without_keeping_them_in_memory(tmp_path):
    """Reading 64 MB of maps batch by batch increases private memory by less than a quarter of that."""
    build_cosmology_dataset(MapSettings(size=256, kind="gaussian"), tmp_path, 256, shard_size=64)
    code = """
import sys
import numpy as np
from hrm_hf.cosmology.dataset.rows import map_arrays

def private():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

map_arrays(sys.argv[1], "train", ["map"])  # writes the cache, which takes memory for a moment
before = private()
maps = map_arrays(sys.argv[1], "train", ["map"])["map"]
total = sum(float(maps[np.arange(start, start + 16)].sum()) for start in range(0, 256, 16))
print(private() - before, np.isfinite(total))
"""
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    grown, finite = result.stdout.split()
    assert finite == "True" and int(grown) < 16 * 1024
