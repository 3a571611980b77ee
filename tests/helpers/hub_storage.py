"""Repositories of a loopback Hub in a folder: commits, branches, tags, pull requests and objects.

A commit is an immutable, complete listing (path -> `Entry`), and a branch names one. A reader looks up a revision once
and keeps the listing, so it sees the tree before or after a commit, never a mixture.

On disk, `objects/` holds contents by hash (git's for small files, SHA-256 for large ones), and `repos/` one JSON file
per repository, which is replaced atomically. Changes of pull requests are in hub_pull_requests.py. Not supported:
gated repositories, rewritten history.
"""

import base64
import binascii
import hashlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import yaml


REGULAR_FILE_LIMIT = 10 * 1024**2  # bytes; the Hub requires larger files to be LFS objects
LFS_SUFFIXES = (
    ".7z .arrow .bin .bz2 .ckpt .gz .h5 .model .msgpack .npy .npz .onnx .parquet .pb .pickle .pkl .pt .pth "
    ".safetensors .tar .tflite .tgz .xz .zip .zst"
).split()
GIT_ATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()
OWNER = "tester"  # owner of the token, and default namespace of new repositories
PULL_REQUEST = "refs/pr/"  # a revision: the newest commit of a pull request


class HubError(Exception):
    """An error answer: HTTP status, message, and the Hub's error code and commit if any."""

    def __init__(self, status: int, message: str, code: str | None = None, commit: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.commit = status, message, code, commit


@dataclass(frozen=True)
class Entry:
    """One file of a commit: git's hash and size; SHA-256 of a large file."""

    oid: str
    size: int
    sha256: str | None = None

    @property
    def object_name(self) -> str:
        return self.sha256 or self.oid

    def description(self, path: str) -> dict:
        """Return the entry as in the Hub's tree listing."""
        answer: dict = {"type": "file", "path": path, "oid": self.oid, "size": self.size}
        if self.sha256:
            pointer = _pointer(self.sha256, self.size)
            answer["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": len(pointer)}
        return answer


@dataclass(frozen=True)
class Commit:
    sha: str
    parent: str | None
    title: str
    message: str
    date: str
    tree: dict[str, Entry]


@dataclass(frozen=True)
class PullRequest:
    """One pull request; `base` is the commit of main that it starts from, `head` its newest one."""

    number: int
    title: str
    author: str
    created: str
    base: str
    head: str
    status: str  # draft, open, closed or merged
    events: tuple[dict, ...] = ()  # as the Hub writes them
    merged_as: str | None = None  # the commit of main that it became

    @property
    def reference(self) -> str:
        return f"{PULL_REQUEST}{self.number}"


@dataclass(frozen=True)
class Repository:
    """An immutable repository; changes create a new one (see `Storage.publish`)."""

    kind: str  # model, dataset or space
    repo_id: str
    private: bool
    created: str
    sdk: str | None = None  # of a space
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    pull_requests: tuple[PullRequest, ...] = ()

    def commit(self, revision: str) -> Commit:
        """Return the commit of a branch, tag, pull request, or full or short sha."""
        name = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        proposed = {request.reference: request.head for request in self.pull_requests}
        sha = self.branches.get(name) or self.tags.get(name) or proposed.get(name) or revision
        found = [self.commits[sha]] if sha in self.commits else []
        if not found and len(revision) >= 7:
            found = [commit for commit in self.commits.values() if commit.sha.startswith(revision)]
        if len(found) != 1:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found[0]

    def entry(self, revision: str, path: str) -> tuple[Commit, Entry]:
        commit = self.commit(revision)
        if path not in commit.tree:
            raise HubError(404, "Entry not found", "EntryNotFound", commit.sha)
        return commit, commit.tree[path]

    def history(self, revision: str = "main") -> list[Commit]:
        """Return the commits from the newest to the first."""
        commits = [self.commit(revision)]
        while commits[-1].parent:
            commits.append(self.commits[commits[-1].parent])
        return commits


class Storage:
    """All repositories in one folder; loads the folder of an earlier server."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.lock = threading.RLock()  # for writers; readers use immutable values
        for name in ("objects", "incoming", "repos"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.repositories: dict[tuple[str, str], Repository] = {}
        for file in sorted((self.folder / "repos").glob("*/*/*.json")):
            repository = _read_repository(json.loads(file.read_text()))
            self.repositories[repository.kind, repository.repo_id] = repository

    # Repositories

    def find(self, kind: str, repo_id: str) -> Repository:
        repository = self.repositories.get((kind, repo_id))
        if repository is None:
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repository

    def create(self, kind: str, repo_id: str, private: bool, sdk: str | None = None) -> Repository:
        with self.lock:
            if (kind, repo_id) in self.repositories:
                raise HubError(409, f"You already created this {kind} repo")
            oid = self.put_regular(GIT_ATTRIBUTES)
            first = new_commit(None, "initial commit", "", {".gitattributes": Entry(oid, len(GIT_ATTRIBUTES))})
            branches, commits = {"main": first.sha}, {first.sha: first}
            return self.publish(Repository(kind, repo_id, private, first.date, sdk, branches, {}, commits))

    def publish(self, repository: Repository) -> Repository:
        """Publish `repository` to readers, after it atomically replaced the file on disk."""
        file = self.folder / "repos" / repository.kind / f"{repository.repo_id}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        new.write_text(json.dumps(asdict(repository)))
        os.replace(new, file)
        self.repositories[repository.kind, repository.repo_id] = repository
        return repository

    def change(self, kind: str, repo_id: str, function: Callable[[Repository], Repository]) -> Repository:
        """Publish `function(repository)` while no other change can happen."""
        with self.lock:
            return self.publish(function(self.find(kind, repo_id)))

    def delete(self, kind: str, repo_id: str) -> None:
        with self.lock:
            self.find(kind, repo_id)
            (self.folder / "repos" / kind / f"{repo_id}.json").unlink()
            del self.repositories[kind, repo_id]

    def set_private(self, kind: str, repo_id: str, private: bool) -> None:
        self.change(kind, repo_id, lambda repository: replace(repository, private=private))

    def set_reference(self, kind: str, repo_id: str, group: str, name: str, revision: str | None) -> None:
        """Add a branch or tag (`group` is "branches" or "tags"), or delete it if `revision` is None."""
        if group == "branches" and name.startswith("refs/"):
            raise HubError(400, f"Invalid reference for a branch: {name}")
        with self.lock:
            repository = self.find(kind, repo_id)
            references = dict(repository.branches if group == "branches" else repository.tags)
            if revision is None:
                if name == "main":
                    raise HubError(403, "Cannot delete the main branch")
                if references.pop(name, None) is None:
                    raise HubError(404, f"Reference {name} does not exist", "RevisionNotFound")
            elif name in references:
                raise HubError(409, f"Reference {name} exists already")
            else:
                references[name] = repository.commit(revision).sha
            self.publish(replace(repository, **{group: references}))

    # Objects

    def object(self, name: str, group: str = "objects") -> Path:
        """Return the path for the object with this hash."""
        if not name.isalnum():  # a request must not point outside the folder
            raise HubError(400, f"Not a hash: {name!r}")
        return self.folder / group / name

    def put_regular(self, content: bytes) -> str:
        """Store a small file and return its git hash."""
        oid = _git_hash(content)
        new = self.incoming()
        new.write_bytes(content)
        os.replace(new, self.object(oid))
        return oid

    def incoming(self) -> Path:
        """Return a new path for an object that is not verified yet."""
        return self.folder / "incoming" / uuid.uuid4().hex

    def accept(self, incoming: Path, sha256: str, size: int) -> None:
        """Accept an uploaded LFS object if its bytes match the announced hash, else delete it."""
        found = hashlib.sha256(incoming.read_bytes()).hexdigest()
        if (found, incoming.stat().st_size) != (sha256, size):
            message = f"Uploaded {incoming.stat().st_size} bytes with SHA-256 {found}; announced {size} and {sha256}"
            incoming.unlink()
            raise HubError(400, message)
        os.replace(incoming, self.object(sha256))

    def content(self, entry: Entry) -> bytes:
        return self.object(entry.object_name).read_bytes()

    # Commits

    def commit(self, kind: str, repo_id: str, branch: str, lines: list[dict]) -> Commit:
        """Apply all operations of a commit request to a branch, or none if one is rejected."""
        with self.lock:
            repository = self.find(kind, repo_id)
            branch = branch.removeprefix("refs/heads/")
            if branch not in repository.branches:
                raise HubError(404, f"Invalid rev id: {branch}", "RevisionNotFound")
            head = repository.commits[repository.branches[branch]]
            check_parent(head, lines)
            commit = self.next_commit(head, lines)
            branches = {**repository.branches, branch: commit.sha}
            self.publish(replace(repository, branches=branches, commits={**repository.commits, commit.sha: commit}))
            return commit

    def next_commit(self, head: Commit, lines: list[dict]) -> Commit:
        """Return the commit that results from a request's operations on `head`, without publishing it."""
        tree = dict(head.tree)
        for line in lines:
            self._apply(tree, line["key"], line["value"])
        _check_tree(tree)
        if "README.md" in tree and tree["README.md"] != head.tree.get("README.md"):
            read_card(self.content(tree["README.md"]).decode())
        header = header_of(lines)
        return new_commit(head.sha, header.get("summary", ""), header.get("description", ""), tree)

    def _apply(self, tree: dict[str, Entry], key: str, value: dict) -> None:
        path = value.get("path", "")
        if key == "file":
            tree[path] = self._regular_entry(path, value)
        elif key == "lfsFile":
            tree[path] = self._large_entry(path, value)
        elif key == "deletedFile":
            if tree.pop(path, None) is None:
                raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        elif key == "deletedFolder":
            inside = [name for name in tree if name.startswith(path.rstrip("/") + "/")]
            if not inside:
                raise HubError(404, f"A folder with this name doesn't exist: {path}", "EntryNotFound")
            for name in inside:
                del tree[name]
        elif key != "header":
            raise HubError(400, f"Unknown commit operation {key!r}")

    def _regular_entry(self, path: str, value: dict) -> Entry:
        try:
            content = base64.b64decode(value["content"], validate=True)
        except binascii.Error as error:
            raise HubError(400, f"{path}: content is not base64: {error}") from error
        if len(content) > REGULAR_FILE_LIMIT:
            raise HubError(400, f"{path}: {len(content)} bytes; files over {REGULAR_FILE_LIMIT} must be LFS objects")
        return Entry(self.put_regular(content), len(content))

    def _large_entry(self, path: str, value: dict) -> Entry:
        stored = self.object(value["oid"])
        if not stored.is_file():
            raise HubError(400, f"{path}: LFS pointer pointed to a file that does not exist: {value['oid']}")
        size = stored.stat().st_size
        if value.get("size", size) != size:
            raise HubError(400, f"{path}: LFS pointer says {value['size']} bytes, the object has {size}")
        return Entry(_git_hash(_pointer(value["oid"], size)), size, value["oid"])


def header_of(lines: list[dict]) -> dict:
    """Return title, description and expected parent of a commit request."""
    return next((line["value"] for line in lines if line["key"] == "header"), {})


def check_parent(head: Commit, lines: list[dict]) -> None:
    """Reject a commit request that is based on another commit than `head`."""
    expected = header_of(lines).get("parentCommit")
    if expected and not head.sha.startswith(expected):
        raise HubError(412, "A commit has happened since. Please refresh and try again.")


def read_card(text: str) -> dict:
    """Return the YAML block at the top of a README.md as a dictionary, {} without one.

    Permissive: it must parse and be a mapping. The Hub also checks licences, model-index and more.
    """
    if not text.startswith("---\n"):
        return {}
    block, closed, _ = text[4:].partition("\n---")
    if not closed:
        return {}
    try:
        card = yaml.safe_load(block) or {}
    except yaml.YAMLError as error:
        raise HubError(400, f"Invalid metadata in README.md: YAML does not parse: {error}") from error
    if not isinstance(card, dict):
        raise HubError(400, f"Invalid metadata in README.md: expected a mapping, found {type(card).__name__}")
    return card


def upload_mode(path: str, size: int, sample: bytes) -> str:
    """Return "lfs" or "regular" by name, size and NUL bytes at the start, much as the Hub decides."""
    large = path.endswith(tuple(LFS_SUFFIXES)) or size > REGULAR_FILE_LIMIT or b"\0" in sample
    return "lfs" if large else "regular"


def _check_tree(tree: dict[str, Entry]) -> None:
    for path in tree:
        parts = path.split("/")
        if not path or not set(parts).isdisjoint({"", ".", "..", ".git"}):
            raise HubError(400, f"Invalid path in commit: {path!r}")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in tree:
                raise HubError(400, f"{path}: {'/'.join(parts[:depth])} is a file, not a folder")


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())


def new_commit(parent: str | None, title: str, message: str, tree: dict[str, Entry]) -> Commit:
    # A unique number distinguishes equal commits, like the dates in git.
    sha = hashlib.sha1(f"{parent} {title} {sorted(tree)} {uuid.uuid4().hex}".encode()).hexdigest()
    return Commit(sha, parent, title, message, now(), tree)


def _read_repository(fields: dict) -> Repository:
    commits = {
        sha: Commit(**{**commit, "tree": {path: Entry(**entry) for path, entry in commit["tree"].items()}})
        for sha, commit in fields["commits"].items()
    }
    requests = tuple(PullRequest(**{**line, "events": tuple(line["events"])}) for line in fields["pull_requests"])
    return Repository(**{**fields, "commits": commits, "pull_requests": requests})
