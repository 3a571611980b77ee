"""Documents from files, folders and the Hub; `answers.py` reads prompts and answers.

`open_source` makes of each source a data set of rows {"text", "error"}.

A source is a file of JSON Lines or one JSON list (`.jsonl`, `.json`), a plain text (`.txt`, `.text`, `.md`), either
also as `.gz`, a `.parquet` file, a folder of these, or a data set of the Hub, `OWNER/NAME` or `OWNER/NAME:CONFIG`;
`hub:` in front says that the Hub is meant where a folder has the same name. Hidden files in a folder are skipped. A
line that cannot be read is an error with file and line; with `on_bad_line="skip"` it becomes a row whose `error` says
what is wrong, for `filters.py` to count.

What is read is converted once to Arrow files in the cache of `datasets`, under a key of path, size and time of change.
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

WRITTEN_AT_ONCE = 100  # rows in memory while a file is converted
REASONING_COLUMNS = {"input_ids", "labels", "steps", "difficulty"}  # of `reasoning/build.py`
READER_VERSION = 2  # part of the cache key; raise it when the same file gives other rows


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
    """Open one source as rows of `text` (str or None) and `error` (str or None; one of the two is None).

    Args:
        source: file, folder or Hub data set, as in the header of this module; `split` of the latter.
        column: JSON key or column that holds the text.
        separator: line at which a plain text is split into documents, "" for an empty line; None for one document a
            file. The separator and line breaks around it belong to no document.
        on_bad_line: "stop" raises `BadLineError` at the first unreadable line, "skip" gives rows with `error`.
        streaming: read while training instead of converting first.

    Raises:
        FileNotFoundError: no such file, folder or Hub data set.
        ValueError: unknown kind of file, folder without known files, or missing column.
        BadLineError: see `on_bad_line`; raised on iteration if streaming.
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


# ---- files of lines ----


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
    # large_string: a whole book, or a file of more than 2 GB without a separator, is one value.
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
    except DatasetGenerationError as error:  # it hides what the reader said
        raise (error.__cause__ or error) from None
    except ValueError as error:  # what the library says of no rows names no file
        if next(iter(reader(**options)), None) is not None:
            raise
        raise ValueError(f"{path} holds no text") from error


def read_json_lines(path: str, column: str, on_bad_line: str) -> Iterator[dict[str, str | None]]:
    """Yield the rows of a file of JSON Lines, without empty lines, or of one JSON list. See `open_source`."""
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
            f"{place}: no key {column!r}, it has {shorten(list(row))}; name the right one with --text_column"
        )
    text = row[column]
    if not isinstance(text, str):
        raise BadLineError(f"{place}: {column!r} is {shorten(text)}; expected a string")
    return encodable_text(text, column, place)


def encodable_text(text: str, key: str, place: str) -> str:
    """Return a text of JSON, where half a surrogate pair is legal, if UTF-8 can encode it; else raise BadLineError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadLineError(f"{place}: {key!r} holds half a surrogate pair at character {error.start + 1}") from None
    return text


def read_plain_text(path: str, separator: str | None, on_bad_line: str) -> Iterator[dict[str, str | None]]:
    """Yield the documents of a plain text; an unreadable line is left out of its document. See `open_source`."""
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
    if text:  # two separators in a row have no document between them
        yield {"text": text, "error": None}


def _bad_row(error: BadLineError, on_bad_line: str) -> dict[str, str | None]:
    if on_bad_line == "stop":
        raise BadLineError(f"{error}. Fix it, or skip such lines with --on_bad_line skip") from None
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
        raise ValueError(f"{path} is no Parquet file: {error}") from error


def open_hub(source: str, split: str, streaming: bool, cache_dir: str | None):
    """Open a data set of the Hub. Raise FileNotFoundError if there is none."""
    from datasets import load_dataset

    name, _, config = source.removeprefix(HUB_PREFIX).partition(":")
    try:
        return load_dataset(name, config or None, split=split, streaming=streaming, cache_dir=cache_dir)
    except (ConnectionError, FileNotFoundError) as error:
        raise FileNotFoundError(f"{source} is no file or folder, and no data set of the Hub: {error}") from error


def _with_places(rows, column: str, name: str):
    """Reduce a table to `text` and `error`, the latter for rows without a text."""
    from datasets import Features, Value

    columns = rows.column_names
    if columns is None:  # a stream tells its columns only after its first row
        rows = rows._resolve_features()
        columns = rows.column_names
    if REASONING_COLUMNS.issubset(columns):
        raise ValueError(
            f"{name} holds labelled questions and no text: train on the folder that `hrm-hf data reasoning` wrote, "
            "fetched as it is, and evaluate with `hrm-hf eval reasoning`"
        )
    if column not in columns:
        raise ValueError(f"{name}: no column {column!r}, it has {columns}; name the right one with --text_column")
    kind = getattr(rows.features[column], "dtype", "list")
    if kind not in ("string", "large_string"):
        raise ValueError(f"{name}: column {column!r} holds {kind}; expected strings")

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
