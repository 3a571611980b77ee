"""Answers of the loopback Hub about a repository, a commit or a path: dictionaries in the Hub's own fields."""

from hub_storage import OWNER, Commit, Entry, HubError, Repository


def information(repository: Repository, commit: Commit, card: dict, blobs: bool) -> dict:
    """Describe a repository at a commit; `card` is the YAML of README.md, `blobs` adds file sizes and hashes."""
    answer = {
        "_id": "0",
        "id": repository.repo_id,
        "author": repository.repo_id.split("/")[0],
        "sha": commit.sha,
        "private": repository.private,
        "gated": False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": card.get("tags") or [],
        "createdAt": repository.created,
        "lastModified": commit.date,
        "siblings": [_sibling(path, entry, blobs) for path, entry in sorted(commit.tree.items())],
        "cardData": card,
    }
    if repository.kind == "model":
        answer |= {"modelId": repository.repo_id}
        answer |= {name: card[name] for name in ("pipeline_tag", "library_name") if name in card}
    if repository.sdk:
        answer |= {"sdk": repository.sdk}
    return answer


def listing(commit: Commit, folder: str, recursive: bool) -> list[dict]:
    """Return folders, then files in `folder` ("" is the root); the complete tree if `recursive`."""
    prefix = f"{folder}/" if folder else ""
    inside = {path: entry for path, entry in sorted(commit.tree.items()) if path.startswith(prefix)}
    if folder and not inside:
        raise HubError(404, f"{folder} does not exist", "EntryNotFound", commit.sha)
    folders = sorted({parent for path in inside for parent in _parents(path) if parent.startswith(prefix)})
    shown = [_folder(path) for path in folders] + [entry.description(path) for path, entry in inside.items()]
    return [line for line in shown if recursive or "/" not in line["path"][len(prefix) :]]


def paths_information(commit: Commit, asked: list[str]) -> list[dict]:
    """Return the requested files and folders; like the Hub, skip those that do not exist."""
    folders = {parent for path in commit.tree for parent in _parents(path)}
    files = [commit.tree[path].description(path) for path in asked if path in commit.tree]
    return files + [_folder(path) for path in asked if path in folders]


def history(repository: Repository, revision: str) -> list[dict]:
    """Return the commits of a revision, newest first."""
    return [
        {
            "id": commit.sha,
            "title": commit.title,
            "message": commit.message,
            "date": commit.date,
            "authors": [{"user": OWNER}],
        }
        for commit in repository.history(revision)
    ]


def references(repository: Repository) -> dict:
    """Return branches, tags and pull requests with their commits."""

    def lines(group: str, named: dict[str, str]) -> list[dict]:
        return [{"name": name, "ref": f"refs/{group}/{name}", "targetCommit": sha} for name, sha in named.items()]

    heads, tags = lines("heads", repository.branches), lines("tags", repository.tags)
    requests = [
        {"name": request.reference, "ref": request.reference, "targetCommit": request.head}
        for request in repository.pull_requests
    ]
    return {"branches": heads, "tags": tags, "converts": [], "pullRequests": requests}


def _sibling(path: str, entry: Entry, blobs: bool) -> dict:
    if not blobs:
        return {"rfilename": path}
    description = entry.description(path)
    lfs = {"lfs": {**description["lfs"], "sha256": entry.sha256}} if entry.sha256 else {}
    return {"rfilename": path, "size": entry.size, "blobId": entry.oid, **lfs}


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _folder(path: str) -> dict:
    return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
