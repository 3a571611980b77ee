"""Load rows for SFT, DPO and GRPO from files, folders and the Hub.

The formats are the same as in TRL:

    sft    {"prompt": ..., "completion": ...}, {"messages": [...]} or {"text": "..."}
    dpo    {"prompt": ..., "chosen": ..., "rejected": ...}, or without the prompt if both answers begin with it
    grpo   {"prompt": ...}, optionally with "reference" or "tests" (strings) for reward functions that read them

A value is a string or a list of messages [{"role": "user", "content": "..."}, ...]; all rows must use the same type.
Other keys are dropped. All rows are kept in memory. Tool calls and images are not supported.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..io.files import (
    JSON_KINDS,
    PARQUET,
    BadLineError,
    file_kind,
    is_hub_source,
    json_object,
    local_files,
    numbered_lines,
    shorten,
)
from .sources import encodable_text, open_hub, validate_parquet


if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = {
    "sft": (("prompt", "completion"), ("messages",), ("text",)),
    "dpo": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "grpo": (("prompt",),),
}
FOR_REWARDS = ("reference", "tests")  # optional GRPO columns that are passed to the reward functions


def load_answers(
    sources: Sequence[str], kind: str, *, split: str = "train", limit: int | None = None, cache_dir: str | None = None
) -> "Dataset":
    """Load up to `limit` rows from all sources, for a `kind` of training: "sft", "dpo" or "grpo".

    Raises:
        FileNotFoundError: a file, folder or Hub data set does not exist.
        BadLineError: a row does not match the format; the message names the row and the expected format.
        ValueError: a file has an unsupported type, or there are no rows.
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
    """Check whether rows contain lists of messages instead of strings."""
    return not isinstance(next(iter(rows[0].values())), str)


def _rows_of(source: str, split: str, cache_dir: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of one source, each with its location for error messages."""
    if is_hub_source(source):
        yield from _numbered(open_hub(source, split, False, cache_dir), f"{source}, split {split}")
        return
    for path in local_files(source):
        if path.suffix == PARQUET:
            yield from _numbered(_parquet_rows(path), str(path))
        elif file_kind(path) in JSON_KINDS:
            for place, line in numbered_lines(path):
                yield place, json_object(line, place)
        elif not Path(source).expanduser().is_dir():  # in a folder, skip text files such as a README
            raise ValueError(f"{path} is plain text; expected {', '.join(JSON_KINDS)} (plain or .gz) or {PARQUET}")


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    validate_parquet(path)
    for batch in pq.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def _numbered(rows, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(rows):
        yield f"{name}, row {number}", row


def _format_of(row: dict[str, Any], kind: str, place: str) -> dict[str, type]:
    """Return the keys of the first row's format and the type of each value: str for text, list for messages."""
    for keys in FORMATS[kind]:
        if set(keys) <= set(row):
            found = {key: str if isinstance(row[key], str) else list for key in keys}
            if "text" not in keys and "messages" not in keys and len(set(found.values())) > 1:
                raise BadLineError(f"{place}: {', '.join(keys)} must all be strings or all be lists of messages")
            if kind == "grpo":
                found |= dict.fromkeys((key for key in FOR_REWARDS if key in row), str)
            return {key: {"text": str, "messages": list}.get(key, wanted) for key, wanted in found.items()}
    hint = "; train on plain text with training/run_clm.py" if "text" in row else ""
    raise BadLineError(f"{place}: keys {shorten(list(row))}; expected {_describe(kind)}{hint}")


def _value(row: dict[str, Any], key: str, wanted: type, place: str) -> Any:
    if key not in row:
        raise BadLineError(f"{place}: key {key!r} is missing, found {shorten(list(row))}; all rows must have it")
    value = row[key]
    if wanted is str:
        if not isinstance(value, str):
            raise BadLineError(f"{place}: {key!r} is {shorten(value)}; expected a string")
        return encodable_text(value, key, place)
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise BadLineError(
            f"{place}: {key!r} is {shorten(value)}; expected a non-empty list of messages "
            '[{"role": "user", "content": "..."}, ...]'
        )
    return [{name: encodable_text(message[name], key, place) for name in ("role", "content")} for message in value]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _describe(kind: str) -> str:
    return " or ".join("{" + ", ".join(f'"{key}": ...' for key in keys) + "}" for keys in FORMATS[kind])
