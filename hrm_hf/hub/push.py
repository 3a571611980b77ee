"""Pushes a complete checkpoint, or a Space, to the Hub in one commit.

Readers see the old model or the new one; with `create_pr` the commit is a pull request, and main stays until somebody
merges it. What goes into a checkpoint is decided in `contents.py`. Bytes are moved by huggingface_hub, with its
retries and progress bars.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import ModelInfo, SpaceInfo

from .addresses import PULL_REQUEST, validate_push_target
from .cards import CARD_FILE
from .contents import Contents, checkpoint_contents, folder_files, stale_weights
from .errors import HubError, hub_errors, printable
from .listing import validate_commit
from .secrets import SECRETS_FILES, validate_no_secrets


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
    """Uploads a complete checkpoint in one commit; the folder itself is not changed.

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
        FileNotFoundError, ValueError: the checkpoint is incomplete, or `repo_id` no name; nothing was uploaded.
        HubError: the Hub refused, or could not be reached. Nothing of an unfinished push is seen by readers.
    """
    validate_push_target(repo_id, revision, create_pr)
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
    validate_push_target(repo_id, revision, create_pr)
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
    for name, (file, problem) in folder_files(folder).items():
        parts = name.split("/")
        if set(parts) & set(SPACE_IGNORED):
            contents.left_out[f"{parts[0]}/"] = "made by programs"
        elif parts[-1] in SECRETS_FILES:
            contents.left_out[name] = "may hold a secret; a Space has its own settings for those"
        elif problem:
            raise ValueError(
                f"{printable(file)} {problem}, so it was not uploaded, nor anything else; copy it there, or delete it"
            )
        else:
            contents.files[name] = file
    validate_no_secrets(contents.files)
    return contents


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
    sha = validate_commit(commit.oid, repo_id)
    if commit.pr_revision is not None and not re.fullmatch(f"{PULL_REQUEST}[0-9]+", commit.pr_revision):
        raise HubError(f"{repo_id}: the Hub answered with the pull request {commit.pr_revision!r}, expected refs/pr/N")
    revision = commit.pr_revision or revision or "main"
    url, notes = f"{api.endpoint}/{'spaces/' if repo_type == 'space' else ''}{repo_id}", list(contents.notes)
    if revision.startswith(PULL_REQUEST):
        number = revision.removeprefix(PULL_REQUEST)
        url = f"{url}/discussions/{number}"
        notes.append(_how_to_try(number, repo_id, repo_type))
    elif create_pr:
        notes.append("nothing differs from main, so no pull request was opened")
    return PushResult(url, sha, sorted(contents.files), sum(contents.sizes.values()), notes, revision)


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
    """Returns the commands to see a pull request, add to it and merge it."""
    space = "--repo-type space " if repo_type == "space" else ""
    pull = f"hf download {space}{repo_id}" if space else f"hrm-hf pull {repo_id}"
    revision = f"--revision {PULL_REQUEST}{number}"
    return (
        f"pull request {number}: main stays as it is until it is merged. See it with `{pull} {revision}`, push more "
        f"to it with {revision}, merge it on its page or with `hf discussions merge {space}{repo_id} {number}`"
    )
