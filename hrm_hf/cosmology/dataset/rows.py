"""The on-disk form of a cosmology data set: maps with the parameters of the universes that made them.

A data set is a folder that `datasets.load_dataset(folder)` reads and that can be pushed to the Hub as it is:

    README.md          a data card; its YAML header names the files, columns and sizes of each split
    train/*.parquet, test/*.parquet
    cosmology.json     `CosmologyInfo`: how the maps were made, their prior, mean and standard deviation of a pixel;
                       or `FilesInfo`: from which files they were read

One row is one map: `map` float32 [channels, size, size]; `mask` bool [size, size] (True: observed) for kinds that have
one; `omega_m`, `sigma_8`, `s_8` (legacy kinds: `omega_m` alone, they depend on nothing else); `seed`, which with
these gives the map again through `generate_map`; `cosmology_id`. No cosmology is in two splits. Maps from files have
no seed but their `source`, and parameters only if a table of them was given.

How the folder is filled is in `build.py` and `from_files.py`. Random access through `datasets` decodes rows one by
one, about 100 times slower than an array; `read_arrays` gives the arrays, and `map_arrays` leaves maps on the disk,
where all processes of a machine share them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .info import INFO_FILE, PARAMETERS, SPLITS, TEST_ID, CosmologyInfo, CosmologyPlan, FilesInfo, info_from_json
from .shards import Rows, numbers_of, read_rows, validate_features


if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

BUILD_COMMAND = "hrm-hf data cosmology --kind lognormal --samples 8000 --out DIR"


def load_cosmology_info(path: str | Path) -> CosmologyInfo | FilesInfo:
    """Reads `cosmology.json` of a local folder or a Hub data set repository.

    Raises:
        FileNotFoundError: no such data set, or one that was not built to its end.
        ValueError: `cosmology.json` is broken or of another version.
    """
    file = _local_folder(path, [INFO_FILE]) / INFO_FILE
    if not file.exists():
        raise FileNotFoundError(
            f"{path} is no cosmology data set: {INFO_FILE} is missing. Build one with `{BUILD_COMMAND}`; the same "
            "command finishes one that was interrupted."
        )
    try:
        return info_from_json(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} does not describe a cosmology data set of this version: {error}") from error


def load_cosmology_dataset(path: str | Path, split: str) -> "datasets.Dataset":
    """One split as a `Dataset`, from a local folder or the Hub; see `read_arrays` for speed.

    Labels, columns and shapes are checked, pixels are not: that would read the whole set.

    Raises:
        FileNotFoundError: no such data set. ValueError: no such split, or rows that `cosmology.json` does not allow.
    """
    from datasets import load_dataset

    info, files = _open_split(path, split)
    dataset = load_dataset("parquet", data_files={split: list(map(str, files))}, split=split)
    table = dataset.data.table
    labels = {name: table.column(name).to_numpy() for name in PARAMETERS if name in table.column_names}
    _validate_labels(labels, info, f"{path}, split {split}")
    return dataset


def read_arrays(path: str | Path, split: str, columns: list[str] | None = None) -> Rows:
    """One split as arrays by column name, for sets that fit in memory.

    Args:
        columns: those wanted, for example ["omega_m", "sigma_8"]; None for all.

    Returns:
        map: float32 [rows, channels, size, size]. mask: bool [rows, size, size], if the kind has one. The others
        [rows]: float32 parameters, int64 `seed` and `cosmology_id`; of maps from files see `FILE_COLUMNS`.

    Raises:
        FileNotFoundError: no such data set.
        ValueError: no such split or column, a missing shard, labels outside the prior, pixels that are no numbers.
    """
    info, files = _open_split(path, split)
    features = _chosen(info.features(), columns, path)
    rows: Rows = {}
    start = 0
    for file in files:
        for group in read_rows(file, features):
            stop = start + len(next(iter(group.values())))
            for name, values in group.items():
                if name not in rows:
                    rows[name] = np.empty((info.counts[split], *values.shape[1:]), values.dtype)
                rows[name][start:stop] = values
            if "map" in group:
                _validate_pixels(group["map"], start, f"{path}, split {split}")
            start = stop
    _validate_labels(rows, info, f"{path}, split {split}")
    return rows


class MappedColumn:
    """Maps or masks in Arrow files that are mapped into memory: only the rows that are asked for are read.

    The system keeps what it has memory for, once for all processes, and drops it when others need the memory.

    Args:
        chunks: of the column, as `datasets` stores Array2D and Array3D. feature: of the column.
        place: the data set and split, for errors.
    """

    def __init__(self, chunks: "pa.ChunkedArray", feature: Any, place: str):
        self.place, self.dtype = place, np.dtype(feature.dtype)
        self.shape = (len(chunks), *feature.shape)
        self._length = int(np.prod(feature.shape))
        self._starts = np.cumsum([0, *(len(chunk) for chunk in chunks.chunks)])[:-1]
        self._values = [numbers_of(chunk) for chunk in chunks.chunks]
        found = sum(len(values) - values.null_count for values in self._values)
        if found != np.prod(self.shape):
            raise ValueError(f"{place} holds {found} values, expected {self.shape}")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows, by number: [rows, ...]. Raises ValueError for one with pixels that are no numbers."""
        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        parts = np.searchsorted(self._starts, rows, side="right") - 1
        for place, (row, part) in enumerate(zip(rows, parts, strict=True)):
            values = self._values[part].slice((row - self._starts[part]) * self._length, self._length)
            # Masks are stored as bits, so that there is no array of theirs to look at.
            found[place] = values.to_numpy(zero_copy_only=False).reshape(self.shape[1:])
            if self.dtype.kind == "f":
                _validate_pixels(found[place : place + 1], row, self.place)
        return found


def map_arrays(path: str | Path, split: str, columns: list[str] | None = None) -> dict[str, Any]:
    """As `read_arrays`, but maps and masks are a `MappedColumn` each, whose pixels are checked when they are read.

    The first call writes the columns as Arrow files to the cache of `datasets` (`HF_DATASETS_CACHE`), once a data set.
    """
    from datasets import load_dataset

    info, files = _open_split(path, split)
    features = _chosen(info.features(), columns, path)
    dataset = load_dataset(
        "parquet",
        data_files={split: list(map(str, files))},
        split=split,
        columns=list(features),
        keep_in_memory=False,
    )
    place = f"{path}, split {split}"
    rows = {}
    for name, feature in features.items():
        column = dataset.data.table.column(name)
        rows[name] = MappedColumn(column, feature, place) if hasattr(feature, "shape") else column.to_numpy()
    _validate_labels(rows, info, place)
    return rows


def _chosen(features: "datasets.Features", columns: list[str] | None, path: str | Path) -> "datasets.Features":
    from datasets import Features

    unknown = [name for name in columns or () if name not in features]
    if unknown:
        raise ValueError(f"{path} has no column {unknown[0]!r}; it has {list(features)}")
    return Features({name: features[name] for name in columns or features})


def _open_split(path: str | Path, split: str) -> tuple[CosmologyInfo | FilesInfo, list[Path]]:
    """The info and the checked files of a split."""
    import pyarrow.parquet as pq

    info = load_cosmology_info(path)
    available = [name for name in SPLITS if info.counts[name]]
    if split not in available:
        reason = info.why_without(split) if split in SPLITS else ""
        raise ValueError(f"{path} has no split {split!r}; it has {available}{reason}")
    files = sorted((_local_folder(path, [INFO_FILE, f"{split}/*"]) / split).glob("*.parquet"))
    features = info.features()
    for file in files:
        validate_features(file, features)
    rows = sum(pq.read_metadata(file).num_rows for file in files)
    if rows != info.counts[split]:
        raise ValueError(
            f"{path}: {len(files)} files of split {split!r} hold {rows} rows, {INFO_FILE} says {info.counts[split]}; "
            f"{info.mend}"
        )
    return info, files


def _local_folder(path: str | Path, patterns: list[str]) -> Path:
    """`path` if it is a folder, else the files of a Hub data set that match the patterns."""
    if Path(path).is_dir():
        return Path(path)
    unknown = f"{path} does not exist; build a cosmology data set with `{BUILD_COMMAND}`"
    if Path(path).exists() or Path(path).is_absolute() or str(path)[:1] in ".~" or str(path).count("/") != 1:
        raise FileNotFoundError(unknown)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), repo_type="dataset", allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"{unknown}. Nor is it a data set of the Hub: {error}") from error


def _validate_labels(rows: Mapping[str, np.ndarray], info: CosmologyInfo | FilesInfo, place: str) -> None:
    for name in PARAMETERS:
        if name not in rows:
            continue
        low, high = info.prior[name]
        slack = 1e-6 * max(abs(low), abs(high))  # the ends, rounded to float32
        bad = ~((rows[name] >= low - slack) & (rows[name] <= high + slack))  # also NaN
        for row in np.flatnonzero(bad)[:1]:
            raise ValueError(
                f"{place}, row {row}: {name}={rows[name][row]:.6g} is outside the prior {low} to {high} that "
                f"{INFO_FILE} states ({bad.sum()} such rows)"
            )


def _validate_pixels(maps: np.ndarray, first_row: int, place: str) -> None:
    finite = np.isfinite(maps).all((1, 2, 3))
    for row in np.flatnonzero(~finite)[:1]:
        count = maps[row].size - np.isfinite(maps[row]).sum()
        raise ValueError(
            f"{place}, row {first_row + row}: {count} of {maps[row].size} pixels are NaN or infinite; pixels without "
            "data belong in a mask"
        )


__all__ = [
    "INFO_FILE",
    "SPLITS",
    "TEST_ID",
    "CosmologyInfo",
    "CosmologyPlan",
    "FilesInfo",
    "MappedColumn",
    "load_cosmology_dataset",
    "load_cosmology_info",
    "map_arrays",
    "read_arrays",
]
