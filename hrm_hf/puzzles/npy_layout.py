"""Read and write data sets in the layout of the original HRM and TRM code, a folder of .npy arrays.

    identifiers.json                       list of names; position = puzzle identifier, position 0 "<blank>"
    {train,test}/dataset.json              pad_id, ignore_label_id, vocab_size, seq_len, sets, counts
    {train,test}/{set}__inputs.npy         [N, S] tokens
    {train,test}/{set}__labels.npy         [N, S] tokens; `ignore_label_id` (0) marks cells that are not predicted
    {train,test}/{set}__puzzle_identifiers.npy  [puzzles]
    {train,test}/{set}__puzzle_indices.npy      [puzzles + 1] first row of each puzzle
    {train,test}/{set}__group_indices.npy       [groups + 1] first puzzle of each group

The set "all" in the folder `test` becomes the split "test"; any other set `x` becomes the split "test_x".
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..io.files import load_json
from .dataset import BLANK_IDENTIFIER, IDENTIFIERS_FILE, IGNORE_LABEL, INFO_FILE, PAD_ID, ROW_COLUMNS, PuzzleInfo
from .readers import make_split
from .task_registry import guess_task


if TYPE_CHECKING:
    import datasets

META_FILE = "dataset.json"
FOLDERS = ("train", "test")
DEFAULT_SET = "all"
# Names and dtypes of the arrays that the original builders write.
ARRAYS = {"inputs": "uint8", "labels": "uint8", "puzzle_identifiers": "int32", "puzzle_indices": "int32",
          "group_indices": "int32"}  # fmt: skip
MAX_TOKEN = 127  # maximum of int8, in which our layout stores tokens


def is_original(path: str | Path) -> bool:
    """Check whether a folder has a data set in the original layout but not in ours."""
    return not Path(path, INFO_FILE).is_file() and any(Path(path, name, META_FILE).is_file() for name in FOLDERS)


def read_original(path: str | Path, only: str | None = None) -> tuple["datasets.DatasetDict", PuzzleInfo]:
    """Read a data set written by the original HRM or TRM builders, inferring its task with `guess_task`.

    Args:
        path: Folder with `identifiers.json`, `train/` and/or `test/`.
        only: Split to read; only the arrays in its folder are loaded.

    Raises:
        FileNotFoundError: If a file of the layout is missing.
        ValueError: If files are inconsistent (shapes, offsets, vocabulary, identifiers).
    """
    from datasets import DatasetDict

    path = Path(path)
    identifiers = load_json(path / IDENTIFIERS_FILE)
    if not isinstance(identifiers, list) or identifiers[:1] != [BLANK_IDENTIFIER]:
        raise ValueError(f"{path / IDENTIFIERS_FILE}: must be a list that starts with {BLANK_IDENTIFIER!r}")
    metas = {name: _read_meta(path / name, len(identifiers)) for name in FOLDERS if (path / name).is_dir()}
    if not metas:
        raise FileNotFoundError(f"{path} has neither train/ nor test/; expected a folder in the original HRM layout")
    first = next(iter(metas.values()))
    for name in ("seq_len", "vocab_size", "ignore_label_id"):
        if any(meta[name] != first[name] for meta in metas.values()):
            raise ValueError(f"{path}: {name} must be the same in both {META_FILE} files")
    splits = DatasetDict()
    for folder, meta in metas.items():
        for set_name in meta["sets"] if only is None or folder == only.partition("_")[0] else ():
            split = folder if set_name == DEFAULT_SET else f"{folder}_{set_name}"
            splits[split] = _rows_of_set(_read_set(path / folder, set_name, meta), meta, split)
    task, grid_shape, box_shape = guess_task(first["seq_len"], first["vocab_size"])
    options = {"source": path.resolve().name, "ignore_label_id": first["ignore_label_id"]}
    info = PuzzleInfo(task, grid_shape, first["vocab_size"], box_shape, identifiers=identifiers, options=options)
    return splits, info


def write_original(splits: "datasets.DatasetDict", info: PuzzleInfo, out: str | Path) -> Path:
    """Write the columns `ROW_COLUMNS` of `splits` in the original layout, and return `out`.

    Raises:
        FileExistsError: If `out` already contains such a data set.
        ValueError: If a split's name does not start with train or test, the rows of a puzzle or group are not
            adjacent, or a label to be predicted equals `ignore_label_id`.
    """
    out = Path(out)
    if any((out / name / META_FILE).exists() for name in FOLDERS):
        raise FileExistsError(f"{out} already has a data set in the original layout; choose another folder")
    ignore_id = info.options.get("ignore_label_id", PAD_ID)
    sets: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    for split, rows in splits.items():
        folder, _, set_name = split.partition("_")
        if folder not in FOLDERS:
            raise ValueError(f"split {split!r} does not exist in the original layout; rename it to train or test")
        sets.setdefault(folder, {})[set_name or DEFAULT_SET] = _set_of_rows(rows, split, info.seq_len, ignore_id)
    for folder, arrays_of_sets in sets.items():
        (out / folder).mkdir(parents=True, exist_ok=True)
        for set_name, arrays in arrays_of_sets.items():
            for name, dtype in ARRAYS.items():
                np.save(out / folder / f"{set_name}__{name}.npy", arrays[name].astype(dtype), allow_pickle=False)
        counted = ("inputs", "puzzle_identifiers", "group_indices")
        rows, puzzles, groups = (sum(len(arrays[name]) for arrays in arrays_of_sets.values()) for name in counted)
        meta = {
            "pad_id": PAD_ID, "ignore_label_id": ignore_id, "blank_identifier_id": 0, "vocab_size": info.vocab_size,
            "seq_len": info.seq_len, "sets": list(arrays_of_sets), "total_puzzles": puzzles,
            "num_puzzle_identifiers": info.num_puzzle_identifiers, "total_groups": groups - len(arrays_of_sets),
            "mean_puzzle_examples": rows / max(puzzles, 1),
        }  # fmt: skip
        (out / folder / META_FILE).write_text(json.dumps(meta))
    (out / IDENTIFIERS_FILE).write_text(json.dumps(info.identifiers))
    return out


def _read_meta(folder: Path, num_identifiers: int) -> dict[str, Any]:
    file = folder / META_FILE
    meta = load_json(file)
    for name, value in {"pad_id": PAD_ID, "blank_identifier_id": 0, "num_puzzle_identifiers": num_identifiers}.items():
        if meta.get(name) != value:
            raise ValueError(f"{file}: {name}={meta.get(name)}: {IDENTIFIERS_FILE} and our layout require {value}")
    for name, most, why in (("vocab_size", MAX_TOKEN + 1, ", since grids are int8"), ("seq_len", math.inf, "")):
        if type(meta.get(name)) is not int or not 1 <= meta[name] <= most:
            raise ValueError(f"{file}: {name}={meta.get(name)!r:.60}: must be in [1, {most}]{why}")
    if not isinstance(meta.get("sets"), list) or not all(str(name).isidentifier() for name in meta["sets"]):
        raise ValueError(
            f"{file}: sets={meta.get('sets')!r:.60}: must be a list of names with only letters, digits and underscores"
        )
    return meta


def _read_set(folder: Path, set_name: str, meta: dict[str, Any]) -> dict[str, np.ndarray]:
    arrays, prefix = {}, folder / f"{set_name}__"
    for name in ARRAYS:
        file = f"{prefix}{name}.npy"
        try:
            arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
        except ValueError as error:  # the file is corrupted or contains pickled objects, which could run code
            raise ValueError(f"{file} is not a plain .npy array of integers: {error}") from error
        if arrays[name].dtype.kind not in "iu":
            raise ValueError(f"{file} has dtype {arrays[name].dtype}; expected integers")
    rows, puzzles = len(arrays["inputs"]), len(arrays["puzzle_identifiers"])
    expected = dict.fromkeys(("inputs", "labels"), (rows, meta["seq_len"])) | {"puzzle_indices": (puzzles + 1,)}
    for name, shape in expected.items():
        if arrays[name].shape != shape:
            raise ValueError(f"{prefix}{name}.npy has shape {arrays[name].shape}; expected {shape}")
    for name, end in (("puzzle_indices", rows), ("group_indices", puzzles)):
        offsets = arrays[name].astype(np.int64)
        # Equal offsets would mean an empty puzzle or group.
        if offsets[:1].tolist() != [0] or offsets[-1] != end or (np.diff(offsets) <= 0).any():
            raise ValueError(f"{prefix}{name}.npy: offsets must increase from 0 to {end}")
    _validate_range(f"{prefix}puzzle_identifiers.npy", arrays["puzzle_identifiers"], meta["num_puzzle_identifiers"])
    return arrays


def _validate_range(file: str, values: np.ndarray, size: int) -> None:
    if len(values) and (values.min() < 0 or values.max() >= size):
        raise ValueError(f"{file} has values from {values.min()} to {values.max()}; must be in [0, {size - 1}]")


def _rows_of_set(arrays: dict[str, np.ndarray], meta: dict[str, Any], split: str) -> "datasets.Dataset":
    labels, ignore_id = arrays["labels"], meta["ignore_label_id"]
    ignored = np.zeros(labels.shape, dtype=bool) if ignore_id is None else labels == ignore_id
    _validate_range(f"{split} inputs", arrays["inputs"], meta["vocab_size"])
    _validate_range(f"{split} labels", labels[~ignored], meta["vocab_size"])
    both = (arrays["puzzle_indices"], arrays["group_indices"])
    puzzle_index, group_of_puzzle = (np.repeat(np.arange(len(each) - 1), np.diff(each)) for each in both)
    labels = np.where(ignored, IGNORE_LABEL, labels.astype(np.int8))
    more = {"puzzle_identifiers": arrays["puzzle_identifiers"][puzzle_index], "puzzle_index": puzzle_index}
    return make_split(arrays["inputs"], labels, group_of_puzzle[puzzle_index], **more)


def _set_of_rows(split: "datasets.Dataset", name: str, seq_len: int, ignore_id: int | None) -> dict[str, np.ndarray]:
    """Return a split as the layout's five arrays, or raise ValueError for rows that it cannot represent."""
    table = split.with_format("arrow")[:]
    tokens = (table[column].combine_chunks().flatten() for column in ("labels", "input_ids"))
    labels, inputs = (flat.to_numpy(zero_copy_only=False).reshape(len(table), seq_len) for flat in tokens)
    identifiers, puzzle_index, group_index = (
        table[column].to_numpy() if len(split) else np.zeros(0, dtype=np.int32) for column in ROW_COLUMNS[2:]
    )
    for column, values in (("puzzle_index", puzzle_index), ("group_index", group_index)):
        for row in np.flatnonzero(np.diff(values) < 0)[:1]:
            raise ValueError(f"split {name!r}: {column} decreases after row {row}; sort the split by {column}")
    starts = np.flatnonzero(np.diff(puzzle_index, prepend=-1))
    lengths = np.diff(np.append(starts, len(puzzle_index)))
    for column, values in (("puzzle_identifiers", identifiers), ("group_index", group_index)):
        for row in np.flatnonzero(values != np.repeat(values[starts], lengths))[:1]:
            raise ValueError(f"split {name!r}: {column} changes inside puzzle {puzzle_index[row]}, at row {row}")
    ignored = labels == IGNORE_LABEL
    if ignore_id is None and ignored.any():
        raise ValueError(f"split {name!r} has ignored labels ({IGNORE_LABEL}) but its ignore_label_id is null")
    if ignore_id is not None and (labels == ignore_id).any():
        raise ValueError(f"split {name!r}: a label to be predicted equals ignore_label_id={ignore_id}")
    return {
        "inputs": inputs,
        "labels": labels if ignore_id is None else np.where(ignored, ignore_id, labels),
        "puzzle_identifiers": identifiers[starts],
        "puzzle_indices": np.append(starts, len(puzzle_index)),
        "group_indices": np.append(np.flatnonzero(np.diff(group_index[starts], prepend=-1)), len(starts)),
    }
