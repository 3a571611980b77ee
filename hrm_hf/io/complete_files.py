"""Files that are complete or absent, however their writer ends."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


TEMPORARY = ".tmp"  # ends the name of a file that is being written


@contextmanager
def complete_file(file: Path) -> Iterator[BinaryIO]:
    """A stream to write `file` with, which appears under its name when all of it is on the disk.

    Raises:
        OSError: the disk is full, for example; nothing is left, and what stood under the name before still does.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # The process id: two builds of one folder, a job and its impatient twin, do not write to one file.
    temporary = file.with_name(f".{file.name}.{os.getpid()}{TEMPORARY}")
    try:
        with open(temporary, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    """Writes a small file completely or not at all."""
    with complete_file(file) as stream:
        stream.write(text.encode())
