"""Pull requests of the loopback Hub: their states, changes and JSON.

A pull request is a separate line of commits, `refs/pr/N`, that starts from a commit of main in the same repository. As
on the Hub, merging applies its changed files to the current main in one new commit. One created with a commit is open;
one created empty, as by `hf upload --create-pr`, is a draft until it is opened.

Not supported: discussions without a commit, comments, branches other than main, and diffs as text.
"""

import uuid
from collections.abc import Iterator
from dataclasses import replace

from hub_storage import (
    Commit,
    Entry,
    HubError,
    PullRequest,
    Repository,
    Storage,
    check_parent,
    header_of,
    new_commit,
    now,
)


ENDED = ("closed", "merged")


def find(repository: Repository, number: str | int) -> PullRequest:
    """Return the pull request with this number."""
    if not str(number).isdecimal() or not 0 < int(number) <= len(repository.pull_requests):
        raise HubError(404, f"Discussion {number} does not exist")
    return repository.pull_requests[int(number) - 1]


def propose(storage: Storage, kind: str, repo_id: str, author: str, lines: list[dict]) -> PullRequest:
    """Open a pull request with a commit, which starts from the request's parent or from main."""

    def change(repository: Repository) -> Repository:
        base = repository.commit(header_of(lines).get("parentCommit") or "main")
        return opened(repository, author, base, storage.next_commit(base, lines))

    return storage.change(kind, repo_id, change).pull_requests[-1]


def add_commit(storage: Storage, kind: str, repo_id: str, number: str, author: str, lines: list[dict]) -> Commit:
    """Add a commit to a pull request."""

    def change(repository: Repository) -> Repository:
        request = find(repository, number)
        head = repository.commits[request.head]
        check_parent(head, lines)
        commit = storage.next_commit(head, lines)
        repository = replace(repository, commits={**repository.commits, commit.sha: commit})
        request = _with_event(request, author, "commit", subject=commit.title, oid=commit.sha)
        return _with(repository, replace(request, head=commit.sha))

    changed = storage.change(kind, repo_id, change)
    return changed.commits[find(changed, number).head]


def opened(repository: Repository, author: str, base: Commit, first: Commit) -> Repository:
    """Return the repository with a new pull request, which has the title of its first commit."""
    repository = replace(repository, commits={**repository.commits, first.sha: first})
    return _with_another(repository, author, first.title, base.sha, first.sha, "open")


def draft(repository: Repository, author: str, title: str) -> Repository:
    """Return the repository with a new pull request without commits."""
    main = repository.branches["main"]
    return _with_another(repository, author, title, main, main, "draft")


def _with_another(repository: Repository, author: str, title: str, base: str, head: str, status: str) -> Repository:
    number = len(repository.pull_requests) + 1
    request = PullRequest(number, title, author, now(), base, head, status)
    if head != base:
        request = _with_event(request, author, "commit", subject=title, oid=head)
    return replace(repository, pull_requests=(*repository.pull_requests, request))


def with_status(repository: Repository, number: str, author: str, status: str) -> Repository:
    """Return the repository with a pull request closed or (re)opened."""
    request = find(repository, number)
    if status not in ("open", "closed"):
        raise HubError(400, f"Invalid status {status!r}: expected open or closed")
    if request.status == "merged":
        raise HubError(400, "A merged pull request stays merged")
    request = _with_event(request, author, "status-change", status=status)
    return _with(repository, replace(request, status=status))


def merged(repository: Repository, number: str, author: str) -> Repository:
    """Return the repository with a pull request merged as one commit on main."""
    request = find(repository, number)
    if request.status != "open":
        raise HubError(400, f"This pull request cannot be merged: it is {request.status}")
    if names := conflicts(repository, request):
        raise HubError(409, f"This pull request has conflicts: {', '.join(names)}")
    tree = {path: entry for path, entry in _merged_entries(repository, request) if entry}
    commit = new_commit(repository.branches["main"], f"{request.title} (#{request.number})", "", tree)
    request = _with_event(request, author, "status-change", status="merged")
    commits = {**repository.commits, commit.sha: commit}
    repository = replace(repository, commits=commits, branches={**repository.branches, "main": commit.sha})
    return _with(repository, replace(request, status="merged", merged_as=commit.sha))


def conflicts(repository: Repository, request: PullRequest) -> list[str]:
    """Return the files that the pull request and main changed differently."""
    return [path for path, base, head, main in _three(repository, request) if len({base, head, main}) == 3]


def summary(repository: Repository, request: PullRequest) -> dict:
    """Describe a pull request as in the list of discussions."""
    return {
        "num": request.number,
        "title": request.title,
        "status": request.status,
        "author": {"name": request.author},
        "createdAt": request.created,
        "isPullRequest": True,
        "repo": {"name": repository.repo_id, "type": repository.kind},
    }


def details(repository: Repository, request: PullRequest) -> dict:
    """Describe a pull request with its events."""
    merged_as = {"mergeCommitId": request.merged_as} if request.merged_as else {}
    return {
        **summary(repository, request),
        "events": list(request.events),
        "changes": {"base": "refs/heads/main", **merged_as},
        "filesWithConflicts": [] if request.status == "merged" else conflicts(repository, request),
    }


def listing(repository: Repository, query: dict[str, list[str]]) -> dict:
    """List the newest first, filtered by author, type and status, on a single page."""

    def fits(request: PullRequest) -> bool:
        status = "closed" if request.status in ENDED else "open"
        found = {"author": request.author, "type": "pull_request", "status": status}
        return all(query.get(name, ["all"])[0] in (value, "all") for name, value in found.items())

    shown = [summary(repository, request) for request in reversed(repository.pull_requests) if fits(request)]
    return {"discussions": shown, "count": len(shown), "start": 0}


def _three(
    repository: Repository, request: PullRequest
) -> Iterator[tuple[str, Entry | None, Entry | None, Entry | None]]:
    """Yield each path with its entry at the pull request's base, at its head, and on main."""
    base, head, main = (repository.commit(name).tree for name in (request.base, request.head, "main"))
    for path in sorted({*base, *head, *main}):
        yield path, base.get(path), head.get(path), main.get(path)


def _merged_entries(repository: Repository, request: PullRequest) -> Iterator[tuple[str, Entry | None]]:
    for path, base, head, main in _three(repository, request):
        yield path, main if head == base else head


def _with(repository: Repository, request: PullRequest) -> Repository:
    requests = tuple(request if old.number == request.number else old for old in repository.pull_requests)
    return replace(repository, pull_requests=requests)


def _with_event(request: PullRequest, author: str, kind: str, **data) -> PullRequest:
    event = {"id": uuid.uuid4().hex, "type": kind, "author": {"name": author}, "createdAt": now(), "data": data}
    return replace(request, events=(*request.events, event))
