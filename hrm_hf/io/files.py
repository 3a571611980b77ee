"""Read and write files and data sets: JSON, YAML, CSV, gzip, checksums, locks and atomic writes.

Errors name the file and the line. Importing this module loads neither torch nor `datasets`.
"""

import codecs
import csv
import errno
import gzip
import hashlib
import io
import json
import os
import re
import socket
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import yaml


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from filelock import FileLock

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
GZIP_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)
HUB_PREFIX = "hub:"
IDENTIFIERS_FILE = "identifiers.json"  # file in data sets and checkpoints with the names of the puzzle table's rows
JSON_KINDS, TEXT_KINDS, PARQUET = (".jsonl", ".json"), (".txt", ".text", ".md"), ".parquet"
KINDS = f"{', '.join((*JSON_KINDS, *TEXT_KINDS))} (plain or .gz) or {PARQUET}"
# Folders created by operating systems.
NOT_DATA = ("__MACOSX", "$RECYCLE.BIN", "System Volume Information", "@eaDir", "lost+found")
TEMPORARY = ".tmp"  # suffix of incomplete files
CHECKSUMS = "sha256"  # entry in a data set's info file that maps file names to SHA-256 checksums
BUILD_LOCK = ".build.lock"
HASHED_AT_ONCE = 4  # files hashed in parallel; more would only cause disk seeks
SECONDS_TO_WAIT = 1.0  # seconds to wait for a lock, in case its owner is exiting
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_checked: set[tuple[str, int, int, str]] = set()  # (path, size, mtime, checksum) of files that were found unchanged


class BadLineError(ValueError):
    """Raised when a line or row cannot be read. The message names its location and the fix."""


class FolderInUseError(OSError):
    """Raised when another process is writing to a folder."""


def is_hub_source(source: str) -> bool:
    """Return whether a source is a data set on the Hub: `hub:...`, or OWNER/NAME[:CONFIG] that is not a path."""
    if source.startswith(HUB_PREFIX):
        return True
    name = source.partition(":")[0]
    is_path = Path(source).exists() or file_kind(Path(source)) is not None or name.startswith((".", "/", "~"))
    return not is_path and name.count("/") == 1 and all(name.split("/"))


def local_files(source: str) -> list[Path]:
    """Return the data files below a path, sorted. Raise if the path is missing or has no files of a known kind."""
    path = Path(source).expanduser()
    if path.is_dir():
        files = [file for file in visible_files(path) if file_kind(file) is not None and file.stat().st_size]
        if not files:
            raise ValueError(f"{source} contains no files of a supported type; expected {KINDS}")
        return files
    if not path.exists():
        raise FileNotFoundError(
            f"{source} does not exist; expected a file ({KINDS}), a folder of such files, or a data set on the Hub "
            "as OWNER/NAME or OWNER/NAME:CONFIG"
        )
    if file_kind(path) is None:
        raise ValueError(f"{source}: unknown file type {''.join(path.suffixes)!r}; expected {KINDS}")
    return [path]


def visible_files(folder: str | Path, pattern: str = "*") -> list[Path]:
    """Return the files below a folder that match a pattern, sorted. Skip hidden files and folders (`is_hidden`)."""
    found = (path for path in Path(folder).rglob(pattern) if path.is_file())
    return sorted(path for path in found if not any(map(is_hidden, path.relative_to(folder).parts)))


def is_hidden(name: str) -> bool:
    """Return whether data readers skip a file or folder with this name, such as `._NAME` from macOS."""
    return name.startswith((".", "~$")) or name in NOT_DATA  # "~$": lock file of an office program


def file_kind(path: Path) -> str | None:
    """Return the kind of a file from its suffix, ignoring .gz, or None if the kind is unknown."""
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix in (*JSON_KINDS, *TEXT_KINDS):
        return suffix
    return PARQUET if path.name.endswith(PARQUET) else None


def numbered_lines(path: str | Path) -> Iterator[tuple[str, bytes]]:
    """Yield ("FILE, line N", line) for each non-empty line of a JSON Lines file.

    For a JSON list, or an object that spans several lines, yield ("FILE, item N", item on one line) instead.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist; expected a JSON Lines file (.jsonl or .jsonl.gz)")
    lines = ((number, line) for number, line in read_lines(path) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    if (items := _items_of_document(path, first[1])) is not None:
        for number, item in enumerate(items, 1):
            yield f"{path}, item {number}", json.dumps(item).encode()
        return
    for number, line in chain([first], lines):
        yield f"{path}, line {number}", line


def _items_of_document(path: str | Path, first: bytes) -> list[Any] | None:
    """Return the items in a file with one JSON list or object, or None for JSON Lines and invalid JSON."""
    if first.lstrip()[:1] not in (b"[", b"{"):
        return None
    with suppress(ValueError, RecursionError):
        if isinstance(json.loads(first), dict):
            return None
    with suppress(ValueError):  # for invalid JSON, the caller reports the first bad line
        content = load_json(path)
        return content if isinstance(content, list) else [content]
    return None


def json_object(line: bytes, place: str) -> dict[str, Any]:
    """Parse a line as a JSON object. For anything else, raise a `BadLineError` that names `place`."""
    value = parse_json(line, place)
    if not isinstance(value, dict):
        raise BadLineError(f"{place}: must be a JSON object, not {shorten(value)}")
    return value


def decode_text(line: bytes, place: str) -> str:
    """Decode a line as UTF-8, or raise a `BadLineError` that names `place` and the invalid byte."""
    if b"\0" in line:
        raise BadLineError(f"{place}: contains NUL bytes, perhaps UTF-16; convert the file to UTF-8")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise BadLineError(
            f"{place}: not valid UTF-8 (byte 0x{line[error.start]:02x} at position {error.start + 1}); convert the "
            "file to UTF-8"
        ) from None


def parse_json(line: bytes, place: str) -> Any:
    """Parse a line as JSON. On a syntax error, raise `BadLineError` with `place` and the error's position."""
    text = decode_text(line.rstrip(b"\r\n"), place)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadLineError(f"{place}: broken JSON ({error.msg}: character {error.pos + 1}): {shorten(text)}") from None
    except RecursionError:
        raise BadLineError(f"{place}: broken JSON (nested too deeply): {shorten(text)}") from None
    except ValueError as error:  # raised for integers with too many digits
        raise BadLineError(f"{place}: broken JSON ({str(error).partition(';')[0]}): {shorten(text)}") from None


def shorten(value: Any) -> str:
    """Return the repr of a value, shortened to at most 100 characters for error messages."""
    try:
        text = repr(value[:200] if isinstance(value, str) else value)
    except (ValueError, RecursionError):  # raised for integers with thousands of digits and for deeply nested lists
        return f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


def load_split(
    path: str | Path, split: str, streaming: bool = False, info: str | None = None
) -> "Dataset | IterableDataset":
    """Load a split of a data set built by this package, from a folder (`data/SPLIT-00000.parquet`) or the Hub.

    Args:
        info: name of the folder's info file. The files must match the checksums in it.

    Raises:
        ValueError: the folder lacks the split, or a file is unreadable or was changed.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    if not Path(path).is_dir():
        return load_dataset(str(path), split=split, streaming=streaming)
    available = {file.name.rsplit("-", 1)[0]: str(file) for file in visible_files(Path(path, "data"), "*.parquet")}
    if split not in available:
        raise ValueError(f"{path} has no split {split!r}; choose from {sorted(available)}")
    file = available[split]
    if info is not None:
        validate_unchanged(Path(path, info), [Path(file), *Path(path).glob(IDENTIFIERS_FILE)], closed=True)
    try:
        # Load only the requested split: converting a large train split takes minutes.
        return load_dataset("parquet", data_files={split: file}, split=split, streaming=streaming)
    except (DatasetGenerationError, ValueError) as error:  # raised for a corrupted or empty file
        raise ValueError(f"{file} cannot be read or has no rows ({error}); build the data set again") from error


def open_unpacked(path: str | Path) -> BinaryIO:
    """Open a file for reading bytes. Decompress .gz files, and convert UTF-16 with a byte-order mark to UTF-8."""
    file = gzip.open(path, "rb") if Path(path).suffix == ".gz" else open(path, "rb")
    with suppress(*GZIP_ERRORS):  # if the file is corrupted, the caller gets the error when reading it
        if file.peek(2)[:2] in UTF16_MARKS:
            with file:
                return io.BytesIO(decode_marked(file.read(), str(path)).encode())
    return file


def decode_marked(content: bytes, place: str) -> str:
    """Decode UTF-8, or UTF-16 with a byte-order mark. For other bytes, raise a ValueError that names `place`."""
    try:
        return content.decode("utf-16" if content[:2] in UTF16_MARKS else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not valid UTF-8 (byte {error.start}); convert the file to UTF-8") from error


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line without byte-order mark). Raise ValueError if a gzip file is corrupted."""
    number = 0
    with open_unpacked(path) as file:
        try:
            for number, line in enumerate(file, 1):
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        except GZIP_ERRORS as error:
            raise ValueError(f"{path}: corrupted after line {number} ({error}); download it again") from error


def load_json(path: str | Path) -> Any:
    """Load a JSON file. If the JSON is invalid, raise a ValueError that names the file."""
    try:
        with open_unpacked(path) as file:
            return json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError, *GZIP_ERRORS) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


class _YamlLoader(yaml.SafeLoader):
    """YAML 1.1 loader that follows YAML 1.2 where it matters: 1e-5 is a number; dates, 012 and 1:20 are text."""


_CHANGED = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("float", "int", "timestamp"))
_YamlLoader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in _CHANGED]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_NUMBER = r"(\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+"
_FLOAT = re.compile(rf"[-+]?({_NUMBER}|\.inf|\.Inf|\.INF)\Z|\.(nan|NaN|NAN)\Z")
_YamlLoader.add_implicit_resolver(_CHANGED[0], _FLOAT, list("-+.0123456789"))
_YamlLoader.add_implicit_resolver(_CHANGED[1], re.compile(r"[-+]?(0|[1-9][\d_]*)\Z"), list("-+0123456789"))


def load_yaml(path: str | Path, as_text: bool = False) -> Any:
    """Load a YAML file of plain values, or return None if it is empty. With `as_text`, numbers like 1.10 stay text.

    Raises a ValueError that names the file if the YAML is invalid or contains other objects.
    """
    return parse_yaml(Path(path).read_bytes(), str(path), as_text)


def parse_yaml(text: str | bytes, place: str, as_text: bool = False) -> Any:
    """Parse YAML text as `load_yaml` does. Error messages refer to the text as `place`."""
    try:
        return yaml.load(text, yaml.BaseLoader if as_text else _YamlLoader)
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{place} is not valid YAML: {' '.join(str(error).split())}") from error


def csv_rows(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number from 1, fields) for each row of a CSV file (`,`, `;` or tabs). An empty line has no fields.

    Raises:
        ValueError: invalid UTF-8, an unclosed quote, or a corrupted gzip file. The message names the file and line.
    """
    with open_unpacked(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        reader = csv.reader([])
        try:
            first = text.readline()
            comma = next((mark for mark in ",;\t" if mark in first), ",")
            # Spaces can be maze cells, so only spaces before a quote are skipped.
            spaces = re.compile(rf'(^|{comma}) +(?="(?!"))')
            lines = (spaces.sub(r"\1", line) for line in chain(filter(None, [first]), text))
            reader = csv.reader(lines, delimiter=comma)
            for row in reader:
                yield reader.line_num, row
        except (csv.Error, UnicodeDecodeError, *GZIP_ERRORS) as error:
            raise ValueError(f"{path}, line {reader.line_num + 1}: {error}; expected CSV in UTF-8") from error


@contextmanager
def complete_file(file: Path) -> Iterator[BinaryIO]:
    """Yield a stream to a temporary file that replaces `file` on exit. If the block fails, the old file is kept."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # The name contains the process id, so two builds in one folder use different temporary files.
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
    """Write a small file atomically."""
    with complete_file(file) as stream:
        stream.write(text.encode())


# ---- checksums and locks of data sets ----


def checksums(files: list[Path]) -> list[str]:
    """Return the SHA-256 of each file. Threads compute them in parallel, since hashing releases the GIL."""
    with ThreadPoolExecutor(min(HASHED_AT_ONCE, os.cpu_count() or 1)) as pool:
        return list(pool.map(_checksum, files))


def _checksum(file: Path) -> str:
    with open(file, "rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def checksums_in(folder: Path, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Compute the checksums of files in a folder, and return the entry for the info file."""
    names = sorted(names)
    return {CHECKSUMS: dict(zip(names, checksums([folder / name for name in names])))}


def load_info(file: Path) -> dict[str, Any]:
    """Load an info file without the checksums. If the JSON is invalid, raise a ValueError that names the file."""
    content = load_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} must contain a JSON object, not {shorten(content)}; build the data set again")
    return {name: value for name, value in content.items() if name != CHECKSUMS}


def validate_unchanged(info: Path, files: Iterable[Path], closed: bool = False) -> None:
    """Raise ValueError if `changed_files` finds a file that changed after its data set was built."""
    for file, (found, expected) in changed_files(info, files, closed).items():
        problem = f"was added after the data set was built: it is not in {info.name}; delete it"
        if expected:
            problem = f"changed after it was built (sha256 {found[:8]}..., but {expected[:8]}... in {info.name}); "
            problem += "if you changed it yourself, delete its entry there"
        raise ValueError(f"{file} {problem}, or build the data set again")


def changed_files(info: Path, files: Iterable[Path], closed: bool = False) -> dict[Path, tuple[str, str]]:
    """Return the files whose checksums differ from those in the info file, with the actual and the recorded checksum.

    Files without an entry are not checked, because older data sets have no checksums. With `closed`, such a file is
    changed if the info file has any checksums. Each process hashes an unchanged file only once.
    """
    content = load_json(info) if info.is_file() else {}
    known = content.get(CHECKSUMS, {}) if isinstance(content, dict) else {}
    if not isinstance(known, dict) or not all(isinstance(each, str) for each in known.values()):
        raise ValueError(f"{info}: {CHECKSUMS} is {shorten(known)}, not a mapping; build the data set again")
    keys, changed = {}, {}
    for file in files:
        if expected := known.get(os.path.relpath(file, info.parent)):
            state = file.stat()
            keys[file] = (str(file.resolve()), state.st_size, state.st_mtime_ns, expected)
        elif known and closed:
            changed[file] = ("", "")
    unread = [file for file, key in keys.items() if key not in _checked]
    found = dict(zip(unread, checksums(unread)))
    changed |= {file: (found[file], keys[file][-1]) for file in unread if found[file] != keys[file][-1]}
    _checked.update(keys[file] for file in unread if file not in changed)
    return changed


def lock_folder(folder: Path, name: str, what: str, option: str, again: bool = False) -> "FileLock | None":
    """Lock a folder with a lock file, and return the lock. Warn and return None if the file system has no locks.

    Error messages call the owner of the lock `what`, and name the `option` for the folder. With `again`, this process
    may lock it twice. Raises FolderInUseError if another process holds the lock, OSError if writing fails.
    """
    from filelock import FileLock, Timeout

    file = folder.resolve() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A singleton lock can be acquired twice: the script already holds it when train() acquires it.
        how = {"is_singleton": again, "preserve_lock_file": True}
        lock = FileLock(file, thread_local=False, fallback_to_soft=False, **how)
        lock.acquire(timeout=SECONDS_TO_WAIT)
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    except Timeout as error:
        owner = file.read_text(encoding="utf-8", errors="replace")[:100] if file.is_file() else "a process"
        raise FolderInUseError(
            f"another {what} is writing to {folder}: {owner}. Wait for it, stop it or choose another {option}, "
            "because two writers would mix up their files"
        ) from error
    except OSError as error:
        if error.errno in NO_LOCKS:
            text = f"the file system of {folder} does not support locks ({error.strerror})"
            warnings.warn(f"{text}; make sure that no other {what} writes to it", stacklevel=2)
            return None
        raise OSError(f"{folder} cannot be written to ({error.strerror}); choose another {option}") from error
    return lock


@contextmanager
def building(out: Path, option: str = "--out") -> Iterator[None]:
    """Lock the output folder during a build. Raise FolderInUseError if another build is writing to it."""
    is_new = not out.exists()
    if not is_new and not out.is_dir():
        raise FileExistsError(f"{option[2:]}={str(out)!r}: is a file; choose another folder")
    lock = lock_folder(out, BUILD_LOCK, "build", option)
    try:
        yield
    finally:
        if lock is not None:
            # Delete the file before releasing the lock. A process waiting for it notices this, and locks a new file.
            (out / BUILD_LOCK).unlink(missing_ok=True)
            lock.release()
        if is_new:
            with suppress(OSError):  # rmdir fails if the folder contains the files of a finished build
                out.rmdir()


def one_at_a_time(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorate a builder to lock its output folders: `options.out` and, if present, `options.text`."""

    @wraps(build)
    def locked(options: Any) -> Any:
        text = getattr(options, "text", None)
        with building(Path(options.out)), building(text, "--text") if text else nullcontext():
            return build(options)

    return locked
