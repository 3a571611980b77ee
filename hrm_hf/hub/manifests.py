"""Checkpoint manifests, which list the size and SHA-256 of every file, to detect incomplete or corrupted checkpoints.

The manifest is written last and checked before loading. A run that is killed while saving leaves no manifest; a faulty
disk or copy leaves a file that does not match its entry. The manifest also names the run. It protects against
corruption but not against tampering: anyone who can change a file can also write a new manifest.
"""

import contextlib
import hashlib
import json
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from ..io.files import checksums
from ..io.options import wanted_checkpoint


MANIFEST = "manifest.json"
WEIGHT_AVERAGE_FILE = "weight_average.safetensors"
RAW_WEIGHTS_FILE = "raw_weights.safetensors"
CARRY_FILE = "act_state_{}.pt"  # a process's carry and data position in a puzzle run
# Patterns for the files that our trainers add to transformers' training state; a push omits them by default.
STATE_FILES = (MANIFEST, WEIGHT_AVERAGE_FILE, RAW_WEIGHTS_FILE, CARRY_FILE.format("*"))

SHARD_METADATA = ".metadata"
METADATA_CLASSES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
    ),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "collections": ("OrderedDict",),
}  # fmt: skip
# Parts of torch's error messages for archives that it cannot write.
TORCH_CANNOT_WRITE = ("inline_container", "iostream error", "PytorchStreamWriter failed")
# Errors that torch and other readers raise for corrupted checkpoints.
READ_ERRORS = (
    OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, RecursionError,
    SafetensorError, pickle.UnpicklingError, zipfile.BadZipFile,
)  # fmt: skip


class CheckpointError(ValueError):
    """Error for a checkpoint that is corrupted or belongs to a different run."""


class Manifest(NamedTuple):
    """Size in bytes and SHA-256 (hex) of each file, keyed by its name in the folder, plus the run id."""

    files: dict[str, tuple[int, str]]
    run_id: str | None = None


def write_manifest(folder: str | Path, run_id: str | None = None) -> None:
    """Write the size and checksum of every file in `folder` to a manifest, as the last step of saving a checkpoint."""
    folder = Path(folder)
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and not file.name.startswith(MANIFEST)]
    # Hashing is fast, because the files are still in the page cache (benchmarks/package/checkpoints.py measures it).
    entries = {
        file.relative_to(folder).as_posix(): {"size": file.stat().st_size, "sha256": checksum}
        for file, checksum in zip(files, checksums(files))
    }
    unfinished = folder / f"{MANIFEST}.tmp"
    unfinished.write_bytes(_signed({"run": run_id, "files": entries}))
    os.replace(unfinished, folder / MANIFEST)


def manifest_of_copy(folder: Path, sources: Mapping[str, Path | bytes]) -> bytes:
    """Return the manifest for a copy of `folder` that consists of the files in `sources`.

    Files missing from the copy are dropped. Files that only the copy has are not added, because people may edit them.
    """
    manifest, entries = read_manifest(folder), {}
    for name, (size, digest) in manifest.files.items():
        if name not in sources:
            continue
        if (source := sources[name]) != folder / name:
            content = source if isinstance(source, bytes) else source.read_bytes()
            size, digest = len(content), hashlib.sha256(content).hexdigest()
        entries[name] = {"size": size, "sha256": digest}
    return _signed({"run": manifest.run_id, "files": entries})


def _signed(content: dict[str, Any]) -> bytes:
    return json.dumps({**content, "sha256": _own_checksum(content)}, indent=1).encode()


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a checkpoint. Raise CheckpointError if it is missing or invalid."""
    file = Path(folder) / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{MANIFEST} is missing; the run was probably stopped while it saved this checkpoint")
    try:
        return _parsed(file.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is corrupted ({error})") from error


def _parsed(text: str) -> Manifest:
    content = json.loads(text)
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict):
        raise CheckpointError(f"{MANIFEST} contains {json.dumps(content)[:40]}; expected an object {{files: ...}}")
    if content.pop("sha256", None) != _own_checksum(content):
        raise CheckpointError(f"{MANIFEST} was modified: it does not match its own checksum")
    files = {}
    for name, entry in content["files"].items():
        path = PurePosixPath(name)
        if not name or set("\0\\") & set(name) or path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{MANIFEST} names {name[:100]!r}, which is not a file in this folder")
        match entry:
            case {"size": int(size), "sha256": str(digest)} if type(size) is int and size >= 0:
                files[name] = size, digest
            case _:
                raise CheckpointError(
                    f"{MANIFEST}: the entry of {name[:100]!r} is {json.dumps(entry)[:120]}; expected size (bytes) and "
                    "sha256 (string)"
                )
    run_id = content.get("run")
    if not isinstance(run_id, str | None):
        raise CheckpointError(f"{MANIFEST}: run is {json.dumps(run_id)[:40]}; expected a string or null")
    return Manifest(files, run_id)


def _own_checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def find_corruption(folder: str | Path, with_checksums: bool = True) -> list[str]:
    """Return the problems found in a checkpoint folder, one line per file, or [] if it is complete.

    Args:
        with_checksums: compare the content of every file, not only its size.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return [f"{folder} does not exist"]
    try:
        files = read_manifest(folder).files
    except (CheckpointError, OSError) as error:
        return [str(error)]
    found, to_read = {}, []
    for name, (size, _) in files.items():
        file = folder / name
        if not os.path.isfile(file):  # reading a pipe or a device could block
            found[name] = f"{name} is missing"
        elif file.stat().st_size != size:
            found[name] = f"{name} has {file.stat().st_size:,} bytes; expected {size:,}"
        elif with_checksums:
            to_read.append(name)
    try:
        read = checksums([folder / name for name in to_read])
    except OSError as error:
        return [*found.values(), f"a file cannot be read ({error})"]
    for name, checksum in zip(to_read, read):
        if checksum != files[name][1]:
            found[name] = f"{name} has changed since it was written (sha256 {checksum[:8]}...)"
    return [found[name] for name in files if name in found]


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first."""
    folders = Path(output_dir).glob("checkpoint-*")
    return sorted((each for each in folders if each.name.removeprefix("checkpoint-").isdecimal()), key=step_of)


def step_of(folder: Path) -> int:
    """Return the step number in the name of a checkpoint folder."""
    return int(folder.name.removeprefix("checkpoint-"))


def run_id_of(folder: str | Path) -> str | None:
    """Return the id of the run that wrote a checkpoint, or None if the manifest is missing or unreadable."""
    try:
        return read_manifest(folder).run_id
    except (CheckpointError, OSError):
        return None


def resolve_checkpoint(
    output_dir: str | Path, wanted: str | bool | None, problems: dict[Path, list[str]] | None = None
) -> str | None:
    """Return the checkpoint to resume from, or None for a fresh start.

    Args:
        wanted: None or False for a fresh start; True or "last" for the newest checkpoint; "last-complete" for the
            newest complete one, or a fresh start if there is none; or a folder.
        problems: dict to fill with the result of `find_corruption` for each checked folder, keyed by resolved path.

    Raises:
        FileNotFoundError: `wanted` is "last", and there is no checkpoint.
        CheckpointError: the checkpoint is corrupted; the message names the newest complete one.
    """
    wanted = wanted_checkpoint(wanted)
    if wanted is None:
        return None
    available, problems = list_checkpoints(output_dir), {} if problems is None else problems

    def problems_of(folder: Path) -> list[str]:
        """Return the problems found in a folder. Check each folder only once, because hashing takes minutes."""
        place = folder.resolve()
        if place not in problems:
            problems[place] = find_corruption(folder)
        return problems[place]

    complete = (folder for folder in reversed(available) if not problems_of(folder))
    if wanted == "last-complete":
        newest = next(complete, None)
        return str(newest) if newest else None
    if wanted == "last" and not available:
        raise FileNotFoundError(f"{output_dir} has no checkpoint to resume from")
    folder = available[-1] if wanted == "last" else Path(wanted)
    if found := problems_of(folder):
        fix = "no complete checkpoint is left; restart the run"
        if newest := next(complete, None):
            fix = f"resume from the newest complete one, {newest}, with --resume_from_checkpoint last-complete"
        raise CheckpointError(f"checkpoint {folder} is corrupted: {'; '.join(found)}. Nothing was loaded; {fix}.")
    return str(folder)


@contextlib.contextmanager
def readable(folder: str | Path, what: str, values_too: bool = True) -> Iterator[None]:
    """Convert errors in a `with` block that reads a checkpoint to a CheckpointError that names `folder` and `what`.

    Args:
        values_too: also convert plain ValueErrors; set to False if this package may raise them with clear messages.
    """
    try:
        yield
    except CheckpointError:
        raise
    except READ_ERRORS as error:
        own = isinstance(error, ValueError) and not isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
        if out_of_memory(error) or (own and not values_too):
            raise
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"checkpoint {folder}: {what} cannot be read, or does not match this run ({type(error).__name__}: "
            f"{reason}). Nothing was trained or written; resume from another checkpoint, or use the model and "
            "options that this checkpoint was saved with"
        ) from error


class _PlainMetadata(pickle.Unpickler):
    """Unpickler for torch.distributed.checkpoint metadata that rejects everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"the file uses {module}.{name}, which is not allowed in metadata")
        return super().find_class(module, name)


def validate_plain_metadata(folder: str | Path) -> None:
    """Raise CheckpointError if the metadata of sharded weights (FSDP), which torch unpickles, contains code."""
    for file in sorted(Path(folder).rglob(SHARD_METADATA)):
        with readable(folder, str(file.relative_to(folder))), open(file, "rb") as stream:
            _PlainMetadata(stream).load()


def out_of_memory(error: BaseException) -> bool:
    """Check whether an error means that the device or the machine ran out of memory."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
