"""Models of the Hub where a path may stand: OWNER/NAME, OWNER/NAME/FILE, or the address of a page or file there."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants
from huggingface_hub.utils import validate_repo_id

from ..io.model_names import is_below_here
from .listing import name_problem
from .pull import pull_checkpoint


PUBLIC_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
VIEWS = ("resolve", "blob", "raw", "tree")  # of a file or folder, in an address: OWNER/NAME/VIEW/REVISION/PATH
PULL_REQUEST = "refs/pr/"  # a revision: the newest commit of a pull request
OTHER_KINDS = ("datasets", "spaces", "api", "docs")
EXPECTED = "expected OWNER/NAME, OWNER/NAME/FILE or https://huggingface.co/OWNER/NAME/resolve/REVISION/FILE"


@dataclass(frozen=True)
class HubAddress:
    """A repository of a model; `path` is a file or folder in it, "" for all, and `revision` None for main."""

    repo_id: str
    path: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo_id}/{self.path}".rstrip("/")


def hub_address(text: str, revision: str | None = None) -> HubAddress | None:
    """The model of the Hub, or the part of one, that a text names; None for a path of this machine.

    Nothing is fetched from the host that an address names: it must be the Hub's, and files come from the Hub that
    huggingface_hub is set to (HF_ENDPOINT), as ever.

    Args:
        text: what exists here, or begins as a path does (".", "/", "~") or with a folder that is here, is a path.
        revision: branch, tag or sha.

    Raises:
        ValueError: another host, no name of a repository or file, two revisions, or a revision of a path.
    """
    if "://" in text:
        found = _of_address(text, revision)
    elif "/" not in text.strip("/") or is_below_here(text):
        if revision is not None:
            raise ValueError(f"revision={revision!r} is for a model of the Hub, and {text} is a path; {EXPECTED}")
        return None
    else:
        owner, name, *path = text.split("/")
        found = HubAddress(f"{owner}/{name}", "/".join(path).rstrip("/"), revision)
    validate_repo_id(found.repo_id)
    if found.path and (why := name_problem(found.path)):
        raise ValueError(f"{text}: {found.path!r} is no file of a repository: {why}; {EXPECTED}")
    return found


def _of_address(text: str, revision: str | None) -> HubAddress:
    address, hub = urlsplit(text), urlsplit(constants.ENDPOINT)
    is_hub = (address.scheme, address.netloc) == (hub.scheme, hub.netloc)
    if not is_hub and (address.scheme != "https" or address.netloc not in PUBLIC_HOSTS):
        hubs = " or ".join(sorted({f"https://{PUBLIC_HOSTS[0]}", constants.ENDPOINT}))
        raise ValueError(
            f"{text} is not on the Hub, which is {hubs}; {EXPECTED}. From another host fetch the files yourself"
        )
    parts = [unquote(part) for part in address.path.strip("/").split("/")]
    if len(parts) < 2 or parts[0] in OTHER_KINDS or (len(parts) > 2 and parts[2] not in VIEWS) or len(parts) == 3:
        raise ValueError(f"{text} is no address of a model or of a file in one; {EXPECTED}")
    named = parts[3] if len(parts) > 3 else None
    if None not in (named, revision) and named != revision:
        raise ValueError(f"{text} is of the revision {named!r}, and revision={revision!r} is asked for; give one")
    return HubAddress("/".join(parts[:2]), "/".join(parts[4:]), revision or named)


def pull_address(address: HubAddress) -> Path:
    """The file or folder in the cache, with the files beside it (or in it). HubError as of `pull_checkpoint`."""

    def choose(names: list[str]) -> list[str]:
        folder = address.path.rpartition("/")[0] if address.path in names else address.path
        return [name for name in names if name.startswith(f"{folder}/" if folder else "")]

    return pull_checkpoint(address.repo_id, revision=address.revision, choose=choose).path / address.path


def validate_push_target(repo_id: str, revision: str | None, create_pr: bool) -> None:
    """Raises ValueError for a name that is not OWNER/NAME, and where a pull request cannot start from the revision."""
    validate_repo_id(repo_id)
    if repo_id.count("/") != 1:
        raise ValueError(f"{repo_id!r} is no name of a repository; expected OWNER/NAME")
    if create_pr and (revision or "").startswith(PULL_REQUEST):
        raise ValueError(f"revision={revision!r} is a pull request; to add a commit to it, leave create_pr out")
    if create_pr and revision not in (None, "main"):
        raise ValueError(f"revision={revision!r}: a pull request starts from main; leave the revision out")
