"""Read lines, JSON, YAML and CSV from files, packed by gzip or not; errors name the file and the line."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml


GZIP_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)


def open_unpacked(path: str | Path) -> BinaryIO:
    """Open a file for reading bytes, unpacked if its name ends in .gz."""
    return gzip.open(path, "rb") if Path(path).suffix == ".gz" else open(path, "rb")


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield numbers, from 1, and lines of a file, without its byte-order mark. ValueError for a broken gzip file."""
    number = 0
    with open_unpacked(path) as file:
        try:
            for number, line in enumerate(file, 1):
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        except GZIP_ERRORS as error:
            raise ValueError(f"{path}: broken gzip file after line {number} ({error}); fetch it again") from error


def load_json(path: str | Path) -> Any:
    """Return the value of a JSON file. ValueError, with the file's name, for anything else."""
    try:
        with open_unpacked(path) as file:
            return json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError, *GZIP_ERRORS) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def load_yaml(path: str | Path) -> Any:
    """Return the plain values of a YAML file; None for an empty one. ValueError, with its name, for anything else."""
    try:
        return yaml.safe_load(Path(path).read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error


def csv_rows(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line numbers, from 1, and fields of a CSV file; empty lines come as rows without fields.

    Raises:
        ValueError: not UTF-8, a quote that nothing closes, or a broken gzip file; names file and line.
    """
    with open_unpacked(path) as file:
        reader = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""))
        try:
            for row in reader:
                yield reader.line_num, row
        except (csv.Error, UnicodeDecodeError, *GZIP_ERRORS) as error:
            raise ValueError(f"{path}, line {reader.line_num + 1}: {error}; expected CSV in UTF-8") from error
