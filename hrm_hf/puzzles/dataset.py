"""On-disk format of a puzzle data set, shared by Sudoku, mazes, ARC and custom grids.

A data set is a folder that `datasets.load_dataset(folder)` can load or stream, and that can be pushed to the Hub
unchanged:

    README.md              a data card; its YAML header lists the files of each split
    data/train-00000.parquet, data/test-00000.parquet
    puzzle.json            `PuzzleInfo` (task, grid, vocabulary), and checksums of the other files
    identifiers.json       list of names; a name's position is its puzzle identifier, position 0 is "<blank>"

A row is one example. As in the original HRM layout, the rows of a puzzle are adjacent, and so are the puzzles of a
group (a task together with its augmentations).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..io.files import IDENTIFIERS_FILE, checksums_in, complete_file, load_info, load_json, load_split, write_text


if TYPE_CHECKING:
    import datasets

BLANK_IDENTIFIER = "<blank>"
IGNORE_LABEL = -100
PAD_ID = 0
MAX_SIDE = 2**20  # maximum cells per side of a board, large because a "generic" board may be a single row
MAX_VOCABULARY = 2**27
INFO_FILE = "puzzle.json"
ROW_COLUMNS = ("input_ids", "labels", "puzzle_identifiers", "puzzle_index", "group_index")


@dataclass
class PuzzleInfo:
    """Description of a puzzle data set: task, board, vocabulary, puzzle identifiers and build options.

    Attributes:
        task: "sudoku", "maze", "arc" or any other name; it selects how answers are decoded and checked.
        grid_shape: Rows and columns of the board; `seq_len` is their product.
        vocab_size: Number of token ids, padding (id 0) included.
        box_shape: Rows and columns of a Sudoku box; None for other tasks.
        units: Cells of each unit by kind, for models that mix by units; None for rows, columns and boxes.
        symbols: Text of each token, from token 0, padding; None for tasks that know it.
        identifiers: Name of each puzzle identifier; entry 0 is "<blank>".
        options: Options of the build (source, seed, counts), for the data card.
        repeated: Number of removed source rows, by reason.
    """

    task: str
    grid_shape: tuple[int, int]
    vocab_size: int
    box_shape: tuple[int, int] | None = None
    symbols: list[str] | None = None
    units: dict[str, list[list[int]]] | None = None
    identifiers: list[str] = field(default_factory=lambda: [BLANK_IDENTIFIER])
    options: dict[str, Any] = field(default_factory=dict)
    repeated: dict[str, int] = field(default_factory=dict)

    def __post_init__(self):
        self.grid_shape = _two_sides("grid_shape", self.grid_shape)
        self.box_shape = _two_sides("box_shape", self.box_shape) if self.box_shape else None
        if not isinstance(self.vocab_size, int) or not 1 <= self.vocab_size <= MAX_VOCABULARY:
            raise ValueError(f"vocab_size={self.vocab_size!r:.60}: must be an integer in [1, {MAX_VOCABULARY}]")

    @property
    def seq_len(self) -> int:
        return self.grid_shape[0] * self.grid_shape[1]

    @property
    def num_puzzle_identifiers(self) -> int:
        return len(self.identifiers)

    def identifiers_json(self) -> str:
        """Return the content of `identifiers.json`, which names the rows of a checkpoint's puzzle table."""
        return json.dumps(self.identifiers)

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of a puzzle model's config that are determined by the data."""
        return {
            "task": self.task,
            "grid_shape": list(self.grid_shape),
            "box_shape": list(self.box_shape) if self.box_shape else None,
            "symbols": self.symbols,
            "units": self.units,
            "seq_len": self.seq_len,
            "vocab_size": self.vocab_size,
            "num_puzzle_identifiers": self.num_puzzle_identifiers,
        }


def _two_sides(name: str, sides: Any) -> tuple[int, int]:
    if not isinstance(sides, (list, tuple)) or [type(s) is int and 1 <= s <= MAX_SIDE for s in sides] != [True, True]:
        raise ValueError(f"{name}={str(sides)[:60]}: must be two integers in [1, {MAX_SIDE}]")
    return tuple(sides)


def puzzle_features(seq_len: int, **extra: str) -> "datasets.Features":
    """Return the `datasets` features of a puzzle row: token grids as int8 lists, and grouping indices.

    `labels` is -100 in cells that are not predicted. `extra` gives the dtypes of additional scalar columns, e.g.
    `rating="float32"`.
    """
    from datasets import Features, List, Value

    grids = dict.fromkeys(ROW_COLUMNS[:2], List(Value("int8"), length=seq_len))
    scalars = dict.fromkeys(ROW_COLUMNS[2:], "int32") | extra
    return Features(grids | {name: Value(dtype) for name, dtype in scalars.items()})


def save_puzzle_dataset(
    splits: "datasets.DatasetDict", info: PuzzleInfo, out: str | Path, more: dict[str, str] | None = None
) -> Path:
    """Save `splits` and `info` to the folder `out` in the format of this module, and return its path.

    `more` maps names of additional files to their text. Raise FileExistsError if `out` already has a puzzle data set
    built with different options.
    """
    out = Path(out)
    info_path = out / INFO_FILE
    new_info = _info_to_json(info)
    if info_path.exists() and load_info(info_path) != json.loads(json.dumps(new_info)):
        raise FileExistsError(f"{out} already has a puzzle data set with different options; choose another --out")
    for name, split in splits.items():
        with complete_file(out / "data" / f"{name}-00000.parquet") as stream:
            split.to_parquet(stream)
    texts = {IDENTIFIERS_FILE: info.identifiers_json(), **(more or {})}
    for name, text in texts.items():
        write_text(out / name, text)
    write_text(out / "README.md", _data_card(splits, info))
    new_info |= checksums_in(out, [*texts, *(f"data/{name}-00000.parquet" for name in splits)])
    write_text(info_path, json.dumps(new_info, indent=1))  # written last, since its presence marks a complete folder
    return out


def load_puzzle_info(path: str | Path) -> PuzzleInfo:
    """Read `puzzle.json` and `identifiers.json` from a local folder or a Hub data set repository."""
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        sidecars = [INFO_FILE, IDENTIFIERS_FILE]
        folder = Path(snapshot_download(str(path), repo_type="dataset", allow_patterns=sidecars))
    for name in (INFO_FILE, IDENTIFIERS_FILE):
        if not (folder / name).exists():
            raise FileNotFoundError(
                f"{folder / name} is missing, so {path} is not a puzzle data set; build one with `hrm-hf data`, or "
                "convert an original HRM folder with `hrm-hf data import SRC --out DIR`"
            )
    identifiers = load_json(folder / IDENTIFIERS_FILE)
    if not isinstance(identifiers, list) or not all(isinstance(name, str) for name in identifiers):
        raise ValueError(f"{folder / IDENTIFIERS_FILE} must be a list of names; build the data set again")
    content = load_info(folder / INFO_FILE)
    try:
        return PuzzleInfo(**content, identifiers=identifiers)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / INFO_FILE}: {error}; build the data set again") from error


def load_identifiers(model: str) -> list[str] | None:
    """Load the row names of a checkpoint's puzzle table (local or Hub). Return None if it has no names."""
    from transformers.utils import cached_file

    file = model and cached_file(model, IDENTIFIERS_FILE, _raise_exceptions_for_missing_entries=False)
    return load_json(file) if file else None


def match_identifiers(names: Sequence[str], known: Sequence[str]) -> list[int | None]:
    """Return each name's position in `known`, or None if unknown. Raise ValueError for duplicate names."""
    places = {name: number for number, name in enumerate(known)}
    if len(places) < len(known) or len(set(names)) < len(names):
        raise ValueError(f"{IDENTIFIERS_FILE}: a name occurs twice; names must be unique, because they select rows")
    return [places.get(name) for name in names]


def load_puzzle_dataset(path: str | Path, split: str, streaming: bool = False):
    """Load one split of a puzzle data set from a local folder or the Hub."""
    return load_split(path, split, streaming, info=INFO_FILE)


def _info_to_json(info: PuzzleInfo) -> dict[str, Any]:
    fields = asdict(info)
    for name in ("repeated", "symbols", "units"):  # omitted if empty, as in files of earlier versions
        if not fields[name]:
            del fields[name]
    del fields["identifiers"]  # these names are saved in identifiers.json, as in the original layout
    return fields


def _data_card(splits, info: PuzzleInfo) -> str:
    files = "".join(f"  - split: {name}\n    path: data/{name}-*.parquet\n" for name in splits)
    counts = "".join(f"| {name} | {len(split):,} |\n" for name, split in splits.items())
    options = "".join(f"- {key}: {value}\n" for key, value in info.options.items())
    options += "".join(f"- {what}: {count:,} rows\n" for what, count in info.repeated.items())
    rows, columns = info.grid_shape
    return (
        f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n\n"
        f"# {info.task}, {rows} x {columns}\n\n| split | rows |\n|---|---|\n{counts}\n"
        f"Vocabulary {info.vocab_size} tokens (0 is padding), {info.num_puzzle_identifiers:,} puzzle identifiers. "
        f"Labels of -100 are not predicted.\n\n## How it was built\n\n{options}"
    )
