"""Write a cosmology data set: shards that are complete or absent, and what describes all of them.

A shard is a parquet file that is written under a temporary name, flushed to the disk and renamed. A JSON header in its
own metadata holds the number of rows and the moments of their pixels. Parquet is written without compression: maps of
noise do not shrink. `unfinished.json` says what an interrupted build was asked for; `cosmology.json` marks a complete
folder.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...io.files import TEMPORARY, complete_file, write_text
from .info import INFO_FILE, CosmologyInfo, FilesInfo


if TYPE_CHECKING:
    import datasets

HEADER = b"hrm_hf_cosmology"
GROUP_BYTES = 2**24  # of maps in a row group: what a streaming reader fetches at a time
UNFINISHED = "unfinished.json"

Rows = dict[str, np.ndarray]  # column name to array [rows, ...]


# ---- folders ----


def claim_folder(out: Path, asked: dict[str, Any]) -> None:
    """Note in a new folder what is asked for, or check that an older build was asked for the same.

    Raises:
        FileExistsError: the folder holds something else; names what differs.
    """
    note = next((out / name for name in (INFO_FILE, UNFINISHED) if (out / name).is_file()), None)
    if note is None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise FileExistsError(f"out={out}: not an empty folder; choose another or delete it")
        write_text(out / UNFINISHED, json.dumps(asked, indent=1))
        return
    found, asked = (_flat(json.loads(text)) for text in (note.read_text(encoding="utf-8"), json.dumps(asked)))
    changes = [
        f"{name} is {found.get(name)!s:.80}, asked {value!s:.80}" for name, value in asked.items()
        if found.get(name) != value
    ]  # fmt: skip
    if changes:
        raise FileExistsError(
            f"out={out}: holds maps of another command ({'; '.join(changes)}); choose another folder or delete it"
        )


def _flat(asked: dict[str, Any]) -> dict[str, Any]:
    groups = {name: value for name, value in asked.items() if isinstance(value, dict)}
    inner = {
        name if group == "settings" else f"{group} {name}": value
        for group, values in groups.items() for name, value in values.items()
    }  # fmt: skip
    return {name: value for name, value in asked.items() if name not in groups} | inner


def shard_names(split: str, total: int) -> list[str]:
    """Return the names of the files of a split."""
    return [f"{split}/{number:05d}-of-{total:05d}.parquet" for number in range(total)]


def pixel_statistics(files: Iterable[Path]) -> dict[str, tuple[float, ...]]:
    """Return `pixel_mean` and `pixel_std` of each channel, from the headers of shards."""
    count, total, squares = sum(np.array(read_header(file)["moments"]) for file in files)
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    # Nine digits: float32 has no more, and sums over shards of another size differ beyond them.
    mean, std = (tuple(float(f"{value:.9g}") for value in values) for values in (mean, std))
    return {"pixel_mean": mean, "pixel_std": std}


def finish_folder(out: Path, info: CosmologyInfo | FilesInfo) -> None:
    """Write the data card and, last, `cosmology.json`."""
    write_text(out / "README.md", data_card(info))
    write_text(out / INFO_FILE, json.dumps(info.as_json(), indent=1))
    (out / UNFINISHED).unlink(missing_ok=True)
    for leftover in out.glob(f"*/.*{TEMPORARY}"):  # of a process that was killed
        leftover.unlink(missing_ok=True)


def data_card(info: CosmologyInfo | FilesInfo) -> str:
    """Return the README of a data set; its YAML header names the files of each split."""
    counts = {split: count for split, count in info.counts.items() if count}
    files = "".join(f"  - split: {split}\n    path: {split}/*.parquet\n" for split in counts)
    columns = "".join(f"| {name} | {unit} |\n" for name, unit in info.units().items())
    notes = "".join(f"- {name}: {value}\n" for name, value in info.notes().items())
    sizes = ", ".join(f"{split} {count:,}" for split, count in counts.items())
    mean, std = (", ".join(f"{value:.6g}" for value in values) for values in (info.pixel_mean, info.pixel_std))
    prior = "The maps have no parameters."
    if info.labelled:
        bounds = ", ".join(f"{name} from {low:.6g} to {high:.6g}" for name, (low, high) in info.prior.items())
        prior = f"No cosmology is in two splits. Prior, uniform: {bounds}."
    return (
        f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}tags:\n- cosmology\n---\n\n"
        f"# Maps of kind {info.kind}, {info.settings.size} x {info.settings.size}\n\n{info.origin} Maps: {sizes}. "
        f"{prior} Pixels have mean {mean} and standard deviation {std}, by channel.\n\n"
        f"| column | what it is |\n|---|---|\n{columns}\n## How the maps were made\n\n{notes}"
    )


# ---- shards ----


def write_shard(file: Path, features: "datasets.Features", blocks: Iterable[Rows]) -> None:
    """Write blocks of rows as one parquet file, which appears only when all of it is on the disk.

    Its header gets `rows`, and `moments`: for each channel the number of observed pixels, their sum and sum of
    squares. Rows are added one by one, so the sums do not depend on the blocks.

    Raises:
        OSError: the disk is full, for example; nothing is left under `file`.
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
    """Return the header that `write_shard` left in a file."""
    import pyarrow.parquet as pq

    return json.loads(pq.read_metadata(file).metadata[HEADER])


def _grouped(blocks: Iterable[Rows]) -> Iterator[Rows]:
    """Join blocks to row groups of about GROUP_BYTES."""
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
