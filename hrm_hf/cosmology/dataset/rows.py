"""Read a cosmology data set: maps with the parameters of the universes that made them.

A data set is a folder that `datasets.load_dataset(folder)` reads and that can be pushed to the Hub as it is:

    README.md          a data card; its YAML header names the files of each split
    train/*.parquet, test/*.parquet
    cosmology.json     `CosmologyInfo`: how the maps were made, their prior, mean and standard deviation of a pixel;
                       or `FilesInfo`: from which files they were read

One row is one map: `map` float32 [channels, size, size]; `mask` bool [size, size] (True: observed) for kinds that have
one; of shear `kappa` float32 [planes, size, size], the convergence; `omega_m`, `sigma_8`, `s_8` (legacy kinds:
`omega_m` alone); `seed`, which with these gives the map again through `generate_map`; `cosmology_id`. No cosmology is
in two splits. Maps from files have no seed but their `source`, and parameters only if a table of them was given.

`datasets` decodes rows one by one, about 100 times slower than an array; `map_arrays` leaves maps on the disk, where
all processes of a machine share them, and `read_arrays` reads them into memory.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...io.usage import UsageError
from .info import INFO_FILE, PARAMETERS, SPLITS, CosmologyInfo, FilesInfo, info_from_json


if TYPE_CHECKING:
    import pyarrow as pa

BUILD_COMMAND = "hrm-hf data cosmology --kind lognormal --samples 8000 --out DIR"


def load_cosmology_info(path: str | Path) -> CosmologyInfo | FilesInfo:
    """Read `cosmology.json` of a local folder or a Hub data set repository.

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


def validate_shear(data: str | Path, info: CosmologyInfo | FilesInfo) -> None:
    """Raise UsageError for a data set that does not hold shear."""
    if info.settings.observable != "shear":
        raise UsageError(
            f"{data} holds {info.settings.observable}, not shear: hrm-hf data cosmology --observable shear"
        )


@dataclass(frozen=True)
class MapSet:
    """Maps in memory with their parameters.

    Args:
        maps: [N, C, H, W]. labels: name -> [N]. masks: bool [N, H, W], True where observed; None if everything is.
        kappa: of shear, the convergence [N, P, H, W]; None if it was not read.
    """

    maps: np.ndarray
    labels: Mapping[str, np.ndarray]
    masks: np.ndarray | None = None
    kappa: np.ndarray | None = None

    def __post_init__(self):
        if self.maps.ndim != 4 or self.maps.shape[2] != self.maps.shape[3]:
            raise ValueError(
                f"maps have shape {self.maps.shape}; expected square ones, (maps, channels, pixels, pixels)"
            )
        expected = (len(self.maps), *self.maps.shape[2:])
        if self.masks is not None and self.masks.shape != expected:
            raise ValueError(f"masks have shape {self.masks.shape}; expected {expected}")
        for name, values in self.labels.items():
            if len(values) != len(self.maps):
                raise ValueError(f"{len(values)} values of {name} for {len(self.maps)} maps; expected one for each")

    @classmethod
    def read(cls, data: str, split: str, limit: int | None = None, kappa: bool = False) -> "MapSet":
        """Read the first `limit` rows of a split, or all; with `kappa`, of a data set of shear alone."""
        info = load_cosmology_info(data)
        if kappa:
            validate_shear(data, info)
        names = [name for name in ("omega_m", "sigma_8", "s_8") if name in info.column_names()]
        columns = ["map", *names, *(["mask"] if info.has_mask else []), *(["kappa"] if kappa else [])]
        rows = read_arrays(data, split, columns, limit)
        return cls(rows["map"], {name: rows[name] for name in names}, rows.get("mask"), rows.get("kappa"))

    def __len__(self) -> int:
        return len(self.maps)

    def __getitem__(self, rows: slice | np.ndarray) -> "MapSet":
        """Some rows, by slice or number."""
        masks, kappa = (None if values is None else values[rows] for values in (self.masks, self.kappa))
        return MapSet(self.maps[rows], {name: values[rows] for name, values in self.labels.items()}, masks, kappa)


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
        self._values = [_numbers_of(chunk) for chunk in chunks.chunks]
        found = sum(len(values) - values.null_count for values in self._values)
        if found != np.prod(self.shape):
            raise ValueError(f"{place} holds {found} values, expected {self.shape}")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray | slice) -> np.ndarray:
        """A copy of these rows: [rows, ...]. Raises ValueError for one with pixels that are no numbers."""
        rows = np.arange(len(self))[rows]
        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        parts = np.searchsorted(self._starts, rows, side="right") - 1
        for place, (row, part) in enumerate(zip(rows, parts, strict=True)):
            values = self._values[part].slice((row - self._starts[part]) * self._length, self._length)
            # Masks are stored as bits, so that there is no array of theirs to look at.
            found[place] = values.to_numpy(zero_copy_only=False).reshape(self.shape[1:])
            if self.dtype.kind == "f" and (bad := found[place].size - np.isfinite(found[place]).sum()):
                raise ValueError(
                    f"{self.place}, row {row}: {bad} of {found[place].size} pixels are NaN or infinite; pixels "
                    "without data belong in a mask"
                )
        return found


def map_arrays(path: str | Path, split: str, columns: list[str] | None = None) -> dict[str, Any]:
    """Open one split: maps and masks as a `MappedColumn` each, the other columns as arrays.

    The first call writes the columns as Arrow files to the cache of `datasets` (`HF_DATASETS_CACHE`), once a data set.

    Args:
        columns: those wanted, for example ["omega_m", "sigma_8"]; None for all.

    Returns:
        map: float32 [rows, channels, size, size]. mask: bool [rows, size, size], if the kind has one. The others
        [rows]: float32 parameters, int64 `seed` and `cosmology_id`; of maps from files see `FILE_COLUMNS`.

    Raises:
        FileNotFoundError: no such data set.
        ValueError: no such split or column, a missing shard, labels outside the prior.
    """
    from datasets import load_dataset

    info, files = _open_split(path, split)
    features, place = info.features(), f"{path}, split {split}"
    unknown = [name for name in columns or () if name not in features]
    if unknown:
        raise ValueError(f"{path} has no column {unknown[0]!r}; it has {list(features)}")
    names = columns or list(features)
    dataset = load_dataset(
        "parquet", data_files={split: files}, split=split, columns=names, keep_in_memory=False
    )  # fmt: skip
    rows = {}
    for name in names:
        column = dataset.data.table.column(name)
        is_map = hasattr(features[name], "shape")
        rows[name] = MappedColumn(column, features[name], place) if is_map else column.to_numpy()
    _validate_labels(rows, info, place)
    return rows


def read_arrays(path: str | Path, split: str, columns: list[str] | None = None, limit: int | None = None) -> dict:
    """Read the first `limit` rows of a split into memory, or all: arrays as those of `map_arrays`.

    Raises:
        FileNotFoundError, ValueError: as `map_arrays`, and for pixels that are no numbers.
    """
    return {name: values[:limit] for name, values in map_arrays(path, split, columns).items()}


def _numbers_of(array: "pa.Array") -> "pa.Array":
    """The numbers in lists of lists, one after the other, where they lie."""
    import pyarrow as pa

    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    while pa.types.is_list(array.type):
        array = array.flatten()
    return array


def _open_split(path: str | Path, split: str) -> tuple[CosmologyInfo | FilesInfo, list[str]]:
    """The info and the files of a split, whose columns and numbers of rows are checked."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Features

    info = load_cosmology_info(path)
    available = [name for name in SPLITS if info.counts[name]]
    if split not in available:
        reason = info.why_without(split) if split in SPLITS else ""
        raise ValueError(f"{path} has no split {split!r}; it has {available}{reason}")
    files = sorted((_local_folder(path, [INFO_FILE, f"{split}/*"]) / split).glob("*.parquet"))
    rows = 0
    for file in files:
        try:
            metadata, found = pq.read_metadata(file), Features.from_arrow_schema(pq.read_schema(file))
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"{file} is not a parquet file ({error}); delete it and build the data set again"
            ) from error
        rows += metadata.num_rows
        for name, feature in info.features().items():
            if found.get(name) != feature:
                raise ValueError(f"{file}: column {name!r} is {found.get(name)}, but {INFO_FILE} says {feature}")
    if rows != info.counts[split]:
        raise ValueError(
            f"{path}: {len(files)} files of split {split!r} hold {rows} rows, {INFO_FILE} says {info.counts[split]}; "
            "build the data set again"
        )
    return info, list(map(str, files))


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


def _validate_labels(rows: Mapping[str, Any], info: CosmologyInfo | FilesInfo, place: str) -> None:
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
