"""Push and pull: whole checkpoints to the Hub and back, and Spaces.

A push is one commit, so that readers see the old model or the new one; with `create_pr` the commit is a pull request,
and main stays until somebody merges it. A pull asks which commit a revision is, fetches that commit, compares every
file with the digest that the Hub states, and only then makes a folder a model; stopped in the middle, it goes on where
it stopped. What goes into a checkpoint is decided in `checkpoint_contents.py`.

Left out: bytes are moved by huggingface_hub, with its retries and progress bars. `model.push_to_hub` and
`Trainer(push_to_hub=True)` are in `models/checkpoint_code.py` and `hub_training.py`.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    constants,
    get_token,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.hf_api import ModelInfo, RepoFile, SpaceInfo
from huggingface_hub.utils import WeakFileLock, build_hf_headers, validate_repo_id

from .cards import CARD_FILE
from .checkpoint_contents import CONFIG, SECRETS_FILES, Contents, checkpoint_contents, refuse_secrets, stale_weights
from .hub_errors import HubError, hub_errors


PULL_RECORD = ".pulled.json"  # which commit of which repository a folder holds
BLOCK = 2**20  # bytes hashed at a time
PULL_REQUEST = "refs/pr/"  # a revision: the newest commit of a pull request
SPACE_IGNORED = ("__pycache__", ".git", ".cache", ".ipynb_checkpoints")


@dataclass
class PushResult:
    """A commit: address of the repository or pull request, sha, names and bytes of the files, what to know of it.

    `revision` names the branch or pull request that has the commit: main, refs/pr/1, ...
    """

    url: str
    commit: str
    files: list[str]
    bytes: int
    notes: list[str]
    revision: str = "main"


@dataclass
class PullResult:
    """A folder that holds a repository at `commit`; every one of its files agrees with the Hub's digest."""

    path: Path
    commit: str
    files: int
    bytes: int


# ---- push ----


def push_checkpoint(
    folder: str | Path,
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    create_pr: bool = False,
    license: str | None = None,
    with_training_state: bool = False,
    include: Iterable[str] = (),
) -> PushResult:
    """Uploads a whole checkpoint in one commit; the folder itself is not changed.

    Args:
        folder: of a saved model, a finished run or a PEFT adapter.
        repo_id: OWNER/NAME; the repository is made if there is none.
        token: that you are logged in with if None.
        private: of a new repository; the owner's default if None.
        revision: branch, made if there is none, or refs/pr/N, a pull request that is open; main by default.
        message: of the commit, and so the title of a pull request.
        create_pr: propose the commit as a new pull request. Needs a repository, but no right to write to it.
        license, with_training_state, include: see `checkpoint_contents`.

    Raises:
        FileNotFoundError, ValueError: the folder is no whole checkpoint, or `repo_id` no name; nothing was uploaded.
        HubError: the Hub refused, or could not be reached. Nothing of an unfinished push is seen by readers.
    """
    check_push_target(repo_id, revision, create_pr)
    contents = checkpoint_contents(folder, repo_id, license, with_training_state, include)
    message = message or f"Upload {Path(folder).resolve().name} with hrm_hf"
    options = {"private": private, "revision": revision, "create_pr": create_pr}
    return commit_contents(contents, repo_id, message, token, **options)


def push_space(
    folder: str | Path,
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    create_pr: bool = False,
) -> PushResult:
    """Uploads the folder of a Gradio Space (see `hrm_hf.app.space.write_space`) in one commit.

    Arguments as in `push_checkpoint`.

    Raises:
        ValueError: README.md does not say `sdk: gradio`, or its app_file is missing.
        FileNotFoundError, HubError: as in `push_checkpoint`.
    """
    check_push_target(repo_id, revision, create_pr)
    contents = space_contents(folder)
    message = message or "Upload the demo with hrm_hf"
    options = {"private": private, "revision": revision, "create_pr": create_pr}
    return commit_contents(contents, repo_id, message, token, "space", **options)


def space_contents(folder: str | Path) -> Contents:
    """The files of a Space's folder. Raises as `push_space`."""
    folder = Path(folder)
    if not (folder / CARD_FILE).exists():
        raise FileNotFoundError(f"{folder} has no {CARD_FILE}; expected the folder of a Space")
    card = ModelCard((folder / CARD_FILE).read_text(encoding="utf-8"), ignore_metadata_errors=False).data.to_dict()
    if card.get("sdk") != "gradio":
        raise ValueError(f"{folder / CARD_FILE}: sdk is {card.get('sdk')!r}; a Space of Gradio says sdk: gradio")
    app_file = card.get("app_file", "app.py")
    if not (folder / app_file).exists():
        raise ValueError(f"{folder} has no {app_file}, which its {CARD_FILE} names as the program to run")
    contents = Contents()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder)
        if set(name.parts) & set(SPACE_IGNORED):
            contents.left_out[f"{name.parts[0]}/"] = "made by programs"
        elif file.name in SECRETS_FILES:
            contents.left_out[name.as_posix()] = "may hold a secret; a Space has its own settings for those"
        else:
            contents.files[name.as_posix()] = file
    refuse_secrets(contents)
    return contents


def check_push_target(repo_id: str, revision: str | None, create_pr: bool) -> None:
    """Raises ValueError for a name that is not OWNER/NAME, and where a pull request cannot start from the revision."""
    validate_repo_id(repo_id)
    if repo_id.count("/") != 1:
        raise ValueError(f"{repo_id!r} is no name of a repository; expected OWNER/NAME")
    if create_pr and (revision or "").startswith(PULL_REQUEST):
        raise ValueError(f"revision={revision!r} is a pull request; to add a commit to it, leave create_pr out")
    if create_pr and revision not in (None, "main"):
        raise ValueError(f"revision={revision!r}: a pull request starts from main; leave the revision out")


def commit_contents(
    contents: Contents,
    repo_id: str,
    message: str,
    token: str | None = None,
    repo_type: str = "model",
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> PushResult:
    """One commit with all of `contents`, which also deletes weights that would be read instead. See the callers."""
    if not (token or get_token()):
        raise HubError("there is no token, and a push needs one: `hf auth login`, or set HF_TOKEN")
    api = HfApi(token=token)
    options = {"repo_id": repo_id, "repo_type": repo_type}
    proposed = create_pr or (revision or "").startswith(PULL_REQUEST)
    with hub_errors("push", repo_id, revision, token):
        if not proposed:
            _make_target(api, options, private, revision)
        head = _head(api, options, revision, proposed)
        commit = api.create_commit(
            **options, operations=_operations(contents, head), commit_message=message, revision=revision,
            create_pr=create_pr, parent_commit=head.sha,
        )  # fmt: skip
    revision = commit.pr_revision or revision or "main"
    url, notes = f"{api.endpoint}/{'spaces/' if repo_type == 'space' else ''}{repo_id}", list(contents.notes)
    if revision.startswith(PULL_REQUEST):
        number = revision.removeprefix(PULL_REQUEST)
        url = f"{url}/discussions/{number}"
        notes.append(_how_to_try(number, repo_id, repo_type))
    elif create_pr:
        notes.append("nothing differs from main, so no pull request was opened")
    return PushResult(url, commit.oid, sorted(contents.files), sum(contents.sizes.values()), notes, revision)


def _make_target(api: HfApi, options: dict, private: bool | None, revision: str | None) -> None:
    """Makes the repository and the branch where there are none."""
    sdk = "gradio" if options["repo_type"] == "space" else None
    api.create_repo(**options, private=private, exist_ok=True, space_sdk=sdk)
    if revision not in (None, "main"):
        api.create_branch(**options, branch=revision, exist_ok=True)


def _head(api: HfApi, options: dict, revision: str | None, proposed: bool) -> ModelInfo | SpaceInfo:
    """The commit that a push starts from. HubError where a pull request cannot be, or has ended."""
    try:
        head = api.repo_info(**options, revision=revision)
    except RepositoryNotFoundError as error:
        if not proposed:
            raise
        raise HubError(
            f"{options['repo_id']} does not exist, or your token may not read it, and a pull request needs a "
            "repository: check the name and the token, or push without --create-pr (create_pr) to make it"
        ) from error
    if revision and revision.startswith(PULL_REQUEST):
        number = int(revision.removeprefix(PULL_REQUEST))
        status = api.get_discussion_details(options["repo_id"], number, repo_type=options["repo_type"]).status
        if status in ("closed", "merged"):
            raise HubError(
                f"pull request {number} of {options['repo_id']} is {status}, so nobody would see the commit; open a "
                "new one with --create-pr (create_pr)"
            )
    return head


def _operations(contents: Contents, head: ModelInfo | SpaceInfo) -> list[CommitOperationAdd | CommitOperationDelete]:
    """All files of `contents`, and for a model the deletion of stale weights that `head` has."""
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(name, source if isinstance(source, bytes) else str(source))
        for name, source in sorted(contents.files.items())
    ]
    if isinstance(head, ModelInfo):
        there = [file.rfilename for file in head.siblings or []]
        operations += [CommitOperationDelete(name) for name in stale_weights(there, contents.files)]
    return operations


def _how_to_try(number: str, repo_id: str, repo_type: str) -> str:
    """What to do with a pull request: see it, add to it, merge it."""
    space = "--repo-type space " if repo_type == "space" else ""
    pull = f"hf download {space}{repo_id}" if space else f"hrm-hf pull {repo_id}"
    revision = f"--revision {PULL_REQUEST}{number}"
    return (
        f"pull request {number}: main stays as it is until it is merged. See it with `{pull} {revision}`, push more "
        f"to it with {revision}, merge it on its page or with `hf discussions merge {space}{repo_id} {number}`"
    )


# ---- pull ----


def pull_checkpoint(
    repo_id: str, out: str | Path | None = None, *, revision: str | None = None, token: str | None = None
) -> PullResult:
    """Downloads a repository at one commit and compares every file with the Hub's digest.

    Args:
        repo_id: OWNER/NAME.
        out: folder to make; the cache of huggingface_hub if None. Until everything is there and right, the files are
            in a hidden folder beside it, from which the same call goes on after an interruption. A folder of an
            earlier pull of the repository is brought to the new commit; files of your own in it stay.
        revision: branch, tag or sha; main by default.
        token: that you are logged in with if None.

    Raises:
        ValueError: `out` holds files that were not pulled from `repo_id`.
        HubError: the Hub refused or could not be reached, the disk is too small, or a file does not agree with its
            digest.
    """
    validate_repo_id(repo_id)
    api = HfApi(token=token)
    with hub_errors("pull", repo_id, revision, token):
        commit = api.model_info(repo_id, revision=revision).sha
        tree = api.list_repo_tree(repo_id, revision=commit, recursive=True)
        entries = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
        total = sum(entry.size for entry in entries.values())
        if strange := [path for path in entries if Path(path).is_absolute() or ".." in Path(path).parts]:
            raise HubError(f"{repo_id} names files outside of its folder ({strange[0]}): it is not to be trusted")
        if out is None:
            path = _pull_into_cache(api, repo_id, revision, commit, entries)
            return PullResult(path, path.name, len(entries), total)
        folder = Path(out).expanduser().absolute()
        _pull_into_folder(folder, repo_id, commit, entries, api)
        return PullResult(folder, commit, len(entries), total)


def _pull_into_cache(
    api: HfApi, repo_id: str, revision: str | None, commit: str, entries: dict[str, RepoFile]
) -> Path:
    cache = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo_id, repo_type="model"))
    absent = [e for e in entries.values() if not (cache / "blobs" / (e.lfs.sha256 if e.lfs else e.blob_id)).exists()]
    _check_space(Path(constants.HF_HUB_CACHE), sum(entry.size for entry in absent))
    # The name of the branch, not the commit: the library then notes where the branch was, and finds it offline.
    path = Path(snapshot_download(repo_id, revision=revision, token=api.token))
    found = api.verify_repo_checksums(repo_id, revision=path.name)
    if found.mismatches:
        names = ", ".join(found_file["path"] for found_file in found.mismatches)
        raise HubError(f"{path}: {names} not as the Hub's digest says; delete {cache} and pull again")
    return path


def _pull_into_folder(folder: Path, repo_id: str, commit: str, entries: dict[str, RepoFile], api: HfApi) -> None:
    incoming = folder.with_name(f".{folder.name}.incoming")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(folder.with_name(f".{folder.name}.lock")):
        record = _pull_record(folder, repo_id)
        if record and record["commit"] == commit and all(_agrees(folder / name, e) for name, e in entries.items()):
            return
        incoming.mkdir(exist_ok=True)
        _check_space(incoming, sum(max(0, e.size - _present(incoming, folder, e)) for e in entries.values()))
        for entry in entries.values():
            _fetch(entry, incoming, folder, repo_id, commit, api)
        content = {"repo_id": repo_id, "commit": commit, "files": sorted(entries)}
        (incoming / PULL_RECORD).write_text(json.dumps(content, indent=1))
        _install(incoming, folder, entries, record)
    folder.with_name(f".{folder.name}.lock").unlink(missing_ok=True)


def _pull_record(folder: Path, repo_id: str) -> dict | None:
    """What the folder says of its last pull, None for a new or empty one. ValueError if it is anything else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    file = folder / PULL_RECORD
    record = json.loads(file.read_text()) if file.exists() else {}
    if record.get("repo_id") != repo_id:
        of = f"a pull of {record['repo_id']}" if record else "files that no pull has put there"
        raise ValueError(f"{folder} holds {of}; choose a new folder, or empty this one")
    return record


def _present(incoming: Path, folder: Path, entry: RepoFile) -> int:
    """Bytes of a file that an interrupted pull has fetched, all of them if it is complete."""
    places = (incoming / entry.path, folder / entry.path, _part(incoming, entry))
    return max(place.stat().st_size if place.exists() else 0 for place in places)


def _part(incoming: Path, entry: RepoFile) -> Path:
    """Where an unfinished download is kept: named by its digest, so that bytes of two commits never mix."""
    return incoming / f"{entry.path}.{entry.lfs.sha256[:16] if entry.lfs else entry.blob_id[:16]}.part"


def _fetch(entry: RepoFile, incoming: Path, folder: Path, repo_id: str, commit: str, api: HfApi) -> None:
    """Puts a file into `incoming`: the one there, that of an earlier pull, the rest of a part, or all of it anew."""
    target, part = incoming / entry.path, _part(incoming, entry)
    if _agrees(target, entry):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if _agrees(folder / entry.path, entry):
        shutil.copyfile(folder / entry.path, target)
        return
    if part.exists() and part.stat().st_size > entry.size:
        part.unlink()
    with open(part, "ab") as stream:  # as it is: bytes of a compressed answer would not tell where to go on
        http_get(
            hf_hub_url(repo_id, entry.path, revision=commit),
            stream,
            resume_size=stream.tell(),
            headers={
                **build_hf_headers(token=api.token),
                "Accept-Encoding": "identity",
            },  # else bytes cannot be counted
            expected_size=entry.size,
            displayed_filename=entry.path,
        )
    if not _agrees(part, entry):
        part.unlink()
        raise HubError(
            f"{entry.path} of {repo_id} at {commit} does not agree with the Hub's digest, so it was deleted: it was "
            "changed on the way. Run the same command again"
        )
    os.replace(part, target)


def _agrees(file: Path, entry: RepoFile) -> bool:
    """Whether a file has the SHA-256 of its LFS object, or git's hash where it is no such object."""
    if not file.exists() or file.stat().st_size != entry.size:
        return False
    digest = hashlib.sha256() if entry.lfs else hashlib.sha1(b"blob %d\0" % entry.size)
    with open(file, "rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest() == (entry.lfs.sha256 if entry.lfs else entry.blob_id)


def _install(incoming: Path, folder: Path, entries: dict[str, RepoFile], record: dict | None) -> None:
    """Makes complete files a model: a new folder at once, an old one with config.json gone first and back last."""
    for file in [path for path in incoming.rglob("*") if path.is_file()]:
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
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(incoming / name, folder / name)
    os.replace(incoming / PULL_RECORD, folder / PULL_RECORD)
    shutil.rmtree(incoming)


def _check_space(folder: Path, needed: int) -> None:
    """Raises HubError where the disk of `folder`, or of the first parent that exists, has less than `needed` bytes."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise HubError(
            f"the disk of {folder} has {free:,} bytes free, and {needed:,} are needed; nothing was downloaded. Free "
            "some space, or choose another folder (--out, or HF_HOME for the cache)"
        )


def verify_checkpoint(
    folder: str | Path, repo_id: str, *, revision: str | None = None, token: str | None = None
) -> PullResult:
    """Compares a pulled folder with the digests that the Hub states for a revision.

    Args:
        revision: that the folder was pulled at if None.

    Raises:
        ValueError: no revision is given, and the folder does not say which one it holds.
        HubError: files are missing, not in the repository, or differ; the message names them.
    """
    folder = Path(folder).expanduser().absolute()
    record = folder / PULL_RECORD
    if revision is None and not record.exists():
        raise ValueError(f"{folder} was not made by a pull, so give the revision to compare with")
    revision = revision or json.loads(record.read_text())["commit"]
    with hub_errors("pull", repo_id, revision, token):
        api = HfApi(token=token)
        info = api.model_info(repo_id, revision=revision)
        found = api.verify_repo_checksums(repo_id, revision=info.sha, local_dir=folder)
    wrong = {
        "differ": [mismatch["path"] for mismatch in found.mismatches],
        "are missing": found.missing_paths,
        "are not in the repository": [name for name in found.extra_paths if name != PULL_RECORD],
    }
    said = "; ".join(f"{', '.join(names)} {words}" for words, names in wrong.items() if names)
    if said:
        raise HubError(f"{folder} is not {repo_id} at {info.sha}: {said}. Pull it again into a new folder")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and file != record)
    return PullResult(folder, info.sha, found.checked_count, size)
