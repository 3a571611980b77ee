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
from .info import INFO_FILE, SPLITS, CosmologyInfo, FilesInfo, info_from_json


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

    @classmethod
    def read(cls, data: str, split: str, limit: int | None = None, kappa: bool = False) -> "MapSet":
        """Read the first `limit` rows of a split, or all; with `kappa`, of a data set of shear alone."""
        info = load_cosmology_info(data)
        if kappa:
            validate_shear(data, info)
        names = [name for name in ("omega_m", "sigma_8", "s_8") if name in info.column_names()]
        columns = ["map", *names, *(["mask"] if info.settings.has_mask else []), *(["kappa"] if kappa else [])]
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
    """

    def __init__(self, chunks: "pa.ChunkedArray", feature: Any):
        self.dtype = np.dtype(feature.dtype)
        self.shape = (len(chunks), *feature.shape)
        self._length = int(np.prod(feature.shape))
        self._starts = np.cumsum([0, *(len(chunk) for chunk in chunks.chunks)])[:-1]
        self._values = [_numbers_of(chunk) for chunk in chunks.chunks]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray | slice) -> np.ndarray:
        """A copy of these rows: [rows, ...]."""
        rows = np.arange(len(self))[rows]
        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        parts = np.searchsorted(self._starts, rows, side="right") - 1
        for place, (row, part) in enumerate(zip(rows, parts, strict=True)):
            values = self._values[part].slice((row - self._starts[part]) * self._length, self._length)
            # Masks are stored as bits, so that there is no array of theirs to look at.
            found[place] = values.to_numpy(zero_copy_only=False).reshape(self.shape[1:])
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
        ValueError: no such split or column, a missing shard, maps that `cosmology.json` does not describe.
    """
    from datasets import load_dataset

    info = load_cosmology_info(path)
    features, available = info.features(), [name for name in SPLITS if info.counts[name]]
    if split not in available:
        hint = "" if info.labelled else ": without labels (--labels TABLE) they are for a trained model, no more"
        raise ValueError(f"{path} has no split {split!r}; it has {available}{hint}")
    names = columns or list(features)
    unknown = [name for name in names if name not in features]
    if unknown:
        raise ValueError(f"{path} has no column {unknown[0]!r}; it has {list(features)}")
    files = sorted(map(str, (_local_folder(path, [INFO_FILE, f"{split}/*"]) / split).glob("*.parquet")))
    dataset = load_dataset(
        "parquet", data_files={split: files}, split=split, columns=names, keep_in_memory=False
    )  # fmt: skip
    found = {name: dataset.features.get(name) for name in names}
    if len(dataset) != info.counts[split] or found != {name: features[name] for name in names}:
        raise ValueError(
            f"{path}, split {split}: {len(files)} files hold {len(dataset)} rows of {found}; {INFO_FILE} says "
            f"{info.counts[split]} of {dict(features)}; build the data set again"
        )
    rows = {}
    for name in names:
        column = dataset.data.table.column(name)
        rows[name] = MappedColumn(column, features[name]) if hasattr(features[name], "shape") else column.to_numpy()
    return rows


def read_arrays(path: str | Path, split: str, columns: list[str] | None = None, limit: int | None = None) -> dict:
    """Read the first `limit` rows of a split into memory, or all: arrays as those of `map_arrays`.

    Raises:
        FileNotFoundError, ValueError: as `map_arrays`.
    """
    return {name: values[:limit] for name, values in map_arrays(path, split, columns).items()}


def _numbers_of(array: "pa.Array") -> "pa.Array":
    """The numbers in lists of lists, one after the other, where they lie."""
    import pyarrow as pa

    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    while pa.types.is_list(array.type):
        array = array.flatten()
    return array


def _local_folder(path: str | Path, patterns: list[str]) -> Path:
    """`path` if it is a folder, else the files of a Hub data set that match the patterns."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), repo_type="dataset", allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{path} does not exist, here or on the Hub; build a cosmology data set with `{BUILD_COMMAND}`. {error}"
        ) from error
