"""The original HRM/TRM layout on disk (a folder of .npy arrays), read into our rows and written back.

    identifiers.json                       list of names; position = puzzle identifier, position 0 "<blank>"
    {train,test}/dataset.json              pad_id, ignore_label_id, vocab_size, seq_len, sets, counts
    {train,test}/{set}__inputs.npy         [N, S] tokens
    {train,test}/{set}__labels.npy         [N, S] tokens; `ignore_label_id` (0) marks what is not predicted
    {train,test}/{set}__puzzle_identifiers.npy  [puzzles]
    {train,test}/{set}__puzzle_indices.npy      [puzzles + 1] first row of each puzzle
    {train,test}/{set}__group_indices.npy       [groups + 1] first puzzle of each group

The set "all" of folder `test` becomes the split "test", any other set `x` the split "test_x". Rows travel in chunks,
so sets larger than memory pass through; `RowWriter` is that mechanism, and the ARC builder uses it too.
"""

import atexit
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..io.bounded_files import load_json
from .dataset import (
    BLANK_IDENTIFIER,
    IDENTIFIERS_FILE,
    IGNORE_LABEL,
    INFO_FILE,
    PAD_ID,
    ROW_COLUMNS,
    PuzzleInfo,
    puzzle_features,
)


if TYPE_CHECKING:
    import datasets

META_FILE = "dataset.json"
FOLDERS = ("train", "test")
DEFAULT_SET = "all"
ARRAYS = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
# What the original builders write; a set that was read remembers its own (`info.options["original_layout"]`).
DEFAULT_DTYPES = dict(zip(ARRAYS, ("uint8", "uint8", "int32", "int32", "int32")))
CHUNK_ROWS = 8192
MAX_TOKEN = 127  # our grids are int8


class RowWriter:
    """Streams puzzle rows into an Arrow file and hands back a memory-mapped `Dataset`; holds one chunk in memory."""

    def __init__(self, path: Path, seq_len: int):
        from datasets.arrow_writer import ArrowWriter

        self.path = path
        self.seq_len = seq_len
        self.features = puzzle_features(seq_len)
        self.buffer: list[tuple[np.ndarray, ...]] = []
        self.buffered = 0
        self.writer = ArrowWriter(features=self.features, path=str(path))

    def write(self, *columns: np.ndarray) -> None:
        """Appends n rows: arrays in the order of `ROW_COLUMNS`, two of shape [n, S] and three of shape [n]."""
        self.buffer.append(columns)
        self.buffered += len(columns[0])
        if self.buffered >= CHUNK_ROWS:
            self._flush()

    def finish(self) -> "datasets.Dataset":
        from datasets import Dataset

        self._flush()
        self.writer.finalize()
        return Dataset.from_file(str(self.path))

    def _flush(self) -> None:
        import pyarrow as pa

        if not self.buffer:
            return
        columns = [np.concatenate(parts) for parts in zip(*self.buffer)]
        grids = [
            pa.FixedSizeListArray.from_arrays(pa.array(grid.astype(np.int8).reshape(-1)), self.seq_len)
            for grid in columns[:2]
        ]
        scalars = [pa.array(column.astype(np.int32)) for column in columns[2:]]
        self.writer.write_table(pa.table(dict(zip(ROW_COLUMNS, grids + scalars))))
        self.buffer, self.buffered = [], 0


def working_folder(cache_dir: str | Path | None = None) -> Path:
    """Where Arrow files of a build live: `cache_dir`, or a folder in the `datasets` cache removed at exit.

    Set HF_DATASETS_CACHE to choose another disk: full ARC needs about 8 GB.
    """
    if cache_dir is not None:
        Path(cache_dir).mkdir(parents=True, exist_ok=True)
        return Path(cache_dir)
    from datasets import config

    Path(config.HF_DATASETS_CACHE).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="hrm_hf_", dir=config.HF_DATASETS_CACHE))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def is_original(path: str | Path) -> bool:
    """Whether a folder has the original's arrays, and not (also) ours."""
    return not Path(path, INFO_FILE).is_file() and any(Path(path, name, META_FILE).is_file() for name in FOLDERS)


def read_original(
    path: str | Path, cache_dir: str | Path | None = None, only: str | None = None
) -> tuple["datasets.DatasetDict", PuzzleInfo]:
    """Reads a folder that the original HRM or TRM builders wrote.

    The task is guessed from the shapes: S 81 with 11 tokens is Sudoku, S 900 with 6 tokens a maze and with 12 tokens
    ARC; everything else is "generic", on a square board if S is a square and on 1 x S if not.

    Args:
        path: folder with `identifiers.json`, `train/` and/or `test/`.
        cache_dir: where the Arrow files go; see `working_folder`.
        only: a split; no other arrays than its folder's are read.

    Raises:
        FileNotFoundError: a file of the layout is missing.
        ValueError: files disagree (shapes, offsets, vocabulary, identifiers); the message names file and values.
    """
    from datasets import DatasetDict

    path = Path(path)
    identifiers = _read_identifiers(path)
    metas = {name: _read_meta(path / name, len(identifiers)) for name in FOLDERS if (path / name).is_dir()}
    if not metas:
        raise FileNotFoundError(f"{path} has neither train/ nor test/; expected a folder of the original HRM layout")
    shared = _agreed_fields(path, metas)
    work = working_folder(cache_dir)
    splits, dtypes = DatasetDict(), {}
    for folder, meta in metas.items():
        if only is not None and folder != only.partition("_")[0]:
            continue
        for set_name in meta["sets"]:
            split = folder if set_name == DEFAULT_SET else f"{folder}_{set_name}"
            arrays = _read_set(path / folder, set_name, meta)
            dtypes[split] = {name: str(array.dtype) for name, array in arrays.items()}
            splits[split] = _set_to_rows(arrays, meta, work / f"{split}.arrow")
    task, grid_shape, box_shape = guess_task(shared["seq_len"], shared["vocab_size"])
    layout = {"ignore_label_id": shared["ignore_label_id"], "dtypes": dtypes}
    return splits, PuzzleInfo(
        task=task,
        grid_shape=grid_shape,
        box_shape=box_shape,
        vocab_size=shared["vocab_size"],
        identifiers=identifiers,
        options={"source": path.resolve().name, "original_layout": layout},
    )


def write_original(splits: "datasets.DatasetDict", info: PuzzleInfo, out: str | Path) -> Path:
    """Writes `splits` in the original layout, readable by the original HRM and TRM loaders, and returns its path.

    The split "train" becomes `train/` with set "all", "test_hard" becomes `test/` with set "hard". Columns other
    than the five of `ROW_COLUMNS` (a Sudoku rating, say) have no place in that layout and are not written.

    Raises:
        FileExistsError: `out` already holds such a data set.
        ValueError: a split is named otherwise, rows of a puzzle or group are not neighbours, or a label equals
            `ignore_label_id` although it is to be predicted.
    """
    out = Path(out)
    if any((out / name / META_FILE).exists() for name in FOLDERS):
        raise FileExistsError(f"{out} already holds a data set in the original layout; choose another folder")
    layout = info.options.get("original_layout", {})
    ignore_id = layout.get("ignore_label_id", PAD_ID)
    sets: dict[str, dict[str, str]] = {}
    for split in splits:
        folder, _, set_name = split.partition("_")
        if folder not in FOLDERS:
            raise ValueError(f"split {split!r} has no place in the original layout; rename it to train or test")
        sets.setdefault(folder, {})[set_name or DEFAULT_SET] = split
    for folder, names in sets.items():
        (out / folder).mkdir(parents=True, exist_ok=True)
        totals = np.zeros(3, dtype=np.int64)
        for set_name, split in names.items():
            dtypes = {**DEFAULT_DTYPES, **layout.get("dtypes", {}).get(split, {})}
            totals += _write_set(splits[split], split, info.seq_len, ignore_id, dtypes, out / folder / set_name)
        (out / folder / META_FILE).write_text(json.dumps(_meta(info, ignore_id, list(names), totals)))
    (out / IDENTIFIERS_FILE).write_text(json.dumps(info.identifiers))
    return out


def guess_task(seq_len: int, vocab_size: int) -> tuple[str, tuple[int, int], tuple[int, int] | None]:
    """Task, grid shape and box shape that `seq_len` and `vocab_size` stand for."""
    known = {
        (81, 11): ("sudoku", (9, 9), (3, 3)),
        (900, 6): ("maze", (30, 30), None),
        (900, 12): ("arc", (30, 30), None),
    }
    side = math.isqrt(seq_len)
    square = (side, side) if side * side == seq_len else (1, seq_len)
    return known.get((seq_len, vocab_size), ("generic", square, None))


# Reading


def _read_identifiers(path: Path) -> list[str]:
    file = path / IDENTIFIERS_FILE
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing; puzzle identifiers of a checkpoint are meaningless without it")
    identifiers = load_json(file)
    if not isinstance(identifiers, list) or identifiers[:1] != [BLANK_IDENTIFIER]:
        raise ValueError(
            f"{file} must be a list that starts with {BLANK_IDENTIFIER!r}; it starts {str(identifiers)[:40]}"
        )
    return identifiers


def _read_meta(folder: Path, num_identifiers: int) -> dict[str, Any]:
    file = folder / META_FILE
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing; every split of the original layout has one")
    meta = load_json(file)
    if not isinstance(meta, dict):
        raise ValueError(f"{file} holds a {type(meta).__name__}; expected an object")
    needed = ("pad_id", "ignore_label_id", "blank_identifier_id", "vocab_size", "seq_len", "num_puzzle_identifiers")
    missing = [name for name in (*needed, "sets") if name not in meta]
    if missing:
        raise ValueError(f"{file} lacks {missing}; it has {sorted(meta)}")
    expected = {"pad_id": PAD_ID, "blank_identifier_id": 0, "num_puzzle_identifiers": num_identifiers}
    for name, value in expected.items():
        if meta[name] != value:
            raise ValueError(f"{file}: {name} is {meta[name]}; expected {value} ({IDENTIFIERS_FILE} and our layout)")
    for name in ("vocab_size", "seq_len"):
        if type(meta[name]) is not int or meta[name] < 1:
            raise ValueError(f"{file}: {name} is {meta[name]!r:.60}; expected a whole number from 1")
    if not isinstance(meta["sets"], list) or not all(isinstance(name, str) for name in meta["sets"]):
        raise ValueError(f"{file}: sets is {meta['sets']!r:.60}; expected a list of names")
    if meta["vocab_size"] > MAX_TOKEN + 1:
        raise ValueError(f"{file}: vocab_size is {meta['vocab_size']}; grids are int8, so at most {MAX_TOKEN + 1} fit")
    for name in meta["sets"]:
        if not name.isidentifier():
            raise ValueError(f"{file}: set {name!r} cannot name a split; use letters, digits and underscores")
    return meta


def _agreed_fields(path: Path, metas: dict[str, dict]) -> dict[str, Any]:
    """The fields that train and test must share."""
    shared = {}
    for name in ("seq_len", "vocab_size", "ignore_label_id"):
        values = {folder: meta[name] for folder, meta in metas.items()}
        if len(set(values.values())) > 1:
            raise ValueError(
                f"{path}: {name} differs between splits: {values}; it must be the same in every {META_FILE}"
            )
        shared[name] = next(iter(values.values()))
    return shared


def _read_set(folder: Path, set_name: str, meta: dict[str, Any]) -> dict[str, np.ndarray]:
    arrays = {}
    for name in ARRAYS:
        file = folder / f"{set_name}__{name}.npy"
        if not file.exists():
            raise FileNotFoundError(f"{file} is missing; {folder / META_FILE} lists the set {set_name!r}")
        try:
            arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
        except ValueError as error:  # pickled objects, which could run code, and corrupted files
            raise ValueError(f"{file} is no plain .npy array of integers: {error}") from error
        if arrays[name].dtype.kind not in "iu":
            raise ValueError(f"{file} has dtype {arrays[name].dtype}; expected integers")
    prefix = folder / f"{set_name}__"
    inputs, seq_len = arrays["inputs"], meta["seq_len"]
    for name in ("inputs", "labels"):
        if arrays[name].shape != (len(inputs), seq_len):
            raise ValueError(
                f"{prefix}{name}.npy has shape {arrays[name].shape}; expected ({len(inputs)}, {seq_len}), the rows of "
                f"{set_name}__inputs.npy and the seq_len of {META_FILE}"
            )
    num_puzzles = len(arrays["puzzle_identifiers"])
    _validate_offsets(f"{prefix}puzzle_indices.npy", arrays["puzzle_indices"], len(inputs), "rows", num_puzzles)
    _validate_offsets(f"{prefix}group_indices.npy", arrays["group_indices"], num_puzzles, "puzzles")
    _validate_range(f"{prefix}puzzle_identifiers.npy", arrays["puzzle_identifiers"], meta["num_puzzle_identifiers"])
    return arrays


def _validate_offsets(file: str, offsets: np.ndarray, end: int, unit: str, spans: int | None = None) -> None:
    """Offsets run from 0 to `end` in strictly increasing order (an empty puzzle or group would have no rows)."""
    if offsets.ndim != 1 or not len(offsets) or (spans is not None and len(offsets) != spans + 1):
        expected = "[n + 1]" if spans is None else f"({spans + 1},), one more than there are puzzle identifiers"
        raise ValueError(f"{file} has shape {offsets.shape}; expected {expected}")
    falls = np.flatnonzero(np.diff(offsets.astype(np.int64)) <= 0)
    if len(falls):
        at = int(falls[0])
        raise ValueError(
            f"{file}: offsets are not increasing: entry {at} is {offsets[at]}, entry {at + 1} is {offsets[at + 1]}"
        )
    if offsets[0] != 0 or offsets[-1] != end:
        raise ValueError(f"{file} runs from {offsets[0]} to {offsets[-1]}; expected 0 to {end}, the number of {unit}")


def _validate_range(file: str, values: np.ndarray, size: int) -> None:
    if len(values) and (values.min() < 0 or values.max() >= size):
        raise ValueError(f"{file} holds values from {values.min()} to {values.max()}; expected 0 to {size - 1}")


def _set_to_rows(arrays: dict[str, np.ndarray], meta: dict[str, Any], file: Path) -> "datasets.Dataset":
    """One set as rows, chunk by chunk."""
    num_rows = len(arrays["inputs"])
    puzzle_lengths = np.diff(arrays["puzzle_indices"])
    group_lengths = np.diff(arrays["group_indices"])
    puzzle_of_row = np.repeat(np.arange(len(puzzle_lengths), dtype=np.int32), puzzle_lengths)
    group_of_puzzle = np.repeat(np.arange(len(group_lengths), dtype=np.int32), group_lengths)
    writer = RowWriter(file, meta["seq_len"])
    for start in range(0, num_rows, CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        inputs, labels = np.asarray(arrays["inputs"][rows]), np.asarray(arrays["labels"][rows])
        _validate_range(f"{file.stem} inputs", inputs, meta["vocab_size"])
        ignored = np.zeros(labels.shape, dtype=bool)
        if meta["ignore_label_id"] is not None:
            ignored = labels == meta["ignore_label_id"]
        _validate_range(f"{file.stem} labels", labels[~ignored], meta["vocab_size"])
        puzzles = puzzle_of_row[rows]
        identifiers = arrays["puzzle_identifiers"][puzzles]
        our_labels = np.where(ignored, np.int8(IGNORE_LABEL), labels.astype(np.int8))
        writer.write(inputs, our_labels, identifiers, puzzles, group_of_puzzle[puzzles])
    return writer.finish()


# Writing


def _write_set(
    split: "datasets.Dataset", name: str, seq_len: int, ignore_id: int | None, dtypes: dict[str, str], prefix: Path
) -> tuple[int, int, int]:
    """Writes the five arrays of one set; returns its number of rows, puzzles and groups."""
    scalars = {column: _column(split, column) for column in ROW_COLUMNS[2:]}
    spans = _spans(name, **scalars)
    for array_name, values in spans.items():
        _save(prefix, array_name, values, dtypes)
    files = {}
    for array_name in ARRAYS[:2]:
        files[array_name] = (
            np.lib.format.open_memmap(
                f"{prefix}__{array_name}.npy", mode="w+", dtype=dtypes[array_name], shape=(len(split), seq_len)
            )
            if len(split)
            else _save(prefix, array_name, np.zeros((0, seq_len)), dtypes)
        )
    for start in range(0, len(split), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        files["inputs"][rows] = _grids(split, rows, "input_ids", seq_len, name)
        files["labels"][rows] = _restore_ignored(_grids(split, rows, "labels", seq_len, name), ignore_id, name)
    return len(split), len(spans["puzzle_identifiers"]), len(spans["group_indices"]) - 1


def _save(prefix: Path, name: str, values: np.ndarray, dtypes: dict[str, str]) -> np.ndarray:
    np.save(f"{prefix}__{name}.npy", values.astype(dtypes[name]), allow_pickle=False)
    return values


def _column(split: "datasets.Dataset", name: str) -> np.ndarray:
    return split.with_format("arrow")[:][name].to_numpy() if len(split) else np.zeros(0, dtype=np.int32)


def _spans(
    split: str, puzzle_identifiers: np.ndarray, puzzle_index: np.ndarray, group_index: np.ndarray
) -> dict[str, np.ndarray]:
    """Offsets and per-puzzle identifiers from per-row indices [N].

    Raises:
        ValueError: an index falls, or an identifier or a group changes inside a puzzle.
    """
    for name, values in (("puzzle_index", puzzle_index), ("group_index", group_index)):
        falls = np.flatnonzero(np.diff(values) < 0)
        if len(falls):
            raise ValueError(
                f"split {split!r}: {name} falls after row {falls[0]} (from {values[falls[0]]} to "
                f"{values[falls[0] + 1]}); rows of a puzzle or group must be neighbours: sort the split by {name}"
            )
    starts = np.flatnonzero(np.diff(puzzle_index, prepend=-1))
    lengths = np.diff(np.append(starts, len(puzzle_index)))
    for name, values in (("puzzle_identifiers", puzzle_identifiers), ("group_index", group_index)):
        changed = np.flatnonzero(values != np.repeat(values[starts], lengths))
        if len(changed):
            raise ValueError(
                f"split {split!r}: {name} changes inside puzzle {puzzle_index[changed[0]]}, at row {changed[0]}"
            )
    group_starts = np.flatnonzero(np.diff(group_index[starts], prepend=-1))
    return {
        "puzzle_identifiers": puzzle_identifiers[starts],
        "puzzle_indices": np.append(starts, len(puzzle_index)),
        "group_indices": np.append(group_starts, len(starts)),
    }


def _grids(split: "datasets.Dataset", rows: slice, column: str, seq_len: int, name: str) -> np.ndarray:
    """Rows of a grid column as [n, S] int8."""
    values = split.with_format("arrow")[rows][column].combine_chunks()
    flat = values.flatten().to_numpy(zero_copy_only=False)
    if len(flat) != len(values) * seq_len:
        raise ValueError(
            f"split {name!r}: {column} holds {len(flat)} values in {len(values)} rows; expected {seq_len} a row"
        )
    return flat.reshape(len(values), seq_len)


def _restore_ignored(labels: np.ndarray, ignore_id: int | None, name: str) -> np.ndarray:
    ignored = labels == IGNORE_LABEL
    if ignore_id is None and ignored.any():
        raise ValueError(f"split {name!r} has ignored labels ({IGNORE_LABEL}) but its ignore_label_id is null")
    if ignore_id is not None and (labels == ignore_id).any():
        raise ValueError(
            f"split {name!r}: a label to be predicted equals ignore_label_id {ignore_id}; the original layout cannot "
            "hold it, since the loader would ignore that position"
        )
    return np.where(ignored, ignore_id, labels) if ignore_id is not None else labels


def _meta(info: PuzzleInfo, ignore_id: int | None, sets: list[str], totals: np.ndarray) -> dict[str, Any]:
    rows, puzzles, groups = (int(total) for total in totals)
    return {
        "pad_id": PAD_ID,
        "ignore_label_id": ignore_id,
        "blank_identifier_id": 0,
        "vocab_size": info.vocab_size,
        "seq_len": info.seq_len,
        "num_puzzle_identifiers": info.num_puzzle_identifiers,
        "total_groups": groups,
        "mean_puzzle_examples": rows / max(puzzles, 1),
        "total_puzzles": puzzles,
        "sets": sets,
    }
