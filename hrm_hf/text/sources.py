"""Read documents from files, folders and the Hub (`answers.py` reads prompts and answers).

`open_source` turns each source into a data set of rows {"text", "error"}.

A source is one of these: JSON Lines or a JSON list (`.jsonl`, `.json`), plain text (`.txt`, `.text`, `.md`), either
compressed as `.gz`, a `.parquet` file, a folder of such files, or a Hub data set `OWNER/NAME` or `OWNER/NAME:CONFIG`.
The prefix `hub:` selects the Hub if a local folder has the same name. Hidden files in a folder are skipped. An
unreadable line raises an error that names file and line; with `on_bad_line="skip"` it becomes a row with an `error`
message, which `filters.py` counts.

Files are converted once to Arrow files in the cache of `datasets`, keyed by path, size and modification time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..io.files import (
    HUB_PREFIX,
    JSON_KINDS,
    PARQUET,
    BadLineError,
    decode_text,
    file_kind,
    is_hub_source,
    local_files,
    numbered_lines,
    parse_json,
    read_lines,
    shorten,
)


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

WRITTEN_AT_ONCE = 100  # number of rows in memory while converting a file
REASONING_COLUMNS = {"input_ids", "labels", "steps", "difficulty"}  # written by `reasoning/build.py`
READER_VERSION = 2  # part of the cache key; increase it when the code reads files differently


def open_source(
    source: str,
    *,
    split: str = "train",
    column: str = "text",
    separator: str | None = None,
    on_bad_line: str = "stop",
    streaming: bool = False,
    cache_dir: str | None = None,
) -> "Dataset | IterableDataset":
    """Open one source as rows with `text` and `error` (str). One of them is None in each row.

    Args:
        source: file, folder or Hub data set, as described in the module docstring.
        split: split of a Hub data set.
        column: JSON key or column that contains the text.
        separator: line that separates the documents of a plain text file, "" for an empty line; None for one document
            per file. Documents contain neither the separator nor the line breaks around it.
        on_bad_line: "stop" raises `BadLineError` at the first unreadable line, "skip" yields rows with `error`.
        streaming: read the source during training instead of converting it first.

    Raises:
        FileNotFoundError: the file, folder or Hub data set does not exist.
        ValueError: a file has an unsupported type, a folder has no supported files, or the column is missing.
        BadLineError: see `on_bad_line`; raised during iteration if streaming.
    """
    from datasets import concatenate_datasets

    if is_hub_source(source):
        rows = open_hub(source, split, streaming, cache_dir)
        return _with_places(rows, column, f"{source.removeprefix(HUB_PREFIX)}, split {split}")
    parts = []
    for path in local_files(source):
        if path.suffix == PARQUET:
            parts.append(_open_parquet(path, column, streaming, cache_dir))
        else:
            parts.append(_open_lines(path, column, separator, on_bad_line, streaming, cache_dir))
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


# ---- text and JSON files ----


def _open_lines(path: Path, column: str, separator, on_bad_line: str, streaming: bool, cache_dir: str | None):
    from datasets import Dataset, Features, IterableDataset, Value
    from datasets.exceptions import DatasetGenerationError
    from datasets.fingerprint import Hasher

    options: dict[str, Any] = {"path": str(path), "on_bad_line": on_bad_line}
    if file_kind(path) in JSON_KINDS:
        reader = read_json_lines
        options["column"] = column
    else:
        reader = read_plain_text
        options["separator"] = separator
    # large_string: one value may be a complete file of more than 2 GB.
    features = Features({"text": Value("large_string"), "error": Value("string")})
    if streaming:
        return IterableDataset.from_generator(reader, features=features, gen_kwargs=options)
    state = path.stat()
    key = Hasher.hash(
        (READER_VERSION, reader.__name__, options, str(path.resolve()), state.st_size, state.st_mtime_ns)
    )
    try:
        return Dataset.from_generator(
            reader,
            features=features,
            gen_kwargs=options,
            cache_dir=cache_dir,
            fingerprint=key,
            writer_batch_size=WRITTEN_AT_ONCE,
        )
    except DatasetGenerationError as error:  # raised by `datasets` for an error in our reader
        raise (error.__cause__ or error) from None
    except ValueError as error:  # raised by `datasets` for an empty file, without its name
        if next(iter(reader(**options)), None) is not None:
            raise
        raise ValueError(f"{path} contains no text") from error


def read_json_lines(path: str, column: str, on_bad_line: str) -> Iterator[dict[str, str | None]]:
    """Yield the rows of a JSON Lines file (skipping empty lines) or a JSON list. See `open_source`."""
    for place, line in numbered_lines(path):
        try:
            yield {"text": _text_of_line(line, column, place), "error": None}
        except BadLineError as error:
            yield _bad_row(error, on_bad_line)


def _text_of_line(line: bytes, column: str, place: str) -> str:
    row = parse_json(line, place)
    if not isinstance(row, dict):
        raise BadLineError(f'{place}: {shorten(row)}; expected a JSON object like {{"{column}": "..."}}')
    if column not in row:
        raise BadLineError(
            f"{place}: key {column!r} is missing, found {shorten(list(row))}; set --text_column to the correct key"
        )
    text = row[column]
    if not isinstance(text, str):
        raise BadLineError(f"{place}: {column!r} is {shorten(text)}; expected a string")
    return encodable_text(text, column, place)


def encodable_text(text: str, key: str, place: str) -> str:
    """Return a string from JSON. Raise BadLineError for a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadLineError(f"{place}: {key!r} has a lone surrogate at character {error.start + 1}") from None
    return text


def read_plain_text(path: str, separator: str | None, on_bad_line: str) -> Iterator[dict[str, str | None]]:
    """Yield the documents of a plain text file, skipping unreadable lines. See `open_source`."""
    lines: list[str] = []
    for number, line in read_lines(path):
        try:
            text = decode_text(line, f"{path}, line {number}")
        except BadLineError as error:
            yield _bad_row(error, on_bad_line)
            continue
        if separator is not None and text.strip() == separator:
            yield from _document(lines, strip=True)
            lines = []
        else:
            lines.append(text)
    yield from _document(lines, strip=separator is not None)


def _document(lines: list[str], strip: bool) -> Iterator[dict[str, str | None]]:
    text = "".join(lines)
    text = text.strip("\r\n") if strip else text
    if text:  # two consecutive separators enclose no text
        yield {"text": text, "error": None}


def _bad_row(error: BadLineError, on_bad_line: str) -> dict[str, str | None]:
    if on_bad_line == "stop":
        raise BadLineError(f"{error}; fix it, or skip such lines with --on_bad_line skip") from None
    return {"text": None, "error": str(error)}


# ---- tables ----


def _open_parquet(path: Path, column: str, streaming: bool, cache_dir: str | None):
    from datasets import load_dataset

    validate_parquet(path)
    rows = load_dataset("parquet", data_files=str(path), split="train", streaming=streaming, cache_dir=cache_dir)
    return _with_places(rows, column, str(path))


def validate_parquet(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        pq.read_metadata(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error


def open_hub(source: str, split: str, streaming: bool, cache_dir: str | None):
    """Open a Hub data set. Raise FileNotFoundError if it does not exist."""
    from datasets import load_dataset

    name, _, config = source.removeprefix(HUB_PREFIX).partition(":")
    try:
        return load_dataset(name, config or None, split=split, streaming=streaming, cache_dir=cache_dir)
    except (ConnectionError, FileNotFoundError) as error:
        raise FileNotFoundError(f"{source} is neither a file or folder nor a Hub data set: {error}") from error


def _with_places(rows, column: str, name: str):
    """Reduce a table to the columns `text` and `error` (set for rows without a text)."""
    from datasets import Features, Value

    columns = rows.column_names
    if columns is None:  # the columns of a stream are unknown until its first row is read
        rows = rows._resolve_features()
        columns = rows.column_names
    if REASONING_COLUMNS.issubset(columns):
        raise ValueError(
            f"{name} is a reasoning data set, not text: to train on it, download the complete folder that "
            "`hrm-hf data reasoning` wrote; to evaluate on it, use `hrm-hf eval reasoning`"
        )
    if column not in columns:
        raise ValueError(f"{name}: column {column!r} is missing, found {columns}; set --text_column to one of them")
    kind = getattr(rows.features[column], "dtype", "list")
    if kind not in ("string", "large_string"):
        raise ValueError(f"{name}: column {column!r} contains {kind}; expected strings")

    return rows.map(
        _mark_rows_without_text,
        batched=True,
        with_indices=True,
        remove_columns=columns,
        fn_kwargs={"column": column, "name": name},
        features=Features({"text": Value("large_string"), "error": Value("string")}),
    )


def _mark_rows_without_text(batch, indices, column: str, name: str) -> dict[str, list]:
    errors = [
        f"{name}, row {index}: {column!r} is empty (null); expected a string" if text is None else None
        for text, index in zip(batch[column], indices)
    ]
    return {"text": batch[column], "error": errors}
