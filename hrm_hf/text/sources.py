"""Documents and answers from files, folders and the Hub.

`open_source` makes of each source a data set of rows {"text", "error"}.

A source is a JSON Lines file (`.jsonl`, `.json`), a plain text (`.txt`, `.text`, `.md`), either also as `.gz`, a
`.parquet` file, a folder of these, or a data set of the Hub, `OWNER/NAME` or `OWNER/NAME:CONFIG`; `hub:` in front says
that the Hub is meant where a folder has the same name. A line that cannot be read is an error with file and line; with
`on_bad_line="skip"` it becomes a row whose `error` says what is wrong, for `filters.py` to count.

What is read is converted once to Arrow files in the cache of `datasets`, under a key of path, size and time of change.

`load_answers` reads rows that teach a model how to answer: prompts with completions, with a better and a worse answer,
or alone, in formats of TRL:

    sft    {"prompt": ..., "completion": ...}, {"messages": [...]} or {"text": "..."}
    dpo    {"prompt": ..., "chosen": ..., "rejected": ...}, or without the prompt if both answers begin with it
    grpo   {"prompt": ...}, with "reference" or "tests" (texts) for rewards that read them

A value is a text, or messages [{"role": "user", "content": "..."}, ...], and the same in every row. Other keys are
dropped. All rows are kept in memory. Tool calls and images are not supported.
"""

from collections.abc import Iterator, Sequence
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
    json_object,
    local_files,
    numbered_lines,
    parse_json,
    read_lines,
    shorten,
)


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

FORMATS = {
    "sft": (("prompt", "completion"), ("messages",), ("text",)),
    "dpo": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "grpo": (("prompt",),),
}
FOR_REWARDS = ("reference", "tests")  # texts beside the prompts of GRPO, which its rewards get
WRITTEN_AT_ONCE = 100  # rows in memory while a file is converted
REASONING_COLUMNS = {"input_ids", "labels", "steps", "difficulty"}  # of `reasoning/build.py`
READER_VERSION = 1  # part of the cache key; raise it when the same file gives other rows


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
    """Yield the rows of a JSON Lines file without empty lines. See `open_source`."""
    for number, line in read_lines(path):
        if line.strip():
            try:
                yield {"text": _text_of_line(line, column, f"{path}, line {number}"), "error": None}
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
    try:
        text.encode()
    except UnicodeEncodeError as error:  # "\ud800" is legal JSON and no text
        raise BadLineError(f"{place}: {column!r} holds half a surrogate pair at character {error.start + 1}") from None
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

    _validate_parquet(path)
    rows = load_dataset("parquet", data_files=str(path), split="train", streaming=streaming, cache_dir=cache_dir)
    return _with_places(rows, column, str(path))


def _validate_parquet(path: Path) -> None:
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


# ---- prompts and answers ----


def load_answers(
    sources: Sequence[str], kind: str, *, split: str = "train", limit: int | None = None, cache_dir: str | None = None
) -> "Dataset":
    """Read the rows of all sources, up to `limit`, with the keys of one format of a kind ("sft", "dpo" or "grpo").

    Raises:
        FileNotFoundError: no such file, folder or Hub data set.
        BadLineError: a line or a row that does not have the format; names the place and what was expected.
        ValueError: a file of another kind, or no row at all.
    """
    from datasets import Dataset

    rows: list[dict[str, Any]] = []
    expected: dict[str, type] = {}
    for source in sources:
        for place, row in _rows_of(source, split, cache_dir):
            if limit is not None and len(rows) == limit:
                break
            expected = expected or _format_of(row, kind, place)
            rows.append({key: _value(row, key, wanted, place) for key, wanted in expected.items()})
    if not rows:
        raise ValueError(f"{', '.join(sources) or 'no source'}: no rows; expected {_describe(kind)}")
    return Dataset.from_list(rows)


def is_conversation(rows: "Dataset") -> bool:
    """Whether the values are messages."""
    return not isinstance(next(iter(rows[0].values())), str)


def _rows_of(source: str, split: str, cache_dir: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Places and rows of one source."""
    if is_hub_source(source):
        yield from _numbered(open_hub(source, split, False, cache_dir), f"{source}, split {split}")
        return
    for path in local_files(source):
        if path.suffix == PARQUET:
            yield from _numbered(_parquet_rows(path), str(path))
        elif Path(path.name.removesuffix(".gz")).suffix.lower() in JSON_KINDS:
            for place, line in numbered_lines(path):
                yield place, json_object(line, place)
        else:
            raise ValueError(f"{path} is plain text; expected {', '.join(JSON_KINDS)} (also .gz) or {PARQUET}")


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    _validate_parquet(path)
    for batch in pq.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def _numbered(rows, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(rows):
        yield f"{name}, row {number}", row


def _format_of(row: dict[str, Any], kind: str, place: str) -> dict[str, type]:
    """The keys of the first row's format, and whether each is a text (str) or messages (list)."""
    for keys in FORMATS[kind]:
        if set(keys) <= set(row):
            found = {key: str if isinstance(row[key], str) else list for key in keys}
            if "text" not in keys and "messages" not in keys and len(set(found.values())) > 1:
                raise BadLineError(f"{place}: {', '.join(keys)} must all be texts, or all messages")
            if kind == "grpo":
                found |= dict.fromkeys((key for key in FOR_REWARDS if key in row), str)
            return {key: {"text": str, "messages": list}.get(key, wanted) for key, wanted in found.items()}
    raise BadLineError(f"{place}: keys {shorten(list(row))}; expected {_describe(kind)}")


def _value(row: dict[str, Any], key: str, wanted: type, place: str) -> Any:
    if key not in row:
        raise BadLineError(f"{place}: no key {key!r}, it has {shorten(list(row))}; the rows before have one")
    value = row[key]
    if wanted is str:
        if not isinstance(value, str):
            raise BadLineError(f"{place}: {key!r} is {shorten(value)}; expected a text")
        return value
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise BadLineError(
            f"{place}: {key!r} is {shorten(value)}; expected messages "
            '[{"role": "user", "content": "..."}, ...] with at least one in it'
        )
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _describe(kind: str) -> str:
    return " or ".join("{" + ", ".join(f'"{key}": ...' for key in keys) + "}" for keys in FORMATS[kind])
