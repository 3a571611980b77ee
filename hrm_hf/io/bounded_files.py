"""Files from strangers, read with bounds: lines, unpacked bytes, JSON and YAML.

A gzip file of some kilobytes may unpack to gigabytes, a line may be as long as the file, JSON may be nested deeper
than Python recurses, and nine lines of YAML may name 10^9 values. Each of these is an error that names the file (and
the line), before memory is gone.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml


MAX_DOCUMENT_BYTES = 2**25  # of a line, or a document; a byte of text takes about 200 of memory to tokenise
MAX_EXPANSION = 100  # times the packed size that a file may unpack to, and
FREE_UNPACKED_BYTES = 2**26  # that much more, for small files
MAX_TABLE_LINE_BYTES = 2**20  # of a table; a maze of 30 x 30 with its solution takes 2 kB
MAX_JSON_BYTES = 2**30  # of a file that is one JSON value
MAX_YAML_BYTES = 2**20
MAX_YAML_VALUES = 100_000  # with what aliases repeat; the longest recipe has some hundred
MAX_YAML_NESTING = 50
GZIP_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)


def open_bounded(path: str | Path, max_unpacked_bytes: int | None = None) -> BinaryIO:
    """A file's bytes, unpacked if its name ends in .gz.

    Args:
        max_unpacked_bytes: of a packed file; 64 MiB and a hundred times its size if None.

    Raises:
        FileNotFoundError: no such file.
        ValueError: while reading, where the bound is passed.
    """
    path = Path(path)
    return io.BufferedReader(_Unpacked(path, max_unpacked_bytes), 2**20) if path.suffix == ".gz" else path.open("rb")


def bounded_lines(
    path: str | Path, max_line_bytes: int, max_unpacked_bytes: int | None = None
) -> Iterator[tuple[int, bytes]]:
    """Numbers, from 1, and lines of a file, without its byte-order mark.

    A line of more than `max_line_bytes` comes as its first `max_line_bytes` + 1 bytes; the rest is passed over.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a broken gzip file, or one that unpacks to too much; names the line before.
    """
    number = 0
    with open_bounded(path, max_unpacked_bytes) as file:
        try:
            while line := file.readline(max_line_bytes + 1):
                number += 1
                rest = line
                while len(rest) > max_line_bytes and not rest.endswith(b"\n"):
                    rest = file.readline(max_line_bytes + 1)
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        except GZIP_ERRORS as error:
            raise ValueError(f"{path}: broken gzip file after line {number} ({error}); fetch it anew") from error


class _Unpacked(io.RawIOBase):
    """A gzip file that ends with an error where it has unpacked to too much."""

    def __init__(self, path: Path, most: int | None):
        self._path, self._size = path, path.stat().st_size
        self._most = FREE_UNPACKED_BYTES + MAX_EXPANSION * self._size if most is None else most
        self._file, self._count = gzip.open(path, "rb"), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        count = self._file.readinto(buffer)
        self._count += count
        if self._count > self._most:
            raise ValueError(
                f"{self._path} has {self._size:,} bytes and unpacks to more than {self._most:,}; if that is meant, "
                "unpack it yourself (gunzip), or raise the limit where there is one (--max_unpacked_bytes)"
            )
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


# ---- one value a file ----


def load_json(path: str | Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value of a JSON file, packed or not.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is too big, no UTF-8 or no JSON; names the file.
    """
    path = Path(path)
    try:
        with open_bounded(path) as file:
            content = file.read(max_bytes + 1)
    except GZIP_ERRORS as error:
        raise ValueError(f"{path}: broken gzip file ({error}); fetch it anew") from error
    if len(content) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes:,} bytes; expected JSON of less")
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: no UTF-8 text at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not valid JSON that can be read: nested too deeply") from error
    except ValueError as error:  # an integer of more digits than Python reads
        raise ValueError(f"{path} is not valid JSON that can be read: {str(error).partition(';')[0]}") from error


def load_yaml(path: str | Path) -> Any:
    """The value of a YAML file with plain values, by PyYAML's safe loader; None for an empty file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is no YAML, has tags, or comes to too many values through aliases; names the file.
    """
    path = Path(path)
    with path.open("rb") as file:
        content = file.read(MAX_YAML_BYTES + 1)
    if len(content) > MAX_YAML_BYTES:
        raise ValueError(f"{path} has more than {MAX_YAML_BYTES:,} bytes; expected a file of options")
    loader = None
    try:
        loader = yaml.SafeLoader(content)
        node = loader.get_single_node()
        if node is None:
            return None
        values = _yaml_values(node, 0, {})
        if values > MAX_YAML_VALUES:
            raise ValueError(
                f"{path} comes to {values:.3g} values through its aliases (&, *); at most {MAX_YAML_VALUES:,}: write "
                "them out"
            )
        return loader.construct_document(node)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not valid YAML: nested more than {MAX_YAML_NESTING} deep") from error
    finally:
        if loader is not None:
            loader.dispose()


def _yaml_values(node: yaml.Node, depth: int, counted: dict[int, int]) -> int:
    """Values below a node, those of an alias counted each time."""
    if depth > MAX_YAML_NESTING:  # an alias to what it stands in has no end either
        raise RecursionError
    if id(node) not in counted:
        children = node.value if isinstance(node, yaml.SequenceNode) else ()
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        counted[id(node)] = 1 + sum(_yaml_values(child, depth + 1, counted) for child in children)
    return counted[id(node)]


# ---- tables ----


def validate_parquet(path: str | Path, column: str | None = None, max_unpacked_bytes: int | None = None) -> None:
    """Refuses what is no Parquet file, or one that unpacks to too much, by what it says and by counting its texts.

    A text that many rows share is stored once, so the sizes that a file states are no bound; lengths are summed here
    without making the texts.

    Args:
        column: only the texts of this one are counted; all of them if None.
        max_unpacked_bytes: as for `open_bounded`.

    Raises:
        ValueError: names the file.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    size = Path(path).stat().st_size
    most = FREE_UNPACKED_BYTES + MAX_EXPANSION * size if max_unpacked_bytes is None else max_unpacked_bytes
    too_much = f"{path} has {size:,} bytes and unpacks to more than {most:,}; if that is meant, write it anew in parts"
    try:
        meta = pq.read_metadata(path)
        groups = [meta.row_group(index) for index in range(meta.num_row_groups)]
        if sum(group.total_byte_size for group in groups) > most or meta.num_rows > most:
            raise ValueError(too_much)
        texts = [
            field.name
            for field in pq.read_schema(path)
            if (pa.types.is_string(field.type) or pa.types.is_large_string(field.type))
            and column in (None, field.name)
        ]
        if not texts:
            return
        total = 0
        for batch in pq.ParquetFile(path, read_dictionary=texts).iter_batches(65_536, columns=texts):
            for values in batch.columns:
                if pa.types.is_dictionary(values.type):
                    lengths = pc.take(pc.binary_length(values.dictionary), values.indices)
                else:
                    lengths = pc.binary_length(values)
                total += pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0
            if total > most:
                raise ValueError(too_much)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no Parquet file that can be read ({str(error)[:200]})") from error


def csv_rows(path: str | Path, max_unpacked_bytes: int | None = None) -> Iterator[tuple[int, list[str]]]:
    """Line numbers, from 1, and fields of a CSV file, packed or not; empty lines come as rows without fields.

    Raises:
        FileNotFoundError: no such file.
        ValueError: text that is not UTF-8 or has NUL characters, a field of more than 131,072 characters (a quote that
            nothing closes makes one), a packed file that unpacks to too much; names file and line.
    """
    reader = csv.reader(_text_lines(path, max_unpacked_bytes))
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {reader.line_num}: {error}; expected CSV with fields of up to "
                f"{csv.field_size_limit():,} characters, each quote closed"
            ) from error
        yield reader.line_num, row


def _text_lines(path: str | Path, max_unpacked_bytes: int | None) -> Iterator[str]:
    for number, line in bounded_lines(path, MAX_TABLE_LINE_BYTES, max_unpacked_bytes):
        validate_table_line(line, f"{path}, line {number}")
        text = line.decode()
        # Old spreadsheets end lines with a lone \r, as the csv module expects to be told.
        yield from io.StringIO(text, newline="") if "\r" in text[:-2] else (text,)


def validate_table_line(line: bytes, place: str) -> None:
    """Raises ValueError, naming the place, for a line that is too long or no text."""
    if len(line) > MAX_TABLE_LINE_BYTES:
        raise ValueError(f"{place}: longer than {MAX_TABLE_LINE_BYTES:,} bytes; expected one row of a table")
    if b"\0" in line:
        raise ValueError(f"{place}: NUL character at byte {line.index(0) + 1}; expected text (is it a packed file?)")
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: not valid UTF-8 (byte 0x{line[error.start]:02x} at position {error.start + 1}); expected text"
        ) from None
