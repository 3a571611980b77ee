"""Reading and writing of cosmology data sets, which pair maps with their cosmological parameters.

A data set is a folder that `datasets.load_dataset(folder)` can read and that can be pushed to the Hub unchanged:

    README.md          data card; its YAML header lists the files of each split
    train/*.parquet, test/*.parquet
    cosmology.json     `CosmologyInfo` of simulated maps, or `FilesInfo` of maps read from files
    unfinished.json    options of an interrupted build, instead of cosmology.json

Each row is one map: `map` float32 [channels, size, size]; `mask` bool [size, size] (True: observed) if the kind has
one; for shear the convergence `kappa` float32 [planes, size, size]; `omega_m`, `sigma_8`, `s_8` (legacy kinds: only
`omega_m`); `seed`, from which `generate_map` reproduces the map; `cosmology_id`. No cosmology is in two splits. Maps
from files have a `source` instead of a seed, and parameters only if a table of them was given.

A shard is a parquet file that is either complete or absent. It is not compressed, because noise does not compress. A
JSON header in its metadata contains the number of rows and the moments of their pixels.

`datasets` decodes rows one by one, about 100 times slower than reading an array. `map_arrays` therefore memory-maps
the maps, which all processes of a machine share, and `read_arrays` reads them into memory.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...io.files import (
    BUILD_LOCK,
    TEMPORARY,
    building,
    changed_files,
    checksums_in,
    complete_file,
    validate_unchanged,
    visible_files,
    write_text,
)
from ...io.usage import UsageError
from .info import INFO_FILE, SPLITS, CosmologyInfo, FilesInfo, info_from_json


if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

BUILD_COMMAND = "hrm-hf data cosmology --kind lognormal --samples 8000 --out DIR"
HEADER = b"hrm_hf_cosmology"
GROUP_BYTES = 2**24  # size of a row group; streaming readers fetch one group at a time
UNFINISHED = "unfinished.json"

Rows = dict[str, np.ndarray]  # column name to array [rows, ...]


# ---- reading ----


def load_cosmology_info(path: str | Path) -> CosmologyInfo | FilesInfo:
    """Read `cosmology.json` from a local folder or a Hub data set.

    Raises:
        FileNotFoundError: the data set does not exist or is unfinished. ValueError: an invalid `cosmology.json`.
    """
    file = _local_folder(path, [INFO_FILE]) / INFO_FILE
    if not file.exists():
        raise FileNotFoundError(
            f"{path} is not a cosmology data set: {INFO_FILE} is missing. Build one with `{BUILD_COMMAND}`; repeat "
            "the command to finish an interrupted build."
        )
    try:
        return info_from_json(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is not valid in this version of hrm_hf: {error}") from error


def validate_shear(data: str | Path, info: CosmologyInfo | FilesInfo) -> None:
    """Raise UsageError if a data set does not contain shear."""
    if info.settings.observable != "shear":
        raise UsageError(
            f"{data} has {info.settings.observable}, not shear; build it with hrm-hf data cosmology --observable shear"
        )


@dataclass(frozen=True)
class MapSet:
    """Maps in memory with their parameters.

    Args:
        maps: [N, C, H, W]. labels: name -> [N]. masks: bool [N, H, W], True where observed; None if all pixels are.
        kappa: convergence of shear maps [N, P, H, W]; None if it was not read.
    """

    maps: np.ndarray
    labels: Mapping[str, np.ndarray]
    masks: np.ndarray | None = None
    kappa: np.ndarray | None = None

    @classmethod
    def read(cls, data: str, split: str, limit: int | None = None, kappa: bool = False) -> "MapSet":
        """Read the first `limit` rows of a split (None: all). With `kappa`, shear maps come with their convergence."""
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
        """Select rows by a slice or by indices."""
        masks, kappa = (None if values is None else values[rows] for values in (self.masks, self.kappa))
        return MapSet(self.maps[rows], {name: values[rows] for name, values in self.labels.items()}, masks, kappa)


class MappedColumn:
    """Column of maps or masks in memory-mapped Arrow files; indexing reads only the requested rows.

    `chunks` and `feature` belong to an Array2D or Array3D column of `datasets`.
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
        """Return the selected rows [rows, ...] as a copy."""
        rows = np.arange(len(self))[rows]
        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        parts = np.searchsorted(self._starts, rows, side="right") - 1
        for place, (row, part) in enumerate(zip(rows, parts, strict=True)):
            values = self._values[part].slice((row - self._starts[part]) * self._length, self._length)
            # Masks are stored as bits, which cannot be viewed as an array.
            found[place] = values.to_numpy(zero_copy_only=False).reshape(self.shape[1:])
        return found


def map_arrays(path: str | Path, split: str, columns: list[str] | None = None) -> dict[str, Any]:
    """Open columns of one split (default: all columns). Pixel columns become a `MappedColumn`, others an array.

    The first call converts the columns to Arrow files in the cache of `datasets` (`HF_DATASETS_CACHE`).
    Raises ValueError for an unknown split or column, and if files were modified or do not match `cosmology.json`.
    """
    from datasets import load_dataset

    info = load_cosmology_info(path)
    features, available = info.features(), [name for name in SPLITS if info.counts[name]]
    if split not in available:
        hint = "" if info.labelled else "; maps without labels (--labels TABLE) can only be input for a trained model"
        raise ValueError(f"{path} has no split {split!r}; choose from {available}{hint}")
    names = columns or list(features)
    unknown = [name for name in names if name not in features]
    if unknown:
        raise ValueError(f"{path} has no column {unknown[0]!r}; choose from {list(features)}")
    folder = _local_folder(path, [INFO_FILE, f"{split}/*"])
    files = list(map(str, visible_files(folder / split, "*.parquet")))
    validate_unchanged(folder / INFO_FILE, map(Path, files), closed=True)
    dataset = load_dataset(
        "parquet", data_files={split: files}, split=split, columns=names, keep_in_memory=False
    )  # fmt: skip
    found = {name: dataset.features.get(name) for name in names}
    if len(dataset) != info.counts[split] or found != {name: features[name] for name in names}:
        raise ValueError(
            f"{path}, split {split}: {len(files)} files contain {len(dataset)} rows of {found}, but {INFO_FILE} lists "
            f"{info.counts[split]} rows of {dict(features)}; build the data set again"
        )
    rows = {}
    for name in names:
        column = dataset.data.table.column(name)
        rows[name] = MappedColumn(column, features[name]) if hasattr(features[name], "shape") else column.to_numpy()
    return rows


def read_arrays(path: str | Path, split: str, columns: list[str] | None = None, limit: int | None = None) -> dict:
    """Read columns of one split, as in `map_arrays`, but load the first `limit` rows (or all) into memory."""
    return {name: values[:limit] for name, values in map_arrays(path, split, columns).items()}


def _numbers_of(array: "pa.Array") -> "pa.Array":
    """Return the numbers inside an array of nested lists as a flat array, without copying them."""
    import pyarrow as pa

    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    while pa.types.is_list(array.type):
        array = array.flatten()
    return array


def _local_folder(path: str | Path, patterns: list[str]) -> Path:
    """Return `path` if it is a folder; else download the files that match `patterns` from the Hub."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), repo_type="dataset", allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{path} does not exist locally or on the Hub; build a cosmology data set with `{BUILD_COMMAND}`. {error}"
        ) from error


# ---- writing a folder ----


@contextmanager
def claimed_folder(out: Path, options: dict[str, Any]) -> Iterator[None]:
    """Lock the folder of a data set and record the build options in it.

    Deletes modified and added shards, so they are built again. Raises FileExistsError if the folder has different
    content.
    """
    with building(out):
        _claim_folder(out, options)
        shards = (file for split in SPLITS for file in (out / split).glob("*.parquet"))
        for file in changed_files(out / INFO_FILE, shards, closed=True):
            file.unlink()
        yield


def _claim_folder(out: Path, options: dict[str, Any]) -> None:
    note = next((out / name for name in (INFO_FILE, UNFINISHED) if (out / name).is_file()), None)
    if note is None:
        if any(file.name != BUILD_LOCK for file in out.iterdir()):
            raise FileExistsError(f"out={out}: the folder is not empty; choose another one or delete it")
        write_text(out / UNFINISHED, json.dumps(options, indent=1))
        return
    found, options = (_flat(json.loads(text)) for text in (note.read_text(encoding="utf-8"), json.dumps(options)))
    changes = [
        f"{name} is {found.get(name)!s:.80}, requested {value!s:.80}" for name, value in options.items()
        if found.get(name) != value
    ]  # fmt: skip
    if changes:
        raise FileExistsError(
            f"out={out}: has maps built with other options ({'; '.join(changes)}); choose another folder or delete it"
        )


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    groups = {name: value for name, value in options.items() if isinstance(value, dict)}
    inner = {
        name if group == "settings" else f"{group} {name}": value
        for group, values in groups.items() for name, value in values.items()
    }  # fmt: skip
    return {name: value for name, value in options.items() if name not in groups} | inner


def shard_names(split: str, total: int) -> list[str]:
    """Return the shard file names of a split."""
    return [f"{split}/{number:05d}-of-{total:05d}.parquet" for number in range(total)]


def pixel_statistics(files: Iterable[Path]) -> dict[str, tuple[float, ...]]:
    """Compute `pixel_mean` and `pixel_std` of each channel from the headers of shards."""
    count, total, squares = sum(np.array(read_header(file)["moments"]) for file in files)
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    # Round to 9 digits, the precision of float32; further digits depend on the shard sizes.
    mean, std = (tuple(float(f"{value:.9g}") for value in values) for values in (mean, std))
    return {"pixel_mean": mean, "pixel_std": std}


def finish_folder(out: Path, info: CosmologyInfo | FilesInfo) -> None:
    """Write the data card and then `cosmology.json`, which marks the data set as finished."""
    write_text(out / "README.md", data_card(info))
    shards = (file.relative_to(out).as_posix() for split in SPLITS for file in (out / split).glob("*.parquet"))
    write_text(out / INFO_FILE, json.dumps(asdict(info) | checksums_in(out, shards), indent=1))
    (out / UNFINISHED).unlink(missing_ok=True)
    for leftover in out.glob(f"*/.*{TEMPORARY}"):  # temporary files left behind by a killed process
        leftover.unlink(missing_ok=True)


def data_card(info: CosmologyInfo | FilesInfo) -> str:
    """Return the README of a data set; its YAML header lists the files of each split."""
    counts = {split: count for split, count in info.counts.items() if count}
    files = "".join(f"  - split: {split}\n    path: {split}/*.parquet\n" for split in counts)
    columns = "".join(f"| {name} | {unit} |\n" for name, unit in info.units().items())
    notes = "".join(f"- {name}: {value}\n" for name, value in info.notes().items())
    sizes = ", ".join(f"{split} {count:,}" for split, count in counts.items())
    mean, std = (", ".join(f"{value:.6g}" for value in values) for values in (info.pixel_mean, info.pixel_std))
    prior = "The parameters of the maps are unknown."
    if info.labelled:
        bounds = ", ".join(f"{name} from {low:.6g} to {high:.6g}" for name, (low, high) in info.prior.items())
        prior = f"No cosmology is in two splits. Prior, uniform: {bounds}."
    return (
        f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}tags:\n- cosmology\n---\n\n"
        f"# Maps of kind {info.kind}, {info.settings.size} x {info.settings.size}\n\n{info.origin} Maps: {sizes}. "
        f"{prior} Pixels have mean {mean} and standard deviation {std} per channel.\n\n"
        f"| column | what it is |\n|---|---|\n{columns}\n## How the maps were made\n\n{notes}"
    )


# ---- writing a shard ----


def write_shard(file: Path, features: "datasets.Features", blocks: Iterable[Rows]) -> None:
    """Write blocks of rows to one parquet file. The file appears only once it is complete.

    The header stores `rows` and `moments`: for each channel the number of observed pixels, their sum and their sum of
    squares. Rows are summed one by one, so the result does not depend on the block size.
    """
    import pyarrow.parquet as pq
    from datasets import Dataset

    moments, rows = np.zeros((3, features["map"].shape[0])), 0
    with complete_file(file) as stream:
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        with pq.ParquetWriter(stream, features.arrow_schema, **options) as writer:
            for block in _grouped(blocks):
                writer.write_table(Dataset.from_dict(block, features).data.table)
                rows += len(block["map"])
                for row in range(len(block["map"])):
                    moments += _moments(block["map"][row], block["mask"][row] if "mask" in block else None)
            writer.add_key_value_metadata({HEADER: json.dumps({"rows": rows, "moments": moments.tolist()})})


def read_header(file: Path) -> dict[str, Any]:
    """Read the header that `write_shard` wrote."""
    import pyarrow.parquet as pq

    return json.loads(pq.read_metadata(file).metadata[HEADER])


def _grouped(blocks: Iterable[Rows]) -> Iterator[Rows]:
    """Concatenate blocks of rows into row groups with about GROUP_BYTES of maps."""
    group: list[Rows] = []
    for block in blocks:
        group.append(block)
        if sum(part["map"].nbytes for part in group) >= GROUP_BYTES:
            yield {name: np.concatenate([part[name] for part in group]) for name in block}
            group = []
    if group:
        yield {name: np.concatenate([part[name] for part in group]) for name in group[0]}


def _moments(maps: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Return count, sum and sum of squares of the observed pixels of a map, [3, channels]."""
    values = maps.reshape(len(maps), -1).astype(np.float64)
    if mask is not None:
        values = values[:, mask.reshape(-1)]
    return np.stack([np.full(len(maps), values.shape[1]), values.sum(1), (values**2).sum(1)])
