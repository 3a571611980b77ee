"""Pull a repository at one commit with huggingface_hub, and verify every file against its digest on the Hub.

A pull into a folder first downloads into a hidden sibling and renames it at the end, so the final folder is always
complete. Repeat the command to continue an interrupted pull.
"""

import errno
import glob
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi, constants, get_token, parse_hf_uri
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from ..io.files import load_json
from ..io.model_names import is_local


TEMPORARY_ERRORS = (408, 409, 423, 425, 429)  # client errors for which a retry may succeed
PULL_RECORD = ".pulled.json"  # file that names a pulled folder's repository and commit


class HubError(OSError):
    """Error raised when a push or pull fails. The message explains the reason and what to do."""


class PullResult(NamedTuple):
    """Result of a pull: folder, commit, number of files and bytes. Every file matches its digest on the Hub."""

    path: Path
    commit: str
    files: int
    bytes: int


class HubAddress(NamedTuple):
    """Address of a model on the Hub, or of the file or folder `path` in its repository. `revision` None means main."""

    repo_id: str
    path: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo_id}/{self.path}".rstrip("/")


def hub_address(text: str, revision: str | None = None) -> HubAddress | None:
    """Parse OWNER/NAME, OWNER/NAME/FILE or the URL of either; return None for a local path.

    Raises:
        ValueError: a different host, an invalid name, two different revisions, or a revision for a local path.
    """
    is_url = "://" in text
    if not is_url and ("/" not in text.strip("/") or is_local(text)):
        if revision is not None:
            raise ValueError(f"revision={revision!r}: only valid for models on the Hub; {text} is a local path")
        return None
    uri = parse_hf_uri(text if is_url else f"hf://{text.rstrip('/')}", endpoint=constants.ENDPOINT)
    if uri.type != "model" or uri.id.count("/") != 1:
        raise ValueError(f"{text}: must be a model on the Hub; pass OWNER/NAME or OWNER/NAME/FILE")
    if None not in (revision, uri.revision) and revision != uri.revision:
        raise ValueError(f"revision={revision!r}: {text} has the revision {uri.revision!r}; pass only one of them")
    return HubAddress(uri.id, uri.path_in_repo or "", revision or uri.revision)


def pull_address(address: HubAddress) -> Path:
    """Download a folder, or a file together with its siblings, into the cache, and return the local path."""

    def choose(names: list[str]) -> list[str]:
        folder = address.path.rpartition("/")[0] if address.path in names else address.path
        return [name for name in names if name.startswith(f"{folder}/" if folder else "")]

    return pull_checkpoint(address.repo_id, revision=address.revision, choose=choose).path / address.path


def pull_checkpoint(
    repo_id: str,
    out: str | Path | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    choose: Callable[[list[str]], Iterable[str]] | None = None,
) -> PullResult:
    """Download a repository at one commit and verify every file.

    Args:
        repo_id: OWNER/NAME.
        out: new folder, or the folder from an earlier pull of the same commit, which is only verified; None for the
            cache of huggingface_hub.
        revision: branch, tag or sha; default main.
        token: Hub token; None for the token of the logged-in user.
        choose: function that selects the file names to download; None for all.

    Raises:
        ValueError: `out` has different content.
        HubError: the download failed, or a file does not match its digest.
    """
    validate_repo_id(repo_id)
    api, folder = HfApi(token=token), None if out is None else Path(out).expanduser().absolute()
    with hub_errors("pull", repo_id, revision, token):
        commit = api.model_info(repo_id, revision=revision).sha
        names = api.list_repo_files(repo_id, revision=commit)
        names = names if choose is None else list(choose(names))
        patterns = [glob.escape(name) for name in names]
        if folder is None:
            # Pass the revision by name, so that the cache can resolve it offline.
            folder = Path(api.snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
            commit = folder.name
            _verify(api, folder, repo_id, commit, names)
        elif _is_new(folder, repo_id, commit):
            incoming = folder.with_name(f".{folder.name}.incoming")
            api.snapshot_download(repo_id, revision=commit, local_dir=incoming, allow_patterns=patterns)
            for leftover in _verify(api, incoming, repo_id, commit, names):  # files from an interrupted pull
                (incoming / leftover).unlink()
            shutil.rmtree(incoming / ".cache")  # created by huggingface_hub for its metadata
            (incoming / PULL_RECORD).write_text(json.dumps({"repo_id": repo_id, "commit": commit}))
            if folder.exists():
                folder.rmdir()
            os.rename(incoming, folder)
        else:
            verify_checkpoint(folder, repo_id, revision=commit, token=token)
    return PullResult(folder, commit, len(names), sum((folder / name).stat().st_size for name in names))


def verify_checkpoint(
    folder: str | Path, repo_id: str, *, revision: str | None = None, token: str | None = None
) -> PullResult:
    """Compare a pulled folder with the digests on the Hub at a revision (default: the pulled commit).

    Raises:
        ValueError: `revision` is None and the folder was not created by a pull.
        HubError: files are missing, extra or different; the message names them.
    """
    folder = Path(folder).expanduser().absolute()
    revision = revision or _pull_record(folder).get("commit")
    if revision is None:
        raise ValueError(f"revision=None: {folder} was not created by a pull; pass the revision to compare with")
    with hub_errors("pull", repo_id, revision, token):
        api = HfApi(token=token)
        commit = api.model_info(repo_id, revision=revision).sha
        found = api.verify_repo_checksums(repo_id, revision=commit, local_dir=folder)
    wrong = {
        "differ": [each["path"] for each in found.mismatches],
        "are missing": found.missing_paths,
        "are not in the repository": [path for path in found.extra_paths if path != PULL_RECORD],
    }
    if problems := "; ".join(f"{', '.join(paths)} {problem}" for problem, paths in wrong.items() if paths):
        raise HubError(f"{folder} differs from {repo_id} at {commit}: {problems}. Pull it again into a new folder")
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file() and file.name != PULL_RECORD]
    return PullResult(folder, commit, found.checked_count, sum(sizes))


def _verify(api: HfApi, folder: Path, repo_id: str, commit: str, names: list[str]) -> list[str]:
    """Return the names of extra files. If files have a wrong digest, delete them and raise HubError."""
    found = api.verify_repo_checksums(repo_id, revision=commit, local_dir=folder)
    for each in found.mismatches:
        file = folder / each["path"]
        Path(os.path.realpath(file)).unlink()  # the cached blob, if the file is a link
        file.unlink(missing_ok=True)
    if found.mismatches:
        names = ", ".join(each["path"] for each in found.mismatches)
        raise HubError(
            f"{names} of {repo_id} at {commit}: the digest differs from that on the Hub, so the download was deleted; "
            "run the same command again"
        )
    if missing := set(names) & set(found.missing_paths):
        raise HubError(f"{', '.join(sorted(missing))} of {repo_id} at {commit}: no folder can contain such file names")
    return found.extra_paths


def _is_new(folder: Path, repo_id: str, commit: str) -> bool:
    """Return False if the folder contains this commit, True if it is empty or missing. Otherwise raise ValueError."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return True
    record = _pull_record(folder)
    if record == {"repo_id": repo_id, "commit": commit}:
        return False
    content = f"{record['repo_id']} at {record['commit']}" if record else "other files"
    raise ValueError(f"out={folder}: contains {content}; choose a new folder, or delete it")


def _pull_record(folder: Path) -> dict[str, str]:
    """Return the repository and commit of a pulled folder, or {} for other folders."""
    file = folder / PULL_RECORD
    record = load_json(file) if file.is_file() else {}
    is_ours = isinstance(record, dict) and all(isinstance(record.get(name), str) for name in ("repo_id", "commit"))
    return record if is_ours else {}


@contextmanager
def hub_errors(action: str, repo_id: str, revision: str | None = None, token: str | None = None) -> Iterator[None]:
    """Convert huggingface_hub errors in a `with` block to one-sentence `HubError`s about the push or pull."""
    try:
        yield
    except HubError:
        raise
    except (HTTPError, OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None:  # huggingface_hub wraps errors from its threads
            if message := _explained(cause, action, repo_id, revision, has_token=bool(token or get_token())):
                raise HubError(message) from error
            cause = cause.__cause__ or cause.__context__
        raise


def _explained(error: BaseException, action: str, repo_id: str, revision: str | None, has_token: bool) -> str | None:
    kept = "the Hub still has the old files" if action == "push" else "downloaded files are kept"
    again, log_in = f"{kept}. Run the same command again", "run `hf auth login`, or set HF_TOKEN"
    match error:
        case OfflineModeIsEnabled():
            return f"HF_HUB_OFFLINE is set: unset it to {action}"
        case LocalTokenNotFoundError():
            return f"this {action} needs a token: {log_in}"
        case GatedRepoError():
            return f"{repo_id} is gated: request access on its page with the account that owns your token"
        case RevisionNotFoundError():
            return f"{repo_id} has no revision {revision!r}; expected a branch, a tag or the sha of a commit"
        case RepositoryNotFoundError() if not has_token:
            return f"{repo_id} does not exist, or is private and there is no token: {log_in}"
        case RepositoryNotFoundError():
            return f"{repo_id} does not exist, or is private and your token cannot read it; check name and token"
        case HfHubHTTPError():
            status, why = error.response.status_code, error.server_message or "no reason given"
            if status >= 500 or status in TEMPORARY_ERRORS:
                return f"the Hub answered the {action} of {repo_id} with {status} ({why}); {again} in a few minutes"
            if not has_token and status in (401, 403):
                return f"the Hub requires a token for {repo_id} ({why}): {log_in}"
            verb, role = ("write to", "write") if action == "push" else ("read", "read")
            propose = ", or propose it with --create-pr (create_pr)" if "create_pr" in why else ""
            messages = {
                401: f"the Hub rejected the token ({why}), which is wrong or was revoked: {log_in}",
                403: f"your token may not {verb} {repo_id} ({why}): use a token with role {role} for it{propose}",
                404: f"the {action} of {repo_id} failed: not found on the Hub ({why}); check name and revision",
                410: f"{repo_id} or a file in it was removed from the Hub ({why}): ask its owner, or use another one",
                412: f"somebody else changed {repo_id} during the push ({why}); nothing was committed. Push again",
            }
            return messages.get(status, f"the Hub rejected the {action} of {repo_id}: {status}, {why}")
        case HTTPError():
            return f"the connection to {constants.ENDPOINT} failed ({type(error).__name__}: {error}); {again}"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            where = f" of {error.filename}" if error.filename else ""
            return f"the disk{where} is full ({error.strerror}); files are kept. Free some space and retry"
    return None
