"""Records from a local git repository's history: one per small commit that changes one Go function.

    git log --raw --numstat --> commits with one .go file and at most 40 changed lines
    git cat-file --batch    --> the file before and after --> the function that changed (`edits.py`)

Two git processes read the complete history. Lazy fetching, all transports, and programs in a repository's
configuration are disabled. Merges, test, vendored and generated files, and commits by bots are dropped and counted.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

from ...hub.licenses import LICENSE_FILES, UNKNOWN_LICENSE, license_of_text
from .edits import MAX_CHANGED_LINES, Edit, edit_record, path_problem, without_trailers
from .sources import MAX_BYTES, Dropped, go_text


BOTS = re.compile(
    r"\[bot\]|\bbot\b|-bot\b|dependabot|renovate|greenkeeper|github-actions|gopherbot|k8s-ci-robot|mergify|snyk",
    re.IGNORECASE,
)
# Separators between commits and between fields: control characters that people do not type.
COMMIT, FIELD = "\x1e", "\x1f"
LOG = (
    "log", "--no-merges", "--full-history", "--raw", "--numstat", "-z", "--no-renames", "--no-abbrev", "--no-color",
    "--no-ext-diff", "--no-textconv", "--no-notes", "--no-show-signature", "--encoding=UTF-8",
    "--format=%x1e%H%x1f%an <%ae>%x1f%s%x1f%b%x1f",
)  # fmt: skip


@dataclass(frozen=True)
class _Commit:
    """A log entry. Each file is (status, old blob, new blob, path), and `changed` counts changed lines."""

    sha: str
    author: str
    subject: str
    body: str
    files: list[tuple[str, str, str, str]]
    changed: int


def commit_records(repository: str | Path, dropped: Dropped | None = None) -> Iterator[dict[str, Any]]:
    """Yield records from the commits in a local repository, newest first.

    A record has the commit's subject and body as the problem, the old function as the context, and the repository's
    name as the group. `dropped` counts commits without a record.

    Raises:
        FileNotFoundError: the folder does not exist, or git is not installed.
        ValueError: it is not a repository, has no commits, or is a shallow clone.
    """
    repository, dropped = Path(repository).expanduser(), dropped or Dropped()
    name, license = _open(repository), _license(repository)
    with _blobs(repository) as blobs:
        for commit in _log(repository, dropped):
            edit = _edit(commit, blobs, name, license, dropped)
            if record := edit and edit_record(edit, dropped):
                yield record


def repository_name(repository: str | Path) -> str:
    """Return owner/name of the repository's origin, or the folder name if there is no origin."""
    answer = _git(Path(repository), "config", "--get", "remote.origin.url")
    match = re.search(r"([\w.~-]+/)?([\w.-]+?)(\.git)?/*$", answer.stdout.strip())
    if answer.returncode == 0 and match and "/" in answer.stdout and not answer.stdout.startswith(("/", ".")):
        return f"{match[1] or ''}{match[2]}"
    path = Path(repository).expanduser().resolve()
    return path.name.removesuffix(".git") or path.parent.name


def _open(repository: Path) -> str:
    """Check that the repository has a readable history, and return its name."""
    if which("git") is None:
        raise FileNotFoundError(
            "the git program is not installed; it is needed to read the history (Debian: apt-get install git)"
        )
    if not repository.is_dir():
        raise FileNotFoundError(f"{repository} does not exist; expected the folder of a git repository")
    answer = _git(repository, "rev-parse", "--is-shallow-repository")
    if answer.returncode:
        raise ValueError(f"{repository} is not a readable git repository; git reports: {answer.stderr.strip()}")
    if answer.stdout.strip() == "true":
        raise ValueError(f"{repository} is a shallow clone without its history; run `git fetch --unshallow`")
    if _git(repository, "rev-parse", "--verify", "-q", "HEAD^{commit}").returncode:
        raise ValueError(f"{repository} has no commits; there is nothing to read")
    return repository_name(repository)


def _license(repository: Path) -> str:
    """Return the SPDX name of the license in the repository's top folder."""
    names = _git(repository, "ls-tree", "--name-only", "-z", "HEAD").stdout.split("\0")
    for name in LICENSE_FILES:
        if name in names:
            return license_of_text(_git(repository, "cat-file", "-p", f"HEAD:{name}").stdout)
    return UNKNOWN_LICENSE


def _edit(commit: _Commit, blobs: subprocess.Popen, name: str, license: str, dropped: Dropped) -> Edit | None:
    reason = _commit_problem(commit)
    if reason:
        dropped.add(reason, commit.sha)
        return None
    _, old, new, path = commit.files[0]
    before, after = _text(blobs, old), _text(blobs, new)
    if before is None or after is None:
        dropped.add(f"missing, not UTF-8 or more than {MAX_BYTES} bytes", commit.sha)
        return None
    return Edit(
        id=f"git:{name}@{commit.sha[:12]}",
        source="git",
        license=license,
        group=name,
        path=path,
        before=before,
        after=after,
        title=commit.subject.strip(),
        body=without_trailers(commit.body),
    )


def _commit_problem(commit: _Commit) -> str | None:
    if len(commit.files) != 1:
        return "more than one .go file"
    status, _, _, path = commit.files[0]
    if status != "M":
        return "file added, deleted or of another kind"
    if BOTS.search(commit.author):
        return "bot"
    if commit.changed > MAX_CHANGED_LINES:
        return f"more than {MAX_CHANGED_LINES} changed lines"
    return path_problem(path)


# ---- git ----


def _environment(repository: Path) -> dict[str, str]:
    return {
        **os.environ,
        # Do not fetch what a partial clone lacks, and do not let its settings start programs or use the network.
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        # Do not fall back to a repository that happens to contain this folder.
        "GIT_CEILING_DIRECTORIES": str(repository.resolve().parent),
        "LC_ALL": "C",
    }


def _command(repository: Path, *arguments: str) -> list[str]:
    return ["git", "--no-pager", "-c", "core.fsmonitor=false", "-C", str(repository), *arguments]


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        _command(repository, *arguments),
        capture_output=True, text=True, encoding="utf-8", errors="replace", env=_environment(repository),
    )  # fmt: skip


def _log(repository: Path, dropped: Dropped) -> Iterator[_Commit]:
    """Yield the commits that touch a .go file."""
    answer = _git(repository, *LOG, "HEAD", "--", "*.go")
    if answer.returncode:
        raise ValueError(f"git log failed in {repository}: {answer.stderr.strip()}")
    for entry in answer.stdout.split(COMMIT)[1:]:
        commit = _parse(entry)
        if commit is None:
            dropped.add("unreadable log entry", entry[:40])
        else:
            yield commit


def _parse(entry: str) -> _Commit | None:
    """Parse a log entry: `sha, author, subject, body`, then `--raw` lines with paths, then `--numstat` counts."""
    fields = entry.split(FIELD)
    if len(fields) != 5:
        return None
    files, changed = [], 0
    parts = iter(part.lstrip("\n") for part in fields[4].split("\0"))
    for part in parts:
        if part.startswith(":"):
            _, _, old, new, status = part.split(" ")
            files.append((status, old, new, next(parts, "")))
        elif part:
            added, removed, _ = part.split("\t", 2)
            # Binary files have dashes instead of counts.
            changed += int(added) + int(removed) if added != "-" else MAX_CHANGED_LINES + 1
    return _Commit(*fields[:4], files, changed)


def _blobs(repository: Path) -> subprocess.Popen:
    """Start one `git cat-file --batch` process for all blobs. The process is a context manager."""
    return subprocess.Popen(
        _command(repository, "cat-file", "--batch"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment(repository),
    )  # fmt: skip


def _text(blobs: subprocess.Popen, sha: str) -> str | None:
    """Return the text of a blob, or None if it is missing, not UTF-8 or too big."""
    blobs.stdin.write(f"{sha}\n".encode())
    blobs.stdin.flush()
    header = blobs.stdout.readline().split()
    if len(header) != 3:
        return None
    size = int(header[2])
    content = blobs.stdout.read(size + 1)[:size]
    try:
        return go_text(content.decode()) if header[1] == b"blob" and size <= MAX_BYTES else None
    except UnicodeDecodeError:
        return None
