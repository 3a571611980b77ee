"""Shards of a cosmology data set: parquet files that are complete or absent, and the way back to arrays.

A shard is written under a temporary name, flushed to the disk and renamed. What it holds is said by a JSON header in
the file's own metadata, so that a file and its description cannot part. Parquet is written without compression: maps
of noise do not shrink, and arrays are read back at the speed of memory. Which maps there are is `cosmology_dataset`'s
business.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...io.complete_files import complete_file


if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

HEADER = b"hrm_hf_cosmology"
GROUP_BYTES = 2**24  # of maps in a row group: what a streaming reader fetches at a time

Rows = dict[str, np.ndarray]  # column name to array [rows, ...]


def write_shard(file: Path, features: "datasets.Features", blocks: Iterable[Rows], header: dict[str, Any]) -> None:
    """Writes blocks of rows as one parquet file, which appears only when all of it is on the disk.

    The header gets `rows`, and `moments`: for each channel the number of observed pixels, their sum and sum of
    squares. Rows are added one by one, so the figures do not depend on the blocks.

    Raises:
        OSError: the disk is full, for example; nothing is left under `file`.
    """
    import pyarrow.parquet as pq

    moments, rows = np.zeros((3, features["map"].shape[0])), 0
    with complete_file(file) as stream:
        options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        with pq.ParquetWriter(stream, features.arrow_schema, **options) as writer:
            for block in _grouped(blocks):
                writer.write_table(_to_table(block, features))
                rows += len(block["map"])
                for row in range(len(block["map"])):
                    moments += _moments(block["map"][row], block["mask"][row] if "mask" in block else None)
            writer.add_key_value_metadata({HEADER: json.dumps(header | {"rows": rows, "moments": moments.tolist()})})


def read_header(file: Path) -> dict[str, Any]:
    """The header that `write_shard` left in a file; {} in a parquet file of other origin.

    Raises:
        ValueError: no parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(file).metadata or {}
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file} is not a parquet file ({error}); delete it and build the data set again") from error
    return json.loads(metadata[HEADER]) if HEADER in metadata else {}


def validate_features(file: Path, expected: "datasets.Features") -> None:
    """Refuses a shard whose columns or shapes differ from those that `cosmology.json` promises."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Features

    try:
        found = Features.from_arrow_schema(pq.read_schema(file))
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file} is not a parquet file ({error}); delete it and build the data set again") from error
    missing = [name for name in expected if name not in found]
    if missing:
        raise ValueError(f"{file} has no column {missing[0]!r}; it has {sorted(found)}, expected {sorted(expected)}")
    for name, feature in expected.items():
        if found[name] != feature:
            raise ValueError(f"{file}: column {name!r} is {found[name]}, but cosmology.json says {feature}")


def read_rows(file: Path, features: "datasets.Features") -> Iterator[Rows]:
    """The rows of a shard, a row group at a time; arrays of numbers share the memory that parquet was decoded to."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as shard:
        for group in range(shard.num_row_groups):
            table = shard.read_row_group(group, columns=list(features))
            yield {name: _to_array(table.column(name), features[name], f"{file}: {name}") for name in features}


def _grouped(blocks: Iterable[Rows]) -> Iterator[Rows]:
    """Joins blocks to row groups of about GROUP_BYTES."""
    group: list[Rows] = []
    for block in blocks:
        group.append(block)
        if sum(part["map"].nbytes for part in group) >= GROUP_BYTES:
            yield {name: np.concatenate([part[name] for part in group]) for name in block}
            group = []
    if group:
        yield {name: np.concatenate([part[name] for part in group]) for name in group[0]}


def _moments(maps: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Count, sum and sum of squares of the observed pixels of one map [channels, size, size]: [3, channels]."""
    values = maps.reshape(len(maps), -1).astype(np.float64)
    if mask is not None:
        values = values[:, mask.reshape(-1)]
    return np.stack([np.full(len(maps), values.shape[1]), values.sum(1), (values**2).sum(1)])


def _to_table(rows: Rows, features: "datasets.Features") -> "pa.Table":
    import pyarrow as pa

    columns = []
    for name, field in zip(features, features.arrow_schema):
        if rows[name].ndim == 1:
            columns.append(pa.array(rows[name], field.type))
        else:
            columns.append(pa.ExtensionArray.from_storage(field.type, _nested(rows[name])))
    return pa.Table.from_arrays(columns, schema=features.arrow_schema)


def _nested(array: np.ndarray) -> "pa.ListArray":
    """An array [rows, ...] as lists in lists, of which `datasets` makes Array2D and Array3D."""
    import pyarrow as pa

    values = pa.array(array.reshape(-1))
    for length in reversed(array.shape[1:]):
        offsets = np.arange(0, len(values) + 1, length, dtype=np.int32)
        values = pa.ListArray.from_arrays(pa.array(offsets), values)
    return values


def numbers_of(array: "pa.Array") -> "pa.Array":
    """The numbers in lists of lists, one after the other, where they lie."""
    import pyarrow as pa

    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    while pa.types.is_list(array.type):
        array = array.flatten()
    return array


def _to_array(column: "pa.ChunkedArray", feature: Any, place: str) -> np.ndarray:
    import pyarrow as pa
    from datasets import Value

    array = column.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    shape = (len(array),) if isinstance(feature, Value) else (len(array), *feature.shape)
    array = numbers_of(array)
    if len(array) != np.prod(shape) or array.null_count:
        raise ValueError(f"{place} holds {len(array)} values, {array.null_count} of them empty; expected {shape}")
    return array.to_numpy(zero_copy_only=False).reshape(shape)
