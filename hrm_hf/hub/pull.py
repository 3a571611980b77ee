"""Pull a repository at one commit by huggingface_hub, and verify every file against the digests of the Hub.

A pull into a folder downloads into a hidden sibling and renames it at the end, so the final name always stands for a
complete model. The same command continues an interrupted pull.
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

from ..io.model_names import is_below_here


WORTH_REPEATING = (408, 409, 423, 425, 429)  # client errors that may pass by themselves
PULL_RECORD = ".pulled.json"  # which commit of which repository a folder holds


class HubError(OSError):
    """A push or pull that failed; the message says why and what to do."""


class PullResult(NamedTuple):
    """A folder that holds a repository at `commit`; each of its files matches the digest of the Hub."""

    path: Path
    commit: str
    files: int
    bytes: int


class HubAddress(NamedTuple):
    """A model on the Hub; `path` is a file or folder in it ("" for all), and `revision` is None for main."""

    repo_id: str
    path: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo_id}/{self.path}".rstrip("/")


def hub_address(text: str, revision: str | None = None) -> HubAddress | None:
    """Parse OWNER/NAME, OWNER/NAME/FILE or the URL of either; return None for a path on this machine.

    Raises:
        ValueError: another host, no valid name, two revisions, or a revision of a path.
    """
    is_url = "://" in text
    if not is_url and ("/" not in text.strip("/") or is_below_here(text)):
        if revision is not None:
            raise ValueError(f"revision={revision!r}: only for models on the Hub; {text} is a path")
        return None
    uri = parse_hf_uri(text if is_url else f"hf://{text.rstrip('/')}", endpoint=constants.ENDPOINT)
    if uri.type != "model" or uri.id.count("/") != 1:
        raise ValueError(f"{text}: must be a model on the Hub; give OWNER/NAME or OWNER/NAME/FILE")
    if None not in (revision, uri.revision) and revision != uri.revision:
        raise ValueError(f"revision={revision!r}: {text} names the revision {uri.revision!r}; give one of them")
    return HubAddress(uri.id, uri.path_in_repo or "", revision or uri.revision)


def pull_address(address: HubAddress) -> Path:
    """Download a file with its siblings, or a folder, into the cache, and return its path."""

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
        out: new folder, or the folder of an earlier pull of the same commit, which is only verified; the cache of
            huggingface_hub if None.
        revision: branch, tag or sha; main by default.
        token: the one you are logged in with if None.
        choose: function from the names of all files to those to download; all if None.

    Raises:
        ValueError: `out` holds something else.
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
            # With the revision's name, so that the cache knows its commit offline.
            folder = Path(api.snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
            commit = folder.name
            _verify(api, folder, repo_id, commit, names)
        elif _is_new(folder, repo_id, commit):
            incoming = folder.with_name(f".{folder.name}.incoming")
            api.snapshot_download(repo_id, revision=commit, local_dir=incoming, allow_patterns=patterns)
            for left in _verify(api, incoming, repo_id, commit, names):  # by an interrupted pull of another commit
                (incoming / left).unlink()
            shutil.rmtree(incoming / ".cache")  # notes of huggingface_hub
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
    """Compare a pulled folder with the digests of the Hub at a revision, by default the pulled one.

    Raises:
        ValueError: no revision is given, and the folder was not made by a pull.
        HubError: files are missing, extra, or differ; the message names them.
    """
    folder = Path(folder).expanduser().absolute()
    revision = revision or _pull_record(folder).get("commit")
    if revision is None:
        raise ValueError(f"revision=None: {folder} was not made by a pull; give the revision to compare with")
    with hub_errors("pull", repo_id, revision, token):
        api = HfApi(token=token)
        commit = api.model_info(repo_id, revision=revision).sha
        found = api.verify_repo_checksums(repo_id, revision=commit, local_dir=folder)
    wrong = {
        "differ": [each["path"] for each in found.mismatches],
        "are missing": found.missing_paths,
        "are not in the repository": [path for path in found.extra_paths if path != PULL_RECORD],
    }
    if said := "; ".join(f"{', '.join(paths)} {words}" for words, paths in wrong.items() if paths):
        raise HubError(f"{folder} is not {repo_id} at {commit}: {said}. Pull it again into a new folder")
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file() and file.name != PULL_RECORD]
    return PullResult(folder, commit, found.checked_count, sum(sizes))


def _verify(api: HfApi, folder: Path, repo_id: str, commit: str, names: list[str]) -> list[str]:
    """Delete files that do not match their digests and raise HubError; return files of other commits."""
    found = api.verify_repo_checksums(repo_id, revision=commit, local_dir=folder)
    for each in found.mismatches:
        file = folder / each["path"]
        Path(os.path.realpath(file)).unlink()  # in the cache, the blob that the file is a link to
        file.unlink(missing_ok=True)
    if found.mismatches:
        names = ", ".join(each["path"] for each in found.mismatches)
        raise HubError(
            f"{names} of {repo_id} at {commit}: does not match the digest of the Hub and was deleted; run the same "
            "command again"
        )
    if missing := set(names) & set(found.missing_paths):
        raise HubError(f"{', '.join(sorted(missing))} of {repo_id} at {commit}: cannot be kept in a folder")
    return found.extra_paths


def _is_new(folder: Path, repo_id: str, commit: str) -> bool:
    """Return False for the folder of an earlier pull of this commit. Raise ValueError for any other content."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return True
    record = _pull_record(folder)
    if record == {"repo_id": repo_id, "commit": commit}:
        return False
    held = f"{record['repo_id']} at {record['commit']}" if record else "other files"
    raise ValueError(f"out={folder}: holds {held}; choose a new folder, or delete it")


def _pull_record(folder: Path) -> dict[str, str]:
    """Return repository and commit of a pulled folder; {} for another one."""
    file = folder / PULL_RECORD
    return json.loads(file.read_text()) if file.is_file() else {}


@contextmanager
def hub_errors(action: str, repo_id: str, revision: str | None = None, token: str | None = None) -> Iterator[None]:
    """Turn errors of huggingface_hub inside the block into a `HubError` of one sentence; `action` is push or pull."""
    try:
        yield
    except HubError:
        raise
    except (HTTPError, OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None:  # the library wraps the errors of its threads
            if said := _explained(cause, action, repo_id, revision, has_token=bool(token or get_token())):
                raise HubError(said) from error
            cause = cause.__cause__ or cause.__context__
        raise


def _explained(error: BaseException, action: str, repo_id: str, revision: str | None, has_token: bool) -> str | None:
    kept = "readers still see the old files" if action == "push" else "what was downloaded is kept"
    again, log_in = f"{kept}. Run the same command again", "`hf auth login`, or set HF_TOKEN"
    match error:
        case OfflineModeIsEnabled():
            return f"HF_HUB_OFFLINE is set: unset it to {action}"
        case LocalTokenNotFoundError():
            return f"there is no token, and this {action} needs one: {log_in}"
        case GatedRepoError():
            return f"{repo_id} is gated: ask for access on its page, with the account of your token"
        case RevisionNotFoundError():
            return f"{repo_id} has no revision {revision!r}; expected a branch, a tag or the sha of a commit"
        case RepositoryNotFoundError() if not has_token:
            return f"{repo_id} does not exist, or is private and there is no token: {log_in}"
        case RepositoryNotFoundError():
            return f"{repo_id} does not exist, or is private and your token may not read it; check name and token"
        case HfHubHTTPError():
            status, why = error.response.status_code, error.server_message or "no reason given"
            if status >= 500 or status in WORTH_REPEATING:
                return f"the Hub answered the {action} of {repo_id} with {status} ({why}); {again} in a few minutes"
            if not has_token and status in (401, 403):
                return f"the Hub wants a token for {repo_id} ({why}): {log_in}"
            verb, role = ("write to", "write") if action == "push" else ("read", "read")
            propose = ", or propose it with --create-pr (create_pr)" if "create_pr" in why else ""
            said = {
                401: f"the Hub rejected the token ({why}): it is wrong or was revoked. {log_in}",
                403: f"your token may not {verb} {repo_id} ({why}): use one with the role {role} and access{propose}",
                404: f"the Hub did not find what the {action} of {repo_id} needs ({why}): check name and revision",
                410: f"{repo_id} or a file of it was removed from the Hub ({why}): ask its owner, or use another",
                412: f"somebody else has changed {repo_id} during the push ({why}); nothing was committed. Push again",
            }
            return said.get(status, f"the Hub rejected the {action} of {repo_id} with {status}: {why}; fix this first")
        case HTTPError():
            return f"the connection to {constants.ENDPOINT} failed ({type(error).__name__}: {error}); {again}"
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            where = f" of {error.filename}" if error.filename else ""
            return f"the disk{where} is full ({error.strerror}); what is there is kept. Free some space and run again"
    return None
