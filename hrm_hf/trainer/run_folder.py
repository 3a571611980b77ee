"""One run in one folder: who may write there, whose its checkpoints are, and what becomes of an earlier run's.

- A run holds a lock on its folder while it writes (`held`). The kernel releases it with the process, killed or not.
- A run has an id, which is in the manifest of each of its checkpoints and which a resumed run keeps.
- A new run does not start where checkpoints are, unless it is told to delete them (`begin`).

The lock is `flock`, by the library filelock, of the first process of a run. Local file systems and NFS from version 4
on (3 with a lock daemon) have it between machines; Lustre only if it is mounted with `flock`. A file system without
locks gets a warning, and one that is mounted with local locks only keeps out runs of the same machine.
"""

import contextlib
import errno
import json
import os
import shutil
import socket
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

from ..hub.manifests import CheckpointError, find_corruption, list_checkpoints, resolve_checkpoint, run_id_of


LOCK_FILE = ".run.lock"
SECONDS_TO_WAIT = 1.0  # for a run that is just ending
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_held_to_the_end: list[FileLock] = []  # a lock that nobody refers to is released

Found = TypeVar("Found")


class FolderInUseError(OSError):
    """Another run writes into the folder."""


@dataclass
class Start:
    """How a run begins.

    Attributes:
        checkpoint: what it resumes from; None for a new run.
        run_id: its own, or that of the run it goes on with.
        stale: checkpoints of an earlier run, to be deleted after the first step of this one.
    """

    checkpoint: str | None
    run_id: str
    stale: list[Path] = field(default_factory=list)


def agreed(call: Callable[[], Found], is_first: bool) -> Found:
    """Calls `call` in the first process and returns its result, or raises its error, in all. A collective call."""
    found: list[Any] = [None, None]
    if is_first:
        try:
            found = [call(), None]
        except Exception as error:  # whatever it is: it is raised below, in this process as well
            found = [None, error]
    value, error = broadcast_object_list(found)
    if error is not None:
        raise error
    return value


@contextlib.contextmanager
def held(output_dir: str | Path, is_first: bool) -> Iterator[None]:
    """Inside, no other run writes into `output_dir`. A collective call, as it starts."""
    lock = agreed_lock(output_dir, is_first)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def claim_run_folder(args: Any) -> None:
    """For training scripts, before they write anything: the folder is this run's until the process ends.

    Args:
        args: TrainingArguments.

    Raises:
        FolderInUseError: another run writes there.
        FileExistsError: it holds checkpoints, and the run is told neither to resume nor to delete them.
        OSError: it cannot be written.
    """
    is_first = args.process_index == 0
    lock = agreed_lock(args.output_dir, is_first)
    if lock is not None:
        _held_to_the_end.append(lock)
    if not args.resume_from_checkpoint and not overwrites(args):
        agreed(lambda: _validate_no_checkpoints(args.output_dir, list_checkpoints(args.output_dir)), is_first)


def overwrites(args: Any) -> bool:
    return getattr(args, "overwrite_output_dir", False)


def agreed_lock(output_dir: str | Path, is_first: bool) -> FileLock | None:
    """The lock on a folder, acquired once more; None in other processes and where there are no locks."""
    taken: list[FileLock | None] = [None]

    def take() -> None:
        taken[0] = _lock(Path(output_dir))

    agreed(take, is_first)
    return taken[0]


def _lock(folder: Path) -> FileLock | None:
    file = folder.resolve() / LOCK_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # One object a file in a process, which counts how often it was acquired: a script holds what train() asks for.
        lock = FileLock(file, is_singleton=True, thread_local=False, fallback_to_soft=False, preserve_lock_file=True)
        lock.acquire(timeout=SECONDS_TO_WAIT)
        if lock.lock_counter == 1:
            file.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}), encoding="utf-8")
    except Timeout as error:
        raise FolderInUseError(
            f"another run writes into {folder}: {_owner(file)}. Two runs would mix their checkpoints: wait for it, "
            "end it, or choose another --output_dir"
        ) from error
    except OSError as error:
        if error.errno in NO_LOCKS:
            warnings.warn(
                f"the file system of {folder} has no locks ({error.strerror}): nothing keeps a second run out, so "
                "start none there",
                stacklevel=2,
            )
            return None
        raise type(error)(
            error.errno,
            f"the run's folder cannot be written ({error.strerror}): choose another --output_dir, or mend its owner, "
            "its mount or its disk space",
            str(folder),
        ) from error
    return lock


def _owner(file: Path) -> str:
    try:
        owner = json.loads(file.read_text(encoding="utf-8"))
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"a process that has not said who it is, see {file}"


def begin(output_dir: str | Path, wanted: str | bool | None, overwrite: bool = False) -> Start:
    """Decides how a run starts in a folder; in the first process alone.

    Checkpoints of which "last-complete" finds none complete are renamed: they are not of the new run.

    Args:
        wanted: as in `resolve_checkpoint`.
        overwrite: a run that resumes from nothing here deletes what it finds.

    Raises:
        FileExistsError: checkpoints are there, and nothing says what to do with them.
        CheckpointError, FileNotFoundError: as in `resolve_checkpoint`; or checkpoints of two runs are there.
    """
    there = list_checkpoints(output_dir)
    checkpoint = resolve_checkpoint(output_dir, wanted)
    inside = checkpoint is not None and Path(checkpoint).resolve().parent == Path(output_dir).resolve()
    run_id = run_id_of(checkpoint) if checkpoint else None
    if inside and run_id is None:  # its manifest was written again by hand: of the run that the others are of
        ids = {found for folder in there if (found := run_id_of(folder))}
        run_id = ids.pop() if len(ids) == 1 else None
    run_id = run_id or uuid.uuid4().hex
    if overwrite and not inside:
        return Start(checkpoint, run_id, there)
    if checkpoint is None and wanted:
        for folder in there:
            print(
                f"{folder} is corrupted ({find_corruption(folder)[0]}): renamed to {_set_aside(folder).name}",
                flush=True,
            )
        return Start(None, run_id)
    if checkpoint is None:
        _validate_no_checkpoints(output_dir, there)
        return Start(None, run_id)
    _validate_one_run(checkpoint, run_id, there)
    names = [folder.name for folder in there]
    if inside and Path(checkpoint).name in names and (later := names[names.index(Path(checkpoint).name) + 1 :]):
        print(
            f"{', '.join(later)} in {output_dir} are later than {Path(checkpoint).name}: they are written over when "
            "the run gets there, and until then `last` means the latest of them",
            flush=True,
        )
    return Start(checkpoint, run_id)


def _validate_no_checkpoints(output_dir: str | Path, there: list[Path]) -> None:
    if there:
        names = ", ".join(folder.name for folder in there[-3:])
        raise FileExistsError(
            f"{output_dir} holds checkpoints of an earlier run ({'..., ' if len(there) > 3 else ''}{names}), and a "
            "new one would mix with it. Go on with that run by --resume_from_checkpoint last (or last-complete), "
            "delete its checkpoints by --overwrite_output_dir true, or choose another --output_dir"
        )


def _validate_one_run(checkpoint: str, run_id: str, there: list[Path]) -> None:
    other = {folder.name: found for folder in there if (found := run_id_of(folder)) not in (None, run_id)}
    if other:
        names = ", ".join(f"{name} of run {found[:8]}" for name, found in other.items())
        raise CheckpointError(
            f"{there[0].parent} holds checkpoints of more than one run: {checkpoint} is of run {run_id[:8]}, but "
            f"{names}. Move one run's checkpoints elsewhere, or give another --output_dir; nothing was loaded"
        )


def _set_aside(folder: Path) -> Path:
    number = 0
    while (place := folder.with_name(f"damaged-{folder.name}" + (f"-{number}" if number else ""))).exists():
        number += 1
    return folder.rename(place)


def delete_checkpoints(folders: list[Path]) -> None:
    """Deletes checkpoints of an earlier run. Raises OSError if one cannot be deleted."""
    for folder in folders:
        print(f"deleting {folder} of an earlier run (overwrite_output_dir)", flush=True)
        shutil.rmtree(folder)


def rotate(folder: Path, run_id: str | None, limit: int | None, best: str | None) -> None:
    """Deletes the oldest checkpoints beside `folder`, which was just written, so that `limit` are left.

    The library's own goes by the number alone: after a run has gone back it deletes what was just written. Here later
    ones, which the run has left behind, go first. The best one stays, and so does what another run wrote.
    """
    if not limit or limit < 0:
        return
    step = int(folder.name.rpartition("-")[2])
    own = [one for one in list_checkpoints(folder.parent) if run_id_of(one) in (None, run_id)]
    kept = {folder.resolve(), Path(best).resolve()} if best else {folder.resolve()}
    own.sort(key=lambda one: int(one.name.rpartition("-")[2]) <= step)
    surplus = len(own) - max(limit, len(kept))
    for one in [one for one in own if one.resolve() not in kept][: max(surplus, 0)]:
        shutil.rmtree(one, ignore_errors=True)
