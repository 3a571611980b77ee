"""Which files a repository has at a commit: what a Hub answers, checked before any of it is used.

A Hub may lie, and so may whoever can write to a repository. Hashes become parts of paths and of addresses, names
become paths, sizes decide how much is fetched: each is refused here unless it is what it must be, and so is a listing
without an end.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import quote

from huggingface_hub import HfApi
from huggingface_hub.utils import build_hf_headers

from .download import get_json
from .errors import HubError, printable


PULL_RECORD = ".pulled.json"  # which commit of which repository a folder holds
SHA1, SHA256 = re.compile("[0-9a-f]{40}"), re.compile("[0-9a-f]{64}")
XET = SHA256  # a Xet hash has the same form
LONGEST_NAME, LONGEST_PART = 1000, 230  # bytes; a file system has 255 for a part, and unfinished files need a suffix
SHOWN = 120  # characters of a name in a message
# Control characters, marks that turn the direction of writing, other invisible ones, halves of characters, line ends.
UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
GIT = (".git", "git~1")  # the second is the first under old Windows


@dataclass(frozen=True)
class Limits:
    """How much a pull takes before it refuses: bytes in all, and files and folders."""

    size: int = 50 * 10**9
    files: int = 10_000

    def __post_init__(self):
        for name, value in (("size", self.size), ("files", self.files)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"max_{name}={value!r} is no limit; expected a whole number of at least 1")


@dataclass(frozen=True)
class Entry:
    """A file of a commit: its name, size, git hash, and for a large file its SHA-256 and Xet hash."""

    path: str
    size: int
    blob_id: str
    sha256: str | None = None
    xet_hash: str | None = None

    @property
    def digest(self) -> str:
        """Of the content: SHA-256, or git's hash where the file is no LFS object."""
        return self.sha256 or self.blob_id


def commit_of(api: HfApi, repo_id: str, revision: str | None) -> str:
    """The full sha of a revision. HubError where the Hub answers with anything else, or with another sha."""
    address = f"{api.endpoint}/api/models/{repo_id}"
    if revision is not None:
        address += f"/revision/{quote(revision, safe='')}"
    answer, _ = get_json(address, build_hf_headers(token=api.token))
    sha = answer.get("sha") if isinstance(answer, dict) else None
    commit = validate_commit(sha, repo_id)
    if revision is not None and SHA1.fullmatch(revision) and commit != revision:
        raise HubError(f"{repo_id}: the Hub answered with commit {commit} where {revision} was asked for")
    return commit


def validate_commit(sha: object, repo_id: str) -> str:
    """`sha` if it is one. HubError if not."""
    if not isinstance(sha, str) or not SHA1.fullmatch(sha):
        raise _untrusted(repo_id, f"commit {_quoted(sha)} is no sha of 40 hexadecimal digits")
    return sha


def files_of(
    api: HfApi,
    repo_id: str,
    commit: str,
    limits: Limits,
    choose: Callable[[list[str]], Iterable[str]] | None = None,
) -> dict[str, Entry]:
    """Name -> file of every file of a commit. HubError for a listing that is not to be believed or above `limits`.

    Args:
        choose: gets all names and returns those that are wanted; only their bytes count.
    """
    entries: dict[str, Entry] = {}
    for line in _lines(api, repo_id, commit, limits):
        entry = _checked(line, repo_id)
        if entry is None:
            continue
        if entry.path in entries:
            raise _untrusted(repo_id, f"{_quoted(entry.path)} is listed twice")
        entries[entry.path] = entry
    for name in entries:
        parts = name.split("/")
        for depth in range(1, len(parts)):
            if (parent := "/".join(parts[:depth])) in entries:
                raise _untrusted(repo_id, f"{_quoted(parent)} is at once a file and a folder")
    if choose is not None:
        entries = {name: entries[name] for name in choose(list(entries))}
    if sum(entry.size for entry in entries.values()) > limits.size:
        raise HubError(
            f"{repo_id} at {commit} has more than {limits.size:,} bytes, which is the most that is pulled; "
            "nothing was downloaded. If you want it all, raise --max-size (max_size)"
        )
    return entries


def name_problem(name: object) -> str | None:
    """Why a name of a file in a repository is not taken for one here, None for a good one."""
    if not isinstance(name, str) or not name:
        return "it is no name"
    if any(unicodedata.category(c) in UNSEEN for c in name):
        return "it has characters that are not seen, such as terminal escapes"
    if len(name.encode()) > LONGEST_NAME:
        return f"it is longer than {LONGEST_NAME} bytes"
    parts = name.split("/")
    found: dict[str, Callable[[str], bool]] = {
        "it leads out of its folder": lambda part: part in ("", ".", "..") or "\\" in part,
        "it names a drive": lambda part: bool(re.match("[A-Za-z]:", part)),
        f"a part of it is longer than {LONGEST_PART} bytes": lambda part: len(part.encode()) > LONGEST_PART,
        "git keeps its own files there": lambda part: part.rstrip(" .").casefold() in GIT,
    }
    for why, wrong in found.items():
        if any(map(wrong, parts)):
            return why
    if name.rstrip(" .").casefold() == PULL_RECORD:
        return "a pull keeps its record there"
    return None


def _lines(api: HfApi, repo_id: str, commit: str, limits: Limits) -> Iterator[object]:
    """The entries of a listing, page by page, until there are more than the limit."""
    address: str | None = f"{api.endpoint}/api/models/{repo_id}/tree/{commit}"
    headers, options, seen = build_hf_headers(token=api.token), {"recursive": "true"}, 0
    while address is not None:
        page, address = get_json(address, headers, options)
        options = None  # the address of the next page has them
        if not isinstance(page, list):
            raise _untrusted(repo_id, f"its listing is {_quoted(page)}, expected a list")
        if not page and address is not None:
            raise _untrusted(repo_id, "its listing has an empty page that is not the last one")
        seen += len(page)
        if seen > limits.files:
            raise HubError(
                f"{repo_id} at {commit} has more than {limits.files:,} files and folders, which is the most that is "
                "pulled; nothing was downloaded. If you want them all, raise --max-files (max_files)"
            )
        yield from page


def _checked(line: object, repo_id: str) -> Entry | None:
    """The file of a line, None for a folder."""
    if not isinstance(line, dict) or line.get("type") not in ("file", "directory"):
        raise _untrusted(repo_id, f"its listing has {_quoted(line)}, expected a file or a folder")
    name = line.get("path")
    if why := name_problem(name):
        raise _untrusted(repo_id, f"it names a file {_quoted(name)}: {why}")
    if line["type"] == "directory":
        return None
    size, lfs, xet = line.get("size"), line.get("lfs"), line.get("xetHash")
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise _untrusted(repo_id, f"the size of {_quoted(name)} is {_quoted(size)}, expected a number of bytes")
    blob_id = _hash(line.get("oid"), SHA1, f"git hash of {_quoted(name)}", repo_id)
    sha256 = None
    if lfs is not None:
        if not isinstance(lfs, dict) or lfs.get("size", size) != size:
            raise _untrusted(repo_id, f"{_quoted(name)} has {size} bytes and the large file {_quoted(lfs)}")
        sha256 = _hash(lfs.get("oid"), SHA256, f"SHA-256 of {_quoted(name)}", repo_id)
    if xet is not None:
        xet = _hash(xet, XET, f"Xet hash of {_quoted(name)}", repo_id)
    return Entry(name, size, blob_id, sha256, xet)


def _hash(value: object, form: re.Pattern, what: str, repo_id: str) -> str:
    if not isinstance(value, str) or not form.fullmatch(value):
        digits = form.pattern.rpartition("{")[2].rstrip("}")
        raise _untrusted(repo_id, f"the {what} is {_quoted(value)}, expected {digits} hexadecimal digits")
    return value


def _quoted(value: object) -> str:
    return printable(repr(value), SHOWN)


def _untrusted(repo_id: str, why: str) -> HubError:
    return HubError(f"{repo_id} is not to be trusted, or the Hub it is on: {why}. Nothing was downloaded")
