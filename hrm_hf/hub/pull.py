"""Pull: a repository at one commit, into a folder or into the cache of huggingface_hub.

A pull asks which commit a revision is and which files that has (`listing.py`, which believes nothing), fetches them
(`download.py`, never more than was stated), compares every file with the digest that the Hub states, and only then
makes a folder a model; stopped in the middle, it goes on where it stopped. Nothing is written outside of the folder,
whatever names a Hub sends and whatever links lie in the folder.

`snapshot_download` of huggingface_hub (2.4) is not used: it takes names of blobs from headers, unpacks what comes
compressed, writes more than was stated and begins files anew; `verify_repo_checksums` reads listings without an end.
"""

import hashlib
import json
import os
import shutil
import unicodedata
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.file_download import (
    _cache_commit_hash_for_specific_revision,
    _create_symlink,
    repo_folder_name,
    xet_get,
)
from huggingface_hub.utils import (
    DEFAULT_IGNORE_PATTERNS,
    WeakFileLock,
    XetFileData,
    build_hf_headers,
    filter_repo_objects,
    validate_repo_id,
)
from huggingface_hub.utils._runtime import is_xet_available

from ..io.model_names import CONFIG
from .download import get_file
from .errors import HubError, hub_errors
from .listing import PULL_RECORD, SHA1, Entry, Limits, commit_of, files_of, name_problem


BLOCK = 2**20  # bytes hashed at a time
WORKERS = 8  # files that are fetched at the same time, as huggingface_hub does


@dataclass
class PullResult:
    """A folder that holds a repository at `commit`; every one of its files agrees with the Hub's digest."""

    path: Path
    commit: str
    files: int
    bytes: int


@dataclass(frozen=True)
class Source:
    """A repository at a commit; `stop` ends what is being fetched."""

    api: HfApi
    repo_id: str
    commit: str
    stop: Event = field(default_factory=Event)

    @property
    def headers(self) -> dict[str, str]:
        return build_hf_headers(token=self.api.token)


def pull_checkpoint(
    repo_id: str,
    out: str | Path | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    max_size: int = Limits.size,
    max_files: int = Limits.files,
    choose: Callable[[list[str]], Iterable[str]] | None = None,
) -> PullResult:
    """Downloads a repository at one commit and compares every file with the Hub's digest.

    Args:
        repo_id: OWNER/NAME.
        out: folder to make; the cache of huggingface_hub if None. Until everything is there and right, the files are
            in a hidden folder beside it, from which the same call goes on after an interruption. A folder of an
            earlier pull of the repository is brought to the new commit; files of your own in it stay.
        revision: branch, tag or sha; main by default.
        token: that you are logged in with if None.
        max_size: most bytes that all files may have together; a larger repository is refused before the download.
        max_files: most files and folders that it may have.
        choose: gets the names of its files and returns those to download; all if None. What it raises is passed on.

    Raises:
        ValueError: `out` holds files that were not pulled from `repo_id`, or links that lead out of it.
        HubError: the Hub refused or could not be reached, says what cannot be true, or more than the limits, the disk
            is too small, or a file does not agree with its digest.
    """
    validate_repo_id(repo_id)
    limits = Limits(max_size, max_files)
    if revision is not None and ".." in revision:
        raise ValueError(f"revision={revision!r} is no name of a branch, tag or commit: those have no two dots")
    api = HfApi(token=token)
    with hub_errors("pull", repo_id, revision, token):
        source = Source(api, repo_id, commit_of(api, repo_id, revision))
        entries = files_of(api, repo_id, source.commit, limits, choose)
        if out is None:
            path = _pull_into_cache(source, revision, entries)
        else:
            path = Path(out).expanduser().absolute()
            _pull_into_folder(path, source, entries)
        return PullResult(path, source.commit, len(entries), sum(entry.size for entry in entries.values()))


# ---- into the cache ----


def _pull_into_cache(source: Source, revision: str | None, entries: dict[str, Entry]) -> Path:
    """As `snapshot_download`, which takes names of blobs from each answer and whatever size they come in."""
    cache = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=source.repo_id, repo_type="model"))
    snapshot = cache / "snapshots" / source.commit
    blobs = {entry.digest: entry for entry in entries.values()}
    absent = [entry for entry in blobs.values() if not (cache / "blobs" / entry.digest).exists()]
    _validate_space(Path(constants.HF_HUB_CACHE), sum(entry.size for entry in absent))
    (cache / "blobs").mkdir(parents=True, exist_ok=True)
    _fetch_all(blobs.values(), source, lambda entry: _fetch_blob(entry, cache, source))
    for name, entry in entries.items():
        pointer, blob = snapshot / name, cache / "blobs" / entry.digest
        if not pointer.exists() or not os.path.samefile(pointer, blob):
            pointer.parent.mkdir(parents=True, exist_ok=True)
            _create_symlink(str(blob), str(pointer))
    # The library's note of where a branch was, by which it finds the model offline.
    _cache_commit_hash_for_specific_revision(str(cache), revision or constants.DEFAULT_REVISION, source.commit)
    return snapshot


def _fetch_blob(entry: Entry, cache: Path, source: Source) -> None:
    """Puts a file's content into the cache, under the lock that the library takes for it."""
    blob = cache / "blobs" / entry.digest
    lock = Path(constants.HF_HUB_CACHE, ".locks", cache.name, f"{entry.digest}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if agrees(blob, entry):
            return
        part = blob.with_name(f"{entry.digest}.part")
        by_xet = entry.xet_hash and is_xet_available()
        _download(entry, part, blob, source, _fetch_by_xet if by_xet else _fetch_part)


def _fetch_by_xet(entry: Entry, part: Path, source: Source) -> None:
    """As the library fetches what is stored in chunks; hf_xet is told the size, and compares it."""
    refresh = f"{source.api.endpoint}/api/models/{source.repo_id}/xet-read-token/{source.commit}"
    content = XetFileData(file_hash=entry.xet_hash, refresh_route=refresh)
    options = {"headers": source.headers, "expected_size": entry.size, "displayed_filename": entry.path}
    try:
        xet_get(incomplete_path=part, xet_file_data=content, **options)
    except RuntimeError as error:  # hf_xet has no errors of its own
        if "size mismatch" not in str(error):
            raise
        part.unlink(missing_ok=True)
        raise HubError(
            f"{entry.path} has not the {entry.size:,} bytes that the Hub says it has, so it was deleted ({error})"
        ) from error


# ---- into a folder ----


def _pull_into_folder(folder: Path, source: Source, entries: dict[str, Entry]) -> None:
    incoming, lock = folder.with_name(f".{folder.name}.incoming"), folder.with_name(f".{folder.name}.lock")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for path in (incoming, lock):
        if path.is_symlink():
            raise ValueError(f"{path} is a link, and the pull would write where it leads; remove it")
    with WeakFileLock(lock):
        record = _pull_record(folder, source.repo_id)
        _validate_no_links(folder, [*entries, *(record["files"] if record else ())])
        if (
            record
            and record["commit"] == source.commit
            and all(_is_there(folder / e.path, e) for e in entries.values())
        ):
            return
        _validate_room(folder, entries, record)
        incoming.mkdir(exist_ok=True)
        _validate_no_links(incoming, entries)
        _validate_distinct_names(incoming, entries, source.repo_id)
        _validate_space(incoming, sum(max(0, e.size - _present(incoming, folder, e)) for e in entries.values()))
        absent = [entry for entry in entries.values() if not _is_there(incoming / entry.path, entry)]
        for entry in absent:
            _make_room(incoming / entry.path, incoming)
        _fetch_all(absent, source, lambda entry: _fetch(entry, incoming, folder, source))
        content = {"repo_id": source.repo_id, "commit": source.commit, "files": sorted(entries)}
        (incoming / PULL_RECORD).unlink(missing_ok=True)
        (incoming / PULL_RECORD).write_text(json.dumps(content, indent=1))
        _install(incoming, folder, entries, record)
    lock.unlink(missing_ok=True)


def _pull_record(folder: Path, repo_id: str | None = None) -> dict | None:
    """Reads the record of a folder's last pull; None if it is new or empty. ValueError if it is anything else.

    Args:
        repo_id: that the folder must hold; any if None.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    file = folder / PULL_RECORD
    if not file.exists():
        raise ValueError(f"{folder} holds files that no pull has put there; choose a new folder, or empty this one")
    try:
        record = json.loads(file.read_text())
        names = record["files"]
        good = isinstance(names, list) and isinstance(record["repo_id"], str) and SHA1.fullmatch(record["commit"])
        good = good and not any(map(name_problem, names))
    except (ValueError, KeyError, TypeError):  # no JSON, or of another form
        good = False
    if not good:
        raise ValueError(f"{file} is corrupted: it is no record of a pull. Choose a new folder, or empty this one")
    if repo_id is not None and record["repo_id"] != repo_id:
        raise ValueError(f"{folder} holds a pull of {record['repo_id']}; choose a new folder, or empty this one")
    return record


def _validate_no_links(root: Path, names: Iterable[str]) -> None:
    """Raises ValueError where a folder on the way to a file is a link: the file would be written where it leads."""
    folders = {root / parent for name in names for parent in Path(name).parents if parent != Path(".")}
    if links := sorted(folder for folder in folders if folder.is_symlink()):
        raise ValueError(f"{links[0]} is a link, and the pull would write where it leads; remove it")


def _validate_distinct_names(incoming: Path, entries: dict[str, Entry], repo_id: str) -> None:
    """HubError for two names of one file: on a disk that takes a and A for one, or that of an unfinished file."""
    names = list(entries)
    folds = os.path.exists(other := incoming.with_name(incoming.name.swapcase())) and os.path.samefile(incoming, other)
    if folds:
        names = [unicodedata.normalize("NFC", name).casefold() for name in names]
    names += [_part(Path(), entry).as_posix() for entry in entries.values()]
    seen: dict[str, str] = {}
    for name, original in zip(names, [*entries, *entries]):
        if name in seen:
            raise HubError(
                f"{repo_id} has {seen[name]!r} and {original!r}, which would be one file here, so that one of them "
                "would be lost; nothing was downloaded"
            )
        seen[name] = original


def _validate_room(folder: Path, entries: dict[str, Entry], record: dict | None) -> None:
    """Raises ValueError where something of the owner's lies in a file's place, before anything is changed."""
    if record is None:
        return
    ours = set(record["files"])
    for name in entries:
        parents = [parent.as_posix() for parent in Path(name).parents if parent != Path(".")]
        blocked = [p for p in parents if (folder / p).exists() and not (folder / p).is_dir() and p not in ours]
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            inside = (file.relative_to(folder).as_posix() for file in (folder / name).rglob("*") if not file.is_dir())
            blocked += [file for file in inside if file not in ours]
        if blocked:
            raise ValueError(f"{folder / blocked[0]} is in the place of {name}, which is to be pulled; move it away")


def _present(incoming: Path, folder: Path, entry: Entry) -> int:
    """Bytes of a file that an interrupted pull has fetched, all of them if it is complete."""
    places = (incoming / entry.path, folder / entry.path, _part(incoming, entry))
    return max(place.stat().st_size if place.exists() else 0 for place in places)


def _part(incoming: Path, entry: Entry) -> Path:
    """The place of an unfinished download: named by its digest, so that bytes of two commits never mix."""
    return incoming / f"{entry.path}.{entry.digest[:16]}.part"


def _make_room(target: Path, incoming: Path) -> None:
    """Removes what a pull of another commit has left in the place of a file, and makes the file's folder."""
    for parent in [p for p in target.parents if incoming in p.parents and p.is_file()]:
        parent.unlink()  # a file that has a folder in its place
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)  # the reverse
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # lest it be a link, through which would be written


def _fetch(entry: Entry, incoming: Path, folder: Path, source: Source) -> None:
    """Puts a file into `incoming`: that of an earlier pull, or what the Hub sends, which goes on where it stopped."""
    target = incoming / entry.path
    if _is_there(folder / entry.path, entry):
        shutil.copyfile(folder / entry.path, target)
    else:  # past Xet, which begins a file anew
        _download(entry, _part(incoming, entry), target, source, _fetch_part)


def _install(incoming: Path, folder: Path, entries: dict[str, Entry], record: dict | None) -> None:
    """Makes complete files a model: a new folder at once, an old one with config.json gone first and back last."""
    for file in [path for path in incoming.rglob("*") if path.is_symlink() or path.is_file()]:
        if file.relative_to(incoming).as_posix() not in {*entries, PULL_RECORD}:
            file.unlink()  # of another commit
    if record is None:
        if folder.exists():
            folder.rmdir()
        os.rename(incoming, folder)
        return
    for name in [CONFIG, *(set(record["files"]) - set(entries))]:
        (folder / name).unlink(missing_ok=True)
    for name in sorted(entries, key=lambda name: name == CONFIG):
        target = folder / name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)  # empty folders: their files were those of the earlier commit
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(incoming / name, target)
    os.replace(incoming / PULL_RECORD, folder / PULL_RECORD)
    shutil.rmtree(incoming)


# ---- both ----


def _fetch_all(entries: Iterable[Entry], source: Source, fetch: Callable[[Entry], None]) -> None:
    """Calls `fetch` for each entry, some at a time; at the first error, or Ctrl-C, the others stop."""
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            jobs = [pool.submit(fetch, entry) for entry in entries]
            for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
                job.result()
        finally:
            source.stop.set()
            pool.shutdown(cancel_futures=True)


def _download(entry: Entry, part: Path, target: Path, source: Source, fetch: Callable) -> None:
    """Makes `part` the file that the Hub describes, and then `target`. HubError for other bytes, which are deleted."""
    fetch(entry, part, source)
    if not agrees(part, entry):
        part.unlink()
        raise HubError(
            f"{entry.path} of {source.repo_id} at {source.commit} does not agree with the Hub's digest, so it was "
            "deleted: it was changed on the way. Run the same command again"
        )
    os.replace(part, target)


def _fetch_part(entry: Entry, part: Path, source: Source) -> None:
    """Brings an unfinished file to its stated size. One that is longer, or that is not its own file, is begun anew."""
    if part.is_symlink() or (part.exists() and part.stat().st_size > entry.size):
        part.unlink()
    address = hf_hub_url(source.repo_id, entry.path, revision=source.commit, endpoint=source.api.endpoint)
    try:
        get_file(address, source.headers, part, entry.size, entry.path, source.stop)
    except HubError as error:
        part.unlink(missing_ok=True)
        raise HubError(f"{error}, so it was deleted: {source.repo_id} or its Hub is not to be trusted") from error


def _is_there(file: Path, entry: Entry) -> bool:
    """Whether `file` is the entry's, and no link to a place that others may change."""
    return not file.is_symlink() and agrees(file, entry)


def agrees(file: Path, entry: Entry) -> bool:
    """Whether a file has the SHA-256 of its LFS object, or git's hash where it is no such object."""
    if not file.is_file() or file.stat().st_size != entry.size:
        return False
    digest = hashlib.sha256() if entry.sha256 else hashlib.sha1(b"blob %d\0" % entry.size)
    with open(file, "rb") as stream:
        for block in iter(partial(stream.read, BLOCK), b""):
            digest.update(block)
    return digest.hexdigest() == entry.digest


def _validate_space(folder: Path, needed: int) -> None:
    """Raises HubError where the disk of `folder`, or of the first parent that exists, has less than `needed` bytes."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise HubError(
            f"the disk of {folder} has {free:,} bytes free, and {needed:,} are needed; nothing was downloaded. Free "
            "some space, or choose another folder (--out, or HF_HOME for the cache)"
        )


# ---- verify ----


def verify_checkpoint(
    folder: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    max_size: int = Limits.size,
    max_files: int = Limits.files,
) -> PullResult:
    """Compares a pulled folder with the digests that the Hub states for a revision.

    Args:
        revision: that the folder was pulled at if None.
        max_size, max_files: as in `pull_checkpoint`.

    Raises:
        ValueError: no revision is given, and the folder does not say which one it holds.
        HubError: files are missing, not in the repository, or differ; the message names them.
    """
    validate_repo_id(repo_id)
    folder, limits = Path(folder).expanduser().absolute(), Limits(max_size, max_files)
    record = folder / PULL_RECORD
    if revision is None and not record.exists():
        raise ValueError(f"{folder} was not made by a pull, so give the revision to compare with")
    revision = revision or _pull_record(folder)["commit"]
    with hub_errors("pull", repo_id, revision, token):
        api = HfApi(token=token)
        commit = commit_of(api, repo_id, revision)
        entries = files_of(api, repo_id, commit, limits)
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file() and file != record]
    there = set(filter_repo_objects(names, ignore_patterns=DEFAULT_IGNORE_PATTERNS))
    wrong = {
        "differ": [name for name, entry in entries.items() if name in there and not agrees(folder / name, entry)],
        "are missing": sorted(entries.keys() - there),
        "are not in the repository": sorted(there - entries.keys()),
    }
    said = "; ".join(f"{', '.join(names)} {words}" for words, names in wrong.items() if names)
    if said:
        raise HubError(f"{folder} is not {repo_id} at {commit}: {said}. Pull it again into a new folder")
    return PullResult(folder, commit, len(entries), sum((folder / name).stat().st_size for name in there))
