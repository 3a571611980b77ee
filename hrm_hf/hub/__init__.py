"""Thin layer over huggingface_hub that pushes and pulls complete checkpoints and Spaces.

`push.py` and `pull.py` transfer files, `cards.py` writes model cards, `manifests.py` validates that a folder is
complete, and `kinds.py` determines the kind of a model. `model.push_to_hub` and `Trainer(push_to_hub=True)` are in
`models/modeling_utils.py` and `trainer/saving.py`. This module defines the options of `hrm-hf push` and `pull`; it
imports other names on first use.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from ..io import lazy_names
from ..io.options import Options, option
from ..io.usage import UsageError


__getattr__, __all__ = lazy_names(
    __name__,
    {
        "pull": (
            "PULL_RECORD", "HubAddress", "HubError", "PullResult", "hub_address", "hub_errors", "pull_address",
            "pull_checkpoint", "verify_checkpoint",
        ),
        "push": (
            "Contents", "PushResult", "checkpoint_contents", "commit_contents", "complete_push", "push_checkpoint",
            "push_space", "space_contents",
        ),
    },
)  # fmt: skip
__all__ += ["PullOptions", "PushOptions"]
PULL_REQUEST = "refs/pr/"  # prefix of pull request revisions


@dataclass(kw_only=True)
class PushOptions(Options):
    """Options of `hrm-hf push`: what to push, and where."""

    sources: list[str] = option("Checkpoint folder; with --space, a Space's folder or models to demo.", argument=True)
    repo_id: str = option("Repository; created if it does not exist.", argument=True, metavar="OWNER/NAME")
    private: bool | None = option(
        "Visibility of a new repository. [default: the owner's setting]", None, flags=("--private/--public",)
    )
    revision: str | None = option(
        "Branch (created if it does not exist), or refs/pr/N for an open pull request. [default: main]", None
    )
    message: str | None = option("Commit message; with --create-pr, also the title of the pull request.", None)
    license: str | None = option("License of the weights, as named on the Hub: apache-2.0, mit, other, ...", None)
    create_pr: bool = option("Open a pull request in an existing repository; requires no write access.", False)
    with_training_state: bool = option("Also push the optimizer state, the carry and the checkpoint-N folders.", False)
    include: list[str] = option("Also push files that match this pattern; may be repeated.", [])
    space: bool = option("Push a Gradio demo instead of a model.", False)
    embed: bool = option("Copy models from local folders into the demo.", False)
    title: str | None = option("Title of the demo. [default: the repository's name]", None)
    dry_run: bool = option("Check the files and list what would be pushed, then stop.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.repo_id):
            raise UsageError(f"repo_id={self.repo_id!r}: must be OWNER/NAME", "OWNER/NAME")
        if self.create_pr and self.revision not in (None, "main"):
            raise UsageError(f"revision={self.revision!r}: cannot be used with --create-pr, which starts from main")
        if self.space:
            self._reject("not valid with --space", license=None, include=[], with_training_state=False)
        else:
            self._reject("only valid with --space", title=None, embed=False)
            if len(self.sources) != 1:
                raise UsageError(f"sources={self.sources}: must be one folder; use --space for several", "SOURCES")

    def _reject(self, why: str, **defaults: object) -> None:
        for name, default in defaults.items():
            if (value := getattr(self, name)) != default:
                raise UsageError(f"{name}={value!r}: {why}", f"--{name.replace('_', '-')}")

    @property
    def to_pull_request(self) -> bool:
        """Whether the revision is a pull request."""
        return (self.revision or "").startswith(PULL_REQUEST)

    @property
    def repository(self) -> dict[str, str]:
        """Arguments of HfApi that identify the repository."""
        return {"repo_id": self.repo_id, "repo_type": "space" if self.space else "model"}


@dataclass(kw_only=True)
class PullOptions(Options):
    """Options of `hrm-hf pull`: what to pull, and where."""

    repo_id: str = option("Repository on the Hub.", argument=True, metavar="OWNER/NAME")
    out: Path | None = option(
        "New folder, or a folder from an earlier pull of the same commit. [default: the huggingface_hub cache]", None
    )
    revision: str | None = option("Branch, tag, commit sha or refs/pr/N. [default: main]", None)
    verify: bool = option("Compare --out with the checksums on the Hub instead of downloading.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify and self.out is None:
            raise UsageError("out=None: must name the folder to compare; set --out", "--verify")
